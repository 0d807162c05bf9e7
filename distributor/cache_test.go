package distributor

import (
	"fmt"
	"hash/maphash"
	"testing"

	"pgregory.net/rapid"

	"github.com/varvedb/varve/pkg/series"
)

func seeded() func([]byte) uint64 {
	seed := maphash.MakeSeed()
	return func(b []byte) uint64 { return maphash.Bytes(seed, b) }
}

// touch looks label sets up as a request does, and tells how many were known.
func (c *labelCache) request(keys []series.LabelBytes) (known int) {
	var last *cacheEntry
	for _, k := range keys {
		e := following(last, k)
		if e == nil {
			h := c.hash(k)
			if e = c.find(h, k); e == nil {
				e = c.insert(h, k, k, nil)
				known--
			}
			follow(last, e)
		}
		known++
		last = e
	}
	return known
}

func keysOf(prefix string, from, to int) []series.LabelBytes {
	var out []series.LabelBytes
	for i := from; i < to; i++ {
		out = append(out, run("__name__", prefix, "i", fmt.Sprint(i)))
	}
	return out
}

func TestCacheKeepsWhatIsUsedThroughChurn(t *testing.T) {
	for _, max := range []int{1000, smallCache} {
		c := newLabelCache(max, 1<<40, seeded())
		steady := keysOf("steady", 0, max/4)
		c.request(steady)
		for round := range 40 { // ten times the cache's size passes through
			c.request(keysOf("churn", round*max/4, (round+1)*max/4))
			if known := c.request(steady); round > 0 && known != len(steady) {
				t.Fatalf("round %d: %d of %d steady series are known", round, known, len(steady))
			}
		}
		if n, _ := c.size(); n > max {
			t.Errorf("%d entries, the bound is %d", n, max)
		}
	}
}

func TestCacheIsBoundedByBytes(t *testing.T) {
	const most = 1 << 20
	c := newLabelCache(1_000_000, most, seeded())
	c.request(keysOf("k", 0, 20_000))
	n, size := c.size()
	if size > most || n == 0 {
		t.Errorf("%d entries of %d bytes, the bound is %d", n, size, most)
	}
	total := int64(0)
	for i := range c.shards {
		for _, e := range c.shards[i].ring {
			total += e.size
		}
	}
	if total != size {
		t.Errorf("%d bytes are accounted for, %d are held", size, total)
	}
	huge := run("__name__", string(make([]byte, maxCachedRun)))
	if e := c.insert(1, huge, huge, nil); !e.dead.Load() || c.find(1, huge) != nil {
		t.Error("an oversized label set is kept")
	}
}

func TestCacheFindsNothingAfterEviction(t *testing.T) {
	c := newLabelCache(2, 1<<20, func([]byte) uint64 { return 1 })
	a, b, d := run("__name__", "a"), run("__name__", "b"), run("__name__", "d")
	ea := c.insert(1, a, a, nil)
	eb := c.insert(1, b, b, nil)
	follow(ea, eb)
	ed := c.insert(1, d, d, nil) // one of the others goes
	gone, kept := ea, eb
	if eb.dead.Load() {
		gone, kept = eb, ea
	}
	if !gone.dead.Load() || kept.dead.Load() || c.find(1, gone.raw) != nil || c.find(1, kept.raw) != kept || c.find(1, d) != ed {
		t.Errorf("a dead %v, b dead %v", ea.dead.Load(), eb.dead.Load())
	}
	if following(ea, b) != nil && eb.dead.Load() {
		t.Error("a dead entry is predicted")
	}
	if gone.next.Load() != nil {
		t.Error("a dead entry holds another")
	}
}

// The cache against a map of everything that was ever inserted: whatever it
// returns must be that, under any hash.
func TestCacheAgainstAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.SampledFrom([]uint64{0, 1, 7, ^uint64(0)}).Draw(t, "bits")
		hash := seeded()
		max := rapid.IntRange(1, 20).Draw(t, "max")
		c := newLabelCache(max, int64(rapid.IntRange(300, 20_000).Draw(t, "bytes")), func(b []byte) uint64 { return hash(b) & bits })
		model := map[string]*cacheEntry{}
		var last *cacheEntry
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			k := run("__name__", "m", "i", fmt.Sprint(rapid.IntRange(0, 30).Draw(t, "key")))
			e := following(last, k)
			if e == nil {
				e = c.find(c.hash(k), k)
			}
			if e == nil {
				e = c.insert(c.hash(k), k, k, nil)
				model[string(k)] = e
			}
			if string(e.raw) != string(k) || model[string(k)] != e {
				t.Fatalf("looked up %q, got %q", k, e.raw)
			}
			follow(last, e)
			last = e
			n, bytes := c.size()
			if n > max || bytes > c.shards[0].maxBytes {
				t.Fatalf("%d entries, %d bytes; bounds %d and %d", n, bytes, max, c.shards[0].maxBytes)
			}
			if m := len(c.shards[0].entries); m > n {
				t.Fatalf("%d hashes for %d entries", m, n)
			}
		}
	})
}

func TestReferenceIsNeverTorn(t *testing.T) {
	c := newLabelCache(10, 1<<20, seeded())
	k := run("__name__", "m")
	e := c.insert(c.hash(k), k, k, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range uint64(20_000) {
			c.setRef(e, series.Ref{Epoch: i%3 + 1, ID: (i%3 + 1) * 100})
		}
	}()
	for {
		if r := e.ref(); r.Epoch*100 != r.ID && r != (series.Ref{}) {
			t.Fatalf("reference %+v belongs together never", r)
		}
		select {
		case <-done:
			return
		default:
		}
	}
}

func BenchmarkCacheHashed(b *testing.B) {
	c := newLabelCache(1<<20, 1<<30, seeded())
	keys := keysOf("DCGM_FI_DEV_GPU_UTIL", 0, 100_000)
	c.request(keys)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		k := keys[i%len(keys)]
		if c.find(c.hash(k), k) == nil {
			b.Fatal("missing")
		}
		i += 7919
	}
}

func BenchmarkCheckMiss(b *testing.B) {
	k := &labelChecker{maxLabels: 256, maxName: 1024, maxValue: 8192}
	labels := run("Hostname", "gpu-node-0001", "UUID", "GPU-00000001-1f3a-4c5d-9e7b-000000000001", "__name__", "DCGM_FI_DEV_GPU_UTIL",
		"cluster", "eu-1", "device", "nvidia0", "gpu", "0", "instance", "10.1.2.3:9400", "job", "dcgm-exporter", "modelName", "NVIDIA H100 80GB HBM3")
	b.ReportAllocs()
	for b.Loop() {
		if _, v, err := k.check(labels); v != nil || err != nil {
			b.Fatal(v, err)
		}
	}
}
