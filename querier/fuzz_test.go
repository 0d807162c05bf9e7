package querier_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/storage"

	"github.com/varvedb/varve/querier"
)

// FuzzServeHTTP sends requests of any shape: each must be answered, in JSON unless it
// is a remote read, and none may panic.
func FuzzServeHTTP(f *testing.F) {
	s := serve(f, func(c *querier.Config, _ *querier.Options) {
		c.MaxSamples, c.MaxBodyBytes, c.Timeout = 10_000, 1<<16, time.Second
	})
	fill(f, s.recent.db, func(app storage.AppenderV2) { gauge("x", base, base+hour, "job", "a")(app) })
	for _, seed := range [][5]string{
		{"GET", "/api/v1/query", "query=x&time=1760047200", "", ""},
		{"POST", "/api/v1/query_range", "", "query=rate(x[5m])&start=1&end=2&step=1", ""},
		{"GET", "/prometheus/api/v1/label/U__gpu_2e_uuid/values", "match[]=x&limit=1", "", fleet},
		{"POST", "/api/v1/series", "match[]={", "match[]=%zz", "a/b"},
		{"POST", "/api/v1/read", "", "\x10\x3c\x0a\x0e\x08\x01\x10\x02\x1a\x08\x08\x02", ""},
		{"POST", "/api/v1/read", "", "\xff\xff\xff\xff\x0f\x00", ""},
		{"GET", "/api/v1/metadata", "limit=-9223372036854775809", "", ""},
		{"OPTIONS", "/api/v1//", "", "", ""},
		{"GET", "/api/v1/query_exemplars", "query=x+{}&start=a", "", ""},
		{"GET", "/api/v1/rules", "type=alert&group_limit=1&match[]={a=\"b\"}", "", ""},
		{"GET", "/api/v1/query", "query=x&partial_response=1&timeout=1&stats=all&lookback_delta=1h", "", ""},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3], seed[4])
	}
	f.Fuzz(func(t *testing.T, method, path, query, body, tenant string) {
		r, err := http.NewRequest(method, "http://x/", strings.NewReader(body))
		if err != nil {
			return
		}
		r.URL = &url.URL{Scheme: "http", Host: "x", Path: path, RawQuery: query}
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if tenant != "" {
			r.Header.Set("X-Scope-OrgID", tenant)
		}
		w := httptest.NewRecorder()
		s.q.ServeHTTP(w, r)
		if w.Code == http.StatusNoContent || strings.HasSuffix(path, "/read") || strings.HasSuffix(path, "/openapi.yaml") {
			return
		}
		var a answer
		if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || a.Status != "success" && a.Status != "error" {
			t.Errorf("%s %q?%q: got %d %q, which is no document of the API: %v", method, path, query, w.Code, w.Body, err)
		}
	})
}
