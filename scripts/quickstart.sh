#!/usr/bin/env bash
# The second half of `make quickstart`: guest kernel, server, template `base`, and the main job in front of you.
# `quickstart.sh stop` ends the server that it left running, and deletes its sandboxes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${CARGO_TARGET_DIR:-target}
bin=$target/release
home=${AENV_HOME_PATH:-/var/lib/aenv}
listen=${API_ADDR:-127.0.0.1:8000}
url=http://$listen
log=$home/logs/server.log
pid_file=$home/quickstart.pid
export AENV_URL=$url

say() { printf '\n==> %s\n' "$*"; }

if [ "$(id -u)" != 0 ]; then
  echo "quickstart: namespaces, mounts and taps need root: run it with sudo" >&2
  exit 1
fi

running() { curl -fsS --max-time 2 -o /dev/null "$url/health" 2>/dev/null; }

stop() {
  if running; then "$bin/aenv" delete --all || true; fi
  if [ -f "$pid_file" ]; then
    pid=$(cat "$pid_file")
    # Only what this script started: the pid must still be our server.
    if [ "$(readlink -f "/proc/$pid/exe" 2>/dev/null)" = "$(readlink -f "$bin/aenv-server")" ]; then
      kill "$pid"
      for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    fi
    rm -f "$pid_file"
  fi
  echo "the server has ended; $home is kept"
}

if [ "${1:-}" = stop ]; then stop; exit 0; fi

say "Guest kernel and initramfs"
"$bin/aenv-server" setup --guest "$target/x86_64-unknown-linux-musl/guest"

say "What this host can do"
"$bin/aenv-server" doctor || { echo "quickstart: mend what is missing, and run it again" >&2; exit 1; }

if running; then
  say "A server answers at $url already"
else
  say "Starting the server at $url (log: $log)"
  mkdir -p "$home/logs"
  setsid nohup "$bin/aenv-server" serve --listen "$listen" --home "$home" >>"$log" 2>&1 </dev/null &
  pid=$!
  echo "$pid" >"$pid_file"
  for _ in $(seq 300); do
    if running; then break; fi
    if ! kill -0 "$pid" 2>/dev/null; then echo "quickstart: the server ended:" >&2; tail -n 20 "$log" >&2; exit 1; fi
    sleep 0.2
  done
  running || { echo "quickstart: the server did not answer within 60 s:" >&2; tail -n 20 "$log" >&2; exit 1; }
fi

unset AENV_API_KEY
export AENV_API_KEY_FILE=$home/secrets/api-key
if ! "$bin/aenv" template show base --output json 2>/dev/null | grep -q '"buildStatus": "ready"'; then
  say "Building the template base"
  # One vCPU and 512 MiB: under emulation on two cores, sixteen copies go further.
  "$bin/aenv" pull oci:.build/base-image --name base --cpu 1 --memory 512 --output table
fi

say "The main job"
"$bin/aenv" demo --template base
