package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/prometheus/prometheus/model/histogram"

	"github.com/varvedb/varve/pkg/fleet"
	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// load is everything that is written, encoded before anything is measured: the
// generator must not compete with the target for the machine.
type load struct {
	protocol remotewrite.Protocol
	create   []request   // the first sample of every series
	rounds   [][]request // the timed part
	series   int
	later    int   // series that first appear in the timed part
	samples  int   // of the timed part
	bytes    int64 // of all bodies
	from, to int64 // times of the first and last sample, milliseconds
	gpus     int
	nodes    []string
	gpu      []string // UUIDs
}

type request struct {
	body    []byte
	samples int
}

// newLoad simulates a fleet of at least n series in which nothing comes or goes,
// so that what is measured is the steady state. The last sample lies shortly
// before now.
func newLoad(f runFlags, protocol remotewrite.Protocol, now time.Time) (*load, error) {
	cfg := fleet.DefaultConfig()
	cfg.Seed = f.Seed
	cfg.Profile = fleet.Profile(f.Profile)
	cfg.ScrapeInterval = f.Interval
	cfg.CollectInterval = 2 * f.Interval // held for two scrapes, as Helm's defaults make it
	cfg.MIG, cfg.TimeSlicing = 0, 0
	cfg.Failures, cfg.Churn, cfg.Rollouts, cfg.Garbage = 0, 0, 0, 0
	cfg.Cooling, cfg.Training, cfg.Inferring, cfg.TargetSeries = false, false, false, false
	perGPU := 25
	if cfg.Profile == fleet.H100Full {
		perGPU = 147
	}
	cfg.Nodes = max(1, (f.Series+perGPU*cfg.GPUsPerNode-1)/(perGPU*cfg.GPUsPerNode))
	cfg.Clusters = min(3, cfg.Nodes)
	fl, err := fleet.New(cfg)
	if err != nil {
		return nil, err
	}
	l := &load{protocol: protocol, gpus: cfg.Nodes * cfg.GPUsPerNode}
	first := now.Add(-time.Duration(f.Rounds+2) * f.Interval).UnixMilli()
	e := &requestEncoder{enc: remotewrite.NewEncoder(protocol), batch: f.Batch, seen: map[uint64]struct{}{}, uuids: map[string]struct{}{}, load: l}
	var scrapers []*fleet.Scraper
	for i := range fl.Targets() {
		if tg := &fl.Targets()[i]; tg.Kind == fleet.NodeTarget {
			scrapers = append(scrapers, fl.NewScraper(tg, 0, first))
			l.nodes = append(l.nodes, tg.Name)
		}
	}
	// In the order of their places in the interval, and always in the same one: a
	// series must stand in the same request of each round, see sender.
	slices.SortStableFunc(scrapers, func(a, b *fleet.Scraper) int { return int(a.At() - b.At()) })
	for r := range f.Rounds + 1 {
		for _, s := range scrapers {
			s.Scrape(e)
		}
		reqs := e.flush()
		if r == 0 {
			l.create, l.series = reqs, len(e.seen)
			continue
		}
		l.rounds = append(l.rounds, reqs)
		for _, q := range reqs {
			l.samples += q.samples
		}
	}
	if e.err != nil {
		return nil, e.err
	}
	l.later = len(e.seen) - l.series
	for u := range e.uuids {
		l.gpu = append(l.gpu, u)
	}
	slices.Sort(l.gpu)
	return l, nil
}

// requestEncoder makes requests out of what scrapes yield.
type requestEncoder struct {
	enc   remotewrite.Encoder
	batch int
	n     int // samples in the request being built
	done  []request
	seen  map[uint64]struct{}
	uuids map[string]struct{}
	load  *load
	err   error
}

// Sample implements fleet.Appender.
func (e *requestEncoder) Sample(ls series.LabelBytes, st, t int64, v float64) {
	if _, ok := e.seen[xxhash.Sum64(ls)]; !ok {
		e.seen[xxhash.Sum64(ls)] = struct{}{}
		if u := ls.Get("UUID"); u != nil {
			e.uuids[string(u)] = struct{}{}
		}
	}
	if e.load.from == 0 || t < e.load.from {
		e.load.from = t
	}
	e.load.to = max(e.load.to, t)
	e.enc.Series(ls)
	e.enc.Sample(st, t, v)
	if e.n++; e.n == e.batch {
		e.cut()
	}
}

// Histogram implements fleet.Appender.
func (e *requestEncoder) Histogram(ls series.LabelBytes, _, _ int64, _ *histogram.Histogram) {
	e.err = fmt.Errorf("BUG: the load has only floats, got a histogram of %s", ls)
}

// Exemplar implements fleet.Appender.
func (e *requestEncoder) Exemplar(series.LabelBytes, int64, float64) {}

func (e *requestEncoder) cut() {
	body := bytes.Clone(e.enc.Snappy())
	e.done = append(e.done, request{body: body, samples: e.n})
	e.load.bytes += int64(len(body))
	e.enc.Reset()
	e.n = 0
}

// flush ends a round: no request holds samples of two.
func (e *requestEncoder) flush() []request {
	if e.n > 0 {
		e.cut()
	}
	done := e.done
	e.done = nil
	return done
}

// written says how sending went.
type written struct {
	Wall    time.Duration
	Samples int
	Retries int
	Latency []time.Duration // of each request
}

// sender writes requests over a fixed number of connections. Requests at the same
// place of each round go over the same connection, one after the other, so that no
// series is ever out of order.
type sender struct {
	url     string
	headers http.Header
	clients []*http.Client
}

func newSender(url string, protocol remotewrite.Protocol, n int) *sender {
	s := &sender{url: url, headers: http.Header{}}
	remotewrite.SetRequestHeaders(s.headers, protocol)
	for range n {
		s.clients = append(s.clients, &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1}, Timeout: time.Minute})
	}
	return s
}

func (s *sender) close() {
	for _, c := range s.clients {
		c.CloseIdleConnections()
	}
}

// send sends the rounds as fast as the target takes them.
func (s *sender) send(ctx context.Context, rounds ...[]request) (written, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	results := make([]written, len(s.clients))
	began := time.Now()
	var wg sync.WaitGroup
	for i, client := range s.clients {
		wg.Go(func() {
			for _, reqs := range rounds {
				for j := i; j < len(reqs); j += len(s.clients) {
					if err := s.post(ctx, client, reqs[j], &results[i]); err != nil {
						cancel(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	w := written{Wall: time.Since(began)}
	for _, r := range results {
		w.Samples += r.Samples
		w.Retries += r.Retries
		w.Latency = append(w.Latency, r.Latency...)
	}
	return w, context.Cause(ctx)
}

// maxRetries bounds how often one request is sent again after 429 or 5xx.
const maxRetries = 100

func (s *sender) post(ctx context.Context, client *http.Client, q request, w *written) error {
	for try := 0; ; try++ {
		began := time.Now()
		status, answer, err := s.postOnce(ctx, client, q.body)
		if err != nil {
			return fmt.Errorf("write %d samples: %w", q.samples, err)
		}
		w.Latency = append(w.Latency, time.Since(began))
		switch {
		case status/100 == 2:
			w.Samples += q.samples
			return nil
		case status != http.StatusTooManyRequests && status/100 != 5 || try == maxRetries:
			return fmt.Errorf("write %d samples: answer %d: %s", q.samples, status, answer)
		}
		w.Retries++
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *sender) postOnce(ctx context.Context, client *http.Client, body []byte) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header = s.headers.Clone()
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 2000))
	return resp.StatusCode, string(bytes.TrimSpace(answer)), err
}

// seconds writes a time in milliseconds as the API wants it.
func seconds(ms int64) string { return strconv.FormatFloat(float64(ms)/1000, 'f', 3, 64) }
