package blocks

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/thanos-io/objstore"
	"golang.org/x/sync/errgroup"

	"github.com/varvedb/varve/pkg/series"
)

// listing is a tenant's blocks at one time. It does not change.
type listing struct {
	at     time.Time
	blocks []*block // by mint, what is set aside or coarse included
}

// use tells whether queries read the block, or miss it if it is set aside: coarse
// blocks and those long marked for deletion are left out.
func (l *lister) use(b *block, now time.Time) bool {
	return !b.coarse && (b.marked.IsZero() || now.Sub(b.marked) < l.cfg.DeletionDelay)
}

// lister knows the blocks of each tenant that is asked for.
type lister struct {
	cfg      Config
	bucket   objstore.BucketReader
	localDir string
	log      *slog.Logger
	now      func() time.Time
	failures prometheus.Counter // of readings
	damage   prometheus.Counter // found by queries

	life  context.Context // of readings, ended by stop
	stop  context.CancelFunc
	tasks sync.WaitGroup // readings
	slots chan struct{}  // of readings, whoever's they are

	mu      sync.Mutex // guards tenants, and the start of tasks against close
	tenants map[string]*tenantList
}

func newLister(cfg Config, opts Options, m *counters) *lister {
	l := &lister{
		cfg: cfg, bucket: opts.Bucket, localDir: opts.LocalDir, log: opts.Logger, now: opts.Now,
		failures: m.listFailures, damage: m.damage,
		slots:   make(chan struct{}, cfg.Concurrency),
		tenants: map[string]*tenantList{},
	}
	l.life, l.stop = context.WithCancel(context.Background())
	return l
}

// close ends all readings and waits for them.
func (l *lister) close() {
	l.mu.Lock()
	l.stop()
	l.mu.Unlock()
	l.tasks.Wait()
}

// tenantList is a tenant's list and its making.
type tenantList struct {
	name    string
	current atomic.Pointer[listing]
	lastUse atomic.Int64 // Unix ms
	// turn is held while the list is read anew. It guards failed and failure.
	turn    chan struct{}
	failed  time.Time
	failure error

	mu sync.Mutex // guards progress, and writes of current
	// progress is what readings that failed have inspected: a list of many blocks
	// takes more than one.
	progress map[ulid.ULID]*block
}

// empty tells whether nothing is known of the tenant that would be missed: it may
// be no more than a name that somebody made up.
func (t *tenantList) empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	current := t.current.Load()
	return (current == nil || len(current.blocks) == 0) && len(t.progress) == 0
}

// retryAfter is how long a failure to list answers for the next attempts: a query
// must not wait for a bucket that hung for the one before it.
const retryAfter = 5 * time.Second

// get returns the tenant's list, read anew if it is missing or overdue. While the
// bucket cannot be listed an older list serves, up to its bound.
func (l *lister) get(ctx context.Context, tenant string) (*listing, error) {
	t := l.tenant(tenant)
	current := t.current.Load()
	if current != nil && l.now().Sub(current.at) <= l.overdue(current) {
		return current, nil
	}
	err := l.refresh(ctx, t, false)
	current = t.current.Load()
	switch {
	case err == nil:
		return current, nil
	case current != nil && l.now().Sub(current.at) <= l.cfg.MaxListAge:
		return current, nil
	case current != nil:
		return nil, series.Errorf(series.Unavailable, "the list of blocks of tenant %s is of %s, older than %s, and cannot be read anew: %w",
			tenant, current.at.UTC().Format(time.RFC3339), l.cfg.MaxListAge, err)
	default:
		return nil, series.Errorf(series.Unavailable, "list blocks of tenant %s: %w", tenant, err)
	}
}

// overdue is the age beyond which a list is read anew before it answers. Empty lists
// are not kept up to date, so that they answer for less long.
func (l *lister) overdue(list *listing) time.Duration {
	if len(list.blocks) == 0 {
		return l.cfg.RefreshInterval
	}
	return 2 * l.cfg.RefreshInterval
}

// refresh reads the tenant's list anew, one reading at a time; who waited for another's
// success is content with it. Without force a failure of moments ago stands. The
// reading goes on when ctx ends: its result is the next caller's.
func (l *lister) refresh(ctx context.Context, t *tenantList, force bool) error {
	before := t.current.Load()
	if err := take(ctx, t.turn); err != nil {
		return err
	}
	if !force {
		if current := t.current.Load(); current != nil && (before == nil || current.at.After(before.at)) {
			<-t.turn
			return nil
		}
		if err := t.failure; err != nil && l.now().Sub(t.failed) < retryAfter {
			<-t.turn
			return err
		}
	}
	if err := take(ctx, l.slots); err != nil {
		<-t.turn
		return err
	}
	done := make(chan error, 1)
	l.start(func() {
		done <- l.attempt(t)
		<-l.slots
		<-t.turn
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// take puts a token into c.
func take(ctx context.Context, c chan struct{}) error {
	select {
	case c <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// start runs f in the background, or, when the lister is closed, at once: f ends soon
// then.
func (l *lister) start(f func()) {
	l.mu.Lock()
	closed := l.life.Err() != nil
	if !closed {
		l.tasks.Add(1)
	}
	l.mu.Unlock()
	if closed {
		f()
		return
	}
	go func() {
		defer l.tasks.Done()
		f()
	}()
}

// attempt reads the list within its time. The caller holds t's turn.
func (l *lister) attempt(t *tenantList) error {
	ctx, cancel := context.WithTimeout(l.life, l.cfg.RefreshTimeout)
	defer cancel()
	next, err := l.readList(ctx, t)
	switch {
	case l.life.Err() != nil:
		return series.Errorf(series.Unavailable, "list blocks: the store is closing")
	case err != nil:
		l.failures.Inc()
		t.failed, t.failure = l.now(), err
		return err
	}
	t.failure = nil
	l.publish(t, next)
	return nil
}

// readList makes the tenant's next list. What was whole before is not read again, and
// what was inspected before a failure is not inspected again. A block that cannot be
// inspected fails the list, as it would be missing in it.
func (l *lister) readList(ctx context.Context, t *tenantList) (*listing, error) {
	next := &listing{at: l.now()}
	var ids []ulid.ULID
	err := l.bucket.Iter(ctx, t.name+"/", func(name string) error {
		if id, err := ulid.ParseStrict(path.Base(name)); err == nil && strings.HasSuffix(name, "/") {
			ids = append(ids, id)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the bucket's folder %s: %w", t.name, err)
	}
	known := t.known()
	found := make([]*block, len(ids))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(l.cfg.Concurrency)
	for i, id := range ids {
		group.Go(func() error {
			b, err := l.look(ctx, t.name, id, known[id])
			if found[i] = b; b != nil {
				t.keep(b)
			}
			return err
		})
	}
	err = group.Wait()
	next.blocks = slices.DeleteFunc(found, func(b *block) bool { return b == nil })
	if err != nil {
		return nil, fmt.Errorf("after %d of %d blocks: %w", len(next.blocks), len(ids), err)
	}
	slices.SortFunc(next.blocks, func(a, b *block) int {
		if c := cmp.Compare(a.mint, b.mint); c != 0 {
			return c
		}
		return a.id.Compare(b.id)
	})
	return next, nil
}

// known is what the last list and later failed readings know of each block.
func (t *tenantList) known() map[ulid.ULID]*block {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := map[ulid.ULID]*block{}
	if last := t.current.Load(); last != nil {
		for _, b := range last.blocks {
			known[b.id] = b
		}
	}
	maps.Copy(known, t.progress)
	return known
}

// keep saves what a reading found out, for the case that it fails.
func (t *tenantList) keep(b *block) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.progress == nil {
		t.progress = map[ulid.ULID]*block{}
	}
	t.progress[b.id] = b
}

// publish makes next the current list. What queries found damaged stays set aside
// until its files change: an inspection does not see inside of them.
func (l *lister) publish(t *tenantList, next *listing) {
	t.mu.Lock()
	last := t.current.Load()
	aside := map[ulid.ULID]*block{}
	if last != nil {
		for _, b := range last.blocks {
			if b.why == reasonUnreadable || b.why == reasonDamaged {
				aside[b.id] = b
			}
		}
	}
	for i, b := range next.blocks {
		if was := aside[b.id]; was != nil && b.damage == nil && b.files == was.files {
			copied := *b
			copied.why, copied.damage = was.why, was.damage
			next.blocks[i] = &copied
		}
	}
	t.current.Store(next)
	t.progress = nil
	t.mu.Unlock()
	l.report(t.name, last, next)
}

// look brings what is known of one block up to date.
func (l *lister) look(ctx context.Context, tenant string, id ulid.ULID, known *block) (*block, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b := known
	if b == nil || b.damage != nil {
		var err error
		if b, err = l.inspect(ctx, tenant, id); b == nil || err != nil {
			return nil, err
		}
		if err := ctx.Err(); b.damage != nil && err != nil {
			return nil, err // what looks like damage may be the end of the time
		}
	} else if l.localDir == "" && l.now().Sub(b.checked) < l.cfg.MarkInterval {
		return b, nil
	}
	marked, err := l.marking(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	copied := *b
	copied.marked, copied.checked = marked, l.now()
	return &copied, nil
}

// report logs what the new list has set aside and the last one had not.
func (l *lister) report(tenant string, last, next *listing) {
	before := map[ulid.ULID]reason{}
	if last != nil {
		for _, b := range last.blocks {
			before[b.id] = b.why
		}
	}
	for _, b := range next.blocks {
		switch was := before[b.id]; {
		case b.why != "" && was != b.why:
			l.log.Error("block is set aside", "tenant", tenant, "block", b.id, "reason", b.why, "err", b.damage)
		case b.why == "" && was != "":
			l.log.Info("block is whole again", "tenant", tenant, "block", b.id)
		}
	}
}

// setAside marks a block of the current list in which a query found damage. It stays
// so until its files change.
func (l *lister) setAside(tenant string, id ulid.ULID, why reason, damage error) {
	t := l.tenant(tenant)
	t.mu.Lock()
	defer t.mu.Unlock()
	last := t.current.Load()
	if last == nil {
		return
	}
	i := slices.IndexFunc(last.blocks, func(b *block) bool { return b.id == id && b.damage == nil })
	if i < 0 {
		return // another query was first, or the block is gone
	}
	next := &listing{at: last.at, blocks: slices.Clone(last.blocks)}
	copied := *next.blocks[i]
	copied.why, copied.damage = why, damage
	next.blocks[i] = &copied
	t.current.Store(next)
	l.damage.Inc()
	l.report(t.name, last, next)
}
