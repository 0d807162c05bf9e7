package fleet

import "math"

// coolingSource is the coolant distribution unit of a liquid-cooled rack, seen
// through a building-management gateway.
type coolingSource struct {
	f       *Fleet
	r       *Rack
	g       []*group
	jobs    [][]*job // by node: one for a gang, or one by GPU
	all     *group
	collect int64
	last    int64
	fresh   bool
}

// coolantHeat is the specific heat of the coolant in kJ per litre and kelvin.
const coolantHeat = 4.18

// leakCell holds at most one leak of a rack.
const leakCell = 90 * day

var coolingFamilies = [...]family{
	{name: "coolant_supply_temperature_celsius", kind: gauge, help: "Coolant temperature before the rack."},
	{name: "coolant_return_temperature_celsius", kind: gauge, help: "Coolant temperature behind the rack."},
	{name: "coolant_flow_liters_per_minute", kind: gauge, help: "Coolant flow through the rack."},
	{name: "coolant_pressure_pascals", kind: gauge, help: "Coolant pressure by side."},
	{name: "coolant_differential_pressure_pascals", kind: gauge, help: "Pressure across the loop; it drifts as filters clog."},
	{name: "coolant_valve_position_ratio", kind: gauge, help: "Position of the control valve."},
	{name: "cdu_pump_speed_ratio", kind: gauge, help: "Pump speed against its maximum."},
	{name: "coolant_leak_detected", kind: gauge, help: "Whether a leak is detected."},
	{name: "rack_power_watts", kind: gauge, help: "Power drawn by the rack."},
	{name: "rack_power_budget_watts", kind: gauge, help: "Power that the rack may draw."},
	{name: "power_shelf_output_watts", kind: gauge, help: "Power given by a shelf."},
}

const powerShelves = 4

func newCoolingSource(f *Fleet, tg *Target, replica int) source {
	s := &coolingSource{f: f, r: tg.rack, collect: 10 * second}
	for _, n := range s.r.nodes {
		units := 1
		if n.role != roleTraining {
			units = f.cfg.GPUsPerNode
		}
		s.jobs = append(s.jobs, make([]*job, units))
	}
	cdu := pair{"cdu", "cdu-" + s.r.Name}
	loop := []pair{cdu, {"loop", "secondary"}}
	fam := func(i int) *family { return &coolingFamilies[i] }
	var extra []extraLine
	add := func(i int, ls ...pair) {
		extra = append(extra, extraLine{family: fam(i), name: coolingFamilies[i].name, labels: ls})
	}
	for i := range 3 {
		add(i, loop...)
	}
	for _, side := range []string{"supply", "return"} {
		add(3, append(loop[:2:2], pair{"side", side})...)
	}
	add(4, loop...)
	add(5, cdu)
	for _, pump := range []string{"a", "b"} {
		add(6, cdu, pair{"pump", pump})
	}
	for _, n := range s.r.nodes {
		add(7, pair{"level", "tray"}, pair{"node", n.Name})
	}
	add(7, pair{"level", "rack"})
	add(7, pair{"level", "cdu"})
	add(8)
	add(9)
	for shelf := range powerShelves {
		add(10, pair{"shelf", string(rune('1' + shelf))})
	}
	s.all = newGroup(groupSpec{page: replica < 0, target: tg.labels(replica, exporter{})}, nil, extra)
	s.g = []*group{s.all}
	return s
}

func (s *coolingSource) groups() []*group       { return s.g }
func (s *coolingSource) slowness(int64) float64 { return 1 }

// refresh implements source.
func (s *coolingSource) refresh(t int64) bool {
	at := floorDiv(t, s.collect) * s.collect
	if s.fresh && at == s.last {
		return true
	}
	s.last, s.fresh = at, true
	heat := s.heat(at)
	power := math.Round(heat*1.18/100) * 100 // with CPUs, fans and losses; 100 W steps
	d := s.r.key.with(1).with(uint64(at))
	loss, _ := s.r.coolantLoss(at)
	rated := 1.8 + 1.05*float64(len(s.r.nodes)*s.f.cfg.GPUsPerNode)
	flow := math.Round(100*(rated*loss.flow(at)+0.3*d.with(1).norm())) / 100
	supply := 34 + 6*s.r.key.with(2).unit() + 2*math.Sin(daily*seconds(at-epoch)) + 0.05*d.with(2).norm()
	back := supply + s.lagged(at)/1000/(max(flow, 1)/60*coolantHeat)
	clog := seconds(at-epoch) / (120 * 86400)
	clog -= math.Floor(clog) // filters are changed every four months
	differential := (90000 + 45000*clog) * loss.flow(at)
	v := s.all.vals[:0]
	v = append(v, tenth(supply), tenth(back), flow)
	v = append(v, math.Round(310000+differential/2+400*d.with(3).norm()), math.Round(310000-differential/2+400*d.with(4).norm()))
	v = append(v, math.Round(differential+300*d.with(5).norm()))
	v = append(v, thousandth(0.3+0.5*power/1000/(1.2*float64(len(s.r.nodes)*s.f.cfg.GPUsPerNode))+0.004*d.with(6).norm()))
	for pump := range 2 {
		v = append(v, thousandth(0.62*loss.flow(at)+0.1*clog+0.003*d.with(uint64(7+pump)).norm()))
	}
	v = s.leaks(v, at)
	v = append(v, power, float64(len(s.r.nodes)*s.f.cfg.GPUsPerNode)*950)
	for shelf := range powerShelves {
		share := 1.0/powerShelves + 0.004*d.with(uint64(20+shelf)).norm()
		v = append(v, math.Round(power*share/10)*10)
	}
	s.all.vals = v
	return true
}

// heat is the power (W) of the rack's GPUs at t.
func (s *coolingSource) heat(t int64) float64 {
	return s.sum(t, func(j *job) float64 { return j.watts(t) })
}

// lagged is the heat that arrives in the coolant at t.
func (s *coolingSource) lagged(t int64) float64 {
	return s.sum(t, func(j *job) float64 { return heatOf(j, t).memory })
}

func (s *coolingSource) sum(t int64, of func(j *job) float64) float64 {
	w := 0.0
	for i, n := range s.r.nodes {
		per := s.jobs[i]
		for gpu := range per {
			if j := per[gpu]; j == nil || t < j.begin || t >= j.end {
				per[gpu] = s.f.jobWithPast(n, gpu, t)
			}
			w += of(per[gpu]) * float64(s.f.cfg.GPUsPerNode) / float64(len(per))
		}
	}
	return w
}

// leaks appends what the leak sensors show: one rack in twenty leaks once a quarter.
func (s *coolingSource) leaks(v []float64, t int64) []float64 {
	c := floorDiv(t-epoch, leakCell)
	k := s.r.key.with(42).with(uint64(c))
	leak := false
	if k.unit() < 0.05*s.f.cfg.Failures {
		at := epoch + c*leakCell + int64(k.with(1).unit()*float64(leakCell-8*hour))
		leak = t >= at && t < at+int64(k.with(2).between(0.3, 6)*float64(hour))
	}
	tray := k.with(3).pick(len(s.r.nodes))
	for i := range s.r.nodes {
		v = append(v, truth(leak && i == tray))
	}
	return append(v, truth(leak), 0)
}

func tenth(x float64) float64      { return math.Round(x*10) / 10 }
func thousandth(x float64) float64 { return math.Round(min(max(x, 0), 1)*1000) / 1000 }
