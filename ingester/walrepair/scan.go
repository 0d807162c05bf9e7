package walrepair

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/golang/snappy"
	"github.com/prometheus/prometheus/util/compression"
)

// The format of a frame, from Prometheus' tsdb/wlog: one byte of type and
// compression, two of length, four of CRC-32C, then the bytes.
const (
	pageSize  = 32 * 1024
	headerLen = 7

	typeMask   = 1<<3 - 1
	snappyFlag = 1 << 3
	zstdFlag   = 1 << 4

	frameFull   = 1
	frameFirst  = 2
	frameMiddle = 3
	frameLast   = 4
)

// maxSnappyRatio is above what the snappy format can reach (64 bytes from a copy
// of three); a header that declares more is not one.
const maxSnappyRatio = 64

// span is a run of bytes inside one page of a segment.
type span struct {
	off int64
	n   int
}

// hole is a run of spans without a good record between them.
type hole struct {
	kind    Kind
	spans   []span
	records int // lost, at least
	cause   string
	cut     bool  // the last record has no end
	end     int64 // where the last bad frame should end by its own header; 0 unknown
	open    bool  // no good record follows in the segment
	damage  int   // index in the report
}

// start is where the hole begins.
func (h *hole) start() int64 { return h.spans[0].off }

// torn reports whether h looks like an append that a crash cut short: nothing
// good follows, and its record has no end or ends in zeros that were never written.
func (h *hole) torn(s scan) bool {
	if !h.open {
		return false
	}
	if h.cut {
		return true
	}
	last := h.spans[len(h.spans)-1]
	return s.dataEnd < h.end || h.end == 0 && s.dataEnd-last.off < headerLen
}

func (h *hole) asDamage(dir string, segment int, dataEnd int64) Damage {
	d := Damage{Kind: h.kind, Dir: dir, Segment: segment, Offset: h.start(), Records: h.records, Cause: h.cause}
	for _, s := range h.spans {
		d.Bytes += max(0, min(int64(s.n), dataEnd-s.off))
	}
	return d
}

// scan is what a pass over one segment found.
type scan struct {
	size    int64
	dataEnd int64 // one past the last byte that is not zero
	records int64 // good ones, without the zero records that cover old holes
	holes   []hole
}

// sampleTimes are the oldest and newest time in one sample record, and how many
// holes of its segment lie before it.
type sampleTimes struct {
	min, max int64
	holes    int
}

// scanner reads one segment frame by frame.
type scanner struct {
	visit func(rec []byte) error // an error says that the record's content is bad

	out  scan
	open bool // the last hole may still grow

	// The record whose frames are being collected; none while frames is empty.
	frames  []span
	flags   byte
	payload []byte

	decoded compression.DecodeBuffer
	times   []sampleTimes
	last    *sampleTimes // set by visit when it saw samples; nil if nobody asks
}

func newScanner(visit func(rec []byte) error) *scanner {
	return &scanner{visit: visit, decoded: compression.NewSyncDecodeBuffer()}
}

// run reads the segment from f to its end. last, if not nil, is where visit leaves
// the times of the samples it saw; run returns those next to holes and to the
// segment's ends. Errors are those of f and of ctx.
func (s *scanner) run(ctx context.Context, f io.Reader, last *sampleTimes) (scan, []sampleTimes, error) {
	s.last = last
	buf := make([]byte, 32*pageSize)
	for {
		if err := ctx.Err(); err != nil {
			return s.out, nil, err
		}
		n, err := io.ReadFull(f, buf)
		for i := 0; i < n; i += pageSize {
			s.page(buf[i:min(i+pageSize, n)])
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			return s.out, nil, err
		}
	}
	if len(s.frames) > 0 {
		s.abandon("record ends with the segment")
		s.out.holes[len(s.out.holes)-1].cut = true
	}
	if s.open {
		s.out.holes[len(s.out.holes)-1].open = true
	}
	return s.out, s.times, nil
}

// page takes the next page; the segment's last one may be short.
func (s *scanner) page(b []byte) {
	base := s.out.size
	s.out.size += int64(len(b))
	if n := len(bytes.TrimRight(b, "\x00")); n > 0 {
		s.out.dataEnd = base + int64(n)
	}
	for i := 0; i < len(b); {
		f := parseFrame(b[i:], pageSize-i)
		switch f.state {
		case frameOK:
			s.frame(base+int64(i), f)
			i += f.n
		case framePadding:
			return
		default:
			j := resync(b, i, f)
			s.bad(span{base + int64(i), j - i}, f)
			i = j
		}
	}
}

// frame is one parsed frame.
type frame struct {
	state   frameState
	typ     byte
	flags   byte
	payload []byte
	n       int // bytes with header; what the header says if the frame is bad, 0 if it says nothing
	cause   string
}

type frameState uint8

const (
	frameOK frameState = iota
	framePadding
	frameBad
	frameCut // runs past the end of the segment
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// parseFrame reads the frame at the start of b. room is what its page has left
// for it: more than len(b) on the last, short page of a segment.
func parseFrame(b []byte, room int) frame {
	if b[0] == 0 {
		if len(bytes.TrimLeft(b, "\x00")) == 0 {
			return frame{state: framePadding}
		}
		return frame{state: frameBad, cause: "bytes in the padding of a page"}
	}
	typ, flags := b[0]&typeMask, b[0]&^typeMask
	if typ < frameFull || typ > frameLast || flags != 0 && flags != snappyFlag && flags != zstdFlag {
		return frame{state: frameBad, cause: fmt.Sprintf("invalid frame type %#x", b[0])}
	}
	if room < headerLen {
		return frame{state: frameBad, cause: "frame header runs over its page"}
	}
	if len(b) < headerLen {
		return frame{state: frameCut, cause: "frame header is cut off"}
	}
	n := headerLen + int(binary.BigEndian.Uint16(b[1:]))
	switch {
	case n > room:
		return frame{state: frameBad, cause: fmt.Sprintf("frame of %d bytes runs over its page", n)}
	case n > len(b):
		return frame{state: frameCut, n: n, cause: "frame is cut off"}
	}
	payload := b[headerLen:n]
	if sum := crc32.Checksum(payload, castagnoli); sum != binary.BigEndian.Uint32(b[3:]) {
		return frame{state: frameBad, n: n, cause: "checksum mismatch"}
	}
	return frame{state: frameOK, typ: typ, flags: flags, payload: payload, n: n}
}

// resync returns where in the page b to go on after the bad frame f at i. The
// bad frame's own length is believed if something sane follows there; else the
// next bytes that make a whole frame with a matching checksum are taken. An empty
// frame does not count: its seven bytes occur in sample values.
func resync(b []byte, i int, f frame) int {
	if j := i + f.n; f.state == frameBad && f.n > 0 && j <= len(b) {
		if j == len(b) {
			return j
		}
		if next := parseFrame(b[j:], pageSize-j); next.state == frameOK || next.state == framePadding {
			return j
		}
	}
	for j := i + headerLen; j+headerLen <= len(b); j++ {
		if next := parseFrame(b[j:], pageSize-j); next.state == frameOK && next.n > headerLen {
			return j
		}
	}
	return len(b)
}

// frame takes a good frame at offset off.
func (s *scanner) frame(off int64, f frame) {
	at := span{off, f.n}
	if f.typ == frameFull || f.typ == frameFirst {
		if len(s.frames) > 0 {
			s.abandon("record has no end")
		}
		s.flags, s.payload = f.flags, s.payload[:0]
	} else if len(s.frames) == 0 || f.flags != s.flags {
		fresh := len(s.frames) > 0 || !s.open // else it is the rest of what was lost already
		s.abandon("")
		h := s.grow("frame without its record's start", at)
		h.end, h.cut = 0, false
		if fresh && h.records == 0 {
			h.records = 1
		}
		return
	}
	s.frames = append(s.frames, at)
	s.payload = append(s.payload, f.payload...)
	if f.typ == frameFull || f.typ == frameLast {
		s.complete()
	}
}

// complete hands the collected record to visit.
func (s *scanner) complete() {
	rec, err := s.decompress()
	filler := err == nil && isFiller(rec)
	if err == nil && !filler {
		err = s.visit(rec)
	}
	if err != nil {
		s.abandon(err.Error())
		return
	}
	s.frames, s.open = s.frames[:0], false
	if filler {
		return
	}
	s.out.records++
	s.noteTimes()
}

// noteTimes keeps the sample times of the first and the last record between two
// holes: others are nobody's neighbours.
func (s *scanner) noteTimes() {
	if s.last == nil || s.last.max == 0 {
		return
	}
	t := *s.last
	t.holes = len(s.out.holes)
	*s.last = sampleTimes{}
	if n := len(s.times); n >= 2 && s.times[n-1].holes == t.holes && s.times[n-2].holes == t.holes {
		s.times[n-1] = t
		return
	}
	s.times = append(s.times, t)
}

// decompress returns the record in the collected frames.
func (s *scanner) decompress() ([]byte, error) {
	switch s.flags {
	case snappyFlag:
		if n, err := snappy.DecodedLen(s.payload); err == nil && n > maxSnappyRatio*len(s.payload) {
			return nil, fmt.Errorf("record of %d bytes declares %d bytes before compression", len(s.payload), n)
		}
		return wrapDecode(compression.Decode(compression.Snappy, s.payload, s.decoded))
	case zstdFlag:
		return wrapDecode(compression.Decode(compression.Zstd, s.payload, s.decoded))
	}
	return s.payload, nil
}

func wrapDecode(rec []byte, err error) ([]byte, error) {
	if err != nil {
		return nil, fmt.Errorf("decompress record: %w", err)
	}
	return rec, nil
}

// bad takes a bad span that began as f. The record being collected is lost with it.
func (s *scanner) bad(at span, f frame) {
	s.abandon(f.cause)
	h := s.grow(f.cause, at)
	h.records = max(h.records, 1)
	h.cut = f.state == frameCut
	h.end = 0
	if f.n > 0 {
		h.end = at.off + int64(f.n)
	}
}

// abandon gives up the frames of the record being collected, if there are any.
func (s *scanner) abandon(cause string) {
	if len(s.frames) == 0 {
		return
	}
	if cause == "" {
		cause = "record has no end"
	}
	h := s.grow(cause, s.frames...)
	h.records++
	last := s.frames[len(s.frames)-1]
	h.end = last.off + int64(last.n)
	s.frames = s.frames[:0]
}

// grow adds spans to the hole that is open, or opens one.
func (s *scanner) grow(cause string, spans ...span) *hole {
	if !s.open {
		s.out.holes = append(s.out.holes, hole{kind: Corruption, cause: cause})
		s.open = true
	}
	h := &s.out.holes[len(s.out.holes)-1]
	h.spans = append(h.spans, spans...)
	return h
}

// isFiller reports whether rec is the record of zeros (or of nothing) that covers
// a hole after a repair.
func isFiller(rec []byte) bool {
	return len(bytes.TrimLeft(rec, "\x00")) == 0
}

// putFrame writes a whole record as one frame into b, which has headerLen bytes
// more than rec.
func putFrame(b, rec []byte) error {
	if len(b) != headerLen+len(rec) || len(b) > pageSize {
		return errors.New("BUG: record does not fit its frame")
	}
	b[0] = frameFull
	binary.BigEndian.PutUint16(b[1:], uint16(len(rec)))
	binary.BigEndian.PutUint32(b[3:], crc32.Checksum(rec, castagnoli))
	copy(b[headerLen:], rec)
	return nil
}
