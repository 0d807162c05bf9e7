package blocks

import "github.com/prometheus/client_golang/prometheus"

type counters struct {
	listFailures     prometheus.Counter
	downloads        prometheus.Counter
	downloadFailures prometheus.Counter
	damage           prometheus.Counter
}

func newCounters(reg prometheus.Registerer) *counters {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		if reg != nil {
			reg.MustRegister(c)
		}
		return c
	}
	return &counters{
		listFailures:     counter("varve_blocks_list_failures_total", "Readings of a tenant's list of blocks that failed."),
		downloads:        counter("varve_blocks_downloads_total", "Blocks fetched from the bucket into the cache."),
		downloadFailures: counter("varve_blocks_download_failures_total", "Blocks that could not be fetched from the bucket."),
		damage:           counter("varve_blocks_damage_total", "Blocks, or copies of them, in which a query found damage."),
	}
}

// collector measures lists and pool when asked.
type collector struct{ s *Store }

var (
	descListed   = prometheus.NewDesc("varve_blocks", "Blocks that queries read, of the tenants with a current list.", nil, nil)
	descAside    = prometheus.NewDesc("varve_blocks_set_aside", "Blocks that cannot be read; queries that need them fail.", []string{"reason"}, nil)
	descCoarse   = prometheus.NewDesc("varve_blocks_downsampled", "Downsampled blocks, which are not read yet.", nil, nil)
	descMarked   = prometheus.NewDesc("varve_blocks_marked", "Blocks left out because they are marked for deletion.", nil, nil)
	descOpen     = prometheus.NewDesc("varve_blocks_open", "Blocks that are open now.", nil, nil)
	descBytes    = prometheus.NewDesc("varve_blocks_cache_bytes", "Bytes of the copies of blocks on local disk.", nil, nil)
	descOldest   = prometheus.NewDesc("varve_blocks_list_age_seconds", "Age of the oldest list of blocks that is kept up to date.", nil, nil)
	everyReason  = []reason{reasonMeta, reasonIdentity, reasonMissing, reasonSize, reasonUnreadable, reasonDamaged}
	descriptions = []*prometheus.Desc{descListed, descAside, descCoarse, descMarked, descOpen, descBytes, descOldest}
)

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descriptions {
		ch <- d
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	l := c.s.lister
	now := l.now()
	var listed, coarse, marked int
	var age float64
	aside := map[reason]int{}
	l.mu.Lock()
	for _, t := range l.tenants {
		current := t.current.Load()
		if current == nil {
			continue
		}
		if len(current.blocks) > 0 { // empty ones are read when they are asked for
			age = max(age, now.Sub(current.at).Seconds())
		}
		for _, b := range current.blocks {
			switch {
			case b.coarse:
				coarse++
			case !l.use(b, now):
				marked++
			case b.damage != nil:
				aside[b.why]++
			default:
				listed++
			}
		}
	}
	l.mu.Unlock()
	open, bytes := c.s.pool.usage()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(descListed, float64(listed))
	gauge(descCoarse, float64(coarse))
	gauge(descMarked, float64(marked))
	gauge(descOpen, float64(open))
	gauge(descBytes, float64(bytes))
	gauge(descOldest, age)
	for _, r := range everyReason {
		gauge(descAside, float64(aside[r]), string(r))
	}
}
