package series

import (
	"context"
	"errors"
	"fmt"
	"net/http"
)

// Kind says whose fault an error is, and so what the caller may do about it. It
// is decided once, where the error is made, and survives wrapping and the wire.
type Kind uint8

const (
	// Internal is a fault of Varve's own. The zero value: an error that nobody
	// classified is ours.
	Internal Kind = iota
	// Invalid is a fault of the request: an identical resend fails again.
	Invalid
	// Limited is a passing limit (a rate): an identical resend may succeed later.
	Limited
	// Unavailable is a passing fault of ours (starting, overloaded, disk full,
	// too few owners): an identical resend may succeed, also elsewhere.
	Unavailable
	// Corrupt is stored data that cannot be read back.
	Corrupt
)

// String returns the kind's name as it stands in logs and on the wire.
func (k Kind) String() string {
	switch k {
	case Invalid:
		return "invalid"
	case Limited:
		return "limited"
	case Unavailable:
		return "unavailable"
	case Corrupt:
		return "corrupt"
	default:
		return "internal"
	}
}

// HTTPStatus is the one mapping from kinds to HTTP: 4xx only for what a resend
// cannot mend, except 429, which says "later" (a Prometheus sender retries it
// only with retry_on_http_429, so overload is Unavailable, not Limited).
func (k Kind) HTTPStatus() int {
	switch k {
	case Invalid:
		return http.StatusBadRequest
	case Limited:
		return http.StatusTooManyRequests
	case Unavailable:
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

// Error is an error with a kind.
type Error struct {
	Kind Kind
	Err  error
}

// Error returns the wrapped error's text: the kind is for programs.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an error of kind k. It formats like fmt.Errorf, %w included.
func Errorf(k Kind, format string, args ...any) error {
	return &Error{Kind: k, Err: fmt.Errorf(format, args...)}
}

// KindOf returns the kind of the outermost classified error in err's chain. A
// context that ended without anybody saying why is Unavailable.
func KindOf(err error) Kind {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Kind
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return Unavailable
	default:
		return Internal
	}
}
