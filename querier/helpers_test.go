package querier_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"go.uber.org/goleak"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/querier"
	"github.com/varvedb/varve/querier/blocks"
	"github.com/varvedb/varve/querier/internal/blocktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const fleet = "fleet" // the tenant of tests

// recent is an ingester of one tenant: a plain TSDB.
type recent struct {
	db       *tsdb.DB
	families map[string][]metadata.Metadata
	fail     atomic.Pointer[error]
	// stuck, if set, makes queriers wait until their context ends; each says so first.
	stuck atomic.Pointer[chan struct{}]
	asked atomic.Int64
}

func (r *recent) ready(ctx context.Context) error {
	r.asked.Add(1)
	if entered := r.stuck.Load(); entered != nil {
		select {
		case *entered <- struct{}{}:
		case <-ctx.Done():
		}
		<-ctx.Done()
		return ctx.Err()
	}
	if err := r.fail.Load(); err != nil {
		return *err
	}
	return nil
}

func (r *recent) failWith(err error) { r.fail.Store(&err) }

func (r *recent) covered() series.BlockSet {
	set := series.BlockSet{}
	for _, b := range r.db.Blocks() {
		set[b.Meta().ULID] = struct{}{}
	}
	return set
}

func (r *recent) Querier(ctx context.Context, tenant string, mint, maxt int64, _ series.BlockSet) (storage.Querier, series.BlockSet, error) {
	if err := r.ready(ctx); err != nil {
		return nil, nil, err
	}
	if tenant != fleet || r.db == nil {
		return storage.NoopQuerier(), nil, nil
	}
	q, err := r.db.Querier(mint, maxt)
	return q, r.covered(), err
}

func (r *recent) ChunkQuerier(ctx context.Context, tenant string, mint, maxt int64, _ series.BlockSet) (storage.ChunkQuerier, series.BlockSet, error) {
	if err := r.ready(ctx); err != nil {
		return nil, nil, err
	}
	if tenant != fleet || r.db == nil {
		return storage.NoopChunkedQuerier(), nil, nil
	}
	q, err := r.db.ChunkQuerier(mint, maxt)
	return q, r.covered(), err
}

func (r *recent) ExemplarQuerier(ctx context.Context, tenant string) (storage.ExemplarQuerier, error) {
	if err := r.ready(ctx); err != nil {
		return nil, err
	}
	return r.db.ExemplarQuerier(ctx)
}

func (r *recent) Metadata(ctx context.Context, tenant, family string) (map[string][]metadata.Metadata, error) {
	if err := r.ready(ctx); err != nil || tenant != fleet {
		return nil, err
	}
	if family == "" {
		return r.families, nil
	}
	if m, ok := r.families[family]; ok {
		return map[string][]metadata.Metadata{family: m}, nil
	}
	return nil, nil
}

func (r *recent) HeadStats(ctx context.Context, tenant, label string, limit int) (*tsdb.Stats, int64, error) {
	if err := r.ready(ctx); err != nil || tenant != fleet {
		return nil, 0, err
	}
	return r.db.Head().Stats(label, limit), 42, nil
}

func options(enc chunkenc.Encoding) *tsdb.Options {
	opts := tsdb.DefaultOptions()
	opts.FloatChunkEncoding = enc
	opts.EnableSTStorage = enc == chunkenc.EncXOR2
	opts.EnableHistogramSTEncoding = enc == chunkenc.EncXOR2
	opts.EnableExemplarStorage, opts.MaxExemplars = true, 1000
	opts.MinBlockDuration = (1000 * time.Hour).Milliseconds()
	opts.MaxBlockDuration = opts.MinBlockDuration
	opts.RetentionDuration = 0
	opts.StripeSize = 64
	return opts
}

func openDB(t testing.TB, enc chunkenc.Encoding) *tsdb.DB {
	t.Helper()
	db, err := tsdb.Open(t.TempDir(), slog.New(slog.DiscardHandler), nil, options(enc), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func fill(t testing.TB, db *tsdb.DB, f func(storage.AppenderV2)) {
	t.Helper()
	app := db.AppenderV2(context.Background())
	f(app)
	if err := app.Commit(); err != nil {
		t.Fatal(err)
	}
}

// server is a querier behind HTTP over a TSDB and a bucket.
type server struct {
	t      testing.TB
	recent *recent
	bucket *bucket.Opened
	blocks *blocks.Store
	url    string
	q      *querier.Querier
	reg    *prometheus.Registry
}

// serve makes a server; change may alter what it is made of.
func serve(t testing.TB, change func(*querier.Config, *querier.Options)) *server {
	t.Helper()
	s := &server{t: t, recent: &recent{}, reg: prometheus.NewRegistry()}
	var err error
	if s.bucket, err = bucket.OpenDir(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	cfg := blocks.DefaultConfig()
	cfg.RefreshInterval, cfg.MaxListAge = time.Hour, 24*time.Hour // tests refresh when they want
	if s.blocks, err = blocks.Open(cfg, blocks.Options{Bucket: s.bucket, LocalDir: s.bucket.LocalDir, Registerer: s.reg}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.blocks.Close(); err != nil {
			t.Error(err)
		}
	})
	s.recent.db = openDB(t, chunkenc.EncXOR2)
	s.listen(change)
	return s
}

// listen starts a querier over the server's stores.
func (s *server) listen(change func(*querier.Config, *querier.Options)) {
	s.t.Helper()
	cfg := querier.DefaultConfig()
	cfg.DefaultTenant = fleet
	opts := querier.Options{Recent: s.recent, Bucket: s.blocks, Registerer: s.reg, Gatherer: s.reg, Build: querier.BuildInfo{Version: "0.1.0"}}
	if change != nil {
		change(&cfg, &opts)
	}
	var err error
	if s.q, err = querier.New(cfg, opts); err != nil {
		s.t.Fatal(err)
	}
	web := httptest.NewServer(s.q)
	s.t.Cleanup(web.Close)
	s.url = web.URL
}

// upload makes a block of what f appends and shows it to the store.
func (s *server) upload(f func(storage.AppenderV2)) string {
	s.t.Helper()
	dir := blocktest.Write(s.t, f)
	s.uploadDir(dir)
	return dir
}

func (s *server) uploadDir(dir string) {
	s.t.Helper()
	blocktest.Upload(s.t, s.bucket, fleet, dir)
	if err := s.blocks.Refresh(context.Background(), fleet); err != nil {
		s.t.Fatal(err)
	}
}

// answer is Prometheus' envelope.
type answer struct {
	code        int
	header      http.Header
	body        string
	Status      string          `json:"status"`
	Data        json.RawMessage `json:"data"`
	ErrorType   string          `json:"errorType"`
	Error       string          `json:"error"`
	Warnings    []string        `json:"warnings"`
	contentType string
}

// do sends a request; form goes into the URL of a GET and the body of a POST.
func (s *server) do(method, path string, form url.Values, header ...string) answer {
	s.t.Helper()
	target, body := s.url+path, io.Reader(nil)
	if method == http.MethodPost {
		body = strings.NewReader(form.Encode())
	} else if len(form) > 0 {
		target += "?" + form.Encode()
	}
	r, err := http.NewRequestWithContext(context.Background(), method, target, body)
	if err != nil {
		s.t.Fatal(err)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return s.send(r)
}

func (s *server) send(r *http.Request) answer {
	s.t.Helper()
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	a := answer{code: response.StatusCode, header: response.Header, body: string(body), contentType: response.Header.Get("Content-Type")}
	if strings.HasPrefix(a.contentType, "application/json") && len(body) > 0 {
		if err := json.Unmarshal(body, &a); err != nil {
			s.t.Fatalf("%s %s: answer %q is no JSON: %v", r.Method, r.URL, body, err)
		}
	}
	return a
}

func (s *server) get(path string, form url.Values) answer {
	s.t.Helper()
	return s.do(http.MethodGet, path, form)
}

// value returns the one number of an instant query's answer.
func (s *server) value(query string, at int64) string {
	s.t.Helper()
	a := s.get("/api/v1/query", url.Values{"query": {query}, "time": {seconds(at)}})
	var data struct {
		Result []struct {
			Value [2]any `json:"value"`
		} `json:"result"`
	}
	if a.code != http.StatusOK {
		s.t.Fatalf("query %s: %d %s", query, a.code, a.body)
	}
	if err := json.Unmarshal(a.Data, &data); err != nil {
		s.t.Fatalf("query %s: %v in %s", query, err, a.body)
	}
	if len(data.Result) != 1 {
		s.t.Fatalf("query %s: %d results in %s, want 1", query, len(data.Result), a.body)
	}
	return data.Result[0].Value[1].(string)
}

// strings returns an answer whose data is a list of strings.
func (a answer) strings(t testing.TB) []string {
	t.Helper()
	var values []string
	if a.code != http.StatusOK {
		t.Fatalf("got %d %s", a.code, a.body)
	}
	if err := json.Unmarshal(a.Data, &values); err != nil {
		t.Fatalf("%v in %s", err, a.body)
	}
	return values
}

func seconds(ms int64) string { return fmt.Sprintf("%.3f", float64(ms)/1000) }

// metric returns the value of a metric without labels, or with its first ones.
func (s *server) metric(name string) float64 {
	s.t.Helper()
	families, err := s.reg.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.Metric[0].GetGauge().GetValue()
		}
	}
	s.t.Fatalf("no metric %s", name)
	return 0
}

// eventually waits for what other goroutines bring about.
func (s *server) eventually(what string, f func() bool) {
	s.t.Helper()
	for range 100_000 {
		if f() {
			return
		}
		runtime.Gosched()
	}
	s.t.Fatalf("it does not come about that %s", what)
}

func rangeHead(db *tsdb.DB, mint, maxt int64) *tsdb.RangeHead {
	return tsdb.NewRangeHead(db.Head(), mint, maxt-1)
}
