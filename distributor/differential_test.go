package distributor

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"
	"pgregory.net/rapid"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// The reference below reads a request with Prometheus' generated decoders, judges
// each label set with plain maps and labels.Labels, and says what must be stored
// and how much must be refused for which reason. It shares no code with the write
// path but the constants.

type verdicts struct {
	floats  map[string][]series.Sample // by labels.Labels
	hists   map[string][]int64         // timestamps
	refused map[series.Reason]int
	dropped map[series.Reason]int
	kept    int // exemplars
}

type plainSeries struct {
	labels    [][2]string
	samples   []series.Sample
	hists     []series.Histogram
	exemplars []plainExemplar
}

type plainExemplar struct {
	labels [][2]string
	t      int64
}

func decodeV1(t *rapid.T, body []byte) (out []plainSeries) {
	var req prompb.WriteRequest
	if err := req.Unmarshal(body); err != nil {
		t.Fatal(err)
	}
	for _, ts := range req.Timeseries {
		var s plainSeries
		for _, l := range ts.Labels {
			s.labels = append(s.labels, [2]string{l.Name, l.Value})
		}
		for _, x := range ts.Samples {
			s.samples = append(s.samples, series.Sample{T: x.Timestamp, V: x.Value})
		}
		for _, h := range ts.Histograms {
			s.hists = append(s.hists, series.Histogram{T: h.Timestamp, H: h.ToIntHistogram()})
		}
		for _, x := range ts.Exemplars {
			e := plainExemplar{t: x.Timestamp}
			for _, l := range x.Labels {
				e.labels = append(e.labels, [2]string{l.Name, l.Value})
			}
			s.exemplars = append(s.exemplars, e)
		}
		out = append(out, s)
	}
	return out
}

func decodeV2(t *rapid.T, body []byte) (out []plainSeries) {
	var req writev2.Request
	if err := req.Unmarshal(body); err != nil {
		t.Fatal(err)
	}
	names := func(refs []uint32) (l [][2]string) {
		for i := 0; i < len(refs); i += 2 {
			l = append(l, [2]string{req.Symbols[refs[i]], req.Symbols[refs[i+1]]})
		}
		return l
	}
	for _, ts := range req.Timeseries {
		s := plainSeries{labels: names(ts.LabelsRefs)}
		for _, x := range ts.Samples {
			s.samples = append(s.samples, series.Sample{ST: x.StartTimestamp, T: x.Timestamp, V: x.Value})
		}
		for _, h := range ts.Histograms {
			s.hists = append(s.hists, series.Histogram{T: h.Timestamp, H: h.ToIntHistogram()})
		}
		for _, x := range ts.Exemplars {
			s.exemplars = append(s.exemplars, plainExemplar{names(x.LabelsRefs), x.Timestamp})
		}
		out = append(out, s)
	}
	return out
}

// judgeLabels says what is wrong with a label set, or returns it.
func judgeLabels(c Config, l [][2]string) (labels.Labels, series.Reason) {
	set := map[string]string{}
	var twice bool
	var kept []labels.Label
	for _, p := range l {
		switch {
		case p[0] == "":
			return labels.EmptyLabels(), series.ReasonEmptyLabelName
		case len(p[0]) > c.MaxLabelNameBytes:
			return labels.EmptyLabels(), series.ReasonLabelTooLong
		case !utf8.ValidString(p[0]):
			return labels.EmptyLabels(), series.ReasonInvalidUTF8
		case len(p[1]) > c.MaxLabelValueBytes:
			return labels.EmptyLabels(), series.ReasonLabelTooLong
		case !utf8.ValidString(p[1]):
			return labels.EmptyLabels(), series.ReasonInvalidUTF8
		case p[1] == "":
			continue
		case len(kept) == c.MaxLabels:
			return labels.EmptyLabels(), series.ReasonTooManyLabels
		}
		if _, ok := set[p[0]]; ok {
			twice = true
		}
		set[p[0]] = p[1]
		kept = append(kept, labels.Label{Name: p[0], Value: p[1]})
	}
	switch {
	case twice:
		return labels.EmptyLabels(), series.ReasonDuplicateLabel
	case set["__name__"] == "":
		return labels.EmptyLabels(), series.ReasonMissingName
	}
	return labels.New(kept...), ""
}

func judgeTime(t, now int64, c Config) series.Reason {
	switch {
	case t > now+c.FutureTolerance.Milliseconds():
		return series.ReasonTooFarInFuture
	case t < earliest:
		return series.ReasonTimestampInvalid
	}
	return ""
}

func judgeExemplar(x plainExemplar, now int64, c Config) series.Reason {
	runes := 0
	seen := map[string]bool{}
	twice := false
	for _, p := range x.labels {
		runes += utf8.RuneCountInString(p[0]) + utf8.RuneCountInString(p[1])
		switch {
		case p[0] == "" || !utf8.ValidString(p[0]) || !utf8.ValidString(p[1]):
			return series.ReasonExemplarInvalid
		case runes > maxExemplarRunes:
			return series.ReasonExemplarTooLong
		case p[1] == "":
			continue
		}
		twice = twice || seen[p[0]]
		seen[p[0]] = true
	}
	if twice || x.t != 0 && judgeTime(x.t, now, c) != "" {
		return series.ReasonExemplarInvalid
	}
	return ""
}

func judgeRequest(p remotewrite.Protocol, in []plainSeries, c Config, now int64) verdicts {
	v := verdicts{map[string][]series.Sample{}, map[string][]int64{}, map[series.Reason]int{}, map[series.Reason]int{}, 0}
	for _, s := range in {
		l, fault := judgeLabels(c, s.labels)
		if fault == "" && p == v2 && len(s.samples) > 0 && len(s.hists) > 0 {
			fault = series.ReasonMixedSamples
		}
		if fault != "" {
			v.refused[fault] += len(s.samples) + len(s.hists)
			v.dropped[fault] += len(s.exemplars)
			continue
		}
		for _, x := range s.samples {
			if fault := judgeTime(x.T, now, c); fault != "" {
				v.refused[fault]++
				continue
			}
			if x.ST != 0 && (x.ST < earliest || x.ST > x.T) {
				x.ST = 0
			}
			v.floats[l.String()] = append(v.floats[l.String()], x)
		}
		for _, h := range s.hists {
			fault := judgeTime(h.T, now, c)
			if fault == "" && h.H.Validate() != nil {
				fault = series.ReasonInvalidHistogram
			}
			if fault != "" {
				v.refused[fault]++
				continue
			}
			v.hists[l.String()] = append(v.hists[l.String()], h.T)
		}
		for _, x := range s.exemplars {
			if fault := judgeExemplar(x, now, c); fault != "" {
				v.dropped[fault]++
			} else {
				v.kept++
			}
		}
	}
	return v
}

// recorder is an Appender that notes what it is given.
type recorder struct {
	got verdicts
	t   *rapid.T
}

func (r *recorder) Append(_ context.Context, _ string, b *series.Batch, res *series.Appended) error {
	var lb labels.ScratchBuilder
	for i := range b.Entries {
		e := &b.Entries[i]
		key := e.Labels.Labels(&lb).String()
		if again := series.AppendLabels(nil, e.Labels.Labels(&lb)); string(again) != string(e.Labels) {
			r.t.Fatalf("label bytes %q are not canonical, %q are", e.Labels, again)
		}
		r.got.floats[key] = append(r.got.floats[key], b.SamplesOf(e)...)
		for _, h := range b.HistogramsOf(e) {
			r.got.hists[key] = append(r.got.hists[key], h.T)
		}
		if xs := b.ExemplarsOf(e); !slices.IsSortedFunc(xs, func(a, b series.Exemplar) int { return cmp.Compare(a.T, b.T) }) {
			r.t.Fatalf("exemplars out of order: %v", xs)
		}
	}
	res.Samples, res.Histograms, res.Exemplars = len(b.Samples), len(b.Histograms), len(b.Exemplars)
	return nil
}

func (v verdicts) String() string {
	var lines []string
	for k, s := range v.floats {
		text := k
		for _, x := range s {
			text += fmt.Sprintf(" %d/%d/%x", x.ST, x.T, math.Float64bits(x.V))
		}
		if len(s) > 0 {
			lines = append(lines, text)
		}
	}
	for k, ts := range v.hists {
		if len(ts) > 0 {
			lines = append(lines, fmt.Sprintf("%s histograms %v", k, ts))
		}
	}
	for _, m := range []struct {
		name string
		by   map[series.Reason]int
	}{{"refused", v.refused}, {"dropped", v.dropped}} {
		for reason, n := range m.by {
			if n > 0 {
				lines = append(lines, fmt.Sprintf("%s %s %d", m.name, reason, n))
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + fmt.Sprintf("\n%d exemplars", v.kept)
}

// drawSeries draws series that are often at fault, from few names and values so
// that they meet in the cache.
func drawSeries(t *rapid.T, e remotewrite.Encoder, now int64) {
	name := rapid.SampledFrom([]string{"__name__", "__name__", "__name__", "UUID", "a", "b", "z", "Hostname", "", "\xff", "ключ", strings.Repeat("n", 40)})
	value := rapid.SampledFrom([]string{"1", "2", "m", "x", "", "\xfe", "значение", strings.Repeat("v", 60)})
	at := rapid.OneOf(rapid.Int64Range(now-1000, now+1000), rapid.Int64Range(now-1000, now+1000), rapid.SampledFrom([]int64{
		0, -1, 1, now / 1000, now * 1000, earliest, earliest - 1, now + 600_000, now + 600_001, math.MaxInt64, math.MinInt64,
	}))
	drawRun := func(most int, label string) (l series.LabelBytes) {
		for range rapid.IntRange(0, most).Draw(t, label) {
			l = series.AppendLabel(l, name.Draw(t, "name"), value.Draw(t, "value"))
		}
		return l
	}
	labels := drawRun(8, "labels")
	if rapid.Bool().Draw(t, "well formed") {
		labels = run("__name__", value.Draw(t, "metric"), "a", value.Draw(t, "a"), "b", "1")
	}
	e.Series(labels)
	for range rapid.IntRange(0, 3).Draw(t, "samples") {
		st := int64(0)
		if rapid.Bool().Draw(t, "has start") {
			st = at.Draw(t, "start")
		}
		e.Sample(st, at.Draw(t, "time"), rapid.SampledFrom([]float64{0, 1, -1, math.NaN(), math.Inf(1), math.Float64frombits(0x7ff0000000000002)}).Draw(t, "v"))
	}
	if rapid.IntRange(0, 5).Draw(t, "histogram?") == 0 {
		h := &histogram.Histogram{Count: 2, Schema: 1, PositiveSpans: []histogram.Span{{Length: 2}}, PositiveBuckets: []int64{1, 0}}
		if rapid.Bool().Draw(t, "broken") {
			h.PositiveSpans[0].Length = 3
		}
		e.Histogram(series.Histogram{T: at.Draw(t, "time"), H: h})
	}
	for range rapid.SampledFrom([]int{0, 0, 0, 1, 3}).Draw(t, "exemplars") {
		e.Exemplar(series.Exemplar{Labels: drawRun(4, "exemplar labels"), T: at.Draw(t, "time"), V: 1})
	}
}

func TestPushAgainstAPlainReference(t *testing.T) {
	now := ms(testNow)
	rapid.Check(t, func(t *rapid.T) {
		rec := &recorder{t: t}
		cfg := DefaultConfig()
		cfg.MaxLabels, cfg.MaxLabelNameBytes, cfg.MaxLabelValueBytes, cfg.CacheSeries = 6, 30, 50, 8
		d := bare(t, rec, cfg)
		for range rapid.IntRange(1, 4).Draw(t, "requests") {
			p := rapid.SampledFrom([]remotewrite.Protocol{v1, v2}).Draw(t, "protocol")
			e := remotewrite.NewEncoder(p)
			for range rapid.IntRange(0, 12).Draw(t, "series") {
				drawSeries(t, e, now)
			}
			body := e.AppendBody(nil)
			var want verdicts
			if p == v1 {
				want = judgeRequest(p, decodeV1(t, body), cfg, now)
			} else {
				want = judgeRequest(p, decodeV2(t, body), cfg, now)
			}
			rec.got = verdicts{map[string][]series.Sample{}, map[string][]int64{}, map[series.Reason]int{}, map[series.Reason]int{}, 0}
			var res series.Appended
			if err := d.Push(context.Background(), "anonymous", p, body, &res); err != nil {
				t.Fatal(err)
			}
			res.Refused.Each(func(r series.Reason, n int) { rec.got.refused[r] += n })
			res.Dropped.Each(func(r series.Reason, n int) { rec.got.dropped[r] += n })
			rec.got.kept = res.Exemplars
			if g, w := rec.got.String(), want.String(); g != w {
				t.Fatalf("got\n%s\nwant\n%s", g, w)
			}
			if n := res.Refused.Total(); n > 0 && (res.Refused.First == "" || !utf8.ValidString(res.Refused.Error())) {
				t.Fatalf("%d refused, said as %q", n, res.Refused.Error())
			}
		}
	})
}
