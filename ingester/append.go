package ingester

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/exemplar"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"

	"github.com/varvedb/varve/pkg/series"
)

// Append stores b for tenant and says in res what became of it. When it returns
// nil, all that res counts as stored is in the WAL. An error means that the
// request failed as a whole (nothing, or an unknown part, is stored) and that the
// same request may be sent again: what is stored already is recognised.
func (i *Ingester) Append(ctx context.Context, tenant string, b *series.Batch, res *series.Appended) error {
	if err := i.admit(); err != nil {
		return err
	}
	t, err := i.acquire(tenant, true)
	if err != nil {
		return err
	}
	defer t.release()
	return t.append(ctx, b, res)
}

// admit refuses writes while the ingester cannot take any.
func (i *Ingester) admit() error {
	switch {
	case !i.ready.Load():
		return series.Errorf(series.Unavailable, "ingester is starting")
	case i.stopping.Load():
		return series.Errorf(series.Unavailable, "ingester is stopping")
	case i.diskFull.Load():
		return series.Errorf(series.Unavailable, "disk is full: less than %d bytes are free below %s", i.cfg.MinFreeDisk, i.cfg.Dir)
	}
	return nil
}

// append is one request's way into one tenant's head: one appender and one WAL
// record group for all of it, unless the request names a series twice.
func (t *tenantDB) append(ctx context.Context, b *series.Batch, res *series.Appended) error {
	if !t.gate.TryRLock() {
		return series.Errorf(series.Unavailable, "tenant %s: its head is being cut", t.name)
	}
	defer t.gate.RUnlock()
	t.lastWrite.Store(t.owner.now().UnixMilli())

	w := t.owner.writes.Get().(*write)
	defer w.recycle()
	w.start(ctx, t, b, res)
	for i := range b.Entries {
		if err := w.entry(&b.Entries[i]); err != nil {
			return errors.Join(err, w.rollback())
		}
	}
	if err := w.commit(); err != nil {
		return err
	}
	t.metadata.add(b.Metadata, res)
	return nil
}

// write is the state of one Append call; it is pooled.
type write struct {
	ctx context.Context
	t   *tenantDB
	b   *series.Batch
	res *series.Appended
	app storage.AppenderV2

	// pending holds the references with samples in app that are not committed yet.
	// TSDB checks a sample against what is committed, so a series that comes twice
	// is committed in between.
	pending refSet
	// creating tells that this request holds the tenant's lock of that name.
	creating bool

	// The series at hand: its reference if known, and its labels once they were needed.
	ref  storage.SeriesRef
	lset labels.Labels

	builder   labels.ScratchBuilder
	exemplars []exemplar.Exemplar
	late      lateReader
}

func (w *write) start(ctx context.Context, t *tenantDB, b *series.Batch, res *series.Appended) {
	w.ctx, w.t, w.b, w.res = ctx, t, b, res
	w.app = t.db.AppenderV2(ctx)
	w.pending.reset(len(b.Entries))
}

// recycle ends the request, also where it panicked half-way: an appender that stays open
// holds up TSDB, and the tenant's lock every other sender.
func (w *write) recycle() {
	owner := w.t.owner
	_ = w.rollback() // nothing is left to roll back unless it panicked
	w.late.close()
	w.ctx, w.t, w.b, w.res, w.app = nil, nil, nil, nil, nil
	w.lset = labels.EmptyLabels()
	clear(w.exemplars)
	owner.writes.Put(w)
}

// commit writes the WAL and makes the samples visible. A WAL that cannot be
// written leaves series in memory that no replay would know, so the tenant takes
// no more writes until it was opened anew.
func (w *write) commit() error {
	defer w.created()
	err := w.app.Commit()
	w.app = nil
	if err != nil {
		w.t.fail(err)
	}
	// Also if it failed for another request: what this one built on may be gone.
	if err := w.t.failure(); err != nil {
		return err
	}
	return nil
}

// rollback gives up what is pending. Series that were made get their record all the same.
func (w *write) rollback() error {
	defer w.created()
	app := w.app
	w.app = nil
	if app == nil {
		return nil
	}
	return app.Rollback()
}

// flush commits what is pending and goes on with a new appender.
func (w *write) flush() error {
	if err := w.commit(); err != nil {
		return err
	}
	w.app = w.t.db.AppenderV2(w.ctx)
	w.pending.reset(len(w.b.Entries))
	return nil
}

// create waits until no other request has made series whose records are not in the
// WAL yet, or found a place for late samples that are not committed, and holds others
// off until commit. Requests whose series are all known by reference and whose samples
// come in order never come here: references are handed out after the commit.
func (w *write) create() error {
	if w.creating {
		return nil
	}
	w.t.creating.Lock()
	w.creating = true
	return w.t.failure()
}

func (w *write) created() {
	if w.creating {
		w.creating = false
		w.t.creating.Unlock()
	}
}

// entry appends one series of the request. Its error fails the request; what is
// wrong with single samples is counted in res.
func (w *write) entry(e *series.Entry) error {
	if err := w.identify(e); err != nil {
		return err
	}
	if err := w.floats(e); err != nil {
		return err
	}
	if err := w.histograms(e); err != nil {
		return err
	}
	w.appendExemplars(e)
	if w.ref == 0 {
		e.Ref = series.Ref{}
		return nil
	}
	w.pending.add(uint64(w.ref))
	e.Ref = series.Ref{Epoch: w.t.epoch, ID: uint64(w.ref)}
	return nil
}

// identify finds the head's reference of e: from the caller's hint, else by labels.
func (w *write) identify(e *series.Entry) error {
	w.lset = labels.EmptyLabels()
	w.ref = 0
	if e.Ref.Epoch == w.t.epoch && e.Ref.ID != 0 {
		w.ref = storage.SeriesRef(e.Ref.ID)
		return w.settle()
	}
	return w.identifyByLabels(e)
}

func (w *write) identifyByLabels(e *series.Entry) error {
	if err := w.create(); err != nil {
		return err
	}
	w.lset = e.Labels.Labels(&w.builder)
	w.ref, _ = w.app.(storage.GetRef).GetRef(w.lset, w.lset.Hash())
	return w.settle()
}

// settle commits if the series at hand has samples pending.
func (w *write) settle() error {
	if w.ref != 0 && w.pending.has(uint64(w.ref)) {
		return w.flush()
	}
	return nil
}

func (w *write) floats(e *series.Entry) error {
	samples := w.b.SamplesOf(e)
	if !slices.IsSortedFunc(samples, byTime) {
		slices.SortStableFunc(samples, byTime) // the first of equal times stays first
	}
	last, kept := series.Sample{}, false // the sample before, and whether it is stored
	for _, s := range samples {
		if kept && s.T == last.T {
			// TSDB sees what is committed; what this entry just brought is compared here.
			if math.Float64bits(s.V) == math.Float64bits(last.V) {
				w.res.Samples++
			} else {
				w.refuseConflict(e, s.T, describe(last.V, nil, nil), describe(s.V, nil, nil))
			}
			continue
		}
		verdict, err := w.put(e, s.ST, s.T, s.V, nil, nil)
		if err != nil {
			return err
		}
		last, kept = s, verdict == stored
		if kept {
			w.res.Samples++
		}
	}
	return nil
}

func byTime(a, b series.Sample) int { return cmp.Compare(a.T, b.T) }

func (w *write) histograms(e *series.Entry) error {
	samples := w.b.HistogramsOf(e)
	if len(samples) > 0 && e.Samples.Len() > 0 {
		// A float and a histogram may stand at one time, too.
		if err := w.flush(); err != nil {
			return err
		}
	}
	slices.SortStableFunc(samples, func(a, b series.Histogram) int { return cmp.Compare(a.T, b.T) })
	var last *series.Histogram // the sample before, if it is stored
	for k := range samples {
		s := &samples[k]
		if last != nil && s.T == last.T {
			if (sample{h: last.H, fh: last.FH}).equal(0, s.H, s.FH) {
				w.res.Histograms++
			} else {
				w.refuseConflict(e, s.T, describe(0, last.H, last.FH), describe(0, s.H, s.FH))
			}
			continue
		}
		verdict, err := w.put(e, s.ST, s.T, 0, s.H, s.FH)
		if err != nil {
			return err
		}
		last = nil
		if verdict == stored {
			w.res.Histograms++
			last = s
		}
	}
	return nil
}

// verdict is what became of one sample.
type verdict int

const (
	stored verdict = iota
	refused
)

// put appends one sample. In-order samples go straight in; for others it first
// looks whether that moment is taken: TSDB would let a second value in silently.
func (w *write) put(e *series.Entry, st, at int64, v float64, h *histogram.Histogram, fh *histogram.FloatHistogram) (verdict, error) {
	if threshold, ok := zeroThreshold(h, fh); !ok {
		w.count(e, series.ReasonInvalidHistogram, func() string {
			return fmt.Sprintf("native histogram at %s: its zero threshold is %v", formatTime(at), threshold)
		})
		return refused, nil
	}
	err := w.try(e, st, at, v, h, fh, true)
	switch {
	case err == nil:
		return stored, nil
	case errors.Is(err, storage.ErrOutOfOrderSample):
		return w.putLate(e, st, at, v, h, fh)
	case value.IsStaleNaN(v) && errors.Is(err, storage.ErrDuplicateSampleForTimestamp):
		// The marker that ends a series of histograms is sent as a float and stored
		// as a histogram: TSDB does not know it again.
		return w.putLate(e, st, at, v, h, fh)
	}
	return w.refuse(e, at, err)
}

// zeroThreshold tells whether a histogram's zero bucket has a width that can be.
// Prometheus does not check it, and adding two histograms one of which has NaN there
// never ends.
func zeroThreshold(h *histogram.Histogram, fh *histogram.FloatHistogram) (threshold float64, ok bool) {
	switch {
	case h != nil:
		threshold = h.ZeroThreshold
	case fh != nil:
		threshold = fh.ZeroThreshold
	}
	return threshold, threshold >= 0 && !math.IsInf(threshold, 1)
}

// try calls the appender, and once more with labels where the head does not know
// the reference any more (its series was garbage-collected).
func (w *write) try(e *series.Entry, st, at int64, v float64, h *histogram.Histogram, fh *histogram.FloatHistogram, inOrder bool) error {
	opts := storage.AOptions{RejectOutOfOrder: inOrder}
	ref, err := w.app.Append(w.ref, w.lset, st, at, v, h, fh, opts)
	if err != nil && w.lset.IsEmpty() && errors.Is(err, tsdb.ErrInvalidSample) {
		if err := w.identifyByLabels(e); err != nil {
			return err
		}
		ref, err = w.app.Append(w.ref, w.lset, st, at, v, h, fh, opts)
	}
	if err == nil {
		w.ref = ref
	}
	return err
}

func (w *write) putLate(e *series.Entry, st, at int64, v float64, h *histogram.Histogram, fh *histogram.FloatHistogram) (verdict, error) {
	if newest := w.t.db.Head().MaxTime(); at < newest-w.t.owner.cfg.LateWindow.Milliseconds() {
		return w.refuseTooOld(e, at), nil
	}
	// One at a time from the look-up to the commit: two requests that both find the
	// moment free would both be acknowledged.
	if err := w.create(); err != nil {
		return refused, err
	}
	if w.ref == 0 { // the first attempt created the series
		if err := w.identifyByLabels(e); err != nil {
			return refused, err
		}
	}
	if w.lset.IsEmpty() {
		w.lset = e.Labels.Labels(&w.builder)
	}
	old, found, err := w.late.find(w.ctx, w.t.db, w.ref, w.lset, at)
	if err != nil {
		return refused, series.Errorf(series.KindOf(err), "look up %s at %s: %w", e.Labels, formatTime(at), err)
	}
	if found {
		if old.equal(v, h, fh) {
			return stored, nil
		}
		return w.refuseConflict(e, at, old.String(), describe(v, h, fh)), nil
	}
	if err := w.try(e, st, at, v, h, fh, false); err != nil {
		return w.refuse(e, at, err)
	}
	w.t.owner.metrics.late.Inc()
	return stored, nil
}

// refuse counts a sample that TSDB did not take, or returns the error if it is not
// the sample's fault.
func (w *write) refuse(e *series.Entry, at int64, err error) (verdict, error) {
	var limit *seriesLimitError
	switch {
	case errors.Is(err, storage.ErrDuplicateSampleForTimestamp):
		w.count(e, series.ReasonConflict, func() string { return err.Error() })
	case errors.Is(err, storage.ErrTooOldSample), errors.Is(err, storage.ErrOutOfBounds), errors.Is(err, storage.ErrOutOfOrderSample):
		return w.refuseTooOld(e, at), nil
	case errors.As(err, &limit):
		w.count(e, series.ReasonSeriesLimit, limit.Error)
	case isHistogramError(err):
		w.count(e, series.ReasonInvalidHistogram, func() string { return fmt.Sprintf("native histogram at %s: %v", formatTime(at), err) })
	default:
		return refused, series.Errorf(series.KindOf(err), "append %s at %s: %w", e.Labels, formatTime(at), err)
	}
	return refused, nil
}

func (w *write) refuseTooOld(e *series.Entry, at int64) verdict {
	w.count(e, series.ReasonTooOld, func() string {
		behind := time.Duration(w.t.db.Head().MaxTime()-at) * time.Millisecond
		return fmt.Sprintf("timestamp %s is %s behind the tenant's newest sample, at most %s is accepted", formatTime(at), behind, w.t.owner.cfg.LateWindow)
	})
	return refused
}

func (w *write) refuseConflict(e *series.Entry, at int64, old, sent string) verdict {
	w.count(e, series.ReasonConflict, func() string {
		return fmt.Sprintf("at %s the value %s is stored, the other value %s is refused", formatTime(at), old, sent)
	})
	return refused
}

func (w *write) count(e *series.Entry, reason series.Reason, message func() string) {
	w.res.Refused.Add(reason, 1, func() string { return e.Labels.String() + ": " + message() })
}

// appendExemplars keeps the good exemplars of e; bad ones are counted and never
// touch the samples.
func (w *write) appendExemplars(e *series.Entry) {
	sent := w.b.ExemplarsOf(e)
	if len(sent) == 0 {
		return
	}
	drop := func(reason series.Reason, n int, why string) {
		w.res.Dropped.Add(reason, n, func() string { return fmt.Sprintf("exemplar of %s: %s", e.Labels, why) })
	}
	switch {
	case w.t.owner.cfg.MaxExemplars == 0:
		drop(series.ReasonExemplarsOff, len(sent), "exemplars are switched off")
		return
	case w.ref == 0:
		drop(series.ReasonExemplarNoSeries, len(sent), "the series has no samples")
		return
	}
	w.collectExemplars(sent, drop)
	if len(w.exemplars) == 0 {
		return
	}
	if err := w.t.expectExemplars(); err != nil {
		drop(series.ReasonExemplarInvalid, len(w.exemplars), err.Error())
		return
	}
	_, err := w.app.(storage.ExemplarAppenderV2).AppendExemplars(w.ref, w.lset, w.exemplars)
	var partial *storage.AppendPartialError
	switch {
	case err == nil:
		w.res.Exemplars += len(w.exemplars)
	case errors.As(err, &partial):
		w.res.Exemplars += len(w.exemplars) - len(partial.ExemplarErrors)
		for _, bad := range partial.ExemplarErrors {
			drop(exemplarReason(bad.Err), 1, bad.Err.Error())
		}
	case errors.Is(err, storage.ErrNotFound):
		drop(series.ReasonExemplarNoSeries, len(w.exemplars), "the series has no samples")
	default:
		drop(series.ReasonExemplarInvalid, len(w.exemplars), err.Error())
	}
}

// collectExemplars turns what was sent into w.exemplars: sorted by time, each once.
func (w *write) collectExemplars(sent []series.Exemplar, drop func(series.Reason, int, string)) {
	latest := w.t.owner.now().Add(w.t.owner.cfg.FutureTolerance).UnixMilli()
	w.exemplars = w.exemplars[:0]
	for _, x := range sent {
		switch {
		case x.T == 0:
			drop(series.ReasonExemplarInvalid, 1, "it has no timestamp")
		case x.T > latest:
			drop(series.ReasonTooFarInFuture, 1, fmt.Sprintf("its timestamp %s is in the future", formatTime(x.T)))
		default:
			w.exemplars = append(w.exemplars, exemplar.Exemplar{Labels: x.Labels.Labels(&w.builder), Value: x.V, Ts: x.T, HasTs: true})
		}
	}
	slices.SortStableFunc(w.exemplars, func(a, b exemplar.Exemplar) int { return cmp.Compare(a.Ts, b.Ts) })
	w.exemplars = slices.CompactFunc(w.exemplars, func(a, b exemplar.Exemplar) bool { return a.Equals(b) })
}

func exemplarReason(err error) series.Reason {
	switch {
	case errors.Is(err, storage.ErrExemplarLabelLength):
		return series.ReasonExemplarTooLong
	case errors.Is(err, storage.ErrOutOfOrderExemplar):
		return series.ReasonExemplarOutOfOrder
	default:
		return series.ReasonExemplarInvalid
	}
}

func isHistogramError(err error) bool {
	var known histogram.Error
	return errors.As(err, &known)
}

func formatTime(ms int64) string {
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.000Z")
}
