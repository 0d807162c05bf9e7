package fleet

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/tsdb/chunkenc"

	"github.com/varvedb/varve/pkg/series"
)

// packer appends samples to XOR chunks of 120, as Prometheus does, and counts bytes
// by class.
type packer struct {
	f      *Fleet
	open   map[string]*packed
	costs  map[Class]*cost
	errors int
}

type packed struct {
	class Class
	chunk *chunkenc.XORChunk
	app   chunkenc.Appender
	n     int
}

type cost struct{ samples, bytes int }

func (c cost) perSample() float64 { return float64(c.bytes) / float64(c.samples) }

func (p *packer) Sample(ls series.LabelBytes, _, t int64, v float64) {
	s := p.open[string(ls)]
	if s == nil {
		s = &packed{class: p.f.ClassOf(string(ls.Get("__name__")))}
		p.open[string(ls)] = s
	}
	if s.class == "" {
		return
	}
	if s.chunk == nil {
		s.chunk = chunkenc.NewXORChunk()
		s.app, _ = s.chunk.Appender()
	}
	s.app.Append(0, t, v)
	if s.n++; s.n == 120 {
		c := p.costs[s.class]
		if c == nil {
			c = &cost{}
			p.costs[s.class] = c
		}
		c.samples += s.n
		c.bytes += len(s.chunk.Bytes())
		s.chunk, s.n = nil, 0
	}
}

func (p *packer) Histogram(series.LabelBytes, int64, int64, *histogram.Histogram) {}
func (p *packer) Exemplar(series.LabelBytes, int64, float64)                      {}

func measure(t *testing.T, profile Profile, collect time.Duration) (map[Class]*cost, cost) {
	f := testFleet(t, func(c *Config) {
		c.Nodes, c.Profile, c.CollectInterval = 8, profile, collect
		c.Inference, c.Video, c.MIG, c.Cooling, c.Training, c.TargetSeries = 0, 0, 0, false, false, false
	})
	p := &packer{f: f, open: map[string]*packed{}, costs: map[Class]*cost{}}
	for i := range f.targets {
		// Whole chunks only, spread over a week, so that all kinds of phases count.
		from := someDay + int64(i)*17*hour
		for s := f.NewScraper(&f.targets[i], 0, from); s.At() < from+121*30*second; {
			s.Scrape(p)
		}
	}
	var all cost
	for _, c := range p.costs {
		all.samples += c.samples
		all.bytes += c.bytes
	}
	return p.costs, all
}

func TestXORCostPerClass(t *testing.T) {
	// What the processes of fleet.md 3.3 cost, measured there on single synthetic
	// series; ours include idle times (NVLink is then
	// 0), failures and chunk headers.
	type bounds struct{ from, to float64 }
	want := map[Class]bounds{Constant: {0.3, 0.7}, Event: {0.3, 0.6}, Small: {0.5, 1.8}, Milli: {4, 7.6}, Micro: {4, 7.6}, Noisy: {1.8, 5.8}, Monotone: {2, 7}}
	for _, profile := range []Profile{Default25, H100Full} {
		for _, collect := range []time.Duration{15 * time.Second, 30 * time.Second} {
			costs, all := measure(t, profile, collect)
			classes := make([]Class, 0, len(costs))
			for c := range costs {
				classes = append(classes, c)
			}
			slices.Sort(classes)
			for _, c := range classes {
				got := costs[c].perSample()
				t.Logf("%s, collected every %v: class %-2s %4.1f%% of samples, %.2f B/sample", profile, collect, c, 100*float64(costs[c].samples)/float64(all.samples), got)
				if b, ok := want[c]; ok && collect == 15*time.Second && (got < b.from || got > b.to) {
					t.Errorf("%s: class %s costs %.2f B/sample, want %v to %v", profile, c, got, b.from, b.to)
				}
			}
			t.Logf("%s, collected every %v: all %.2f B/sample", profile, collect, all.perSample())
			if math.IsNaN(all.perSample()) || all.perSample() > 3 {
				t.Errorf("%s: %.2f B/sample", profile, all.perSample())
			}
		}
	}
}
