package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/golang/snappy"
	"github.com/prometheus/prometheus/prompb"
	writev2 "github.com/prometheus/prometheus/prompb/io/prometheus/write/v2"
	"github.com/stretchr/testify/require"
)

// rw1 builds a remote write 1.0 request exactly as given: labels in the order of pairs.
func rw1(t *testing.T, list ...prompb.TimeSeries) []byte {
	t.Helper()
	body, err := (&prompb.WriteRequest{Timeseries: list}).Marshal()
	require.NoError(t, err)
	return body
}

func ts(at time.Time, v float64, pairs ...string) prompb.TimeSeries {
	s := prompb.TimeSeries{Samples: []prompb.Sample{{Timestamp: at.UnixMilli(), Value: v}}}
	for i := 0; i < len(pairs); i += 2 {
		s.Labels = append(s.Labels, prompb.Label{Name: pairs[i], Value: pairs[i+1]})
	}
	return s
}

func rw2(t *testing.T, symbols []string, list ...writev2.TimeSeries) []byte {
	t.Helper()
	body, err := (&writev2.Request{Symbols: symbols, Timeseries: list}).Marshal()
	require.NoError(t, err)
	return body
}

// send posts a body with the headers given and returns status and text.
func (s *server) send(path string, body []byte, headers ...string) (int, string, http.Header) {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodPost, s.url+path, bytes.NewReader(body))
	require.NoError(s.t, err)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	return resp.StatusCode, string(text), resp.Header
}

// TestBadWrites holds the faults of remote write against the binary: each is refused with
// the right status and words, and the good series beside it is stored.
func TestBadWrites(t *testing.T) {
	varve := startVarve(t, t.TempDir())
	now := time.Now().Add(-time.Minute).Truncate(time.Second)
	const v1, v2 = "application/x-protobuf", "application/x-protobuf;proto=io.prometheus.write.v2.Request"
	good := func(id string) prompb.TimeSeries { return ts(now, 1, "__name__", "good", "case", id) }

	for i, c := range []struct {
		name   string
		bad    prompb.TimeSeries
		reason string
		says   string
	}{
		{"a label name twice (RW-01)", ts(now, 1, "__name__", "bad", "z", "a", "z", "b"), "duplicate_label_name", "bad"},
		{"a label name twice, apart (RW-04)", ts(now, 1, "__name__", "bad", "b", "1", "a", "2", "b", "3"), "duplicate_label_name", "bad"},
		{"an empty label name (RW-11)", ts(now, 1, "__name__", "bad", "", "x"), "empty_label_name", "bad"},
		{"no name (RW-17)", ts(now, 1, "a", "b"), "missing_metric_name", "a="},
		{"an empty name (RW-17)", ts(now, 1, "__name__", "", "a", "b"), "missing_metric_name", "a="},
		{"a value that is no UTF-8 (RW-17)", ts(now, 1, "__name__", "bad", "a", "\xff\xfe"), "invalid_utf8", "bad"},
		{"a name that is no UTF-8 (RW-17)", ts(now, 1, "__name__", "\xff"), "invalid_utf8", `\xff`},
		{"a value of 100 KiB (RW-17)", ts(now, 1, "__name__", "bad", "a", strings.Repeat("x", 100<<10)), "label_too_long", "bad"},
		{"a sample two hours ahead (RW-03)", ts(now.Add(2*time.Hour), 1, "__name__", "bad"), "too_far_in_future", "bad"},
		{"nanoseconds (RW-03)", prompb.TimeSeries{Labels: ts(now, 1, "__name__", "bad").Labels, Samples: []prompb.Sample{{Timestamp: now.UnixNano()}}}, "too_far_in_future", "nanoseconds"},
		{"seconds (RW-03)", prompb.TimeSeries{Labels: ts(now, 1, "__name__", "bad").Labels, Samples: []prompb.Sample{{Timestamp: now.Unix()}}}, "timestamp_invalid", "seconds"},
		{"the largest time (RW-03)", prompb.TimeSeries{Labels: ts(now, 1, "__name__", "bad").Labels, Samples: []prompb.Sample{{Timestamp: math.MaxInt64}}}, "too_far_in_future", "bad"},
		{"time zero (RW-17)", prompb.TimeSeries{Labels: ts(now, 1, "__name__", "bad").Labels, Samples: []prompb.Sample{{Timestamp: 0}}}, "timestamp_invalid", "bad"},
		{"a negative time (RW-03)", prompb.TimeSeries{Labels: ts(now, 1, "__name__", "bad").Labels, Samples: []prompb.Sample{{Timestamp: -1}}}, "timestamp_invalid", "bad"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := metric(t, varve, fmt.Sprintf(`varve_discarded_samples_total{reason="%s"}`, c.reason))
			id := fmt.Sprint(i)
			code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, rw1(t, c.bad, good(id))), "Content-Type", v1, "Content-Encoding", "snappy")
			require.Equal(t, 400, code, text)
			require.Contains(t, text, c.reason+": 1")
			require.Contains(t, text, c.says)
			require.True(t, utf8.ValidString(text))
			require.Less(t, len(text), 2000)
			require.Len(t, varve.instant(fmt.Sprintf(`good{case="%s"}`, id), now), 1, "its neighbour is stored")
			require.Empty(t, varve.instant(`bad`, now))
			require.Equal(t, before+1, metric(t, varve, fmt.Sprintf(`varve_discarded_samples_total{reason="%s"}`, c.reason)))
		})
	}

	t.Run("a future sample does not stop the others (RW-03)", func(t *testing.T) {
		code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, rw1(t, ts(time.Now(), 1, "__name__", "y"))), "Content-Type", v1, "Content-Encoding", "snappy")
		require.Equal(t, 204, code, text)
	})
	t.Run("empty values equal absent labels (RW-11), and any order of labels is one series (RW-04)", func(t *testing.T) {
		body := rw1(t, ts(now, 1, "__name__", "u", "UUID", "GPU-1", "pod", ""), ts(now.Add(time.Second), 2, "UUID", "GPU-1", "__name__", "u"))
		code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, body), "Content-Type", v1, "Content-Encoding", "snappy")
		require.Equal(t, 204, code, text)
		got := varve.instant(`u{pod=""}[1m]`, now.Add(10*time.Second))
		require.Len(t, got, 1)
		require.Len(t, got[0].Values, 2)
	})
	t.Run("label sets that look alike stay apart (RW-18)", func(t *testing.T) {
		body := rw1(t, ts(now, 1, "__name__", "m", "a", "bc"), ts(now, 2, "__name__", "m", "ab", "c"))
		code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, body), "Content-Type", v1, "Content-Encoding", "snappy")
		require.Equal(t, 204, code, text)
		require.Len(t, varve.instant(`m`, now), 2)
	})
	t.Run("UTF-8 names are stored and can be asked for (RW-17)", func(t *testing.T) {
		body := rw1(t, ts(now, 7, "__name__", "gpu.util.🔥", "host.name", "n1"))
		code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, body), "Content-Type", v1, "Content-Encoding", "snappy")
		require.Equal(t, 204, code, text)
		require.Len(t, varve.instant(`{"gpu.util.🔥", "host.name"="n1"}`, now), 1)
	})

	symbols := []string{"", "__name__", "two"}
	sample := []writev2.Sample{{Timestamp: now.UnixMilli(), Value: 1}}
	whole := rw2(t, symbols, writev2.TimeSeries{LabelsRefs: []uint32{1, 2}, Samples: sample})
	one := rw1(t, good("envelope"))
	for _, c := range []struct {
		name     string
		body     []byte
		encoding string
		typ      string
		want     int
	}{
		{"2.0 labelled 2.0 (RW-08)", snappy.Encode(nil, whole), "snappy", v2, 204},
		{"2.0 without a proto parameter", snappy.Encode(nil, whole), "snappy", v1, 400},
		{"2.0 labelled 1.0", snappy.Encode(nil, whole), "snappy", v1 + ";proto=prometheus.WriteRequest", 400},
		{"1.0 labelled 2.0", snappy.Encode(nil, one), "snappy", v2, 400},
		{"1.0 in upper case and with spaces", snappy.Encode(nil, one), "Snappy", "Application/X-Protobuf; proto=prometheus.WriteRequest", 204},
		{"JSON", []byte("{}"), "snappy", "application/json", 415},
		{"an unknown message", snappy.Encode(nil, one), "snappy", v1 + ";proto=prometheus.Other", 415},
		{"gzip", one, "gzip", v1, 415},
		{"zstd", one, "zstd", v1, 415},
		{"a reference out of range", snappy.Encode(nil, rw2(t, symbols, writev2.TimeSeries{LabelsRefs: []uint32{1, 9}, Samples: sample})), "snappy", v2, 400},
		{"an odd number of references", snappy.Encode(nil, rw2(t, symbols, writev2.TimeSeries{LabelsRefs: []uint32{1}, Samples: sample})), "snappy", v2, 400},
		{"no symbols", snappy.Encode(nil, rw2(t, nil, writev2.TimeSeries{LabelsRefs: []uint32{1, 2}, Samples: sample})), "snappy", v2, 400},
		{"a few bytes that claim 4 GiB (RW-09)", []byte{0xff, 0xff, 0xff, 0xff, 0x0f, 0x00}, "snappy", v1, 400},
		{"40 MiB of one label", snappy.Encode(nil, bytes.Repeat([]byte("\x0a\x00"), 20<<20)), "snappy", v1, 413},
		{"truncated snappy", snappy.Encode(nil, one)[:20], "snappy", v1, 400},
		{"broken protobuf", snappy.Encode(nil, []byte{0x0a, 0xff, 0x01}), "snappy", v1, 400},
		{"an empty request", snappy.Encode(nil, nil), "snappy", v1, 204},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, text, _ := varve.send("/api/v1/push", c.body, "Content-Type", c.typ, "Content-Encoding", c.encoding)
			require.Equal(t, c.want, code, text)
		})
	}
	t.Run("the answer to 2.0 counts what was written", func(t *testing.T) {
		_, _, header := varve.send("/api/v1/write", snappy.Encode(nil, whole), "Content-Type", v2, "Content-Encoding", "snappy")
		require.Equal(t, "1", header.Get("X-Prometheus-Remote-Write-Samples-Written"))
		require.Equal(t, "0", header.Get("X-Prometheus-Remote-Write-Exemplars-Written"))
	})
	t.Run("tenants that would leave their folder are refused", func(t *testing.T) {
		for _, name := range []string{"../x", "a/b", "..", "a\\b", strings.Repeat("x", 200)} {
			code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, one), "Content-Type", v1, "Content-Encoding", "snappy", "X-Scope-OrgID", name)
			require.Equal(t, 400, code, text)
		}
	})
	t.Run("limits answer by their kind (LM-02)", func(t *testing.T) {
		limited := startVarve(t, t.TempDir(), "--limits.series=2", "--limits.sample-rate=1", "--limits.sample-burst=3")
		body := rw1(t, ts(now, 1, "__name__", "a"), ts(now, 1, "__name__", "b"), ts(now, 1, "__name__", "c"))
		code, text, _ := limited.send("/api/v1/write", snappy.Encode(nil, body), "Content-Type", v1, "Content-Encoding", "snappy")
		require.Equal(t, 400, code, text)
		require.Contains(t, text, "series_limit: 1")
		require.Len(t, limited.instant(`{__name__=~"a|b"}`, now), 2, "what fits is stored")
		var header http.Header
		waitFor(t, "the rate limit to answer", func() bool {
			code, _, header = limited.send("/api/v1/write", snappy.Encode(nil, body), "Content-Type", v1, "Content-Encoding", "snappy")
			return code == 429
		})
		require.NotEmpty(t, header.Get("Retry-After"))
	})
}

// TestGrafana walks the requests that Grafana's Prometheus data source makes (case GF-01).
func TestGrafana(t *testing.T) {
	varve := startVarve(t, t.TempDir())
	now := time.Now().Add(-10 * time.Second)
	code, text, _ := varve.send("/api/v1/write", snappy.Encode(nil, rw1(t, ts(now, 1, "__name__", "up", "job", "x"), ts(now, 2, "__name__", "up", "job", "y"))), "Content-Encoding", "snappy")
	require.Equal(t, 204, code, text)

	var build struct{ Version, Application string }
	mustUnmarshal(t, varve.get("/api/v1/status/buildinfo", nil).Data, &build)
	require.Regexp(t, `^3\.\d+\.\d+$`, build.Version)

	form := url.Values{"query": {"sum(up)"}, "match[]": {"up"}, "start": {unix(now.Add(-time.Minute))}, "end": {unix(now.Add(time.Minute))}, "step": {"15"}, "time": {unix(now)}}
	for _, prefix := range []string{"", "/prometheus"} {
		for _, path := range []string{"/query", "/query_range", "/series", "/labels", "/query_exemplars", "/format_query", "/parse_query"} {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				req, err := http.NewRequest(method, varve.url+prefix+"/api/v1"+path, nil)
				require.NoError(t, err)
				if method == http.MethodGet {
					req.URL.RawQuery = form.Encode()
				} else {
					req, err = http.NewRequest(method, req.URL.String(), strings.NewReader(form.Encode()))
					require.NoError(t, err)
					req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				}
				resp, err := http.DefaultClient.Do(req)
				require.NoError(t, err)
				body, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				resp.Body.Close()
				require.Equal(t, 200, resp.StatusCode, "%s %s: %s", method, path, body)
				var a answer
				require.NoError(t, json.Unmarshal(body, &a))
				require.Equal(t, "success", a.Status)
			}
		}
		for _, path := range []string{"/label/job/values", "/label/__name__/values", "/metadata", "/rules", "/alerts", "/alertmanagers", "/targets", "/status/flags", "/status/config", "/status/tsdb", "/status/runtimeinfo"} {
			a := varve.get(prefix+"/api/v1"+path, nil)
			require.Equal(t, "success", a.Status, path)
		}
	}
	var values []string
	mustUnmarshal(t, varve.get("/api/v1/label/job/values", url.Values{"match[]": {`up{job!="x"}`}}).Data, &values)
	require.Equal(t, []string{"y"}, values)
	limited := varve.get("/api/v1/label/job/values", url.Values{"limit": {"1"}})
	mustUnmarshal(t, limited.Data, &values)
	require.Len(t, values, 1)
	require.NotEmpty(t, limited.Warnings, "an answer cut short says so")
	require.Equal(t, 405, varve.delete("/api/v1/query"))
	require.Equal(t, 404, varve.get("/api/v1/nonsense", nil).code)
	require.Equal(t, "bad_data", varve.get("/api/v1/query", url.Values{"query": {"sum("}}).ErrorType)
}

func (s *server) delete(path string) int {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodDelete, s.url+path, nil)
	require.NoError(s.t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(s.t, err)
	resp.Body.Close()
	return resp.StatusCode
}
