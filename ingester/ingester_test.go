package ingester

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/stretchr/testify/require"
	"github.com/thanos-io/objstore"
	"go.uber.org/goleak"

	"github.com/varvedb/varve/pkg/series"
)

func TestMain(m *testing.M) {
	// TSDB's block pool keeps no goroutine; anything that is left is ours.
	goleak.VerifyTestMain(m)
}

// clock is a test's own time.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// world is an ingester with what is around it.
type world struct {
	t     *testing.T
	cfg   Config
	clock *clock
	bkt   objstore.Bucket
	free  func(string) (int64, error)
	*Ingester
}

// base is the time of most samples: the start of a block, and recent.
var base = time.Now().Truncate(2 * time.Hour).Add(-2 * time.Hour)

func at(offset time.Duration) int64 { return base.Add(offset).UnixMilli() }

func newWorld(t *testing.T, change func(*Config)) *world {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Dir = filepath.Join(t.TempDir(), "ingester")
	cfg.MaintenanceInterval = time.Hour // tests call Maintain
	cfg.HeadStripes = 64
	if change != nil {
		change(&cfg)
	}
	w := &world{t: t, cfg: cfg, clock: &clock{at: base.Add(3 * time.Hour)}, bkt: objstore.NewInMemBucket()}
	w.free = func(string) (int64, error) { return 1 << 40, nil }
	w.start()
	t.Cleanup(func() {
		if w.Ingester != nil {
			require.NoError(t, w.Close())
		}
	})
	return w
}

func (w *world) start() {
	w.t.Helper()
	i, err := New(w.cfg, Options{
		Bucket: w.bkt, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(), Now: w.clock.now,
		FreeDisk: func(dir string) (int64, error) { return w.free(dir) },
	})
	require.NoError(w.t, err)
	require.NoError(w.t, i.Start(context.Background()))
	w.Ingester = i
}

func (w *world) restart() {
	w.t.Helper()
	require.NoError(w.t, w.Close())
	w.start()
}

// batch builds requests.
type batch struct{ series.Batch }

func bytesOf(pairs ...string) series.LabelBytes {
	return series.AppendLabels(nil, labels.FromStrings(pairs...))
}

func (b *batch) floats(lb series.LabelBytes, samples ...series.Sample) *batch {
	from := uint32(len(b.Samples))
	b.Samples = append(b.Samples, samples...)
	b.Entries = append(b.Entries, series.Entry{Labels: lb, Samples: series.Range{From: from, To: uint32(len(b.Samples))}})
	return b
}

func (b *batch) exemplars(lb series.LabelBytes, xs ...series.Exemplar) *batch {
	from := uint32(len(b.Exemplars))
	b.Exemplars = append(b.Exemplars, xs...)
	e := &b.Entries[len(b.Entries)-1]
	if string(e.Labels) != string(lb) {
		b.floats(lb)
		e = &b.Entries[len(b.Entries)-1]
	}
	e.Exemplars = series.Range{From: from, To: uint32(len(b.Exemplars))}
	return b
}

func (b *batch) histogram(lb series.LabelBytes, hs ...series.Histogram) *batch {
	from := uint32(len(b.Histograms))
	b.Histograms = append(b.Histograms, hs...)
	b.Entries = append(b.Entries, series.Entry{Labels: lb, Histograms: series.Range{From: from, To: uint32(len(b.Histograms))}})
	return b
}

func (w *world) append(tenant string, b *batch) series.Appended {
	w.t.Helper()
	var res series.Appended
	require.NoError(w.t, w.Append(context.Background(), tenant, &b.Batch, &res))
	return res
}

func sampleAt(offset time.Duration, v float64) series.Sample {
	return series.Sample{T: at(offset), V: v}
}

// read returns every sample of the selector as "t:value" with t in seconds from base.
func (w *world) read(tenant string, matchers ...*labels.Matcher) map[string][]string {
	w.t.Helper()
	q, _, err := w.Querier(context.Background(), tenant, math.MinInt64, math.MaxInt64, nil)
	require.NoError(w.t, err)
	defer q.Close()
	got := map[string][]string{}
	set := q.Select(context.Background(), true, nil, matchers...)
	for set.Next() {
		s := set.At()
		it := s.Iterator(nil)
		for typ := it.Next(); typ != chunkenc.ValNone; typ = it.Next() {
			var text string
			var ts int64
			switch typ {
			case chunkenc.ValFloat:
				var v float64
				ts, v = it.At()
				text = fmt.Sprint(v)
				if value.IsStaleNaN(v) {
					text = "stale"
				}
			case chunkenc.ValHistogram:
				var h *histogram.Histogram
				ts, h = it.AtHistogram(nil)
				text = fmt.Sprintf("h%d", h.Count)
			case chunkenc.ValFloatHistogram:
				var fh *histogram.FloatHistogram
				ts, fh = it.AtFloatHistogram(nil)
				text = fmt.Sprintf("fh%v", fh.Count)
			}
			got[s.Labels().String()] = append(got[s.Labels().String()], fmt.Sprintf("%d:%s", (ts-base.UnixMilli())/1000, text))
		}
		require.NoError(w.t, it.Err())
	}
	require.NoError(w.t, set.Err())
	return got
}

func named(name string) *labels.Matcher {
	return labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, name)
}

func counts(r *series.Refusals) map[series.Reason]int {
	m := map[series.Reason]int{}
	r.Each(func(reason series.Reason, n int) { m[reason] = n })
	return m
}

// Case RW-06: the same timestamp twice is a resend if the bits are equal, else a
// conflict that keeps the first value; wherever the first copy lies.
func TestSameTimestampTwice(t *testing.T) {
	x := bytesOf("__name__", "x", "UUID", "GPU-0001")
	nan, stale := math.NaN(), math.Float64frombits(value.StaleNaN)
	cases := []struct {
		name          string
		first, second float64
		conflict      bool
	}{
		{"an equal number is a resend", 5, 5, false},
		{"another number is a conflict", 5, 6, true},
		{"0 and -0 differ in bits and so conflict", 0, math.Copysign(0, -1), true},
		{"NaN equals itself", nan, nan, false},
		{"a stale marker equals itself", stale, stale, false},
		{"a number after a stale marker is a conflict", stale, 7, true},
		{"+Inf equals itself", math.Inf(1), math.Inf(1), false},
	}
	places := []struct {
		name    string
		prepare func(w *world)
	}{
		{"newest sample", func(*world) {}},
		{"newest sample after a restart", func(w *world) { w.restart() }},
		{"older than the newest", func(w *world) { w.append("a", new(batch).floats(x, sampleAt(10*time.Minute, 1))) }},
		{"older than the newest after a restart", func(w *world) {
			w.append("a", new(batch).floats(x, sampleAt(10*time.Minute, 1)))
			w.restart()
		}},
		{"itself stored late", func(w *world) {}},
		{"in a block", func(w *world) {
			require.NoError(w.t, w.Flush(context.Background()))
			w.append("a", new(batch).floats(bytesOf("__name__", "other"), sampleAt(30*time.Minute, 1)))
		}},
		{"in a block, head empty", func(w *world) { require.NoError(w.t, w.Flush(context.Background())) }},
	}
	for _, place := range places {
		for _, c := range cases {
			t.Run(place.name+"/"+c.name, func(t *testing.T) {
				w := newWorld(t, nil)
				if place.name == "itself stored late" {
					w.append("a", new(batch).floats(x, sampleAt(10*time.Minute, 1)))
				}
				first := w.append("a", new(batch).floats(x, sampleAt(0, c.first)))
				require.Equal(t, 1, first.Samples)
				place.prepare(w)
				before := w.read("a", named("x"))

				second := w.append("a", new(batch).floats(x, sampleAt(0, c.second)))
				if c.conflict {
					require.Equal(t, map[series.Reason]int{series.ReasonConflict: 1}, counts(&second.Refused))
					require.Contains(t, second.Refused.Error(), `x{UUID="GPU-0001"}`)
				} else {
					require.Zero(t, second.Refused.Total(), second.Refused.First)
					require.Equal(t, 1, second.Samples)
				}
				require.Equal(t, before, w.read("a", named("x")), "the stored samples do not change")
				w.restart()
				require.Equal(t, before, w.read("a", named("x")), "nor after a restart")
			})
		}
	}
}

// Case RW-15: entries of one request that name one series mean the same as one entry.
func TestSeriesTwiceInOneRequest(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x", "a", "1")
	w.append("a", new(batch).floats(bytesOf("__name__", "y"), sampleAt(time.Minute, 0)))
	res := w.append("a", new(batch).
		floats(x, sampleAt(30*time.Second, 1), sampleAt(45*time.Second, 2)).
		floats(x, sampleAt(30*time.Second, 1), sampleAt(45*time.Second, 3)).
		floats(x, sampleAt(15*time.Second, 0)))
	require.Equal(t, map[series.Reason]int{series.ReasonConflict: 1}, counts(&res.Refused))
	require.Contains(t, res.Refused.First, "3", "the refused value is named")
	require.Equal(t, 4, res.Samples)
	require.Equal(t, map[string][]string{`{__name__="x", a="1"}`: {"15:0", "30:1", "45:2"}}, w.read("a", named("x")))
}

func TestManySamplesAtOneTimestampInOneEntry(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	samples := make([]series.Sample, 80_000)
	for i := range samples {
		samples[i] = sampleAt(0, float64(i/2)) // each value twice
	}
	res := w.append("a", new(batch).floats(x, samples...))
	require.Equal(t, 80_000, res.Samples+res.Refused.Total())
	require.Equal(t, map[string][]string{`{__name__="x"}`: {"0:0"}}, w.read("a", named("x")))
	require.Equal(t, 79_998, counts(&res.Refused)[series.ReasonConflict], "every other value than the first")
}

// Case RW-05: one bad sample, wherever it stands, costs its neighbours nothing.
func TestOneBadSampleAmongManyGood(t *testing.T) {
	for _, position := range []int{0, 250, 499} {
		for name, bad := range map[string]series.Sample{
			"too old":  sampleAt(-5*time.Hour, 1),
			"conflict": sampleAt(0, 99),
		} {
			t.Run(fmt.Sprint(name, " at ", position), func(t *testing.T) {
				w := newWorld(t, nil)
				w.append("a", new(batch).floats(bytesOf("__name__", "m", "i", fmt.Sprint(position)), sampleAt(0, 1)))
				b := new(batch)
				for i := range 500 {
					s := sampleAt(time.Minute, float64(i))
					if i == position {
						s = bad
					}
					b.floats(bytesOf("__name__", "m", "i", fmt.Sprint(i)), s)
				}
				for range 2 { // an identical resend changes nothing
					res := w.append("a", b)
					require.Equal(t, 499, res.Samples)
					require.Equal(t, 1, res.Refused.Total())
					require.Contains(t, res.Refused.First, fmt.Sprintf(`i="%d"`, position))
					require.Len(t, w.read("a", named("m")), 500)
				}
			})
		}
	}
}

// Case RW-10: a sender that was cut off brings its backlog; resends are no-ops, and
// beyond the late window the answer says how far behind it was.
func TestBacklogAfterAnOutage(t *testing.T) {
	w := newWorld(t, nil)
	a, b := bytesOf("__name__", "a"), bytesOf("__name__", "b")
	var want []string
	for m := range 10 {
		w.append("x", new(batch).floats(a, sampleAt(time.Duration(m)*time.Minute, float64(m))))
	}
	for m := range 100 {
		w.append("x", new(batch).floats(b, sampleAt(time.Duration(m)*time.Minute, 1)))
	}
	for m := range 100 {
		if m == 50 {
			w.restart()
		}
		res := w.append("x", new(batch).floats(a, sampleAt(time.Duration(m)*time.Minute, float64(m))))
		require.Equal(t, 1, res.Samples, "minute %d: %s", m, res.Refused.First)
		want = append(want, fmt.Sprintf("%d:%d", m*60, m))
	}
	require.Equal(t, want, w.read("x", named("a"))[`{__name__="a"}`])

	res := w.append("x", new(batch).floats(a, sampleAt(-23*time.Hour, 1)))
	require.Equal(t, map[series.Reason]int{series.ReasonTooOld: 1}, counts(&res.Refused))
	require.Contains(t, res.Refused.First, "24h39m0s behind")
	require.Contains(t, res.Refused.First, "2h0m0s")
}

// Case RW-16, from outside: many connections bring the samples of the same series in
// any order, and none is lost or refused.
func TestParallelConnections(t *testing.T) {
	w := newWorld(t, nil)
	const rounds, nSeries, senders = 40, 100, 8
	var wg sync.WaitGroup
	for sender := range senders {
		wg.Go(func() {
			for round := sender; round < rounds; round += senders {
				b := new(batch)
				for s := range nSeries {
					b.floats(bytesOf("__name__", "m", "s", fmt.Sprint(s)), sampleAt(time.Duration(round)*time.Second, float64(round)))
				}
				var res series.Appended
				if err := w.Append(context.Background(), "a", &b.Batch, &res); err != nil || res.Samples != nSeries {
					t.Errorf("round %d: %v, stored %d, refused %s", round, err, res.Samples, res.Refused.First)
				}
			}
		})
	}
	wg.Wait()
	got := w.read("a", named("m"))
	require.Len(t, got, nSeries)
	for name, samples := range got {
		require.Len(t, samples, rounds, name)
	}
}

func TestReferencesAreReusedAndNeverMistaken(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	b := new(batch).floats(x, sampleAt(0, 1))
	w.append("a", b)
	ref := b.Entries[0].Ref
	require.NotZero(t, ref.ID)

	again := new(batch).floats(x, sampleAt(time.Second, 2))
	again.Entries[0].Ref = ref
	w.append("a", again)
	require.Equal(t, ref, again.Entries[0].Ref)

	t.Run("a reference of another epoch is ignored", func(t *testing.T) {
		w.restart()
		other := new(batch).floats(bytesOf("__name__", "other"), sampleAt(2*time.Second, 3))
		other.Entries[0].Ref = ref
		w.append("a", other)
		require.Equal(t, map[string][]string{`{__name__="other"}`: {"2:3"}}, w.read("a", named("other")))
		require.Len(t, w.read("a", named("x"))[`{__name__="x"}`], 2)
	})
	t.Run("a reference to a series that is gone makes the series anew", func(t *testing.T) {
		b := new(batch).floats(x, sampleAt(3*time.Second, 3))
		w.append("a", b)
		require.NoError(t, w.Flush(context.Background()))
		after := new(batch).floats(x, sampleAt(4*time.Second, 4))
		after.Entries[0].Ref = b.Entries[0].Ref
		res := w.append("a", after)
		require.Equal(t, 1, res.Samples, res.Refused.First)
		require.Equal(t, []string{"0:1", "1:2", "3:3", "4:4"}, w.read("a", named("x"))[`{__name__="x"}`])
	})
}

func TestStaleReferenceTwiceInOneRequest(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	b := new(batch).floats(x, sampleAt(0, 1))
	w.append("a", b)
	require.NoError(t, w.Flush(context.Background())) // the head forgets the series
	twice := new(batch).floats(x, sampleAt(time.Second, 2)).floats(x, sampleAt(time.Second, 3))
	for i := range twice.Entries {
		twice.Entries[i].Ref = b.Entries[0].Ref
	}
	res := w.append("a", twice)
	require.Equal(t, 1, res.Samples)
	require.Equal(t, map[series.Reason]int{series.ReasonConflict: 1}, counts(&res.Refused))
	require.Equal(t, []string{"0:1", "1:2"}, w.read("a", named("x"))[`{__name__="x"}`])
}

func TestSamplesInFallingOrderInOneEntry(t *testing.T) {
	w := newWorld(t, nil)
	samples := make([]series.Sample, 20_000)
	for i := range samples {
		samples[i] = series.Sample{T: at(0) - int64(i)*100, V: float64(i)}
	}
	res := w.append("a", new(batch).floats(bytesOf("__name__", "x"), samples...))
	require.Equal(t, len(samples), res.Samples)
	require.Len(t, w.read("a", named("x"))[`{__name__="x"}`], len(samples))
}

// The stale marker of a series of native histograms travels as a float.
func TestStaleMarkerOfHistogramsSentAgain(t *testing.T) {
	for _, floats := range []bool{false, true} {
		w := newWorld(t, nil)
		h := &histogram.Histogram{Count: 3, Sum: 1, Schema: 3, PositiveSpans: []histogram.Span{{Length: 1}}, PositiveBuckets: []int64{3}}
		first := series.Histogram{T: at(0), H: h}
		if floats {
			first = series.Histogram{T: at(0), FH: h.ToFloat(nil)}
		}
		x := bytesOf("__name__", "h")
		w.append("a", new(batch).histogram(x, first))
		marker := series.Sample{T: at(time.Second), V: math.Float64frombits(value.StaleNaN)}
		for range 2 {
			res := w.append("a", new(batch).floats(x, marker))
			require.Equal(t, 1, res.Samples, res.Refused.First)
		}
		later := first
		later.T = at(time.Minute)
		w.append("a", new(batch).histogram(x, later))
		res := w.append("a", new(batch).floats(x, marker))
		require.Equal(t, 1, res.Samples, "late, too: %s", res.Refused.First)
		require.Len(t, w.read("a", named("h"))[`{__name__="h"}`], 3)
	}
}

// Two requests that bring the same new series at the same time: whichever is
// acknowledged first must not depend on the other's record in the WAL.
func TestNewSeriesFromManyConnections(t *testing.T) {
	w := newWorld(t, nil)
	var wg sync.WaitGroup
	for sender := range 8 {
		wg.Go(func() {
			for round := range 20 {
				b := new(batch)
				for s := range 50 {
					b.floats(bytesOf("__name__", "m", "s", fmt.Sprint(s), "round", fmt.Sprint(round)), sampleAt(time.Duration(sender)*time.Second, float64(sender)))
				}
				var res series.Appended
				if err := w.Append(context.Background(), "a", &b.Batch, &res); err != nil || res.Samples != 50 {
					t.Errorf("%v, stored %d, refused %s", err, res.Samples, res.Refused.First)
				}
			}
		})
	}
	wg.Wait()
	w.restart()
	got := w.read("a", named("m"))
	require.Len(t, got, 1000)
	for name, samples := range got {
		require.Len(t, samples, 8, name)
	}
}

func TestOneProcessPerFolder(t *testing.T) {
	w := newWorld(t, nil)
	second, err := New(w.cfg, Options{Bucket: w.bkt, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	require.ErrorContains(t, second.Start(context.Background()), "another process")
	require.NoError(t, second.Close())
	require.Equal(t, 1, w.append("a", new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1))).Samples)
}

// A tenant whose samples cannot be read is an error for its own requests, never an
// empty answer; the others go on, and it heals by itself.
func TestTenantThatCannotBeOpened(t *testing.T) {
	w := newWorld(t, nil)
	x := new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1))
	w.append("good", x)
	w.append("bad", x)
	require.NoError(t, w.Close())
	wal := filepath.Join(w.cfg.Dir, "bad", "wal")
	require.NoError(t, os.Rename(wal, wal+".away"))
	require.NoError(t, os.WriteFile(wal, []byte("no folder"), 0o666))
	w.start()

	require.Len(t, w.read("good", named("x")), 1)
	_, _, err := w.Querier(context.Background(), "bad", 0, math.MaxInt64, nil)
	require.Equal(t, series.Unavailable, series.KindOf(err))
	var res series.Appended
	require.Equal(t, series.Unavailable, series.KindOf(w.Append(context.Background(), "bad", &x.Batch, &res)))
	w.Maintain(context.Background()) // no better yet

	require.NoError(t, os.Remove(wal))
	require.NoError(t, os.Rename(wal+".away", wal))
	w.Maintain(context.Background())
	require.Len(t, w.read("bad", named("x")), 1)
	require.Equal(t, 1, w.append("bad", new(batch).floats(bytesOf("__name__", "x"), sampleAt(time.Second, 2))).Samples)
}

// Case LM-02: a lasting limit refuses what is new, and only that.
func TestSeriesLimitRefusesNewSeriesOnly(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxSeries = 3 })
	b := new(batch)
	for i := range 5 {
		b.floats(bytesOf("__name__", "m", "i", fmt.Sprint(i)), sampleAt(0, 1))
	}
	res := w.append("a", b)
	require.Equal(t, 3, res.Samples)
	require.Equal(t, map[series.Reason]int{series.ReasonSeriesLimit: 2}, counts(&res.Refused))
	res = w.append("a", new(batch).floats(bytesOf("__name__", "m", "i", "0"), sampleAt(time.Second, 2)))
	require.Equal(t, 1, res.Samples)
	res = w.append("other tenant"[:5], new(batch).floats(bytesOf("__name__", "m"), sampleAt(0, 1)))
	require.Equal(t, 1, res.Samples, "another tenant is not touched")
}

func TestFullDiskRefusesWritesAndKeepsReading(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	w.append("a", new(batch).floats(x, sampleAt(0, 1)))
	w.free = func(string) (int64, error) { return 1000, nil }
	w.checkDisk()
	var res series.Appended
	err := w.Append(context.Background(), "a", &new(batch).floats(x, sampleAt(time.Second, 2)).Batch, &res)
	require.Equal(t, series.Unavailable, series.KindOf(err))
	require.ErrorContains(t, err, "disk is full")
	require.Equal(t, []string{"0:1"}, w.read("a", named("x"))[`{__name__="x"}`])
	w.free = func(string) (int64, error) { return 1 << 40, nil }
	w.checkDisk()
	require.Equal(t, 1, w.append("a", new(batch).floats(x, sampleAt(time.Second, 2))).Samples)
}

func TestHistograms(t *testing.T) {
	w := newWorld(t, nil)
	good := func(n uint64) *histogram.Histogram {
		return &histogram.Histogram{Count: n, Sum: 1, Schema: 3, PositiveSpans: []histogram.Span{{Length: 1}}, PositiveBuckets: []int64{int64(n)}}
	}
	bad := good(3)
	bad.PositiveBuckets = []int64{-5}
	custom := &histogram.FloatHistogram{Count: 4, Sum: 2, Schema: histogram.CustomBucketsSchema, CustomValues: []float64{1, 2}, PositiveSpans: []histogram.Span{{Length: 2}}, PositiveBuckets: []float64{1, 3}}
	res := w.append("a", new(batch).
		histogram(bytesOf("__name__", "h"), series.Histogram{T: at(0), H: good(3)}, series.Histogram{T: at(time.Second), H: good(5)}).
		histogram(bytesOf("__name__", "bad"), series.Histogram{T: at(0), H: bad}).
		histogram(bytesOf("__name__", "fh"), series.Histogram{T: at(0), FH: custom}).
		floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	require.Equal(t, 3, res.Histograms)
	require.Equal(t, 1, res.Samples)
	require.Equal(t, map[series.Reason]int{series.ReasonInvalidHistogram: 1}, counts(&res.Refused))
	require.Contains(t, res.Refused.First, "bad{}")

	res = w.append("a", new(batch).histogram(bytesOf("__name__", "h"), series.Histogram{T: at(0), H: good(3)}))
	require.Equal(t, 1, res.Histograms, "an identical late histogram is a resend")
	res = w.append("a", new(batch).histogram(bytesOf("__name__", "h"), series.Histogram{T: at(0), H: good(4)}))
	require.Equal(t, map[series.Reason]int{series.ReasonConflict: 1}, counts(&res.Refused))
	res = w.append("a", new(batch).floats(bytesOf("__name__", "h"), sampleAt(0, 4)))
	require.Equal(t, map[series.Reason]int{series.ReasonConflict: 1}, counts(&res.Refused), "a float where a histogram is")

	want := map[string][]string{`{__name__="h"}`: {"0:h3", "1:h5"}}
	require.Equal(t, want, w.read("a", named("h")))
	require.NoError(t, w.Flush(context.Background()))
	require.Equal(t, want, w.read("a", named("h")))
	require.Equal(t, map[string][]string{`{__name__="fh"}`: {"0:fh4"}}, w.read("a", named("fh")))
}

// A zero bucket that is not a number makes Prometheus' engine add for ever.
func TestHistogramsWithImpossibleZeroThreshold(t *testing.T) {
	w := newWorld(t, nil)
	for _, threshold := range []float64{math.NaN(), -1, math.Inf(1)} {
		h := &histogram.Histogram{Count: 3, Sum: 1, Schema: 3, ZeroThreshold: threshold, PositiveSpans: []histogram.Span{{Length: 1}}, PositiveBuckets: []int64{3}}
		res := w.append("a", new(batch).
			histogram(bytesOf("__name__", "h"), series.Histogram{T: at(0), H: h}).
			histogram(bytesOf("__name__", "fh"), series.Histogram{T: at(0), FH: h.ToFloat(nil)}))
		require.Equal(t, map[series.Reason]int{series.ReasonInvalidHistogram: 2}, counts(&res.Refused), threshold)
	}
}

func TestStartTimestampsAreKept(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x_total")
	w.append("a", new(batch).floats(x, series.Sample{ST: at(-time.Minute), T: at(0), V: 1}, series.Sample{ST: at(-time.Minute), T: at(time.Second), V: 2}))
	check := func() {
		q, _, err := w.Querier(context.Background(), "a", 0, math.MaxInt64, nil)
		require.NoError(t, err)
		defer q.Close()
		set := q.Select(context.Background(), true, nil, named("x_total"))
		require.True(t, set.Next())
		it := set.At().Iterator(nil)
		for range 2 {
			require.Equal(t, chunkenc.ValFloat, it.Next())
			require.Equal(t, at(-time.Minute), it.AtST())
		}
	}
	check()
	w.restart()
	check()
	require.NoError(t, w.Flush(context.Background()))
	check()
}

// Case RW-13: bad exemplars are dropped and counted; samples are stored all the same.
func TestBadExemplarsDoNotSinkSamples(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	trace := func(id string) series.LabelBytes { return bytesOf("trace_id", id) }
	res := w.append("a", new(batch).
		floats(x, sampleAt(0, 1), sampleAt(time.Second, 2), sampleAt(2*time.Second, 3)).
		exemplars(x,
			series.Exemplar{Labels: trace("one"), T: at(time.Second), V: 1},
			series.Exemplar{Labels: trace("one"), T: at(time.Second), V: 1},
			series.Exemplar{Labels: trace("none")},
			series.Exemplar{Labels: trace(strings.Repeat("x", 200)), T: at(time.Second), V: 1},
			series.Exemplar{Labels: trace("future"), T: at(50 * time.Hour), V: 1},
			series.Exemplar{Labels: trace(""), T: at(2 * time.Second), V: 2}).
		exemplars(bytesOf("__name__", "no_samples"), series.Exemplar{Labels: trace("two"), T: at(0), V: 1}))
	require.Equal(t, 3, res.Samples)
	require.Zero(t, res.Refused.Total())
	require.Equal(t, 2, res.Exemplars, "the repeated one counts once")
	require.Equal(t, map[series.Reason]int{
		series.ReasonExemplarInvalid: 1, series.ReasonExemplarTooLong: 1, series.ReasonTooFarInFuture: 1, series.ReasonExemplarNoSeries: 1,
	}, counts(&res.Dropped))

	eq, err := w.ExemplarQuerier(context.Background(), "a")
	require.NoError(t, err)
	got, err := eq.Select(at(0), at(time.Hour), []*labels.Matcher{named("x")})
	require.NoError(t, err)
	require.Len(t, got, 1)
	require.Len(t, got[0].Exemplars, 2)
	require.Equal(t, `{trace_id="one"}`, got[0].Exemplars[0].Labels.String())

	eq, err = w.ExemplarQuerier(context.Background(), "nobody")
	require.NoError(t, err)
	got, err = eq.Select(at(0), at(time.Hour), []*labels.Matcher{named("x")})
	require.NoError(t, err)
	require.Empty(t, got)
}

// Case RW-14: metadata is kept, each distinct fact once, over a hard stop, too.
func TestMetadataSurvivesARestartAndATornLine(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxMetadataFamilies = 2 })
	fact := func(family, help string) series.Metadata {
		return series.Metadata{Family: family, Metadata: metadata.Metadata{Type: model.MetricTypeGauge, Help: help}}
	}
	b := new(batch)
	b.Metadata = []series.Metadata{fact("a", "one"), fact("a", "one"), fact("a", "two"), fact("b", "x"), fact("c", "too many")}
	res := w.append("t", b)
	require.Equal(t, map[series.Reason]int{series.ReasonMetadataLimit: 1}, counts(&res.Dropped))

	require.NoError(t, w.Close())
	file := filepath.Join(w.cfg.Dir, "t", metadataFile)
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, append(whole, `{"family":"torn`...), 0o666))
	w.start()
	got, err := w.Metadata(context.Background(), "t", "")
	require.NoError(t, err)
	require.Equal(t, map[string][]metadata.Metadata{
		"a": {fact("a", "one").Metadata, fact("a", "two").Metadata},
		"b": {fact("b", "x").Metadata},
	}, got)
	got, err = w.Metadata(context.Background(), "t", "b")
	require.NoError(t, err)
	require.Len(t, got, 1)
}

func TestHeadStats(t *testing.T) {
	w := newWorld(t, nil)
	w.append("a", new(batch).floats(bytesOf("__name__", "x", "UUID", "1"), sampleAt(0, 1)).floats(bytesOf("__name__", "x", "UUID", "2"), sampleAt(0, 1)))
	stats, chunks, err := w.HeadStats(context.Background(), "a", "__name__", 10)
	require.NoError(t, err)
	require.EqualValues(t, 2, stats.NumSeries)
	require.EqualValues(t, 2, chunks)
	require.Equal(t, "x", stats.IndexPostingStats.CardinalityMetricsStats[0].Name)
	stats, _, err = w.HeadStats(context.Background(), "nobody", "__name__", 10)
	require.NoError(t, err)
	require.Nil(t, stats)
}

func TestGatherLabelsMetricsByTenant(t *testing.T) {
	w := newWorld(t, nil)
	for _, tenant := range []string{"a", "b"} {
		w.append(tenant, new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1)))
	}
	families, err := w.Gather()
	require.NoError(t, err)
	seen := map[string]float64{}
	for _, f := range families {
		if f.GetName() == "prometheus_tsdb_head_series" {
			for _, m := range f.Metric {
				seen[m.Label[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
	}
	require.Equal(t, map[string]float64{"a": 1, "b": 1}, seen)
}

func TestTenantLimitRefusesNewTenantsOnly(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxTenants = 1 })
	b := new(batch).floats(bytesOf("__name__", "x"), sampleAt(0, 1))
	w.append("a", b)
	var res series.Appended
	err := w.Append(context.Background(), "b", &b.Batch, &res)
	require.Equal(t, series.Invalid, series.KindOf(err))
	require.ErrorContains(t, err, "limit")
	require.Equal(t, 1, w.append("a", b).Samples)
}

func TestExemplarsSurviveARestart(t *testing.T) {
	w := newWorld(t, nil)
	x := bytesOf("__name__", "x")
	b := new(batch).floats(x, sampleAt(0, 1))
	var sent []series.Exemplar
	for i := range 50 {
		sent = append(sent, series.Exemplar{Labels: bytesOf("trace_id", fmt.Sprint(i)), T: at(time.Duration(i) * time.Second), V: 1})
	}
	require.Equal(t, 50, w.append("a", b.exemplars(x, sent...)).Exemplars)
	for range 2 {
		eq, err := w.ExemplarQuerier(context.Background(), "a")
		require.NoError(t, err)
		got, err := eq.Select(at(0), at(time.Hour), []*labels.Matcher{named("x")})
		require.NoError(t, err)
		require.Len(t, got[0].Exemplars, 50)
		w.restart()
	}
}
