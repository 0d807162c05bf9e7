package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func parse(t *testing.T, config string, args ...string) (*flags, error) {
	t.Helper()
	if config != "" {
		path := filepath.Join(t.TempDir(), "varve.yaml")
		require.NoError(t, os.WriteFile(path, []byte(config), 0o666))
		args = append(args, "--config.file="+path)
	}
	var out, errs bytes.Buffer
	return parseFlags(args, &out, &errs)
}

func TestDefaultsAreTheDocumentedOnes(t *testing.T) {
	f, err := parse(t, "")
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:9433", f.HTTP.Listen)
	require.Equal(t, "data", filepath.Base(f.Storage.Path))
	require.NoError(t, f.ingesterConfig("x").Validate())
	write := f.distributorConfig()
	require.NoError(t, write.Validate())
	require.NoError(t, f.querierConfig().Validate())
	require.NoError(t, f.blocksConfig(t.TempDir()).Validate())
	require.Equal(t, "2h0m0s", f.values["ingester.late-window"])
}

func TestConfigFile(t *testing.T) {
	f, err := parse(t, `
http:
  listen: 127.0.0.1:1
ingester:
  late-window: 3h   # a comment
  min-free-disk: 1MiB
limits: {series: 7, sample-rate: 2.5}
write:
  otlp-promote: [host.name, a.b]
`, "--limits.series=8")
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:1", f.HTTP.Listen)
	require.Equal(t, 3*time.Hour, f.Ingester.LateWindow)
	require.EqualValues(t, 1<<20, f.Ingester.MinFreeDisk)
	require.Equal(t, 8, f.Limits.Series, "the command line wins")
	require.Equal(t, 2.5, f.Limits.SampleRate)
	require.Equal(t, []string{"host.name", "a.b"}, f.Write.OTLPPromote)
}

func TestConfigFileFaultsNameThePlace(t *testing.T) {
	for name, c := range map[string]struct{ config, want string }{
		"an unknown key":          {"http:\n  listen: :1\ningester:\n  late-windw: 3h\n", "varve.yaml line 4: unknown key ingester.late-windw"},
		"an unknown section":      {"nonsense: {a: 1}\n", "varve.yaml line 1: unknown key nonsense.a"},
		"a key that stands twice": {"http.listen: :1\nhttp:\n  listen: :2\n", "varve.yaml line 3: http.listen stands in line 1 already"},
		"a value of a wrong kind": {"ingester:\n  late-window: many\n", "ingester.late-window"},
		"a list of maps":          {"write:\n  otlp-promote: [{a: b}]\n", "varve.yaml line 2: the items of write.otlp-promote must be plain values"},
		"a second document":       {"http: {listen: a}\n---\nfoo: 1\n", "a second document begins"},
		"no YAML":                 {"http: [", "parse"},
		"a list at the top":       {"- a\n", "varve.yaml line 1: want keys and values"},
	} {
		_, err := parse(t, c.config)
		require.ErrorContains(t, err, c.want, name)
	}
	_, err := parse(t, "", "--config.file=/no/such/file")
	require.ErrorContains(t, err, "read config file: open /no/such/file")
	_, err = parse(t, "", "--target=compactor")
	require.ErrorContains(t, err, "only all is there so far")
}

func TestHelpFitsAPerson(t *testing.T) {
	var out, errs bytes.Buffer
	_, err := parseFlags([]string{"--help"}, &out, &errs)
	require.ErrorIs(t, err, errHelp)
	text := out.String()
	for _, want := range []string{"GPU fleets", "--http.listen", "Writes", "Queries", "--ingester.late-window"} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "block-duration", "flags for tests are hidden")
	for line := range strings.Lines(text) {
		require.LessOrEqual(t, len(line), 121, line)
	}
}
