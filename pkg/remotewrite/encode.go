package remotewrite

import (
	"bytes"
	"encoding/binary"
	"math"
	"net/http"

	"github.com/golang/snappy"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"

	"github.com/varvedb/varve/pkg/series"
)

// Protocol is a version of the remote write protocol, as senders choose it.
type Protocol uint8

const (
	// Protocol1 is remote write 1.0: labels repeated in every series.
	Protocol1 Protocol = 1
	// Protocol2 is remote write 2.0: strings interned per request, start timestamps,
	// metadata per series.
	Protocol2 Protocol = 2
)

// SetRequestHeaders sets what a sender of p puts beside a snappy-compressed body.
func SetRequestHeaders(h http.Header, p Protocol) {
	h.Set("Content-Encoding", "snappy")
	if p == Protocol2 {
		h.Set("Content-Type", "application/x-protobuf;proto=io.prometheus.write.v2.Request")
		h.Set("X-Prometheus-Remote-Write-Version", "2.0.0")
		return
	}
	h.Set("Content-Type", "application/x-protobuf")
	h.Set("X-Prometheus-Remote-Write-Version", "0.1.0")
}

// Encoder builds the body of one request, series by series. The order of calls is
// Series, then what belongs to that series, then the next Series; Metadata stands
// between series. It is reused with Reset, and then allocates nothing for float
// samples. Nothing is checked: tests send wrong bodies on purpose.
type Encoder interface {
	// Series begins a series. labels is read before Series returns.
	Series(labels series.LabelBytes)
	// Sample adds a float to the series. Protocol 1.0 has no place for st.
	Sample(st, t int64, v float64)
	// Histogram adds a native histogram, integer or float, to the series.
	Histogram(h series.Histogram)
	// Exemplar adds an exemplar to the series.
	Exemplar(e series.Exemplar)
	// Metadata describes a metric family: in 1.0 as an entry of its own, in 2.0 on
	// the series that was begun last, where m.Family is not sent.
	Metadata(m series.Metadata)
	// Len is the size of the body in bytes so far, before compression; the series
	// begun last may be missing in it.
	Len() int
	// AppendBody appends the uncompressed protobuf message to dst.
	AppendBody(dst []byte) []byte
	// Snappy returns the compressed body. It is valid until the next call of
	// Snappy or Reset.
	Snappy() []byte
	// Reset empties the encoder and keeps its memory.
	Reset()
}

// NewEncoder returns an empty encoder of p.
func NewEncoder(p Protocol) Encoder {
	if p == Protocol2 {
		e := &EncoderV2{}
		e.Reset()
		return e
	}
	return &EncoderV1{}
}

// EncodeBatch appends every entry and the metadata of b to e. With 2.0, metadata
// needs the series it belongs to, and that of b, which names families, is left out.
func EncodeBatch(e Encoder, b *series.Batch) {
	for i := range b.Entries {
		entry := &b.Entries[i]
		e.Series(entry.Labels)
		for _, s := range b.SamplesOf(entry) {
			e.Sample(s.ST, s.T, s.V)
		}
		for _, h := range b.HistogramsOf(entry) {
			e.Histogram(h)
		}
		for _, x := range b.ExemplarsOf(entry) {
			e.Exemplar(x)
		}
	}
	if _, two := e.(*EncoderV2); two {
		return
	}
	for _, m := range b.Metadata {
		e.Metadata(m)
	}
}

// EncoderV1 builds prometheus.WriteRequest messages.
type EncoderV1 struct {
	done  []byte // finished fields of the WriteRequest
	open  []byte // fields of the TimeSeries begun last
	begun bool
	wire  compressor
}

// Series implements Encoder.
func (e *EncoderV1) Series(labels series.LabelBytes) {
	e.finish()
	e.begun = true
	e.open = append(e.open, labels...)
}

// Sample implements Encoder.
func (e *EncoderV1) Sample(_, t int64, v float64) {
	e.open = appendSample(e.open, 0, t, v)
}

// Histogram implements Encoder.
func (e *EncoderV1) Histogram(h series.Histogram) {
	var p prompb.Histogram
	if h.FH != nil {
		p = prompb.FromFloatHistogram(h.T, h.FH)
	} else {
		p = prompb.FromIntHistogram(h.T, h.H)
	}
	e.open = appendMessage(e.open, 4, &p)
}

// Exemplar implements Encoder.
func (e *EncoderV1) Exemplar(x series.Exemplar) {
	size := len(x.Labels) + doubleSize(x.V) + intSize(x.T)
	e.open = appendHeader(e.open, 3, size)
	e.open = append(e.open, x.Labels...)
	e.open = appendDouble(e.open, 2, x.V)
	e.open = appendInt(e.open, 3, x.T)
}

// Metadata implements Encoder.
func (e *EncoderV1) Metadata(m series.Metadata) {
	e.finish()
	p := prompb.MetricMetadata{
		Type:             prompb.FromMetadataType(m.Type),
		MetricFamilyName: m.Family, Help: m.Help, Unit: m.Unit,
	}
	e.done = appendMessage(e.done, 3, &p)
}

// Len implements Encoder.
func (e *EncoderV1) Len() int { return len(e.done) }

// AppendBody implements Encoder.
func (e *EncoderV1) AppendBody(dst []byte) []byte {
	e.finish()
	return append(dst, e.done...)
}

// Snappy implements Encoder.
func (e *EncoderV1) Snappy() []byte {
	e.finish()
	return e.wire.compress(e.done)
}

// Reset implements Encoder.
func (e *EncoderV1) Reset() { e.done, e.open, e.begun = e.done[:0], e.open[:0], false }

func (e *EncoderV1) finish() {
	if !e.begun {
		return
	}
	e.done = appendHeader(e.done, 1, len(e.open))
	e.done = append(e.done, e.open...)
	e.open, e.begun = e.open[:0], false
}

// EncoderV2 builds io.prometheus.write.v2.Request messages. Make it with
// NewEncoder: the symbol table starts with the empty string.
type EncoderV2 struct {
	// symbols outlives a request, so that a string met again costs no allocation;
	// what it holds counts only in the request whose number it bears.
	symbols map[string]*symbol
	request uint64
	table   []byte // finished symbols fields
	count   uint32
	done    []byte // finished timeseries fields
	open    []byte // fields of the TimeSeries begun last
	begun   bool
	packed  []byte // labels_refs being built

	// The series before, label by label: neighbours share most labels, and
	// comparing a label with the one in its place before is a tenth of a look-up.
	last []symbolPair

	body []byte
	wire compressor
}

type symbol struct {
	request uint64
	ref     uint32
}

// maxSymbols bounds the memory of strings of earlier requests.
const maxSymbols = 1 << 16

type symbolPair struct {
	label       []byte // copy of the label field
	name, value uint32
}

// Series implements Encoder.
func (e *EncoderV2) Series(labels series.LabelBytes) {
	e.finish()
	e.begun = true
	e.packed = e.packed[:0]
	n := 0
	for ; len(labels) > 0; n++ {
		if n < len(e.last) && bytes.HasPrefix(labels, e.last[n].label) {
			labels = labels[len(e.last[n].label):]
		} else {
			name, value, rest, ok := labels.Next()
			if !ok {
				break
			}
			e.remember(n, labels[:len(labels)-len(rest)], e.symbol(name), e.symbol(value))
			labels = rest
		}
		e.packed = appendUvarint(e.packed, e.last[n].name)
		e.packed = appendUvarint(e.packed, e.last[n].value)
	}
	e.last = e.last[:n]
	if len(e.packed) > 0 {
		e.open = appendHeader(e.open, 1, len(e.packed))
		e.open = append(e.open, e.packed...)
	}
}

// remember notes the n-th label of a series for the series after it.
func (e *EncoderV2) remember(n int, label []byte, name, value uint32) {
	switch {
	case n < len(e.last):
	case n < cap(e.last):
		e.last = e.last[:n+1]
	default:
		e.last = append(e.last, symbolPair{})
	}
	p := &e.last[n]
	p.label, p.name, p.value = append(p.label[:0], label...), name, value
}

// Sample implements Encoder.
func (e *EncoderV2) Sample(st, t int64, v float64) {
	e.open = appendSample(e.open, st, t, v)
}

// Histogram implements Encoder.
func (e *EncoderV2) Histogram(h series.Histogram) {
	var p writev2.Histogram
	if h.FH != nil {
		p = writev2.FromFloatHistogram(h.ST, h.T, h.FH)
	} else {
		p = writev2.FromIntHistogram(h.ST, h.T, h.H)
	}
	e.open = appendMessage(e.open, 3, &p)
}

// Exemplar implements Encoder.
func (e *EncoderV2) Exemplar(x series.Exemplar) {
	e.packed = e.packed[:0]
	for labels := x.Labels; ; {
		name, value, rest, ok := labels.Next()
		if !ok {
			break
		}
		e.packed = binary.AppendUvarint(e.packed, uint64(e.symbol(name)))
		e.packed = binary.AppendUvarint(e.packed, uint64(e.symbol(value)))
		labels = rest
	}
	size := doubleSize(x.V) + intSize(x.T)
	if n := len(e.packed); n > 0 {
		size += 1 + varintSize(uint64(n)) + n
	}
	e.open = appendHeader(e.open, 4, size)
	if len(e.packed) > 0 {
		e.open = appendHeader(e.open, 1, len(e.packed))
		e.open = append(e.open, e.packed...)
	}
	e.open = appendDouble(e.open, 2, x.V)
	e.open = appendInt(e.open, 3, x.T)
}

// Metadata implements Encoder.
func (e *EncoderV2) Metadata(m series.Metadata) {
	p := writev2.Metadata{
		Type:    writev2.FromMetadataType(m.Type),
		HelpRef: symbolOf(e, m.Help), UnitRef: symbolOf(e, m.Unit),
	}
	e.open = appendMessage(e.open, 5, &p)
}

// Len implements Encoder.
func (e *EncoderV2) Len() int { return len(e.table) + len(e.done) }

// AppendBody implements Encoder.
func (e *EncoderV2) AppendBody(dst []byte) []byte {
	e.finish()
	dst = append(dst, e.table...)
	return append(dst, e.done...)
}

// Snappy implements Encoder.
func (e *EncoderV2) Snappy() []byte {
	e.body = e.AppendBody(e.body[:0])
	return e.wire.compress(e.body)
}

// Reset implements Encoder.
func (e *EncoderV2) Reset() {
	if e.symbols == nil || len(e.symbols) > maxSymbols {
		e.symbols = map[string]*symbol{}
	}
	e.request++
	e.table, e.done, e.open = e.table[:0], e.done[:0], e.open[:0]
	e.last, e.count, e.begun = e.last[:0], 0, false
	e.symbol(nil) // the specification wants the empty string first
}

func (e *EncoderV2) finish() {
	if !e.begun {
		return
	}
	e.done = appendHeader(e.done, 5, len(e.open))
	e.done = append(e.done, e.open...)
	e.open, e.begun = e.open[:0], false
}

func (e *EncoderV2) symbol(text []byte) uint32 { return symbolOf(e, text) }

func symbolOf[T string | []byte](e *EncoderV2, text T) uint32 {
	s, ok := e.symbols[string(text)]
	if !ok {
		s = &symbol{}
		e.symbols[string(text)] = s
	}
	if s.request != e.request {
		s.request, s.ref = e.request, e.count
		e.count++
		e.table = appendHeader(e.table, 4, len(text))
		e.table = append(e.table, text...)
	}
	return s.ref
}

// compressor keeps the snappy buffer from request to request.
type compressor struct{ buf []byte }

func (c *compressor) compress(body []byte) []byte {
	if n := snappy.MaxEncodedLen(len(body)); n > cap(c.buf) {
		c.buf = make([]byte, n)
	}
	return snappy.Encode(c.buf[:cap(c.buf)], body)
}

// marshaler is what gogo/protobuf generates.
type marshaler interface {
	Size() int
	MarshalToSizedBuffer(buf []byte) (int, error)
}

// appendMessage appends m as the length-delimited field with the given number.
func appendMessage(dst []byte, number int, m marshaler) []byte {
	size := m.Size()
	dst = appendHeader(dst, number, size)
	from := len(dst)
	dst = append(dst, make([]byte, size)...)
	if _, err := m.MarshalToSizedBuffer(dst[from:]); err != nil {
		// Generated code cannot fail with a buffer of its own Size.
		panic("BUG: marshal remote write message: " + err.Error())
	}
	return dst
}

// appendHeader appends tag and length of a length-delimited field.
func appendHeader(dst []byte, number, size int) []byte {
	dst = append(dst, byte(number<<3|2))
	return binary.AppendUvarint(dst, uint64(size))
}

// appendUvarint is binary.AppendUvarint, inlined for the one-byte case.
func appendUvarint(dst []byte, v uint32) []byte {
	if v < 0x80 {
		return append(dst, byte(v))
	}
	return binary.AppendUvarint(dst, uint64(v))
}

// appendSample appends field 2 of a TimeSeries. Zero values are left out, as
// proto3 does; -0 is not zero here, since its sign would be lost.
func appendSample(dst []byte, st, t int64, v float64) []byte {
	dst = append(dst, 2<<3|2, byte(doubleSize(v)+intSize(t)+intSize(st)))
	dst = appendDouble(dst, 1, v)
	dst = appendInt(dst, 2, t)
	return appendInt(dst, 3, st)
}

func appendDouble(dst []byte, number int, v float64) []byte {
	bits := math.Float64bits(v)
	if bits == 0 {
		return dst
	}
	dst = append(dst, byte(number<<3|1))
	return binary.LittleEndian.AppendUint64(dst, bits)
}

func appendInt(dst []byte, number int, v int64) []byte {
	if v == 0 {
		return dst
	}
	dst = append(dst, byte(number<<3))
	return binary.AppendUvarint(dst, uint64(v))
}

func doubleSize(v float64) int {
	if math.Float64bits(v) == 0 {
		return 0
	}
	return 9
}

func intSize(v int64) int {
	if v == 0 {
		return 0
	}
	return 1 + varintSize(uint64(v))
}

func varintSize(v uint64) int {
	n := 1
	for ; v >= 0x80; v >>= 7 {
		n++
	}
	return n
}
