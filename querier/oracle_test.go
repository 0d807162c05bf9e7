package querier_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"

	"github.com/varvedb/varve/pkg/tenant"
	"github.com/varvedb/varve/querier"
	"github.com/varvedb/varve/querier/internal/blocktest"
)

// corpusQuery is one line of testdata/queries.txt.
type corpusQuery struct {
	line    int
	text    string
	instant bool // not over ranges
}

func corpus(t testing.TB) []corpusQuery {
	t.Helper()
	content, err := os.ReadFile("testdata/queries.txt")
	if err != nil {
		t.Fatal(err)
	}
	var queries []corpusQuery
	for i, line := range strings.Split(string(content), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		text, instant := strings.CutPrefix(line, "instant ")
		queries = append(queries, corpusQuery{i + 1, text, instant})
	}
	return queries
}

func corpusParser() parser.Parser {
	return parser.NewParser(parser.Options{EnableExperimentalFunctions: true, EnableBinopFillModifiers: true})
}

// The corpus must not fall behind the language.
func TestCorpusCoversPromQL(t *testing.T) {
	missing := map[string]bool{}
	for name := range parser.Functions {
		missing[name] = true
	}
	for _, op := range []string{
		"+", "-", "*", "/", "%", "^", "==", "!=", "<", "<=", ">", ">=", ">/", "</", "atan2", "and", "or", "unless",
		"sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "quantile", "count_values", "topk", "bottomk", "limitk", "limit_ratio",
	} {
		missing[op] = true
	}
	queries := corpus(t)
	for _, q := range queries {
		expr, err := corpusParser().ParseExpr(q.text)
		if err != nil {
			t.Errorf("testdata/queries.txt:%d: %s: %v", q.line, q.text, err)
			continue
		}
		parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
			switch n := node.(type) {
			case *parser.Call:
				delete(missing, n.Func.Name)
			case *parser.BinaryExpr:
				delete(missing, n.Op.String())
			case *parser.AggregateExpr:
				delete(missing, n.Op.String())
			}
			return nil
		})
		for _, word := range []string{"max_of", "min_of", "step", "range", "start", "end"} { // in durations they are no calls
			if strings.Contains(q.text, word+"(") {
				delete(missing, word)
			}
		}
	}
	if len(missing) > 0 {
		t.Errorf("the corpus lacks %v", slices.Sorted(maps.Keys(missing)))
	}
	if len(queries) < 120 {
		t.Errorf("the corpus has %d queries, want at least 120", len(queries))
	}
}

const fleetSpan = 5 * hour

// splitFleet spreads the fleet's samples over two blocks in the bucket and the head,
// each overlapping the next.
func splitFleet(t testing.TB, s *server, data []source) {
	t.Helper()
	for _, part := range [][2]int64{{0, 2 * hour}, {2*hour - 10*60_000, 4 * hour}} {
		dir := t.TempDir()
		db, err := tsdb.Open(dir, slog.New(slog.DiscardHandler), nil, options(chunkenc.EncXOR2), nil)
		if err != nil {
			t.Fatal(err)
		}
		fill(t, db, func(app storage.AppenderV2) { appendFleet(t, app, data, part[0], part[1]) })
		if err := db.CompactHead(rangeHead(db, base+part[0], base+part[1])); err != nil {
			t.Fatal(err)
		}
		blocktest.Upload(t, s.bucket, fleet, db.Blocks()[0].Dir())
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.blocks.Refresh(context.Background(), fleet); err != nil {
		t.Fatal(err)
	}
	fill(t, s.recent.db, func(app storage.AppenderV2) { appendFleet(t, app, data, 4*hour-30*60_000, fleetSpan) })
}

// plain is the reference: the engine of the same version over one TSDB.
func plain(t testing.TB, data []source) (*promql.Engine, *tsdb.DB) {
	t.Helper()
	db := openDB(t, chunkenc.EncXOR2)
	fill(t, db, func(app storage.AppenderV2) { appendFleet(t, app, data, 0, fleetSpan) })
	cfg := querier.DefaultConfig()
	return promql.NewEngine(promql.EngineOpts{
		MaxSamples: cfg.MaxSamples, Timeout: cfg.Timeout, LookbackDelta: cfg.LookbackDelta,
		NoStepSubqueryIntervalFn: func(int64) int64 { return time.Minute.Milliseconds() },
		EnableAtModifier:         true, EnableNegativeOffset: true,
		Parser: corpusParser(),
	}), db
}

// evaluation is one way to run a query.
type evaluation struct {
	name       string
	start, end int64 // relative to base
	step       time.Duration
	// startTimes lets rate and its kin use start timestamps.
	startTimes bool
}

var evaluations = []evaluation{
	{"where the blocks overlap", 2*hour - 3*60_000, 0, 0, false},
	{"at the end", fleetSpan - step, 0, 0, true},
	{"over all", 10 * 60_000, fleetSpan, 7 * time.Minute, true},
	{"across the seam of block and head", 4*hour - 40*60_000, 4*hour + 10*60_000, 45 * time.Second, false},
}

func TestEveryQueryAgreesWithOneEngineOverOneTSDB(t *testing.T) {
	data := fleetData()
	s := serve(t, nil)
	splitFleet(t, s, data)
	reference, db := plain(t, data)
	ctx := tenant.NewContext(t.Context(), fleet)
	nonEmpty := 0
	for _, q := range corpus(t) {
		found := false
		for _, e := range evaluations {
			if q.instant && e.step > 0 {
				continue
			}
			want := run(ctx, t, reference, db, q, e)
			got := run(ctx, t, s.q.Engine(), s.q.Queryable(), q, e)
			found = found || len(want.series) > 0
			if diff := compare(want, got); diff != "" {
				t.Errorf("testdata/queries.txt:%d: %s, %s: %s", q.line, q.text, e.name, diff)
			}
		}
		if found {
			nonEmpty++
		} else {
			t.Logf("testdata/queries.txt:%d: no evaluation of %s has a result", q.line, q.text)
		}
	}
	if nonEmpty < 300 {
		t.Errorf("only %d queries have results", nonEmpty)
	}
}

// outcome is a result as text, every bit of its values in it.
type outcome struct {
	series []string
	notes  []string
	err    string
}

func run(ctx context.Context, t testing.TB, engine *promql.Engine, q storage.Queryable, c corpusQuery, e evaluation) outcome {
	t.Helper()
	var query promql.Query
	var err error
	opts := promql.NewPrometheusQueryOpts(false, 0, &e.startTimes)
	if start := time.UnixMilli(base + e.start); e.step == 0 {
		query, err = engine.NewInstantQuery(ctx, q, opts, c.text, start)
	} else {
		query, err = engine.NewRangeQuery(ctx, q, opts, c.text, start, time.UnixMilli(base+e.end), e.step)
	}
	if err != nil {
		return outcome{err: err.Error()}
	}
	defer query.Close()
	result := query.Exec(ctx)
	o := outcome{notes: slices.Sorted(maps.Keys(result.Warnings))}
	if result.Err != nil {
		o.err = result.Err.Error()
		return o
	}
	switch v := result.Value.(type) {
	case promql.Vector:
		for _, s := range v {
			o.series = append(o.series, s.Metric.String()+" "+textOf(s.T, s.F, s.H))
		}
		if !ordered(query.Statement().(*parser.EvalStmt).Expr) {
			slices.Sort(o.series) // the engine itself makes another order each time
		}
	case promql.Matrix:
		for _, s := range v {
			text := strings.Builder{}
			text.WriteString(s.Metric.String())
			for _, p := range s.Floats {
				text.WriteString(" " + textOf(p.T, p.F, nil))
			}
			for _, p := range s.Histograms {
				text.WriteString(" " + textOf(p.T, 0, p.H))
			}
			o.series = append(o.series, text.String())
		}
	case promql.Scalar:
		o.series = []string{textOf(v.T, v.V, nil)}
	case promql.String:
		o.series = []string{v.V}
	default:
		t.Fatalf("a result of type %T", v)
	}
	return o
}

// ordered tells whether PromQL defines the order of the expression's vector.
func ordered(expr parser.Expr) bool {
	for {
		switch e := expr.(type) {
		case *parser.StepInvariantExpr:
			expr = e.Expr
		case *parser.ParenExpr:
			expr = e.Expr
		case *parser.Call:
			return strings.HasPrefix(e.Func.Name, "sort")
		case *parser.AggregateExpr:
			return e.Op == parser.TOPK || e.Op == parser.BOTTOMK
		case *parser.VectorSelector:
			return true // not defined, but one order for us and the reference
		default:
			return false
		}
	}
}

func textOf(at int64, v float64, h *histogram.FloatHistogram) string {
	if h != nil {
		return fmt.Sprintf("%s schema %d sum %x @%d", h, h.Schema, math.Float64bits(h.Sum), at)
	}
	return fmt.Sprintf("%g (%x) @%d", v, math.Float64bits(v), at)
}

func compare(want, got outcome) string {
	switch {
	case want.err != got.err:
		return fmt.Sprintf("got error %q, want %q", got.err, want.err)
	case !slices.Equal(want.notes, got.notes):
		return fmt.Sprintf("got annotations %q, want %q", got.notes, want.notes)
	case len(want.series) != len(got.series):
		return fmt.Sprintf("got %d series, want %d", len(got.series), len(want.series))
	}
	for i := range want.series {
		if want.series[i] != got.series[i] {
			return fmt.Sprintf("series %d: got\n%.2000s\nwant\n%.2000s", i, got.series[i], want.series[i])
		}
	}
	return ""
}
