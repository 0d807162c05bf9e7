package tenant

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/varvedb/varve/pkg/series"
)

func TestValidate(t *testing.T) {
	for _, good := range []string{"anonymous", "a", "team-1_x.y", "!*'()", "...", strings.Repeat("x", 128)} {
		require.NoError(t, Validate(good), good)
	}
	for _, bad := range []string{"", ".", "..", "../x", "a/b", `a\b`, "a b", "a\x00", "é", "a|b", "~lock", "__varve__", strings.Repeat("x", 129)} {
		require.Equal(t, series.Invalid, series.KindOf(Validate(bad)), "%q", bad)
	}
}

func TestFromRequest(t *testing.T) {
	for name, c := range map[string]struct {
		headers  []string
		fallback string
		want     string
		refused  bool
	}{
		"no header":                     {nil, Default, Default, false},
		"no header, and one is needed":  {nil, "", "", true},
		"a header":                      {[]string{"a"}, Default, "a", false},
		"an empty header is no tenant":  {[]string{""}, Default, "", true},
		"two headers, the same":         {[]string{"a", "a"}, Default, "", true},
		"a name that leaves its folder": {[]string{"../a"}, Default, "", true},
	} {
		r := &http.Request{Header: http.Header{}}
		for _, h := range c.headers {
			r.Header.Add(Header, h)
		}
		got, err := FromRequest(r, c.fallback)
		if c.refused {
			require.Equal(t, series.Invalid, series.KindOf(err), name)
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, c.want, got, name)
	}
}

func TestContextWithoutTenantIsAnError(t *testing.T) {
	_, err := FromContext(context.Background())
	require.Equal(t, series.Internal, series.KindOf(err))
	got, err := FromContext(NewContext(context.Background(), "a"))
	require.NoError(t, err)
	require.Equal(t, "a", got)
}
