package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/varvedb/varve/pkg/remotewrite"
)

// bin is the folder with the binaries under test.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "varve-e2e-*")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		bin = dir
		build := exec.Command("go", "build", "-o", dir, "../cmd/...")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			fmt.Fprintln(os.Stderr, "build the binaries under test:", err)
			return 1
		}
		return m.Run()
	}())
}

// soak tells whether the long form of tests is wanted (make soak).
func soak() bool { return os.Getenv("VARVE_SOAK") != "" }

// tool finds a program that scripts/tools.sh fetches. Where CI runs it must be there.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", ".tools", name))
	require.NoError(t, err)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("VARVE_TOOLS_REQUIRED") != "" {
			t.Fatalf("%s is missing: run make tools", path)
		}
		t.Skipf("%s is missing: run make tools to have this test", path)
	}
	return path
}

// freeAddress returns a loopback address that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// process is a program that the test started.
type process struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	log  *tail
	done chan struct{} // closed when it has ended
}

// tail keeps the last part of a log, for the failure message.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.buf.Len() > 1<<20 {
		l.buf.Next(1 << 19)
	}
	return l.buf.Write(p)
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: filepath.Base(name), cmd: exec.Command(name, args...), log: &tail{}, done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing outlives the test
	require.NoError(t, p.cmd.Start())
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.done
		if t.Failed() {
			log := p.log.String()
			t.Logf("end of the log of %s:\n%s", p.name, log[max(0, len(log)-2500):])
		}
	})
	return p
}

func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

// kill is kill -9.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// interrupt is Ctrl-C, and waits for a clean end.
func (p *process) interrupt() {
	p.t.Helper()
	p.signal(os.Interrupt)
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		p.t.Fatalf("%s did not stop", p.name)
	}
	require.Equal(p.t, 0, p.cmd.ProcessState.ExitCode(), "%s: %s", p.name, p.log)
}

// waitFor polls f until it is true.
func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// server is something that speaks Prometheus' HTTP API.
type server struct {
	*process
	url    string
	tenant string
}

// as returns the server as another tenant sees it.
func (s *server) as(tenant string) *server {
	return &server{process: s.process, url: s.url, tenant: tenant}
}

func (s *server) waitReady() {
	s.t.Helper()
	waitFor(s.t, s.name+" is ready", func() bool {
		select {
		case <-s.done:
			s.t.Fatalf("%s ended while starting:\n%s", s.name, s.log)
		default:
		}
		resp, err := http.Get(s.url + "/-/ready")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// startVarve starts the binary on dir and waits until it is ready.
func startVarve(t *testing.T, dir string, args ...string) *server {
	t.Helper()
	return startVarveAt(t, freeAddress(t), dir, args...)
}

func startVarveAt(t *testing.T, addr, dir string, args ...string) *server {
	t.Helper()
	s := &server{url: "http://" + addr}
	s.process = start(t, filepath.Join(bin, "varve"), append([]string{"--http.listen=" + addr, "--storage.path=" + dir}, args...)...)
	s.waitReady()
	return s
}

// answer is the envelope of Prometheus' HTTP API.
type answer struct {
	Status    string          `json:"status"`
	Data      json.RawMessage `json:"data"`
	ErrorType string          `json:"errorType"`
	Error     string          `json:"error"`
	Warnings  []string        `json:"warnings"`
	Infos     []string        `json:"infos"`
	code      int
	header    http.Header
}

// get asks the API; the caller checks what came.
func (s *server) get(path string, params url.Values) answer {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodGet, s.url+path+"?"+params.Encode(), nil)
	require.NoError(s.t, err)
	if s.tenant != "" {
		req.Header.Set("X-Scope-OrgID", s.tenant)
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	a := answer{code: resp.StatusCode, header: resp.Header}
	require.NoError(s.t, json.Unmarshal(body, &a), "%s answered %d: %.300s", path, resp.StatusCode, body)
	return a
}

// instant evaluates a query at a moment and returns the decoded result.
func (s *server) instant(query string, at time.Time) []point {
	s.t.Helper()
	a := s.get("/api/v1/query", url.Values{"query": {query}, "time": {fmt.Sprintf("%.3f", float64(at.UnixMilli())/1000)}})
	require.Equal(s.t, "success", a.Status, "%s: %s", query, a.Error)
	var data struct {
		Result []point `json:"result"`
	}
	require.NoError(s.t, json.Unmarshal(a.Data, &data))
	return data.Result
}

// point is one series of an instant vector or of a matrix.
type point struct {
	Metric map[string]string    `json:"metric"`
	Value  [2]json.RawMessage   `json:"value"`
	Values [][2]json.RawMessage `json:"values"`
}

// post sends a remote write body.
func (s *server) post(p remotewrite.Protocol, body []byte) (int, string) {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, s.url+"/api/v1/write", bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	remotewrite.SetRequestHeaders(req.Header, p)
	if s.tenant != "" {
		req.Header.Set("X-Scope-OrgID", s.tenant)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, strings.TrimSpace(string(text))
}

func mustUnmarshal(t *testing.T, data []byte, v any) {
	t.Helper()
	require.NoError(t, json.Unmarshal(data, v))
}

// metric returns the sum of a metric of the server over its labels, 0 if it has none.
func metric(t *testing.T, s *server, name string) float64 {
	t.Helper()
	resp, err := http.Get(s.url + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	sum := 0.0
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), strings.TrimSuffix(name, "}"))
		if !ok || rest == "" || !strings.ContainsRune("{ ,}", rune(rest[0])) {
			continue
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		require.NoError(t, err, lines.Text())
		sum += v
	}
	require.NoError(t, lines.Err())
	return sum
}
