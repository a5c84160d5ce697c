#!/usr/bin/env bash
# Makes the lab's root disk and initramfs in .build/lab and prints their paths, one a line. Both are named after what they
# are made of, so that they are made once.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"
. "$CACHE/versions"

packages=(ca-certificates e2fsprogs fuse3 iproute2 iputils-ping kmod nftables procps python3 util-linux)
modules=$CACHE/kernel-$KERNEL/lib/modules/$KERNEL
key=$(cat "$here/root.sh" "$here/initramfs" | sha256sum | cut -c1-12)
disk=$CACHE/root-$KERNEL-$key.ext4
initramfs=$CACHE/initramfs-$KERNEL-$key.cpio

if [ ! -f "$disk" ] || [ ! -f "$initramfs" ]; then
  [ "$(id -u)" = 0 ] || fail "making the root disk needs root"
  work=$(mktemp -d "$CACHE/root.XXXXXX")
  trap 'rm -rf "$work"' EXIT

  # The initramfs mounts the disks, for which the kernel lacks one driver.
  mkdir -p "$work/initramfs/"{bin,dev,root}
  cp /bin/busybox "$work/initramfs/bin/"
  cp "$here/initramfs" "$work/initramfs/init"
  xz -dc "$modules/kernel/drivers/block/virtio_blk.ko.xz" >"$work/initramfs/virtio_blk.ko"
  (cd "$work/initramfs" && find . | cpio -o -H newc -R 0:0 --quiet) >"$initramfs.new"
  mv "$initramfs.new" "$initramfs"

  say "making the root disk (about half a minute)"
  mmdebstrap --variant=minbase --architectures=amd64 --include="$(IFS=,; printf '%s' "${packages[*]}")" \
    --aptopt='Apt::Install-Recommends "false";' --dpkgopt='path-exclude=/usr/share/{man,doc,locale}/*' \
    bookworm "$work/root" "deb $MIRROR bookworm main" >&2
  mkdir -p "$work/root/lib/modules" "$work/root/lab"
  cp -a "$modules" "$work/root/lib/modules/"
  chroot "$work/root" depmod "$KERNEL"
  # Sparse: room for what runs there.
  truncate -s 12G "$disk.new"
  mke2fs -q -t ext4 -O ^has_journal -E lazy_itable_init=1 -d "$work/root" "$disk.new"
  mv "$disk.new" "$disk"
fi
printf '%s\n' "$disk" "$initramfs"
