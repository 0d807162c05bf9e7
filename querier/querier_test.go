package querier_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/prompb"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/storage/remote"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/tsdbutil"
	"github.com/prometheus/prometheus/util/annotations"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/querier"
	"github.com/varvedb/varve/querier/internal/blocktest"
)

const (
	base = int64(1_760_047_200_000) // 22:00 of a day, Unix ms
	hour = int64(3_600_000)
	step = int64(30_000)
)

// gauge fills a series with a sample each 30 s in [from, to), of value 1.
func gauge(name string, from, to int64, pairs ...string) func(storage.AppenderV2) {
	ls := labels.FromStrings(append([]string{"__name__", name}, pairs...)...)
	return func(app storage.AppenderV2) {
		for at := from; at < to; at += step {
			if _, err := app.Append(0, ls, 0, at, 1, nil, nil, storage.AppendV2Options{}); err != nil {
				panic(fmt.Sprintf("append %s at %d: %v", ls, at, err))
			}
		}
	}
}

func together(fills ...func(storage.AppenderV2)) func(storage.AppenderV2) {
	return func(app storage.AppenderV2) {
		for _, f := range fills {
			f(app)
		}
	}
}

// HA-10: however often a sample is stored, it counts once.
func TestOverlappingHeadAndBlocksAnswerAsOne(t *testing.T) {
	s := serve(t, nil)
	first := s.upload(gauge("x", base, base+hour))
	s.uploadDir(blocktest.Twin(t, first))
	s.upload(gauge("x", base+hour/2, base+2*hour))
	fill(t, s.recent.db, gauge("x", base+hour+hour/4, base+3*hour))

	for at := base + 5*60_000 - 1; at < base+3*hour; at += 11*60_000 + step {
		for query, want := range map[string]string{
			"count_over_time(x[5m])": "10",
			"sum_over_time(x[5m])":   "10",
			"count(x)":               "1",
			"changes(x[5m])":         "0",
		} {
			if got := s.value(query, at); got != want {
				t.Errorf("%s %d s after the start: got %s, want %s", query, (at-base)/1000, got, want)
			}
		}
	}
	if got := s.value("count_over_time(x[3h])", base+3*hour-1); got != "360" {
		t.Errorf("count over all: got %s, want 360", got)
	}
}

func TestLocalBlockIsNotReadAgainFromTheBucket(t *testing.T) {
	s := serve(t, nil)
	fill(t, s.recent.db, gauge("x", base, base+hour))
	if err := s.recent.db.CompactHead(rangeHead(s.recent.db, base, base+hour)); err != nil {
		t.Fatal(err)
	}
	local := s.recent.db.Blocks()
	if len(local) != 1 {
		t.Fatalf("%d local blocks, want 1", len(local))
	}
	blocktest.Upload(t, s.bucket, fleet, local[0].Dir())
	if err := s.blocks.Refresh(t.Context(), fleet); err != nil {
		t.Fatal(err)
	}
	if got := s.value("count_over_time(x[1h])", base+hour-1); got != "120" {
		t.Errorf("got %s samples, want 120", got)
	}
	if got := s.metric("varve_blocks_open"); got != 0 {
		t.Errorf("%g blocks of the bucket were opened, want 0: the ingester answers for them", got)
	}
}

// QR-03: label values are those of the series that match in the range.
func TestLabelValuesAreThoseOfMatchingSeries(t *testing.T) {
	s := serve(t, nil)
	s.upload(together(
		gauge("up", base, base+hour, "job", "x", "cluster", "a"),
		gauge("power", base, base+hour, "job", "y", "cluster", "b", "gpu.uuid", "GPU-1"),
		gauge("short", base, base+10*step, "job", "z", "cluster", "c"),
	))
	fill(t, s.recent.db, together(
		gauge("up", base+hour, base+2*hour, "job", "x", "cluster", "d"),
		gauge("temp", base+hour, base+2*hour, "job", "y"),
	))
	ranges := map[string][2]string{
		"no range":              {},
		"everything":            {seconds(base), seconds(base + 2*hour)},
		"the block only":        {seconds(base), seconds(base + hour - 1)},
		"after the short one":   {seconds(base + hour/2), seconds(base + 2*hour)},
		"before all":            {seconds(base - hour), seconds(base - 1)},
		"a moment of the short": {seconds(base), seconds(base + step)},
	}
	selectors := [][]string{
		{`up{cluster="a"}`}, {`up`}, {`{cluster=~"a|",job=~".+"}`, `nosuch`}, {`{cluster!="b",job=~".+"}`}, {`{job=~".+"}`}, {`{cluster=~".*",job!=""}`},
		{`nosuch`}, {`up`, `power`}, {`up{cluster="a"}`, `{job="y"}`}, {`{"gpu.uuid"="GPU-1"}`}, {`{__name__=~"up|temp"}`}, {`{__name__!~"up|temp",job=~".+"}`}, {`short`},
	}
	for when, r := range ranges {
		for _, match := range selectors {
			form := url.Values{"match[]": match}
			if r[0] != "" {
				form.Set("start", r[0])
				form.Set("end", r[1])
			}
			a := s.get("/api/v1/series", form)
			var found []map[string]string
			if err := json.Unmarshal(a.Data, &found); err != nil || a.code != http.StatusOK {
				t.Fatalf("series %v: %v in %d %s", match, err, a.code, a.body)
			}
			for name, inPath := range map[string]string{"cluster": "cluster", "job": "job", "__name__": "__name__", "gpu.uuid": "U__gpu_2e_uuid"} {
				want := []string{}
				for _, series := range found {
					if v := series[name]; v != "" && !slices.Contains(want, v) {
						want = append(want, v)
					}
				}
				slices.Sort(want)
				got := s.get("/api/v1/label/"+inPath+"/values", form).strings(t)
				if !slices.Equal(got, want) {
					t.Errorf("%s, values of %s with match[]=%v: got %v, want %v", when, name, match, got, want)
				}
			}
		}
	}
	if a := s.get("/api/v1/label/job/values", url.Values{"match[]": {`{job=`}}); a.code != http.StatusBadRequest || a.ErrorType != "bad_data" {
		t.Errorf("an invalid matcher: got %d %s, want 400 bad_data", a.code, a.body)
	}
	limited := s.get("/api/v1/label/job/values", url.Values{"limit": {"2"}})
	if got := limited.strings(t); !slices.Equal(got, []string{"x", "y"}) || len(limited.Warnings) != 1 {
		t.Errorf("with limit 2: got %v, warnings %v; want x and y, and a warning", got, limited.Warnings)
	}
}

// GF-01: what Grafana and other clients of Prometheus ask for is there, by every
// method that Prometheus has, below both prefixes, always as JSON.
func TestEndpointsAndMethods(t *testing.T) {
	s := serve(t, nil)
	s.recent.families = map[string][]metadata.Metadata{"x": {{Type: "gauge", Help: "An x."}}}
	fill(t, s.recent.db, gauge("x", base, base+hour, "job", "a"))
	at := url.Values{"query": {"x"}, "time": {seconds(base + hour/2)}}
	span := url.Values{"query": {"x"}, "start": {seconds(base)}, "end": {seconds(base + hour)}, "step": {"60"}}
	match := url.Values{"match[]": {"x"}}
	get, both, post := []string{"GET"}, []string{"GET", "POST"}, []string{"POST", "PUT"}
	cases := []struct {
		path    string
		methods []string
		form    url.Values
		code    int
		data    string // a part of data, or the whole of it if it starts with '='
	}{
		{"/query", both, at, 200, `"resultType":"vector"`},
		{"/query_range", both, span, 200, `"resultType":"matrix"`},
		{"/query_exemplars", both, span, 200, `=[]`},
		{"/series", both, match, 200, `=[{"__name__":"x","job":"a"}]`},
		{"/labels", both, match, 200, `=["__name__","job"]`},
		{"/labels", both, nil, 200, `=["__name__","job"]`},
		{"/label/job/values", get, match, 200, `=["a"]`},
		{"/label/nosuch/values", get, nil, 200, `=[]`},
		{"/format_query", both, url.Values{"query": {"x+x"}}, 200, `="x + x"`},
		{"/parse_query", both, url.Values{"query": {"x"}}, 200, `"type":"vectorSelector"`},
		{"/metadata", get, nil, 200, `={"x":[{"type":"gauge","unit":"","help":"An x."}]}`},
		{"/rules", get, nil, 200, `={"groups":[]}`},
		{"/alerts", get, nil, 200, `={"alerts":[]}`},
		{"/alertmanagers", get, nil, 200, `={"activeAlertmanagers":[],"droppedAlertmanagers":[]}`},
		{"/targets", get, nil, 200, `={"activeTargets":[],"droppedTargets":[],"droppedTargetCounts":{}}`},
		{"/targets/metadata", get, nil, 200, `=[]`},
		{"/scrape_pools", get, nil, 200, `={"scrapePools":[]}`},
		{"/status/buildinfo", get, nil, 200, `"version":"3.16.0"`},
		{"/status/buildinfo", get, nil, 200, `"application":"Varve"`},
		{"/status/flags", get, nil, 200, `={}`},
		{"/status/config", get, nil, 200, `={"yaml":""}`},
		{"/status/runtimeinfo", get, nil, 200, `"startTime"`},
		{"/status/tsdb", get, nil, 200, `"chunkCount":42`},
		{"/status/tsdb", get, nil, 200, `"numSeries":1`},
		{"/status/tsdb/blocks", get, nil, 200, `={"blocks":[]}`},
		{"/status/walreplay", get, nil, 200, `={"min":0,"max":0,"current":0}`},
		{"/status/self_metrics", get, nil, 200, `varve_queries_running`},
		{"/features", get, nil, 200, `"promql_functions"`},
		{"/notifications", get, nil, 200, `=[]`},
		{"/search/metric_names", both, nil, 503, ``},
		{"/admin/tsdb/clean_tombstones", post, nil, 503, ``},
		{"/nosuch", get, nil, 404, ``},
		{"/label/job", get, nil, 404, ``},
		{"/label//values", get, nil, 404, ``},
		{"", get, nil, 404, ``},
		{"/write", []string{"POST"}, nil, 404, ``},
	}
	for _, prefix := range []string{"/api/v1", "/prometheus/api/v1"} {
		for _, c := range cases {
			for _, method := range c.methods {
				a := s.do(method, prefix+c.path, c.form)
				name := method + " " + prefix + c.path
				if a.code != c.code || !strings.HasPrefix(a.contentType, "application/json") {
					t.Errorf("%s: got %d of type %s: %s; want %d of JSON", name, a.code, a.contentType, a.body, c.code)
					continue
				}
				if wantStatus := map[bool]string{true: "success", false: "error"}[c.code == 200]; a.Status != wantStatus {
					t.Errorf("%s: status is %q, want %q", name, a.Status, wantStatus)
				}
				data := string(a.Data)
				if whole, ok := strings.CutPrefix(c.data, "="); ok && data != whole {
					t.Errorf("%s: data is %s, want %s", name, data, whole)
				} else if !ok && !strings.Contains(data, c.data) {
					t.Errorf("%s: data is %.300s, want %s in it", name, data, c.data)
				}
			}
			if c.code != 200 {
				continue
			}
			for _, method := range []string{"GET", "POST", "PUT", "DELETE"} {
				if slices.Contains(c.methods, method) {
					continue
				}
				a := s.do(method, prefix+c.path, nil)
				if a.code != http.StatusMethodNotAllowed || a.Status != "error" || !strings.Contains(a.header.Get("Allow"), c.methods[0]) {
					t.Errorf("%s %s%s: got %d %s with Allow %q, want 405 with %s", method, prefix, c.path, a.code, a.body, a.header.Get("Allow"), c.methods[0])
				}
			}
		}
	}
	if a := s.get("/api/v1/openapi.yaml", nil); a.code != 200 || !strings.Contains(a.body, "openapi:") {
		t.Errorf("openapi.yaml: got %d %.100s", a.code, a.body)
	}
	if a := s.get("/api/v1/status/buildinfo", nil); strings.Contains(a.body, `"features"`) {
		t.Errorf("buildinfo has features, by which Grafana takes us for Mimir: %s", a.body)
	}
	if a := s.get("/api/v1/notifications/live", nil); a.code != http.StatusNoContent {
		t.Errorf("live notifications: got %d, want 204", a.code)
	}
}

func TestScriptsOfOtherOriginsMayRead(t *testing.T) {
	s := serve(t, nil)
	for _, path := range []string{"/api/v1/query?query=1", "/api/v1/metadata", "/api/v1/nosuch", "/api/v1/query?partial_response=maybe"} {
		a := s.do("GET", path, nil, "Origin", "http://grafana.example")
		if got := a.header.Get("Access-Control-Allow-Origin"); got != "*" {
			t.Errorf("GET %s: allowed origin is %q, want *", path, got)
		}
	}
	a := s.do("OPTIONS", "/api/v1/query", nil, "Origin", "http://grafana.example")
	if a.code != http.StatusNoContent || a.header.Get("Access-Control-Allow-Methods") == "" {
		t.Errorf("OPTIONS: got %d, methods %q; want 204 and methods", a.code, a.header.Get("Access-Control-Allow-Methods"))
	}
}

// RW-14: the parameters of the metadata endpoint are honoured.
func TestMetadataParameters(t *testing.T) {
	s := serve(t, nil)
	s.recent.families = map[string][]metadata.Metadata{
		"a": {{Type: "gauge"}, {Type: "counter", Help: "it was"}},
		"b": {{Type: "unknown", Unit: "W"}},
		"c": {{Type: "gauge"}},
	}
	all := `{"a":[{"type":"gauge","unit":"","help":""},{"type":"counter","unit":"","help":"it was"}],"b":[{"type":"unknown","unit":"W","help":""}],"c":[{"type":"gauge","unit":"","help":""}]}`
	one := `{"a":[{"type":"gauge","unit":"","help":""}]}`
	for query, want := range map[string]string{
		"":                                 all,
		"limit=-1&limit_per_metric=0":      all,
		"limit=0":                          `{}`,
		"limit=1&limit_per_metric=1":       one,
		"metric=a&limit_per_metric=1":      one,
		"metric=b":                         `{"b":[{"type":"unknown","unit":"W","help":""}]}`,
		"metric=b&limit=0":                 `{}`,
		"metric=nosuch":                    `{}`,
		"limit=2&limit_per_metric=1&x=y":   `{"a":[{"type":"gauge","unit":"","help":""}],"b":[{"type":"unknown","unit":"W","help":""}]}`,
		"limit=100000&limit_per_metric=-1": all,
	} {
		if a := s.get("/api/v1/metadata?"+query, nil); a.code != 200 || string(a.Data) != want {
			t.Errorf("metadata?%s: got %d %s, want %s", query, a.code, a.body, want)
		}
	}
	for _, query := range []string{"limit=many", "limit_per_metric=1.5"} {
		if a := s.get("/api/v1/metadata?"+query, nil); a.code != 400 || a.ErrorType != "bad_data" {
			t.Errorf("metadata?%s: got %d %s, want 400 bad_data", query, a.code, a.body)
		}
	}
	for _, query := range []string{"limit=0", "limit=x", "limit=10001"} {
		if a := s.get("/api/v1/status/tsdb?"+query, nil); a.code != 400 || a.ErrorType != "bad_data" {
			t.Errorf("status/tsdb?%s: got %d %s, want 400 bad_data", query, a.code, a.body)
		}
	}
}

func TestTenantsAreApart(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) { c.DefaultTenant = "" })
	fill(t, s.recent.db, gauge("x", base, base+hour))
	cases := map[string]struct {
		header []string
		code   int
		data   string
	}{
		"the tenant":         {[]string{"X-Scope-OrgID", fleet}, 200, `["x"]`},
		"another tenant":     {[]string{"X-Scope-OrgID", "other"}, 200, `[]`},
		"no tenant":          {nil, 400, ``},
		"a path as a tenant": {[]string{"X-Scope-OrgID", "../fleet"}, 400, ``},
		"two tenants":        {[]string{"X-Scope-OrgID", fleet, "X-Scope-OrgID", "other"}, 400, ``},
	}
	for name, c := range cases {
		a := s.do("GET", "/api/v1/label/__name__/values", nil, c.header...)
		if a.code != c.code || string(a.Data) != c.data || c.code != 200 && a.ErrorType != "bad_data" {
			t.Errorf("%s: got %d %s, want %d %s", name, a.code, a.body, c.code, c.data)
		}
	}
}

func TestKindsOfErrorsBecomeStatusCodes(t *testing.T) {
	s := serve(t, nil)
	now := url.Values{"query": {"x"}, "match[]": {"x"}, "start": {"1"}, "end": {"2"}, "step": {"1"}}
	for _, c := range []struct {
		name      string
		err       error
		code      int
		errorType string // of queries
	}{
		{"starting", series.Errorf(series.Unavailable, "ingester is starting: replay of 3 of 7"), 503, "unavailable"},
		{"wrapped", fmt.Errorf("ask ingester-3: %w", series.Errorf(series.Unavailable, "it is gone")), 503, "unavailable"},
		{"limited", series.Errorf(series.Limited, "too many at once"), 429, ""},
		{"corrupt", series.Errorf(series.Corrupt, "block 01H is damaged"), 500, "internal"},
		{"unclassified", errors.New("who knows"), 500, "internal"},
		{"too slow", context.DeadlineExceeded, 503, "timeout"},
	} {
		s.recent.failWith(c.err)
		for _, path := range []string{"/query", "/query_range", "/series", "/labels", "/label/job/values", "/query_exemplars", "/metadata", "/status/tsdb"} {
			a := s.get("/api/v1"+path, now)
			if a.code != c.code || a.Status != "error" || !strings.Contains(a.Error, c.err.Error()) && c.errorType != "timeout" {
				t.Errorf("%s, %s: got %d %s, want %d with %q", path, c.name, a.code, a.body, c.code, c.err)
			}
			if exact := path == "/query" || path == "/query_range" || path == "/series"; exact && c.errorType != "" && a.ErrorType != c.errorType {
				t.Errorf("%s, %s: errorType is %q, want %q", path, c.name, a.ErrorType, c.errorType)
			}
		}
	}
}

func TestUnreadableBlockFailsTheQueryUnlessPartialAnswersAreAllowed(t *testing.T) {
	s := serve(t, nil)
	dir := s.upload(gauge("x", base, base+hour, "part", "block"))
	fill(t, s.recent.db, gauge("x", base+hour, base+2*hour, "part", "head"))
	id := dir[strings.LastIndexByte(dir, '/')+1:]
	if err := s.bucket.Delete(t.Context(), bucket.BlockDir(fleet, ulid.MustParse(id))+"/index"); err != nil {
		t.Fatal(err)
	}

	span := func(extra ...string) url.Values {
		form := url.Values{"query": {"count_over_time(x[2h])"}, "time": {seconds(base + 2*hour)}, "match[]": {"x"}, "start": {seconds(base)}, "end": {seconds(base + 2*hour)}, "step": {"600"}}
		for i := 0; i < len(extra); i += 2 {
			form.Set(extra[i], extra[i+1])
		}
		return form
	}
	for _, path := range []string{"/query", "/query_range", "/series", "/labels", "/label/part/values"} {
		for _, no := range []string{"", "false", "0"} {
			a := s.get("/api/v1"+path, span("partial_response", no))
			if a.code != 500 || !strings.Contains(a.Error, id) {
				t.Errorf("%s with partial_response=%s: got %d %s, want 500 naming block %s", path, no, a.code, a.body, id)
			}
		}
		for _, method := range []string{"GET", "POST"} {
			if path == "/label/part/values" && method == "POST" {
				continue
			}
			a := s.do(method, "/api/v1"+path, span("partial_response", "true"))
			if a.code != 200 || len(a.Warnings) == 0 || !strings.Contains(a.Warnings[0], id) {
				t.Errorf("%s %s with partial_response=true: got %d %s, want 200 with a warning naming block %s", method, path, a.code, a.body, id)
			}
			if path != "/labels" && !strings.Contains(string(a.Data), "head") {
				t.Errorf("%s: the answer lacks what is in the head: %s", path, a.body)
			}
		}
	}
	if a := s.get("/api/v1/query", span("partial_response", "perhaps")); a.code != 400 || a.ErrorType != "bad_data" {
		t.Errorf("partial_response=perhaps: got %d %s, want 400 bad_data", a.code, a.body)
	}
	// What does not need the block is not disturbed by it.
	if a := s.get("/api/v1/query", url.Values{"query": {"x"}, "time": {seconds(base + 2*hour - 1)}}); a.code != 200 || len(a.Warnings) > 0 {
		t.Errorf("a query of the head only: got %d %s", a.code, a.body)
	}
}

func TestIngesterThatIsDownMakesAnswersPartial(t *testing.T) {
	s := serve(t, nil)
	s.upload(gauge("x", base, base+hour))
	s.recent.failWith(series.Errorf(series.Unavailable, "ingester is starting"))
	form := url.Values{"query": {"count(x)"}, "time": {seconds(base + hour - 1)}, "partial_response": {"true"}}
	a := s.get("/api/v1/query", form)
	if a.code != 200 || len(a.Warnings) != 1 || !strings.Contains(a.Warnings[0], "starting") || !strings.Contains(string(a.Data), `"1"`) {
		t.Errorf("got %d %s, want the block's samples and a warning", a.code, a.body)
	}
}

func TestDamageFoundWhileReadingIsAnErrorThatNamesTheBlock(t *testing.T) {
	s := serve(t, nil)
	dir := s.upload(gauge("x", base, base+hour))
	id := dir[strings.LastIndexByte(dir, '/')+1:]
	if got := s.get("/api/v1/status/tsdb/blocks", nil); !strings.Contains(got.body, id) {
		t.Errorf("blocks of the tenant: got %s, want %s", got.body, id)
	}
	name := filepath.Join(s.bucket.LocalDir, fleet, id, "chunks", "000001")
	content, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	content[len(content)-30] ^= 0xff
	if err := os.WriteFile(name, content, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/query?query=sum_over_time(x[1h])&time=" + seconds(base+hour), "/query_range?query=x&step=60&start=" + seconds(base) + "&end=" + seconds(base+hour)} {
		if a := s.get("/api/v1"+path, nil); a.code != 500 || !strings.Contains(a.Error, id) {
			t.Errorf("%s: got %d %s, want 500 naming block %s", path, a.code, a.body, id)
		}
	}
	var blocks struct{ Blocks []struct{ ULID string } }
	if err := json.Unmarshal(s.get("/api/v1/status/tsdb/blocks", nil).Data, &blocks); err != nil || len(blocks.Blocks) != 0 {
		t.Errorf("blocks that queries read: got %v, error %v; want none, the damaged one is set aside", blocks, err)
	}
}

// down is a bucket that cannot be listed.
type down struct{ querier.Store }

func (down) Querier(context.Context, string, int64, int64, series.BlockSet) (storage.Querier, series.BlockSet, error) {
	return nil, nil, series.Errorf(series.Unavailable, "the bucket is down")
}

func (down) ChunkQuerier(context.Context, string, int64, int64, series.BlockSet) (storage.ChunkQuerier, series.BlockSet, error) {
	return nil, nil, series.Errorf(series.Unavailable, "the bucket is down")
}

func TestRecentQueriesGoOnWhileTheBucketIsDown(t *testing.T) {
	now := base + 10*hour
	s := serve(t, func(c *querier.Config, o *querier.Options) {
		c.IngesterHolds = 6 * time.Hour
		o.Bucket = down{}
		o.Now = func() time.Time { return time.UnixMilli(now) }
	})
	fill(t, s.recent.db, gauge("x", base, now))
	a := s.get("/api/v1/query", url.Values{"query": {"sum_over_time(x[5h])"}, "time": {seconds(now)}})
	if a.code != 200 || len(a.Warnings) != 1 || !strings.Contains(a.Warnings[0], "the bucket is down") {
		t.Errorf("a recent query: got %d %s, want 200 with a warning", a.code, a.body)
	}
	a = s.get("/api/v1/query", url.Values{"query": {"sum_over_time(x[7h])"}, "time": {seconds(now)}})
	if a.code != 503 || a.ErrorType != "unavailable" {
		t.Errorf("an older query: got %d %s, want 503 unavailable", a.code, a.body)
	}
	// Remote reads have no room for a warning.
	if response, _ := s.read(now-hour, now, prompb.ReadRequest_SAMPLES); response.StatusCode != 503 {
		t.Errorf("a recent remote read: got %d, want 503", response.StatusCode)
	}
}

func TestLimits(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) {
		c.MaxSamples, c.MaxSeries, c.MaxLabels = 1000, 3, 3
	})
	for i := range 4 {
		fill(t, s.recent.db, gauge("x", base, base+hour, "i", fmt.Sprint(i), fmt.Sprintf("l%d", i), "v"))
	}
	cases := map[string]struct {
		path string
		form url.Values
		code int
		kind string
		text string
	}{
		"a query of few samples":     {"/query", url.Values{"query": {"x"}, "time": {seconds(base)}}, 200, "", ""},
		"a query of many samples":    {"/query_range", url.Values{"query": {"x"}, "start": {seconds(base)}, "end": {seconds(base + hour)}, "step": {"1"}}, 422, "execution", "too many samples"},
		"more than 11,000 points":    {"/query_range", url.Values{"query": {"x"}, "start": {"0"}, "end": {"99999"}, "step": {"1"}}, 400, "bad_data", "11,000"},
		"series within the limit":    {"/series", url.Values{"match[]": {`x{i!="3"}`}}, 200, "", ""},
		"more series than allowed":   {"/series", url.Values{"match[]": {"x"}}, 422, "execution", "more than 3 series"},
		"as many as asked for":       {"/series", url.Values{"match[]": {"x"}, "limit": {"2"}}, 200, "", ""},
		"values beyond the limit":    {"/label/i/values", nil, 422, "execution", "4 values of label i"},
		"values as many as asked":    {"/label/i/values", url.Values{"limit": {"2"}}, 200, "", ""},
		"names beyond the limit":     {"/labels", nil, 422, "execution", "6 label names"},
		"a timeout too short":        {"/query", url.Values{"query": {"x"}, "timeout": {"0.000000001"}}, 503, "timeout", "timed out"},
		"a timeout below zero":       {"/query", url.Values{"query": {"x"}, "timeout": {"-1"}}, 400, "bad_data", "positive"},
		"PromQL that does not parse": {"/query", url.Values{"query": {"x{"}}, 400, "bad_data", "parse error"},
		"no query":                   {"/query", nil, 400, "bad_data", ""},
		"a body of 20 kB":            {"POST /query", url.Values{"query": {"x + " + strings.Repeat(" ", 20_000) + "x"}}, 200, "", ""},
	}
	for name, c := range cases {
		method, path := "GET", c.path
		if after, ok := strings.CutPrefix(c.path, "POST "); ok {
			method, path = "POST", after
		}
		a := s.do(method, "/api/v1"+path, c.form)
		if a.code != c.code || a.ErrorType != c.kind || !strings.Contains(a.Error, c.text) {
			t.Errorf("%s: got %d %s, want %d %s with %q", name, a.code, a.body, c.code, c.kind, c.text)
		}
	}
}

// endless is a body that never ends.
type endless struct{ sent atomic.Int64 }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	e.sent.Add(int64(len(p)))
	return len(p), nil
}

func TestBodiesAreBounded(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) { c.MaxBodyBytes = 1 << 20 })
	for _, path := range []string{"/api/v1/query", "/api/v1/series", "/api/v1/read"} {
		body := &endless{}
		r, err := http.NewRequestWithContext(t.Context(), "POST", s.url+path, io.LimitReader(body, 100<<20))
		if err != nil {
			t.Fatal(err)
		}
		r.ContentLength = 100 << 20
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		a := s.send(r)
		if a.code != http.StatusRequestEntityTooLarge || a.ErrorType != "bad_data" {
			t.Errorf("POST %s of 100 MiB: got %d %s, want 413 bad_data", path, a.code, a.body)
		}
		if body.sent.Load() > 20<<20 {
			t.Errorf("POST %s: %d bytes were taken", path, body.sent.Load())
		}
	}
}

func TestClientThatGoesAwayFreesItsSlot(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) {
		c.MaxConcurrent, c.MaxWait = 1, time.Millisecond
	})
	fill(t, s.recent.db, gauge("x", base, base+hour))
	entered := make(chan struct{})
	s.recent.stuck.Store(&entered)

	ctx, goAway := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, "GET", s.url+"/api/v1/query?query=x", nil)
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan error, 1)
	go func() {
		response, err := http.DefaultClient.Do(r)
		if err == nil {
			response.Body.Close()
		}
		gone <- err
	}()
	<-entered
	a := s.get("/api/v1/query?query=x", nil)
	if a.code != 503 || a.ErrorType != "unavailable" || a.header.Get("Retry-After") == "" {
		t.Errorf("a query while the only slot is taken: got %d %s, want 503 unavailable", a.code, a.body)
	}
	if a := s.get("/api/v1/status/buildinfo", nil); a.code != 200 {
		t.Errorf("what needs no slot: got %d %s", a.code, a.body)
	}
	goAway()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	s.recent.stuck.Store(nil)
	s.eventually("a query after the client went away is answered", func() bool {
		return s.get("/api/v1/query?query=x", nil).code == 200
	})
}

func TestWaitingQueryTakesTheSlotThatBecomesFree(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) { c.MaxConcurrent, c.MaxWait = 1, time.Minute })
	fill(t, s.recent.db, gauge("x", base, base+hour))
	entered := make(chan struct{})
	s.recent.stuck.Store(&entered)
	ctx, goAway := context.WithCancel(t.Context())
	first := make(chan struct{})
	go func() {
		defer close(first)
		r, _ := http.NewRequestWithContext(ctx, "GET", s.url+"/api/v1/query?query=x", nil)
		if response, err := http.DefaultClient.Do(r); err == nil {
			response.Body.Close()
		}
	}()
	<-entered
	s.recent.stuck.Store(nil)
	second := make(chan answer, 1)
	go func() { second <- s.get("/api/v1/query?query=x", nil) }()
	s.eventually("the second query waits", func() bool { return s.metric("varve_queries_waiting") == 1 })
	goAway()
	<-first
	if a := <-second; a.code != 200 {
		t.Errorf("the query that waited: got %d %s", a.code, a.body)
	}
}

func TestClientThatNeverReadsIsCutOff(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) {
		c.MaxConcurrent, c.MaxWait, c.WriteTimeout = 1, time.Minute, 50*time.Millisecond
	})
	// An answer of some 20 MB, more than any socket buffer holds.
	fill(t, s.recent.db, func(app storage.AppenderV2) {
		for i := range 100 {
			gauge("x", base, base+hour, "i", fmt.Sprint(i))(app)
		}
	})
	connection, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	form := url.Values{"query": {"x"}, "start": {seconds(base)}, "end": {seconds(base + 10_000_000)}, "step": {"1"}}
	fmt.Fprintf(connection, "GET /api/v1/query_range?%s HTTP/1.1\r\nHost: x\r\n\r\n", form.Encode())
	s.eventually("the query holds the slot", func() bool { return s.metric("varve_queries_running") == 1 })
	if a := s.get("/api/v1/query?query=1", nil); a.code != 200 {
		t.Errorf("the query after it: got %d %s", a.code, a.body)
	}
}

// read sends a remote read of all series.
func (s *server) read(mint, maxt int64, kind prompb.ReadRequest_ResponseType) (*http.Response, []byte) {
	s.t.Helper()
	response, err := http.Post(s.url+"/api/v1/read", "application/x-protobuf", bytes.NewReader(readRequest(s.t, mint, maxt, kind)))
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response, body
}

// readRequest encodes a remote read of all series.
func readRequest(t testing.TB, mint, maxt int64, kind prompb.ReadRequest_ResponseType) []byte {
	t.Helper()
	request := prompb.ReadRequest{
		AcceptedResponseTypes: []prompb.ReadRequest_ResponseType{kind},
		Queries: []*prompb.Query{{
			StartTimestampMs: mint, EndTimestampMs: maxt,
			Matchers: []*prompb.LabelMatcher{{Type: prompb.LabelMatcher_RE, Name: "__name__", Value: ".+"}},
		}},
	}
	document, err := request.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return snappy.Encode(nil, document)
}

func TestRemoteReadByOldClients(t *testing.T) {
	s := serve(t, nil)
	s.upload(gauge("x", base, base+hour))
	// With start timestamps the head's chunks are of encodings that Prometheus before
	// 3.14 cannot read.
	fill(t, s.recent.db, func(app storage.AppenderV2) {
		for at := base + hour/2; at < base+2*hour; at += step {
			n := (at - base) / step
			h := tsdbutil.GenerateTestHistogram(n)
			for name, f := range map[string]func(ls labels.Labels) error{
				"x": func(ls labels.Labels) error {
					_, err := app.Append(0, ls, base, at, 1, nil, nil, storage.AppendV2Options{})
					return err
				},
				"h": func(ls labels.Labels) error {
					_, err := app.Append(0, ls, base, at, 0, h, nil, storage.AppendV2Options{})
					return err
				},
				"fh": func(ls labels.Labels) error {
					_, err := app.Append(0, ls, base, at, 0, nil, h.ToFloat(nil), storage.AppendV2Options{})
					return err
				},
			} {
				if err := f(labels.FromStrings("__name__", name)); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
	want := map[string]int{"x": 240, "h": 180, "fh": 180}

	response, body := s.read(base, base+2*hour, prompb.ReadRequest_SAMPLES)
	if response.StatusCode != 200 {
		t.Fatalf("samples: got %d %s", response.StatusCode, body)
	}
	document, err := snappy.Decode(nil, body)
	if err != nil {
		t.Fatal(err)
	}
	var answer prompb.ReadResponse
	if err := answer.Unmarshal(document); err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, series := range answer.Results[0].Timeseries {
		got[series.Labels[0].Value] += len(series.Samples) + len(series.Histograms)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("samples: got %v, want %v", got, want)
	}

	response, body = s.read(base, base+2*hour, prompb.ReadRequest_STREAMED_XOR_CHUNKS)
	if response.StatusCode != 200 {
		t.Fatalf("chunks: got %d %s", response.StatusCode, body)
	}
	stream := remote.NewChunkedReader(bytes.NewReader(body), 10<<20, nil)
	got = map[string]int{}
	last := map[string]int64{}
	for {
		var frame prompb.ChunkedReadResponse
		if err := stream.NextProto(&frame); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for _, series := range frame.ChunkedSeries {
			name := series.Labels[0].Value
			for _, c := range series.Chunks {
				if c.Type > prompb.Chunk_FLOAT_HISTOGRAM {
					t.Errorf("a chunk of %s is of encoding %s", name, c.Type)
				}
				chunk, err := chunkenc.FromData(chunkenc.Encoding(c.Type), c.Data)
				if err != nil {
					t.Fatal(err)
				}
				it := chunk.Iterator(nil)
				for v := it.Next(); v != chunkenc.ValNone; v = it.Next() {
					at := it.AtT()
					if at <= last[name] {
						t.Errorf("%s: sample at %d follows %d", name, at, last[name])
					}
					last[name] = at
					if v == chunkenc.ValHistogram {
						_, h := it.AtHistogram(nil)
						if want := tsdbutil.GenerateTestHistogram((at - base) / step); !h.Equals(want) {
							t.Errorf("histogram at %d: got %s, want %s", at, h, want)
						}
						if h.CounterResetHint == histogram.CounterReset {
							t.Errorf("histogram at %d claims a reset", at)
						}
					}
					got[name]++
				}
			}
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("chunks: got %v samples, want %v", got, want)
	}

	s.recent.failWith(series.Errorf(series.Unavailable, "ingester is starting"))
	for _, kind := range []prompb.ReadRequest_ResponseType{prompb.ReadRequest_SAMPLES, prompb.ReadRequest_STREAMED_XOR_CHUNKS} {
		if response, body := s.read(base, base+hour, kind); response.StatusCode != 503 || !strings.Contains(string(body), "starting") {
			t.Errorf("%s while the ingester starts: got %d %s, want 503", kind, response.StatusCode, body)
		}
	}
}

func TestExemplars(t *testing.T) {
	s := serve(t, nil)
	fill(t, s.recent.db, func(app storage.AppenderV2) {
		_, err := app.Append(0, labels.FromStrings("__name__", "x", "job", "a"), 0, base, 1, nil, nil, storage.AppendV2Options{
			Exemplars: []exemplar.Exemplar{{Labels: labels.FromStrings("trace_id", "t1"), Value: 7, Ts: base, HasTs: true}},
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	a := s.do("POST", "/api/v1/query_exemplars", url.Values{"query": {"rate(x[5m])"}, "start": {seconds(base - hour)}, "end": {seconds(base + hour)}})
	if a.code != 200 || !strings.Contains(string(a.Data), `"trace_id":"t1"`) {
		t.Errorf("got %d %s, want the exemplar", a.code, a.body)
	}
}

func TestExperimentalFunctionsAreOn(t *testing.T) {
	s := serve(t, nil)
	fill(t, s.recent.db, gauge("x", base, base+hour))
	for _, query := range []string{"limitk(1, x)", "mad_over_time(x[5m])", "start_timestamp(x)", "x + fill(0) x"} {
		if a := s.get("/api/v1/query", url.Values{"query": {query}, "time": {seconds(base)}}); a.code != 200 {
			t.Errorf("%s: got %d %s, want 200", query, a.code, a.body)
		}
	}
}

// slowClient reads an answer as a test wants it to.
type slowClient struct {
	header   http.Header
	code     int
	deadline time.Time
	writes   int
	read     func(c *slowClient) error // called with every write
}

func (c *slowClient) Header() http.Header                { return c.header }
func (c *slowClient) WriteHeader(code int)               { c.code = code }
func (c *slowClient) Flush()                             {}
func (c *slowClient) SetWriteDeadline(d time.Time) error { c.deadline = d; return nil }

func (c *slowClient) Write(p []byte) (int, error) {
	c.writes++
	if err := c.read(c); err != nil {
		return 0, err
	}
	return len(p), nil
}

// serveRead answers a remote read of streamed chunks to c, and tells whether the stream
// broke off.
func (s *server) serveRead(ctx context.Context, c *slowClient) (broken bool) {
	s.t.Helper()
	document := readRequest(s.t, base, base+hour, prompb.ReadRequest_STREAMED_XOR_CHUNKS)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "/api/v1/read", bytes.NewReader(document))
	if err != nil {
		s.t.Fatal(err)
	}
	c.header = http.Header{}
	defer func() {
		if p := recover(); p != nil {
			if p != http.ErrAbortHandler {
				panic(p)
			}
			broken = true
		}
	}()
	s.q.ServeHTTP(c, r)
	return false
}

func manySeries(app storage.AppenderV2) {
	for i := range 100 {
		gauge("x", base, base+hour, "i", fmt.Sprint(i))(app)
	}
}

// A client that reads a little now and then would keep a reader of the head open.
func TestRemoteReadEndsHoweverSlowlyItIsRead(t *testing.T) {
	s := serve(t, func(c *querier.Config, _ *querier.Options) {
		c.Timeout, c.WriteTimeout = 100*time.Millisecond, time.Hour
	})
	fill(t, s.recent.db, manySeries)
	hangs := &slowClient{read: func(c *slowClient) error {
		timer := time.NewTimer(time.Until(c.deadline))
		defer timer.Stop()
		<-timer.C
		return os.ErrDeadlineExceeded
	}}
	if !s.serveRead(t.Context(), hangs) && hangs.code != http.StatusServiceUnavailable {
		t.Errorf("a client that reads nothing has the whole answer, code %d", hangs.code)
	}
	if hangs.writes > 2 {
		t.Errorf("a client that reads nothing was written to %d times", hangs.writes)
	}
	trickles := &slowClient{read: func(c *slowClient) error {
		timer := time.NewTimer(20 * time.Millisecond) // of 100 frames: beyond any bound
		defer timer.Stop()
		<-timer.C
		return nil
	}}
	if !s.serveRead(t.Context(), trickles) && trickles.code != http.StatusServiceUnavailable {
		t.Errorf("a client that reads little has the whole answer of %d frames, code %d", trickles.writes, trickles.code)
	}
}

func TestStreamEndsWithItsRequest(t *testing.T) {
	s := serve(t, nil)
	fill(t, s.recent.db, manySeries)
	ctx, goAway := context.WithCancel(t.Context())
	c := &slowClient{read: func(c *slowClient) error {
		if c.writes == 3 {
			goAway()
		}
		return nil
	}}
	if broken := s.serveRead(ctx, c); !broken || c.writes > 3+2 {
		t.Errorf("the stream broke off: %t, after %d writes; want that after 3", broken, c.writes)
	}
	whole := &slowClient{read: func(*slowClient) error { return nil }}
	if broken := s.serveRead(t.Context(), whole); broken || whole.writes < 100 {
		t.Errorf("without an end: the stream broke off: %t, after %d writes", broken, whole.writes)
	}
}

// hanging is a bucket that answers nothing: not when it is listed, or, with opened, not
// when its blocks are read.
type hanging struct {
	querier.Store
	opened bool
}

func (h hanging) Querier(ctx context.Context, _ string, _, _ int64, _ series.BlockSet) (storage.Querier, series.BlockSet, error) {
	if h.opened {
		return hangingQuerier{storage.NoopQuerier()}, nil, nil
	}
	<-ctx.Done()
	return nil, nil, series.Errorf(series.Unavailable, "list blocks: %w", ctx.Err())
}

type hangingQuerier struct{ storage.Querier }

func (hangingQuerier) Select(ctx context.Context, _ bool, _ *storage.SelectHints, _ ...*labels.Matcher) storage.SeriesSet {
	<-ctx.Done()
	return storage.ErrSeriesSet(ctx.Err())
}

func (hangingQuerier) LabelNames(ctx context.Context, _ *storage.LabelHints, _ ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	<-ctx.Done()
	return nil, nil, ctx.Err()
}

// QR-01: a slow store is left out in time where partial answers are allowed.
func TestBucketThatHangsLeavesTimeForAPartialAnswer(t *testing.T) {
	for name, bucket := range map[string]hanging{"while it is listed": {}, "while blocks are read": {opened: true}} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, func(c *querier.Config, o *querier.Options) {
				c.Timeout, c.StoreShare = time.Minute, .005
				o.Bucket = bucket
			})
			fill(t, s.recent.db, gauge("x", base, base+hour))
			form := url.Values{"query": {"count(x)"}, "time": {seconds(base + hour - 1)}, "partial_response": {"true"}, "match[]": {"x"}, "start": {seconds(base)}, "end": {seconds(base + hour)}, "step": {"600"}}
			for _, path := range []string{"/query", "/query_range", "/series", "/labels"} {
				a := s.get("/api/v1"+path, form)
				if a.code != 200 || len(a.Warnings) == 0 || !strings.Contains(a.Warnings[0], "the answer lacks") || len(a.Data) < 10 {
					t.Errorf("%s: got %d %s, want the ingester's data and a warning", path, a.code, a.body)
				}
			}
			form.Del("partial_response")
			form.Set("timeout", "0.2")
			if a := s.get("/api/v1/query", form); a.code != 503 {
				t.Errorf("without partial answers: got %d %s, want 503", a.code, a.body)
			}
		})
	}
}

func TestSettingsAreChecked(t *testing.T) {
	for name, change := range map[string]func(*querier.Config){
		"no time":                   func(c *querier.Config) { c.Timeout = 0 },
		"no time for the bucket":    func(c *querier.Config) { c.StoreShare = 0 },
		"no slots":                  func(c *querier.Config) { c.MaxConcurrent = 0 },
		"a tenant that is a path":   func(c *querier.Config) { c.DefaultTenant = "a/b" },
		"origins that do not parse": func(c *querier.Config) { c.CORSOrigin = "(" },
	} {
		cfg := querier.DefaultConfig()
		change(&cfg)
		if _, err := querier.New(cfg, querier.Options{}); series.KindOf(err) != series.Invalid {
			t.Errorf("%s: got %v, want an error of kind invalid", name, err)
		}
	}
}
