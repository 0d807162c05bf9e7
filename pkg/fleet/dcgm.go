package fleet

import (
	"fmt"
	"strconv"
)

// dcgmSource is a node's dcgm-exporter.
type dcgmSource struct {
	f       *Fleet
	n       *Node
	rack    *Rack
	target  *Target
	replica int // -1: a page without target labels
	phase   int64
	collect int64

	exporter     exporter
	failure      *Failure
	announced    int64 // when the failure comes that scrapes announce, 0 for none
	coolant      *Failure
	driver       driver
	labelsValid  span // of t: what the target labels depend on
	layoutsValid span // of the collection instant
	gpus         []reading
	rows         [][]*group // by GPU
	flat         []*group
	last         int64 // collection instant of the values
	fresh        bool  // values are of last
}

func newDCGMSource(f *Fleet, tg *Target, replica int) *dcgmSource {
	s := &dcgmSource{f: f, n: tg.node, rack: f.rackOf(tg.node), target: tg, replica: replica}
	s.collect = f.cfg.CollectInterval.Milliseconds()
	s.phase = int64(s.n.key.with(50).unit() * float64(s.collect))
	s.gpus = make([]reading, f.cfg.GPUsPerNode)
	s.rows = make([][]*group, f.cfg.GPUsPerNode)
	return s
}

func (s *dcgmSource) groups() []*group { return s.flat }

// slowness is how a GPU announces that it is about to fall off the bus: the scrapes
// of the ten minutes before take longer.
func (s *dcgmSource) slowness(t int64) float64 {
	if s.announced != 0 && t < s.announced && t >= s.announced-10*minute {
		return 8
	}
	return 1
}

// refresh implements source.
func (s *dcgmSource) refresh(t int64) bool {
	if !s.labelsValid.has(t) {
		s.identify(t)
	}
	if s.down(t) {
		return false
	}
	at := s.collection(t)
	if !s.layoutsValid.has(at) {
		s.relabel(at)
	}
	if s.fresh && at == s.last {
		return true
	}
	s.last, s.fresh = at, true
	s.fill(at)
	return true
}

// collection returns the instant of which the exporter knows at t: its last tick,
// its start if it is younger than that, or the moment at which its host engine
// hung.
func (s *dcgmSource) collection(t int64) int64 {
	at := s.tick(t)
	for _, start := range []int64{s.driver.loaded, s.exporter.down.to} {
		if start <= t {
			at = max(at, start)
		}
	}
	if x := s.failure; x.active(t) && x.Kind == Hang {
		at = min(at, s.tick(x.At))
	}
	return at
}

func (s *dcgmSource) tick(t int64) int64 {
	return floorDiv(t-s.phase, s.collect)*s.collect + s.phase
}

func (s *dcgmSource) down(t int64) bool {
	if s.failure.active(t) && s.failure.Kind == NodeLost {
		return true
	}
	return s.driver.down.has(t) || s.exporter.down.has(t)
}

// identify looks up what the node is at t: exporter, driver, and what ails it.
func (s *dcgmSource) identify(t int64) {
	var v span
	s.exporter, s.labelsValid = s.f.exporterAt(s.n, t)
	s.driver, v = s.f.driverAt(s.n, t)
	s.labelsValid = s.labelsValid.and(v)
	s.failure, v = s.f.failureAt(s.n, t)
	s.labelsValid = s.labelsValid.and(v)
	s.announced = s.f.announced(s.n, t)
	s.labelsValid = s.labelsValid.and(span{always.from, s.tick(t) + 10*minute})
	s.layoutsValid, s.fresh = span{}, false
}

// announced returns the start of a failure within the next hour whose coming the
// scrapes show, 0 if there is none.
func (f *Fleet) announced(n *Node, t int64) int64 {
	for c := floorDiv(t-epoch, failureCell); c <= floorDiv(t+hour-epoch, failureCell); c++ {
		if x := f.failureIn(n, c); x != nil && x.Kind == OffTheBus && x.At > t && x.At <= t+hour {
			return x.At
		}
	}
	return 0
}

// relabel rebuilds the label rows of all GPUs as of collection instant at.
func (s *dcgmSource) relabel(at int64) {
	s.layoutsValid = always
	s.coolant, s.layoutsValid = s.rack.coolantLoss(at)
	s.fresh = false
	rows := make([][]*group, len(s.gpus))
	for i := range s.gpus {
		rows[i] = s.relabelGPU(i, at)
	}
	s.adopt(rows)
}

// adopt puts the new rows in place and keeps the groups whose labels are the same,
// with the memory of what was sent.
func (s *dcgmSource) adopt(rows [][]*group) {
	var flat []*group
	for _, row := range rows {
		for _, g := range row {
			for _, old := range s.flat {
				if old.sameLabels(g) {
					g = old
					break
				}
			}
			flat = append(flat, g)
		}
	}
	s.flat = flat
	s.rows = make([][]*group, len(rows))
	at := 0
	for i, row := range rows {
		s.rows[i] = flat[at : at+len(row)]
		at += len(row)
	}
}

func (s *dcgmSource) relabelGPU(i int, at int64) []*group {
	g := &s.gpus[i]
	x, valid := s.f.failureAt(s.n, at)
	froze := x.active(at) && x.Kind == Firmware && x.hits(i)
	outer := valid
	if froze {
		at = s.tick(x.At)
	}
	job := g.job
	if job == nil || at < job.begin || at >= job.end {
		job = s.f.jobWithPast(s.n, i, at)
	}
	valid = valid.and(span{job.begin, job.end}).and(splitAt(job.alloc, at))
	b, v := s.f.boardAt(s.n, i, at)
	valid = valid.and(v)
	code, v := s.f.lastXID(s.n, i, s.driver.loaded, at, x)
	valid = valid.and(v)
	if code.code != 0 { // the EXP families show it for five minutes
		valid = valid.and(splitAt(code.at+5*minute, at))
	}
	*g = reading{f: s.f, node: s.n, index: i, board: b, driver: s.driver, job: job, xid: code, meter: g.meter}
	switch {
	case froze:
		g.frozen, g.failure = at, x
	case x.active(at) && x.hits(i):
		g.failure = x
	default:
		g.failure = s.coolant
	}
	g.bias = 1 + 0.04*(b.key.with(2).unit()-0.5)
	g.remapped = s.f.remappedRows(s.n, i, b, at)
	var rows []*group
	if !(x.active(at) && x.Kind == OffTheBus && x.hits(i)) {
		rows, v = s.buildRows(g, at)
		valid = valid.and(v)
	}
	if froze {
		valid = outer
	}
	s.layoutsValid = s.layoutsValid.and(valid)
	return rows
}

// buildRows makes the label rows of one GPU: one, or one per MIG instance, or the
// device's and one per time slice.
func (s *dcgmSource) buildRows(g *reading, collected int64) ([]*group, span) {
	metrics := s.f.metrics.of(s.exporter.version)
	valid := always
	var rows []*group
	switch {
	case s.n.role == roleMIG:
		var layout []instance
		layout, valid = s.f.migLayout(s.n, g.index, collected)
		for _, in := range layout {
			ls := s.deviceLabels(g)
			ls = append(ls[:5:5], append([]pair{{"GPU_I_PROFILE", in.profile}, {"GPU_I_ID", strconv.Itoa(in.id)}}, ls[5:]...)...)
			rows = append(rows, s.row(g, metrics, append(ls, in.pod...), true))
		}
	case s.n.slicing && g.job.kind != jobNone && collected >= g.job.alloc:
		rows = append(rows, s.row(g, metrics, s.deviceLabels(g), false))
		for v := range 2 + g.job.key.with(70).pick(3) {
			ls := append(s.deviceLabels(g), s.podLabels(g, v)...)
			rows = append(rows, s.row(g, metrics, append(ls, pair{"vgpu", strconv.Itoa(v)}), false))
		}
	default:
		ls := s.deviceLabels(g)
		if g.job.kind != jobNone && collected >= g.job.alloc {
			ls = append(ls, s.podLabels(g, -1)...)
		}
		rows = append(rows, s.row(g, metrics, ls, false))
	}
	if s.f.cfg.EXP {
		rows = append(rows, s.expRow(g))
	}
	return rows, valid
}

// deviceLabels are the labels of a GPU, in the exporter's order; the driver's comes
// last.
func (s *dcgmSource) deviceLabels(g *reading) []pair {
	host := "hostname"
	driver := "DCGM_FI_DRIVER_VERSION"
	switch s.exporter.version {
	case V482:
		host = "Hostname"
	case V490:
		driver = "DCGM_FI_SYSTEM_DRIVER_VERSION"
	}
	return []pair{
		{"gpu", strconv.Itoa(g.index)},
		{"UUID", g.board.uuid},
		{"pci_bus_id", "00000000:" + busIDs[g.index] + ":00.0"},
		{"device", fmt.Sprintf("nvidia%d", g.index)},
		{"modelName", modelName},
		{host, s.n.Name},
		{driver, s.driver.version},
	}
}

// podLabels say who has the GPU: a pod, or a Slurm job. slice is -1 without time
// slicing.
func (s *dcgmSource) podLabels(g *reading, slice int) []pair {
	j := g.job
	if j.hpc != "" {
		return []pair{{"hpc_job", j.hpc}}
	}
	pod := j.pod(s.n.local)
	if slice >= 0 {
		pod = fmt.Sprintf("%s-%s", j.name, podSuffix(j.key.with(71).with(uint64(slice)), 5))
	}
	return []pair{{"container", j.container}, {"namespace", j.namespace}, {"pod", pod}}
}

// row makes a group of all metrics under the given labels; the XID's line is last.
func (s *dcgmSource) row(g *reading, metrics []*metric, ls []pair, mig bool) *group {
	var extra []extraLine
	for _, m := range metrics {
		if m.xid {
			extra = append(extra, extraLine{family: &m.family, name: m.name, labels: []pair{
				{"err_code", strconv.Itoa(g.xid.code)}, {"err_msg", xidTexts[g.xid.code]},
			}})
		}
	}
	lines := s.f.metrics.lines[lineKey{s.exporter.version, mig}]
	return newGroup(groupSpec{page: s.replica < 0, exporter: ls, target: s.target.labels(s.replica, s.exporter)}, lines, extra)
}

// expRow makes the event families of a GPU, whose series come and go with events.
func (s *dcgmSource) expRow(g *reading) *group {
	ls := append(s.deviceLabels(g), pair{"window_size_in_ms", "300000"})
	exp := s.f.metrics.exp
	var extra []extraLine
	one := func(m *metric, labels ...pair) {
		extra = append(extra, extraLine{family: &m.family, name: m.name, labels: labels})
	}
	one(exp[0])
	one(exp[0], pair{"xid", strconv.Itoa(g.xid.code)})
	one(exp[1])
	for _, e := range clockEvents {
		one(exp[1], pair{"clock_event", e.name})
	}
	code := "0"
	if g.failure != nil && g.failure.XID != 0 {
		code = strconv.Itoa(1000 + g.failure.XID)
	}
	for _, w := range healthWatches {
		one(exp[2], pair{"health_watch", w}, pair{"health_error_code", code})
	}
	return newGroup(groupSpec{page: s.replica < 0, exporter: ls, target: s.target.labels(s.replica, s.exporter)}, nil, extra)
}

// fill reads all GPUs at the collection instant t and spreads the readings over
// the rows.
func (s *dcgmSource) fill(t int64) {
	var h heat
	for i := range s.gpus {
		g := &s.gpus[i]
		if len(s.rows[i]) == 0 {
			continue
		}
		at := t
		if g.frozen != 0 {
			at = g.frozen
		}
		if h.job == nil || h.job.key != g.job.key || h.t != at {
			h = heatOf(g.job, at)
		}
		g.take(at, h, s.collect)
		s.spread(i)
	}
}

func (s *dcgmSource) spread(i int) {
	g := &s.gpus[i]
	metrics := s.f.metrics.of(s.exporter.version)
	for r, row := range s.rows[i] {
		if s.f.cfg.EXP && r == len(s.rows[i])-1 {
			s.fillEXP(g, row)
			continue
		}
		if r > 0 && s.n.role != roleMIG {
			copy(row.vals, s.rows[i][0].vals)
			continue
		}
		s.fillRow(g, row, metrics, r)
	}
}

// fillRow evaluates the metrics in the order of the row's lines: XID is last.
func (s *dcgmSource) fillRow(g *reading, row *group, metrics []*metric, r int) {
	mig := s.n.role == roleMIG
	if mig {
		// Profiling values are the instance's own; the rest repeats the device's.
		g.draw = g.draw.with(uint64(1000 + r))
	}
	at := 0
	for k, m := range metrics {
		if mig && m.noMIG {
			continue
		}
		v := m.value(g)
		if k == g.blankIndex {
			v = m.blank.value()
		}
		if m.xid {
			row.vals[len(row.vals)-1] = v
			continue
		}
		row.vals[at] = v
		at++
	}
}

// fillEXP sets the sliding-window counts. A GPU without events has the one series
// without the event's label.
func (s *dcgmSource) fillEXP(g *reading, row *group) {
	v := row.vals
	v[0], v[1] = 0, absent
	if age := g.t - g.xid.at; g.xid.code != 0 && age < 5*minute {
		v[0], v[1] = absent, float64(min(1+age/minute, 3))
	}
	none := true
	for i, e := range clockEvents {
		v[3+i] = absent
		if n := s.clockEvents(g, e.bits); n > 0 {
			v[3+i], none = n, false
		}
	}
	v[2] = absent
	if none {
		v[2] = 0
	}
	for i := range healthWatches {
		v[3+len(clockEvents)+i] = s.health(g, healthWatches[i])
	}
}

// clockEvents counts in how many of the last window's collections the reason held,
// as far as the present phase tells.
func (s *dcgmSource) clockEvents(g *reading, bits uint64) float64 {
	if g.throttle&bits == 0 {
		return 0
	}
	return float64(1 + g.draw.with(16).with(bits).pick(10))
}

func (s *dcgmSource) health(g *reading, watch string) float64 {
	x := g.failure
	if !x.active(g.t) {
		return 0
	}
	bad := map[FailureKind]string{MemoryError: "MEM", Thermal: "THERMAL", CoolantLoss: "THERMAL", LinkError: "NVLINK", NarrowLink: "PCIE", Firmware: "DRIVER"}[x.Kind]
	switch {
	case watch != bad && watch != "ALL":
		return 0
	case x.XID != 0:
		return 20
	default:
		return 10
	}
}
