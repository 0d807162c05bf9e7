package ingester

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/tsdb/fileutil"
	"github.com/prometheus/prometheus/tsdb/index"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
)

// shippedFile remembers which local blocks are in the bucket, and since when. It may
// be lost: blocks are then uploaded again, which is harmless.
const shippedFile = "shipped.json"

// shipped is the set of local blocks that are in the bucket, with the time at which
// their upload ended in Unix ms.
type shipped struct {
	path string

	mu sync.Mutex // guards at
	at map[ulid.ULID]int64
}

type shippedDocument struct {
	Version int                 `json:"version"`
	Shipped map[ulid.ULID]int64 `json:"shipped"`
}

func openShipped(dir string) (*shipped, error) {
	s := &shipped{path: filepath.Join(dir, shippedFile), at: map[ulid.ULID]int64{}}
	document, err := os.ReadFile(s.path)
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read list of uploaded blocks: %w", err)
	}
	var doc shippedDocument
	if json.Unmarshal(document, &doc) == nil && doc.Shipped != nil {
		s.at = doc.Shipped
	}
	return s, nil
}

// since returns when the block was uploaded.
func (s *shipped) since(id ulid.ULID) (ms int64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ms, ok = s.at[id]
	return ms, ok
}

// update notes one upload, forgets blocks that are not in local, and writes the file.
func (s *shipped) update(id ulid.ULID, ms int64, local series.BlockSet) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at[id] = ms
	for old := range s.at {
		if !local.Has(old) {
			delete(s.at, old)
		}
	}
	document, err := json.Marshal(shippedDocument{Version: 1, Shipped: s.at})
	if err != nil {
		return err
	}
	return writeFile(s.path, document)
}

// writeFile replaces a small file: written aside, synced, renamed, the folder synced.
func writeFile(path string, content []byte) error {
	aside := path + ".tmp"
	f, err := os.Create(aside)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return fileutil.Rename(aside, path)
}

// ship uploads the local blocks that are not in the bucket yet, oldest first. One
// that fails does not stop the others; it is tried again in the next round.
func (t *tenantDB) ship(ctx context.Context) error {
	var errs []error
	blocks := t.db.Blocks()
	local := series.BlockSet{}
	for _, b := range blocks {
		local[b.Meta().ULID] = struct{}{}
	}
	for _, b := range blocks {
		id := b.Meta().ULID
		if _, done := t.shipped.since(id); done {
			continue
		}
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		started := time.Now()
		if err := verify(b); err != nil {
			t.owner.metrics.damagedBlocks.Inc()
			errs = append(errs, fmt.Errorf("block %s of tenant %s is damaged and not uploaded: %w", id, t.name, err))
			continue
		}
		if err := t.upload(ctx, b); err != nil {
			t.owner.metrics.uploadFailures.Inc()
			errs = append(errs, fmt.Errorf("upload block %s of tenant %s: %w", id, t.name, err))
			continue
		}
		if err := t.shipped.update(id, t.owner.now().UnixMilli(), local); err != nil {
			errs = append(errs, fmt.Errorf("note upload of block %s: %w", id, err))
			continue
		}
		t.owner.metrics.uploads.Inc()
		t.log.Info("block uploaded", "block", id, "from", formatTime(b.MinTime()), "to", formatTime(b.MaxTime()), "series", b.Meta().Stats.NumSeries, "samples", b.Meta().Stats.NumSamples, "took", time.Since(started).Round(time.Millisecond))
	}
	return errors.Join(errs...)
}

// verify reads a block to its end: what is damaged on this disk must not become the
// only copy in the bucket. Chunks carry checksums, which reading them checks.
func verify(b *tsdb.Block) error {
	ix, err := b.Index()
	if err != nil {
		return err
	}
	defer ix.Close()
	reader, err := b.Chunks()
	if err != nil {
		return err
	}
	defer reader.Close()
	name, value := index.AllPostingsKey()
	postings, err := ix.Postings(context.Background(), name, value)
	if err != nil {
		return err
	}
	var builder labels.ScratchBuilder
	var metas []chunks.Meta
	for postings.Next() {
		if err := ix.Series(postings.At(), &builder, &metas); err != nil {
			return err
		}
		for _, m := range metas {
			if _, _, err := reader.ChunkOrIterable(m); err != nil {
				return err
			}
		}
	}
	return postings.Err()
}

// upload gives a block the time that a slow bucket needs and no more, so that one
// that hangs does not hold up the others for ever.
func (t *tenantDB) upload(ctx context.Context, b *tsdb.Block) error {
	const slow = 256 << 10 // bytes per second
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute+time.Duration(b.Size()/slow)*time.Second)
	defer cancel()
	_, err := bucket.UploadBlock(ctx, t.owner.bucket, t.name, b.Dir())
	return err
}

// blocksToDelete tells TSDB which local blocks may go.
func (t *tenantDB) blocksToDelete(blocks []*tsdb.Block) map[ulid.ULID]struct{} {
	now := t.owner.now().UnixMilli()
	deletable := map[ulid.ULID]struct{}{}
	for _, b := range blocks {
		uploaded, ok := t.shipped.since(b.Meta().ULID)
		if ok && expired(now, b.MaxTime(), uploaded, t.owner.cfg) {
			deletable[b.Meta().ULID] = struct{}{}
		}
	}
	return deletable
}

// expired decides whether a local block that is in the bucket may be deleted: its
// newest sample is old enough, and every querier had time to learn of the upload.
// All times are Unix ms.
func expired(now, newest, uploaded int64, cfg Config) bool {
	return now-newest >= cfg.LocalRetention.Milliseconds() && now-uploaded >= cfg.VisibleAfter.Milliseconds()
}

func (t *tenantDB) blockSet() series.BlockSet {
	set := series.BlockSet{}
	for _, b := range t.db.Blocks() {
		set[b.Meta().ULID] = struct{}{}
	}
	return set
}

// pendingUploads counts the local blocks that are not in the bucket.
func (t *tenantDB) pendingUploads() int {
	n := 0
	for _, b := range t.db.Blocks() {
		if _, done := t.shipped.since(b.Meta().ULID); !done {
			n++
		}
	}
	return n
}

// cut turns the whole head into blocks, in-order and late samples, along the block
// grid. The caller holds a reference.
func (t *tenantDB) cut(ctx context.Context) error {
	t.gate.Lock()
	defer t.gate.Unlock()
	head := t.db.Head()
	// Fixed bounds: cutting moves the head's own, its newest time included.
	mint, maxt := head.MinTime(), head.MaxTime()
	for mint <= maxt {
		if err := ctx.Err(); err != nil {
			return err
		}
		from, to := window(mint, maxt, t.owner.cfg.BlockDuration.Milliseconds())
		if err := t.db.CompactHead(tsdb.NewRangeHead(head, from, to)); err != nil {
			return fmt.Errorf("cut head of tenant %s from %s to %s: %w", t.name, formatTime(from), formatTime(to), err)
		}
		mint = max(to+1, head.MinTime())
	}
	if err := t.db.CompactOOOHead(ctx); err != nil {
		return fmt.Errorf("cut late samples of tenant %s: %w", t.name, err)
	}
	return nil
}

// window is the first part of [mint, maxt] that lies in one block of the given width.
func window(mint, maxt, width int64) (from, to int64) {
	end := mint - mint%width + width
	return mint, min(end-1, maxt)
}
