package ingester

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
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
	"github.com/prometheus/prometheus/tsdb/fileutil"
	"github.com/prometheus/prometheus/util/compression"
	"golang.org/x/sys/unix"

	"github.com/varvedb/varve/ingester/walrepair"
	"github.com/varvedb/varve/pkg/series"
)

// damagedDir keeps blocks and head chunks that could not be opened, below the
// tenant's folder. (What walrepair replaces is in a folder of its own.)
const damagedDir = "set-aside"

// tenantDB is one tenant's part of the ingester: its TSDB, its metadata, and what of
// it is in the bucket already. A dormant tenant has metadata only here.
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
	exemplars atomic.Bool               // the ring of exemplars has its full size
	head      atomic.Pointer[tsdb.Head] // once it is replayed; for seriesLimit

	// creating is held by a request from before it makes a series until that series'
	// record is in the WAL, and by those that look series up by their labels: a
	// sample of a series whose record is not written yet would be lost by a replay.
	creating sync.Mutex

	// mu guards the life of db. It is never held while a TSDB is opened or closed:
	// state says that somebody does, and changed is signalled when state or refs move.
	mu      sync.Mutex
	changed *sync.Cond
	state   tenantState
	fault   error // why state is failed
	refs    int

	// Set while state is open; read by those who hold a reference.
	db    *tsdb.DB
	reg   *prometheus.Registry
	epoch uint64
}

// tenantState is where a tenant is in its life:
//
//	dormant --> opening --> open --(idle)--> reopening --> dormant
//	               |         |
//	               v         v (its WAL failed)
//	             failed --> reopening --> open or failed
//	any --> closed, for good
type tenantState int

const (
	dormant   tenantState = iota // no samples here, all are in the bucket
	opening                      // from dormant: readers miss nothing
	open                         // reads and writes
	reopening                    // being closed, to be opened anew or to go dormant: neither reads nor writes
	failed                       // could not be opened: there are samples that nobody can read
	closed                       // the ingester stops
)

func newTenant(owner *Ingester, name string) (*tenantDB, error) {
	dir := filepath.Join(owner.cfg.Dir, name)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, series.Errorf(series.Unavailable, "make folder of tenant %s: %w", name, err)
	}
	t := &tenantDB{owner: owner, name: name, dir: dir, log: owner.log.With("tenant", name)}
	t.changed = sync.NewCond(&t.mu)
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
	for _, sub := range []string{"wal", "wbl", headChunksDir} {
		if _, err := os.Stat(filepath.Join(t.dir, sub)); err == nil {
			return true
		}
	}
	return len(blockDirs(t.dir)) > 0
}

// retain takes a reference that keeps db open until release. A dormant tenant is
// opened if create is set; else retain reports false for it. A tenant with samples
// that cannot be read now is an error, never an empty answer.
func (t *tenantDB) retain(create bool) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for create && t.state == opening {
		t.changed.Wait()
	}
	if create && t.state == dormant {
		t.openLocked(opening)
	}
	switch t.state {
	case open:
		t.refs++
		return true, nil
	case dormant, opening:
		return false, nil
	case failed:
		return false, t.fault
	case closed:
		return false, series.Errorf(series.Unavailable, "tenant %s: the ingester is stopping", t.name)
	default:
		return false, series.Errorf(series.Unavailable, "tenant %s is being opened anew", t.name)
	}
}

// sick tells whether the tenant needs to be opened anew.
func (t *tenantDB) sick() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state == failed || t.state == open && t.broken.Load() != nil
}

// peek is retain for those who only want to see what is open right now.
func (t *tenantDB) peek() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != open {
		return false
	}
	t.refs++
	return true
}

func (t *tenantDB) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refs--; t.refs == 0 {
		t.changed.Broadcast()
	}
}

// openLocked opens the TSDB, letting go of mu meanwhile; via is the state of that time.
func (t *tenantDB) openLocked(via tenantState) {
	t.state = via
	t.mu.Unlock()
	db, reg, err := t.open()
	t.mu.Lock()
	if err != nil {
		t.state, t.fault = failed, err
	} else {
		t.state, t.fault = open, nil
		t.db, t.reg, t.epoch = db, reg, rand.Uint64()|1
		t.lastWrite.Store(t.owner.now().UnixMilli())
		t.broken.Store(nil)
	}
	t.changed.Broadcast()
}

// open makes the folder sound and opens the TSDB in it.
func (t *tenantDB) open() (*tsdb.DB, *prometheus.Registry, error) {
	started := time.Now()
	t.head.Store(nil)
	if err := t.repair(); err != nil {
		return nil, nil, series.Errorf(series.Unavailable, "repair tenant %s: %w", t.name, err)
	}
	reg := prometheus.NewRegistry()
	log := slog.New(&walWatch{t.log.Handler(), t})
	db, err := tsdb.Open(t.dir, log, reg, t.options(), nil)
	if err != nil && t.hasHeadChunks() && !isSystemError(err) && t.setAside(headChunksDir, err) == nil {
		// All that the head's chunk files hold is in the logs as well.
		reg = prometheus.NewRegistry()
		db, err = tsdb.Open(t.dir, log, reg, t.options(), nil)
	}
	if err != nil {
		return nil, nil, series.Errorf(series.Unavailable, "open tenant %s: %w", t.name, err)
	}
	t.head.Store(db.Head())
	t.log.Info("tenant opened", "series", db.Head().NumSeries(), "blocks", len(db.Blocks()), "took", time.Since(started).Round(time.Millisecond))
	return db, reg, nil
}

// walWatch listens to what TSDB logs: that late samples could not be written to their
// log is told nowhere else, and they would be acknowledged and gone after a restart.
type walWatch struct {
	slog.Handler
	t *tenantDB
}

func (w *walWatch) Handle(ctx context.Context, r slog.Record) error {
	if r.Level == slog.LevelError && strings.HasPrefix(r.Message, "Failed to log out of order samples") {
		w.t.fail(errors.New("the log of late samples could not be written"))
	}
	return w.Handler.Handle(ctx, r)
}

func (w *walWatch) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &walWatch{w.Handler.WithAttrs(attrs), w.t}
}

func (w *walWatch) WithGroup(name string) slog.Handler {
	return &walWatch{w.Handler.WithGroup(name), w.t}
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

// checkBlock opens a local block and sets it aside if it is damaged.
func (t *tenantDB) checkBlock(name string) error {
	block, err := tsdb.OpenBlock(t.log, filepath.Join(t.dir, name), nil, nil)
	switch {
	case err == nil:
		return block.Close()
	case isSystemError(err):
		return fmt.Errorf("open block %s: %w", name, err)
	}
	return t.setAside(name, err)
}

// isSystemError tells what the machine lacks from what a file has wrong with it.
func isSystemError(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOSPC, unix.EDQUOT, unix.EIO, unix.EACCES, unix.EPERM, unix.EROFS, context.Canceled} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// headChunksDir is where TSDB keeps full chunks of the head, to map them into memory.
const headChunksDir = "chunks_head"

func (t *tenantDB) hasHeadChunks() bool {
	entries, err := os.ReadDir(filepath.Join(t.dir, headChunksDir))
	return err == nil && len(entries) > 0
}

// setAside moves a part of the tenant's folder that cannot be read out of the way.
func (t *tenantDB) setAside(name string, why error) error {
	aside := filepath.Join(t.dir, damagedDir, name)
	t.log.Error("what cannot be opened is set aside", "name", name, "aside", aside, "err", why)
	t.owner.metrics.setAside.Inc()
	if err := os.MkdirAll(filepath.Dir(aside), 0o777); err != nil {
		return fmt.Errorf("make folder for what is damaged: %w", err)
	}
	if err := os.RemoveAll(aside); err != nil {
		return fmt.Errorf("make room for what is damaged: %w", err)
	}
	if err := fileutil.Rename(filepath.Join(t.dir, name), aside); err != nil {
		return fmt.Errorf("set %s aside: %w", name, err)
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
	opts.NoLockfile = true // the ingester has locked the whole folder
	opts.BlocksToDelete = t.blocksToDelete
	opts.WALCompression = compression.Snappy
	opts.StripeSize = cfg.HeadStripes
	opts.OutOfOrderTimeWindow = cfg.LateWindow.Milliseconds()
	opts.EnableExemplarStorage = cfg.MaxExemplars > 0
	opts.MaxExemplars = t.exemplarRing()
	opts.SeriesLifecycleCallback = seriesLimit{t.owner.cfg.MaxSeries, &t.head}
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

// close ends the tenant for good, once those who use it are done.
func (t *tenantDB) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.refs > 0 || t.state == opening || t.state == reopening {
		t.changed.Wait()
	}
	err := t.closeLocked(closed)
	t.state = closed
	return errors.Join(err, t.metadata.close())
}

// closeLocked closes the TSDB, letting go of mu meanwhile; via is the state of that
// time. The caller sees to it that refs is 0 and says what the tenant is then.
func (t *tenantDB) closeLocked(via tenantState) error {
	db := t.db
	t.state, t.db, t.reg = via, nil, nil
	if db == nil {
		return nil
	}
	t.mu.Unlock()
	err := db.Close()
	t.mu.Lock()
	if err != nil {
		return fmt.Errorf("close tenant %s: %w", t.name, err)
	}
	return nil
}

// patience is how long reopen waits for a moment without readers before it turns new
// ones away.
const patience = 5 * time.Second

// reopen opens a tenant anew whose WAL failed or that could not be opened, replaying
// the WAL, so that memory and WAL agree once more.
func (t *tenantDB) reopen() error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline) && t.busy(); {
		time.Sleep(10 * time.Millisecond)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != open && t.state != failed {
		return nil
	}
	t.state = reopening
	for t.refs > 0 {
		t.changed.Wait()
	}
	if err := t.closeLocked(reopening); err != nil {
		t.log.Warn("closing a tenant whose WAL failed", "err", err)
	}
	t.openLocked(reopening)
	return t.fault
}

func (t *tenantDB) busy() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.refs > 0
}

// goDormant closes an idle tenant whose samples are all in the bucket, known to every
// querier and past their time here, and removes all of it but the metadata.
func (t *tenantDB) goDormant() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != open || t.refs > 0 || t.db.Head().NumSeries() > 0 || len(t.blocksToDelete(t.db.Blocks())) < len(t.db.Blocks()) {
		return nil
	}
	if err := t.closeLocked(reopening); err != nil {
		t.state, t.fault = failed, series.Errorf(series.Unavailable, "%w", err)
		return err
	}
	var errs []error
	for _, name := range append(blockDirs(t.dir), "wal", "wbl", headChunksDir) {
		errs = append(errs, os.RemoveAll(filepath.Join(t.dir, name)))
	}
	t.state = dormant
	t.changed.Broadcast()
	t.log.Info("idle tenant closed; all its samples are in the bucket")
	return errors.Join(errs...)
}

// seriesLimit refuses new series beyond the tenant's bound. Known series go on. head
// is nil while the WAL is replayed, when nothing is refused.
type seriesLimit struct {
	limit int
	head  *atomic.Pointer[tsdb.Head]
}

type seriesLimitError struct{ limit int }

func (e *seriesLimitError) Error() string {
	return fmt.Sprintf("the tenant has %d series already, which is its limit; new series are refused", e.limit)
}

func (s seriesLimit) PreCreation(labels.Labels) error {
	if s.limit == 0 {
		return nil
	}
	if head := s.head.Load(); head != nil && head.NumSeries() >= uint64(s.limit) {
		return &seriesLimitError{s.limit}
	}
	return nil
}

func (seriesLimit) PostCreation(labels.Labels)                          {}
func (seriesLimit) PostDeletion(map[chunks.HeadSeriesRef]labels.Labels) {}
