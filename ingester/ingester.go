// Package ingester holds recent samples: a Prometheus TSDB for each tenant, with its
// WAL, head and recent blocks on local disk. It cuts blocks, ships them to the
// bucket, and answers queries for what it holds. It knows no HTTP and no peers.
package ingester

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/prometheus/tsdb/fileutil"
	"github.com/thanos-io/objstore"
	"golang.org/x/sync/errgroup"

	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// Options are what an Ingester needs of its surroundings.
type Options struct {
	Bucket     objstore.Bucket
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Now is the clock. Nil means time.Now.
	Now func() time.Time
	// FreeDisk returns the bytes free on the file system of a folder. Nil asks the
	// operating system.
	FreeDisk func(dir string) (int64, error)
}

// Ingester holds the recent samples of all tenants.
type Ingester struct {
	cfg      Config
	bucket   objstore.Bucket
	log      *slog.Logger
	now      func() time.Time
	freeDisk func(dir string) (int64, error)
	metrics  *metrics
	writes   sync.Pool // of *write

	ready    atomic.Bool
	stopping atomic.Bool
	diskFull atomic.Bool
	progress atomic.Pointer[string]

	mu      sync.RWMutex // guards tenants
	tenants map[string]*tenantDB

	life context.Context // ends with Close, or when Start is told to give up
	stop context.CancelFunc
	done sync.WaitGroup
	lock fileutil.Releaser // of the folder
}

// lockFile is held while a process uses the folder: a second one would repair, that
// is rewrite, the logs that the first appends to.
const lockFile = "lock"

// New makes an ingester; it does nothing before Start.
func New(cfg Config, opts Options) (*Ingester, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	i := &Ingester{
		cfg:      cfg,
		bucket:   opts.Bucket,
		log:      opts.Logger,
		now:      opts.Now,
		freeDisk: opts.FreeDisk,
		tenants:  map[string]*tenantDB{},
	}
	if i.now == nil {
		i.now = time.Now
	}
	if i.freeDisk == nil {
		i.freeDisk = freeDisk
	}
	i.life, i.stop = context.WithCancel(context.Background())
	i.writes.New = func() any { return &write{} }
	i.metrics = newMetrics(opts.Registerer, i)
	i.setProgress("not started")
	return i, nil
}

// Start opens every tenant found on disk, replaying WALs, then begins to take writes
// and to maintain. It returns when all are open, or with the first error.
func (i *Ingester) Start(ctx context.Context) error {
	if err := os.MkdirAll(i.cfg.Dir, 0o777); err != nil {
		return fmt.Errorf("make ingester's folder: %w", err)
	}
	lock, _, err := fileutil.Flock(filepath.Join(i.cfg.Dir, lockFile))
	if err != nil {
		return fmt.Errorf("lock %s, which another process may use: %w", i.cfg.Dir, err)
	}
	i.lock = lock
	i.checkDisk()
	unwatch := context.AfterFunc(ctx, i.stop)
	defer unwatch()
	if err := i.openAll(); err != nil {
		return errors.Join(err, i.closeAll())
	}
	i.done.Go(func() { i.maintain(i.life) })
	i.done.Go(func() { i.watchDisk(i.life) })
	i.ready.Store(true)
	i.setProgress("ready")
	return nil
}

// openAll opens the tenants that have samples on disk, two at a time: replay uses
// several cores itself.
func (i *Ingester) openAll() error {
	entries, err := os.ReadDir(i.cfg.Dir)
	if err != nil {
		return fmt.Errorf("list tenants: %w", err)
	}
	var opened atomic.Int64
	group, ctx := errgroup.WithContext(i.life)
	group.SetLimit(2)
	for _, e := range entries {
		if e.Name() == lockFile {
			continue
		}
		if !e.IsDir() || tenant.Validate(e.Name()) != nil {
			i.log.Warn("left alone what is no tenant's folder", "path", e.Name())
			continue
		}
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			i.setProgress(fmt.Sprintf("replaying WALs: %d of %d tenants are open", opened.Load(), len(entries)))
			defer opened.Add(1)
			return i.openTenant(e.Name())
		})
	}
	return group.Wait()
}

// openTenant opens a tenant that is on disk. One that cannot be opened does not stop
// the others: its reads and writes fail, and it is tried again in every round.
func (i *Ingester) openTenant(name string) error {
	t, err := newTenant(i, name)
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.tenants[name] = t
	i.mu.Unlock()
	if !t.hasData() {
		return nil
	}
	held, err := t.retain(true)
	if held {
		t.release()
		return nil
	}
	t.log.Error("tenant cannot be opened; it is tried again", "err", err)
	return nil
}

// Ready returns nil when the ingester takes reads and writes, else why it does not.
func (i *Ingester) Ready() error {
	switch {
	case i.stopping.Load():
		return series.Errorf(series.Unavailable, "ingester is stopping")
	case !i.ready.Load():
		return series.Errorf(series.Unavailable, "ingester is starting: %s", *i.progress.Load())
	}
	return nil
}

func (i *Ingester) setProgress(s string) { i.progress.Store(&s) }

// acquire returns the tenant with its TSDB open, to be released. Without create it
// returns nil for tenants that have nothing here.
func (i *Ingester) acquire(name string, create bool) (*tenantDB, error) {
	t, err := i.tenant(name, create)
	if t == nil || err != nil {
		return nil, err
	}
	if create {
		// Before a reference is taken: refused writes must not keep a tenant busy
		// that waits for a quiet moment to be opened anew.
		if err := t.failure(); err != nil {
			return nil, err
		}
	}
	held, err := t.retain(create)
	if !held {
		return nil, err
	}
	return t, nil
}

// tenant returns the tenant, open or dormant, nil if it is unknown.
func (i *Ingester) tenant(name string, create bool) (*tenantDB, error) {
	i.mu.RLock()
	t := i.tenants[name]
	i.mu.RUnlock()
	if t != nil || !create {
		return t, nil
	}
	if err := tenant.Validate(name); err != nil {
		return nil, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if t := i.tenants[name]; t != nil {
		return t, nil
	}
	if len(i.tenants) >= i.cfg.MaxTenants {
		return nil, series.Errorf(series.Invalid, "tenant %s is new and there are %d tenants already, which is the limit", name, len(i.tenants))
	}
	t, err := newTenant(i, name)
	if err != nil {
		return nil, err
	}
	i.tenants[name] = t
	return t, nil
}

// all returns the tenants in the order of their names.
func (i *Ingester) all() []*tenantDB {
	i.mu.RLock()
	defer i.mu.RUnlock()
	all := make([]*tenantDB, 0, len(i.tenants))
	for _, t := range i.tenants {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b *tenantDB) int { return strings.Compare(a.name, b.name) })
	return all
}

// eachOpen calls f with every tenant that is open.
func (i *Ingester) eachOpen(f func(t *tenantDB)) {
	for _, t := range i.all() {
		if t.peek() {
			f(t)
			t.release()
		}
	}
}

// maintain uploads blocks, heals tenants whose WAL failed, and puts idle ones to
// sleep, for as long as ctx lives.
func (i *Ingester) maintain(ctx context.Context) {
	for {
		// Jittered by a tenth, so that ingesters of one cluster drift apart.
		pause := i.cfg.MaintenanceInterval + time.Duration(rand.Int64N(int64(i.cfg.MaintenanceInterval)/10+1))
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		i.Maintain(ctx)
	}
}

// Maintain is one round of what the ingester does by itself now and then: heal, ship,
// put to sleep. Faults are logged, counted and tried again in the next round.
func (i *Ingester) Maintain(ctx context.Context) {
	for _, t := range i.all() {
		if ctx.Err() != nil {
			return
		}
		if err := i.maintainTenant(ctx, t); err != nil && ctx.Err() == nil {
			t.log.Error("maintenance", "err", err)
		}
	}
}

func (i *Ingester) maintainTenant(ctx context.Context, t *tenantDB) error {
	if t.sick() && !i.diskFull.Load() {
		if err := t.reopen(); err != nil {
			return err
		}
	}
	if !t.peek() {
		return nil
	}
	idle := i.cfg.IdleTimeout > 0 && i.now().UnixMilli()-t.lastWrite.Load() >= i.cfg.IdleTimeout.Milliseconds()
	err := func() error {
		defer t.release()
		if idle && t.db.Head().NumSeries() > 0 {
			if err := t.cut(ctx); err != nil {
				return err
			}
		}
		return t.ship(ctx)
	}()
	if err != nil || !idle {
		return err
	}
	return t.goDormant()
}

// Flush cuts every tenant's head into blocks and uploads all that is not in the
// bucket. It returns nil only if then all samples acknowledged before the call are
// in the bucket.
func (i *Ingester) Flush(ctx context.Context) error {
	var errs []error
	i.eachOpen(func(t *tenantDB) {
		if err := t.cut(ctx); err != nil {
			errs = append(errs, err)
			return
		}
		errs = append(errs, t.ship(ctx))
	})
	return errors.Join(errs...)
}

// watchDisk keeps diskFull up to date.
func (i *Ingester) watchDisk(ctx context.Context) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			i.checkDisk()
		}
	}
}

func (i *Ingester) checkDisk() {
	free, err := i.freeDisk(i.cfg.Dir)
	if err != nil {
		i.log.Warn("measuring free disk space", "dir", i.cfg.Dir, "err", err)
		return
	}
	full := free < i.cfg.MinFreeDisk
	if i.diskFull.Swap(full) == full {
		return
	}
	if full {
		i.log.Error("disk is full: writes are refused, reads go on", "dir", i.cfg.Dir, "free_bytes", free, "needed_bytes", i.cfg.MinFreeDisk)
	} else {
		i.log.Info("disk has room again: writes are taken", "dir", i.cfg.Dir, "free_bytes", free)
	}
}

// Close stops taking writes, waits for those under way and for open queries, and
// closes every tenant. What is not in the bucket yet stays on disk and is uploaded
// after the next start.
func (i *Ingester) Close() error {
	i.stopping.Store(true)
	i.stop()
	i.done.Wait()
	return i.closeAll()
}

func (i *Ingester) closeAll() error {
	var errs []error
	for _, t := range i.all() {
		errs = append(errs, t.close())
	}
	if i.lock != nil {
		errs = append(errs, i.lock.Release())
		i.lock = nil
	}
	return errors.Join(errs...)
}

// Gather returns TSDB's own metrics of every open tenant, each with the label tenant.
func (i *Ingester) Gather() ([]*dto.MetricFamily, error) {
	var gatherers prometheus.Gatherers
	i.eachOpen(func(t *tenantDB) {
		gatherers = append(gatherers, labelled{t.reg, t.name})
	})
	return gatherers.Gather()
}

// labelled adds the label tenant to what a registry gathers.
type labelled struct {
	reg    *prometheus.Registry
	tenant string
}

func (l labelled) Gather() ([]*dto.MetricFamily, error) {
	families, err := l.reg.Gather()
	label := &dto.LabelPair{Name: new("tenant"), Value: &l.tenant}
	for _, f := range families {
		for _, m := range f.Metric {
			m.Label = append(m.Label, label)
			slices.SortFunc(m.Label, func(a, b *dto.LabelPair) int { return strings.Compare(a.GetName(), b.GetName()) })
		}
	}
	return families, err
}
