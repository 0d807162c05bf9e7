package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/alecthomas/units"

	"github.com/varvedb/varve/distributor"
	"github.com/varvedb/varve/ingester"
	"github.com/varvedb/varve/querier"
	"github.com/varvedb/varve/querier/blocks"
)

// flags is every flag of varve. A key of the config file has the flag's name.
type flags struct {
	Config struct {
		File string `name:"file" type:"path" placeholder:"FILE" help:"YAML file with values for these flags: a flag's name is the path of its key. Flags on the command line win; unknown keys are errors."`
	} `embed:"" prefix:"config."`

	Target  []string         `name:"target" default:"all" help:"Roles to run in this process. Only all so far."`
	Version kong.VersionFlag `name:"version" help:"Print the version and exit."`

	HTTP struct {
		Listen string `name:"listen" default:"127.0.0.1:9433" placeholder:"ADDRESS" help:"Address for everything HTTP: writes, queries, /metrics. Use :9433 to listen on all interfaces."`
	} `embed:"" prefix:"http." group:"Server"`
	Log struct {
		Level  string `name:"level" enum:"debug,info,warn,error" default:"info" help:"Least severe messages to log: ${enum}."`
		Format string `name:"format" enum:"text,json" default:"text" help:"Form of log lines: ${enum}."`
	} `embed:"" prefix:"log." group:"Server"`
	Tenant struct {
		Default  string `name:"default" default:"anonymous" placeholder:"NAME" help:"Tenant of requests without the header X-Scope-OrgID."`
		Required bool   `name:"required" help:"Refuse requests without the header X-Scope-OrgID."`
	} `embed:"" prefix:"tenant." group:"Server"`

	Storage struct {
		Path string `name:"path" default:"data" type:"path" placeholder:"DIR" help:"Folder for everything that is kept on this machine."`
	} `embed:"" prefix:"storage." group:"Storage"`
	Bucket struct {
		ConfigFile string `name:"config-file" type:"path" placeholder:"FILE" help:"objstore's YAML file for the bucket (type FILESYSTEM, S3, GCS or AZURE). Without it the bucket is a folder below storage.path."`
	} `embed:"" prefix:"bucket." group:"Storage"`
	Ingester struct {
		LateWindow     time.Duration    `name:"late-window" default:"2h" help:"How far behind the tenant's newest sample a sample may be and still be stored."`
		LocalRetention time.Duration    `name:"local-retention" default:"6h" help:"How long blocks stay on this disk although they are in the bucket; at least the late window and two hours."`
		IdleTimeout    time.Duration    `name:"idle-timeout" default:"3h" help:"How long a tenant may be silent before it is moved to the bucket and closed. 0 for never."`
		MinFreeDisk    units.Base2Bytes `name:"min-free-disk" default:"256MiB" help:"Refuse writes with 503 when less of the disk is free."`
		FloatChunks    string           `name:"float-chunks" enum:"xor2,xor" default:"xor2" help:"Encoding of float samples: xor2 keeps start timestamps, xor can be read by tools older than Prometheus 3.14."`
		BlockDuration  time.Duration    `name:"block-duration" default:"2h" hidden:"" help:"Width of blocks. For tests: Prometheus, Thanos and Mimir expect 2h."`
		Maintenance    time.Duration    `name:"maintenance-interval" default:"30s" hidden:"" help:"How often blocks are uploaded. For tests."`
	} `embed:"" prefix:"ingester." group:"Storage"`

	Write struct {
		MaxBody         units.Base2Bytes `name:"max-body" default:"16MiB" help:"Largest request body as sent, compressed. Larger ones are answered 413."`
		MaxDecoded      units.Base2Bytes `name:"max-decoded" default:"32MiB" help:"Largest request body once decompressed."`
		MaxInflight     units.Base2Bytes `name:"max-inflight" default:"1GiB" help:"Memory for all write requests at one time; more are answered 503."`
		FutureTolerance time.Duration    `name:"future-tolerance" default:"10m" help:"How far in the future a timestamp may be."`
		OTLPPromote     []string         `name:"otlp-promote" default:"host.name,k8s.node.name,k8s.cluster.name,k8s.namespace.name,k8s.pod.name" help:"OTLP resource attributes that become labels of every series of the resource."`
	} `embed:"" prefix:"write." group:"Writes"`
	Limits struct {
		Series      int     `name:"series" default:"0" help:"Series in a tenant's head; new ones beyond are refused with 400. 0 for no limit."`
		SampleRate  float64 `name:"sample-rate" default:"0" help:"Samples per second of a tenant, on average; more are answered 429. 0 for no limit."`
		SampleBurst int     `name:"sample-burst" default:"1000000" help:"Samples that a tenant may send at once where a rate is set."`
		Labels      int     `name:"labels" default:"256" help:"Labels of a series, its name included."`
		LabelName   int     `name:"label-name" default:"1024" help:"Bytes of a label name."`
		LabelValue  int     `name:"label-value" default:"8192" help:"Bytes of a label value."`
		Exemplars   int     `name:"exemplars" default:"20000" help:"Exemplars kept for a tenant, the newest ones. 0 for none."`
		Tenants     int     `name:"tenants" default:"1000" help:"Tenants on this disk; writes of new ones beyond are refused with 400. Each costs about a megabyte while it is open."`
	} `embed:"" prefix:"limits." group:"Limits"`

	Query struct {
		Timeout       time.Duration    `name:"timeout" default:"2m" help:"Longest time for a query."`
		MaxSamples    int              `name:"max-samples" default:"50000000" help:"Most samples that a query may hold in memory."`
		MaxConcurrent int              `name:"max-concurrent" default:"20" help:"Queries evaluated at one time; more wait."`
		Lookback      time.Duration    `name:"lookback" default:"5m" help:"How far an instant looks back for a series' last sample."`
		BlockCache    units.Base2Bytes `name:"block-cache" default:"20GiB" help:"Disk space for blocks fetched from a bucket that is not a local folder."`

		StartTimestamps bool `name:"start-timestamps" help:"Let rate and its kin use start timestamps where samples have them, as Prometheus' feature use-start-timestamps."`
	} `embed:"" prefix:"query." group:"Queries"`

	values   map[string]string // every flag with its value, for /api/v1/status/flags
	fileText string            // the config file, for /api/v1/status/config
}

// errHelp ends run after --help or --version was answered.
var errHelp = errors.New("help was printed")

// parseFlags reads the command line and the config file it may name.
func parseFlags(args []string, stdout, stderr io.Writer) (*flags, error) {
	var f flags
	exited := false
	options := []kong.Option{
		kong.Name("varve"),
		kong.Description("A long-term metrics store for GPU fleets. Without flags it is a complete store on 127.0.0.1:9433 with its data in ./data: point a Prometheus' remote_write at /api/v1/write, and add it to Grafana as a Prometheus data source."),
		kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 110, FlagsLast: true}),
		kong.Vars{"version": versionText()},
		kong.Writers(stdout, stderr),
		kong.Exit(func(int) { exited = true }),
	}
	if path := configFileArg(args); path != "" {
		file, err := readConfigFile(path)
		if err != nil {
			return nil, err
		}
		options = append(options, kong.Resolvers(file))
		f.fileText = file.text
	}
	parser, err := kong.New(&f, options...)
	if err != nil {
		return nil, fmt.Errorf("BUG: flags: %w", err)
	}
	_, err = parser.Parse(args)
	if exited {
		return nil, errHelp
	}
	if err != nil {
		return nil, err
	}
	for _, target := range f.Target {
		if target != "all" {
			return nil, fmt.Errorf("--target=%s: only all is there so far", target)
		}
	}
	f.values = map[string]string{}
	for _, group := range parser.Model.AllFlags(false) {
		for _, flag := range group {
			f.values[flag.Name] = fmt.Sprint(flag.Target.Interface())
		}
	}
	return &f, nil
}

// configFileArg finds --config.file before the flags are parsed: the file's values
// take part in parsing.
func configFileArg(args []string) string {
	for i, a := range args {
		if value, ok := strings.CutPrefix(a, "--config.file="); ok {
			return value
		}
		if a == "--config.file" && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

func (f *flags) logger(w io.Writer) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.Log.Level)); err != nil {
		level = slog.LevelInfo
	}
	options := &slog.HandlerOptions{Level: level}
	if f.Log.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// tenantFallback is the tenant of requests that name none, empty to refuse them.
func (f *flags) tenantFallback() string {
	if f.Tenant.Required {
		return ""
	}
	return f.Tenant.Default
}

func (f *flags) ingesterConfig(dir string) ingester.Config {
	c := ingester.DefaultConfig()
	c.Dir = dir
	c.BlockDuration = f.Ingester.BlockDuration
	c.LateWindow = f.Ingester.LateWindow
	// A late sample is compared with what is here: its moment must not be in the bucket only.
	c.LocalRetention = max(f.Ingester.LocalRetention, c.LateWindow+c.BlockDuration)
	c.MaintenanceInterval = f.Ingester.Maintenance
	c.IdleTimeout = f.Ingester.IdleTimeout
	c.MinFreeDisk = int64(f.Ingester.MinFreeDisk)
	c.FloatChunks = f.Ingester.FloatChunks
	c.FutureTolerance = f.Write.FutureTolerance
	c.MaxSeries = f.Limits.Series
	c.MaxExemplars = f.Limits.Exemplars
	c.MaxTenants = f.Limits.Tenants
	return c
}

func (f *flags) distributorConfig() distributor.Config {
	c := distributor.DefaultConfig()
	c.DefaultTenant = f.tenantFallback()
	c.MaxBodyBytes = int(f.Write.MaxBody)
	c.MaxDecodedBytes = int(f.Write.MaxDecoded)
	c.MaxRequestBytes = max(c.MaxRequestBytes, c.MaxDecodedBytes)
	c.MaxInflightBytes = int64(f.Write.MaxInflight)
	c.FutureTolerance = f.Write.FutureTolerance
	c.PromoteResourceAttributes = f.Write.OTLPPromote
	c.SampleRate = f.Limits.SampleRate
	c.SampleBurst = f.Limits.SampleBurst
	c.MaxLabels = f.Limits.Labels
	c.MaxLabelNameBytes = f.Limits.LabelName
	c.MaxLabelValueBytes = f.Limits.LabelValue
	c.MaxTenants = f.Limits.Tenants
	c.Exemplars = f.Limits.Exemplars > 0
	return c
}

func (f *flags) querierConfig() querier.Config {
	c := querier.DefaultConfig()
	c.DefaultTenant = f.tenantFallback()
	c.Timeout = f.Query.Timeout
	c.MaxSamples = f.Query.MaxSamples
	c.MaxConcurrent = f.Query.MaxConcurrent
	c.LookbackDelta = f.Query.Lookback
	c.StartTimestamps = f.Query.StartTimestamps
	c.IngesterHolds = f.ingesterConfig("").LocalRetention
	return c
}

func (f *flags) blocksConfig(dir string) blocks.Config {
	c := blocks.DefaultConfig()
	c.CacheDir = dir
	c.CacheBytes = int64(f.Query.BlockCache)
	// A list must not be older than an ingester keeps what it uploaded.
	c.MaxListAge = ingester.DefaultConfig().VisibleAfter - c.RefreshInterval
	return c
}
