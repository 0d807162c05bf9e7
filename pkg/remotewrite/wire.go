package remotewrite

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Protobuf wire types. Groups (3, 4) are long dead, but skipping an unknown field
// includes them.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireGroup   = 3
	wireEnd     = 4
	wireFixed32 = 5
)

const maxFieldNumber = 1<<29 - 1

var (
	errTruncated = errors.New("the message ends within a field")
	errGroupEnd  = errors.New("a group ends that did not begin")
	errWireType  = errors.New("unknown wire type")

	// errStrict marks what some lenient decoders let pass and the protobuf
	// specification does not.
	errStrict      = errors.New("not valid protobuf")
	errOverflow    = fmt.Errorf("%w: varint above 64 bits", errStrict)
	errFieldNumber = fmt.Errorf("%w: field number out of range", errStrict)
)

// uvarint reads a varint at b[i:] and returns the index after it, negative where
// the bytes are no varint.
func uvarint(b []byte, i int) (uint64, int) {
	if i < len(b) && b[i] < 0x80 {
		return uint64(b[i]), i + 1
	}
	return longUvarint(b, i)
}

func longUvarint(b []byte, i int) (uint64, int) {
	v, w := binary.Uvarint(b[min(i, len(b)):])
	if w <= 0 {
		return 0, w - 1 // -1: truncated; below: overflow
	}
	return v, i + w
}

// varintError names what is wrong where uvarint returned the negative index i.
func varintError(i int) error {
	if i == -1 {
		return errTruncated
	}
	return errOverflow
}

// bytesField reads a length and that many bytes at b[i:]. The content keeps the
// capacity up to the end of the body: its distance from there is its offset.
func bytesField(b []byte, i int) (content []byte, next int) {
	n, j := uvarint(b, i)
	if j < 0 {
		return nil, j
	}
	if n > uint64(len(b)-j) {
		return nil, -1
	}
	return b[j : j+int(n)], j + int(n)
}

// fixed64 reads eight bytes at b[i:] as a double.
func fixed64(b []byte, i int) (float64, int) {
	if len(b)-i < 8 {
		return 0, -1
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b[i:])), i + 8
}

// skipField skips the value of an unknown field whose tag ended at b[:i]. A group
// ends with its end tag; depth is counted, not recursed into.
func skipField(b []byte, i int, tag uint64) (next int, err error) {
	depth := 0
	for {
		switch tag & 7 {
		case wireVarint:
			_, i = uvarint(b, i)
		case wireFixed64:
			i = skipBytes(b, i, 8)
		case wireFixed32:
			i = skipBytes(b, i, 4)
		case wireBytes:
			_, i = bytesField(b, i)
		case wireGroup:
			depth++
		case wireEnd:
			if depth == 0 {
				return 0, errGroupEnd
			}
			depth--
		default:
			return 0, errWireType
		}
		if i < 0 {
			return 0, varintError(i)
		}
		if depth == 0 {
			return i, nil
		}
		if tag, i = uvarint(b, i); i < 0 {
			return 0, varintError(i)
		}
		if err := checkTag(tag); err != nil {
			return 0, err
		}
	}
}

func skipBytes(b []byte, i, n int) int {
	if len(b)-i < n {
		return -1
	}
	return i + n
}

func checkTag(tag uint64) error {
	if n := tag >> 3; n == 0 || n > maxFieldNumber {
		return errFieldNumber
	}
	return nil
}

// wrongType reports a known field with a wire type that is not its own.
func wrongType(name string, tag uint64) error {
	return fmt.Errorf("field %d, %s, has wire type %d", tag>>3, name, tag&7)
}
