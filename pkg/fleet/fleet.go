// Package fleet simulates a GPU fleet's monitoring: what DCGM exporters, cooling
// units, training ranks and inference engines would show, for any instant.
//
// Every value is a function of (seed, entity, time): a scrape of any age costs the
// same as one of now, and a run that starts in the middle gives the samples that a
// run from the beginning would have given. Two things look back, over a bounded
// past: counters sum the jobs since the last driver reload (a quarter at most, in
// closed form per job), and temperatures look at the last minutes. Only stale
// markers depend on the run: they need a scrape before.
package fleet

import (
	"fmt"
	"time"
)

// Epoch is when the simulated world begins; nothing can be asked of earlier times.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC).UnixMilli()

// Epoch returns when the simulated world begins.
func Epoch() time.Time { return time.UnixMilli(epoch).UTC() }

const (
	second = int64(1000)
	minute = 60 * second
	hour   = 60 * minute
	day    = 24 * hour
	week   = 7 * day
)

// Fleet is an immutable description: nodes and targets, and the rules by which
// their values follow. It is safe for concurrent use; what moves is in Scrapers.
type Fleet struct {
	cfg      Config
	key      key
	nodes    []Node
	byName   map[string]*Node
	racks    []Rack
	targets  []Target
	byTarget map[string]*Target
	metrics  metricSets
}

// role says what a node is used for.
type role uint8

const (
	roleTraining role = iota
	roleInference
	roleVideo
	roleMIG
)

func (r role) String() string {
	return [...]string{"training", "inference", "video", "mig"}[r]
}

// Node is one server with its GPUs.
type Node struct {
	Name      string
	Cluster   string
	Rack      string
	Zone      string
	Partition string // what the node is used for

	f       *Fleet
	key     key
	index   int // in the fleet
	cluster int
	local   int // in its cluster
	rack    int // in the fleet
	role    role
	block   block // the training partition it belongs to
	liquid  bool
	slicing bool
	lemon   bool
}

// block is a run of a power of two nodes that share a job schedule.
type block struct {
	key    key
	lo, n  int   // local indices
	offset int64 // its 32-day windows begin here
}

// Rack is a group of nodes with one coolant loop.
type Rack struct {
	Name    string
	Cluster string
	Liquid  bool

	f     *Fleet
	key   key
	nodes []*Node
}

// New builds the fleet that cfg describes.
func New(cfg Config) (*Fleet, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	f := &Fleet{cfg: cfg, key: key(0).with(cfg.Seed), byName: map[string]*Node{}, byTarget: map[string]*Target{}}
	f.metrics = newMetricSets(cfg)
	f.nodes = make([]Node, 0, cfg.Nodes)
	for c := range cfg.Clusters {
		n := cfg.Nodes / cfg.Clusters
		if c < cfg.Nodes%cfg.Clusters {
			n++
		}
		f.addCluster(c, n)
	}
	for i := range f.nodes {
		f.byName[f.nodes[i].Name] = &f.nodes[i]
	}
	f.addRacks()
	f.addTargets()
	return f, nil
}

// Config returns what the fleet was built from.
func (f *Fleet) Config() Config { return f.cfg }

// Nodes returns all nodes, cluster by cluster. The slice is the fleet's own.
func (f *Fleet) Nodes() []Node { return f.nodes }

// Racks returns all racks. The slice is the fleet's own.
func (f *Fleet) Racks() []Rack { return f.racks }

// Node returns the node of that name, nil if there is none.
func (f *Fleet) Node(name string) *Node { return f.byName[name] }

func (f *Fleet) addCluster(c, n int) {
	name := fmt.Sprintf("gpu-%s-%02d", [...]string{"eu", "us", "ap"}[c%3], c+1)
	ck := f.key.with(1).with(uint64(c))
	roles := f.splitRoles(n)
	perRack := 4
	for i := range n {
		nk := ck.with(2).with(uint64(i))
		rackNumber := i / perRack
		node := Node{
			Name:    fmt.Sprintf("%s-node-%05d", name, i+1),
			Cluster: name,
			Rack:    fmt.Sprintf("%s-r%04d", name, rackNumber+1),
			Zone:    fmt.Sprintf("%s-%c", name[4:6], 'a'+rune(rackNumber/16%3)),
			f:       f, key: nk, index: len(f.nodes), cluster: c, local: i,
			role:   roles[i],
			liquid: ck.with(3).with(uint64(rackNumber)).unit() < f.cfg.Liquid,
			lemon:  nk.with(1).unit() < 0.05,
		}
		node.slicing = node.role == roleInference && nk.with(2).unit() < f.cfg.TimeSlicing
		node.Partition = node.role.String()
		f.nodes = append(f.nodes, node)
	}
	first := len(f.nodes) - n
	for i := 0; i < n; {
		// Runs of the same role, cut into powers of two: a gang of 4,096 GPUs is the
		// most.
		run := 1
		for i+run < n && roles[i+run] == roles[i] {
			run++
		}
		size := 1
		for size*2 <= run && size*2*f.cfg.GPUsPerNode <= 4096 {
			size *= 2
		}
		k := ck.with(4).with(uint64(i))
		b := block{key: k, lo: i, n: size, offset: int64(k.with(1).unit() * float64(window))}
		for j := range size {
			f.nodes[first+i+j].block = b
		}
		i += size
	}
}

// splitRoles deals the shares out over n nodes in runs, so that gangs find
// neighbours.
func (f *Fleet) splitRoles(n int) []role {
	count := func(share float64) int {
		if share == 0 {
			return 0
		}
		return max(int(share*float64(n)+0.5), min(1, n/8))
	}
	roles := make([]role, n)
	at := n
	for _, part := range []struct {
		r role
		n int
	}{{roleMIG, count(f.cfg.MIG)}, {roleVideo, count(f.cfg.Video)}, {roleInference, count(f.cfg.Inference)}} {
		for range part.n {
			if at > 0 {
				at--
				roles[at] = part.r
			}
		}
	}
	return roles
}

func (f *Fleet) addRacks() {
	index := map[string]int{}
	for i := range f.nodes {
		n := &f.nodes[i]
		at, ok := index[n.Rack]
		if !ok {
			at = len(f.racks)
			index[n.Rack] = at
			f.racks = append(f.racks, Rack{Name: n.Rack, Cluster: n.Cluster, Liquid: n.liquid, f: f,
				key: f.key.with(5).with(uint64(at))})
		}
		f.racks[at].nodes = append(f.racks[at].nodes, n)
		n.rack = at
	}
}

func (f *Fleet) rackOf(n *Node) *Rack { return &f.racks[n.rack] }
