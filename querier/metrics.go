package querier

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	duration *prometheus.HistogramVec
	running  prometheus.Gauge
	waiting  *prometheus.GaugeVec
	refused  *prometheus.CounterVec
	partial  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:                        "varve_query_duration_seconds",
			Help:                        "Time from a read request's first byte to its answer's last, by endpoint and status code.",
			Buckets:                     []float64{.001, .005, .025, .1, .5, 1, 5, 30, 120},
			NativeHistogramBucketFactor: 1.1,
		}, []string{"endpoint", "code"}),
		running: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "varve_queries_running",
			Help: "Read requests that hold a slot now.",
		}),
		waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "varve_queries_waiting",
			Help: "Read requests that wait for a slot now.",
		}, []string{"gate"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "varve_queries_refused_total",
			Help: "Read requests answered 503 because no slot became free in time.",
		}, []string{"gate"}),
		partial: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "varve_queries_partial_total",
			Help: "Selections that were answered without what a warning names.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.duration, m.running, m.waiting, m.refused, m.partial)
	}
	return m
}
