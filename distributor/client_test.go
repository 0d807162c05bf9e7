package distributor

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/exp/api/remote"
	clientv2 "github.com/prometheus/client_golang/exp/api/remote/genproto/v2"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"

	"github.com/varvedb/varve/pkg/series"
)

// The real client library, with the message types of either of its generators.
func TestRemoteWriteByTheClientLibrary(t *testing.T) {
	ctx := context.Background()
	now := ms(testNow)
	client := func(r *rig) *remote.API {
		api, err := remote.NewAPI(r.server.URL, remote.WithAPIHTTPClient(r.server.Client()),
			remote.WithAPIBackoff(remote.BackoffConfig{Min: time.Millisecond, Max: time.Millisecond, MaxRetries: 3}))
		if err != nil {
			t.Fatal(err)
		}
		return api
	}
	good := func() *writev2.Request {
		return &writev2.Request{
			Symbols: []string{"", "__name__", "ok_total", "gpu", "0", "help text", "bytes", "trace_id", "abc", "hist"},
			Timeseries: []writev2.TimeSeries{
				{LabelsRefs: []uint32{1, 2, 3, 4}, Samples: []writev2.Sample{{Value: 5, Timestamp: now, StartTimestamp: now - 1000}, {Value: 6, Timestamp: now + 1}},
					Exemplars: []writev2.Exemplar{{LabelsRefs: []uint32{7, 8}, Value: 1, Timestamp: now}},
					Metadata:  writev2.Metadata{Type: writev2.Metadata_METRIC_TYPE_COUNTER, HelpRef: 5, UnitRef: 6}},
				{LabelsRefs: []uint32{1, 9}, Histograms: []writev2.Histogram{{Count: &writev2.Histogram_CountInt{CountInt: 2}, Sum: 3,
					PositiveSpans: []writev2.BucketSpan{{Length: 2}}, PositiveDeltas: []int64{1, 0}, Timestamp: now}}},
			},
		}
	}
	t.Run("2.0", func(t *testing.T) {
		r := newRig(t, nil)
		stats, err := client(r).Write(ctx, remote.WriteV2MessageType, good())
		if err != nil || stats.Samples != 2 || stats.Histograms != 1 || stats.Exemplars != 1 {
			t.Errorf("%+v, %v", stats, err)
		}
		if got := r.store.values(`{__name__="ok_total", gpu="0"}`); got[now] != 5 || got[now+1] != 6 {
			t.Errorf("stored %v", got)
		}
		if len(r.store.metadata) != 1 || len(r.store.hists[`anonymous/{__name__="hist"}`]) != 1 {
			t.Errorf("metadata %v, histograms %v", r.store.metadata, r.store.hists)
		}
	})
	t.Run("2.0, a part refused", func(t *testing.T) {
		r := newRig(t, nil)
		req := good()
		req.Timeseries = append(req.Timeseries, writev2.TimeSeries{LabelsRefs: []uint32{3, 4}, Samples: []writev2.Sample{{Value: 1, Timestamp: now}}})
		stats, err := client(r).Write(ctx, remote.WriteV2MessageType, req)
		if err == nil || !strings.Contains(err.Error(), "missing_metric_name: 1") || stats.Samples != 2 || stats.Histograms != 1 {
			t.Errorf("%+v, %v", stats, err)
		}
		if r.store.batches != 1 {
			t.Errorf("sent %d times, a 400 is not to be retried", r.store.batches)
		}
	})
	t.Run("2.0, by vtprotobuf's types", func(t *testing.T) {
		r := newRig(t, nil)
		stats, err := client(r).Write(ctx, remote.WriteV2MessageType, &clientv2.Request{
			Symbols:    []string{"", "__name__", "x"},
			Timeseries: []*clientv2.TimeSeries{{LabelsRefs: []uint32{1, 2}, Samples: []*clientv2.Sample{{Value: 5, Timestamp: now}}}},
		})
		if err != nil || stats.Samples != 1 || r.store.values(`{__name__="x"}`)[now] != 5 {
			t.Errorf("%+v, %v, stored %v", stats, err, r.store.floats)
		}
	})
	t.Run("2.0, nothing but metadata", func(t *testing.T) {
		r := newRig(t, nil)
		req := good()
		req.Timeseries[0].Samples, req.Timeseries[0].Exemplars = nil, nil
		req.Timeseries = req.Timeseries[:1]
		if stats, err := client(r).Write(ctx, remote.WriteV2MessageType, req); err != nil || stats.Samples != 0 || len(r.store.metadata) != 1 {
			t.Errorf("%+v, %v, stored %v", stats, err, r.store.metadata)
		}
	})
	t.Run("1.0", func(t *testing.T) {
		r := newRig(t, nil)
		_, err := client(r).Write(ctx, remote.WriteV1MessageType, &prompb.WriteRequest{Timeseries: []prompb.TimeSeries{{
			Labels:  []prompb.Label{{Name: "__name__", Value: "x"}, {Name: "pod", Value: ""}},
			Samples: []prompb.Sample{{Value: 5, Timestamp: now}},
		}}})
		if err != nil || r.store.values(`{__name__="x"}`)[now] != 5 {
			t.Errorf("%v, stored %v", err, r.store.floats)
		}
	})
	t.Run("2.0, unavailable for a while", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.RetryAfter = time.Nanosecond })
		r.store.fail = series.Errorf(series.Unavailable, "starting")
		retries := 0
		// The client waits the Retry-After of 1 s, so once is enough.
		stats, err := client(r).Write(ctx, remote.WriteV2MessageType, good(), remote.WithWriteRetryCallback(func(error) {
			retries++
			r.store.mu.Lock()
			r.store.fail = nil
			r.store.mu.Unlock()
		}))
		if err != nil || retries != 1 || stats.Samples != 2 {
			t.Errorf("%+v, %v after %d retries", stats, err, retries)
		}
	})
}
