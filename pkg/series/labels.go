package series

import (
	"encoding/binary"
	"strconv"
	"unicode/utf8"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
)

// LabelBytes is a label set as bytes: the run of label fields of a remote write
// 1.0 TimeSeries message, so that what a well-behaved sender sends is used where
// it lies, without a copy.
//
//	label      = 0x0a len(pair) pair
//	pair       = 0x0a len(name) name  0x12 len(value) value
//	LabelBytes = label*
//
// Lengths are unsigned varints. A LabelBytes is canonical: names sorted bytewise
// and unique, no name and no value empty, varints minimal. Two canonical
// LabelBytes are the same series exactly if their bytes are equal.
//
// Names sort bytewise, so upper-case DCGM labels (UUID, GPU_I_ID, Hostname) come
// before __name__: nothing may assume that the name comes first.
type LabelBytes []byte

const (
	tagLabel = 0x0a // TimeSeries.labels, field 1, length-delimited
	tagName  = 0x0a // Label.name, field 1, length-delimited
	tagValue = 0x12 // Label.value, field 2, length-delimited
)

// AppendLabel appends one label to dst. The caller keeps the order of names.
func AppendLabel[T string | []byte](dst []byte, name, value T) []byte {
	pair := 2 + uvarintLen(len(name)) + len(name) + uvarintLen(len(value)) + len(value)
	dst = append(dst, tagLabel)
	dst = binary.AppendUvarint(dst, uint64(pair))
	dst = append(dst, tagName)
	dst = binary.AppendUvarint(dst, uint64(len(name)))
	dst = append(dst, name...)
	dst = append(dst, tagValue)
	dst = binary.AppendUvarint(dst, uint64(len(value)))
	return append(dst, value...)
}

// AppendLabels appends the labels of ls, which Prometheus keeps sorted, to dst.
// Labels with empty values, which equal absent ones, are left out.
func AppendLabels(dst []byte, ls labels.Labels) []byte {
	ls.Range(func(l labels.Label) {
		if l.Value != "" {
			dst = AppendLabel(dst, l.Name, l.Value)
		}
	})
	return dst
}

// Next returns the first label and what follows it. ok is false at the end, and
// also where the bytes are not canonical, which only a bug of ours can cause.
func (b LabelBytes) Next() (name, value []byte, rest LabelBytes, ok bool) {
	pair, rest, ok := field(b, tagLabel)
	if !ok {
		return nil, nil, nil, false
	}
	name, pair, ok = field(pair, tagName)
	if !ok {
		return nil, nil, nil, false
	}
	value, pair, ok = field(pair, tagValue)
	if !ok || len(pair) != 0 {
		return nil, nil, nil, false
	}
	return name, value, rest, true
}

// Get returns the value of the label called name, nil if there is none.
func (b LabelBytes) Get(name string) []byte {
	for {
		n, v, rest, ok := b.Next()
		if !ok {
			return nil
		}
		if string(n) == name {
			return v
		}
		b = rest
	}
}

// Len returns the number of labels.
func (b LabelBytes) Len() int {
	n := 0
	for {
		_, _, rest, ok := b.Next()
		if !ok {
			return n
		}
		n++
		b = rest
	}
}

// Labels builds Prometheus' label object, with strings of its own.
func (b LabelBytes) Labels(builder *labels.ScratchBuilder) labels.Labels {
	builder.Reset()
	for {
		n, v, rest, ok := b.Next()
		if !ok {
			return builder.Labels()
		}
		builder.Add(string(n), string(v))
		b = rest
	}
}

// maxDescription bounds what a label set adds to an error message, in bytes.
const maxDescription = 400

// String describes the series for messages: the metric name first, valid UTF-8
// whatever the bytes are, cut after a few hundred bytes.
func (b LabelBytes) String() string { return string(AppendDescription(nil, b)) }

// AppendDescription appends what String returns. It also serves label runs that
// are not canonical: it stops where the bytes cannot be read.
func AppendDescription(dst []byte, b LabelBytes) []byte {
	start := len(dst)
	if name := b.Get(model.MetricNameLabel); name != nil {
		dst = appendQuotedOrBare(dst, name, 120)
	}
	dst = append(dst, '{')
	first := true
	for {
		n, v, rest, ok := b.Next()
		if !ok {
			break
		}
		b = rest
		if string(n) == model.MetricNameLabel {
			continue
		}
		if !first {
			dst = append(dst, ", "...)
		}
		first = false
		if len(dst)-start > maxDescription {
			dst = append(dst, "..."...)
			break
		}
		dst = appendQuotedOrBare(dst, n, 80)
		dst = append(dst, '=')
		dst = appendQuoted(dst, v, 80)
	}
	return append(dst, '}')
}

// appendQuotedOrBare writes plain names as they are and quotes all others.
func appendQuotedOrBare(dst, name []byte, most int) []byte {
	if len(name) <= most && model.IsValidLegacyMetricName(string(name)) {
		return append(dst, name...)
	}
	return appendQuoted(dst, name, most)
}

func appendQuoted(dst, s []byte, most int) []byte {
	cut := false
	if len(s) > most {
		for most > 0 && !utf8.RuneStart(s[most]) {
			most--
		}
		s, cut = s[:most], true
	}
	dst = strconv.AppendQuote(dst, string(s))
	if cut {
		dst = append(dst, "..."...)
	}
	return dst
}

// field reads one length-delimited protobuf field with the given one-byte tag.
func field(b []byte, tag byte) (content, rest []byte, ok bool) {
	if len(b) < 2 || b[0] != tag {
		return nil, nil, false
	}
	n, w := uint64(b[1]), 1
	if n >= 0x80 {
		if n, w = binary.Uvarint(b[1:]); w <= 0 {
			return nil, nil, false
		}
	}
	if n > uint64(len(b)-1-w) {
		return nil, nil, false
	}
	end := 1 + w + int(n)
	return b[1+w : end : end], b[end:], true
}

func uvarintLen(n int) int {
	w := 1
	for ; n >= 0x80; n >>= 7 {
		w++
	}
	return w
}
