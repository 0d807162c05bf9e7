// Package querier is the read path's door: Prometheus' HTTP API over the stores that
// hold a tenant's samples, which answer as one.
package querier
