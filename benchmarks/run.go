package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/varvedb/varve/pkg/remotewrite"
)

// measurement is one run of one target with one protocol.
type measurement struct {
	Target     string
	Protocol   int
	Repetition int

	CreateNanos  float64 // CPU per new series, its first sample included
	SamplesPerS  float64 // wall clock, all senders together
	SampleNanos  float64 // CPU per sample in the steady state
	WriteP50     time.Duration
	WriteP99     time.Duration
	Retries      int
	PeakRSSWrite int64 // bytes, when writing was done
	PeakRSS      int64 // bytes, at the end

	Disk    int64 // bytes after a clean stop
	DiskLog int64 // of these in write-ahead logs

	QueryP50   time.Duration
	QueryP99   time.Duration
	QueryNanos float64 // CPU per query
	Queries    []queryResult
}

type queryResult struct {
	Name     string
	P50, P99 time.Duration
	Rows     int
	Bytes    int
}

// run is the whole program.
func run(ctx context.Context, f runFlags, stdout, stderr io.Writer) error {
	if err := pinSelf(f.LoadCPUs); err != nil {
		return err
	}
	targets, queries, err := readInputs(f)
	if err != nil {
		return err
	}
	rep := report{Machine: machine(), Flags: f, Started: time.Now()}
	for _, t := range targets {
		rep.Targets = append(rep.Targets, targetInfo{Name: t.Name, Binary: t.Binary, Version: t.version()})
	}
	for _, p := range f.Protocols {
		l, err := newLoad(f, remotewrite.Protocol(p), time.Now())
		if err != nil {
			return fmt.Errorf("make load: %w", err)
		}
		rep.Loads = append(rep.Loads, describe(l))
		fmt.Fprintf(stderr, "load: %d series (%d more later), %d samples, %.1f B each on the wire\n", l.series, l.later, l.samples, float64(l.bytes)/float64(l.samples+l.series))
		for r := range f.Repetitions {
			for _, t := range targets {
				if !slices.Contains(t.Protocols, p) {
					continue
				}
				m, err := measure(ctx, f, t, l, queries)
				if err != nil {
					return fmt.Errorf("%s, remote write %d, repetition %d: %w", t.Name, p, r+1, err)
				}
				m.Protocol, m.Repetition = p, r+1
				fmt.Fprintf(stderr, "%-20s rw%d #%d: %s\n", t.Name, p, r+1, m)
				rep.Runs = append(rep.Runs, m)
			}
		}
	}
	return rep.write(f.Out, stdout)
}

func readInputs(f runFlags) ([]*target, []query, error) {
	var targets []*target
	for _, path := range f.Targets {
		t, err := readTarget(path, f.Bin)
		if err != nil {
			return nil, nil, err
		}
		targets = append(targets, t)
	}
	b := builtinQueries
	if f.Queries != "" {
		var err error
		if b, err = os.ReadFile(f.Queries); err != nil {
			return nil, nil, fmt.Errorf("read queries: %w", err)
		}
	}
	queries, err := parseQueries(b)
	return targets, queries, err
}

// measure runs t once in a fresh folder.
func measure(ctx context.Context, f runFlags, t *target, l *load, queries []query) (m measurement, err error) {
	dir, err := os.MkdirTemp(f.WorkDir, "bench-"+t.Name+"-")
	if err != nil {
		return m, fmt.Errorf("make folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	port, err := freePort()
	if err != nil {
		return m, err
	}
	t = t.at(dir, port)
	p, err := start(ctx, t, dir, f.TargetCPUs, f.ReadyTimeout)
	if err != nil {
		return m, err
	}
	stopped := false
	defer func() {
		if !stopped {
			err = errors.Join(err, p.stop(time.Minute))
		}
	}()
	m.Target = t.Name
	if err := m.write(ctx, f, p, l); err != nil {
		return m, err
	}
	if err := m.query(ctx, f, p, l, queries); err != nil {
		return m, err
	}
	if err := p.alive(); err != nil {
		return m, err
	}
	stopped = true
	if err := p.stop(2 * time.Minute); err != nil {
		return m, err
	}
	m.Disk, m.DiskLog, err = diskUse(t.Data, t.Logs)
	return m, err
}

// write sends the load and fills in what writing cost.
func (m *measurement) write(ctx context.Context, f runFlags, p *process, l *load) error {
	s := newSender(p.t.WriteURL, l.protocol, f.Senders)
	defer s.close()
	idle, err := p.usage()
	if err != nil {
		return err
	}
	if _, err := s.send(ctx, l.create); err != nil {
		return fmt.Errorf("create series: %w", err)
	}
	if err := pause(ctx, f.Settle); err != nil {
		return err
	}
	created, err := p.usage()
	if err != nil {
		return err
	}
	w, err := s.send(ctx, l.rounds...)
	if err != nil {
		return err
	}
	if err := pause(ctx, f.Settle); err != nil {
		return err
	}
	done, err := p.usage()
	if err != nil {
		return err
	}
	if err := checkStored(ctx, p.t, l, f.Rounds+1, f.Visible); err != nil {
		return err
	}
	m.CreateNanos = perUnit(created.CPU-idle.CPU, l.series)
	m.SampleNanos = perUnit(done.CPU-created.CPU, w.Samples)
	m.SamplesPerS = float64(w.Samples) / w.Wall.Seconds()
	m.WriteP50, m.WriteP99 = quantile(w.Latency, 0.5), quantile(w.Latency, 0.99)
	m.Retries, m.PeakRSSWrite = w.Retries, done.PeakRSS
	return nil
}

// checkStored fails unless the target soon holds exactly what was sent: samples of
// each series.
func checkStored(ctx context.Context, t *target, l *load, samples int, within time.Duration) error {
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	want := float64(l.gpus * samples)
	var got float64
	for deadline := time.Now().Add(within); time.Now().Before(deadline); {
		var err error
		if got, err = stored(ctx, client, t, l); err != nil {
			return fmt.Errorf("count what is stored: %w", err)
		}
		if got == want {
			return nil
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s holds %.0f samples of DCGM_FI_DEV_GPU_TEMP, %.0f were sent and acknowledged", t.Name, got, want)
}

// query asks the whole set in turn, so that no question comes twice in a row.
func (m *measurement) query(ctx context.Context, f runFlags, p *process, l *load, queries []query) error {
	client := &http.Client{Timeout: 2 * time.Minute}
	defer client.CloseIdleConnections()
	for i, began := 0, time.Now(); time.Since(began) < f.QueryWarmup; i++ {
		if _, err := askAll(ctx, client, p.t, l, queries, i); err != nil {
			return err
		}
	}
	before, err := p.usage()
	if err != nil {
		return err
	}
	latencies := make([][]time.Duration, len(queries))
	m.Queries = make([]queryResult, len(queries))
	var all []time.Duration
	for i := range f.QueryRounds {
		answers, err := askAll(ctx, client, p.t, l, queries, i)
		if err != nil {
			return err
		}
		for j, a := range answers {
			latencies[j] = append(latencies[j], a.Latency)
			all = append(all, a.Latency)
			m.Queries[j].Rows, m.Queries[j].Bytes = a.Rows, a.Bytes
		}
	}
	after, err := p.usage()
	if err != nil {
		return err
	}
	for j := range queries {
		m.Queries[j].Name = queries[j].Name
		m.Queries[j].P50, m.Queries[j].P99 = quantile(latencies[j], 0.5), quantile(latencies[j], 0.99)
	}
	m.QueryP50, m.QueryP99 = quantile(all, 0.5), quantile(all, 0.99)
	m.QueryNanos = perUnit(after.CPU-before.CPU, len(all))
	m.PeakRSS = after.PeakRSS
	return nil
}

// askAll asks the i-th repetition of each query.
func askAll(ctx context.Context, client *http.Client, t *target, l *load, queries []query, i int) ([]answer, error) {
	answers := make([]answer, len(queries))
	for j := range queries {
		path, v := queries[j].urlFor(l, i)
		for k, x := range t.QueryParams {
			v.Set(k, x)
		}
		var err error
		if answers[j], err = ask(ctx, client, t.QueryURL, path, v); err != nil {
			return nil, fmt.Errorf("query %q: %w", queries[j].Name, err)
		}
	}
	return answers, nil
}

func (m measurement) String() string {
	return fmt.Sprintf("%.0f samples/s, %.0f ns CPU/sample, create %.1f us/series, write p99 %v, RSS %d MiB, disk %d MiB, query p50 %v p99 %v",
		m.SamplesPerS, m.SampleNanos, m.CreateNanos/1000, m.WriteP99.Round(time.Millisecond), m.PeakRSS>>20, m.Disk>>20,
		m.QueryP50.Round(100*time.Microsecond), m.QueryP99.Round(100*time.Microsecond))
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func perUnit(d time.Duration, n int) float64 {
	if n == 0 {
		return 0
	}
	return float64(d.Nanoseconds()) / float64(n)
}

// quantile returns the q-quantile of d by nearest rank, 0 of nothing.
func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Clone(d)
	slices.Sort(s)
	i := int(q*float64(len(s)) + 0.999999)
	return s[min(max(i-1, 0), len(s)-1)]
}

// pinSelf moves all threads of this process to the given CPUs.
func pinSelf(cpus string) error {
	if cpus == "" {
		return nil
	}
	out, err := exec.Command("taskset", "-a", "-c", "-p", cpus, fmt.Sprint(os.Getpid())).CombinedOutput()
	if err != nil {
		return fmt.Errorf("pin to CPUs %s: %w: %s", cpus, err, out)
	}
	return nil
}

// machineInfo says what the numbers were measured on.
type machineInfo struct {
	CPU, Kernel, Go string
	CPUs            int
	MemoryGiB       int
}

func machine() machineInfo {
	m := machineInfo{CPUs: runtime.NumCPU(), Go: runtime.Version()}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if name, ok := strings.CutPrefix(line, "model name"); ok {
				m.CPU = strings.TrimSpace(strings.TrimLeft(name, " \t:"))
				break
			}
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(b))
	}
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		var kb int
		if _, err := fmt.Sscanf(string(b), "MemTotal: %d kB", &kb); err == nil {
			m.MemoryGiB = (kb + 1<<19) >> 20
		}
	}
	return m
}

func describe(l *load) loadInfo {
	return loadInfo{
		Protocol: int(l.protocol), Series: l.series, LaterSeries: l.later, Samples: l.samples, GPUs: l.gpus, Nodes: len(l.nodes),
		BytesPerSample: float64(l.bytes) / float64(l.samples+l.series),
	}
}

// jsonPath is where raw numbers go beside a table.
func jsonPath(out string) string { return strings.TrimSuffix(out, filepath.Ext(out)) + ".json" }
