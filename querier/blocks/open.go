package blocks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
)

// inPlace opens blocks where they lie: in a bucket that is a local folder.
type inPlace struct {
	dir string
	log *slog.Logger
}

func (o inPlace) open(_ context.Context, tenant string, meta *bucket.Meta) (readable, int64, error) {
	b, err := openDir(filepath.Join(o.dir, tenant, meta.ULID.String()), meta, o.log)
	return b, 0, err
}

func (inPlace) size(*bucket.Meta) int64 { return 0 }

func (inPlace) detach(string, ulid.ULID) func() { return func() {} }

// openDir opens the block in dir. What is gone may be deleted since the list was
// read: that passes.
func openDir(dir string, meta *bucket.Meta, log *slog.Logger) (b readable, err error) {
	// The index reader checks what it is given, but is not written for malice.
	defer func() {
		if p := recover(); p != nil {
			b, err = nil, series.Errorf(series.Corrupt, "open block %s: %v", meta.ULID, p)
		}
	}()
	if _, err := os.Stat(filepath.Join(dir, bucket.MetaFile)); errors.Is(err, fs.ErrNotExist) {
		return nil, series.Errorf(series.Unavailable, "open block %s: it is gone since the bucket was listed", meta.ULID)
	}
	opened, err := tsdb.OpenBlock(log, dir, nil, nil)
	if err != nil {
		return nil, series.Errorf(series.Corrupt, "open block %s: %w", meta.ULID, err)
	}
	return opened, nil
}

// copies opens blocks by copies of them in a folder. A copy is made aside and
// renamed, so that one with its own name is whole.
//
//	<dir>/<tenant>/<ULID>/{meta.json,index,chunks/000001...}
//	<dir>/.aside/<random>    being made or removed; cleared at start
type copies struct {
	dir       string
	lister    *lister
	log       *slog.Logger
	downloads prometheus.Counter
	failures  prometheus.Counter
}

// asideDir holds what is not a copy yet, or no longer. No tenant can have this name's
// path: block folders are ULIDs.
const asideDir = ".aside"

// openCopies clears what an earlier process left half made and calls adopt with
// every whole copy.
func openCopies(c *copies, adopt func(blockKey, int64)) error {
	if err := os.RemoveAll(filepath.Join(c.dir, asideDir)); err != nil {
		return fmt.Errorf("clear cache of blocks: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(c.dir, asideDir), 0o777); err != nil {
		return fmt.Errorf("make cache of blocks: %w", err)
	}
	tenants, err := os.ReadDir(c.dir)
	if err != nil {
		return fmt.Errorf("list cache of blocks: %w", err)
	}
	for _, t := range tenants {
		if !t.IsDir() || t.Name() == asideDir {
			continue
		}
		blocks, err := os.ReadDir(filepath.Join(c.dir, t.Name()))
		if err != nil {
			return fmt.Errorf("list cache of blocks: %w", err)
		}
		for _, b := range blocks {
			id, err := ulid.ParseStrict(b.Name())
			if err != nil || !b.IsDir() {
				continue
			}
			bytes, err := bytesBelow(filepath.Join(c.dir, t.Name(), b.Name()))
			if err != nil {
				return fmt.Errorf("measure cache of blocks: %w", err)
			}
			adopt(blockKey{t.Name(), id}, bytes)
		}
	}
	return nil
}

func bytesBelow(dir string) (total int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		total += info.Size()
		return nil
	})
	return total, err
}

func (c *copies) path(tenant string, id ulid.ULID) string {
	return filepath.Join(c.dir, tenant, id.String())
}

func (c *copies) size(meta *bucket.Meta) (bytes int64) {
	for _, f := range meta.Thanos.Files {
		bytes += f.SizeBytes
	}
	return bytes
}

// open opens the block's copy. One from before that turns out to be damaged is made
// anew, as the disk may be to blame.
func (c *copies) open(ctx context.Context, tenant string, meta *bucket.Meta) (readable, int64, error) {
	dir := c.path(tenant, meta.ULID)
	if whole(dir, meta) {
		if b, bytes, err := c.openCopy(dir, meta); err == nil {
			return b, bytes, nil
		}
	}
	c.detach(tenant, meta.ULID)()
	if err := c.fetch(ctx, tenant, meta, dir); err != nil {
		if ctx.Err() != nil {
			return nil, 0, ctx.Err()
		}
		c.failures.Inc()
		return nil, 0, err
	}
	c.downloads.Inc()
	b, bytes, err := c.openCopy(dir, meta)
	if err != nil {
		c.detach(tenant, meta.ULID)()
	}
	return b, bytes, err
}

func (c *copies) openCopy(dir string, meta *bucket.Meta) (readable, int64, error) {
	bytes, err := bytesBelow(dir)
	if err != nil {
		return nil, 0, series.Errorf(series.Unavailable, "measure copy of block %s: %w", meta.ULID, err)
	}
	b, err := openDir(dir, meta, c.log)
	if err != nil {
		return nil, 0, err
	}
	return b, bytes, nil
}

// whole tells whether dir has the files that meta lists, with their sizes.
func whole(dir string, meta *bucket.Meta) bool {
	if _, err := os.Stat(filepath.Join(dir, bucket.MetaFile)); err != nil {
		return false
	}
	for _, f := range meta.Thanos.Files {
		if f.RelPath == bucket.MetaFile {
			continue
		}
		info, err := os.Stat(filepath.Join(dir, filepath.FromSlash(f.RelPath)))
		if err != nil || f.SizeBytes > 0 && info.Size() != f.SizeBytes {
			return false
		}
	}
	return true
}

// fetch copies the block aside and gives it its name.
func (c *copies) fetch(ctx context.Context, tenant string, meta *bucket.Meta, dir string) error {
	aside, err := os.MkdirTemp(filepath.Join(c.dir, asideDir), "fetch-*")
	if err != nil {
		return series.Errorf(series.Unavailable, "make room for block %s: %w", meta.ULID, err)
	}
	defer os.RemoveAll(aside)
	files, err := c.lister.files(ctx, tenant, meta)
	if err != nil {
		return series.Errorf(series.Unavailable, "fetch block %s: %w", meta.ULID, err)
	}
	if err := os.Mkdir(filepath.Join(aside, bucket.ChunksDir), 0o777); err != nil {
		return series.Errorf(series.Unavailable, "make room for block %s: %w", meta.ULID, err)
	}
	for _, f := range files {
		if err := c.fetchFile(ctx, tenant, meta.ULID, f, aside); err != nil {
			return err
		}
	}
	document, err := json.Marshal(meta)
	if err != nil {
		return series.Errorf(series.Internal, "encode meta.json of block %s: %w", meta.ULID, err)
	}
	if err := os.WriteFile(filepath.Join(aside, bucket.MetaFile), document, 0o666); err != nil {
		return series.Errorf(series.Unavailable, "write copy of block %s: %w", meta.ULID, err)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o777); err != nil {
		return series.Errorf(series.Unavailable, "write copy of block %s: %w", meta.ULID, err)
	}
	if err := os.Rename(aside, dir); err != nil {
		return series.Errorf(series.Unavailable, "write copy of block %s: %w", meta.ULID, err)
	}
	return nil
}

func (c *copies) fetchFile(ctx context.Context, tenant string, id ulid.ULID, f bucket.File, aside string) error {
	name := path.Join(bucket.BlockDir(tenant, id), f.RelPath)
	r, err := c.lister.bucket.Get(ctx, name)
	if err != nil {
		return series.Errorf(c.kindOfMiss(ctx, tenant, id, err), "fetch %s: %w", name, err)
	}
	defer r.Close()
	n, err := writeFile(filepath.Join(aside, filepath.FromSlash(f.RelPath)), r)
	switch {
	case err != nil:
		return series.Errorf(series.Unavailable, "fetch %s: %w", name, err)
	case f.SizeBytes > 0 && n != f.SizeBytes:
		return series.Errorf(series.Corrupt, "fetch %s: it has %d bytes, meta.json says %d", name, n, f.SizeBytes)
	}
	return nil
}

// kindOfMiss tells a block that lacks a file from one that was deleted since the list
// was read, whose meta.json goes first.
func (c *copies) kindOfMiss(ctx context.Context, tenant string, id ulid.ULID, err error) series.Kind {
	if !c.lister.bucket.IsObjNotFoundErr(err) {
		return series.Unavailable
	}
	if exists, err := c.lister.bucket.Exists(ctx, path.Join(bucket.BlockDir(tenant, id), bucket.MetaFile)); err != nil || !exists {
		return series.Unavailable
	}
	return series.Corrupt
}

// writeFile writes and syncs: after a power failure a copy with the right sizes must
// have the right content, too.
func writeFile(name string, r io.Reader) (int64, error) {
	f, err := os.Create(name)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, r)
	if err == nil {
		err = f.Sync()
	}
	return n, errors.Join(err, f.Close())
}

// detach renames the copy out of sight.
func (c *copies) detach(tenant string, id ulid.ULID) func() {
	aside, err := os.MkdirTemp(filepath.Join(c.dir, asideDir), "remove-*")
	if err == nil {
		err = os.Rename(c.path(tenant, id), filepath.Join(aside, "block"))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.log.Warn("remove copy of block", "tenant", tenant, "block", id, "err", err)
	}
	return func() {
		if aside == "" {
			return
		}
		if err := os.RemoveAll(aside); err != nil {
			c.log.Warn("remove copy of block", "tenant", tenant, "block", id, "err", err)
		}
	}
}
