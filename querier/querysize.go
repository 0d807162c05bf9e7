package querier

import (
	"net/url"

	"github.com/varvedb/varve/pkg/series"
)

const (
	// maxQueryBytes bounds a PromQL expression. Dashboards that list every node of a
	// large cluster in a matcher reach some tens of kilobytes. Parsing and printing take
	// a time that grows with the square of the length, outside of any timeout.
	maxQueryBytes = 64 << 10
	// maxNesting bounds how deep parentheses, braces and brackets of an expression are
	// nested, which people do by the handful: the parser's cost grows with its cube.
	maxNesting = 100
)

// checkQueries refuses expressions that cost more to parse than any answer is worth.
func checkQueries(form url.Values) error {
	for _, parameter := range []string{"query", "match[]", "match"} {
		for _, text := range form[parameter] {
			if len(text) > maxQueryBytes {
				return series.Errorf(series.Invalid, "invalid parameter %q: it has %d bytes, at most %d are allowed", parameter, len(text), maxQueryBytes)
			}
			if depth := nesting(text); depth > maxNesting {
				return series.Errorf(series.Invalid, "invalid parameter %q: its parentheses are nested %d deep, at most %d are allowed", parameter, depth, maxNesting)
			}
		}
	}
	return nil
}

// nesting returns how deep the brackets of an expression are nested, those in strings
// aside.
func nesting(text string) int {
	depth, deepest := 0, 0
	for i := 0; i < len(text); i++ {
		switch c := text[i]; c {
		case '(', '[', '{':
			depth++
			deepest = max(deepest, depth)
		case ')', ']', '}':
			depth--
		case '"', '\'', '`':
			for i++; i < len(text) && text[i] != c; i++ {
				if text[i] == '\\' && c != '`' {
					i++
				}
			}
		}
	}
	return deepest
}
