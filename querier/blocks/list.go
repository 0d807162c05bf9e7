package blocks

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
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
	failures prometheus.Counter

	mu      sync.Mutex // guards tenants
	tenants map[string]*tenantList
}

// tenantList is a tenant's list and its making.
type tenantList struct {
	name    string
	current atomic.Pointer[listing]
	lastUse atomic.Int64 // Unix ms
	// turn is held by who reads the list anew. It guards failed and failure.
	turn    chan struct{}
	failed  time.Time
	failure error
}

// retryAfter is how long a failure to list answers for the next attempts: a query
// must not wait for a bucket that hung for the one before it.
const retryAfter = 5 * time.Second

func (l *lister) tenant(name string) *tenantList {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.tenants[name]
	if t == nil {
		t = &tenantList{name: name, turn: make(chan struct{}, 1)}
		l.tenants[name] = t
	}
	t.lastUse.Store(l.now().UnixMilli())
	return t
}

// get returns the tenant's list, read anew if it is missing or overdue. While the
// bucket cannot be listed an older list serves, up to its bound.
func (l *lister) get(ctx context.Context, tenant string) (*listing, error) {
	t := l.tenant(tenant)
	current := t.current.Load()
	if current != nil && l.now().Sub(current.at) <= 2*l.cfg.RefreshInterval {
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

// refresh reads the tenant's list anew, one caller at a time; who waited for another's
// success is content with it. Without force a failure of moments ago stands.
func (l *lister) refresh(ctx context.Context, t *tenantList, force bool) error {
	before := t.current.Load()
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if !force {
		if t.current.Load() != before {
			return nil
		}
		if t.failure != nil && l.now().Sub(t.failed) < retryAfter {
			return t.failure
		}
	}
	bounded, cancel := context.WithTimeout(ctx, l.cfg.RefreshTimeout)
	defer cancel()
	next, err := l.readList(bounded, t)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err() // the caller's end is no failure of the bucket
		}
		l.failures.Inc()
		t.failed, t.failure = l.now(), err
		return err
	}
	t.failure = nil
	l.report(t.name, t.current.Swap(next), next)
	return nil
}

// readList makes the tenant's next list. What was whole before is not read again; a
// block that cannot be inspected fails the list, as it would be missing in it.
func (l *lister) readList(ctx context.Context, t *tenantList) (*listing, error) {
	next := &listing{at: l.now()}
	known := map[ulid.ULID]*block{}
	if last := t.current.Load(); last != nil {
		for _, b := range last.blocks {
			known[b.id] = b
		}
	}
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
	found := make([]*block, len(ids))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(l.cfg.Concurrency)
	for i, id := range ids {
		group.Go(func() error {
			b, err := l.look(ctx, t.name, id, known[id])
			found[i] = b
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for _, b := range found {
		if b != nil {
			next.blocks = append(next.blocks, b)
		}
	}
	slices.SortFunc(next.blocks, func(a, b *block) int {
		if c := cmp.Compare(a.mint, b.mint); c != 0 {
			return c
		}
		return a.id.Compare(b.id)
	})
	return next, nil
}

// look brings what is known of one block up to date.
func (l *lister) look(ctx context.Context, tenant string, id ulid.ULID, known *block) (*block, error) {
	b := known
	if b == nil || b.damage != nil {
		var err error
		if b, err = l.inspect(ctx, tenant, id); b == nil || err != nil {
			return nil, err
		}
		if known != nil && known.why == reasonUnreadable && b.damage == nil && b.files == known.files {
			b.why, b.damage = known.why, known.damage
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

// setAside marks a block of the current list that proved unreadable. It stays so until
// its files change.
func (l *lister) setAside(t *tenantList, id ulid.ULID, damage error) {
	for {
		last := t.current.Load()
		if last == nil {
			return
		}
		next := &listing{at: last.at, blocks: slices.Clone(last.blocks)}
		for i, b := range next.blocks {
			if b.id == id {
				copied := *b
				copied.why, copied.damage = reasonUnreadable, damage
				next.blocks[i] = &copied
			}
		}
		if t.current.CompareAndSwap(last, next) {
			l.report(t.name, last, next)
			return
		}
	}
}

// refreshAll brings all lists that are in use up to date, and forgets the others.
func (l *lister) refreshAll(ctx context.Context) {
	l.mu.Lock()
	var due []*tenantList
	for name, t := range l.tenants {
		if l.now().UnixMilli()-t.lastUse.Load() > l.cfg.TenantIdle.Milliseconds() {
			delete(l.tenants, name)
			continue
		}
		due = append(due, t)
	}
	l.mu.Unlock()
	for _, t := range due {
		if ctx.Err() != nil {
			return
		}
		if err := l.refresh(ctx, t, true); err != nil && ctx.Err() == nil {
			l.log.Warn("list of blocks cannot be read anew", "tenant", t.name, "err", err)
		}
	}
}
