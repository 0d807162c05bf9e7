package ingester

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/varvedb/varve/ingester/walrepair"
)

// metrics are the ingester's own; TSDB's come by Gather.
type metrics struct {
	late           prometheus.Counter
	uploads        prometheus.Counter
	uploadFailures prometheus.Counter
	damagedBlocks  prometheus.Counter
	setAside       prometheus.Counter
	walDamage      *prometheus.CounterVec
	walLost        *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, i *Ingester) *metrics {
	m := &metrics{
		late: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "varve_ingester_late_samples_total",
			Help: "Samples stored out of order, within the late window.",
		}),
		uploads: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "varve_ingester_block_uploads_total",
			Help: "Blocks uploaded to the bucket.",
		}),
		uploadFailures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "varve_ingester_block_upload_failures_total",
			Help: "Block uploads that failed; they are tried again.",
		}),
		damagedBlocks: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "varve_ingester_damaged_blocks_total",
			Help: "Blocks not uploaded as they cannot be read to their end; counted in each round.",
		}),
		setAside: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "varve_ingester_set_aside_total",
			Help: "Blocks and head chunks that could not be opened and were moved to the tenant's folder set-aside.",
		}),
		walDamage: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "varve_ingester_wal_damage_total",
			Help: "Damaged places found in WALs at start, by kind: a torn tail is what a hard stop leaves, the others are faults of the disk.",
		}, []string{"kind"}),
		walLost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "varve_ingester_wal_lost_bytes_total",
			Help: "Bytes of damaged WAL records that could not be read at start, by kind of damage.",
		}, []string{"kind"}),
	}
	for _, kind := range []walrepair.Kind{walrepair.TornTail, walrepair.Corruption, walrepair.MissingSegment} {
		m.walDamage.WithLabelValues(string(kind))
		m.walLost.WithLabelValues(string(kind))
	}
	if reg != nil {
		reg.MustRegister(m.late, m.uploads, m.uploadFailures, m.damagedBlocks, m.setAside, m.walDamage, m.walLost, &state{i})
	}
	return m
}

func (m *metrics) countRepair(r walrepair.Report) {
	for _, d := range r.Damages {
		m.walDamage.WithLabelValues(string(d.Kind)).Inc()
		m.walLost.WithLabelValues(string(d.Kind)).Add(float64(d.Bytes))
	}
}

// state collects what the ingester holds at the moment of asking.
type state struct{ i *Ingester }

var (
	descTenants = prometheus.NewDesc("varve_ingester_tenants", "Tenants known on this disk, by state: open, or closed, as idle ones are.", []string{"state"}, nil)
	descSeries  = prometheus.NewDesc("varve_ingester_series", "Series in the heads of all tenants.", nil, nil)
	descPending = prometheus.NewDesc("varve_ingester_blocks_pending_upload", "Local blocks that are not in the bucket yet.", nil, nil)
	descBroken  = prometheus.NewDesc("varve_ingester_tenants_failed", "Tenants that take no writes, because their WAL could not be written, or that cannot be opened at all.", nil, nil)
	descFull    = prometheus.NewDesc("varve_ingester_disk_full", "1 while writes are refused for want of disk space.", nil, nil)
)

// Describe implements prometheus.Collector.
func (*state) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descTenants, descSeries, descPending, descBroken, descFull} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *state) Collect(ch chan<- prometheus.Metric) {
	var open, pending, broken int
	var heads uint64
	s.i.eachOpen(func(t *tenantDB) {
		open++
		heads += t.db.Head().NumSeries()
		pending += t.pendingUploads()
	})
	all := s.i.all()
	for _, t := range all {
		if t.sick() {
			broken++
		}
	}
	full := 0
	if s.i.diskFull.Load() {
		full = 1
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(descTenants, float64(open), "open")
	gauge(descTenants, float64(len(all)-open), "closed")
	gauge(descSeries, float64(heads))
	gauge(descPending, float64(pending))
	gauge(descBroken, float64(broken))
	gauge(descFull, float64(full))
}
