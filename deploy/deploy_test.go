package deploy_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/discovery/http"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

// decodeYAML decodes path strictly: unknown keys, doubled keys and a second
// document are errors.
func decodeYAML(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	if err := dec.Decode(into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if err := dec.Decode(into); !errors.Is(err, io.EOF) {
		t.Fatalf("%s: more than one document (%v)", path, err)
	}
}

// compose is the part of the compose format that compose.yaml uses.
type compose struct {
	Name     string                    `yaml:"name"`
	Services map[string]composeService `yaml:"services"`
	Volumes  map[string]struct{}       `yaml:"volumes"`
}

type composeService struct {
	Image string `yaml:"image"`
	Build struct {
		Context    string `yaml:"context"`
		Dockerfile string `yaml:"dockerfile"`
	} `yaml:"build"`
	DependsOn       []string          `yaml:"depends_on"`
	Entrypoint      []string          `yaml:"entrypoint"`
	Command         []string          `yaml:"command"`
	Environment     map[string]string `yaml:"environment"`
	Ports           []string          `yaml:"ports"`
	Volumes         []string          `yaml:"volumes"`
	StopGracePeriod string            `yaml:"stop_grace_period"`
	Restart         string            `yaml:"restart"`
}

func readCompose(t *testing.T) compose {
	t.Helper()
	var c compose
	decodeYAML(t, "compose.yaml", &c)
	return c
}

func TestEveryYAMLParses(t *testing.T) {
	n := 0
	err := filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || filepath.Ext(path) != ".yaml" && filepath.Ext(path) != ".yml" {
			return err
		}
		n++
		var any map[string]any
		decodeYAML(t, path, &any)
		if len(any) == 0 {
			t.Errorf("%s is empty", path)
		}
		return nil
	})
	if err != nil || n < 6 {
		t.Fatalf("%d YAML files, %v; want at least 6", n, err)
	}
}

func TestComposeLeadsSomewhere(t *testing.T) {
	c := readCompose(t)
	image := regexp.MustCompile(`^[a-z0-9./-]+:v?[0-9]+\.[0-9]+\.[0-9]+$`)
	hostPorts := map[string]string{}
	for name, s := range c.Services {
		if s.Image != "varve" && !image.MatchString(s.Image) {
			t.Errorf("service %s: image %q is not pinned to a version", name, s.Image)
		}
		if s.Build.Context != "" {
			dockerfile := filepath.Join(s.Build.Context, s.Build.Dockerfile)
			if _, err := os.Stat(dockerfile); err != nil {
				t.Errorf("service %s: %v", name, err)
			}
		}
		for _, d := range s.DependsOn {
			if _, ok := c.Services[d]; !ok {
				t.Errorf("service %s depends on %s, which is no service", name, d)
			}
		}
		for _, p := range s.Ports {
			parts := strings.Split(p, ":")
			if len(parts) != 3 || parts[0] != "127.0.0.1" {
				t.Errorf("service %s: port %s is not bound to loopback", name, p)
				continue
			}
			if other := hostPorts[parts[1]]; other != "" {
				t.Errorf("services %s and %s share host port %s", name, other, parts[1])
			}
			hostPorts[parts[1]] = name
		}
		for _, v := range s.Volumes {
			checkMount(t, c, name, v)
		}
	}
}

func checkMount(t *testing.T, c compose, service, mount string) {
	t.Helper()
	parts := strings.Split(mount, ":")
	if len(parts) < 2 || !strings.HasPrefix(parts[1], "/") {
		t.Errorf("service %s: mount %q has no absolute target", service, mount)
		return
	}
	if strings.HasPrefix(parts[0], ".") {
		if _, err := os.Stat(parts[0]); err != nil {
			t.Errorf("service %s: %v", service, err)
		}
		if len(parts) != 3 || parts[2] != "ro" {
			t.Errorf("service %s: %s is mounted so that the container may change it", service, parts[0])
		}
		return
	}
	if _, ok := c.Volumes[parts[0]]; !ok {
		t.Errorf("service %s: volume %s is not declared", service, parts[0])
	}
}

// checkAddress checks that an address in a configuration names a service that
// listens on that port.
func checkAddress(t *testing.T, c compose, where, address string) {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	s, ok := c.Services[u.Hostname()]
	if !ok {
		t.Errorf("%s: %s is not a service of compose.yaml", where, u.Hostname())
		return
	}
	listens := slices.ContainsFunc(s.Command, func(a string) bool { return strings.HasSuffix(a, "listen=:"+u.Port()) })
	if !listens {
		t.Errorf("%s: service %s does not listen on port %s: %v", where, u.Hostname(), u.Port(), s.Command)
	}
}

func TestPrometheusPair(t *testing.T) {
	c := readCompose(t)
	replicas := map[string]bool{}
	var bodies []string
	for _, twin := range []string{"a", "b"} {
		path := filepath.Join("prometheus", "prometheus-"+twin+".yml")
		cfg, err := config.LoadFile(path, false, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		replicas[cfg.GlobalConfig.ExternalLabels.Get("prometheus_replica")] = true
		if len(cfg.RemoteWriteConfigs) != 1 || !cfg.RemoteWriteConfigs[0].SendNativeHistograms || !cfg.RemoteWriteConfigs[0].SendExemplars {
			t.Fatalf("%s: remote write = %+v; want one that sends native histograms and exemplars", path, cfg.RemoteWriteConfigs)
		}
		checkAddress(t, c, path, cfg.RemoteWriteConfigs[0].URL.String())
		for _, sc := range cfg.ScrapeConfigs {
			for _, r := range sc.RelabelConfigs {
				if r.TargetLabel == "__address__" {
					checkAddress(t, c, path, "http://"+r.Replacement)
				}
			}
			for _, sd := range sc.ServiceDiscoveryConfigs {
				if h, ok := sd.(*http.SDConfig); ok {
					checkAddress(t, c, path, h.URL)
				}
			}
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, body, _ := strings.Cut(string(b), "\n")
		bodies = append(bodies, strings.ReplaceAll(body, "prometheus_replica: "+twin, "prometheus_replica: x"))
	}
	if len(replicas) != 2 || replicas[""] {
		t.Errorf("replica labels = %v; want two", replicas)
	}
	if bodies[0] != bodies[1] {
		t.Error("the twins differ in more than their replica label")
	}
}

func TestGrafanaProvisioning(t *testing.T) {
	c := readCompose(t)
	var sources struct {
		APIVersion  int `yaml:"apiVersion"`
		Datasources []struct {
			Name      string         `yaml:"name"`
			UID       string         `yaml:"uid"`
			Type      string         `yaml:"type"`
			Access    string         `yaml:"access"`
			URL       string         `yaml:"url"`
			IsDefault bool           `yaml:"isDefault"`
			Editable  bool           `yaml:"editable"`
			JSONData  map[string]any `yaml:"jsonData"`
		} `yaml:"datasources"`
	}
	decodeYAML(t, "grafana/provisioning/datasources/varve.yaml", &sources)
	if len(sources.Datasources) != 1 || sources.Datasources[0].Type != "prometheus" {
		t.Fatalf("data sources = %+v; want one of type prometheus", sources.Datasources)
	}
	checkAddress(t, c, "data source", sources.Datasources[0].URL)

	var providers struct {
		APIVersion int `yaml:"apiVersion"`
		Providers  []struct {
			Name            string `yaml:"name"`
			Folder          string `yaml:"folder"`
			Type            string `yaml:"type"`
			DisableDeletion bool   `yaml:"disableDeletion"`
			AllowUIUpdates  bool   `yaml:"allowUiUpdates"`
			Options         struct {
				Path string `yaml:"path"`
			} `yaml:"options"`
		} `yaml:"providers"`
	}
	decodeYAML(t, "grafana/provisioning/dashboards/fleet.yaml", &providers)
	mounted := slices.ContainsFunc(c.Services["grafana"].Volumes, func(v string) bool {
		return strings.HasPrefix(v, "./grafana/dashboards:"+providers.Providers[0].Options.Path+":")
	})
	if !mounted {
		t.Errorf("dashboards are expected at %s, mounts are %v", providers.Providers[0].Options.Path, c.Services["grafana"].Volumes)
	}
	home := c.Services["grafana"].Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	if _, err := os.Stat(filepath.Join("grafana", "dashboards", filepath.Base(home))); err != nil {
		t.Errorf("home dashboard: %v", err)
	}
}

// dashboard is Grafana's dashboard model as far as fleet.json uses it: a key that
// is not here is a typing mistake or something to check.
type dashboard struct {
	UID, Title, Description string
	Tags                    []string
	SchemaVersion, Version  int
	Editable, LiveNow       bool
	Time                    struct{ From, To string }
	Refresh, Timezone       string
	GraphTooltip            int
	FiscalYearStartMonth    int
	WeekStart               string
	Annotations             struct{ List []any }
	Links                   []any
	Templating              struct{ List []variable }
	Panels                  []panel
}

type variable struct {
	Name, Label, Type, Definition string
	Datasource                    source
	Query                         any
	Regex, AllValue               string
	Refresh, Sort, Hide           int
	Multi, IncludeAll             bool
	SkipURLSync                   bool `json:"skipUrlSync"`
	Current                       map[string]any
	Options                       []any
}

type source struct{ Type, UID string }

type panel struct {
	ID                       int
	Type, Title, Description string
	Collapsed                bool
	Panels                   []panel
	GridPos                  struct{ H, W, X, Y int }
	Datasource               source
	Targets                  []target
	FieldConfig              struct {
		Defaults  map[string]any
		Overrides []any
	}
	Options         map[string]any
	Transformations []map[string]any
	MaxDataPoints   int
}

type target struct {
	RefID, Expr, LegendFormat, Format string
	Datasource                        source
	Instant, Range                    bool
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	f, err := os.Open("grafana/dashboards/fleet.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dec := json.NewDecoder(f)
	dec.DisallowUnknownFields()
	var d dashboard
	if err := dec.Decode(&d); err != nil {
		t.Fatalf("fleet.json: %v", err)
	}
	if dec.More() {
		t.Fatal("fleet.json: more than one document")
	}
	return d
}

// substitute puts plain values in the place of Grafana's variables.
func substitute(expr string) string {
	return strings.NewReplacer("$__rate_interval", "1m", "$__range", "6h", "$__interval", "1m",
		"$cluster", "gpu-eu-01|gpu-us-02", "$rack", ".*", "$node", ".*", "$modelName", ".*", "$namespace", ".*").Replace(expr)
}

func TestDashboardExpressionsParse(t *testing.T) {
	d := readDashboard(t)
	p := parser.NewParser(parser.Options{})
	n := 0
	for _, panel := range d.Panels {
		for _, q := range panel.Targets {
			n++
			expr := substitute(q.Expr)
			if strings.Contains(expr, "$") {
				t.Errorf("panel %q: unknown variable in %s", panel.Title, q.Expr)
			}
			parsed, err := p.ParseExpr(expr)
			if err != nil {
				t.Errorf("panel %q: %v\n%s", panel.Title, err, q.Expr)
				continue
			}
			checkSelectors(t, panel.Title, parsed)
		}
	}
	if n < 40 {
		t.Errorf("%d expressions, want at least 40", n)
	}
	for _, v := range d.Templating.List {
		inner, ok := strings.CutPrefix(v.Definition, "label_values(")
		if !ok {
			continue
		}
		selector := inner[:strings.LastIndex(inner, ",")]
		if _, err := p.ParseExpr(substitute(selector)); err != nil {
			t.Errorf("variable %s: %v", v.Name, err)
		}
	}
}

// checkSelectors checks that each selector follows the dashboard's variables: a
// panel that ignores the chosen cluster answers another question than it shows.
func checkSelectors(t *testing.T, title string, expr parser.Expr) {
	t.Helper()
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		s, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		has := map[string]bool{}
		for _, m := range s.LabelMatchers {
			has[m.Name] = true
		}
		if !has["cluster"] {
			t.Errorf("panel %q: selector %s ignores the cluster variable", title, s)
		}
		return nil
	})
}

func TestDashboardIsSound(t *testing.T) {
	d := readDashboard(t)
	ids := map[int]bool{}
	taken := map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("panel %q: id %d is used twice", p.Title, p.ID)
		}
		ids[p.ID] = true
		g := p.GridPos
		if g.X < 0 || g.W < 1 || g.X+g.W > 24 || g.H < 1 {
			t.Errorf("panel %q lies outside of the grid: %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" {
					t.Fatalf("panels %q and %q overlap", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q has no description or no query", p.Title)
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.Datasource.UID != "${datasource}" || p.Datasource.UID != "${datasource}" {
				t.Errorf("panel %q does not ask the chosen data source", p.Title)
			}
			if refs[q.RefID] || q.Instant == q.Range {
				t.Errorf("panel %q: query %s is doubled, or neither or both of instant and range", p.Title, q.RefID)
			}
			refs[q.RefID] = true
		}
	}
	var names []string
	for _, v := range d.Templating.List {
		names = append(names, v.Name)
	}
	for _, want := range []string{"datasource", "cluster", "rack", "node", "modelName", "namespace"} {
		if !slices.Contains(names, want) {
			t.Errorf("variable %s is missing in %v", want, names)
		}
	}
}

// TestNoLinePerGPU checks that no graph returns a series for every GPU: at 100,000
// of them no browser lives through it.
func TestNoLinePerGPU(t *testing.T) {
	p := parser.NewParser(parser.Options{})
	for _, panel := range readDashboard(t).Panels {
		if panel.Type != "timeseries" && panel.Type != "heatmap" {
			continue
		}
		for _, q := range panel.Targets {
			expr, err := p.ParseExpr(substitute(q.Expr))
			if err != nil {
				t.Fatal(err)
			}
			if by := outerLabels(expr); slices.Contains(by, "UUID") || slices.Contains(by, "node") {
				t.Errorf("panel %q draws a line per %v", panel.Title, by)
			}
		}
	}
}

// outerLabels returns the labels that tell expr's series apart, as far as its
// outermost aggregations say; topk and its like bound the number instead.
func outerLabels(expr parser.Expr) []string {
	switch e := expr.(type) {
	case *parser.AggregateExpr:
		if e.Op == parser.TOPK || e.Op == parser.BOTTOMK {
			return nil
		}
		return e.Grouping
	case *parser.ParenExpr:
		return outerLabels(e.Expr)
	case *parser.BinaryExpr:
		return append(outerLabels(e.LHS), outerLabels(e.RHS)...)
	case *parser.Call:
		for _, a := range e.Args {
			if l := outerLabels(a); l != nil {
				return l
			}
		}
		return nil
	case *parser.VectorSelector, *parser.MatrixSelector, *parser.SubqueryExpr:
		return []string{"UUID"}
	default:
		return nil
	}
}

func TestSystemdUnit(t *testing.T) {
	b, err := os.ReadFile("systemd/varve.service")
	if err != nil {
		t.Fatal(err)
	}
	unit := string(b)
	for _, want := range []string{"NoNewPrivileges=yes", "ProtectSystem=strict", "DynamicUser=yes", "StateDirectory=varve", "CapabilityBoundingSet=\n"} {
		if !strings.Contains(unit, want) {
			t.Errorf("unit lacks %q", want)
		}
	}
	var conf struct {
		HTTP    struct{ Listen string }
		Storage struct{ Path string }
		Log     struct{ Format string }
	}
	decodeYAML(t, "systemd/varve.yaml", &conf)
	if conf.Storage.Path != "/var/lib/varve" {
		t.Errorf("storage.path is %q, the unit's state folder is /var/lib/varve", conf.Storage.Path)
	}
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed: the unit's syntax stays unchecked")
	}
	// The binary that the unit starts is not here; everything else must be right.
	out, _ := exec.Command(tool, "verify", "--man=no", "systemd/varve.service").CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.TrimSpace(line) != "" && !strings.Contains(line, "is not executable: No such file") {
			t.Error(strings.TrimSpace(line))
		}
	}
}

func TestDockerfileBuildsWhatIsThere(t *testing.T) {
	b, err := os.ReadFile("Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"cmd/varve", "cmd/fleetgen"} {
		if !strings.Contains(string(b), "./"+dir) {
			t.Errorf("Dockerfile does not build %s", dir)
		}
		if _, err := os.Stat(filepath.Join("..", dir)); err != nil {
			t.Error(err)
		}
	}
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))
	if version == nil || !strings.Contains(string(b), fmt.Sprintf("FROM golang:%s-", version[1])) {
		t.Errorf("Dockerfile's Go is not that of go.mod, %v", version)
	}
}
