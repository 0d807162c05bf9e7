package distributor

import (
	"bytes"
	"sync"
	"sync/atomic"

	"github.com/varvedb/varve/pkg/series"
)

// labelCache remembers, for label runs as they were sent, what the slow way found
// out about them: the canonical form or a verdict, and the appender's reference.
// It is bounded, and safe for concurrent use.
//
// A look-up first tries the entry that followed the entry before the last time:
// senders keep the order of their series, and comparing bytes is a third of what
// hashing them and missing the CPU's caches in a map costs. The bytes are always
// compared: a hash never stands for a series.
type labelCache struct {
	hash   func([]byte) uint64
	shards []cacheShard
}

// cacheEntry is immutable but for its atomics.
type cacheEntry struct {
	raw     []byte            // the run as it was sent: the key
	labels  series.LabelBytes // nil where verdict is set; may share raw's memory
	verdict *verdict

	next atomic.Pointer[cacheEntry] // what followed last time
	used atomic.Bool                // since the clock's hand passed
	dead atomic.Bool                // no longer in the cache, or never was

	// The reference. Written under the shard's lock, version being odd meanwhile.
	version, epoch, id atomic.Uint64

	family atomic.Pointer[family] // what its metadata said last

	hash  uint64
	chain *cacheEntry // entries with the same hash, under the shard's lock
	size  int64
}

// cacheShard is a part of the cache: the entries of some hashes, evicted by a
// clock. A sweep passes over an entry that was used since the sweep before it, so
// series that are written again and again outlive any number that come once.
type cacheShard struct {
	budget *cacheBudget // shared by the caches of all tenants; nil for none

	mu      sync.Mutex
	entries map[uint64]*cacheEntry
	ring    []*cacheEntry
	hand    int
	bytes   int64

	maxEntries int
	maxBytes   int64
	closed     bool // nothing is kept any more
}

// cacheBudget bounds the label caches of all tenants together. A tenant that finds it
// used up evicts entries of its own, and keeps nothing where it has none.
type cacheBudget struct {
	used atomic.Int64
	max  int64
}

func (b *cacheBudget) add(n int64) {
	if b != nil {
		b.used.Add(n)
	}
}

func (b *cacheBudget) lacks(n int64) bool { return b != nil && b.used.Load()+n > b.max }

const (
	cacheShards = 32
	// smallCache is the size below which one shard serves, so that small bounds
	// are exact.
	smallCache = 64 << 10
	// entryOverhead is what an entry costs beside its label bytes: the struct, its
	// place in map and ring, allocation classes.
	entryOverhead = 240
	// maxCachedRun bounds one entry: bytes that may be a fault of their own are
	// not worth keeping.
	maxCachedRun = 64 << 10
)

func newLabelCache(maxEntries int, maxBytes int64, hash func([]byte) uint64) *labelCache {
	n := cacheShards
	if maxEntries < smallCache {
		n = 1
	}
	c := &labelCache{hash: hash, shards: make([]cacheShard, n)}
	for i := range c.shards {
		c.shards[i].maxEntries = max(1, maxEntries/n)
		c.shards[i].maxBytes = maxBytes / int64(n)
	}
	return c
}

// share puts the cache under a budget that it has in common with others.
func (c *labelCache) share(b *cacheBudget) *labelCache {
	for i := range c.shards {
		c.shards[i].budget = b
	}
	return c
}

// close gives back what the cache holds of the budget. Requests under way may go on
// using it; nothing they insert is kept.
func (c *labelCache) close() {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.budget.add(-s.bytes)
		s.entries, s.ring, s.bytes, s.closed = nil, nil, 0, true
		s.mu.Unlock()
	}
}

// following returns the entry predicted to come after prev, if it is run's.
func following(prev *cacheEntry, run []byte) *cacheEntry {
	if prev == nil {
		return nil
	}
	e := prev.next.Load()
	if e == nil || !bytes.Equal(e.raw, run) || e.dead.Load() {
		return nil
	}
	e.touch()
	return e
}

// follow predicts that next comes after prev.
func follow(prev, next *cacheEntry) {
	if prev != nil && prev.next.Load() != next && !prev.dead.Load() && !next.dead.Load() {
		prev.next.Store(next)
	}
}

func (e *cacheEntry) touch() {
	if !e.used.Load() { // a store would take the line from other cores each time
		e.used.Store(true)
	}
}

// find returns the entry of run, whose hash is h, or nil.
func (c *labelCache) find(h uint64, run []byte) *cacheEntry {
	s := c.shard(h)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(h, run)
	if e != nil {
		e.touch()
	}
	return e
}

// insert keeps a copy of what is known about run and returns its entry, or the
// entry that another request inserted meanwhile. Where there is no room for it the
// entry is good for this request alone.
func (c *labelCache) insert(h uint64, run []byte, labels series.LabelBytes, v *verdict) *cacheEntry {
	e := newCacheEntry(h, run, labels, v)
	s := c.shard(h)
	if len(run) > maxCachedRun || e.size > s.maxBytes {
		e.dead.Store(true)
		return e
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other := s.find(h, run); other != nil {
		return other
	}
	if !s.insert(e) {
		e.dead.Store(true)
	}
	return e
}

func newCacheEntry(h uint64, run []byte, labels series.LabelBytes, v *verdict) *cacheEntry {
	e := &cacheEntry{hash: h, raw: bytes.Clone(run), verdict: v}
	e.size = int64(len(run)) + entryOverhead
	switch {
	case v != nil:
		e.size += int64(len(v.message)) + 48
	case bytes.Equal(labels, run):
		e.labels = e.raw
	default:
		e.labels = bytes.Clone(labels)
		e.size += int64(len(labels))
	}
	return e
}

func (c *labelCache) shard(h uint64) *cacheShard {
	return &c.shards[h>>32%uint64(len(c.shards))]
}

// size returns the entries and bytes held.
func (c *labelCache) size() (entries int, bytes int64) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		entries += len(s.ring)
		bytes += s.bytes
		s.mu.Unlock()
	}
	return entries, bytes
}

func (s *cacheShard) find(h uint64, run []byte) *cacheEntry {
	for e := s.entries[h]; e != nil; e = e.chain {
		if bytes.Equal(e.raw, run) {
			return e
		}
	}
	return nil
}

// insert keeps e, if there is room once others have made way.
func (s *cacheShard) insert(e *cacheEntry) bool {
	for len(s.ring) > 0 && (len(s.ring) >= s.maxEntries || s.bytes+e.size > s.maxBytes || s.budget.lacks(e.size)) {
		s.evict()
	}
	if s.closed || s.budget.lacks(e.size) {
		return false
	}
	s.budget.add(e.size)
	if s.entries == nil {
		s.entries = make(map[uint64]*cacheEntry)
	}
	e.chain = s.entries[e.hash]
	s.entries[e.hash] = e
	s.bytes += e.size
	// Behind the hand, so that it comes round to e last.
	s.ring = append(s.ring, e)
	if s.hand < len(s.ring)-1 {
		last := len(s.ring) - 1
		s.ring[s.hand], s.ring[last] = e, s.ring[s.hand]
		s.hand++
	}
	return true
}

// evict drops the first entry from the hand on that was not used since the hand
// passed it last. Requests go on using entries meanwhile, so after one round any
// entry will do.
func (s *cacheShard) evict() {
	for range len(s.ring) + 1 {
		if s.hand >= len(s.ring) {
			s.hand = 0
		}
		if !s.ring[s.hand].used.Swap(false) {
			break
		}
		s.hand++
	}
	if s.hand >= len(s.ring) {
		s.hand = 0
	}
	e := s.ring[s.hand]
	last := len(s.ring) - 1
	s.ring[s.hand] = s.ring[last]
	s.ring[last] = nil
	s.ring = s.ring[:last]
	s.unlink(e)
	s.bytes -= e.size
	s.budget.add(-e.size)
	// Whoever predicted e may hold it a while longer; it must not hold a chain of
	// entries in turn.
	e.dead.Store(true)
	e.next.Store(nil)
}

func (s *cacheShard) unlink(e *cacheEntry) {
	first := s.entries[e.hash]
	if first == e {
		if e.chain == nil {
			delete(s.entries, e.hash)
		} else {
			s.entries[e.hash] = e.chain
		}
		return
	}
	for p := first; p != nil; p = p.chain {
		if p.chain == e {
			p.chain = e.chain
			return
		}
	}
}

// ref returns the appender's reference, zero where there is none or where it is
// just being written: its two parts must never come from two references.
func (e *cacheEntry) ref() series.Ref {
	version := e.version.Load()
	r := series.Ref{Epoch: e.epoch.Load(), ID: e.id.Load()}
	if version%2 != 0 || e.version.Load() != version {
		return series.Ref{}
	}
	return r
}

// setRef keeps the reference for the next request.
func (c *labelCache) setRef(e *cacheEntry, r series.Ref) {
	s := c.shard(e.hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	e.version.Add(1)
	e.epoch.Store(r.Epoch)
	e.id.Store(r.ID)
	e.version.Add(1)
}
