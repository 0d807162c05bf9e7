package fleet

// FailureKind is the signature by which a fault shows in the metrics.
type FailureKind uint8

const (
	// OffTheBus: XID 79. The scrape slows for ten minutes, then the GPU's series end;
	// its seven neighbours go on.
	OffTheBus FailureKind = iota + 1
	// MemoryError: XID 48, 63, 64, 94 or 95 and a remapped row.
	MemoryError
	// Thermal: the memory's temperature climbs, clocks fall, no XID.
	Thermal
	// LinkError: XID 74 or 144 to 150; NVLink replays and half the bandwidth.
	LinkError
	// Firmware: XID 119 or 120; the GPU's values freeze.
	Firmware
	// NodeLost: the whole target is gone.
	NodeLost
	// Hang: the host engine repeats its values, and the target looks healthy.
	Hang
	// NarrowLink: PCIe at half its width: a straggler without an error.
	NarrowLink
	// CoolantLoss: flow falls and a whole rack heats together.
	CoolantLoss
)

var failureNames = [...]string{"", "off_the_bus", "memory_error", "thermal", "link_error", "firmware", "node_lost", "hang", "narrow_link", "coolant_loss"}

// String returns the kind's name.
func (k FailureKind) String() string { return failureNames[k] }

// Failure is one fault of a node or of one of its GPUs.
type Failure struct {
	Kind     FailureKind
	GPU      int // -1: the whole node
	At       int64
	Until    int64 // repaired; the node reboots then, except after a hang
	XID      int
	Node     string
	hardware key
}

func (x *Failure) active(t int64) bool { return x != nil && x.At <= t && t < x.Until }

// hits tells whether x is about this GPU.
func (x *Failure) hits(gpu int) bool { return x != nil && (x.GPU < 0 || x.GPU == gpu) }

const (
	// failureCell holds at most one failure of a node.
	failureCell = 10 * day
	// ratePerNodeDay makes 4 per 1,000 node-days with 5% lemons at ten times the
	// others' rate.
	ratePerNodeDay = 0.004 / 1.45
)

// failureIn returns the failure of n that begins in the c-th cell, if there is one.
func (f *Fleet) failureIn(n *Node, c int64) *Failure {
	x := f.drawFailure(n, c)
	if x == nil {
		return nil
	}
	if before := f.drawFailure(n, c-1); before != nil && before.Until+reboot > x.At {
		return nil // still under repair
	}
	return x
}

func (f *Fleet) drawFailure(n *Node, c int64) *Failure {
	rate := ratePerNodeDay * float64(failureCell/day) * f.cfg.Failures
	if n.lemon {
		rate *= 10
	}
	k := n.key.with(40).with(uint64(c))
	if c < 0 || k.unit() >= rate {
		return nil
	}
	x := &Failure{GPU: k.with(1).pick(f.cfg.GPUsPerNode), Node: n.Name, hardware: k}
	x.At = epoch + c*failureCell + int64(k.with(2).unit()*float64(failureCell))
	length := func(a, b float64) { x.Until = x.At + int64(k.with(3).between(a, b)*float64(hour)) }
	xids := func(codes ...int) { x.XID = codes[k.with(4).pick(len(codes))] }
	switch u := k.with(5).unit(); {
	case u < 0.26:
		x.Kind = OffTheBus
		length(2, 24)
		xids(79)
	case u < 0.48:
		x.Kind = MemoryError
		length(0.5, 4)
		xids(48, 63, 64, 94, 95)
	case u < 0.56:
		x.Kind = Thermal
		length(1, 6)
	case u < 0.64:
		x.Kind = LinkError
		length(1, 12)
		xids(74, 145, 149)
	case u < 0.68:
		x.Kind = Firmware
		length(0.5, 3)
		xids(119, 120)
	case u < 0.88:
		x.Kind, x.GPU = NodeLost, -1
		length(1, 48)
	case u < 0.94:
		x.Kind, x.GPU = Hang, -1
		length(0.4, 2)
	default:
		x.Kind = NarrowLink
		length(24, 168)
	}
	return x
}

// failureAt returns the failure that n suffers at t or had last before t in this
// cell or the one before, and the time for which this stays the answer.
func (f *Fleet) failureAt(n *Node, t int64) (*Failure, span) {
	c := floorDiv(t-epoch, failureCell)
	valid := span{epoch + c*failureCell, epoch + (c+1)*failureCell}
	if c == 0 {
		valid.from = always.from
	}
	x := f.failureIn(n, c)
	if x != nil {
		valid = valid.and(splitAt(x.At, t))
		if t >= x.At {
			return x, valid.and(splitAt(x.Until, t))
		}
	}
	x = f.failureIn(n, c-1)
	if x != nil {
		valid = valid.and(splitAt(x.Until, t))
	}
	return x, valid
}

// lastRepair returns when a repair of n, after the given time and up to t, last
// rebooted it. It looks back a quarter at most: then there was a driver upgrade.
func (f *Fleet) lastRepair(n *Node, t, after int64) (int64, bool) {
	if f.cfg.Failures == 0 {
		return 0, false
	}
	last := max(after, epoch)
	for c := floorDiv(t-epoch, failureCell); epoch+(c+2)*failureCell > last && c >= 0; c-- {
		if x := f.failureIn(n, c); x != nil && x.Kind != Hang && x.Until <= t && x.Until > after {
			return x.Until, true
		}
	}
	return 0, false
}

// Failures returns the failures of all nodes that begin in [from, to), for tests
// and for people who want to know what they should see. Times are Unix milliseconds.
func (f *Fleet) Failures(from, to int64) []Failure {
	var all []Failure
	for i := range f.nodes {
		n := &f.nodes[i]
		for c := floorDiv(from-epoch, failureCell); c <= floorDiv(to-epoch, failureCell); c++ {
			if x := f.failureIn(n, c); x != nil && x.At >= from && x.At < to {
				all = append(all, *x)
			}
		}
	}
	return all
}

// coolantCell holds at most one loss of flow of a rack.
const coolantCell = 30 * day

// lossIn returns the rack's loss of flow in the c-th cell, if there is one.
func (r *Rack) lossIn(c int64) *Failure {
	k := r.key.with(41).with(uint64(c))
	if !r.Liquid || c < 0 || k.unit() >= 0.05*r.f.cfg.Failures {
		return nil
	}
	at := epoch + c*coolantCell + int64(k.with(1).unit()*float64(coolantCell-2*hour))
	return &Failure{Kind: CoolantLoss, GPU: -1, At: at, hardware: k,
		Until: at + int64(k.with(2).between(10, 40)*float64(minute))}
}

// coolantLoss returns the rack's loss of flow that is under way at t.
func (r *Rack) coolantLoss(t int64) (*Failure, span) {
	c := floorDiv(t-epoch, coolantCell)
	valid := span{epoch + c*coolantCell, epoch + (c+1)*coolantCell}
	x := r.lossIn(c)
	if x == nil {
		return nil, valid
	}
	valid = valid.and(splitAt(x.At, t)).and(splitAt(x.Until, t))
	if !x.active(t) {
		return nil, valid
	}
	return x, valid
}

// flow is the share of the coolant's flow that is left at t: the pump takes five
// minutes to fail, and comes back in two.
func (x *Failure) flow(t int64) float64 {
	if !x.active(t) {
		return 1
	}
	down := min(1, float64(t-x.At)/float64(5*minute))
	back := min(1, float64(x.Until-t)/float64(2*minute))
	return 1 - 0.54*min(down, back)
}
