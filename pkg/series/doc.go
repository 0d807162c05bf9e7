// Package series is Varve's vocabulary: labels as bytes, the batch that a write
// hands from the distributor to an ingester, what became of it, and the kinds of
// error that every part of Varve tells apart.
//
// It is a leaf: it imports Prometheus' model packages and nothing of Varve.
package series
