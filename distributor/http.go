package distributor

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
	"github.com/varvedb/varve/pkg/tenant"
)

// Headers of remote write 2.0 that say what was stored.
const (
	samplesWritten    = "X-Prometheus-Remote-Write-Samples-Written"
	histogramsWritten = "X-Prometheus-Remote-Write-Histograms-Written"
	exemplarsWritten  = "X-Prometheus-Remote-Write-Exemplars-Written"
)

// errUnsupportedMedia is in the chain of errors answered 415.
var errUnsupportedMedia = errors.New("unsupported media type")

// limitedError is a refusal that knows when to try again.
type limitedError struct {
	wait time.Duration
	err  error
}

func (e *limitedError) Error() string { return e.err.Error() }
func (e *limitedError) Unwrap() error { return e.err }

// serveRemoteWrite answers one remote write request of either version.
func (d *Distributor) serveRemoteWrite(w http.ResponseWriter, r *http.Request) {
	began := d.now()
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "remote write requests are POSTed", http.StatusMethodNotAllowed)
		return
	}
	q := d.begin()
	defer d.end(q)
	var res series.Appended
	p, err := d.handleRemoteWrite(r, q, &res)
	if p == remotewrite.Protocol2 {
		setWritten(w.Header(), &res)
	}
	code := http.StatusNoContent
	switch {
	case err != nil:
		code = d.writeError(w, r, err)
	case res.Refused.Total() > 0:
		code = http.StatusBadRequest
		http.Error(w, res.Refused.Error(), code)
	default:
		w.WriteHeader(code)
	}
	d.metrics.observe(fmt.Sprintf("remote_write_%d", p), code, d.now().Sub(began))
}

// handleRemoteWrite reads one request and pushes it. It returns the version as
// soon as that is known, 1.0 before.
func (d *Distributor) handleRemoteWrite(r *http.Request, q *request, res *series.Appended) (remotewrite.Protocol, error) {
	p, err := negotiate(r.Header)
	if err != nil {
		return p, err
	}
	t, err := d.admit(r)
	if err != nil {
		return p, err
	}
	if q.body, err = d.readBody(r, q); err != nil {
		return p, err
	}
	if err := d.decompress(q); err != nil {
		return p, err
	}
	return p, d.push(r.Context(), t, q, p, q.decoded, res)
}

// admit finds the tenant and refuses those in debt, before anything is read.
func (d *Distributor) admit(r *http.Request) (*tenantState, error) {
	name, err := tenant.FromRequest(r, d.cfg.DefaultTenant)
	if err != nil {
		return nil, err
	}
	now := d.now()
	t := d.tenants.get(name, now)
	if wait := t.rate.wait(now); wait > 0 {
		return nil, &limitedError{wait, series.Errorf(series.Limited,
			"tenant %s: its rate of %g samples per second is used up, try again in %s", name, d.cfg.SampleRate, wait)}
	}
	return t, nil
}

// negotiate returns the version that the headers ask for: 1.0 where the type does
// not name a message. As in Prometheus, a missing Content-Encoding is taken for
// snappy, the only one both specifications have.
func negotiate(h http.Header) (remotewrite.Protocol, error) {
	if enc := strings.TrimSpace(strings.Join(h.Values("Content-Encoding"), ",")); enc != "" && !strings.EqualFold(enc, "snappy") {
		return remotewrite.Protocol1, series.Errorf(series.Invalid, "Content-Encoding %.80q: remote write takes snappy: %w", enc, errUnsupportedMedia)
	}
	contentType := strings.TrimSpace(h.Get("Content-Type"))
	if contentType == "" {
		return remotewrite.Protocol1, nil
	}
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || media != "application/x-protobuf" {
		return remotewrite.Protocol1, series.Errorf(series.Invalid, "Content-Type %.80q: remote write takes application/x-protobuf: %w", contentType, errUnsupportedMedia)
	}
	message, named := params["proto"]
	switch {
	case !named, strings.EqualFold(message, "prometheus.WriteRequest"):
		return remotewrite.Protocol1, nil
	case strings.EqualFold(message, "io.prometheus.write.v2.Request"):
		return remotewrite.Protocol2, nil
	}
	return remotewrite.Protocol1, series.Errorf(series.Invalid,
		"Content-Type %.80q: the messages are prometheus.WriteRequest and io.prometheus.write.v2.Request: %w", contentType, errUnsupportedMedia)
}

// readBody reads the body as it is into q's buffer, at most MaxBodyBytes of it.
func (d *Distributor) readBody(r *http.Request, q *request) ([]byte, error) {
	if r.ContentLength > int64(d.cfg.MaxBodyBytes) {
		return q.body, tooLarge(r.ContentLength, d.cfg.MaxBodyBytes)
	}
	hint := max(int(r.ContentLength), 0)
	return readAll(r.Body, q.body, hint, d.cfg.MaxBodyBytes, q.memory.grow)
}

func tooLarge(size int64, most int) error {
	return series.Errorf(series.Invalid, "body of %d bytes, at most %d are allowed: %w", size, most, remotewrite.ErrTooLarge)
}

// A body's buffer begins with these sizes, in bytes: a Content-Length is a claim,
// and holds no more memory than this until the bytes come.
const (
	minRead = 16 << 10
	maxRead = 128 << 10
)

// readAll reads r to its end into buf's memory, asking grow before it holds more
// than it did. More than most bytes are an error. hint is the expected size.
func readAll(r io.Reader, buf []byte, hint, most int, grow func(int) error) ([]byte, error) {
	buf = buf[:0]
	granted := 0
	want := min(hint+1, maxRead) // one more, to see the end without growing
	for {
		if want = min(max(want, minRead), most+1); want > granted {
			if err := grow(want - granted); err != nil {
				return buf, err
			}
			granted = want
		}
		if cap(buf) < granted {
			bigger := make([]byte, len(buf), granted)
			copy(bigger, buf)
			buf = bigger
		}
		n, err := r.Read(buf[len(buf):granted])
		buf = buf[:len(buf)+n]
		switch {
		case len(buf) > most:
			return buf, series.Errorf(series.Invalid, "body of more than %d bytes: %w", most, remotewrite.ErrTooLarge)
		case err == io.EOF:
			return buf, nil
		case err != nil:
			return buf, bodyError(len(buf), err)
		}
		if len(buf) == granted {
			want = 2 * granted
		}
	}
}

// bodyError is about a body that could not be read; what reads it may have classified
// it better. One that came too slowly is the network's matter, and worth sending again.
func bodyError(n int, err error) error {
	var classified *series.Error
	var timeout net.Error
	switch {
	case errors.As(err, &classified):
		return err
	case errors.As(err, &timeout) && timeout.Timeout():
		return series.Errorf(series.Unavailable, "read body: after %d bytes: %w", n, err)
	}
	return series.Errorf(series.Invalid, "read body: after %d bytes: %w", n, err)
}

// decompress decodes q's body. The memory for it is asked for by the size that
// the body declares, before it is allocated.
func (d *Distributor) decompress(q *request) error {
	n, err := remotewrite.DecodedLen(q.body, d.cfg.MaxDecodedBytes)
	if err != nil {
		return err
	}
	if err := q.memory.grow(n); err != nil {
		return err
	}
	decoded, err := remotewrite.Decompress(q.decoded, q.body, d.cfg.MaxDecodedBytes)
	if err != nil {
		return err
	}
	q.decoded = decoded
	return nil
}

func setWritten(h http.Header, res *series.Appended) {
	h.Set(samplesWritten, strconv.Itoa(res.Samples))
	h.Set(histogramsWritten, strconv.Itoa(res.Histograms))
	h.Set(exemplarsWritten, strconv.Itoa(res.Exemplars))
}

// writeError answers err as text and returns the status.
func (d *Distributor) writeError(w http.ResponseWriter, r *http.Request, err error) int {
	code := d.statusOf(w.Header(), err)
	d.logFault(r, code, err)
	http.Error(w, err.Error(), code)
	return code
}

// statusOf returns the HTTP status for err and sets Retry-After where it has one.
func (d *Distributor) statusOf(h http.Header, err error) int {
	switch {
	case errors.Is(err, errUnsupportedMedia):
		return http.StatusUnsupportedMediaType
	case errors.Is(err, remotewrite.ErrTooLarge):
		return http.StatusRequestEntityTooLarge
	}
	code := series.KindOf(err).HTTPStatus()
	if code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable {
		wait := d.cfg.RetryAfter
		var limited *limitedError
		if errors.As(err, &limited) {
			wait = limited.wait
		}
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(wait.Seconds()))))
	}
	return code
}

// logFault logs what is our own fault; the sender logs the rest.
func (d *Distributor) logFault(r *http.Request, code int, err error) {
	if code == http.StatusInternalServerError {
		d.logger.Error("write failed", slog.String("path", r.URL.Path), slog.String("remote", r.RemoteAddr), slog.Any("err", err))
	}
}
