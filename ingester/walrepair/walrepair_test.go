package walrepair_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/tsdb/record"
	"github.com/prometheus/prometheus/tsdb/wlog"
	"github.com/prometheus/prometheus/util/compression"
	"go.uber.org/goleak"

	"github.com/varvedb/varve/ingester/walrepair"
	"github.com/varvedb/varve/pkg/series"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	pageSize = 32 * 1024
	start    = int64(1_790_000_000_000) // ms
	step     = int64(15_000)
	nSeries  = 40
	nRounds  = 500
)

type sample struct {
	t int64
	v float64
}

// samples are all samples of a store: series text -> time -> value.
type samples map[string]map[int64]float64

func (s samples) count() int {
	n := 0
	for _, m := range s {
		n += len(m)
	}
	return n
}

// missing returns what is in want and not, or not the same, in s, and fails the
// test for anything in s that is not in want.
func (s samples) missing(t *testing.T, want samples) samples {
	t.Helper()
	out := samples{}
	for name, m := range want {
		for ts, v := range m {
			if got, ok := s[name][ts]; !ok || got != v {
				if out[name] == nil {
					out[name] = map[int64]float64{}
				}
				out[name][ts] = v
			}
		}
	}
	for name, m := range s {
		for ts, v := range m {
			if w, ok := want[name][ts]; !ok || w != v {
				t.Fatalf("store answers %s %v at %d, which was never written (want %v, %v)", name, v, ts, w, ok)
			}
		}
	}
	return out
}

func options(compr compression.Type) *tsdb.Options {
	o := tsdb.DefaultOptions()
	o.WALSegmentSize = 2 * pageSize
	o.WALCompression = compr
	o.OutOfOrderTimeWindow = 24 * 3600 * 1000
	o.NoLockfile = true
	o.MinBlockDuration = 24 * 3600 * 1000 // no cut while the test runs
	o.MaxBlockDuration = 24 * 3600 * 1000
	return o
}

// write fills a store with nSeries series of nRounds samples, one commit a round,
// and an out-of-order sample each, and returns a folder as kill -9 would leave it.
func write(t *testing.T, compr compression.Type) (string, samples) {
	t.Helper()
	live := t.TempDir()
	db, err := tsdb.Open(live, nil, nil, options(compr), nil)
	if err != nil {
		t.Fatal(err)
	}
	db.DisableCompactions()
	rng := rand.New(rand.NewPCG(1, 2))
	want := samples{}
	refs := make([]storage.SeriesRef, nSeries)
	add := func(t0 int64, s int, app storage.Appender) {
		l := labels.FromStrings("__name__", "DCGM_FI_DEV_POWER_USAGE", "gpu", fmt.Sprint(s), "node", "n1")
		v := rng.Float64()
		ref, err := app.Append(refs[s], l, t0, v)
		if err != nil {
			t.Fatal(err)
		}
		refs[s] = ref
		if want[l.String()] == nil {
			want[l.String()] = map[int64]float64{}
		}
		want[l.String()][t0] = v
	}
	for r := range int64(nRounds) {
		app := db.Appender(t.Context())
		for s := range nSeries {
			if s%2 == 1 && r < 100 {
				continue // half of the series begin later
			}
			add(start+r*step, s, app)
		}
		if err := app.Commit(); err != nil {
			t.Fatal(err)
		}
		if r < 101 {
			continue
		}
		app = db.Appender(t.Context())
		for s := range nSeries {
			add(start-3600_000+r*1000, s, app)
		}
		if err := app.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	dir := copyDir(t, live)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, want
}

func copyDir(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

// read opens the store, fails the test if the TSDB repairs anything itself, and
// returns all its samples.
func read(t *testing.T, dir string) samples {
	t.Helper()
	var logged bytes.Buffer
	reg := prometheus.NewRegistry()
	db, err := tsdb.Open(dir, slog.New(slog.NewTextHandler(&logged, nil)), reg, options(compression.Snappy), nil)
	if err != nil {
		t.Fatalf("open store after repair: %v", err)
	}
	defer db.Close()
	if strings.Contains(logged.String(), "attempting repair") {
		t.Fatalf("TSDB repaired the log itself:\n%s", logged.String())
	}
	return readDB(t, db)
}

func readDB(t *testing.T, db *tsdb.DB) samples {
	t.Helper()
	q, err := db.Querier(math.MinInt64, math.MaxInt64)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	out := samples{}
	set := q.Select(t.Context(), false, nil, labels.MustNewMatcher(labels.MatchRegexp, "__name__", ".+"))
	var it chunkenc.Iterator
	for set.Next() {
		name := set.At().Labels().String()
		out[name] = map[int64]float64{}
		it = set.At().Iterator(it)
		for it.Next() == chunkenc.ValFloat {
			ts, v := it.At()
			out[name][ts] = v
		}
		if it.Err() != nil {
			t.Fatal(it.Err())
		}
	}
	if set.Err() != nil {
		t.Fatal(set.Err())
	}
	return out
}

func segments(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	// An empty one at the end is only prepared.
	for len(files) > 0 && size(t, files[len(files)-1]) == 0 {
		files = files[:len(files)-1]
	}
	return files
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Size()
}

// edit changes the bytes of a file.
func edit(t *testing.T, path string, f func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, f(b), 0o666); err != nil {
		t.Fatal(err)
	}
}

func flip(off int) func([]byte) []byte {
	return func(b []byte) []byte {
		b[off] ^= 0x10
		return b
	}
}

// frameAt returns the offset and length of the frame in which off lies.
func frameAt(t *testing.T, path string, off int) (int, int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := off / pageSize * pageSize; i < len(b) && b[i] != 0; {
		n := 7 + int(binary.BigEndian.Uint16(b[i+1:]))
		if off < i+n {
			return i, n
		}
		i += n
	}
	t.Fatalf("no frame at %d in %s", off, path)
	return 0, 0
}

func repair(t *testing.T, dir string) walrepair.Report {
	t.Helper()
	rep, err := walrepair.Repair(t.Context(), dir, nil)
	if err != nil {
		t.Fatalf("repair: %v", err)
	}
	again, err := walrepair.Repair(t.Context(), dir, nil)
	if err != nil || len(again.Damages) != 0 {
		t.Fatalf("second repair found %+v, %v; want nothing", again.Damages, err)
	}
	return rep
}

func TestRepair(t *testing.T) {
	const wholeRound = nSeries // samples in one record of the log
	tests := []struct {
		name   string
		damage func(t *testing.T, dir string)
		// want
		kinds   []walrepair.Kind
		maxLost int // samples
		where   string
		segment int
	}{
		{
			name:   "an intact log is not touched",
			damage: func(*testing.T, string) {},
		},
		{
			name: "the last segment is cut inside its last record: that record is lost",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				edit(t, s[len(s)-1], func(b []byte) []byte { return b[:len(b)-100] })
			},
			// Out-of-order samples stand in both logs, so nothing is lost if the cut
			// record is one of theirs.
			kinds: []walrepair.Kind{walrepair.TornTail}, maxLost: wholeRound, where: "wal", segment: -1,
		},
		{
			name: "the last segment is cut inside the header of its last frame",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				last := s[len(s)-1]
				at, _ := frameAt(t, last, int(size(t, last))-1)
				edit(t, last, func(b []byte) []byte { return b[:at+3] })
			},
			kinds: []walrepair.Kind{walrepair.TornTail}, maxLost: wholeRound, where: "wal", segment: -1,
		},
		{
			name: "zeros after the last record are padding, not damage",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				edit(t, s[len(s)-1], func(b []byte) []byte { return append(b, make([]byte, 3*pageSize)...) })
			},
		},
		{
			name: "the last record was allocated but not written: zeros to the end",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				edit(t, s[len(s)-1], func(b []byte) []byte {
					clear(b[len(b)-50:])
					return append(b, make([]byte, pageSize)...)
				})
			},
			kinds: []walrepair.Kind{walrepair.TornTail}, maxLost: wholeRound, where: "wal", segment: -1,
		},
		{
			name: "one bit of a payload in the middle of segment 2 costs its record",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				at, n := frameAt(t, s[2], pageSize/2)
				edit(t, s[2], flip(at+n/2))
			},
			kinds: []walrepair.Kind{walrepair.Corruption}, maxLost: wholeRound, where: "wal", segment: 2,
		},
		{
			name: "one bit of a length in the middle of segment 2 costs its record",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				at, _ := frameAt(t, s[2], pageSize/2)
				edit(t, s[2], flip(at+1))
			},
			kinds: []walrepair.Kind{walrepair.Corruption}, maxLost: wholeRound, where: "wal", segment: 2,
		},
		{
			name: "a whole page of segment 2 is garbage: its records are lost and those it cuts",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				edit(t, s[2], func(b []byte) []byte {
					for i := range pageSize {
						b[pageSize+i] = byte(i*7 + i>>8)
					}
					return b
				})
			},
			kinds: []walrepair.Kind{walrepair.Corruption}, maxLost: 90 * wholeRound, where: "wal", segment: 2,
		},
		{
			name: "an older segment lost its end, although others follow",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				edit(t, s[1], func(b []byte) []byte { return b[:pageSize+1000] })
			},
			kinds: []walrepair.Kind{walrepair.Corruption}, maxLost: 90 * wholeRound, where: "wal", segment: 1,
		},
		{
			name: "segment 2 is not there",
			damage: func(t *testing.T, dir string) {
				if err := os.Remove(segments(t, filepath.Join(dir, "wal"))[2]); err != nil {
					t.Fatal(err)
				}
			},
			kinds: []walrepair.Kind{walrepair.MissingSegment}, maxLost: 180 * wholeRound, where: "wal", segment: 2,
		},
		{
			name: "the first segment with the series records of half of the series is not there",
			damage: func(t *testing.T, dir string) {
				if err := os.Remove(segments(t, filepath.Join(dir, "wal"))[0]); err != nil {
					t.Fatal(err)
				}
			},
			kinds: []walrepair.Kind{walrepair.MissingSegment}, maxLost: nSeries * nRounds * 2, where: "wal", segment: 0,
		},
		{
			name: "one bit in the out-of-order log costs its record",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wbl"))
				at, n := frameAt(t, s[1], pageSize/2)
				edit(t, s[1], flip(at+n/2))
			},
			kinds: []walrepair.Kind{walrepair.Corruption}, maxLost: wholeRound, where: "wbl", segment: 1,
		},
		{
			name: "the out-of-order log is cut inside its last record",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wbl"))
				edit(t, s[len(s)-1], func(b []byte) []byte { return b[:len(b)-10] })
			},
			kinds: []walrepair.Kind{walrepair.TornTail}, maxLost: wholeRound, where: "wbl", segment: -1,
		},
		{
			name: "a segment of the out-of-order log is not there",
			damage: func(t *testing.T, dir string) {
				if err := os.Remove(segments(t, filepath.Join(dir, "wbl"))[1]); err != nil {
					t.Fatal(err)
				}
			},
			kinds: []walrepair.Kind{walrepair.MissingSegment}, maxLost: 180 * wholeRound, where: "wbl", segment: 1,
		},
		{
			name: "damage in both logs and a torn tail are all found",
			damage: func(t *testing.T, dir string) {
				s := segments(t, filepath.Join(dir, "wal"))
				at, n := frameAt(t, s[1], pageSize/2)
				edit(t, s[1], flip(at+n/2))
				edit(t, s[len(s)-1], func(b []byte) []byte { return b[:len(b)-1] })
				s = segments(t, filepath.Join(dir, "wbl"))
				edit(t, s[0], flip(100))
			},
			kinds: []walrepair.Kind{walrepair.Corruption, walrepair.TornTail, walrepair.Corruption}, maxLost: 3 * wholeRound, where: "wal", segment: 1,
		},
	}
	for _, compr := range []compression.Type{compression.None, compression.Snappy, compression.Zstd} {
		base, want := write(t, compr)
		if n := len(segments(t, filepath.Join(base, "wal"))); n < 4 {
			t.Fatalf("test wrote %d segments, needs at least 4", n)
		}
		for _, tt := range tests {
			t.Run(compr+"/"+tt.name, func(t *testing.T) {
				dir := copyDir(t, base)
				tt.damage(t, dir)
				before := readTree(t, dir)
				rep := repair(t, dir)
				var kinds []walrepair.Kind
				for _, d := range rep.Damages {
					kinds = append(kinds, d.Kind)
				}
				if !slices.Equal(kinds, tt.kinds) {
					t.Fatalf("damages = %+v; want kinds %v", rep.Damages, tt.kinds)
				}
				if len(tt.kinds) == 0 {
					if after := readTree(t, dir); !equalTree(before, after) {
						t.Fatal("repair changed files of an undamaged log")
					}
				} else {
					checkDamage(t, dir, rep.Damages[0], tt.where, tt.segment)
				}
				got := read(t, dir)
				if lost := got.missing(t, want).count(); lost > tt.maxLost {
					t.Fatalf("lost %d samples, at most %d were to be lost; damages %+v", lost, tt.maxLost, rep.Damages)
				}
			})
		}
	}
}

// checkDamage checks that d names its place, its neighbours in time and, except
// for a missing file, the kept original.
func checkDamage(t *testing.T, dir string, d walrepair.Damage, where string, segment int) {
	t.Helper()
	if filepath.Base(d.Dir) != where || segment >= 0 && d.Segment != segment {
		t.Errorf("damage is in %s segment %d, want %s segment %d", d.Dir, d.Segment, where, segment)
	}
	if d.Cause == "" {
		t.Error("damage has no cause")
	}
	if d.Kind == walrepair.MissingSegment {
		return
	}
	if d.Bytes <= 0 || d.Records < 1 {
		t.Errorf("damage of %d bytes and %d records, want some of both", d.Bytes, d.Records)
	}
	if d.Segment > 0 && d.LastBefore < start-3600_000 {
		t.Errorf("last sample before is at %d, want a time that was written", d.LastBefore)
	}
	if after := d.FirstAfter; d.Kind == walrepair.TornTail != (after == 0) {
		t.Errorf("%s: first sample after is at %d", d.Kind, after)
	}
	if filepath.Dir(d.Kept) != filepath.Join(dir, "damaged") {
		t.Errorf("original is kept as %q, want it in <tenant>/damaged", d.Kept)
	}
	if _, err := os.Stat(d.Kept); err != nil {
		t.Errorf("kept original: %v", err)
	}
}

func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		out[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func equalTree(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// withCheckpoint turns the first half of the log into a checkpoint.
func withCheckpoint(t *testing.T, base string) string {
	t.Helper()
	dir := copyDir(t, base)
	w, err := wlog.NewSize(nil, nil, filepath.Join(dir, "wal"), 2*pageSize, compression.Snappy)
	if err != nil {
		t.Fatal(err)
	}
	first, last, err := wlog.Segments(w.Dir())
	if err != nil {
		t.Fatal(err)
	}
	keep := func(chunks.HeadSeriesRef) bool { return true }
	mid := (first + last) / 2
	if _, err := wlog.Checkpoint(slog.New(slog.DiscardHandler), w, first, mid, keep, start-7200_000, false, true); err != nil {
		t.Fatal(err)
	}
	if err := w.Truncate(mid + 1); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestRepairCheckpoint(t *testing.T) {
	base, want := write(t, compression.Snappy)
	base = withCheckpoint(t, base)
	if lost := read(t, copyDir(t, base)).missing(t, want).count(); lost != 0 {
		t.Fatalf("test's own checkpoint lost %d samples", lost)
	}
	checkpoint := func(dir string) string {
		cp, _, err := wlog.LastCheckpoint(filepath.Join(dir, "wal"))
		if err != nil {
			t.Fatal(err)
		}
		return cp
	}
	tests := []struct {
		name    string
		damage  func(t *testing.T, dir string)
		kind    walrepair.Kind
		maxLost int
	}{
		{"one bit in a sample record of the checkpoint costs that record", func(t *testing.T, dir string) {
			path := segments(t, checkpoint(dir))[0]
			at, n := frameAt(t, path, pageSize+pageSize/2)
			edit(t, path, flip(at+n/2))
		}, walrepair.Corruption, nSeries},
		{"the checkpoint's end is cut off", func(t *testing.T, dir string) {
			path := segments(t, checkpoint(dir))[0]
			edit(t, path, func(b []byte) []byte { b = bytes.TrimRight(b, "\x00"); return b[:len(b)-30] })
		}, walrepair.Corruption, nSeries},
		{"the checkpoint's only segment is not there", func(t *testing.T, dir string) {
			if err := os.Remove(segments(t, checkpoint(dir))[0]); err != nil {
				t.Fatal(err)
			}
		}, walrepair.MissingSegment, nSeries * nRounds * 2},
		{"the segment after the checkpoint is not there", func(t *testing.T, dir string) {
			if err := os.Remove(segments(t, filepath.Join(dir, "wal"))[0]); err != nil {
				t.Fatal(err)
			}
		}, walrepair.MissingSegment, 200 * nSeries},
		{"no segment follows the checkpoint", func(t *testing.T, dir string) {
			files, _ := filepath.Glob(filepath.Join(dir, "wal", "[0-9]*"))
			for _, f := range files {
				if err := os.Remove(f); err != nil {
					t.Fatal(err)
				}
			}
		}, walrepair.MissingSegment, nSeries * nRounds * 2},
		{"the checkpoint is not there", func(t *testing.T, dir string) {
			if err := os.RemoveAll(checkpoint(dir)); err != nil {
				t.Fatal(err)
			}
		}, walrepair.MissingSegment, nSeries * nRounds * 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := copyDir(t, base)
			tt.damage(t, dir)
			rep := repair(t, dir)
			if len(rep.Damages) != 1 || rep.Damages[0].Kind != tt.kind {
				t.Fatalf("damages = %+v; want one %s", rep.Damages, tt.kind)
			}
			got := read(t, dir)
			if lost := got.missing(t, want).count(); lost > tt.maxLost {
				t.Fatalf("lost %d samples, at most %d were to be lost", lost, tt.maxLost)
			}
			// What is written now must be there after the next start.
			extra := appendOne(t, dir, "after")
			if again := read(t, dir); again[extra] == nil {
				t.Fatalf("series %s, written after the repair, is gone at the next start", extra)
			}
		})
	}
}

// appendOne writes one sample of a new series to the store and closes it.
func appendOne(t *testing.T, dir, name string) string {
	t.Helper()
	db, err := tsdb.Open(dir, nil, nil, options(compression.Snappy), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	l := labels.FromStrings("__name__", name)
	app := db.Appender(t.Context())
	if _, err := app.Append(0, l, start+nRounds*step, 1); err != nil {
		t.Fatal(err)
	}
	if err := app.Commit(); err != nil {
		t.Fatal(err)
	}
	return l.String()
}

// TestLostSeriesKeepTheirReferences loses the record of the newest series while
// its samples survive: a series made later must not inherit them.
func TestLostSeriesKeepTheirReferences(t *testing.T) {
	dir := t.TempDir()
	db, err := tsdb.Open(dir, nil, nil, options(compression.None), nil)
	if err != nil {
		t.Fatal(err)
	}
	commit := func(name string, n int, ref storage.SeriesRef) storage.SeriesRef {
		for i := range n {
			app := db.Appender(t.Context())
			ref, err = app.Append(ref, labels.FromStrings("__name__", name), start+int64(i)*step, 7)
			if err != nil {
				t.Fatal(err)
			}
			if err := app.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		return ref
	}
	commit("old", 3, 0)
	commit("newest", 300, 0)
	db.ForceHeadMMap()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "wal", "00000000")
	edit(t, path, func(b []byte) []byte {
		i := bytes.Index(b, []byte("newest"))
		if i < 0 {
			t.Fatal("no series record to damage")
		}
		b[i] ^= 1
		return b
	})
	rep := repair(t, dir)
	if rep.Count(walrepair.Corruption) != 1 || rep.OrphanedSeries != 1 || rep.OrphanedSamples != 300 {
		t.Fatalf("report = %+v; want one corruption that orphans 300 samples of one series", rep)
	}
	name := appendOne(t, dir, "later")
	got := read(t, dir)
	if len(got[name]) != 1 {
		t.Fatalf("series %s has %d samples, want its own one", name, len(got[name]))
	}
	if n := len(got[labels.FromStrings("__name__", "old").String()]); n != 3 {
		t.Fatalf("series old has %d samples, want 3", n)
	}
}

// TestLogIsTruncatedAfterRepair forces a head compaction over a repaired log: damage
// that stays in it would fail every checkpoint until the disk is full.
func TestLogIsTruncatedAfterRepair(t *testing.T) {
	dir, want := write(t, compression.Snappy)
	s := segments(t, filepath.Join(dir, "wal"))
	at, n := frameAt(t, s[1], pageSize/2)
	edit(t, s[1], flip(at+n/2))
	if err := os.Remove(s[2]); err != nil {
		t.Fatal(err)
	}
	repair(t, dir)
	// A disk that filled during a checkpoint leaves a half-written folder behind.
	half := filepath.Join(dir, "wal", "checkpoint.00000002.tmp")
	if err := os.Mkdir(half, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(half, "00000000"), []byte{1, 0}, 0o666); err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	db, err := tsdb.Open(dir, nil, reg, options(compression.Snappy), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	mint, maxt := db.Head().MinTime(), start+nRounds*step/2
	if err := db.CompactHead(tsdb.NewRangeHead(db.Head(), mint, maxt)); err != nil {
		t.Fatalf("compact head: %v", err)
	}
	for name, want := range map[string]float64{
		"prometheus_tsdb_checkpoint_creations_total":        1,
		"prometheus_tsdb_checkpoint_creations_failed_total": 0,
		"prometheus_tsdb_wal_corruptions_total":             0,
	} {
		if got := counter(t, reg, name); got != want {
			t.Errorf("%s = %v, want %v", name, got, want)
		}
	}
	if len(segments(t, filepath.Join(dir, "wal"))) >= len(s) {
		t.Error("no segment was removed")
	}
	if lost := readDB(t, db).missing(t, want).count(); lost > 200*nSeries {
		t.Errorf("lost %d samples, at most those of one segment were to be lost", lost)
	}
}

func counter(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func TestDamagedHeadChunksAreTheTSDBsOwnAffair(t *testing.T) {
	base, want := write(t, compression.Snappy)
	db, err := tsdb.Open(base, nil, nil, options(compression.Snappy), nil)
	if err != nil {
		t.Fatal(err)
	}
	db.ForceHeadMMap()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(base, "chunks_head", "0*"))
	if len(files) == 0 {
		t.Fatal("no head chunk files")
	}
	edit(t, files[0], flip(int(size(t, files[0]))/3))
	rep := repair(t, base)
	if len(rep.Damages) != 0 {
		t.Fatalf("damages = %+v; want none in the logs", rep.Damages)
	}
	db, err = tsdb.Open(base, nil, nil, options(compression.Snappy), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	// In-order samples come back from the log. Out-of-order chunks that were already
	// written out have only the chunk file, and a marker in their log says so.
	inOrder := samples{}
	for name, m := range want {
		inOrder[name] = map[int64]float64{}
		for ts, v := range m {
			if ts >= start {
				inOrder[name][ts] = v
			}
		}
	}
	got := readDB(t, db)
	for name, m := range inOrder {
		for ts, v := range m {
			if w, ok := got[name][ts]; !ok || w != v {
				t.Fatalf("%s at %d = %v, %v; want %v", name, ts, w, ok, v)
			}
		}
	}
}

func TestOriginalsAreBounded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "wal", "00000000")
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		b := frame(t, []byte{byte(record.Samples)})
		b = append(b, frame(t, bytes.Repeat([]byte{200}, 20))...)
		b[len(b)-1-i%5] ^= 1
		b = append(b, frame(t, []byte{byte(record.Samples)})...)
		if err := os.WriteFile(path, b, 0o666); err != nil {
			t.Fatal(err)
		}
		repair(t, dir)
	}
	kept, err := os.ReadDir(filepath.Join(dir, "damaged"))
	if err != nil || len(kept) != 8 {
		t.Fatalf("%d originals kept, %v; want 8", len(kept), err)
	}
	if _, err := os.Stat(filepath.Join(dir, "damaged", "wal-00000000.damaged-20")); err != nil {
		t.Errorf("newest original: %v", err)
	}
}

func frame(t *testing.T, rec []byte) []byte {
	t.Helper()
	b := make([]byte, 7, 7+len(rec))
	b[0] = 1
	binary.BigEndian.PutUint16(b[1:], uint16(len(rec)))
	binary.BigEndian.PutUint32(b[3:], crc32.Checksum(rec, crc32.MakeTable(crc32.Castagnoli)))
	return append(b, rec...)
}

func TestUndecodableRecordsAreDropped(t *testing.T) {
	huge := binary.AppendUvarint([]byte{byte(record.Series), 0, 0, 0, 0, 0, 0, 0, 1}, 1<<62)
	tests := []struct {
		name    string
		rec     []byte
		damaged bool
	}{
		{"a series record that declares 2^62 labels", huge, true},
		{"a sample record that ends inside a value", append([]byte{byte(record.Samples)}, make([]byte, 20)...), true},
		{"a tombstone record that ends inside an interval", append([]byte{byte(record.Tombstones)}, make([]byte, 8)...), true},
		{"a record of a type from the future is left alone", []byte{200, 1, 2, 3}, false},
		{"a record of zeros is an old repair's filler", make([]byte, 10), false},
		{"an empty record", nil, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			good := (&record.Encoder{}).Samples([]record.RefSample{{Ref: 1, T: start, V: 1}}, nil)
			b := slices.Concat(frame(t, good), frame(t, tt.rec), frame(t, good))
			if err := os.MkdirAll(filepath.Join(dir, "wal"), 0o777); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "wal", "00000000"), b, 0o666); err != nil {
				t.Fatal(err)
			}
			rep := repair(t, dir)
			if got := rep.Count(walrepair.Corruption) == 1; got != tt.damaged {
				t.Fatalf("damages = %+v; want damaged = %v", rep.Damages, tt.damaged)
			}
			read(t, dir)
		})
	}
}

func TestRepairNamesAnAbsurdGap(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "wal"), 0o777); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"00000000", "99999999"} {
		if err := os.WriteFile(filepath.Join(dir, "wal", name), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	_, err := walrepair.Repair(t.Context(), dir, nil)
	if series.KindOf(err) != series.Corrupt || !strings.Contains(err.Error(), "99999999") {
		t.Fatalf("repair: %v (%s); want a corrupt error that names the segment", err, series.KindOf(err))
	}
}

func TestRepairOfNothing(t *testing.T) {
	rep := repair(t, filepath.Join(t.TempDir(), "no such tenant"))
	if rep.Segments != 0 || len(rep.Damages) != 0 {
		t.Fatalf("report = %+v; want an empty one", rep)
	}
}

func TestRepairStops(t *testing.T) {
	base, _ := write(t, compression.Snappy)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := walrepair.Repair(ctx, base, nil); err == nil {
		t.Fatal("repair with a cancelled context succeeded")
	}
}

func TestRepairLogsPlaceAndTime(t *testing.T) {
	base, _ := write(t, compression.Snappy)
	s := segments(t, filepath.Join(base, "wal"))
	at, n := frameAt(t, s[2], pageSize/2)
	edit(t, s[2], flip(at+n/2))
	var out bytes.Buffer
	if _, err := walrepair.Repair(t.Context(), base, slog.New(slog.NewTextHandler(&out, nil))); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"kind=corruption", "segment=2", fmt.Sprintf("offset=%d", at), "last_sample_before=2026-", "first_sample_after=2026-"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("log line lacks %s:\n%s", want, out.String())
		}
	}
}

// allRecords returns the records of the log in dir through Prometheus' own reader.
func allRecords(t testing.TB, dir string) []string {
	t.Helper()
	sr, err := wlog.NewSegmentsReader(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer sr.Close()
	var out []string
	r := wlog.NewReader(sr)
	for r.Next() {
		if rec := r.Record(); len(bytes.TrimLeft(rec, "\x00")) > 0 {
			out = append(out, string(rec))
		}
	}
	if r.Err() != nil {
		t.Fatalf("Prometheus' reader after repair: %v", r.Err())
	}
	return out
}

// writeRecords logs n sample records of various sizes in small segments.
func writeRecords(t testing.TB, dir string, n int, compr compression.Type) []string {
	t.Helper()
	w, err := wlog.NewSize(nil, nil, dir, 3*pageSize, compr)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(3, 4))
	var out []string
	var enc record.Encoder
	for i := range n {
		list := make([]record.RefSample, 1+rng.IntN(40))
		if i%17 == 0 {
			list = make([]record.RefSample, 4000) // over a page
		}
		for j := range list {
			list[j] = record.RefSample{Ref: chunks.HeadSeriesRef(j), T: start + int64(i), V: rng.Float64()}
		}
		rec := enc.Samples(list, nil)
		out = append(out, string(rec))
		if err := w.Log(rec); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

// pagesOf returns, for each record in the log, the pages (segment, page) it lies in.
func pagesOf(t testing.TB, dir string) [][][2]int {
	t.Helper()
	var out [][][2]int
	files, _ := filepath.Glob(filepath.Join(dir, "[0-9]*"))
	slices.Sort(files)
	for s, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var cur [][2]int
		for p := 0; p*pageSize < len(b); p++ {
			page := b[p*pageSize : min((p+1)*pageSize, len(b))]
			for i := 0; i < len(page) && page[i] != 0; {
				cur = append(cur, [2]int{s, p})
				if typ := page[i] & 7; typ == 1 || typ == 4 {
					out, cur = append(out, cur), nil
				}
				i += 7 + int(binary.BigEndian.Uint16(page[i+1:]))
			}
		}
	}
	return out
}

// FuzzRepair damages a log anywhere. Repair must not panic, must keep every
// record that lies on undamaged pages, in order, and must find nothing the
// second time.
func FuzzRepair(f *testing.F) {
	base := f.TempDir()
	var records [3][]string
	var pages [3][][][2]int
	types := []compression.Type{compression.None, compression.Snappy, compression.Zstd}
	for i, compr := range types {
		dir := filepath.Join(base, compr, "wal")
		records[i] = writeRecords(f, dir, 120, compr)
		pages[i] = pagesOf(f, dir)
		if len(pages[i]) != len(records[i]) {
			f.Fatalf("test found %d records of %d", len(pages[i]), len(records[i]))
		}
	}
	f.Add(uint8(0), []byte{0, 0, 0, 0, 1})
	f.Add(uint8(1), []byte{1, 10, 200, 7, 255, 2, 60, 3, 0, 9})
	f.Add(uint8(2), bytes.Repeat([]byte{1, 50, 0, 1, 128}, 5))
	f.Fuzz(func(t *testing.T, which uint8, flips []byte) {
		i := int(which) % len(types)
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(filepath.Join(base, types[i]))); err != nil {
			t.Fatal(err)
		}
		damaged := flipBytes(t, filepath.Join(dir, "wal"), flips)
		if _, err := walrepair.Repair(t.Context(), dir, nil); err != nil {
			t.Fatal(err)
		}
		got := allRecords(t, filepath.Join(dir, "wal"))
		k := 0
		for j, rec := range records[i] {
			if !slices.ContainsFunc(pages[i][j], func(p [2]int) bool { return damaged[p] }) {
				for k < len(got) && got[k] != rec {
					k++
				}
				if k == len(got) {
					t.Fatalf("record %d on undamaged pages %v is gone or out of order", j, pages[i][j])
				}
				k++
			}
		}
		again, err := walrepair.Repair(t.Context(), dir, nil)
		if err != nil || len(again.Damages) > 0 {
			t.Fatalf("second repair: %+v, %v", again.Damages, err)
		}
	})
}

// flipBytes applies edits of 5 bytes each (segment, page, offset in page, xor) and
// returns the pages it changed.
func flipBytes(t *testing.T, dir string, flips []byte) map[[2]int]bool {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(dir, "[0-9]*"))
	slices.Sort(files)
	out := map[[2]int]bool{}
	for ; len(flips) >= 5; flips = flips[5:] {
		s := int(flips[0]) % len(files)
		edit(t, files[s], func(b []byte) []byte {
			if len(b) == 0 {
				return b
			}
			off := (int(flips[1])*pageSize + int(binary.BigEndian.Uint16(flips[2:]))) % len(b)
			b[off] ^= flips[4]
			out[[2]int{s, off / pageSize}] = true
			return b
		})
	}
	return out
}

func TestRandomDamage(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "wal")
	records := writeRecords(t, dir, 120, compression.Snappy)
	pages := pagesOf(t, dir)
	for seed := range uint64(150) {
		rng := rand.New(rand.NewPCG(seed, 0))
		flips := make([]byte, 5*(1+rng.IntN(12)))
		for i := range flips {
			flips[i] = byte(rng.Uint32())
		}
		work := copyDir(t, base)
		damaged := flipBytes(t, filepath.Join(work, "wal"), flips)
		repair(t, work)
		got := allRecords(t, filepath.Join(work, "wal"))
		for j, rec := range records {
			if !slices.ContainsFunc(pages[j], func(p [2]int) bool { return damaged[p] }) && !slices.Contains(got, rec) {
				t.Fatalf("seed %d: record %d on undamaged pages is gone", seed, j)
			}
		}
	}
}

// FuzzRecord checks that any record that Repair leaves in a log can be read by
// the decoder that replay uses.
func FuzzRecord(f *testing.F) {
	var enc record.Encoder
	l := labels.FromStrings("__name__", "a", "b", "c")
	f.Add(enc.Series([]record.RefSeries{{Ref: 1, Labels: l}}, nil))
	f.Add(enc.Samples([]record.RefSample{{Ref: 1, T: start, V: 2}, {Ref: 9, T: start, V: 2}}, nil))
	f.Add(enc.Metadata([]record.RefMetadata{{Ref: 1, Type: 1, Unit: "u", Help: "h"}}, nil))
	f.Add(enc.Exemplars([]record.RefExemplar{{Ref: 1, T: start, V: 2, Labels: l}}, nil))
	f.Add(enc.MmapMarkers([]record.RefMmapMarker{{Ref: 1, MmapRef: 2}}, nil))
	f.Add(enc.MinValidTime(start, nil))
	v2 := record.Encoder{EnableSTStorage: true}
	f.Add(v2.Samples([]record.RefSample{{Ref: 1, ST: 5, T: start, V: 2}, {Ref: 9, ST: 6, T: start, V: 2}}, nil))
	h := &histogram.Histogram{Schema: 1, Count: 3, Sum: 2, PositiveSpans: []histogram.Span{{Offset: 1, Length: 2}}, PositiveBuckets: []int64{1, 1}}
	custom := &histogram.Histogram{Schema: histogram.CustomBucketsSchema, Count: 3, Sum: 2, PositiveSpans: []histogram.Span{{Offset: 0, Length: 2}}, PositiveBuckets: []int64{1, 1}, CustomValues: []float64{1, 2}}
	for _, e := range []*record.Encoder{&enc, &v2} {
		for _, h := range []*histogram.Histogram{h, custom} {
			b, _ := e.HistogramSamples([]record.RefHistogramSample{{Ref: 1, T: start, H: h}}, nil)
			f.Add(b)
			f.Add(e.CustomBucketsHistogramSamples([]record.RefHistogramSample{{Ref: 1, T: start, H: h}}, nil))
			b, _ = e.FloatHistogramSamples([]record.RefFloatHistogramSample{{Ref: 1, T: start, FH: h.ToFloat(nil)}}, nil)
			f.Add(b)
			f.Add(e.CustomBucketsFloatHistogramSamples([]record.RefFloatHistogramSample{{Ref: 1, T: start, FH: h.ToFloat(nil)}}, nil))
		}
	}
	f.Fuzz(func(t *testing.T, rec []byte) {
		dir := t.TempDir()
		if err := os.MkdirAll(filepath.Join(dir, "wal"), 0o777); err != nil {
			t.Fatal(err)
		}
		if len(rec) > pageSize-7 {
			return
		}
		path := filepath.Join(dir, "wal", "00000000")
		if err := os.WriteFile(path, append(frame(t, rec), frame(t, []byte{byte(record.Samples)})...), 0o666); err != nil {
			t.Fatal(err)
		}
		if _, err := walrepair.Repair(t.Context(), dir, nil); err != nil {
			t.Fatal(err)
		}
		for _, rec := range allRecords(t, filepath.Join(dir, "wal")) {
			if err := decode([]byte(rec)); err != nil {
				t.Fatalf("record %x was kept, replay says %v", rec, err)
			}
		}
	})
}

func decode(rec []byte) (err error) {
	dec := record.NewDecoder(labels.NewSymbolTable(), slog.New(slog.DiscardHandler))
	switch dec.Type(rec) {
	case record.Series:
		_, err = dec.Series(rec, nil)
	case record.Samples, record.SamplesV2:
		_, err = dec.Samples(rec, nil)
	case record.Tombstones:
		_, err = dec.Tombstones(rec, nil)
	case record.Exemplars:
		_, err = dec.Exemplars(rec, nil)
	case record.MmapMarkers:
		_, err = dec.MmapMarkers(rec, nil)
	case record.Metadata:
		_, err = dec.Metadata(rec, nil)
	case record.HistogramSamples, record.CustomBucketsHistogramSamples, record.HistogramSamplesV2:
		_, err = dec.HistogramSamples(rec, nil)
	case record.FloatHistogramSamples, record.CustomBucketsFloatHistogramSamples, record.FloatHistogramSamplesV2:
		_, err = dec.FloatHistogramSamples(rec, nil)
	case record.MinValidTime:
		_, err = dec.MinValidTime(rec)
	}
	return err
}

// BenchmarkRepairIntact is the price of every start: one pass over a sound log.
func BenchmarkRepairIntact(b *testing.B) {
	for _, compr := range []compression.Type{compression.None, compression.Snappy, compression.Zstd} {
		b.Run(compr, func(b *testing.B) {
			dir := b.TempDir()
			w, err := wlog.NewSize(nil, nil, filepath.Join(dir, "wal"), wlog.DefaultSegmentSize, compr)
			if err != nil {
				b.Fatal(err)
			}
			var enc record.Encoder
			list := make([]record.RefSample, 2000)
			for i := range 2000 {
				for j := range list {
					list[j] = record.RefSample{Ref: chunks.HeadSeriesRef(j), T: start + int64(i)*step, V: float64((i/5 + j) % 100)}
				}
				if err := w.Log(enc.Samples(list, nil)); err != nil {
					b.Fatal(err)
				}
			}
			n, err := w.Size()
			if err != nil {
				b.Fatal(err)
			}
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(n)
			b.ResetTimer()
			for b.Loop() {
				if _, err := walrepair.Repair(b.Context(), dir, slog.New(slog.NewTextHandler(io.Discard, nil))); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(2000*2000), "ns/sample")
		})
	}
}
