// Package tenant knows what a tenant name is, where a request carries it, and how
// it travels in a context.
package tenant

import (
	"context"
	"net/http"

	"github.com/varvedb/varve/pkg/series"
)

// Header is the de-facto standard header that names the tenant of a request.
const Header = "X-Scope-OrgID"

// Default is the tenant of requests without the header.
const Default = "anonymous"

// maxName bounds a tenant name, which becomes a folder and an object key.
const maxName = 128

// Validate checks a tenant name: 1 to 128 of letters, digits and !-_.*'(), not
// "." or "..", and not a name that Varve itself uses beside tenants. These are the
// characters that are safe in S3 keys and in file names; names are compared as
// they are, so a file system must be case-sensitive.
func Validate(name string) error {
	switch {
	case name == "":
		return series.Errorf(series.Invalid, "tenant name in %s is empty", Header)
	case len(name) > maxName:
		return series.Errorf(series.Invalid, "tenant name in %s has %d bytes, at most %d are allowed", Header, len(name), maxName)
	case name == "." || name == "..":
		return series.Errorf(series.Invalid, "tenant name %q in %s is reserved", name, Header)
	case name == "__varve__":
		return series.Errorf(series.Invalid, "tenant name %q in %s is reserved for Varve itself", name, Header)
	}
	for i := 0; i < len(name); i++ {
		if !allowed(name[i]) {
			return series.Errorf(series.Invalid, "tenant name %.40q in %s has %q at byte %d; letters, digits and !-_.*'() are allowed", name, Header, name[i:i+1], i)
		}
	}
	return nil
}

func allowed(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	case c == '!', c == '-', c == '_', c == '.', c == '*', c == '\'', c == '(', c == ')':
		return true
	}
	return false
}

// FromRequest returns the checked tenant of r: its header, or fallback where the
// header is missing. An empty fallback means that the header is required. Two
// header lines are refused: a proxy that adds one must not be outvoted.
func FromRequest(r *http.Request, fallback string) (string, error) {
	values := r.Header.Values(Header)
	switch {
	case len(values) == 0 && fallback == "":
		return "", series.Errorf(series.Invalid, "header %s is required: it names the tenant", Header)
	case len(values) == 0:
		return fallback, nil
	case len(values) > 1:
		return "", series.Errorf(series.Invalid, "header %s stands %d times in the request, once is allowed", Header, len(values))
	}
	return values[0], Validate(values[0])
}

type key struct{}

// NewContext returns a context that carries the tenant.
func NewContext(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, key{}, name)
}

// FromContext returns the tenant that NewContext put into ctx. A context without
// one is a bug of ours, answered as an error: a wrong tenant would be a leak.
func FromContext(ctx context.Context) (string, error) {
	if name, ok := ctx.Value(key{}).(string); ok && name != "" {
		return name, nil
	}
	return "", series.Errorf(series.Internal, "BUG: context carries no tenant")
}
