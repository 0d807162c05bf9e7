package fleet

import "fmt"

// TargetKind says what a target's page shows.
type TargetKind string

// The kinds of target. The name is also the first part of the page's path.
const (
	NodeTarget  TargetKind = "node"  // dcgm-exporter
	CDUTarget   TargetKind = "cdu"   // coolant distribution unit of a rack
	TrainTarget TargetKind = "train" // training ranks of a node
	VLLMTarget  TargetKind = "vllm"  // inference engines of a node
	HostTarget  TargetKind = "host"  // node_exporter-like
)

// Target is something that Prometheus scrapes.
type Target struct {
	Kind TargetKind
	// Name is the node's or rack's, unique within the kind.
	Name string
	// Job is the scrape job.
	Job string

	f    *Fleet
	key  key
	node *Node
	rack *Rack
}

// Path is where `fleetgen serve` offers the target's page.
func (tg *Target) Path() string { return "/" + string(tg.Kind) + "/" + tg.Name + "/metrics" }

// Label is a label of a target.
type Label struct{ Name, Value string }

// Labels returns the labels that service discovery gives the target at t (Unix
// milliseconds): cluster, node or rack, instance and so on, without external
// labels.
func (tg *Target) Labels(t int64) []Label {
	var e exporter
	if tg.node != nil {
		e, _ = tg.f.exporterAt(tg.node, t)
	}
	var ls []Label
	for _, p := range tg.labels(-1, e) {
		ls = append(ls, Label{p.name, p.value})
	}
	return ls
}

var ports = map[TargetKind]int{NodeTarget: 9400, CDUTarget: 9500, TrainTarget: 9600, VLLMTarget: 8000, HostTarget: 9100}

// labels returns the target's labels, with the external ones of the replica's
// Prometheus if replica is not negative.
func (tg *Target) labels(replica int, e exporter) []pair {
	cfg := &tg.f.cfg
	ls := []pair{{"job", tg.Job}}
	if n := tg.node; n != nil {
		address := e.ip
		if tg.Kind != NodeTarget {
			address = n.address()
		}
		ls = append(ls, pair{"cluster", n.Cluster}, pair{"node", n.Name}, pair{"rack", n.Rack}, pair{"zone", n.Zone},
			pair{"instance", fmt.Sprintf("%s:%d", address, ports[tg.Kind])})
		if cfg.Kubernetes && tg.Kind == NodeTarget {
			ls = append(ls, pair{"namespace", "gpu-operator"}, pair{"pod", e.pod}, pair{"container", "nvidia-dcgm-exporter"},
				pair{"endpoint", "gpu-metrics"}, pair{"service", "nvidia-dcgm-exporter"})
		}
	} else {
		ls = append(ls, pair{"cluster", tg.rack.Cluster}, pair{"rack", tg.rack.Name},
			pair{"instance", fmt.Sprintf("cdu-%s:%d", tg.rack.Name, ports[tg.Kind])})
	}
	if replica < 0 {
		return ls
	}
	for _, l := range tg.f.ExternalLabels(replica) {
		ls = append(ls, pair{l.Name, l.Value})
	}
	return ls
}

// ExternalLabels are what the Prometheus with this number (0 or 1 for twins) adds to
// everything that it sends.
func (f *Fleet) ExternalLabels(replica int) []Label {
	return []Label{
		{"prometheus", "monitoring/k8s"},
		{f.cfg.ReplicaLabel, fmt.Sprintf("%s%d", f.cfg.ReplicaPrefix, replica)},
	}
}

// address is the node's own, which stays.
func (n *Node) address() string {
	return fmt.Sprintf("10.%d.%d.%d", 120+n.cluster%100, n.local>>8&255, n.local&255)
}

func (f *Fleet) addTargets() {
	add := func(kind TargetKind, name, job string, n *Node, r *Rack) {
		k := f.key.with(100).with(uint64(len(f.targets)))
		f.targets = append(f.targets, Target{Kind: kind, Name: name, Job: job, f: f, key: k, node: n, rack: r})
	}
	for i := range f.nodes {
		n := &f.nodes[i]
		add(NodeTarget, n.Name, "dcgm-exporter", n, nil)
		if f.cfg.Training && n.role == roleTraining {
			add(TrainTarget, n.Name, "training", n, nil)
		}
		if f.cfg.Inferring && n.role == roleInference {
			add(VLLMTarget, n.Name, "vllm", n, nil)
		}
		if f.cfg.HostInfra > 0 {
			add(HostTarget, n.Name, "node-exporter", n, nil)
		}
	}
	for i := range f.racks {
		if r := &f.racks[i]; f.cfg.Cooling && r.Liquid {
			add(CDUTarget, r.Name, "bms", nil, r)
		}
	}
	for i := range f.targets {
		tg := &f.targets[i]
		f.byTarget[tg.Path()] = tg
	}
}

// Targets returns everything that can be scraped. The slice is the fleet's own.
func (f *Fleet) Targets() []Target { return f.targets }

// Target returns the target with that Path, nil if there is none.
func (f *Fleet) Target(path string) *Target { return f.byTarget[path] }

// newSource makes the target's source, with the labels of the replica's Prometheus,
// or for pages if replica is negative.
func (tg *Target) newSource(replica int) source {
	switch tg.Kind {
	case NodeTarget:
		return newDCGMSource(tg.f, tg, replica)
	case CDUTarget:
		return newCoolingSource(tg.f, tg, replica)
	case TrainTarget:
		return newTrainingSource(tg.f, tg, replica)
	case VLLMTarget:
		return newVLLMSource(tg.f, tg, replica)
	default:
		return newHostSource(tg.f, tg, replica)
	}
}
