package blocks_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kitlog "github.com/go-kit/log"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/index"
	"github.com/prometheus/prometheus/util/annotations"
	"github.com/thanos-io/objstore"
	"github.com/thanos-io/objstore/providers/s3"
	"go.uber.org/goleak"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/querier/blocks"
	"github.com/varvedb/varve/querier/internal/blocktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	tenantName = "fleet"
	hour       = int64(3_600_000)
	step       = int64(30_000)
)

var all = labels.MustNewMatcher(labels.MatchRegexp, "gpu", ".*")

// hourOf fills one hour of two series, a sample each 30 s, values the time in steps.
func hourOf(from int64) func(storage.AppenderV2) {
	return func(app storage.AppenderV2) {
		for _, gpu := range []string{"0", "1"} {
			ls := labels.FromStrings("__name__", "power", "gpu", gpu, "hour", fmt.Sprint(from/hour))
			var ref storage.SeriesRef
			for at := from; at < from+hour; at += step {
				var err error
				if ref, err = app.Append(ref, ls, 0, at, float64(at/step), nil, nil, storage.AppendV2Options{}); err != nil {
					panic(err)
				}
			}
		}
	}
}

// setting is one kind of bucket with a store over it.
type setting struct {
	bkt     objstore.Bucket
	dir     string // of a local bucket
	cache   string
	store   *blocks.Store
	reg     *prometheus.Registry
	now     atomic.Int64 // Unix ms, the store's clock
	options blocks.Options
	cfg     blocks.Config
}

func (s *setting) clock() time.Time { return time.UnixMilli(s.now.Load()) }

func (s *setting) advance(d time.Duration) { s.now.Add(d.Milliseconds()) }

// open opens the store, anew if it was.
func (s *setting) open(t *testing.T) {
	t.Helper()
	s.close(t)
	s.reg = prometheus.NewRegistry()
	s.options.Registerer = s.reg
	store, err := blocks.Open(s.cfg, s.options)
	if err != nil {
		t.Fatal(err)
	}
	s.store = store
}

func (s *setting) close(t *testing.T) {
	t.Helper()
	if s.store == nil {
		return
	}
	if err := s.store.Close(); err != nil {
		t.Fatal(err)
	}
	s.store = nil
}

func (s *setting) refresh(t *testing.T) {
	t.Helper()
	if err := s.store.Refresh(t.Context(), tenantName); err != nil {
		t.Fatal(err)
	}
}

// metric returns the value of a metric, with the value of its one label if it has one.
func (s *setting) metric(t *testing.T, name, label string) float64 {
	t.Helper()
	families, err := s.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.Metric {
			if label != "" && m.Label[0].GetValue() != label {
				continue
			}
			if m.Counter != nil {
				return m.Counter.GetValue()
			}
			return m.Gauge.GetValue()
		}
	}
	t.Fatalf("no metric %s %s", name, label)
	return 0
}

func newSetting(t *testing.T, bkt objstore.Bucket, dir string) *setting {
	t.Helper()
	s := &setting{bkt: bkt, dir: dir, cfg: blocks.DefaultConfig()}
	s.now.Store(1000 * hour)
	s.cfg.RefreshInterval = time.Minute
	if dir == "" {
		s.cache = t.TempDir()
		s.cfg.CacheDir = s.cache
	}
	s.options = blocks.Options{Bucket: bkt, LocalDir: dir, Now: s.clock}
	s.open(t)
	t.Cleanup(func() { s.close(t) })
	return s
}

func local(t *testing.T) *setting {
	t.Helper()
	opened, err := bucket.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return newSetting(t, opened.Bucket, opened.LocalDir)
}

func inMemory(t *testing.T) *setting {
	t.Helper()
	return newSetting(t, objstore.NewInMemBucket(), "")
}

func onS3(t *testing.T) *setting {
	t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("blocks"); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(gofakes3.New(backend).Server())
	cfg := s3.DefaultConfig
	cfg.Bucket, cfg.Endpoint = "blocks", strings.TrimPrefix(server.URL, "http://")
	cfg.AccessKey, cfg.SecretKey = "test", "testsecret"
	cfg.Insecure, cfg.BucketLookupType = true, s3.PathLookup
	cfg.Region = "local"
	bkt, err := s3.NewBucketWithConfig(kitlog.NewNopLogger(), cfg, "test", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return newSetting(t, bkt, "")
}

var settings = map[string]func(*testing.T) *setting{
	"in place, in a local folder":       local,
	"by copies, from a bucket":          inMemory,
	"by copies, from S3 over a network": onS3,
}

func eachSetting(t *testing.T, f func(t *testing.T, s *setting)) {
	for name, make := range settings {
		t.Run(name, func(t *testing.T) { f(t, make(t)) })
	}
}

// samples counts what a query of the range finds, and checks each value.
func samples(ctx context.Context, s *blocks.Store, mint, maxt int64, skip series.BlockSet) (n int, warnings annotations.Annotations, err error) {
	q, _, err := s.Querier(ctx, tenantName, mint, maxt, skip)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, q.Close()) }()
	set := q.Select(ctx, true, nil, all)
	for set.Next() {
		it := set.At().Iterator(nil)
		last := int64(math.MinInt64)
		for it.Next() == chunkenc.ValFloat {
			at, v := it.At()
			if v != float64(at/step) {
				return 0, nil, fmt.Errorf("sample at %d is %g", at, v)
			}
			if at <= last {
				return 0, nil, fmt.Errorf("sample at %d follows %d", at, last)
			}
			last = at
			n++
		}
		if it.Err() != nil {
			return 0, nil, it.Err()
		}
	}
	return n, set.Warnings(), set.Err()
}

func wantSamples(t *testing.T, s *setting, mint, maxt int64, want int) {
	t.Helper()
	got, warnings, err := samples(t.Context(), s.store, mint, maxt, nil)
	if err != nil || got != want || len(warnings) > 0 {
		t.Fatalf("query of [%d, %d]: got %d samples, warnings %v, error %v; want %d samples", mint, maxt, got, warnings, err, want)
	}
}

func TestBlocksAnswerForTheirSamples(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		var ids []ulid.ULID
		for h := range int64(3) {
			ids = append(ids, blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(h*hour))))
		}
		blocktest.Upload(t, s.bkt, "another", blocktest.Write(t, hourOf(0)))

		wantSamples(t, s, 0, 3*hour, 3*2*120)
		wantSamples(t, s, hour, 2*hour-1, 2*120)
		wantSamples(t, s, hour-step, hour, 2*2)
		wantSamples(t, s, 5*hour, 6*hour, 0)

		got, _, err := samples(t.Context(), s.store, 0, 3*hour, series.BlockSet{ids[1]: {}})
		if err != nil || got != 2*2*120 {
			t.Errorf("with a block skipped: got %d samples, error %v; want %d", got, err, 2*2*120)
		}
		q, covered, err := s.store.Querier(t.Context(), tenantName, hour, 3*hour, series.BlockSet{ids[1]: {}})
		if err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		if len(covered) != 1 || !covered.Has(ids[2]) {
			t.Errorf("covered is %v, want %s only", covered, ids[2])
		}
		hours, _, err := q.LabelValues(t.Context(), "hour", nil)
		if err != nil || !slices.Equal(hours, []string{"2"}) {
			t.Errorf("values of label hour: got %v, error %v; want 2", hours, err)
		}
		names, _, err := q.LabelNames(t.Context(), nil)
		if err != nil || !slices.Equal(names, []string{"__name__", "gpu", "hour"}) {
			t.Errorf("label names: got %v, error %v", names, err)
		}
	})
}

func TestChunksOfOverlappingBlocksAreMergedOnce(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		dir := blocktest.Write(t, hourOf(0))
		blocktest.Upload(t, s.bkt, tenantName, dir)
		blocktest.Upload(t, s.bkt, tenantName, blocktest.Twin(t, dir))
		wantSamples(t, s, 0, hour, 2*120)

		q, _, err := s.store.ChunkQuerier(t.Context(), tenantName, 0, hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		n := 0
		set := q.Select(t.Context(), true, nil, all)
		for set.Next() {
			chunks := set.At().Iterator(nil)
			for chunks.Next() {
				n += chunks.At().Chunk.NumSamples()
			}
			if chunks.Err() != nil {
				t.Fatal(chunks.Err())
			}
		}
		if set.Err() != nil || n != 2*120 {
			t.Errorf("got %d samples in chunks, error %v; want %d", n, set.Err(), 2*120)
		}
	})
}

func TestSelectionsOpenOnlyTheBlocksOfTheirRange(t *testing.T) {
	s := inMemory(t)
	for h := range int64(3) {
		blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(h*hour)))
	}
	q, _, err := s.store.Querier(t.Context(), tenantName, 0, 3*hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if got := s.metric(t, "varve_blocks_downloads_total", ""); got != 0 {
		t.Errorf("%g blocks were fetched before anybody selected", got)
	}
	set := q.Select(t.Context(), false, &storage.SelectHints{Start: 2 * hour, End: 3 * hour}, all)
	for set.Next() {
	}
	if got := s.metric(t, "varve_blocks_downloads_total", ""); set.Err() != nil || got != 1 {
		t.Errorf("%g blocks were fetched (error %v), want 1", got, set.Err())
	}
}

func object(id ulid.ULID, rel string) string { return path.Join(tenantName, id.String(), rel) }

func get(t *testing.T, bkt objstore.Bucket, name string) []byte {
	t.Helper()
	r, err := bkt.Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func put(t *testing.T, bkt objstore.Bucket, name string, content []byte) {
	t.Helper()
	if err := bkt.Upload(t.Context(), name, bytes.NewReader(content)); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, bkt objstore.Bucket, name string) {
	t.Helper()
	if err := bkt.Delete(t.Context(), name); err != nil {
		t.Fatal(err)
	}
}

// editMeta changes a block's meta.json.
func editMeta(t *testing.T, bkt objstore.Bucket, id ulid.ULID, edit func(meta map[string]any)) {
	t.Helper()
	var meta map[string]any
	if err := json.Unmarshal(get(t, bkt, object(id, "meta.json")), &meta); err != nil {
		t.Fatal(err)
	}
	edit(meta)
	document, err := json.Marshal(meta)
	if err != nil {
		t.Fatal(err)
	}
	put(t, bkt, object(id, "meta.json"), document)
}

func truncated(t *testing.T, bkt objstore.Bucket, id ulid.ULID, rel string, by int) {
	t.Helper()
	content := get(t, bkt, object(id, rel))
	put(t, bkt, object(id, rel), content[:len(content)-by])
}

// withoutSizes makes the block one of an uploader that does not list files.
func withoutSizes(meta map[string]any) { delete(meta["thanos"].(map[string]any), "files") }

// BL-01: a damaged block is named by the queries that need it, counted with its
// reason, and stops no others.
func TestDamagedBlockIsSetAsideWithItsReason(t *testing.T) {
	cases := map[string]struct {
		damage func(t *testing.T, bkt objstore.Bucket, id ulid.ULID)
		reason string
		kind   series.Kind
	}{
		"its chunk segment is deleted": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			remove(t, bkt, object(id, "chunks/000001"))
		}, "file_missing", series.Corrupt},
		"its index is deleted": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			remove(t, bkt, object(id, "index"))
		}, "file_missing", series.Corrupt},
		"its index lacks a byte": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			truncated(t, bkt, id, "index", 1)
		}, "file_size", series.Corrupt},
		"its chunk segment is cut short": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			truncated(t, bkt, id, "chunks/000001", 20)
		}, "file_size", series.Corrupt},
		"its meta.json is empty": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			put(t, bkt, object(id, "meta.json"), nil)
		}, "meta_unreadable", series.Corrupt},
		"its meta.json is no JSON": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			put(t, bkt, object(id, "meta.json"), []byte(`{"version": 1,`))
		}, "meta_unreadable", series.Corrupt},
		"its meta.json lists a wrong size": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			editMeta(t, bkt, id, func(meta map[string]any) {
				files := meta["thanos"].(map[string]any)["files"].([]any)
				files[0].(map[string]any)["size_bytes"] = 12345
			})
		}, "file_size", series.Corrupt},
		"its meta.json lists a file elsewhere": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			editMeta(t, bkt, id, func(meta map[string]any) {
				files := meta["thanos"].(map[string]any)["files"].([]any)
				files[0].(map[string]any)["rel_path"] = "../../other"
			})
		}, "meta_unreadable", series.Corrupt},
		"its meta.json is that of another block": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			editMeta(t, bkt, id, func(meta map[string]any) { meta["ulid"] = ulid.MustNew(1, nil).String() })
		}, "meta_of_another_block", series.Corrupt},
		"no sizes are listed and the chunk segment is deleted": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			editMeta(t, bkt, id, func(meta map[string]any) { delete(meta, "thanos") })
			remove(t, bkt, object(id, "chunks/000001"))
		}, "file_missing", series.Corrupt},
		"no sizes are listed and the index lacks a byte": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			editMeta(t, bkt, id, withoutSizes)
			truncated(t, bkt, id, "index", 1)
		}, "cannot_be_opened", series.Corrupt},
		"no sizes are listed and the chunk segment is cut short": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			editMeta(t, bkt, id, withoutSizes)
			truncated(t, bkt, id, "chunks/000001", 20)
		}, "damaged_inside", series.Corrupt},
		"a byte of a chunk is another": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			content := get(t, bkt, object(id, "chunks/000001"))
			content = slices.Clone(content)
			content[len(content)-30] ^= 0xff
			put(t, bkt, object(id, "chunks/000001"), content)
		}, "damaged_inside", series.Corrupt},
		"a byte of a series in its index is another": {func(t *testing.T, bkt objstore.Bucket, id ulid.ULID) {
			content := slices.Clone(get(t, bkt, object(id, "index")))
			content[seriesIn(t, content)+3] ^= 0xff
			put(t, bkt, object(id, "index"), content)
		}, "damaged_inside", series.Corrupt},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			for where, make := range map[string]func(*testing.T) *setting{"in place": local, "by copies": inMemory} {
				t.Run(where, func(t *testing.T) {
					s := make(t)
					var ids []ulid.ULID
					for h := range int64(3) {
						ids = append(ids, blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(h*hour))))
					}
					c.damage(t, s.bkt, ids[1])
					s.refresh(t)

					_, _, err := samples(t.Context(), s.store, 0, 3*hour, nil)
					if err == nil || series.KindOf(err) != c.kind || !strings.Contains(err.Error(), ids[1].String()) {
						t.Errorf("a query of its range: error %v of kind %s, want one of kind %s that names block %s", err, series.KindOf(err), c.kind, ids[1])
					}
					wantSamples(t, s, 0, hour-1, 2*120)
					wantSamples(t, s, 2*hour, 3*hour, 2*120)
					if c.reason == "damaged_inside" {
						// A copy may be to blame, the one that replaces it is not.
						if _, _, err := samples(t.Context(), s.store, 0, 3*hour, nil); series.KindOf(err) != c.kind {
							t.Errorf("another query of its range: error %v, want one of kind %s", err, c.kind)
						}
					}
					if got := s.metric(t, "varve_blocks_set_aside", c.reason); got != 1 {
						t.Errorf("%g blocks are set aside for %s, want 1", got, c.reason)
					}
					n, warnings, err := samples(series.AllowPartial(t.Context()), s.store, 0, 3*hour, nil)
					if err != nil || n != 2*2*120 || len(warnings) != 1 {
						t.Errorf("a query that allows partial answers: got %d samples, %d warnings, error %v; want %d samples and 1 warning", n, len(warnings), err, 2*2*120)
					}
					for w := range warnings {
						if !strings.Contains(w, ids[1].String()) {
							t.Errorf("warning %q does not name block %s", w, ids[1])
						}
					}
					s.advance(2 * time.Minute)
					s.refresh(t)
					if got := s.metric(t, "varve_blocks_set_aside", c.reason); got != 1 {
						t.Errorf("after another look %g blocks are set aside for %s, want 1", got, c.reason)
					}
				})
			}
		})
	}
}

// seriesIn returns where the first series of an index is.
func seriesIn(t *testing.T, content []byte) uint64 {
	t.Helper()
	toc, err := index.NewTOCFromByteSlice(byteSlice(content))
	must(t, err)
	return (toc.Series + 15) / 16 * 16
}

type byteSlice []byte

func (b byteSlice) Len() int                    { return len(b) }
func (b byteSlice) Range(start, end int) []byte { return b[start:end] }

func TestDamageThatQueriesFindIsLoggedAndCountedOnceUntilTheBlockIsRepaired(t *testing.T) {
	for where, make := range map[string]func(*testing.T) *setting{"in place": local, "by copies": inMemory} {
		t.Run(where, func(t *testing.T) {
			s := make(t)
			var log bytes.Buffer
			s.options.Logger = slog.New(slog.NewTextHandler(&log, nil))
			s.open(t)
			id := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
			whole := slices.Clone(get(t, s.bkt, object(id, "chunks/000001")))
			damaged := slices.Clone(whole)
			damaged[len(damaged)-30] ^= 0xff
			put(t, s.bkt, object(id, "chunks/000001"), damaged)
			for range 4 {
				if _, _, err := samples(t.Context(), s.store, 0, hour, nil); series.KindOf(err) != series.Corrupt {
					t.Fatalf("got %v, want an error of kind corrupt", err)
				}
				s.advance(2 * time.Minute)
				s.refresh(t)
			}
			findings := 1.
			if where == "by copies" {
				findings = 2 // the first copy, and the one after it
			}
			if got := s.metric(t, "varve_blocks_damage_total", ""); got != findings {
				t.Errorf("damage is counted %g times, want %g", got, findings)
			}
			if got := strings.Count(log.String(), "block is set aside"); got != 1 {
				t.Errorf("it is logged %d times that the block is set aside, want 1: %s", got, log.String())
			}
			put(t, s.bkt, object(id, "chunks/000001"), append(whole, 0)) // another state of the files, whatever the clock
			editMeta(t, s.bkt, id, withoutSizes)
			s.refresh(t)
			wantSamples(t, s, 0, hour, 2*120)
		})
	}
}

func TestBlockWithoutReadableMetaAndIndexMayHoldAnythingOlder(t *testing.T) {
	s := inMemory(t)
	blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
	id := ulid.MustNew(uint64(2*hour), nil)
	put(t, s.bkt, object(id, "meta.json"), nil)
	_, _, err := samples(t.Context(), s.store, 0, hour, nil)
	if series.KindOf(err) != series.Corrupt || !strings.Contains(fmt.Sprint(err), id.String()) {
		t.Errorf("a query of older samples: got %v, want an error that names block %s", err, id)
	}
	wantSamples(t, s, 2*hour+1, 3*hour, 0)
}

func TestRepairedBlockIsReadAgain(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		dir := blocktest.Write(t, hourOf(0))
		id := blocktest.Upload(t, s.bkt, tenantName, dir)
		remove(t, s.bkt, object(id, "index"))
		if _, _, err := samples(t.Context(), s.store, 0, hour, nil); err == nil {
			t.Fatal("a block without index was read")
		}
		blocktest.Upload(t, s.bkt, tenantName, dir)
		s.refresh(t)
		wantSamples(t, s, 0, hour, 2*120)
	})
}

func TestWhatIsNoBlockIsLeftAlone(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
		marked := ulid.MustNew(uint64(hour), nil)
		put(t, s.bkt, object(marked, "deletion-mark.json"), []byte(`{"id":"`+marked.String()+`","deletion_time":1,"version":1}`))
		uploading := ulid.MustNew(uint64(2*hour), nil)
		put(t, s.bkt, object(uploading, "index"), []byte("half of it"))
		put(t, s.bkt, tenantName+"/bucket-index.json.zst", []byte("not ours"))
		put(t, s.bkt, tenantName+"/markers/x.json", []byte("{}"))
		wantSamples(t, s, 0, 3*hour, 2*120)
	})
}

func TestDeletionMarksAreHonouredAfterTheirDelay(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		id := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
		wantSamples(t, s, 0, hour, 2*120)
		put(t, s.bkt, object(id, "deletion-mark.json"), fmt.Appendf(nil, `{"id":%q,"deletion_time":%d,"version":1}`, id, s.clock().Unix()))
		s.advance(s.cfg.DeletionDelay - time.Minute)
		s.refresh(t)
		wantSamples(t, s, 0, hour, 2*120)
		s.advance(time.Minute)
		wantSamples(t, s, 0, hour, 0)
		if got := s.metric(t, "varve_blocks_marked", ""); got != 1 {
			t.Errorf("%g blocks are counted as marked, want 1", got)
		}
	})
}

func TestDownsampledBlocksAreLeftOutAndCounted(t *testing.T) {
	s := inMemory(t)
	blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
	coarse := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
	editMeta(t, s.bkt, coarse, func(meta map[string]any) {
		meta["thanos"].(map[string]any)["downsample"] = map[string]any{"resolution": 300_000}
	})
	compacted := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(hour)))
	editMeta(t, s.bkt, compacted, func(meta map[string]any) { meta["compaction"].(map[string]any)["level"] = 3 })
	wantSamples(t, s, 0, 2*hour, 2*2*120)
	if got := s.metric(t, "varve_blocks_downsampled", ""); got != 1 {
		t.Errorf("%g blocks are counted as downsampled, want 1", got)
	}
	metas, err := s.store.Blocks(t.Context(), tenantName)
	if err != nil || len(metas) != 2 {
		t.Errorf("%d blocks are described, error %v; want 2", len(metas), err)
	}
}

// faulty fails or delays what a test tells it to.
type faulty struct {
	objstore.Bucket
	fail atomic.Bool
	gate atomic.Pointer[gate] // of Get of chunks
	// metas, if set, is how many more meta.json can be read; those beyond it wait for
	// their context's end. lists counts the listings of folders, by folder.
	metas *atomic.Int64
	mu    sync.Mutex
	lists map[string]int
}

func (f *faulty) listings(tenant string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists[tenant+"/"]
}

type gate struct {
	entered chan struct{}
	open    chan struct{}
}

var errDown = errors.New("the bucket is down")

func (f *faulty) Iter(ctx context.Context, dir string, each func(string) error, opts ...objstore.IterOption) error {
	if f.fail.Load() {
		return errDown
	}
	f.mu.Lock()
	if f.lists == nil {
		f.lists = map[string]int{}
	}
	f.lists[dir]++
	f.mu.Unlock()
	return f.Bucket.Iter(ctx, dir, each, opts...)
}

func (f *faulty) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	if f.fail.Load() {
		return nil, errDown
	}
	if f.metas != nil && strings.HasSuffix(name, "/meta.json") && f.metas.Add(-1) < 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if g := f.gate.Load(); g != nil && strings.Contains(name, "/chunks/") {
		select {
		case g.entered <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		select {
		case <-g.open:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return f.Bucket.Get(ctx, name)
}

func TestListServesWhileTheBucketIsDownUpToItsBound(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	s := newSetting(t, bkt, "")
	blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(0)))
	wantSamples(t, s, 0, hour, 2*120)
	bkt.fail.Store(true)

	s.advance(s.cfg.MaxListAge)
	wantSamples(t, s, 0, hour, 2*120)
	s.advance(time.Second)
	_, _, err := samples(t.Context(), s.store, 0, hour, nil)
	if series.KindOf(err) != series.Unavailable || !errors.Is(err, errDown) {
		t.Errorf("with a list beyond its bound: got %v of kind %s, want unavailable", err, series.KindOf(err))
	}
	if got := s.metric(t, "varve_blocks_list_failures_total", ""); got < 1 {
		t.Errorf("%g failures are counted", got)
	}

	bkt.fail.Store(false)
	s.advance(time.Minute)
	wantSamples(t, s, 0, hour, 2*120)
}

// A first list that takes longer than one reading may is complete after some.
func TestListContinuesWhereAFailedReadingEnded(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket(), metas: &atomic.Int64{}}
	s := newSetting(t, bkt, "")
	s.cfg.RefreshTimeout, s.cfg.Concurrency = 50*time.Millisecond, 2
	s.open(t)
	for h := range int64(5) {
		blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(h*hour)))
	}
	readings := 0
	for ; ; readings++ {
		bkt.metas.Store(2)
		n, _, err := samples(t.Context(), s.store, 0, 5*hour, nil)
		if err == nil && n == 5*2*120 {
			break
		}
		if series.KindOf(err) != series.Unavailable || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "of 5 blocks") {
			t.Fatalf("reading %d: got %d samples, error %v of kind %s; want unavailable for want of time", readings+1, n, err, series.KindOf(err))
		}
		if readings == 50 {
			t.Fatalf("after %d readings there is no list: %v", readings, err)
		}
		s.advance(time.Minute)
	}
	if readings < 2 {
		t.Errorf("5 blocks were inspected in %d readings of 2 at most", readings+1)
	}
}

func TestListIsReadOnWhenItsQueryEnds(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	s := newSetting(t, bkt, "")
	blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(0)))
	blocked := &blockedLists{Bucket: bkt, entered: make(chan struct{}), open: make(chan struct{})}
	s.options.Bucket = blocked
	s.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, _, err := samples(ctx, s.store, 0, hour, nil)
		gone <- err
	}()
	<-blocked.entered
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("the query that ended got %v", err)
	}
	close(blocked.open)
	wantSamples(t, s, 0, hour, 2*120)
	if got := bkt.listings(tenantName); got != 1 {
		t.Errorf("the folder was listed %d times, want 1", got)
	}
	if got := s.metric(t, "varve_blocks_list_failures_total", ""); got != 0 {
		t.Errorf("%g failures are counted, want 0", got)
	}
}

func TestCloseEndsAReadingOfTheList(t *testing.T) {
	blocked := &blockedLists{Bucket: objstore.NewInMemBucket(), entered: make(chan struct{}), open: make(chan struct{})}
	s := newSetting(t, blocked, "")
	gone := make(chan error, 1)
	go func() {
		_, _, err := samples(t.Context(), s.store, 0, hour, nil)
		gone <- err
	}()
	<-blocked.entered
	must(t, s.store.Close())
	if err := <-gone; series.KindOf(err) != series.Unavailable {
		t.Errorf("the query got %v, want an error of kind unavailable", err)
	}
}

// blockedLists lists nothing until it is opened.
type blockedLists struct {
	objstore.Bucket
	entered, open chan struct{}
}

func (b *blockedLists) Iter(ctx context.Context, dir string, each func(string) error, opts ...objstore.IterOption) error {
	for {
		select {
		case b.entered <- struct{}{}:
		case <-b.open:
			return b.Bucket.Iter(ctx, dir, each, opts...)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Whoever asks for tenants that do not exist causes one listing for each, and no more.
func TestNamesThatSomebodyMadeUpCostNothingFurther(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	s := newSetting(t, bkt, "")
	s.cfg.RefreshInterval, s.cfg.MaxTenants = time.Minute, 10
	s.open(t)
	blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(0)))
	wantSamples(t, s, 0, hour, 2*120)
	ask := func(name string) {
		t.Helper()
		if found, err := s.store.Blocks(t.Context(), name); err != nil || len(found) != 0 {
			t.Fatalf("tenant %s: got %d blocks, error %v", name, len(found), err)
		}
	}
	for i := range 1000 {
		ask(fmt.Sprint("nobody-", i))
	}
	ask("nobody-999")
	blocks.RefreshAll(s.store)
	if got := blocks.Tenants(s.store); got > 10 {
		t.Errorf("%d tenants are kept, want 10 at most", got)
	}
	if got := bkt.listings("nobody-999"); got != 1 {
		t.Errorf("a tenant without blocks was listed %d times, want 1", got)
	}
	if got := bkt.listings(tenantName); got != 2 {
		t.Errorf("the tenant with blocks was listed %d times, want 2: by its query, and to keep it up to date", got)
	}
	s.advance(time.Minute + time.Second)
	ask("nobody-999")
	if got := bkt.listings("nobody-999"); got != 2 {
		t.Errorf("after the list was overdue it was listed %d times in all, want 2", got)
	}
	s.advance(s.cfg.MaxListAge + time.Second)
	blocks.RefreshAll(s.store)
	if got := blocks.Tenants(s.store); got != 1 {
		t.Errorf("%d tenants are kept when only one has blocks, want 1", got)
	}
}

func TestTenantsWithBlocksAreBoundedToo(t *testing.T) {
	s := inMemory(t)
	s.cfg.MaxTenants = 2
	s.open(t)
	dir := blocktest.Write(t, hourOf(0))
	for i := range 4 {
		name := fmt.Sprint("t", i)
		blocktest.Upload(t, s.bkt, name, dir)
		s.advance(time.Second)
		if found, err := s.store.Blocks(t.Context(), name); err != nil || len(found) != 1 {
			t.Errorf("tenant %s: got %d blocks, error %v; want 1", name, len(found), err)
		}
	}
	if got := blocks.Tenants(s.store); got != 2 {
		t.Errorf("%d tenants are kept, want 2", got)
	}
}

func TestWithoutAnyListQueriesAreUnavailable(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	bkt.fail.Store(true)
	s := newSetting(t, bkt, "")
	_, _, err := samples(t.Context(), s.store, 0, hour, nil)
	if series.KindOf(err) != series.Unavailable || !errors.Is(err, errDown) {
		t.Errorf("got %v of kind %s, want unavailable", err, series.KindOf(err))
	}
}

func TestFetchFailureIsUnavailableAndNotRemembered(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	s := newSetting(t, bkt, "")
	id := blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(0)))
	s.refresh(t)
	bkt.fail.Store(true)
	_, _, err := samples(t.Context(), s.store, 0, hour, nil)
	if series.KindOf(err) != series.Unavailable || !strings.Contains(err.Error(), id.String()) {
		t.Errorf("got %v of kind %s, want one of kind unavailable that names block %s", err, series.KindOf(err), id)
	}
	bkt.fail.Store(false)
	wantSamples(t, s, 0, hour, 2*120)
}

func TestConcurrentQueriesShareOneFetchThatOutlivesWhoGivesUp(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	s := newSetting(t, bkt, "")
	blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(0)))
	s.refresh(t)
	g := &gate{entered: make(chan struct{}, 10), open: make(chan struct{})}
	bkt.gate.Store(g)

	impatient, giveUp := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() {
		_, _, err := samples(impatient, s.store, 0, hour, nil)
		gaveUp <- err
	}()
	<-g.entered
	patient := make(chan error, 3)
	for range 3 {
		go func() {
			n, _, err := samples(t.Context(), s.store, 0, hour, nil)
			if err == nil && n != 2*120 {
				err = fmt.Errorf("got %d samples", n)
			}
			patient <- err
		}()
	}
	giveUp()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Errorf("who gave up got %v", err)
	}
	close(g.open)
	for range 3 {
		if err := <-patient; err != nil {
			t.Errorf("who waited got %v", err)
		}
	}
}

func TestFetchEndsWhenNobodyWaitsForIt(t *testing.T) {
	bkt := &faulty{Bucket: objstore.NewInMemBucket()}
	s := newSetting(t, bkt, "")
	blocktest.Upload(t, bkt, tenantName, blocktest.Write(t, hourOf(0)))
	s.refresh(t)
	g := &gate{entered: make(chan struct{}, 10), open: make(chan struct{})}
	bkt.gate.Store(g)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, _, err := samples(ctx, s.store, 0, hour, nil)
		gone <- err
	}()
	<-g.entered
	cancel()
	<-gone
	bkt.gate.Store(nil)
	// The gate stays shut: only a new fetch can answer this.
	wantSamples(t, s, 0, hour, 2*120)
	s.close(t)
	wantEmptyAside(t, s.cache)
}

func wantEmptyAside(t *testing.T, cache string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(cache, ".aside"))
	if err != nil || len(left) > 0 {
		t.Errorf("left aside in the cache: %v, error %v", left, err)
	}
}

func TestCacheStaysWithinItsBytesAndServesAfterRestart(t *testing.T) {
	s := inMemory(t)
	var size int64
	for h := range int64(4) {
		dir := blocktest.Write(t, hourOf(h*hour))
		size = max(size, blocktest.Size(t, dir))
		blocktest.Upload(t, s.bkt, tenantName, dir)
	}
	s.cfg.CacheBytes = 2*size + size/2
	s.open(t)
	for h := range int64(4) {
		wantSamples(t, s, h*hour, (h+1)*hour-1, 2*120)
		if got := s.metric(t, "varve_blocks_cache_bytes", ""); int64(got) > s.cfg.CacheBytes {
			t.Fatalf("the cache holds %g bytes, more than %d", got, s.cfg.CacheBytes)
		}
	}
	s.close(t)
	if got := blocktest.Size(t, s.cache); got > s.cfg.CacheBytes || got < size {
		t.Errorf("%d bytes are on disk, want at most %d and at least a block of %d", got, s.cfg.CacheBytes, size)
	}
	wantEmptyAside(t, s.cache)

	// What a crash leaves behind, and a copy that lost its end.
	if err := os.MkdirAll(filepath.Join(s.cache, ".aside", "fetch-1", "chunks"), 0o777); err != nil {
		t.Fatal(err)
	}
	s.open(t)
	wantEmptyAside(t, s.cache)
	wantSamples(t, s, 3*hour, 4*hour, 2*120)
	if got := s.metric(t, "varve_blocks_downloads_total", ""); got != 0 {
		t.Errorf("%g blocks were fetched again after a restart, want 0", got)
	}
	wantSamples(t, s, 0, 4*hour, 4*2*120)
}

func TestDamagedCopyIsFetchedAnew(t *testing.T) {
	cases := map[string]func(t *testing.T, copied string){
		"its chunks are cut short":    func(t *testing.T, copied string) { shorten(t, filepath.Join(copied, "chunks", "000001")) },
		"its index is zeroes":         func(t *testing.T, copied string) { zero(t, filepath.Join(copied, "index")) },
		"its index is gone":           func(t *testing.T, copied string) { must(t, os.Remove(filepath.Join(copied, "index"))) },
		"its meta.json was not there": func(t *testing.T, copied string) { must(t, os.Remove(filepath.Join(copied, "meta.json"))) },
	}
	for name, damage := range cases {
		t.Run(name, func(t *testing.T) {
			s := inMemory(t)
			id := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
			wantSamples(t, s, 0, hour, 2*120)
			s.close(t)
			damage(t, filepath.Join(s.cache, tenantName, id.String()))
			s.open(t)
			wantSamples(t, s, 0, hour, 2*120)
			if got := s.metric(t, "varve_blocks_downloads_total", ""); got != 1 {
				t.Errorf("%g blocks were fetched, want 1", got)
			}
		})
	}
	t.Run("a chunk in it is zeroes, which only reading shows", func(t *testing.T) {
		s := inMemory(t)
		id := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
		wantSamples(t, s, 0, hour, 2*120)
		s.close(t)
		zero(t, filepath.Join(s.cache, tenantName, id.String(), "chunks", "000001"), 8)
		s.open(t)
		q, _, err := s.store.Querier(t.Context(), tenantName, 0, hour, nil) // uses the copy all the while
		must(t, err)
		defer q.Close()
		must(t, q.Select(t.Context(), true, nil, all).Err())
		if _, _, err := samples(t.Context(), s.store, 0, hour, nil); series.KindOf(err) != series.Corrupt {
			t.Fatalf("got %v, want an error of kind corrupt", err)
		}
		wantSamples(t, s, 0, hour, 2*120)
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func shorten(t *testing.T, name string) {
	t.Helper()
	info, err := os.Stat(name)
	must(t, err)
	must(t, os.Truncate(name, info.Size()-10))
}

// zero overwrites a file, but for its first bytes.
func zero(t *testing.T, name string, from ...int64) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	info, err := f.Stat()
	must(t, err)
	start := int64(0)
	if len(from) > 0 {
		start = from[0]
	}
	_, err = f.WriteAt(make([]byte, info.Size()-start), start)
	must(t, err)
}

func TestBlockLargerThanTheCacheStillAnswers(t *testing.T) {
	s := inMemory(t)
	s.cfg.CacheBytes = 1
	s.open(t)
	for h := range int64(2) {
		blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(h*hour)))
	}
	wantSamples(t, s, 0, 2*hour, 2*2*120)
	wantSamples(t, s, 0, 2*hour, 2*2*120)
	if got := s.metric(t, "varve_blocks_cache_bytes", ""); got != 0 {
		t.Errorf("the cache holds %g bytes after all queries ended, want 0", got)
	}
}

func TestBlocksInUseOutliveEvictionAndDeletion(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		s.cfg.MaxOpen, s.cfg.CacheBytes = 0, 1
		s.open(t)
		id := blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(0)))
		blocktest.Upload(t, s.bkt, tenantName, blocktest.Write(t, hourOf(hour)))
		q, _, err := s.store.Querier(t.Context(), tenantName, 0, hour-1, nil)
		must(t, err)
		set := q.Select(t.Context(), true, nil, all)
		if !set.Next() {
			t.Fatal("no series")
		}
		for range 3 {
			wantSamples(t, s, hour, 2*hour, 2*120) // closes what is out of use
		}
		for _, rel := range []string{"meta.json", "index", "chunks/000001"} {
			remove(t, s.bkt, object(id, rel))
		}
		s.refresh(t)
		n := 0
		for {
			it := set.At().Iterator(nil)
			for it.Next() != chunkenc.ValNone {
				n++
			}
			must(t, it.Err())
			if !set.Next() {
				break
			}
		}
		must(t, set.Err())
		must(t, q.Close())
		if n != 2*120 {
			t.Errorf("got %d samples of a block in use, want %d", n, 2*120)
		}
		wantSamples(t, s, 0, hour-1, 0)
		if got := s.metric(t, "varve_blocks_open", ""); got != 0 {
			t.Errorf("%g blocks are open though none is in use, want 0", got)
		}
	})
}

func TestManyQueriesWhileListsAndCacheChange(t *testing.T) {
	eachSetting(t, func(t *testing.T, s *setting) {
		var size int64
		for h := range int64(4) {
			dir := blocktest.Write(t, hourOf(h*hour))
			size = blocktest.Size(t, dir)
			blocktest.Upload(t, s.bkt, tenantName, dir)
		}
		s.cfg.MaxOpen, s.cfg.CacheBytes, s.cfg.RefreshInterval = 2, 2*size, 2*time.Millisecond
		s.open(t)
		var group sync.WaitGroup
		for worker := range int64(4) {
			group.Go(func() {
				for i := range int64(15) {
					from := (worker + i) % 3
					n, _, err := samples(t.Context(), s.store, from*hour, (from+2)*hour-1, nil)
					if err != nil || n != 2*2*120 {
						t.Errorf("got %d samples, error %v; want %d", n, err, 2*2*120)
						return
					}
				}
			})
		}
		group.Wait()
	})
}
