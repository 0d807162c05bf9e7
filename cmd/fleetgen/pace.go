package main

import (
	"math"
	"sync"
)

// pace keeps the senders together in sample time: a store refuses what is much older
// than what it has seen, so one sender must not run days ahead of another.
type pace struct {
	mu      sync.Mutex // guards what follows
	moved   *sync.Cond
	at      []int64 // sample time that each sender has reached
	skew    int64
	stopped bool
}

func newPace(senders int, skew int64) *pace {
	p := &pace{at: make([]int64, senders), skew: max(skew, 0)}
	p.moved = sync.NewCond(&p.mu)
	return p
}

// try records that sender i wants to go on at t, and tells whether it may.
func (p *pace) try(i int, t int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.may(i, t)
}

// wait blocks until sender i may go on at t, or the run ends.
func (p *pace) wait(i int, t int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.may(i, t) {
		p.moved.Wait()
	}
}

func (p *pace) may(i int, t int64) bool {
	if p.at[i] != t {
		p.at[i] = t
		p.moved.Broadcast()
	}
	return p.stopped || t <= p.min()+p.skew
}

func (p *pace) min() int64 {
	m := int64(math.MaxInt64)
	for _, t := range p.at {
		m = min(m, t)
	}
	return m
}

// slowest returns the sample time that all senders have reached.
func (p *pace) slowest() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.min(); m != math.MaxInt64 {
		return m
	}
	return 0
}

// finish takes sender i out: nobody waits for it any more.
func (p *pace) finish(i int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at[i] = math.MaxInt64
	p.moved.Broadcast()
}

// stop lets everybody go on.
func (p *pace) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	p.moved.Broadcast()
}
