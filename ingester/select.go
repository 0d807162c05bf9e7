package ingester

import (
	"context"
	"sync"

	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/metadata"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/varvedb/varve/pkg/series"
)

// Querier reads tenant's samples in [mint, maxt] (Unix ms) from head and local blocks.
// covered names the local blocks: they stay readable until the querier is closed,
// so nobody else needs to read them. skip is for stores that come after another;
// the ingester is asked first and has none. An unknown tenant has no samples.
func (i *Ingester) Querier(_ context.Context, tenant string, mint, maxt int64, _ series.BlockSet) (storage.Querier, series.BlockSet, error) {
	t, err := i.reader(tenant)
	if t == nil || err != nil {
		return storage.NoopQuerier(), nil, err
	}
	q, err := t.db.Querier(mint, maxt)
	if err != nil {
		t.release()
		return nil, nil, series.Errorf(series.Internal, "query tenant %s: %w", tenant, err)
	}
	// Listed after the querier holds its blocks: one that was deleted in between is
	// missing here and read twice, never not at all.
	return &releasingQuerier{q, sync.OnceFunc(t.release)}, t.blockSet(), nil
}

// ChunkQuerier is Querier for those who want chunks as they are stored.
func (i *Ingester) ChunkQuerier(_ context.Context, tenant string, mint, maxt int64, _ series.BlockSet) (storage.ChunkQuerier, series.BlockSet, error) {
	t, err := i.reader(tenant)
	if t == nil || err != nil {
		return storage.NoopChunkedQuerier(), nil, err
	}
	q, err := t.db.ChunkQuerier(mint, maxt)
	if err != nil {
		t.release()
		return nil, nil, series.Errorf(series.Internal, "query tenant %s: %w", tenant, err)
	}
	return &releasingChunkQuerier{q, sync.OnceFunc(t.release)}, t.blockSet(), nil
}

// ExemplarQuerier reads tenant's exemplars, which live in memory and in the WAL.
func (i *Ingester) ExemplarQuerier(_ context.Context, tenant string) (storage.ExemplarQuerier, error) {
	return exemplarReader{i, tenant}, nil
}

// Metadata returns what was said of the metric family, or of all families for the
// empty name: each distinct (type, help, unit) once, the oldest first.
func (i *Ingester) Metadata(_ context.Context, tenant, family string) (map[string][]metadata.Metadata, error) {
	if err := i.readable(); err != nil {
		return nil, err
	}
	t, err := i.tenant(tenant, false)
	if t == nil || err != nil {
		return nil, err
	}
	return t.metadata.get(family), nil
}

// readable refuses reads until all that is on disk can be read: an answer without
// it would look complete.
func (i *Ingester) readable() error {
	if i.ready.Load() && i.stopping.Load() {
		return nil // those who were let in may finish
	}
	return i.Ready()
}

// reader returns the tenant for reading, nil if it has no samples here.
func (i *Ingester) reader(tenant string) (*tenantDB, error) {
	if err := i.readable(); err != nil {
		return nil, err
	}
	return i.acquire(tenant, false)
}

// releasingQuerier gives the tenant back when it is closed.
type releasingQuerier struct {
	storage.Querier
	release func()
}

func (q *releasingQuerier) Close() error {
	defer q.release()
	return q.Querier.Close()
}

type releasingChunkQuerier struct {
	storage.ChunkQuerier
	release func()
}

func (q *releasingChunkQuerier) Close() error {
	defer q.release()
	return q.ChunkQuerier.Close()
}

// exemplarReader holds the tenant only while it selects: Prometheus' exemplar
// queriers have no Close.
type exemplarReader struct {
	i      *Ingester
	tenant string
}

func (r exemplarReader) Select(start, end int64, matchers ...[]*labels.Matcher) ([]exemplar.QueryResult, error) {
	t, err := r.i.reader(r.tenant)
	if t == nil || err != nil {
		return nil, err
	}
	defer t.release()
	q, err := t.db.ExemplarQuerier(context.Background())
	if err != nil {
		return nil, series.Errorf(series.Internal, "query exemplars of tenant %s: %w", r.tenant, err)
	}
	return q.Select(start, end, matchers...)
}

// HeadStats describes tenant's head: the limit largest counts of each table, series
// counted by the values of label, and the number of chunks in the head. Stats are nil
// for a tenant without a head.
func (i *Ingester) HeadStats(_ context.Context, tenant, label string, limit int) (*tsdb.Stats, int64, error) {
	t, err := i.reader(tenant)
	if t == nil || err != nil {
		return nil, 0, err
	}
	defer t.release()
	chunks, err := t.gauge("prometheus_tsdb_head_chunks")
	if err != nil {
		return nil, 0, err
	}
	return t.db.Head().Stats(label, limit), int64(chunks), nil
}

// gauge reads one of TSDB's metrics: some of what it knows is shown nowhere else.
func (t *tenantDB) gauge(name string) (float64, error) {
	families, err := t.reg.Gather()
	if err != nil {
		return 0, series.Errorf(series.Internal, "read metrics of tenant %s: %w", t.name, err)
	}
	for _, f := range families {
		if f.GetName() == name && len(f.Metric) == 1 {
			return f.Metric[0].GetGauge().GetValue(), nil
		}
	}
	return 0, series.Errorf(series.Internal, "BUG: TSDB has no metric %s", name)
}
