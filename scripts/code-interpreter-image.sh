#!/usr/bin/env bash
# Builds the image of the code interpreter without a container registry: the base image, and templates/code-interpreter with its
# packages from PyPI, as an OCI layout that `aenv pull oci:OUT_DIR` reads.
#
# usage: scripts/code-interpreter-image.sh OUT_DIR
#
# PyPI is asked by this machine's pip, with its settings, not from within the image.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 OUT_DIR" >&2; exit 1; }
python3 -c 'import ensurepip' 2>/dev/null || { echo "$0: pip is missing: apt-get install -y python3-venv" >&2; exit 1; }
out=$1
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source=$here/../templates/code-interpreter
mkdir -p -- "$(dirname -- "$out")"
build=$(cd -- "$(dirname -- "$out")" && pwd)
wheels=$build/code-interpreter-wheels

if ! cmp -s "$source/requirements.txt" "$wheels/requirements.txt"; then
  echo "code-interpreter-image: fetching packages from PyPI" >&2
  rm -rf "$wheels"
  python3 -m venv "$wheels/venv"
  # Debian 12 has Python 3.11 and glibc 2.36.
  platforms=()
  for tag in 2014 _2_17 _2_24 _2_26 _2_27 _2_28 _2_31 _2_34 _2_35; do platforms+=(--platform "manylinux${tag}_x86_64"); done
  "$wheels/venv/bin/pip" --disable-pip-version-check --quiet download --dest "$wheels/files" --no-deps --only-binary :all: \
    --implementation cp --python-version 3.11 "${platforms[@]}" -r "$source/requirements.txt"
  rm -rf "$wheels/venv"
  cp "$source/requirements.txt" "$wheels/requirements.txt"
fi

overlay=$(mktemp -d -- "$build/.code-interpreter.XXXXXX")
trap 'rm -rf -- "$overlay"' EXIT
target=$overlay/opt/code-interpreter
mkdir -p "$target"
cp -R "$source/code_interpreter" "$source/requirements.txt" "$source/setup.sh" "$source/start" "$target"
find "$target" -depth -name __pycache__ -exec rm -rf {} +
cp -R "$wheels/files" "$target/wheels"
chmod -R u=rwX,go=rX "$overlay"

"$here/base-image.sh" "$out" --title code-interpreter --overlay "$overlay" --setup "sh /opt/code-interpreter/setup.sh" \
  --package libstdc++6 \
  --env PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
