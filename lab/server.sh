#!/usr/bin/env bash
# The whole product on Firecracker, in the lab's VM: a server with `engine = "firecracker"` makes a template and does the main job
# (`aenv demo`: create, run, pause, resume, fork, snapshot). FIRECRACKER_BIN names the binary.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

if [ -z "${FIRECRACKER_BIN:-}" ]; then
  echo "lab: SKIPPED: a server on Firecracker, because FIRECRACKER_BIN names no binary" >&2
  exit 0
fi
cd "$here/.."
target=$(realpath "${CARGO_TARGET_DIR:-target}")
image=$(realpath "${AENV_BASE_IMAGE:-.build/base-image}")
bin=$target/release
for needed in "$bin"/{aenv,aenv-server,aenv-blockd} "$target/x86_64-unknown-linux-musl/guest/aenv-envd" "$image/index.json"; do
  [ -e "$needed" ] || fail "$needed is missing: make build image"
done

# In the VM there is no network: kernel and initramfs are made here.
home=$CACHE/home
mkdir -p "$home"
"$bin/aenv-server" setup --home "$home" --guest "$target/x86_64-unknown-linux-musl/guest"

echo "lab: every time below is one of an emulated machine"
exec "$here/run" -t "${AENV_LAB_LIMIT:-1500}" \
  -f "$bin/aenv:/bin-aenv/aenv" -f "$bin/aenv-server:/bin-aenv/aenv-server" -f "$bin/aenv-blockd:/bin-aenv/aenv-blockd" \
  -f "$home/artifacts" -e ARTIFACTS="$home/artifacts" -f "$image:/image" -f "$FIRECRACKER_BIN:/firecracker" \
  -f "$here/server-inside.sh:/inside.sh" -- bash /inside.sh
