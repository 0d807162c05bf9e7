package distributor

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varvedb/varve/pkg/series"
)

// Appender is what the distributor needs of an ingester.
type Appender interface {
	// Append stores b for the tenant. Entries are in the order of the request and
	// a series may stand in several of them. Append adds what is stored and what
	// is refused to res, which it finds empty, and sets each Entry.Ref to the
	// reference to use next time.
	//
	// An error means that nothing of b counts as stored and is answered by its
	// series.Kind: Unavailable and Limited ask the sender to send all of it again.
	// Append must not keep any part of b after it returns; histograms, their
	// slices and strings are its own to keep.
	Append(ctx context.Context, tenant string, b *series.Batch, res *series.Appended) error
}

// Distributor takes writes. It is safe for concurrent use.
type Distributor struct {
	cfg      Config
	appender Appender
	now      func() time.Time
	logger   *slog.Logger
}

// New returns a Distributor that hands what it accepts to appender. Its metrics go
// to reg. now is the clock that timestamps and rates are held against.
func New(cfg Config, appender Appender, reg prometheus.Registerer, logger *slog.Logger, now func() time.Time) (*Distributor, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Distributor{cfg: cfg, appender: appender, now: now, logger: logger}, nil
}

// Register mounts the write endpoints: /api/v1/write and /api/v1/push for remote
// write, /otlp/v1/metrics and /api/v1/otlp/v1/metrics for OTLP.
func (d *Distributor) Register(mux *http.ServeMux) {
	mux.HandleFunc("/api/v1/write", d.serveRemoteWrite)
	mux.HandleFunc("/api/v1/push", d.serveRemoteWrite)
	mux.HandleFunc("/otlp/v1/metrics", d.serveOTLP)
	mux.HandleFunc("/api/v1/otlp/v1/metrics", d.serveOTLP)
}

// Run drops the caches of idle tenants until ctx ends, and returns nil.
func (d *Distributor) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (d *Distributor) serveRemoteWrite(w http.ResponseWriter, r *http.Request) {
	http.Error(w, "not built yet", http.StatusNotImplemented)
}

func (d *Distributor) serveOTLP(w http.ResponseWriter, r *http.Request) {
	http.Error(w, "not built yet", http.StatusNotImplemented)
}
