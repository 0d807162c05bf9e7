// Package distributor is the write path's door: it takes remote write 1.0 and 2.0
// and OTLP metrics over HTTP, checks and limits them, and hands batches of label
// bytes and samples to an Appender.
package distributor
