package distributor

import (
	"bytes"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/prometheus/common/model"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// verdict says why a label set is refused. It is made once per label set and kept.
type verdict struct {
	reason  series.Reason
	message string
}

// labelChecker turns label runs as they were sent into canonical LabelBytes, and
// judges them. It keeps scratch memory, so each request has its own.
type labelChecker struct {
	maxLabels int
	maxName   int
	maxValue  int

	pairs []labelPair
	buf   []byte
}

type labelPair struct{ name, value []byte }

// check returns run in canonical form: sorted by name, labels without a value left
// out. The bytes are run's own where it is canonical already, else scratch that
// the next check overwrites. A label set that is refused has a verdict instead. An
// error means that the run is no protobuf at all.
func (k *labelChecker) check(run []byte) (series.LabelBytes, *verdict, error) {
	v, err := k.parse(run)
	if err != nil {
		return nil, nil, err
	}
	if v == nil {
		v = k.arrange()
	}
	canonical := k.encode()
	if v != nil {
		v.message = fmt.Sprintf("series %s: %s", canonical, v.message)
		return nil, v, nil
	}
	if bytes.Equal(canonical, run) {
		return run, nil, nil
	}
	return canonical, nil, nil
}

// parse collects the labels that have a value, until one is at fault. What follows
// a fault is still read, as its protobuf must be sound.
func (k *labelChecker) parse(run []byte) (*verdict, error) {
	k.pairs = k.pairs[:0]
	var fault *verdict
	for len(run) > 0 {
		name, value, rest, err := remotewrite.NextLabel(run)
		if err != nil {
			return nil, err
		}
		run = rest
		if fault == nil {
			if fault = k.judge(name, value); fault == nil && len(value) > 0 {
				k.pairs = append(k.pairs, labelPair{name, value})
			}
		} else if string(name) == model.MetricNameLabel {
			// Upper-case labels come before the name, which the message wants.
			k.pairs = append(k.pairs[:min(len(k.pairs), k.maxLabels)], labelPair{name, value})
		}
	}
	return fault, nil
}

func (k *labelChecker) judge(name, value []byte) *verdict {
	switch {
	case len(name) == 0:
		return &verdict{series.ReasonEmptyLabelName, fmt.Sprintf("a label with the value %.80q has no name", value)}
	case len(name) > k.maxName:
		return &verdict{series.ReasonLabelTooLong, fmt.Sprintf("label name %.80q has %d bytes, at most %d are allowed", name, len(name), k.maxName)}
	case !utf8.Valid(name):
		return &verdict{series.ReasonInvalidUTF8, fmt.Sprintf("label name %.80q is not valid UTF-8", name)}
	case len(value) > k.maxValue:
		return &verdict{series.ReasonLabelTooLong, fmt.Sprintf("the value of label %.80q has %d bytes, at most %d are allowed", name, len(value), k.maxValue)}
	case !utf8.Valid(value):
		return &verdict{series.ReasonInvalidUTF8, fmt.Sprintf("the value %.80q of label %.80q is not valid UTF-8", value, name)}
	case len(value) > 0 && len(k.pairs) == k.maxLabels:
		return &verdict{series.ReasonTooManyLabels, fmt.Sprintf("it has more than %d labels", k.maxLabels)}
	}
	return nil
}

// arrange sorts the labels and judges the set as a whole.
func (k *labelChecker) arrange() *verdict {
	byName := func(a, b labelPair) int { return bytes.Compare(a.name, b.name) }
	if !slices.IsSortedFunc(k.pairs, byName) {
		slices.SortStableFunc(k.pairs, byName)
	}
	named := false
	for i, p := range k.pairs {
		if i > 0 && bytes.Equal(p.name, k.pairs[i-1].name) {
			return &verdict{series.ReasonDuplicateLabel, fmt.Sprintf("label %.80q stands twice, with the values %.80q and %.80q", p.name, k.pairs[i-1].value, p.value)}
		}
		named = named || string(p.name) == model.MetricNameLabel
	}
	if !named {
		return &verdict{series.ReasonMissingName, "it has no metric name"}
	}
	return nil
}

func (k *labelChecker) encode() series.LabelBytes {
	k.buf = k.buf[:0]
	for _, p := range k.pairs {
		k.buf = series.AppendLabel(k.buf, p.name, p.value)
	}
	return k.buf
}

// maxExemplarRunes is how many characters the labels of an exemplar may have in
// all, names and values, as OpenMetrics has it.
const maxExemplarRunes = 128

// checkExemplar is check for the labels of an exemplar, which need no name and
// have a bound of their own. The reason is empty where they are good.
func (k *labelChecker) checkExemplar(run []byte) (series.LabelBytes, series.Reason, error) {
	k.pairs = k.pairs[:0]
	var fault series.Reason
	runes := 0
	for len(run) > 0 {
		name, value, rest, err := remotewrite.NextLabel(run)
		if err != nil {
			return nil, "", err
		}
		run = rest
		if fault != "" {
			continue
		}
		runes += utf8.RuneCount(name) + utf8.RuneCount(value)
		switch {
		case len(name) == 0, !utf8.Valid(name), !utf8.Valid(value):
			fault = series.ReasonExemplarInvalid
		case runes > maxExemplarRunes:
			fault = series.ReasonExemplarTooLong
		case len(value) > 0:
			k.pairs = append(k.pairs, labelPair{name, value})
		}
	}
	if fault != "" {
		return nil, fault, nil
	}
	byName := func(a, b labelPair) int { return bytes.Compare(a.name, b.name) }
	slices.SortStableFunc(k.pairs, byName)
	for i := range k.pairs {
		if i > 0 && bytes.Equal(k.pairs[i].name, k.pairs[i-1].name) {
			return nil, series.ReasonExemplarInvalid, nil
		}
	}
	return k.encode(), "", nil
}

// release drops pointers into the request.
func (k *labelChecker) release() {
	clear(k.pairs[:cap(k.pairs)])
	k.pairs = k.pairs[:0]
	if cap(k.buf) > keepBuffer {
		k.buf = nil
	}
}
