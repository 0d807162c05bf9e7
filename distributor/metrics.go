package distributor

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varvedb/varve/pkg/series"
)

// metrics are the distributor's own. None has a tenant label: tenants are names
// that anybody may send.
type metrics struct {
	discardedSamples   *prometheus.CounterVec
	discardedExemplars *prometheus.CounterVec
	discardedMetadata  *prometheus.CounterVec
	droppedStarts      prometheus.Counter
	unaccounted        prometheus.Counter

	received   prometheus.Counter
	samples    prometheus.Counter
	histograms prometheus.Counter
	exemplars  prometheus.Counter
	requests   *prometheus.HistogramVec

	predicted prometheus.Counter
	hashed    prometheus.Counter
	missed    prometheus.Counter

	otlpWarnings *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, d *Distributor) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	byReason := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"reason"})
	}
	lookups := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "varve_distributor_label_cache_lookups_total",
		Help: "Series looked up in the label cache: predicted from the series before, found by hash, or missed.",
	}, []string{"result"})
	m := &metrics{
		discardedSamples:   byReason("varve_discarded_samples_total", "Samples and native histograms refused for good, by the distributor or an ingester."),
		discardedExemplars: byReason("varve_discarded_exemplars_total", "Exemplars dropped; the samples beside them are not affected."),
		discardedMetadata:  byReason("varve_discarded_metadata_total", "Metric metadata dropped; the samples beside it are not affected."),
		droppedStarts:      counter("varve_distributor_dropped_start_timestamps_total", "Start timestamps left out as they are after their sample or before 2000; the samples are kept."),
		unaccounted:        counter("varve_distributor_unaccounted_samples_total", "Samples that the appender neither stored nor refused, or told of twice. Must stay 0."),
		received:           counter("varve_distributor_received_samples_total", "Samples and native histograms received, good or bad."),
		samples:            counter("varve_distributor_written_samples_total", "Float samples stored."),
		histograms:         counter("varve_distributor_written_histograms_total", "Native histograms stored."),
		exemplars:          counter("varve_distributor_written_exemplars_total", "Exemplars stored."),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:                            "varve_distributor_request_duration_seconds",
			Help:                            "Time from a write request's headers to its answer, by protocol and HTTP status.",
			Buckets:                         []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
			NativeHistogramBucketFactor:     1.1,
			NativeHistogramMaxBucketNumber:  100,
			NativeHistogramMinResetDuration: time.Hour,
		}, []string{"protocol", "code"}),
		predicted: lookups.WithLabelValues("predicted"),
		hashed:    lookups.WithLabelValues("hashed"),
		missed:    lookups.WithLabelValues("miss"),
		otlpWarnings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "varve_otlp_translation_warnings_total",
			Help: "Warnings of the translation from OTLP, by category.",
		}, []string{"category"}),
	}
	for _, c := range []prometheus.Collector{
		m.discardedSamples, m.discardedExemplars, m.discardedMetadata, m.droppedStarts, m.unaccounted,
		m.received, m.samples, m.histograms, m.exemplars, m.requests, lookups, m.otlpWarnings,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "varve_distributor_inflight_bytes",
			Help: "Memory of the writes in hand, as it is held against its bound.",
		}, func() float64 { return float64(d.inflight.used.Load()) }),
		cacheSizes{d},
	} {
		if err := reg.Register(c); err != nil {
			return nil, series.Errorf(series.Internal, "register distributor metrics: %w", err)
		}
	}
	return m, nil
}

// countRequest counts what was received.
func (m *metrics) countRequest(q *request) {
	m.received.Add(float64(q.received))
	m.predicted.Add(float64(q.predicted))
	m.hashed.Add(float64(q.hashed))
	m.missed.Add(float64(q.missed))
	m.droppedStarts.Add(float64(q.badStarts))
}

// countAppended counts what became of it. This is the one place where refusals
// are counted, whoever refused.
func (m *metrics) countAppended(res *series.Appended) {
	m.samples.Add(float64(res.Samples))
	m.histograms.Add(float64(res.Histograms))
	m.exemplars.Add(float64(res.Exemplars))
	res.Refused.Each(func(reason series.Reason, n int) {
		m.discardedSamples.WithLabelValues(string(reason)).Add(float64(n))
	})
	res.Dropped.Each(func(reason series.Reason, n int) {
		by := m.discardedExemplars
		if reason == series.ReasonMetadataLimit || reason == series.ReasonMetadataInvalid {
			by = m.discardedMetadata
		}
		by.WithLabelValues(string(reason)).Add(float64(n))
	})
}

func (m *metrics) observe(protocol string, code int, took time.Duration) {
	m.requests.WithLabelValues(protocol, strconv.Itoa(code)).Observe(took.Seconds())
}

// cacheSizes collects what the label caches of all tenants hold.
type cacheSizes struct{ d *Distributor }

func (c cacheSizes) descs() [3]*prometheus.Desc {
	return [3]*prometheus.Desc{
		prometheus.NewDesc("varve_distributor_tenants", "Tenants that wrote lately.", nil, nil),
		prometheus.NewDesc("varve_distributor_label_cache_series", "Label sets in the caches of all tenants.", nil, nil),
		prometheus.NewDesc("varve_distributor_label_cache_bytes", "Estimated memory of the label caches of all tenants.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c cacheSizes) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.descs() {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c cacheSizes) Collect(ch chan<- prometheus.Metric) {
	tenants, entries, bytes := c.d.tenants.size()
	for i, v := range []float64{float64(tenants), float64(entries), float64(bytes)} {
		ch <- prometheus.MustNewConstMetric(c.descs()[i], prometheus.GaugeValue, v)
	}
}
