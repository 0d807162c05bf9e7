package remotewrite

import (
	"errors"
	"fmt"
	"slices"

	"github.com/varvedb/varve/pkg/series"
)

// readSymbols collects the symbols of a 2.0 Request, which may stand after the
// series that use them: symbols 4, timeseries 5. Fields 1 to 3 are reserved so
// that a 1.0 request is recognised here.
func (c *Cursor) readSymbols() error {
	b := c.body
	for i := 0; i < len(b); {
		tag, j := uvarint(b, i)
		if j < 0 {
			c.fail(b, i, varintError(j))
			return c.err
		}
		next := j
		switch {
		case tag == 4<<3|wireBytes:
			var s []byte
			if s, next = bytesField(b, j); next >= 0 {
				if !c.spend(symbolBytes) {
					return c.err
				}
				c.symbols = append(c.symbols, span{uint32(next - len(s)), uint32(len(s))})
			}
		case tag == 5<<3|wireBytes:
			_, next = bytesField(b, j)
		case tag>>3 == 4 || tag>>3 == 5:
			c.fail(b, i, wrongType("of a request", tag))
		case tag>>3 >= 1 && tag>>3 <= 3:
			c.fail(b, i, errVersion(tag, "remote write 1.0"))
		default:
			next = c.skip(b, i, j, tag)
		}
		if c.err == nil && next < 0 {
			c.fail(b, j, varintError(next))
		}
		if c.err != nil {
			return c.err
		}
		i = next
	}
	if len(b) == 0 {
		return nil
	}
	switch {
	case len(c.symbols) == 0:
		c.fail(b, 0, errors.New("it has no symbols, the first must be the empty string"))
	case c.symbols[0].len != 0:
		c.fail(b, int(c.symbols[0].off), errors.New("the first symbol is not the empty string"))
	}
	return c.err
}

// nextV2 reads fields of a Request up to and including the next TimeSeries. The
// pass over the symbols has checked all of them.
func (c *Cursor) nextV2() bool {
	b := c.body
	for i := c.pos; i < len(b); {
		tag, j := uvarint(b, i)
		if tag == 5<<3|wireBytes {
			var msg []byte
			msg, c.pos = bytesField(b, j)
			return c.seriesV2(msg)
		}
		if i = c.skip(b, i, j, tag); i < 0 {
			return false
		}
	}
	c.pos = len(b)
	return false
}

// seriesV2 reads a TimeSeries: labels_refs 1, samples 2, histograms 3, exemplars
// 4, metadata 5.
func (c *Cursor) seriesV2(msg []byte) bool {
	c.begin()
	if !c.spend(entryBytes) {
		return false
	}
	c.refs = c.refs[:0]
	var meta metadataRefs
	for i := 0; i < len(msg); {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		n := tag >> 3
		if n == 0 || n > 5 {
			if i = c.skip(msg, i, j, tag); i < 0 {
				return false
			}
			continue
		}
		if tag == 1<<3|wireVarint {
			if i = c.ref(msg, j); i < 0 {
				return false
			}
			continue
		}
		if tag&7 != wireBytes {
			return c.fail(msg, i, wrongType("of a series", tag))
		}
		part, next := bytesField(msg, j)
		if next < 0 {
			return c.fail(msg, j, varintError(next))
		}
		ok := true
		switch n {
		case 1:
			ok = c.packedRefs(part)
		case 2:
			ok = c.sample(part)
		case 3:
			ok = c.histogramV2(part)
		case 4:
			ok = c.exemplarV2(part)
		case 5:
			ok = c.metadataV2(part, &meta)
		}
		if !ok {
			return false
		}
		i = next
	}
	before := cap(c.run)
	var ok bool
	if c.run, ok = c.resolve(msg, c.run, c.refs, c.limits.Run); !ok || !c.spend(cap(c.run)-before) {
		return false
	}
	c.current.Labels = c.run
	c.end()
	return c.resolveMetadata(msg, meta)
}

func (c *Cursor) ref(msg []byte, i int) int {
	v, next := uvarint(msg, i)
	if next < 0 {
		c.fail(msg, i, varintError(next))
		return next
	}
	if len(c.refs) == cap(c.refs) {
		if !c.spend(2 * refBytes * len(c.refs)) { // what append is about to take
			return -1
		}
	}
	c.refs = append(c.refs, uint32(v))
	return next
}

func (c *Cursor) packedRefs(part []byte) bool {
	if most := len(c.refs) + len(part); most > cap(c.refs) {
		if !c.spend(refBytes * most) {
			return false
		}
		c.refs = slices.Grow(c.refs, len(part))
	}
	refs := c.refs
	for i := 0; i < len(part); {
		if part[i] < 0x80 { // uvarint, at hand
			refs = append(refs, uint32(part[i]))
			i++
			continue
		}
		if i+1 < len(part) && part[i+1] < 0x80 {
			refs = append(refs, uint32(part[i]&0x7f)|uint32(part[i+1])<<7)
			i += 2
			continue
		}
		v, next := uvarint(part, i)
		if next < 0 {
			return c.fail(part, i, varintError(next))
		}
		refs = append(refs, uint32(v))
		i = next
	}
	c.refs = refs
	return true
}

// resolve appends the labels that refs name to dst, in the wire form of 1.0. It
// stops appending, not checking, once dst has grown by more than most.
func (c *Cursor) resolve(msg, dst []byte, refs []uint32, most int) ([]byte, bool) {
	if len(refs)%2 != 0 {
		return dst, c.fail(msg, 0, fmt.Errorf("%d references, labels need an even number", len(refs)))
	}
	start := len(dst)
	for i := 0; i+1 < len(refs); i += 2 {
		name, value := refs[i], refs[i+1]
		if int(max(name, value)) >= len(c.symbols) {
			return dst, c.fail(msg, 0, fmt.Errorf("label references %d and %d, there are %d symbols", name, value, len(c.symbols)))
		}
		if len(dst)-start > most {
			continue
		}
		dst = appendLabel(dst, c.symbol(name), c.symbol(value))
	}
	if c.resolved += len(dst) - start; c.resolved > c.limits.Resolved {
		c.err = series.Errorf(series.Invalid, "scan request of %d bytes: its label references resolve to more than %d bytes: %w", len(c.body), c.limits.Resolved, ErrTooLarge)
		return dst, false
	}
	return dst, true
}

func (c *Cursor) symbol(ref uint32) []byte {
	s := c.symbols[ref]
	return c.body[s.off : s.off+s.len]
}

// appendLabel is series.AppendLabel, with a short way for the usual lengths: a
// 2.0 series spends most of its time here.
func appendLabel(dst, name, value []byte) []byte {
	pair := len(name) + len(value) + 4
	if pair > 127 {
		return series.AppendLabel(dst, name, value)
	}
	n := len(dst)
	dst = slices.Grow(dst, pair+2)[:n+pair+2]
	b := dst[n:]
	b[0], b[1], b[2], b[3] = 1<<3|wireBytes, byte(pair), 1<<3|wireBytes, byte(len(name))
	b = b[4+copy(b[4:], name):]
	b[0], b[1] = 2<<3|wireBytes, byte(len(value))
	copy(b[2:], value)
	return dst
}

// exemplarRun bounds the gathered labels of an exemplar. An exemplar may have 128
// characters of labels, 512 bytes at most: what passes this bound is too long.
const exemplarRun = 8 << 10

// exemplarV2 reads an Exemplar: labels_refs 1, value 2, timestamp 3.
func (c *Cursor) exemplarV2(msg []byte) bool {
	if !c.spend(exemplarBytes) {
		return false
	}
	var e series.Exemplar
	before := len(c.refs) // the series' own references, so far
	for i := 0; i < len(msg); {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		next := j
		switch tag {
		case 1<<3 | wireVarint:
			if next = c.ref(msg, j); next < 0 {
				return false
			}
		case 1<<3 | wireBytes:
			var part []byte
			if part, next = bytesField(msg, j); next >= 0 && !c.packedRefs(part) {
				return false
			}
		case 2<<3 | wireFixed64:
			e.V, next = fixed64(msg, j)
		case 3<<3 | wireVarint:
			var t uint64
			t, next = uvarint(msg, j)
			e.T = int64(t)
		default:
			if n := tag >> 3; n >= 1 && n <= 3 {
				return c.fail(msg, i, wrongType("of an exemplar", tag))
			}
			if next = c.skip(msg, i, j, tag); next < 0 {
				return false
			}
		}
		if next < 0 {
			return c.fail(msg, j, varintError(next))
		}
		i = next
	}
	start := len(c.arena)
	var ok bool
	if c.arena, ok = c.resolve(msg, c.arena, c.refs[before:], exemplarRun); !ok {
		return false
	}
	c.refs = c.refs[:before]
	if !c.spend(len(c.arena) - start) {
		return false
	}
	e.Labels = c.arena[start:len(c.arena):len(c.arena)]
	c.batch.Exemplars = append(c.batch.Exemplars, e)
	return true
}

type metadataRefs struct {
	typ        uint64
	help, unit uint32
}

// metadataV2 reads a Metadata: type 1, help_ref 3, unit_ref 4. A series may carry
// several, which protobuf merges.
func (c *Cursor) metadataV2(msg []byte, m *metadataRefs) bool {
	for i := 0; i < len(msg); {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		var v uint64
		next := j
		switch tag {
		case 1<<3 | wireVarint:
			v, next = uvarint(msg, j)
			m.typ = v
		case 3<<3 | wireVarint:
			v, next = uvarint(msg, j)
			m.help = uint32(v)
		case 4<<3 | wireVarint:
			v, next = uvarint(msg, j)
			m.unit = uint32(v)
		default:
			if n := tag >> 3; n == 1 || n == 3 || n == 4 {
				return c.fail(msg, i, wrongType("of metadata", tag))
			}
			if next = c.skip(msg, i, j, tag); next < 0 {
				return false
			}
		}
		if next < 0 {
			return c.fail(msg, j, varintError(next))
		}
		i = next
	}
	return true
}

func (c *Cursor) resolveMetadata(msg []byte, m metadataRefs) bool {
	if int(max(m.help, m.unit)) >= len(c.symbols) {
		return c.fail(msg, 0, fmt.Errorf("metadata references %d and %d, there are %d symbols", m.help, m.unit, len(c.symbols)))
	}
	c.current.Metadata = Metadata{Type: metricType(m.typ), Help: c.symbol(m.help), Unit: c.symbol(m.unit)}
	return true
}
