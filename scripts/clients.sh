#!/usr/bin/env bash
# Installs the published clients that the tests use, each pinned, from PyPI and npm: the current Python ones into .venv, the older
# ones, schemathesis, and what the code interpreter's service is made of into environments of their own below .build/clients, and
# those for Node.js beside their scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
[ -x "$venv/bin/pytest" ] || python3 -m venv "$venv"
pip=("$venv/bin/pip" --disable-pip-version-check --quiet)
"${pip[@]}" install -r tests/requirements.txt -r tests/e2e/code_interpreter/requirements.txt

# Installs $1, a requirements file, into the environment $2, unless that was made from it already.
environment() {
  if cmp -s "$1" "$2/requirements.txt"; then return; fi
  rm -rf "$2"
  python3 -m venv --without-pip "$2"
  "${pip[@]}" --python "$2/bin/python" install -r "$1"
  cp "$1" "$2/requirements.txt"
}
mkdir -p .build/clients
for requirements in tests/e2e/previous/*.txt; do
  environment "$requirements" ".build/clients/$(basename "$requirements" .txt)"
done
environment tests/e2e/schemathesis.txt .build/clients/schemathesis
environment templates/code-interpreter/requirements.txt .build/clients/code_interpreter_service

npm --prefix tests/e2e/typescript install --no-audit --no-fund --no-package-lock --silent
