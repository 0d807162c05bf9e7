package querier_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/tsdbutil"
)

// point is a sample of the test fleet; no value at all if none is set.
type point struct {
	v    float64
	h    *histogram.Histogram
	fh   *histogram.FloatHistogram
	none bool
	st   int64
}

// source is one series of the test fleet: point gives its sample at step i.
type source struct {
	labels labels.Labels
	point  func(i int) point
}

// fleetData describes the series that querier/testdata/queries.txt asks for, sorted by
// labels so that every storage meets them in that order.
func fleetData() []source {
	f := &fleetBuilder{rand: rand.New(rand.NewPCG(1, 2))}
	f.gpus()
	f.cluster()
	f.services()
	f.natives()
	f.oddities()
	slices.SortFunc(f.sources, func(a, b source) int { return labels.Compare(a.labels, b.labels) })
	return f.sources
}

type fleetBuilder struct {
	rand    *rand.Rand
	sources []source
}

func (f *fleetBuilder) add(point func(i int) point, name string, pairs ...string) {
	f.sources = append(f.sources, source{labels.FromStrings(append([]string{"__name__", name}, pairs...)...), point})
}

// gauge adds a series of decimals around mean.
func (f *fleetBuilder) gauge(mean, spread float64, name string, pairs ...string) {
	values := make([]float64, 700)
	for i := range values {
		values[i] = math.Round((mean+f.rand.NormFloat64()*spread)*1000) / 1000
	}
	f.add(func(i int) point { return point{v: values[i/2*2]} }, name, pairs...) // each value held twice
}

// whole adds a gauge of whole numbers between 0 and most.
func (f *fleetBuilder) whole(mean, spread, most float64, name string, pairs ...string) {
	values := make([]float64, 700)
	for i := range values {
		values[i] = math.Round(min(most, max(0, mean+f.rand.NormFloat64()*spread)))
	}
	f.add(func(i int) point { return point{v: values[i/2*2]} }, name, pairs...)
}

// counter adds a series that rises by about rate a step and restarts after reset steps.
func (f *fleetBuilder) counter(rate float64, reset int, name string, pairs ...string) {
	values := make([]float64, 700)
	for i := range values {
		if i > 0 && (reset == 0 || i%reset != 0) {
			values[i] = values[i-1] + math.Floor(f.rand.Float64()*2*rate)
		}
	}
	f.add(func(i int) point {
		st := base
		if reset > 0 {
			st += int64(i/reset*reset) * step
		}
		return point{v: values[i], st: st - 1}
	}, name, pairs...)
}

func (f *fleetBuilder) fixed(v float64, name string, pairs ...string) {
	f.add(func(int) point { return point{v: v} }, name, pairs...)
}

func (f *fleetBuilder) gpus() {
	for _, cluster := range []string{"a", "b"} {
		for n := range 2 {
			for g := range 2 {
				node := fmt.Sprintf("%s-node-%d", cluster, n)
				model := []string{"NVIDIA H100 80GB HBM3", "NVIDIA H200"}[n]
				gpu := []string{"cluster", cluster, "rack", cluster + "-r" + fmt.Sprint(n), "node", node, "gpu", fmt.Sprint(g),
					"UUID", fmt.Sprintf("GPU-%s%d%d-0001", cluster, n, g), "modelName", model, "DCGM_FI_DRIVER_VERSION", "580.105.08", "job", "dcgm-exporter", "instance", node + ":9400"}
				with := func(more ...string) []string { return append(slices.Clone(gpu), more...) }
				busy := with("pod", "train-7", "namespace", "research", "hpc_job", "4711")
				if g == 1 {
					busy = with("pod", "infer-x", "namespace", "serving")
				}
				if cluster == "b" && n == 1 {
					busy = gpu
				}
				if n*g == 1 {
					f.whole(0, 2, 100, "DCGM_FI_DEV_GPU_UTIL", busy...) // idle
				} else {
					f.whole(90, 30, 100, "DCGM_FI_DEV_GPU_UTIL", busy...)
				}
				f.gauge(0.6, 0.2, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", busy...)
				power := 600.0
				if cluster == "a" && n == 1 {
					power = 400 // a straggler
				}
				if cluster == "b" && n == 0 && g == 0 {
					f.fixed(612.5, "DCGM_FI_DEV_POWER_USAGE", busy...) // frozen
				} else {
					f.gauge(power, 60, "DCGM_FI_DEV_POWER_USAGE", busy...)
				}
				f.whole(50, 12, 90, "DCGM_FI_DEV_GPU_TEMP", busy...)
				if !(cluster == "a" && n == 0 && g == 1) {
					f.whole(70, 10, 105, "DCGM_FI_DEV_MEMORY_TEMP", busy...)
				}
				f.fixed(95, "DCGM_FI_DEV_MEM_MAX_OP_TEMP", busy...)
				f.counter(1e9, 0, "DCGM_FI_DEV_THERMAL_VIOLATION", busy...)
				f.counter(2e9, 0, "DCGM_FI_DEV_POWER_VIOLATION", busy...)
				f.counter(18_000_000, 230, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", busy...)
				f.counter(0.6, 0, "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", gpu...)
				f.counter(0.51, 0, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", gpu...)
				f.counter(3, 100, "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", gpu...)
				f.fixed(float64(g*n), "DCGM_FI_DEV_ROW_REMAP_FAILURE", gpu...)
				f.fixed(float64(16-8*g), "DCGM_FI_DEV_PCIE_LINK_WIDTH", gpu...)
				f.fixed(16, "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", gpu...)
				f.gauge(65_000, 9_000, "DCGM_FI_DEV_FB_USED", busy...)
				f.gauge(15_000, 4_000, "DCGM_FI_DEV_FB_FREE", busy...)
				f.xid(g, n, gpu)
				for id := range 3 {
					pod := []string{"p0", "p1", ""}[id]
					f.gauge(0.5, 0.1, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", with("GPU_I_ID", fmt.Sprint(id), "GPU_I_PROFILE", []string{"1g.10gb", "2g.20gb"}[id%2], "pod", pod)...)
				}
			}
		}
	}
}

// xid adds an error code that appears, and the exporter's count of the last minutes.
func (f *fleetBuilder) xid(g, n int, gpu []string) {
	with := func(more ...string) []string { return append(slices.Clone(gpu), more...) }
	f.add(func(i int) point { return point{none: i >= 300} }, "DCGM_FI_DEV_XID_ERRORS", with("err_code", "0")...)
	code := []string{"31", "79"}[(g+n)%2]
	f.add(func(i int) point { return point{none: i < 300, v: 79} }, "DCGM_FI_DEV_XID_ERRORS", with("err_code", code)...)
	f.add(func(i int) point { return point{v: float64(max(0, i%40-30))} }, "DCGM_EXP_XID_ERRORS_COUNT", with("xid", code)...)
}

func (f *fleetBuilder) cluster() {
	for _, c := range []string{"a", "b"} {
		for n := range 2 {
			node, rack := fmt.Sprintf("%s-node-%d", c, n), fmt.Sprintf("%s-r%d", c, n)
			f.add(func(i int) point { return point{v: float64(min(1, i%97))} }, "up", "cluster", c, "node", node, "job", "dcgm-exporter", "instance", node+":9400")
			f.add(func(i int) point { return point{v: 1} }, "up", "cluster", c, "node", node, "job", "node", "instance", node+":9100")
			f.fixed(8, "kube_node_status_allocatable", "cluster", c, "node", node, "resource", "nvidia_com_gpu")
			f.add(func(i int) point { return point{v: float64(1 + i/200)} }, "kube_pod_container_resource_requests", "cluster", c, "namespace", "research", "pod", "train-"+fmt.Sprint(n), "resource", "nvidia_com_gpu")
			f.fixed(float64(n), "kube_pod_status_phase", "cluster", c, "namespace", "research", "pod", "train-"+fmt.Sprint(n), "phase", "Pending")
			f.fixed(1500, "rack_power_budget_watts", "cluster", c, "rack", rack)
			f.gauge(30, 0.5, "coolant_supply_temperature_celsius", "cluster", c, "rack", rack, "cdu", "1", "loop", "1")
			f.gauge(40, 1, "coolant_return_temperature_celsius", "cluster", c, "rack", rack, "cdu", "1", "loop", "1")
			f.gauge(130, 20, "coolant_flow_liters_per_minute", "cluster", c, "rack", rack, "cdu", "1", "loop", "1")
			f.fixed(float64(n), "coolant_leak_detected", "cluster", c, "rack", rack, "node", node, "level", "tray")
			f.gauge(1450, 50, "node:gpu_power_watts:sum", "cluster", c, "rack", rack, "node", node)
			f.add(func(i int) point { return point{none: i%9 > 4, v: 1} }, "job_node:gpu_straggler:bool", "cluster", c, "node", node, "hpc_job", "4711")
		}
		for m, model := range []string{"NVIDIA H100 80GB HBM3", "NVIDIA H200"} {
			f.fixed(2, "cluster:gpu_installed:count", "cluster", c, "modelName", model)
			f.add(func(i int) point { return point{v: float64(i%3 + m)} }, "cluster:gpu_allocated:count", "cluster", c, "modelName", model)
		}
		f.gauge(3, 1, "cluster:gpu_busy:count", "cluster", c)
	}
	f.fixed(3.5, "gpu_model_hourly_cost_usd", "modelName", "NVIDIA H100 80GB HBM3", "currency", "USD")
	f.fixed(4.25, "gpu_model_hourly_cost_usd", "modelName", "NVIDIA H200", "currency", "USD")
	for _, ns := range []string{"research", "serving"} {
		for k, le := range []string{"0", "5", "20", "40", "60", "80", "95", "100", "+Inf"} {
			f.fixed(float64(k), "namespace:gpu_util:bucket", "namespace", ns, "le", le)
		}
	}
}

func (f *fleetBuilder) services() {
	for e, model := range []string{"llama-70b", "mixtral"} {
		service := []string{"model_name", model, "engine", fmt.Sprint(e), "namespace", "serving", "job", "vllm", "instance", "v" + fmt.Sprint(e) + ":8000"}
		with := func(more ...string) []string { return append(slices.Clone(service), more...) }
		f.counter(900, 150, "vllm:generation_tokens_total", service...)
		f.gauge(5, 2, "vllm:num_requests_running", service...)
		f.gauge(0.9, 0.1, "vllm:kv_cache_usage_perc", service...)
		for k, le := range []string{"0.1", "0.25", "0.5", "1.0", "2.5", "+Inf"} {
			weight := k + 1
			f.add(func(i int) point { return point{v: float64(weight * (i%150 + 1) * 7)} }, "vllm:time_to_first_token_seconds_bucket", with("le", le)...)
		}
		version := []string{"1.0", "1.1"}
		f.add(func(i int) point { return point{v: 1, none: i >= 350} }, "target_info", "job", "vllm", "instance", "v"+fmt.Sprint(e)+":8000", "service_version", version[0], "host_name", "h")
		f.add(func(i int) point { return point{v: 1, none: i < 350} }, "target_info", "job", "vllm", "instance", "v"+fmt.Sprint(e)+":8000", "service_version", version[1], "host_name", "h")
		f.counter(8_000, 0, "megatron_training_step_duration_ms_milliseconds_sum", "run", model)
		f.add(func(i int) point {
			if i%50 == 7 {
				return point{v: math.NaN()}
			}
			return point{v: 2 + 1/float64(i+1)}
		}, "megatron_training_loss", "run", model)
	}
}

// natives adds native histograms of every kind, counters with resets.
func (f *fleetBuilder) natives() {
	for _, c := range []string{"a", "b"} {
		f.add(func(i int) point {
			return point{h: tsdbutil.GenerateTestHistogram(int64(i % 210)), st: base + int64(i/210*210)*step - 1}
		}, "native_int", "cluster", c)
		f.add(func(i int) point { return point{fh: tsdbutil.GenerateTestFloatHistogram(int64(i % 130))} }, "native_float", "cluster", c)
		f.add(func(i int) point { return point{h: tsdbutil.GenerateTestCustomBucketsHistogram(int64(i % 330))} }, "native_custom", "cluster", c)
		f.add(func(i int) point { return point{h: tsdbutil.GenerateTestGaugeHistogram(int64(i * 37 % 100))} }, "native_gauge", "cluster", c)
		f.add(func(i int) point {
			if i/25%2 == 0 {
				return point{v: float64(i)}
			}
			return point{h: tsdbutil.GenerateTestHistogram(int64(i))}
		}, "native_mixed", "cluster", c)
	}
}

func (f *fleetBuilder) oddities() {
	stale := math.Float64frombits(value.StaleNaN)
	odd := []float64{math.NaN(), math.Inf(1), math.Inf(-1), 0, math.Copysign(0, -1), -1.5, 9223372036854775808, 140737488355328, stale, 5e-324}
	for k := range 4 {
		f.add(func(i int) point {
			if i/10%(k+2) == 0 {
				return point{v: odd[(i+k)%len(odd)]}
			}
			return point{v: float64(i), none: i%13 == k}
		}, "specials", "k", fmt.Sprint(k))
	}
	for g := range 2 {
		f.gauge(5, 3, "gpu.utf8.metric", "gpu.uuid", fmt.Sprintf("GPU-%d", g), "größe", "groß")
	}
}

// appendFleet appends the samples of [from, to), times relative to base.
func appendFleet(t testing.TB, app storage.AppenderV2, data []source, from, to int64) {
	t.Helper()
	for _, s := range data {
		var ref storage.SeriesRef
		for i := int(from / step); int64(i)*step < to; i++ {
			p := s.point(i)
			if p.none {
				continue
			}
			var err error
			if ref, err = app.Append(ref, s.labels, p.st, base+int64(i)*step, p.v, p.h, p.fh, storage.AppendV2Options{}); err != nil {
				t.Fatalf("append %s at step %d: %v", s.labels, i, err)
			}
		}
	}
}
