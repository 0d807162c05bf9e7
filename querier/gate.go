package querier

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varvedb/varve/pkg/series"
)

// gate lets a bounded number of requests in at one time. Its queue is bounded by the
// time that a request may stand in it.
type gate struct {
	what    string
	slots   chan struct{}
	maxWait time.Duration
	waiting prometheus.Gauge
	refused prometheus.Counter
}

func newGate(what string, slots int, maxWait time.Duration, m *metrics) *gate {
	return &gate{
		what:    what,
		slots:   make(chan struct{}, slots),
		maxWait: maxWait,
		waiting: m.waiting.WithLabelValues(what),
		refused: m.refused.WithLabelValues(what),
	}
}

// enter waits for a slot, to be given back by leave. It fails when ctx ends or the
// wait takes too long.
func (g *gate) enter(ctx context.Context) error {
	select {
	case g.slots <- struct{}{}:
		return nil
	default:
	}
	g.waiting.Inc()
	defer g.waiting.Dec()
	timer := time.NewTimer(g.maxWait)
	defer timer.Stop()
	select {
	case g.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		g.refused.Inc()
		return series.Errorf(series.Unavailable, "%d %s are running, the most allowed, and none ended within %s", cap(g.slots), g.what, g.maxWait)
	}
}

func (g *gate) leave() { <-g.slots }
