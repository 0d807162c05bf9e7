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

// Write writes what the target shows at t (Unix milliseconds), in Prometheus' text
// format. A target that does not answer is an error of kind Unavailable.
func (p *Page) Write(w io.Writer, t int64) error {
	if !p.src.refresh(max(t, epoch+day)) {
		return series.Errorf(series.Unavailable, "scrape %s: the target is down", p.target.Path())
	}
	p.buf = writePage(p.buf[:0], p.src.groups())
	_, err := w.Write(p.buf)
	return err
}
