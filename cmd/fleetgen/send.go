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

// flush sends what is pending.
func (s *sender) flush(ctx context.Context) error {
	if s.pending == 0 {
		return nil
	}
	return s.send(ctx)
}

// send sends the request that was built, again and again while the store says
// "later". Until it is through nothing else of this sender's targets is sent: order
// is kept. It returns an error only when the run is over.
func (s *sender) send(ctx context.Context) error {
	body, n, st := s.enc.Snappy(), s.pending, s.load.stats
	size := s.enc.Len()
	s.pending = 0
	defer s.enc.Reset()
	if l := s.load.limiter; l != nil {
		if err := l.WaitN(ctx, min(n, l.Burst())); err != nil {
			return err
		}
	}
	st.encoded(n, size, len(body))
	if s.load.cmd.DryRun {
		st.accepted(n)
		return nil
	}
	for backoff := minBackoff; ; backoff = min(2*backoff, maxBackoff) {
		began := time.Now()
		a, err := s.post(body)
		st.answered(time.Since(began), a.status)
		why := fmt.Sprintf("%d %s", a.status, a.message)
		if err != nil {
			why = err.Error()
		}
		switch {
		case err == nil && a.status/100 == 2:
			st.accepted(n)
			return nil
		case err == nil && !again(a.status), s.load.cmd.NoRetry:
			st.refused(n, a.written, why)
			return nil
		}
		st.retried(why)
		select {
		case <-ctx.Done():
			st.unknown(n)
			return ctx.Err()
		case <-time.After(max(backoff, a.after)):
		}
	}
}

// again tells whether the same request may succeed later.
func again(status int) bool {
	return status == http.StatusTooManyRequests || status/100 == 5
}

// answer is what the store said.
type answer struct {
	status  int
	message string
	written int           // samples stored although the request was refused, -1 if not said
	after   time.Duration // when to come back
}

func (s *sender) post(body []byte) (answer, error) {
	req, err := http.NewRequestWithContext(s.hard, http.MethodPost, s.load.cmd.URL, bytes.NewReader(body))
	if err != nil {
		return answer{written: -1}, err
	}
	remotewrite.SetRequestHeaders(req.Header, s.protocol)
	req.Header.Set("User-Agent", "fleetgen")
	if s.load.cmd.Tenant != "" {
		req.Header.Set(tenant.Header, s.load.cmd.Tenant)
	}
	resp, err := s.load.client.Do(req)
	if err != nil {
		return answer{written: -1}, err
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
