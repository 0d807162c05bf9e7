package distributor

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	otlptranslator "github.com/prometheus/prometheus/storage/remote/otlptranslator/prometheusremotewrite"
	"github.com/prometheus/prometheus/util/annotations"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/pmetric"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// translate fills q with the samples that md becomes by Prometheus' own rules:
// names escaped and with suffixes, resource attributes promoted as configured,
// explicit-bucket histograms classic, exponential ones native.
func (d *Distributor) translate(ctx context.Context, t *tenantState, q *request, md pmetric.Metrics) error {
	q.refusePoints(md, func(_ pmetric.ResourceMetrics, _ pmetric.ScopeMetrics, m pmetric.Metric) func(point) (series.Reason, string) {
		return func(p point) (series.Reason, string) { return q.pointFault(m, p) }
	})
	early, refused := q.own, q.received // should the rest be done again
	q.own = series.Appended{}

	annots, err := d.convert(ctx, t, q, md)
	if err != nil {
		return err
	}
	if annots.errs != nil {
		// Some data point cannot be translated, and took others of its metric with
		// it. Find out which, one by one, and do the others again.
		q.rewind()
		q.own, q.received = early, refused
		q.refusePoints(md, d.newIsolation(ctx).fault)
		early, q.own = q.own, series.Appended{}
		if annots, err = d.convert(ctx, t, q, md); err != nil {
			return err
		}
	}
	early.Refused.Merge(&q.own.Refused)
	early.Dropped.Merge(&q.own.Dropped)
	q.own = early
	for category, n := range otlptranslator.CountWarningsByCategory(annots.warnings) {
		d.warnOTLP(ctx, t, string(category), n, annots.text())
	}
	if annots.errs != nil { // about target_info only: the data points are in
		d.warnOTLP(ctx, t, "target_info", 1, annots.errs.Error())
	}
	return nil
}

type conversion struct {
	warnings annotations.Annotations
	errs     error // of the translation
}

func (c conversion) text() string {
	warnings, _ := c.warnings.AsStrings("", 1, 0)
	return fmt.Sprint(warnings)
}

// convert runs Prometheus' converter. An error is one that ends the request.
func (d *Distributor) convert(ctx context.Context, t *tenantState, q *request, md pmetric.Metrics) (conversion, error) {
	into := &collector{d: d, t: t, q: q}
	converter := otlptranslator.NewPrometheusConverter(into)
	warnings, errs := converter.FromMetrics(ctx, md, d.translation())
	switch {
	case into.err != nil:
		return conversion{}, into.err
	case ctx.Err() != nil:
		return conversion{}, series.Errorf(series.Unavailable, "translate OTLP metrics: %w", ctx.Err())
	}
	return conversion{warnings, errs}, nil
}

func (d *Distributor) translation() otlptranslator.Settings {
	c := config.DefaultOTLPConfig
	c.PromoteResourceAttributes = d.cfg.PromoteResourceAttributes
	return otlptranslator.Settings{
		AddMetricSuffixes:                    c.TranslationStrategy.ShouldAddSuffixes(),
		AllowUTF8:                            !c.TranslationStrategy.ShouldEscape(),
		PromoteResourceAttributes:            otlptranslator.NewPromoteResourceAttributes(c),
		LookbackDelta:                        5 * time.Minute,
		LabelNameUnderscoreSanitization:      c.LabelNameUnderscoreSanitization,
		LabelNamePreserveMultipleUnderscores: c.LabelNamePreserveMultipleUnderscores,
	}
}

// collector is a storage.AppenderV2 that puts what the converter appends through
// the same checks as remote write, into the request's batch.
type collector struct {
	d *Distributor
	t *tenantState
	q *request

	run         []byte
	spent       int
	granted     int
	targetInfos int
	err         error // that ends the request
}

// maxTargetInfos bounds the target_info samples of one request: the converter
// makes one for every two and a half minutes between a resource's first and last
// data point, and a client may send any two times.
const maxTargetInfos = 10_000

var errTargetInfos = errors.New("the data points of a resource are too far apart for target_info between them")

// Append implements storage.AppenderV2.
func (c *collector) Append(_ storage.SeriesRef, ls labels.Labels, st, t int64, v float64, h *histogram.Histogram, fh *histogram.FloatHistogram, opts storage.AOptions) (storage.SeriesRef, error) {
	if c.err != nil {
		return 0, c.err
	}
	if opts.MetricFamilyName == "target_info" {
		if c.targetInfos++; c.targetInfos > maxTargetInfos {
			return 0, errTargetInfos
		}
	}
	q, b := c.q, &c.q.batch
	c.run = series.AppendLabels(c.run[:0], ls)
	s := remotewrite.Series{
		Labels:     c.run,
		Samples:    rangeAt(len(b.Samples)),
		Histograms: rangeAt(len(b.Histograms)),
		Exemplars:  rangeAt(len(b.Exemplars)),
		Metadata:   remotewrite.Metadata{Type: opts.Metadata.Type, Help: bytesOf(opts.Metadata.Help), Unit: bytesOf(opts.Metadata.Unit)},
	}
	if h != nil || fh != nil {
		b.Histograms = append(b.Histograms, series.Histogram{ST: st, T: t, H: h, FH: fh})
	} else {
		b.Samples = append(b.Samples, series.Sample{ST: st, T: t, V: v})
	}
	for i := range opts.Exemplars {
		c.exemplar(&opts.Exemplars[i])
	}
	s.Samples.To, s.Histograms.To, s.Exemplars.To = uint32(len(b.Samples)), uint32(len(b.Histograms)), uint32(len(b.Exemplars))
	if c.err = c.spend(collectedCost + len(opts.Exemplars)*256); c.err == nil {
		c.err = c.d.take(c.t, q, &s)
	}
	return 0, c.err
}

// collectedCost is what a sample takes in the batch, with its entry.
const collectedCost = 128

func (c *collector) spend(n int) error {
	if c.spent += n; c.spent <= c.granted {
		return nil
	}
	if c.spent > c.d.cfg.MaxRequestBytes {
		return series.Errorf(series.Invalid, "translate OTLP metrics: the samples take more than %d bytes: %w", c.d.cfg.MaxRequestBytes, remotewrite.ErrTooLarge)
	}
	const step = 256 << 10
	c.granted += step
	return c.q.memory.grow(step)
}

func (c *collector) exemplar(x *exemplar.Exemplar) {
	q := c.q
	start := len(q.arena)
	q.arena = series.AppendLabels(q.arena, x.Labels)
	e := series.Exemplar{Labels: q.arena[start:len(q.arena):len(q.arena)], V: x.Value}
	if x.HasTs {
		e.T = x.Ts
	}
	q.batch.Exemplars = append(q.batch.Exemplars, e)
}

// Commit implements storage.AppenderV2; the distributor commits by itself.
func (c *collector) Commit() error { return nil }

// Rollback implements storage.AppenderV2.
func (c *collector) Rollback() error { return nil }

func rangeAt(n int) series.Range { return series.Range{From: uint32(n), To: uint32(n)} }

// bytesOf lends a string's bytes, which must not be written to.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// rewind takes back what a conversion put into q.
func (q *request) rewind() {
	for _, f := range q.handed {
		f.handed.Store(0)
	}
	clear(q.entries)
	clear(q.handed)
	q.entries, q.handed, q.last = q.entries[:0], q.handed[:0], nil
	q.batch.Reset()
	q.arena = q.arena[:0]
	q.own = series.Appended{}
	q.received, q.badStarts = 0, 0
}

// point is one data point of any type.
type point struct {
	at        pcommon.Timestamp
	number    pmetric.NumberDataPoint // of a gauge or sum
	isNumber  bool
	exemplars *pmetric.ExemplarSlice
	// copyTo makes a metric of the same type of the point alone.
	copyTo func(pmetric.Metric)
}

// judge returns the check that a metric's data points have to pass, nil for none.
type judge func(pmetric.ResourceMetrics, pmetric.ScopeMetrics, pmetric.Metric) func(point) (series.Reason, string)

// refusePoints removes the data points that do not pass, and counts them. Metrics
// without any data point go too.
func (q *request) refusePoints(md pmetric.Metrics, of judge) {
	for _, rm := range md.ResourceMetrics().All() {
		for _, sm := range rm.ScopeMetrics().All() {
			sm.Metrics().RemoveIf(func(m pmetric.Metric) bool {
				fault := of(rm, sm, m)
				if fault == nil {
					return false
				}
				removePoints(m, func(p point) bool {
					reason, text := fault(p)
					if reason == "" {
						return false
					}
					q.received++
					q.own.Refused.Add(reason, 1, func() string { return fmt.Sprintf("metric %.200q: %s", m.Name(), text) })
					return true
				})
				return pointCount(m) == 0
			})
		}
	}
}

func pointCount(m pmetric.Metric) int {
	switch m.Type() {
	case pmetric.MetricTypeGauge:
		return m.Gauge().DataPoints().Len()
	case pmetric.MetricTypeSum:
		return m.Sum().DataPoints().Len()
	case pmetric.MetricTypeHistogram:
		return m.Histogram().DataPoints().Len()
	case pmetric.MetricTypeExponentialHistogram:
		return m.ExponentialHistogram().DataPoints().Len()
	case pmetric.MetricTypeSummary:
		return m.Summary().DataPoints().Len()
	}
	return 0
}

// removePoints removes the data points of m for which remove says so.
func removePoints(m pmetric.Metric, remove func(point) bool) {
	switch m.Type() {
	case pmetric.MetricTypeGauge:
		m.Gauge().DataPoints().RemoveIf(func(p pmetric.NumberDataPoint) bool {
			x := p.Exemplars()
			return remove(point{at: p.Timestamp(), number: p, isNumber: true, exemplars: &x,
				copyTo: func(to pmetric.Metric) { p.CopyTo(to.SetEmptyGauge().DataPoints().AppendEmpty()) }})
		})
	case pmetric.MetricTypeSum:
		m.Sum().DataPoints().RemoveIf(func(p pmetric.NumberDataPoint) bool {
			x := p.Exemplars()
			return remove(point{at: p.Timestamp(), number: p, isNumber: true, exemplars: &x,
				copyTo: func(to pmetric.Metric) {
					to.SetEmptySum().SetAggregationTemporality(m.Sum().AggregationTemporality())
					to.Sum().SetIsMonotonic(m.Sum().IsMonotonic())
					p.CopyTo(to.Sum().DataPoints().AppendEmpty())
				}})
		})
	case pmetric.MetricTypeHistogram:
		m.Histogram().DataPoints().RemoveIf(func(p pmetric.HistogramDataPoint) bool {
			x := p.Exemplars()
			return remove(point{at: p.Timestamp(), exemplars: &x, copyTo: func(to pmetric.Metric) {
				to.SetEmptyHistogram().SetAggregationTemporality(m.Histogram().AggregationTemporality())
				p.CopyTo(to.Histogram().DataPoints().AppendEmpty())
			}})
		})
	case pmetric.MetricTypeExponentialHistogram:
		m.ExponentialHistogram().DataPoints().RemoveIf(func(p pmetric.ExponentialHistogramDataPoint) bool {
			x := p.Exemplars()
			return remove(point{at: p.Timestamp(), exemplars: &x, copyTo: func(to pmetric.Metric) {
				to.SetEmptyExponentialHistogram().SetAggregationTemporality(m.ExponentialHistogram().AggregationTemporality())
				p.CopyTo(to.ExponentialHistogram().DataPoints().AppendEmpty())
			}})
		})
	case pmetric.MetricTypeSummary:
		m.Summary().DataPoints().RemoveIf(func(p pmetric.SummaryDataPoint) bool {
			return remove(point{at: p.Timestamp(), copyTo: func(to pmetric.Metric) { p.CopyTo(to.SetEmptySummary().DataPoints().AppendEmpty()) }})
		})
	}
}

// pointFault finds what the converter would take for something else, or let other
// data points suffer for: times that cannot be (target_info would reach from
// there), temporalities that are not cumulative, numbers without a value. Exemplars
// without a value are dropped here too, as they would cost their metric.
func (q *request) pointFault(m pmetric.Metric, p point) (series.Reason, string) {
	if t := temporality(m); t != pmetric.AggregationTemporalityCumulative {
		return series.ReasonDeltaTemporality, fmt.Sprintf("its aggregation temporality is %s, only cumulative ones are stored", t)
	}
	at := int64(uint64(p.at) / 1_000_000)
	if at < earliest || at > q.latest {
		reason := series.ReasonTimestampInvalid
		if at > q.latest {
			reason = series.ReasonTooFarInFuture
		}
		return reason, fmt.Sprintf("timestamp %d (nanoseconds) is %s", uint64(p.at), timeSide(at, q.latest))
	}
	if p.isNumber && p.number.ValueType() == pmetric.NumberDataPointValueTypeEmpty && !p.number.Flags().NoRecordedValue() {
		return series.ReasonUntranslatable, "a data point has no value"
	}
	if p.exemplars != nil {
		p.exemplars.RemoveIf(func(x pmetric.Exemplar) bool {
			bad := x.ValueType() == pmetric.ExemplarValueTypeEmpty
			if bad {
				q.own.Dropped.Add(series.ReasonExemplarInvalid, 1, nil)
			}
			return bad
		})
	}
	return "", ""
}

func timeSide(at, latest int64) string {
	if at > latest {
		return "too far in the future"
	}
	return "before 2000-01-01"
}

// temporality returns m's, and cumulative for the types that have none.
func temporality(m pmetric.Metric) pmetric.AggregationTemporality {
	switch m.Type() {
	case pmetric.MetricTypeSum:
		return m.Sum().AggregationTemporality()
	case pmetric.MetricTypeHistogram:
		return m.Histogram().AggregationTemporality()
	case pmetric.MetricTypeExponentialHistogram:
		return m.ExponentialHistogram().AggregationTemporality()
	}
	return pmetric.AggregationTemporalityCumulative
}

// isolation finds out which data points cannot be translated, by translating
// them alone.
type isolation struct {
	ctx      context.Context
	settings otlptranslator.Settings
	// budget bounds the work: each try goes over all attributes of the resource
	// again. Above it data points are refused together with their metric.
	budget int
}

// isolationBudget is in attributes of a resource gone over: some tenths of a
// second's worth.
const isolationBudget = 1_000_000

func (d *Distributor) newIsolation(ctx context.Context) *isolation {
	s := &isolation{ctx: ctx, settings: d.translation(), budget: isolationBudget}
	s.settings.DisableTargetInfo = true
	return s
}

// fault returns the check of m's data points, nil if all of m can be translated.
func (s *isolation) fault(rm pmetric.ResourceMetrics, sm pmetric.ScopeMetrics, m pmetric.Metric) func(point) (series.Reason, string) {
	try := 10 + rm.Resource().Attributes().Len() + sm.Scope().Attributes().Len()
	if s.budget -= try; s.budget < 0 {
		return func(point) (series.Reason, string) {
			return series.ReasonUntranslatable, "too many data points of the request have to be tried one by one"
		}
	}
	md := pmetric.NewMetrics()
	alone := md.ResourceMetrics().AppendEmpty()
	rm.Resource().CopyTo(alone.Resource())
	scope := alone.ScopeMetrics().AppendEmpty()
	sm.Scope().CopyTo(scope.Scope())
	metric := scope.Metrics().AppendEmpty()
	m.CopyTo(metric)
	whole := s.try(md)
	if whole == nil {
		return nil
	}
	return func(p point) (series.Reason, string) {
		if s.budget -= try; s.budget < 0 {
			return series.ReasonUntranslatable, whole.Error()
		}
		p.copyTo(metric)
		if err := s.try(md); err != nil {
			return series.ReasonUntranslatable, err.Error()
		}
		return "", ""
	}
}

func (s *isolation) try(md pmetric.Metrics) error {
	_, err := otlptranslator.NewPrometheusConverter(&nowhere{}).FromMetrics(s.ctx, md, s.settings)
	return err
}

// nowhere is a storage.AppenderV2 that keeps nothing.
type nowhere struct{ collector }

// Append implements storage.AppenderV2.
func (*nowhere) Append(storage.SeriesRef, labels.Labels, int64, int64, float64, *histogram.Histogram, *histogram.FloatHistogram, storage.AOptions) (storage.SeriesRef, error) {
	return 0, nil
}
