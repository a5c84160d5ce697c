#!/usr/bin/env bash
# The export suite of aenv-blockd, on ublk and on FUSE, in the lab's VM.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Built as `make test` builds it, so that nothing is compiled twice.
built=$(cargo test --release --locked --workspace --test exports --no-run --message-format json)
test=$(python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"] and message["target"]["name"] == "exports":
        print(message["executable"])' <<<"$built")
target=${CARGO_TARGET_DIR:-$here/../target}
exec "$here/run" -t 900 -e AENV_LAB=1 -f "$test" -f "$(realpath "$target")/release/aenv-blockd" -- \
  "$test" --test-threads 1 "$@"
