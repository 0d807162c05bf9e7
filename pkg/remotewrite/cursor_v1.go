package remotewrite

import (
	"github.com/varvedb/varve/pkg/series"
)

// nextV1 reads fields of a WriteRequest up to and including the next TimeSeries:
// timeseries 1, metadata 3. Field 2 is reserved and skipped: Cortex sent it.
func (c *Cursor) nextV1() bool {
	b := c.body
	for i := c.pos; i < len(b); {
		tag, j := uvarint(b, i)
		if j < 0 {
			return c.fail(b, i, varintError(j))
		}
		var msg []byte
		switch tag {
		case 1<<3 | wireBytes:
			if msg, c.pos = bytesField(b, j); c.pos < 0 {
				return c.fail(b, j, varintError(c.pos))
			}
			return c.seriesV1(msg)
		case 3<<3 | wireBytes:
			if msg, i = bytesField(b, j); i < 0 {
				return c.fail(b, j, varintError(i))
			}
			if !c.metadataV1(msg) {
				return false
			}
		case 4<<3 | wireBytes, 5<<3 | wireBytes:
			return c.fail(b, i, errVersion(tag, "remote write 2.0"))
		default:
			if n := tag >> 3; n == 1 || n == 3 {
				return c.fail(b, i, wrongType("of a write request", tag))
			}
			if i = c.skip(b, i, j, tag); i < 0 {
				return false
			}
		}
	}
	c.pos = len(b)
	return false
}

// seriesV1 reads a TimeSeries: labels 1, samples 2, exemplars 3, histograms 4.
func (c *Cursor) seriesV1(msg []byte) bool {
	c.begin()
	if !c.spend(entryBytes) {
		return false
	}
	i := labelRun(msg)
	labels := msg[:i]
	gathered := false
	for i < len(msg) {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		if n := tag >> 3; n == 0 || n > 4 {
			if i = c.skip(msg, i, j, tag); i < 0 {
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
		switch tag >> 3 {
		case 1:
			// A label after other fields, or behind a tag that is not minimal: put
			// the run together, in the same form.
			if !gathered {
				gathered = true
				ok = c.gather(labels)
			}
			ok = ok && c.gatherLabel(part)
		case 2:
			ok = c.sample(part)
		case 3:
			ok = c.exemplarV1(part)
		case 4:
			ok = c.histogramV1(part)
		}
		if !ok {
			return false
		}
		i = next
	}
	if gathered {
		labels = c.run
	}
	c.current.Labels = labels
	c.end()
	return true
}

// labelRun returns the length of the run of label fields that msg begins with. It
// stops at anything unusual, and leaves that to the slow way.
func labelRun(msg []byte) int {
	i := 0
	for i < len(msg) && msg[i] == 1<<3|wireBytes {
		if i+1 < len(msg) && msg[i+1] < 0x80 { // bytesField, at hand
			next := i + 2 + int(msg[i+1])
			if next > len(msg) {
				return i
			}
			i = next
			continue
		}
		_, next := bytesField(msg, i+1)
		if next < 0 {
			return i
		}
		i = next
	}
	return i
}

func (c *Cursor) gather(run []byte) bool {
	if !c.spend(len(run)) {
		return false
	}
	c.run = append(c.run, run...)
	return true
}

func (c *Cursor) gatherLabel(msg []byte) bool {
	if !c.spend(len(msg) + 6) {
		return false
	}
	c.run = appendHeader(c.run, 1, len(msg))
	c.run = append(c.run, msg...)
	return true
}

// exemplarV1 reads an Exemplar: labels 1, value 2, timestamp 3.
func (c *Cursor) exemplarV1(msg []byte) bool {
	if !c.spend(exemplarBytes) {
		return false
	}
	var e series.Exemplar
	start := len(c.arena)
	i := labelRun(msg)
	labels := msg[:i]
	for i < len(msg) {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		next := j
		switch tag {
		case 1<<3 | wireBytes:
			var part []byte
			if part, next = bytesField(msg, j); next < 0 {
				break
			}
			if !c.spend(len(part) + len(labels) + 6) {
				return false
			}
			c.arena = append(c.arena, labels...)
			labels = nil
			c.arena = appendHeader(c.arena, 1, len(part))
			c.arena = append(c.arena, part...)
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
	e.Labels = labels
	if len(c.arena) > start {
		e.Labels = c.arena[start:len(c.arena):len(c.arena)]
	}
	c.batch.Exemplars = append(c.batch.Exemplars, e)
	return true
}

// metadataV1 reads a MetricMetadata: type 1, family 2, help 4, unit 5.
func (c *Cursor) metadataV1(msg []byte) bool {
	if !c.spend(metadataBytes) {
		return false
	}
	m := Metadata{Type: metricTypes[0]}
	for i := 0; i < len(msg); {
		tag, j := uvarint(msg, i)
		if j < 0 {
			return c.fail(msg, i, varintError(j))
		}
		next := j
		switch tag {
		case 1<<3 | wireVarint:
			var v uint64
			v, next = uvarint(msg, j)
			m.Type = metricType(v)
		case 2<<3 | wireBytes:
			m.Family, next = bytesField(msg, j)
		case 4<<3 | wireBytes:
			m.Help, next = bytesField(msg, j)
		case 5<<3 | wireBytes:
			m.Unit, next = bytesField(msg, j)
		default:
			if n := tag >> 3; n == 1 || n == 2 || n == 4 || n == 5 {
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
	c.metadata = append(c.metadata, m)
	return true
}
