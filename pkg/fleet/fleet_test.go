package fleet

import (
	"math"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"

	"github.com/varvedb/varve/pkg/series"
)

// someDay is in the middle of the simulated world.
var someDay = time.Date(2026, 3, 10, 9, 0, 0, 0, time.UTC).UnixMilli()

func testFleet(t testing.TB, change func(*Config)) *Fleet {
	t.Helper()
	cfg := DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	f, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// busy switches on everything that can happen.
func busy(c *Config) {
	c.Nodes, c.Clusters = 24, 2
	c.Profile = H100Full
	c.EXP, c.Outages, c.HostInfra = true, true, 30
	c.MIG, c.TimeSlicing, c.Failures, c.Churn = 0.1, 0.5, 20, 4
	c.Garbage, c.Sentinels = 1e-3, 1e-4
}

// counting counts what it is given.
type counting struct{ samples, histograms, exemplars, stale int }

func (c *counting) Sample(_ series.LabelBytes, _, _ int64, v float64) {
	c.samples++
	if value.IsStaleNaN(v) {
		c.stale++
	}
}
func (c *counting) Histogram(series.LabelBytes, int64, int64, *histogram.Histogram) { c.histograms++ }
func (c *counting) Exemplar(series.LabelBytes, int64, float64)                      { c.exemplars++ }

// point is one sample as it was given out.
type point struct {
	t int64
	v float64
}

// collected keeps all samples by series, described like in PromQL.
type collected struct {
	series map[string][]point
	native int
	order  []string
	traces int
}

func newCollected() *collected { return &collected{series: map[string][]point{}} }

func (c *collected) Sample(ls series.LabelBytes, _, t int64, v float64) {
	k := string(ls)
	if _, ok := c.series[k]; !ok {
		c.order = append(c.order, k)
	}
	c.series[k] = append(c.series[k], point{t, v})
}
func (c *collected) Histogram(series.LabelBytes, int64, int64, *histogram.Histogram) { c.native++ }
func (c *collected) Exemplar(series.LabelBytes, int64, float64)                      { c.traces++ }

// each calls f for every series whose metric has the name, in order of appearance.
func (c *collected) each(name string, f func(ls series.LabelBytes, ps []point)) {
	for _, k := range c.order {
		ls := series.LabelBytes(k)
		if string(ls.Get("__name__")) == name {
			f(ls, c.series[k])
		}
	}
}

// collect scrapes the targets of one kind (all for "") for replica 0.
func collect(f *Fleet, kind TargetKind, from, to int64) *collected {
	c := newCollected()
	for i := range f.targets {
		if kind == "" || f.targets[i].Kind == kind {
			for s := f.NewScraper(&f.targets[i], 0, from); s.At() < to; {
				s.Scrape(c)
			}
		}
	}
	return c
}

// digest hashes everything of one time range but stale markers, whatever the order
// of series.
type digest struct {
	from, to int64
	sum      uint64
	n        int
}

func (d *digest) add(ls series.LabelBytes, st, t int64, bits ...uint64) {
	if t < d.from || t >= d.to {
		return
	}
	k := key(xxhash.Sum64(ls)).with(uint64(st)).with(uint64(t))
	for _, b := range bits {
		k = k.with(b)
	}
	d.sum += uint64(k)
	d.n++
}

func (d *digest) Sample(ls series.LabelBytes, st, t int64, v float64) {
	if !value.IsStaleNaN(v) {
		d.add(ls, st, t, math.Float64bits(v))
	}
}

func (d *digest) Histogram(ls series.LabelBytes, st, t int64, h *histogram.Histogram) {
	if !value.IsStaleNaN(h.Sum) {
		d.add(ls, st, t, h.Count, math.Float64bits(h.Sum), uint64(len(h.PositiveBuckets)))
	}
}

func (d *digest) Exemplar(ls series.LabelBytes, t int64, v float64) {
	d.add(ls, 0, t, math.Float64bits(v))
}

func runDigest(t *testing.T, from, hashFrom, to int64, change func(*Config)) *digest {
	t.Helper()
	f := testFleet(t, change)
	d := &digest{from: hashFrom, to: to}
	for i := range f.targets {
		for r := range 2 {
			for s := f.NewScraper(&f.targets[i], r, from); s.At() < to; {
				s.Scrape(d)
			}
		}
	}
	return d
}

func TestSameSeedSameSamples(t *testing.T) {
	change := func(c *Config) { busy(c); c.Nodes = 8; c.TargetSeries = false }
	from, to := someDay, someDay+80*minute
	late := someDay + 50*minute + 7*second
	a := runDigest(t, from, late+minute, to, change)
	if a.n < 100_000 {
		t.Fatalf("only %d samples were compared", a.n)
	}
	if b := runDigest(t, from, late+minute, to, change); a.sum != b.sum || a.n != b.n {
		t.Errorf("two runs differ: %d samples with digest %x, then %d with %x", a.n, a.sum, b.n, b.sum)
	}
	// A minute after its start a run no longer shows that exemplars of held values
	// were given out before it began.
	if c := runDigest(t, late, late+minute, to, change); a.sum != c.sum || a.n != c.n {
		t.Errorf("a start in the middle differs: %d samples with digest %x, instead of %d with %x", c.n, c.sum, a.n, a.sum)
	}
	other := runDigest(t, from, late+minute, to, func(c *Config) { change(c); c.Seed = 2 })
	if other.sum == a.sum {
		t.Error("another seed gives the same samples")
	}
}

func TestStartInTheMiddleOfEventfulTimes(t *testing.T) {
	// Scrapers that go on for three weeks against scrapers made at each instant.
	change := func(c *Config) { busy(c); c.Nodes, c.Clusters, c.Outages, c.Failures = 4, 1, false, 60 }
	f := testFleet(t, change)
	for i := range f.targets {
		tg := &f.targets[i]
		if tg.Kind == HostTarget {
			continue
		}
		old := tg.newSource(0)
		for at := someDay; at < someDay+15*day; at += 97 * minute {
			fresh := tg.newSource(0)
			up := old.refresh(at)
			if got := fresh.refresh(at); got != up {
				t.Fatalf("%s at %d: up is %v for a fresh source, %v for an old one", tg.Path(), at, got, up)
			}
			if up {
				sameGroups(t, tg, at, old.groups(), fresh.groups())
			}
			if t.Failed() {
				return
			}
		}
	}
}

func sameGroups(t *testing.T, tg *Target, at int64, old, fresh []*group) {
	t.Helper()
	if len(old) != len(fresh) {
		t.Errorf("%s at %d: %d groups, a fresh source has %d", tg.Path(), at, len(old), len(fresh))
		return
	}
	for i := range old {
		if !old[i].sameLabels(fresh[i]) {
			t.Errorf("%s at %d: labels of group %d differ: %s and %s", tg.Path(), at, i, old[i].text, fresh[i].text)
			return
		}
		for k := range old[i].vals {
			if math.Float64bits(old[i].vals[k]) != math.Float64bits(fresh[i].vals[k]) {
				t.Errorf("%s at %d: %s{%s} is %v, a fresh source has %v", tg.Path(), at, old[i].line(k).metric, old[i].text, old[i].vals[k], fresh[i].vals[k])
				return
			}
		}
	}
}

func TestLabelBytesAreCanonical(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"plain":               busy,
		"target labels":       func(c *Config) { busy(c); c.Kubernetes = true },
		"after the renaming":  func(c *Config) { busy(c); c.Exporter = V490 },
		"the older spelling":  func(c *Config) { busy(c); c.Exporter = V482 },
		"another replica tag": func(c *Config) { busy(c); c.ReplicaLabel = "__replica__" },
	} {
		t.Run(name, func(t *testing.T) {
			f := testFleet(t, change)
			c := collect(f, "", someDay, someDay+minute)
			var sb labels.ScratchBuilder
			for _, k := range c.order {
				ls := series.LabelBytes(k)
				built := ls.Labels(&sb)
				if again := series.AppendLabels(nil, built); string(again) != k {
					t.Fatalf("%s: bytes are not those of its labels", ls)
				}
				sb.Reset()
				built.Range(func(l labels.Label) { sb.Add(l.Name, l.Value) })
				sb.Sort()
				if sorted := sb.Labels(); !labels.Equal(sorted, built) {
					t.Fatalf("%s: labels are not sorted", ls)
				}
				if name, dup := built.HasDuplicateLabelNames(); dup {
					t.Fatalf("%s: label %s stands twice", ls, name)
				}
				for _, want := range []string{"__name__", "cluster", "job", "instance", "prometheus", f.cfg.ReplicaLabel} {
					if ls.Get(want) == nil {
						t.Fatalf("%s: no label %s", ls, want)
					}
				}
			}
		})
	}
}

func TestConfigIsChecked(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no nodes":                   func(c *Config) { c.Nodes = 0 },
		"more clusters than nodes":   func(c *Config) { c.Clusters = 11 },
		"no GPUs":                    func(c *Config) { c.GPUsPerNode = 0 },
		"an unknown profile":         func(c *Config) { c.Profile = "a100" },
		"an unknown exporter":        func(c *Config) { c.Exporter = "1.0" },
		"an interval of nothing":     func(c *Config) { c.ScrapeInterval = 0 },
		"a share above one":          func(c *Config) { c.Inference = 1.1 },
		"a share that is no number":  func(c *Config) { c.Liquid = math.NaN() },
		"shares above one in sum":    func(c *Config) { c.Inference, c.Video = 0.6, 0.6 },
		"a negative rate":            func(c *Config) { c.Failures = -1 },
		"a replica label of nothing": func(c *Config) { c.ReplicaLabel = "" },
	} {
		cfg := DefaultConfig()
		change(&cfg)
		if _, err := New(cfg); series.KindOf(err) != series.Invalid {
			t.Errorf("%s: got error %v, want an invalid one", name, err)
		}
	}
}

func BenchmarkScrape(b *testing.B) {
	for _, p := range []Profile{Default25, H100Full} {
		for _, collect := range []time.Duration{30 * time.Second, 15 * time.Second} {
			b.Run(string(p)+"/collect="+collect.String(), func(b *testing.B) {
				f := testFleet(b, func(c *Config) { c.Nodes, c.Profile, c.CollectInterval = 50, p, collect })
				var scrapers []*Scraper
				for i := range f.targets {
					if f.targets[i].Kind == NodeTarget {
						scrapers = append(scrapers, f.NewScraper(&f.targets[i], 0, someDay))
					}
				}
				c := &counting{}
				for _, s := range scrapers {
					s.Scrape(c)
				}
				*c = counting{}
				b.ReportAllocs()
				b.ResetTimer()
				for i := range b.N {
					scrapers[i%len(scrapers)].Scrape(c)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(c.samples), "ns/sample")
			})
		}
	}
}

// BenchmarkFirst is what it costs to begin with a target: the jobs of a quarter are
// summed, and all labels are made.
func BenchmarkFirst(b *testing.B) {
	f := testFleet(b, func(c *Config) { c.Nodes = 40; c.EXP = true })
	for _, k := range []TargetKind{NodeTarget, VLLMTarget, TrainTarget, CDUTarget} {
		b.Run(string(k), func(b *testing.B) {
			var scrapers []*Target
			for i := range f.targets {
				if f.targets[i].Kind == k {
					scrapers = append(scrapers, &f.targets[i])
				}
			}
			c := &counting{}
			for i := range b.N {
				f.NewScraper(scrapers[i%len(scrapers)], 0, someDay).Scrape(c)
			}
		})
	}
}
