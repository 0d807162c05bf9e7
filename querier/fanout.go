package querier

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/annotations"
	v1 "github.com/prometheus/prometheus/web/api/v1"

	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// fanout makes one storage of the stores: the ingester is asked first, then the
// bucket for the blocks that the ingester does not answer for.
type fanout struct {
	recent Recent
	bucket Store // nil: there is none
	cfg    Config
	now    func() time.Time
	m      *metrics
}

// Querier implements storage.Queryable. The stores are opened by the first call
// that has a context, which names the tenant.
func (f *fanout) Querier(mint, maxt int64) (storage.Querier, error) {
	q := &sampleQuerier{mint: mint, maxt: maxt}
	q.f = f
	q.open = func(ctx context.Context) (storage.Querier, annotations.Annotations, error) {
		opened, warnings, err := openStores(ctx, f, mint, maxt, f.querier)
		if err != nil {
			return nil, nil, err
		}
		return storage.NewMergeQuerier(opened, nil, storage.ChainedSeriesMerge), warnings, nil
	}
	return q, nil
}

// querier opens a store's querier, one that turns errors into warnings where the
// request allows partial answers.
func (f *fanout) querier(s Store, ctx context.Context, tenant string, mint, maxt int64, skip series.BlockSet) (storage.Querier, series.BlockSet, error) {
	q, covered, err := s.Querier(ctx, tenant, mint, maxt, skip)
	if err != nil || !series.PartialAllowed(ctx) {
		return q, covered, err
	}
	best := &bestEffort{Querier: q}
	if deadline, ok := ctx.Deadline(); ok {
		best.deadline = deadline
	}
	return best, covered, nil
}

// ChunkQuerier implements storage.ChunkQueryable, for remote read: its chunks have
// encodings that every Prometheus since 2.40 reads.
func (f *fanout) ChunkQuerier(mint, maxt int64) (storage.ChunkQuerier, error) {
	q := &chunkQuerier{}
	q.f = f
	q.open = func(ctx context.Context) (storage.ChunkQuerier, annotations.Annotations, error) {
		opened, warnings, err := openStores(ctx, f, mint, maxt, Store.ChunkQuerier)
		if err != nil {
			return nil, nil, err
		}
		merge := storage.NewCompactingChunkSeriesMerger(storage.ChainedSeriesMerge)
		return storage.NewMergeChunkQuerier(opened, nil, merge), warnings, nil
	}
	return q, nil
}

// ExemplarQuerier implements storage.ExemplarQueryable: exemplars are at the ingester.
func (f *fanout) ExemplarQuerier(ctx context.Context) (storage.ExemplarQuerier, error) {
	name, err := tenant.FromContext(ctx)
	if err != nil {
		return nil, asStoreError(err)
	}
	q, err := f.recent.ExemplarQuerier(ctx, name)
	if err != nil {
		return nil, asStoreError(err)
	}
	return exemplarQuerier{q}, nil
}

// exemplarQuerier gives errors the form that the API understands.
type exemplarQuerier struct{ storage.ExemplarQuerier }

func (q exemplarQuerier) Select(start, end int64, matchers ...[]*labels.Matcher) ([]exemplar.QueryResult, error) {
	found, err := q.ExemplarQuerier.Select(start, end, matchers...)
	return found, asStoreError(err)
}

// openStores opens a querier on every store that can have samples in the range. The
// caller closes them. A store that fails is an error, or a warning where the
// request allows partial answers.
func openStores[Q storage.LabelQuerier](ctx context.Context, f *fanout, mint, maxt int64,
	ask func(Store, context.Context, string, int64, int64, series.BlockSet) (Q, series.BlockSet, error),
) (opened []Q, warnings annotations.Annotations, err error) {
	name, err := tenant.FromContext(ctx)
	if err != nil {
		return nil, nil, err
	}
	q, covered, err := ask(f.recent, ctx, name, mint, maxt, nil)
	switch {
	case err == nil:
		opened = append(opened, q)
	case series.PartialAllowed(ctx):
		warnings.Add(fmt.Errorf("the answer lacks what the ingester has: %w", err))
	default:
		return nil, nil, fmt.Errorf("query the ingester: %w", err)
	}
	if f.bucket == nil {
		return opened, warnings, nil
	}
	bounded, cancel := f.bucketTime(ctx)
	defer cancel()
	q, _, err = ask(f.bucket, bounded, name, mint, maxt, covered)
	switch {
	case err == nil:
		opened = append(opened, q)
	case series.PartialAllowed(ctx):
		warnings.Add(fmt.Errorf("the answer lacks what the bucket has: %w", err))
	case canWarn(ctx) && f.ingesterHas(mint) && series.KindOf(err) == series.Unavailable && ctx.Err() == nil:
		warnings.Add(fmt.Errorf("the answer comes from the ingester only: %w", err))
	default:
		for _, q := range opened {
			q.Close()
		}
		return nil, nil, fmt.Errorf("query the bucket: %w", err)
	}
	return opened, warnings, nil
}

// bucketTime bounds the bucket's part of a query, so that there is time left for an
// answer without it.
func (f *fanout) bucketTime(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Duration(float64(time.Until(end))*f.cfg.StoreShare))
}

// ingesterHas tells whether samples since mint are sure to be at the ingester.
func (f *fanout) ingesterHas(mint int64) bool {
	return f.cfg.IngesterHolds > 0 && mint > f.now().Add(-f.cfg.IngesterHolds).UnixMilli()
}

// lazyQuerier opens the stores when a context is there to do it with, once.
type lazyQuerier[Q storage.LabelQuerier] struct {
	f    *fanout
	open func(context.Context) (Q, annotations.Annotations, error)

	mu       sync.Mutex // guards what follows
	opened   bool
	q        Q
	warnings annotations.Annotations
	err      error
}

func (l *lazyQuerier[Q]) get(ctx context.Context) (Q, annotations.Annotations, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.opened {
		l.q, l.warnings, l.err = l.open(ctx)
		l.opened = true
		if len(l.warnings) > 0 {
			l.f.m.partial.Inc()
		}
	}
	if l.err != nil {
		noteFailure(ctx, l.err)
	}
	return l.q, l.warnings, asStoreError(l.err)
}

func (l *lazyQuerier[Q]) LabelValues(ctx context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	q, warnings, err := l.get(ctx)
	if err != nil {
		return nil, nil, err
	}
	values, more, err := q.LabelValues(ctx, name, hints, matchers...)
	return l.labels("values of label "+name, values, warnings, more, err)
}

func (l *lazyQuerier[Q]) LabelNames(ctx context.Context, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	q, warnings, err := l.get(ctx)
	if err != nil {
		return nil, nil, err
	}
	names, more, err := q.LabelNames(ctx, hints, matchers...)
	return l.labels("label names", names, warnings, more, err)
}

// labels finishes an answer of label names or values.
func (l *lazyQuerier[Q]) labels(what string, values []string, opening, more annotations.Annotations, err error) ([]string, annotations.Annotations, error) {
	if err != nil {
		return nil, nil, asStoreError(err)
	}
	if most := l.f.cfg.MaxLabels; most > 0 && len(values) > most {
		return nil, nil, fmt.Errorf("the answer would hold %d %s, at most %d are allowed: ask for less with match[] or limit", len(values), what, most)
	}
	var all annotations.Annotations
	all.Merge(opening)
	all.Merge(more)
	return values, all, nil
}

func (l *lazyQuerier[Q]) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.opened || l.err != nil {
		return nil
	}
	return l.q.Close()
}

// sampleQuerier is what PromQL and the series endpoint read from.
type sampleQuerier struct {
	lazyQuerier[storage.Querier]
	mint, maxt int64
}

// exactSeries is how many series are looked at, one by one, for the values of a label.
const exactSeries = 5_000

// LabelValues returns the values that matching series have in the querier's range, as
// long as these are few. An index knows its label values for the whole of a head or
// block only, so that for more series there can be values of other times among them,
// as in Prometheus.
func (s *sampleQuerier) LabelValues(ctx context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	if len(matchers) == 0 || s.mint <= v1.MinTime.UnixMilli() && s.maxt >= v1.MaxTime.UnixMilli() {
		return s.lazyQuerier.LabelValues(ctx, name, hints, matchers...)
	}
	set := s.Select(ctx, false, &storage.SelectHints{Start: s.mint, End: s.maxt, Func: "series", Limit: exactSeries + 1}, matchers...)
	found := map[string]struct{}{}
	n := 0
	for ; n <= exactSeries && set.Next(); n++ {
		if value := set.At().Labels().Get(name); value != "" {
			found[value] = struct{}{}
		}
	}
	if set.Err() != nil {
		return nil, nil, set.Err()
	}
	if n > exactSeries {
		return s.lazyQuerier.LabelValues(ctx, name, hints, matchers...)
	}
	values := slices.Sorted(maps.Keys(found))
	if hints != nil && hints.Limit > 0 && len(values) > hints.Limit {
		values = values[:hints.Limit]
	}
	return values, set.Warnings(), nil
}

func (s *sampleQuerier) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	q, warnings, err := s.get(ctx)
	if err != nil {
		return storage.ErrSeriesSet(err)
	}
	set := q.Select(ctx, sorted, hints, matchers...)
	if series.PartialAllowed(ctx) {
		// The series endpoint asks for warnings before the first series.
		set = peek(set)
	}
	if hints != nil && hints.Func == "series" && s.f.cfg.MaxSeries > 0 {
		set = &limitedSet{SeriesSet: set, left: s.f.cfg.MaxSeries, most: s.f.cfg.MaxSeries}
	}
	return &answer{set, ctx, warnings}
}

// answer is a series set with what is known of it besides: the warnings of its
// opening, and errors in the form that the API understands.
type answer struct {
	storage.SeriesSet
	ctx     context.Context
	opening annotations.Annotations
}

func (a *answer) Err() error {
	err := a.SeriesSet.Err()
	if err == nil {
		return nil
	}
	if _, limited := err.(*tooManySeries); limited {
		return err // the request's fault, not a store's
	}
	noteFailure(a.ctx, err)
	return asStoreError(err)
}

func (a *answer) Warnings() annotations.Annotations {
	var all annotations.Annotations
	all.Merge(a.opening)
	all.Merge(a.SeriesSet.Warnings())
	return all
}

// limitedSet fails when there are more series than one answer may hold.
type limitedSet struct {
	storage.SeriesSet
	left, most int
	err        error
}

// tooManySeries says that an answer would hold more series than allowed.
type tooManySeries struct{ most int }

func (e *tooManySeries) Error() string {
	return fmt.Sprintf("the answer would hold more than %d series, the most allowed: ask for less with match[], start, end or limit", e.most)
}

func (s *limitedSet) Next() bool {
	if s.err != nil || !s.SeriesSet.Next() {
		return false
	}
	if s.left == 0 {
		s.err = &tooManySeries{s.most}
		return false
	}
	s.left--
	return true
}

func (s *limitedSet) Err() error {
	if s.err != nil {
		return s.err
	}
	return s.SeriesSet.Err()
}

// bestEffort turns what its querier fails with into warnings, its lack of time
// included.
type bestEffort struct {
	storage.Querier
	deadline time.Time // by which the store must have answered

	mu      sync.Mutex // guards cancels
	cancels []context.CancelFunc
}

// bounded is ctx with the deadline, until Close: sets may need their context until then.
func (b *bestEffort) bounded(ctx context.Context) context.Context {
	if b.deadline.IsZero() {
		return ctx
	}
	ctx, cancel := context.WithDeadline(ctx, b.deadline)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cancels = append(b.cancels, cancel)
	return ctx
}

func (b *bestEffort) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, cancel := range b.cancels {
		cancel()
	}
	return b.Querier.Close()
}

func (b *bestEffort) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	set := peek(b.Querier.Select(b.bounded(ctx), sorted, hints, matchers...))
	if err := set.Err(); err != nil && ctx.Err() == nil {
		var warnings annotations.Annotations
		warnings.Merge(set.Warnings())
		return warningsOnly(warnings.Add(fmt.Errorf("the answer lacks a store: %w", err)))
	}
	return set
}

func (b *bestEffort) LabelValues(ctx context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	values, warnings, err := b.Querier.LabelValues(b.bounded(ctx), name, hints, matchers...)
	return lessError(ctx, values, warnings, err)
}

func (b *bestEffort) LabelNames(ctx context.Context, hints *storage.LabelHints, matchers ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	names, warnings, err := b.Querier.LabelNames(b.bounded(ctx), hints, matchers...)
	return lessError(ctx, names, warnings, err)
}

func lessError(ctx context.Context, values []string, warnings annotations.Annotations, err error) ([]string, annotations.Annotations, error) {
	if err == nil || ctx.Err() != nil {
		return values, warnings, err
	}
	return nil, warnings.Add(fmt.Errorf("the answer lacks a store: %w", err)), nil
}

// peek makes the set's first step, so that errors and warnings show before it.
func peek(set storage.SeriesSet) *peekedSet {
	return &peekedSet{SeriesSet: set, ok: set.Next(), fresh: true}
}

type peekedSet struct {
	storage.SeriesSet
	ok, fresh bool
}

func (p *peekedSet) Next() bool {
	if p.fresh {
		p.fresh = false
		return p.ok
	}
	return p.ok && p.SeriesSet.Next()
}

// warningsOnly is an empty series set with warnings.
type warningsOnly annotations.Annotations

func (warningsOnly) Next() bool                          { return false }
func (warningsOnly) At() storage.Series                  { return nil }
func (warningsOnly) Err() error                          { return nil }
func (w warningsOnly) Warnings() annotations.Annotations { return annotations.Annotations(w) }

// chunkQuerier is what streamed remote reads read from.
type chunkQuerier struct {
	lazyQuerier[storage.ChunkQuerier]
}

func (c *chunkQuerier) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, matchers ...*labels.Matcher) storage.ChunkSeriesSet {
	q, _, err := c.get(ctx)
	if err != nil {
		return storage.ErrChunkSeriesSet(err)
	}
	return &portableSet{q.Select(ctx, sorted, hints, slices.Clone(matchers)...), ctx}
}
