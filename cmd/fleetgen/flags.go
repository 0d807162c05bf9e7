package main

import (
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/common/model"

	"github.com/varvedb/varve/pkg/fleet"
)

// fleetFlags describe the fleet; all commands take them, and give the same fleet for
// the same values.
type fleetFlags struct {
	Seed            uint64        `default:"1" help:"Seed of everything random."`
	Clusters        int           `default:"1" help:"Clusters."`
	Nodes           int           `default:"10" help:"Nodes in all clusters together."`
	GPUs            int           `default:"8" name:"gpus-per-node" help:"GPUs per node."`
	Profile         string        `default:"default-25" enum:"default-25,h100-147" help:"Metrics per GPU: ${enum}."`
	Interval        time.Duration `default:"15s" help:"Scrape interval."`
	Collect         time.Duration `default:"30s" help:"Interval at which exporters read the hardware; values are held between."`
	ExporterVersion string        `default:"4.8.3" enum:"4.8.2,4.8.3,4.9.0" help:"dcgm-exporter release: ${enum}. It decides names, units and label spellings."`
	UpgradeAt       string        `placeholder:"TIME" help:"Begin a two-week rollout of exporter 4.9.0 (RFC 3339 or -7d)."`
	Inference       float64       `default:"0.3" help:"Share of nodes that serve inference; what is left trains."`
	Video           float64       `default:"0.05" help:"Share of nodes that transcode video."`
	MIG             float64       `default:"0.05" name:"mig" help:"Share of nodes whose GPUs are cut into MIG instances."`
	TimeSlicing     float64       `default:"0.05" help:"Share of inference nodes with time-sliced GPUs."`
	Liquid          float64       `default:"0.5" help:"Share of racks with liquid cooling."`
	Failures        float64       `default:"1" help:"Failure rate; 1 is 4 per 1,000 node-days, 0 none."`
	Churn           float64       `default:"1" help:"Rate at which jobs and pods come and go; 1 is about 3 label changes per GPU-day."`
	Rollouts        float64       `default:"1" help:"1: driver and exporter rollouts and board swaps happen; 0: never."`
	Garbage         float64       `default:"1e-6" help:"Share of GPU_UTIL samples that are nonsense."`
	Sentinels       float64       `default:"0" help:"Share of samples that are DCGM blanks, as old exporters leak them."`
	EXP             bool          `name:"exp" help:"Add the DCGM_EXP_* families, whose series come and go with events."`
	NoCooling       bool          `help:"No CDU targets."`
	NoTraining      bool          `help:"No training targets."`
	NoVLLM          bool          `name:"no-vllm" help:"No vLLM targets."`
	HostInfra       int           `default:"0" help:"node_exporter-like series per node."`
	NoTargetSeries  bool          `help:"Leave out up and scrape_*."`
	Kubernetes      bool          `help:"Add the exporter's own pod as target labels, so that the workload's become exported_*."`
	Outages         bool          `help:"Prometheus twins fail: 10 minutes a week, late sends, 30 seconds a month together."`
	NoJitter        bool          `help:"Keep every scrape exactly on its grid."`
	ReplicaLabel    string        `default:"prometheus_replica" help:"External label that tells twins apart."`
}

func (f *fleetFlags) build(now time.Time) (*fleet.Fleet, error) {
	cfg := fleet.Config{
		Seed: f.Seed, Clusters: f.Clusters, Nodes: f.Nodes, GPUsPerNode: f.GPUs, Profile: fleet.Profile(f.Profile),
		ScrapeInterval: f.Interval, CollectInterval: f.Collect, Exporter: fleet.Version(f.ExporterVersion),
		Inference: f.Inference, Video: f.Video, MIG: f.MIG, TimeSlicing: f.TimeSlicing, Liquid: f.Liquid,
		Failures: f.Failures, Churn: f.Churn, Rollouts: f.Rollouts, Garbage: f.Garbage, Sentinels: f.Sentinels,
		JitterOff: f.NoJitter, EXP: f.EXP, Cooling: !f.NoCooling, Training: !f.NoTraining, Inferring: !f.NoVLLM,
		HostInfra: f.HostInfra, TargetSeries: !f.NoTargetSeries, Kubernetes: f.Kubernetes, Outages: f.Outages,
		ReplicaLabel: f.ReplicaLabel, ReplicaPrefix: "prometheus-k8s-",
	}
	if f.UpgradeAt != "" {
		at, err := parseTime(f.UpgradeAt, now)
		if err != nil {
			return nil, fmt.Errorf("--upgrade-at: %w", err)
		}
		cfg.UpgradeAt = at
	}
	return fleet.New(cfg)
}

// parseTime reads "now", a duration before or after now (-14d, +1h), or RFC 3339.
func parseTime(s string, now time.Time) (time.Time, error) {
	switch {
	case s == "now":
		return now, nil
	case strings.HasPrefix(s, "-"), strings.HasPrefix(s, "+"):
		d, err := model.ParseDuration(s[1:])
		if err != nil {
			return time.Time{}, fmt.Errorf("parse time %q: %w", s, err)
		}
		if s[0] == '-' {
			d = -d
		}
		return now.Add(time.Duration(d)), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return time.Time{}, fmt.Errorf("parse time %q: want now, a duration like -14d, or RFC 3339: %w", s, err)
	}
	return t, nil
}

// parseDuration reads a duration with Prometheus' units; 0 for "".
func parseDuration(s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := model.ParseDuration(s)
	return time.Duration(d), err
}

// loopbackURL refuses addresses that are not of this machine: the generator is made
// to overwhelm stores.
func loopbackURL(raw string, remote bool) error {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("URL %q: want http://host:port/path", raw)
	}
	if remote {
		return nil
	}
	return loopbackHost(u.Hostname())
}

func loopbackHost(host string) error {
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	return fmt.Errorf("host %q is not this machine; --allow-remote permits it", host)
}
