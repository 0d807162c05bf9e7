// Package remotewrite speaks Prometheus' remote write protocols 1.0 and 2.0: it
// scans request bodies in bounded memory and linear time, without building label
// objects, and encodes bodies for tools and tests.
package remotewrite
