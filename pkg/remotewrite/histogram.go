package remotewrite

import (
	"fmt"

	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"

	"github.com/varvedb/varve/pkg/series"
)

// histogramCost is what decoding a histogram message of n bytes may take: a
// bucket of one byte becomes eight.
func histogramCost(n int) int { return 512 + 8*n }

// histogramV1 reads a native histogram of a 1.0 request with Prometheus' own
// types: histograms are rare, and their rules many.
func (c *Cursor) histogramV1(msg []byte) bool {
	if !c.spend(histogramCost(len(msg))) {
		return false
	}
	var p prompb.Histogram
	if err := p.Unmarshal(msg); err != nil {
		return c.fail(msg, 0, fmt.Errorf("native histogram: %w", err))
	}
	out := series.Histogram{T: p.Timestamp}
	_, zeroFloat := p.ZeroCount.(*prompb.Histogram_ZeroCountFloat)
	_, zeroInt := p.ZeroCount.(*prompb.Histogram_ZeroCountInt)
	float := p.IsFloatHistogram()
	fault := histogramFault(float, int32(p.ResetHint),
		zeroFloat || len(p.PositiveCounts)+len(p.NegativeCounts) > 0,
		zeroInt || len(p.PositiveDeltas)+len(p.NegativeDeltas) > 0)
	if float {
		out.FH = p.ToFloatHistogram()
	} else {
		out.H = p.ToIntHistogram()
	}
	return c.histogram(out, fault)
}

// histogramV2 is histogramV1 for 2.0, where a start timestamp may be set.
func (c *Cursor) histogramV2(msg []byte) bool {
	if !c.spend(histogramCost(len(msg))) {
		return false
	}
	var p writev2.Histogram
	if err := p.Unmarshal(msg); err != nil {
		return c.fail(msg, 0, fmt.Errorf("native histogram: %w", err))
	}
	out := series.Histogram{ST: p.StartTimestamp, T: p.Timestamp}
	_, zeroFloat := p.ZeroCount.(*writev2.Histogram_ZeroCountFloat)
	_, zeroInt := p.ZeroCount.(*writev2.Histogram_ZeroCountInt)
	float := p.IsFloatHistogram()
	fault := histogramFault(float, int32(p.ResetHint),
		zeroFloat || len(p.PositiveCounts)+len(p.NegativeCounts) > 0,
		zeroInt || len(p.PositiveDeltas)+len(p.NegativeDeltas) > 0)
	if float {
		out.FH = p.ToFloatHistogram()
	} else {
		out.H = p.ToIntHistogram()
	}
	return c.histogram(out, fault)
}

// histogram appends h, or notes why that would not be what was sent. Whether h is
// valid in itself is for the caller to check.
func (c *Cursor) histogram(h series.Histogram, fault string) bool {
	if fault != "" {
		if c.current.BadHistograms++; c.current.BadHistograms == 1 {
			c.current.HistogramFault = fmt.Sprintf("%s, at timestamp %d", fault, h.T)
		}
		return true
	}
	c.batch.Histograms = append(c.batch.Histograms, h)
	return true
}

// histogramFault says what of a message would be lost, silently, by taking it for
// an integer or a float histogram, whichever its count says it is.
func histogramFault(float bool, hint int32, floatParts, intParts bool) string {
	switch {
	case hint < 0 || hint > int32(prompb.Histogram_GAUGE):
		return fmt.Sprintf("counter reset hint %d is unknown", hint)
	case float && intParts:
		return "a float histogram has integer buckets"
	case !float && floatParts:
		return "an integer histogram has float buckets"
	}
	return ""
}
