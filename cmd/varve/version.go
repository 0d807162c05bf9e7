package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/varvedb/varve/querier"
)

// version is set by the linker: -X main.version=1.2.3.
var version = ""

// buildInfo says what build this is.
func buildInfo() querier.BuildInfo {
	b := querier.BuildInfo{Version: version}
	if info, ok := debug.ReadBuildInfo(); ok {
		if b.Version == "" {
			b.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Revision = s.Value
			case "vcs.time":
				b.BuildDate = s.Value
			}
		}
	}
	return b
}

// versionText describes the build in a line.
func versionText() string {
	b := buildInfo()
	return fmt.Sprintf("varve %s (revision %s, %s)", b.Version, cmp.Or(b.Revision, "unknown"), runtime.Version())
}
