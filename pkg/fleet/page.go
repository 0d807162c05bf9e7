package fleet

import (
	"io"

	"github.com/varvedb/varve/pkg/series"
)

// Page is a target's exposition page. It is not safe for concurrent use.
type Page struct {
	target *Target
	src    source
	buf    []byte
}

// NewPage returns the page of tg.
func (f *Fleet) NewPage(tg *Target) *Page { return &Page{target: tg, src: tg.newSource(-1)} }

// OpenMetrics tells whether the target's exporter knows that format, which has
// exemplars. DCGM's does not: its counters are not named as the format wants.
func (p *Page) OpenMetrics() bool { return p.target.Kind == VLLMTarget || p.target.Kind == TrainTarget }

// Write writes what the target shows at t (Unix milliseconds), in Prometheus' text
// format or in OpenMetrics. Native histograms have no place in either. A target that
// does not answer is an error of kind Unavailable.
func (p *Page) Write(w io.Writer, t int64, openMetrics bool) error {
	if !p.src.refresh(max(t, epoch+day)) {
		return series.Errorf(series.Unavailable, "scrape %s: the target is down", p.target.Path())
	}
	p.buf = writePage(p.buf[:0], p.src.groups(), openMetrics)
	_, err := w.Write(p.buf)
	return err
}
