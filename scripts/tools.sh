#!/usr/bin/env bash
# Fetches what some tests compare with into .tools, unless it is there already:
#   .tools/prometheus-2  Debian's Prometheus, an older real sender
#   .tools/prometheus-3  Prometheus of the very version that Varve links, the reference for PromQL
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .tools

if [ ! -x .tools/prometheus-2 ]; then
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' EXIT
  (cd "$tmp" && { apt-get download prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download prometheus >/dev/null; }; } && dpkg -x prometheus_*.deb .)
  cp "$tmp/usr/bin/prometheus" .tools/prometheus-2
fi

version=$(go list -m -f '{{.Version}}' github.com/prometheus/prometheus)
if [ ! -x .tools/prometheus-3 ] || [ "$(cat .tools/prometheus-3.version 2>/dev/null)" != "$version" ]; then
  # Without service discovery, which the tests do not need, it shares most of its packages with Varve.
  (cd / && GOBIN="$OLDPWD/.tools/bin" GOFLAGS=-buildvcs=false go install -tags remove_all_sd \
    -ldflags "-s -w -X github.com/prometheus/common/version.Version=3.${version#v0.3}" \
    "github.com/prometheus/prometheus/cmd/prometheus@$version")
  mv .tools/bin/prometheus .tools/prometheus-3
  rmdir .tools/bin
  echo "$version" >.tools/prometheus-3.version
fi
ls -l .tools
