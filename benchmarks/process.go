package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a running target.
type process struct {
	t      *target
	cmd    *exec.Cmd
	log    *os.File
	exited chan struct{}
	err    error // of the exit; set before exited is closed
}

// start starts t, whose placeholders are filled in, and waits until it is ready.
func start(ctx context.Context, t *target, dir, cpus string, timeout time.Duration) (*process, error) {
	name, args := t.Binary, t.Args
	if cpus != "" {
		// taskset becomes the target, with the same process number.
		name, args = "taskset", append([]string{"-c", cpus, t.Binary}, t.Args...)
	}
	p := &process{t: t, cmd: exec.Command(name, args...), exited: make(chan struct{})}
	var err error
	if p.log, err = os.Create(filepath.Join(dir, "output.log")); err != nil {
		return nil, fmt.Errorf("create log of %s: %w", t.Name, err)
	}
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.Env = os.Environ()
	for k, v := range t.Env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	if err := p.cmd.Start(); err != nil {
		p.log.Close()
		return nil, fmt.Errorf("start %s: %w", t.Name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	if err := p.waitReady(ctx, timeout); err != nil {
		return nil, errors.Join(err, p.stop(10*time.Second))
	}
	return p, nil
}

func (p *process) waitReady(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	client := &http.Client{Timeout: 5 * time.Second}
	defer client.CloseIdleConnections()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.t.ReadyURL, nil)
		if err != nil {
			return fmt.Errorf("ready URL of %s: %w", p.t.Name, err)
		}
		if resp, err := client.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended before it was ready: %v\n%s", p.t.Name, p.err, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready at %s: %w\n%s", p.t.Name, p.t.ReadyURL, ctx.Err(), p.tail())
		case <-tick.C:
		}
	}
}

// stop ends the target by its process number and waits for it.
func (p *process) stop(timeout time.Duration) error {
	defer p.log.Close()
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
	select {
	case <-p.exited:
		return nil
	case <-time.After(timeout):
		_ = p.cmd.Process.Kill()
		<-p.exited
		return fmt.Errorf("%s did not stop within %v and was killed\n%s", p.t.Name, timeout, p.tail())
	}
}

// alive returns an error if the target has ended by itself.
func (p *process) alive() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended by itself: %v\n%s", p.t.Name, p.err, p.tail())
	default:
		return nil
	}
}

// tail returns the end of what the target printed.
func (p *process) tail() string {
	b, err := os.ReadFile(p.log.Name())
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// usage is what a process and its descendants have used so far.
type usage struct {
	CPU     time.Duration // user and system
	PeakRSS int64         // bytes; the sum over processes of each one's peak
}

// clockTick is the unit of CPU times in /proc, fixed in the kernel's interface.
const clockTick = 10 * time.Millisecond

// usage reads /proc: the target's own CPU, that of its descendants, and of those
// that have ended.
func (p *process) usage() (usage, error) {
	procs, err := readProcs("/proc")
	if err != nil {
		return usage{}, fmt.Errorf("read CPU of %s: %w", p.t.Name, err)
	}
	var u usage
	for _, pid := range descendants(procs, p.cmd.Process.Pid) {
		u.CPU += procs[pid].cpu
		u.PeakRSS += peakRSS(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	}
	if u.CPU == 0 && u.PeakRSS == 0 {
		return u, p.alive()
	}
	return u, nil
}

type procStat struct {
	parent int
	cpu    time.Duration // with that of children that were waited for
}

func readProcs(root string) (map[int]procStat, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	procs := map[int]procStat{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(root, e.Name(), "stat"))
		if err != nil {
			continue // ended meanwhile
		}
		if s, err := parseStat(string(b)); err == nil {
			procs[pid] = s
		}
	}
	return procs, nil
}

// parseStat reads the line of /proc/<pid>/stat. The command in brackets may hold
// anything, so fields are counted from its last bracket.
func parseStat(line string) (procStat, error) {
	i := strings.LastIndexByte(line, ')')
	if i < 0 {
		return procStat{}, fmt.Errorf("no command in %q", line)
	}
	f := strings.Fields(line[i+1:])
	const parent, utime, cstime = 1, 11, 14
	if len(f) <= cstime {
		return procStat{}, fmt.Errorf("%d fields in %q", len(f), line)
	}
	var s procStat
	var err error
	if s.parent, err = strconv.Atoi(f[parent]); err != nil {
		return procStat{}, fmt.Errorf("parent process in %q: %w", line, err)
	}
	for _, x := range f[utime : cstime+1] {
		n, err := strconv.ParseInt(x, 10, 64)
		if err != nil {
			return procStat{}, fmt.Errorf("CPU time in %q: %w", line, err)
		}
		s.cpu += time.Duration(n) * clockTick
	}
	return s, nil
}

// descendants returns pid and all processes below it.
func descendants(procs map[int]procStat, pid int) []int {
	out := []int{pid}
	for i := 0; i < len(out); i++ {
		for child, s := range procs {
			if s.parent == out[i] && !slices.Contains(out, child) {
				out = append(out, child)
			}
		}
	}
	return out
}

func peakRSS(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return kb << 10
		}
	}
	return 0
}

// diskUse returns the bytes of all files below dir, and of those in folders called
// by one of the names in logs.
func diskUse(dir string, logs []string) (total, inLogs int64, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		total += fi.Size()
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		for _, part := range strings.Split(filepath.Dir(rel), string(filepath.Separator)) {
			if slices.Contains(logs, part) {
				inLogs += fi.Size()
				break
			}
		}
		return nil
	})
	return total, inLogs, err
}

// freePort returns a port that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
