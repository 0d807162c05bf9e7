package ingester

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/compression"

	"github.com/varvedb/varve/ingester/walrepair"
	"github.com/varvedb/varve/pkg/series"
)

// damagedBlocksDir keeps blocks that could not be opened, below the tenant's folder.
const damagedBlocksDir = "damaged-blocks"

// tenantDB is one tenant's part of the ingester: its TSDB, its metadata, and what of
// it is in the bucket already. It is dormant while db is nil: then it has metadata
// only, and all its samples are in the bucket.
type tenantDB struct {
	owner *Ingester
	name  string
	dir   string
	log   *slog.Logger

	metadata *metadataLog
	shipped  *shipped

	// gate is held for reading while samples are appended, and for writing while an
	// idle head is cut to its last sample.
	gate sync.RWMutex

	lastWrite atomic.Int64 // Unix ms
	broken    atomic.Pointer[error]
	exemplars atomic.Bool // the ring of exemplars has its full size

	// mu guards the life of db: it is opened and closed under it, and closed only
	// when refs is 0. idle is signalled when refs falls to 0.
	mu   sync.Mutex
	idle *sync.Cond
	refs int

	// Set while open; read by those who hold a reference.
	db    *tsdb.DB
	reg   *prometheus.Registry
	epoch uint64
}

func newTenant(owner *Ingester, name string) (*tenantDB, error) {
	dir := filepath.Join(owner.cfg.Dir, name)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, series.Errorf(series.Unavailable, "make folder of tenant %s: %w", name, err)
	}
	t := &tenantDB{owner: owner, name: name, dir: dir, log: owner.log.With("tenant", name)}
	t.idle = sync.NewCond(&t.mu)
	var err error
	if t.metadata, err = openMetadata(dir, owner.cfg.MaxMetadataFamilies, t.log); err != nil {
		return nil, series.Errorf(series.Unavailable, "open tenant %s: %w", name, err)
	}
	if t.shipped, err = openShipped(dir); err != nil {
		t.metadata.close()
		return nil, series.Errorf(series.Unavailable, "open tenant %s: %w", name, err)
	}
	return t, nil
}

// hasData tells whether the folder holds more than metadata.
func (t *tenantDB) hasData() bool {
	for _, sub := range []string{"wal", "wbl", "chunks_head"} {
		if _, err := os.Stat(filepath.Join(t.dir, sub)); err == nil {
			return true
		}
	}
	return len(blockDirs(t.dir)) > 0
}

// retain takes a reference that keeps db open until release. A dormant tenant is
// opened if create is set; else retain reports false.
func (t *tenantDB) retain(create bool) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.db == nil {
		if !create {
			return false, nil
		}
		if err := t.open(); err != nil {
			return false, err
		}
	}
	t.refs++
	return true, nil
}

func (t *tenantDB) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refs--; t.refs == 0 {
		t.idle.Broadcast()
	}
}

// open makes the folder sound and opens the TSDB in it. The caller holds mu.
func (t *tenantDB) open() error {
	started := time.Now()
	if err := t.repair(); err != nil {
		return series.Errorf(series.Unavailable, "repair tenant %s: %w", t.name, err)
	}
	t.reg = prometheus.NewRegistry()
	db, err := tsdb.Open(t.dir, t.log, t.reg, t.options(), nil)
	if err != nil {
		return series.Errorf(series.Unavailable, "open tenant %s: %w", t.name, err)
	}
	t.db = db
	t.epoch = rand.Uint64() | 1
	t.broken.Store(nil)
	t.lastWrite.Store(t.owner.now().UnixMilli())
	t.log.Info("tenant opened", "series", db.Head().NumSeries(), "blocks", len(db.Blocks()), "took", time.Since(started).Round(time.Millisecond))
	return nil
}

// repair mends what a hard stop may have left, which TSDB would refuse to open or
// would cut off with all that follows: damage in the WAL, and blocks that cannot be
// read. What is set aside stays below the tenant's folder.
func (t *tenantDB) repair() error {
	report, err := walrepair.Repair(t.owner.life, t.dir, t.log)
	if err != nil {
		return err
	}
	t.owner.metrics.countRepair(report)
	for _, name := range blockDirs(t.dir) {
		if err := t.checkBlock(name); err != nil {
			return err
		}
	}
	return nil
}

// checkBlock opens a local block and sets it aside if that fails.
func (t *tenantDB) checkBlock(name string) error {
	dir := filepath.Join(t.dir, name)
	block, err := tsdb.OpenBlock(t.log, dir, nil, nil)
	if err == nil {
		return block.Close()
	}
	aside := filepath.Join(t.dir, damagedBlocksDir, name)
	t.log.Error("local block cannot be opened and is set aside", "block", name, "aside", aside, "err", err)
	t.owner.metrics.blocksSetAside.Inc()
	if err := os.MkdirAll(filepath.Dir(aside), 0o777); err != nil {
		return fmt.Errorf("make folder for damaged blocks: %w", err)
	}
	if err := os.RemoveAll(aside); err != nil {
		return fmt.Errorf("make room for damaged block: %w", err)
	}
	if err := os.Rename(dir, aside); err != nil {
		return fmt.Errorf("set damaged block aside: %w", err)
	}
	return nil
}

// blockDirs lists the folders below dir that are named like blocks.
func blockDirs(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		if _, err := ulid.ParseStrict(e.Name()); err == nil && e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

func (t *tenantDB) options() *tsdb.Options {
	cfg := t.owner.cfg
	opts := tsdb.DefaultOptions()
	opts.MinBlockDuration = cfg.BlockDuration.Milliseconds()
	opts.MaxBlockDuration = opts.MinBlockDuration // blocks are merged in the bucket, not here
	opts.EnableOverlappingCompaction = false
	opts.RetentionDuration = 0
	opts.BlocksToDelete = t.blocksToDelete
	opts.WALCompression = compression.Snappy
	opts.StripeSize = cfg.HeadStripes
	opts.OutOfOrderTimeWindow = cfg.LateWindow.Milliseconds()
	opts.EnableExemplarStorage = cfg.MaxExemplars > 0
	opts.MaxExemplars = t.exemplarRing()
	opts.SeriesLifecycleCallback = seriesLimit{t}
	if cfg.FloatChunks == "xor2" {
		opts.FloatChunkEncoding = chunkenc.EncXOR2
		opts.EnableSTStorage = true
		opts.EnableHistogramSTEncoding = true
	}
	return opts
}

// exemplarsFile is there once the tenant has sent an exemplar.
const exemplarsFile = "has-exemplars"

// smallRing is the exemplar ring of tenants that send none, as most do: TSDB allocates
// the whole ring at once.
const smallRing = 1

func (t *tenantDB) exemplarRing() int64 {
	most := int64(t.owner.cfg.MaxExemplars)
	if _, err := os.Stat(filepath.Join(t.dir, exemplarsFile)); err != nil {
		return min(most, smallRing)
	}
	t.exemplars.Store(true)
	return most
}

// expectExemplars gives the ring its full size before the first exemplar goes in. The
// file comes first, so that a replay has room for what the WAL holds.
func (t *tenantDB) expectExemplars() error {
	if t.exemplars.Load() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.exemplars.Load() {
		return nil
	}
	if err := writeFile(filepath.Join(t.dir, exemplarsFile), nil); err != nil {
		return fmt.Errorf("note that the tenant has exemplars: %w", err)
	}
	err := t.db.ApplyConfig(&config.Config{StorageConfig: config.StorageConfig{
		TSDBConfig:      &config.TSDBConfig{OutOfOrderTimeWindow: t.owner.cfg.LateWindow.Milliseconds()},
		ExemplarsConfig: &config.ExemplarsConfig{MaxExemplars: int64(t.owner.cfg.MaxExemplars)},
	}})
	if err != nil {
		return fmt.Errorf("make room for exemplars: %w", err)
	}
	t.exemplars.Store(true)
	return nil
}

// fail stops writes until the tenant is opened anew.
func (t *tenantDB) fail(err error) {
	if t.broken.CompareAndSwap(nil, &err) {
		t.log.Error("writing the WAL failed; the tenant takes no writes until it is opened anew", "err", err)
	}
}

func (t *tenantDB) failure() error {
	if err := t.broken.Load(); err != nil {
		return series.Errorf(series.Unavailable, "tenant %s takes no writes, its WAL could not be written: %w", t.name, *err)
	}
	return nil
}

// close closes the TSDB. With wait it waits for those who use it; else it reports
// false if there are any.
func (t *tenantDB) close(wait bool) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for wait && t.refs > 0 {
		t.idle.Wait()
	}
	if t.refs > 0 {
		return false, nil
	}
	return true, t.closeLocked()
}

func (t *tenantDB) closeLocked() error {
	if t.db == nil {
		return nil
	}
	err := t.db.Close()
	t.db, t.reg = nil, nil
	if err != nil {
		return fmt.Errorf("close tenant %s: %w", t.name, err)
	}
	return nil
}

// reopen closes the TSDB and opens it again, replaying the WAL, so that memory and
// WAL agree once more. It reports false while somebody uses it.
func (t *tenantDB) reopen() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refs > 0 {
		return false, nil
	}
	if err := t.closeLocked(); err != nil {
		t.log.Warn("closing a tenant whose WAL failed", "err", err)
	}
	return true, t.open()
}

// goDormant closes an idle tenant whose samples are all in the bucket, known to every
// querier and past their time here, and removes all of it but the metadata.
func (t *tenantDB) goDormant() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refs > 0 || t.db == nil || t.db.Head().NumSeries() > 0 || len(t.blocksToDelete(t.db.Blocks())) < len(t.db.Blocks()) {
		return nil
	}
	if err := t.closeLocked(); err != nil {
		return err
	}
	var errs []error
	for _, name := range append(blockDirs(t.dir), "wal", "wbl", "chunks_head") {
		errs = append(errs, os.RemoveAll(filepath.Join(t.dir, name)))
	}
	t.log.Info("idle tenant closed; all its samples are in the bucket")
	return errors.Join(errs...)
}

// seriesLimit refuses new series beyond the tenant's bound. Known series go on.
type seriesLimit struct{ t *tenantDB }

type seriesLimitError struct{ limit int }

func (e *seriesLimitError) Error() string {
	return fmt.Sprintf("the tenant has %d series already, which is its limit; new series are refused", e.limit)
}

func (s seriesLimit) PreCreation(labels.Labels) error {
	limit := s.t.owner.cfg.MaxSeries
	if limit > 0 && s.t.db != nil && s.t.db.Head().NumSeries() >= uint64(limit) {
		return &seriesLimitError{limit}
	}
	return nil
}

func (seriesLimit) PostCreation(labels.Labels)                          {}
func (seriesLimit) PostDeletion(map[chunks.HeadSeriesRef]labels.Labels) {}
