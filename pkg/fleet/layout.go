package fleet

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"

	"github.com/varvedb/varve/pkg/series"
)

// pair is one label.
type pair struct{ name, value string }

// absent is the value of a series that is not there at this moment.
var absent = math.Float64frombits(0x7ff8000000000abc)

func isAbsent(v float64) bool { return math.Float64bits(v) == math.Float64bits(absent) }

// line is one series of a group.
type line struct {
	family *family
	name   []byte // label field of the name, used if own is nil
	metric string
	own    []byte // all label bytes, for series with labels beside the group's
	text   string // those labels as the page shows them
	st     bool   // cumulative, counting from the group's start
	native *histogram.Histogram
}

// group is a run of series that share all labels but the name: most of a GPU's. It
// lives as long as these labels do, and its series end with it.
type group struct {
	// head and tail are the label bytes before and after the name.
	head, tail []byte
	text       string // labels as the page shows them, without braces
	lines      []line // may be shared between groups
	more       []line // after lines: those with labels of their own
	vals       []float64
	start      int64 // start time of cumulative lines, 0 if unknown

	exemplar *exemplarOf // of one of the lines, nil for none
	sent     []bool      // what the last scrape gave
}

type exemplarOf struct {
	line   int
	labels []byte
	t      int64
	v      float64
	sent   bool
}

// groupSpec is what a group is made of. Target labels win over the exporter's own,
// which become exported_*, as in Prometheus with honor_labels off.
type groupSpec struct {
	exporter []pair // in the order in which the page shows them
	target   []pair
	start    int64
	page     bool // the text is needed
}

// extraLine is a series with labels beside the group's.
type extraLine struct {
	family *family
	name   string
	labels []pair
	st     bool
	native *histogram.Histogram
}

func newGroup(spec groupSpec, lines []line, extra []extraLine) *group {
	g := &group{start: spec.start, lines: lines}
	base := appendScraped(nil, spec.exporter, spec.target)
	for _, p := range spec.target {
		base = insert(base, p)
	}
	g.head, g.tail = splitName(base)
	if spec.page {
		g.text = renderLabels(spec.exporter)
	}
	g.more = make([]line, 0, len(extra))
	arena := make([]byte, 0, len(extra)*(len(g.head)+len(g.tail)+80))
	var scratch []pair
	for _, x := range extra {
		scratch = append(scratch[:0], base...)
		scratch = appendScraped(scratch, x.labels, spec.target)
		scratch = insert(scratch, pair{labels.MetricName, x.name})
		from := len(arena)
		for _, p := range scratch {
			arena = series.AppendLabel(arena, p.name, p.value)
		}
		l := line{family: x.family, metric: x.name, st: x.st, native: x.native, own: arena[from:len(arena):len(arena)]}
		if spec.page {
			l.text = g.text
			if more := renderLabels(x.labels); more != "" {
				l.text = strings.TrimPrefix(g.text+","+more, ",")
			}
		}
		g.more = append(g.more, l)
	}
	g.vals = make([]float64, g.len())
	g.sent = make([]bool, g.len())
	return g
}

func (g *group) len() int { return len(g.lines) + len(g.more) }

// line returns the i-th line.
func (g *group) line(i int) *line {
	if i < len(g.lines) {
		return &g.lines[i]
	}
	return &g.more[i-len(g.lines)]
}

// labels returns the label bytes of the i-th line: its own, or built in b behind the
// group's head, which b must begin with.
func (g *group) labels(b []byte, i int) (ls, buf []byte) {
	l := g.line(i)
	if l.own != nil {
		return l.own, b
	}
	b = append(b[:len(g.head)], l.name...)
	b = append(b, g.tail...)
	return b, b
}

// appendScraped inserts the labels that a page shows into the sorted list, under the
// names that a scrape gives them: a target's label wins.
func appendScraped(sorted, exporter, target []pair) []pair {
	for _, p := range exporter {
		for _, t := range target {
			if t.name == p.name {
				p.name = "exported_" + p.name
				break
			}
		}
		sorted = insert(sorted, p)
	}
	return sorted
}

// insert keeps the list sorted by name. Empty values are no labels.
func insert(sorted []pair, p pair) []pair {
	if p.value == "" {
		return sorted
	}
	sorted = append(sorted, p)
	for i := len(sorted) - 1; i > 0 && sorted[i].name < sorted[i-1].name; i-- {
		sorted[i], sorted[i-1] = sorted[i-1], sorted[i]
	}
	return sorted
}

// sameLabels tells whether o is the same group in another life of the layout.
func (g *group) sameLabels(o *group) bool {
	if g.len() != o.len() || g.start != o.start || string(g.head) != string(o.head) || string(g.tail) != string(o.tail) {
		return false
	}
	for i := range g.len() {
		a, b := g.line(i), o.line(i)
		if a.metric != b.metric || string(a.own) != string(b.own) {
			return false
		}
	}
	return true
}

// splitName encodes the labels that sort before __name__ and those after it.
func splitName(sorted []pair) (head, tail []byte) {
	for _, p := range sorted {
		if p.name < labels.MetricName {
			head = series.AppendLabel(head, p.name, p.value)
		} else {
			tail = series.AppendLabel(tail, p.name, p.value)
		}
	}
	return head, tail
}

func renderLabels(ps []pair) string {
	var b strings.Builder
	for i, p := range ps {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(p.name)
		b.WriteByte('=')
		// The exposition format escapes backslash, quote and newline only, and none
		// of the fleet's values has anything else that Quote would touch.
		b.WriteString(strconv.Quote(p.value))
	}
	return b.String()
}

// source is what stands behind a target: it knows its series and their values.
type source interface {
	// refresh brings the source to time t. up is false if the target does not
	// answer; then the groups mean nothing.
	refresh(t int64) (up bool)
	// groups are the target's series now. A group that is gone from one refresh to
	// the next has ended.
	groups() []*group
	// slowness multiplies the duration of a scrape at t.
	slowness(t int64) float64
}

// place is a line of a page.
type place struct {
	g *group
	i int
}

// writePage renders the source's series, family by family in the order in which
// they first occur. OpenMetrics names counters without _total and has exemplars.
func writePage(b []byte, groups []*group, openMetrics bool) []byte {
	order, places := byFamily(groups)
	for _, f := range order {
		name := f.name
		if openMetrics && f.kind == counter {
			name = strings.TrimSuffix(name, "_total")
		}
		b = append(b, "# HELP "...)
		b = append(b, name...)
		b = append(b, ' ')
		b = append(b, f.help...)
		b = append(b, "\n# TYPE "...)
		b = append(b, name...)
		b = append(b, ' ')
		b = append(b, f.kind...)
		b = append(b, '\n')
		for _, p := range places[f] {
			b = appendLine(b, p, openMetrics)
		}
	}
	if openMetrics {
		b = append(b, "# EOF\n"...)
	}
	return b
}

func byFamily(groups []*group) (order []*family, places map[*family][]place) {
	places = map[*family][]place{}
	for _, g := range groups {
		for i := range g.len() {
			f := g.line(i).family
			if isAbsent(g.vals[i]) || g.line(i).native != nil {
				continue
			}
			if places[f] == nil {
				order = append(order, f)
			}
			places[f] = append(places[f], place{g, i})
		}
	}
	return order, places
}

func appendLine(b []byte, p place, openMetrics bool) []byte {
	l := p.g.line(p.i)
	text := p.g.text
	if l.own != nil {
		text = l.text
	}
	b = append(b, l.metric...)
	if text != "" {
		b = append(b, '{')
		b = append(b, text...)
		b = append(b, '}')
	}
	b = append(b, ' ')
	b = appendValue(b, l.family, p.g.vals[p.i])
	if x := p.g.exemplar; openMetrics && x != nil && x.line == p.i {
		name, id, _, _ := series.LabelBytes(x.labels).Next()
		b = fmt.Appendf(b, " # {%s=%q} %g %.3f", name, id, x.v, seconds(x.t))
	}
	return append(b, '\n')
}

// appendValue prints v as its exporter would: DCGM's as %d or %f, others shortest.
func appendValue(b []byte, f *family, v float64) []byte {
	switch {
	case !strings.HasPrefix(f.name, "DCGM_"):
		return strconv.AppendFloat(b, v, 'g', -1, 64)
	case f.decimals:
		return strconv.AppendFloat(b, v, 'f', 6, 64)
	case v >= math.MaxInt64:
		return append(b, "9223372036854775794"...) // the blank that float64 cannot hold
	default:
		return strconv.AppendInt(b, int64(v), 10)
	}
}
