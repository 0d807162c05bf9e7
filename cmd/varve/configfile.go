package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"
)

// configFile is a YAML file that gives flags their values: a flag's name is the path
// of its key, so ingester.late-window is
//
//	ingester:
//	  late-window: 3h
//
// Flags on the command line win. Keys that are no flag are errors.
type configFile struct {
	path   string
	text   string
	values map[string]configValue
}

type configValue struct {
	value any
	line  int
}

// readConfigFile reads and flattens the file.
func readConfigFile(path string) (*configFile, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read config file: %w", err)
	}
	c := &configFile{path: path, text: string(text), values: map[string]configValue{}}
	var document, second yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	switch err := decoder.Decode(&document); {
	case errors.Is(err, io.EOF):
		return c, nil
	case err != nil:
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	if decoder.Decode(&second) == nil {
		return nil, fmt.Errorf("%s line %d: a second document begins, one is read", path, second.Line)
	}
	if err := c.flatten("", document.Content[0]); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *configFile) flatten(prefix string, n *yaml.Node) error {
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			if err := c.flatten(prefix+"."+n.Content[i].Value, n.Content[i+1]); err != nil {
				return err
			}
		}
		return nil
	case yaml.ScalarNode:
		return c.set(prefix, n, n.Value)
	case yaml.SequenceNode:
		items := make([]any, 0, len(n.Content))
		for _, item := range n.Content {
			if item.Kind != yaml.ScalarNode {
				return fmt.Errorf("%s line %d: the items of %s must be plain values", c.path, item.Line, strings.TrimPrefix(prefix, "."))
			}
			items = append(items, item.Value)
		}
		return c.set(prefix, n, items)
	case yaml.AliasNode:
		return c.flatten(prefix, n.Alias)
	}
	return fmt.Errorf("%s line %d: cannot be read", c.path, n.Line)
}

func (c *configFile) set(key string, n *yaml.Node, value any) error {
	key = strings.TrimPrefix(key, ".")
	if key == "" {
		return fmt.Errorf("%s line %d: want keys and values", c.path, n.Line)
	}
	if first, twice := c.values[key]; twice {
		return fmt.Errorf("%s line %d: %s stands in line %d already", c.path, n.Line, key, first.line)
	}
	c.values[key] = configValue{value, n.Line}
	return nil
}

// Validate implements kong.Resolver: every key must be a flag.
func (c *configFile) Validate(app *kong.Application) error {
	known := map[string]bool{}
	for _, group := range app.AllFlags(false) {
		for _, flag := range group {
			known[flag.Name] = true
		}
	}
	var unknown []string
	for key, v := range c.values {
		if !known[key] {
			unknown = append(unknown, fmt.Sprintf("%s line %d: unknown key %s", c.path, v.line, key))
		}
	}
	slices.Sort(unknown)
	if len(unknown) > 0 {
		return errors.New(strings.Join(unknown, "; "))
	}
	return nil
}

// Resolve implements kong.Resolver.
func (c *configFile) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	if v, ok := c.values[flag.Name]; ok {
		return v.value, nil
	}
	return nil, nil
}
