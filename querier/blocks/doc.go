// Package blocks answers queries from the TSDB blocks in the bucket: it knows which
// there are, keeps those in use readable, and says so when one cannot be read.
package blocks
