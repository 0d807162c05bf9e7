// Package bucket is what Varve knows about object storage: which provider a
// configuration names, where a tenant's blocks lie, what their meta.json says, and
// how a block gets there whole.
package bucket

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	kitlog "github.com/go-kit/log"
	"github.com/prometheus/prometheus/tsdb/fileutil"
	"github.com/thanos-io/objstore"
	"github.com/thanos-io/objstore/providers/azure"
	"github.com/thanos-io/objstore/providers/filesystem"
	"github.com/thanos-io/objstore/providers/gcs"
	"github.com/thanos-io/objstore/providers/s3"
	"go.yaml.in/yaml/v3"
)

// Config is objstore's YAML form, as Thanos and Cortex users have it:
//
//	type: S3            # FILESYSTEM, S3, GCS or AZURE
//	prefix: varve       # optional: everything below this folder of the bucket
//	config: {...}       # the provider's own keys
type Config struct {
	Type   string    `yaml:"type"`
	Prefix string    `yaml:"prefix"`
	Config yaml.Node `yaml:"config"`
}

// Opened is a bucket ready for use. LocalDir is its folder when it is a plain
// directory of this machine, where blocks can be read in place, and else empty.
type Opened struct {
	objstore.Bucket
	LocalDir string
}

// OpenDir opens a directory as a bucket, the embedded default.
func OpenDir(dir string) (*Opened, error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("make bucket folder: %w", err)
	}
	fs, err := filesystem.NewBucket(dir)
	if err != nil {
		return nil, fmt.Errorf("open bucket folder %s: %w", dir, err)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("find bucket folder %s: %w", dir, err)
	}
	return &Opened{Bucket: &directory{Bucket: fs, root: abs}, LocalDir: abs}, nil
}

// Open opens the bucket that a YAML document describes. Unknown keys are errors.
func Open(ctx context.Context, document []byte) (*Opened, error) {
	var cfg Config
	decoder := yaml.NewDecoder(bytes.NewReader(document))
	decoder.KnownFields(true)
	if err := decoder.Decode(&cfg); err != nil {
		return nil, fmt.Errorf("parse bucket configuration: %w", err)
	}
	provider, err := yaml.Marshal(&cfg.Config)
	if err != nil {
		return nil, fmt.Errorf("read bucket configuration's config section: %w", err)
	}
	opened, err := openProvider(ctx, strings.ToUpper(cfg.Type), provider)
	if err != nil {
		return nil, fmt.Errorf("open bucket of type %q: %w", cfg.Type, err)
	}
	if prefix := strings.Trim(cfg.Prefix, "/"); prefix != "" {
		opened.Bucket = objstore.NewPrefixedBucket(opened.Bucket, prefix)
		if opened.LocalDir != "" {
			opened.LocalDir = filepath.Join(opened.LocalDir, filepath.FromSlash(prefix))
		}
	}
	return opened, nil
}

func openProvider(ctx context.Context, kind string, config []byte) (*Opened, error) {
	var bkt objstore.Bucket
	var err error
	switch kind {
	case "FILESYSTEM":
		var dir filesystem.Config
		if err := yaml.Unmarshal(config, &dir); err != nil {
			return nil, fmt.Errorf("parse config: %w", err)
		}
		if dir.Directory == "" {
			return nil, errors.New("config.directory is missing")
		}
		return OpenDir(dir.Directory)
	case "S3":
		bkt, err = s3.NewBucket(kitlog.NewNopLogger(), config, "varve", nil)
	case "GCS":
		bkt, err = gcs.NewBucket(ctx, kitlog.NewNopLogger(), config, "varve", nil)
	case "AZURE":
		bkt, err = azure.NewBucket(kitlog.NewNopLogger(), config, "varve", nil)
	default:
		return nil, errors.New("type must be FILESYSTEM, S3, GCS or AZURE")
	}
	if err != nil {
		return nil, err
	}
	return &Opened{Bucket: bkt}, nil
}

// directory is objstore's filesystem provider with uploads that appear whole or
// not at all: a reader must never see half a meta.json, also after a crash.
type directory struct {
	*filesystem.Bucket
	root string
}

// Upload writes the object aside, syncs it and renames it to its name.
func (d *directory) Upload(ctx context.Context, name string, r io.Reader, _ ...objstore.ObjectUploadOption) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	path := filepath.Join(d.root, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return fmt.Errorf("make folder of object %s: %w", name, err)
	}
	return writeAside(ctx, path, r)
}

// writeAside writes path by way of a temporary file beside it.
func writeAside(ctx context.Context, path string, r io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".uploading-*")
	if err != nil {
		return fmt.Errorf("create temporary file: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if _, err := io.Copy(f, contextReader{ctx, r}); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("close %s: %w", path, err)
	}
	if err := os.Chmod(f.Name(), 0o644); err != nil {
		return fmt.Errorf("set mode of %s: %w", path, err)
	}
	return fileutil.Rename(f.Name(), path)
}

// contextReader ends a copy when its context ends.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
