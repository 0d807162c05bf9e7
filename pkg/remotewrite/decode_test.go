package remotewrite

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/golang/snappy"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"

	"github.com/varvedb/varve/pkg/series"
)

// wide are limits that no test reaches by accident.
var wide = Limits{Run: 1 << 20, Memory: 1 << 28, Resolved: 1 << 28}

// plain is a request as plain Go values, whichever decoder made it.
type plain struct {
	Series   []plainSeries
	Metadata []series.Metadata
}

type plainSeries struct {
	Labels    [][2]string
	Samples   []series.Sample
	Hists     []string
	Exemplars []string
	Meta      series.Metadata
}

// scan reads a request with the cursor.
func scan(p Protocol, body []byte, limits Limits) (plain, error) {
	var c Cursor
	var b series.Batch
	c.Reset(p, body, &b, limits)
	var out plain
	for c.Next() {
		s := c.Series()
		ps := plainSeries{Meta: plainMetadata(&s.Metadata)}
		var err error
		if ps.Labels, err = pairs(s.Labels); err != nil {
			return out, err
		}
		ps.Samples = append(ps.Samples, b.Samples[s.Samples.From:s.Samples.To]...)
		for _, h := range b.Histograms[s.Histograms.From:s.Histograms.To] {
			ps.Hists = append(ps.Hists, describeHistogram(h))
		}
		for range s.BadHistograms {
			ps.Hists = append(ps.Hists, "bad")
		}
		for _, x := range b.Exemplars[s.Exemplars.From:s.Exemplars.To] {
			l, err := pairs(x.Labels)
			if err != nil {
				return out, err
			}
			ps.Exemplars = append(ps.Exemplars, describeExemplar(l, x.V, x.T))
		}
		out.Series = append(out.Series, ps)
	}
	for _, m := range c.Metadata() {
		out.Metadata = append(out.Metadata, plainMetadata(&m))
	}
	return out, c.Err()
}

func plainMetadata(m *Metadata) series.Metadata {
	out := series.Metadata{Family: string(m.Family)}
	out.Type, out.Help, out.Unit = m.Type, string(m.Help), string(m.Unit)
	return out
}

func pairs(run []byte) ([][2]string, error) {
	var out [][2]string
	for len(run) > 0 {
		name, value, rest, err := NextLabel(run)
		if err != nil {
			return nil, err
		}
		out = append(out, [2]string{string(name), string(value)})
		run = rest
	}
	return out, nil
}

func describeHistogram(h series.Histogram) string {
	if h.FH != nil {
		return fmt.Sprintf("%d %d %#v", h.ST, h.T, *h.FH)
	}
	return fmt.Sprintf("%d %d %#v", h.ST, h.T, *h.H)
}

func describeExemplar(l [][2]string, v float64, t int64) string {
	return fmt.Sprintf("%q %x %d", l, math.Float64bits(v), t)
}

// referenceV1 reads a request with Prometheus' generated decoder.
func referenceV1(body []byte) (plain, error) {
	var req prompb.WriteRequest
	if err := req.Unmarshal(body); err != nil {
		return plain{}, err
	}
	var out plain
	for _, ts := range req.Timeseries {
		s := plainSeries{}
		for _, l := range ts.Labels {
			s.Labels = append(s.Labels, [2]string{l.Name, l.Value})
		}
		for _, x := range ts.Samples {
			s.Samples = append(s.Samples, series.Sample{T: x.Timestamp, V: x.Value})
		}
		for _, h := range ts.Histograms {
			_, zf := h.ZeroCount.(*prompb.Histogram_ZeroCountFloat)
			_, zi := h.ZeroCount.(*prompb.Histogram_ZeroCountInt)
			switch float := h.IsFloatHistogram(); {
			case h.ResetHint < 0 || h.ResetHint > 3,
				float && (zi || len(h.PositiveDeltas)+len(h.NegativeDeltas) > 0),
				!float && (zf || len(h.PositiveCounts)+len(h.NegativeCounts) > 0):
				s.Hists = append(s.Hists, "bad")
			case float:
				s.Hists = append(s.Hists, describeHistogram(series.Histogram{T: h.Timestamp, FH: h.ToFloatHistogram()}))
			default:
				s.Hists = append(s.Hists, describeHistogram(series.Histogram{T: h.Timestamp, H: h.ToIntHistogram()}))
			}
		}
		for _, x := range ts.Exemplars {
			var l [][2]string
			for _, p := range x.Labels {
				l = append(l, [2]string{p.Name, p.Value})
			}
			s.Exemplars = append(s.Exemplars, describeExemplar(l, x.Value, x.Timestamp))
		}
		out.Series = append(out.Series, badLast(s))
	}
	for _, m := range req.Metadata {
		x := series.Metadata{Family: m.MetricFamilyName}
		x.Type, x.Help, x.Unit = metricType(uint64(m.Type)), m.Help, m.Unit
		out.Metadata = append(out.Metadata, x)
	}
	return out, nil
}

// badLast puts histograms that were not appended last, where scan puts them.
func badLast(s plainSeries) plainSeries {
	var good, bad []string
	for _, h := range s.Hists {
		if h == "bad" {
			bad = append(bad, h)
		} else {
			good = append(good, h)
		}
	}
	s.Hists = append(good, bad...)
	return s
}

// referenceV2 is referenceV1 for 2.0. Errors are those of the generated decoder
// and of the references.
func referenceV2(body []byte) (plain, error) {
	var req writev2.Request
	if err := req.Unmarshal(body); err != nil {
		return plain{}, err
	}
	if len(body) > 0 && (len(req.Symbols) == 0 || req.Symbols[0] != "") {
		return plain{}, errors.New("first symbol")
	}
	labels := func(refs []uint32) ([][2]string, error) {
		if len(refs)%2 != 0 {
			return nil, errors.New("odd references")
		}
		var l [][2]string
		for i := 0; i < len(refs); i += 2 {
			if int(max(refs[i], refs[i+1])) >= len(req.Symbols) {
				return nil, errors.New("reference out of range")
			}
			l = append(l, [2]string{req.Symbols[refs[i]], req.Symbols[refs[i+1]]})
		}
		return l, nil
	}
	var out plain
	for _, ts := range req.Timeseries {
		var s plainSeries
		var err error
		if s.Labels, err = labels(ts.LabelsRefs); err != nil {
			return out, err
		}
		for _, x := range ts.Samples {
			s.Samples = append(s.Samples, series.Sample{ST: x.StartTimestamp, T: x.Timestamp, V: x.Value})
		}
		for _, h := range ts.Histograms {
			_, zf := h.ZeroCount.(*writev2.Histogram_ZeroCountFloat)
			_, zi := h.ZeroCount.(*writev2.Histogram_ZeroCountInt)
			switch float := h.IsFloatHistogram(); {
			case h.ResetHint < 0 || h.ResetHint > 3,
				float && (zi || len(h.PositiveDeltas)+len(h.NegativeDeltas) > 0),
				!float && (zf || len(h.PositiveCounts)+len(h.NegativeCounts) > 0):
				s.Hists = append(s.Hists, "bad")
			case float:
				s.Hists = append(s.Hists, describeHistogram(series.Histogram{ST: h.StartTimestamp, T: h.Timestamp, FH: h.ToFloatHistogram()}))
			default:
				s.Hists = append(s.Hists, describeHistogram(series.Histogram{ST: h.StartTimestamp, T: h.Timestamp, H: h.ToIntHistogram()}))
			}
		}
		for _, x := range ts.Exemplars {
			l, err := labels(x.LabelsRefs)
			if err != nil {
				return out, err
			}
			s.Exemplars = append(s.Exemplars, describeExemplar(l, x.Value, x.Timestamp))
		}
		m, err := ts.ToMetadata(req.Symbols)
		if err != nil {
			return out, err
		}
		s.Meta.Metadata = m
		out.Series = append(out.Series, badLast(s))
	}
	return out, nil
}

// agree fails the test unless the cursor and the reference say the same about
// body. NaN values are compared bit by bit, as text.
func agree(t *testing.T, p Protocol, body []byte) {
	t.Helper()
	got, err := scan(p, body, wide)
	reference := referenceV1
	if p == Protocol2 {
		reference = referenceV2
	}
	want, wantErr := reference(body)
	switch {
	case wantErr != nil && err == nil:
		// The generated decoder reads the reserved fields' neighbours alike; what it
		// finds broken must be broken for the cursor too.
		t.Fatalf("cursor accepts what the reference refuses: %v\nbody %x", wantErr, body)
	case wantErr == nil && err != nil:
		if !errors.Is(err, errStrict) && !strings.Contains(err.Error(), "belongs to") {
			t.Fatalf("cursor refuses what the reference accepts: %v\nbody %x", err, body)
		}
	case err == nil:
		if g, w := text(got), text(want); g != w {
			t.Fatalf("body %x\ngot  %s\nwant %s", body, g, w)
		}
	}
	if err != nil && series.KindOf(err) != series.Invalid {
		t.Fatalf("kind of %v is %s", err, series.KindOf(err))
	}
}

func text(p plain) string {
	var b strings.Builder
	for _, s := range p.Series {
		fmt.Fprintf(&b, "labels %q samples", s.Labels)
		for _, x := range s.Samples {
			fmt.Fprintf(&b, " %d/%d/%x", x.ST, x.T, math.Float64bits(x.V))
		}
		fmt.Fprintf(&b, " hists %v exemplars %v meta %+v\n", s.Hists, s.Exemplars, s.Meta)
	}
	for _, m := range p.Metadata {
		fmt.Fprintf(&b, "metadata %+v\n", m)
	}
	return b.String()
}

func intHistogram() *histogram.Histogram {
	return &histogram.Histogram{
		Count: 12, ZeroCount: 2, ZeroThreshold: 0.001, Sum: 18.4, Schema: 1,
		PositiveSpans: []histogram.Span{{Offset: 0, Length: 2}, {Offset: 1, Length: 2}}, PositiveBuckets: []int64{1, 1, -1, 0},
		NegativeSpans: []histogram.Span{{Offset: 0, Length: 2}, {Offset: 1, Length: 2}}, NegativeBuckets: []int64{1, 1, -1, 0},
	}
}

func floatHistogram() *histogram.FloatHistogram {
	return &histogram.FloatHistogram{
		Count: 9.5, ZeroCount: 2.5, Sum: 18.4, Schema: 0, CounterResetHint: histogram.GaugeType,
		PositiveSpans: []histogram.Span{{Offset: -2, Length: 2}}, PositiveBuckets: []float64{3, 4},
	}
}

func customHistogram() *histogram.Histogram {
	return &histogram.Histogram{
		Count: 5, Sum: 18.4, Schema: histogram.CustomBucketsSchema, CustomValues: []float64{0.5, 1, 5},
		PositiveSpans: []histogram.Span{{Offset: 0, Length: 3}}, PositiveBuckets: []int64{1, 0, 2},
	}
}

// rich is a request with everything in it.
func rich(p Protocol) []byte {
	e := NewEncoder(p)
	dcgm := series.AppendLabel(series.AppendLabel(nil, "UUID", "GPU-1"), "__name__", "DCGM_FI_DEV_GPU_UTIL")
	e.Series(dcgm)
	e.Sample(1_700_000_000_000, 1_700_000_015_000, 42)
	e.Sample(0, 1_700_000_030_000, math.Float64frombits(0x7ff0000000000002))
	e.Exemplar(series.Exemplar{Labels: series.AppendLabel(nil, "trace_id", "abc"), T: 1_700_000_015_000, V: 1.5})
	e.Exemplar(series.Exemplar{V: 0})
	if p == Protocol2 {
		m := series.Metadata{}
		m.Type, m.Help, m.Unit = model.MetricTypeGauge, "GPU utilization (in %).", "percent"
		e.Metadata(m)
	}
	e.Series(series.AppendLabel(nil, "__name__", "latency"))
	e.Histogram(series.Histogram{T: 1_700_000_015_000, H: intHistogram()})
	e.Histogram(series.Histogram{ST: 1, T: 1_700_000_030_000, FH: floatHistogram()})
	e.Histogram(series.Histogram{T: 1_700_000_045_000, H: customHistogram()})
	e.Series(nil)
	e.Sample(0, -5, math.Inf(-1))
	if p == Protocol1 {
		m := series.Metadata{Family: "latency"}
		m.Type, m.Help, m.Unit = model.MetricTypeHistogram, "How long.", "seconds"
		e.Metadata(m)
	}
	return e.AppendBody(nil)
}

// field appends a protobuf field with bytes as content.
func field(dst []byte, number int, content []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(number)<<3|wireBytes)
	dst = binary.AppendUvarint(dst, uint64(len(content)))
	return append(dst, content...)
}

func TestCursorReadsWhatSendersWrite(t *testing.T) {
	for _, p := range []Protocol{Protocol1, Protocol2} {
		body := rich(p)
		agree(t, p, body)
		got, err := scan(p, body, wide)
		if err != nil || len(got.Series) != 3 || len(got.Series[1].Hists) != 3 || len(got.Series[0].Exemplars) != 2 {
			t.Errorf("protocol %d: %v\n%s", p, err, text(got))
		}
	}
}

func TestCursorYieldsRawBytesWhereTheyLie(t *testing.T) {
	labels := series.AppendLabel(series.AppendLabel(nil, "__name__", "m"), "a", "1")
	e := NewEncoder(Protocol1)
	e.Series(labels)
	e.Sample(0, 1, 2)
	body := e.AppendBody(nil)
	var c Cursor
	var b series.Batch
	c.Reset(Protocol1, body, &b, wide)
	if !c.Next() || !bytes.Equal(c.Series().Labels, labels) {
		t.Fatalf("labels %q, want %q", c.Series().Labels, labels)
	}
	if i := bytes.Index(body, labels); &c.Series().Labels[0] != &body[i] {
		t.Error("the labels were copied")
	}
	e2 := NewEncoder(Protocol2)
	e2.Series(labels)
	e2.Sample(0, 1, 2)
	c.Reset(Protocol2, e2.AppendBody(nil), &b, wide)
	if !c.Next() || !bytes.Equal(c.Series().Labels, labels) {
		t.Errorf("2.0 gathers %q, 1.0 sends %q", c.Series().Labels, labels)
	}
}

func TestCursorTakesFieldsInAnyOrderAndForm(t *testing.T) {
	label := field(nil, 1, field(field(nil, 1, []byte("__name__")), 2, []byte("m")))
	late := field(nil, 1, field(field(nil, 2, []byte("1")), 1, []byte("a")))
	noValue := field(nil, 1, field(nil, 1, []byte("pod")))
	sample := []byte{0x12, 0x0c, 0x10, 0x85, 0x01, 0x09, 0, 0, 0, 0, 0, 0, 0x45, 0x40}
	unknown := append(field(nil, 99, []byte("x")), 0xa3, 0x06, 0x08, 0x01, 0xa4, 0x06) // a group 100
	longTag := append([]byte{0x8a, 0x00}, late[1:]...)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, ts := range map[string][]byte{
		"labels after the samples":             join(sample, label, late),
		"labels before and after":              join(label, sample, late),
		"a label without a value":              join(label, noValue, sample),
		"unknown fields and groups everywhere": join(unknown, label, unknown, sample, unknown),
		"a tag that is not minimal":            join(label, longTag, sample),
		"no labels":                            sample,
		"nothing":                              nil,
	} {
		body := join(unknown, field(nil, 1, ts), unknown)
		t.Run(name, func(t *testing.T) {
			agree(t, Protocol1, body)
			if _, err := scan(Protocol1, body, wide); err != nil {
				t.Error(err)
			}
		})
	}
	symbols := join(field(nil, 4, nil), field(nil, 4, []byte("__name__")), field(nil, 4, []byte("m")), field(nil, 4, []byte("h")))
	refs := field(nil, 1, []byte{1, 2})
	loose := []byte{0x08, 1, 0x08, 2}
	meta := field(field(nil, 5, []byte{0x08, 2}), 5, []byte{0x18, 3})
	for name, body := range map[string][]byte{
		"packed references":               join(symbols, field(nil, 5, join(refs, sample))),
		"unpacked references":             join(symbols, field(nil, 5, join(loose, sample))),
		"packed and unpacked ones":        join(symbols, field(nil, 5, join(refs, sample, loose))),
		"symbols after the series":        join(field(nil, 5, join(refs, sample)), symbols),
		"symbols on both sides":           join(symbols[:2], field(nil, 5, join(refs, sample)), symbols[2:]),
		"metadata in two parts":           join(symbols, field(nil, 5, join(meta, refs, sample))),
		"unknown fields everywhere":       join(unknown, symbols, unknown, field(nil, 5, join(unknown, refs, unknown, sample, unknown))),
		"a series without references":     join(symbols, field(nil, 5, sample)),
		"a type that is not known":        join(symbols, field(nil, 5, join(field(nil, 5, []byte{0x08, 99}), refs, sample))),
		"an exemplar before references":   join(symbols, field(nil, 5, join(field(nil, 4, field(nil, 1, []byte{3, 2})), loose, sample))),
		"an exemplar between references":  join(symbols, field(nil, 5, join(loose, field(nil, 4, loose), loose, sample))),
		"the highest reference":           join(symbols, field(nil, 5, field(nil, 1, []byte{1, 3}))),
		"symbols and no series":           symbols,
		"a reference of more than 32 bit": join(symbols, field(nil, 5, []byte{0x08, 0x81, 0x80, 0x80, 0x80, 0x10, 0x08, 2})),
	} {
		t.Run(name, func(t *testing.T) {
			agree(t, Protocol2, body)
			if _, err := scan(Protocol2, body, wide); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCursorNamesWhatIsBroken(t *testing.T) {
	good1, good2 := rich(Protocol1), rich(Protocol2)
	symbols := bytes.Join([][]byte{field(nil, 4, nil), field(nil, 4, []byte("__name__")), field(nil, 4, []byte("m"))}, nil)
	for name, c := range map[string]struct {
		p    Protocol
		body []byte
		want string
	}{
		"2.0 labelled 1.0":                 {Protocol1, good2, "belongs to remote write 2.0"},
		"1.0 labelled 2.0":                 {Protocol2, good1, "belongs to remote write 1.0"},
		"1.0 metadata labelled 2.0":        {Protocol2, field(nil, 3, nil), "belongs to remote write 1.0"},
		"a truncated series":               {Protocol1, good1[:20], "at byte 1: the message ends within a field"},
		"a label with wire type varint":    {Protocol1, field(nil, 1, []byte{0x08, 1}), "at byte 2: field 1, of a series, has wire type 0"},
		"a sample with wire type varint":   {Protocol1, field(nil, 1, field(nil, 2, []byte{0x08, 1})), "at byte 4: field 1, of a sample, has wire type 0"},
		"a varint without an end":          {Protocol1, bytes.Repeat([]byte{0xff}, 12), "above 64 bits"},
		"field number zero":                {Protocol1, []byte{0x02, 0x00}, "field number out of range"},
		"an end group alone":               {Protocol1, []byte{0x54}, "a group ends"},
		"a group without an end":           {Protocol1, []byte{0x53}, "ends within a field"},
		"wire type 7":                      {Protocol1, []byte{0x57}, "unknown wire type"},
		"no symbols":                       {Protocol2, field(nil, 5, nil), "no symbols"},
		"a first symbol that is not empty": {Protocol2, field(nil, 4, []byte("a")), "the first symbol is not the empty string"},
		"an odd number of references":      {Protocol2, append(symbols[:len(symbols):len(symbols)], field(nil, 5, field(nil, 1, []byte{1, 2, 1}))...), "3 references"},
		"a reference out of range":         {Protocol2, append(symbols[:len(symbols):len(symbols)], field(nil, 5, field(nil, 1, []byte{1, 3}))...), "label references 1 and 3, there are 3 symbols"},
		"an exemplar's reference":          {Protocol2, append(symbols[:len(symbols):len(symbols)], field(nil, 5, field(nil, 4, field(nil, 1, []byte{9, 9})))...), "label references 9 and 9"},
		"a metadata reference":             {Protocol2, append(symbols[:len(symbols):len(symbols)], field(nil, 5, field(nil, 5, []byte{0x18, 7}))...), "metadata references 7 and 0"},
		"a broken histogram":               {Protocol1, field(nil, 1, field(nil, 4, []byte{0x08})), "native histogram"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := scan(c.p, c.body, wide)
			if err == nil || !strings.Contains(err.Error(), c.want) || series.KindOf(err) != series.Invalid {
				t.Errorf("error %v of kind %s, want %q", err, series.KindOf(err), c.want)
			}
		})
	}
}

func TestCursorNotesHistogramsThatWouldLoseSomething(t *testing.T) {
	marshal := func(h prompb.Histogram) []byte {
		b, err := h.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, c := range map[string]struct {
		h    prompb.Histogram
		want string
	}{
		"an unknown reset hint":       {prompb.Histogram{ResetHint: 7, Timestamp: 5}, "counter reset hint 7 is unknown, at timestamp 5"},
		"float buckets of integers":   {prompb.Histogram{PositiveCounts: []float64{1}}, "an integer histogram has float buckets"},
		"integer buckets of floats":   {prompb.Histogram{Count: &prompb.Histogram_CountFloat{CountFloat: 1}, NegativeDeltas: []int64{1}}, "a float histogram has integer buckets"},
		"an integer zero of floats":   {prompb.Histogram{Count: &prompb.Histogram_CountFloat{CountFloat: 1}, ZeroCount: &prompb.Histogram_ZeroCountInt{ZeroCountInt: 1}}, "a float histogram has integer buckets"},
		"a float zero bucket of ints": {prompb.Histogram{ZeroCount: &prompb.Histogram_ZeroCountFloat{ZeroCountFloat: 1}}, "an integer histogram has float buckets"},
	} {
		t.Run(name, func(t *testing.T) {
			var cur Cursor
			var b series.Batch
			cur.Reset(Protocol1, field(nil, 1, field(field(nil, 4, marshal(c.h)), 4, marshal(prompb.Histogram{Timestamp: 9}))), &b, wide)
			if !cur.Next() {
				t.Fatal(cur.Err())
			}
			s := cur.Series()
			if s.BadHistograms != 1 || !strings.Contains(s.HistogramFault, c.want) || s.Histograms.Len() != 1 {
				t.Errorf("%d bad: %q; %d good; want %q", s.BadHistograms, s.HistogramFault, s.Histograms.Len(), c.want)
			}
		})
	}
}

func TestCursorStaysWithinItsLimits(t *testing.T) {
	many := func(number int, part []byte) []byte { // a series of 200,000 empty parts
		return field(nil, 1, bytes.Repeat(field(nil, number, part), 200_000))
	}
	long := bytes.Repeat([]byte("v"), 64<<10)
	greedy := bytes.Join([][]byte{field(nil, 4, nil), field(nil, 4, long)}, nil)
	for range 20_000 { // each series of ten bytes names 256 KiB
		greedy = append(greedy, field(nil, 5, field(nil, 1, []byte{1, 1, 1, 1}))...)
	}
	one := append(field(field(nil, 4, nil), 4, long), field(nil, 5, field(nil, 1, bytes.Repeat([]byte{1}, 100_000)))...)
	for name, c := range map[string]struct {
		p    Protocol
		body []byte
	}{
		"empty samples":                   {Protocol1, many(2, nil)},
		"empty histograms":                {Protocol1, many(4, nil)},
		"empty exemplars":                 {Protocol1, many(3, nil)},
		"empty series":                    {Protocol1, bytes.Repeat(field(nil, 1, nil), 200_000)},
		"empty metadata":                  {Protocol1, bytes.Repeat(field(nil, 3, nil), 200_000)},
		"empty symbols":                   {Protocol2, bytes.Repeat(field(nil, 4, nil), 500_000)},
		"symbols resolved over and over":  {Protocol2, greedy},
		"one series of one long symbol":   {Protocol2, one},
		"exemplars of one long symbol":    {Protocol2, append(field(field(nil, 4, nil), 4, long), field(nil, 5, bytes.Repeat(field(nil, 4, field(nil, 1, []byte{1, 1})), 1000))...)},
		"labels gathered one by one":      {Protocol1, field(nil, 1, append(field(nil, 2, nil), bytes.Repeat(field(nil, 1, nil), 500_000)...))},
		"exemplar labels gathered":        {Protocol1, field(nil, 1, field(nil, 3, append([]byte{0x18, 1}, bytes.Repeat(field(nil, 1, nil), 500_000)...)))},
		"references, unused, four to one": {Protocol2, append(field(nil, 4, nil), field(nil, 5, field(nil, 1, bytes.Repeat([]byte{0}, 2_000_000)))...)},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			limits := Limits{Run: 1 << 20, Memory: 2 << 20, Resolved: 8 << 20, Grow: func(n int) error { asked += n; return nil }}
			_, err := scan(c.p, c.body, limits)
			if name == "one series of one long symbol" {
				if err != nil {
					t.Errorf("gathering is to stop quietly: %v", err)
				}
				return
			}
			if !errors.Is(err, ErrTooLarge) || series.KindOf(err) != series.Invalid {
				t.Errorf("error %v, want one that is ErrTooLarge", err)
			}
			if asked > limits.Memory+growStep {
				t.Errorf("%d bytes were asked for, %d are allowed", asked, limits.Memory)
			}
		})
	}
}

func TestCursorReturnsWhatGrowReturns(t *testing.T) {
	busy := series.Errorf(series.Unavailable, "busy")
	for _, p := range []Protocol{Protocol1, Protocol2} {
		_, err := scan(p, rich(p), Limits{Run: 1 << 20, Memory: 1 << 20, Resolved: 1 << 20, Grow: func(int) error { return busy }})
		if !errors.Is(err, busy) || series.KindOf(err) != series.Unavailable {
			t.Errorf("protocol %d: error %v, want %v", p, err, busy)
		}
	}
}

func TestCursorIsReusedWithoutAllocating(t *testing.T) {
	for _, p := range []Protocol{Protocol1, Protocol2} {
		body := floats(p, 500)
		var c Cursor
		var b series.Batch
		n := testing.AllocsPerRun(20, func() {
			b.Reset()
			c.Reset(p, body, &b, wide)
			for c.Next() {
			}
			c.Release()
		})
		if n != 0 || c.Err() != nil || len(b.Samples) != 500 {
			t.Errorf("protocol %d: %v allocations, %v, %d samples", p, n, c.Err(), len(b.Samples))
		}
	}
}

func TestDecompress(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789"), 100_000)
	framed := &bytes.Buffer{}
	w := snappy.NewBufferedWriter(framed)
	if _, err := w.Write(big); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	packed := snappy.Encode(nil, big)
	for name, c := range map[string]struct {
		body     []byte
		want     string
		tooLarge bool
	}{
		"a body of the size allowed":             {packed, "", false},
		"an empty message":                       {[]byte{0}, "", false},
		"4 GiB declared in six bytes":            {[]byte{0xff, 0xff, 0xff, 0xff, 0x0f, 0x00}, "which so few cannot hold", false},
		"more than 4 GiB declared":               {binary.AppendUvarint(nil, 1<<40), "header is broken", false},
		"one byte too many":                      {snappy.Encode(nil, append(big, 'x')), "at most 1000000 are allowed", true},
		"a cut body":                             {packed[:len(packed)-5], "broken", false},
		"half a body":                            {packed[:len(packed)/2], "which so few cannot hold", false},
		"a body with bytes behind its end":       {append(bytes.Clone(packed), 1), "broken", false},
		"the framing format":                     {framed.Bytes(), "framing format", false},
		"an empty body":                          {nil, "empty", false},
		"a header that does not end":             {[]byte{0x80}, "header is broken", false},
		"zstd":                                   {[]byte{0x28, 0xb5, 0x2f, 0xfd, 4, 0, 1, 2, 3}, "broken", false},
		"a size that two bytes more would allow": {[]byte{64, 0}, "broken", false},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decompress(nil, c.body, len(big))
			switch {
			case c.want == "" && err != nil:
				t.Error(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || series.KindOf(err) != series.Invalid || errors.Is(err, ErrTooLarge) != c.tooLarge):
				t.Errorf("error %v, want %q, too large %v", err, c.want, c.tooLarge)
			}
		})
	}
	buf := make([]byte, 0, len(big))
	out, err := Decompress(buf, packed, len(big))
	if err != nil || !bytes.Equal(out, big) || &out[0] != &buf[:1][0] {
		t.Errorf("decoding into a buffer that is large enough: %v, %d bytes", err, len(out))
	}
}

func FuzzDecompress(f *testing.F) {
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f, 0x00})
	f.Add(snappy.Encode(nil, []byte("hello hello hello hello")))
	f.Fuzz(func(t *testing.T, body []byte) {
		const most = 1 << 20
		out, err := Decompress(nil, body, most)
		want, wantErr := []byte(nil), errors.New("too large")
		if n, err := snappy.DecodedLen(body); err == nil && n <= most {
			want, wantErr = snappy.Decode(nil, body)
		}
		if (err == nil) != (wantErr == nil) || err == nil && !bytes.Equal(out, want) {
			t.Fatalf("got %d bytes, %v; want %d bytes, %v", len(out), err, len(want), wantErr)
		}
		if err != nil && series.KindOf(err) != series.Invalid {
			t.Fatalf("kind of %v is %s", err, series.KindOf(err))
		}
	})
}

func FuzzScanV1(f *testing.F) {
	f.Add(rich(Protocol1))
	f.Add(rich(Protocol2))
	f.Add(field(nil, 1, []byte{0x08, 1}))
	f.Fuzz(func(t *testing.T, body []byte) { agree(t, Protocol1, body) })
}

func FuzzScanV2(f *testing.F) {
	f.Add(rich(Protocol2))
	f.Add(rich(Protocol1))
	f.Add(append(field(nil, 4, nil), field(nil, 5, []byte{0x08, 0, 0x08, 0})...))
	f.Fuzz(func(t *testing.T, body []byte) { agree(t, Protocol2, body) })
}

// floats is a request of n series with a sample each, and labels like DCGM's.
func floats(p Protocol, n int) []byte {
	e := NewEncoder(p)
	for i := range n {
		var l series.LabelBytes
		for _, kv := range [][2]string{
			{"DCGM_FI_DRIVER_VERSION", "570.133.20"}, {"Hostname", fmt.Sprintf("gpu-node-%04d", i/320)}, {"UUID", fmt.Sprintf("GPU-%08x-1f3a-4c5d-9e7b-%012x", i/40, i/40*7919)},
			{"__name__", fmt.Sprintf("DCGM_FI_PROF_METRIC_NUMBER_%02d", i%40)}, {"cluster", "eu-1"}, {"device", fmt.Sprintf("nvidia%d", i/40%8)},
			{"gpu", fmt.Sprint(i / 40 % 8)}, {"instance", "10.1.2.3:9400"}, {"job", "dcgm-exporter"}, {"modelName", "NVIDIA H100 80GB HBM3"},
		} {
			l = series.AppendLabel(l, kv[0], kv[1])
		}
		e.Series(l)
		e.Sample(0, 1_796_126_400_000, float64(i%100))
	}
	return e.AppendBody(nil)
}

func benchmarkScan(b *testing.B, p Protocol) {
	const n = 2000
	body := floats(p, n)
	var c Cursor
	var batch series.Batch
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		batch.Reset()
		c.Reset(p, body, &batch, wide)
		for c.Next() {
		}
		if c.Err() != nil || len(batch.Samples) != n {
			b.Fatal(c.Err())
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/sample")
}

func BenchmarkScanV1(b *testing.B) { benchmarkScan(b, Protocol1) }
func BenchmarkScanV2(b *testing.B) { benchmarkScan(b, Protocol2) }

func BenchmarkDecompressV1(b *testing.B) {
	body := floats(Protocol1, 2000)
	packed := snappy.Encode(nil, body)
	var dst []byte
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		var err error
		if dst, err = Decompress(dst, packed, 32<<20); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/2000, "ns/sample")
}
