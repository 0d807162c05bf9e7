package blocks

import (
	"context"
	"errors"
	"fmt"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/tsdb/index"

	"github.com/varvedb/varve/pkg/series"
)

// guarded is a block whose damage, found while reading, is said to be that, and sets
// the block aside.
type guarded struct {
	readable
	s     *Store
	entry *entry
}

// found returns err as damage of the block, and sees to it that it is known. What
// ends a query is no damage.
func (g *guarded) found(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, storage.ErrNotFound) {
		return err
	}
	key := g.entry.key
	err = series.Errorf(series.Corrupt, "read block %s of tenant %s: %w", key.id, key.tenant, err)
	first, own := g.s.pool.blame(g.entry)
	switch {
	case !first:
	case own:
		g.s.lister.setAside(key.tenant, key.id, reasonDamaged, err)
	default:
		g.s.lister.damage.Inc()
		g.s.log.Warn("copy of block is damaged and will be fetched anew", "tenant", key.tenant, "block", key.id, "err", err)
	}
	return err
}

func (g *guarded) Chunks() (tsdb.ChunkReader, error) {
	c, err := g.readable.Chunks()
	if err != nil {
		return nil, err
	}
	return &guardedChunks{c, g}, nil
}

func (g *guarded) Index() (tsdb.IndexReader, error) {
	x, err := g.readable.Index()
	if err != nil {
		return nil, err
	}
	return &guardedIndex{x, g}, nil
}

type guardedChunks struct {
	tsdb.ChunkReader
	g *guarded
}

func (c *guardedChunks) ChunkOrIterable(meta chunks.Meta) (chunkenc.Chunk, chunkenc.Iterable, error) {
	chunk, iterable, err := c.ChunkReader.ChunkOrIterable(meta)
	if err != nil {
		err = c.g.found(fmt.Errorf("chunk %d: %w", meta.Ref, err))
	}
	return chunk, iterable, err
}

// guardedIndex guards all that reads the index: it checks what it is given, but is not
// written for malice, so that panics are damage, too.
type guardedIndex struct {
	tsdb.IndexReader
	g *guarded
}

// check is deferred by what reads the index and returns *err.
func (x *guardedIndex) check(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("index: %v", p)
	}
	*err = x.g.found(*err)
}

func (x *guardedIndex) SortedLabelValues(ctx context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) (values []string, err error) {
	defer x.check(&err)
	return x.IndexReader.SortedLabelValues(ctx, name, hints, matchers...)
}

func (x *guardedIndex) LabelValues(ctx context.Context, name string, hints *storage.LabelHints, matchers ...*labels.Matcher) (values []string, err error) {
	defer x.check(&err)
	return x.IndexReader.LabelValues(ctx, name, hints, matchers...)
}

func (x *guardedIndex) Postings(ctx context.Context, name string, values ...string) (p index.Postings, err error) {
	defer x.check(&err)
	return x.IndexReader.Postings(ctx, name, values...)
}

func (x *guardedIndex) PostingsForLabelMatching(ctx context.Context, name string, match func(string) bool) index.Postings {
	return x.postings(func() index.Postings { return x.IndexReader.PostingsForLabelMatching(ctx, name, match) })
}

func (x *guardedIndex) PostingsForAllLabelValues(ctx context.Context, name string) index.Postings {
	return x.postings(func() index.Postings { return x.IndexReader.PostingsForAllLabelValues(ctx, name) })
}

// postings reads postings whose errors are in themselves.
func (x *guardedIndex) postings(read func() index.Postings) (p index.Postings) {
	var err error
	func() {
		defer x.check(&err)
		p = read()
		err = p.Err()
	}()
	if err != nil {
		return index.ErrPostings(err)
	}
	return p
}

func (x *guardedIndex) Series(ref storage.SeriesRef, builder *labels.ScratchBuilder, chks *[]chunks.Meta) (err error) {
	defer x.check(&err)
	return x.IndexReader.Series(ref, builder, chks)
}

func (x *guardedIndex) LabelNames(ctx context.Context, matchers ...*labels.Matcher) (names []string, err error) {
	defer x.check(&err)
	return x.IndexReader.LabelNames(ctx, matchers...)
}

func (x *guardedIndex) LabelNamesFor(ctx context.Context, postings index.Postings) (names []string, err error) {
	defer x.check(&err)
	return x.IndexReader.LabelNamesFor(ctx, postings)
}
