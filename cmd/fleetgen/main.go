// Command fleetgen is a simulated GPU fleet: exporter pages for Prometheus to
// scrape, and remote-write load of any size and age.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "fleetgen:", err)
		os.Exit(1)
	}
}

// commands are what fleetgen can do. Each has its own file.
type commands struct {
	Serve            serveCommand      `cmd:"" help:"Serve the pages of all exporters from one port, with service discovery."`
	Load             loadCommand       `cmd:"" help:"Send the fleet's samples by remote write: past weeks in minutes, then live."`
	PrometheusConfig prometheusCommand `cmd:"" help:"Print a prometheus.yml that scrapes 'fleetgen serve' and writes to a store."`
	Failures         failuresCommand   `cmd:"" help:"List the failures that the fleet has in a time range: what a store should show."`
}

// errHelp ends run after the help text was printed.
var errHelp = errors.New("help was printed")

func run(ctx context.Context, args []string, stdout io.Writer) (err error) {
	defer func() {
		if p := recover(); p != nil {
			if p != errHelp { //nolint:errorlint // our own value, never wrapped
				panic(p)
			}
			err = nil
		}
	}()
	var c commands
	parser, err := kong.New(&c,
		kong.Name("fleetgen"),
		kong.Description("A simulated GPU fleet. The same seed and the same flags give the same samples, whatever the instant at which one begins."),
		kong.Writers(stdout, os.Stderr),
		kong.Exit(func(int) { panic(errHelp) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.BindTo(stdout, (*io.Writer)(nil)),
	)
	if err != nil {
		return fmt.Errorf("build the command line: %w", err)
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	kctx, err := parser.Parse(joinTimes(args))
	if err != nil {
		return err
	}
	return kctx.Run()
}

// joinTimes turns "--from -14d" into "--from=-14d": the parser takes the former for
// another flag.
func joinTimes(args []string) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		switch a := args[i]; {
		case (a == "--from" || a == "--to" || a == "--upgrade-at") && i+1 < len(args):
			out = append(out, a+"="+args[i+1])
			i++
		default:
			out = append(out, a)
		}
	}
	return out
}
