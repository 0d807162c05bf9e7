package bucket

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"github.com/thanos-io/objstore"
)

func TestOpenFaultsNameTheKey(t *testing.T) {
	for name, c := range map[string]struct{ document, want string }{
		"an unknown key":       {"type: S3\nnonsense: 1\n", "nonsense"},
		"an unknown type":      {"type: TAPE\n", "FILESYSTEM, S3, GCS or AZURE"},
		"no folder":            {"type: FILESYSTEM\nconfig: {}\n", "config.directory is missing"},
		"a provider's bad key": {"type: S3\nconfig: {bukket: x}\n", "bukket"},
		"no YAML":              {"type: [", "parse bucket configuration"},
	} {
		_, err := Open(context.Background(), []byte(c.document))
		require.ErrorContains(t, err, c.want, name)
	}
}

func TestPrefixIsPartOfTheLocalFolder(t *testing.T) {
	dir := t.TempDir()
	b, err := Open(context.Background(), []byte("type: filesystem\nprefix: /some/where/\nconfig: {directory: "+dir+"}\n"))
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "some", "where"), b.LocalDir)
	require.NoError(t, b.Upload(context.Background(), "a/b", bytes.NewReader([]byte("x"))))
	content, err := os.ReadFile(filepath.Join(b.LocalDir, "a", "b"))
	require.NoError(t, err)
	require.Equal(t, "x", string(content))
}

// An upload that fails half-way leaves what was there, and nothing beside it.
func TestFolderUploadsAppearWholeOrNotAtAll(t *testing.T) {
	b, err := OpenDir(t.TempDir())
	require.NoError(t, err)
	ctx := context.Background()
	require.NoError(t, b.Upload(ctx, "t/meta.json", bytes.NewReader([]byte("old"))))
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	half := io.MultiReader(bytes.NewReader([]byte("ne")), iotest.ErrReader(errors.New("gone")))
	require.Error(t, b.Upload(ctx, "t/meta.json", half))
	require.ErrorIs(t, b.Upload(cancelled, "t/meta.json", bytes.NewReader([]byte("new"))), context.Canceled)
	var names []string
	require.NoError(t, b.Iter(ctx, "", func(name string) error { names = append(names, name); return nil }, objstore.WithRecursiveIter()))
	require.Equal(t, []string{"t/meta.json"}, names)
	r, err := b.Get(ctx, "t/meta.json")
	require.NoError(t, err)
	defer r.Close()
	content, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "old", string(content))
}

func TestParseMetaRefusesWhatReadersCannotRelyOn(t *testing.T) {
	const id = `"ulid":"01M8QZJTK005Y8BMEEQS211AA4"`
	for name, document := range map[string]string{
		"empty":                 ``,
		"no JSON":               `{`,
		"no ulid":               `{"version":1}`,
		"another version":       `{` + id + `,"version":2}`,
		"ends before it begins": `{` + id + `,"version":1,"minTime":2,"maxTime":1}`,
	} {
		_, err := ParseMeta([]byte(document))
		require.Error(t, err, name)
	}
	m, err := ParseMeta([]byte(`{` + id + `,"version":1,"minTime":1,"maxTime":2,"thanos":{"downsample":{"resolution":300000}}}`))
	require.NoError(t, err)
	require.EqualValues(t, 300_000, m.Thanos.Downsample.Resolution)
}
