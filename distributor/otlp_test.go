package distributor

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/pmetric/pmetricotlp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/varvedb/varve/pkg/series"
)

const otlpPath = "/api/v1/otlp/v1/metrics"

// otlp builds an export of one resource and scope.
type otlp struct {
	md pmetric.Metrics
	sm pmetric.ScopeMetrics
}

func newOTLP() otlp {
	md := pmetric.NewMetrics()
	rm := md.ResourceMetrics().AppendEmpty()
	for k, v := range map[string]string{"service.name": "trainer", "service.instance.id": "i-1", "host.name": "node-a", "k8s.pod.name": "pod-1", "cloud.region": "eu"} {
		rm.Resource().Attributes().PutStr(k, v)
	}
	return otlp{md, rm.ScopeMetrics().AppendEmpty()}
}

func (o otlp) metric(name string) pmetric.Metric {
	m := o.sm.Metrics().AppendEmpty()
	m.SetName(name)
	return m
}

func (o otlp) gauge(name string, v float64, at time.Time) pmetric.NumberDataPoint {
	p := o.metric(name).SetEmptyGauge().DataPoints().AppendEmpty()
	p.SetDoubleValue(v)
	p.SetTimestamp(pcommon.NewTimestampFromTime(at))
	return p
}

func (o otlp) proto(t testing.TB) []byte {
	b, err := pmetricotlp.NewExportRequestFromMetrics(o.md).MarshalProto()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (o otlp) json(t testing.TB) []byte {
	b, err := pmetricotlp.NewExportRequestFromMetrics(o.md).MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (r *rig) export(body []byte, header ...string) answer {
	r.t.Helper()
	return r.send("POST", otlpPath, 0, bytes.NewReader(body), append([]string{"Content-Type", typeProtobuf}, header...)...)
}

// partial reads the partial success of a 200.
func partial(t *testing.T, a answer) (int64, string) {
	t.Helper()
	resp := pmetricotlp.NewExportResponse()
	unmarshal := resp.UnmarshalProto
	if a.header.Get("Content-Type") == typeJSON {
		unmarshal = resp.UnmarshalJSON
	}
	if err := unmarshal([]byte(a.body)); a.code != 200 || err != nil {
		t.Fatalf("status %d, %v: %q", a.code, err, a.body)
	}
	return resp.PartialSuccess().RejectedDataPoints(), resp.PartialSuccess().ErrorMessage()
}

func gzipped(t *testing.T, b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zstded(t *testing.T, b []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(b, nil)
}

func TestOTLPEncodings(t *testing.T) {
	o := newOTLP()
	o.gauge("gpu.util", 42, testNow)
	for name, c := range map[string]struct {
		body   []byte
		header []string
		want   int
	}{
		"protobuf":                  {o.proto(t), nil, 200},
		"protobuf, identity":        {o.proto(t), []string{"Content-Encoding", "identity"}, 200},
		"protobuf, gzip":            {gzipped(t, o.proto(t)), []string{"Content-Encoding", "gzip"}, 200},
		"protobuf, zstd":            {zstded(t, o.proto(t)), []string{"Content-Encoding", "ZSTD"}, 200},
		"JSON":                      {o.json(t), []string{"Content-Type", "application/json; charset=utf-8"}, 200},
		"JSON, gzip":                {gzipped(t, o.json(t)), []string{"Content-Type", "application/json", "Content-Encoding", "gzip"}, 200},
		"an empty export":           {nil, nil, 200},
		"JSON as protobuf":          {o.json(t), nil, 400},
		"protobuf as JSON":          {o.proto(t), []string{"Content-Type", "application/json"}, 400},
		"cut protobuf":              {o.proto(t)[:30], nil, 400},
		"plain as gzip":             {o.proto(t), []string{"Content-Encoding", "gzip"}, 400},
		"plain as zstd":             {o.proto(t), []string{"Content-Encoding", "zstd"}, 400},
		"cut gzip":                  {gzipped(t, o.proto(t))[:40], []string{"Content-Encoding", "gzip"}, 400},
		"text":                      {o.proto(t), []string{"Content-Type", "text/plain"}, 415},
		"no type":                   {o.proto(t), []string{"Content-Type", ""}, 415},
		"snappy":                    {o.proto(t), []string{"Content-Encoding", "snappy"}, 415},
		"a bad tenant":              {o.proto(t), []string{"X-Scope-OrgID", "a/b"}, 400},
		"a body of 17 MiB":          {make([]byte, 17<<20), nil, 413},
		"64 MiB in gzip":            {gzipped(t, make([]byte, 64<<20)), []string{"Content-Encoding", "gzip"}, 413},
		"64 MiB in zstd":            {zstded(t, make([]byte, 64<<20)), []string{"Content-Encoding", "zstd"}, 413},
		"1.2 million empty metrics": {manyMetrics(1_200_000), nil, 413},
		"a million of them, JSON":   {[]byte(`{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{}` + strings.Repeat(",{}", 1_000_000) + `]}]}]}`), []string{"Content-Type", "application/json"}, 413},
		"nested 5,000 deep":         {nested(5_000), nil, 400},
		"nested JSON":               {[]byte(`{"a":` + strings.Repeat("[", 100_000)), []string{"Content-Type", "application/json"}, 400},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			a := r.export(c.body, c.header...)
			if a.code != c.want {
				t.Fatalf("status %d, want %d: %q", a.code, c.want, a.body)
			}
			if c.want == 200 {
				if n, text := partial(t, a); n != 0 || text != "" {
					t.Errorf("%d rejected: %s", n, text)
				}
				if c.body != nil && len(r.store.values(`{__name__="gpu_util", host_name="node-a", instance="i-1", job="trainer", k8s_pod_name="pod-1"}`)) != 1 {
					t.Errorf("stored %v", r.store.floats)
				}
				return
			}
			var st status.Status
			var err error
			if a.header.Get("Content-Type") == typeProtobuf {
				err = proto.Unmarshal([]byte(a.body), &st)
			} else {
				err = protojson.Unmarshal([]byte(a.body), &st)
			}
			if err != nil || st.Code != int32(code.Code_INVALID_ARGUMENT) || st.Message == "" {
				t.Errorf("answer %q as %s: %v", a.body, a.header.Get("Content-Type"), err)
			}
			if asked := slices.Contains(c.header, "application/json"); asked != (a.header.Get("Content-Type") == typeJSON) && c.want != 415 {
				t.Errorf("answered as %s", a.header.Get("Content-Type"))
			}
		})
	}
}

// manyMetrics is an export of n empty metrics, two bytes each.
func manyMetrics(n int) []byte {
	return wrap(1, wrap(2, bytes.Repeat([]byte{0x12, 0}, n)))
}

// nested is an attribute of lists in lists.
func nested(depth int) []byte {
	var v []byte
	for range depth {
		v = wrap(5, wrap(1, v)) // AnyValue.array_value.values
	}
	return wrap(1, wrap(1, wrap(1, wrap(2, v)))) // resource.attributes.value
}

func wrap(field byte, content []byte) []byte {
	out := binary.AppendUvarint([]byte{field<<3 | 2}, uint64(len(content)))
	return append(out, content...)
}

func TestOTLPTranslation(t *testing.T) {
	r := newRig(t, nil)
	o := newOTLP()
	start := testNow.Add(-time.Hour)
	o.gauge("gpu.temp", 61, testNow).Attributes().PutStr("gpu.id", "0")

	sum := o.metric("requests")
	sum.SetDescription("Requests served.")
	sum.SetUnit("1")
	sum.SetEmptySum().SetIsMonotonic(true)
	sum.Sum().SetAggregationTemporality(pmetric.AggregationTemporalityCumulative)
	p := sum.Sum().DataPoints().AppendEmpty()
	p.SetIntValue(7)
	p.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
	p.SetStartTimestamp(pcommon.NewTimestampFromTime(start))
	x := p.Exemplars().AppendEmpty()
	x.SetDoubleValue(3)
	x.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
	x.SetTraceID([16]byte{1, 2, 3})
	p.Exemplars().AppendEmpty() // without a value: must cost nothing but itself

	h := o.metric("latency")
	h.SetUnit("s")
	h.SetEmptyHistogram().SetAggregationTemporality(pmetric.AggregationTemporalityCumulative)
	hp := h.Histogram().DataPoints().AppendEmpty()
	hp.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
	hp.ExplicitBounds().FromRaw([]float64{0.5, 1})
	hp.BucketCounts().FromRaw([]uint64{3, 2, 1})
	hp.SetCount(6)
	hp.SetSum(4)

	e := o.metric("size")
	e.SetEmptyExponentialHistogram().SetAggregationTemporality(pmetric.AggregationTemporalityCumulative)
	ep := e.ExponentialHistogram().DataPoints().AppendEmpty()
	ep.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
	ep.SetScale(1)
	ep.Positive().BucketCounts().FromRaw([]uint64{2, 0, 1})
	ep.SetCount(3)

	stale := o.gauge("gone", 0, testNow)
	stale.SetFlags(pmetric.DefaultDataPointFlags.WithNoRecordedValue(true))

	if n, text := partial(t, r.export(o.proto(t))); n != 0 {
		t.Fatalf("%d rejected: %s", n, text)
	}
	now := ms(testNow)
	with := func(name, more string) string {
		all := []string{`__name__="` + name + `"`, `host_name="node-a"`, `instance="i-1"`, `job="trainer"`, `k8s_pod_name="pod-1"`}
		if more != "" {
			all = append(all, more)
		}
		slices.Sort(all)
		return "{" + strings.Join(all, ", ") + "}"
	}
	for key, want := range map[string]float64{
		with("gpu_temp", `gpu_id="0"`):              61,
		with("requests_total", ""):                  7,
		with("latency_seconds_bucket", `le="0.5"`):  3,
		with("latency_seconds_bucket", `le="1"`):    5,
		with("latency_seconds_bucket", `le="+Inf"`): 6,
		with("latency_seconds_sum", ""):             4,
		with("latency_seconds_count", ""):           6,
		`{__name__="target_info", cloud_region="eu", host_name="node-a", instance="i-1", job="trainer", k8s_pod_name="pod-1"}`: 1,
	} {
		if got, ok := r.store.values(key)[now]; !ok || got != want {
			t.Errorf("%s is %v, want %v", key, got, want)
		}
	}
	if got := r.store.hists["anonymous/"+with("size", "")]; len(got) != 1 || got[0].H.Count != 3 {
		t.Errorf("native histograms %+v", got)
	}
	if got := r.store.starts["anonymous/"+with("requests_total", "")]; got != ms(start) {
		t.Errorf("start timestamp %d, want %d", got, ms(start))
	}
	if got := r.store.exemplars["anonymous/"+with("requests_total", "")]; fmt.Sprint(got) != "[3]" {
		t.Errorf("exemplars %v", got)
	}
	if got := r.store.floats["anonymous/"+with("gone", "")][now]; got != 0x7ff0000000000002 {
		t.Errorf("a point without a value is stored as %x, want the stale marker", got)
	}
	if n := testutil.ToFloat64(r.metrics.discardedExemplars.WithLabelValues(string(series.ReasonExemplarInvalid))); n != 1 {
		t.Errorf("%v exemplars dropped", n)
	}
	found := false
	for m := range r.store.metadata {
		found = found || m.Family == "requests_total" && m.Help == "Requests served." && m.Type == "counter"
	}
	if !found {
		t.Errorf("metadata %+v", r.store.metadata)
	}
	if len(r.store.floats) != 9 || r.totalDiscarded() != 0 {
		t.Errorf("%d series, %v discarded", len(r.store.floats), r.totalDiscarded())
	}
}

func TestOTLPRefusesDataPointsOneByOne(t *testing.T) {
	sum := func(o otlp, temporality pmetric.AggregationTemporality) {
		m := o.metric("bad")
		m.SetEmptySum().SetAggregationTemporality(temporality)
		for i := range 3 {
			p := m.Sum().DataPoints().AppendEmpty()
			p.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
			p.SetDoubleValue(float64(i))
			p.Attributes().PutInt("i", int64(i))
		}
	}
	for name, c := range map[string]struct {
		bad    func(otlp)
		n      int64
		reason series.Reason
		part   string
	}{
		"delta temporality":       {func(o otlp) { sum(o, pmetric.AggregationTemporalityDelta) }, 3, series.ReasonDeltaTemporality, `metric "bad": its aggregation temporality is Delta`},
		"unspecified temporality": {func(o otlp) { sum(o, pmetric.AggregationTemporalityUnspecified) }, 3, series.ReasonDeltaTemporality, "Unspecified"},
		"the future":              {func(o otlp) { o.gauge("bad", 1, testNow.Add(time.Hour)) }, 1, series.ReasonTooFarInFuture, "too far in the future"},
		"no timestamp":            {func(o otlp) { o.gauge("bad", 1, testNow).SetTimestamp(0) }, 1, series.ReasonTimestampInvalid, "before 2000"},
		"the largest timestamp":   {func(o otlp) { o.gauge("bad", 1, testNow).SetTimestamp(math.MaxUint64) }, 1, series.ReasonTooFarInFuture, "future"},
		"milliseconds":            {func(o otlp) { o.gauge("bad", 1, testNow).SetTimestamp(pcommon.Timestamp(ms(testNow))) }, 1, series.ReasonTimestampInvalid, "before 2000"},
		"no value": {func(o otlp) {
			p := o.metric("bad").SetEmptyGauge().DataPoints().AppendEmpty()
			p.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
		}, 1, series.ReasonUntranslatable, "has no value"},
		"a scale too coarse, between good points": {func(o otlp) {
			m := o.metric("bad")
			m.SetEmptyExponentialHistogram().SetAggregationTemporality(pmetric.AggregationTemporalityCumulative)
			for i, scale := range []int32{0, -10, 0} {
				p := m.ExponentialHistogram().DataPoints().AppendEmpty()
				p.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
				p.SetScale(scale)
				p.Attributes().PutInt("i", int64(i))
			}
		}, 1, series.ReasonUntranslatable, "Scale must be >= -4"},
		"an attribute without a name, between good points": {func(o otlp) {
			g := o.metric("bad").SetEmptyGauge()
			for _, k := range []string{"a", "", "b", "___"} {
				p := g.DataPoints().AppendEmpty()
				p.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
				p.SetDoubleValue(1)
				p.Attributes().PutStr(k, "x")
			}
		}, 2, series.ReasonUntranslatable, "label name is empty"},
		"a value that is not UTF-8": {func(o otlp) { o.gauge("bad", 1, testNow).Attributes().PutStr("a", "\xff") }, 1, series.ReasonInvalidUTF8, "bad"},
		"a histogram that does not add up": {func(o otlp) {
			m := o.metric("bad")
			m.SetEmptyExponentialHistogram().SetAggregationTemporality(pmetric.AggregationTemporalityCumulative)
			p := m.ExponentialHistogram().DataPoints().AppendEmpty()
			p.SetTimestamp(pcommon.NewTimestampFromTime(testNow))
			p.Positive().BucketCounts().FromRaw([]uint64{5, 5})
			p.SetCount(1)
		}, 1, series.ReasonInvalidHistogram, "bad"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			o := newOTLP()
			o.gauge("before", 1, testNow)
			c.bad(o)
			o.gauge("after", 2, testNow)
			total := int64(o.md.DataPointCount())
			n, text := partial(t, r.export(o.proto(t)))
			if n != c.n || !strings.Contains(text, c.part) || !strings.Contains(text, fmt.Sprintf("%s: %d", c.reason, c.n)) {
				t.Errorf("%d rejected, want %d: %s", n, c.n, text)
			}
			if got := r.discarded(c.reason); got != float64(c.n) || r.totalDiscarded() != got {
				t.Errorf("%v discarded for %s, %v in all, want %d", got, c.reason, r.totalDiscarded(), c.n)
			}
			stored := int64(-1) // less target_info
			for _, s := range r.store.floats {
				stored += int64(len(s))
			}
			for _, h := range r.store.hists {
				stored += int64(len(h))
			}
			if stored != total-c.n {
				t.Errorf("%d data points stored, want %d: %v", stored, total-c.n, r.store.floats)
			}
			if received := testutil.ToFloat64(r.metrics.received); received != float64(total+1) {
				t.Errorf("%v samples received, want %d", received, total+1)
			}
		})
	}
}

func TestOTLPTargetInfoIsBounded(t *testing.T) {
	r := newRig(t, nil)
	o := newOTLP()
	o.gauge("old", 1, time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)) // five million target_infos from here
	o.gauge("new", 2, testNow)
	if n, text := partial(t, r.export(o.proto(t))); n != 0 {
		t.Errorf("%d rejected: %s", n, text)
	}
	for _, name := range []string{"old", "new"} {
		if len(r.store.values(`{__name__="`+name+`", host_name="node-a", instance="i-1", job="trainer", k8s_pod_name="pod-1"}`)) != 1 {
			t.Errorf("%s is not stored", name)
		}
	}
	if n := testutil.ToFloat64(r.metrics.otlpWarnings.WithLabelValues("target_info")); n != 1 {
		t.Errorf("%v warnings about target_info, want 1", n)
	}
}

func TestOTLPErrors(t *testing.T) {
	o := newOTLP()
	o.gauge("x", 1, testNow)
	t.Run("an appender that is not available", func(t *testing.T) {
		r := newRig(t, nil)
		r.store.fail = series.Errorf(series.Unavailable, "starting")
		a := r.export(o.json(t), "Content-Type", "application/json")
		var st struct {
			Code    int
			Message string
		}
		if err := json.Unmarshal([]byte(a.body), &st); err != nil || a.code != 503 || a.header.Get("Retry-After") == "" || st.Code != int(code.Code_UNAVAILABLE) || st.Message != "starting" {
			t.Errorf("status %d, %v: %s", a.code, err, a.body)
		}
	})
	t.Run("a rate that is used up", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.SampleRate, c.SampleBurst = 1, 1 })
		if a := r.export(o.proto(t)); a.code != 200 {
			t.Errorf("status %d", a.code)
		}
		if a := r.export(o.proto(t)); a.code != 429 || a.header.Get("Retry-After") != "2" {
			t.Errorf("status %d, Retry-After %q", a.code, a.header.Get("Retry-After"))
		}
	})
	t.Run("another method", func(t *testing.T) {
		r := newRig(t, nil)
		if a := r.send("GET", "/otlp/v1/metrics", 0, nil); a.code != 405 || a.header.Get("Allow") != "POST" {
			t.Errorf("status %d", a.code)
		}
	})
	t.Run("promoted attributes are a setting", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.PromoteResourceAttributes = []string{"cloud.region"} })
		if a := r.send("POST", "/otlp/v1/metrics", 0, bytes.NewReader(o.proto(t)), "Content-Type", typeProtobuf); a.code != 200 {
			t.Errorf("status %d", a.code)
		}
		if len(r.store.values(`{__name__="x", cloud_region="eu", instance="i-1", job="trainer"}`)) != 1 {
			t.Errorf("stored %v", r.store.floats)
		}
	})
}

// The real SDK's exporter, with and without compression, and what it makes of a
// partial success.
func TestOTLPFromTheSDK(t *testing.T) {
	for _, compression := range []otlpmetrichttp.Compression{otlpmetrichttp.NoCompression, otlpmetrichttp.GzipCompression} {
		r := newRig(t, nil)
		r.mu.Lock()
		r.clock = time.Now() // the SDK takes its own time
		r.mu.Unlock()
		ctx := context.Background()
		exporter, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(r.server.URL+otlpPath), otlpmetrichttp.WithCompression(compression),
			otlpmetrichttp.WithRetry(otlpmetrichttp.RetryConfig{Enabled: false}))
		if err != nil {
			t.Fatal(err)
		}
		reader := sdkmetric.NewPeriodicReader(exporter, sdkmetric.WithInterval(time.Hour))
		provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader),
			sdkmetric.WithResource(resource.NewSchemaless(attribute.String("service.name", "trainer"), attribute.String("host.name", "node-b"))),
			sdkmetric.WithView(sdkmetric.NewView(sdkmetric.Instrument{Name: "native"}, sdkmetric.Stream{Aggregation: sdkmetric.AggregationBase2ExponentialHistogram{MaxSize: 160, MaxScale: 20}})))
		meter := provider.Meter("test")
		steps, _ := meter.Int64Counter("steps", metric.WithUnit("{step}"), metric.WithDescription("Steps done."))
		temp, _ := meter.Float64Gauge("temperature", metric.WithUnit("Cel"))
		wait, _ := meter.Float64Histogram("wait", metric.WithUnit("s"))
		native, _ := meter.Float64Histogram("native")
		for i := range 10 {
			steps.Add(ctx, int64(i), metric.WithAttributes(attribute.String("job.kind", "train")))
			wait.Record(ctx, float64(i))
			native.Record(ctx, float64(i+1))
		}
		temp.Record(ctx, 71.5)
		if err := provider.ForceFlush(ctx); err != nil {
			t.Fatalf("%v: %v", compression, err)
		}
		if n := len(r.store.hists[`anonymous/{__name__="native", host_name="node-b", job="trainer"}`]); n != 1 {
			t.Errorf("%d native histograms: %v", n, r.store.hists)
		}
		for key, want := range map[string]float64{
			`{__name__="steps_total", host_name="node-b", job="trainer", job_kind="train"}`: 45,
			`{__name__="temperature_celsius", host_name="node-b", job="trainer"}`:           71.5,
			`{__name__="wait_seconds_count", host_name="node-b", job="trainer"}`:            10,
		} {
			got := r.store.values(key)
			if len(got) != 1 {
				t.Errorf("%s has %v, want one sample of %v", key, got, want)
			}
			for _, v := range got {
				if v != want {
					t.Errorf("%s is %v, want %v", key, v, want)
				}
			}
		}
		r.advance(-2 * time.Hour) // now the exporter seems to live in the future
		temp.Record(ctx, 72)
		if err := provider.ForceFlush(ctx); err == nil || !strings.Contains(err.Error(), "too far in the future") {
			t.Errorf("the exporter reports %v for refused data points", err)
		}
		if err := provider.Shutdown(ctx); err != nil && !strings.Contains(err.Error(), "future") {
			t.Error(err)
		}
	}
}

func FuzzOTLP(f *testing.F) {
	o := newOTLP()
	o.gauge("x", 1, testNow)
	f.Add(o.proto(f), false)
	f.Add(o.json(f), true)
	f.Add(nested(3), false)
	f.Fuzz(func(t *testing.T, body []byte, asJSON bool) {
		d := newBare(t, newMemory(t), func(c *Config) { c.MaxDecodedBytes, c.MaxBodyBytes, c.MaxRequestBytes = 1<<20, 1<<20, 8<<20 })
		media := typeProtobuf
		if asJSON {
			media = typeJSON
		}
		q := d.begin()
		defer d.end(q)
		export, err := d.parseOTLP(q, media, body)
		if err == nil {
			tenant := d.tenants.get("anonymous", testNow)
			if err = d.translate(context.Background(), tenant, q, export.Metrics()); err == nil {
				var res series.Appended
				err = d.commit(context.Background(), tenant, q, &res)
			}
		}
		if err != nil && series.KindOf(err) != series.Invalid {
			t.Fatalf("kind %s: %v", series.KindOf(err), err)
		}
	})
}
