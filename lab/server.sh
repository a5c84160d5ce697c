#!/usr/bin/env bash
# The whole product on Firecracker, in the lab's VM: a server with `engine = "firecracker"` makes a template and does the main job
# (`aenv demo`, and lab/sdk.py with the published SDK: create, run, pause, resume, fork, snapshot). FIRECRACKER_BIN names the binary; the one of `aenv-server setup` without it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

need_firecracker "a server on Firecracker"

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

# The same by the published SDK, as `make test` installed it.
sdk=() packages=$(echo "${AENV_VENV:-.venv}"/lib/python3.11/site-packages)
if [ -d "$packages/e2b" ]; then
  sdk=(-f "$packages:/site-packages" -f "$here/sdk.py:/sdk.py")
else
  say "SKIPPED: the main job by the Python SDK, because $packages/e2b is not there (make test makes it)"
fi

echo "lab: every time below is one of an emulated machine"
exec "$here/run" -t "${AENV_LAB_LIMIT:-1500}" \
  -f "$bin/aenv:/bin-aenv/aenv" -f "$bin/aenv-server:/bin-aenv/aenv-server" -f "$bin/aenv-blockd:/bin-aenv/aenv-blockd" \
  -f "$home/artifacts" -e ARTIFACTS="$home/artifacts" -f "$image:/image" -f "$FIRECRACKER_BIN:/firecracker" \
  -f "$here/server-inside.sh:/inside.sh" "${sdk[@]}" -- bash /inside.sh
