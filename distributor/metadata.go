package distributor

import (
	"bytes"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/prometheus/common/model"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// A family is one metric family's metadata, as one of its senders says it. Remote
// write 2.0 repeats it with every sample; it is handed on when it is new and then
// every metadataInterval, as remote write 1.0 senders do.
type family struct {
	series.Metadata
	handed atomic.Int64 // Unix milliseconds
}

const (
	metadataInterval = 30_000    // milliseconds
	metadataForget   = 3_600_000 // milliseconds: not said for so long, a family may go
)

// due tells whether f is to be handed on now, to one caller only.
func (f *family) due(now int64) bool {
	last := f.handed.Load()
	return now-last >= metadataInterval && f.handed.CompareAndSwap(last, now)
}

// families interns the metadata of a tenant, boundedly.
type families struct {
	max       int
	maxHelp   int
	maxFamily int

	mu    sync.Mutex
	known map[series.Metadata]*family
	swept int64 // Unix milliseconds
}

// same tells whether f is what m says.
func (s *families) same(f *family, m *remotewrite.Metadata) bool {
	return f.Type == m.Type && f.Unit == string(m.Unit) && f.Help == string(s.cut(m.Help))
}

// cut bounds a help text at a character's edge.
func (s *families) cut(help []byte) []byte {
	if len(help) <= s.maxHelp {
		return help
	}
	n := s.maxHelp
	for n > 0 && !utf8.RuneStart(help[n]) {
		n--
	}
	return help[:n]
}

// intern returns the family that m describes, or why it is dropped.
func (s *families) intern(m *remotewrite.Metadata, now int64) (*family, series.Reason) {
	help := s.cut(m.Help)
	switch {
	case len(m.Family) == 0, !utf8.Valid(m.Family), !utf8.Valid(help), !utf8.Valid(m.Unit):
		return nil, series.ReasonMetadataInvalid
	case len(m.Family) > s.maxFamily, len(m.Unit) > s.maxHelp:
		return nil, series.ReasonMetadataLimit
	}
	key := series.Metadata{Family: string(m.Family)}
	key.Type, key.Help, key.Unit = m.Type, string(help), string(m.Unit)

	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.known[key]; f != nil {
		return f, ""
	}
	if len(s.known) >= s.max && !s.sweep(now) {
		return nil, series.ReasonMetadataLimit
	}
	f := &family{Metadata: key}
	if s.known == nil {
		s.known = make(map[series.Metadata]*family)
	}
	s.known[key] = f
	return f, ""
}

// sweep makes room, and tells whether there is some.
func (s *families) sweep(now int64) bool {
	if now-s.swept < metadataInterval {
		return false
	}
	s.swept = now
	for key, f := range s.known {
		if now-f.handed.Load() > metadataForget {
			delete(s.known, key)
		}
	}
	return len(s.known) < s.max
}

// familyName returns the metric family of a series by its metric name and type:
// the parts of classic histograms and summaries belong to the family without
// their suffix, every other series is a family of its name.
func familyName(name []byte, typ model.MetricType) []byte {
	var suffixes []string
	switch typ {
	case model.MetricTypeHistogram:
		suffixes = []string{"_bucket", "_count", "_sum"}
	case model.MetricTypeGaugeHistogram:
		suffixes = []string{"_bucket", "_gcount", "_gsum", "_count", "_sum"}
	case model.MetricTypeSummary:
		suffixes = []string{"_count", "_sum"}
	}
	for _, s := range suffixes {
		if short, ok := bytes.CutSuffix(name, []byte(s)); ok && len(short) > 0 {
			return short
		}
	}
	return name
}
