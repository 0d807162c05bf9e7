package series

import "context"

type partialKey struct{}

// AllowPartial returns a context whose query may answer without what cannot be
// read, as long as a warning names it.
func AllowPartial(ctx context.Context) context.Context {
	return context.WithValue(ctx, partialKey{}, true)
}

// PartialAllowed tells whether AllowPartial was said of ctx. Without it, what cannot
// be read makes the query fail.
func PartialAllowed(ctx context.Context) bool {
	allowed, _ := ctx.Value(partialKey{}).(bool)
	return allowed
}
