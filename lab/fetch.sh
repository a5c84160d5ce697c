#!/usr/bin/env bash
# Gets QEMU 10 and Linux 6.12 from Debian 12's backports into .build/lab, beside whatever is installed, and writes
# .build/lab/versions. The host's apt sources stay as they are. Does nothing when they are there; remove that file to get
# newer ones.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

if [ -f "$CACHE/versions" ]; then exit 0; fi

# An apt of its own: sources, lists and packages lie in the cache.
state=$CACHE/apt
mkdir -p "$state/lists/partial" "$state/archives/partial" "$state/debs"
for suite in bookworm bookworm-backports; do
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR $suite main"
done >"$state/sources.list"
options=(
  -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::lists="$state/lists" -o Dir::Cache="$state" -o APT::Sandbox::User=root
)
say "fetching QEMU and a kernel from Debian's backports"
apt-get -q "${options[@]}" update >&2

field() { apt-cache "${options[@]}" show "$1/bookworm-backports" | sed -n "s/^$2: //p" | head -1; }
qemu=$(field qemu-system-x86 Version | sed 's/^[0-9]*://')
package=$(field linux-image-cloud-amd64 Depends | sed 's/ .*//')
kernel=${package#linux-image-}
if [ -z "$qemu" ] || [ -z "$kernel" ]; then fail "bookworm-backports has no qemu-system-x86 or no linux-image-cloud-amd64"; fi

unpack() { # FOLDER PACKAGE...
  local folder=$1 name
  shift
  [ ! -d "$folder" ] || return 0
  rm -rf "$folder.new"
  mkdir -p "$folder.new"
  for name in "$@"; do
    rm -f "$state/debs/$name"_*.deb
    (cd "$state/debs" && apt-get -q "${options[@]}" download "$name/bookworm-backports" >&2)
    dpkg-deb -x "$state/debs/$name"_*.deb "$folder.new"
  done
  mv "$folder.new" "$folder"
}
unpack "$CACHE/qemu-$qemu" qemu-system-x86 qemu-system-common qemu-system-data seabios
unpack "$CACHE/kernel-$kernel" "$package"
if missing=$(ldd "$CACHE/qemu-$qemu/usr/bin/qemu-system-x86_64" | grep 'not found'); then
  fail "QEMU lacks libraries that the package qemu-system-x86 would bring: $missing"
fi

printf 'QEMU=qemu-%s\nKERNEL=%s\n' "$qemu" "$kernel" >"$CACHE/versions.new"
mv "$CACHE/versions.new" "$CACHE/versions"
say "QEMU $qemu, Linux $kernel"
