package main

import (
	"container/heap"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"golang.org/x/time/rate"

	"github.com/varvedb/varve/pkg/fleet"
	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

type loadCommand struct {
	fleetFlags     `embed:""`
	URL            string        `default:"http://127.0.0.1:9433/api/v1/write" help:"Remote-write endpoint."`
	AllowRemote    bool          `help:"Permit a URL of another machine."`
	Protocol       string        `default:"1.0" enum:"1.0,2.0" help:"Remote write protocol: ${enum}."`
	From           string        `default:"now" help:"Timestamp of the first samples: now, -14d, or RFC 3339. Past samples are sent as fast as they are taken."`
	To             string        `placeholder:"TIME" help:"Stop at this timestamp. Default: go on live."`
	Duration       string        `placeholder:"DURATION" help:"Stop after this time on the clock, e.g. 5m."`
	Samples        int64         `help:"Stop after about this many samples."`
	Rate           float64       `help:"Most samples per second; 0 for no limit."`
	Twins          bool          `help:"Send everything twice, as two Prometheus servers with unlike offsets."`
	Concurrency    int           `default:"4" help:"Senders. A target belongs to one of them, so its samples arrive in order."`
	SamplesPerSend int           `default:"2000" help:"Samples per request."`
	Deadline       time.Duration `default:"5s" help:"Send a request that is not full after this time."`
	Skew           time.Duration `default:"10m" help:"How far (in sample time) one sender may be ahead of another."`
	Tenant         string        `help:"Value of X-Scope-OrgID."`
	Timeout        time.Duration `default:"30s" help:"Timeout of one request."`
	NoMetadata     bool          `help:"Send no metadata (1.0: once a minute; 2.0: with every series)."`
	NoRetry        bool          `help:"Count 429 and 5xx answers as refused instead of sending again."`
	DryRun         bool          `help:"Generate and encode, and send nothing."`
	JSON           bool          `name:"json" help:"Print the report as JSON."`
	Progress       time.Duration `default:"10s" help:"Interval of progress lines on stderr; 0 for none."`
}

// Run sends until the end of the range, of the allowance, or of ctx.
func (c *loadCommand) Run(ctx context.Context, stdout io.Writer) error {
	l, err := c.prepare(time.Now())
	if err != nil {
		return err
	}
	if limit, err := parseDuration(c.Duration); err != nil {
		return fmt.Errorf("--duration: %w", err)
	} else if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	report := l.run(ctx)
	if c.JSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(report)
	}
	_, err = io.WriteString(stdout, report.text())
	return err
}

// load is one run of the load command.
type load struct {
	cmd     *loadCommand
	fleet   *fleet.Fleet
	from    int64
	to      int64 // 0: no end
	limiter *rate.Limiter
	pace    *pace
	stats   *stats
	client  *http.Client
}

func (c *loadCommand) prepare(now time.Time) (*load, error) {
	switch {
	case c.Concurrency < 1 || c.Concurrency > 1024:
		return nil, fmt.Errorf("--concurrency is %d, want 1 to 1024", c.Concurrency)
	case c.SamplesPerSend < 1:
		return nil, fmt.Errorf("--samples-per-send is %d, want at least 1", c.SamplesPerSend)
	}
	if err := loopbackURL(c.URL, c.AllowRemote); err != nil {
		return nil, fmt.Errorf("--url: %w", err)
	}
	f, err := c.build(now)
	if err != nil {
		return nil, err
	}
	l := &load{cmd: c, fleet: f, stats: newStats(), pace: newPace(c.Concurrency, c.Skew.Milliseconds())}
	from, err := parseTime(c.From, now)
	if err != nil {
		return nil, fmt.Errorf("--from: %w", err)
	}
	if from.Before(fleet.Epoch().AddDate(0, 0, 1)) {
		return nil, fmt.Errorf("--from: %s is before the simulated world begins (%s)", from.Format(time.RFC3339), fleet.Epoch().Format(time.DateOnly))
	}
	l.from = from.UnixMilli()
	if c.To != "" {
		to, err := parseTime(c.To, now)
		if err != nil {
			return nil, fmt.Errorf("--to: %w", err)
		}
		l.to = to.UnixMilli()
	}
	if c.Rate > 0 {
		l.limiter = rate.NewLimiter(rate.Limit(c.Rate), max(c.SamplesPerSend*2, int(c.Rate/10)))
	}
	l.client = &http.Client{
		Timeout:   c.Timeout,
		Transport: &http.Transport{MaxIdleConnsPerHost: c.Concurrency, MaxConnsPerHost: c.Concurrency, DisableCompression: true},
	}
	return l, nil
}

// grace is how long a request that is under way may take when the run ends.
const grace = 5 * time.Second

func (l *load) run(ctx context.Context) report {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// Requests outlive ctx for a moment: what was sent wants its answer.
	hard, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	defer context.AfterFunc(ctx, l.pace.stop)()
	defer context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(grace, abort)
		context.AfterFunc(hard, func() { timer.Stop() })
	})()
	began := time.Now()
	var wg sync.WaitGroup
	for i := range l.cmd.Concurrency {
		s := l.newSender(hard, i)
		wg.Go(func() {
			defer l.pace.finish(i)
			if err := s.run(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		})
	}
	stop := make(chan struct{})
	var aside sync.WaitGroup
	aside.Go(func() { l.progress(stop, began) })
	wg.Wait()
	close(stop)
	aside.Wait()
	l.client.CloseIdleConnections()
	r := l.stats.report(time.Since(began))
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		r.Stopped = cause.Error()
	}
	return r
}

func (l *load) progress(stop <-chan struct{}, began time.Time) {
	if l.cmd.Progress <= 0 {
		return
	}
	tick := time.NewTicker(l.cmd.Progress)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
			r := l.stats.report(time.Since(began))
			slog.Info("load", "samples", r.Sent, "per_second", int(r.PerSecond), "refused", r.Refused, "retries", r.Retries,
				"sample_time", time.UnixMilli(l.pace.slowest()).UTC().Format(time.RFC3339))
		}
	}
}

// sender scrapes its share of the targets in time order and sends what it gets, one
// request after the other.
type sender struct {
	load     *load
	hard     context.Context // of requests; ends later than the run's
	number   int
	protocol remotewrite.Protocol
	queue    scrapeQueue
	enc      remotewrite.Encoder
	pending  int
	since    time.Time // the oldest pending sample was added
	err      error     // of a send in the middle of a scrape
	ctx      context.Context

	families  []series.Metadata
	described time.Time
}

func (l *load) newSender(hard context.Context, number int) *sender {
	s := &sender{load: l, hard: hard, number: number, protocol: remotewrite.Protocol1}
	if l.cmd.Protocol == "2.0" {
		s.protocol = remotewrite.Protocol2
	}
	s.enc = remotewrite.NewEncoder(s.protocol)
	if number == 0 && s.protocol == remotewrite.Protocol1 && !l.cmd.NoMetadata {
		s.families = l.fleet.Families()
	}
	replicas := 1
	if l.cmd.Twins {
		replicas = 2
	}
	targets := l.fleet.Targets()
	for i := number; i < len(targets); i += l.cmd.Concurrency {
		for r := range replicas {
			s.queue = append(s.queue, queued{l.fleet.NewScraper(&targets[i], r, l.from), 0})
		}
	}
	for i := range s.queue {
		s.queue[i].sentAt = s.queue[i].SentAt()
	}
	heap.Init(&s.queue)
	return s
}

// queued is a scraper with the time at which its next samples are sent.
type queued struct {
	*fleet.Scraper
	sentAt int64
}

type scrapeQueue []queued

func (q scrapeQueue) Len() int           { return len(q) }
func (q scrapeQueue) Less(i, j int) bool { return q[i].sentAt < q[j].sentAt }
func (q scrapeQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *scrapeQueue) Push(x any)        { *q = append(*q, x.(queued)) }
func (q *scrapeQueue) Pop() any          { panic("BUG: the queue never shrinks") }

func (s *sender) run(ctx context.Context) error {
	s.ctx = ctx
	var to fleet.Appender = s
	if s.protocol == remotewrite.Protocol2 && !s.load.cmd.NoMetadata {
		to = describing{s}
	}
	for len(s.queue) > 0 && ctx.Err() == nil && !s.load.stats.reached(s.load.cmd.Samples) {
		next := &s.queue[0]
		switch {
		case next.sentAt == math.MaxInt64: // all are at the end
			return s.flush(ctx)
		case s.load.to != 0 && next.At() > s.load.to:
			next.sentAt = math.MaxInt64
			heap.Fix(&s.queue, 0)
			continue
		}
		if err := s.waitFor(ctx, next.sentAt); err != nil {
			return err
		}
		if err := s.describe(ctx); err != nil {
			return err
		}
		next.Scrape(to)
		if s.err != nil {
			return s.err
		}
		next.sentAt = max(next.SentAt(), next.sentAt)
		heap.Fix(&s.queue, 0)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.flush(ctx)
}

// describe sends the metadata of all families once a minute, in requests of their
// own, as Prometheus does with protocol 1.0.
func (s *sender) describe(ctx context.Context) error {
	const perRequest = 500
	if len(s.families) == 0 || time.Since(s.described) < time.Minute {
		return nil
	}
	if err := s.flush(ctx); err != nil {
		return err
	}
	s.described = time.Now()
	for chunk := range slices.Chunk(s.families, perRequest) {
		for _, m := range chunk {
			s.enc.Metadata(m)
		}
		if err := s.send(ctx); err != nil {
			return err
		}
	}
	return nil
}

// waitFor waits until t is not in the future, and until the other senders are near.
func (s *sender) waitFor(ctx context.Context, t int64) error {
	for ctx.Err() == nil {
		ahead := time.Until(time.UnixMilli(t))
		if ahead <= 0 || s.load.cmd.DryRun && s.load.to != 0 {
			break
		}
		if s.pending > 0 {
			if left := s.load.cmd.Deadline - time.Since(s.since); left < ahead {
				ahead = max(left, 0)
			}
		}
		timer := time.NewTimer(ahead)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
		if s.pending > 0 && time.Since(s.since) >= s.load.cmd.Deadline {
			if err := s.flush(ctx); err != nil {
				return err
			}
		}
	}
	// A sender that waits for others must not sit on samples: they may be what the
	// others' store needs to see.
	if !s.load.pace.try(s.number, t) {
		if err := s.flush(ctx); err != nil {
			return err
		}
		s.load.pace.wait(s.number, t)
	}
	return ctx.Err()
}

// Sample implements fleet.Appender.
func (s *sender) Sample(ls series.LabelBytes, st, t int64, v float64) {
	s.begin()
	s.enc.Series(ls)
	s.enc.Sample(st, t, v)
}

// Histogram implements fleet.Appender.
func (s *sender) Histogram(ls series.LabelBytes, st, t int64, h *histogram.Histogram) {
	s.begin()
	s.enc.Series(ls)
	s.enc.Histogram(series.Histogram{ST: st, T: t, H: h})
}

// Exemplar implements fleet.Appender.
func (s *sender) Exemplar(ls series.LabelBytes, t int64, v float64) {
	s.enc.Exemplar(series.Exemplar{Labels: ls, T: t, V: v})
}

// begin makes room for a sample. It is called before the sample and not after, since
// exemplars and metadata follow their sample into the same request.
func (s *sender) begin() {
	if s.pending >= s.load.cmd.SamplesPerSend && s.err == nil {
		s.err = s.flush(s.ctx)
	}
	if s.pending == 0 {
		s.since = time.Now()
	}
	s.pending++
}

// describing is a sender that is told the family of every sample.
type describing struct{ *sender }

// Metadata implements fleet.MetadataAppender.
func (d describing) Metadata(m series.Metadata) { d.enc.Metadata(m) }
