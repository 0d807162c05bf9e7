#!/usr/bin/env bash
# Runs Varve and a simulated fleet that writes to it: six hours of history first, then live.
set -euo pipefail
cd "$(dirname "$0")/.."
listen=${LISTEN:-127.0.0.1:9433}
data=${DATA:-./data}

./bin/varve --http.listen="$listen" --storage.path="$data" &
varve=$!
trap 'kill -INT "$varve" ${fleet:-} 2>/dev/null || true; wait' EXIT
until curl -fs "http://$listen/-/ready" >/dev/null 2>&1; do
  kill -0 "$varve" || exit 1
  sleep 0.2
done
echo
echo "Varve is at http://$listen - add it to Grafana as a Prometheus data source. Ctrl-C ends the demo."
echo
./bin/fleetgen load --url "http://$listen/api/v1/write" --nodes="${NODES:-16}" --twins --from=-6h &
fleet=$!
wait "$varve"
