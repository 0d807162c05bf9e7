package distributor

import (
	"slices"
	"time"

	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// Config says what a Distributor accepts. All bounds are hard: no request can make
// it use more.
type Config struct {
	// DefaultTenant is the tenant of requests without X-Scope-OrgID. Empty means
	// that the header is required.
	DefaultTenant string

	// MaxBodyBytes bounds a request's body as it travels, compressed.
	MaxBodyBytes int
	// MaxDecodedBytes bounds the same body decompressed; a snappy body that
	// declares more is refused before anything is allocated for it.
	MaxDecodedBytes int
	// MaxRequestBytes bounds the memory that the decoded samples, labels and
	// exemplars of one request take. It is a multiple of MaxDecodedBytes, as a
	// message of many empty parts takes more room decoded than it did on the wire.
	MaxRequestBytes int
	// MaxInflightBytes bounds the memory of all requests that are being decoded
	// and appended at one time. Above it requests are answered 503 at once.
	MaxInflightBytes int64
	// RetryAfter is what a 503 tells the sender to wait, in whole seconds.
	RetryAfter time.Duration

	// MaxLabels bounds the labels of a series, the metric name included. A DCGM
	// exporter on Kubernetes passes 30.
	MaxLabels int
	// MaxLabelNameBytes bounds a label name, MaxLabelValueBytes a label value,
	// both in bytes. The metric name counts as a value.
	MaxLabelNameBytes  int
	MaxLabelValueBytes int

	// FutureTolerance is how far ahead of this machine's clock a timestamp may be.
	FutureTolerance time.Duration

	// SampleRate limits each tenant's samples per second on average, SampleBurst
	// is what it may take at once. A rate of 0 means no limit. A request is let in
	// whole while the tenant is not in debt, so that none is too large to ever pass.
	SampleRate  float64
	SampleBurst int

	// Exemplars tells whether exemplars are kept. If not, they are dropped and
	// counted.
	Exemplars bool
	// MaxMetadataHelpBytes is where a metric's help text is cut.
	MaxMetadataHelpBytes int
	// MaxMetadataFamilies bounds the metric families per tenant whose metadata is
	// remembered between requests.
	MaxMetadataFamilies int

	// CacheSeries bounds the label cache of each tenant, CacheBytes those of all
	// tenants together. A tenant
	// with more active series than this pays for parsing and checking the labels
	// of its series again and again, some microseconds each.
	CacheSeries int
	CacheBytes  int64
	// TenantIdle is how long a tenant may write nothing before its cache is
	// dropped. MaxTenants bounds the tenants that are remembered at all.
	TenantIdle time.Duration
	MaxTenants int

	// PromoteResourceAttributes are the OTLP resource attributes that become
	// labels of every series of the resource; all others stay on target_info.
	PromoteResourceAttributes []string
}

// DefaultConfig returns the configuration of the single binary.
func DefaultConfig() Config {
	return Config{
		DefaultTenant:        tenant.Default,
		MaxBodyBytes:         16 << 20,
		MaxDecodedBytes:      32 << 20,
		MaxRequestBytes:      256 << 20,
		MaxInflightBytes:     1 << 30,
		RetryAfter:           5 * time.Second,
		MaxLabels:            256,
		MaxLabelNameBytes:    1024,
		MaxLabelValueBytes:   8 << 10,
		FutureTolerance:      10 * time.Minute,
		Exemplars:            true,
		MaxMetadataHelpBytes: 1024,
		MaxMetadataFamilies:  20_000,
		CacheSeries:          2_000_000,
		CacheBytes:           1 << 30,
		TenantIdle:           time.Hour,
		MaxTenants:           10_000,
		PromoteResourceAttributes: []string{
			"host.name", "k8s.node.name", "k8s.cluster.name", "k8s.namespace.name", "k8s.pod.name",
		},
	}
}

// Validate reports the first setting that cannot work.
func (c Config) Validate() error {
	if c.DefaultTenant != "" {
		if err := tenant.Validate(c.DefaultTenant); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"max body bytes", int64(c.MaxBodyBytes)},
		{"max decoded bytes", int64(c.MaxDecodedBytes)},
		{"max request bytes", int64(c.MaxRequestBytes)},
		{"max in-flight bytes", c.MaxInflightBytes},
		{"retry after", int64(c.RetryAfter)},
		{"max labels", int64(c.MaxLabels)},
		{"max label name bytes", int64(c.MaxLabelNameBytes)},
		{"max label value bytes", int64(c.MaxLabelValueBytes)},
		{"max metadata help bytes", int64(c.MaxMetadataHelpBytes)},
		{"max metadata families", int64(c.MaxMetadataFamilies)},
		{"cache series", int64(c.CacheSeries)},
		{"cache bytes", c.CacheBytes},
		{"tenant idle", int64(c.TenantIdle)},
		{"max tenants", int64(c.MaxTenants)},
	} {
		if f.value <= 0 {
			return series.Errorf(series.Invalid, "distributor: %s is %d, must be positive", f.name, f.value)
		}
	}
	switch {
	case c.FutureTolerance < 0:
		return series.Errorf(series.Invalid, "distributor: future tolerance is %s, must not be negative", c.FutureTolerance)
	case c.MaxDecodedBytes > 1<<31-1:
		return series.Errorf(series.Invalid, "distributor: max decoded bytes is %d, at most %d is possible", c.MaxDecodedBytes, 1<<31-1)
	case c.MaxRequestBytes < c.MaxDecodedBytes:
		return series.Errorf(series.Invalid, "distributor: max request bytes (%d) is below max decoded bytes (%d)", c.MaxRequestBytes, c.MaxDecodedBytes)
	case c.MaxInflightBytes < c.oneRequest():
		return series.Errorf(series.Invalid, "distributor: max in-flight bytes (%d) is below what one request may take (%d)", c.MaxInflightBytes, c.oneRequest())
	case c.SampleRate < 0:
		return series.Errorf(series.Invalid, "distributor: sample rate is %g, must not be negative", c.SampleRate)
	case c.SampleRate > 0 && c.SampleBurst < 1:
		return series.Errorf(series.Invalid, "distributor: sample burst is %d, must be positive where a rate is set", c.SampleBurst)
	case slices.Contains(c.PromoteResourceAttributes, ""):
		return series.Errorf(series.Invalid, "distributor: a promoted resource attribute is empty")
	}
	return nil
}

// oneRequest is the most that a single request may take: its body, decoded, and
// its samples, in OTLP also as they were before the translation. A request below
// its own bounds must be able to pass when it is alone.
func (c *Config) oneRequest() int64 {
	const slack = maxZstdWindow + 1<<20
	return int64(c.MaxBodyBytes) + int64(c.MaxDecodedBytes) + 2*int64(c.MaxRequestBytes) + slack
}
