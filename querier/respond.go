package querier

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/prometheus/util/annotations"

	"github.com/varvedb/varve/pkg/series"
)

// statusClientClosed is what Prometheus answers a client that is gone.
const statusClientClosed = 499

// document is Prometheus' envelope of every answer.
type document struct {
	Status    string   `json:"status"`
	Data      any      `json:"data,omitempty"`
	ErrorType string   `json:"errorType,omitempty"`
	Error     string   `json:"error,omitempty"`
	Warnings  []string `json:"warnings,omitempty"`
}

// respond answers with data.
func (q *Querier) respond(w http.ResponseWriter, data any, warnings annotations.Annotations) {
	texts, _ := warnings.AsStrings("", 10, 10)
	q.write(w, http.StatusOK, document{Status: "success", Data: data, Warnings: texts})
}

// refuse answers with an error whose kind gives status and errorType.
func (q *Querier) refuse(w http.ResponseWriter, r *http.Request, err error) {
	kind := series.KindOf(err)
	code, errorType := kind.HTTPStatus(), "internal"
	switch {
	case r.Context().Err() != nil && errors.Is(err, context.Canceled):
		code, errorType = statusClientClosed, "canceled"
	case errors.Is(err, context.DeadlineExceeded):
		errorType = "timeout"
	case kind == series.Invalid:
		errorType = "bad_data"
	case kind == series.Limited:
		errorType = "too_many_requests"
	case kind == series.Unavailable:
		errorType = "unavailable"
		w.Header().Set("Retry-After", "5")
	}
	q.refuseAs(w, code, errorType, err.Error())
}

func (q *Querier) refuseAs(w http.ResponseWriter, code int, errorType, message string) {
	q.write(w, code, document{Status: "error", ErrorType: errorType, Error: message})
}

func (q *Querier) write(w http.ResponseWriter, code int, d document) {
	body, err := json.Marshal(d)
	if err != nil {
		q.log.Error("encode answer", "err", err)
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if _, err := w.Write(body); err != nil {
		q.log.Debug("write answer", "err", err)
	}
}

// patientWriter gives a client that reads much time, and cuts the connection of one
// that has not read for timeout, or not all by the end: nothing else ends a write to it.
type patientWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
	end     time.Time // of all writing, zero if there is none
	code    int
	failure *failure // of a remote read, whose handler knows no kinds
}

// writePiece is what a client must read in one timeout.
const writePiece = 64 << 10

func newPatientWriter(w http.ResponseWriter, timeout time.Duration) *patientWriter {
	return &patientWriter{ResponseWriter: w, control: http.NewResponseController(w), timeout: timeout}
}

func (w *patientWriter) WriteHeader(code int) {
	if code == http.StatusInternalServerError && w.failure != nil {
		if err := w.failure.get(); err != nil {
			code = series.KindOf(err).HTTPStatus()
		}
	}
	if w.code == 0 {
		w.code = code
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *patientWriter) Write(p []byte) (int, error) {
	if w.code == 0 {
		w.code = http.StatusOK
	}
	written := 0
	for {
		piece := p[written:min(written+writePiece, len(p))]
		if w.extend(); !w.end.IsZero() && !time.Now().Before(w.end) {
			return written, fmt.Errorf("write answer: its time is over: %w", os.ErrDeadlineExceeded)
		}
		n, err := w.ResponseWriter.Write(piece)
		written += n
		if err != nil || written == len(p) {
			return written, err
		}
	}
}

// Flush implements http.Flusher, which streamed remote reads need.
func (w *patientWriter) Flush() {
	w.extend()
	// An error shows in the next write.
	_ = w.control.Flush()
}

// extend starts the timeout anew, up to the end. Writers without deadlines, as in tests,
// go without.
func (w *patientWriter) extend() {
	deadline := time.Now().Add(w.timeout)
	if !w.end.IsZero() && w.end.Before(deadline) {
		deadline = w.end
	}
	_ = w.control.SetWriteDeadline(deadline)
}

// Unwrap lets an http.ResponseController see the writer below.
func (w *patientWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// failure holds the first store error of a remote read, so that its status code can
// tell what passes from what does not.
type failure struct {
	mu  sync.Mutex
	err error
}

func (f *failure) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

type failureKey struct{}

func noteFailure(ctx context.Context, err error) {
	f, ok := ctx.Value(failureKey{}).(*failure)
	if !ok {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

// canWarn tells whether the answer to ctx's request has room for warnings.
func canWarn(ctx context.Context) bool { return ctx.Value(failureKey{}) == nil }
