package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
)

// stats count what the senders do.
type stats struct {
	mu        sync.Mutex // guards what follows
	r         report
	latencies map[int]int // by logarithmic bucket
}

// report is the outcome of a load. Every sample sent is accepted, refused or, where
// the run ended without an answer, unknown.
type report struct {
	Seconds   float64        `json:"seconds"`
	Sent      int64          `json:"samples_sent"`
	Accepted  int64          `json:"samples_accepted"`
	Refused   int64          `json:"samples_refused"`
	Unknown   int64          `json:"samples_unanswered"`
	PerSecond float64        `json:"samples_per_second"`
	Requests  int64          `json:"requests"`
	Retries   int64          `json:"retries"`
	Statuses  map[string]int `json:"answers_by_status"`
	BodyBytes int64          `json:"body_bytes"`
	WireBytes int64          `json:"wire_bytes"`
	Latency   latency        `json:"latency_seconds"`
	Refusal   string         `json:"first_refusal,omitempty"`
	Retry     string         `json:"last_retry_reason,omitempty"`
	Stopped   string         `json:"stopped_by,omitempty"`
}

// latency holds quantiles of the time from sending a request to its answer.
type latency struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

func newStats() *stats {
	return &stats{latencies: map[int]int{}, r: report{Statuses: map[string]int{}}}
}

func (s *stats) encoded(samples, body, wire int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r.Sent += int64(samples)
	s.r.BodyBytes += int64(body)
	s.r.WireBytes += int64(wire)
}

// latencyBase makes buckets 2% wide.
var latencyBase = math.Log(1.02)

func (s *stats) answered(took time.Duration, status int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r.Requests++
	key := "no answer"
	if status != 0 {
		key = fmt.Sprint(status)
	}
	s.r.Statuses[key]++
	s.latencies[int(math.Ceil(math.Log(max(took.Seconds(), 1e-6))/latencyBase))]++
	s.r.Latency.Max = max(s.r.Latency.Max, took.Seconds())
}

func (s *stats) accepted(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r.Accepted += int64(n)
}

// refused counts a request that was refused for good; written samples of it were
// stored all the same, where the store said so.
func (s *stats) refused(n, written int, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	written = min(max(written, 0), n)
	s.r.Accepted += int64(written)
	s.r.Refused += int64(n - written)
	if s.r.Refusal == "" {
		s.r.Refusal = why
	}
}

func (s *stats) retried(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r.Retries++
	s.r.Retry = why
}

func (s *stats) unknown(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r.Unknown += int64(n)
}

// reached tells whether most samples, if not 0, have been sent.
func (s *stats) reached(most int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return most > 0 && s.r.Sent >= most
}

func (s *stats) report(took time.Duration) report {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.r
	r.Seconds = took.Seconds()
	r.PerSecond = float64(r.Sent) / max(r.Seconds, 1e-9)
	r.Statuses = map[string]int{}
	for k, v := range s.r.Statuses {
		r.Statuses[k] = v
	}
	r.Latency.P50, r.Latency.P90, r.Latency.P99 = s.quantile(0.5), s.quantile(0.9), s.quantile(0.99)
	return r
}

func (s *stats) quantile(q float64) float64 {
	var buckets []int
	total := 0
	for b, n := range s.latencies {
		buckets = append(buckets, b)
		total += n
	}
	slices.Sort(buckets)
	left := int(math.Ceil(q * float64(total)))
	for _, b := range buckets {
		if left -= s.latencies[b]; left <= 0 {
			return math.Exp(float64(b) * latencyBase)
		}
	}
	return 0
}

func (r report) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "samples   %d sent in %.1f s (%.0f/s): %d accepted, %d refused, %d unanswered\n",
		r.Sent, r.Seconds, r.PerSecond, r.Accepted, r.Refused, r.Unknown)
	fmt.Fprintf(&b, "requests  %d, of which %d were sent again\n", r.Requests, r.Retries)
	statuses := make([]string, 0, len(r.Statuses))
	for k, v := range r.Statuses {
		statuses = append(statuses, fmt.Sprintf("%s: %d", k, v))
	}
	slices.Sort(statuses)
	fmt.Fprintf(&b, "answers   %s\n", strings.Join(statuses, ", "))
	if r.Sent > 0 {
		fmt.Fprintf(&b, "bytes     %d on the wire (%.1f per sample), %d before compression (%.1f per sample)\n",
			r.WireBytes, float64(r.WireBytes)/float64(r.Sent), r.BodyBytes, float64(r.BodyBytes)/float64(r.Sent))
	}
	fmt.Fprintf(&b, "latency   p50 %.1f ms, p90 %.1f ms, p99 %.1f ms, max %.1f ms\n",
		1000*r.Latency.P50, 1000*r.Latency.P90, 1000*r.Latency.P99, 1000*r.Latency.Max)
	for _, line := range []struct{ name, text string }{{"refused", r.Refusal}, {"retried", r.Retry}, {"stopped", r.Stopped}} {
		if line.text != "" {
			fmt.Fprintf(&b, "%-9s %s\n", line.name, line.text)
		}
	}
	return b.String()
}
