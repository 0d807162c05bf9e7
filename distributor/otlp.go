package distributor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net/http"
	"strings"

	"go.opentelemetry.io/collector/pdata/pmetric/pmetricotlp"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/varvedb/varve/pkg/series"
)

const (
	typeProtobuf = "application/x-protobuf"
	typeJSON     = "application/json"
)

// serveOTLP answers one OTLP/HTTP export of metrics.
func (d *Distributor) serveOTLP(w http.ResponseWriter, r *http.Request) {
	began := d.now()
	reply := otlpReply{w: w, media: otlpMedia(r.Header)}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		reply.fail(http.StatusMethodNotAllowed, errors.New("OTLP exports are POSTed"))
		return
	}
	q := d.begin()
	defer d.end(q)
	var res series.Appended
	points, err := d.handleOTLP(r, q, reply.media, &res)
	answered := http.StatusOK
	if err != nil {
		answered = d.statusOf(w.Header(), err)
		d.logFault(r, answered, err)
		reply.fail(answered, err)
	} else {
		reply.done(&res, points)
	}
	d.metrics.observe("otlp", answered, d.now().Sub(began))
}

// handleOTLP reads one export, translates and commits it. It returns the number of
// data points that came.
func (d *Distributor) handleOTLP(r *http.Request, q *request, media string, res *series.Appended) (points int, err error) {
	if media == "" {
		return 0, series.Errorf(series.Invalid, "Content-Type %.80q: OTLP comes as %s or %s: %w", r.Header.Get("Content-Type"), typeProtobuf, typeJSON, errUnsupportedMedia)
	}
	encoding, err := otlpEncoding(r.Header)
	if err != nil {
		return 0, err
	}
	t, err := d.admit(r)
	if err != nil {
		return 0, err
	}
	if q.body, err = d.readBody(r, q); err != nil {
		return 0, err
	}
	body, err := d.decode(q, encoding)
	if err != nil {
		return 0, err
	}
	export, err := d.parseOTLP(q, media, body)
	if err != nil {
		return 0, err
	}
	md := export.Metrics()
	points = md.DataPointCount()
	if err := d.translate(r.Context(), t, q, md); err != nil {
		return points, err
	}
	return points, d.commit(r.Context(), t, q, res)
}

// otlpMedia returns the media type of the body, empty where OTLP has no such.
func otlpMedia(h http.Header) string {
	media, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err == nil && (media == typeProtobuf || media == typeJSON) {
		return media
	}
	return ""
}

func otlpEncoding(h http.Header) (string, error) {
	encoding := strings.ToLower(strings.TrimSpace(strings.Join(h.Values("Content-Encoding"), ",")))
	switch encoding {
	case "", "identity":
		return "", nil
	case "gzip", "zstd":
		return encoding, nil
	}
	return "", series.Errorf(series.Invalid, "Content-Encoding %.80q: OTLP comes as gzip, zstd or plain: %w", encoding, errUnsupportedMedia)
}

// otlpReply answers in the encoding of the request, in JSON where that is unknown.
type otlpReply struct {
	w     http.ResponseWriter
	media string
}

// done answers 200. What was refused stands in the partial success: the data
// points that were refused before translation are counted as such, and each
// refused sample as one data point after it, though a classic histogram becomes
// several.
func (o otlpReply) done(res *series.Appended, points int) {
	answer := pmetricotlp.NewExportResponse()
	if n := res.Refused.Total(); n > 0 {
		answer.PartialSuccess().SetRejectedDataPoints(int64(min(n, points)))
		answer.PartialSuccess().SetErrorMessage(res.Refused.Error())
	}
	marshal := answer.MarshalProto
	if o.media == typeJSON {
		marshal = answer.MarshalJSON
	}
	o.write(http.StatusOK, marshal)
}

// fail answers with a google.rpc.Status.
func (o otlpReply) fail(httpCode int, err error) {
	c := code.Code_INVALID_ARGUMENT
	switch httpCode {
	case http.StatusTooManyRequests:
		c = code.Code_RESOURCE_EXHAUSTED
	case http.StatusServiceUnavailable:
		c = code.Code_UNAVAILABLE
	case http.StatusInternalServerError:
		c = code.Code_INTERNAL
	case http.StatusMethodNotAllowed:
		c = code.Code_UNIMPLEMENTED
	}
	answer := &status.Status{Code: int32(c), Message: strings.ToValidUTF8(err.Error(), "\uFFFD")}
	o.write(httpCode, func() ([]byte, error) {
		if o.media == typeProtobuf {
			return proto.Marshal(answer)
		}
		return protojson.Marshal(answer)
	})
}

func (o otlpReply) write(httpCode int, marshal func() ([]byte, error)) {
	media := o.media
	if media == "" {
		media = typeJSON
	}
	body, err := marshal()
	if err != nil { // strings that are valid UTF-8 always marshal
		http.Error(o.w, fmt.Sprintf("BUG: marshal answer: %v", err), http.StatusInternalServerError)
		return
	}
	o.w.Header().Set("Content-Type", media)
	o.w.WriteHeader(httpCode)
	_, _ = o.w.Write(body) // nobody is left to tell
}

// warnOTLP counts and logs what the translation found odd and kept.
func (d *Distributor) warnOTLP(ctx context.Context, t *tenantState, category string, n int, text string) {
	d.metrics.otlpWarnings.WithLabelValues(category).Add(float64(n))
	d.logger.DebugContext(ctx, "odd OTLP metrics", slog.String("tenant", t.name), slog.String("category", category), slog.String("warning", text))
}
