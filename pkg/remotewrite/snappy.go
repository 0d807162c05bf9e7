package remotewrite

import (
	"bytes"
	"errors"

	"github.com/golang/snappy"

	"github.com/varvedb/varve/pkg/series"
)

// ErrTooLarge is in the chain of every error about a request that is larger than
// allowed: HTTP answers it 413 where other invalid requests are answered 400.
var ErrTooLarge = errors.New("request too large")

// framedMagic starts the snappy framing format, which remote write does not use.
var framedMagic = []byte("\xff\x06\x00\x00sNaPpY")

// DecodedLen returns how many bytes body, snappy's block format, declares to hold.
// It reads the header only. An error is Invalid; it is ErrTooLarge too where the
// declared size is above maxDecoded.
func DecodedLen(body []byte, maxDecoded int) (int, error) {
	if len(body) == 0 {
		return 0, series.Errorf(series.Invalid, "decompress body: it is empty, snappy needs a byte at least")
	}
	if bytes.HasPrefix(body, framedMagic) {
		return 0, series.Errorf(series.Invalid, "decompress body of %d bytes: it is in snappy's framing format, remote write uses the block format", len(body))
	}
	n, err := snappy.DecodedLen(body)
	switch {
	case err != nil:
		return 0, series.Errorf(series.Invalid, "decompress body of %d bytes: the snappy header is broken: %w", len(body), err)
	case n > maxExpansion(len(body)):
		return 0, series.Errorf(series.Invalid, "decompress body of %d bytes: it declares %d bytes, which so few cannot hold", len(body), n)
	case n > maxDecoded:
		return 0, series.Errorf(series.Invalid, "decompress body of %d bytes: it declares %d bytes, at most %d are allowed: %w", len(body), n, maxDecoded, ErrTooLarge)
	}
	return n, nil
}

// maxExpansion is the most that n bytes of snappy can decode to: its densest
// element is a copy of 64 bytes written in 3.
func maxExpansion(n int) int { return n/3*64 + 64 }

// Decompress decodes body, snappy's block format, into dst's memory where that is
// large enough, and returns the decoded bytes. Nothing is allocated for a body
// that declares more than maxDecoded bytes. Errors are those of DecodedLen, and
// Invalid where the data does not hold what the header declares.
func Decompress(dst, body []byte, maxDecoded int) ([]byte, error) {
	n, err := DecodedLen(body, maxDecoded)
	if err != nil {
		return nil, err
	}
	out, err := snappy.Decode(dst[:cap(dst)], body)
	if err != nil {
		return nil, series.Errorf(series.Invalid, "decompress body of %d bytes to %d: the data is broken: %w", len(body), n, err)
	}
	return out, nil
}
