package distributor

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/varvedb/varve/pkg/series"
)

// inflight is the memory of all requests in hand, against one bound.
type inflight struct {
	used atomic.Int64
	max  int64
}

// reservation is one request's share of the memory in flight.
type reservation struct {
	of    *inflight
	taken int64
}

// grow takes n bytes more. An error is Unavailable: the memory comes back as soon
// as other requests end.
func (r *reservation) grow(n int) error {
	if r.of == nil {
		return nil
	}
	if used := r.of.used.Add(int64(n)); used > r.of.max {
		r.of.used.Add(-int64(n))
		return series.Errorf(series.Unavailable, "take %d bytes for a write: writes in hand use %d of %d bytes", n, used-int64(n), r.of.max)
	}
	r.taken += int64(n)
	return nil
}

func (r *reservation) release() {
	if r.of != nil {
		r.of.used.Add(-r.taken)
	}
	r.taken = 0
}

// bucket limits a tenant's samples per second. It may go into debt: a request is
// weighed after it has been let in, so that refusing costs nothing and no request
// is too large to pass.
type bucket struct {
	rate  float64 // samples per second, 0 for no limit
	burst float64

	mu     sync.Mutex
	tokens float64
	at     time.Time // when tokens was right
}

func newBucket(rate float64, burst int) *bucket {
	return &bucket{rate: rate, burst: float64(burst), tokens: float64(burst)}
}

// wait returns how long the tenant has to wait before it is out of debt.
func (b *bucket) wait(now time.Time) time.Duration {
	if b.rate <= 0 {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now)
	if b.tokens > 0 {
		return 0
	}
	seconds := (1 - b.tokens) / b.rate
	return time.Duration(min(math.Ceil(seconds), 3600)) * time.Second
}

// take charges n samples.
func (b *bucket) take(now time.Time, n int) {
	if b.rate <= 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill(now)
	b.tokens -= float64(n)
}

func (b *bucket) refill(now time.Time) {
	if b.at.IsZero() {
		b.at = now
	}
	if passed := now.Sub(b.at); passed > 0 {
		b.tokens = min(b.burst, b.tokens+passed.Seconds()*b.rate)
		b.at = now
	}
}
