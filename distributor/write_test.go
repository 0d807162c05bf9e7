package distributor

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/golang/snappy"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"go.uber.org/goleak"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	v1 = remotewrite.Protocol1
	v2 = remotewrite.Protocol2
)

// both runs a test with either version.
func both(t *testing.T, f func(*testing.T, remotewrite.Protocol)) {
	for _, p := range []remotewrite.Protocol{v1, v2} {
		t.Run(fmt.Sprintf("version %d", p), func(t *testing.T) { f(t, p) })
	}
}

// want400 fails unless a is a 400 with every part in its bounded, readable text.
func want400(t *testing.T, a answer, parts ...string) {
	t.Helper()
	if a.code != http.StatusBadRequest {
		t.Errorf("status %d, want 400: %s", a.code, a.body)
	}
	for _, p := range parts {
		if !strings.Contains(a.body, p) {
			t.Errorf("answer %q lacks %q", a.body, p)
		}
	}
	if !utf8.ValidString(a.body) || len(a.body) > 2048 {
		t.Errorf("answer of %d bytes, valid UTF-8 %v", len(a.body), utf8.ValidString(a.body))
	}
}

func want204(t *testing.T, a answer) {
	t.Helper()
	if a.code != http.StatusNoContent {
		t.Errorf("status %d, want 204: %s", a.code, a.body)
	}
}

// RW-01, RW-05: a bad series is refused alone, whatever is bad and wherever it is.
func TestBadSeriesIsRefusedAlone(t *testing.T) {
	now := ms(testNow)
	cases := map[string]struct {
		reason series.Reason
		part   string
		bad    func(remotewrite.Encoder)
	}{
		"a name twice":       {series.ReasonDuplicateLabel, `bad{z="a", z="b"}: label "z" stands twice`, func(e remotewrite.Encoder) { one(e, 9, "__name__", "bad", "z", "a", "z", "b") }},
		"a name twice, afar": {series.ReasonDuplicateLabel, `label "b" stands twice`, func(e remotewrite.Encoder) { one(e, 9, "__name__", "bad", "b", "1", "a", "2", "b", "3") }},
		"no metric name":     {series.ReasonMissingName, "no metric name", func(e remotewrite.Encoder) { one(e, 9, "a", "1") }},
		"an empty name":      {series.ReasonMissingName, "no metric name", func(e remotewrite.Encoder) { one(e, 9, "__name__", "", "a", "1") }},
		"two metric names":   {series.ReasonDuplicateLabel, `label "__name__" stands twice`, func(e remotewrite.Encoder) { one(e, 9, "__name__", "bad", "__name__", "worse") }},
		"no labels at all":   {series.ReasonMissingName, "no metric name", func(e remotewrite.Encoder) { one(e, 9) }},
		"an empty label name": {series.ReasonEmptyLabelName, `bad{`, func(e remotewrite.Encoder) {
			one(e, 9, "__name__", "bad", "", "1")
		}},
		"an empty label name and value": {series.ReasonEmptyLabelName, "has no name", func(e remotewrite.Encoder) { one(e, 9, "__name__", "bad", "", "") }},
		"a value that is not UTF-8":     {series.ReasonInvalidUTF8, `bad{}: the value "\xff\xfe" of label "a"`, func(e remotewrite.Encoder) { one(e, 9, "__name__", "bad", "a", "\xff\xfe") }},
		"a name that is not UTF-8":      {series.ReasonInvalidUTF8, `label name "\xff"`, func(e remotewrite.Encoder) { one(e, 9, "__name__", "bad", "\xff", "1") }},
		"a metric name that is not UTF-8": {series.ReasonInvalidUTF8, `of label "__name__"`, func(e remotewrite.Encoder) {
			one(e, 9, "__name__", "\xff")
		}},
		"a value of 100 KiB": {series.ReasonLabelTooLong, `bad{}: the value of label "a" has 102400 bytes, at most 8192`, func(e remotewrite.Encoder) {
			one(e, 9, "__name__", "bad", "a", strings.Repeat("x", 100<<10))
		}},
		"an upper-case label too long, before the name": {series.ReasonLabelTooLong, `bad{}: the value of label "UUID"`, func(e remotewrite.Encoder) {
			one(e, 9, "UUID", strings.Repeat("x", 9000), "__name__", "bad")
		}},
		"a name of 2 KiB": {series.ReasonLabelTooLong, "has 2048 bytes, at most 1024", func(e remotewrite.Encoder) {
			one(e, 9, "__name__", "bad", strings.Repeat("n", 2048), "1")
		}},
		"10,000 labels": {series.ReasonTooManyLabels, "more than 256 labels", func(e remotewrite.Encoder) {
			pairs := []string{"__name__", "bad"}
			for i := range 10_000 {
				pairs = append(pairs, fmt.Sprintf("l%05d", i), "x")
			}
			one(e, 9, pairs...)
		}},
		"a sample two hours ahead": {series.ReasonTooFarInFuture, "bad{}: timestamp 1796133600000 is in the future: 10m0s ahead is allowed", func(e remotewrite.Encoder) {
			e.Series(run("__name__", "bad"))
			e.Sample(0, now+7_200_000, 9)
		}},
		"nanoseconds":            {series.ReasonTooFarInFuture, "it looks like nanoseconds", at(now * 1_000_000)},
		"microseconds":           {series.ReasonTooFarInFuture, "it looks like microseconds", at(now * 1_000)},
		"seconds":                {series.ReasonTimestampInvalid, "is before 2000-01-01; it looks like seconds", at(now / 1_000)},
		"timestamp 0":            {series.ReasonTimestampInvalid, "timestamp 0 is before 2000-01-01", at(0)},
		"a negative timestamp":   {series.ReasonTimestampInvalid, "timestamp -1 is", at(-1)},
		"the largest timestamp":  {series.ReasonTooFarInFuture, "timestamp 9223372036854775807 is in the future", at(math.MaxInt64)},
		"the smallest timestamp": {series.ReasonTimestampInvalid, "timestamp -9223372036854775808", at(math.MinInt64)},
		"a histogram ahead of time": {series.ReasonTooFarInFuture, "bad{}: timestamp", func(e remotewrite.Encoder) {
			e.Series(run("__name__", "bad"))
			e.Histogram(series.Histogram{T: now + 7_200_000, H: &histogram.Histogram{}})
		}},
		"a histogram without its buckets": {series.ReasonInvalidHistogram, "bad{}: native histogram at timestamp", func(e remotewrite.Encoder) {
			e.Series(run("__name__", "bad"))
			e.Histogram(series.Histogram{T: now, H: &histogram.Histogram{Count: 5, PositiveSpans: []histogram.Span{{Length: 3}}, PositiveBuckets: []int64{1}}})
		}},
		"a histogram of an unknown schema": {series.ReasonInvalidHistogram, "bad{}: native histogram", func(e remotewrite.Encoder) {
			e.Series(run("__name__", "bad"))
			e.Histogram(series.Histogram{T: now, FH: &histogram.FloatHistogram{Schema: 99}})
		}},
		"a histogram with an unknown hint": {series.ReasonInvalidHistogram, "counter reset hint 9 is unknown", func(e remotewrite.Encoder) {
			e.Series(run("__name__", "bad"))
			e.Histogram(series.Histogram{T: now, H: &histogram.Histogram{CounterResetHint: 9}})
		}},
		"a conflict, found by the appender": {series.ReasonConflict, "another value is stored", func(e remotewrite.Encoder) {
			e.Series(run("__name__", "bad"))
			e.Sample(0, now, 1)
			e.Sample(0, now, 2)
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, p remotewrite.Protocol) {
				for _, place := range []int{0, 25, 49} {
					r := newRig(t, nil)
					e := remotewrite.NewEncoder(p)
					for i := range 50 {
						if i == place {
							c.bad(e)
						} else {
							one(e, float64(i), "__name__", "ok", "i", fmt.Sprint(i))
						}
					}
					for range 2 { // a resend changes nothing
						want400(t, r.post(p, e.Snappy()), c.part, "refused 1 in all", string(c.reason)+": 1")
					}
					if got := r.discarded(c.reason); got != 2 || r.totalDiscarded() != 2 {
						t.Errorf("%v discarded for %s, %v in all, want 2", got, c.reason, r.totalDiscarded())
					}
					for i := range 50 {
						if i != place && r.store.values(fmt.Sprintf(`{__name__="ok", i="%d"}`, i))[now] != float64(i) {
							t.Errorf("series %d is not stored", i)
						}
					}
				}
			})
		})
	}
}

func at(t int64) func(remotewrite.Encoder) {
	return func(e remotewrite.Encoder) {
		e.Series(run("__name__", "bad"))
		e.Sample(0, t, 9)
	}
}

// RW-03, RW-17: a bad sample is refused alone within its series.
func TestBadSampleIsRefusedAloneInItsSeries(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		r := newRig(t, nil)
		now := ms(testNow)
		e := remotewrite.NewEncoder(p)
		e.Series(run("__name__", "x"))
		for i, at := range []int64{now - 2, now + 700_000, now - 1, 5, now, now + 600_000, now + 600_001} {
			e.Sample(0, at, float64(i))
		}
		want400(t, r.post(p, e.Snappy()), "too_far_in_future: 2", "timestamp_invalid: 1", "refused 3 in all")
		want := map[int64]float64{now - 2: 0, now - 1: 2, now: 4, now + 600_000: 5}
		if got := r.store.values(`{__name__="x"}`); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("stored %v, want %v", got, want)
		}
		if p == v2 {
			a := r.post(p, e.Snappy())
			if got := a.header.Get(samplesWritten); got != "4" {
				t.Errorf("%s samples are reported as written, want 4", got)
			}
		}
	})
}

// RW-04, RW-11: order and empty values make no other series.
func TestRawFormsOfASeriesAreOneSeries(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		r := newRig(t, nil)
		now := ms(testNow)
		forms := [][]string{
			{"UUID", "GPU-1", "__name__", "m", "b", "1"},
			{"__name__", "m", "UUID", "GPU-1", "b", "1"},
			{"b", "1", "UUID", "GPU-1", "__name__", "m"},
			{"UUID", "GPU-1", "__name__", "m", "b", "1", "pod", ""},
			{"namespace", "", "UUID", "GPU-1", "__name__", "m", "b", "1", "container", ""},
		}
		e := remotewrite.NewEncoder(p)
		for i, f := range forms {
			e.Series(run(f...))
			e.Sample(0, now+int64(i), float64(i))
		}
		want204(t, r.post(p, e.Snappy()))
		want204(t, r.post(p, e.Snappy()))
		if n := len(r.store.ids); n != 1 {
			t.Errorf("%d series, want 1: %v", n, r.store.ids)
		}
		if got := r.store.values(`{UUID="GPU-1", __name__="m", b="1"}`); len(got) != len(forms) {
			t.Errorf("stored %v", got)
		}
	})
}

func TestLabelMessageWithoutValueFieldIsAnEmptyValue(t *testing.T) {
	r := newRig(t, nil)
	var ts []byte
	ts = append(ts, run("__name__", "u")...)
	ts = append(ts, 0x0a, 5, 0x0a, 3, 'p', 'o', 'd') // as gogo encodes pod=""
	ts = append(ts, 0x12, 7, 0x10)
	ts = binary.AppendUvarint(ts, uint64(ms(testNow)))
	body := append([]byte{0x0a, byte(len(ts))}, ts...)
	want204(t, r.post(v1, snappy.Encode(nil, body)))
	if got := r.store.values(`{__name__="u"}`); len(got) != 1 {
		t.Errorf("stored %v", r.store.floats)
	}
}

func TestAnyUTF8NameIsStored(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		r := newRig(t, nil)
		e := remotewrite.NewEncoder(p)
		for _, n := range []string{"http.server.duration", "🌡", "a b", "nul\x00nul", "{}"} {
			one(e, 1, "__name__", n, "l.with.dots", "v\x00v", "ключ", "значение")
		}
		want204(t, r.post(p, e.Snappy()))
		if len(r.store.ids) != 5 {
			t.Errorf("%d series: %v", len(r.store.ids), r.store.ids)
		}
	})
}

// RW-08: what the headers say is what the body must be.
func TestNegotiation(t *testing.T) {
	bodies := map[remotewrite.Protocol][]byte{}
	for _, p := range []remotewrite.Protocol{v1, v2} {
		e := remotewrite.NewEncoder(p)
		one(e, 1, "__name__", "x")
		bodies[p] = e.Snappy()
	}
	for name, c := range map[string]struct {
		p        remotewrite.Protocol
		typ, enc string
		want     int
	}{
		"1.0, short":                     {v1, "application/x-protobuf", "snappy", 204},
		"1.0, named":                     {v1, "application/x-protobuf;proto=prometheus.WriteRequest", "snappy", 204},
		"1.0 without a type":             {v1, "", "snappy", 204},
		"2.0":                            {v2, "application/x-protobuf;proto=io.prometheus.write.v2.Request", "snappy", 204},
		"2.0 with spaces":                {v2, "application/x-protobuf ; proto=io.prometheus.write.v2.Request ", " snappy ", 204},
		"2.0 in upper case":              {v2, "APPLICATION/X-PROTOBUF; PROTO=IO.PROMETHEUS.WRITE.V2.REQUEST", "SNAPPY", 204},
		"2.0 quoted, with a charset":     {v2, `application/x-protobuf; charset=utf-8; proto="io.prometheus.write.v2.Request"`, "snappy", 204},
		"2.0 under the short type":       {v2, "application/x-protobuf", "snappy", 400},
		"2.0 under the name of 1.0":      {v2, "application/x-protobuf;proto=prometheus.WriteRequest", "snappy", 400},
		"2.0 without a type":             {v2, "", "snappy", 400},
		"1.0 under the name of 2.0":      {v1, "application/x-protobuf;proto=io.prometheus.write.v2.Request", "snappy", 400},
		"JSON":                           {v1, "application/json", "snappy", 415},
		"another message":                {v2, "application/x-protobuf;proto=io.prometheus.write.v3.Request", "snappy", 415},
		"an empty message name":          {v1, "application/x-protobuf;proto=", "snappy", 415},
		"two messages":                   {v1, "application/x-protobuf;proto=prometheus.WriteRequest;proto=io.prometheus.write.v2.Request", "snappy", 415},
		"text that is no type":           {v1, "protobuf", "snappy", 415},
		"gzip":                           {v1, "application/x-protobuf", "gzip", 415},
		"zstd":                           {v1, "application/x-protobuf", "zstd", 415},
		"identity":                       {v1, "application/x-protobuf", "identity", 415},
		"snappy twice":                   {v1, "application/x-protobuf", "snappy, snappy", 415},
		"no encoding, as Prometheus has": {v1, "application/x-protobuf", "", 204},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			a := r.post(c.p, bodies[c.p], "Content-Type", c.typ, "Content-Encoding", c.enc)
			if a.code != c.want {
				t.Errorf("status %d, want %d: %s", a.code, c.want, a.body)
			}
			if stored := len(r.store.floats); (stored == 1) != (c.want == 204) {
				t.Errorf("%d series stored with status %d", stored, a.code)
			}
		})
	}
}

func TestMethodsAndPaths(t *testing.T) {
	r := newRig(t, nil)
	e := remotewrite.NewEncoder(v1)
	one(e, 1, "__name__", "x")
	for _, path := range []string{"/api/v1/write", "/api/v1/push"} {
		if a := r.send("POST", path, v1, bytes.NewReader(e.Snappy())); a.code != 204 {
			t.Errorf("POST %s: %d %s", path, a.code, a.body)
		}
		for _, method := range []string{"GET", "PUT", "DELETE"} {
			if a := r.send(method, path, v1, nil); a.code != 405 || a.header.Get("Allow") != "POST" {
				t.Errorf("%s %s: %d, Allow %q", method, path, a.code, a.header.Get("Allow"))
			}
		}
	}
}

func TestTenants(t *testing.T) {
	r := newRig(t, nil)
	e := remotewrite.NewEncoder(v1)
	one(e, 1, "__name__", "x")
	want204(t, r.post(v1, e.Snappy()))
	want204(t, r.post(v1, e.Snappy(), "X-Scope-OrgID", "team-a"))
	want400(t, r.post(v1, e.Snappy(), "X-Scope-OrgID", "../../etc"), "X-Scope-OrgID")
	if len(r.store.floats) != 2 {
		t.Errorf("stored %v", r.store.floats)
	}
	strict := newRig(t, func(c *Config) { c.DefaultTenant = "" })
	want400(t, strict.post(v1, e.Snappy()), "header X-Scope-OrgID is required")
}

// RW-09: bodies that are broken or too large.
func TestBrokenAndLargeBodies(t *testing.T) {
	label40M := func() []byte {
		v := bytes.Repeat([]byte("v"), 40<<20)
		return snappy.Encode(nil, v)
	}
	one20M := func() []byte {
		e := remotewrite.NewEncoder(v1)
		one(e, 1, "__name__", "x", "a", strings.Repeat("v", 20<<20))
		one(e, 1, "__name__", "ok")
		return e.Snappy()
	}
	garbage := snappy.Encode(nil, []byte("this is no protobuf at all"))
	good := remotewrite.NewEncoder(v1)
	one(good, 1, "__name__", "ok")
	for name, c := range map[string]struct {
		body func() []byte
		want int
	}{
		"4 GiB declared in six bytes":   {func() []byte { return []byte{0xff, 0xff, 0xff, 0xff, 0x0f, 0x00} }, 400},
		"40 MiB decoded":                {label40M, 413},
		"a body of 17 MiB":              {func() []byte { return make([]byte, 17<<20) }, 413},
		"cut snappy":                    {func() []byte { return good.Snappy()[:8] }, 400},
		"an empty body":                 {func() []byte { return nil }, 400},
		"an empty request":              {func() []byte { return []byte{0} }, 204},
		"broken protobuf in snappy":     {func() []byte { return garbage }, 400},
		"a value of 20 MiB in a series": {one20M, 400},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			if a := r.post(v1, c.body()); a.code != c.want || len(a.body) > 2048 {
				t.Errorf("status %d, want %d: %s", a.code, c.want, a.body)
			}
			want204(t, r.post(v1, good.Snappy())) // no buffer was left poisoned
			if got := r.store.values(`{__name__="ok"}`); len(got) != 1 {
				t.Errorf("stored %v", got)
			}
		})
	}
	t.Run("200 MiB without a Content-Length", func(t *testing.T) {
		r := newRig(t, nil)
		sent := &counting{r: io.LimitReader(zeros{}, 200<<20)}
		req, _ := http.NewRequest("POST", r.server.URL+"/api/v1/write", sent)
		remotewrite.SetRequestHeaders(req.Header, v1)
		resp, err := r.server.Client().Do(req)
		if err == nil { // the server may hang up before the client has read the answer
			resp.Body.Close()
			if resp.StatusCode != 413 {
				t.Errorf("status %d, want 413", resp.StatusCode)
			}
		}
		want204(t, r.post(v1, good.Snappy()))
	})
	t.Run("a sender that hangs up", func(t *testing.T) {
		r := newRig(t, nil)
		req, _ := http.NewRequest("POST", r.server.URL+"/api/v1/write", io.MultiReader(bytes.NewReader(good.Snappy()), broken{}))
		req.ContentLength = 1000
		remotewrite.SetRequestHeaders(req.Header, v1)
		if resp, err := r.server.Client().Do(req); err == nil {
			resp.Body.Close()
		}
		want204(t, r.post(v1, good.Snappy()))
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrClosedPipe }

type counting struct {
	r io.Reader
	n int
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

// RW-09: 64 senders at once that declare, and send, as much as they may.
func TestParallelLargeRequestsStayWithinTheBound(t *testing.T) {
	const bound = 64 << 20
	r := newRig(t, func(c *Config) {
		c.MaxBodyBytes, c.MaxDecodedBytes, c.MaxRequestBytes = 4<<20, 8<<20, 20<<20
		c.MaxInflightBytes = bound
	})
	e := remotewrite.NewEncoder(v1)
	for i := range 20_000 {
		one(e, 1, "__name__", "m", "i", fmt.Sprint(i), "pad", strings.Repeat("p", 300))
	}
	body := bytes.Clone(e.Snappy())
	var peak, before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var wg sync.WaitGroup
	codes := make([]int, 64)
	for i := range codes {
		wg.Go(func() {
			a := r.post(v1, body)
			codes[i] = a.code
			if a.code == 503 && a.header.Get("Retry-After") != "5" {
				t.Errorf("503 with Retry-After %q", a.header.Get("Retry-After"))
			}
		})
	}
	wg.Wait()
	runtime.ReadMemStats(&peak)
	ok := 0
	for _, c := range codes {
		switch c {
		case 204:
			ok++
		case 503:
		default:
			t.Errorf("status %d", c)
		}
	}
	if ok == 0 {
		t.Error("no request went through")
	}
	// What is in use afterwards, garbage included, says how much was live at most.
	if grown := int64(peak.HeapSys) - int64(before.HeapSys); grown > 6*bound {
		t.Errorf("the heap grew by %d MiB, the bound is %d MiB", grown>>20, bound>>20)
	}
	t.Logf("%d of 64 accepted, heap grew by %d MiB", ok, (int64(peak.HeapSys)-int64(before.HeapSys))>>20)
	want204(t, r.post(v1, body))
}

// LM-02: passing limits say when to come back and cost nothing.
func TestRateLimit(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		r := newRig(t, func(c *Config) { c.SampleRate, c.SampleBurst = 10, 20 })
		e := remotewrite.NewEncoder(p)
		for i := range 100 { // more than the burst: it must be able to pass
			one(e, 1, "__name__", "x", "i", fmt.Sprint(i))
		}
		want204(t, r.post(p, e.Snappy()))
		a := r.post(p, []byte("not even decoded"))
		if a.code != 429 || a.header.Get("Retry-After") != "9" {
			t.Errorf("status %d, Retry-After %q: %s", a.code, a.header.Get("Retry-After"), a.body)
		}
		want204(t, r.post(p, e.Snappy(), "X-Scope-OrgID", "other")) // not another tenant's matter
		r.advance(8 * time.Second)
		if a := r.post(p, e.Snappy()); a.code != 429 {
			t.Errorf("after 8 s: status %d", a.code)
		}
		r.advance(time.Second)
		want204(t, r.post(p, e.Snappy()))
		if n := r.totalDiscarded(); n != 0 {
			t.Errorf("%v samples count as discarded, they can be sent again", n)
		}
	})
}

// LM-02: a fault of the appender is answered by its kind, and nothing is counted
// as refused that comes again.
func TestAppenderErrors(t *testing.T) {
	for kind, want := range map[series.Kind]int{
		series.Unavailable: 503, series.Limited: 429, series.Internal: 500, series.Invalid: 400, series.Corrupt: 500,
	} {
		t.Run(kind.String(), func(t *testing.T) {
			r := newRig(t, nil)
			r.store.fail = series.Errorf(kind, "append: the disk is full")
			e := remotewrite.NewEncoder(v2)
			one(e, 1, "__name__", "x")
			one(e, 1, "a", "no name")
			a := r.post(v2, e.Snappy())
			if a.code != want || !strings.Contains(a.body, "disk is full") || a.header.Get(samplesWritten) != "0" {
				t.Errorf("status %d, want %d; %s samples written: %s", a.code, want, a.header.Get(samplesWritten), a.body)
			}
			if again := a.header.Get("Retry-After"); (again != "") != (want == 503 || want == 429) {
				t.Errorf("status %d with Retry-After %q", a.code, again)
			}
			if n := r.totalDiscarded(); n != 0 {
				t.Errorf("%v samples count as discarded", n)
			}
			r.store.fail = nil
			want400(t, r.post(v2, e.Snappy()), "missing_metric_name: 1")
			if len(r.store.floats) != 1 || r.totalDiscarded() != 1 {
				t.Errorf("the resend stored %v, %v discarded", r.store.floats, r.totalDiscarded())
			}
		})
	}
}

// RW-13: exemplars never cost a sample, and good ones are kept.
func TestBadExemplarsAreDroppedAndCounted(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		now := ms(testNow)
		r := newRig(t, nil)
		e := remotewrite.NewEncoder(p)
		e.Series(run("__name__", "x"))
		for i := range 3 {
			e.Sample(0, now+int64(i), float64(i))
		}
		x := func(v float64, at int64, pairs ...string) {
			e.Exemplar(series.Exemplar{Labels: run(pairs...), T: at, V: v})
		}
		x(3, now+3, "trace_id", "abc")
		x(1, now+1, "trace_id", "") // an empty value is no label
		x(2, 0, "z", "1", "a", "2") // no time, unsorted
		x(101, now, "trace_id", strings.Repeat("x", 129))
		x(102, now, "a", "1", "a", "2")
		x(103, now, "", "1")
		x(104, now, "a", "\xff")
		x(105, now+3_600_000)
		x(106, 1234)
		a := r.post(p, e.Snappy())
		want204(t, a)
		if got := r.store.exemplars[`anonymous/{__name__="x"}`]; fmt.Sprint(got) != "[2 1 3]" {
			t.Errorf("exemplars %v are stored, want 2, 1, 3 in order of time", got)
		}
		if got := len(r.store.values(`{__name__="x"}`)); got != 3 {
			t.Errorf("%d samples are stored", got)
		}
		for reason, want := range map[series.Reason]float64{series.ReasonExemplarTooLong: 1, series.ReasonExemplarInvalid: 5} {
			if got := testutil.ToFloat64(r.metrics.discardedExemplars.WithLabelValues(string(reason))); got != want {
				t.Errorf("%v exemplars dropped for %s, want %v", got, reason, want)
			}
		}
		if p == v2 && a.header.Get(exemplarsWritten) != "3" {
			t.Errorf("%s exemplars are reported as written", a.header.Get(exemplarsWritten))
		}
		e.Reset()
		e.Series(run("__name__", "only_exemplars"))
		x(7, now, "trace_id", "abc")
		want204(t, r.post(p, e.Snappy()))
		if got := r.store.exemplars[`anonymous/{__name__="only_exemplars"}`]; len(got) != 1 {
			t.Errorf("exemplars of a series without samples: %v", got)
		}

		off := newRig(t, func(c *Config) { c.Exemplars = false })
		want204(t, off.post(p, e.Snappy()))
		if got := testutil.ToFloat64(off.metrics.discardedExemplars.WithLabelValues(string(series.ReasonExemplarsOff))); got != 1 {
			t.Errorf("%v exemplars dropped as they are off", got)
		}
	})
}

// RW-14: metadata alone is a good request, and its faults cost nothing else.
func TestMetadata(t *testing.T) {
	meta := func(family string, typ model.MetricType, help, unit string) series.Metadata {
		m := series.Metadata{Family: family}
		m.Type, m.Help, m.Unit = typ, help, unit
		return m
	}
	t.Run("500 entries of 1.0 and no series", func(t *testing.T) {
		r := newRig(t, nil)
		e := remotewrite.NewEncoder(v1)
		for i := range 500 {
			e.Metadata(meta(fmt.Sprintf("m%d", i), model.MetricTypeGauge, "Help.", "bytes"))
		}
		e.Metadata(meta("m1", model.MetricTypeCounter, "Another opinion.", ""))
		e.Metadata(meta("long", model.MetricTypeUnknown, strings.Repeat("é", 32<<10), ""))
		e.Metadata(meta("", model.MetricTypeGauge, "no family", ""))
		e.Metadata(meta("bad", model.MetricTypeGauge, "\xff", ""))
		want204(t, r.post(v1, e.Snappy()))
		if len(r.store.metadata) != 502 || r.store.metadata[meta("long", model.MetricTypeUnknown, strings.Repeat("é", 512), "")] != 1 {
			t.Errorf("%d entries stored", len(r.store.metadata))
		}
		if n := testutil.ToFloat64(r.metrics.discardedMetadata.WithLabelValues(string(series.ReasonMetadataInvalid))); n != 2 {
			t.Errorf("%v entries dropped, want 2", n)
		}
	})
	t.Run("of 2.0 series, by family, and again only after a while", func(t *testing.T) {
		r := newRig(t, nil)
		e := remotewrite.NewEncoder(v2)
		add := func(name string, typ model.MetricType, help string) {
			one(e, 1, "__name__", name, "a", "1")
			e.Metadata(meta("", typ, help, ""))
		}
		add("lat_bucket", model.MetricTypeHistogram, "Latency.")
		add("lat_sum", model.MetricTypeHistogram, "Latency.")
		add("lat_count", model.MetricTypeHistogram, "Latency.")
		add("native", model.MetricTypeHistogram, "Native.")
		add("s_sum", model.MetricTypeSummary, "Summary.")
		add("ops_total", model.MetricTypeCounter, "Operations.")
		add("gauge_count", model.MetricTypeGauge, "A gauge.")
		add("untyped", model.MetricTypeUnknown, "Help without a type.")
		add("silent", model.MetricTypeUnknown, "")
		e.Series(run("__name__", "never_sampled"))
		e.Metadata(meta("", model.MetricTypeGauge, "Never sampled.", ""))
		for range 3 {
			want204(t, r.post(v2, e.Snappy()))
		}
		want := []series.Metadata{
			meta("lat", model.MetricTypeHistogram, "Latency.", ""), meta("native", model.MetricTypeHistogram, "Native.", ""),
			meta("s", model.MetricTypeSummary, "Summary.", ""), meta("ops_total", model.MetricTypeCounter, "Operations.", ""),
			meta("gauge_count", model.MetricTypeGauge, "A gauge.", ""), meta("untyped", model.MetricTypeUnknown, "Help without a type.", ""),
			meta("never_sampled", model.MetricTypeGauge, "Never sampled.", ""),
		}
		for _, m := range want {
			if r.store.metadata[m] != 1 {
				t.Errorf("%+v handed on %d times, want once", m, r.store.metadata[m])
			}
		}
		if len(r.store.metadata) != len(want) {
			t.Errorf("stored %+v", r.store.metadata)
		}
		r.advance(time.Minute)
		want204(t, r.post(v2, e.Snappy()))
		if n := r.store.metadata[want[0]]; n != 2 {
			t.Errorf("after a minute it was handed on %d times, want 2", n)
		}
		r.advance(time.Minute)
		r.store.fail = series.Errorf(series.Unavailable, "restarting")
		r.post(v2, e.Snappy())
		r.store.fail = nil
		want204(t, r.post(v2, e.Snappy()))
		if n := r.store.metadata[want[0]]; n != 3 {
			t.Errorf("after a failed write it was handed on %d times, want 3", n)
		}
	})
	t.Run("more families than are remembered", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.MaxMetadataFamilies = 10 })
		e := remotewrite.NewEncoder(v2)
		for i := range 30 {
			one(e, 1, "__name__", fmt.Sprintf("m%d", i))
			e.Metadata(meta("", model.MetricTypeGauge, "Help.", ""))
		}
		want204(t, r.post(v2, e.Snappy()))
		if n := testutil.ToFloat64(r.metrics.discardedMetadata.WithLabelValues(string(series.ReasonMetadataLimit))); n != 20 || len(r.store.floats) != 30 {
			t.Errorf("%v entries dropped, %d series stored", n, len(r.store.floats))
		}
		e.Reset()
		for i := 10; i < 20; i++ {
			one(e, 1, "__name__", fmt.Sprintf("m%d", i))
			e.Metadata(meta("", model.MetricTypeGauge, "Help.", ""))
		}
		r.advance(2 * time.Hour) // nobody says the first ten any more
		want204(t, r.post(v2, e.Snappy()))
		if len(r.store.metadata) != 20 {
			t.Errorf("%d families stored in two hours, want 20", len(r.store.metadata))
		}
	})
}

// RW-15: entries of one series are handed on in the order of the request.
func TestSeriesTwiceInARequest(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		r := newRig(t, nil)
		now := ms(testNow)
		e := remotewrite.NewEncoder(p)
		put := func(labels series.LabelBytes, samples ...float64) {
			e.Series(labels)
			for i := 0; i < len(samples); i += 2 {
				e.Sample(0, now+int64(samples[i]), samples[i+1])
			}
		}
		put(run("__name__", "x", "a", "1"), 0, 1, 15, 2)
		put(run("a", "1", "__name__", "x"), 0, 1, 15, 3)
		put(run("__name__", "x", "a", "1"), -15, 0)
		want400(t, r.post(p, e.Snappy()), "conflicting_value: 1", "refused 1 in all")
		want := map[int64]float64{now - 15: 0, now: 1, now + 15: 2}
		if got := r.store.values(`{__name__="x", a="1"}`); fmt.Sprint(got) != fmt.Sprint(want) || len(r.store.order) != 3 {
			t.Errorf("stored %v, want %v; entries %v", got, want, r.store.order)
		}
	})
}

func TestFloatsAndHistogramsInOneSeries(t *testing.T) {
	now := ms(testNow)
	body := func(p remotewrite.Protocol) []byte {
		e := remotewrite.NewEncoder(p)
		e.Series(run("__name__", "mixed"))
		e.Sample(0, now, 1)
		e.Histogram(series.Histogram{T: now + 1, H: &histogram.Histogram{}})
		one(e, 2, "__name__", "ok")
		return e.Snappy()
	}
	r := newRig(t, nil)
	a := r.post(v2, body(v2))
	want400(t, a, "mixed{}: it has 1 floats and 1 histograms", "floats_and_histograms: 2")
	if a.header.Get(samplesWritten) != "1" || a.header.Get(histogramsWritten) != "0" || len(r.store.floats) != 1 {
		t.Errorf("stored %v, headers %v", r.store.floats, a.header)
	}
	r = newRig(t, nil)
	want204(t, r.post(v1, body(v1))) // 1.0 has no such rule
	if len(r.store.floats) != 2 || len(r.store.hists[`anonymous/{__name__="mixed"}`]) != 1 {
		t.Errorf("stored %v and %v", r.store.floats, r.store.hists)
	}
}

func TestStartTimestamps(t *testing.T) {
	now := ms(testNow)
	r := newRig(t, nil)
	e := remotewrite.NewEncoder(v2)
	for i, st := range []int64{0, now - 1000, now, now + 1, -1, 1_700_000_000, math.MaxInt64} {
		e.Series(run("__name__", "x", "i", fmt.Sprint(i)))
		e.Sample(st, now, 1)
	}
	want204(t, r.post(v2, e.Snappy())) // a bad start time does not cost its sample
	for i, want := range []int64{0, now - 1000, now, 0, 0, 0, 0} {
		if got := r.store.starts[fmt.Sprintf(`anonymous/{__name__="x", i="%d"}`, i)]; got != want {
			t.Errorf("series %d has start %d, want %d", i, got, want)
		}
	}
	if n := testutil.ToFloat64(r.metrics.droppedStarts); n != 4 {
		t.Errorf("%v start timestamps dropped, want 4", n)
	}
}

func TestHistogramsOfReservedResolutionsAreReduced(t *testing.T) {
	r := newRig(t, nil)
	e := remotewrite.NewEncoder(v2)
	e.Series(run("__name__", "x"))
	e.Histogram(series.Histogram{T: ms(testNow), H: &histogram.Histogram{Schema: 10, Count: 3, Sum: 3,
		PositiveSpans: []histogram.Span{{Offset: 0, Length: 3}}, PositiveBuckets: []int64{1, 0, 0}}})
	want204(t, r.post(v2, e.Snappy()))
	hs := r.store.hists[`anonymous/{__name__="x"}`]
	if len(hs) != 1 || hs[0].H.Schema != histogram.ExponentialSchemaMax || hs[0].H.Validate() != nil {
		t.Errorf("stored %+v", hs)
	}
}

// RW-18: a hash is never a series.
func TestEveryHashEqual(t *testing.T) {
	both(t, func(t *testing.T, p remotewrite.Protocol) {
		r := newRigHash(t, nil, func([]byte) uint64 { return 1 })
		e := remotewrite.NewEncoder(p)
		one(e, 1, "__name__", "m", "a", "bc")
		one(e, 2, "__name__", "m", "ab", "c")
		one(e, 3, "__name__", "ma", "b", "c")
		one(e, 4, "a", "no name")
		for i := range 100 {
			one(e, float64(i), "__name__", "n", "i", fmt.Sprint(i))
		}
		for range 3 {
			want400(t, r.post(p, e.Snappy()), "missing_metric_name: 1")
		}
		e.Reset()
		for i := 99; i >= 0; i-- { // in another order, so that predictions fail
			one(e, float64(i), "__name__", "n", "i", fmt.Sprint(i))
		}
		want204(t, r.post(p, e.Snappy()))
		now := ms(testNow)
		for key, want := range map[string]float64{`{__name__="m", a="bc"}`: 1, `{__name__="m", ab="c"}`: 2, `{__name__="ma", b="c"}`: 3, `{__name__="n", i="42"}`: 42} {
			if got := r.store.values(key); len(got) != 1 || got[now] != want {
				t.Errorf("%s has %v, want %v", key, got, want)
			}
		}
		if len(r.store.ids) != 103 {
			t.Errorf("%d series, want 103", len(r.store.ids))
		}
		if n := testutil.ToFloat64(r.metrics.hashed); n < 99 {
			t.Errorf("%v series were found by hash", n)
		}
	})
}

func TestReferencesAndLookups(t *testing.T) {
	r := newRig(t, nil)
	e := remotewrite.NewEncoder(v1)
	for i := range 100 {
		one(e, 1, "__name__", "n", "i", fmt.Sprint(i))
	}
	want204(t, r.post(v1, e.Snappy()))
	want204(t, r.post(v1, e.Snappy())) // memory checks the references that come back
	r.store.epoch = 8
	want204(t, r.post(v1, e.Snappy()))
	want204(t, r.post(v1, e.Snappy()))
	for name, want := range map[string]float64{"predicted": 3 * 99, "hashed": 3, "miss": 100} {
		c := map[string]float64{"predicted": testutil.ToFloat64(r.metrics.predicted), "hashed": testutil.ToFloat64(r.metrics.hashed), "miss": testutil.ToFloat64(r.metrics.missed)}
		if c[name] != want {
			t.Errorf("%v look-ups %s, want %v", c[name], name, want)
		}
	}
	if n := testutil.ToFloat64(r.metrics.received); n != 400 {
		t.Errorf("%v samples received", n)
	}
	r.advance(2 * time.Hour)
	if n := r.DropIdle(); n != 1 {
		t.Errorf("%d idle tenants dropped, want 1", n)
	}
	want204(t, r.post(v1, e.Snappy()))
	if n := testutil.ToFloat64(r.metrics.missed); n != 200 {
		t.Errorf("%v look-ups missed after the tenant was idle, want 200", n)
	}
}

func TestMoreTenantsThanAreRemembered(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxTenants = 3 })
	e := remotewrite.NewEncoder(v1)
	one(e, 1, "__name__", "x")
	for i := range 20 {
		r.advance(time.Second)
		want204(t, r.post(v1, e.Snappy(), "X-Scope-OrgID", fmt.Sprint("t", i)))
	}
	if n, _, _ := r.tenants.size(); n != 3 || len(r.store.floats) != 20 {
		t.Errorf("%d tenants are remembered, %d stored", n, len(r.store.floats))
	}
}

func TestConcurrentSendersOfTheSameAndOtherSeries(t *testing.T) {
	r := newRig(t, func(c *Config) { c.CacheSeries = 150 }) // evicts all the time
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			e := remotewrite.NewEncoder([]remotewrite.Protocol{v1, v2}[w%2])
			for round := range 30 {
				e.Reset()
				for i := range 100 {
					one(e, float64(i), "__name__", "n", "i", fmt.Sprint((i*(1+w%3)+round)%300))
					e.Series(run("i", fmt.Sprint(i), "__name__", "own", "w", fmt.Sprint(w)))
					e.Sample(0, ms(testNow)+int64(round), float64(i))
				}
				if a := r.post([]remotewrite.Protocol{v1, v2}[w%2], e.Snappy()); a.code != 204 && !strings.Contains(a.body, "conflicting_value") {
					t.Errorf("status %d: %s", a.code, a.body)
				}
			}
		})
	}
	wg.Wait()
	if n := len(r.store.ids); n != 300+8*100 {
		t.Errorf("%d series, want 1100", n)
	}
	_, entries, _ := r.tenants.size()
	if entries > 150 {
		t.Errorf("the cache holds %d series, its bound is 150", entries)
	}
}

func TestConfigValidate(t *testing.T) {
	if c := DefaultConfig(); c.Validate() != nil {
		t.Error(c.Validate())
	}
	for name, change := range map[string]func(*Config){
		"no body":                    func(c *Config) { c.MaxBodyBytes = 0 },
		"a rate without a burst":     func(c *Config) { c.SampleRate = 5 },
		"a bad default tenant":       func(c *Config) { c.DefaultTenant = "a/b" },
		"less in flight than needed": func(c *Config) { c.MaxInflightBytes = 1 << 20 },
		"a request below its body":   func(c *Config) { c.MaxRequestBytes = 1 << 20 },
		"an empty attribute":         func(c *Config) { c.PromoteResourceAttributes = []string{""} },
	} {
		c := DefaultConfig()
		change(&c)
		if err := c.Validate(); series.KindOf(err) != series.Invalid {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func FuzzPush(f *testing.F) {
	for _, p := range []remotewrite.Protocol{v1, v2} {
		e := remotewrite.NewEncoder(p)
		one(e, 1, "__name__", "x", "a", "1")
		one(e, 1, "b", "no name", "a", "", "", "")
		e.Exemplar(series.Exemplar{Labels: run("a", "b"), T: ms(testNow)})
		e.Series(run("__name__", "h"))
		e.Histogram(series.Histogram{T: ms(testNow), H: &histogram.Histogram{}})
		f.Add(e.AppendBody(nil), p == v2)
	}
	f.Fuzz(func(t *testing.T, body []byte, two bool) {
		p := v1
		if two {
			p = v2
		}
		d := bare(t, newMemory(t), DefaultConfig())
		for range 2 { // unknown label sets, then known ones
			var res series.Appended
			if err := d.Push(t.Context(), "anonymous", p, body, &res); err != nil && series.KindOf(err) != series.Invalid {
				t.Fatalf("kind %s: %v", series.KindOf(err), err)
			}
			if n := res.Refused.Total(); n > 0 && !utf8.ValidString(res.Refused.Error()) {
				t.Fatalf("refused as %q", res.Refused.Error())
			}
		}
		if n := testutil.ToFloat64(d.metrics.unaccounted); n != 0 {
			t.Fatalf("%v samples are unaccounted for", n)
		}
	})
}
