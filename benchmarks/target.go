package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// target describes a store to measure. In every text {{dir}} stands for a fresh
// folder of the run and {{port}} for a free port.
type target struct {
	Name string `yaml:"name"`
	// Binary is the program, a path or a name on PATH; BinaryEnv names an
	// environment variable that overrides it, and --bin overrides both.
	Binary    string `yaml:"binary"`
	BinaryEnv string `yaml:"binaryEnv"`
	// Version are arguments that print the version; VersionCommand is a whole command
	// that does, where the binary does not know it.
	Version        []string          `yaml:"version"`
	VersionCommand []string          `yaml:"versionCommand"`
	Args           []string          `yaml:"args"`
	Env            map[string]string `yaml:"env"`

	WriteURL string `yaml:"writeURL"`
	QueryURL string `yaml:"queryURL"` // /api/v1/query and so on come after it
	ReadyURL string `yaml:"readyURL"` // answers 200 once writes and queries work

	Data string   `yaml:"data"` // folder whose size counts
	Logs []string `yaml:"logs"` // names of folders below it that hold write-ahead logs
	// Protocols are the remote write versions that it speaks.
	Protocols []int `yaml:"protocols"`
	// QueryParams go with every query, such as those that switch off a cache of
	// results: the same question would else be answered once and repeated.
	QueryParams map[string]string `yaml:"queryParams"`
}

// readTarget reads and checks a target file.
func readTarget(path string, bins map[string]string) (*target, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read target: %w", err)
	}
	t, err := parseTarget(b)
	if err != nil {
		return nil, fmt.Errorf("target %s: %w", path, err)
	}
	if v := os.Getenv(t.BinaryEnv); t.BinaryEnv != "" && v != "" {
		t.Binary = v
	}
	if v := bins[t.Name]; v != "" {
		t.Binary = v
	}
	if t.Binary, err = exec.LookPath(t.Binary); err != nil {
		return nil, fmt.Errorf("target %s: find its binary: %w", t.Name, err)
	}
	if t.Binary, err = filepath.Abs(t.Binary); err != nil {
		return nil, fmt.Errorf("target %s: %w", t.Name, err)
	}
	return t, nil
}

func parseTarget(b []byte) (*target, error) {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	var t target
	if err := dec.Decode(&t); err != nil {
		return nil, fmt.Errorf("parse: %w", err)
	}
	if t.Name == "" || t.Binary == "" || t.WriteURL == "" || t.QueryURL == "" || t.ReadyURL == "" || t.Data == "" {
		return nil, fmt.Errorf("name, binary, writeURL, queryURL, readyURL and data are required")
	}
	if len(t.Protocols) == 0 {
		return nil, fmt.Errorf("protocols is empty, want 1, 2 or both")
	}
	for _, p := range t.Protocols {
		if p != 1 && p != 2 {
			return nil, fmt.Errorf("protocol %d is none, want 1 or 2", p)
		}
	}
	return &t, nil
}

// at returns t with its placeholders filled in.
func (t *target) at(dir string, port int) *target {
	r := strings.NewReplacer("{{dir}}", dir, "{{port}}", strconv.Itoa(port))
	u := *t
	u.Args = slices.Clone(t.Args)
	for i := range u.Args {
		u.Args[i] = r.Replace(u.Args[i])
	}
	u.Env = map[string]string{}
	for k, v := range t.Env {
		u.Env[k] = r.Replace(v)
	}
	for _, s := range []*string{&u.WriteURL, &u.QueryURL, &u.ReadyURL, &u.Data} {
		*s = r.Replace(*s)
	}
	return &u
}

// version asks the binary for its version; "" if it does not say.
func (t *target) version() string {
	command := append([]string{t.Binary}, t.Version...)
	if len(t.VersionCommand) > 0 {
		command = t.VersionCommand
	} else if len(t.Version) == 0 {
		return ""
	}
	out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if err != nil && line == "" {
		return "unknown: " + err.Error()
	}
	return line
}
