package fleet

import (
	"time"

	"github.com/varvedb/varve/pkg/series"
)

// Profile names a set of metrics that every GPU exposes.
type Profile string

const (
	// Default25 is what dcgm-exporter 4.8 has on by default: 25 series per GPU.
	Default25 Profile = "default-25"
	// H100Full is what an H100 can expose at most: 147 series per GPU.
	H100Full Profile = "h100-147"
)

// Version is a release of dcgm-exporter; it decides names, units and spellings.
type Version string

const (
	// V482 spells the label Hostname.
	V482 Version = "4.8.2"
	// V483 spells it hostname.
	V483 Version = "4.8.3"
	// V490 renames deprecated fields, some with a new unit, and the driver label.
	V490 Version = "4.9.0"
)

// Config describes a fleet. The same Config gives the same samples for ever.
type Config struct {
	Seed        uint64
	Clusters    int // nodes are dealt out evenly, in order
	Nodes       int // of all clusters together
	GPUsPerNode int
	Profile     Profile

	// ScrapeInterval is how often Prometheus asks; CollectInterval is how often the
	// exporter reads the hardware. Between two collections values are held.
	ScrapeInterval  time.Duration
	CollectInterval time.Duration

	// Exporter is the version that runs everywhere until UpgradeAt; then, if that
	// is set, nodes move to 4.9.0 within two weeks.
	Exporter  Version
	UpgradeAt time.Time

	// Shares of nodes, 0 to 1. What is neither inference nor video trains.
	Inference   float64
	Video       float64
	MIG         float64 // of all nodes; they serve inference
	TimeSlicing float64 // of inference nodes
	Liquid      float64 // of racks

	// Multipliers of the usual rates; 0 switches off, 1 is the published rate.
	Failures float64
	Churn    float64 // of jobs and pods starting and ending
	Rollouts float64 // 0 or 1: exporter and driver rollouts, board swaps

	Garbage   float64 // share of GPU_UTIL samples that are nonsense
	Sentinels float64 // share of samples that are DCGM blanks, as old exporters leak them
	JitterOff bool    // keep every scrape exactly on its grid
	EXP       bool    // the DCGM_EXP_* families, whose series come and go

	// Targets beside the GPU exporters.
	Cooling   bool // one CDU page per liquid-cooled rack
	Training  bool // per-rank training metrics of training nodes
	Inferring bool // vLLM engines of inference nodes
	HostInfra int  // node_exporter-like series per node; 0 for none

	// TargetSeries adds what Prometheus makes itself: up, scrape_duration_seconds...
	TargetSeries bool
	// Kubernetes adds the exporter's own namespace, pod and container as target
	// labels, so that the workload's become exported_namespace and so on.
	Kubernetes bool
	// Outages stops one twin for 10 minutes a week, holds its sends back in others,
	// and both for 30 seconds a month.
	Outages bool

	// ReplicaLabel and ReplicaPrefix name the twin: prefix + "0" or "1".
	ReplicaLabel  string
	ReplicaPrefix string
}

// DefaultConfig is a small training and inference fleet with everything on.
func DefaultConfig() Config {
	return Config{
		Seed: 1, Clusters: 1, Nodes: 10, GPUsPerNode: 8, Profile: Default25,
		ScrapeInterval: 15 * time.Second, CollectInterval: 30 * time.Second,
		Exporter:  V483,
		Inference: 0.3, Video: 0.05, MIG: 0.05, TimeSlicing: 0.05, Liquid: 0.5,
		Failures: 1, Churn: 1, Rollouts: 1, Garbage: 1e-6,
		Cooling: true, Training: true, Inferring: true, TargetSeries: true,
		ReplicaLabel: "prometheus_replica", ReplicaPrefix: "prometheus-k8s-",
	}
}

// maxNodes keeps addresses and names within what their formats hold.
const maxNodes = 200_000

// Validate says what is wrong with c.
func (c *Config) Validate() error {
	bad := func(format string, args ...any) error {
		return series.Errorf(series.Invalid, "fleet configuration: "+format, args...)
	}
	switch {
	case c.Nodes < 1 || c.Nodes > maxNodes:
		return bad("nodes is %d, want 1 to %d", c.Nodes, maxNodes)
	case c.Clusters < 1 || c.Clusters > c.Nodes || c.Clusters > 200:
		return bad("clusters is %d, want 1 to 200 and at most one per node (%d)", c.Clusters, c.Nodes)
	case c.GPUsPerNode < 1 || c.GPUsPerNode > 16:
		return bad("GPUs per node is %d, want 1 to 16", c.GPUsPerNode)
	case c.Profile != Default25 && c.Profile != H100Full:
		return bad("profile is %q, want %q or %q", c.Profile, Default25, H100Full)
	case c.Exporter != V482 && c.Exporter != V483 && c.Exporter != V490:
		return bad("exporter version is %q, want %q, %q or %q", c.Exporter, V482, V483, V490)
	case c.ScrapeInterval < time.Second || c.ScrapeInterval > time.Hour:
		return bad("scrape interval is %v, want 1s to 1h", c.ScrapeInterval)
	case c.CollectInterval < 100*time.Millisecond || c.CollectInterval > time.Hour:
		return bad("collect interval is %v, want 100ms to 1h", c.CollectInterval)
	case c.Churn < 0 || c.Failures < 0:
		return bad("churn %v and failures %v must not be negative", c.Churn, c.Failures)
	case c.HostInfra < 0 || c.HostInfra > 100_000:
		return bad("host infra series is %d, want 0 to 100000", c.HostInfra)
	case c.ReplicaLabel == "":
		return bad("replica label is empty")
	}
	shares := []struct {
		name string
		v    float64
	}{
		{"inference", c.Inference}, {"video", c.Video}, {"mig", c.MIG}, {"time slicing", c.TimeSlicing},
		{"liquid", c.Liquid}, {"garbage", c.Garbage}, {"sentinels", c.Sentinels},
		{"inference + video + mig", c.Inference + c.Video + c.MIG},
	}
	for _, s := range shares {
		if !(s.v >= 0 && s.v <= 1) {
			return bad("share %s is %v, want 0 to 1", s.name, s.v)
		}
	}
	return nil
}
