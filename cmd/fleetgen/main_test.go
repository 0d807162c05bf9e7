package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"
	"go.uber.org/goleak"

	"github.com/varvedb/varve/pkg/fleet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a remote-write receiver that keeps everything and can refuse.
type store struct {
	mu       sync.Mutex // guards what follows
	series   map[string][]int64
	values   map[string][]uint64
	samples  int
	metadata map[string]string // type by family
	sizes    []int
	requests int
	// answer says what to do with the n-th request: 0 to store it.
	answer func(n int) (status int, header http.Header)
	err    error
}

func newStore(t *testing.T, answer func(n int) (int, http.Header)) (*store, string) {
	s := &store{series: map[string][]int64{}, values: map[string][]uint64{}, metadata: map[string]string{}, answer: answer}
	web := httptest.NewServer(s)
	t.Cleanup(web.Close)
	return s, web.URL
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err == nil {
		body, err = snappy.Decode(nil, body)
	}
	if err != nil {
		s.err = err
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.requests++
	if s.answer != nil {
		if status, header := s.answer(s.requests); status != 0 {
			for k, v := range header {
				w.Header()[k] = v
			}
			http.Error(w, "not now", status)
			return
		}
	}
	before := s.samples
	if strings.Contains(r.Header.Get("Content-Type"), "v2") {
		s.err = s.keep2(body)
	} else {
		s.err = s.keep1(body)
	}
	if s.err != nil {
		http.Error(w, s.err.Error(), http.StatusBadRequest)
		return
	}
	s.sizes = append(s.sizes, s.samples-before)
	w.WriteHeader(http.StatusNoContent)
}

func (s *store) keep1(body []byte) error {
	var req prompb.WriteRequest
	if err := req.Unmarshal(body); err != nil {
		return err
	}
	var b labels.ScratchBuilder
	for i := range req.Timeseries {
		ts := &req.Timeseries[i]
		ls := ts.ToLabels(&b, nil)
		for _, x := range ts.Samples {
			s.keep(ls, x.Timestamp, x.Value)
		}
		for _, x := range ts.Histograms {
			s.keep(ls, x.Timestamp, x.Sum)
		}
	}
	for _, m := range req.Metadata {
		s.metadata[m.MetricFamilyName] = m.Type.String()
	}
	return nil
}

func (s *store) keep2(body []byte) error {
	var req writev2.Request
	if err := req.Unmarshal(body); err != nil {
		return err
	}
	var b labels.ScratchBuilder
	for i := range req.Timeseries {
		ts := &req.Timeseries[i]
		ls, err := ts.ToLabels(&b, req.Symbols)
		if err != nil {
			return err
		}
		for _, x := range ts.Samples {
			s.keep(ls, x.Timestamp, x.Value)
		}
		for _, x := range ts.Histograms {
			s.keep(ls, x.Timestamp, x.Sum)
		}
		if m, err := ts.ToMetadata(req.Symbols); err == nil && m.Help != "" {
			s.metadata[ls.Get("__name__")] = strings.ToUpper(string(m.Type))
		}
	}
	return nil
}

func (s *store) keep(ls labels.Labels, t int64, v float64) {
	k := ls.String()
	s.series[k] = append(s.series[k], t)
	s.values[k] = append(s.values[k], math.Float64bits(v))
	s.samples++
}

// checkOrder fails if a series got a sample that is not newer than the one before.
func (s *store) checkOrder(t *testing.T) {
	t.Helper()
	if s.err != nil {
		t.Fatal(s.err)
	}
	for k, ts := range s.series {
		for i := 1; i < len(ts); i++ {
			if ts[i] <= ts[i-1] {
				t.Fatalf("%s: sample at %d came after one at %d", k, ts[i], ts[i-1])
			}
		}
	}
}

// runLoad runs the command and returns its JSON report.
func runLoad(t *testing.T, ctx context.Context, args ...string) report {
	t.Helper()
	var out bytes.Buffer
	args = append([]string{"load", "--json", "--progress", "0"}, args...)
	if err := run(ctx, args, &out); err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, out.String())
	}
	return r
}

const begin, end = "2026-03-10T09:00:00Z", "2026-03-10T09:10:00Z"

func TestLoadSendsEverySampleOnceAndInOrder(t *testing.T) {
	args := []string{"--nodes", "4", "--from", begin, "--to", end, "--twins", "--concurrency", "3", "--samples-per-send", "500"}
	totals := map[int]bool{}
	for name, more := range map[string][]string{
		"protocol 1.0":           {"--protocol", "1.0"},
		"protocol 2.0":           {"--protocol", "2.0"},
		"one sender":             {"--concurrency", "1"},
		"senders close together": {"--skew", "1ms"},
		"large requests":         {"--samples-per-send", "20000"},
	} {
		t.Run(name, func(t *testing.T) {
			s, url := newStore(t, nil)
			r := runLoad(t, t.Context(), append(append(args, "--url", url), more...)...)
			s.checkOrder(t)
			if r.Accepted != r.Sent || r.Refused != 0 || r.Unknown != 0 || int(r.Sent) != s.samples || s.samples == 0 {
				t.Errorf("report says %d sent, %d accepted, %d refused, %d unanswered; the store has %d", r.Sent, r.Accepted, r.Refused, r.Unknown, s.samples)
			}
			totals[s.samples] = true
			for _, n := range s.sizes {
				if n > 500 && name != "large requests" {
					t.Errorf("a request has %d samples, want 500 at most", n)
				}
			}
			if got := s.metadata["DCGM_FI_DEV_GPU_TEMP"]; got != "GAUGE" {
				t.Errorf("type of DCGM_FI_DEV_GPU_TEMP is %q, want GAUGE", got)
			}
			if got := r.Statuses["204"]; got != s.requests {
				t.Errorf("%d answers 204 are reported, there were %d", got, s.requests)
			}
		})
	}
	if len(totals) != 1 {
		t.Errorf("the number of samples depends on how they are sent: %v", totals)
	}
}

func TestLoadSendsAgainInOrder(t *testing.T) {
	for name, answer := range map[string]func(n int) (int, http.Header){
		"every third request fails":        func(n int) (int, http.Header) { return pick(n%3 == 0, 503), nil },
		"every second request is too much": func(n int) (int, http.Header) { return pick(n%2 == 0, 429), nil },
		"the first five fail":              func(n int) (int, http.Header) { return pick(n <= 5, 500), nil },
	} {
		t.Run(name, func(t *testing.T) {
			s, url := newStore(t, answer)
			r := runLoad(t, t.Context(), "--url", url, "--nodes", "4", "--from", begin, "--to", end, "--samples-per-send", "5000", "--concurrency", "2")
			s.checkOrder(t)
			if r.Retries == 0 || r.Accepted != r.Sent || int(r.Sent) != s.samples {
				t.Errorf("report says %d retries, %d sent, %d accepted; the store has %d", r.Retries, r.Sent, r.Accepted, s.samples)
			}
		})
	}
}

func pick(yes bool, status int) int {
	if yes {
		return status
	}
	return 0
}

func TestLoadCountsWhatIsRefused(t *testing.T) {
	s, url := newStore(t, func(n int) (int, http.Header) {
		return pick(n == 2, 400), http.Header{"X-Prometheus-Remote-Write-Samples-Written": {"7"}}
	})
	r := runLoad(t, t.Context(), "--url", url, "--nodes", "2", "--from", begin, "--to", end, "--concurrency", "1", "--samples-per-send", "1000", "--no-metadata")
	if r.Refused != 993 || r.Accepted != r.Sent-993 || int(r.Sent) != s.samples+1000 {
		t.Errorf("report says %d refused, %d accepted of %d; the store has %d", r.Refused, r.Accepted, r.Sent, s.samples)
	}
	if r.Refusal != "400 not now" {
		t.Errorf("first refusal is %q", r.Refusal)
	}
}

func TestLoadIsBounded(t *testing.T) {
	t.Run("by samples", func(t *testing.T) {
		s, url := newStore(t, nil)
		r := runLoad(t, t.Context(), "--url", url, "--nodes", "4", "--from", begin, "--samples", "20000")
		if r.Sent < 20000 || r.Sent > 60000 || int(r.Sent) != s.samples {
			t.Errorf("%d samples were sent, %d stored, want a little more than 20000", r.Sent, s.samples)
		}
	})
	t.Run("by time on the clock, in live mode", func(t *testing.T) {
		s, url := newStore(t, nil)
		r := runLoad(t, t.Context(), "--url", url, "--nodes", "4", "--duration", "1500ms", "--interval", "1s", "--deadline", "100ms")
		if r.Sent == 0 || r.Accepted+r.Unknown != r.Sent || int(r.Accepted) != s.samples {
			t.Errorf("%d were sent, %d accepted, %d unanswered, %d stored", r.Sent, r.Accepted, r.Unknown, s.samples)
		}
		s.checkOrder(t)
	})
	t.Run("by a signal, while the store is down", func(t *testing.T) {
		var calls sync.Once
		ctx, cancel := context.WithCancel(t.Context())
		_, url := newStore(t, func(int) (int, http.Header) { calls.Do(cancel); return 503, nil })
		r := runLoad(t, ctx, "--url", url, "--nodes", "4", "--from", begin, "--no-metadata")
		if r.Accepted != 0 || r.Unknown != r.Sent || r.Sent == 0 {
			t.Errorf("%d were sent, %d accepted, %d unanswered", r.Sent, r.Accepted, r.Unknown)
		}
	})
}

func TestWrongUseIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"a URL elsewhere":          {[]string{"load", "--url", "http://192.0.2.1/api/v1/write"}, "not this machine"},
		"a URL without a host":     {[]string{"load", "--url", "api/v1/write"}, "want http://"},
		"an address elsewhere":     {[]string{"serve", "--listen", "0.0.0.0:0"}, "not this machine"},
		"a time of nothing":        {[]string{"load", "--from", "yesterday"}, "parse time"},
		"a time before the world":  {[]string{"load", "--from", "2020-01-01T00:00:00Z"}, "before the simulated world"},
		"a fleet that cannot be":   {[]string{"load", "--nodes", "0"}, "nodes is 0"},
		"an unknown flag":          {[]string{"load", "--frob"}, "unknown flag"},
		"a protocol of the future": {[]string{"load", "--protocol", "3.0"}, "must be one of"},
	} {
		err := run(t.Context(), c.args, io.Discard)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want one with %q", name, err, c.want)
		}
	}
}

func TestHelpSaysWhatThereIs(t *testing.T) {
	for _, args := range [][]string{{}, {"--help"}, {"load", "--help"}} {
		var out bytes.Buffer
		if err := run(t.Context(), args, &out); err != nil {
			t.Errorf("%v: %v", args, err)
		}
		if !strings.Contains(out.String(), "Usage: fleetgen") {
			t.Errorf("%v: printed %q", args, out.String())
		}
	}
}

// startServe runs the serve command on a free port.
func startServe(t *testing.T, args ...string) (base string) {
	t.Helper()
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		err := run(ctx, append([]string{"serve", "--listen", "127.0.0.1:0"}, args...), w)
		w.CloseWithError(io.EOF)
		done <- err
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve ended with %v", err)
		}
	})
	line := make([]byte, 200)
	n, err := r.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(line[:n]), "http://")
	address, _, _ := strings.Cut(rest, " ")
	return "http://" + address
}

func get(t *testing.T, url string, header ...string) (*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, body
}

func TestServeOffersWhatDiscoveryLists(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sd.json")
	base := startServe(t, "--nodes", "20", "--failures", "0", "--rollouts", "0", "--host-infra", "20", "--file-sd", file)
	_, doc := get(t, base+"/sd")
	var groups []targetGroup
	if err := json.Unmarshal(doc, &groups); err != nil {
		t.Fatal(err)
	}
	jobs := map[string]int{}
	exemplars := 0
	for _, g := range groups {
		resp, page := get(t, "http://"+g.Targets[0]+g.Labels["__metrics_path__"], "Accept", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
		if resp.StatusCode != 200 {
			t.Fatalf("%s: status %d: %s", g.Labels["__metrics_path__"], resp.StatusCode, page)
		}
		p, err := textparse.New(page, resp.Header.Get("Content-Type"), labels.NewSymbolTable(), textparse.ParserOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for {
			entry, err := p.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", g.Labels["__metrics_path__"], err)
			}
			if entry == textparse.EntrySeries {
				jobs[g.Labels["job"]]++
				if p.Exemplar(&exemplar.Exemplar{}) {
					exemplars++
				}
			}
		}
		for _, want := range []string{"cluster", "rack", "instance", "job"} {
			if g.Labels[want] == "" {
				t.Errorf("%s: no label %s", g.Labels["__metrics_path__"], want)
			}
		}
	}
	for _, want := range []string{"dcgm-exporter", "node-exporter", "bms"} {
		if jobs[want] == 0 {
			t.Errorf("job %s has no series; there are %v", want, jobs)
		}
	}
	if exemplars == 0 {
		t.Error("no page has an exemplar")
	}
	written, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(written, doc) {
		t.Errorf("the file_sd file differs from /sd (%v)", err)
	}
	_, nodes := get(t, base+"/sd?kind=node")
	if err := json.Unmarshal(nodes, &groups); err != nil || len(groups) != 20 {
		t.Errorf("/sd?kind=node has %d groups (%v), want 20", len(groups), err)
	}
	if resp, _ := get(t, base+"/node/nobody/metrics"); resp.StatusCode != 404 {
		t.Errorf("an unknown node is answered %d, want 404", resp.StatusCode)
	}
}

func TestServeAnswersDownNodesWith503(t *testing.T) {
	cfg := fleet.DefaultConfig()
	cfg.Nodes, cfg.Failures = 100, 5
	f, err := fleet.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	from := time.Date(2026, 3, 10, 0, 0, 0, 0, time.UTC)
	for _, x := range f.Failures(from.UnixMilli(), from.AddDate(0, 1, 0).UnixMilli()) {
		if x.Kind.String() != "node_lost" {
			continue
		}
		s := newServer(f, "127.0.0.1:1", func() time.Time { return time.UnixMilli(x.At + 60_000) })
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/node/"+x.Node+"/metrics", nil))
		if w.Code != http.StatusServiceUnavailable {
			t.Errorf("a lost node is answered %d, want 503", w.Code)
		}
		return
	}
	t.Fatal("no node was lost in a month")
}

var discovery = regexp.MustCompile(`(?m)^    (http|file)_sd_configs:\n      - (url|files): .+\n        refresh_interval: 30s\n`)

func TestPrometheusConfigIsAccepted(t *testing.T) {
	for name, args := range map[string][]string{
		"twin a":       {"--twin", "a"},
		"twin b, 2.0":  {"--twin", "b", "--protocol", "2.0", "--tenant", "team-a"},
		"file_sd":      {"--file-sd", "/tmp/sd.json"},
		"no write URL": {"--write-url", ""},
	} {
		var out bytes.Buffer
		if err := run(t.Context(), append([]string{"prometheus-config"}, args...), &out); err != nil {
			t.Fatal(err)
		}
		// The packages of the discovery mechanisms are not linked here; that Prometheus
		// knows their keys is for the end-to-end tests.
		text := discovery.ReplaceAllString(out.String(), "    static_configs: []\n")
		if text == out.String() {
			t.Errorf("%s: no service discovery in\n%s", name, text)
		}
		cfg, err := config.Load(text, nil)
		if err != nil {
			t.Errorf("%s: %v in\n%s", name, err, out.String())
			continue
		}
		want := "prometheus-k8s-" + strconv.Itoa(pick(strings.Contains(name, "twin b"), 1))
		if got := cfg.GlobalConfig.ExternalLabels.Get("prometheus_replica"); got != want {
			t.Errorf("%s: replica is %q, want %q", name, got, want)
		}
	}
}

func TestFailuresAreListed(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"failures", "--nodes", "200", "--from", begin, "--to", "2026-04-10T09:00:00Z"}, &out); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n < 10 || n > 50 {
		t.Errorf("%d failures of 200 nodes in a month, want about 25:\n%s", n, out.String())
	}
}

func TestPaceKeepsSendersTogether(t *testing.T) {
	p := newPace(2, 100)
	if p.try(0, 1000) {
		t.Error("a sender may run a second ahead of one that has not begun")
	}
	if !p.try(1, 950) || !p.try(0, 1000) {
		t.Error("senders within 100 ms of one another may not go on")
	}
	if p.try(0, 1051) {
		t.Error("a sender may be 101 ms ahead")
	}
	done := make(chan struct{})
	go func() { p.wait(0, 1051); close(done) }()
	p.finish(1)
	<-done
	if got := p.slowest(); got != 1051 {
		t.Errorf("the slowest is at %d, want 1051", got)
	}
	p.stop()
	p.wait(0, 1<<40)
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{"127.0.0.1": true, "127.1.2.3": true, "::1": true, "localhost": true, "10.0.0.1": false, "": false, "example.org": false} {
		if got := loopbackHost(host) == nil; got != want {
			t.Errorf("%q: got %v, want %v", host, got, want)
		}
	}
}
