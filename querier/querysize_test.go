package querier

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/varvedb/varve/pkg/series"
)

func TestQueriesThatCostTooMuchToParse(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		ok   bool
	}{
		"a plain query":                  {`sum by (node) (rate(x{a="b"}[5m]))`, true},
		"a matcher of 20 KB":             {`x{node=~"` + strings.Repeat("node-00001|", 1800) + `"}`, true},
		"brackets in strings":            {`x{a="` + strings.Repeat("(", 500) + `", b='\'` + strings.Repeat("[", 500) + `'}`, true},
		"a hundred parentheses":          {strings.Repeat("(", 100) + "1" + strings.Repeat(")", 100), true},
		"a hundred and one":              {strings.Repeat("(", 101) + "1" + strings.Repeat(")", 101), false},
		"many parentheses side by side":  {strings.Repeat("(1)+", 1000) + "1", true},
		"more than 64 KiB":               {strings.Repeat("-", 64<<10) + "1", false},
		"a string that does not end":     {`x{a="`, true}, // the parser says so
		"an escape that ends the string": {`"\`, true},
	} {
		for _, parameter := range []string{"query", "match[]"} {
			err := checkQueries(url.Values{parameter: {"up", c.text}})
			if c.ok {
				require.NoError(t, err, name)
			} else {
				require.Equal(t, series.Invalid, series.KindOf(err), name)
			}
		}
	}
}
