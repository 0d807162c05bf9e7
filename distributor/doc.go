// Package distributor is the write path's door: it takes remote write 1.0 and 2.0
// and OTLP metrics over HTTP, checks and limits them, and hands batches of label
// bytes and samples to an Appender.
//
// Where the specifications leave room or disagree with practice:
//
//   - A body is valid as a whole or not at all: broken protobuf, a symbol reference
//     out of range or a message of the other version is 400 and nothing is stored.
//     Everything else is refused one by one, 400, and its neighbours are stored.
//   - A missing Content-Type means 1.0, a missing Content-Encoding means snappy, as
//     Prometheus has it. Any other type or encoding is 415.
//   - An empty request, one of nothing but metadata, and a series without samples
//     are no faults: 204. A body of no bytes at all is not snappy: 400.
//   - Unsorted labels are sorted, labels with an empty value are left out. A label
//     name that stands twice with values is refused.
//   - A 2.0 series with floats and histograms is refused, as its specification says
//     it must not be; in 1.0, which says nothing, both are stored.
//   - Exemplars, metadata and start timestamps that are bad are dropped and counted;
//     they never fail the samples beside them.
//   - Resending must be able to help where the answer is 429 or 5xx, and only there.
package distributor
