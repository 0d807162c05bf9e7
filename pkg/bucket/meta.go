package bucket

import (
	"encoding/json"
	"fmt"
	"path"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/prometheus/tsdb"
)

// Object names below a block's folder.
const (
	MetaFile         = "meta.json"
	IndexFile        = "index"
	ChunksDir        = "chunks"
	DeletionMarkFile = "deletion-mark.json"
)

// TenantLabel is the external label that Varve writes into the Thanos section: Thanos
// needs one to tell streams of blocks apart, and names tenants like this itself.
const TenantLabel = "tenant_id"

// Meta is a block's meta.json: Prometheus' own, with the section that Thanos
// introduced and Mimir and Cortex carry along, so that their tools read the block.
type Meta struct {
	tsdb.BlockMeta
	Thanos Thanos `json:"thanos"`
}

// Thanos is the thanos section of meta.json, version 1. See Thanos' documentation
// of its block metadata format.
type Thanos struct {
	Version      int               `json:"version,omitempty"`
	Labels       map[string]string `json:"labels"`
	Downsample   Downsample        `json:"downsample"`
	Source       string            `json:"source"`
	SegmentFiles []string          `json:"segment_files,omitempty"`
	Files        []File            `json:"files,omitempty"`
}

// Downsample gives the resolution of a block in milliseconds; 0 is raw.
type Downsample struct {
	Resolution int64 `json:"resolution"`
}

// File is one object of the block. meta.json lists itself without a size.
type File struct {
	RelPath   string `json:"rel_path"`
	SizeBytes int64  `json:"size_bytes,omitempty"`
}

// BlockDir is the object prefix of a tenant's block.
func BlockDir(tenant string, id ulid.ULID) string { return path.Join(tenant, id.String()) }

// ParseMeta reads a meta.json and checks what every reader relies on.
func ParseMeta(document []byte) (*Meta, error) {
	var m Meta
	if err := json.Unmarshal(document, &m); err != nil {
		return nil, fmt.Errorf("parse meta.json: %w", err)
	}
	switch {
	case m.ULID == (ulid.ULID{}):
		return nil, fmt.Errorf("parse meta.json: no ulid")
	case m.Version != 1:
		return nil, fmt.Errorf("parse meta.json of %s: version %d, known is 1", m.ULID, m.Version)
	case m.MinTime > m.MaxTime:
		return nil, fmt.Errorf("parse meta.json of %s: minTime %d is after maxTime %d", m.ULID, m.MinTime, m.MaxTime)
	}
	return &m, nil
}
