package e2e

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/stretchr/testify/require"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// TestBlocksInTheBucket sends two days of the past, so that blocks are cut and shipped,
// and reads across head, local blocks and bucket; then it throws the ingester's disk away
// and reads what was shipped from the bucket alone. Once with a folder as the bucket, once
// with an S3 server.
func TestBlocksInTheBucket(t *testing.T) {
	t.Run("a folder", func(t *testing.T) { testBucket(t) })
	t.Run("S3", func(t *testing.T) {
		backend := s3mem.New()
		require.NoError(t, backend.CreateBucket("varve"))
		s3 := httptest.NewServer(gofakes3.New(backend).Server())
		t.Cleanup(s3.Close)
		config := filepath.Join(t.TempDir(), "bucket.yml")
		require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `
type: S3
prefix: some/where
config:
  bucket: varve
  endpoint: %s
  access_key: test
  secret_key: testsecret
  insecure: true
  bucket_lookup_type: path
`, s3.Listener.Addr()), 0o600))
		testBucket(t, "--bucket.config-file="+config)
	})
}

func testBucket(t *testing.T, args ...string) {
	dir := t.TempDir()
	args = append(args, "--ingester.maintenance-interval=200ms")
	varve := startVarve(t, dir, args...)
	const (
		step   = time.Minute
		steps  = 2 * 24 * 60
		series = 5
	)
	begin := time.Now().Add(-steps * step).Truncate(time.Minute)
	for from := 0; from < steps; from += 120 {
		code, message := varve.post(remotewrite.Protocol1, history(series, begin, step, from, from+120))
		require.Equal(t, 204, code, message)
	}
	check := func(when string, from, to time.Duration) {
		t.Helper()
		n := int((to - from) / step)
		got := varve.instant(fmt.Sprintf(`count_over_time(history[%ds])`, int((to-from).Seconds())), begin.Add(to))
		require.Len(t, got, series, when)
		for _, p := range got {
			require.Equal(t, fmt.Sprintf(`"%d"`, n), string(p.Value[1]), "%s: %v", when, p.Metric)
		}
		got = varve.instant(fmt.Sprintf(`sum_over_time(history[%ds])`, int((to-from).Seconds())), begin.Add(to))
		for _, p := range got {
			require.Equal(t, fmt.Sprintf(`"%d"`, sumBetween(from, to, step)), string(p.Value[1]), "%s: %v", when, p.Metric)
		}
	}
	const all = (steps - 1) * step
	check("just written", 0, all)
	waitFor(t, "blocks are uploaded", func() bool {
		return metric(t, varve, "varve_ingester_block_uploads_total") >= 22 && metric(t, varve, "varve_ingester_blocks_pending_upload") == 0
	})
	for hours := 1; hours < 47; hours += 5 { // across every seam
		check("across seams", time.Duration(hours)*time.Hour-30*time.Minute, time.Duration(hours)*time.Hour+90*time.Minute)
	}
	check("with blocks", 0, all)
	varve.interrupt()

	require.NoError(t, os.RemoveAll(filepath.Join(dir, "ingester")))
	varve = startVarve(t, dir, args...)
	check("from the bucket alone", 0, 42*time.Hour)
	varve.interrupt()
}

// history is a request with the values from..to-1 of n series, a value a step.
func history(n int, begin time.Time, step time.Duration, from, to int) []byte {
	e := remotewrite.NewEncoder(remotewrite.Protocol1)
	for g := range n {
		e.Series(series.AppendLabels(nil, labels.FromStrings("__name__", "history", "g", fmt.Sprint(g))))
		for k := from; k < to; k++ {
			e.Sample(0, begin.Add(time.Duration(k)*step).UnixMilli(), float64(k))
		}
	}
	return e.Snappy()
}

// sumBetween is the sum of the values in (from, to], value k standing at k*step.
func sumBetween(from, to, step time.Duration) int {
	sum := 0
	for k := int(from/step) + 1; k <= int(to/step); k++ {
		sum += k
	}
	return sum
}
