package blocks

import (
	"time"

	"github.com/varvedb/varve/pkg/series"
)

// Config configures a Store. Start from DefaultConfig.
type Config struct {
	// RefreshInterval is how often a tenant's list of blocks is read anew.
	RefreshInterval time.Duration
	// RefreshTimeout bounds one reading of the list. What it has inspected when it is
	// over is the next one's start.
	RefreshTimeout time.Duration
	// MaxListAge is how old a list may be and still be used, when the bucket cannot be
	// listed. It must be shorter than ingesters keep blocks after their upload:
	// else blocks could be in neither place.
	MaxListAge time.Duration
	// TenantIdle is how long after a tenant's last query its list is kept up to date,
	// unless it is empty.
	TenantIdle time.Duration
	// MaxTenants bounds the tenants whose lists are kept.
	MaxTenants int
	// DeletionDelay is how long after it was marked for deletion a block is still read,
	// so that what replaces it is surely known. Blocks must stay in the bucket for
	// longer than DeletionDelay + MaxListAge after they are marked.
	DeletionDelay time.Duration
	// MarkInterval is how often each block is looked at for a deletion mark, in
	// buckets where that is a request.
	MarkInterval time.Duration

	// CacheDir holds copies of blocks from buckets that are not a local folder.
	CacheDir string
	// CacheBytes bounds the copies that no query uses at the moment.
	CacheBytes int64
	// MaxOpen bounds the blocks that stay open between queries. Each costs some memory
	// and a few file descriptors.
	MaxOpen int
	// Concurrency is the number of lists that are read at one time, and of requests to
	// the bucket for each of them; MaxDownloads the number of blocks that are fetched at one time.
	Concurrency  int
	MaxDownloads int
}

// DefaultConfig is a store for one machine; CacheDir is left to the caller.
func DefaultConfig() Config {
	return Config{
		RefreshInterval: time.Minute,
		RefreshTimeout:  time.Minute,
		MaxListAge:      10 * time.Minute,
		TenantIdle:      time.Hour,
		MaxTenants:      10_000,
		DeletionDelay:   15 * time.Minute,
		MarkInterval:    10 * time.Minute,
		CacheBytes:      10 << 30,
		MaxOpen:         1000,
		Concurrency:     16,
		MaxDownloads:    4,
	}
}

// Validate names the first setting that cannot work.
func (c Config) Validate() error {
	for _, f := range []struct {
		name  string
		value int64
		least int64
	}{
		{"refresh interval", int64(c.RefreshInterval), int64(time.Millisecond)},
		{"refresh timeout", int64(c.RefreshTimeout), 1},
		{"max list age", int64(c.MaxListAge), int64(c.RefreshInterval)},
		{"tenant idle", int64(c.TenantIdle), 0},
		{"max tenants", int64(c.MaxTenants), 1},
		{"deletion delay", int64(c.DeletionDelay), 0},
		{"mark interval", int64(c.MarkInterval), 0},
		{"cache bytes", c.CacheBytes, 0},
		{"max open", int64(c.MaxOpen), 0},
		{"concurrency", int64(c.Concurrency), 1},
		{"max downloads", int64(c.MaxDownloads), 1},
	} {
		if f.value < f.least {
			return series.Errorf(series.Invalid, "blocks: %s is %d, at least %d is needed", f.name, f.value, f.least)
		}
	}
	return nil
}
