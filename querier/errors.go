package querier

import (
	"context"
	"errors"
	"net/http"

	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/tsdb"
	v1 "github.com/prometheus/prometheus/web/api/v1"

	"github.com/varvedb/varve/pkg/series"
)

// storeError is an error of a store on its way through Prometheus' engine and API,
// which tell errors apart by their own types. It stands for those types, so that
// its kind decides the JSON errorType: "unavailable", "timeout" or "internal".
type storeError struct{ err error }

func asStoreError(err error) error {
	var done *storeError
	if err == nil || errors.As(err, &done) || errors.Is(err, context.Canceled) {
		return err
	}
	return &storeError{err}
}

func (e *storeError) Error() string { return e.err.Error() }

func (e *storeError) Unwrap() error { return e.err }

// Is lets the API see what is unavailable as it sees a TSDB that is not ready.
func (e *storeError) Is(target error) bool {
	return target == tsdb.ErrNotReady && !errors.Is(e.err, context.DeadlineExceeded) && series.KindOf(e.err) == series.Unavailable
}

// As lets the API see timeouts as the engine's own, and all else as storage errors.
func (e *storeError) As(target any) bool {
	switch target := target.(type) {
	case *promql.ErrQueryTimeout:
		if errors.Is(e.err, context.DeadlineExceeded) {
			*target = "reading from the stores"
			return true
		}
	case *promql.ErrStorage:
		*target = promql.ErrStorage{Err: e.err}
		return true
	}
	return false
}

// overrideStatus chooses the status code of an API error: kinds have one mapping in
// all of Varve. The number's type has no exported name, which a type parameter can do
// without.
func overrideStatus[N comparable](number N, err error) (code int, override bool) {
	var store *storeError
	var kinded *series.Error
	switch {
	case errors.As(err, &store):
		return series.KindOf(store.err).HTTPStatus(), true
	case errors.As(err, &kinded):
		return kinded.Kind.HTTPStatus(), true
	case any(number) == any(v1.ErrorUnavailable):
		return http.StatusServiceUnavailable, true
	default:
		return 0, false
	}
}
