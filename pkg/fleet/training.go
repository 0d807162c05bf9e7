package fleet

import (
	"math"
	"strconv"
)

// trainingSource is what the ranks of a training job on one node export. Without a
// job the page is empty.
type trainingSource struct {
	f       *Fleet
	n       *Node
	target  *Target
	replica int
	job     *job
	valid   span
	g       []*group
	ranks   []rank
	leader  *leader // on the node of rank 0
	last    int64
	fresh   bool
}

// rank is one training process, on one GPU.
type rank struct {
	group     *group
	number    int
	allreduce classic
	ckpt      classic
	spread    mixture // of its all-reduce times
	shares    shares
	native    int // line of the native histogram, -1 for none
}

// leader is rank 0, which logs for all.
type leader struct {
	group *group
	step  classic
}

var (
	trainAllreduce  = family{name: "train_allreduce_seconds", kind: "histogram", help: "Duration of gradient all-reduces."}
	trainCheckpoint = family{name: "train_checkpoint_duration_seconds", kind: "histogram", help: "Duration of checkpoints."}
	trainBubble     = family{name: "train_pipeline_bubble_ratio", kind: gauge, help: "Share of a step that the pipeline stage waits."}
	trainDataWait   = family{name: "train_data_wait_seconds_total", kind: counter, help: "Time waiting for data."}
	trainSteps      = family{name: "train_step_total", kind: counter, help: "Steps done."}
	trainGoodput    = family{name: "train_goodput_seconds_total", kind: counter, help: "Time by what it was good for."}
	trainStep       = family{name: "train_step_seconds", kind: "histogram", help: "Duration of steps."}

	megatronFamilies = [...]family{
		{name: "megatron_training_loss", kind: gauge, help: "Training loss."},
		{name: "megatron_training_throughput_tflops_TFLOP_per_second", kind: gauge, help: "Throughput per GPU."},
		{name: "megatron_training_tokens_per_sec_per_second", kind: gauge, help: "Tokens per second."},
		{name: "megatron_training_grad_norm", kind: gauge, help: "Norm of the gradient."},
		{name: "megatron_training_skipped_iters_total", kind: counter, help: "Iterations skipped."},
		{name: "megatron_training_learning_rate", kind: gauge, help: "Learning rate."},
		{name: "megatron_training_memory_allocated_gb_GB", kind: gauge, help: "Memory allocated."},
	}
	megatronStep = family{name: "megatron_training_step_duration_ms_milliseconds", kind: "histogram", help: "Duration of a step."}

	goodputStates = [...]string{"productive", "checkpoint", "stalled", "loading"}
)

func newTrainingSource(f *Fleet, tg *Target, replica int) source {
	return &trainingSource{f: f, n: tg.node, target: tg, replica: replica}
}

func (s *trainingSource) groups() []*group       { return s.g }
func (s *trainingSource) slowness(int64) float64 { return 1 }

// refresh implements source.
func (s *trainingSource) refresh(t int64) bool {
	if x, _ := s.f.failureAt(s.n, t); x.active(t) && x.Kind == NodeLost {
		return false
	}
	if s.job == nil || !s.valid.has(t) {
		s.job = s.f.jobAt(s.n, 0, t)
		s.valid = span{s.job.begin, s.job.end}.and(splitAt(s.job.alloc, t))
		s.build(t)
	}
	at := floorDiv(t, 5*second) * 5 * second
	if len(s.g) == 0 || s.fresh && at == s.last {
		return true
	}
	s.last, s.fresh = at, true
	s.fill(at)
	return true
}

func (s *trainingSource) build(t int64) {
	s.g, s.ranks, s.leader, s.fresh = nil, nil, nil, false
	j := s.job
	if j.kind != jobTraining || t < j.alloc {
		return
	}
	gpus := s.f.cfg.GPUsPerNode
	target := s.target.labels(s.replica, exporter{})
	for i := range gpus {
		r := rank{number: (s.n.local-j.lo)*gpus + i, native: -1}
		r.allreduce = classic{family: &trainAllreduce, bounds: []float64{.005, .01, .02, .03, .05, .075, .1, .15, .25, .5, 1, 2.5}}
		r.ckpt = classic{family: &trainCheckpoint, bounds: []float64{20, 30, 45, 60, 90, 120, 180, 300}}
		tp := min(gpus, 8)
		pp := min(j.n, 4)
		ls := []pair{
			{"run", j.name}, {"rank", strconv.Itoa(r.number)}, {"gpu", strconv.Itoa(i)},
			{"tp", strconv.Itoa(r.number % tp)}, {"pp", strconv.Itoa(r.number / tp % pp)}, {"dp", strconv.Itoa(r.number / tp / pp)},
		}
		var extra []extraLine
		extra = r.allreduce.lines(extra)
		extra = r.ckpt.lines(extra)
		extra = append(extra, extraLine{family: &trainBubble, name: trainBubble.name},
			extraLine{family: &trainDataWait, name: trainDataWait.name, st: true},
			extraLine{family: &trainSteps, name: trainSteps.name, st: true})
		for _, state := range goodputStates {
			extra = append(extra, extraLine{family: &trainGoodput, name: trainGoodput.name, labels: []pair{{"state", state}}, st: true})
		}
		if i == 0 {
			r.native = len(extra)
			extra = append(extra, extraLine{family: &trainStep, name: trainStep.name, st: true, native: nativeHistogram(0, 1, 1)})
		}
		r.group = newGroup(groupSpec{page: s.replica < 0, exporter: ls, target: target, start: j.alloc}, nil, extra)
		r.spread = mixture{median: 0.045 * (1 + 0.1*j.key.with(200).with(uint64(r.number)).norm()), sigma: 0.35}
		r.shares = r.allreduce.shares(r.spread)
		s.ranks = append(s.ranks, r)
		s.g = append(s.g, r.group)
	}
	if s.n.local == j.lo {
		s.buildLeader(target)
	}
}

func (s *trainingSource) buildLeader(target []pair) {
	l := &leader{step: classic{family: &megatronStep, bounds: []float64{500, 1000, 2000, 3000, 4000, 5000, 7500, 10000, 15000, 30000}}}
	extra := l.step.lines(nil)
	for i := range megatronFamilies {
		f := &megatronFamilies[i]
		extra = append(extra, extraLine{family: f, name: f.name, st: f.kind == counter})
	}
	l.group = newGroup(groupSpec{page: s.replica < 0, exporter: []pair{{"run", s.job.name}}, target: target, start: s.job.alloc}, nil, extra)
	s.leader = l
	s.g = append(s.g, l.group)
}

// stepSeconds is how long the job's steps take.
func (j *job) stepSeconds() float64 { return j.key.with(201).between(1.5, 9) }

func (s *trainingSource) fill(t int64) {
	j := s.job
	busy := j.busySeconds(t)
	step := j.stepSeconds()
	steps := math.Floor(busy / step)
	for i := range s.ranks {
		r := &s.ranks[i]
		k := j.key.with(202).with(uint64(r.number))
		d := k.with(uint64(t))
		v := r.group.vals
		r.allreduce.fill(v, r.shares, r.spread, steps*4, 0, k)
		s.fillCheckpoints(v, r, t, k)
		at := r.ckpt.at + len(r.ckpt.bounds) + 3
		v[at] = min(max(0.12+0.02*d.norm(), 0), 1)
		v[at+1] = busy*0.021 + 0.01*steps*k.unit()
		v[at+2] = steps
		v[at+3] = busy * 0.97
		v[at+4] = seconds(max(0, t-j.alloc-j.load)) - busy
		v[at+5] = busy * 0.03
		v[at+6] = seconds(min(max(t-j.alloc, 0), j.load))
		if r.native >= 0 {
			r.group.more[r.native].native = nativeHistogram(steps, step, 0.08)
		}
	}
	if s.leader != nil {
		s.fillLeader(s.leader, steps, step)
	}
}

// fillCheckpoints: all checkpoints of a job take about as long as it is configured,
// so they fall into one bucket.
func (s *trainingSource) fillCheckpoints(v []float64, r *rank, t int64, k key) {
	n := float64(s.job.checkpoints(t))
	took := seconds(s.job.ckpt) * (0.95 + 0.05*k.unit())
	v = v[r.ckpt.at:]
	for i, b := range r.ckpt.bounds {
		v[i] = n * truth(took <= b)
	}
	e := len(r.ckpt.bounds)
	v[e], v[e+1], v[e+2] = n, n*took, n
}

// fillLeader sets what rank 0 logs every ten steps: doubles with all their digits.
func (s *trainingSource) fillLeader(l *leader, steps, step float64) {
	j := s.job
	logged := math.Floor(steps/10) * 10
	k := j.key.with(203)
	d := k.with(uint64(logged))
	v := l.group.vals
	m := mixture{median: step * 1000, sigma: 0.08}
	l.step.fill(v, l.step.shares(m), m, steps, 0, k)
	v = v[l.step.at+len(l.step.bounds)+3:]
	v[0] = j.loss(logged)
	v[1] = 420 + 60*k.unit() + 6*d.with(1).norm()
	v[2] = float64(j.size) * 2200 * (1 + 0.01*d.with(2).norm()) * 9 / (step + 1)
	v[3] = d.with(3).lognorm(0.8, 0.4)
	v[4] = math.Floor(steps / 900 * k.with(4).unit())
	v[5] = 3e-4 * min(1, logged/2000) * (0.55 + 0.45*math.Cos(math.Pi*min(1, logged/200000)))
	v[6] = j.mem / 1024
}

// loss falls with a power of the step; one run in thirty loses its mind for a while,
// and then the loss is not a number.
func (j *job) loss(step float64) float64 {
	k := j.key.with(204)
	if k.unit() < 1.0/30 {
		from := k.with(1).between(500, 5000)
		if step >= from && step < from+k.with(2).between(20, 400) {
			return math.NaN()
		}
	}
	loss := k.with(3).between(1.6, 2.2) + 9*math.Pow(step+1, -0.3)
	if w := k.with(uint64(100 + step/200)); w.unit() < 0.02 {
		loss *= 1 + 2*w.with(1).unit() // a spike
	}
	return loss * (1 + 0.008*k.with(4).with(uint64(step)).norm())
}
