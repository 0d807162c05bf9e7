package fleet

import (
	"fmt"
	"math"
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/metadata"

	"github.com/varvedb/varve/pkg/series"
)

// Class is the kind of process behind a metric; it decides what the metric costs to
// store.
type Class string

// The classes of metric.
const (
	Constant Class = "C"  // constant per epoch
	Event    Class = "E"  // event counter, almost always flat
	Small    Class = "Q"  // small-integer gauge
	Milli    Class = "D3" // gauge with three decimals
	Micro    Class = "D6" // gauge with six decimals
	Noisy    Class = "N"  // large noisy integer
	Monotone Class = "M"  // growing counter
	State    Class = "S"  // enum or bit mask
	Windowed Class = "W"  // count over a sliding window, called a counter
)

// metric is one metric of a GPU: how it is exposed, and how it is read.
type metric struct {
	family
	class Class
	read  func(g *reading) float64
	// mul and div turn the reading's unit into the exposed one.
	mul, div float64
	noMIG    bool // MIG instances do not have it
	blank    blank
	xid      bool   // its series carry err_code and err_msg
	label    []byte // label field of the name
}

// family is a metric family as a page shows it.
type family struct {
	name, kind, help string
	decimals         bool // printed with %f
}

// blank is the kind of DCGM field, which decides how a missing value reads.
type blank uint8

const (
	blankInt64 blank = iota
	blankDouble
	blankInt32
)

func (b blank) value() float64 {
	switch b {
	case blankDouble:
		return 140737488355328
	case blankInt32:
		return 2147483634
	default:
		return 9223372036854775794
	}
}

// value reads m, in the unit of the exporter's version.
func (m *metric) value(g *reading) float64 {
	v := m.read(g)
	if m.mul != 1 || m.div != 1 {
		v = v * m.mul / m.div
	}
	return v
}

// metricSets are the metrics of the profile under the names of each version.
type metricSets struct {
	perGPU  int
	old     []*metric // up to 4.8
	renamed []*metric // from 4.9
	exp     []*metric
	// The lines of a GPU and of a MIG instance, by version: all but the XID's, whose
	// labels differ.
	lines map[lineKey][]line
}

type lineKey struct {
	version Version
	mig     bool
}

func (s *metricSets) of(v Version) []*metric {
	if v == V490 {
		return s.renamed
	}
	return s.old
}

func newMetricSets(cfg Config) metricSets {
	var s metricSets
	s.old = defaultMetrics()
	if cfg.Profile == H100Full {
		s.old = append(s.old, fullMetrics()...)
	}
	for _, m := range s.old {
		r := *m
		if to, ok := lineage[strings.TrimPrefix(m.name, "DCGM_FI_")]; ok {
			r.name, r.mul, r.div = "DCGM_FI_"+to.name, to.mul, to.div
			r.decimals = m.decimals || to.div != 1
		}
		s.renamed = append(s.renamed, &r)
	}
	s.perGPU = len(s.old)
	s.exp = expMetrics()
	for _, set := range [][]*metric{s.old, s.renamed, s.exp} {
		for _, m := range set {
			m.label = series.AppendLabel(nil, "__name__", m.name)
		}
	}
	s.lines = map[lineKey][]line{}
	for _, v := range []Version{V482, V483, V490} {
		for _, mig := range []bool{false, true} {
			var lines []line
			for _, m := range s.of(v) {
				if !m.xid && !(mig && m.noMIG) {
					lines = append(lines, line{family: &m.family, name: m.label, metric: m.name})
				}
			}
			s.lines[lineKey{v, mig}] = lines
		}
	}
	return s
}

// metadata is what a scrape learns of the family.
func (f *family) metadata() series.Metadata {
	return series.Metadata{Family: f.name, Metadata: metadata.Metadata{Type: model.MetricType(f.kind), Help: f.help}}
}

// Families describes the DCGM families of the exporter's version and those of all
// other targets of the fleet, as a Prometheus would announce them.
func (f *Fleet) Families() []series.Metadata {
	seen := map[string]bool{}
	var all []series.Metadata
	for i := range f.targets {
		tg := &f.targets[i]
		src := tg.newSource(0)
		if !src.refresh(epoch + 400*day) {
			continue
		}
		for _, g := range src.groups() {
			for i := range g.len() {
				if fam := g.line(i).family; !seen[fam.name] {
					seen[fam.name] = true
					all = append(all, fam.metadata())
				}
			}
		}
		if len(all) > 0 && i > 200 {
			break // by then every kind of target was seen
		}
	}
	return all
}

// Metrics returns the names of the metrics that one GPU exposes under version v.
func (f *Fleet) Metrics(v Version) []string {
	var names []string
	for _, m := range f.metrics.of(v) {
		names = append(names, m.name)
	}
	return names
}

// ClassOf returns the class of a DCGM metric, "" for other names.
func (f *Fleet) ClassOf(name string) Class {
	for _, set := range [][]*metric{f.metrics.old, f.metrics.renamed, f.metrics.exp} {
		for _, m := range set {
			if m.name == name {
				return m.class
			}
		}
	}
	return ""
}

func define(class Class, kind, name, help string, read func(g *reading) float64) *metric {
	return &metric{family: family{name: "DCGM_FI_" + name, kind: kind, help: help}, class: class, read: read, mul: 1, div: 1}
}

// double marks a metric that DCGM keeps as a double and the exporter prints with %f.
func (m *metric) double() *metric {
	m.decimals, m.blank = true, blankDouble
	return m
}

func (m *metric) withXID() *metric {
	m.xid = true
	return m
}

func (m *metric) withoutMIG() *metric {
	m.noMIG = true
	return m
}

func zero(*reading) float64 { return 0 }

func fixed(v float64) func(*reading) float64 { return func(*reading) float64 { return v } }

const (
	gauge   = "gauge"
	counter = "counter"
)

// defaultMetrics are the 25 that dcgm-exporter 4.8 exposes if nobody chooses.
func defaultMetrics() []*metric {
	return []*metric{
		define(Small, gauge, "DEV_SM_CLOCK", "SM clock (MHz).", func(g *reading) float64 { return g.smClock }),
		define(Constant, gauge, "DEV_MEM_CLOCK", "Memory clock (MHz).", fixed(memClock)),
		define(Small, gauge, "DEV_MEMORY_TEMP", "Memory temperature (C).", func(g *reading) float64 { return g.memTemp }),
		define(Small, gauge, "DEV_GPU_TEMP", "Die temperature (C).", func(g *reading) float64 { return g.temp }),
		define(Milli, gauge, "DEV_POWER_USAGE", "Power drawn by the board (W).", func(g *reading) float64 { return milli(g.watts) }).double(),
		define(Monotone, counter, "DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded (mJ).", func(g *reading) float64 { return whole(g.joules * 1000) }),
		define(Event, counter, "DEV_PCIE_REPLAY_COUNTER", "PCIe retries.", (*reading).pcieReplays),
		define(Small, gauge, "DEV_GPU_UTIL", "Share of time with a kernel running (%).", (*reading).util).withoutMIG(),
		define(Small, gauge, "DEV_MEM_COPY_UTIL", "Share of time with the memory in use (%).", (*reading).memCopyUtil).withoutMIG(),
		define(Constant, gauge, "DEV_ENC_UTIL", "Encoder utilisation (%).", func(g *reading) float64 { return g.video(1) }).withoutMIG(),
		define(Constant, gauge, "DEV_DEC_UTIL", "Decoder utilisation (%).", func(g *reading) float64 { return g.video(2) }).withoutMIG(),
		define(State, gauge, "DEV_XID_ERRORS", "Last XID error.", func(g *reading) float64 { return float64(g.xid.code) }).withXID(),
		define(Constant, gauge, "DEV_FB_FREE", "Frame buffer free (MiB).", func(g *reading) float64 { return fbTotal - fbReserved - g.fbUsed() }),
		define(Constant, gauge, "DEV_FB_USED", "Frame buffer used (MiB).", (*reading).fbUsed),
		define(Constant, gauge, "DEV_FB_RESERVED", "Frame buffer reserved (MiB).", fixed(fbReserved)),
		define(Event, counter, "DEV_UNCORRECTABLE_REMAPPED_ROWS", "Rows remapped for uncorrectable errors.", func(g *reading) float64 { return g.remapped }),
		define(Event, counter, "DEV_CORRECTABLE_REMAPPED_ROWS", "Rows remapped for correctable errors.", (*reading).correctableRows),
		define(State, gauge, "DEV_ROW_REMAP_FAILURE", "Whether remapping a row failed.", func(g *reading) float64 { return truth(g.remapped >= 8) }),
		define(Noisy, counter, "DEV_NVLINK_BANDWIDTH_TOTAL", "NVLink bandwidth, all lanes (MB/s).", (*reading).nvlinkBandwidth),
		define(Constant, gauge, "DEV_VGPU_LICENSE_STATUS", "vGPU licence status.", zero),
		define(Micro, gauge, "PROF_GR_ENGINE_ACTIVE", "Share of time the graphics engine was active.", (*reading).engineActive).double(),
		define(Micro, gauge, "PROF_PIPE_TENSOR_ACTIVE", "Share of cycles the tensor pipe was active.", (*reading).tensorActive).double(),
		define(Micro, gauge, "PROF_DRAM_ACTIVE", "Share of cycles the memory interface was active.", (*reading).dramActive).double(),
		define(Noisy, gauge, "PROF_PCIE_TX_BYTES", "PCIe bytes sent (B/s).", func(g *reading) float64 { return g.pcieBytes(31) }),
		define(Noisy, gauge, "PROF_PCIE_RX_BYTES", "PCIe bytes received (B/s).", func(g *reading) float64 { return g.pcieBytes(32) }),
	}
}

// fullMetrics are the 122 that an H100 can expose beside the defaults.
func fullMetrics() []*metric {
	var all []*metric
	add := func(class Class, kind, name, help string, read func(g *reading) float64) *metric {
		m := define(class, kind, name, help, read)
		all = append(all, m)
		return m
	}
	add(Small, gauge, "DEV_VIDEO_CLOCK", "Video clock (MHz).", func(g *reading) float64 { return math.Floor(g.smClock * 0.89) })
	add(Constant, gauge, "DEV_APP_SM_CLOCK", "SM application clock (MHz).", fixed(smClockMax))
	add(Constant, gauge, "DEV_APP_MEM_CLOCK", "Memory application clock (MHz).", fixed(memClock))
	add(Constant, gauge, "DEV_MAX_SM_CLOCK", "Highest SM clock (MHz).", fixed(smClockMax))
	add(Constant, gauge, "DEV_MAX_MEM_CLOCK", "Highest memory clock (MHz).", fixed(memClock))
	add(State, gauge, "DEV_CLOCKS_EVENT_REASONS", "Why clocks are held down (bit mask).", func(g *reading) float64 { return float64(g.throttle) })
	add(Small, gauge, "DEV_GPU_TEMP_LIMIT", "Temperature left until slowdown (C).", func(g *reading) float64 { return 87 - g.temp })
	for _, c := range []struct {
		name, help string
		v          float64
	}{
		{"DEV_MEM_MAX_OP_TEMP", "Highest operating memory temperature (C).", hbmMaxTemp},
		{"DEV_GPU_MAX_OP_TEMP", "Highest operating die temperature (C).", 87},
		{"DEV_SLOWDOWN_TEMP", "Die temperature at which clocks fall (C).", 89},
		{"DEV_SHUTDOWN_TEMP", "Die temperature at which the GPU stops (C).", 94},
	} {
		add(Constant, gauge, c.name, c.help, fixed(c.v))
	}
	add(Milli, gauge, "DEV_POWER_USAGE_INSTANT", "Power drawn at this instant (W).", func(g *reading) float64 { return milli(g.instant) }).double()
	for _, c := range []struct {
		name, help string
		v          float64
	}{
		{"DEV_POWER_MGMT_LIMIT", "Power limit (W).", powerLimit},
		{"DEV_POWER_MGMT_LIMIT_MIN", "Lowest power limit that can be set (W).", 200},
		{"DEV_POWER_MGMT_LIMIT_MAX", "Highest power limit that can be set (W).", powerLimit},
		{"DEV_POWER_MGMT_LIMIT_DEF", "Default power limit (W).", powerLimit},
		{"DEV_ENFORCED_POWER_LIMIT", "Power limit in force (W).", powerLimit},
	} {
		add(Constant, gauge, c.name, c.help, fixed(c.v)).double()
	}
	add(Monotone, counter, "DEV_POWER_VIOLATION", "Time throttled by the power limit (ns).", func(g *reading) float64 { return g.capNanos })
	add(Event, counter, "DEV_THERMAL_VIOLATION", "Time throttled by temperature (ns).", func(g *reading) float64 { return g.heatNanos })
	for _, v := range []string{"SYNC_BOOST", "BOARD_LIMIT", "LOW_UTIL", "RELIABILITY", "TOTAL_APP_CLOCKS", "TOTAL_BASE_CLOCKS"} {
		add(Event, counter, "DEV_"+v+"_VIOLATION", "Time throttled for this reason (ns).", zero)
	}
	add(Constant, gauge, "DEV_FB_TOTAL", "Frame buffer in all (MiB).", fixed(fbTotal))
	add(Constant, gauge, "DEV_FB_USED_PERCENT", "Share of the frame buffer used.", func(g *reading) float64 { return ratio(g.fbUsed() / (fbTotal - fbReserved)) }).double()
	add(Constant, gauge, "DEV_BAR1_TOTAL", "BAR1 in all (MiB).", fixed(131072))
	add(Constant, gauge, "DEV_BAR1_USED", "BAR1 used (MiB).", func(g *reading) float64 { return g.bar1() })
	add(Constant, gauge, "DEV_BAR1_FREE", "BAR1 free (MiB).", func(g *reading) float64 { return 131072 - g.bar1() })
	addErrors(add)
	addPipes(add)
	add(Noisy, gauge, "PROF_NVLINK_TX_BYTES", "NVLink bytes sent (B/s).", func(g *reading) float64 { return g.nvlinkBytes(33) })
	add(Noisy, gauge, "PROF_NVLINK_RX_BYTES", "NVLink bytes received (B/s).", func(g *reading) float64 { return g.nvlinkBytes(34) })
	addLinks(add)
	for _, c := range []struct {
		name string
		v    float64
	}{{"PSTATE", 0}, {"MIG_MODE", -1}, {"FABRIC_MANAGER_STATUS", 3}, {"PERSISTENCE_MODE", 1}, {"COMPUTE_MODE", 0}, {"CC_MODE", 0}, {"VIRTUAL_MODE", 0}} {
		read := fixed(c.v)
		if c.name == "MIG_MODE" {
			read = func(g *reading) float64 { return truth(g.node.role == roleMIG) }
		}
		add(Constant, gauge, "DEV_"+c.name, "Mode or state of the device.", read)
	}
	return all
}

type adder func(class Class, kind, name, help string, read func(g *reading) float64) *metric

// addPipes adds the ratios of the profiling unit: means by phase.
func addPipes(add adder) {
	for i, p := range []struct {
		name                  string
		busy, serve, checkpnt float64
	}{
		{"SM_ACTIVE", 0.90, 0.6, 0.02}, {"SM_OCCUPANCY", 0.25, 0.18, 0.01},
		{"PIPE_FP64_ACTIVE", 0, 0, 0}, {"PIPE_FP32_ACTIVE", 0.10, 0.08, 0.004}, {"PIPE_FP16_ACTIVE", 0.05, 0.06, 0.001},
		{"PIPE_INT_ACTIVE", 0.10, 0.07, 0.002}, {"PIPE_TENSOR_IMMA_ACTIVE", 0, 0, 0},
		{"PIPE_TENSOR_HMMA_ACTIVE", 0.60, 0.25, 0.001}, {"PIPE_TENSOR_DFMA_ACTIVE", 0, 0, 0},
	} {
		class := Micro
		if p.busy == 0 {
			class = Constant
		}
		stream := uint64(120 + i)
		add(class, gauge, "PROF_"+p.name, "Share of cycles or warps active.", func(g *reading) float64 { return g.profile(stream, p.busy, p.serve, p.checkpnt) }).double()
	}
}

// addErrors adds the ECC, retired-page and remapping metrics.
func addErrors(add adder) {
	for _, bits := range []string{"SBE", "DBE"} {
		for _, life := range []string{"VOL", "AGG"} {
			for _, place := range []string{"TOTAL", "DEV", "L2", "REG", "SRM"} {
				single, since := bits == "SBE", life == "VOL"
				add(Event, counter, "DEV_ECC_"+bits+"_"+life+"_"+place, "ECC errors.", func(g *reading) float64 {
					return g.ecc(single, since, place)
				})
			}
		}
	}
	add(Constant, gauge, "DEV_ECC_CURRENT", "Whether ECC is on.", fixed(1))
	add(Event, counter, "DEV_RETIRED_SBE", "Pages retired for single-bit errors.", zero)
	add(Event, counter, "DEV_RETIRED_DBE", "Pages retired for double-bit errors.", zero)
	add(Event, counter, "DEV_RETIRED_PENDING", "Pages waiting to be retired.", zero)
	add(State, gauge, "DEV_ROW_REMAP_PENDING", "Whether a row waits for a reset to be remapped.", func(g *reading) float64 {
		return truth(g.failure.active(g.t) && g.failure.Kind == MemoryError)
	})
	for i, level := range []string{"MAX", "HIGH", "PARTIAL", "LOW", "NONE"} {
		add(Event, gauge, "DEV_BANKS_REMAP_ROWS_AVAIL_"+level, "Banks with this many spare rows.", func(g *reading) float64 { return g.banks(i) })
	}
}

// addLinks adds the PCIe link and NVLink metrics.
func addLinks(add adder) {
	add(Constant, gauge, "DEV_PCIE_LINK_GEN", "PCIe generation in use.", fixed(5))
	add(Constant, gauge, "DEV_PCIE_LINK_WIDTH", "PCIe lanes in use.", func(g *reading) float64 {
		if g.failure.active(g.t) && g.failure.Kind == NarrowLink {
			return 8
		}
		return 16
	})
	add(Constant, gauge, "DEV_PCIE_MAX_LINK_GEN", "Highest PCIe generation.", fixed(5))
	add(Constant, gauge, "DEV_PCIE_MAX_LINK_WIDTH", "Most PCIe lanes.", fixed(16))
	for i, kind := range []string{"CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY"} {
		add(Event, counter, "DEV_NVLINK_"+kind+"_ERROR_COUNT_TOTAL", "NVLink errors, all lanes.", func(g *reading) float64 { return g.linkErrors(i, -1) })
	}
	for lane := range 18 {
		add(Noisy, counter, fmt.Sprintf("DEV_NVLINK_BANDWIDTH_L%d", lane), "NVLink bandwidth of the lane (MB/s).", func(g *reading) float64 {
			return whole(g.nvlinkBandwidth() / 18 * (1 + 0.03*g.draw.with(100+uint64(lane)).norm()))
		})
	}
	for lane := range 18 {
		add(Event, counter, fmt.Sprintf("DEV_NVLINK_REPLAY_ERROR_COUNT_L%d", lane), "NVLink replays of the lane.", func(g *reading) float64 { return g.linkErrors(2, lane) })
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func milli(x float64) float64 { return math.Round(x*1000) / 1000 }

// pcieReplays come from half a percent of boards, at very unlike rates.
func (g *reading) pcieReplays() float64 {
	k := g.board.key.with(10)
	if k.unit() >= 0.005 {
		return 0
	}
	rate := math.Pow(10, k.with(1).between(-1, 2)) // per hour
	return k.with(2).happened(seconds(g.t-g.driver.loaded), 3600/rate)
}

func (g *reading) correctableRows() float64 {
	k := g.board.key.with(11)
	if k.unit() >= 0.02 {
		return 0
	}
	return min(16, k.with(2).happened(seconds(g.t-g.board.born), k.with(1).lognorm(90, 1)*86400))
}

func (g *reading) memCopyUtil() float64 {
	switch g.phase {
	case phaseBusy:
		return percent(g.normal(11, 45, 4))
	case phaseServe:
		return percent(g.normal(11, 25, 10))
	case phaseIdle:
		return 0
	default:
		return percent(g.normal(11, 4, 2))
	}
}

func (g *reading) video(stream uint64) float64 {
	if g.phase != phaseVideo {
		return 0
	}
	return percent(min(60, max(10, g.normal(20+stream, 35, 8))))
}

// fbUsed grows when the job allocates, right after its start, and then stays.
func (g *reading) fbUsed() float64 {
	if g.job.kind == jobNone || g.t < g.job.alloc {
		return 0
	}
	if g.t < g.job.alloc+g.job.load/3 {
		return math.Floor(g.job.mem * 0.07)
	}
	return g.job.mem
}

func (g *reading) bar1() float64 {
	if g.fbUsed() > 0 {
		return 27
	}
	return 1
}

// linkFactor is what a failure leaves of the NVLink bandwidth.
func (g *reading) linkFactor() float64 {
	if g.failure.active(g.t) && g.failure.Kind == LinkError {
		return 0.5
	}
	return 1
}

func (g *reading) nvlinkBandwidth() float64 {
	switch {
	case g.phase == phaseBusy && g.job.size > 1:
		return whole(g.normal(12, 150000, 40000) * g.linkFactor())
	case g.phase == phaseServe && g.job.size > 1:
		return whole(20000 * g.load * g.draw.with(12).unit() * g.linkFactor())
	default:
		return 0
	}
}

func (g *reading) nvlinkBytes(stream uint64) float64 {
	switch {
	case g.phase == phaseBusy && g.comm:
		return whole(g.normal(stream, 3.6e11, 3e10) * g.linkFactor())
	case g.phase == phaseBusy:
		return whole(g.normal(stream, 1.1e11, 4e10) * g.linkFactor())
	case g.phase == phaseServe && g.job.size > 1:
		return whole(4e10 * g.load * g.draw.with(stream).unit() * g.linkFactor())
	default:
		return 0
	}
}

func (g *reading) pcieBytes(stream uint64) float64 {
	k := g.draw.with(stream)
	switch g.phase {
	case phaseBusy:
		return whole(k.lognorm(2e9, 0.6))
	case phaseServe:
		return whole(k.lognorm(2e8, 0.7))
	case phaseLoad, phaseCheckpoint:
		return whole(k.lognorm(8e9, 0.3))
	default:
		return whole(k.lognorm(7e5, 0.6))
	}
}

func (g *reading) engineActive() float64 {
	switch g.phase {
	case phaseBusy:
		return ratio(g.normal(13, 0.97, 0.01))
	case phaseServe:
		return ratio(0.15 + g.load*g.normal(13, 0.75, 0.08))
	case phaseVideo:
		return ratio(g.normal(13, 0.3, 0.05))
	case phaseIdle:
		return 0
	default:
		return ratio(g.normal(13, 0.05, 0.02))
	}
}

// tensorActive is an instant's value: the gang computes, or it communicates.
func (g *reading) tensorActive() float64 {
	switch {
	case g.phase == phaseBusy && g.comm:
		return ratio(0.2 * g.draw.with(14).unit())
	case g.phase == phaseBusy:
		return ratio(g.normal(14, 0.62, 0.04))
	case g.phase == phaseServe:
		return ratio(0.05 + g.load*g.normal(14, 0.3, 0.05))
	case g.phase == phaseVideo:
		return ratio(g.normal(14, 0.03, 0.005))
	default:
		return 0
	}
}

func (g *reading) dramActive() float64 {
	switch g.phase {
	case phaseBusy:
		return ratio(g.normal(15, 0.45, 0.05))
	case phaseServe:
		return ratio(0.3 + g.load*g.normal(15, 0.45, 0.05))
	case phaseIdle:
		return ratio(0.0002 * g.draw.with(15).unit())
	default:
		return ratio(g.normal(15, 0.06, 0.02))
	}
}

// profile is a ratio of the profiling unit: the means by phase, give or take 5%.
func (g *reading) profile(stream uint64, busy, serve, other float64) float64 {
	switch g.phase {
	case phaseBusy:
		return ratio(busy * g.normal(stream, 1, 0.05))
	case phaseServe:
		return ratio(serve * g.load * g.normal(stream, 1, 0.15))
	case phaseIdle:
		return 0
	default:
		return ratio(other * g.normal(stream, 1, 0.2))
	}
}

// ecc counts errors since the driver was loaded or since the board was made. The
// total is the sum of its places.
func (g *reading) ecc(single, sinceLoad bool, place string) float64 {
	switch place {
	case "TOTAL":
		return g.ecc(single, sinceLoad, "DEV") + g.ecc(single, sinceLoad, "SRM")
	case "L2", "REG":
		return 0
	}
	if !single {
		return g.doubleBit(sinceLoad, place)
	}
	k := g.board.key.with(12).with(uint64(len(place) + int(place[0])))
	if k.unit() >= 0.015 {
		return 0
	}
	every := 3600 / math.Pow(10, k.with(1).between(-1.5, 0.5))
	n := k.with(2).happened(seconds(g.t-g.board.born), every)
	if sinceLoad {
		n -= k.with(2).happened(seconds(max(g.driver.loaded, g.board.born)-g.board.born), every)
	}
	return n
}

func (g *reading) doubleBit(sinceLoad bool, place string) float64 {
	if place != "DEV" {
		return 0
	}
	if !sinceLoad {
		return g.remapped
	}
	return truth(g.failure.active(g.t) && g.failure.Kind == MemoryError)
}

// banks counts memory banks by spare rows: almost all have all of them.
func (g *reading) banks(level int) float64 {
	used := g.remapped + g.correctableRows()
	low := truth(used >= 8)
	high := min(used, 4)
	switch level {
	case 0:
		return 2560 - high - low
	case 1:
		return high
	case 3:
		return low
	default:
		return 0
	}
}

// linkErrors counts NVLink errors since the driver was loaded: on bad links, and
// many more while a link fails. lane -1 is the sum over lanes.
func (g *reading) linkErrors(kind, lane int) float64 {
	k := g.board.key.with(13)
	bad := k.unit() < 0.004
	failing := g.failure.active(g.t) && g.failure.Kind == LinkError
	if !bad && !failing {
		return 0
	}
	worst := k.with(1).pick(18)
	if lane >= 0 && lane != worst {
		return 0
	}
	if kind != 2 && !failing {
		return 0
	}
	n := 0.0
	if bad {
		rate := math.Pow(10, k.with(2).between(0, 3))
		n = k.with(3).happened(seconds(g.t-g.driver.loaded), 3600/rate)
	}
	if failing {
		n += g.failure.hardware.with(uint64(50+kind)).happened(seconds(g.t-g.failure.At), 3600/400.0)
	}
	return n
}

// lineage are the names of dcgm-exporter 4.9 and the change of unit.
var lineage = map[string]struct {
	name     string
	mul, div float64
}{
	"DEV_SM_CLOCK":                    {"DEV_SM_CLOCK_HERTZ", 1e6, 1},
	"DEV_MEM_CLOCK":                   {"DEV_MEMORY_CLOCK_HERTZ", 1e6, 1},
	"DEV_MEMORY_TEMP":                 {"DEV_MEMORY_TEMP_CELSIUS", 1, 1},
	"DEV_GPU_TEMP":                    {"DEV_GPU_TEMP_CELSIUS", 1, 1},
	"DEV_POWER_USAGE":                 {"DEV_BOARD_POWER_WATTS", 1, 1},
	"DEV_TOTAL_ENERGY_CONSUMPTION":    {"DEV_GPU_ENERGY_JOULES_TOTAL", 1, 1000},
	"DEV_PCIE_REPLAY_COUNTER":         {"DEV_PCIE_REPLAY_TOTAL", 1, 1},
	"DEV_GPU_UTIL":                    {"DEV_GPU_UTIL_RATIO", 1, 100},
	"DEV_MEM_COPY_UTIL":               {"DEV_MEMORY_COPY_UTIL_RATIO", 1, 100},
	"DEV_ENC_UTIL":                    {"DEV_ENC_UTIL_RATIO", 1, 100},
	"DEV_DEC_UTIL":                    {"DEV_DEC_UTIL_RATIO", 1, 100},
	"DEV_XID_ERRORS":                  {"DEV_XID_ERROR", 1, 1},
	"DEV_FB_USED":                     {"DEV_FB_MEM_USED_BYTES", 1048576, 1},
	"DEV_FB_FREE":                     {"DEV_FB_MEM_FREE_BYTES", 1048576, 1},
	"DEV_FB_RESERVED":                 {"DEV_FB_MEM_RESERVED_BYTES", 1048576, 1},
	"DEV_NVLINK_BANDWIDTH_TOTAL":      {"DEV_NVLINK_THROUGHPUT_TOTAL", 1, 1},
	"DEV_UNCORRECTABLE_REMAPPED_ROWS": {"DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 1, 1},
	"DEV_CORRECTABLE_REMAPPED_ROWS":   {"DEV_ROW_REMAP_CORRECTABLE_TOTAL", 1, 1},
	"DEV_ROW_REMAP_FAILURE":           {"DEV_ROW_REMAP_FAILED", 1, 1},
	"PROF_GR_ENGINE_ACTIVE":           {"PROF_GR_ENGINE_UTIL_RATIO", 1, 1},
	"PROF_PIPE_TENSOR_ACTIVE":         {"PROF_TENSOR_UTIL_RATIO", 1, 1},
	"PROF_DRAM_ACTIVE":                {"PROF_DRAM_UTIL_RATIO", 1, 1},
	"PROF_SM_ACTIVE":                  {"PROF_SM_UTIL_RATIO", 1, 1},
}

// clockEvents are the reasons that DCGM_EXP_CLOCK_EVENTS_COUNT tells apart.
var clockEvents = [...]struct {
	name string
	bits uint64
}{
	{"gpu_idle", 1}, {"power_cap", 4}, {"sw_thermal", 0x20}, {"hw_thermal", 0x40},
}

// healthWatches are the subsystems of DCGM_EXP_GPU_HEALTH_STATUS.
var healthWatches = [...]string{"PCIE", "NVLINK", "PMU", "MCU", "MEM", "SM", "INFOROM", "THERMAL", "POWER", "DRIVER", "ALL"}

func expMetrics() []*metric {
	var all []*metric
	for _, name := range []string{"DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_CLOCK_EVENTS_COUNT", "DCGM_EXP_GPU_HEALTH_STATUS"} {
		class, help := Windowed, "Events in the last five minutes."
		if name == "DCGM_EXP_GPU_HEALTH_STATUS" {
			class, help = State, "Health of a subsystem: 0, 10 or 20."
		}
		all = append(all, &metric{family: family{name: name, kind: counter, help: help}, class: class, mul: 1, div: 1})
	}
	return all
}
