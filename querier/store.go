package querier

import (
	"context"

	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/varvedb/varve/pkg/series"
)

// Store answers for the samples it holds: an ingester, or the blocks in the bucket.
type Store interface {
	// Querier reads tenant's samples in [mint, maxt] (Unix ms). Blocks in skip are
	// answered for by another store and left out. covered lists the blocks that the
	// querier answers for; they stay readable until it is closed. A tenant that the
	// store does not know has no samples. ctx is for this call, the querier's methods
	// get their own. Errors carry a series.Kind.
	Querier(ctx context.Context, tenant string, mint, maxt int64, skip series.BlockSet) (q storage.Querier, covered series.BlockSet, err error)
	// ChunkQuerier is Querier for chunks as they are stored.
	ChunkQuerier(ctx context.Context, tenant string, mint, maxt int64, skip series.BlockSet) (q storage.ChunkQuerier, covered series.BlockSet, err error)
}

// Recent is a Store that also has what lives in memory only: an ingester.
type Recent interface {
	Store
	// ExemplarQuerier reads tenant's exemplars.
	ExemplarQuerier(ctx context.Context, tenant string) (storage.ExemplarQuerier, error)
	// Metadata returns what was said of the metric family, of all families for the
	// empty name: each distinct (type, help, unit) once. The caller must not change it.
	Metadata(ctx context.Context, tenant, family string) (map[string][]metadata.Metadata, error)
	// HeadStats describes tenant's head: the limit largest counts of each table, the
	// series counted by the values of label. chunks is the number of chunks in the
	// head. Nil stats mean a tenant without a head.
	HeadStats(ctx context.Context, tenant, label string, limit int) (stats *tsdb.Stats, chunks int64, err error)
}
