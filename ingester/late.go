package ingester

import (
	"context"
	"fmt"
	"math"
	"strconv"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
)

// sample is a stored value, to be compared with one that comes late.
type sample struct {
	v  float64
	h  *histogram.Histogram
	fh *histogram.FloatHistogram
}

// equal compares by bits, so that a NaN sent twice is the same sample, and 0 and -0
// are different ones (case RW-06).
func (s sample) equal(v float64, h *histogram.Histogram, fh *histogram.FloatHistogram) bool {
	switch {
	case s.h != nil && h == nil && fh == nil:
		return value.IsStaleNaN(v) && value.IsStaleNaN(s.h.Sum) // a marker is sent as a float
	case s.fh != nil && h == nil && fh == nil:
		return value.IsStaleNaN(v) && value.IsStaleNaN(s.fh.Sum)
	case s.h != nil:
		return h != nil && s.h.Equals(h)
	case s.fh != nil:
		return fh != nil && s.fh.Equals(fh)
	default:
		return h == nil && fh == nil && math.Float64bits(s.v) == math.Float64bits(v)
	}
}

func (s sample) String() string { return describe(s.v, s.h, s.fh) }

func describe(v float64, h *histogram.Histogram, fh *histogram.FloatHistogram) string {
	switch {
	case h != nil:
		return fmt.Sprintf("histogram(count %d, sum %v)", h.Count, h.Sum)
	case fh != nil:
		return fmt.Sprintf("histogram(count %v, sum %v)", fh.Count, fh.Sum)
	default:
		return strconv.FormatFloat(v, 'g', -1, 64)
	}
}

// lateReader looks up what is stored at one moment of one series. It is only used
// for samples that come out of order, which TSDB appends without a look at what is
// there: a second value for the same moment would be kept beside the first, and
// which one a query shows would be chance.
type lateReader struct {
	// guard is an open querier over all there is: while it is there, TSDB waits
	// before it truncates the head or unmaps its chunk files, which the look-ups by
	// reference read without being known to it.
	guard storage.Querier

	builder labels.ScratchBuilder
	metas   []chunks.Meta
	it      chunkenc.Iterator
}

// find returns the sample of the series at time at (ms). The head is asked by
// reference, which costs no index look-up; blocks only where they cover at.
func (r *lateReader) find(ctx context.Context, db *tsdb.DB, ref storage.SeriesRef, ls labels.Labels, at int64) (sample, bool, error) {
	if r.guard == nil {
		var err error
		if r.guard, err = db.Querier(math.MinInt64, math.MaxInt64); err != nil {
			return sample{}, false, err
		}
	}
	if !blocksCover(db, at) {
		if s, found, err := r.inHead(db.Head(), ref, at); err == nil {
			return s, found, nil
		}
		// The head moved on under us: what it held may be in a block by now.
	}
	return r.anywhere(ctx, db, ls, at)
}

func blocksCover(db *tsdb.DB, at int64) bool {
	for _, b := range db.Blocks() {
		if b.OverlapsClosedInterval(at, at) {
			return true
		}
	}
	return false
}

func (r *lateReader) inHead(head *tsdb.Head, ref storage.SeriesRef, at int64) (sample, bool, error) {
	index := tsdb.NewHeadAndOOOIndexReader(head, at, at, at, 0)
	if err := index.Series(ref, &r.builder, &r.metas); err != nil {
		return sample{}, false, err
	}
	reader := tsdb.NewHeadAndOOOChunkReader(head, at, at, nil, nil, 0)
	defer reader.Close()
	for _, m := range r.metas {
		if at < m.MinTime || at > m.MaxTime {
			continue
		}
		chunk, iterable, err := reader.ChunkOrIterable(m)
		if err != nil {
			return sample{}, false, err
		}
		if iterable == nil {
			iterable = chunk
		}
		r.it = iterable.Iterator(r.it)
		if s, found := seek(r.it, at); found || r.it.Err() != nil {
			return s, found, r.it.Err()
		}
	}
	return sample{}, false, nil
}

// anywhere asks head and local blocks by labels.
func (r *lateReader) anywhere(ctx context.Context, db *tsdb.DB, ls labels.Labels, at int64) (sample, bool, error) {
	q, err := db.Querier(at, at)
	if err != nil {
		return sample{}, false, err
	}
	defer q.Close()
	set := q.Select(ctx, false, nil, exactMatchers(ls)...)
	for set.Next() {
		if !labels.Equal(set.At().Labels(), ls) {
			continue // it has these labels and more
		}
		r.it = set.At().Iterator(r.it)
		if s, found := seek(r.it, at); found || r.it.Err() != nil {
			return s, found, r.it.Err()
		}
	}
	return sample{}, false, set.Err()
}

func exactMatchers(ls labels.Labels) []*labels.Matcher {
	ms := make([]*labels.Matcher, 0, ls.Len())
	ls.Range(func(l labels.Label) {
		ms = append(ms, labels.MustNewMatcher(labels.MatchEqual, l.Name, l.Value))
	})
	return ms
}

func seek(it chunkenc.Iterator, at int64) (sample, bool) {
	switch it.Seek(at) {
	case chunkenc.ValFloat:
		t, v := it.At()
		return sample{v: v}, t == at
	case chunkenc.ValHistogram:
		t, h := it.AtHistogram(nil)
		return sample{h: h}, t == at
	case chunkenc.ValFloatHistogram:
		t, fh := it.AtFloatHistogram(nil)
		return sample{fh: fh}, t == at
	}
	return sample{}, false
}

// close drops what the reader holds of a tenant.
func (r *lateReader) close() {
	if r.guard != nil {
		r.guard.Close() // it has read nothing: its errors are nobody's
		r.guard = nil
	}
	clear(r.metas)
	r.metas = r.metas[:0]
	r.it = nil
}
