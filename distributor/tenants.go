package distributor

import (
	"sync"
	"sync/atomic"
	"time"
)

// tenants holds what the distributor remembers of each tenant. All of it can be
// lost at any time: it costs time, and a rate limit its debt.
type tenants struct {
	make func(name string) *tenantState
	idle time.Duration
	max  int

	mu     sync.RWMutex
	byName map[string]*tenantState
}

type tenantState struct {
	name     string
	rate     *bucket
	cache    *labelCache
	families *families
	seen     atomic.Int64 // Unix milliseconds
}

func (t *tenants) get(name string, now time.Time) *tenantState {
	t.mu.RLock()
	s := t.byName[name]
	t.mu.RUnlock()
	if s == nil {
		s = t.add(name, now)
	}
	if ms := now.UnixMilli(); s.seen.Load() < ms {
		s.seen.Store(ms)
	}
	return s
}

func (t *tenants) add(name string, now time.Time) *tenantState {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.byName[name]; s != nil {
		return s
	}
	if len(t.byName) >= t.max {
		t.dropOldest()
	}
	s := t.make(name)
	s.seen.Store(now.UnixMilli())
	t.byName[name] = s
	return s
}

func (t *tenants) dropOldest() {
	var oldest *tenantState
	for _, s := range t.byName {
		if oldest == nil || s.seen.Load() < oldest.seen.Load() {
			oldest = s
		}
	}
	if oldest != nil {
		delete(t.byName, oldest.name)
		oldest.cache.close()
	}
}

// dropIdle forgets tenants that wrote nothing for a while, and returns how many.
func (t *tenants) dropIdle(now time.Time) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	dropped := 0
	for name, s := range t.byName {
		if now.UnixMilli()-s.seen.Load() > t.idle.Milliseconds() {
			delete(t.byName, name)
			s.cache.close()
			dropped++
		}
	}
	return dropped
}

// size returns the tenants known and what their caches hold.
func (t *tenants) size() (tenants, entries int, bytes int64) {
	t.mu.RLock()
	states := make([]*tenantState, 0, len(t.byName))
	for _, s := range t.byName {
		states = append(states, s)
	}
	t.mu.RUnlock()
	for _, s := range states {
		n, b := s.cache.size()
		entries += n
		bytes += b
	}
	return len(states), entries, bytes
}
