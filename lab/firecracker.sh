#!/usr/bin/env bash
# The engine suite on a real Firecracker, in the lab's VM. FIRECRACKER_BIN names the binary; the one of `aenv-server setup`
# without it. AENV_SUITE=full: as often as is promised (50 captures in a row, 16 forks), which takes an hour; a few without it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"
need_firecracker "the Firecracker engine suite"

cd "$here/.."
target=$(realpath "${CARGO_TARGET_DIR:-target}")
test=$(test_program firecracker)
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
