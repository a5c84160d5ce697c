# What the lab's scripts share; sourced. CACHE is where everything that is made lies.
CACHE=${AENV_LAB_CACHE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.build/lab}
MIRROR=${AENV_DEBIAN_MIRROR:-http://deb.debian.org/debian}

say() { printf 'lab: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
