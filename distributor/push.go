package distributor

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/histogram"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// Push takes the decoded body of one remote write request for a tenant and fills
// res with what became of it. A nil error means that all of the request is dealt
// with, though some of it may have been refused: that is in res.Refused. With an
// error nothing counts as stored.
//
// The body is not kept, but must not change until Push returns.
func (d *Distributor) Push(ctx context.Context, tenant string, p remotewrite.Protocol, body []byte, res *series.Appended) error {
	q := d.begin()
	defer d.end(q)
	return d.push(ctx, d.tenants.get(tenant, d.now()), q, p, body, res)
}

func (d *Distributor) push(ctx context.Context, t *tenantState, q *request, p remotewrite.Protocol, body []byte, res *series.Appended) error {
	if err := d.scan(t, q, p, body); err != nil {
		return err
	}
	return d.commit(ctx, t, q, res)
}

// request is the memory of one write, reused from one to the next.
type request struct {
	body    []byte // as it came
	decoded []byte

	memory  reservation
	cursor  remotewrite.Cursor
	checker labelChecker
	batch   series.Batch
	entries []*cacheEntry // of batch.Entries, one each
	last    *cacheEntry   // of the series before
	handed  []*family     // whose metadata is in batch
	arena   []byte        // exemplar labels

	now      int64 // Unix milliseconds, when the request began
	latest   int64 // the last timestamp that is accepted
	protocol remotewrite.Protocol

	// What the distributor itself refuses and drops, and what it counts.
	own       series.Appended
	received  int // samples and histograms
	predicted int
	hashed    int
	missed    int
	badStarts int
}

// Buffers above these sizes are not kept for the next request.
const (
	keepBuffer   = 4 << 20 // bytes
	keepElements = 64 << 10
)

func (d *Distributor) begin() *request {
	q, _ := d.requests.Get().(*request)
	if q == nil {
		q = &request{checker: labelChecker{
			maxLabels: d.cfg.MaxLabels, maxName: d.cfg.MaxLabelNameBytes, maxValue: d.cfg.MaxLabelValueBytes,
		}}
	}
	now := d.now()
	q.memory.of = &d.inflight
	q.now = now.UnixMilli()
	q.latest = now.Add(d.cfg.FutureTolerance).UnixMilli()
	return q
}

func (d *Distributor) end(q *request) {
	q.memory.release()
	q.cursor.Release()
	q.checker.release()
	q.batch.Reset()
	if cap(q.batch.Samples) > 4*keepElements || cap(q.batch.Entries) > keepElements ||
		cap(q.batch.Histograms) > keepElements || cap(q.batch.Exemplars) > keepElements || cap(q.batch.Metadata) > keepElements {
		q.batch = series.Batch{}
	}
	q.body, q.decoded, q.arena = keptBuffer(q.body), keptBuffer(q.decoded), keptBuffer(q.arena)
	clear(q.entries)
	clear(q.handed)
	q.entries, q.handed, q.last = q.entries[:0], q.handed[:0], nil
	q.own.Reset()
	q.received, q.predicted, q.hashed, q.missed, q.badStarts = 0, 0, 0, 0, 0
	d.requests.Put(q)
}

func keptBuffer(b []byte) []byte {
	if cap(b) > keepBuffer {
		return nil
	}
	return b[:0]
}

// scan fills q with the series of a remote write request that pass the checks.
func (d *Distributor) scan(t *tenantState, q *request, p remotewrite.Protocol, body []byte) error {
	q.protocol = p
	q.cursor.Reset(p, body, &q.batch, remotewrite.Limits{
		Run:      d.cfg.maxRun(),
		Memory:   d.cfg.MaxRequestBytes,
		Resolved: resolvedPerByte * d.cfg.MaxDecodedBytes,
		Grow:     q.memory.grow,
	})
	for q.cursor.Next() {
		if err := d.take(t, q, q.cursor.Series()); err != nil {
			return err
		}
	}
	if err := q.cursor.Err(); err != nil {
		return err
	}
	for _, m := range q.cursor.Metadata() {
		d.describe(t, q, nil, &m)
	}
	return nil
}

// resolvedPerByte bounds the label bytes that one byte of a 2.0 request may stand
// for, on average over the largest request.
const resolvedPerByte = 16

// maxRun is the size of the largest label run that can be acceptable.
func (c *Config) maxRun() int { return c.MaxLabels * (c.MaxLabelNameBytes + c.MaxLabelValueBytes + 16) }

// take checks one series and adds what is acceptable of it to the batch.
func (d *Distributor) take(t *tenantState, q *request, s *remotewrite.Series) error {
	e, err := d.lookup(t, q, s.Labels)
	if err != nil {
		return fmt.Errorf("series %d of the request: %w", q.predicted+q.hashed+q.missed, err)
	}
	q.received += s.Samples.Len() + s.Histograms.Len() + s.BadHistograms
	if e.verdict != nil {
		q.refuseSeries(s, e.verdict)
		return nil
	}
	if s.BadHistograms > 0 {
		fault := s.HistogramFault
		q.own.Refused.Add(series.ReasonInvalidHistogram, s.BadHistograms, func() string {
			return fmt.Sprintf("series %s: %s", e.labels, fault)
		})
	}
	if q.protocol == remotewrite.Protocol2 && s.Samples.Len() > 0 && s.Histograms.Len() > 0 {
		q.refuseMixed(s, e)
		return nil
	}
	return d.add(t, q, s, e)
}

// add checks the samples of a good series and appends its entry.
func (d *Distributor) add(t *tenantState, q *request, s *remotewrite.Series, e *cacheEntry) error {
	q.checkSamples(s, e)
	if s.Histograms.Len() > 0 {
		q.checkHistograms(s, e)
	}
	if s.Exemplars.Len() > 0 {
		if err := q.checkExemplars(s, d.cfg.Exemplars); err != nil {
			return err
		}
	}
	if !s.Metadata.IsZero() {
		d.describe(t, q, e, &s.Metadata)
	}
	if s.Samples.Len() == 0 && s.Histograms.Len() == 0 && s.Exemplars.Len() == 0 {
		return nil
	}
	q.batch.Entries = append(q.batch.Entries, series.Entry{
		Labels: e.labels, Ref: e.ref(),
		Samples: s.Samples, Histograms: s.Histograms, Exemplars: s.Exemplars,
	})
	q.entries = append(q.entries, e)
	return nil
}

// lookup returns what is known about a label run: by prediction, by hash, or by
// finding out.
func (d *Distributor) lookup(t *tenantState, q *request, run []byte) (*cacheEntry, error) {
	if e := following(q.last, run); e != nil {
		q.predicted++
		q.last = e
		return e, nil
	}
	h := t.cache.hash(run)
	e := t.cache.find(h, run)
	if e != nil {
		q.hashed++
	} else {
		q.missed++
		// The request holds the entry to its end, also where the cache does not keep it.
		if err := q.memory.grow(len(run) + entryOverhead); err != nil {
			return nil, err
		}
		labels, v, err := q.checker.check(run)
		if err != nil {
			return nil, err
		}
		e = t.cache.insert(h, run, labels, v)
	}
	follow(q.last, e)
	q.last = e
	return e, nil
}

// refuseSeries takes everything of s out of the batch again.
func (q *request) refuseSeries(s *remotewrite.Series, v *verdict) {
	q.own.Refused.Add(v.reason, s.Samples.Len()+s.Histograms.Len()+s.BadHistograms, func() string { return v.message })
	q.own.Dropped.Add(v.reason, s.Exemplars.Len(), func() string { return v.message })
	q.withdraw(s)
}

// refuseMixed refuses a 2.0 series with floats and histograms, which the
// specification forbids. In 1.0 nothing does, and both kinds are kept.
func (q *request) refuseMixed(s *remotewrite.Series, e *cacheEntry) {
	message := func() string {
		return fmt.Sprintf("series %s: it has %d floats and %d histograms, a series of a remote write 2.0 request has one kind",
			e.labels, s.Samples.Len(), s.Histograms.Len())
	}
	q.own.Refused.Add(series.ReasonMixedSamples, s.Samples.Len()+s.Histograms.Len(), message)
	q.own.Dropped.Add(series.ReasonMixedSamples, s.Exemplars.Len(), message)
	q.withdraw(s)
}

func (q *request) withdraw(s *remotewrite.Series) {
	b := &q.batch
	clear(b.Histograms[s.Histograms.From:])
	clear(b.Exemplars[s.Exemplars.From:])
	b.Samples = b.Samples[:s.Samples.From]
	b.Histograms = b.Histograms[:s.Histograms.From]
	b.Exemplars = b.Exemplars[:s.Exemplars.From]
}

// earliest is the first timestamp that is taken for one: 2000-01-01 UTC. What lies
// before it is zero, negative or in another unit.
const earliest = 946_684_800_000

// checkSamples keeps the samples of s whose time can be.
func (q *request) checkSamples(s *remotewrite.Series, e *cacheEntry) {
	samples := q.batch.Samples[s.Samples.From:s.Samples.To]
	kept := 0
	for i := range samples {
		sample := samples[i]
		if !q.timely(sample.T, e) {
			continue
		}
		if sample.ST != 0 {
			sample.ST = q.start(sample.ST, sample.T)
		}
		samples[kept] = sample
		kept++
	}
	s.Samples.To = s.Samples.From + uint32(kept)
	q.batch.Samples = q.batch.Samples[:s.Samples.To]
}

// checkHistograms keeps the histograms of s that are valid and whose time can be.
func (q *request) checkHistograms(s *remotewrite.Series, e *cacheEntry) {
	all := q.batch.Histograms[s.Histograms.From:s.Histograms.To]
	kept := all[:0]
	for _, h := range all {
		if !q.timely(h.T, e) {
			continue
		}
		if fault := normalize(&h); fault != nil {
			q.own.Refused.Add(series.ReasonInvalidHistogram, 1, func() string {
				return fmt.Sprintf("series %s: native histogram at timestamp %d: %s", e.labels, h.T, fault)
			})
			continue
		}
		if h.ST != 0 {
			h.ST = q.start(h.ST, h.T)
		}
		kept = append(kept, h)
	}
	clear(all[len(kept):])
	s.Histograms.To = s.Histograms.From + uint32(len(kept))
	q.batch.Histograms = q.batch.Histograms[:s.Histograms.To]
}

// timely tells whether a sample of e may have the timestamp t, and counts it as
// refused if not.
func (q *request) timely(t int64, e *cacheEntry) bool {
	if t >= earliest && t <= q.latest {
		return true
	}
	reason := series.ReasonTimestampInvalid
	if t > q.latest {
		reason = series.ReasonTooFarInFuture
	}
	q.own.Refused.Add(reason, 1, func() string {
		return fmt.Sprintf("series %s: %s", e.labels, timeFault(t, q.now, q.latest))
	})
	return false
}

// start returns the start time to store with a sample at t: none where it cannot
// be. It is an extra that must not cost the sample.
func (q *request) start(st, t int64) int64 {
	if st >= earliest && st <= t {
		return st
	}
	q.badStarts++
	return 0
}

// timeFault says in words why timestamp t is refused, and what it looks like.
func timeFault(t, now, latest int64) string {
	fault := fmt.Sprintf("timestamp %d is before 2000-01-01", t)
	if t > latest {
		fault = fmt.Sprintf("timestamp %d is in the future: %s ahead is allowed, from %s", t,
			time.Duration(latest-now)*time.Millisecond, time.UnixMilli(now).UTC().Format(time.RFC3339))
	}
	// What it would be in another unit, if that were within twenty years.
	const near = 20 * 365 * 86_400_000
	plausible := func(ms int64) bool { return ms > now-near && ms <= latest }
	unit := ""
	switch {
	case t > 0 && t < earliest && plausible(t*1000):
		unit = "seconds"
	case plausible(t / 1_000):
		unit = "microseconds"
	case plausible(t / 1_000_000):
		unit = "nanoseconds"
	default:
		return fault
	}
	return fault + "; it looks like " + unit + ", timestamps are in milliseconds"
}

// normalize reduces resolutions that Prometheus reserves but does not store to the
// finest that it does, and reports what makes the histogram invalid.
func normalize(h *series.Histogram) error {
	if fh := h.FH; fh != nil {
		if fh.Schema > histogram.ExponentialSchemaMax && histogram.IsExponentialSchemaReserved(fh.Schema) {
			if err := fh.ReduceResolution(histogram.ExponentialSchemaMax); err != nil {
				return err
			}
		}
		return fh.Validate()
	}
	if h.H.Schema > histogram.ExponentialSchemaMax && histogram.IsExponentialSchemaReserved(h.H.Schema) {
		if err := h.H.ReduceResolution(histogram.ExponentialSchemaMax); err != nil {
			return err
		}
	}
	return h.H.Validate()
}

// checkExemplars keeps the exemplars of s that are good, with canonical labels and
// in order of time. The others are dropped and counted: never an error.
func (q *request) checkExemplars(s *remotewrite.Series, wanted bool) error {
	all := q.batch.Exemplars[s.Exemplars.From:s.Exemplars.To]
	kept := all[:0]
	for _, x := range all {
		labels, fault, err := q.checker.checkExemplar(x.Labels)
		if err != nil {
			return fmt.Errorf("exemplar: %w", err)
		}
		switch {
		case !wanted:
			fault = series.ReasonExemplarsOff
		case fault == "" && (x.T > q.latest || x.T != 0 && x.T < earliest):
			fault = series.ReasonExemplarInvalid
		}
		if fault != "" {
			q.own.Dropped.Add(fault, 1, nil)
			continue
		}
		start := len(q.arena)
		q.arena = append(q.arena, labels...)
		x.Labels = q.arena[start:len(q.arena):len(q.arena)]
		kept = append(kept, x)
	}
	slices.SortStableFunc(kept, func(a, b series.Exemplar) int {
		switch {
		case a.T < b.T:
			return -1
		case a.T > b.T:
			return 1
		}
		return 0
	})
	clear(all[len(kept):])
	s.Exemplars.To = s.Exemplars.From + uint32(len(kept))
	q.batch.Exemplars = q.batch.Exemplars[:s.Exemplars.To]
	return nil
}

// describe adds metadata to the batch where it is due. With an entry, m describes
// that series and has no family of its own.
func (d *Distributor) describe(t *tenantState, q *request, e *cacheEntry, m *remotewrite.Metadata) {
	var f *family
	if e != nil {
		f = e.family.Load()
	}
	if f == nil || !t.families.same(f, m) {
		var fault series.Reason
		if e != nil {
			m.Family = familyName(e.labels.Get(nameLabel), m.Type)
		}
		if f, fault = t.families.intern(m, q.now); f == nil {
			q.own.Dropped.Add(fault, 1, nil)
			return
		}
		if e != nil {
			e.family.Store(f)
		}
	}
	if f.due(q.now) {
		q.batch.Metadata = append(q.batch.Metadata, f.Metadata)
		q.handed = append(q.handed, f)
	}
}

// commit hands the batch on and accounts for every sample received.
func (d *Distributor) commit(ctx context.Context, t *tenantState, q *request, res *series.Appended) error {
	t.rate.take(d.now(), q.received)
	d.metrics.countRequest(q)
	res.Reset()
	offered := len(q.batch.Samples) + len(q.batch.Histograms)
	if len(q.batch.Entries) > 0 || len(q.batch.Metadata) > 0 {
		if err := d.appender.Append(ctx, t.name, &q.batch, res); err != nil {
			for _, f := range q.handed {
				f.handed.Store(0) // the resend brings it again
			}
			res.Reset()
			// Not stored, not charged: else the resends of a 503 would end in a 429,
			// which senders do not resend.
			t.rate.take(d.now(), -q.received)
			return err
		}
		for i, e := range q.entries {
			if r := q.batch.Entries[i].Ref; r != e.ref() {
				t.cache.setRef(e, r)
			}
		}
	}
	if got := res.Samples + res.Histograms + res.Refused.Total(); got != offered {
		d.metrics.unaccounted.Add(float64(max(got-offered, offered-got)))
		d.logger.Error("BUG: appender does not account for all samples", slog.String("tenant", t.name),
			slog.Int("offered", offered), slog.Int("accounted", got))
	}
	// The distributor's own findings come first in the message.
	q.own.Refused.Merge(&res.Refused)
	q.own.Dropped.Merge(&res.Dropped)
	res.Refused, q.own.Refused = q.own.Refused, res.Refused
	res.Dropped, q.own.Dropped = q.own.Dropped, res.Dropped
	d.metrics.countAppended(res)
	return nil
}
