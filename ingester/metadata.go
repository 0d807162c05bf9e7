package ingester

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/metadata"

	"github.com/varvedb/varve/pkg/series"
)

const (
	metadataFile = "metadata.jsonl"
	// maxVariants bounds the distinct (type, help, unit) kept per family: two exporter
	// versions disagree, a broken one that writes a new help text each time must not win.
	maxVariants = 16
)

// metadataLog is a tenant's metric metadata: in memory, and in an append-only file of
// JSON lines, one for each distinct fact, written before the request that brought it
// is acknowledged. Facts are few and repeated for ever, so the file stays small.
//
//	{"family":"up","type":"gauge","unit":"","help":"..."}\n
type metadataLog struct {
	maxFamilies int
	log         *slog.Logger

	mu       sync.RWMutex // guards all below
	families map[string][]metadata.Metadata
	file     *os.File
	size     int64 // of the whole lines in file
}

type metadataLine struct {
	Family string `json:"family"`
	Type   string `json:"type"`
	Unit   string `json:"unit,omitempty"`
	Help   string `json:"help,omitempty"`
}

// openMetadata reads the tenant's file in dir. A line that a crash cut off at the end
// is dropped.
func openMetadata(dir string, maxFamilies int, log *slog.Logger) (*metadataLog, error) {
	file, err := os.OpenFile(filepath.Join(dir, metadataFile), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("open metadata: %w", err)
	}
	m := &metadataLog{maxFamilies: maxFamilies, log: log, families: map[string][]metadata.Metadata{}, file: file}
	m.size, err = m.load(file)
	if err == nil {
		err = file.Truncate(m.size)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("read metadata: %w", err)
	}
	return m, nil
}

// load fills the map and returns how many bytes of the file are whole lines.
func (m *metadataLog) load(r io.Reader) (whole int64, err error) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return whole, nil
		}
		if err != nil {
			return whole, err
		}
		whole += int64(len(line))
		var l metadataLine
		if err := json.Unmarshal(bytes.TrimSpace(line), &l); err != nil {
			m.log.Warn("skipped a damaged line of metadata", "file", metadataFile, "offset", whole-int64(len(line)), "err", err)
			continue
		}
		m.families[l.Family] = append(m.families[l.Family], metadata.Metadata{Type: model.MetricType(l.Type), Unit: l.Unit, Help: l.Help})
	}
}

// add keeps facts that are new. What does not fit is counted in res.Dropped; it never
// fails the samples beside it.
func (m *metadataLog) add(facts []series.Metadata, res *series.Appended) {
	for i := range facts {
		f := &facts[i]
		if f.Family == "" || f.IsEmpty() || m.has(f) {
			continue
		}
		if err := m.insert(f); err != nil {
			res.Dropped.Add(series.ReasonMetadataLimit, 1, func() string { return fmt.Sprintf("metadata of %.100q: %v", f.Family, err) })
		}
	}
}

func (m *metadataLog) has(f *series.Metadata) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Contains(m.families[f.Family], f.Metadata)
}

func (m *metadataLog) insert(f *series.Metadata) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.families[f.Family]
	switch {
	case slices.Contains(known, f.Metadata):
		return nil
	case len(known) == 0 && len(m.families) >= m.maxFamilies:
		return fmt.Errorf("%d families are kept, no more are", m.maxFamilies)
	case len(known) >= maxVariants:
		return fmt.Errorf("%d variants are kept, no more are", maxVariants)
	}
	line, err := json.Marshal(metadataLine{Family: f.Family, Type: string(f.Type), Unit: f.Unit, Help: f.Help})
	if err != nil {
		return err
	}
	// At the end of what is whole, so that a write cut short is written over.
	if _, err := m.file.WriteAt(append(line, '\n'), m.size); err != nil {
		return fmt.Errorf("write %s: %w", metadataFile, err)
	}
	m.size += int64(len(line)) + 1
	m.families[f.Family] = append(known, f.Metadata)
	return nil
}

// get returns the facts of one family, or of all for the empty name.
func (m *metadataLog) get(family string) map[string][]metadata.Metadata {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if family != "" {
		if known := m.families[family]; len(known) > 0 {
			return map[string][]metadata.Metadata{family: slices.Clone(known)}
		}
		return nil
	}
	all := make(map[string][]metadata.Metadata, len(m.families))
	for name, known := range m.families {
		all[name] = slices.Clone(known)
	}
	return all
}

func (m *metadataLog) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.file.Close()
}
