package querier

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strconv"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/index"
	"github.com/prometheus/prometheus/util/annotations"
	v1 "github.com/prometheus/prometheus/web/api/v1"

	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// number reads an integer parameter, fallback where it is missing.
func number(r *http.Request, name string, fallback int) (int, error) {
	s := r.FormValue(name)
	if s == "" {
		return fallback, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, series.Errorf(series.Invalid, "%s must be a number, not %.40q", name, s)
	}
	return n, nil
}

// serveMetadata answers /api/v1/metadata from what senders said. With limit the
// families come first in the order of their names; a negative limit, and a
// limit_per_metric below 1, are none, as in Prometheus.
func (q *Querier) serveMetadata(w http.ResponseWriter, r *http.Request) {
	limit, err := number(r, "limit", -1)
	if err != nil {
		q.refuse(w, r, err)
		return
	}
	perMetric, err := number(r, "limit_per_metric", -1)
	if err != nil {
		q.refuse(w, r, err)
		return
	}
	var warnings annotations.Annotations
	known, err := q.metadata(r)
	if err != nil && series.PartialAllowed(r.Context()) {
		warnings.Add(fmt.Errorf("the answer lacks what the ingester has: %w", err))
	} else if err != nil {
		q.refuse(w, r, err)
		return
	}
	families := slices.Sorted(maps.Keys(known))
	if limit >= 0 && len(families) > limit {
		families = families[:limit]
	}
	answer := make(map[string][]metadata.Metadata, len(families))
	for _, f := range families {
		entries := known[f]
		if perMetric > 0 && len(entries) > perMetric {
			entries = entries[:perMetric]
		}
		answer[f] = entries
	}
	q.respond(w, answer, warnings)
}

func (q *Querier) metadata(r *http.Request) (map[string][]metadata.Metadata, error) {
	name, err := tenant.FromContext(r.Context())
	if err != nil {
		return nil, err
	}
	return q.opts.Recent.Metadata(r.Context(), name, r.FormValue("metric"))
}

// mostTSDBStats is the limit of Prometheus' own endpoint.
const mostTSDBStats = 10_000

// serveTSDBStatus answers /api/v1/status/tsdb for the tenant's head.
func (q *Querier) serveTSDBStatus(w http.ResponseWriter, r *http.Request) {
	limit, err := number(r, "limit", 10)
	switch {
	case err != nil:
	case limit < 1:
		err = series.Errorf(series.Invalid, "limit must be a positive number")
	case limit > mostTSDBStats:
		err = series.Errorf(series.Invalid, "limit must not exceed %d", mostTSDBStats)
	}
	if err != nil {
		q.refuse(w, r, err)
		return
	}
	name, err := tenant.FromContext(r.Context())
	if err != nil {
		q.refuse(w, r, err)
		return
	}
	stats, chunks, err := q.opts.Recent.HeadStats(r.Context(), name, labels.MetricName, limit)
	if err != nil {
		q.refuse(w, r, err)
		return
	}
	if stats == nil {
		stats = &tsdb.Stats{}
	}
	if stats.IndexPostingStats == nil {
		stats.IndexPostingStats = &index.PostingsStats{}
	}
	p := stats.IndexPostingStats
	q.respond(w, v1.TSDBStatus{
		HeadStats: v1.HeadStats{
			NumSeries:     stats.NumSeries,
			NumLabelPairs: p.NumLabelPairs,
			ChunkCount:    chunks,
			MinTime:       stats.MinTime,
			MaxTime:       stats.MaxTime,
		},
		SeriesCountByMetricName:     v1.TSDBStatsFromIndexStats(p.CardinalityMetricsStats),
		LabelValueCountByLabelName:  v1.TSDBStatsFromIndexStats(p.CardinalityLabelStats),
		MemoryInBytesByLabelName:    v1.TSDBStatsFromIndexStats(p.LabelValueStats),
		SeriesCountByLabelValuePair: v1.TSDBStatsFromIndexStats(p.LabelValuePairsStats),
	}, nil)
}

// describer is a bucket's store that can say which blocks it reads.
type describer interface {
	Blocks(ctx context.Context, tenant string) ([]tsdb.BlockMeta, error)
}

// serveBlocks answers /api/v1/status/tsdb/blocks with the tenant's blocks in the
// bucket.
func (q *Querier) serveBlocks(w http.ResponseWriter, r *http.Request) {
	metas := []tsdb.BlockMeta{}
	if d, ok := q.opts.Bucket.(describer); ok {
		name, err := tenant.FromContext(r.Context())
		if err == nil {
			metas, err = d.Blocks(r.Context(), name)
		}
		if err != nil {
			q.refuse(w, r, err)
			return
		}
	}
	q.respond(w, map[string][]tsdb.BlockMeta{"blocks": metas}, nil)
}

// buildInfo is Prometheus' document with who really answers. It has no "features":
// Grafana takes a data source with them for Mimir.
type buildInfo struct {
	v1.PrometheusVersion
	Application        string `json:"application"`
	ApplicationVersion string `json:"applicationVersion"`
}

func (q *Querier) serveBuildInfo(w http.ResponseWriter, _ *http.Request) {
	q.respond(w, buildInfo{
		PrometheusVersion: v1.PrometheusVersion{
			Version:   APIVersion,
			Revision:  q.opts.Build.Revision,
			Branch:    q.opts.Build.Branch,
			BuildUser: q.opts.Build.BuildUser,
			BuildDate: q.opts.Build.BuildDate,
			GoVersion: runtime.Version(),
		},
		Application:        "Varve",
		ApplicationVersion: q.opts.Build.Version,
	}, nil)
}

func (q *Querier) serveConfig(w http.ResponseWriter, _ *http.Request) {
	q.respond(w, map[string]string{"yaml": q.opts.ConfigYAML}, nil)
}
