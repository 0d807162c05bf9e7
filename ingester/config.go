package ingester

import (
	"fmt"
	"time"
)

// Config configures an Ingester. Start from DefaultConfig.
type Config struct {
	// Dir is where every tenant has a folder with its WAL, head and recent blocks.
	Dir string
	// BlockDuration is the width of the blocks that are cut from the head. 2h is
	// what Prometheus, Thanos and Mimir expect; tests use less.
	BlockDuration time.Duration
	// LateWindow is how far behind the tenant's newest sample a sample may be and
	// still be stored. It bounds the backlog that a sender may bring after an outage.
	LateWindow time.Duration
	// LocalRetention is how long a block stays on this disk after its newest sample,
	// although it is in the bucket. Recent queries are then answered without the
	// bucket. A block that is not uploaded yet is never deleted.
	LocalRetention time.Duration
	// VisibleAfter is how long after its upload a block is deleted at the earliest:
	// longer than queriers take to learn of it.
	VisibleAfter time.Duration
	// MaintenanceInterval is how often blocks are uploaded and idle tenants looked for.
	MaintenanceInterval time.Duration
	// IdleTimeout is how long a tenant may be silent before its head is cut, uploaded
	// and closed, so that it costs no memory. 0 keeps tenants open for ever.
	IdleTimeout time.Duration
	// MaxSeries bounds the series in a tenant's head; new ones beyond it are refused,
	// known ones go on. 0 is no bound.
	MaxSeries int
	// MaxTenants bounds the tenants with samples or metadata here; writes of others are
	// refused. Each costs about a megabyte while it is open (measured: 0.97 MB of resident
	// memory for one with a single series).
	MaxTenants int
	// MaxExemplars is the size of a tenant's ring of exemplars; 0 keeps none. The ring
	// gets its memory when the first exemplar comes.
	MaxExemplars int
	// MaxMetadataFamilies bounds the metric families a tenant's metadata may name.
	MaxMetadataFamilies int
	// MinFreeDisk is how many bytes of Dir's file system stay free: below it writes
	// are refused as unavailable, so that the head can still be cut and uploaded.
	MinFreeDisk int64
	// FutureTolerance is how far ahead of this machine's clock an exemplar may be.
	FutureTolerance time.Duration
	// FloatChunks is the encoding of float chunks: "xor2" keeps start timestamps and
	// is a little smaller; "xor" is readable by tools older than Prometheus 3.14, and
	// start timestamps of float samples are not kept.
	FloatChunks string
	// HeadStripes is the number of stripes of a head's series map: more costs
	// memory per tenant, fewer costs contention.
	HeadStripes int
}

// DefaultConfig is an ingester for one machine; Dir is left to the caller.
func DefaultConfig() Config {
	return Config{
		BlockDuration:       2 * time.Hour,
		LateWindow:          2 * time.Hour,
		LocalRetention:      6 * time.Hour,
		VisibleAfter:        15 * time.Minute,
		MaintenanceInterval: 30 * time.Second,
		IdleTimeout:         3 * time.Hour,
		MaxTenants:          1000,
		MaxExemplars:        20_000,
		MaxMetadataFamilies: 20_000,
		MinFreeDisk:         256 << 20,
		FutureTolerance:     10 * time.Minute,
		FloatChunks:         "xor2",
		HeadStripes:         2048,
	}
}

// Validate names the first setting that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return fmt.Errorf("ingester: dir is empty")
	case c.BlockDuration < time.Second:
		return fmt.Errorf("ingester: block duration %s is below 1s", c.BlockDuration)
	case c.LateWindow < 0:
		return fmt.Errorf("ingester: late window %s is negative", c.LateWindow)
	case c.LocalRetention < 0:
		return fmt.Errorf("ingester: local retention %s is negative", c.LocalRetention)
	case c.VisibleAfter < 0:
		return fmt.Errorf("ingester: visible-after %s is negative", c.VisibleAfter)
	case c.MaintenanceInterval <= 0:
		return fmt.Errorf("ingester: maintenance interval %s is not positive", c.MaintenanceInterval)
	case c.IdleTimeout < 0:
		return fmt.Errorf("ingester: idle timeout %s is negative", c.IdleTimeout)
	case c.MaxTenants < 1:
		return fmt.Errorf("ingester: %d tenants are allowed, at least 1 is needed", c.MaxTenants)
	case c.MaxSeries < 0, c.MaxExemplars < 0, c.MaxMetadataFamilies < 0:
		return fmt.Errorf("ingester: a limit is negative: series %d, exemplars %d, metadata families %d", c.MaxSeries, c.MaxExemplars, c.MaxMetadataFamilies)
	case c.FloatChunks != "xor" && c.FloatChunks != "xor2":
		return fmt.Errorf("ingester: float chunk encoding %q is neither xor nor xor2", c.FloatChunks)
	case c.HeadStripes < 1 || c.HeadStripes&(c.HeadStripes-1) != 0:
		return fmt.Errorf("ingester: %d head stripes are not a power of two", c.HeadStripes)
	}
	return nil
}
