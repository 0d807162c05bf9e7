// Package deploy holds no code: its test checks the files for deploying Varve.
package deploy
