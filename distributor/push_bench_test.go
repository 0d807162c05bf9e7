package distributor

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// fleetBodies returns decoded requests of 2,000 series each, all different, with
// DCGM's labels on Kubernetes.
func fleetBodies(p remotewrite.Protocol, requests int) [][]byte {
	enc := remotewrite.NewEncoder(p)
	bodies := make([][]byte, requests)
	for r := range bodies {
		enc.Reset()
		for i := range 2000 {
			n := r*2000 + i
			gpu := n / 40
			enc.Series(run(
				"DCGM_FI_DRIVER_VERSION", "570.133.20",
				"Hostname", fmt.Sprintf("gpu-node-%04d", gpu/8),
				"UUID", fmt.Sprintf("GPU-%08x-1f3a-4c5d-9e7b-%012x", gpu, gpu*7919),
				"__name__", fmt.Sprintf("DCGM_FI_PROF_METRIC_NUMBER_%02d", n%40),
				"cluster", "eu-1",
				"device", fmt.Sprintf("nvidia%d", gpu%8),
				"gpu", fmt.Sprint(gpu%8),
				"instance", fmt.Sprintf("10.1.%d.%d:9400", gpu/8/250, gpu/8%250),
				"job", "dcgm-exporter",
				"modelName", "NVIDIA H100 80GB HBM3",
				"pci_bus_id", fmt.Sprintf("00000000:%02X:00.0", gpu%8),
			))
			enc.Sample(0, ms(testNow), float64(n%100))
		}
		bodies[r] = enc.AppendBody(nil)
	}
	return bodies
}

func benchmarkPush(b *testing.B, p remotewrite.Protocol) {
	bodies := fleetBodies(p, 50)
	d, err := New(DefaultConfig(), nullAppender{}, prometheus.NewRegistry(), slog.New(slog.NewTextHandler(io.Discard, nil)), func() time.Time { return testNow })
	if err != nil {
		b.Fatal(err)
	}
	push := func(body []byte) {
		var res series.Appended
		if err := d.Push(context.Background(), "anonymous", p, body, &res); err != nil || res.Samples != 2000 {
			b.Fatalf("%v, %d samples", err, res.Samples)
		}
	}
	for range 2 {
		for _, body := range bodies {
			push(body)
		}
	}
	b.SetBytes(int64(len(bodies[0])))
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		push(bodies[i%len(bodies)])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/2000, "ns/sample")
}

func BenchmarkPushV1(b *testing.B) { benchmarkPush(b, remotewrite.Protocol1) }
func BenchmarkPushV2(b *testing.B) { benchmarkPush(b, remotewrite.Protocol2) }
