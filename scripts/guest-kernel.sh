#!/usr/bin/env bash
# Builds a guest kernel from the distribution's kernel source package, into a folder that `aenv-server setup --kernel-package` takes.
#
# usage: scripts/guest-kernel.sh OUT_DIR [--source DIR] [--config FILE]... [--only-config]
#
#   --source       a kernel tree instead of Debian's package linux-source; such as one with a host's PVM patches
#   --config       lines of configuration after those of scripts/guest-kernel.config
#   --only-config  make and check the configuration (OUT_DIR/build/.config), and build nothing
#
# Nothing is installed. OUT_DIR gets boot/vmlinuz-<release> (an ELF vmlinux), lib/modules/<release> and the configuration.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: $0 OUT_DIR [--source DIR] [--config FILE]... [--only-config]"

fail() { echo "$0: $*" >&2; exit 1; }
out="" source="" only="" fragments=("$here/guest-kernel.config")
while [ $# -gt 0 ]; do
  case $1 in
    --source) source=$(realpath "${2:?$usage}") && shift ;;
    --config) fragments+=("$(realpath "${2:?$usage}")") && shift ;;
    --only-config) only=yes ;;
    -*) fail "$usage" ;;
    *) [ -z "$out" ] || fail "$usage"; out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || fail "$usage"

tools=(make gcc flex bison)
[ -n "$only" ] || tools+=(bc)
missing=()
for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || missing+=("$tool"); done
[ ${#missing[@]} -eq 0 ] || fail "what a kernel is built with is missing: apt-get install -y ${missing[*]} libelf-dev"
if [ -z "$only" ] && ! echo '#include <libelf.h>' | gcc -E - >/dev/null 2>&1; then
  fail "what a kernel is built with is missing: apt-get install -y libelf-dev"
fi
mkdir -p "$out"
out=$(realpath "$out")

if [ -z "$source" ]; then
  # The package that linux-source stands for, such as linux-source-6.1; apt checks its signature.
  package=$(apt-cache depends --no-recommends linux-source | sed -n 's/^ *Depends: \(linux-source-[0-9.]*\)$/\1/p' | head -1)
  [ -n "$package" ] || fail "apt knows no package linux-source: apt-get update, or name a tree with --source"
  source=$out/$package
  if [ ! -f "$source/Makefile" ]; then
    rm -rf "$out/package" "$source"
    mkdir -p "$out/package"
    (cd "$out/package" && apt-get download -q "$package" && dpkg-deb -x "$package"_*.deb .)
    tar -C "$out" -xf "$out/package/usr/src/$package.tar.xz"
    rm -rf "$out/package"
  fi
fi
[ -f "$source/Makefile" ] || fail "$source is no kernel tree"

build=$out/build
mkdir -p "$build"
kernel() { make -s -C "$source" O="$build" ARCH=x86_64 "$@"; }
kernel x86_64_defconfig kvm_guest.config
cat "${fragments[@]}" >>"$build/.config"
# The last line about an option counts; what it needs is switched on, what was overruled is told of below.
kernel olddefconfig 2>&1 | grep -v 'override: reassigning' >&2 || true

lost=()
for fragment in "${fragments[@]}"; do
  while read -r line; do
    case $line in
      CONFIG_*=*) grep -qxF "$line" "$build/.config" || lost+=("$line") ;;
      "# CONFIG_"*" is not set")
        option=${line#\# } option=${option%% *}
        ! grep -q "^$option=" "$build/.config" || lost+=("$line") ;;
    esac
  done <"$fragment"
done
[ ${#lost[@]} -eq 0 ] || { printf '  %s\n' "${lost[@]}" >&2; fail "this kernel does not take ${#lost[@]} lines of the configuration"; }
echo "configuration of Linux $(kernel kernelversion): $build/.config"
[ -z "$only" ] || exit 0

kernel -j"$(nproc)" vmlinux modules
release=$(kernel kernelrelease)
mkdir -p "$out/boot" "$out/lib/modules/$release/kernel"
# Nothing loads them by depmod's index.
kernel INSTALL_MOD_PATH="$out" DEPMOD=true modules_install
rm -f "$out/lib/modules/$release/"{build,source} "$out"/boot/vmlinuz-*
objcopy --strip-debug "$build/vmlinux" "$out/boot/vmlinuz-$release"
cp "$build/.config" "$out/boot/config-$release"
echo "guest kernel $release: aenv-server setup --kernel-package $out"
