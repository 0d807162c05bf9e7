package fleet

import (
	"bytes"
	"hash/fnv"
	"io"
	"math"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/histogram"

	"github.com/varvedb/varve/pkg/series"
)

// counting counts what it is given.
type counting struct{ samples, histograms, exemplars, stale int }

func (c *counting) Sample(_ series.LabelBytes, _, _ int64, v float64) {
	c.samples++
	if math.Float64bits(v) == math.Float64bits(staleNaN) {
		c.stale++
	}
}
func (c *counting) Histogram(series.LabelBytes, int64, int64, *histogram.Histogram) { c.histograms++ }
func (c *counting) Exemplar(series.LabelBytes, int64, float64)                      { c.exemplars++ }

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

// someDay is in the middle of the simulated world.
var someDay = time.Date(2026, 3, 10, 9, 0, 0, 0, time.UTC).UnixMilli()

func TestSmoke(t *testing.T) {
	f := testFleet(t, nil)
	var b bytes.Buffer
	if err := f.NewPage(&f.targets[0]).Write(&b, someDay); err != nil {
		t.Fatal(err)
	}
	t.Log(b.String()[:min(6000, b.Len())])
	_ = fnv.New64
	_ = io.Discard
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
