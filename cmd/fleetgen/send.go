package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/tenant"
)

// Backoff between resends, as in Prometheus.
const (
	minBackoff = 30 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// flush sends what is pending, again and again while the store says "later". Until
// it is through nothing else of this sender's targets is sent: order is kept.
func (s *sender) flush(ctx context.Context) error {
	body := s.enc.Snappy()
	n := s.pending
	defer func() {
		s.enc.Reset()
		s.pending, s.since = 0, time.Time{}
	}()
	st := s.load.stats
	if l := s.load.limiter; l != nil {
		if err := l.WaitN(ctx, min(n, l.Burst())); err != nil {
			return err
		}
	}
	st.encoded(n, s.enc.Len(), len(body))
	if s.load.cmd.DryRun {
		st.accepted(n)
		return nil
	}
	for backoff := minBackoff; ; backoff = min(2*backoff, maxBackoff) {
		began := time.Now()
		a, err := s.post(ctx, body)
		if ctx.Err() != nil {
			st.unknown(n)
			return ctx.Err()
		}
		st.answered(time.Since(began), a.status)
		switch {
		case err == nil && a.status/100 == 2:
			st.accepted(n)
			return nil
		case err == nil && a.status != http.StatusTooManyRequests && a.status/100 != 5, s.load.cmd.NoRetry:
			st.refused(n, a.written, fmt.Sprintf("%d %s %v", a.status, a.message, err))
			return nil
		}
		st.retried(fmt.Sprintf("%d %s %v", a.status, a.message, err))
		select {
		case <-ctx.Done():
			st.unknown(n)
			return ctx.Err()
		case <-time.After(max(backoff, a.after)):
		}
	}
}

// answer is what the store said.
type answer struct {
	status  int
	message string
	written int           // samples stored although the request was refused, -1 if not said
	after   time.Duration // when to come back
}

func (s *sender) post(ctx context.Context, body []byte) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.load.cmd.URL, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	p := remotewrite.Protocol1
	if s.load.cmd.Protocol == "2.0" {
		p = remotewrite.Protocol2
	}
	remotewrite.SetRequestHeaders(req.Header, p)
	req.Header.Set("User-Agent", "fleetgen")
	if s.load.cmd.Tenant != "" {
		req.Header.Set(tenant.Header, s.load.cmd.Tenant)
	}
	resp, err := s.load.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 512)) // a cut message is still a message
	io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	a := answer{status: resp.StatusCode, message: strings.TrimSpace(string(text)), written: -1}
	if w := resp.Header.Get("X-Prometheus-Remote-Write-Samples-Written"); w != "" {
		if n, err := strconv.Atoi(w); err == nil {
			a.written = n
		}
	}
	if after, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && after > 0 {
		a.after = min(time.Duration(after)*time.Second, time.Minute)
	}
	return a, nil
}
