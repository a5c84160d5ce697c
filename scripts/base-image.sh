#!/usr/bin/env bash
# Builds the base image: Debian 12 with what agents and SDKs expect, as an OCI layout that `aenv pull oci:OUT_DIR` reads.
# With options, an image on the same ground.
#
# usage: scripts/base-image.sh OUT_DIR [--title NAME] [--package NAME]... [--overlay DIR] [--setup COMMAND] [--env KEY=VALUE]...
#
#   --title     name of the image (base)
#   --package   a further package
#   --overlay   a folder whose files are put over the image's, as root's
#   --setup     run in the image, by its /bin/sh, after that
#   --env       a variable of its configuration; may replace one
#
# Uses the apt sources and proxies of this machine where it is a Debian 12 itself, and deb.debian.org otherwise.
# AENV_DEBIAN_MIRROR overrides both. Does nothing when OUT_DIR holds the image of the same inputs already; AENV_FORCE=1 builds anyway.
set -euo pipefail

suite=bookworm
packages=(
  bash ca-certificates coreutils curl findutils git iproute2 less libc-bin ncurses-bin openssl passwd
  procps python-is-python3 python3 python3-venv sudo tzdata util-linux wget xz-utils
)
# The date that everything in the image carries, so that equal inputs give equal bytes.
: "${SOURCE_DATE_EPOCH:=1735689600}"
export SOURCE_DATE_EPOCH LC_ALL=C.UTF-8

say() { printf '%s\n' "base-image: $*" >&2; }
fail() { say "$*"; exit 1; }

usage="usage: $0 OUT_DIR [--title NAME] [--package NAME]... [--overlay DIR] [--setup COMMAND] [--env KEY=VALUE]..."
[ $# -ge 1 ] || fail "$usage"
out=$1 title=base overlay="" setup=""
env=(--env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --env LANG=C.UTF-8)
shift
while [ $# -ge 2 ]; do
  case $1 in
    --title) title=$2 ;;
    --package) packages+=("$2") ;;
    --overlay) overlay=$2 ;;
    --setup) setup=$2 ;;
    --env) env+=(--env "$2") ;;
    *) fail "$usage" ;;
  esac
  shift 2
done
[ $# -eq 0 ] || fail "$usage"
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

for tool in mmdebstrap python3 sha256sum; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install -y mmdebstrap python3 coreutils"
done
# A build as another user works too, in a user namespace of its own.
if [ "$(id -u)" -ne 0 ]; then
  command -v newuidmap >/dev/null || fail "newuidmap is missing: apt-get install -y uidmap (or run as root)"
fi

# Where packages come from.
mirrors=()
if [ -n "${AENV_DEBIAN_MIRROR:-}" ]; then
  mirrors=("deb $AENV_DEBIAN_MIRROR $suite main" "deb $AENV_DEBIAN_MIRROR $suite-updates main")
else
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    if [ -f "$file" ] && grep -Eq "^[^#]*\b$suite\b" "$file"; then mirrors+=("$file"); fi
  done
fi
if [ ${#mirrors[@]} -eq 0 ]; then
  mirrors=(
    "deb http://deb.debian.org/debian $suite main"
    "deb http://deb.debian.org/debian $suite-updates main"
    "deb http://deb.debian.org/debian-security $suite-security main"
  )
fi
# How they are fetched: this machine's proxies and limits, for the build only.
apt_options=()
if command -v apt-config >/dev/null; then
  while IFS= read -r option; do
    [ -n "$option" ] && apt_options+=("--aptopt=$option")
  done < <(apt-config dump --format '%f "%v";%n' 2>/dev/null |
    grep -E '^Acquire::(http|https|ftp|Retries|Check-Date|Check-Valid-Until)[: ]' | grep -v ' "";$' || true)
fi

inputs=$({
  cat -- "${BASH_SOURCE[0]}" "$here/oci_layout.py"
  printf '%s\n' "$SOURCE_DATE_EPOCH" "${packages[@]}" "${mirrors[@]}" "$title" "$setup" "${env[@]}"
  if [ -n "$overlay" ]; then (cd "$overlay" && find . -type f -print0 | sort -z | xargs -0 sha256sum); fi
  for mirror in "${mirrors[@]}"; do [ -f "$mirror" ] && cat -- "$mirror"; done
  true
} | sha256sum | cut -d' ' -f1)
if [ -z "${AENV_FORCE:-}" ] && [ -f "$out/index.json" ] && [ "$(cat "$out/.inputs" 2>/dev/null)" = "$inputs" ]; then
  say "$out is up to date"
  exit 0
fi

mkdir -p -- "$(dirname -- "$out")"
work=$(mktemp -d -- "$(dirname -- "$out")/.base-image.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
started=$SECONDS

cat >"$work/sources" <<SOURCES
deb http://deb.debian.org/debian $suite main
deb http://deb.debian.org/debian $suite-updates main
deb http://deb.debian.org/debian-security $suite-security main
SOURCES

extra=()
if [ -n "$overlay" ]; then
  tar -C "$overlay" --owner=0 --group=0 --numeric-owner --sort=name --mtime="@$SOURCE_DATE_EPOCH" -cf "$work/overlay.tar" .
  extra+=(--customize-hook="tar-in $work/overlay.tar /")
fi
if [ -n "$setup" ]; then
  printf '%s\n' "$setup" >"$work/setup"
  # shellcheck disable=SC2016 # $1 is for the shell that mmdebstrap starts
  extra+=(--customize-hook="upload $work/setup /tmp/setup" --customize-hook='chroot "$1" /bin/sh -eu /tmp/setup')
fi

say "installing ${#packages[@]} packages and what they need from ${mirrors[*]} (about a minute)"
# Everything that would make two builds differ, or that only a builder needs, goes at the end.
# Commands run in login shells, and bash knows its user without starting `id`, which costs as much as the shell itself.
# The locale lies in one file instead of twelve: each program that asks for it opens one.
# shellcheck disable=SC2016 # $1 is for the shell that mmdebstrap starts
mmdebstrap \
  --variant=minbase --architectures=amd64 --components=main \
  --include="$(IFS=,; printf '%s' "${packages[*]}")" \
  "${apt_options[@]}" \
  --aptopt='Apt::Install-Recommends "false";' \
  --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/info/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  "${extra[@]}" \
  --customize-hook='rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap' \
  --customize-hook='rm -f "$1"/etc/apt/sources.list.d/* "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/etc/machine-id' \
  --customize-hook='rm -rf "$1"/var/log/* "$1"/var/cache/* "$1"/var/lib/apt/lists/* "$1"/tmp/*' \
  --customize-hook='mkdir -p "$1"/var/cache/apt/archives/partial "$1"/var/lib/apt/lists/partial' \
  --customize-hook='find "$1"/usr -depth -name __pycache__ -type d -exec rm -rf {} +' \
  --customize-hook='chroot "$1" python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3 /usr/lib/python3.11' \
  --customize-hook='chroot "$1" localedef --add-to-archive /usr/lib/locale/C.utf8' \
  --customize-hook='sed -i '\''s/$(id -u)/${EUID:-$(id -u)}/'\'' "$1"/etc/profile' \
  --customize-hook="upload $work/sources /etc/apt/sources.list" \
  --customize-hook='chown 0:0 "$1"/etc/apt/sources.list && chmod 0644 "$1"/etc/apt/sources.list' \
  --customize-hook='echo "127.0.0.1 localhost" >"$1"/etc/hosts; : >"$1"/etc/machine-id' \
  "$suite" "$work/rootfs.tar" "${mirrors[@]}" >&2

say "writing the OCI layout"
python3 "$here/oci_layout.py" "$work/rootfs.tar" "$work/layout" \
  --tag "$title" --created "$SOURCE_DATE_EPOCH" "${env[@]}" --cmd bash --label "org.opencontainers.image.title=aenv-$title"
printf '%s\n' "$inputs" >"$work/layout/.inputs"
sync -f -- "$work/layout"

# The old image makes way for the new one in one step; what stands between is only a name.
if [ -e "$out" ]; then
  [ -f "$out/index.json" ] || [ -z "$(ls -A -- "$out")" ] || fail "$out is there and is no OCI layout: name another folder"
  mv -- "$out" "$work/old"
fi
mv -- "$work/layout" "$out"
say "done in $((SECONDS - started)) s: $(du -sh -- "$out" | cut -f1) in $out; use it with: aenv pull oci:$out --name $title"
