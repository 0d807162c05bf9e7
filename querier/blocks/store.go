package blocks

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/thanos-io/objstore"

	"github.com/varvedb/varve/pkg/series"
)

// Options are what a Store needs of its surroundings.
type Options struct {
	Bucket objstore.BucketReader
	// LocalDir is the bucket's folder if it is one of this machine: blocks are then
	// read in place. Else empty, and Config.CacheDir is needed.
	LocalDir   string
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Now is the clock. Nil means time.Now.
	Now func() time.Time
}

// Store reads the blocks in a bucket.
type Store struct {
	cfg    Config
	lister *lister
	pool   *pool
	log    *slog.Logger

	stop context.CancelFunc
	done sync.WaitGroup
}

// Open makes a store and starts to keep its lists up to date. A list is read when its
// tenant is first asked for.
func Open(cfg Config, opts Options) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if opts.LocalDir == "" && cfg.CacheDir == "" {
		return nil, series.Errorf(series.Invalid, "blocks: the bucket is no local folder, and no folder for copies is given")
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	m := newCounters(opts.Registerer)
	s := &Store{cfg: cfg, log: opts.Logger}
	s.lister = newLister(cfg, opts, m)
	if err := s.openPool(opts, m); err != nil {
		return nil, err
	}
	if opts.Registerer != nil {
		opts.Registerer.MustRegister(&collector{s})
	}
	loop, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.done.Add(1)
	go func() { defer s.done.Done(); s.keepUpToDate(loop) }()
	return s, nil
}

func (s *Store) openPool(opts Options, m *counters) error {
	if opts.LocalDir != "" {
		s.pool = newPool(inPlace{opts.LocalDir, opts.Logger}, s.cfg, opts.Logger)
		return nil
	}
	dir, err := filepath.Abs(s.cfg.CacheDir)
	if err != nil {
		return fmt.Errorf("find cache of blocks: %w", err)
	}
	c := &copies{dir: dir, lister: s.lister, log: opts.Logger, downloads: m.downloads, failures: m.downloadFailures}
	s.pool = newPool(c, s.cfg, opts.Logger)
	return openCopies(c, s.pool.adopt)
}

// keepUpToDate refreshes the lists now and then, jittered by a tenth so that queriers
// of one cluster drift apart.
func (s *Store) keepUpToDate(ctx context.Context) {
	for {
		pause := s.cfg.RefreshInterval + time.Duration(rand.Int64N(int64(s.cfg.RefreshInterval)/10+1))
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		s.lister.refreshAll(ctx)
	}
}

// Refresh reads the tenant's list of blocks anew.
func (s *Store) Refresh(ctx context.Context, tenant string) error {
	return s.lister.refresh(ctx, s.lister.tenant(tenant), true)
}

// Blocks describes the tenant's blocks that queries read, by their start.
func (s *Store) Blocks(ctx context.Context, tenant string) ([]tsdb.BlockMeta, error) {
	l, err := s.lister.get(ctx, tenant)
	if err != nil {
		return nil, err
	}
	now := s.lister.now()
	metas := []tsdb.BlockMeta{}
	for _, b := range l.blocks {
		if b.damage == nil && s.lister.use(b, now) {
			metas = append(metas, b.meta.BlockMeta)
		}
	}
	return metas, nil
}

// Close stops the refreshing, waits for open queriers and closes all blocks.
func (s *Store) Close() error {
	s.stop()
	s.done.Wait()
	s.lister.close()
	s.pool.close()
	return nil
}

// Querier reads tenant's samples in [mint, maxt] from the blocks that are not in
// skip. Blocks are opened when they are needed.
func (s *Store) Querier(ctx context.Context, tenant string, mint, maxt int64, skip series.BlockSet) (storage.Querier, series.BlockSet, error) {
	plan, covered, err := s.plan(ctx, tenant, mint, maxt, skip)
	if err != nil {
		return nil, nil, err
	}
	if len(plan) == 0 {
		return storage.NoopQuerier(), nil, nil
	}
	return &sampleReader{newReader(s, tenant, mint, maxt, plan, tsdb.NewBlockQuerier)}, covered, nil
}

// ChunkQuerier is Querier for chunks as they are stored.
func (s *Store) ChunkQuerier(ctx context.Context, tenant string, mint, maxt int64, skip series.BlockSet) (storage.ChunkQuerier, series.BlockSet, error) {
	plan, covered, err := s.plan(ctx, tenant, mint, maxt, skip)
	if err != nil {
		return nil, nil, err
	}
	if len(plan) == 0 {
		return storage.NoopChunkedQuerier(), nil, nil
	}
	return &chunkReader{newReader(s, tenant, mint, maxt, plan, tsdb.NewBlockChunkQuerier)}, covered, nil
}

// plan chooses the blocks that a query of the range reads or misses.
func (s *Store) plan(ctx context.Context, tenant string, mint, maxt int64, skip series.BlockSet) (plan []*block, covered series.BlockSet, err error) {
	l, err := s.lister.get(ctx, tenant)
	if err != nil {
		return nil, nil, err
	}
	now := s.lister.now()
	for _, b := range l.blocks {
		if b.mint > maxt {
			break // by mint: nothing that follows overlaps
		}
		if !b.overlaps(mint, maxt) || skip.Has(b.id) || !s.lister.use(b, now) {
			continue
		}
		plan = append(plan, b)
		if b.damage == nil {
			if covered == nil {
				covered = series.BlockSet{}
			}
			covered[b.id] = struct{}{}
		}
	}
	return plan, covered, nil
}
