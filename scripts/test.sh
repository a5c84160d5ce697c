#!/usr/bin/env bash
# All tests, after `make test` has built what they run against: Rust's own, then the whole system with real VMs and the
# published SDKs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
export CARGO_TARGET_DIR=$target

scripts/clients.sh

# The repository's tests run on an S3 server as well.
s3_port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export AENV_TEST_S3=http://127.0.0.1:$s3_port
.venv/bin/moto_server -H 127.0.0.1 -p "$s3_port" >/dev/null 2>&1 &
s3=$!
trap 'kill "$s3" 2>/dev/null || true' EXIT
for _ in $(seq 300); do
  if curl -sf -X PUT "$AENV_TEST_S3/aenv-test" -o /dev/null; then bucket=made; break; fi
  sleep 0.2
done
[ -n "${bucket-}" ] || { echo "$0: the S3 server does not answer" >&2; exit 1; }

cargo nextest run --release --locked --workspace --no-fail-fast
cargo test --release --locked --workspace --doc
mkdir -p .build
AENV_TEST_LOG=$PWD/.build/test-server.log .venv/bin/pytest -q tests --compatibility .build/compatibility.json "$@"
# A run of some of the tests says nothing about the others.
if [ $# -eq 0 ]; then scripts/compatibility.py .build/compatibility.json docs/compatibility.md --check; fi
