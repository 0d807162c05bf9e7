package ingester

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/varvedb/varve/pkg/series"
)

// A disk that is really full (not only below MinFreeDisk) tears the WAL: the tenant
// takes no writes until it was opened anew, reads go on, and all that was ever
// acknowledged is there in the end, also after a restart. Random values keep the WAL
// from being compressed to nothing.
func TestWALThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("a small file system cannot be mounted here (it takes root): %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	w := newWorld(t, func(c *Config) { c.Dir = filepath.Join(dir, "ingester") })

	acknowledged := map[string]int{}
	write := func(round int) error {
		b := new(batch)
		for s := range 2000 {
			b.floats(bytesOf("__name__", "m", "s", fmt.Sprint(s), "epoch", fmt.Sprint(round/50)), sampleAt(time.Duration(round)*time.Second, float64(round*s)*1.1))
		}
		for s := range 20 { // late ones, which have a log of their own
			b.floats(bytesOf("__name__", "m", "s", fmt.Sprint(s), "late", fmt.Sprint(round/50)), sampleAt(-30*time.Minute-time.Duration(round)*time.Second, float64(round*s)*1.1))
		}
		var res series.Appended
		if err := w.Append(context.Background(), "a", &b.Batch, &res); err != nil {
			return err
		}
		require.Equal(t, 2020, res.Samples, res.Refused.First)
		for i := range b.Entries {
			acknowledged[b.Entries[i].Labels.String()]++
		}
		return nil
	}
	round := 0
	var err error
	for ; err == nil; round++ {
		require.Less(t, round, 5000, "the disk never filled")
		err = write(round)
	}
	require.Equal(t, series.Unavailable, series.KindOf(err))
	require.Equal(t, series.Unavailable, series.KindOf(write(round)), "no write is taken while memory and WAL may differ")
	check := func() {
		t.Helper()
		got := w.read("a", named("m"))
		require.GreaterOrEqual(t, len(got), len(acknowledged))
		total := 0
		for _, samples := range got {
			total += len(samples)
		}
		want := 0
		for _, n := range acknowledged {
			want += n
		}
		require.GreaterOrEqual(t, total, want)
		require.LessOrEqual(t, total, want+2020, "only the request that failed may be there besides")
	}
	check()

	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=200m"))
	w.Maintain(context.Background())
	for range 60 {
		round++
		require.NoError(t, write(round))
	}
	check()
	w.restart()
	check()
}
