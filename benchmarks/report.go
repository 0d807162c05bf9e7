package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"
)

// report is everything that was measured.
type report struct {
	Started time.Time
	Machine machineInfo
	Flags   runFlags
	Targets []targetInfo
	Loads   []loadInfo
	Runs    []measurement
}

type targetInfo struct{ Name, Binary, Version string }

type loadInfo struct {
	Protocol, Series, LaterSeries, Samples, GPUs, Nodes int
	BytesPerSample                                      float64
}

// column is one number of the table.
type column struct {
	title  string
	value  func(m measurement, l loadInfo) float64
	format func(float64) string
	more   bool // more is better
}

var columns = []column{
	{"CPU µs/sample", func(m measurement, _ loadInfo) float64 { return m.SampleNanos / 1000 }, decimals(3), false},
	{"samples/s", func(m measurement, _ loadInfo) float64 { return m.SamplesPerS }, thousands, true},
	{"CPU µs/new series", func(m measurement, _ loadInfo) float64 { return m.CreateNanos / 1000 }, decimals(1), false},
	{"peak RSS MiB", func(m measurement, _ loadInfo) float64 { return float64(m.PeakRSS) / (1 << 20) }, decimals(0), false},
	{"disk B/sample", func(m measurement, l loadInfo) float64 { return float64(m.Disk) / float64(l.Samples+l.Series) }, decimals(2), false},
	{"of it in logs", func(m measurement, l loadInfo) float64 { return float64(m.DiskLog) / float64(l.Samples+l.Series) }, decimals(2), false},
	{"write p99 ms", func(m measurement, _ loadInfo) float64 { return ms(m.WriteP99) }, decimals(1), false},
	{"query p50 ms", func(m measurement, _ loadInfo) float64 { return ms(m.QueryP50) }, decimals(1), false},
	{"query p99 ms", func(m measurement, _ loadInfo) float64 { return ms(m.QueryP99) }, decimals(1), false},
	{"CPU ms/query", func(m measurement, _ loadInfo) float64 { return m.QueryNanos / 1e6 }, decimals(1), false},
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func decimals(n int) func(float64) string {
	return func(v float64) string { return fmt.Sprintf("%.*f", n, v) }
}

func thousands(v float64) string { return fmt.Sprintf("%.0fk", v/1000) }

// median returns the middle value, the mean of the two middle ones if there are two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// key names one row of the table.
type key struct {
	target   string
	protocol int
}

// rows returns the targets with their protocols in the order of their first run.
func (r *report) rows() []key {
	var keys []key
	for _, m := range r.Runs {
		if k := (key{m.Target, m.Protocol}); !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
	}
	return keys
}

func (r *report) medianOf(k key, value func(measurement, loadInfo) float64) (mid, low, high float64) {
	var v []float64
	for _, m := range r.Runs {
		if m.Target == k.target && m.Protocol == k.protocol {
			v = append(v, value(m, r.load(k.protocol)))
		}
	}
	if len(v) == 0 {
		return 0, 0, 0
	}
	return median(v), slices.Min(v), slices.Max(v)
}

func (r *report) load(protocol int) loadInfo {
	for _, l := range r.Loads {
		if l.Protocol == protocol {
			return l
		}
	}
	return loadInfo{}
}

// markdown renders the tables.
func (r *report) markdown() string {
	var b strings.Builder
	base := r.Flags.Base
	if base == "" && len(r.Targets) > 0 {
		base = r.Targets[0].Name
	}
	l := r.load(r.Flags.Protocols[0])
	fmt.Fprintf(&b, "%s. %d × %s, %d GiB, Linux %s.\n", r.Started.UTC().Format("2006-01-02"), r.Machine.CPUs, r.Machine.CPU, r.Machine.MemoryGiB, r.Machine.Kernel)
	fmt.Fprintf(&b, "%d series (%d nodes, %d GPUs, profile %s), %d samples each in the timed part, %d a request, %d senders; medians of %d interleaved runs.\n",
		l.Series, l.Nodes, l.GPUs, r.Flags.Profile, r.Flags.Rounds, r.Flags.Batch, r.Flags.Senders, r.Flags.Repetitions)
	if r.Flags.TargetCPUs != "" {
		fmt.Fprintf(&b, "Targets ran on CPU %s, the load on CPU %s.\n", r.Flags.TargetCPUs, r.Flags.LoadCPUs)
	}
	b.WriteString("\n")
	for _, t := range r.Targets {
		fmt.Fprintf(&b, "- %s: `%s`\n", t.Name, t.Version)
	}
	for _, l := range r.Loads {
		fmt.Fprintf(&b, "- remote write %d.0: %.1f B per sample on the wire\n", l.Protocol, l.BytesPerSample)
	}
	b.WriteString("\n")
	r.mainTable(&b, base)
	b.WriteString("\n")
	r.queryTable(&b)
	return b.String()
}

func (r *report) mainTable(b *strings.Builder, base string) {
	b.WriteString("| target | write |")
	for _, c := range columns {
		b.WriteString(" " + c.title + " |")
	}
	b.WriteString("\n| --- | --- |" + strings.Repeat(" ---: |", len(columns)) + "\n")
	for _, k := range r.rows() {
		fmt.Fprintf(b, "| %s | %d.0 |", k.target, k.protocol)
		for _, c := range columns {
			mid, low, high := r.medianOf(k, c.value)
			fmt.Fprintf(b, " %s", c.format(mid))
			if ref, _, _ := r.medianOf(key{base, k.protocol}, c.value); k.target != base && ref > 0 {
				fmt.Fprintf(b, " (×%.2f)", mid/ref)
			} else if mid > 0 && r.Flags.Repetitions > 1 {
				fmt.Fprintf(b, " (%+.0f/%+.0f %%)", 100*(low/mid-1), 100*(high/mid-1))
			}
			b.WriteString(" |")
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "\n×: median divided by that of %s with the same protocol. In its own rows: lowest and highest run against the median.\n", base)
}

// queryTable shows each query's median latency, and how much came back: a target
// that answers less is not faster.
func (r *report) queryTable(b *strings.Builder) {
	protocol := r.Flags.Protocols[0]
	var keys []key
	b.WriteString("| query, p50 ms |")
	for _, k := range r.rows() {
		if k.protocol == protocol {
			keys = append(keys, k)
			b.WriteString(" " + k.target + " |")
		}
	}
	b.WriteString(" rows |\n| --- |" + strings.Repeat(" ---: |", len(keys)+1) + "\n")
	if len(r.Runs) == 0 {
		return
	}
	for i, q := range r.Runs[0].Queries {
		fmt.Fprintf(b, "| %s |", q.Name)
		rows := map[int]bool{}
		var each []string
		for _, k := range keys {
			mid, _, _ := r.medianOf(k, func(m measurement, _ loadInfo) float64 { return ms(m.Queries[i].P50) })
			n, _, _ := r.medianOf(k, func(m measurement, _ loadInfo) float64 { return float64(m.Queries[i].Rows) })
			fmt.Fprintf(b, " %.1f |", mid)
			rows[int(n)] = true
			each = append(each, fmt.Sprintf("%.0f", n))
		}
		if len(rows) == 1 {
			fmt.Fprintf(b, " %s |\n", each[0])
		} else {
			fmt.Fprintf(b, " **%s** |\n", strings.Join(each, " / "))
		}
	}
}

// write prints the tables, and writes them and the raw numbers where --out says.
func (r *report) write(out string, stdout io.Writer) error {
	table := r.markdown()
	if _, err := io.WriteString(stdout, table); err != nil {
		return fmt.Errorf("print table: %w", err)
	}
	if out == "" {
		return nil
	}
	if err := os.WriteFile(out, []byte(table), 0o666); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode raw numbers: %w", err)
	}
	if err := os.WriteFile(jsonPath(out), append(raw, '\n'), 0o666); err != nil {
		return fmt.Errorf("write raw numbers: %w", err)
	}
	return nil
}

// merge reads several reports and writes them as one: a machine that others need in
// between is used for one repetition at a time. Only runs that measured the same
// thing can be merged.
func merge(f mergeFlags, stdout io.Writer) error {
	var all report
	for i, path := range f.Files {
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read raw numbers: %w", err)
		}
		var r report
		if err := json.Unmarshal(b, &r); err != nil {
			return fmt.Errorf("parse raw numbers %s: %w", path, err)
		}
		if i == 0 {
			all = r
			continue
		}
		if err := all.add(r); err != nil {
			return fmt.Errorf("merge %s: %w", path, err)
		}
	}
	return all.write(f.Out, stdout)
}

// add appends the runs of other, whose flags but for the number of repetitions must
// be the same.
func (r *report) add(other report) error {
	a, b := r.Flags, other.Flags
	a.Repetitions, b.Repetitions, a.Out, b.Out = 0, 0, "", ""
	if !reflect.DeepEqual(a, b) {
		return fmt.Errorf("flags differ: %+v and %+v", a, b)
	}
	if !slices.Equal(r.Targets, other.Targets) || r.Machine != other.Machine {
		return fmt.Errorf("targets or machines differ: %+v on %+v and %+v on %+v", r.Targets, r.Machine, other.Targets, other.Machine)
	}
	for _, m := range other.Runs {
		m.Repetition += r.Flags.Repetitions
		r.Runs = append(r.Runs, m)
	}
	r.Flags.Repetitions += other.Flags.Repetitions
	return nil
}
