package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/prometheus/prometheus/prompb"

	"github.com/varvedb/varve/pkg/remotewrite"
)

// The test binary is its own fake target: started with this variable set, it
// serves on the address that it names.
const fakeAddress = "VARVE_BENCH_FAKE"

func TestMain(m *testing.M) {
	if address := os.Getenv(fakeAddress); address != "" {
		if err := fakeTarget(address, os.Getenv("VARVE_BENCH_FAKE_DIR"), os.Getenv("VARVE_BENCH_FAKE_LOSES") != ""); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// fakeTarget counts what is written and answers every query with one row, the
// count. It refuses the first write, as a busy store does.
func fakeTarget(address, dir string, loses bool) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "wal"), 0o777); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "wal", "0"))
	if err != nil {
		return err
	}
	var mu sync.Mutex // guards what follows, and log
	refused, temps := false, 0
	mux := http.NewServeMux()
	mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/write", func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if !refused {
			refused = true
			http.Error(w, "busy", http.StatusServiceUnavailable)
			return
		}
		n, err := countTemps(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if temps += n; loses && n > 0 {
			temps--
			loses = false
		}
		fmt.Fprintln(log, n)
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("/api/v1/", func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(r.URL.Path, "/query") {
			fmt.Fprintf(w, `{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"%d"]}]}}`, temps)
			return
		}
		fmt.Fprint(w, `{"status":"success","data":["a","b"]}`)
	})
	return http.Serve(l, mux)
}

func countTemps(body io.Reader) (int, error) {
	b, err := io.ReadAll(body)
	if err != nil {
		return 0, err
	}
	if b, err = snappy.Decode(nil, b); err != nil {
		return 0, err
	}
	var req prompb.WriteRequest
	if err := req.Unmarshal(b); err != nil {
		return 0, err
	}
	n := 0
	for _, ts := range req.Timeseries {
		for _, l := range ts.Labels {
			if l.Name == "__name__" && l.Value == "DCGM_FI_DEV_GPU_TEMP" {
				n += len(ts.Samples)
			}
		}
	}
	return n, nil
}

func fakeTargetFile(t *testing.T, loses string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`
name: fake
binary: %s
args: []
env:
  %s: 127.0.0.1:{{port}}
  VARVE_BENCH_FAKE_DIR: "{{dir}}/data"
  VARVE_BENCH_FAKE_LOSES: "%s"
writeURL: http://127.0.0.1:{{port}}/write
queryURL: http://127.0.0.1:{{port}}
readyURL: http://127.0.0.1:{{port}}/ready
data: "{{dir}}/data"
logs: [wal]
protocols: [1]
`, self, fakeAddress, loses)
	path := filepath.Join(t.TempDir(), "fake.yaml")
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

func smallRun(t *testing.T, targets ...string) runFlags {
	return runFlags{
		Targets: targets, Series: 2000, Profile: "h100-147", Rounds: 3, Interval: 15 * time.Second,
		Batch: 500, Protocols: []int{1}, Senders: 2, Seed: 1, Repetitions: 2, QueryRounds: 2,
		WorkDir: t.TempDir(), Out: filepath.Join(t.TempDir(), "result.md"), ReadyTimeout: 30 * time.Second, Visible: time.Second,
	}
}

func TestRunOfAFakeTarget(t *testing.T) {
	f := smallRun(t, fakeTargetFile(t, ""))
	var out strings.Builder
	if err := run(t.Context(), f, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(jsonPath(f.Out))
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Runs) != 2 || len(r.Loads) != 1 {
		t.Fatalf("%d runs and %d loads, want 2 and 1", len(r.Runs), len(r.Loads))
	}
	for _, m := range r.Runs {
		if m.PeakRSS == 0 || m.SamplesPerS == 0 || m.Disk == 0 || m.DiskLog != m.Disk || m.WriteP99 == 0 {
			t.Errorf("measurement has holes: %+v", m)
		}
		if len(m.Queries) == 0 || m.Queries[0].Rows != 1 {
			t.Errorf("queries = %+v; want one row of the first", m.Queries)
		}
	}
	if r.Loads[0].Series < 2000 || r.Loads[0].Samples != 3*r.Loads[0].Series {
		t.Errorf("load = %+v; want at least 2000 series with 3 samples each", r.Loads[0])
	}
	if !strings.Contains(out.String(), "| fake | 1.0 |") {
		t.Errorf("table has no row of the target:\n%s", out.String())
	}
	left, err := os.ReadDir(f.WorkDir)
	if err != nil || len(left) != 0 {
		t.Errorf("run left %v behind (%v)", left, err)
	}
}

func TestATargetThatLosesSamplesFails(t *testing.T) {
	f := smallRun(t, fakeTargetFile(t, "1"))
	f.Repetitions = 1
	err := run(t.Context(), f, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "were sent and acknowledged") {
		t.Fatalf("run: %v; want an error that says what is missing", err)
	}
}

func TestATargetThatCannotStartIsShown(t *testing.T) {
	path := fakeTargetFile(t, "")
	f := smallRun(t, path)
	f.Bin = map[string]string{"fake": "/bin/false"}
	err := run(t.Context(), f, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "ended before it was ready") {
		t.Fatalf("run: %v; want an error that says that it ended", err)
	}
}

func TestShippedTargetsParse(t *testing.T) {
	paths, err := filepath.Glob("targets/*.yaml")
	if err != nil || len(paths) < 3 {
		t.Fatalf("%d target files, %v", len(paths), err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		tg, err := parseTarget(b)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		at := tg.at("/d", 1234)
		all := fmt.Sprint(at.Args, at.WriteURL, at.QueryURL, at.ReadyURL, at.Data)
		if strings.Contains(all, "{{") || !strings.Contains(all, "1234") {
			t.Errorf("%s: placeholders are left, or none was there: %s", path, all)
		}
		if tg.Name+".yaml" != filepath.Base(path) {
			t.Errorf("%s names its target %s", path, tg.Name)
		}
	}
}

func TestParseTargetRefuses(t *testing.T) {
	good := "name: a\nbinary: b\nwriteURL: w\nqueryURL: q\nreadyURL: r\ndata: d\nprotocols: [1]\n"
	if _, err := parseTarget([]byte(good)); err != nil {
		t.Fatal(err)
	}
	tests := map[string]string{
		"an unknown key":             good + "unknown: 1\n",
		"a missing URL":              strings.Replace(good, "writeURL: w\n", "", 1),
		"no protocol":                strings.Replace(good, "[1]", "[]", 1),
		"a protocol that is no such": strings.Replace(good, "[1]", "[3]", 1),
	}
	for name, text := range tests {
		if _, err := parseTarget([]byte(text)); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

func TestParseStat(t *testing.T) {
	// pid (comm) state ppid pgrp session tty tpgid flags minflt cminflt majflt cmajflt utime stime cutime cstime ...
	s, err := parseStat("42 (a ) b) S 7 1 1 0 -1 0 1 2 3 4 100 20 3 1 20 0 9")
	if err != nil || s.parent != 7 || s.cpu != 1240*time.Millisecond {
		t.Fatalf("parseStat = %+v, %v; want parent 7 and 1.24s", s, err)
	}
	for _, bad := range []string{"", "1 (x) S 1", "1 x S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", "1 (x) S p 1 1 0 -1 0 1 2 3 4 100 20 3 1 20"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("parseStat(%q) succeeds", bad)
		}
	}
}

func TestDescendants(t *testing.T) {
	procs := map[int]procStat{1: {}, 10: {parent: 1}, 11: {parent: 10}, 12: {parent: 11}, 20: {parent: 1}}
	got := descendants(procs, 10)
	slices.Sort(got)
	if !slices.Equal(got, []int{10, 11, 12}) {
		t.Fatalf("descendants(10) = %v, want 10 11 12", got)
	}
}

func TestQuantileAndMedian(t *testing.T) {
	d := []time.Duration{5, 1, 4, 2, 3}
	for q, want := range map[float64]time.Duration{0: 1, 0.2: 1, 0.5: 3, 0.99: 5, 1: 5} {
		if got := quantile(d, q); got != want {
			t.Errorf("quantile %v of 1..5 = %d, want %d", q, got, want)
		}
	}
	if got := quantile(nil, 0.5); got != 0 {
		t.Errorf("quantile of nothing = %d, want 0", got)
	}
	if got := median([]float64{4, 1, 3, 2}); got != 2.5 {
		t.Errorf("median of 1..4 = %v, want 2.5", got)
	}
	if d[0] != 5 {
		t.Error("quantile sorted its argument")
	}
}

func TestBuiltinQueries(t *testing.T) {
	qs, err := parseQueries(builtinQueries)
	if err != nil || len(qs) < 10 {
		t.Fatalf("%d built-in queries, %v; want at least 10", len(qs), err)
	}
	l := &load{nodes: []string{"n1", "n2"}, gpu: []string{"GPU-1"}, from: 1_000_000, to: 1_900_000}
	for _, q := range qs {
		path, v := q.urlFor(l, 3)
		if text := path + v.Encode(); strings.Contains(text, "%7B%7B") || strings.Contains(v.Get("query"), "[all") {
			t.Errorf("query %q keeps a placeholder: %s", q.Name, text)
		}
		if q.Range > 0 && v.Get("end") != "1900.000" {
			t.Errorf("query %q ends at %s, want 1900.000", q.Name, v.Get("end"))
		}
	}
}

func TestParseQueriesRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"a query without a name":      "- {query: up}",
		"a query and a match":         "- {name: a, query: up, match: up}",
		"neither a query nor a match": "- {name: a}",
		"a range without a step":      "- {name: a, query: up, range: 1m}",
		"an unknown key":              "- {name: a, query: up, steps: 1m}",
	} {
		if _, err := parseQueries([]byte(text)); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

func TestCountRows(t *testing.T) {
	for body, want := range map[string]int{
		`{"status":"success","data":{"resultType":"vector","result":[{},{}]}}`: 2,
		`{"status":"success","data":["a","b","c"]}`:                            3,
		`{"status":"success","data":[]}`:                                       0,
	} {
		if got, err := countRows([]byte(body)); err != nil || got != want {
			t.Errorf("countRows(%s) = %d, %v; want %d", body, got, err, want)
		}
	}
	for _, bad := range []string{``, `{"status":"error","error":"x"}`, `{"status":"success","data":7}`} {
		if _, err := countRows([]byte(bad)); err == nil {
			t.Errorf("countRows(%s) succeeds", bad)
		}
	}
}

func TestLoadIsSteady(t *testing.T) {
	for _, p := range []remotewrite.Protocol{remotewrite.Protocol1, remotewrite.Protocol2} {
		f := smallRun(t)
		now := time.Now()
		l, err := newLoad(f, p, now)
		if err != nil {
			t.Fatal(err)
		}
		if l.later != 0 || l.series != l.gpus*147 || len(l.gpu) != l.gpus {
			t.Errorf("protocol %d: %d series and %d later for %d GPUs (%d by UUID), want 147 each and none later", p, l.series, l.later, l.gpus, len(l.gpu))
		}
		if l.to > now.UnixMilli() || now.UnixMilli()-l.to > 60_000 {
			t.Errorf("protocol %d: last sample is %d ms before now, want at most a minute", p, now.UnixMilli()-l.to)
		}
		n := 0
		for _, reqs := range l.rounds {
			if len(reqs) != len(l.create) {
				t.Errorf("protocol %d: a round has %d requests, the first has %d", p, len(reqs), len(l.create))
			}
			for _, q := range reqs {
				n += q.samples
				if q.samples > f.Batch {
					t.Errorf("protocol %d: request of %d samples, at most %d are wanted", p, q.samples, f.Batch)
				}
			}
		}
		if n != l.samples || n != 3*l.series {
			t.Errorf("protocol %d: %d samples, want %d", p, n, 3*l.series)
		}
	}
}

// TestSeriesStayWithTheirSender holds what keeps samples in order: a series stands
// in the same request of every round, whatever the jitter of its scrapes.
func TestSeriesStayWithTheirSender(t *testing.T) {
	f := smallRun(t)
	f.Series, f.Rounds = 30_000, 8
	l, err := newLoad(f, remotewrite.Protocol1, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	at := map[string]int{}
	newest := map[string]int64{}
	for r, reqs := range append([][]request{l.create}, l.rounds...) {
		for i, q := range reqs {
			b, err := snappy.Decode(nil, q.body)
			if err != nil {
				t.Fatal(err)
			}
			var req prompb.WriteRequest
			if err := req.Unmarshal(b); err != nil {
				t.Fatal(err)
			}
			for _, ts := range req.Timeseries {
				name := fmt.Sprint(ts.Labels)
				if was, ok := at[name]; ok && was != i {
					t.Fatalf("round %d: series moved from request %d to %d: %s", r, was, i, name)
				}
				at[name] = i
				if ts.Samples[0].Timestamp <= newest[name] {
					t.Fatalf("round %d: time of %s stands still", r, name)
				}
				newest[name] = ts.Samples[0].Timestamp
			}
		}
	}
}

func TestMerge(t *testing.T) {
	dir := t.TempDir()
	one := report{Flags: runFlags{Series: 10, Protocols: []int{1}, Repetitions: 1, Out: "x"}, Targets: []targetInfo{{Name: "a"}}, Loads: []loadInfo{{Protocol: 1, Series: 10, Samples: 90}}}
	two, other := one, one
	one.Runs = []measurement{{Target: "a", Protocol: 1, Repetition: 1, SampleNanos: 1000}}
	two.Runs = []measurement{{Target: "a", Protocol: 1, Repetition: 1, SampleNanos: 3000}}
	other.Flags.Series = 11
	var paths []string
	for i, r := range []report{one, two, other} {
		path := filepath.Join(dir, fmt.Sprintf("%d.md", i))
		if err := r.write(path, io.Discard); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, jsonPath(path))
	}
	var out strings.Builder
	if err := merge(mergeFlags{Files: paths[:2]}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "| a | 1.0 | 2.000 (-50/+50 %) |") || !strings.Contains(out.String(), "medians of 2 ") {
		t.Errorf("merged table is not that of both runs:\n%s", out.String())
	}
	if err := merge(mergeFlags{Files: paths}, io.Discard); err == nil || !strings.Contains(err.Error(), "flags differ") {
		t.Errorf("merge of unlike runs: %v; want an error", err)
	}
}

func TestMarkdown(t *testing.T) {
	r := report{
		Flags:   runFlags{Base: "a", Protocols: []int{1}, Repetitions: 3},
		Targets: []targetInfo{{Name: "a"}, {Name: "b"}},
		Loads:   []loadInfo{{Protocol: 1, Series: 10, Samples: 90}},
	}
	for i, nanos := range []float64{100, 300, 200} {
		r.Runs = append(r.Runs,
			measurement{Target: "a", Protocol: 1, Repetition: i, SampleNanos: nanos, Disk: 200, Queries: []queryResult{{Name: "q", Rows: 3}}},
			measurement{Target: "b", Protocol: 1, Repetition: i, SampleNanos: 4 * nanos, Disk: 100, Queries: []queryResult{{Name: "q", Rows: 2}}})
	}
	got := r.markdown()
	for _, want := range []string{"| a | 1.0 | 0.200 (-50/+50 %) |", "| b | 1.0 | 0.800 (×4.00) |", " 2.00 (+0/+0 %) ", " 1.00 (×0.50) ", "**3 / 2**"} {
		if !strings.Contains(got, want) {
			t.Errorf("table lacks %q:\n%s", want, got)
		}
	}
}
