# What the lab's scripts share; sourced. CACHE is where everything that is made lies.
CACHE=${AENV_LAB_CACHE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.build/lab}
MIRROR=${AENV_DEBIAN_MIRROR:-http://deb.debian.org/debian}

say() { printf 'lab: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# Builds the test NAME as `make test` builds it, so that nothing is compiled twice, and prints the path of its program.
test_program() { # NAME
  cargo test --release --locked --workspace --test "$1" --no-run --message-format json | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"] and message["target"]["name"] == sys.argv[1]:
        print(message["executable"])' "$1"
}

# Sets FIRECRACKER_BIN to the Firecracker that `aenv-server setup` got, unless it names one. Ends the script with 0 when there is
# none, and says loudly what is not tested therefore.
need_firecracker() { # WHAT
  local found=(${AENV_HOME_PATH:-/var/lib/aenv}/artifacts/firecracker-[0-9]*[0-9])
  if [ -z "${FIRECRACKER_BIN:-}" ] && [ -x "${found[-1]}" ]; then FIRECRACKER_BIN=${found[-1]}; fi
  if [ -z "${FIRECRACKER_BIN:-}" ]; then
    say "SKIPPED: $1, because FIRECRACKER_BIN names no binary and $(dirname "${found[-1]}") has none"
    exit 0
  fi
  say "$("$FIRECRACKER_BIN" --version | head -1): $FIRECRACKER_BIN"
}
