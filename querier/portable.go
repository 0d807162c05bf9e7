package querier

import (
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

func (s *portableSet) At() storage.ChunkSeries { return portableSeries{s.ChunkSeriesSet.At()} }

func (s *portableSet) Err() error {
	err := s.ChunkSeriesSet.Err()
	if err != nil {
		noteFailure(s.ctx, err)
	}
	return asStoreError(err)
}

type portableSeries struct{ storage.ChunkSeries }

func (s portableSeries) Iterator(it chunks.Iterator) chunks.Iterator {
	if old, ok := it.(*portableIterator); ok {
		old.Iterator, old.recoded = s.ChunkSeries.Iterator(old.Iterator), nil
		return old
	}
	return &portableIterator{Iterator: s.ChunkSeries.Iterator(nil)}
}

// portableIterator passes on what every client reads and recodes the rest, one chunk
// at a time.
type portableIterator struct {
	chunks.Iterator
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
	for it.Iterator.Next() {
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
	return it.Iterator.Err()
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
