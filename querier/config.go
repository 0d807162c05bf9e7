package querier

import (
	"time"

	"github.com/grafana/regexp"

	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// Config bounds what queries may take. Start from DefaultConfig.
type Config struct {
	// DefaultTenant is the tenant of requests without X-Scope-OrgID. Empty means
	// that the header is required.
	DefaultTenant string

	// Timeout is how long a query may run, its wait for a slot not counted. A request
	// may ask for less with its own parameter "timeout".
	Timeout time.Duration
	// MaxSamples bounds the samples that one PromQL query holds in memory at a time,
	// 16 bytes each.
	MaxSamples int
	// MaxConcurrent is the number of requests that read samples or series at one
	// time. Others wait.
	MaxConcurrent int
	// MaxWait is how long a request waits for its turn before it is answered 503.
	MaxWait time.Duration
	// LookbackDelta is how long a sample stays current for an instant selector.
	LookbackDelta time.Duration
	// MaxSeries bounds the series that /api/v1/series answers, MaxLabels the label
	// names or values of one answer. More is an error: an answer cut short without
	// being asked for would look complete. 0 is no bound.
	MaxSeries int
	MaxLabels int
	// MaxBodyBytes bounds the body of a POST.
	MaxBodyBytes int64
	// WriteTimeout is how long a client may read nothing of its answer before the
	// connection is cut and its slot freed. However it reads, its request ends after
	// some times Timeout: until then the ingester cannot drop what it reads.
	WriteTimeout time.Duration
	// StoreShare is the part of a query's time that the bucket may take. What is left
	// is for an answer without it, where one is allowed. 1 leaves nothing.
	StoreShare float64

	// RemoteReadSamples bounds the samples of one remote read that asks for samples,
	// RemoteReadConcurrent the remote reads at one time, RemoteReadFrameBytes the
	// frames of streamed chunks. RemoteReadSamples 0 is no bound.
	RemoteReadSamples    int
	RemoteReadConcurrent int
	RemoteReadFrameBytes int

	// IngesterHolds is how long samples are sure to be at the ingester. A query that
	// reaches no further back is answered, with a warning, while the bucket cannot
	// be listed. 0: every query needs the bucket.
	IngesterHolds time.Duration

	// StartTimestamps lets rate and its kin use start timestamps where samples have
	// them. A request chooses with the header X-Prometheus-Use-Start-Timestamps.
	StartTimestamps bool

	// CORSOrigin is a regular expression of the origins whose scripts may read
	// answers, anchored at both ends.
	CORSOrigin string
}

// DefaultConfig has Prometheus' own limits where it has one.
func DefaultConfig() Config {
	return Config{
		DefaultTenant:        tenant.Default,
		Timeout:              2 * time.Minute,
		MaxSamples:           50_000_000,
		MaxConcurrent:        20,
		MaxWait:              30 * time.Second,
		LookbackDelta:        5 * time.Minute,
		MaxSeries:            2_000_000,
		MaxLabels:            2_000_000,
		MaxBodyBytes:         10 << 20,
		WriteTimeout:         30 * time.Second,
		StoreShare:           .75,
		RemoteReadSamples:    50_000_000,
		RemoteReadConcurrent: 10,
		RemoteReadFrameBytes: 1 << 20,
		CORSOrigin:           ".*",
	}
}

// Validate names the first setting that cannot work.
func (c Config) Validate() error {
	if c.DefaultTenant != "" {
		if err := tenant.Validate(c.DefaultTenant); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name  string
		value int64
		least int64
	}{
		{"timeout", int64(c.Timeout), 1},
		{"max samples", int64(c.MaxSamples), 1},
		{"max concurrent", int64(c.MaxConcurrent), 1},
		{"max wait", int64(c.MaxWait), 0},
		{"lookback delta", int64(c.LookbackDelta), 1},
		{"max series", int64(c.MaxSeries), 0},
		{"max labels", int64(c.MaxLabels), 0},
		{"max body bytes", c.MaxBodyBytes, 1},
		{"write timeout", int64(c.WriteTimeout), 1},
		{"remote read samples", int64(c.RemoteReadSamples), 0},
		{"remote read concurrent", int64(c.RemoteReadConcurrent), 1},
		{"remote read frame bytes", int64(c.RemoteReadFrameBytes), 1},
		{"ingester holds", int64(c.IngesterHolds), 0},
	} {
		if f.value < f.least {
			return series.Errorf(series.Invalid, "querier: %s is %d, at least %d is needed", f.name, f.value, f.least)
		}
	}
	if !(c.StoreShare > 0 && c.StoreShare <= 1) {
		return series.Errorf(series.Invalid, "querier: store share is %g, more than 0 and at most 1 is needed", c.StoreShare)
	}
	if _, err := c.corsOrigin(); err != nil {
		return series.Errorf(series.Invalid, "querier: parse CORS origin %q: %w", c.CORSOrigin, err)
	}
	return nil
}

// corsOrigin compiles the origin in the form that Prometheus' CORS code knows.
func (c Config) corsOrigin() (*regexp.Regexp, error) {
	return regexp.Compile("^(?:" + c.CORSOrigin + ")$")
}
