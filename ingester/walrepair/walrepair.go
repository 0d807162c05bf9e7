// Package walrepair mends a damaged Prometheus TSDB write-ahead log before the
// TSDB sees it, so that a bad byte costs the records it lies in and no more.
//
// The TSDB's own repair drops everything after the first bad record, and a
// missing segment stops it from opening. A log is a row of numbered segments; a
// segment is a row of 32 KiB pages; a record lies in one or more checksummed
// frames, and no frame crosses a page. So every page is a place to start afresh:
// after damage the scan goes on at the next frame that proves itself.
//
// Repair changes nothing in place. A damaged segment is copied aside, each hole
// is covered by one record of zeros, which readers skip as an unknown type, and
// the copy is renamed over the segment; everything else keeps its offset, as the
// TSDB's chunk snapshot points into segments by offset.
package walrepair

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/prometheus/tsdb/record"
	"github.com/prometheus/prometheus/tsdb/wlog"

	"github.com/varvedb/varve/pkg/series"
)

// Kind says what sort of damage was found; metrics count the kinds apart.
type Kind string

const (
	// TornTail is a record that a crash cut off at the very end of a log. It is
	// what a hard stop leaves behind and was never acknowledged as durable.
	TornTail Kind = "torn tail"
	// Corruption is damage anywhere else: acknowledged records are gone.
	Corruption Kind = "corruption"
	// MissingSegment is a hole in the row of segment files.
	MissingSegment Kind = "missing segment"
)

// refGap is added to the highest series reference seen to find one that no lost
// series had. Heads hand references out in order, so only more than this many
// lost series in one head could reach it; references have 40 bits.
const refGap = 1 << 24

// maxMissing bounds how many segments Repair invents: beyond it a stray file
// with a huge number is likelier than that many lost segments.
const maxMissing = 100_000

// Damage is one hole in a log: neighbouring bad bytes without a good record
// between them.
type Damage struct {
	Kind    Kind
	Dir     string // folder of the segment: wal, wbl or a checkpoint
	Segment int    // number of the segment; of the first one where several are missing
	Offset  int64  // bytes from the segment's start
	Bytes   int64  // bytes given up
	Records int    // records lost, a lower bound; 0 where nobody can know
	Missing int    // segments missing, for MissingSegment
	Cause   string // what gave it away

	// LastBefore and FirstAfter are the sample times (milliseconds since 1970)
	// nearest to the hole in log order: the last record before it, at its newest,
	// and the first after it, at its oldest. 0 where there is none.
	LastBefore, FirstAfter int64

	// Kept is the file with the damaged original; empty for a missing segment.
	Kept string
}

// Report is what Repair read and found.
type Report struct {
	Segments int
	Bytes    int64
	Records  int64
	// Unknown counts whole records of a type that this TSDB does not know and
	// will skip: a newer version wrote them, or damage changed their type.
	Unknown int64
	// OrphanedSeries and OrphanedSamples count, after corruption of the
	// write-ahead log only, references without a series record and their samples:
	// the TSDB cannot name them and skips them. Samples that an earlier checkpoint
	// left behind count as well, so both are upper bounds.
	OrphanedSeries  int
	OrphanedSamples int64
	Damages         []Damage
}

// Count returns the number of damages of kind k.
func (r *Report) Count(k Kind) int {
	n := 0
	for i := range r.Damages {
		if r.Damages[i].Kind == k {
			n++
		}
	}
	return n
}

// Repair reads the write-ahead log, its newest checkpoint and the out-of-order
// log below the TSDB folder dir, mends what is damaged and says what it found,
// also to logger (nil discards). Damaged originals stay in <dir>/damaged, the
// newest eight of them. Undamaged files are only read.
//
// The caller owns dir: no TSDB may have it open. Repair may be stopped at any
// instant, by ctx or by a crash, and run again. It fails only where a file cannot
// be read or written (Unavailable), or where the folder is beyond it (Corrupt).
func Repair(ctx context.Context, dir string, logger *slog.Logger) (Report, error) {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	r := &repair{ctx: ctx, keep: keeper{dir: filepath.Join(dir, "damaged")}}
	wal, err := r.scanWAL(filepath.Join(dir, "wal"))
	if err != nil {
		return r.report, fmt.Errorf("scan write-ahead log in %s: %w", dir, err)
	}
	wbl, err := r.scanDir(filepath.Join(dir, wlog.WblDirName), outOfOrder, -1)
	if err != nil {
		return r.report, fmt.Errorf("scan out-of-order log in %s: %w", dir, err)
	}
	r.noteTimes(wal)
	r.noteTimes([]*logDir{wbl})
	for _, l := range wal {
		// A lost series record may be that of any reference, so the next references
		// must be new ones: see sentinel.
		if err := r.mend(l, sentinel(r.maxRef+refGap)); err != nil {
			return r.report, fmt.Errorf("mend %s: %w", l.dir, err)
		}
	}
	if err := r.mend(wbl, nil); err != nil {
		return r.report, fmt.Errorf("mend %s: %w", wbl.dir, err)
	}
	if lost(wal) {
		if err := r.countOrphans(wal); err != nil {
			return r.report, fmt.Errorf("count orphans in %s: %w", dir, err)
		}
	}
	r.log(logger)
	return r.report, nil
}

// repair is the state of one Repair.
type repair struct {
	ctx    context.Context
	keep   keeper
	report Report
	maxRef uint64 // highest series reference in any record
}

// role is what a folder of segments is to the TSDB.
type role uint8

const (
	inOrder role = iota
	outOfOrder
	checkpoint
)

// logDir is one folder of segments after its scan.
type logDir struct {
	dir      string
	role     role
	segments []*segment
	missing  []Damage // holes in the row of files
	stand    string   // checkpoint to invent where the row's start is missing
}

// segment is one scanned segment file.
type segment struct {
	index int
	scan  scan
	times []sampleTimes // of the good sample records, only around holes
}

// scanWAL scans the newest checkpoint below dir, if there is one, and the
// segments that follow it, in replay order.
func (r *repair) scanWAL(dir string) ([]*logDir, error) {
	if err := removeTemporary(dir); err != nil {
		return nil, err
	}
	newest, index, err := wlog.LastCheckpoint(dir)
	switch {
	case errors.Is(err, record.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		wal, err := r.scanDir(dir, inOrder, -1)
		return []*logDir{wal}, err
	case err != nil:
		return nil, series.Errorf(series.Corrupt, "find checkpoint: %w", err)
	}
	cp, err := r.scanDir(newest, checkpoint, -1)
	if err != nil {
		return nil, err
	}
	wal, err := r.scanDir(dir, inOrder, index)
	return []*logDir{cp, wal}, err
}

// scanDir scans the segments of dir with numbers above after. A folder that does
// not exist has none.
func (r *repair) scanDir(dir string, role role, after int) (*logDir, error) {
	l := &logDir{dir: dir, role: role}
	indexes, err := listSegments(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return l, nil
	}
	if err != nil {
		return l, series.Errorf(series.Unavailable, "list segments: %w", err)
	}
	if err := removeTemporary(dir); err != nil {
		return l, err
	}
	indexes = slices.DeleteFunc(indexes, func(i int) bool { return i <= after })
	if err := l.findMissing(indexes, after); err != nil {
		return l, err
	}
	for _, i := range indexes {
		s, err := r.scanSegment(dir, i)
		if err != nil {
			return l, err
		}
		l.segments = append(l.segments, s)
	}
	l.classify()
	return l, nil
}

// findMissing notes the holes in the row of segment numbers. after is the
// checkpoint's number, -1 without one.
func (l *logDir) findMissing(indexes []int, after int) error {
	next := after + 1
	if l.role == outOfOrder && len(indexes) > 0 {
		next = indexes[0] // truncation leaves no trace there: any start is right
	}
	if len(indexes) == 0 && (l.role == checkpoint || l.role == inOrder && after >= 0) {
		// After a checkpoint the TSDB would number new segments from 0 and never
		// replay them; a checkpoint always has a segment 0.
		indexes = []int{next + 1}
	}
	for _, i := range indexes {
		if n := i - next; n > 0 {
			d := Damage{Kind: MissingSegment, Dir: l.dir, Segment: next, Missing: n, Cause: "segment file is not there"}
			if l.role == inOrder && after < 0 && next == 0 {
				// One empty checkpoint says "start at i" as well as i empty segments.
				l.stand = wlog.CheckpointDir(l.dir, i-1)
			} else if n > maxMissing {
				return series.Errorf(series.Corrupt, "segments %d to %d are missing in %s, at most %d are filled in: is %s a segment?", next, i-1, l.dir, maxMissing, wlog.SegmentName(l.dir, i))
			}
			l.missing = append(l.missing, d)
		}
		next = i + 1
	}
	return nil
}

// classify tells a torn tail, which only the end of the last segment in use can
// have, from corruption. A checkpoint was synced whole before it got its name.
func (l *logDir) classify() {
	for i := len(l.segments) - 1; i >= 0; i-- {
		s := l.segments[i]
		if s.scan.dataEnd == 0 {
			continue
		}
		if n := len(s.scan.holes); n > 0 && l.role != checkpoint && s.scan.holes[n-1].torn(s.scan) {
			s.scan.holes[n-1].kind = TornTail
		}
		return
	}
}

func (r *repair) scanSegment(dir string, index int) (*segment, error) {
	path := wlog.SegmentName(dir, index)
	f, err := os.Open(path)
	if err != nil {
		return nil, series.Errorf(series.Unavailable, "open segment: %w", err)
	}
	defer f.Close()
	s := &segment{index: index}
	var last sampleTimes
	sc := newScanner(func(rec []byte) error {
		facts, err := inspect(rec)
		if err != nil {
			return err
		}
		r.maxRef = max(r.maxRef, facts.maxRef)
		if facts.unknown {
			r.report.Unknown++
		}
		if facts.samples > 0 {
			last = sampleTimes{min: facts.minT, max: facts.maxT}
		}
		return nil
	})
	s.scan, s.times, err = sc.run(r.ctx, f, &last)
	if err != nil {
		return nil, series.Errorf(series.Unavailable, "read segment %s: %w", path, err)
	}
	r.report.Segments++
	r.report.Bytes += s.scan.size
	r.report.Records += s.scan.records
	return s, nil
}

// noteTimes turns the holes of a log, in replay order, into the report's damages
// with the sample times around each.
func (r *repair) noteTimes(dirs []*logDir) {
	var before int64
	var open []int // damages that still wait for the first sample after them
	see := func(t sampleTimes) {
		for _, i := range open {
			r.report.Damages[i].FirstAfter = t.min
		}
		open, before = open[:0], t.max
	}
	add := func(d Damage) {
		d.LastBefore = before
		open = append(open, len(r.report.Damages))
		r.report.Damages = append(r.report.Damages, d)
	}
	for _, l := range dirs {
		missing := l.missing
		for _, s := range l.segments {
			for len(missing) > 0 && missing[0].Segment < s.index {
				add(missing[0])
				missing = missing[1:]
			}
			s.walk(see, func(h *hole) {
				h.damage = len(r.report.Damages)
				add(h.asDamage(l.dir, s.index, s.scan.dataEnd))
			})
		}
		for _, d := range missing {
			add(d)
		}
	}
}

// walk calls see with sample times and hit with holes in the segment's order.
func (s *segment) walk(see func(sampleTimes), hit func(*hole)) {
	h := 0
	for _, t := range s.times {
		for h < t.holes {
			hit(&s.scan.holes[h])
			h++
		}
		see(t)
	}
	for ; h < len(s.scan.holes); h++ {
		hit(&s.scan.holes[h])
	}
}

// lost reports whether series records may have been lost in the middle of the log.
func lost(dirs []*logDir) bool {
	for _, l := range dirs {
		if len(l.missing) > 0 {
			return true
		}
		for _, s := range l.segments {
			if s.corrupt() {
				return true
			}
		}
	}
	return false
}

func (s *segment) corrupt() bool {
	return slices.ContainsFunc(s.scan.holes, func(h hole) bool { return h.kind == Corruption })
}

// mend rewrites the damaged segments of l and fills in the missing ones. mark, if
// there is one, is a record that ends each segment in which something was lost.
func (r *repair) mend(l *logDir, mark []byte) error {
	if l.stand != "" {
		if err := createCheckpoint(l.stand, mark); err != nil {
			return series.Errorf(series.Unavailable, "create checkpoint %s for missing segments: %w", l.stand, err)
		}
	}
	for _, d := range l.missing {
		if l.stand != "" && d.Segment == 0 {
			continue
		}
		for i := d.Segment; i < d.Segment+d.Missing; i++ {
			if err := createSegment(wlog.SegmentName(l.dir, i), mark); err != nil {
				return series.Errorf(series.Unavailable, "create missing segment: %w", err)
			}
		}
	}
	for _, s := range l.segments {
		if len(s.scan.holes) == 0 {
			continue
		}
		if err := r.ctx.Err(); err != nil {
			return err
		}
		end := mark
		if !s.corrupt() {
			end = nil // nothing follows a torn tail
		}
		kept, err := r.keep.rewrite(r.ctx, wlog.SegmentName(l.dir, s.index), s.scan, end)
		if err != nil {
			return fmt.Errorf("rewrite segment %s: %w", wlog.SegmentName(l.dir, s.index), err)
		}
		for _, h := range s.scan.holes {
			r.report.Damages[h.damage].Kept = kept
		}
	}
	return nil
}

// countOrphans reads the mended log once more for references without a series.
func (r *repair) countOrphans(dirs []*logDir) error {
	known := map[uint64]struct{}{}
	orphans := map[uint64]int64{}
	count := func(rec []byte) error {
		for _, ref := range seriesRefs(rec) {
			known[ref] = struct{}{}
		}
		for _, ref := range sampleRefs(rec) {
			if _, ok := known[ref]; !ok {
				orphans[ref]++
			}
		}
		return nil
	}
	for _, l := range dirs {
		for _, s := range l.segments {
			f, err := os.Open(wlog.SegmentName(l.dir, s.index))
			if err != nil {
				return series.Errorf(series.Unavailable, "open segment: %w", err)
			}
			_, _, err = newScanner(count).run(r.ctx, f, nil)
			f.Close()
			if err != nil {
				return series.Errorf(series.Unavailable, "read segment %s: %w", wlog.SegmentName(l.dir, s.index), err)
			}
		}
	}
	for _, n := range orphans {
		r.report.OrphanedSeries++
		r.report.OrphanedSamples += n
	}
	return nil
}

// log writes one line per damage, so that each can be found again.
func (r *repair) log(logger *slog.Logger) {
	for _, d := range r.report.Damages {
		logger.Warn("Repaired damaged log",
			"kind", string(d.Kind), "dir", d.Dir, "segment", d.Segment, "offset", d.Offset,
			"bytes_skipped", d.Bytes, "records_lost_at_least", d.Records, "segments_missing", d.Missing,
			"cause", d.Cause, "last_sample_before", formatTime(d.LastBefore), "first_sample_after", formatTime(d.FirstAfter),
			"original", d.Kept)
	}
	if r.report.OrphanedSeries > 0 {
		logger.Warn("Samples in the log lost their series record and cannot be replayed",
			"series_at_most", r.report.OrphanedSeries, "samples_at_most", r.report.OrphanedSamples)
	}
	if r.report.Unknown > 0 {
		logger.Warn("Log has records of an unknown type; the TSDB skips them", "records", r.report.Unknown)
	}
}

func formatTime(ms int64) string {
	if ms == 0 {
		return "none"
	}
	return time.UnixMilli(ms).UTC().Format(time.RFC3339Nano)
}

// listSegments returns the segment numbers in dir, ascending. Only names as the
// TSDB itself writes them count.
func listSegments(dir string) ([]int, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var indexes []int
	for _, e := range entries {
		i, err := strconv.Atoi(e.Name())
		if err != nil || i < 0 || e.IsDir() || filepath.Base(wlog.SegmentName(dir, i)) != e.Name() {
			continue
		}
		indexes = append(indexes, i)
	}
	slices.Sort(indexes)
	return indexes, nil
}
