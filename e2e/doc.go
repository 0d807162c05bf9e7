// Package e2e tests Varve as its users meet it: real binaries, HTTP on loopback, real
// senders, hard stops. It holds no code but tests.
package e2e
