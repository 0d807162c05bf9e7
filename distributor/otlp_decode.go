package distributor

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
	"go.opentelemetry.io/collector/pdata/pmetric/pmetricotlp"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/varvedb/varve/pkg/remotewrite"
	"github.com/varvedb/varve/pkg/series"
)

// otlpDecoder keeps decompressors between requests.
type otlpDecoder struct {
	gzip sync.Pool // of *gzip.Reader
	zstd sync.Pool // of *zstd.Decoder
}

// decode returns q's body decompressed, at most MaxDecodedBytes of it.
func (d *Distributor) decode(q *request, encoding string) (_ []byte, err error) {
	switch encoding {
	case "":
		if len(q.body) > d.cfg.MaxDecodedBytes {
			return nil, tooLarge(int64(len(q.body)), d.cfg.MaxDecodedBytes)
		}
		return q.body, nil
	case "gzip":
		q.decoded, err = d.gunzip(q)
	default:
		q.decoded, err = d.unzstd(q)
	}
	if err != nil {
		return nil, fmt.Errorf("decompress %s body of %d bytes: %w", encoding, len(q.body), err)
	}
	return q.decoded, nil
}

func (d *Distributor) gunzip(q *request) ([]byte, error) {
	z, _ := d.otlp.gzip.Get().(*gzip.Reader)
	if z == nil {
		z = new(gzip.Reader)
	}
	defer d.otlp.gzip.Put(z)
	if err := z.Reset(bytes.NewReader(q.body)); err != nil {
		return q.decoded, series.Errorf(series.Invalid, "the header is broken: %w", err)
	}
	return readAll(z, q.decoded, 8*len(q.body), d.cfg.MaxDecodedBytes, q.memory.grow)
}

// maxZstdWindow bounds what a zstd frame may ask its decoder to remember.
const maxZstdWindow = 8 << 20

func (d *Distributor) unzstd(q *request) ([]byte, error) {
	z, _ := d.otlp.zstd.Get().(*zstd.Decoder)
	if z == nil {
		var err error
		// One goroutine less than none: with a concurrency of 1 all work is done
		// where Read is called.
		z, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, series.Errorf(series.Internal, "make decoder: %w", err)
		}
	}
	defer func() {
		_ = z.Reset(nil) // lets go of the body
		d.otlp.zstd.Put(z)
	}()
	if err := q.memory.grow(maxZstdWindow); err != nil {
		return q.decoded, err
	}
	if err := z.Reset(bytes.NewReader(q.body)); err != nil {
		return q.decoded, series.Errorf(series.Invalid, "the header is broken: %w", err)
	}
	return readAll(z, q.decoded, 8*len(q.body), d.cfg.MaxDecodedBytes, q.memory.grow)
}

// parseOTLP decodes an export request, after a walk over its bytes that bounds
// what decoding takes: the decoder itself follows any nesting and makes a struct
// of two hundred bytes of every two bytes.
func (d *Distributor) parseOTLP(q *request, media string, body []byte) (pmetricotlp.ExportRequest, error) {
	export := pmetricotlp.NewExportRequest()
	weigh, unmarshal := weighProto, export.UnmarshalProto
	if media == typeJSON {
		weigh, unmarshal = weighJSON, export.UnmarshalJSON
	}
	cost, err := weigh(body)
	if err != nil {
		return export, series.Errorf(series.Invalid, "decode OTLP export of %d bytes: %w", len(body), err)
	}
	if cost > d.cfg.MaxRequestBytes {
		return export, series.Errorf(series.Invalid, "decode OTLP export of %d bytes: it takes about %d bytes decoded, at most %d are allowed: %w",
			len(body), cost, d.cfg.MaxRequestBytes, remotewrite.ErrTooLarge)
	}
	if err := q.memory.grow(cost); err != nil {
		return export, err
	}
	if err := unmarshal(body); err != nil {
		return export, series.Errorf(series.Invalid, "decode OTLP export of %d bytes: %w", len(body), err)
	}
	return export, nil
}

// What decoding takes, roughly, in bytes.
const (
	messageCost = 256
	stringCost  = 24
)

// maxOTLPDepth bounds nesting: attributes may hold lists of maps of lists.
const maxOTLPDepth = 64

// otlpKind is a message type of OTLP metrics, as far as nesting goes.
type otlpKind uint8

const (
	otlpLeaf otlpKind = iota // a message without messages in it, or a string
	otlpExport
	otlpResourceMetrics
	otlpResource
	otlpScopeMetrics
	otlpScope
	otlpMetric
	otlpPoints // Gauge, Sum, Histogram and so on: a list of data points in field 1
	otlpPoint
	otlpExemplar
	otlpKeyValue
	otlpAnyValue
	otlpValues // ArrayValue
	otlpMap    // KeyValueList
	otlpString
)

// within returns the type of the length-delimited field n of a message of kind k.
func (k otlpKind) within(n protowire.Number) otlpKind {
	switch k {
	case otlpExport:
		if n == 1 {
			return otlpResourceMetrics
		}
	case otlpResourceMetrics:
		switch n {
		case 1:
			return otlpResource
		case 2, 1000:
			return otlpScopeMetrics
		}
	case otlpResource:
		switch n {
		case 1:
			return otlpKeyValue
		case 3:
			return otlpLeaf
		}
	case otlpScopeMetrics:
		switch n {
		case 1:
			return otlpScope
		case 2:
			return otlpMetric
		}
	case otlpScope:
		if n == 3 {
			return otlpKeyValue
		}
	case otlpMetric:
		switch n {
		case 5, 7, 9, 10, 11:
			return otlpPoints
		case 12:
			return otlpKeyValue
		}
	case otlpPoints:
		if n == 1 {
			return otlpPoint
		}
	case otlpPoint:
		return otlpWithinPoint(n)
	case otlpExemplar:
		if n == 7 {
			return otlpKeyValue
		}
	case otlpKeyValue:
		if n == 2 {
			return otlpAnyValue
		}
	case otlpAnyValue:
		switch n {
		case 5:
			return otlpValues
		case 6:
			return otlpMap
		}
	case otlpValues:
		if n == 1 {
			return otlpAnyValue
		}
	case otlpMap:
		if n == 1 {
			return otlpKeyValue
		}
	}
	return otlpString
}

// otlpWithinPoint does not tell the four kinds of data points apart. Where a field
// is a message in one and bytes in another, taking it for a message that it is not
// only ends the walk into it.
func otlpWithinPoint(n protowire.Number) otlpKind {
	switch n {
	case 1, 7, 9:
		return otlpKeyValue
	case 5, 8, 11:
		return otlpExemplar
	case 6:
		return otlpLeaf
	}
	return otlpString
}

// weighProto returns roughly what decoding body takes, in bytes.
func weighProto(body []byte) (int, error) {
	w := otlpScale{total: len(body)}
	if !w.walk(otlpExport, body, 0) {
		return 0, fmt.Errorf("messages are nested more than %d deep", maxOTLPDepth)
	}
	return w.total, nil
}

type otlpScale struct{ total int }

// walk adds up the fields of msg. Broken protobuf ends the walk: the decoder will
// end there too. It returns false where msg is nested too deep.
func (w *otlpScale) walk(k otlpKind, msg []byte, depth int) bool {
	if depth > maxOTLPDepth {
		return false
	}
	for len(msg) > 0 {
		n, typ, size := protowire.ConsumeTag(msg)
		if size < 0 {
			return true
		}
		msg = msg[size:]
		if typ != protowire.BytesType {
			if size = protowire.ConsumeFieldValue(n, typ, msg); size < 0 {
				return true
			}
			msg = msg[size:]
			w.total += 8
			continue
		}
		content, size := protowire.ConsumeBytes(msg)
		if size < 0 {
			return true
		}
		msg = msg[size:]
		switch in := k.within(n); {
		case in == otlpString || k == otlpLeaf:
			// Packed bucket counts: a byte becomes eight.
			w.total += stringCost + 8*len(content)
		default:
			w.total += messageCost
			if !w.walk(in, content, depth+1) {
				return false
			}
		}
	}
	return true
}

// weighJSON is weighProto for JSON: objects are messages, and so may be whatever
// stands between commas.
func weighJSON(body []byte) (int, error) {
	total, depth, most := len(body), 0, 0
	quoted := false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case quoted:
			if c == '\\' {
				i++
			} else if c == '"' {
				quoted = false
			}
		case c == '"':
			quoted = true
			total += stringCost
		case c == '{' || c == '[':
			if depth++; depth > most {
				most = depth
			}
			total += messageCost
		case c == '}' || c == ']':
			depth--
		case c == ',':
			total += stringCost
		}
	}
	// A list of messages is two levels of JSON, and attributes are at the tenth.
	if most > 2*maxOTLPDepth {
		return 0, fmt.Errorf("it is nested %d deep, at most %d is allowed", most, 2*maxOTLPDepth)
	}
	return total, nil
}
