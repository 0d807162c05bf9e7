package blocks

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/util/annotations"
	"golang.org/x/sync/errgroup"

	"github.com/varvedb/varve/pkg/series"
)

// reader is what samples and chunks are read with alike: the planned blocks, opened
// when a selection needs them and held until it is closed.
type reader[Q storage.LabelQuerier] struct {
	s          *Store
	tenant     string
	mint, maxt int64
	plan       []*block
	ask        func(b tsdb.BlockReader, mint, maxt int64) (Q, error)

	mu     sync.Mutex // guards held and closed
	held   map[ulid.ULID]*heldBlock[Q]
	closed bool
}

type heldBlock[Q storage.LabelQuerier] struct {
	entry   *entry
	querier Q
}

func newReader[Q storage.LabelQuerier](s *Store, tenant string, mint, maxt int64, plan []*block, ask func(tsdb.BlockReader, int64, int64) (Q, error)) *reader[Q] {
	return &reader[Q]{s: s, tenant: tenant, mint: mint, maxt: maxt, plan: plan, ask: ask, held: map[ulid.ULID]*heldBlock[Q]{}}
}

// queriers returns the queriers of the planned blocks that overlap [mint, maxt]. A
// block that cannot be read is an error, or a warning where the request allows it.
func (r *reader[Q]) queriers(ctx context.Context, mint, maxt int64) ([]Q, annotations.Annotations, error) {
	var needed []*block
	for _, b := range r.plan {
		if b.overlaps(mint, maxt) {
			needed = append(needed, b)
		}
	}
	found := make([]*heldBlock[Q], len(needed))
	failed := make([]error, len(needed))
	if r.allHeld(needed, found) {
		return queriersOf(found), nil, nil
	}
	group := errgroup.Group{}
	group.SetLimit(r.s.cfg.Concurrency)
	for i, b := range needed {
		if found[i] != nil {
			continue
		}
		group.Go(func() error {
			found[i], failed[i] = r.hold(ctx, b)
			return nil
		})
	}
	_ = group.Wait() // errors are in failed
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	var warnings annotations.Annotations
	for i, err := range failed {
		switch {
		case err == nil:
		case series.PartialAllowed(ctx):
			warnings.Add(fmt.Errorf("the answer lacks a block: %w", err))
			found[i] = nil
		default:
			return nil, nil, err
		}
	}
	return queriersOf(found), warnings, nil
}

func queriersOf[Q storage.LabelQuerier](held []*heldBlock[Q]) []Q {
	queriers := make([]Q, 0, len(held))
	for _, h := range held {
		if h != nil {
			queriers = append(queriers, h.querier)
		}
	}
	return queriers
}

// allHeld fills found with the blocks that are held already.
func (r *reader[Q]) allHeld(needed []*block, found []*heldBlock[Q]) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := true
	for i, b := range needed {
		if found[i] = r.held[b.id]; found[i] == nil {
			all = false
		}
	}
	return all
}

// hold opens the block and keeps it open until the reader is closed.
func (r *reader[Q]) hold(ctx context.Context, b *block) (*heldBlock[Q], error) {
	if b.damage != nil {
		return nil, series.Errorf(series.Corrupt, "block %s of tenant %s (%s) is set aside: %w", b.id, r.tenant, span(b), b.damage)
	}
	e, err := r.s.pool.acquire(ctx, r.tenant, b.meta)
	if err != nil {
		return nil, r.s.unreadable(ctx, r.tenant, b, err)
	}
	q, err := r.ask(&guarded{e.block, r.s, e}, r.mint, r.maxt)
	if err != nil {
		r.s.pool.release(e)
		return nil, series.Errorf(series.Internal, "query block %s of tenant %s: %w", b.id, r.tenant, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if other := r.held[b.id]; other != nil || r.closed {
		closeErr := q.Close()
		r.s.pool.release(e)
		if r.closed {
			return nil, series.Errorf(series.Internal, "BUG: block %s of tenant %s is read after the querier was closed: %w", b.id, r.tenant, closeErr)
		}
		return other, nil
	}
	h := &heldBlock[Q]{e, q}
	r.held[b.id] = h
	return h, nil
}

// unreadable describes a block that did not open, and sees to it that it is known.
func (s *Store) unreadable(ctx context.Context, tenant string, b *block, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if series.KindOf(err) == series.Corrupt {
		s.lister.setAside(tenant, b.id, reasonUnreadable, err)
	}
	return series.Errorf(series.KindOf(err), "read block %s of tenant %s (%s): %w", b.id, tenant, span(b), err)
}

// span writes a block's time range.
func span(b *block) string {
	if b.mint == math.MinInt64 {
		return "up to " + timeOf(b.maxt)
	}
	return timeOf(b.mint) + " to " + timeOf(b.maxt)
}

func timeOf(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// LabelValues implements storage.LabelQuerier.
func (r *reader[Q]) LabelValues(ctx context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return r.merged(ctx, hints, func(q Q) ([]string, annotations.Annotations, error) {
		return q.LabelValues(ctx, name, hints, matchers...)
	})
}

// LabelNames implements storage.LabelQuerier.
func (r *reader[Q]) LabelNames(ctx context.Context, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return r.merged(ctx, hints, func(q Q) ([]string, annotations.Annotations, error) {
		return q.LabelNames(ctx, hints, matchers...)
	})
}

// merged joins sorted strings of all blocks.
func (r *reader[Q]) merged(ctx context.Context, hints *storage.LabelHints, ask func(Q) ([]string, annotations.Annotations, error)) ([]string, annotations.Annotations, error) {
	queriers, warnings, err := r.queriers(ctx, r.mint, r.maxt)
	if err != nil {
		return nil, nil, err
	}
	var all []string
	for _, q := range queriers {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		values, more, err := ask(q)
		if err != nil {
			return nil, nil, err
		}
		warnings.Merge(more)
		all = append(all, values...)
	}
	slices.Sort(all)
	all = slices.Compact(all)
	if hints != nil && hints.Limit > 0 && len(all) > hints.Limit {
		all = all[:hints.Limit]
	}
	return all, warnings, nil
}

// Close gives all blocks back.
func (r *reader[Q]) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	var errs []error
	for id, h := range r.held {
		errs = append(errs, h.querier.Close())
		r.s.pool.release(h.entry)
		delete(r.held, id)
	}
	return errors.Join(errs...)
}

// window is the range that a selection reads: hints, where there are any, name a part
// of the querier's.
func (r *reader[Q]) window(hints *storage.SelectHints) (mint, maxt int64) {
	if hints == nil {
		return r.mint, r.maxt
	}
	return hints.Start, hints.End
}

// sampleReader implements storage.Querier.
type sampleReader struct{ *reader[storage.Querier] }

func (r *sampleReader) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	mint, maxt := r.window(hints)
	queriers, warnings, err := r.queriers(ctx, mint, maxt)
	if err != nil {
		return storage.ErrSeriesSet(err)
	}
	var set storage.SeriesSet = storage.EmptySeriesSet()
	switch len(queriers) {
	case 0:
	case 1:
		set = queriers[0].Select(ctx, sorted, hints, matchers...)
	default:
		sets := make([]storage.SeriesSet, 0, len(queriers))
		for _, q := range queriers {
			sets = append(sets, q.Select(ctx, true, hints, slices.Clone(matchers)...))
		}
		set = storage.NewMergeSeriesSet(sets, limitOf(hints), storage.ChainedSeriesMerge)
	}
	if len(warnings) > 0 {
		return &warned{set, warnings}
	}
	return set
}

func limitOf(hints *storage.SelectHints) int {
	if hints == nil {
		return 0
	}
	return hints.Limit
}

// warned is a series set with warnings of its opening.
type warned struct {
	storage.SeriesSet
	warnings annotations.Annotations
}

func (w *warned) Warnings() annotations.Annotations {
	var all annotations.Annotations
	all.Merge(w.warnings)
	all.Merge(w.SeriesSet.Warnings())
	return all
}

// chunkReader implements storage.ChunkQuerier. Its answers have no room for warnings, so
// that every block it needs must be readable.
type chunkReader struct{ *reader[storage.ChunkQuerier] }

func (r *chunkReader) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.ChunkSeriesSet {
	mint, maxt := r.window(hints)
	queriers, warnings, err := r.queriers(ctx, mint, maxt)
	for _, w := range warnings {
		err = w
	}
	if err != nil {
		return storage.ErrChunkSeriesSet(err)
	}
	sets := make([]storage.ChunkSeriesSet, 0, len(queriers))
	for _, q := range queriers {
		sets = append(sets, q.Select(ctx, sorted || len(queriers) > 1, hints, slices.Clone(matchers)...))
	}
	if len(sets) == 1 {
		return sets[0]
	}
	return storage.NewMergeChunkSeriesSet(sets, limitOf(hints), storage.NewCompactingChunkSeriesMerger(storage.ChainedSeriesMerge))
}
