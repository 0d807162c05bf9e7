package fleet

import (
	"fmt"
	"math"
	"strconv"
)

// hostSource stands for node_exporter and its like: as many series as asked for, in
// about the usual mix.
type hostSource struct {
	f     *Fleet
	n     *Node
	all   *group
	reads []func(t int64, d key) float64
	last  int64
	fresh bool
	valid span
	drv   driver
}

func newHostSource(f *Fleet, tg *Target, replica int) source {
	s := &hostSource{f: f, n: tg.node}
	families := map[string]*family{}
	var extra []extraLine
	add := func(name, kind string, ls []pair, read func(t int64, d key) float64) {
		fam := families[name]
		if fam == nil {
			fam = &family{name: name, kind: kind, help: "Host metric."}
			families[name] = fam
		}
		extra = append(extra, extraLine{family: fam, name: name, labels: ls})
		s.reads = append(s.reads, read)
	}
	for i := 0; len(extra) < f.cfg.HostInfra; i++ {
		s.addOne(i, add)
	}
	s.all = newGroup(groupSpec{page: replica < 0, target: tg.labels(replica, exporter{})}, nil, extra)
	return s
}

// addOne adds the i-th series: four in ten are CPU times, then network, memory,
// InfiniBand and a lot that never moves.
func (s *hostSource) addOne(i int, add func(name, kind string, ls []pair, read func(t int64, d key) float64)) {
	modes := [...]string{"idle", "user", "system", "iowait"}
	k := s.n.key.with(300).with(uint64(i))
	switch n := i / 10; i % 10 {
	case 0, 1, 2, 3:
		share := [...]float64{0.8, 0.15, 0.045, 0.005}[i%10]
		add("node_cpu_seconds_total", counter, []pair{{"cpu", strconv.Itoa(n)}, {"mode", modes[i%10]}}, func(t int64, d key) float64 {
			return math.Round(100*share*s.uptime(t, d)) / 100
		})
	case 4:
		add("node_network_receive_bytes_total", counter, []pair{{"device", fmt.Sprintf("eth%d", n)}}, func(t int64, d key) float64 {
			return math.Floor(k.between(1e4, 1e7) * s.uptime(t, d))
		})
	case 5:
		add("node_infiniband_port_data_received_bytes_total", counter, []pair{{"device", fmt.Sprintf("mlx5_%d", n)}, {"port", "1"}}, func(t int64, d key) float64 {
			return math.Floor(k.between(1e6, 2e10) * s.uptime(t, d))
		})
	case 6:
		add("node_memory_bytes", gauge, []pair{{"kind", fmt.Sprintf("k%d", n)}}, func(t int64, d key) float64 {
			return 4096 * math.Floor(k.between(1e4, 5e8)*(1+0.002*d.norm()))
		})
	case 7:
		add("node_filesystem_avail_bytes", gauge, []pair{{"mountpoint", fmt.Sprintf("/mnt/%d", n)}}, func(t int64, d key) float64 {
			return 4096 * math.Floor(k.between(1e6, 1e9)-float64(t/(10*minute)%1000))
		})
	default:
		add("node_vmstat_events", counter, []pair{{"event", fmt.Sprintf("e%d", i)}}, func(int64, key) float64 {
			return math.Floor(k.unit() * 1000)
		})
	}
}

// uptime is the time since the last boot, less the noise of when a counter was read.
func (s *hostSource) uptime(t int64, d key) float64 {
	return max(0, seconds(t-s.drv.loaded)-2*d.unit())
}

func (s *hostSource) groups() []*group       { return []*group{s.all} }
func (s *hostSource) slowness(int64) float64 { return 1 }

// refresh implements source.
func (s *hostSource) refresh(t int64) bool {
	if !s.valid.has(t) {
		var v span
		s.drv, s.valid = s.f.driverAt(s.n, t)
		_, v = s.f.failureAt(s.n, t)
		s.valid = s.valid.and(v)
	}
	if x, _ := s.f.failureAt(s.n, t); s.drv.down.has(t) || x.active(t) && x.Kind == NodeLost {
		return false
	}
	if at := floorDiv(t, 5*second) * 5 * second; !s.fresh || at != s.last {
		s.last, s.fresh = at, true
		d := s.n.key.with(301).with(uint64(at))
		for i, read := range s.reads {
			s.all.vals[i] = read(at, d.with(uint64(i)))
		}
	}
	return true
}
