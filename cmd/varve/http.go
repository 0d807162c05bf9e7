package main

import (
	"fmt"
	"html/template"
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// registerOperations mounts what operators and machines ask of the process itself.
func registerOperations(mux *http.ServeMux, metrics prometheus.Gatherer, ready func() error) {
	mux.HandleFunc("/-/healthy", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "varve is alive")
	})
	mux.HandleFunc("/-/ready", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "varve is ready")
	})
	mux.Handle("/metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/{$}", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = frontPage.Execute(w, struct{ Host, Version string }{r.Host, versionText()}) // the client is gone: nothing to do
	})
}

var frontPage = template.Must(template.New("front page").Parse(`<!doctype html>
<html lang="en"><title>Varve</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}code,pre{background:#8882;border-radius:4px;padding:.1rem .3rem}pre{padding:.8rem}</style>
<h1>Varve</h1>
<p>{{.Version}}</p>
<p>Write to it from Prometheus:</p>
<pre>remote_write:
  - url: http://{{.Host}}/api/v1/write</pre>
<p>Look at it with Grafana: add a <b>Prometheus</b> data source with the URL <code>http://{{.Host}}</code>.</p>
<ul>
<li><a href="/-/ready">is it ready?</a></li>
<li><a href="/metrics">its own metrics</a></li>
<li><a href="/api/v1/status/tsdb">series, labels and cardinality</a></li>
<li><a href="/api/v1/labels">label names</a></li>
<li><a href="/debug/pprof/">profiles</a></li>
</ul>
</html>
`))
