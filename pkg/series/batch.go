package series

import (
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/metadata"
)

// Batch is what one write request carries for one tenant: entries in the order of
// the request, and flat slices that the entries own ranges of. It is reused from
// request to request; whoever is handed a Batch must not keep any of its bytes
// or slices after returning.
type Batch struct {
	Entries    []Entry
	Samples    []Sample
	Histograms []Histogram
	Exemplars  []Exemplar
	Metadata   []Metadata
}

// Entry is one series of a Batch with its samples. A series may stand in several
// entries of one batch; the meaning is as if they were one.
type Entry struct {
	Labels LabelBytes
	// Ref is a hint on the way in: the reference that the same appender assigned
	// to the same label bytes before, or the zero Ref. On the way out it is the
	// reference to use next time, or the zero Ref if the series was refused.
	Ref        Ref
	Samples    Range // of Batch.Samples
	Histograms Range // of Batch.Histograms
	Exemplars  Range // of Batch.Exemplars
}

// Ref is an appender's own reference to a series, so that a known series costs no
// look-up by labels. Epoch tells one life of the appender's memory from another:
// a Ref from another epoch is ignored, never mistaken.
type Ref struct {
	Epoch uint64
	ID    uint64
}

// Range is the half-open interval [From, To) of a slice.
type Range struct{ From, To uint32 }

// Len returns the number of elements in r.
func (r Range) Len() int { return int(r.To - r.From) }

// Sample is a float sample. Times are Unix milliseconds; ST, the start time of a
// cumulative value, is 0 where the sender gave none.
type Sample struct {
	ST, T int64
	V     float64
}

// Histogram is a native histogram sample: exactly one of H (integer counts) and
// FH (float counts) is set. They belong to the receiver.
type Histogram struct {
	ST, T int64
	H     *histogram.Histogram
	FH    *histogram.FloatHistogram
}

// Exemplar is a traced example of a value. Labels is sorted and may be empty. T
// is Unix milliseconds, 0 where the sender gave none.
type Exemplar struct {
	Labels LabelBytes
	T      int64
	V      float64
}

// Metadata says what a metric family is. Its strings belong to the receiver.
type Metadata struct {
	Family string
	metadata.Metadata
}

// Reset empties b and keeps its memory. Pointers are dropped, so that a pooled
// batch holds no histogram or label of a request that is gone.
func (b *Batch) Reset() {
	clear(b.Entries)
	clear(b.Histograms)
	clear(b.Exemplars)
	clear(b.Metadata)
	b.Entries = b.Entries[:0]
	b.Samples = b.Samples[:0]
	b.Histograms = b.Histograms[:0]
	b.Exemplars = b.Exemplars[:0]
	b.Metadata = b.Metadata[:0]
}

// SamplesOf returns e's float samples.
func (b *Batch) SamplesOf(e *Entry) []Sample { return b.Samples[e.Samples.From:e.Samples.To] }

// HistogramsOf returns e's native histograms.
func (b *Batch) HistogramsOf(e *Entry) []Histogram {
	return b.Histograms[e.Histograms.From:e.Histograms.To]
}

// ExemplarsOf returns e's exemplars.
func (b *Batch) ExemplarsOf(e *Entry) []Exemplar {
	return b.Exemplars[e.Exemplars.From:e.Exemplars.To]
}
