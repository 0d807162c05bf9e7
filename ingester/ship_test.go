package ingester

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/thanos-io/objstore"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
)

// objects lists the bucket.
func (w *world) objects() map[string][]byte {
	w.t.Helper()
	found := map[string][]byte{}
	require.NoError(w.t, w.bkt.Iter(context.Background(), "", func(name string) error {
		r, err := w.bkt.Get(context.Background(), name)
		if err != nil {
			return err
		}
		defer r.Close()
		found[name], err = io.ReadAll(r)
		return err
	}, objstore.WithRecursiveIter()))
	return found
}

func (w *world) metas() []*bucket.Meta {
	var metas []*bucket.Meta
	for name, content := range w.objects() {
		if path.Base(name) == bucket.MetaFile {
			m, err := bucket.ParseMeta(content)
			require.NoError(w.t, err)
			metas = append(metas, m)
		}
	}
	return metas
}

func TestBlocksAreCutByTheirGridAndShippedWhole(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	for m := range 5 * 60 { // 5h of samples
		w.append("a", new(batch).floats(x, sampleAt(time.Duration(m)*time.Minute-3*time.Hour, float64(m))))
	}
	w.append("a", new(batch).floats(bytesOf("__name__", "late"), sampleAt(time.Minute, 7)))
	before := w.read("a")
	require.NoError(t, w.Flush(context.Background()))
	require.Equal(t, before, w.read("a"))

	width := w.cfg.BlockDuration.Milliseconds()
	metas := w.metas()
	require.Len(t, metas, 4, "three windows of samples in order, and one with a late sample")
	for _, m := range metas {
		require.Equal(t, m.MinTime/width, (m.MaxTime-1)/width, "a block stays in its window")
		require.Equal(t, "a", m.Thanos.Labels[bucket.TenantLabel])
		require.Zero(t, m.Thanos.Downsample.Resolution)
		objects := w.objects()
		for _, f := range m.Thanos.Files {
			content, ok := objects[path.Join("a", m.ULID.String(), f.RelPath)]
			require.True(t, ok, f.RelPath)
			if f.RelPath != bucket.MetaFile {
				require.EqualValues(t, len(content), f.SizeBytes)
			}
		}
	}
}

func TestExpired(t *testing.T) {
	cfg := Config{LocalRetention: 6 * time.Hour, VisibleAfter: 15 * time.Minute}
	hour := time.Hour.Milliseconds()
	for name, c := range map[string]struct {
		newest, uploaded int64
		want             bool
	}{
		"old and long uploaded":                  {1 * hour, 1 * hour, true},
		"old, uploaded just now":                 {1 * hour, 10*hour - 1, false},
		"young":                                  {9 * hour, 9 * hour, false},
		"at the edge of both":                    {4 * hour, 10*hour - 15*60_000, true},
		"uploaded by a clock that ran in future": {1 * hour, 11 * hour, false},
	} {
		require.Equal(t, c.want, expired(10*hour, c.newest, c.uploaded, cfg), name)
	}
}

// failing refuses uploads while down is set.
type failing struct {
	objstore.Bucket
	down bool
}

func (f *failing) Upload(ctx context.Context, name string, r io.Reader, o ...objstore.ObjectUploadOption) error {
	if f.down {
		return errors.New("bucket is down")
	}
	return f.Bucket.Upload(ctx, name, r, o...)
}

func TestBlocksQueueWhileTheBucketIsDownAndStayUntilTheyAreSafe(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.LocalRetention = 0 })
	bkt := &failing{Bucket: w.bkt, down: true}
	w.bucket = bkt
	w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	require.Error(t, w.Flush(context.Background()))
	w.clock.advance(time.Hour)
	require.NoError(t, w.tenants["a"].db.Compact(context.Background()))
	require.Len(t, blockDirs(w.tenants["a"].dir), 1, "a block that is not in the bucket stays")
	require.NotEmpty(t, w.read("a", named("x")))

	bkt.down = false
	w.Maintain(context.Background())
	require.Len(t, w.metas(), 1)
	require.Zero(t, w.tenants["a"].pendingUploads())
	require.Len(t, blockDirs(w.tenants["a"].dir), 1, "queriers do not know of it yet")

	w.clock.advance(time.Hour)
	w.restart() // the list of uploads survives
	require.Empty(t, blockDirs(w.tenants["a"].dir), "the bucket answers for it now")
}

func TestIdleTenantGoesToTheBucketAndComesBack(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.LocalRetention = 0 })
	b := new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1))
	b.Metadata = []series.Metadata{{Family: "x"}}
	b.Metadata[0].Help = "kept"
	w.append("a", b)
	old := b.Entries[0].Ref

	w.clock.advance(w.cfg.IdleTimeout)
	w.Maintain(context.Background())
	require.Len(t, w.metas(), 1, "its head is cut and uploaded")
	tenant := w.tenants["a"]
	require.NotNil(t, tenant.db, "queriers may not know of the block yet")

	w.clock.advance(w.cfg.VisibleAfter)
	w.Maintain(context.Background())
	require.Equal(t, dormant, tenant.state)
	entries, err := os.ReadDir(tenant.dir)
	require.NoError(t, err)
	for _, e := range entries {
		require.Contains(t, []string{metadataFile, shippedFile}, e.Name())
	}
	require.Empty(t, w.read("a", named("x")))
	facts, err := w.Metadata(context.Background(), "a", "x")
	require.NoError(t, err)
	require.Len(t, facts, 1)

	back := new(batch).floats(bytesOf("__name__", "x"), sampleAt(3*time.Hour, 2))
	back.Entries[0].Ref = old
	require.Equal(t, 1, w.append("a", back).Samples)
	require.Equal(t, []string{"10800:2"}, w.read("a", named("x"))[`{__name__="x"}`])
}

func TestQuerierNamesTheBlocksItCovers(t *testing.T) {
	w := newWorld(t, nil)
	w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	require.NoError(t, w.Flush(context.Background()))
	q, covered, err := w.Querier(context.Background(), "a", 0, at(time.Hour), nil)
	require.NoError(t, err)
	require.NoError(t, q.Close())
	require.Len(t, covered, 1)
	for _, m := range w.metas() {
		require.True(t, covered.Has(m.ULID))
	}
}

func TestDamagedLocalBlockIsSetAside(t *testing.T) {
	w := newWorld(t, nil)
	w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	require.NoError(t, w.Flush(context.Background()))
	w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(time.Hour, 2)))
	require.NoError(t, w.Close())
	dir := w.tenants["a"].dir
	name := blockDirs(dir)[0]
	require.NoError(t, os.Truncate(filepath.Join(dir, name, "index"), 10))
	w.start()
	require.Empty(t, blockDirs(dir))
	require.DirExists(t, filepath.Join(dir, damagedDir, name))
	require.Equal(t, []string{"3600:2"}, w.read("a", named("x"))[`{__name__="x"}`])
}

func TestShippedListThatCannotBeReadOnlyCostsUploads(t *testing.T) {
	w := newWorld(t, nil)
	w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	require.NoError(t, w.Flush(context.Background()))
	require.NoError(t, w.Close())
	require.NoError(t, os.WriteFile(filepath.Join(w.tenants["a"].dir, shippedFile), []byte("{"), 0o666))
	w.start()
	w.Maintain(context.Background())
	require.Len(t, w.metas(), 1)
	document, err := os.ReadFile(filepath.Join(w.tenants["a"].dir, shippedFile))
	require.NoError(t, err)
	require.True(t, json.Valid(document))
}

func TestDamagedBlockIsNotUploaded(t *testing.T) {
	w := newWorld(t, nil)
	bkt := &failing{Bucket: w.bkt, down: true}
	w.bucket = bkt
	w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	require.Error(t, w.Flush(context.Background()))
	segment := filepath.Join(w.tenants["a"].dir, blockDirs(w.tenants["a"].dir)[0], "chunks", "000001")
	content, err := os.ReadFile(segment)
	require.NoError(t, err)
	content[len(content)-6] ^= 1
	require.NoError(t, os.WriteFile(segment, content, 0o666))
	bkt.down = false
	w.Maintain(context.Background())
	require.Empty(t, w.metas())
	require.Equal(t, 1, w.tenants["a"].pendingUploads(), "it is not forgotten")
}

// Case IN-02: what the head's chunk files hold is in the WAL, too.
func TestDamagedHeadChunks(t *testing.T) {
	w := newWorld(t, nil)
	b := new(batch)
	for i := range 400 {
		b.floats(bytesOf("__name__", "x"), sampleAt(time.Duration(i)*time.Second, float64(i)))
	}
	w.append("a", b)
	w.tenants["a"].db.ForceHeadMMap()
	before := w.read("a", named("x"))
	require.NoError(t, w.Close())
	files, err := filepath.Glob(filepath.Join(w.cfg.Dir, "a", "chunks_head", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	content, err := os.ReadFile(files[0])
	require.NoError(t, err)
	content[0] ^= 1 // its magic number
	require.NoError(t, os.WriteFile(files[0], content, 0o666))
	w.start()
	require.Equal(t, before, w.read("a", named("x")))
}
