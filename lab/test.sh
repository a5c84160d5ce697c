#!/usr/bin/env bash
# `make test-lab`: what needs a kernel that the machine may not have, in the lab's VM.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

failed=()
for suite in exports firecracker server; do
  echo "lab: ==== $suite"
  "$here/$suite.sh" || failed+=("$suite")
done
[ ${#failed[@]} -eq 0 ] || { echo "lab: failed: ${failed[*]}" >&2; exit 1; }
echo "lab: all suites passed"
