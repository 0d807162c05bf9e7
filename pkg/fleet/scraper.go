package fleet

import (
	"math"
	"slices"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/value"

	"github.com/varvedb/varve/pkg/series"
)

// Appender takes what scrapes yield. Label bytes and histograms are lent for the
// call only. Times are Unix milliseconds.
type Appender interface {
	// Sample takes a float. st is when a cumulative value began, 0 if unknown.
	Sample(ls series.LabelBytes, st, t int64, v float64)
	// Histogram takes a native histogram.
	Histogram(ls series.LabelBytes, st, t int64, h *histogram.Histogram)
	// Exemplar takes an exemplar of the series of the call before.
	Exemplar(ls series.LabelBytes, t int64, v float64)
}

// MetadataAppender is an Appender that also wants the family of every sample, right
// after the sample.
type MetadataAppender interface {
	Appender
	Metadata(m series.Metadata)
}

// Scraper is one Prometheus' scrape loop for one target: it knows when to scrape,
// what the scrape before gave, and so which series have ended. It is not safe for
// concurrent use.
type Scraper struct {
	f       *Fleet
	target  *Target
	replica int
	src     source
	self    *group // up and its like
	valid   span   // of self's labels

	slot  int64 // grid time of the next scrape
	next  int64 // its timestamp
	prev  []*group
	buf   []byte
	total int

	describe MetadataAppender // the receiver of this scrape, if it wants metadata
}

// NewScraper returns the scrape loop of replica (0 or 1 for twins) for tg. Its first
// scrape is the first at or after the time given.
func (f *Fleet) NewScraper(tg *Target, replica int, from int64) *Scraper {
	s := &Scraper{f: f, target: tg, replica: replica, src: tg.newSource(replica)}
	s.seek(max(from, epoch+day))
	return s
}

// Target returns what is scraped.
func (s *Scraper) Target() *Target { return s.target }

// At returns the timestamp of the next scrape.
func (s *Scraper) At() int64 { return s.next }

// SentAt returns when the samples of the next scrape leave the Prometheus: at once,
// or after an outage of its network.
func (s *Scraper) SentAt() int64 {
	if !s.f.cfg.Outages {
		return s.next
	}
	if o := s.f.outageAt(s.replica, s.next); o.kind == networkOut && o.has(s.next) {
		return o.to
	}
	return s.next
}

// Scrape makes the next scrape and returns the number of samples.
func (s *Scraper) Scrape(to Appender) int {
	n := s.scrapeAt(s.next, to)
	s.advance()
	return n
}

func (s *Scraper) seek(t int64) {
	interval := s.f.cfg.ScrapeInterval.Milliseconds()
	offset := s.offset(t)
	s.slot = floorDiv(t-offset+interval-1, interval)*interval + offset
	s.skipOutage()
}

func (s *Scraper) advance() {
	interval := s.f.cfg.ScrapeInterval.Milliseconds()
	s.slot += interval
	s.skipOutage()
}

// skipOutage moves the next scrape out of times at which this Prometheus is down.
// Its restart means a new offset and a loop that knows of no earlier series.
func (s *Scraper) skipOutage() {
	interval := s.f.cfg.ScrapeInterval.Milliseconds()
	for s.f.cfg.Outages {
		o := s.f.outageAt(s.replica, s.slot)
		if o.kind != processDown || !o.has(s.slot) {
			break
		}
		offset := s.offset(o.to)
		s.slot = floorDiv(o.to-offset+interval-1, interval)*interval + offset
		s.forget()
	}
	s.next = s.slot + s.jitter()
}

func (s *Scraper) forget() {
	for _, g := range s.prev {
		clear(g.sent)
	}
	s.prev = nil
}

// offset is where in the interval the target's scrapes lie: fixed for one life of
// the Prometheus.
func (s *Scraper) offset(t int64) int64 {
	k := s.target.key.with(1).with(uint64(s.replica))
	if s.f.cfg.Outages {
		k = k.with(uint64(s.f.lives(s.replica, t)))
	}
	return int64(k.unit() * float64(s.f.cfg.ScrapeInterval.Milliseconds()))
}

// jitter is how far the timestamp is off the grid: Prometheus hides small delays, a
// hundredth is off by 3 to 50 ms.
func (s *Scraper) jitter() int64 {
	k := s.target.key.with(2).with(uint64(s.replica)).with(uint64(s.slot))
	if s.f.cfg.JitterOff || k.unit() >= 0.01 {
		return 0
	}
	j := int64(k.with(1).between(3, 51))
	if k.with(2).unit() < 0.5 {
		return -j
	}
	return j
}

// outage is a time at which a Prometheus is down or cut off.
type outage struct {
	span
	kind outageKind
}

type outageKind uint8

const (
	noOutage outageKind = iota
	processDown
	networkOut
)

// outageAt returns the outage of the replica nearest before or at t: in one week ten
// minutes down, in the next up to two hours without a network; and both replicas
// together are down for half a minute a month.
func (f *Fleet) outageAt(replica int, t int64) outage {
	const month = 30 * day
	mk := f.key.with(110).with(uint64(t / month))
	both := t/month*month + int64(mk.unit()*float64(month-minute))
	if t >= both && t < both+30*second {
		return outage{span{both, both + 30*second}, processDown}
	}
	w := floorDiv(t, week)
	k := f.key.with(111).with(uint64(replica)).with(uint64(w))
	at := w*week + int64(k.unit()*float64(week-3*hour))
	if (w+int64(replica))%2 == 0 {
		return outage{span{at, at + 10*minute}, processDown}
	}
	return outage{span{at, at + int64(k.with(1).between(10, 120)*float64(minute))}, networkOut}
}

// lives counts the restarts of a replica's Prometheus up to t, give or take a
// constant.
func (f *Fleet) lives(replica int, t int64) int64 {
	const month = 30 * day
	w := floorDiv(t, week)
	n := (w + int64(replica) + 1) / 2
	if o := f.outageAt(replica, t); o.kind == processDown && o.to-o.from == 10*minute && t >= o.to {
		n++
	}
	mk := f.key.with(110).with(uint64(t / month))
	m := t / month
	if t >= m*month+int64(mk.unit()*float64(month-minute)) {
		m++
	}
	return n*1000 + m
}

// scrapeAt makes the scrape with timestamp t.
func (s *Scraper) scrapeAt(t int64, to Appender) int {
	s.total = 0
	s.describe, _ = to.(MetadataAppender)
	up := s.src.refresh(t)
	scraped, added := 0, 0
	var now []*group
	if up {
		now = s.src.groups()
	}
	if !slices.Equal(s.prev, now) {
		for _, g := range s.prev {
			if !slices.Contains(now, g) {
				s.end(g, t, to)
			}
		}
	}
	for _, g := range now {
		n, fresh := s.emit(g, t, to)
		scraped, added = scraped+n, added+fresh
	}
	s.prev = append(s.prev[:0], now...)
	if s.f.cfg.TargetSeries {
		s.emitSelf(t, up, scraped, added, to)
	}
	return s.total
}

var staleNaN = math.Float64frombits(value.StaleNaN)

// staleHistogram marks the end of a native histogram's series.
var staleHistogram = &histogram.Histogram{Sum: staleNaN}

// emit gives out the group's series, and marks for those that are gone.
func (s *Scraper) emit(g *group, t int64, to Appender) (scraped, fresh int) {
	b := append(s.buf[:0], g.head...)
	var ls []byte
	for i, v := range g.vals {
		gone := isAbsent(v)
		if gone && !g.sent[i] {
			continue
		}
		l := g.line(i)
		ls, b = g.labels(b, i)
		s.total++
		if gone {
			g.sent[i] = false
			s.stale(l, ls, t, to)
			continue
		}
		scraped++
		if !g.sent[i] {
			fresh++
			g.sent[i] = true
		}
		s.give(g, i, ls, t, v, to)
	}
	s.buf = b
	return scraped, fresh
}

// give hands on one sample and what belongs to it.
func (s *Scraper) give(g *group, i int, ls []byte, t int64, v float64, to Appender) {
	l := g.line(i)
	st := int64(0)
	if l.st {
		st = g.start
	}
	if l.native != nil {
		to.Histogram(ls, st, t, l.native)
	} else {
		to.Sample(ls, st, t, v)
	}
	if s.describe != nil && l.family.kind != "" {
		s.describe.Metadata(l.family.metadata())
	}
	if x := g.exemplar; x != nil && x.line == i && !x.sent {
		x.sent = true // Prometheus passes each exemplar on once
		to.Exemplar(x.labels, x.t, x.v)
	}
}

// end marks the end of all of a group's series.
func (s *Scraper) end(g *group, t int64, to Appender) {
	b := append(s.buf[:0], g.head...)
	var ls []byte
	for i, sent := range g.sent {
		if !sent {
			continue
		}
		g.sent[i] = false
		ls, b = g.labels(b, i)
		s.total++
		s.stale(g.line(i), ls, t, to)
	}
	s.buf = b
}

func (s *Scraper) stale(l *line, ls series.LabelBytes, t int64, to Appender) {
	if l.native != nil {
		to.Histogram(ls, 0, t, staleHistogram)
		return
	}
	to.Sample(ls, 0, t, staleNaN)
}

var selfFamilies = [...]family{
	{name: "up"}, {name: "scrape_duration_seconds"}, {name: "scrape_samples_scraped"},
	{name: "scrape_samples_post_metric_relabeling"}, {name: "scrape_series_added"},
}

// emitSelf gives out what Prometheus itself records of a scrape.
func (s *Scraper) emitSelf(t int64, up bool, scraped, added int, to Appender) {
	if !s.valid.has(t) {
		s.relabel(t, to)
	}
	k := s.target.key.with(3).with(uint64(t))
	took := 0.004 + 0.00001*float64(scraped)*k.lognorm(1, 0.3)
	if up {
		took *= s.src.slowness(t)
	} else {
		took = 10.0001
	}
	s.self.vals[0], s.self.vals[1] = truth(up), math.Round(took*1e9)/1e9
	s.self.vals[2], s.self.vals[3], s.self.vals[4] = float64(scraped), float64(scraped), float64(added)
	s.emit(s.self, t, to)
}

// relabel follows a change of the target's address.
func (s *Scraper) relabel(t int64, to Appender) {
	var e exporter
	s.valid = always
	if s.target.node != nil {
		e, s.valid = s.f.exporterAt(s.target.node, t)
	}
	var extra []extraLine
	for i := range selfFamilies {
		extra = append(extra, extraLine{family: &selfFamilies[i], name: selfFamilies[i].name})
	}
	g := newGroup(groupSpec{target: s.target.labels(s.replica, e)}, nil, extra)
	if s.self != nil && s.self.sameLabels(g) {
		return
	}
	if s.self != nil {
		s.end(s.self, t, to)
	}
	s.self = g
}
