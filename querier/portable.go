package querier

import (
	"cmp"
	"context"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
)

// portableSet turns chunks of encodings with start timestamps into the older ones.
// Remote read has no way to ask for encodings, and a client that does not know one
// fails or, worse, misreads it.
type portableSet struct {
	storage.ChunkSeriesSet
	ctx context.Context
}

// Next ends with the context: what is below looks at it at its start only.
func (s *portableSet) Next() bool { return s.ctx.Err() == nil && s.ChunkSeriesSet.Next() }

func (s *portableSet) At() storage.ChunkSeries { return portableSeries{s.ChunkSeriesSet.At(), s.ctx} }

func (s *portableSet) Err() error {
	err := cmp.Or(s.ChunkSeriesSet.Err(), s.ctx.Err())
	if err != nil {
		noteFailure(s.ctx, err)
	}
	return asStoreError(err)
}

type portableSeries struct {
	storage.ChunkSeries
	ctx context.Context
}

func (s portableSeries) Iterator(it chunks.Iterator) chunks.Iterator {
	if old, ok := it.(*portableIterator); ok {
		old.Iterator, old.ctx, old.recoded = s.ChunkSeries.Iterator(old.Iterator), s.ctx, nil
		return old
	}
	return &portableIterator{Iterator: s.ChunkSeries.Iterator(nil), ctx: s.ctx}
}

// portableIterator passes on what every client reads and recodes the rest, one chunk
// at a time.
type portableIterator struct {
	chunks.Iterator
	ctx     context.Context
	recoded chunks.Iterator // what became of the current chunk, nil if it is passed on
	samples chunkenc.Iterator
}

func (it *portableIterator) Next() bool {
	if it.recoded != nil {
		if it.recoded.Next() {
			return true
		}
		if it.recoded.Err() != nil {
			return false
		}
		it.recoded = nil
	}
	for it.ctx.Err() == nil && it.Iterator.Next() {
		chunk := it.Iterator.At().Chunk
		if chunk == nil || portable(chunk.Encoding()) {
			return true
		}
		it.recoded = it.recode(chunk)
		if it.recoded.Next() {
			return true
		}
		if it.recoded.Err() != nil {
			return false
		}
		it.recoded = nil
	}
	return false
}

func (it *portableIterator) At() chunks.Meta {
	if it.recoded != nil {
		return it.recoded.At()
	}
	return it.Iterator.At()
}

func (it *portableIterator) Err() error {
	if it.recoded != nil && it.recoded.Err() != nil {
		return it.recoded.Err()
	}
	if err := it.Iterator.Err(); err != nil {
		return err
	}
	return it.ctx.Err()
}

func (it *portableIterator) recode(chunk chunkenc.Chunk) chunks.Iterator {
	it.samples = chunk.Iterator(it.samples)
	samples := it.samples
	return storage.NewSeriesToChunkEncoder(&storage.SeriesEntry{
		Lset:             labels.EmptyLabels(),
		SampleIteratorFn: func(chunkenc.Iterator) chunkenc.Iterator { return withoutST{samples} },
	}).Iterator(nil)
}

func portable(e chunkenc.Encoding) bool {
	return e == chunkenc.EncXOR || e == chunkenc.EncHistogram || e == chunkenc.EncFloatHistogram
}

// withoutST hides start timestamps, for which an encoder would take the newer
// encodings.
type withoutST struct{ chunkenc.Iterator }

func (withoutST) AtST() int64 { return 0 }
