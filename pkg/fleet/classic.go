package fleet

import (
	"math"
	"slices"
	"strconv"

	"github.com/prometheus/prometheus/model/histogram"
)

// classic is a classic histogram among the lines of a group. Its counts follow from
// how many observations there are and how they are distributed, so they are exact
// and monotone at any instant.
type classic struct {
	family *family
	bounds []float64
	at     int // its first line in the group
}

// lines appends the histogram's lines: buckets, sum, count.
func (c *classic) lines(extra []extraLine, labels ...pair) []extraLine {
	c.at = len(extra)
	for _, le := range append(slices.Clone(c.bounds), math.Inf(1)) {
		ls := append(slices.Clone(labels), pair{"le", formatBound(le)})
		extra = append(extra, extraLine{family: c.family, name: c.family.name + "_bucket", labels: ls, st: true})
	}
	extra = append(extra, extraLine{family: c.family, name: c.family.name + "_sum", labels: labels, st: true})
	return append(extra, extraLine{family: c.family, name: c.family.name + "_count", labels: labels, st: true})
}

func formatBound(le float64) string {
	if math.IsInf(le, 1) {
		return "+Inf"
	}
	s := strconv.FormatFloat(le, 'f', -1, 64)
	if le == math.Trunc(le) {
		s += ".0"
	}
	return s
}

// mixture is a distribution: mostly lognormal, with a slow part.
type mixture struct {
	median, sigma         float64
	slowMedian, slowSigma float64
}

func (m mixture) mean() float64     { return m.median * math.Exp(m.sigma*m.sigma/2) }
func (m mixture) slowMean() float64 { return m.slowMedian * math.Exp(m.slowSigma*m.slowSigma/2) }

// cdf is the share of a lognormal distribution up to x.
func cdf(x, median, sigma float64) float64 {
	return 0.5 * math.Erfc(-math.Log(x/median)/(sigma*math.Sqrt2))
}

// shares are the cumulative shares of both parts at each bound.
type shares struct{ usual, slow []float64 }

func (c *classic) shares(m mixture) shares {
	var s shares
	for _, b := range c.bounds {
		s.usual = append(s.usual, cdf(b, m.median, m.sigma))
		if m.slowMedian > 0 {
			s.slow = append(s.slow, cdf(b, m.slowMedian, m.slowSigma))
		} else {
			s.slow = append(s.slow, 0)
		}
	}
	return s
}

// fill writes n observations, of which about slow are from the slow part.
func (c *classic) fill(vals []float64, s shares, m mixture, n, slow float64, k key) {
	n = math.Floor(n)
	vals = vals[c.at:]
	u := k.unit()
	usual := max(n-slow, 0)
	for i := range c.bounds {
		vals[i] = min(n, math.Floor(usual*s.usual[i]+slow*s.slow[i]+u))
	}
	vals[len(c.bounds)] = n
	// A third of an observation's noise keeps the sum growing with every one.
	sum := usual*m.mean() + slow*m.slowMean()
	if n > 0 {
		sum += 0.3 * m.mean() * k.with(uint64(n)).unit()
	}
	vals[len(c.bounds)+1] = sum
	vals[len(c.bounds)+2] = n
}

// nativeHistogram returns n observations of a lognormal distribution as a native
// histogram of schema 3.
func nativeHistogram(n, median, sigma float64) *histogram.Histogram {
	const schema, from, to = 3, -40, 60 // about 0.03 to 180
	bound := func(i int) float64 { return math.Pow(2, float64(i)/8) }
	h := &histogram.Histogram{Schema: schema, ZeroThreshold: 1e-128}
	last, before := int64(0), 0.0
	gap := 0
	for i := from; i <= to; i++ {
		upTo := math.Floor(n * cdf(bound(i), median, sigma))
		count := int64(upTo - before)
		before = upTo
		if count == 0 {
			gap++
			continue
		}
		switch {
		case len(h.PositiveSpans) == 0:
			h.PositiveSpans = append(h.PositiveSpans, histogram.Span{Offset: int32(i), Length: 1})
		case gap > 0:
			h.PositiveSpans = append(h.PositiveSpans, histogram.Span{Offset: int32(gap), Length: 1})
		default:
			h.PositiveSpans[len(h.PositiveSpans)-1].Length++
		}
		gap = 0
		h.PositiveBuckets = append(h.PositiveBuckets, count-last)
		last = count
		h.Count += uint64(count)
	}
	h.Sum = float64(h.Count) * median * math.Exp(sigma*sigma/2)
	return h
}
