package distributor

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/prometheus/model/labels"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// testNow is the clock of all tests.
var testNow = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func ms(t time.Time) int64 { return t.UnixMilli() }

// memory is an ingester of a few lines: it keeps everything, refuses another value
// at a time it has already, and hands out references that it checks when they come
// back.
type memory struct {
	mu        sync.Mutex
	epoch     uint64
	ids       map[string]uint64 // by tenant and canonical labels
	floats    map[string]map[int64]uint64
	hists     map[string][]series.Histogram
	exemplars map[string][]float64
	metadata  map[series.Metadata]int
	order     []string // label sets in the order of the entries
	starts    map[string]int64
	batches   int
	fail      error
	wait      chan struct{} // if set, Append waits for it
	t         testing.TB
}

func newMemory(t testing.TB) *memory {
	return &memory{t: t, epoch: 7, ids: map[string]uint64{}, floats: map[string]map[int64]uint64{}, hists: map[string][]series.Histogram{},
		exemplars: map[string][]float64{}, metadata: map[series.Metadata]int{}, starts: map[string]int64{}}
}

func (m *memory) Append(ctx context.Context, tenant string, b *series.Batch, res *series.Appended) error {
	if m.wait != nil {
		select {
		case <-m.wait:
		case <-ctx.Done():
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	m.batches++
	var lb labels.ScratchBuilder
	for i := range b.Entries {
		e := &b.Entries[i]
		key := tenant + "/" + e.Labels.Labels(&lb).String()
		m.order = append(m.order, key)
		id, known := m.ids[string(e.Labels)]
		if !known {
			id = uint64(len(m.ids) + 1)
			m.ids[string(e.Labels)] = id
		}
		if e.Ref.Epoch == m.epoch && e.Ref.ID != id {
			m.t.Errorf("series %s came with reference %v, its own is %d", key, e.Ref, id)
		}
		e.Ref = series.Ref{Epoch: m.epoch, ID: id}
		for _, s := range b.SamplesOf(e) {
			m.float(key, s, res)
		}
		m.hists[key] = append(m.hists[key], b.HistogramsOf(e)...)
		res.Histograms += e.Histograms.Len()
		for _, x := range b.ExemplarsOf(e) {
			m.exemplars[key] = append(m.exemplars[key], x.V)
			res.Exemplars++
		}
	}
	for _, x := range b.Metadata {
		m.metadata[x]++
	}
	return nil
}

func (m *memory) float(key string, s series.Sample, res *series.Appended) {
	if m.floats[key] == nil {
		m.floats[key] = map[int64]uint64{}
	}
	bits := math.Float64bits(s.V)
	if old, ok := m.floats[key][s.T]; ok && old != bits {
		res.Refused.Add(series.ReasonConflict, 1, func() string { return "series " + key + ": another value is stored" })
		return
	}
	m.floats[key][s.T] = bits
	m.starts[key] = s.ST
	res.Samples++
}

// values returns the stored floats of the anonymous tenant's series, by time.
func (m *memory) values(key string) map[int64]float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[int64]float64{}
	for t, bits := range m.floats["anonymous/"+key] {
		out[t] = math.Float64frombits(bits)
	}
	return out
}

type nullAppender struct{}

func (nullAppender) Append(_ context.Context, _ string, b *series.Batch, res *series.Appended) error {
	for i := range b.Entries {
		b.Entries[i].Ref = series.Ref{Epoch: 1, ID: uint64(i + 1)}
	}
	res.Samples, res.Histograms, res.Exemplars = len(b.Samples), len(b.Histograms), len(b.Exemplars)
	return nil
}

// rig is a Distributor behind a real HTTP server, over a memory.
type rig struct {
	*Distributor
	t      testing.TB
	store  *memory
	server *httptest.Server
	reg    *prometheus.Registry
	mu     sync.Mutex
	clock  time.Time
	logs   bytes.Buffer
}

func newRig(t testing.TB, change func(*Config)) *rig { return newRigHash(t, change, nil) }

func newRigHash(t testing.TB, change func(*Config), hash func([]byte) uint64) *rig {
	t.Helper()
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	r := &rig{t: t, store: newMemory(t), reg: prometheus.NewRegistry(), clock: testNow}
	logger := slog.New(slog.NewTextHandler(&r.logs, nil))
	now := func() time.Time {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.clock
	}
	var err error
	if hash == nil {
		r.Distributor, err = New(cfg, r.store, r.reg, logger, now)
	} else {
		r.Distributor, err = newDistributor(cfg, r.store, r.reg, logger, now, hash)
	}
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	r.Register(mux)
	r.server = httptest.NewServer(mux)
	t.Cleanup(func() {
		r.server.Close()
		if used := r.inflight.used.Load(); used != 0 {
			t.Errorf("%d bytes are still in flight at the end", used)
		}
		if n := testutil.ToFloat64(r.metrics.unaccounted); n != 0 {
			t.Errorf("%v samples are unaccounted for", n)
		}
	})
	return r
}

func (r *rig) advance(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.clock = r.clock.Add(d)
}

// newBare is a Distributor alone, for what happens thousands of times.
func newBare(t testing.TB, app Appender, change func(*Config)) *Distributor {
	t.Helper()
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	return bare(t, app, cfg)
}

func bare(t interface{ Fatal(...any) }, app Appender, cfg Config) *Distributor {
	d, err := New(cfg, app, prometheus.NewRegistry(), slog.New(slog.NewTextHandler(io.Discard, nil)), func() time.Time { return testNow })
	if err != nil {
		t.Fatal(err)
	}
	return d
}

type answer struct {
	code   int
	body   string
	header http.Header
}

// post sends a body as it is, with the headers of protocol p unless others are
// given.
func (r *rig) post(p remotewrite.Protocol, body []byte, header ...string) answer {
	r.t.Helper()
	return r.send(http.MethodPost, "/api/v1/write", p, bytes.NewReader(body), header...)
}

func (r *rig) send(method, path string, p remotewrite.Protocol, body io.Reader, header ...string) answer {
	r.t.Helper()
	req, err := http.NewRequest(method, r.server.URL+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	if p != 0 {
		remotewrite.SetRequestHeaders(req.Header, p)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Del(header[i])
		if header[i+1] != "" {
			req.Header.Set(header[i], header[i+1])
		}
	}
	resp, err := r.server.Client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return answer{resp.StatusCode, string(text), resp.Header}
}

// run is a label run as a sender writes it, in the order given.
func run(pairs ...string) series.LabelBytes {
	var b series.LabelBytes
	for i := 0; i < len(pairs); i += 2 {
		b = series.AppendLabel(b, pairs[i], pairs[i+1])
	}
	return b
}

// one is a series with a sample of value v at testNow.
func one(e remotewrite.Encoder, v float64, pairs ...string) {
	e.Series(run(pairs...))
	e.Sample(0, ms(testNow), v)
}

func (r *rig) discarded(reason series.Reason) float64 {
	return testutil.ToFloat64(r.metrics.discardedSamples.WithLabelValues(string(reason)))
}

func (r *rig) totalDiscarded() float64 {
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	n := 0.0
	for _, f := range families {
		if f.GetName() == "varve_discarded_samples_total" {
			for _, m := range f.GetMetric() {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}
