package querier_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/storage"

	"github.com/varvedb/varve/pkg/tenant"
	"github.com/varvedb/varve/querier"
)

// fillPower appends an hour of 1,000 series, a sample each 15 s.
func fillPower(app storage.AppenderV2, from, to int64) {
	for i := range 1000 {
		ls := labels.FromStrings("__name__", "power", "cluster", fmt.Sprint(i%10), "gpu", fmt.Sprint(i%8), "node", fmt.Sprintf("node-%04d", i/8))
		var ref storage.SeriesRef
		for at := from; at < to; at += 15_000 {
			ref, _ = app.Append(ref, ls, 0, at, float64(at/15_000%97)+float64(i), nil, nil, storage.AppendV2Options{})
		}
	}
}

// discard is a response writer that keeps nothing.
type discard struct {
	header http.Header
	code   int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) WriteHeader(code int)        { d.code = code }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }

// BenchmarkQuery compares the engine over a plain TSDB with the engine over the stores
// (the same TSDB and an empty bucket), and with the whole way through HTTP.
func BenchmarkQuery(b *testing.B) {
	s := serve(b, nil)
	fill(b, s.recent.db, func(app storage.AppenderV2) { fillPower(app, base, base+hour) })
	ctx := tenant.NewContext(context.Background(), fleet)
	queries := []struct{ name, text string }{
		{"select", "power"},
		{"rate", "sum by (cluster) (rate(power[5m]))"},
	}
	kinds := []struct {
		name string
		step time.Duration
	}{{"instant", 0}, {"range", 30 * time.Second}}
	start, end := time.UnixMilli(base+hour/2), time.UnixMilli(base+hour-1)
	for _, q := range queries {
		for _, k := range kinds {
			over := func(b *testing.B, store storage.Queryable) {
				b.ReportAllocs()
				for b.Loop() {
					var query promql.Query
					var err error
					if k.step == 0 {
						query, err = s.q.Engine().NewInstantQuery(ctx, store, nil, q.text, end)
					} else {
						query, err = s.q.Engine().NewRangeQuery(ctx, store, nil, q.text, start, end, k.step)
					}
					if err != nil {
						b.Fatal(err)
					}
					if result := query.Exec(ctx); result.Err != nil {
						b.Fatal(result.Err)
					}
					query.Close()
				}
			}
			name := q.name + "/" + k.name
			b.Run(name+"/engine over TSDB", func(b *testing.B) { over(b, s.recent.db) })
			b.Run(name+"/engine over stores", func(b *testing.B) { over(b, s.q.Queryable()) })
			b.Run(name+"/HTTP over stores", func(b *testing.B) {
				form := url.Values{"query": {q.text}, "time": {seconds(end.UnixMilli())}}
				path := "/api/v1/query?"
				if k.step > 0 {
					form = url.Values{"query": {q.text}, "start": {seconds(start.UnixMilli())}, "end": {seconds(end.UnixMilli())}, "step": {"30"}}
					path = "/api/v1/query_range?"
				}
				r := httptest.NewRequest(http.MethodGet, path+form.Encode(), nil)
				b.ReportAllocs()
				for b.Loop() {
					w := &discard{header: http.Header{}}
					s.q.ServeHTTP(w, r)
					if w.code != http.StatusOK {
						b.Fatal(w.code)
					}
				}
			})
		}
	}
}

// BenchmarkSeam reads what lies half in the head, half in a block of the bucket.
func BenchmarkSeam(b *testing.B) {
	s := serve(b, nil)
	s.upload(func(app storage.AppenderV2) { fillPower(app, base, base+hour/2) })
	fill(b, s.recent.db, func(app storage.AppenderV2) { fillPower(app, base+hour/2-10*60_000, base+hour) })
	ctx := tenant.NewContext(context.Background(), fleet)
	b.ReportAllocs()
	for b.Loop() {
		query, err := s.q.Engine().NewRangeQuery(ctx, s.q.Queryable(), nil, "sum by (cluster) (rate(power[5m]))", time.UnixMilli(base), time.UnixMilli(base+hour), time.Minute)
		if err != nil {
			b.Fatal(err)
		}
		if result := query.Exec(ctx); result.Err != nil {
			b.Fatal(result.Err)
		}
		query.Close()
	}
}

// BenchmarkLabelValues asks 250,000 series for one of 500 values, as Grafana's
// variables do.
func BenchmarkLabelValues(b *testing.B) {
	s := serve(b, func(*querier.Config, *querier.Options) {})
	fill(b, s.recent.db, func(app storage.AppenderV2) {
		for i := range 250_000 {
			_, _ = app.Append(0, labels.FromStrings("__name__", "power", "gpu", fmt.Sprint(i), "node", fmt.Sprint(i%500)), 0, base, 1, nil, nil, storage.AppendV2Options{})
		}
	})
	for name, form := range map[string]url.Values{
		"of a metric":               {"match[]": {"power"}},
		"of a metric, in a range":   {"match[]": {"power"}, "start": {seconds(base)}, "end": {seconds(base + hour)}},
		"of a metric, with a limit": {"match[]": {"power"}, "limit": {"100"}},
	} {
		b.Run(name, func(b *testing.B) {
			r := httptest.NewRequest(http.MethodGet, "/api/v1/label/node/values?"+form.Encode(), nil)
			for b.Loop() {
				w := &discard{header: http.Header{}}
				s.q.ServeHTTP(w, r)
				if w.code != http.StatusOK {
					b.Fatal(w.code)
				}
			}
		})
	}
}
