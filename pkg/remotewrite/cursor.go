package remotewrite

import (
	"fmt"
	"unsafe"

	"github.com/prometheus/common/model"

	"github.com/varvedb/varve/pkg/series"
)

// Limits bounds what scanning one request may take, whatever its bytes are.
type Limits struct {
	// Run bounds the label bytes put together for one series of a 2.0 request.
	// Gathering stops with the label that passes the bound, so that Run must be at
	// least the size of the largest label set that is acceptable.
	Run int
	// Memory bounds the bytes that samples, histograms, exemplars, metadata and
	// gathered labels of the request take in memory.
	Memory int
	// Resolved bounds the label bytes that references of a 2.0 request resolve to,
	// all series together: a series of ten bytes may name megabytes of symbols.
	Resolved int
	// Grow, if set, is called before memory beyond what was granted so far is
	// used, with the number of bytes; its error ends the scan and is returned.
	Grow func(n int) error
}

// growStep is what a scan asks Grow for at a time, in bytes.
const growStep = 256 << 10

// Series is what a Cursor stands on. Byte slices point into the request or into
// the cursor's own memory and are valid until the next call of Next.
type Series struct {
	// Labels is the run of label fields, in the order in which they were sent: the
	// wire form of series.LabelBytes, but not necessarily canonical. The bytes are
	// equal where a sender repeats itself, which makes them a cache key. NextLabel
	// reads them.
	Labels []byte

	// What was appended to the batch. The labels of exemplars are runs like Labels,
	// and stay valid until the cursor is reset.
	Samples    series.Range
	Histograms series.Range
	Exemplars  series.Range

	// Metadata is what a 2.0 request says about the series. Its Family is not set.
	Metadata Metadata

	// BadHistograms counts histograms that were not appended as they cannot be
	// represented, HistogramFault says why for the first of them.
	BadHistograms  int
	HistogramFault string
}

// Metadata is metric metadata as it lies in a request. Nothing in it is checked.
type Metadata struct {
	Family, Help, Unit []byte
	Type               model.MetricType
}

// IsZero tells whether m says nothing.
func (m *Metadata) IsZero() bool {
	return len(m.Help) == 0 && len(m.Unit) == 0 && (m.Type == "" || m.Type == model.MetricTypeUnknown)
}

// Cursor walks the series of one request, in one pass, and appends what belongs
// to each to a batch. The zero Cursor is ready for Reset; it keeps its memory.
//
//	c.Reset(protocol, body, batch, limits)
//	for c.Next() {
//		use(c.Series())
//	}
//	if err := c.Err(); err != nil { ... }
type Cursor struct {
	protocol Protocol
	body     []byte
	pos      int
	batch    *series.Batch
	limits   Limits
	err      error

	granted  int // bytes that Grow has allowed so far
	spent    int // bytes taken of them
	resolved int

	current  Series
	metadata []Metadata // of a 1.0 request, collected on the way

	symbols []span // of a 2.0 request
	refs    []uint32
	run     []byte // gathered labels of the current series
	arena   []byte // gathered labels of exemplars, kept until Reset
}

// span is a piece of the body. Half the size of a slice header: a request may
// consist of nothing but empty symbols.
type span struct{ off, len uint32 }

// Reset begins a request. body and b must stay as they are until the batch has
// been used up: labels are not copied.
func (c *Cursor) Reset(p Protocol, body []byte, b *series.Batch, limits Limits) {
	c.forget()
	c.protocol, c.body, c.batch, c.limits = p, body, b, limits
	c.pos, c.err = 0, nil
	c.granted, c.spent, c.resolved = 0, 0, 0
	if p == Protocol2 {
		c.err = c.readSymbols()
	}
}

// Memory that a cursor keeps between requests, in bytes and in elements.
const (
	keepBytes    = 1 << 20
	keepElements = 1 << 16
)

// forget drops every pointer into the request before, and outsized memory.
func (c *Cursor) forget() {
	clear(c.metadata)
	c.current, c.batch, c.body = Series{}, nil, nil
	c.metadata = kept(c.metadata, keepElements)
	c.symbols = kept(c.symbols, keepElements)
	c.refs = kept(c.refs, keepElements)
	c.run = kept(c.run, keepBytes)
	// Exemplars of the batch point into the arena: it may be reused only now.
	c.arena = kept(c.arena, keepBytes)
}

func kept[T any](s []T, most int) []T {
	if cap(s) > most {
		return nil
	}
	return s[:0]
}

// Release lets go of the request and the batch.
func (c *Cursor) Release() { c.forget() }

// Next moves to the next series. It returns false at the end and on an error.
func (c *Cursor) Next() bool {
	if c.err != nil {
		return false
	}
	if c.protocol == Protocol2 {
		return c.nextV2()
	}
	return c.nextV1()
}

// Series returns the series the cursor stands on, valid until the next Next.
func (c *Cursor) Series() *Series { return &c.current }

// Metadata returns the metadata entries of a 1.0 request once Next has returned
// false. They point into the request.
func (c *Cursor) Metadata() []Metadata { return c.metadata }

// Err returns what ended the scan early: an Invalid error that names the offset
// of broken bytes, one with ErrTooLarge, or what Grow returned.
func (c *Cursor) Err() error { return c.err }

// spend accounts for n bytes of memory about to be used.
func (c *Cursor) spend(n int) bool {
	c.spent += n
	return c.spent <= c.granted || c.grow()
}

func (c *Cursor) grow() bool {
	if c.spent > c.limits.Memory {
		c.err = series.Errorf(series.Invalid, "scan request of %d bytes: its samples and labels take more than %d bytes: %w", len(c.body), c.limits.Memory, ErrTooLarge)
		return false
	}
	n := max(growStep, c.spent-c.granted)
	if c.limits.Grow != nil {
		if err := c.limits.Grow(n); err != nil {
			c.err = err
			return false
		}
	}
	c.granted += n
	return true
}

// fail ends the scan with what is wrong at b[i:], b being a part of the body.
func (c *Cursor) fail(b []byte, i int, err error) bool {
	if c.err == nil { // else a limit was reached on the way, which says more
		c.err = series.Errorf(series.Invalid, "scan remote write %d.0 request of %d bytes: at byte %d: %w",
			c.protocol, len(c.body), c.offset(b)+i, err)
	}
	return false
}

// offset returns where b begins in the body, told from its capacity.
func (c *Cursor) offset(b []byte) int { return cap(c.body) - cap(b) }

// begin empties the current series.
func (c *Cursor) begin() {
	b := c.batch
	s := &c.current
	s.Labels = nil
	s.Samples = emptyRange(len(b.Samples))
	s.Histograms = emptyRange(len(b.Histograms))
	s.Exemplars = emptyRange(len(b.Exemplars))
	s.Metadata = Metadata{}
	s.BadHistograms, s.HistogramFault = 0, ""
	c.run = c.run[:0]
}

// end closes the ranges of the current series.
func (c *Cursor) end() {
	b := c.batch
	s := &c.current
	s.Samples.To = uint32(len(b.Samples))
	s.Histograms.To = uint32(len(b.Histograms))
	s.Exemplars.To = uint32(len(b.Exemplars))
}

func emptyRange(at int) series.Range { return series.Range{From: uint32(at), To: uint32(at)} }

// Sizes that spend accounts with.
const (
	entryBytes    = int(unsafe.Sizeof(series.Entry{}))
	sampleBytes   = int(unsafe.Sizeof(series.Sample{}))
	exemplarBytes = int(unsafe.Sizeof(series.Exemplar{}))
	metadataBytes = int(unsafe.Sizeof(Metadata{}))
	symbolBytes   = int(unsafe.Sizeof(span{}))
	refBytes      = 4
)

// sample reads a Sample message: value 1, timestamp 2 and, in 2.0, start
// timestamp 3.
func (c *Cursor) sample(msg []byte) bool {
	if !c.spend(sampleBytes) {
		return false
	}
	var s series.Sample
	i := 0
	// What every sender writes: 09 value, 10 timestamp.
	if len(msg) > 10 && msg[0] == 0x09 && msg[9] == 0x10 {
		s.V, _ = fixed64(msg, 1)
		t, j := uvarint(msg, 10)
		if j < 0 {
			return c.fail(msg, 10, varintError(j))
		}
		s.T, i = int64(t), j
	}
	for i < len(msg) {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		var v uint64
		next := j
		switch {
		case tag == 1<<3|wireFixed64:
			s.V, next = fixed64(msg, j)
		case tag == 2<<3|wireVarint:
			v, next = uvarint(msg, j)
			s.T = int64(v)
		case tag == 3<<3|wireVarint && c.protocol == Protocol2:
			v, next = uvarint(msg, j)
			s.ST = int64(v)
		case tag>>3 == 1 || tag>>3 == 2 || tag>>3 == 3 && c.protocol == Protocol2:
			return c.fail(msg, i, wrongType("of a sample", tag))
		default:
			if next = c.skip(msg, i, j, tag); next < 0 {
				return false
			}
		}
		if next < 0 {
			return c.fail(msg, j, varintError(next))
		}
		i = next
	}
	c.batch.Samples = append(c.batch.Samples, s)
	return true
}

// skip skips an unknown field with its tag at b[i:j]; it is negative once c has
// failed.
func (c *Cursor) skip(b []byte, i, j int, tag uint64) int {
	if err := checkTag(tag); err != nil {
		c.fail(b, i, err)
		return -1
	}
	next, err := skipField(b, j, tag)
	if err != nil {
		c.fail(b, i, err)
		return -1
	}
	return next
}

// NextLabel reads the first label of a run and returns what follows it. The end
// is an empty run. Where a label message repeats a field the last one counts, and
// unknown fields are skipped, as protobuf has it. An error is Invalid.
func NextLabel(run []byte) (name, value, rest []byte, err error) {
	tag, i := uvarint(run, 0)
	if i < 0 || tag != 1<<3|wireBytes {
		return nil, nil, nil, series.Errorf(series.Invalid, "read label: the run of labels is broken")
	}
	msg, next := bytesField(run, i)
	if next < 0 {
		return nil, nil, nil, series.Errorf(series.Invalid, "read label: %w", varintError(next))
	}
	rest = run[next:]
	for i = 0; i < len(msg); {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return nil, nil, nil, labelError(i, varintError(j))
		}
		switch {
		case tag == 1<<3|wireBytes:
			name, next = bytesField(msg, j)
		case tag == 2<<3|wireBytes:
			value, next = bytesField(msg, j)
		case tag>>3 == 1 || tag>>3 == 2:
			return nil, nil, nil, labelError(i, wrongType("of a label", tag))
		default:
			if err := checkTag(tag); err != nil {
				return nil, nil, nil, labelError(i, err)
			}
			if next, err = skipField(msg, j, tag); err != nil {
				return nil, nil, nil, labelError(i, err)
			}
		}
		if next < 0 {
			return nil, nil, nil, labelError(i, varintError(next))
		}
		i = next
	}
	return name, value, rest, nil
}

func labelError(i int, err error) error {
	return series.Errorf(series.Invalid, "read label: at byte %d of it: %w", i, err)
}

// metricTypes maps the wire's enumeration, the same in both versions.
var metricTypes = [...]model.MetricType{
	model.MetricTypeUnknown, model.MetricTypeCounter, model.MetricTypeGauge, model.MetricTypeHistogram,
	model.MetricTypeGaugeHistogram, model.MetricTypeSummary, model.MetricTypeInfo, model.MetricTypeStateset,
}

// metricType returns the type for a wire value; types of the future are unknown.
func metricType(v uint64) model.MetricType {
	if n := int32(v); n >= 0 && int(n) < len(metricTypes) {
		return metricTypes[n]
	}
	return model.MetricTypeUnknown
}

// errVersion is what scanning with the wrong version comes to.
func errVersion(tag uint64, is string) error {
	return fmt.Errorf("field %d belongs to %s, which is not what the Content-Type says", tag>>3, is)
}
