#!/usr/bin/env bash
# Installs what is missing: `deps.sh run` for building and running, `deps.sh test` for the tests as well.
set -euo pipefail

run_packages=(
  build-essential pkg-config musl-tools protobuf-compiler   # building
  libclang-dev                                              # building: bindgen, for the ublk driver's header
  qemu-system-x86 e2fsprogs iproute2 nftables               # running
  mmdebstrap curl ca-certificates zstd cpio xz-utils        # kernel and base image
)
test_packages=(busybox-static docker-registry fuse3 openssl skopeo python3-venv)

packages=("${run_packages[@]}")
if [ "${1:-run}" = test ]; then packages+=("${test_packages[@]}"); fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "deps: these packages are missing and there is no apt-get to install them: ${missing[*]}" >&2
    exit 1
  fi
  echo "deps: installing ${missing[*]}"
  sudo=""; if [ "$(id -u)" != 0 ]; then sudo=sudo; fi
  $sudo apt-get update -q
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
fi

if ! rustup target list --installed 2>/dev/null | grep -qx x86_64-unknown-linux-musl; then
  rustup target add x86_64-unknown-linux-musl
fi
if [ "${1:-run}" = test ]; then
  # Without optimization: on a new machine compiling a tool takes longer than using it.
  command -v cargo-nextest >/dev/null || CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --locked cargo-nextest@0.9.143
fi
