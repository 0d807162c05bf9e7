package fleet

import "math"

// Nominal facts of an H100 SXM.
const (
	modelName  = "NVIDIA H100 80GB HBM3"
	fbTotal    = 81559 // MiB
	fbReserved = 551
	powerLimit = 700
	smClockMax = 1980
	memClock   = 2619
	hbmMaxTemp = 95
)

// reading is what the exporter finds out about one GPU at one collection. It is
// filled once, and the metrics are views of it.
type reading struct {
	// What stays for a while.
	f        *Fleet
	node     *Node
	index    int
	board    board
	driver   driver
	job      *job
	failure  *Failure // under way on this GPU
	frozen   int64    // the instant at which its firmware hung, 0 if it runs
	xid      xid
	bias     float64 // power of this GPU against others
	remapped float64
	meter    meter

	// What changes with every collection.
	t          int64
	draw       key // of this GPU and collection
	gang       key // shared by all GPUs of the job
	phase      phase
	load       float64
	watts      float64
	instant    float64
	temp       float64
	memTemp    float64
	joules     float64
	capNanos   float64
	heatNanos  float64
	smClock    float64
	throttle   uint64 // clocks event reasons
	comm       bool   // the gang is in a collective at this instant
	blankIndex int    // metric that reads as blank, -1 for none
}

// meter sums what jobs drew since the driver was loaded. It is advanced from one
// true boundary (job, failure) to the next and never to an instant that happened to
// be asked for, so that its sums do not depend on when it was asked.
type meter struct {
	from   int64 // everything before is in the sums
	joules float64
	busy   float64 // seconds at the power cap
	valid  span
	job    *job
	factor float64
}

// meterAt brings m up to the boundary at or before t.
func (f *Fleet) advanceMeter(m *meter, n *Node, gpu int, loaded, t int64) {
	if m.from < loaded || m.from > t || m.job == nil {
		*m = meter{from: loaded}
		m.open(f, n, gpu)
	}
	for m.valid.to <= t {
		m.joules += m.factor * (m.job.joules(m.valid.to) - m.job.joules(m.from))
		m.busy += m.job.capShare * (m.job.busySeconds(m.valid.to) - m.job.busySeconds(m.from))
		m.from = m.valid.to
		m.open(f, n, gpu)
	}
}

// open looks up what runs from m.from on.
func (m *meter) open(f *Fleet, n *Node, gpu int) {
	if m.job == nil || m.from >= m.job.end || m.from < m.job.begin {
		m.job = f.jobAt(n, gpu, m.from)
	}
	x, valid := f.failureAt(n, m.from)
	m.valid = valid.and(span{m.job.begin, m.job.end})
	m.factor = 1
	if x.active(m.from) && x.hits(gpu) {
		m.factor = x.powerFactor()
	}
}

// powerFactor is what the failure leaves of the power that the job would draw.
func (x *Failure) powerFactor() float64 {
	switch x.Kind {
	case Thermal:
		return 0.6
	case NarrowLink:
		return 0.85
	default:
		return 1
	}
}

// at returns the sums at t, which must lie in the meter's present piece.
func (m *meter) at(t int64) (joules, busy float64) {
	t = max(t, m.from)
	return m.joules + m.factor*(m.job.joules(t)-m.job.joules(m.from)),
		m.busy + m.job.capShare*(m.job.busySeconds(t)-m.job.busySeconds(m.from))
}

// lagAt are the ages (s) at which the power of the past is sampled for the
// temperatures; lagWeight are the weights of a first-order lag of 40 s for the die
// and of 100 s for the memory.
var (
	lagAt     = [...]int64{0, 12, 30, 55, 90, 140, 220, 340}
	lagDie    = lagWeights(40)
	lagMemory = lagWeights(100)
)

func lagWeights(tau float64) (w [len(lagAt)]float64) {
	sum := 0.0
	for i := range lagAt {
		from, to := 0.0, 480.0
		if i > 0 {
			from = float64(lagAt[i-1]+lagAt[i]) / 2
		}
		if i+1 < len(lagAt) {
			to = float64(lagAt[i]+lagAt[i+1]) / 2
		}
		w[i] = math.Exp(-from/tau) - math.Exp(-to/tau)
		sum += w[i]
	}
	for i := range w {
		w[i] /= sum
	}
	return w
}

// heat is the lagged power of a job's GPUs.
type heat struct {
	job         *job
	t           int64
	die, memory float64
}

func heatOf(j *job, t int64) heat {
	h := heat{job: j, t: t}
	for i, age := range lagAt {
		w := j.before
		if at := t - age*second; at >= j.begin {
			w = j.watts(at)
		}
		h.die += lagDie[i] * w
		h.memory += lagMemory[i] * w
	}
	return h
}

// take fills the reading at collection instant t.
func (g *reading) take(t int64, h heat, collect int64) {
	f, x := g.f, g.failure
	g.t = t
	tick := uint64(t / collect)
	g.draw = g.node.key.with(60).with(uint64(g.index)).with(tick)
	g.gang = g.job.key.with(61).with(tick)
	g.phase, g.load = g.job.at(t)
	g.comm = g.phase == phaseBusy && g.gang.unit() < 0.15

	factor := 1.0
	if x.active(t) {
		factor = x.powerFactor()
	}
	noise := g.powerNoise()
	wanted := g.bias * (g.job.watts(t) + noise) * factor
	g.watts = min(wanted, powerLimit+0.4*g.draw.with(1).unit())
	g.instant = min(g.watts+0.02*g.watts*g.draw.with(2).norm()*min(1, noise*noise), powerLimit*1.03)
	g.takeClocks(wanted)
	g.takeTemperatures(h, factor)

	f.advanceMeter(&g.meter, g.node, g.index, g.driver.loaded, t)
	at := t - int64(0.5*float64(collect)*g.draw.with(3).unit())
	joules, busy := g.meter.at(at)
	g.joules, g.capNanos = joules*g.bias, math.Floor(busy*1e9)
	g.heatNanos = g.throttledNanos(at)
	g.takeGarbage()
}

// powerNoise is in W: half of it shared by the gang.
func (g *reading) powerNoise() float64 {
	switch g.phase {
	case phaseBusy:
		return 25*g.gang.with(1).norm() + 25*g.draw.with(4).norm()
	case phaseServe:
		return (10 + 25*g.load) * g.draw.with(4).norm()
	case phaseCheckpoint, phaseLoad, phaseVideo:
		return 8*g.gang.with(1).norm() + 8*g.draw.with(4).norm()
	default:
		return 0.3 * g.draw.with(4).norm()
	}
}

func (g *reading) takeClocks(wanted float64) {
	g.throttle = 0
	switch {
	case g.phase == phaseIdle:
		g.smClock, g.throttle = 345, 1
	default:
		g.smClock = smClockMax
		if over := wanted - 640; over > 0 {
			g.smClock -= 15 * math.Floor(1+over/8)
		}
		if wanted > 690 {
			g.throttle |= 4
		}
	}
	if x := g.failure; x.active(g.t) && g.phase != phaseIdle {
		switch x.Kind {
		case Thermal:
			g.smClock = math.Max(345, g.smClock-15*math.Floor(60*x.ramp(g.t, 20*minute)))
			if x.ramp(g.t, 20*minute) > 0.3 {
				g.throttle |= 0x20 | 0x40
			}
		case CoolantLoss:
			if x.flow(g.t) < 0.7 {
				g.smClock = math.Max(345, g.smClock-15*math.Floor(50*(1-x.flow(g.t))))
				g.throttle |= 0x20
			}
		}
	}
}

// ramp grows from 0 to 1 in the given time after the failure.
func (x *Failure) ramp(t, length int64) float64 {
	return min(1, float64(t-x.At)/float64(length))
}

func (g *reading) takeTemperatures(h heat, factor float64) {
	perWatt, inlet := 0.063, 23.5
	if g.node.liquid {
		perWatt, inlet = 0.034, 24.5
	}
	inlet += 2 * (g.board.key.with(1).unit() - 0.5)
	die := inlet + perWatt*g.bias*factor*h.die
	memory := inlet + 4 + perWatt*1.25*g.bias*factor*h.memory
	if x := g.failure; x.active(g.t) {
		switch x.Kind {
		case Thermal:
			memory += (104 - memory) * x.ramp(g.t, 30*minute)
			die += 12 * x.ramp(g.t, 30*minute)
		case CoolantLoss:
			die += 45 * (1 - x.flow(g.t))
			memory += 50 * (1 - x.flow(g.t))
		}
	}
	g.temp = math.Round(die + 0.5*g.draw.with(5).norm())
	g.memTemp = math.Round(memory + 0.4*g.draw.with(6).norm())
}

// throttledNanos is the time spent throttled by heat since the driver was loaded.
func (g *reading) throttledNanos(t int64) float64 {
	ms := int64(0)
	if x := g.failure; x.active(t) && x.Kind == Thermal {
		ms += max(0, t-x.At-10*minute) * 7 / 10
	}
	if r := g.node.liquid; r {
		ms += g.node.coolantThrottled(g.driver.loaded, t)
	}
	return float64(ms) * 1e6
}

// takeGarbage decides which metric, if any, reads as a DCGM blank this time.
func (g *reading) takeGarbage() {
	g.blankIndex = -1
	if s := g.f.cfg.Sentinels; s > 0 {
		n := g.f.metrics.perGPU
		if u := g.draw.with(7).unit(); u < s*float64(n) {
			g.blankIndex = g.draw.with(8).pick(n)
		}
	}
}

// nonsense are readings of GPU_UTIL that were seen in the field.
var nonsense = [...]float64{1980, 2619, 127622, 627618, 808334905, 4294967295}

func (g *reading) util() float64 {
	if gb := g.f.cfg.Garbage; gb > 0 {
		if d := g.draw.with(9); d.unit() < gb {
			return nonsense[d.with(1).pick(len(nonsense))]
		}
	}
	d := g.draw.with(10)
	switch g.phase {
	case phaseBusy:
		return 98 + math.Floor(3*d.unit())
	case phaseCheckpoint:
		return math.Floor(20 * d.unit())
	case phaseLoad:
		return math.Floor(12 * d.unit())
	case phaseServe:
		return percent(100 * (g.load*1.15 + 0.12*d.norm()))
	case phaseVideo:
		return percent(30 + 8*d.norm())
	default:
		return 0
	}
}

// normal draws a value for the stream in the given phase, with mean and deviation.
func (g *reading) normal(stream uint64, mean, sigma float64) float64 {
	return mean + sigma*g.draw.with(stream).norm()
}

// ratio is a value as the exporter prints a double: six decimals, 0 to 1.
func ratio(x float64) float64 {
	return math.Round(1e6*min(max(x, 0), 1)) / 1e6
}

func percent(x float64) float64 { return math.Round(min(max(x, 0), 100)) }

// whole is a non-negative integer.
func whole(x float64) float64 { return math.Floor(max(x, 0)) }

// xid is the last error that the driver reported.
type xid struct {
	code int
	at   int64
}

var xidTexts = map[int]string{
	0: "No Error", 13: "Graphics Engine Exception", 31: "GPU memory page fault", 43: "GPU stopped processing",
	48: "Double Bit ECC Error", 63: "ECC page retirement or row remapping recording event",
	64: "ECC page retirement or row remapper recording failure", 74: "NVLINK Error", 79: "GPU has fallen off the bus",
	94: "Contained ECC error", 95: "Uncontained ECC error", 119: "GSP RPC Timeout", 120: "GSP Error",
	145: "NVLINK RLW Error", 149: "NVLINK NETIR Error",
}

// softCell holds at most one XID that an application caused.
const softCell = 16 * day

// lastXID returns the XID that GPU gpu shows at t: it stays until the driver is
// loaded anew.
func (f *Fleet) lastXID(n *Node, gpu int, loaded, t int64, x *Failure) (xid, span) {
	last, valid := xid{at: loaded}, always
	if x != nil && x.XID != 0 && x.hits(gpu) && x.At >= loaded && x.At <= t {
		last = xid{code: x.XID, at: x.At}
	}
	if f.cfg.Failures == 0 {
		return last, valid
	}
	c := floorDiv(t-epoch, softCell)
	valid = span{math.MinInt64, epoch + (c+1)*softCell}
	for ; c >= 0 && epoch+(c+1)*softCell > loaded; c-- {
		k := n.key.with(62).with(uint64(gpu)).with(uint64(c))
		if k.unit() >= 0.1*f.cfg.Failures {
			continue
		}
		at := epoch + c*softCell + int64(k.with(1).unit()*float64(softCell))
		valid = valid.and(splitAt(at, t))
		if at <= t && at > last.at {
			last = xid{code: [...]int{13, 31, 43}[k.with(2).pick(3)], at: at}
		}
		if at <= t {
			break
		}
	}
	return last, valid
}

// remappedRows counts the rows that a board lost to memory errors: it follows the
// board through both nodes between which it may have moved.
func (f *Fleet) remappedRows(n *Node, gpu int, b board, t int64) float64 {
	rows := 0.0
	if k := b.key.with(30); k.unit() < 0.03 {
		rows = math.Floor(k.with(1).lognorm(1, 0.8)) // from the burn-in
	}
	if f.cfg.Failures == 0 {
		return rows
	}
	homes := []*Node{n}
	if f.cfg.Rollouts != 0 && f.hasPartner(n) {
		homes = append(homes, &f.nodes[n.index+(n.local^1)-n.local])
	}
	for _, home := range homes {
		for c := floorDiv(b.born-epoch, failureCell); c <= floorDiv(t-epoch, failureCell); c++ {
			x := f.failureIn(home, c)
			if x == nil || x.Kind != MemoryError || x.GPU != gpu || x.At > t || x.At < b.born {
				continue
			}
			if len(homes) > 1 {
				if at, _ := f.boardAt(home, gpu, x.At); at.uuid != b.uuid {
					continue
				}
			}
			rows++
		}
	}
	return min(rows, 16)
}

// coolantThrottled is the time (ms) that n was throttled for lack of coolant in
// (from, t].
func (n *Node) coolantThrottled(from, t int64) int64 {
	r := n.f.rackOf(n)
	ms := int64(0)
	for c := floorDiv(from-epoch, coolantCell); c <= floorDiv(t-epoch, coolantCell); c++ {
		x := r.lossIn(c)
		if x == nil {
			continue
		}
		// From 3 minutes after the pump failed (70% flow) to the repair.
		a, b := max(x.At+3*minute, from), min(x.Until-minute, t)
		ms += max(0, b-a) / 2
	}
	return ms
}
