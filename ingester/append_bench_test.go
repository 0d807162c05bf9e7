package ingester

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/thanos-io/objstore"

	"github.com/varvedb/varve/pkg/series"
)

func dcgmLabels(i int) series.LabelBytes {
	return series.AppendLabels(nil, labels.FromStrings(
		"__name__", fmt.Sprintf("DCGM_FI_METRIC_%03d", i%147), "UUID", fmt.Sprintf("GPU-%08x-1234-5678-9abc-def012345678", i/147),
		"cluster", "eu-1", "device", "nvidia0", "gpu", fmt.Sprint(i/147%8), "hostname", fmt.Sprintf("node-%05d", i/147/8), "instance", "10.0.0.1:9400",
		"job", "dcgm-exporter", "modelName", "NVIDIA H100 80GB HBM3", "pci_bus_id", "00000000:53:00.0", "prometheus", "eu-1", "prometheus_replica", "a"))
}

// BenchmarkAppend measures Append alone, WAL included: 2,000 series a request, one
// sample each, as a Prometheus sender does. One op is one request.
func BenchmarkAppend(b *testing.B) {
	for _, mode := range []string{"known by reference", "known by labels", "late"} {
		b.Run(mode, func(b *testing.B) {
			cfg := DefaultConfig()
			cfg.Dir = b.TempDir()
			i, err := New(cfg, Options{Bucket: objstore.NewInMemBucket(), Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			if err := i.Start(context.Background()); err != nil {
				b.Fatal(err)
			}
			defer i.Close()
			const nSeries, perRequest = 20_000, 2000
			batches := make([]*batch, nSeries/perRequest)
			for r := range batches {
				batches[r] = new(batch)
				for s := range perRequest {
					batches[r].floats(dcgmLabels(r*perRequest+s), series.Sample{T: at(0), V: 1})
				}
			}
			now := at(0)
			send := func(r int, at int64) {
				x := batches[r]
				for s := range x.Samples {
					x.Samples[s] = series.Sample{T: at, V: float64(at % 7)}
				}
				if mode == "known by labels" {
					for e := range x.Entries {
						x.Entries[e].Ref = series.Ref{}
					}
				}
				var res series.Appended
				if err := i.Append(context.Background(), "a", &x.Batch, &res); err != nil || res.Samples != perRequest {
					b.Fatal(err, res.Samples, res.Refused.First)
				}
			}
			for r := range batches {
				send(r, now)
			}
			if mode == "late" {
				for r := range batches {
					send(r, now+3_600_000)
				}
			}
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n++ {
				if n%len(batches) == 0 {
					now += 500
				}
				send(n%len(batches), now)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/perRequest, "ns/sample")
		})
	}
}
