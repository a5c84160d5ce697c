#!/usr/bin/env bash
# The engine suite on Firecracker, in the lab's VM. FIRECRACKER_BIN names the binary.
set -euo pipefail

if [ -z "${FIRECRACKER_BIN:-}" ]; then
  echo "lab: SKIPPED: the Firecracker engine suite, because FIRECRACKER_BIN names no binary" >&2
  exit 0
fi
echo "lab: SKIPPED: the Firecracker engine suite, because there is no Firecracker engine yet" >&2
