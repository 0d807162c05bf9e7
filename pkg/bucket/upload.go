package bucket

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"sort"

	"github.com/thanos-io/objstore"
)

// UploadBlock copies the finished TSDB block in dir to the tenant's part of the
// bucket: chunks and index first, meta.json last, so that a block with meta.json is
// whole. meta.json lists every file with its size, by which readers find damage.
// Uploading the same block again is harmless: objects are written anew.
func UploadBlock(ctx context.Context, bkt objstore.Bucket, tenant, dir string) (*Meta, error) {
	document, err := os.ReadFile(filepath.Join(dir, MetaFile))
	if err != nil {
		return nil, fmt.Errorf("read block's meta.json: %w", err)
	}
	meta, err := ParseMeta(document)
	if err != nil {
		return nil, err
	}
	if meta.Thanos, err = describe(tenant, dir); err != nil {
		return nil, err
	}
	prefix := BlockDir(tenant, meta.ULID)
	for _, f := range meta.Thanos.Files {
		if f.RelPath == MetaFile {
			continue
		}
		if err := uploadFile(ctx, bkt, filepath.Join(dir, filepath.FromSlash(f.RelPath)), path.Join(prefix, f.RelPath)); err != nil {
			return nil, err
		}
	}
	document, err = json.MarshalIndent(meta, "", "\t")
	if err != nil {
		return nil, fmt.Errorf("encode meta.json of %s: %w", prefix, err)
	}
	if err := bkt.Upload(ctx, path.Join(prefix, MetaFile), bytes.NewReader(document)); err != nil {
		return nil, fmt.Errorf("upload %s/%s: %w", prefix, MetaFile, err)
	}
	return meta, nil
}

// describe lists a block's files for its thanos section.
func describe(tenant, dir string) (Thanos, error) {
	section := Thanos{
		Version: 1,
		Labels:  map[string]string{TenantLabel: tenant},
		Source:  "varve",
	}
	segments, err := os.ReadDir(filepath.Join(dir, ChunksDir))
	if err != nil {
		return section, fmt.Errorf("list block's chunks: %w", err)
	}
	rel := []string{IndexFile}
	for _, s := range segments {
		section.SegmentFiles = append(section.SegmentFiles, s.Name())
		rel = append(rel, path.Join(ChunksDir, s.Name()))
	}
	for _, r := range rel {
		info, err := os.Stat(filepath.Join(dir, filepath.FromSlash(r)))
		if err != nil {
			return section, fmt.Errorf("measure block's file: %w", err)
		}
		section.Files = append(section.Files, File{RelPath: r, SizeBytes: info.Size()})
	}
	section.Files = append(section.Files, File{RelPath: MetaFile})
	sort.Slice(section.Files, func(i, j int) bool { return section.Files[i].RelPath < section.Files[j].RelPath })
	return section, nil
}

func uploadFile(ctx context.Context, bkt objstore.Bucket, from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("open block's file: %w", err)
	}
	defer f.Close()
	if err := bkt.Upload(ctx, to, f); err != nil {
		return fmt.Errorf("upload %s: %w", to, err)
	}
	return nil
}
