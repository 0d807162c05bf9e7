package distributor

import (
	"context"
	"hash/maphash"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"

	"github.com/varvedb/varve/pkg/series"
)

const nameLabel = model.MetricNameLabel

// Appender is what the distributor needs of an ingester.
type Appender interface {
	// Append stores b for the tenant. Entries are in the order of the request and
	// a series may stand in several of them. Append adds what is stored and what
	// is refused to res, which it finds empty, and sets each Entry.Ref to the
	// reference to use next time. Every sample of b is either stored or refused.
	//
	// An error means that nothing of b counts as stored and is answered by its
	// series.Kind: Unavailable and Limited ask the sender to send all of it again.
	// Append must not keep any part of b after it returns; histograms, their
	// slices and strings are its own to keep.
	Append(ctx context.Context, tenant string, b *series.Batch, res *series.Appended) error
}

// Distributor takes writes. It is safe for concurrent use.
//
//	HTTP -> admit -> read, decompress -> scan -> look up labels, check -> Appender
type Distributor struct {
	cfg      Config
	appender Appender
	now      func() time.Time
	logger   *slog.Logger
	metrics  *metrics
	tenants  tenants
	inflight inflight
	requests sync.Pool // of *request
	otlp     otlpDecoder
}

// New returns a Distributor that hands what it accepts to appender. Its metrics go
// to reg. now is the clock that timestamps and rates are held against.
func New(cfg Config, appender Appender, reg prometheus.Registerer, logger *slog.Logger, now func() time.Time) (*Distributor, error) {
	// Seeded, so that nobody can prepare label sets that collide.
	seed := maphash.MakeSeed()
	return newDistributor(cfg, appender, reg, logger, now, func(b []byte) uint64 { return maphash.Bytes(seed, b) })
}

func newDistributor(cfg Config, appender Appender, reg prometheus.Registerer, logger *slog.Logger, now func() time.Time, hash func([]byte) uint64) (*Distributor, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := &Distributor{cfg: cfg, appender: appender, now: now, logger: logger}
	d.inflight.max = cfg.MaxInflightBytes
	budget := &cacheBudget{max: cfg.CacheBytes}
	d.tenants = tenants{
		idle: cfg.TenantIdle, max: cfg.MaxTenants, byName: make(map[string]*tenantState),
		make: func(name string) *tenantState {
			return &tenantState{
				name:     name,
				rate:     newBucket(cfg.SampleRate, cfg.SampleBurst),
				cache:    newLabelCache(cfg.CacheSeries, cfg.CacheBytes, hash).share(budget),
				families: &families{max: cfg.MaxMetadataFamilies, maxHelp: cfg.MaxMetadataHelpBytes, maxFamily: cfg.MaxLabelValueBytes},
			}
		},
	}
	var err error
	if d.metrics, err = newMetrics(reg, d); err != nil {
		return nil, err
	}
	return d, nil
}

// Register mounts the write endpoints: /api/v1/write and /api/v1/push for remote
// write, /otlp/v1/metrics and /api/v1/otlp/v1/metrics for OTLP.
func (d *Distributor) Register(mux *http.ServeMux) {
	mux.HandleFunc("/api/v1/write", d.serveRemoteWrite)
	mux.HandleFunc("/api/v1/push", d.serveRemoteWrite)
	mux.HandleFunc("/otlp/v1/metrics", d.serveOTLP)
	mux.HandleFunc("/api/v1/otlp/v1/metrics", d.serveOTLP)
}

// Run forgets tenants that have been idle until ctx ends, and returns nil.
func (d *Distributor) Run(ctx context.Context) error {
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if n := d.DropIdle(); n > 0 {
				d.logger.Info("idle tenants forgotten", slog.Int("tenants", n))
			}
		}
	}
}

// DropIdle forgets tenants that wrote nothing for Config.TenantIdle, and returns
// how many. Run calls it every minute.
func (d *Distributor) DropIdle() int { return d.tenants.dropIdle(d.now()) }
