#!/usr/bin/env bash
# The export suite of aenv-blockd, on ublk and on FUSE, in the lab's VM.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

test=$(test_program exports)
target=${CARGO_TARGET_DIR:-$here/../target}
exec "$here/run" -t 900 -e AENV_LAB=1 -f "$test" -f "$(realpath "$target")/release/aenv-blockd" -- \
  "$test" --test-threads 1 "$@"
