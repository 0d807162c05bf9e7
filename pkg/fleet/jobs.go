package fleet

import (
	"fmt"
	"math"
)

// A block's time is cut into windows; within one, space (nodes, or the GPUs of one
// node) and time are halved again and again, by the block's key, until a piece is
// one job. So the job of any place and instant is found in twenty steps, and a job
// knows its own start, end and size.
const window = 32 * day

type jobKind uint8

const (
	jobNone jobKind = iota // nobody has the GPUs
	jobTraining
	jobInference
	jobVideo
	jobIdle // allocated, and doing nothing
)

// job is what runs on one or more GPUs for a while. Before alloc the place is free.
type job struct {
	key               key
	kind              jobKind
	begin, alloc, end int64
	lo, n             int // units: local nodes of a gang, GPUs of a pod
	size              int // GPUs

	name, namespace, container string
	hpc                        string // Slurm job id: no pod then

	load     int64 // duration of loading data
	period   int64 // of checkpoints, for training
	ckpt     int64 // duration of one
	busyW    float64
	ckptW    float64
	capShare float64 // of busy time spent at the power cap
	before   float64 // nominal W of the place when it was handed over
	day0     float64 // where in the day its load peaks, radians
	mem      float64 // MiB of frame buffer used
}

const (
	idleW    = 68.5
	loadingW = 115
)

// stopShare[i] is how often a piece of about window>>i is one job: chosen so that
// of the GPUs that start a job half get one shorter than 6 hours, with a tail to a
// month.
var stopShare = [...]float64{.053, .113, .127, .136, .21, .334, .5, .65, .72, .78, 1}

// jobAt returns the job that has unit i (a local node of a training block, or a
// GPU) at time t.
func (f *Fleet) jobAt(n *Node, gpu int, t int64) *job {
	b, i := n.block, n.local
	if n.role != roleTraining {
		b = block{key: n.key.with(10), n: powerOfTwo(f.cfg.GPUsPerNode), offset: int64(n.key.with(11).unit() * float64(window))}
		i = gpu
	}
	begin := floorDiv(t-b.offset, window)*window + b.offset
	k := b.key.with(uint64(begin / minute))
	lo, size, end := b.lo, b.n, begin+window
	for depth := uint64(0); ; depth++ {
		draw := k.with(depth)
		if size > 1 && draw.unit() < 0.38 {
			size /= 2
			if i >= lo+size {
				lo += size
				k = k.with(1001)
			} else {
				k = k.with(1002)
			}
			continue
		}
		if f.isOneJob(draw.with(1), end-begin) {
			break
		}
		cut := begin + int64(float64(end-begin)*draw.with(2).between(0.35, 0.65))
		if t >= cut {
			begin = cut
			k = k.with(1003)
		} else {
			end = cut
			k = k.with(1004)
		}
	}
	return f.describe(n, k.with(2000), begin, end, lo, size)
}

// jobWithPast is jobAt, with the power that the place drew when it was handed over.
func (f *Fleet) jobWithPast(n *Node, gpu int, t int64) *job {
	j := f.jobAt(n, gpu, t)
	j.before = f.jobAt(n, gpu, j.begin-1).watts(j.begin - 1)
	return j
}

func (f *Fleet) isOneJob(k key, length int64) bool {
	if f.cfg.Churn == 0 {
		return true
	}
	level := int(math.Round(math.Log2(float64(window) / float64(length) / f.cfg.Churn)))
	if level < 0 {
		return false
	}
	return k.unit() < stopShare[min(level, len(stopShare)-1)]
}

// describe fills in what follows from the piece's key.
func (f *Fleet) describe(n *Node, k key, begin, end int64, lo, size int) *job {
	j := &job{key: k, begin: begin, end: end, lo: lo, n: size}
	gap := int64(k.with(1).between(45, 600)) * second
	j.alloc = begin + min(gap, (end-begin)/10)
	u := k.with(2).unit()
	switch {
	case n.role == roleTraining && u < 0.8:
		j.kind = jobTraining
	case n.role == roleInference && u < 0.85, n.role == roleMIG && u < 0.9:
		j.kind = jobInference
	case n.role == roleVideo && u < 0.9:
		j.kind = jobVideo
	case u > 0.95:
		j.kind = jobIdle
	}
	j.size = size
	if n.role == roleTraining {
		j.size = size * f.cfg.GPUsPerNode
	} else {
		j.size = min(size, f.cfg.GPUsPerNode-lo)
	}
	f.nameJob(j)
	j.load = int64(k.with(3).between(60, 420)) * second
	j.period = int64(k.with(4).between(10*60, 30*60)) * second
	j.ckpt = int64(k.with(5).between(30, 120)) * second
	j.busyW = k.with(6).between(585, 645)
	j.ckptW = k.with(7).between(110, 200)
	j.capShare = max(0, k.with(8).between(-0.3, 0.8))
	j.day0 = k.with(9).between(-0.6, 0.6)
	switch j.kind {
	case jobTraining:
		j.mem = math.Floor(k.with(10).between(52000, 78000))
	case jobInference:
		j.mem = math.Floor(k.with(10).between(70000, 74500))
	case jobVideo:
		j.mem = math.Floor(k.with(10).between(4000, 16000))
		j.busyW = k.with(6).between(130, 190)
	case jobIdle:
		j.mem = math.Floor(k.with(10).between(600, 60000))
	}
	return j
}

func (f *Fleet) nameJob(j *job) {
	if j.kind == jobNone {
		return
	}
	id := uint64(j.key.with(20)) % 1_000_000
	teams := [...]string{"research-llm", "research-vision", "speech", "recsys", "robotics", "bio", "platform", "search"}
	j.namespace = teams[j.key.with(21).pick(len(teams))]
	suffix := podSuffix(j.key.with(22), 5)
	switch j.kind {
	case jobTraining:
		models := [...]string{"llm-7b", "llm-70b", "moe-8x22b", "diffusion-xl", "asr-large"}
		j.name = fmt.Sprintf("%s-pretrain-%s", models[j.key.with(23).pick(len(models))], suffix)
		j.container = "trainer"
		if j.key.with(24).unit() < 0.5 {
			j.hpc = fmt.Sprint(1_000_000 + id)
		}
	case jobInference:
		j.name = fmt.Sprintf("vllm-%s-%s", vllmModels[j.key.with(23).pick(len(vllmModels))].short, podSuffix(j.key.with(25), 10))
		j.container = "vllm"
	case jobVideo:
		j.name, j.container = "transcode-"+suffix, "transcoder"
	case jobIdle:
		j.name, j.container = "notebook-"+suffix, "jupyter"
		j.namespace = "notebooks"
	}
}

// pod is the name of the job's pod on the node: gangs have one worker per node.
func (j *job) pod(local int) string {
	switch j.kind {
	case jobTraining:
		return fmt.Sprintf("%s-worker-%d", j.name, local-j.lo)
	default:
		return fmt.Sprintf("%s-%s", j.name, podSuffix(j.key.with(26), 5))
	}
}

func podSuffix(k key, n int) string {
	const alphabet = "bcdfghjklmnpqrstvwxz2456789" // what Kubernetes uses
	b := make([]byte, n)
	for i := range b {
		b[i] = alphabet[k.with(uint64(i)).pick(len(alphabet))]
	}
	return string(b)
}

// phase is what a job is doing.
type phase uint8

const (
	phaseIdle phase = iota
	phaseLoad
	phaseBusy
	phaseCheckpoint
	phaseServe
	phaseVideo
)

// at returns what the job does at t, and its load: 0 to about 1.
func (j *job) at(t int64) (phase, float64) {
	x := t - j.alloc
	if x < 0 || j.kind == jobNone || j.kind == jobIdle {
		return phaseIdle, 0
	}
	if x < j.load {
		return phaseLoad, 0.1
	}
	x -= j.load
	switch j.kind {
	case jobTraining:
		if x%j.period >= j.period-j.ckpt {
			return phaseCheckpoint, 0.1
		}
		return phaseBusy, 1
	case jobInference:
		return phaseServe, j.demand(t)
	default:
		return phaseVideo, 0.5
	}
}

// watts is the nominal power of each of the job's GPUs at t.
func (j *job) watts(t int64) float64 {
	p, load := j.at(t)
	switch p {
	case phaseLoad:
		return loadingW
	case phaseBusy, phaseVideo:
		return j.busyW
	case phaseCheckpoint:
		return j.ckptW
	case phaseServe:
		return serveBaseW + serveSpanW*load
	default:
		return idleW
	}
}

const (
	serveBaseW = 150
	serveSpanW = 330
)

// joules is the integral of watts from begin to t.
func (j *job) joules(t int64) float64 {
	x := seconds(min(t, j.alloc) - j.begin)
	sum := idleW * x
	if t <= j.alloc {
		return sum
	}
	if j.kind == jobNone || j.kind == jobIdle {
		return sum + idleW*seconds(t-j.alloc)
	}
	loaded := min(t, j.alloc+j.load)
	sum += loadingW * seconds(loaded-j.alloc)
	if t == loaded {
		return sum
	}
	switch j.kind {
	case jobTraining:
		busy := j.busySeconds(t)
		return sum + j.busyW*busy + j.ckptW*(seconds(t-loaded)-busy)
	case jobInference:
		return sum + serveBaseW*seconds(t-loaded) + serveSpanW*(j.demanded(t)-j.demanded(loaded))
	default:
		return sum + j.busyW*seconds(t-loaded)
	}
}

// busySeconds is how long a training job computed until t.
func (j *job) busySeconds(t int64) float64 {
	x := t - j.alloc - j.load
	if j.kind != jobTraining || x <= 0 {
		return 0
	}
	work := j.period - j.ckpt
	return seconds(x/j.period*work + min(x%j.period, work))
}

// checkpoints is how many checkpoints are finished at t.
func (j *job) checkpoints(t int64) int64 {
	x := t - j.alloc - j.load
	if j.kind != jobTraining || x < 0 {
		return 0
	}
	return x / j.period
}

const (
	daily  = 2 * math.Pi / 86400
	weekly = daily / 7
	burst  = 300 // seconds
)

// demand is an inference service's load at t: a day 4:1 from peak to trough, a
// week, and bursts. Bursts are differences of a bounded noise, so that their sum
// over any time is bounded too, and demanded is exact at any age.
func (j *job) demand(t int64) float64 {
	s := seconds(t - epoch)
	w := uint64(s / burst)
	k := j.key.with(30)
	b := k.with(w+1).unit() - k.with(w).unit()
	return 0.54 + 0.27*math.Cos(daily*s-2*math.Pi*15/24-j.day0) + 0.05*math.Cos(weekly*s) + 0.12*b
}

// demanded is the integral of demand from the epoch to t, in seconds of full load.
func (j *job) demanded(t int64) float64 {
	s := seconds(t - epoch)
	w := math.Floor(s / burst)
	k := j.key.with(30)
	a, b := k.with(uint64(w)).unit(), k.with(uint64(w)+1).unit()
	bursts := burst*a + (b-a)*(s-w*burst)
	phase := 2*math.Pi*15/24 + j.day0
	return 0.54*s + 0.27/daily*math.Sin(daily*s-phase) + 0.05/weekly*math.Sin(weekly*s) + 0.12*bursts
}

func seconds(ms int64) float64 { return float64(ms) / 1000 }

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

func powerOfTwo(n int) int {
	p := 1
	for p < n {
		p *= 2
	}
	return p
}
