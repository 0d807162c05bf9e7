# Bare `make` prints the targets.
SHELL := /bin/bash
GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION)
FUZZTIME ?= 30s

.PHONY: help
help: ## print the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: ## run Varve on 127.0.0.1:9433 with its data in ./data
	$(GO) run ./cmd/varve

.PHONY: demo
demo: build ## run Varve with a simulated GPU fleet beside it (Ctrl-C ends both)
	./scripts/demo.sh

.PHONY: build
build: ## build bin/varve and bin/fleetgen
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

.PHONY: tools
tools: ## fetch what some tests compare with: two Prometheus, into .tools
	./scripts/tools.sh

.PHONY: test
test: ## run all tests
	$(GO) vet ./...
	$(GO) test -timeout 20m ./...

.PHONY: race
race: ## run all tests with the race detector
	$(GO) test -race -short -timeout 40m ./...

.PHONY: soak
soak: ## kill -9 under load a hundred times, and real Prometheus for ten minutes
	VARVE_SOAK=1 $(GO) test -count=1 -timeout 60m -v -run 'TestKill|TestEndToEnd' ./e2e

.PHONY: fuzz
fuzz: ## fuzz every decoder that meets the network or a damaged disk, FUZZTIME each
	@set -e; grep -rl --include='*_test.go' '^func Fuzz' . | while read -r f; do \
	  for t in $$(grep -oE '^func Fuzz[A-Za-z0-9_]*' $$f | cut -d' ' -f2); do \
	    echo "== $$t in $$(dirname $$f)"; $(GO) test -run '^$$' -fuzz "^$$t$$" -fuzztime $(FUZZTIME) ./$$(dirname $$f); \
	  done; done

.PHONY: bench
bench: ## run the Go benchmarks beside the hot functions
	$(GO) test -run '^$$' -bench . -benchmem ./pkg/... ./distributor/... ./ingester/... ./querier/...

.PHONY: lint
lint: ## gofmt, vet, and the rules of who imports whom
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt-clean:"; echo "$$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) mod tidy -diff
	$(GO) test -run 'TestImports' ./cmd/varve

.PHONY: proto
proto: ## generate code from .proto files (there are none yet: the cluster brings them)
	@if ls proto/*.proto >/dev/null 2>&1; then echo "protoc rules are missing"; exit 1; else echo "nothing to generate"; fi
