package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/varvedb/varve/pkg/fleet"
	"github.com/varvedb/varve/pkg/series"
)

type serveCommand struct {
	fleetFlags  `embed:""`
	Listen      string        `default:"127.0.0.1:9500" help:"Address to listen on."`
	AllowRemote bool          `help:"Permit an address that others can reach."`
	FileSD      string        `name:"file-sd" placeholder:"FILE" help:"Also keep this file_sd JSON file up to date."`
	SDEvery     time.Duration `default:"30s" help:"How often the file_sd file is written."`
}

// Run serves until ctx ends.
func (c *serveCommand) Run(ctx context.Context, stdout io.Writer) error {
	f, err := c.build(time.Now())
	if err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	if !c.AllowRemote {
		if err := loopbackHost(host); err != nil {
			return fmt.Errorf("--listen: %w", err)
		}
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", c.Listen, err)
	}
	s := newServer(f, ln.Addr().String(), time.Now)
	fmt.Fprintf(stdout, "serving %d targets at http://%s (/sd lists them)\n", len(f.Targets()), ln.Addr())
	return s.serve(ctx, ln, c.FileSD, c.SDEvery)
}

// server offers every target's page under its own path.
type server struct {
	fleet   *fleet.Fleet
	address string
	now     func() time.Time
	pages   map[string]*lockedPage
}

// lockedPage serialises the scrapes of one page; twins scrape the same one.
type lockedPage struct {
	mu   sync.Mutex
	page *fleet.Page
}

func newServer(f *fleet.Fleet, address string, now func() time.Time) *server {
	s := &server{fleet: f, address: address, now: now, pages: map[string]*lockedPage{}}
	targets := f.Targets()
	for i := range targets {
		s.pages[targets[i].Path()] = &lockedPage{page: f.NewPage(&targets[i])}
	}
	return s
}

func (s *server) serve(ctx context.Context, ln net.Listener, fileSD string, every time.Duration) error {
	web := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	errs := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { errs <- web.Serve(ln) })
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if fileSD != "" {
		if err := s.writeFileSD(fileSD); err != nil {
			slog.Error("service discovery file not written", "err", err)
		}
		wg.Go(func() { s.keepFileSD(ctx, fileSD, every) })
	}
	var err error
	select {
	case <-ctx.Done():
		stop, done := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		err = web.Shutdown(stop)
		done()
	case err = <-errs:
	}
	cancel()
	wg.Wait()
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// ServeHTTP implements http.Handler.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/":
		s.index(w)
	case "/-/healthy", "/-/ready":
		fmt.Fprintln(w, "fleetgen is up")
	case "/sd":
		w.Header().Set("Content-Type", "application/json")
		w.Write(s.discovery(fleet.TargetKind(r.URL.Query().Get("kind"))))
	default:
		s.page(w, r)
	}
}

func (s *server) page(w http.ResponseWriter, r *http.Request) {
	p := s.pages[r.URL.Path]
	if p == nil {
		http.NotFound(w, r)
		return
	}
	var b bytes.Buffer
	openMetrics := p.page.OpenMetrics() && strings.Contains(r.Header.Get("Accept"), "application/openmetrics-text")
	p.mu.Lock()
	err := p.page.Write(&b, s.now().UnixMilli(), openMetrics)
	p.mu.Unlock()
	if err != nil {
		http.Error(w, err.Error(), series.KindOf(err).HTTPStatus())
		return
	}
	if openMetrics {
		w.Header().Set("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
	} else {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	}
	w.Write(b.Bytes())
}

func (s *server) index(w io.Writer) {
	count := map[fleet.TargetKind]int{}
	var first []string
	targets := s.fleet.Targets()
	for i := range targets {
		tg := &targets[i]
		if count[tg.Kind] == 0 {
			first = append(first, tg.Path())
		}
		count[tg.Kind]++
	}
	fmt.Fprintf(w, "%d nodes, %d targets; /sd lists them for http_sd_configs (/sd?kind=node for one kind)\n", len(s.fleet.Nodes()), len(targets))
	for _, path := range first {
		kind, _, _ := strings.Cut(path[1:], "/")
		fmt.Fprintf(w, "%5d %-6s for example %s\n", count[fleet.TargetKind(kind)], kind, path)
	}
}

// targetGroup is an element of Prometheus' http_sd and file_sd documents.
type targetGroup struct {
	Targets []string          `json:"targets"`
	Labels  map[string]string `json:"labels"`
}

// discovery lists the targets of one kind, or all.
func (s *server) discovery(kind fleet.TargetKind) []byte {
	now := s.now().UnixMilli()
	targets := s.fleet.Targets()
	groups := make([]targetGroup, 0, len(targets))
	for i := range targets {
		tg := &targets[i]
		if kind != "" && tg.Kind != kind {
			continue
		}
		g := targetGroup{Targets: []string{s.address}, Labels: map[string]string{"__metrics_path__": tg.Path()}}
		for _, l := range tg.Labels(now) {
			g.Labels[l.Name] = l.Value
		}
		groups = append(groups, g)
	}
	doc, err := json.Marshal(groups)
	if err != nil {
		panic("BUG: marshal service discovery: " + err.Error()) // strings only
	}
	return doc
}

func (s *server) keepFileSD(ctx context.Context, path string, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := s.writeFileSD(path); err != nil {
				slog.Error("service discovery file not written", "err", err)
			}
		}
	}
}

// writeFileSD replaces the file whole: Prometheus watches it.
func (s *server) writeFileSD(path string) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".fleetgen-sd-*.json")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(tmp.Name())
	if _, err := tmp.Write(s.discovery("")); err != nil {
		tmp.Close()
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := errors.Join(tmp.Chmod(0o644), tmp.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
