package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

type prometheusCommand struct {
	Twin         string        `default:"a" enum:"a,b" help:"Which of the twins: ${enum}."`
	ServeURL     string        `default:"http://127.0.0.1:9500" help:"Where 'fleetgen serve' listens."`
	FileSD       string        `name:"file-sd" placeholder:"FILE" help:"Discover by this file instead of HTTP."`
	WriteURL     string        `default:"http://127.0.0.1:9433/api/v1/write" help:"Where to remote-write; empty for nowhere."`
	Protocol     string        `default:"1.0" enum:"1.0,2.0" help:"Remote write protocol: ${enum}."`
	Tenant       string        `help:"Value of X-Scope-OrgID."`
	Interval     time.Duration `default:"15s" help:"Scrape interval."`
	ReplicaLabel string        `default:"prometheus_replica" help:"External label that tells twins apart."`
}

// Run prints the configuration.
func (c *prometheusCommand) Run(stdout io.Writer) error {
	replica := 0
	if c.Twin == "b" {
		replica = 1
	}
	var b strings.Builder
	fmt.Fprintf(&b, "global:\n  scrape_interval: %s\n  scrape_timeout: %s\n", c.Interval, min(c.Interval, 10*time.Second))
	fmt.Fprintf(&b, "  external_labels:\n    prometheus: monitoring/k8s\n    %s: prometheus-k8s-%d\n", c.ReplicaLabel, replica)
	// The job, the path and all other target labels come from service discovery.
	fmt.Fprintf(&b, "scrape_configs:\n  - job_name: fleet\n")
	if c.FileSD != "" {
		fmt.Fprintf(&b, "    file_sd_configs:\n      - files: [%q]\n        refresh_interval: 30s\n", c.FileSD)
	} else {
		fmt.Fprintf(&b, "    http_sd_configs:\n      - url: %s/sd\n        refresh_interval: 30s\n", strings.TrimSuffix(c.ServeURL, "/"))
	}
	if c.WriteURL != "" {
		fmt.Fprintf(&b, "remote_write:\n  - url: %s\n    send_exemplars: true\n    send_native_histograms: true\n", c.WriteURL)
		if c.Protocol == "2.0" {
			fmt.Fprintf(&b, "    protobuf_message: io.prometheus.write.v2.Request\n")
		}
		if c.Tenant != "" {
			fmt.Fprintf(&b, "    headers:\n      X-Scope-OrgID: %q\n", c.Tenant)
		}
		fmt.Fprintf(&b, "    queue_config:\n      max_samples_per_send: 2000\n")
	}
	_, err := io.WriteString(stdout, b.String())
	return err
}
