package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/varvedb/varve/distributor"
	"github.com/varvedb/varve/ingester"
	"github.com/varvedb/varve/pkg/bucket"
	"github.com/varvedb/varve/querier"
	"github.com/varvedb/varve/querier/blocks"
)

// The components of one process, and who calls whom:
//
//	     remote write, OTLP                          Prometheus HTTP API
//	             |                                            |
//	+------------|--------------------------------------------|-----------+
//	|            v                                            v      http |
//	|     +-------------+                              +-------------+    |
//	|     | distributor |                              |   querier   |    |
//	|     +-------------+                              +-------------+    |
//	|            | Append (label bytes)         Querier |         |       |
//	|            v                                      v         v       |
//	|     +----------------------------------------------+  +----------+  |
//	|     |                   ingester                   |  |  blocks  |  |
//	|     |     a TSDB per tenant: WAL, head, blocks     |  +----------+  |
//	|     +----------------------------------------------+       |        |
//	|            | upload                                        | read   |
//	|            v                                               v        |
//	|     +----------------------------------------------------------+    |
//	|     |             bucket: a folder, S3, GCS, Azure             |    |
//	|     +----------------------------------------------------------+    |
//	+---------------------------------------------------------------------+
//
// They start from the bottom up and stop from the top down.
type varve struct {
	log      *slog.Logger
	flags    *flags
	registry *prometheus.Registry

	bucket      *bucket.Opened
	ingester    *ingester.Ingester
	blocks      *blocks.Store
	querier     *querier.Querier
	distributor *distributor.Distributor

	listener net.Listener
	server   *http.Server
}

// shutdownTimeout is how long requests under way may take once the process is told
// to stop.
const shutdownTimeout = 30 * time.Second

// run is the whole program: it returns when ctx ends or something fails.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f, err := parseFlags(args, stdout, stderr)
	if errors.Is(err, errHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	v, err := newVarve(ctx, f, f.logger(stderr))
	if err != nil {
		return err
	}
	return v.run(ctx)
}

// newVarve wires the components; nothing runs yet but the listener is open, so that a
// port in use is found before a long replay.
func newVarve(ctx context.Context, f *flags, log *slog.Logger) (_ *varve, err error) {
	v := &varve{log: log, flags: f, registry: prometheus.NewRegistry()}
	v.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if v.listener, err = net.Listen("tcp", f.HTTP.Listen); err != nil {
		return nil, fmt.Errorf("listen for HTTP: %w", err)
	}
	defer func() {
		if err != nil {
			v.listener.Close()
		}
	}()
	if v.bucket, err = openBucket(ctx, f); err != nil {
		return nil, err
	}
	if v.ingester, err = newIngester(v); err != nil {
		return nil, err
	}
	if v.blocks, err = newBlocks(v); err != nil {
		return nil, err
	}
	if v.querier, err = newQuerier(v); err != nil {
		return nil, err
	}
	if v.distributor, err = newDistributor(v); err != nil {
		return nil, err
	}
	v.server = newServer(v)
	return v, nil
}

func openBucket(ctx context.Context, f *flags) (*bucket.Opened, error) {
	if f.Bucket.ConfigFile == "" {
		return bucket.OpenDir(filepath.Join(f.Storage.Path, "bucket"))
	}
	document, err := os.ReadFile(f.Bucket.ConfigFile)
	if err != nil {
		return nil, fmt.Errorf("read bucket configuration: %w", err)
	}
	b, err := bucket.Open(ctx, document)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Bucket.ConfigFile, err)
	}
	return b, nil
}

func newIngester(v *varve) (*ingester.Ingester, error) {
	return ingester.New(v.flags.ingesterConfig(filepath.Join(v.flags.Storage.Path, "ingester")), ingester.Options{
		Bucket:     v.bucket.Bucket,
		Logger:     v.log.With("component", "ingester"),
		Registerer: v.registry,
	})
}

func newBlocks(v *varve) (*blocks.Store, error) {
	return blocks.Open(v.flags.blocksConfig(filepath.Join(v.flags.Storage.Path, "querier", "blocks")), blocks.Options{
		Bucket:     v.bucket.Bucket,
		LocalDir:   v.bucket.LocalDir,
		Logger:     v.log.With("component", "blocks"),
		Registerer: v.registry,
	})
}

func newQuerier(v *varve) (*querier.Querier, error) {
	return querier.New(v.flags.querierConfig(), querier.Options{
		Recent:     v.ingester,
		Bucket:     v.blocks,
		Logger:     v.log.With("component", "querier"),
		Registerer: v.registry,
		Gatherer:   v.registry,
		Build:      buildInfo(),
		Flags:      v.flags.values,
		ConfigYAML: v.flags.fileText,
	})
}

func newDistributor(v *varve) (*distributor.Distributor, error) {
	return distributor.New(v.flags.distributorConfig(), v.ingester, v.registry, v.log.With("component", "distributor"), time.Now)
}

func newServer(v *varve) *http.Server {
	mux := http.NewServeMux()
	registerOperations(mux, prometheus.Gatherers{v.registry, v.ingester}, v.ingester.Ready)
	v.distributor.Register(mux)
	mux.Handle("/api/v1/", v.querier)
	mux.Handle("/prometheus/api/v1/", v.querier)
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       2 * time.Minute, // a body that trickles must not hold a handler for ever
		IdleTimeout:       5 * time.Minute,
		ErrorLog:          slog.NewLogLogger(v.log.With("component", "http").Handler(), slog.LevelWarn),
	}
}

// run serves until ctx ends or the server fails, then stops from the top down.
func (v *varve) run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- v.server.Serve(v.listener) }()
	v.log.Info("listening", "http", "http://"+v.listener.Addr().String(), "data", v.flags.Storage.Path, "bucket", v.bucket.Name(), "version", versionText())

	background, stopBackground := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- v.distributor.Run(background) }()

	err := v.ingester.Start(ctx)
	if err == nil {
		v.log.Info("ready")
		select {
		case <-ctx.Done():
			v.log.Info("stopping")
		case err = <-served:
			err = fmt.Errorf("serve HTTP: %w", err)
		}
	} else if ctx.Err() != nil {
		err = nil // told to stop while starting
	}

	stopBackground()
	return errors.Join(err, v.stop(), <-ran)
}

// stop ends the components from the top down and says how long each took.
func (v *varve) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	var errs []error
	for _, c := range []struct {
		name string
		stop func() error
	}{
		{"http", func() error { return v.stopServer(ctx) }},
		{"blocks", v.blocks.Close},
		{"ingester", v.ingester.Close},
		{"bucket", v.bucket.Close},
	} {
		started := time.Now()
		if err := c.stop(); err != nil {
			errs = append(errs, fmt.Errorf("stop %s: %w", c.name, err))
		}
		v.log.Info("stopped", "component", c.name, "took", time.Since(started).Round(time.Millisecond))
	}
	return errors.Join(errs...)
}

// stopServer lets requests under way end, and cuts those that do not.
func (v *varve) stopServer(ctx context.Context) error {
	err := v.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		v.log.Warn("requests under way were cut off", "after", shutdownTimeout)
		return v.server.Close()
	}
	return err
}
