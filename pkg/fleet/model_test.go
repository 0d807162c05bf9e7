package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/model/value"

	"github.com/varvedb/varve/pkg/series"
)

// expand spells out {a,b} groups in a template, and L0..L17.
func expand(templates ...string) []string {
	var out []string
	for _, t := range templates {
		from := strings.IndexByte(t, '{')
		if from < 0 {
			out = append(out, t)
			continue
		}
		to := from + strings.IndexByte(t[from:], '}')
		for _, alt := range strings.Split(t[from+1:to], ",") {
			out = append(out, expand(t[:from]+alt+t[to+1:])...)
		}
	}
	return out
}

// The 147 names of the H100 profile, from the list of fields that DCGM has.
func h100Names() (defaults, all []string) {
	defaults = expand("DCGM_FI_DEV_{SM_CLOCK,MEM_CLOCK,MEMORY_TEMP,GPU_TEMP,POWER_USAGE,TOTAL_ENERGY_CONSUMPTION,PCIE_REPLAY_COUNTER,"+
		"GPU_UTIL,MEM_COPY_UTIL,ENC_UTIL,DEC_UTIL,XID_ERRORS,FB_FREE,FB_USED,FB_RESERVED,UNCORRECTABLE_REMAPPED_ROWS,"+
		"CORRECTABLE_REMAPPED_ROWS,ROW_REMAP_FAILURE,NVLINK_BANDWIDTH_TOTAL,VGPU_LICENSE_STATUS}",
		"DCGM_FI_PROF_{GR_ENGINE_ACTIVE,PIPE_TENSOR_ACTIVE,DRAM_ACTIVE,PCIE_TX_BYTES,PCIE_RX_BYTES}")
	lanes := make([]string, 18)
	for i := range lanes {
		lanes[i] = fmt.Sprintf("L%d", i)
	}
	l := "{" + strings.Join(lanes, ",") + "}"
	all = append(slices.Clone(defaults), expand(
		"DCGM_FI_DEV_{VIDEO_CLOCK,APP_SM_CLOCK,APP_MEM_CLOCK,MAX_SM_CLOCK,MAX_MEM_CLOCK,CLOCKS_EVENT_REASONS}",
		"DCGM_FI_DEV_{GPU_TEMP_LIMIT,MEM_MAX_OP_TEMP,GPU_MAX_OP_TEMP,SLOWDOWN_TEMP,SHUTDOWN_TEMP}",
		"DCGM_FI_DEV_{POWER_USAGE_INSTANT,ENFORCED_POWER_LIMIT}", "DCGM_FI_DEV_POWER_MGMT_LIMIT{,_MIN,_MAX,_DEF}",
		"DCGM_FI_DEV_{POWER,THERMAL,SYNC_BOOST,BOARD_LIMIT,LOW_UTIL,RELIABILITY,TOTAL_APP_CLOCKS,TOTAL_BASE_CLOCKS}_VIOLATION",
		"DCGM_FI_DEV_{FB_TOTAL,FB_USED_PERCENT}", "DCGM_FI_DEV_BAR1_{TOTAL,USED,FREE}",
		"DCGM_FI_DEV_ECC_{SBE,DBE}_{VOL,AGG}_{TOTAL,DEV,L2,REG,SRM}", "DCGM_FI_DEV_ECC_CURRENT",
		"DCGM_FI_DEV_RETIRED_{SBE,DBE,PENDING}", "DCGM_FI_DEV_ROW_REMAP_PENDING",
		"DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_{MAX,HIGH,PARTIAL,LOW,NONE}",
		"DCGM_FI_PROF_{SM_ACTIVE,SM_OCCUPANCY,PIPE_FP64_ACTIVE,PIPE_FP32_ACTIVE,PIPE_FP16_ACTIVE,PIPE_INT_ACTIVE,"+
			"PIPE_TENSOR_IMMA_ACTIVE,PIPE_TENSOR_HMMA_ACTIVE,PIPE_TENSOR_DFMA_ACTIVE,NVLINK_TX_BYTES,NVLINK_RX_BYTES}",
		"DCGM_FI_DEV_PCIE_{LINK_GEN,LINK_WIDTH,MAX_LINK_GEN,MAX_LINK_WIDTH}",
		"DCGM_FI_DEV_NVLINK_{CRC_FLIT,CRC_DATA,REPLAY,RECOVERY}_ERROR_COUNT_TOTAL",
		"DCGM_FI_DEV_NVLINK_BANDWIDTH_"+l, "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_"+l,
		"DCGM_FI_DEV_{PSTATE,MIG_MODE,FABRIC_MANAGER_STATUS,PERSISTENCE_MODE,COMPUTE_MODE,CC_MODE,VIRTUAL_MODE}")...)
	return defaults, all
}

func TestProfilesHaveExactlyTheirNames(t *testing.T) {
	defaults, all := h100Names()
	if len(defaults) != 25 || len(all) != 147 {
		t.Fatalf("the expected lists have %d and %d names", len(defaults), len(all))
	}
	for p, want := range map[Profile][]string{Default25: defaults, H100Full: all} {
		f := testFleet(t, func(c *Config) { c.Profile = p })
		got := f.Metrics(V483)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", p, got, want)
		}
		// Every GPU of a plain node exposes each name once.
		perGPU := map[string]int{}
		c := collect(f, NodeTarget, someDay, someDay+15*second)
		for _, k := range c.order {
			ls := series.LabelBytes(k)
			if name := string(ls.Get("__name__")); strings.HasPrefix(name, "DCGM_") && string(ls.Get("node")) == f.nodes[0].Name {
				perGPU[string(ls.Get("gpu"))]++
			}
		}
		for g, n := range perGPU {
			if n != len(want) {
				t.Errorf("%s: GPU %s has %d series, want %d", p, g, n, len(want))
			}
		}
		if len(perGPU) != 8 {
			t.Errorf("%s: the first node shows %d GPUs, want 8", p, len(perGPU))
		}
	}
}

// parsePage reads a page as Prometheus does, and refuses what a scrape would.
func parsePage(t *testing.T, page []byte) map[string]float64 {
	t.Helper()
	p, err := textparse.New(page, "text/plain; version=0.0.4; charset=utf-8", labels.NewSymbolTable(), textparse.ParserOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	types := map[string]bool{}
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return got
		}
		if err != nil {
			t.Fatalf("parse page: %v", err)
		}
		switch entry {
		case textparse.EntryType:
			name, _ := p.Type()
			if types[string(name)] {
				t.Errorf("TYPE of %s stands twice", name)
			}
			types[string(name)] = true
		case textparse.EntrySeries:
			_, _, v := p.Series()
			var ls labels.Labels
			p.Labels(&ls)
			if _, dup := got[ls.String()]; dup {
				t.Errorf("series %s stands twice", ls)
			}
			if name, dup := ls.HasDuplicateLabelNames(); dup {
				t.Errorf("series %s has label %s twice", ls, name)
			}
			got[ls.String()] = v
		}
	}
}

func TestPagesSayWhatRemoteWriteSends(t *testing.T) {
	f := testFleet(t, busy)
	compared := 0
	for i := range f.targets {
		tg := &f.targets[i]
		s := f.NewScraper(tg, 0, someDay)
		at := s.At()
		var b bytes.Buffer
		if err := f.NewPage(tg).Write(&b, at, false); err != nil {
			if series.KindOf(err) != series.Unavailable {
				t.Errorf("%s: %v", tg.Path(), err)
			}
			continue
		}
		page := parsePage(t, b.Bytes())
		c := newCollected()
		s.Scrape(c)
		target := map[string]bool{}
		for _, l := range append(tg.Labels(at), f.ExternalLabels(0)...) {
			target[l.Name] = true
		}
		var sb labels.ScratchBuilder
		sent := 0
		for _, k := range c.order {
			ls := series.LabelBytes(k).Labels(&sb)
			if name := ls.Get("__name__"); name == "up" || strings.HasPrefix(name, "scrape_") {
				continue
			}
			sent++
			onPage := labels.NewBuilder(ls)
			ls.Range(func(l labels.Label) {
				if target[l.Name] {
					onPage.Del(l.Name)
				}
			})
			v, ok := page[onPage.Labels().String()]
			if !ok {
				t.Fatalf("%s: %s is not on the page", tg.Path(), onPage.Labels())
			}
			if want := c.series[k][0].v; math.Float64bits(v) != math.Float64bits(want) {
				t.Errorf("%s: %s is %v on the page and %v in remote write", tg.Path(), onPage.Labels(), v, want)
			}
		}
		if sent != len(page) {
			t.Errorf("%s: %d series on the page, %d in remote write", tg.Path(), len(page), sent)
		}
		compared += sent
	}
	if compared < 10_000 {
		t.Errorf("only %d series were compared", compared)
	}
}

func TestTimeSlicesRepeatTheirDevice(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.Inference, c.TimeSlicing, c.MIG, c.Failures = 8, 0.9, 1, 0, 0 })
	c := collect(f, NodeTarget, someDay, someDay+15*second)
	device, slices := map[string]float64{}, map[string][]float64{}
	c.each("DCGM_FI_DEV_FB_USED", func(ls series.LabelBytes, ps []point) {
		id := string(ls.Get("UUID"))
		switch {
		case ls.Get("vgpu") != nil && ls.Get("pod") != nil:
			slices[id] = append(slices[id], ps[0].v)
		case ls.Get("vgpu") == nil:
			device[id] = ps[0].v
		}
	})
	if len(slices) < 10 {
		t.Fatalf("only %d GPUs are time-sliced", len(slices))
	}
	for id, vs := range slices {
		for _, v := range vs {
			if v != device[id] {
				t.Errorf("%s: a slice shows %v, the device %v", id, v, device[id])
			}
		}
		if len(vs) < 2 || len(vs) > 4 {
			t.Errorf("%s has %d slices, want 2 to 4", id, len(vs))
		}
	}
}

func TestFrameBufferAddsUp(t *testing.T) {
	f := testFleet(t, func(c *Config) { busy(c); c.Sentinels = 0 })
	c := collect(f, NodeTarget, someDay, someDay+3*minute)
	sums := map[string]float64{}
	for _, part := range []string{"FREE", "USED", "RESERVED"} {
		c.each("DCGM_FI_DEV_FB_"+part, func(ls series.LabelBytes, ps []point) {
			for _, p := range ps {
				if !value.IsStaleNaN(p.v) {
					id := fmt.Sprint(string(ls.Get("UUID")), string(ls.Get("GPU_I_ID")), string(ls.Get("vgpu")), p.t)
					sums[id] += p.v
				}
			}
		})
	}
	if len(sums) == 0 {
		t.Fatal("no frame buffer samples")
	}
	for id, sum := range sums {
		if sum != fbTotal {
			t.Errorf("%s: free + used + reserved is %v, want %d", id, sum, fbTotal)
		}
	}
}

// byGPU collects a metric per GPU of plain nodes, over changes of pod labels.
func byGPU(c *collected, name string) map[string][]point {
	out := map[string][]point{}
	c.each(name, func(ls series.LabelBytes, ps []point) {
		if ls.Get("GPU_I_ID") != nil || ls.Get("vgpu") != nil {
			return
		}
		id := string(ls.Get("UUID"))
		for _, p := range ps {
			if !value.IsStaleNaN(p.v) {
				out[id] = append(out[id], p)
			}
		}
	})
	for _, ps := range out {
		slices.SortFunc(ps, func(a, b point) int { return int(a.t - b.t) })
	}
	return out
}

func TestEnergyIsTheIntegralOfPower(t *testing.T) {
	// The profile of everything, over failures, jobs that begin and end, and an hour
	// at least between reloads of the driver.
	f := testFleet(t, func(c *Config) {
		c.Nodes, c.CollectInterval, c.Failures, c.JitterOff = 10, 15*time.Second, 20, true
		c.MIG, c.Cooling, c.Training, c.Inferring, c.TargetSeries = 0, false, false, false, false
	})
	c := collect(f, NodeTarget, someDay, someDay+21*hour)
	power, energy := byGPU(c, "DCGM_FI_DEV_POWER_USAGE"), byGPU(c, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
	resets, checked := 0, 0
	for id, es := range energy {
		ps := power[id]
		if len(ps) != len(es) {
			t.Fatalf("%s: %d power and %d energy samples", id, len(ps), len(es))
		}
		from := 0
		integral := 0.0
		for i := 1; i < len(es); i++ {
			if es[i].v < es[i-1].v || es[i].t-es[i-1].t > 5*minute {
				resets++
				if es[i].v < es[i-1].v && es[i].v > 2e9 {
					t.Errorf("%s: energy falls from %v to %v: not to about 0", id, es[i-1].v, es[i].v)
				}
				from, integral = i, 0
				continue
			}
			integral += (ps[i].v + ps[i-1].v) / 2 * seconds(es[i].t-es[i-1].t)
			if i-from == 240*4 { // four hours
				got := (es[i].v - es[from].v) / 1000
				if math.Abs(got-integral) > 0.02*integral {
					t.Errorf("%s from %d to %d: energy grew by %.0f J, power makes %.0f J (%.1f%%)", id, es[from].t, es[i].t, got, integral, 100*(got/integral-1))
				}
				checked++
				from, integral = i, 0
			}
		}
	}
	if checked < 250 {
		t.Errorf("only %d stretches of four hours were checked", checked)
	}
	if resets > len(energy)*3 {
		t.Errorf("%d resets of %d GPUs in 21 hours", resets, len(energy))
	}
}

func TestCountersOnlyFallWhenTheDriverIsLoaded(t *testing.T) {
	f := testFleet(t, func(c *Config) {
		busy(c)
		c.Nodes, c.Clusters, c.MIG, c.Sentinels, c.Failures, c.Outages = 100, 1, 0, 0, 10, false
		c.ScrapeInterval = 2 * time.Minute
	})
	// Around one failure of each kind and its repair, and around a driver upgrade.
	seen := map[FailureKind]bool{}
	falls := 0
	for _, x := range f.Failures(someDay, someDay+60*day) {
		if seen[x.Kind] || x.Until-x.At > 13*hour {
			continue
		}
		seen[x.Kind] = true
		falls += checkFalls(t, f, f.Node(x.Node), x.At-hour, x.Until+2*hour)
	}
	if len(seen) < 7 {
		t.Errorf("failures of %d kinds were seen, want 7 at least", len(seen))
	}
	n := &f.nodes[0]
	upgrade := f.driverUpgrade(n, f.upgradesBefore(n, someDay))
	falls += checkFalls(t, f, n, upgrade-hour, upgrade+hour)
	if falls < 50 {
		t.Errorf("%d counters were ever reset: the test saw too few driver loads", falls)
	}
}

// checkFalls scrapes n and counts the falls of counters. They must fall together
// with a driver load, and those that belong to the board not even then.
func checkFalls(t *testing.T, f *Fleet, n *Node, from, to int64) (falls int) {
	t.Helper()
	c := scrapeRange(f, f.Target("/node/"+n.Name+"/metrics"), from, to)
	loads := map[int64]bool{}
	for at := from; at < to; at += minute {
		d, _ := f.driverAt(n, at)
		loads[d.loaded] = true
	}
	for _, m := range f.metrics.old {
		if m.kind != counter || m.class == Noisy {
			continue
		}
		persistent := strings.Contains(m.name, "_AGG_") || strings.Contains(m.name, "REMAPPED") || strings.Contains(m.name, "RETIRED")
		for id, ps := range byGPU(c, m.name) {
			for i := 1; i < len(ps); i++ {
				if ps[i].v >= ps[i-1].v {
					continue
				}
				falls++
				reloaded := false
				for at := range loads {
					reloaded = reloaded || at > ps[i-1].t && at <= ps[i].t
				}
				if persistent || !reloaded {
					t.Errorf("%s of %s on %s falls from %v to %v between %d and %d; the driver was loaded at %v", m.name, id, n.Name, ps[i-1].v, ps[i].v, ps[i-1].t, ps[i].t, loads)
				}
			}
		}
	}
	return falls
}

func TestValuesAreHeldBetweenCollections(t *testing.T) {
	f := testFleet(t, func(c *Config) {
		c.ScrapeInterval, c.CollectInterval, c.JitterOff, c.Failures = 5*time.Second, 30*time.Second, true, 0
	})
	c := collect(f, NodeTarget, someDay, someDay+30*minute)
	changes, pairs := 0, 0
	for _, ps := range byGPU(c, "DCGM_FI_DEV_POWER_USAGE") {
		for i := 1; i < len(ps); i++ {
			pairs++
			if ps[i].v != ps[i-1].v {
				changes++
			}
		}
	}
	if share := float64(changes) / float64(pairs); share < 0.13 || share > 0.17 {
		t.Errorf("power changes at %.1f%% of scrapes, want a sixth", 100*share)
	}
}

func TestGarbageAndBlanksComeAtTheirRates(t *testing.T) {
	f := testFleet(t, func(c *Config) {
		c.Garbage, c.Sentinels, c.CollectInterval, c.Failures = 0.01, 0.001, 15*time.Second, 0
		c.MIG, c.TargetSeries = 0, false
	})
	c := collect(f, NodeTarget, someDay, someDay+2*hour)
	n, garbage, all, blanks := 0, 0, 0, 0
	for _, k := range c.order {
		name := string(series.LabelBytes(k).Get("__name__"))
		for _, p := range c.series[k] {
			if value.IsStaleNaN(p.v) {
				continue
			}
			all++
			switch {
			case p.v == 9223372036854775808 || p.v == 140737488355328:
				blanks++
			case name == "DCGM_FI_DEV_GPU_UTIL" && p.v > 100:
				garbage++
			}
			if name == "DCGM_FI_DEV_GPU_UTIL" {
				n++
			}
		}
	}
	if got := float64(garbage) / float64(n); math.Abs(got-0.01) > 0.002 {
		t.Errorf("%d of %d GPU_UTIL samples are nonsense, want 1%%", garbage, n)
	}
	if got := float64(blanks) / float64(all); math.Abs(got-0.001) > 0.0002 {
		t.Errorf("%d of %d samples are blank, want 0.1%%", blanks, all)
	}
}

func TestJobsChurnAsPublished(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.Failures, c.Rollouts, c.MIG = 600, 0, 0, 0 })
	const days = 20
	changes, gpuDays := 0, 0.0
	var starts, hours []float64 // per job, weighted by GPUs below
	sizes := map[int]bool{}
	for i := range f.nodes {
		n := &f.nodes[i]
		units, gpus := 1, 8.0
		if n.role != roleTraining {
			units, gpus = 8, 1.0
		}
		for u := range units {
			gpuDays += gpus * days
			for at := someDay; at < someDay+days*day; {
				j := f.jobAt(n, u, at)
				if !(j.begin <= at && at < j.end && j.begin <= j.alloc && j.alloc < j.end) {
					t.Fatalf("job %d..%d..%d at %d", j.begin, j.alloc, j.end, at)
				}
				if j.kind != jobNone {
					changes += 2 * int(gpus) // labels come, labels go
					starts = append(starts, gpus)
					hours = append(hours, float64(j.end-j.alloc)/float64(hour))
					if n.role == roleTraining {
						sizes[j.size] = true
					}
				}
				at = j.end
			}
		}
	}
	if got := float64(changes) / gpuDays; got < 2.2 || got > 4.2 {
		t.Errorf("%.2f label changes per GPU-day, want about 3", got)
	}
	if m := weightedMedian(hours, starts); m < 3.5 || m > 9 {
		t.Errorf("GPU-weighted median of job durations is %.1f h, want about 6", m)
	}
	if longest := slices.Max(hours); longest < 10*24 {
		t.Errorf("the longest job takes %.0f h, want a tail to a month", longest)
	}
	for s := range sizes {
		if s < 8 || s > 4096 || s&(s-1) != 0 {
			t.Errorf("a gang has %d GPUs, want a power of two from 8 to 4096", s)
		}
	}
	if len(sizes) < 4 {
		t.Errorf("gangs have only %d sizes", len(sizes))
	}
}

func weightedMedian(xs, ws []float64) float64 {
	order := make([]int, len(xs))
	total := 0.0
	for i := range order {
		order[i] = i
		total += ws[i]
	}
	slices.SortFunc(order, func(a, b int) int {
		if xs[a] < xs[b] {
			return -1
		}
		return 1
	})
	sum := 0.0
	for _, i := range order {
		if sum += ws[i]; sum >= total/2 {
			return xs[i]
		}
	}
	return 0
}

func TestAGangSharesItsPhases(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.Failures, c.Rollouts, c.Inference, c.Video, c.MIG = 16, 0, 0, 0, 0, 0 })
	for at := someDay; at < someDay+30*day; at += 6 * hour {
		for i := range f.nodes {
			j := f.jobAt(&f.nodes[i], 0, at)
			for local := j.lo; local < j.lo+j.n; local++ {
				if o := f.jobAt(&f.nodes[local], 0, at); o.key != j.key || o.name != j.name || o.end != j.end {
					t.Fatalf("nodes %d and %d of one gang have jobs %s and %s", i, local, j.name, o.name)
				}
			}
		}
	}
}

func TestSeriesThatEndAreMarked(t *testing.T) {
	f := testFleet(t, func(c *Config) { busy(c); c.Nodes, c.Clusters, c.Outages, c.Churn = 5, 1, false, 20 })
	c := collect(f, "", someDay, someDay+80*minute)
	stale, gaps := 0, 0
	for _, k := range c.order {
		ps := c.series[k]
		for i, p := range ps {
			if i > 0 && p.t <= ps[i-1].t {
				t.Fatalf("%s: sample at %d follows one at %d", series.LabelBytes(k), p.t, ps[i-1].t)
			}
			if value.IsStaleNaN(p.v) {
				stale++
				if i == 0 || value.IsStaleNaN(ps[i-1].v) {
					t.Errorf("%s: a stale marker at %d without a sample before", series.LabelBytes(k), p.t)
				}
				continue
			}
			if i > 0 && p.t-ps[i-1].t > 16*second && !value.IsStaleNaN(ps[i-1].v) {
				gaps++
				t.Errorf("%s: a gap from %d to %d without a marker", series.LabelBytes(k), ps[i-1].t, p.t)
			}
		}
		if last := ps[len(ps)-1]; last.t < someDay+80*minute-20*second && !value.IsStaleNaN(last.v) {
			t.Errorf("%s ends at %d without a marker", series.LabelBytes(k), last.t)
		}
		if t.Failed() {
			return
		}
	}
	if stale < 1000 {
		t.Errorf("only %d stale markers", stale)
	}
}

func TestMIGInstancesReuseIdsForOtherProfiles(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.MIG, c.Inference, c.Video, c.Failures = 2, 1, 0, 0, 0 })
	profiles := map[string]map[string]bool{} // by GPU and instance id
	counts := map[string]int{"1g.10gb": 7, "2g.20gb": 3, "3g.40gb": 2, "7g.80gb": 1}
	for at := someDay; at < someDay+10*day; at += 3 * hour {
		src := f.targets[0].newSource(0)
		if !src.refresh(at) {
			continue
		}
		perGPU := map[string]int{}
		var power = map[string]map[float64]bool{}
		for _, g := range src.groups() {
			ls := series.LabelBytes(append(append(slices.Clone(g.head), g.lines[0].name...), g.tail...))
			gpu, id, profile := string(ls.Get("gpu")), string(ls.Get("GPU_I_ID")), string(ls.Get("GPU_I_PROFILE"))
			k := gpu + "/" + id
			if profiles[k] == nil {
				profiles[k] = map[string]bool{}
			}
			profiles[k][profile] = true
			perGPU[gpu+" "+profile]++
			for i := range g.len() {
				if g.line(i).metric == "DCGM_FI_DEV_GPU_UTIL" {
					t.Fatal("a MIG instance has GPU_UTIL")
				}
				if g.line(i).metric == "DCGM_FI_DEV_POWER_USAGE" {
					if power[gpu] == nil {
						power[gpu] = map[float64]bool{}
					}
					power[gpu][g.vals[i]] = true
				}
			}
		}
		for k, n := range perGPU {
			if _, profile, _ := strings.Cut(k, " "); n != counts[profile] {
				t.Errorf("GPU and profile %s: %d instances, want %d", k, n, counts[profile])
			}
		}
		for gpu, values := range power {
			if len(values) != 1 {
				t.Errorf("instances of GPU %s show %d powers, want the device's on each", gpu, len(values))
			}
		}
	}
	reused := 0
	for _, p := range profiles {
		if len(p) > 1 {
			reused++
		}
	}
	if reused == 0 {
		t.Error("no instance id ever meant two profiles")
	}
}

// failureOf looks for a failure of the kind and hands its node's fleet and itself to
// check.
func failureOf(t *testing.T, kind FailureKind, check func(t *testing.T, f *Fleet, tg *Target, x Failure)) {
	t.Run(kind.String(), func(t *testing.T) {
		f := testFleet(t, func(c *Config) {
			c.Nodes, c.Profile, c.EXP, c.Failures, c.MIG = 200, H100Full, true, 10, 0
			c.Cooling, c.Training, c.Inferring = false, false, false
		})
		for _, x := range f.Failures(someDay, someDay+60*day) {
			if x.Kind != kind {
				continue
			}
			n := f.Node(x.Node)
			j := f.jobAt(n, max(x.GPU, 0), x.At)
			if j.kind != jobTraining || x.At-j.alloc < hour || j.end-x.At < 3*hour || x.Until-x.At < 40*minute {
				continue // a busy GPU shows it best
			}
			if d, _ := f.driverAt(n, x.At); x.At-d.loaded < hour {
				continue
			}
			if u := f.driverUpgrade(n, f.upgradesBefore(n, x.At)); u < x.Until+hour {
				continue
			}
			check(t, f, f.Target("/node/"+x.Node+"/metrics"), x)
			return
		}
		t.Fatal("no such failure within 60 days of 200 nodes")
	})
}

func scrapeRange(f *Fleet, tg *Target, from, to int64) *collected {
	c := newCollected()
	for s := f.NewScraper(tg, 0, from); s.At() < to; {
		s.Scrape(c)
	}
	return c
}

// valuesOf returns the metric's samples of one GPU, before and after a time.
func valuesOf(c *collected, name string, gpu int, at int64) (before, after []float64) {
	var all []point
	c.each(name, func(ls series.LabelBytes, ps []point) {
		if string(ls.Get("gpu")) == strconv.Itoa(gpu) {
			all = append(all, ps...)
		}
	})
	slices.SortFunc(all, func(a, b point) int { return int(a.t - b.t) })
	for _, p := range all {
		switch {
		case value.IsStaleNaN(p.v):
		case p.t < at:
			before = append(before, p.v)
		default:
			after = append(after, p.v)
		}
	}
	return before, after
}

func mean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / float64(len(xs))
}

func TestFailuresShowTheirSignatures(t *testing.T) {
	up := func(c *collected) (ups []float64) {
		c.each("up", func(_ series.LabelBytes, ps []point) {
			for _, p := range ps {
				ups = append(ups, p.v)
			}
		})
		return ups
	}
	failureOf(t, OffTheBus, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-30*minute, x.At+20*minute)
		if before, after := valuesOf(c, "DCGM_FI_DEV_GPU_TEMP", x.GPU, x.At+minute); len(before) == 0 || len(after) != 0 {
			t.Errorf("the GPU has %d samples before and %d after", len(before), len(after))
		}
		if _, after := valuesOf(c, "DCGM_FI_DEV_GPU_TEMP", (x.GPU+1)%8, x.At+minute); len(after) < 70 {
			t.Errorf("its neighbour has %d samples after", len(after))
		}
		if slices.Contains(up(c), 0) {
			t.Error("up is 0")
		}
		var early, late []float64
		c.each("scrape_duration_seconds", func(_ series.LabelBytes, ps []point) {
			for _, p := range ps {
				if p.t < x.At-11*minute {
					early = append(early, p.v)
				} else if p.t < x.At {
					late = append(late, p.v)
				}
			}
		})
		if mean(late) < 4*mean(early) {
			t.Errorf("scrapes take %v s early and %v s just before: they should slow down", mean(early), mean(late))
		}
	})
	failureOf(t, MemoryError, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-20*minute, x.Until+20*minute)
		before, after := valuesOf(c, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", x.GPU, x.At+minute)
		if after[len(after)-1] != before[0]+1 {
			t.Errorf("remapped rows go from %v to %v, want one more", before[0], after[len(after)-1])
		}
		code := 0
		c.each("DCGM_FI_DEV_XID_ERRORS", func(ls series.LabelBytes, ps []point) {
			if string(ls.Get("gpu")) == strconv.Itoa(x.GPU) && string(ls.Get("err_code")) == strconv.Itoa(x.XID) && ps[0].v == float64(x.XID) {
				code++
			}
		})
		if code == 0 {
			t.Errorf("no XID_ERRORS series with err_code %d", x.XID)
		}
		_, after = valuesOf(c, "DCGM_FI_DEV_XID_ERRORS", x.GPU, x.Until+reboot+minute)
		if len(after) == 0 || slices.Max(after) != 0 {
			t.Errorf("after the repair XID_ERRORS is %v, want 0", after)
		}
		c.each("DCGM_EXP_XID_ERRORS_COUNT", func(ls series.LabelBytes, ps []point) {
			if string(ls.Get("gpu")) == strconv.Itoa(x.GPU) && ls.Get("xid") != nil {
				code = -1
				if n := len(ps); n < 15 || n > 25 || !value.IsStaleNaN(ps[n-1].v) {
					t.Errorf("the event series has %d samples, want five minutes and a stale marker", n)
				}
			}
		})
		if code != -1 {
			t.Error("no DCGM_EXP_XID_ERRORS_COUNT series with a label xid")
		}
	})
	failureOf(t, Thermal, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-20*minute, min(x.Until, x.At+50*minute))
		before, after := valuesOf(c, "DCGM_FI_DEV_MEMORY_TEMP", x.GPU, x.At)
		if hot := slices.Max(after); hot < 95 || hot <= slices.Max(before) {
			t.Errorf("memory temperature goes from %v to %v", slices.Max(before), hot)
		}
		_, after = valuesOf(c, "DCGM_FI_DEV_THERMAL_VIOLATION", x.GPU, x.At)
		if after[len(after)-1] <= after[0] {
			t.Error("the thermal violation counter stands still")
		}
		if _, codes := valuesOf(c, "DCGM_FI_DEV_XID_ERRORS", x.GPU, x.At); slices.Max(codes) > 43 {
			t.Errorf("there is an XID: %v", slices.Max(codes))
		}
	})
	failureOf(t, LinkError, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-30*minute, min(x.Until, x.At+30*minute))
		before, after := valuesOf(c, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", x.GPU, x.At+minute)
		if r := mean(after) / mean(before); r > 0.75 {
			t.Errorf("bandwidth falls to %.2f of before, want about half", r)
		}
		_, after = valuesOf(c, "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", x.GPU, x.At+minute)
		if after[len(after)-1] == 0 {
			t.Error("no replays are counted")
		}
	})
	failureOf(t, Firmware, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-20*minute, x.At+30*minute)
		_, after := valuesOf(c, "DCGM_FI_DEV_POWER_USAGE", x.GPU, x.At+minute)
		if len(after) < 100 || slices.Max(after) != slices.Min(after) {
			t.Errorf("power still moves from %v to %v", slices.Min(after), slices.Max(after))
		}
		if _, other := valuesOf(c, "DCGM_FI_DEV_POWER_USAGE", (x.GPU+1)%8, x.At+minute); slices.Max(other) == slices.Min(other) {
			t.Error("the neighbour's power does not move either")
		}
	})
	failureOf(t, NodeLost, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-5*minute, x.At+5*minute)
		ups := up(c)
		if ups[0] != 1 || ups[len(ups)-1] != 0 {
			t.Errorf("up goes from %v to %v", ups[0], ups[len(ups)-1])
		}
		if _, after := valuesOf(c, "DCGM_FI_DEV_GPU_TEMP", 0, x.At+minute); len(after) != 0 {
			t.Errorf("%d samples after", len(after))
		}
	})
	failureOf(t, Hang, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-5*minute, x.At+20*minute)
		if slices.Contains(up(c), 0) {
			t.Error("up is 0")
		}
		for gpu := range 8 {
			if _, after := valuesOf(c, "DCGM_FI_DEV_POWER_USAGE", gpu, x.At+minute); len(after) < 70 || slices.Max(after) != slices.Min(after) {
				t.Errorf("GPU %d: power of %d samples still moves", gpu, len(after))
			}
		}
	})
	failureOf(t, NarrowLink, func(t *testing.T, f *Fleet, tg *Target, x Failure) {
		c := scrapeRange(f, tg, x.At-30*minute, x.At+30*minute)
		before, after := valuesOf(c, "DCGM_FI_DEV_PCIE_LINK_WIDTH", x.GPU, x.At+minute)
		if before[0] != 16 || after[0] != 8 {
			t.Errorf("the link's width goes from %v to %v", before[0], after[0])
		}
	})
}

func TestCoolantLossHeatsARackTogether(t *testing.T) {
	f := testFleet(t, func(c *Config) {
		c.Nodes, c.Liquid, c.Failures, c.Inference, c.Video, c.MIG = 40, 1, 1, 0, 0, 0
		c.Failures = 5
	})
	for i := range f.racks {
		r := &f.racks[i]
		for cell := floorDiv(someDay-epoch, coolantCell); cell < floorDiv(someDay-epoch, coolantCell)+4; cell++ {
			x := r.lossIn(cell)
			if x == nil {
				continue
			}
			at := x.At + 7*minute
			tg := f.Target("/cdu/" + r.Name + "/metrics")
			c := scrapeRange(f, tg, x.At-3*minute, at+minute)
			c.each("coolant_flow_liters_per_minute", func(_ series.LabelBytes, ps []point) {
				if first, last := ps[0].v, ps[len(ps)-1].v; last > 0.6*first {
					t.Errorf("flow goes from %v to %v l/min, want a loss of half", first, last)
				}
			})
			hotter := 0
			for _, n := range r.nodes {
				c := scrapeRange(f, f.Target("/node/"+n.Name+"/metrics"), x.At-3*minute, at+minute)
				for gpu := range 8 {
					before, after := valuesOf(c, "DCGM_FI_DEV_GPU_TEMP", gpu, at)
					if len(before) > 0 && len(after) > 0 && after[len(after)-1] > before[0]+8 {
						hotter++
					}
				}
			}
			if hotter < 12 {
				t.Errorf("%d GPUs of %d got hotter", hotter, 8*len(r.nodes))
			}
			return
		}
	}
	t.Fatal("no loss of coolant was found")
}

func TestFailureRateIsThePublishedOne(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes = 2000 })
	const days = 90
	n := len(f.Failures(someDay, someDay+days*day))
	if rate := 1000 * float64(n) / (2000 * days); rate < 3 || rate > 5 {
		t.Errorf("%.2f failures per 1,000 node-days, want about 4", rate)
	}
	byNode := map[string]int{}
	for _, x := range f.Failures(someDay, someDay+days*day) {
		byNode[x.Node]++
	}
	lemons := 0
	for i := range f.nodes {
		if f.nodes[i].lemon {
			lemons += byNode[f.nodes[i].Name]
		}
	}
	if share := float64(lemons) / float64(n); share < 0.2 || share > 0.5 {
		t.Errorf("lemons have %.0f%% of failures, want about a third", 100*share)
	}
}

func TestTwinsDifferByOffsetAndReplicaOnly(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.JitterOff, c.Failures, c.Rollouts = 3, true, 0, 0 })
	for i := range f.targets {
		tg := &f.targets[i]
		a, b := f.NewScraper(tg, 0, someDay), f.NewScraper(tg, 1, someDay)
		ca, cb := newCollected(), newCollected()
		first := [2]int64{a.At() % 15000, b.At() % 15000}
		for range 40 {
			if a.At()%15000 != first[0] || b.At()%15000 != first[1] {
				t.Fatalf("%s: the offset moves", tg.Path())
			}
			a.Scrape(ca)
			b.Scrape(cb)
		}
		strip := func(c *collected) map[string]bool {
			names := map[string]bool{}
			var sb labels.ScratchBuilder
			for _, k := range c.order {
				names[labels.NewBuilder(series.LabelBytes(k).Labels(&sb)).Del("prometheus_replica").Labels().String()] = true
			}
			return names
		}
		sa, sb := strip(ca), strip(cb)
		for k := range sa {
			if !sb[k] && tg.Kind == NodeTarget && !strings.Contains(k, "pod=") && !strings.Contains(k, "hpc_job=") {
				t.Errorf("twin b has no %s", k)
			}
		}
	}
}

func TestOutagesOfTwins(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.Outages, c.JitterOff, c.Failures = 2, true, true, 0 })
	tg := &f.targets[0]
	down, late, offsets := 0, int64(0), map[int64]bool{}
	s := f.NewScraper(tg, 0, someDay)
	last := s.At()
	for s.At() < someDay+60*day {
		at := s.At()
		switch gap := at - last; {
		case gap > 9*minute && gap < 12*minute:
			down++
		case gap > 61*second:
			t.Fatalf("a gap of %d ms", gap)
		}
		last = at
		offsets[at%15000] = true
		late = max(late, s.SentAt()-at)
		if s.SentAt() < at {
			t.Fatalf("the scrape at %d is sent at %d", at, s.SentAt())
		}
		s.advance() // what it scrapes does not matter here
	}
	if down < 3 || down > 6 {
		t.Errorf("%d outages of ten minutes in 60 days, want one in two weeks", down)
	}
	if late < 10*minute || late > 2*hour {
		t.Errorf("samples are sent up to %d minutes late, want ten minutes to two hours", late/minute)
	}
	if len(offsets) < down {
		t.Errorf("%d offsets after %d restarts", len(offsets), down)
	}
}

func TestExporterRenamingKeepsTheMeaning(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.Failures, c.UpgradeAt, c.MIG = 4, 0, time.UnixMilli(someDay-day), 0 })
	n := &f.nodes[0]
	at := f.cfg.UpgradeAt.UnixMilli() + int64(n.key.with(26).unit()*float64(14*day))
	c := scrapeRange(f, f.Target("/node/"+n.Name+"/metrics"), at-3*minute, at+3*minute)
	for _, x := range []struct {
		old, renamed string
		factor       float64
	}{
		{"DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 1e6},
		{"DCGM_FI_DEV_FB_RESERVED", "DCGM_FI_DEV_FB_MEM_RESERVED_BYTES", 1048576},
		{"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 1e-3},
	} {
		before, none := valuesOf(c, x.old, 0, at)
		none2, after := valuesOf(c, x.renamed, 0, at)
		if len(none) != 0 || len(none2) != 0 || len(before) == 0 || len(after) == 0 {
			t.Fatalf("%s has %d samples before and %d after, %s has %d and %d", x.old, len(before), len(none), x.renamed, len(none2), len(after))
		}
		if r := after[0] / before[len(before)-1] / x.factor; r < 0.99 || r > 1.01 {
			t.Errorf("%s ends at %v, %s begins at %v: want a factor of %v", x.old, before[len(before)-1], x.renamed, after[0], x.factor)
		}
	}
	c.each("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", func(ls series.LabelBytes, _ []point) {
		if ls.Get("DCGM_FI_SYSTEM_DRIVER_VERSION") == nil || ls.Get("DCGM_FI_DRIVER_VERSION") != nil {
			t.Errorf("%s: the driver label has the old name", ls)
		}
	})
}

func TestHistogramsAreCumulative(t *testing.T) {
	f := testFleet(t, func(c *Config) { c.Nodes, c.Failures = 12, 0 })
	c := collect(f, VLLMTarget, someDay, someDay+10*minute)
	for _, k := range collect(f, TrainTarget, someDay, someDay+10*minute).order {
		c.order = append(c.order, k)
		c.series[k] = []point{}
	}
	train := collect(f, TrainTarget, someDay, someDay+10*minute)
	for k, ps := range train.series {
		c.series[k] = ps
	}
	type bucket struct {
		le float64
		ps []point
	}
	sets := map[string][]bucket{}
	counts := map[string][]point{}
	var sb labels.ScratchBuilder
	for _, k := range c.order {
		ls := series.LabelBytes(k).Labels(&sb)
		name := ls.Get("__name__")
		id := labels.NewBuilder(ls).Del("le", "__name__").Labels().String()
		if base, ok := strings.CutSuffix(name, "_bucket"); ok {
			le, err := strconv.ParseFloat(ls.Get("le"), 64)
			if err != nil {
				t.Fatal(err)
			}
			sets[base+id] = append(sets[base+id], bucket{le, c.series[k]})
		}
		if base, ok := strings.CutSuffix(name, "_count"); ok {
			counts[base+id] = c.series[k]
		}
	}
	if len(sets) < 50 {
		t.Fatalf("only %d histograms", len(sets))
	}
	perEngine := map[string]int{}
	for id, set := range sets {
		slices.SortFunc(set, func(a, b bucket) int {
			if a.le < b.le {
				return -1
			}
			return 1
		})
		for i := range set {
			for j, p := range set[i].ps {
				if i > 0 && p.v < set[i-1].ps[j].v {
					t.Fatalf("%s: bucket %v has %v, the one below %v", id, set[i].le, p.v, set[i-1].ps[j].v)
				}
				if j > 0 && p.v < set[i].ps[j-1].v {
					t.Fatalf("%s: bucket %v falls", id, set[i].le)
				}
			}
		}
		inf := set[len(set)-1].ps
		for j, p := range counts[id] {
			if p.v != inf[j].v && !(value.IsStaleNaN(p.v) && value.IsStaleNaN(inf[j].v)) {
				t.Fatalf("%s: count is %v, +Inf has %v", id, p.v, inf[j].v)
			}
		}
		if strings.HasPrefix(id, "vllm:time_to_first_token_seconds") && len(set) != 23 {
			t.Errorf("TTFT has %d buckets, want 22 and +Inf", len(set))
		}
	}
	for _, k := range c.order {
		ls := series.LabelBytes(k)
		if string(ls.Get("job")) == "vllm" && ls.Get("pod") != nil {
			perEngine[string(ls.Get("pod"))]++
		}
	}
	for pod, n := range perEngine {
		if n < 200 || n > 350 {
			t.Errorf("engine %s has %d series, want about 300", pod, n)
		}
	}
	if c.traces == 0 {
		t.Error("no exemplars")
	}
	if train.native == 0 {
		t.Error("no native histograms")
	}
}
