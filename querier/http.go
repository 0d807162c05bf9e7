package querier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/util/httputil"

	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// prefixes are the paths below which the API stands; both are the same.
var prefixes = [...]string{"/prometheus/api/v1", "/api/v1"}

// endpoint is one path of the API.
type endpoint struct {
	name    string // as metrics show it
	methods []string
	handler http.Handler
	// gate bounds how many requests run at one time, nil for what costs nothing.
	gate *gate
	// remoteRead marks the one endpoint whose body and answer are protobuf.
	remoteRead bool
}

// labelValues is the one path with a parameter in it.
const labelValues = "/label/:name/values"

// routes lists every endpoint with the methods that Prometheus gives it.
func (q *Querier) routes(api http.Handler) map[string]*endpoint {
	get, both := []string{http.MethodGet}, []string{http.MethodGet, http.MethodPost}
	write := []string{http.MethodPost, http.MethodPut}
	table := map[string]*endpoint{}
	add := func(h http.Handler, g *gate, methods []string, paths ...string) {
		for _, p := range paths {
			table[p] = &endpoint{name: strings.TrimPrefix(p, "/"), methods: methods, handler: h, gate: g}
		}
	}
	add(api, q.queries, both, "/query", "/query_range", "/query_exemplars", "/labels", "/series")
	add(api, q.queries, get, labelValues)
	add(api, q.queries, both, "/format_query", "/parse_query")
	add(api, nil, both, "/search/metric_names", "/search/label_names", "/search/label_values")
	add(api, nil, get, "/scrape_pools", "/scrape_pools/config", "/targets", "/targets/metadata", "/targets/relabel_steps",
		"/alertmanagers", "/alerts", "/rules", "/features", "/notifications", "/notifications/live", "/openapi.yaml",
		"/status/runtimeinfo", "/status/flags", "/status/self_metrics", "/status/walreplay")
	add(api, nil, write, "/admin/tsdb/delete_series", "/admin/tsdb/clean_tombstones", "/admin/tsdb/snapshot")
	add(q.own(q.serveMetadata), q.queries, get, "/metadata")
	add(q.own(q.serveTSDBStatus), q.queries, get, "/status/tsdb")
	add(q.own(q.serveBlocks), q.queries, get, "/status/tsdb/blocks")
	add(q.own(q.serveBuildInfo), nil, get, "/status/buildinfo")
	add(q.own(q.serveConfig), nil, get, "/status/config")
	add(api, q.reads, []string{http.MethodPost}, "/read")
	table["/read"].remoteRead = true
	return table
}

// own gives an endpoint of ours what Prometheus' have: CORS headers and compression.
func (q *Querier) own(serve func(http.ResponseWriter, *http.Request)) http.Handler {
	return httputil.CompressionHandler{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		httputil.SetCORS(w, q.api.CORSOrigin, r)
		serve(w, r)
	})}
}

// ServeHTTP answers below /api/v1 and /prometheus/api/v1: everything there, unknown
// paths included, is JSON as Prometheus' clients expect it.
func (q *Querier) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	started := time.Now()
	patient := newPatientWriter(w, q.cfg.WriteTimeout)
	path, name := r.URL.Path, "unknown"
	for _, p := range prefixes {
		if rest, ok := strings.CutPrefix(path, p); ok && (rest == "" || rest[0] == '/') {
			path = rest
			break
		}
	}
	e := q.find(path)
	if e != nil {
		name = e.name
	}
	defer func() {
		// What is still buffered has the same time to leave.
		patient.extend()
		q.metrics.duration.WithLabelValues(name, strconv.Itoa(patient.code)).Observe(time.Since(started).Seconds())
	}()
	switch {
	case r.Method == http.MethodOptions:
		httputil.SetCORS(patient, q.api.CORSOrigin, r)
		patient.WriteHeader(http.StatusNoContent)
	case e == nil:
		q.refuseEarly(patient, r, http.StatusNotFound, "not_found", fmt.Sprintf("there is no endpoint %s", r.URL.Path))
	case !slices.Contains(e.methods, r.Method):
		patient.Header().Set("Allow", strings.Join(append(slices.Clone(e.methods), http.MethodOptions), ", "))
		q.refuseEarly(patient, r, http.StatusMethodNotAllowed, "bad_data", fmt.Sprintf("%s takes %s, not %s", r.URL.Path, strings.Join(e.methods, " and "), r.Method))
	default:
		q.serve(patient, r, e, path)
	}
}

func (q *Querier) refuseEarly(w http.ResponseWriter, r *http.Request, code int, errorType, message string) {
	httputil.SetCORS(w, q.api.CORSOrigin, r)
	q.refuseAs(w, code, errorType, message)
}

func (q *Querier) find(path string) *endpoint {
	if e := q.endpoints[path]; e != nil {
		return e
	}
	if name, ok := strings.CutPrefix(path, "/label/"); ok {
		if name, ok = strings.CutSuffix(name, "/values"); ok && name != "" && !strings.Contains(name, "/") {
			return q.endpoints[labelValues]
		}
	}
	return nil
}

// answerTimeouts is how many times the time of a query its whole request may take,
// the client's reading of it included.
const answerTimeouts = 5

// serve runs a request through what all endpoints share: the tenant, the bounds of
// the body, the slot, the time.
func (q *Querier) serve(w *patientWriter, r *http.Request, e *endpoint, path string) {
	ctx, err := q.prepare(w, r, e)
	if err != nil {
		httputil.SetCORS(w, q.api.CORSOrigin, r)
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			q.refuseAs(w, http.StatusRequestEntityTooLarge, "bad_data", fmt.Sprintf("the body is larger than %d bytes, the most allowed", large.Limit))
			return
		}
		q.refuse(w, r, err)
		return
	}
	if e.gate != nil {
		if err := e.gate.enter(ctx); err != nil {
			httputil.SetCORS(w, q.api.CORSOrigin, r)
			q.refuse(w, r, err)
			return
		}
		defer e.gate.leave()
		q.metrics.running.Inc()
		defer q.metrics.running.Dec()
		// PromQL queries start the same time anew when they are evaluated; for all else
		// this is the only bound. A remote read reads while it writes.
		timeout, most := q.cfg.Timeout, answerTimeouts*q.cfg.Timeout
		if e.remoteRead {
			timeout = most
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
		w.end = time.Now().Add(most)
	}
	inner := r.WithContext(ctx)
	url := *r.URL
	url.Path, url.RawPath = path, ""
	inner.URL = &url
	e.handler.ServeHTTP(w, inner)
}

// prepare reads what the request says apart from the query.
func (q *Querier) prepare(w *patientWriter, r *http.Request, e *endpoint) (context.Context, error) {
	name, err := tenant.FromRequest(r, q.cfg.DefaultTenant)
	if err != nil {
		return nil, err
	}
	ctx := tenant.NewContext(r.Context(), name)
	r.Body = http.MaxBytesReader(w.ResponseWriter, r.Body, q.cfg.MaxBodyBytes)
	if e.remoteRead {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, series.Errorf(series.Invalid, "read body: %w", err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		w.failure = &failure{}
		return context.WithValue(ctx, failureKey{}, w.failure), nil
	}
	if err := r.ParseForm(); err != nil {
		return nil, series.Errorf(series.Invalid, "parse form: %w", err)
	}
	if err := checkQueries(r.Form); err != nil {
		return nil, err
	}
	if s := r.Form.Get("partial_response"); s != "" {
		partial, err := strconv.ParseBool(s)
		if err != nil {
			return nil, series.Errorf(series.Invalid, "invalid parameter %q: %q is neither true nor false", "partial_response", s)
		}
		if partial {
			ctx = series.AllowPartial(ctx)
		}
	}
	return ctx, nil
}
