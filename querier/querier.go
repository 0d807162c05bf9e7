package querier

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/route"
	promconfig "github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/features"
	"github.com/prometheus/prometheus/util/notifications"
	v1 "github.com/prometheus/prometheus/web/api/v1"
)

// APIVersion is the version of Prometheus whose HTTP API and PromQL this is. Clients
// choose by it what they ask for.
const APIVersion = "3.16.0"

// BuildInfo says what program this is.
type BuildInfo struct {
	Version   string // of Varve
	Revision  string
	Branch    string
	BuildUser string
	BuildDate string
}

// Options are what a Querier needs of its surroundings.
type Options struct {
	// Recent is the ingester, asked first.
	Recent Recent
	// Bucket answers for the blocks that the ingester does not have. Nil: none.
	Bucket Store
	Logger *slog.Logger
	// Registerer takes the querier's and the PromQL engine's metrics; nil drops them.
	Registerer prometheus.Registerer
	// Gatherer is what /api/v1/status/self_metrics shows. Nil: nothing.
	Gatherer prometheus.Gatherer
	// Now is the clock. Nil means time.Now.
	Now func() time.Time
	// Build, Flags and ConfigYAML are shown below /api/v1/status.
	Build      BuildInfo
	Flags      map[string]string
	ConfigYAML string
}

// Querier answers Prometheus' HTTP API.
type Querier struct {
	cfg     Config
	opts    Options
	log     *slog.Logger
	now     func() time.Time
	started time.Time
	metrics *metrics

	stores *fanout
	engine *promql.Engine
	parser parser.Parser
	api    *v1.API

	queries   *gate
	reads     *gate
	endpoints map[string]*endpoint
}

// New makes a querier. It starts nothing: there is nothing to close.
func New(cfg Config, opts Options) (*Querier, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Gatherer == nil {
		opts.Gatherer = prometheus.NewRegistry()
	}
	q := &Querier{cfg: cfg, opts: opts, log: opts.Logger, now: opts.Now, started: opts.Now(), metrics: newMetrics(opts.Registerer)}
	q.stores = &fanout{recent: opts.Recent, bucket: opts.Bucket, cfg: cfg, now: opts.Now, m: q.metrics}
	q.parser = parser.NewParser(parser.Options{
		// On, as a stored dashboard or rule may use them; they change nothing else.
		EnableExperimentalFunctions: true,
		EnableBinopFillModifiers:    true,
	})
	registry := features.NewRegistry()
	q.engine = promql.NewEngine(q.engineOptions(registry))
	q.queries = newGate("queries", cfg.MaxConcurrent, cfg.MaxWait, q.metrics)
	q.reads = newGate("remote reads", cfg.RemoteReadConcurrent, cfg.MaxWait, q.metrics)
	var err error
	if q.api, err = q.newAPI(registry); err != nil {
		return nil, err
	}
	router := route.New()
	q.api.Register(router)
	q.endpoints = q.routes(router)
	return q, nil
}

// Engine evaluates PromQL. Its queries are bounded by samples and time; the number
// of them at a time is bounded where they come in, over HTTP.
func (q *Querier) Engine() *promql.Engine { return q.engine }

// Queryable reads from all stores. The contexts of its queries name the tenant.
func (q *Querier) Queryable() storage.SampleAndChunkQueryable { return q.stores }

// subqueryStep is the step of subqueries that name none: Prometheus' default evaluation
// interval, in ms.
const subqueryStep = 60_000

func (q *Querier) engineOptions(registry features.Collector) promql.EngineOpts {
	return promql.EngineOpts{
		Logger:                   q.log,
		Reg:                      q.opts.Registerer,
		MaxSamples:               q.cfg.MaxSamples,
		Timeout:                  q.cfg.Timeout,
		LookbackDelta:            q.cfg.LookbackDelta,
		NoStepSubqueryIntervalFn: func(int64) int64 { return subqueryStep },
		EnableAtModifier:         true,
		EnableNegativeOffset:     true,
		EnablePerStepStats:       true,
		EnableDelayedNameRemoval: false, // as in Prometheus, where it is a feature flag
		UseStartTimestamps:       q.cfg.StartTimestamps,
		FeatureRegistry:          registry,
		Parser:                   q.parser,
	}
}

// newAPI makes Prometheus' API over the stores. What needs a tenant but gets no
// request there (metadata, TSDB status) is answered by endpoints of our own.
func (q *Querier) newAPI(registry features.Collector) (*v1.API, error) {
	origin, err := q.cfg.corsOrigin()
	if err != nil {
		return nil, fmt.Errorf("parse CORS origin: %w", err)
	}
	return v1.NewAPI(
		q.engine,
		q.stores,
		nil, // appender: writes are not the querier's
		q.stores,
		func(context.Context) v1.ScrapePoolsRetriever { return nothing{} },
		func(context.Context) v1.TargetRetriever { return nothing{} },
		func(context.Context) v1.AlertmanagerRetriever { return nothing{} },
		func() promconfig.Config { return promconfig.DefaultConfig },
		q.flags(),
		v1.GlobalURLOptions{},
		func(h http.HandlerFunc) http.HandlerFunc { return h }, // stores say themselves that they are not ready
		admin{},
		"",
		false, // admin API
		false, // search API
		0,
		q.log,
		func(context.Context) v1.RulesRetriever { return nothing{} },
		q.cfg.RemoteReadSamples,
		q.cfg.RemoteReadConcurrent,
		q.cfg.RemoteReadFrameBytes,
		false, // agent
		origin,
		q.runtimeInfo,
		&v1.PrometheusVersion{Version: APIVersion},
		func() []notifications.Notification { return []notifications.Notification{} },
		func() (<-chan notifications.Notification, func(), bool) { return nil, nil, false },
		q.opts.Gatherer,
		q.opts.Registerer,
		nil,   // stats renderer
		false, // remote write
		nil,
		false, false, false, // OTLP
		q.cfg.LookbackDelta,
		false, // type and unit labels
		false, // append metadata
		overrideStatus,
		registry,
		v1.OpenAPIOptions{Version: APIVersion},
		q.parser,
		false, // query cost
		q.cfg.Timeout,
	), nil
}

func (q *Querier) flags() map[string]string {
	if q.opts.Flags == nil {
		return map[string]string{}
	}
	return q.opts.Flags
}

func (q *Querier) runtimeInfo() (v1.RuntimeInfo, error) {
	dir, err := os.Getwd()
	if err != nil {
		return v1.RuntimeInfo{}, fmt.Errorf("find working directory: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return v1.RuntimeInfo{}, fmt.Errorf("find host name: %w", err)
	}
	return v1.RuntimeInfo{
		StartTime:           q.started,
		CWD:                 dir,
		Hostname:            host,
		ServerTime:          q.now().UTC(),
		ReloadConfigSuccess: true,
		LastConfigTime:      q.started,
		GoroutineCount:      runtime.NumGoroutine(),
		GOMAXPROCS:          runtime.GOMAXPROCS(0),
		GOMEMLIMIT:          debug.SetMemoryLimit(-1),
		GOGC:                os.Getenv("GOGC"),
		GODEBUG:             os.Getenv("GODEBUG"),
	}, nil
}
