package fleet

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
)

const never = int64(math.MaxInt64)

// span is the half-open time [from, to) for which something stays the same.
type span struct{ from, to int64 }

func (s span) has(t int64) bool { return s.from <= t && t < s.to }

// and shortens s to the times that are also in o.
func (s span) and(o span) span { return span{max(s.from, o.from), min(s.to, o.to)} }

var always = span{math.MinInt64, never}

// split returns the side of t's change at which t lies.
func splitAt(change, t int64) span {
	if t < change {
		return span{math.MinInt64, change}
	}
	return span{change, never}
}

// board is a GPU as a piece of hardware: it keeps its UUID and its lifetime
// counters when it moves to another node.
type board struct {
	key  key
	uuid string
	born int64
}

// boardAt returns the board in slot gpu of n at t, and how long it sits there. Each
// week one of a thousand slots swaps its board with the neighbour node's, and one
// board of a thousand is replaced by a new one.
func (f *Fleet) boardAt(n *Node, gpu int, t int64) (board, span) {
	if f.cfg.Rollouts == 0 {
		return f.newBoard(n.cluster, n.local, gpu, 0, epoch), always
	}
	pair := f.key.with(20).with(uint64(n.cluster)).with(uint64(n.local / 2)).with(uint64(gpu))
	valid := always
	home := n.local
	for w := epoch; w <= t; w += week {
		if at, ok := weekly1000(pair.with(1), w); ok {
			valid = valid.and(splitAt(at, t))
			if at <= t {
				home ^= 1
			}
		}
	}
	if !f.hasPartner(n) {
		home = n.local
	}
	slot := pair.with(2).with(uint64(home & 1))
	generation, born := 0, epoch
	for w := epoch; w <= t; w += week {
		if at, ok := weekly1000(slot, w); ok {
			valid = valid.and(splitAt(at, t))
			if at <= t {
				generation, born = generation+1, at
			}
		}
	}
	thisWeek := epoch + floorDiv(t-epoch, week)*week
	valid = valid.and(span{math.MinInt64, thisWeek + week})
	return f.newBoard(n.cluster, home, gpu, generation, born), valid
}

func (f *Fleet) hasPartner(n *Node) bool {
	partner := n.index + (n.local ^ 1) - n.local
	return partner >= 0 && partner < len(f.nodes) && f.nodes[partner].cluster == n.cluster
}

func weekly1000(k key, w int64) (at int64, ok bool) {
	d := k.with(uint64(w / week))
	if d.unit() >= 0.001 {
		return 0, false
	}
	return w + int64(d.with(1).unit()*float64(week)), true
}

func (f *Fleet) newBoard(cluster, home, gpu, generation int, born int64) board {
	k := f.key.with(21).with(uint64(cluster)).with(uint64(home)).with(uint64(gpu)).with(uint64(generation))
	return board{key: k, uuid: "GPU-" + uuid4(k), born: born}
}

func uuid4(k key) string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(k.with(1)))
	binary.BigEndian.PutUint64(b[8:], uint64(k.with(2)))
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	s := hex.EncodeToString(b[:])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}

var busIDs = [...]string{"53", "64", "75", "86", "97", "A8", "B9", "CA", "D3", "D7", "DB", "DF", "E3", "E7", "EB", "EF"}

var drivers = [...]string{
	"535.129.03", "535.161.08", "550.54.15", "550.90.07", "560.35.03", "565.57.01",
	"570.86.15", "570.124.06", "575.57.08", "580.65.06", "580.95.05", "580.105.08",
}

// reboot is how long a node is away when its driver is loaded anew.
const reboot = 6 * minute

// driver is a node's driver since its last load.
type driver struct {
	version string
	loaded  int64 // when the node was back; counters start here
	down    span  // the reboot before
}

// upgradeEvery is the time between two driver upgrades of a cluster, and between two
// rollouts of its exporters.
const upgradeEvery = 91 * day

// driverUpgrade returns when the u-th upgrade reboots n: 5% of nodes an hour.
func (f *Fleet) driverUpgrade(n *Node, u int64) int64 {
	start := epoch + u*upgradeEvery + int64(f.key.with(22).with(uint64(n.cluster)).unit()*float64(10*day))
	return start + int64(n.key.with(23).with(uint64(u)).unit()*float64(20*hour))
}

// upgradesBefore returns how many driver upgrades n has behind it at t.
func (f *Fleet) upgradesBefore(n *Node, t int64) int64 {
	if f.cfg.Rollouts == 0 {
		return 0
	}
	u := max(floorDiv(t-epoch, upgradeEvery)+1, 0)
	for u > 0 && f.driverUpgrade(n, u-1) > t {
		u--
	}
	return u
}

// driverAt returns n's driver at t and until when nothing about it changes.
func (f *Fleet) driverAt(n *Node, t int64) (driver, span) {
	d := driver{loaded: epoch}
	u := f.upgradesBefore(n, t)
	d.version = driverVersion(u)
	valid := always
	if f.cfg.Rollouts != 0 {
		valid.to = f.driverUpgrade(n, u)
	}
	if u > 0 {
		at := f.driverUpgrade(n, u-1)
		valid.from, d.loaded, d.down = at, at+reboot, span{at, at + reboot}
	}
	if at, ok := f.lastRepair(n, t, valid.from); ok {
		valid.from, d.loaded, d.down = at, at+reboot, span{at, at + reboot}
	}
	return d, valid
}

func driverVersion(u int64) string {
	if u < int64(len(drivers)) {
		return drivers[u]
	}
	return fmt.Sprintf("590.%d.%02d", 40+u, u%10)
}

// exporter is the monitoring pod of a node.
type exporter struct {
	pod, ip string
	version Version
	down    span // it restarts
}

const exporterRestart = 25 * second

// exporterAt returns n's exporter at t. Rollouts go through a cluster node by node.
func (f *Fleet) exporterAt(n *Node, t int64) (exporter, span) {
	r, valid, down := f.rollout(n, t)
	e := exporter{version: f.cfg.Exporter, down: down}
	if !f.cfg.UpgradeAt.IsZero() {
		at := f.cfg.UpgradeAt.UnixMilli() + int64(n.key.with(26).unit()*float64(14*day))
		valid = valid.and(splitAt(at, t))
		if t >= at {
			e.version, e.down, r = V490, span{at, at + exporterRestart}, r+1000
		}
	}
	e.pod = "nvidia-dcgm-exporter-" + podSuffix(n.key.with(25).with(uint64(r)), 5)
	host := uint64(n.local)*4 + uint64(r)%4
	e.ip = fmt.Sprintf("10.%d.%d.%d", 20+n.cluster, host>>8&255, host&255)
	return e, valid
}

func (f *Fleet) rollout(n *Node, t int64) (r int64, valid, down span) {
	if f.cfg.Rollouts == 0 {
		return 0, always, span{}
	}
	// Two minutes a node, but the whole cluster within a day.
	step := min(2*minute, day/int64(f.cfg.Nodes/f.cfg.Clusters+1))
	at := func(r int64) int64 { return epoch + 45*day + r*upgradeEvery + int64(n.local)*step }
	r = floorDiv(t-at(0), upgradeEvery)
	valid = span{at(r), at(r + 1)}
	return r + 1, valid, span{at(r), at(r) + exporterRestart}
}
