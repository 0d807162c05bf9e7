package fleet

import (
	"fmt"
	"math"

	"github.com/varvedb/varve/pkg/series"
)

type vllmModel struct{ short, name string }

var vllmModels = [...]vllmModel{
	{"llama-8b", "meta-llama/Llama-3.1-8B-Instruct"}, {"llama-70b", "meta-llama/Llama-3.3-70B-Instruct"},
	{"qwen-32b", "Qwen/Qwen3-32B"}, {"mixtral", "mistralai/Mixtral-8x22B-Instruct-v0.1"},
}

// vllmSource is the inference engines on one node: one per pod.
type vllmSource struct {
	f       *Fleet
	n       *Node
	target  *Target
	replica int
	valid   span
	engines []*engine
	g       []*group
	last    int64
	fresh   bool
}

// engine is one vLLM process.
type engine struct {
	job        *job
	group      *group
	histograms []engineHistogram
}

type engineHistogram struct {
	classic
	mixture mixture
	shares  shares
	per     float64 // observations per request
}

var (
	vllmGauges = [...]family{
		{name: "vllm:num_requests_running", kind: gauge, help: "Requests being executed."},
		{name: "vllm:num_requests_waiting", kind: gauge, help: "Requests in the queue."},
		{name: "vllm:kv_cache_usage_perc", kind: gauge, help: "Share of the KV cache in use."},
	}
	vllmCounters = [...]struct {
		family
		per  float64 // of each request
		slow bool    // of slow requests only
	}{
		{family{name: "vllm:prompt_tokens_total", kind: counter, help: "Prompt tokens."}, 900, false},
		{family{name: "vllm:generation_tokens_total", kind: counter, help: "Tokens generated."}, 310, false},
		{family{name: "vllm:num_preemptions_total", kind: counter, help: "Requests preempted."}, 0.4, true},
		{family{name: "vllm:prefix_cache_queries_total", kind: counter, help: "Tokens looked up in the prefix cache."}, 900, false},
		{family{name: "vllm:prefix_cache_hits_total", kind: counter, help: "Tokens found in the prefix cache."}, 380, false},
	}
	vllmSuccess = family{name: "vllm:request_success_total", kind: counter, help: "Requests finished, by reason."}
	vllmReasons = [...]struct {
		name string
		per  float64
	}{{"stop", 0.9}, {"length", 0.085}, {"abort", 0.015}}

	latencyBounds = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	tokenBounds   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}

	vllmHistograms = [...]struct {
		family  family
		bounds  []float64
		mixture mixture
		per     float64
	}{
		{histogramFamily("time_to_first_token_seconds"), []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560},
			mixture{0.25, 0.5, 2.5, 0.9}, 1},
		{histogramFamily("time_per_output_token_seconds"), []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80},
			mixture{0.03, 0.3, 0.09, 0.5}, 310},
		{histogramFamily("e2e_request_latency_seconds"), latencyBounds, mixture{9, 0.7, 30, 0.8}, 1},
		{histogramFamily("request_queue_time_seconds"), latencyBounds, mixture{0.05, 1, 2, 0.9}, 1},
		{histogramFamily("request_inference_time_seconds"), latencyBounds, mixture{8.7, 0.7, 27, 0.8}, 1},
		{histogramFamily("request_prefill_time_seconds"), latencyBounds, mixture{0.2, 0.5, 0.5, 0.6}, 1},
		{histogramFamily("request_decode_time_seconds"), latencyBounds, mixture{8.4, 0.7, 26, 0.8}, 1},
		{histogramFamily("request_prompt_tokens"), tokenBounds, mixture{550, 1, 2500, 0.8}, 1},
		{histogramFamily("request_generation_tokens"), tokenBounds, mixture{220, 0.8, 600, 0.6}, 1},
		{histogramFamily("iteration_tokens_total"), []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}, mixture{90, 0.9, 700, 0.7}, 40},
	}
)

func histogramFamily(name string) family {
	return family{name: "vllm:" + name, kind: "histogram", help: "Distribution over requests."}
}

func newVLLMSource(f *Fleet, tg *Target, replica int) source {
	return &vllmSource{f: f, n: tg.node, target: tg, replica: replica}
}

func (s *vllmSource) groups() []*group       { return s.g }
func (s *vllmSource) slowness(int64) float64 { return 1 }

// refresh implements source.
func (s *vllmSource) refresh(t int64) bool {
	if x, _ := s.f.failureAt(s.n, t); x.active(t) && x.Kind == NodeLost {
		return false
	}
	if !s.valid.has(t) {
		s.build(t)
	}
	at := floorDiv(t, second) * second
	if s.fresh && at == s.last {
		return true
	}
	s.last, s.fresh = at, true
	for _, e := range s.engines {
		e.fill(at)
	}
	return true
}

// build finds the pods that serve at t, and keeps the engines that go on.
func (s *vllmSource) build(t int64) {
	s.valid, s.fresh = always, false
	old := s.engines
	s.engines, s.g = nil, nil
	for gpu := 0; gpu < s.f.cfg.GPUsPerNode; {
		j := s.f.jobAt(s.n, gpu, t)
		gpu = j.lo + j.n
		ready := j.alloc + j.load
		s.valid = s.valid.and(span{j.begin, j.end}).and(splitAt(ready, t))
		if j.kind != jobInference || t < ready {
			continue
		}
		e := s.keep(old, j)
		if e == nil {
			e = s.start(j)
		}
		s.engines = append(s.engines, e)
		s.g = append(s.g, e.group)
	}
}

func (s *vllmSource) keep(old []*engine, j *job) *engine {
	for _, e := range old {
		if e.job.key == j.key {
			return e
		}
	}
	return nil
}

func (s *vllmSource) start(j *job) *engine {
	e := &engine{job: j}
	model := vllmModels[j.key.with(23).pick(len(vllmModels))]
	ls := []pair{{"model_name", model.name}, {"engine", "0"}, {"namespace", j.namespace}, {"pod", j.pod(s.n.local)}}
	var extra []extraLine
	for i := range vllmGauges {
		extra = append(extra, extraLine{family: &vllmGauges[i], name: vllmGauges[i].name})
	}
	for i := range vllmCounters {
		f := &vllmCounters[i].family
		extra = append(extra, extraLine{family: f, name: f.name, st: true})
	}
	for _, r := range vllmReasons {
		extra = append(extra, extraLine{family: &vllmSuccess, name: vllmSuccess.name, labels: []pair{{"finished_reason", r.name}}, st: true})
	}
	for i := range vllmHistograms {
		d := &vllmHistograms[i]
		h := engineHistogram{classic: classic{family: &d.family, bounds: d.bounds}, mixture: d.mixture, per: d.per}
		extra = h.lines(extra)
		h.shares = h.classic.shares(h.mixture)
		e.histograms = append(e.histograms, h)
	}
	e.group = newGroup(groupSpec{page: s.replica < 0, exporter: ls, target: s.target.labels(s.replica, exporter{}), start: j.alloc + j.load}, nil, extra)
	return e
}

// requestsPerSecond is what one GPU of an engine serves at full load.
const requestsPerSecond = 4

// served counts the requests that the job's engine served until t, and the slow ones
// among them: those come when the day's load is high.
func (j *job) served(t int64) (all, slow float64) {
	from := j.alloc + j.load
	if t <= from {
		return 0, 0
	}
	rate := requestsPerSecond * float64(j.size)
	return rate * (j.demanded(t) - j.demanded(from)), rate * 0.02 * (j.crowded(t) - j.crowded(from))
}

// crowded is the integral of (1+c)², c being the day's cosine in demand.
func (j *job) crowded(t int64) float64 {
	s := seconds(t - epoch)
	a := daily*s - 2*math.Pi*15/24 - j.day0
	return 1.5*s + 2*math.Sin(a)/daily + 0.25*math.Sin(2*a)/daily
}

func (e *engine) fill(t int64) {
	j := e.job
	all, slow := j.served(t)
	load := j.demand(t)
	d := j.key.with(210).with(uint64(t))
	v := e.group.vals
	v[0] = whole(load*48*float64(j.size) + 3*d.with(1).norm())
	v[1] = whole((load-0.7)*60*float64(j.size) + 2*d.with(2).norm())
	v[2] = min(1, max(0, 0.08+load*load*1.05+0.02*d.with(3).norm()))
	at := len(vllmGauges)
	for i := range vllmCounters {
		c := &vllmCounters[i]
		n := all
		if c.slow {
			n = slow
		}
		v[at+i] = math.Floor(n * c.per)
	}
	at += len(vllmCounters)
	for i, r := range vllmReasons {
		v[at+i] = math.Floor(all * r.per)
	}
	k := j.key.with(211)
	for i := range e.histograms {
		h := &e.histograms[i]
		h.fill(v, h.shares, h.mixture, all*h.per, slow*h.per, k.with(uint64(i)))
	}
	e.trace(t, d)
}

// trace gives one request's trace id with its time to first token.
func (e *engine) trace(t int64, d key) {
	h := &e.histograms[0]
	e.group.exemplar = nil
	if e.group.vals[h.at+len(h.bounds)] == 0 {
		return
	}
	x := d.with(5).lognorm(h.mixture.median, h.mixture.sigma)
	line := h.at
	for i, b := range h.bounds {
		if x > b {
			line = h.at + i + 1
		}
	}
	id := fmt.Sprintf("%016x%016x", uint64(d.with(6)), uint64(d.with(7)))
	e.group.exemplar = &exemplarOf{line: line, t: t - int64(d.with(8).unit()*900), v: x,
		labels: series.AppendLabel(nil, "trace_id", id)}
}
