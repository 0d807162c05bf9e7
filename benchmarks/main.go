// Command benchmarks measures stores that take Prometheus remote write and answer
// its HTTP API, each as a process of its own and over HTTP only.
//
//	go run ./benchmarks run --targets benchmarks/targets/varve.yaml,benchmarks/targets/prometheus.yaml --series 100000
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
)

type command struct {
	Run   runFlags   `cmd:"" help:"Run targets in turn and write a table."`
	Merge mergeFlags `cmd:"" help:"Make one table of the raw numbers of several runs with the same flags."`
}

type mergeFlags struct {
	Files []string `arg:"" help:"Raw numbers (.json) that run wrote with --out."`
	Out   string   `name:"out" help:"File for the table (.md); raw numbers go beside it (.json)."`
}

type runFlags struct {
	Targets []string          `name:"targets" required:"" help:"Target files, see benchmarks/targets. The first one is the base of ratios unless --base names another."`
	Bin     map[string]string `name:"bin" help:"Binary of a target: name=path."`
	Base    string            `name:"base" help:"Target whose numbers the others are divided by."`

	Series    int           `name:"series" default:"100000" help:"Active series, rounded up to whole nodes."`
	Profile   string        `name:"profile" enum:"default-25,h100-147" default:"h100-147" help:"Metrics of each GPU: ${enum}."`
	Rounds    int           `name:"rounds" default:"60" help:"Samples of each series in the timed part; one more creates the series."`
	Interval  time.Duration `name:"interval" default:"15s" help:"Time between the samples of a series."`
	Batch     int           `name:"batch" default:"2000" help:"Samples in a request."`
	Protocols []int         `name:"protocol" default:"1" help:"Remote write versions, 1 or 2; a target that does not speak one is left out there."`
	Senders   int           `name:"senders" default:"4" help:"Connections that write at the same time."`
	Seed      uint64        `name:"seed" default:"1" help:"Seed of the simulated fleet."`

	Repetitions  int           `name:"repetitions" default:"3" help:"Runs of each target, interleaved; numbers are medians."`
	Queries      string        `name:"queries" help:"Query set; the built-in one if empty."`
	QueryRounds  int           `name:"query-rounds" default:"10" help:"Times that each query is asked."`
	QueryWarmup  time.Duration `name:"query-warmup" default:"5s" help:"How long the query set is asked before it counts: a store that makes little garbage when writing has a small heap to begin with."`
	Settle       time.Duration `name:"settle" default:"3s" help:"Pause after writing, whose CPU still counts as that of the writes."`
	Visible      time.Duration `name:"visible-within" default:"30s" help:"How long a target may take to show what it acknowledged: some answer from it only seconds later."`
	TargetCPUs   string        `name:"target-cpus" help:"CPUs for the target, in the form of taskset -c."`
	LoadCPUs     string        `name:"load-cpus" help:"CPUs for this program, in the form of taskset -c."`
	WorkDir      string        `name:"work-dir" help:"Where targets keep their data during a run; the system's temporary folder if empty."`
	Out          string        `name:"out" help:"File for the table (.md); raw numbers go beside it (.json)."`
	ReadyTimeout time.Duration `name:"ready-timeout" default:"60s" help:"How long a target may take to start."`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var c command
	k := kong.Parse(&c, kong.Name("benchmarks"), kong.Description("Measures metric stores over HTTP."), kong.UsageOnError())
	var err error
	if strings.HasPrefix(k.Command(), "merge") {
		err = merge(c.Merge, os.Stdout)
	} else {
		err = run(ctx, c.Run, os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchmarks:", err)
		os.Exit(1)
	}
}
