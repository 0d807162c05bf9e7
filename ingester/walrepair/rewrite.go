package walrepair

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/prometheus/tsdb/wlog"

	"github.com/varvedb/varve/pkg/series"
)

// temporary ends the names of files that are being written: the TSDB ignores
// them, and removeTemporary sweeps those that a crash left.
const temporary = ".varve-repair"

// maxKept is how many damaged originals stay in <tenant>/damaged.
const maxKept = 8

// keeper holds the damaged originals, named <log>-<segment>.damaged-<n>.
type keeper struct{ dir string }

// rewrite replaces the segment at path by a copy without the holes of sc, ended
// by the record mark if there is one, and returns where the original went.
func (k keeper) rewrite(ctx context.Context, path string, sc scan, mark []byte) (string, error) {
	tmp := path + temporary
	defer os.Remove(tmp)
	if err := writePatched(path, tmp, sc, mark); err != nil {
		return "", series.Errorf(series.Unavailable, "write copy without holes: %w", err)
	}
	if err := verify(ctx, tmp); err != nil {
		return "", err
	}
	kept, err := k.keepOriginal(path)
	if err != nil {
		return "", series.Errorf(series.Unavailable, "keep original: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", series.Errorf(series.Unavailable, "replace by copy: %w", err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return "", series.Errorf(series.Unavailable, "sync folder: %w", err)
	}
	return kept, nil
}

// writePatched writes the segment src to dst with its holes covered, its torn tail
// cut off and mark at its end, and syncs it.
func writePatched(src, dst string, sc scan, mark []byte) (err error) {
	f, err := os.OpenFile(dst, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o666)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := copyFile(f, src); err != nil {
		return err
	}
	size := sc.size
	for i := range sc.holes {
		if h := &sc.holes[i]; h.kind == TornTail {
			size = h.start()
			if err := f.Truncate(size); err != nil {
				return err
			}
		} else if err := cover(f, h.spans); err != nil {
			return err
		}
	}
	if mark != nil {
		if err := appendRecord(f, size, mark); err != nil {
			return err
		}
	}
	return f.Sync()
}

// cover overwrites each span with one record of zeros. A span too short for that
// lies at the end of a page, where bare zeros are padding.
func cover(f io.WriterAt, spans []span) error {
	for _, s := range spans {
		b := make([]byte, s.n)
		if s.n >= headerLen {
			if err := putFrame(b, make([]byte, s.n-headerLen)); err != nil {
				return err
			}
		}
		if _, err := f.WriteAt(b, s.off); err != nil {
			return err
		}
	}
	return nil
}

// appendRecord writes rec at the end of a segment of size bytes, on the next page
// if the last one is too full; what it skips reads as zeros, which is padding.
func appendRecord(f io.WriterAt, size int64, rec []byte) error {
	b := make([]byte, headerLen+len(rec))
	if err := putFrame(b, rec); err != nil {
		return err
	}
	if used := size % pageSize; used+int64(len(b)) > pageSize {
		size += pageSize - used
	}
	_, err := f.WriteAt(b, size)
	return err
}

// verify reads the copy once more: what replaces the original has no holes.
func verify(ctx context.Context, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return series.Errorf(series.Unavailable, "open copy: %w", err)
	}
	defer f.Close()
	sc, _, err := newScanner(func(rec []byte) error { _, err := inspect(rec); return err }).run(ctx, f, nil)
	if err != nil {
		return series.Errorf(series.Unavailable, "read copy: %w", err)
	}
	if len(sc.holes) > 0 {
		return series.Errorf(series.Internal, "BUG: copy of segment still has %d holes, first at %d: %s", len(sc.holes), sc.holes[0].start(), sc.holes[0].cause)
	}
	return nil
}

// keepOriginal gives the file at path a second name in k's folder, drops the
// oldest originals beyond maxKept, and returns the new name.
func (k keeper) keepOriginal(path string) (string, error) {
	if err := os.MkdirAll(k.dir, 0o777); err != nil {
		return "", err
	}
	old, err := k.list()
	if err != nil {
		return "", err
	}
	n := 1
	if len(old) > 0 {
		n = old[len(old)-1].n + 1
	}
	for len(old) >= maxKept {
		if err := os.Remove(filepath.Join(k.dir, old[0].name)); err != nil {
			return "", err
		}
		old = old[1:]
	}
	log, segment := filepath.Base(filepath.Dir(path)), filepath.Base(path)
	kept := filepath.Join(k.dir, fmt.Sprintf("%s-%s.damaged-%d", log, segment, n))
	if err := os.Link(path, kept); err != nil {
		// Not every file system has links. A copy cut short by a crash is only a
		// worse keepsake: the original is still in place then.
		if err := copyTo(kept, path); err != nil {
			return "", err
		}
	}
	return kept, syncDir(k.dir)
}

type keptFile struct {
	name string
	n    int
}

// list returns the kept originals, oldest first.
func (k keeper) list() ([]keptFile, error) {
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return nil, err
	}
	var files []keptFile
	for _, e := range entries {
		_, number, ok := strings.Cut(e.Name(), ".damaged-")
		if n, err := strconv.Atoi(number); ok && err == nil {
			files = append(files, keptFile{e.Name(), n})
		}
	}
	slices.SortFunc(files, func(a, b keptFile) int { return cmp.Compare(a.n, b.n) })
	return files, nil
}

// createSegment writes a segment with only the record mark, or an empty one.
func createSegment(path string, mark []byte) error {
	tmp := path + temporary
	defer os.Remove(tmp)
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o666)
	if err != nil {
		return err
	}
	if mark != nil {
		err = appendRecord(f, 0, mark)
	}
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// createCheckpoint writes a checkpoint with only the record mark.
func createCheckpoint(dir string, mark []byte) error {
	tmp := dir + wlog.CheckpointTempFileSuffix // the TSDB sweeps these itself
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o777); err != nil {
		return err
	}
	if err := createSegment(wlog.SegmentName(tmp, 0), mark); err != nil {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

// removeTemporary removes what an earlier repair left half-written in dir.
func removeTemporary(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return series.Errorf(series.Unavailable, "list folder: %w", err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), temporary) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return series.Errorf(series.Unavailable, "remove unfinished copy: %w", err)
			}
		}
	}
	return nil
}

func copyFile(dst io.Writer, src string) error {
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(dst, f)
	return err
}

func copyTo(dst, src string) error {
	f, err := os.Create(dst)
	if err != nil {
		return err
	}
	return errors.Join(copyFile(f, src), f.Sync(), f.Close())
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
