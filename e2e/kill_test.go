package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/stretchr/testify/require"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// TestKill9 kills Varve twenty times (a hundred in make soak) at random instants while writers send known
// sequences, some of them late and some of new series, and after every restart reads
// everything back: each acknowledged sample is there exactly once with its value, and
// nothing is there that was not sent.
func TestKill9(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("VARVE_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("VARVE_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 1))

	dir := t.TempDir()
	begin := time.Now().Add(-50 * time.Minute).Truncate(time.Second)
	writers := make([]*killWriter, 4)
	for i := range writers {
		writers[i] = &killWriter{id: i, protocol: remotewrite.Protocol(1 + i%2), begin: begin}
	}
	varve := startVarve(t, dir)
	kills := 20
	if soak() {
		kills = 100
	}
	for round := range kills {
		var stop atomic.Bool
		var wg sync.WaitGroup
		for _, w := range writers {
			wg.Go(func() {
				for !stop.Load() && w.send(varve) {
				}
			})
		}
		time.Sleep(time.Duration(50+random.IntN(350)) * time.Millisecond)
		varve.kill()
		stop.Store(true)
		wg.Wait()
		varve = startVarve(t, dir)
		for _, w := range writers {
			w.check(t, varve, fmt.Sprintf("round %d", round))
		}
	}
	total := 0
	for _, w := range writers {
		total += w.acknowledged
	}
	t.Logf("%d samples were acknowledged over %d kills, all are there", total, kills)
	require.Greater(t, total, 10_000, "the writers wrote too little to prove anything")
	varve.interrupt()
	varve = startVarve(t, dir)
	for _, w := range writers {
		w.check(t, varve, "after a clean stop")
	}
}

// killWriter sends one sample for each of its series per request; sample k of a series
// has the time begin+k*step and the value k. Two writers share their series, one with
// the even k and one with the odd, so that new ones come on two connections at once. Every tenth request is held back and sent
// five requests later, so that late samples are killed, too.
type killWriter struct {
	id       int
	protocol remotewrite.Protocol
	begin    time.Time

	next         int
	held         []int
	sent         map[int]bool // requests that were sent, acknowledged or not
	acked        map[int]bool
	acknowledged int
}

const (
	killSeries = 40
	killStep   = 250 * time.Millisecond
)

func (w *killWriter) seriesOf(k, i int) labels.Labels {
	// A third of the series change their name every 50 requests of each writer, as pods do.
	generation := 0
	if i%3 == 0 {
		generation = k / 100
	}
	return labels.FromStrings("__name__", "kill_total", "UUID", fmt.Sprintf("GPU-%04d", i), "generation", strconv.Itoa(generation), "pair", strconv.Itoa(w.id/2))
}

// send sends the next request and reports whether it was answered at all.
func (w *killWriter) send(s *server) bool {
	if w.sent == nil {
		w.sent, w.acked = map[int]bool{}, map[int]bool{}
	}
	n := w.next
	switch {
	case len(w.held) > 0 && n >= w.held[0]+5:
		n, w.held = w.held[0], w.held[1:]
	case n%10 == 3:
		w.held = append(w.held, n)
		n++
		w.next += 2
	default:
		w.next++
	}
	k := 2*n + w.id%2
	e := remotewrite.NewEncoder(w.protocol)
	for i := range killSeries {
		e.Series(series.AppendLabels(nil, w.seriesOf(k, i)))
		e.Sample(0, w.begin.Add(time.Duration(k)*killStep).UnixMilli(), float64(k))
	}
	w.sent[k] = true
	code, text := s.post(w.protocol, e.Snappy())
	switch code {
	case 204:
		w.acked[k] = true
		w.acknowledged += killSeries
		return true
	case 0, 503:
		return false // it was killed
	}
	panic(fmt.Sprintf("request %d of writer %d: %d %s", k, w.id, code, text))
}

func (w *killWriter) check(t *testing.T, s *server, when string) {
	t.Helper()
	end := w.begin.Add(time.Duration(2*w.next+2) * killStep)
	result := s.instant(fmt.Sprintf(`kill_total{pair="%d"}[%ds]`, w.id/2, int(end.Sub(w.begin).Seconds())+2), end)
	got := map[string]map[int]int{} // series -> k -> how often
	for _, r := range result {
		seen := map[int]int{}
		for _, v := range r.Values {
			var at float64
			var text string
			mustUnmarshal(t, v[0], &at)
			mustUnmarshal(t, v[1], &text)
			k, err := strconv.Atoi(text)
			require.NoError(t, err, "%s: value %s", when, text)
			if want := w.begin.Add(time.Duration(k) * killStep).UnixMilli(); want != int64(at*1000+0.5) {
				t.Fatalf("%s: sample %d stands at %f, want %d ms", when, k, at, want)
			}
			if k%2 != w.id%2 {
				continue // the other writer's
			}
			if !w.sent[k] {
				t.Fatalf("%s: sample %d was never sent", when, k)
			}
			seen[k]++
		}
		got[labels.FromMap(r.Metric).String()] = seen
	}
	names := map[[2]int]string{} // by generation and series
	for k := range w.acked {
		for i := range killSeries {
			id := [2]int{k / 100, i}
			if names[id] == "" {
				names[id] = w.seriesOf(k, i).String()
			}
			if n := got[names[id]][k]; n != 1 {
				t.Fatalf("%s: acknowledged sample %d of %s is there %d times", when, k, names[id], n)
			}
		}
	}
}
