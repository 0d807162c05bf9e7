package blocks

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/tsdb/index"

	"github.com/varvedb/varve/pkg/bucket"
)

// reason names why a block is set aside: a metric's label value.
type reason string

const (
	reasonMeta       reason = "meta_unreadable"
	reasonIdentity   reason = "meta_of_another_block"
	reasonMissing    reason = "file_missing"
	reasonSize       reason = "file_size"
	reasonUnreadable reason = "cannot_be_opened"
	reasonDamaged    reason = "damaged_inside"
)

// block is what the list knows of one block. It does not change.
type block struct {
	meta *bucket.Meta // nil if it cannot be read
	id   ulid.ULID
	// mint and maxt enclose its samples, both included, Unix ms.
	mint, maxt int64
	// why and damage tell why it is set aside; empty and nil if it is whole.
	why    reason
	damage error
	// files tells one state of its files from another.
	files string
	// coarse blocks hold downsampled windows, no samples.
	coarse bool
	// marked is when it was marked for deletion, zero if it was not; checked is when
	// that was looked at.
	marked, checked time.Time
}

func (b *block) overlaps(mint, maxt int64) bool { return b.mint <= maxt && mint <= b.maxt }

// mostMeta bounds the meta.json that is read: one of a block of many segments has a
// few hundred kilobytes.
const mostMeta = 32 << 20

// mostIndex bounds the index that is read into memory to find a block's time range.
const mostIndex = 256 << 20

// inspect reads what there is to know of a block that the list has not seen, or
// not seen whole. It returns nil if there is no block: without meta.json it is not
// uploaded to the end, or deleted from its beginning. An error is the bucket's.
func (l *lister) inspect(ctx context.Context, tenant string, id ulid.ULID) (*block, error) {
	name := path.Join(bucket.BlockDir(tenant, id), bucket.MetaFile)
	document, err := l.read(ctx, name)
	if l.bucket.IsObjNotFoundErr(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	meta, err := bucket.ParseMeta(document)
	if err != nil {
		return l.withoutMeta(ctx, tenant, id, reasonMeta, err), nil
	}
	if meta.ULID != id {
		return l.withoutMeta(ctx, tenant, id, reasonIdentity, fmt.Errorf("meta.json is that of block %s", meta.ULID)), nil
	}
	b := &block{
		meta: meta,
		id:   id,
		mint: meta.MinTime,
		// maxTime of meta.json is exclusive.
		maxt:   max(meta.MinTime, meta.MaxTime-1),
		coarse: meta.Thanos.Downsample.Resolution > 0,
	}
	if b.coarse {
		return b, nil
	}
	b.why, b.damage, err = l.checkFiles(ctx, tenant, b)
	return b, err
}

// checkFiles compares the block's files with what meta.json lists.
func (l *lister) checkFiles(ctx context.Context, tenant string, b *block) (why reason, damage, err error) {
	meta := b.meta
	files, err := l.files(ctx, tenant, meta)
	if err != nil {
		return "", nil, err
	}
	segments := 0
	for _, f := range files {
		if !filepath.IsLocal(filepath.FromSlash(f.RelPath)) {
			return reasonMeta, fmt.Errorf("meta.json lists the file %q", f.RelPath), nil
		}
		if strings.HasPrefix(f.RelPath, bucket.ChunksDir+"/") {
			segments++
		}
		attributes, err := l.bucket.Attributes(ctx, path.Join(bucket.BlockDir(tenant, meta.ULID), f.RelPath))
		switch {
		case l.bucket.IsObjNotFoundErr(err):
			return reasonMissing, fmt.Errorf("%s is missing", f.RelPath), nil
		case err != nil:
			return "", nil, fmt.Errorf("measure %s of block %s: %w", f.RelPath, meta.ULID, err)
		case f.SizeBytes > 0 && attributes.Size != f.SizeBytes:
			return reasonSize, fmt.Errorf("%s has %d bytes, meta.json says %d", f.RelPath, attributes.Size, f.SizeBytes), nil
		case attributes.Size == 0:
			return reasonSize, fmt.Errorf("%s is empty", f.RelPath), nil
		}
		b.files += fmt.Sprintf("%s %d %d\n", f.RelPath, attributes.Size, attributes.LastModified.UnixNano())
	}
	if segments == 0 && meta.Stats.NumChunks > 0 {
		return reasonMissing, fmt.Errorf("it has %d chunks by its meta.json, and no file of chunks", meta.Stats.NumChunks), nil
	}
	return "", nil, nil
}

// files lists what a block consists of, meta.json apart: as its meta.json says, or,
// where that says nothing, as Prometheus writes it, what lies there.
func (l *lister) files(ctx context.Context, tenant string, meta *bucket.Meta) ([]bucket.File, error) {
	files := []bucket.File{}
	for _, f := range meta.Thanos.Files {
		if f.RelPath != bucket.MetaFile {
			files = append(files, f)
		}
	}
	if len(files) > 0 {
		return files, nil
	}
	files = append(files, bucket.File{RelPath: bucket.IndexFile})
	if len(meta.Thanos.SegmentFiles) > 0 {
		for _, s := range meta.Thanos.SegmentFiles {
			files = append(files, bucket.File{RelPath: path.Join(bucket.ChunksDir, s)})
		}
		return files, nil
	}
	dir := path.Join(bucket.BlockDir(tenant, meta.ULID), bucket.ChunksDir) + "/"
	err := l.bucket.Iter(ctx, dir, func(name string) error {
		if base := path.Base(name); !strings.HasSuffix(name, "/") && !strings.HasPrefix(base, ".") {
			files = append(files, bucket.File{RelPath: path.Join(bucket.ChunksDir, base)})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	return files, nil
}

// withoutMeta describes a block whose meta.json is of no use. Its range comes from
// its index if that can be read; else it may hold anything older than itself.
func (l *lister) withoutMeta(ctx context.Context, tenant string, id ulid.ULID, why reason, damage error) *block {
	b := &block{id: id, why: why, damage: damage, mint: math.MinInt64, maxt: int64(id.Time())}
	mint, maxt, err := l.rangeOfIndex(ctx, tenant, id)
	if err != nil {
		b.damage = fmt.Errorf("%w (nor can its time range be found: %w)", damage, err)
		return b
	}
	b.mint, b.maxt = mint, maxt
	return b
}

// rangeOfIndex finds a block's time range by its chunks.
func (l *lister) rangeOfIndex(ctx context.Context, tenant string, id ulid.ULID) (mint, maxt int64, err error) {
	// The reader checks what it is given, but is not written for malice.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("read index: %v", p)
		}
	}()
	reader, err := l.openIndex(ctx, path.Join(bucket.BlockDir(tenant, id), bucket.IndexFile))
	if err != nil {
		return 0, 0, err
	}
	defer reader.Close()
	all, err := reader.Postings(ctx, "", "")
	if err != nil {
		return 0, 0, err
	}
	mint, maxt = math.MaxInt64, math.MinInt64
	var builder labels.ScratchBuilder
	var metas []chunks.Meta
	for all.Next() {
		if err := reader.Series(all.At(), &builder, &metas); err != nil {
			return 0, 0, err
		}
		for _, c := range metas {
			mint, maxt = min(mint, c.MinTime), max(maxt, c.MaxTime)
		}
	}
	return mint, maxt, all.Err()
}

// openIndex opens an index in place, or from memory.
func (l *lister) openIndex(ctx context.Context, name string) (*index.Reader, error) {
	if l.localDir != "" {
		return index.NewFileReader(filepath.Join(l.localDir, filepath.FromSlash(name)), index.DecodePostingsRaw)
	}
	r, err := l.bucket.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	document, err := readBounded(r, mostIndex)
	if err != nil {
		return nil, err
	}
	return index.NewReader(byteSlice(document), index.DecodePostingsRaw)
}

// byteSlice implements index.ByteSlice.
type byteSlice []byte

func (b byteSlice) Len() int                    { return len(b) }
func (b byteSlice) Range(start, end int) []byte { return b[start:end] }

// marking reads the block's deletion mark: zero if there is none.
func (l *lister) marking(ctx context.Context, tenant string, id ulid.ULID) (time.Time, error) {
	name := path.Join(bucket.BlockDir(tenant, id), bucket.DeletionMarkFile)
	document, err := l.read(ctx, name)
	if l.bucket.IsObjNotFoundErr(err) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("read %s: %w", name, err)
	}
	var mark struct {
		ID           ulid.ULID `json:"id"`
		DeletionTime int64     `json:"deletion_time"` // Unix seconds
		Version      int       `json:"version"`
	}
	if err := json.Unmarshal(document, &mark); err != nil || mark.Version != 1 || mark.ID != id {
		// To read a block once more is harmless, to leave it out may not be.
		l.log.Warn("deletion mark cannot be read and is ignored", "object", name, "err", err)
		return time.Time{}, nil
	}
	return time.Unix(mark.DeletionTime, 0), nil
}

// read returns a whole small object.
func (l *lister) read(ctx context.Context, name string) ([]byte, error) {
	if l.localDir != "" {
		return readLocal(filepath.Join(l.localDir, filepath.FromSlash(name)))
	}
	r, err := l.bucket.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return readBounded(r, mostMeta)
}

func readLocal(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readBounded(f, mostMeta)
}

func readBounded(r io.Reader, most int64) ([]byte, error) {
	document, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(document)) > most {
		err = fmt.Errorf("it has more than %d bytes", most)
	}
	return document, err
}
