package blocks

import (
	"container/list"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/pkg/series"
)

// readable is an open block.
type readable interface {
	tsdb.BlockReader
	Close() error
}

// opener makes blocks readable: in place, or by a copy of the whole block. Ranged
// reads of index and chunks will be a third.
type opener interface {
	// size is about what the block's copy will take on disk, 0 if there will be none.
	size(meta *bucket.Meta) int64
	// open returns the block and the bytes that its copy takes on disk, 0 if there is
	// none. After an error there is none. Errors have a kind: Corrupt for the block's
	// own faults.
	open(ctx context.Context, tenant string, meta *bucket.Meta) (b readable, copied int64, err error)
	// detach takes the block's copy out of open's sight, to be removed by the function
	// returned. No reader of the copy is harmed.
	detach(tenant string, id ulid.ULID) (remove func())
}

type blockKey struct {
	tenant string
	id     ulid.ULID
}

// pool keeps blocks open while queries use them, and some longer. A block in use is
// never closed; one out of use goes when the pool is over a bound, the one longest
// out of use first.
type pool struct {
	opener   opener
	maxOpen  int
	maxBytes int64
	slots    chan struct{} // of opening
	log      *slog.Logger

	stop  context.CancelFunc // ends what is being opened
	life  context.Context
	tasks sync.WaitGroup

	mu      sync.Mutex // guards what follows, and entries
	entries map[blockKey]*entry
	idle    *list.List // of *entry without references, longest out of use first
	open    int
	bytes   int64
	closed  bool
	unused  *sync.Cond // no references are left
	refs    int
	// suspects are the blocks whose last copy was damaged.
	suspects map[blockKey]struct{}
}

// entry is a block that is open, or whose copy is on disk, or is being made so.
type entry struct {
	key     blockKey
	refs    int
	place   *list.Element // in idle, nil while in use
	block   readable      // nil while closed
	bytes   int64         // of its copy
	opening *opening
	// damaged entries are for those who use them already: for others the block is
	// opened anew.
	damaged atomic.Bool
	again   bool // the copy before this one was damaged
}

// opening is one attempt to open a block, shared by all that wait for it.
type opening struct {
	done    chan struct{}
	err     error
	waiters int
	cancel  context.CancelFunc
}

func newPool(o opener, cfg Config, log *slog.Logger) *pool {
	p := &pool{
		opener: o, maxOpen: cfg.MaxOpen, maxBytes: cfg.CacheBytes, log: log,
		slots:    make(chan struct{}, cfg.MaxDownloads),
		entries:  map[blockKey]*entry{},
		suspects: map[blockKey]struct{}{},
		idle:     list.New(),
	}
	p.unused = sync.NewCond(&p.mu)
	p.life, p.stop = context.WithCancel(context.Background())
	return p
}

// adopt takes charge of a copy that is on disk already.
func (p *pool) adopt(key blockKey, bytes int64) {
	p.mu.Lock()
	e := &entry{key: key, bytes: bytes}
	p.entries[key] = e
	e.place = p.idle.PushBack(e)
	p.bytes += bytes
	p.mu.Unlock()
	p.trim(0)
}

// acquire returns the block, open, to be released by the caller. Whoever waits with it
// for the same block may give up without harm to the others; the work is
// abandoned when all do.
func (p *pool) acquire(ctx context.Context, tenant string, meta *bucket.Meta) (*entry, error) {
	key := blockKey{tenant, meta.ULID}
	for {
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			return nil, series.Errorf(series.Unavailable, "open block %s: the store is closing", meta.ULID)
		}
		e := p.entries[key]
		if e == nil {
			e = &entry{key: key}
			p.entries[key] = e
		}
		p.retain(e)
		if e.block != nil {
			p.mu.Unlock()
			return e, nil
		}
		o := e.opening
		if o == nil {
			o = p.start(e, meta)
		}
		o.waiters++
		p.mu.Unlock()

		err := p.await(ctx, o)
		if err == nil {
			return e, nil
		}
		p.release(e)
		if ctx.Err() != nil || !errors.Is(err, context.Canceled) || p.life.Err() != nil {
			return nil, err
		}
		// The attempt was abandoned by others just before we joined it.
	}
}

func (p *pool) await(ctx context.Context, o *opening) error {
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if o.waiters--; o.waiters == 0 {
		o.cancel()
	}
	return ctx.Err()
}

// start begins to open e. The caller holds mu and a reference.
func (p *pool) start(e *entry, meta *bucket.Meta) *opening {
	ctx, cancel := context.WithCancel(p.life)
	o := &opening{done: make(chan struct{}), cancel: cancel}
	e.opening = o
	p.retain(e) // the task's own
	p.tasks.Add(1)
	go func() {
		defer p.tasks.Done()
		defer cancel()
		b, copied, err := p.load(ctx, e, meta)
		p.mu.Lock()
		e.opening = nil
		o.err = err
		p.bytes += copied - e.bytes
		e.bytes = copied
		if err == nil {
			e.block = b
			_, e.again = p.suspects[e.key]
			delete(p.suspects, e.key)
			p.open++
		}
		p.mu.Unlock()
		p.release(e) // those who wait have references of their own
		close(o.done)
	}()
	return o
}

// load opens e's block when its turn comes, and returns the bytes of e's copy.
func (p *pool) load(ctx context.Context, e *entry, meta *bucket.Meta) (readable, int64, error) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return nil, e.bytes, ctx.Err()
	}
	if e.bytes == 0 {
		p.trim(p.opener.size(meta))
	}
	return p.opener.open(ctx, e.key.tenant, meta)
}

// blame notes that a reader of e found damage, and takes e and its copy out of the
// sight of readers to come, if it is the first. own tells that the block itself must be
// to blame: it has no copy, or this is the second in a row that is damaged.
func (p *pool) blame(e *entry) (first, own bool) {
	if e.damaged.Swap(true) {
		return false, false
	}
	p.mu.Lock()
	own = e.bytes == 0 || e.again
	if !own {
		p.suspects[e.key] = struct{}{}
	}
	remove := p.opener.detach(e.key.tenant, e.key.id)
	p.bytes -= e.bytes
	e.bytes = 0
	p.forget(e)
	p.mu.Unlock()
	remove()
	return true, own
}

// forget drops e, but not what may have taken its place. The caller holds mu.
func (p *pool) forget(e *entry) {
	if p.entries[e.key] == e {
		delete(p.entries, e.key)
	}
}

// retain takes a reference. The caller holds mu.
func (p *pool) retain(e *entry) {
	e.refs++
	p.refs++
	if e.place != nil {
		p.idle.Remove(e.place)
		e.place = nil
	}
}

// release gives a reference back.
func (p *pool) release(e *entry) {
	p.mu.Lock()
	e.refs--
	p.refs--
	shut := func() {}
	switch {
	case e.refs > 0:
	case e.block == nil && e.bytes == 0:
		p.forget(e)
	case e.damaged.Load():
		shut = p.shut(e)
	default:
		e.place = p.idle.PushBack(e)
	}
	if p.refs == 0 {
		p.unused.Broadcast()
	}
	p.mu.Unlock()
	shut()
	p.trim(0)
}

// trim closes blocks and removes copies until the pool, with the extra bytes of a copy
// to come, is within its bounds, or all that is left is in use.
func (p *pool) trim(extra int64) {
	p.mu.Lock()
	var todo []func()
	for at := p.idle.Front(); at != nil; {
		e := at.Value.(*entry)
		at = at.Next()
		full := p.bytes+extra > p.maxBytes
		if !full && !p.closed && p.open <= p.maxOpen {
			break
		}
		todo = p.evict(e, full, todo)
	}
	p.mu.Unlock()
	for _, f := range todo {
		f()
	}
}

// evict closes e and, if the room is needed, removes its copy. What takes time is
// added to todo. The caller holds mu.
func (p *pool) evict(e *entry, copied bool, todo []func()) []func() {
	if copied && e.bytes == 0 && p.open <= p.maxOpen && !p.closed {
		return todo // it takes no room
	}
	if e.block != nil {
		todo = append(todo, p.shut(e))
	}
	if copied && e.bytes > 0 {
		todo = append(todo, p.opener.detach(e.key.tenant, e.key.id))
		p.bytes -= e.bytes
		e.bytes = 0
	}
	if e.bytes == 0 {
		p.idle.Remove(e.place)
		e.place = nil
		p.forget(e)
	}
	return todo
}

// shut makes e a closed entry; the function returned does the closing. The caller holds
// mu.
func (p *pool) shut(e *entry) func() {
	b := e.block
	e.block = nil
	p.open--
	return func() {
		if err := b.Close(); err != nil {
			p.log.Warn("close block", "tenant", e.key.tenant, "block", e.key.id, "err", err)
		}
	}
}

// close ends what is being opened, waits until no block is in use and closes all.
// Copies stay for the next start.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.stop()
	p.tasks.Wait()
	p.mu.Lock()
	for p.refs > 0 {
		p.unused.Wait()
	}
	p.mu.Unlock()
	p.trim(0)
}

// usage returns how many blocks are open and the bytes of all copies.
func (p *pool) usage() (open int, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open, p.bytes
}
