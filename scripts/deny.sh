#!/usr/bin/env bash
# cargo-deny, installed when missing. Advisories need RustSec's database from the network; where it cannot be reached,
# that check is left out, and said so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo-deny >/dev/null || CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --locked cargo-deny@0.20.2
cargo deny check bans licenses sources
if curl -fsS --max-time 10 -o /dev/null https://github.com/RustSec/advisory-db 2>/dev/null; then
  cargo deny check advisories
else
  echo "deny: ADVISORIES NOT CHECKED: the RustSec database cannot be reached from here" >&2
fi
