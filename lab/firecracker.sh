#!/usr/bin/env bash
# The engine suite on a real Firecracker, in the lab's VM. FIRECRACKER_BIN names the binary. AENV_SUITE=full: as often as is promised
# (50 captures in a row, 16 forks); a few without it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ -z "${FIRECRACKER_BIN:-}" ]; then
  echo "lab: SKIPPED: the Firecracker engine suite, because FIRECRACKER_BIN names no binary" >&2
  exit 0
fi
"$FIRECRACKER_BIN" --version | head -1

cd "$here/.."
target=$(realpath "${CARGO_TARGET_DIR:-target}")
# Built as `make test` builds them, so that nothing is compiled twice.
built=$(cargo test --release --locked --workspace --test firecracker --no-run --message-format json)
test=$(python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"] and message["target"]["name"] == "firecracker":
        print(message["executable"])' <<<"$built")
cargo build --quiet --locked --profile guest --target x86_64-unknown-linux-musl -p aenv-init --bin aenv-init --example agent
programs=$target/x86_64-unknown-linux-musl/guest
# In the VM there is neither a network nor cargo: the guest is made here.
artifacts=$(realpath -m "${AENV_TEST_CACHE:-$target/guest-artifacts}")
AENV_TEST_CACHE=$artifacts "$test" --exact the_guest_is_there

echo "lab: every time below is one of an emulated machine"
exec "$here/run" -t "${AENV_LAB_LIMIT:-1500}" \
  -e AENV_SUITE="${AENV_SUITE:-few}" -e FIRECRACKER_BIN=/lab/files/firecracker \
  -e AENV_TEST_PROGRAMS=/lab/files/programs -e AENV_TEST_CACHE=/root/artifacts \
  -f "$test:/suite" -f "$FIRECRACKER_BIN:/firecracker" -f "$artifacts:/artifacts" -f /bin/busybox:/usr/bin/busybox \
  -f "$programs/aenv-init:/programs/aenv-init" -f "$programs/examples/agent:/programs/examples/agent" -- \
  bash -c 'mkdir -p /tmp && cp -rL /lab/files/artifacts /root/artifacts && exec /suite --test-threads 1 "$@"' suite "$@"
