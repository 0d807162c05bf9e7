package series

import (
	"fmt"
	"slices"
	"strings"
)

// Reason names why a sample or exemplar was refused. It is a metric's label value
// and stands in answers, so the set is closed and the names are stable.
type Reason string

const (
	// About the label set.
	ReasonMissingName    Reason = "missing_metric_name"
	ReasonEmptyLabelName Reason = "empty_label_name"
	ReasonDuplicateLabel Reason = "duplicate_label_name"
	ReasonInvalidUTF8    Reason = "invalid_utf8"
	ReasonTooManyLabels  Reason = "too_many_labels"
	ReasonLabelTooLong   Reason = "label_too_long"

	// About a sample.
	ReasonTooFarInFuture   Reason = "too_far_in_future"
	ReasonTimestampInvalid Reason = "timestamp_invalid"
	ReasonTooOld           Reason = "too_old"
	ReasonConflict         Reason = "conflicting_value"
	ReasonInvalidHistogram Reason = "invalid_histogram"
	ReasonMixedSamples     Reason = "floats_and_histograms"

	// About an OTLP data point.
	ReasonDeltaTemporality Reason = "delta_temporality"
	ReasonUntranslatable   Reason = "untranslatable"

	// About a lasting limit.
	ReasonSeriesLimit Reason = "series_limit"

	// About exemplars and metadata, which never fail the samples beside them.
	ReasonExemplarInvalid    Reason = "exemplar_invalid"
	ReasonExemplarTooLong    Reason = "exemplar_too_long"
	ReasonExemplarOutOfOrder Reason = "exemplar_out_of_order"
	ReasonExemplarNoSeries   Reason = "exemplar_without_series"
	ReasonExemplarsOff       Reason = "exemplars_disabled"
	ReasonMetadataLimit      Reason = "metadata_limit"
	ReasonMetadataInvalid    Reason = "metadata_invalid"
)

// Refusals counts what was refused, by reason, and keeps the first message.
type Refusals struct {
	// First describes the first refusal: the series, the reason with its values.
	// Valid UTF-8 of bounded length.
	First  string
	counts []reasonCount // a handful at most: a slice beats a map
}

type reasonCount struct {
	reason Reason
	n      int
}

// Add counts n refusals. message is called for the first one only.
func (r *Refusals) Add(reason Reason, n int, message func() string) {
	if n <= 0 {
		return
	}
	if len(r.counts) == 0 && message != nil {
		r.First = message()
	}
	for i := range r.counts {
		if r.counts[i].reason == reason {
			r.counts[i].n += n
			return
		}
	}
	r.counts = append(r.counts, reasonCount{reason, n})
}

// Merge adds what other counted; r's first message stays if it has one.
func (r *Refusals) Merge(other *Refusals) {
	for _, c := range other.counts {
		r.Add(c.reason, c.n, func() string { return other.First })
	}
}

// Total is the number of things refused.
func (r *Refusals) Total() int {
	n := 0
	for _, c := range r.counts {
		n += c.n
	}
	return n
}

// Each calls f for every reason, in the order in which they first occurred.
func (r *Refusals) Each(f func(reason Reason, n int)) {
	for _, c := range r.counts {
		f(c.reason, c.n)
	}
}

// Reset empties r.
func (r *Refusals) Reset() { r.First, r.counts = "", r.counts[:0] }

// Error describes all refusals in one line: the first one in words, then the
// count by reason, sorted by name so that equal faults read equal.
func (r *Refusals) Error() string {
	parts := make([]string, 0, len(r.counts))
	for _, c := range r.counts {
		parts = append(parts, fmt.Sprintf("%s: %d", c.reason, c.n))
	}
	slices.Sort(parts)
	return fmt.Sprintf("%s; refused %d in all (%s)", r.First, r.Total(), strings.Join(parts, ", "))
}

// Appended says what became of a Batch: what is stored (samples that were there
// already with the same value count as stored), and what was refused for good.
type Appended struct {
	Samples    int
	Histograms int
	Exemplars  int
	// Refused counts samples and histograms: the request's fault, answered 400.
	Refused Refusals
	// Dropped counts exemplars and metadata: never an error of the request.
	Dropped Refusals
}

// Reset empties a.
func (a *Appended) Reset() {
	a.Samples, a.Histograms, a.Exemplars = 0, 0, 0
	a.Refused.Reset()
	a.Dropped.Reset()
}
