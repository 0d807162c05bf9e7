package walrepair

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/record"
	"github.com/prometheus/prometheus/tsdb/tombstones"
)

// facts are what inspect learns from one record.
type facts struct {
	maxRef     uint64
	samples    int
	minT, maxT int64 // of the samples
	unknown    bool  // a type that the TSDB skips
}

func (f *facts) ref(ref uint64) { f.maxRef = max(f.maxRef, ref) }

func (f *facts) sample(ref uint64, t int64) {
	f.ref(ref)
	if f.samples == 0 {
		f.minT, f.maxT = t, t
	}
	f.samples++
	f.minT, f.maxT = min(f.minT, t), max(f.maxT, t)
}

// inspect walks rec as record.Decoder does, without building anything, and fails
// where the decoder would fail, panic or ask for absurd memory: one such record
// stops the TSDB's replay like a bad checksum.
func inspect(rec []byte) (facts, error) {
	var f facts
	c := cursor{b: rec[1:]}
	typ := record.Type(rec[0])
	switch typ {
	case record.Series:
		f.walkSeries(&c)
	case record.Samples:
		f.walkSamples(&c, func(c *cursor) { c.take(8) })
	case record.Exemplars:
		f.walkExemplars(&c)
	case record.SamplesV2:
		f.walkSamplesV2(&c, func(c *cursor) { c.take(8) })
	case record.Tombstones:
		f.walkTombstones(&c)
	case record.MmapMarkers:
		for c.more() {
			f.ref(c.be64())
			c.take(8)
		}
	case record.Metadata:
		f.walkMetadata(&c)
	case record.HistogramSamples, record.CustomBucketsHistogramSamples:
		f.walkSamples(&c, walkHistogram)
	case record.FloatHistogramSamples, record.CustomBucketsFloatHistogramSamples:
		f.walkSamples(&c, walkFloatHistogram)
	case record.HistogramSamplesV2:
		f.walkSamplesV2(&c, walkHistogram)
	case record.FloatHistogramSamplesV2:
		f.walkSamplesV2(&c, walkFloatHistogram)
	case record.MinValidTime:
		c.take(8)
		if len(c.b) > 0 {
			c.fail()
		}
	default:
		f.unknown = true
		return f, nil
	}
	if c.reduce && c.err == nil {
		c.err = decodeHistograms(typ, rec)
	}
	if c.err != nil {
		return f, fmt.Errorf("decode %s record of %d bytes: %w", typ, len(rec), c.err)
	}
	return f, nil
}

func (f *facts) walkSeries(c *cursor) {
	for c.more() {
		f.ref(c.be64())
		c.labels()
	}
}

// walkSamples walks the first encoding: a base reference and time, then deltas to
// them, each followed by a value.
func (f *facts) walkSamples(c *cursor, value func(*cursor)) {
	if !c.more() {
		return
	}
	ref, t := c.be64(), int64(c.be64())
	for c.more() {
		dref, dt := c.varint(), c.varint()
		value(c)
		f.sample(ref+uint64(dref), t+dt)
	}
}

func (f *facts) walkExemplars(c *cursor) {
	if !c.more() {
		return
	}
	ref := c.be64()
	c.take(8)
	for c.more() {
		f.ref(ref + uint64(c.varint()))
		c.varint()
		c.take(8)
		c.labels()
	}
}

// walkSamplesV2 walks the encoding with start times: references are deltas to the
// sample before, times to the first.
func (f *facts) walkSamplesV2(c *cursor, value func(*cursor)) {
	if !c.more() {
		return
	}
	ref, first := uint64(c.varint()), c.varint()
	c.varint()
	value(c)
	if c.err == nil {
		f.sample(ref, first)
	}
	for c.more() {
		ref += uint64(c.varint())
		t := first + c.varint()
		if marker := c.byte(); marker > 1 { // neither none nor the same again
			c.varint()
		}
		value(c)
		f.sample(ref, t)
	}
}

func (f *facts) walkTombstones(c *cursor) {
	for c.more() {
		f.ref(c.be64())
		c.varint()
		c.varint()
	}
}

func (f *facts) walkMetadata(c *cursor) {
	for c.more() {
		f.ref(c.uvarint())
		c.byte()
		for range c.count(2) {
			c.str()
			c.str()
		}
	}
}

func walkHistogram(c *cursor) {
	schema := c.histogramHead()
	c.uvarint()
	c.uvarint()
	c.take(8)
	c.spans()
	c.spans()
	for range 2 {
		for range c.count(1) {
			c.varint()
		}
	}
	if histogram.IsCustomBucketsSchema(schema) {
		c.take(8 * c.count(8))
	}
}

func walkFloatHistogram(c *cursor) {
	schema := c.histogramHead()
	c.take(24)
	c.spans()
	c.spans()
	c.take(8 * c.count(8))
	c.take(8 * c.count(8))
	if histogram.IsCustomBucketsSchema(schema) {
		c.take(8 * c.count(8))
	}
}

// cursor reads a record's bytes. After its first error it reads zeros.
type cursor struct {
	b      []byte
	err    error
	reduce bool // a histogram needs its resolution reduced, which may fail
}

var errShort = errors.New("record is shorter than it says")

func (c *cursor) more() bool { return len(c.b) > 0 && c.err == nil }

func (c *cursor) fail() {
	c.b = nil
	if c.err == nil {
		c.err = errShort
	}
}

func (c *cursor) take(n int) []byte {
	if n < 0 || n > len(c.b) {
		c.fail()
		return nil
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) byte() byte {
	if b := c.take(1); len(b) == 1 {
		return b[0]
	}
	return 0
}

func (c *cursor) be64() uint64 {
	if b := c.take(8); len(b) == 8 {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (c *cursor) uvarint() uint64 {
	x, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.fail()
		return 0
	}
	c.b = c.b[n:]
	return x
}

func (c *cursor) varint() int64 {
	x, n := binary.Varint(c.b)
	if n <= 0 {
		c.fail()
		return 0
	}
	c.b = c.b[n:]
	return x
}

// count reads how many items of at least size bytes follow. The decoder allocates
// that many unseen, so what the record cannot hold is refused.
func (c *cursor) count(size int) int {
	n := c.uvarint()
	if n > uint64(len(c.b)/size) {
		c.fail()
		return 0
	}
	return int(n)
}

func (c *cursor) str() {
	if n := c.uvarint(); n <= uint64(len(c.b)) {
		c.take(int(n))
	} else {
		c.fail()
	}
}

func (c *cursor) labels() {
	for range c.count(2) {
		c.str()
		c.str()
	}
}

func (c *cursor) histogramHead() int32 {
	c.byte()
	schema := int32(c.varint())
	c.take(8)
	c.reduce = c.reduce || schema > histogram.ExponentialSchemaMax && schema <= histogram.ExponentialSchemaMaxReserved
	return schema
}

func (c *cursor) spans() {
	for range c.count(2) {
		c.varint()
		c.uvarint()
	}
}

// decodeHistograms lets the decoder itself judge a record whose histograms are
// finer than this version keeps.
func decodeHistograms(typ record.Type, rec []byte) error {
	dec := newDecoder()
	var err error
	switch typ {
	case record.HistogramSamples, record.CustomBucketsHistogramSamples, record.HistogramSamplesV2:
		_, err = dec.HistogramSamples(rec, nil)
	default:
		_, err = dec.FloatHistogramSamples(rec, nil)
	}
	return err
}

func newDecoder() record.Decoder {
	return record.NewDecoder(labels.NewSymbolTable(), slog.New(slog.DiscardHandler))
}

// seriesRefs returns the references that rec, a good record, declares.
func seriesRefs(rec []byte) []uint64 {
	if record.Type(rec[0]) != record.Series {
		return nil
	}
	dec := newDecoder()
	list, _ := dec.Series(rec, nil) // inspected before
	refs := make([]uint64, len(list))
	for i := range list {
		refs[i] = uint64(list[i].Ref)
	}
	return refs
}

// sampleRefs returns the reference of each sample in rec, a good record.
func sampleRefs(rec []byte) []uint64 {
	var refs []uint64
	dec := newDecoder()
	switch record.Type(rec[0]) {
	case record.Samples, record.SamplesV2:
		list, _ := dec.Samples(rec, nil)
		for i := range list {
			refs = append(refs, uint64(list[i].Ref))
		}
	case record.HistogramSamples, record.CustomBucketsHistogramSamples, record.HistogramSamplesV2:
		list, _ := dec.HistogramSamples(rec, nil)
		for i := range list {
			refs = append(refs, uint64(list[i].Ref))
		}
	case record.FloatHistogramSamples, record.CustomBucketsFloatHistogramSamples, record.FloatHistogramSamplesV2:
		list, _ := dec.FloatHistogramSamples(rec, nil)
		for i := range list {
			refs = append(refs, uint64(list[i].Ref))
		}
	}
	return refs
}

// sentinel returns a record that keeps the TSDB from giving out references up to
// ref again: a tombstone over all time, which replay takes as proof that ref was
// in use. Without it a series made after the repair could get the reference of one
// whose record was lost, and with it that one's samples at the next replay.
func sentinel(ref uint64) []byte {
	var enc record.Encoder
	return enc.Tombstones([]tombstones.Stone{{
		Ref:       storage.SeriesRef(ref),
		Intervals: tombstones.Intervals{{Mint: math.MinInt64, Maxt: math.MaxInt64}},
	}}, nil)
}
