package remotewrite

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"testing"

	"github.com/golang/snappy"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"
	"github.com/prometheus/prometheus/tsdb/tsdbutil"

	"github.com/varvedb/varve/pkg/series"
)

func labelBytes(pairs ...string) series.LabelBytes {
	return series.AppendLabels(nil, labels.FromStrings(pairs...))
}

// sampleBatch has every kind of thing that a series can carry.
func sampleBatch() *series.Batch {
	b := &series.Batch{
		Samples: []series.Sample{
			{ST: 1, T: 1000, V: 1.5}, {ST: 1, T: 2000, V: 0},
			{T: 3000, V: math.Inf(-1)}, {T: 0, V: 7},
		},
		Histograms: []series.Histogram{
			{ST: 500, T: 1000, H: tsdbutil.GenerateTestHistogram(3)},
			{T: 2000, FH: tsdbutil.GenerateTestFloatHistogram(4)},
			{T: 3000, H: tsdbutil.GenerateTestCustomBucketsHistogram(2)},
			{T: 4000, FH: tsdbutil.GenerateTestGaugeFloatHistogram(5)},
		},
		Exemplars: []series.Exemplar{
			{Labels: labelBytes("trace_id", "abc"), T: 999, V: 0.25},
			{V: 2},
		},
	}
	long := string(bytes.Repeat([]byte("x"), 300))
	b.Entries = []series.Entry{
		{Labels: labelBytes("__name__", "up", "UUID", "GPU-1", "pod", long), Samples: series.Range{From: 0, To: 2}, Exemplars: series.Range{From: 0, To: 2}},
		{Labels: labelBytes("__name__", "up", "UUID", "GPU-2", "pod", long), Samples: series.Range{From: 2, To: 3}},
		{Labels: labelBytes("__name__", "h"), Histograms: series.Range{From: 0, To: 4}},
		{Labels: labelBytes("__name__", "up", "a", "b", "pod", "x"), Samples: series.Range{From: 3, To: 4}},
	}
	return b
}

func TestV1RoundTrip(t *testing.T) {
	b := sampleBatch()
	b.Metadata = []series.Metadata{{Family: "up", Metadata: metadata.Metadata{Type: model.MetricTypeGauge, Unit: "s", Help: "is it up?"}}}
	e := NewEncoder(Protocol1)
	for round := range 3 { // a reused encoder gives the same bytes
		e.Reset()
		EncodeBatch(e, b)
		body, err := snappy.Decode(nil, e.Snappy())
		if err != nil {
			t.Fatalf("round %d: decompress: %v", round, err)
		}
		var got prompb.WriteRequest
		if err := got.Unmarshal(body); err != nil {
			t.Fatalf("round %d: unmarshal: %v", round, err)
		}
		if again, _ := got.Marshal(); !bytes.Equal(again, body) {
			t.Errorf("round %d: official marshalling of the same message differs from ours", round)
		}
		checkV1(t, b, &got)
		if want := (prompb.MetricMetadata{Type: prompb.MetricMetadata_GAUGE, MetricFamilyName: "up", Unit: "s", Help: "is it up?"}); len(got.Metadata) != 1 || got.Metadata[0].String() != want.String() {
			t.Errorf("metadata: got %v, want %v", got.Metadata, want)
		}
	}
}

func checkV1(t *testing.T, b *series.Batch, got *prompb.WriteRequest) {
	t.Helper()
	if len(got.Timeseries) != len(b.Entries) {
		t.Fatalf("got %d series, want %d", len(got.Timeseries), len(b.Entries))
	}
	var sb labels.ScratchBuilder
	for i, ts := range got.Timeseries {
		entry := &b.Entries[i]
		if g, w := ts.ToLabels(&sb, nil), entry.Labels.Labels(&sb); !labels.Equal(g, w) {
			t.Errorf("series %d: labels %s, want %s", i, g, w)
		}
		for k, s := range b.SamplesOf(entry) {
			if g := ts.Samples[k]; g.Timestamp != s.T || g.Value != s.V {
				t.Errorf("series %d sample %d: got %v, want %v", i, k, g, s)
			}
		}
		for k, h := range b.HistogramsOf(entry) {
			g := ts.Histograms[k]
			switch {
			case h.H != nil:
				if !sameHistogram(g.ToIntHistogram(), h.H) {
					t.Errorf("series %d histogram %d: got %v, want %v", i, k, g.ToIntHistogram(), h.H)
				}
			case !sameFloatHistogram(g.ToFloatHistogram(), h.FH):
				t.Errorf("series %d histogram %d: got %v, want %v", i, k, g.ToFloatHistogram(), h.FH)
			}
		}
		for k, x := range b.ExemplarsOf(entry) {
			g := ts.Exemplars[k].ToExemplar(&sb, nil)
			if g.Ts != x.T || g.Value != x.V || !labels.Equal(g.Labels, x.Labels.Labels(&sb)) {
				t.Errorf("series %d exemplar %d: got %v, want %v", i, k, g, x)
			}
		}
	}
}

// Equals does not compare the reset hint.
func sameHistogram(a, b *histogram.Histogram) bool {
	return a.Equals(b) && a.CounterResetHint == b.CounterResetHint
}

func sameFloatHistogram(a, b *histogram.FloatHistogram) bool {
	return a.Equals(b) && a.CounterResetHint == b.CounterResetHint
}

func TestV2RoundTrip(t *testing.T) {
	b := sampleBatch()
	e := NewEncoder(Protocol2)
	for round := range 3 {
		e.Reset()
		EncodeBatch(e, b)
		e.Metadata(series.Metadata{Family: "up", Metadata: metadata.Metadata{Type: model.MetricTypeCounter, Help: "is it up?"}})
		body, err := snappy.Decode(nil, e.Snappy())
		if err != nil {
			t.Fatalf("round %d: decompress: %v", round, err)
		}
		var got writev2.Request
		if err := got.Unmarshal(body); err != nil {
			t.Fatalf("round %d: unmarshal: %v", round, err)
		}
		if got.Symbols[0] != "" {
			t.Errorf("round %d: symbols start with %q, want the empty string", round, got.Symbols[0])
		}
		seen := map[string]bool{}
		for _, s := range got.Symbols {
			if seen[s] {
				t.Errorf("round %d: symbol %q stands twice", round, s)
			}
			seen[s] = true
		}
		checkV2(t, b, &got)
		last := got.Timeseries[len(got.Timeseries)-1]
		m, err := last.ToMetadata(got.Symbols)
		if err != nil || m.Type != model.MetricTypeCounter || m.Help != "is it up?" || m.Unit != "" {
			t.Errorf("round %d: metadata %v, error %v", round, m, err)
		}
	}
}

func checkV2(t *testing.T, b *series.Batch, got *writev2.Request) {
	t.Helper()
	if len(got.Timeseries) != len(b.Entries) {
		t.Fatalf("got %d series, want %d", len(got.Timeseries), len(b.Entries))
	}
	var sb labels.ScratchBuilder
	for i, ts := range got.Timeseries {
		entry := &b.Entries[i]
		g, err := ts.ToLabels(&sb, got.Symbols)
		if w := entry.Labels.Labels(&sb); err != nil || !labels.Equal(g, w) {
			t.Errorf("series %d: labels %s (%v), want %s", i, g, err, w)
		}
		for k, s := range b.SamplesOf(entry) {
			if g := ts.Samples[k]; g.Timestamp != s.T || g.Value != s.V || g.StartTimestamp != s.ST {
				t.Errorf("series %d sample %d: got %v, want %v", i, k, g, s)
			}
		}
		for k, h := range b.HistogramsOf(entry) {
			g := ts.Histograms[k]
			if g.StartTimestamp != h.ST || g.Timestamp != h.T {
				t.Errorf("series %d histogram %d: times %d %d, want %d %d", i, k, g.StartTimestamp, g.Timestamp, h.ST, h.T)
			}
			switch {
			case h.H != nil:
				if !sameHistogram(g.ToIntHistogram(), h.H) {
					t.Errorf("series %d histogram %d: got %v, want %v", i, k, g.ToIntHistogram(), h.H)
				}
			case !sameFloatHistogram(g.ToFloatHistogram(), h.FH):
				t.Errorf("series %d histogram %d: got %v, want %v", i, k, g.ToFloatHistogram(), h.FH)
			}
		}
		for k, x := range b.ExemplarsOf(entry) {
			g, err := ts.Exemplars[k].ToExemplar(&sb, got.Symbols)
			if err != nil || g.Ts != x.T || g.Value != x.V || !labels.Equal(g.Labels, x.Labels.Labels(&sb)) {
				t.Errorf("series %d exemplar %d: got %v (%v), want %v", i, k, g, err, x)
			}
		}
	}
}

func TestBitsOfValuesSurvive(t *testing.T) {
	cases := map[string]uint64{
		"a stale marker":     0x7ff0000000000002,
		"the ordinary NaN":   0x7ff8000000000001,
		"negative zero":      0x8000000000000000,
		"zero":               0,
		"the smallest value": 1,
	}
	for name, bits := range cases {
		v := math.Float64frombits(bits)
		for _, p := range []Protocol{Protocol1, Protocol2} {
			e := NewEncoder(p)
			e.Series(labelBytes("__name__", "m"))
			e.Sample(0, -5, v)
			body := e.AppendBody(nil)
			var got float64
			var ts int64
			if p == Protocol1 {
				var r prompb.WriteRequest
				if err := r.Unmarshal(body); err != nil {
					t.Fatal(err)
				}
				got, ts = r.Timeseries[0].Samples[0].Value, r.Timeseries[0].Samples[0].Timestamp
			} else {
				var r writev2.Request
				if err := r.Unmarshal(body); err != nil {
					t.Fatal(err)
				}
				got, ts = r.Timeseries[0].Samples[0].Value, r.Timeseries[0].Samples[0].Timestamp
			}
			if math.Float64bits(got) != bits || ts != -5 {
				t.Errorf("%s, protocol %d: got bits %x at %d, want %x at -5", name, p, math.Float64bits(got), ts, bits)
			}
		}
	}
}

func TestRequestHeaders(t *testing.T) {
	h := http.Header{}
	SetRequestHeaders(h, Protocol2)
	want := http.Header{
		"Content-Encoding":                  {"snappy"},
		"Content-Type":                      {"application/x-protobuf;proto=io.prometheus.write.v2.Request"},
		"X-Prometheus-Remote-Write-Version": {"2.0.0"},
	}
	if !reflect.DeepEqual(h, want) {
		t.Errorf("2.0: got %v, want %v", h, want)
	}
	SetRequestHeaders(h, Protocol1)
	want.Set("Content-Type", "application/x-protobuf")
	want.Set("X-Prometheus-Remote-Write-Version", "0.1.0")
	if !reflect.DeepEqual(h, want) {
		t.Errorf("1.0: got %v, want %v", h, want)
	}
}

func TestReuseAllocatesNothing(t *testing.T) {
	ls := make([]series.LabelBytes, 200)
	for i := range ls {
		ls[i] = labelBytes("__name__", fmt.Sprintf("m%d", i%20), "UUID", fmt.Sprintf("GPU-%d", i/20), "cluster", "c")
	}
	for _, p := range []Protocol{Protocol1, Protocol2} {
		e := NewEncoder(p)
		fill := func() {
			e.Reset()
			for i, l := range ls {
				e.Series(l)
				e.Sample(0, int64(i), float64(i))
			}
			e.Snappy()
		}
		fill()
		if n := testing.AllocsPerRun(10, fill); n > 0 {
			t.Errorf("protocol %d: %v allocations per request, want none", p, n)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	const n = 2000
	ls := make([]series.LabelBytes, n)
	for i := range ls {
		ls[i] = labelBytes("__name__", fmt.Sprintf("DCGM_FI_DEV_METRIC_%d", i%147), "UUID", fmt.Sprintf("GPU-%036d", i/147),
			"cluster", "c1", "device", fmt.Sprintf("nvidia%d", i/147%8), "gpu", fmt.Sprint(i/147%8), "hostname", "node-0001",
			"instance", "10.0.0.1:9400", "job", "dcgm-exporter", "modelName", "NVIDIA H100 80GB HBM3", "namespace", "team-a",
			"pod", "llm-pretrain-7b-worker-12", "prometheus", "monitoring/k8s")
	}
	for _, p := range []Protocol{Protocol1, Protocol2} {
		b.Run(fmt.Sprintf("protocol=%d", p), func(b *testing.B) {
			e := NewEncoder(p)
			b.ReportAllocs()
			for range b.N {
				e.Reset()
				for i, l := range ls {
					e.Series(l)
					e.Sample(0, 1700000000000, float64(i))
				}
				e.Snappy()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/sample")
		})
	}
}
