package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestEndToEndPrometheus: two real Prometheus scrape a simulated fleet and write to
// Varve, Debian's old one by remote write 1.0 and a current one by 2.0, each as a tenant
// of its own. Varve is killed and started again on the way. In the end Varve must have
// every sample that they have, and answer every query of the corpus as the current
// Prometheus does over its own data.
func TestEndToEndPrometheus(t *testing.T) {
	old, current := tool(t, "prometheus-2"), tool(t, "prometheus-3")
	scrapeFor := 40 * time.Second
	if soak() {
		scrapeFor = 10 * time.Minute
	}

	fleetAddr := freeAddress(t)
	start(t, filepath.Join(bin, "fleetgen"), "serve", "--listen="+fleetAddr, "--nodes=3", "--gpus-per-node=4",
		"--collect=2s", "--interval=1s", "--mig=0.3", "--inference=0.5", "--exp", "--churn=200")
	varveAddr, dir := freeAddress(t), t.TempDir()
	varve := startVarveAt(t, varveAddr, dir)

	// 2.42 does not send the headers that it is configured with, so it is the default tenant.
	p2 := startPrometheus(t, old, fleetAddr, varveAddr, "anonymous", "")
	p3 := startPrometheus(t, current, fleetAddr, varveAddr, "current", "protobuf_message: io.prometheus.write.v2.Request",
		"--enable-feature=promql-experimental-functions,metadata-wal-records,exemplar-storage,promql-binop-fill-modifiers")

	begin := time.Now()
	time.Sleep(scrapeFor / 2)
	varve.kill()
	varve = startVarveAt(t, varveAddr, dir)
	time.Sleep(scrapeFor / 2)
	end := time.Now().Truncate(time.Second).Add(-500 * time.Millisecond)
	window := int(end.Sub(begin).Seconds()) + 10

	for _, side := range []struct {
		reference *server
		tenant    string
	}{{p2, "anonymous"}, {p3, "current"}} {
		mine := varve.as(side.tenant)
		raw := fmt.Sprintf(`{__name__=~".+"}[%ds]`, window)
		want := samplesIn(side.reference.instant(raw, end))
		waitFor(t, fmt.Sprintf("all of %d samples of %s to arrive", want, side.tenant), func() bool {
			return samplesIn(mine.instant(raw, end)) >= want
		})
		sameAnswer(t, side.reference, mine, "/api/v1/query", url.Values{"query": {raw}, "time": {unix(end)}})
		for _, path := range []string{"/api/v1/labels", "/api/v1/label/__name__/values", "/api/v1/label/UUID/values"} {
			sameAnswer(t, side.reference, mine, path, url.Values{"start": {unix(begin)}, "end": {unix(end)}})
		}
		sameAnswer(t, side.reference, mine, "/api/v1/series", url.Values{"match[]": {`{__name__=~"DCGM_FI_DEV_(GPU_TEMP|POWER_USAGE)"}`, "up"}, "start": {unix(begin)}, "end": {unix(end)}})
		t.Logf("%s: %d samples are the same", side.tenant, want)
	}

	asked, answered := 0, 0
	for _, query := range corpus(t) {
		asked++
		at := url.Values{"query": {query.text}, "time": {unix(end)}}
		n := sameAnswer(t, p3, varve.as("current"), "/api/v1/query", at)
		if !query.instant {
			over := url.Values{"query": {query.text}, "start": {unix(begin)}, "end": {unix(end)}, "step": {"3"}}
			n += sameAnswer(t, p3, varve.as("current"), "/api/v1/query_range", over)
		}
		if n > 0 {
			answered++
		}
	}
	t.Logf("%d queries agree, %d of them with results", asked, answered)
	require.Greater(t, asked, 120)
	require.Greater(t, answered, 120, "too few queries met data to prove anything")

	var facts map[string][]map[string]string
	for _, tenant := range []string{"anonymous", "current"} {
		a := varve.as(tenant).get("/api/v1/metadata", url.Values{"metric": {"DCGM_FI_DEV_GPU_TEMP"}})
		mustUnmarshal(t, a.Data, &facts)
		require.Equal(t, "gauge", facts["DCGM_FI_DEV_GPU_TEMP"][0]["type"], tenant)
	}
	varve.interrupt()
}

func startPrometheus(t *testing.T, binary, fleetAddr, varveAddr, tenant, write string, args ...string) *server {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf(`
global: {scrape_interval: 1s, scrape_timeout: 900ms}
scrape_configs:
  - job_name: dcgm-exporter
    http_sd_configs: [{url: "http://%s/sd", refresh_interval: 1s}]
remote_write:
  - url: http://%s/api/v1/write
    headers: {X-Scope-OrgID: %s}
    queue_config: {batch_send_deadline: 200ms, max_backoff: 500ms}
    metadata_config: {send: %v, send_interval: 2s}
    %s
`, fleetAddr, varveAddr, tenant, write == "", write)
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o666))
	addr := freeAddress(t)
	s := &server{url: "http://" + addr}
	s.process = start(t, binary, append([]string{"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, "data"), "--web.listen-address=" + addr}, args...)...)
	s.waitReady()
	return s
}

// sameAnswer asks both and fails where data, error type or annotations differ. It
// returns the number of results.
func sameAnswer(t *testing.T, reference, mine *server, path string, params url.Values) int {
	t.Helper()
	want, got := reference.get(path, params), mine.get(path, params)
	if want.Status != got.Status || want.ErrorType != got.ErrorType || want.Error != got.Error {
		t.Errorf("%s %s: want %s %s %s, got %s %s %s", path, params.Get("query"), want.Status, want.ErrorType, want.Error, got.Status, got.ErrorType, got.Error)
		return 0
	}
	if want.Status != "success" {
		return 0 // both refuse it, with the same words
	}
	ordered := strings.HasPrefix(params.Get("query"), "sort")
	wantList, n := canonical(t, want.Data, ordered)
	gotList, _ := canonical(t, got.Data, ordered)
	if !slices.Equal(wantList, gotList) {
		i := 0
		for i < min(len(wantList), len(gotList)) && wantList[i] == gotList[i] {
			i++
		}
		t.Errorf("%s %s: %d results against %d, first difference at %d:\nwant %s\ngot  %s", path, params.Encode(), len(wantList), len(gotList), i, element(wantList, i), element(gotList, i))
	}
	for _, notes := range [][2][]string{{want.Warnings, got.Warnings}, {want.Infos, got.Infos}} {
		slices.Sort(notes[0])
		slices.Sort(notes[1])
		if !slices.Equal(notes[0], notes[1]) {
			t.Errorf("%s %s: annotations %q, want %q", path, params.Get("query"), notes[1], notes[0])
		}
	}
	return n
}

func element(list []string, i int) string {
	if i >= len(list) {
		return "nothing"
	}
	return list[i][:min(len(list[i]), 400)]
}

// canonical turns an answer's data into a list that can be compared: each result as
// text, sorted unless the query sorts.
func canonical(t *testing.T, data json.RawMessage, ordered bool) (list []string, n int) {
	t.Helper()
	var results []json.RawMessage
	if json.Unmarshal(data, &results) != nil {
		var typed struct {
			Type   string          `json:"resultType"`
			Result json.RawMessage `json:"result"`
		}
		mustUnmarshal(t, data, &typed)
		if typed.Type == "scalar" || typed.Type == "string" {
			return []string{typed.Type, string(typed.Result)}, 1
		}
		mustUnmarshal(t, typed.Result, &results)
		list = append(list, "type "+typed.Type)
	}
	for _, r := range results {
		list = append(list, string(r))
	}
	if !ordered {
		slices.Sort(list)
	}
	return list, len(results)
}

type corpusQuery struct {
	text    string
	instant bool
}

func corpus(t *testing.T) []corpusQuery {
	t.Helper()
	f, err := os.Open(filepath.Join("..", "querier", "testdata", "queries.txt"))
	require.NoError(t, err)
	defer f.Close()
	var queries []corpusQuery
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		query, instant := strings.CutPrefix(line, "instant ")
		queries = append(queries, corpusQuery{query, instant})
	}
	require.NoError(t, lines.Err())
	return queries
}

func samplesIn(matrix []point) int {
	n := 0
	for _, p := range matrix {
		n += len(p.Values)
	}
	return n
}

func unix(at time.Time) string { return fmt.Sprintf("%.3f", float64(at.UnixMilli())/1000) }
