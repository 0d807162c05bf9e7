package e2e

import (
	"encoding/json"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// mayBeEmpty are panels that list trouble which a few hours of a small fleet need not
// have, each with the series that must be there for it to be seen.
var mayBeEmpty = map[string]string{
	"Thermal throttling over the range": "DCGM_FI_DEV_THERMAL_VIOLATION",
	"Nodes with missing GPUs":           "DCGM_FI_DEV_GPU_TEMP",
	"NVLink replays over the range":     "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
	"PCIe links below their width":      "DCGM_FI_DEV_PCIE_LINK_WIDTH and on (cluster, node, UUID) DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH",
	"Leaks":                             "coolant_leak_detected",
}

// TestDashboard asks every query of the fleet dashboard of a store with three hours of a
// simulated fleet in which much fails: none is an error, and each panel has something to
// show, or for those listed above, would have.
func TestDashboard(t *testing.T) {
	varve := startVarve(t, t.TempDir())
	end := time.Date(2026, 11, 2, 12, 0, 0, 0, time.UTC) // any age will do for an empty store; this one is always the same
	load := exec.Command(filepath.Join(bin, "fleetgen"), "load", "--url="+varve.url+"/api/v1/write", "--nodes=24", "--gpus-per-node=8",
		"--profile=h100-147", "--interval=30s", "--failures=300", "--churn=20", "--mig=0.2", "--exp",
		"--from="+end.Add(-3*time.Hour).UTC().Format(time.RFC3339), "--to="+end.UTC().Format(time.RFC3339))
	out, err := load.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "0 refused")

	content, err := os.ReadFile("../deploy/grafana/dashboards/fleet.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct {
				Expr    string
				Instant bool
			}
		}
	}
	require.NoError(t, json.Unmarshal(content, &dashboard))
	variables := strings.NewReplacer("$__rate_interval", "2m", "$__range", "2h", "$__interval", "1m",
		"$cluster", ".*", "$rack", ".*", "$node", ".*", "$modelName", ".*", "$namespace", ".*")
	asked := 0
	for _, panel := range dashboard.Panels {
		shown := len(panel.Targets) == 0 // a row has none
		for _, target := range panel.Targets {
			asked++
			params := url.Values{"query": {variables.Replace(target.Expr)}}
			path := "/api/v1/query"
			if target.Instant {
				params.Set("time", unix(end))
			} else {
				path = "/api/v1/query_range"
				params.Set("start", unix(end.Add(-2*time.Hour)))
				params.Set("end", unix(end))
				params.Set("step", "60")
			}
			a := varve.get(path, params)
			require.Equal(t, "success", a.Status, "panel %q: %s: %s", panel.Title, target.Expr, a.Error)
			require.Empty(t, a.Warnings, "panel %q: %s", panel.Title, target.Expr)
			if _, n := canonical(t, a.Data, false); n > 0 {
				shown = true
			}
		}
		switch base := mayBeEmpty[panel.Title]; {
		case shown:
		case base != "":
			require.NotEmpty(t, varve.instant(base, end), "panel %q could never show anything", panel.Title)
		default:
			t.Errorf("panel %q shows nothing: %s", panel.Title, variables.Replace(panel.Targets[0].Expr))
		}
	}
	require.Greater(t, asked, 50)
}
