package main

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/varvedb/varve/"

// layer says which folders of the module a folder may import from, itself and its
// own subfolders aside. Dependencies point one way: cmd -> roles -> pkg -> proto.
var layers = map[string][]string{
	"cmd":         {"distributor", "ingester", "querier", "compactor", "pkg", "proto"},
	"distributor": {"pkg", "proto"},
	"ingester":    {"pkg", "proto"},
	"querier":     {"pkg", "proto"},
	"compactor":   {"pkg", "proto"},
	"benchmarks":  {"pkg"},
	"deploy":      {},
	"e2e":         {"pkg"},
	"pkg":         {"proto"},
	"proto":       {},
}

// leaves are packages that import nothing of the module.
var leaves = []string{"pkg/series"}

// owners names the only packages that may import a library, so that a change of it
// touches one place.
var owners = map[string][]string{
	"github.com/alecthomas/kong":                                     {"cmd", "benchmarks"},
	"github.com/golang/snappy":                                       {"pkg/remotewrite", "benchmarks", "ingester/walrepair"},
	"github.com/prometheus/prometheus/tsdb":                          {"ingester", "querier", "pkg/bucket"},
	"github.com/prometheus/prometheus/web/api/v1":                    {"querier"},
	"github.com/thanos-io/objstore/providers/s3":                     {"pkg/bucket"},
	"github.com/thanos-io/objstore/providers/gcs":                    {"pkg/bucket"},
	"github.com/thanos-io/objstore/providers/azure":                  {"pkg/bucket"},
	"github.com/prometheus/prometheus/storage/remote/otlptranslator": {"distributor"},
}

// TestImportsPointOneWay reads the imports of every package, without those of tests,
// which may reach where they need to.
func TestImportsPointOneWay(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, module+"...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		pkg := strings.TrimPrefix(fields[0], module)
		top, _, _ := strings.Cut(pkg, "/")
		allowed, known := layers[top]
		if !known {
			t.Errorf("package %s is in no layer: add it to the table or move it", pkg)
			continue
		}
		for _, imported := range fields[1:] {
			checkOwner(t, pkg, imported)
			target, inside := strings.CutPrefix(imported, module)
			if !inside {
				continue
			}
			if slices.Contains(leaves, pkg) {
				t.Errorf("%s is a leaf and imports %s", pkg, target)
			}
			targetTop, _, _ := strings.Cut(target, "/")
			if targetTop != top && !slices.Contains(allowed, targetTop) {
				t.Errorf("%s imports %s: %s may import only %v", pkg, target, top, allowed)
			}
		}
	}
}

// TestEveryDependencyHasAReason holds docs/dependencies.md against go.mod.
func TestEveryDependencyHasAReason(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{if not (or .Indirect .Main)}}{{.Path}}{{end}}", "all").Output()
	if err != nil {
		t.Fatalf("go list -m: %v", err)
	}
	reasons, err := os.ReadFile("../../docs/dependencies.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		if !regexp.MustCompile(regexp.QuoteMeta(path) + `[, ]`).Match(reasons) {
			t.Errorf("%s is in go.mod and not in docs/dependencies.md", path)
		}
	}
}

func checkOwner(t *testing.T, pkg, imported string) {
	for library, may := range owners {
		if imported != library && !strings.HasPrefix(imported, library+"/") {
			continue
		}
		if !slices.ContainsFunc(may, func(owner string) bool { return pkg == owner || strings.HasPrefix(pkg, owner+"/") }) {
			t.Errorf("%s imports %s, which only %v may", pkg, imported, may)
		}
	}
}
