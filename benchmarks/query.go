package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

//go:embed queries.yaml
var builtinQueries []byte

// query is one question of the set: an instant query, a range query if Range is
// set, the values of Label, or the series of Match.
type query struct {
	Name  string        `yaml:"name"`
	Query string        `yaml:"query"`
	Range time.Duration `yaml:"range"`
	Step  time.Duration `yaml:"step"`
	Label string        `yaml:"label"`
	Match string        `yaml:"match"`
}

func parseQueries(b []byte) ([]query, error) {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	var qs []query
	if err := dec.Decode(&qs); err != nil {
		return nil, fmt.Errorf("parse queries: %w", err)
	}
	for _, q := range qs {
		switch {
		case q.Name == "":
			return nil, fmt.Errorf("a query has no name: %+v", q)
		case (q.Query == "") == (q.Match == ""):
			return nil, fmt.Errorf("query %q: want either query or match", q.Name)
		case q.Range > 0 && q.Step <= 0:
			return nil, fmt.Errorf("query %q: a range needs a step", q.Name)
		}
	}
	return qs, nil
}

// urlFor returns the path and parameters of q's i-th repetition over l.
func (q *query) urlFor(l *load, i int) (string, url.Values) {
	fill := strings.NewReplacer(
		"{{node}}", pick(l.nodes, i), "{{uuid}}", pick(l.gpu, i),
		"[all", fmt.Sprintf("[%ds", (l.to-l.from)/1000+1)).Replace
	v := url.Values{}
	switch {
	case q.Query != "" && q.Range > 0:
		v.Set("query", fill(q.Query))
		v.Set("start", seconds(max(l.from, l.to-q.Range.Milliseconds())))
		v.Set("end", seconds(l.to))
		v.Set("step", fmt.Sprint(q.Step.Seconds()))
		return "/api/v1/query_range", v
	case q.Query != "":
		v.Set("query", fill(q.Query))
		v.Set("time", seconds(l.to))
		return "/api/v1/query", v
	}
	v.Set("match[]", fill(q.Match))
	v.Set("start", seconds(l.from))
	v.Set("end", seconds(l.to))
	if q.Label != "" {
		return "/api/v1/label/" + q.Label + "/values", v
	}
	return "/api/v1/series", v
}

// pick deals out values so that repetitions differ and runs do not.
func pick(values []string, i int) string {
	if len(values) == 0 {
		return ""
	}
	return values[(i*7919+13)%len(values)]
}

// answer is what was asked, how long it took and how much came back.
type answer struct {
	Latency time.Duration
	Rows    int // series, or values, in the answer
	Bytes   int
}

// ask sends one question.
func ask(ctx context.Context, client *http.Client, base, path string, v url.Values) (answer, error) {
	began := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path+"?"+v.Encode(), nil)
	if err != nil {
		return answer{}, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	a := answer{Latency: time.Since(began), Bytes: len(body)}
	if err != nil {
		return a, err
	}
	if resp.StatusCode != http.StatusOK {
		return a, fmt.Errorf("answer %d: %.500s", resp.StatusCode, body)
	}
	if a.Rows, err = countRows(body); err != nil {
		return a, err
	}
	return a, nil
}

// countRows returns the number of series or values in an answer of the API.
func countRows(body []byte) (int, error) {
	var r struct {
		Status string
		Error  string
		Data   json.RawMessage
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return 0, fmt.Errorf("parse answer: %w", err)
	}
	if r.Status != "success" {
		return 0, fmt.Errorf("status %s: %s", r.Status, r.Error)
	}
	var list []json.RawMessage
	if json.Unmarshal(r.Data, &list) == nil {
		return len(list), nil
	}
	var result struct{ Result []json.RawMessage }
	if err := json.Unmarshal(r.Data, &result); err != nil {
		return 0, fmt.Errorf("parse answer's data: %w", err)
	}
	return len(result.Result), nil
}

// stored asks how many samples of one metric the target holds.
func stored(ctx context.Context, client *http.Client, t *target, l *load) (float64, error) {
	v := url.Values{}
	v.Set("query", fmt.Sprintf("sum(count_over_time(DCGM_FI_DEV_GPU_TEMP[%dms]))", l.to-l.from+1000))
	v.Set("time", seconds(l.to))
	for k, x := range t.QueryParams {
		v.Set(k, x)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.QueryURL+"/api/v1/query?"+v.Encode(), nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var r struct {
		Data struct {
			Result []struct{ Value []any }
		}
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(body, &r); err != nil || resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("answer %d: %.300s", resp.StatusCode, body)
	}
	if len(r.Data.Result) != 1 || len(r.Data.Result[0].Value) != 2 {
		return 0, nil // nothing visible yet
	}
	var n float64
	_, err = fmt.Sscan(fmt.Sprint(r.Data.Result[0].Value[1]), &n)
	return n, err
}
