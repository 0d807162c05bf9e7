// Package blocktest makes TSDB blocks and buckets for tests of the read path.
package blocktest

import (
	"context"
	"encoding/json"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/thanos-io/objstore"

	"github.com/varvedb/varve/pkg/bucket"
)

// Write makes a block of what fill appends and returns its folder.
func Write(t testing.TB, fill func(storage.AppenderV2)) string {
	t.Helper()
	parent := t.TempDir()
	w, err := tsdb.NewBlockWriter(slog.New(slog.DiscardHandler), parent, (1000 * time.Hour).Milliseconds())
	check(t, err)
	defer w.Close()
	app := w.AppenderV2(context.Background())
	fill(app)
	check(t, app.Commit())
	id, err := w.Flush(context.Background())
	check(t, err)
	return filepath.Join(parent, id.String())
}

// Upload puts the block into the bucket as ingesters do.
func Upload(t testing.TB, bkt objstore.Bucket, tenant, dir string) ulid.ULID {
	t.Helper()
	meta, err := bucket.UploadBlock(context.Background(), bkt, tenant, dir)
	check(t, err)
	return meta.ULID
}

// Twin copies the block to one with another identity and returns its folder.
func Twin(t testing.TB, dir string) string {
	t.Helper()
	id := ulid.MustNew(ulid.Now(), ulid.DefaultEntropy())
	twin := filepath.Join(t.TempDir(), id.String())
	check(t, os.CopyFS(twin, os.DirFS(dir)))
	name := filepath.Join(twin, bucket.MetaFile)
	document, err := os.ReadFile(name)
	check(t, err)
	var meta map[string]any
	check(t, json.Unmarshal(document, &meta))
	meta["ulid"] = id.String()
	document, err = json.Marshal(meta)
	check(t, err)
	check(t, os.WriteFile(name, document, 0o666))
	return twin
}

// Size returns the bytes of all files below dir.
func Size(t testing.TB, dir string) (total int64) {
	t.Helper()
	check(t, filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			total += info.Size()
		}
		return err
	}))
	return total
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
