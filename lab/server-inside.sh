#!/bin/bash
# What lab/server.sh runs in the VM.
set -uo pipefail
bin=/opt/aenv home=/var/lib/aenv log=/var/log/aenv.log
mkdir -p "$bin" "$home" /tmp
ln -sf /proc/self/fd/0 /dev/stdin
cp -L /bin-aenv/* "$bin/"
# It names files by the paths that they had where it was made, which they have here too.
mkdir "$home/artifacts"
cp -L "$ARTIFACTS/guest.json" "$home/artifacts/"
cp -rL /image /opt/image
cp -L /firecracker "$bin/firecracker"
export AENV_ENGINE=firecracker AENV_FIRECRACKER_BINARY_PATH=$bin/firecracker AENV_URL=http://127.0.0.1:8000
# One emulated CPU: guests that start side by side all answer late.
export AENV_ORCHESTRATOR_PARALLEL_LAUNCHES=1
# The demo forks sixteen; they touch little of what they are promised.
export AENV_ORCHESTRATOR_MEMORY_MIB=16384
export AENV_API_KEY_FILE=$home/secrets/api-key

"$bin/aenv-server" doctor
"$bin/aenv-server" serve --listen 127.0.0.1:8000 --home "$home" >"$log" 2>&1 </dev/null &
server=$!
result=1
for _ in $(seq 300); do
  if "$bin/aenv" list >/dev/null 2>&1; then
    "$bin/aenv" pull oci:/opt/image --name base --cpu 1 --memory 512 --output table &&
      "$bin/aenv" demo --template base
    result=$?
    if [ "$result" = 0 ] && [ -e /sdk.py ]; then
      E2B_API_URL=$AENV_URL E2B_SANDBOX_URL=$AENV_URL E2B_API_KEY=$(cat "$AENV_API_KEY_FILE") PYTHONPATH=/site-packages \
        python3 /sdk.py
      result=$?
    fi
    break
  fi
  kill -0 "$server" || break
  sleep 0.5
done
if [ "$result" != 0 ]; then
  echo "lab: the server's log:"
  tail -n 60 "$log"
  tail -n 30 /run/aenv/sandboxes/*/firecracker.log "$home"/sandboxes/*/serial.log 2>/dev/null
fi
kill "$server"
exit "$result"
