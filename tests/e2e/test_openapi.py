"""The server's own description, and whatever may be sent that fits it or does not: never a 500."""

import os
import subprocess

from conftest import ROOT

PROGRAM = ROOT / ".build/clients/schemathesis/bin/st"
# They talk to registries by whatever name is made up.
OUTWARD = ["/sandboxes-cold", "/images/convert", "/images/push"]


def test_no_request_makes_a_500(server, tmp_path):
    assert PROGRAM.exists(), f"{PROGRAM} does not exist: scripts/clients.sh makes it"
    status, key = server.api("POST", "/api-keys", {"name": "made-up-requests", "limits": {"maxRunningSandboxes": 1, "maxTimeoutSecs": 60}})
    assert status == 201, key
    excluded = [word for path in OUTWARD for word in ("--exclude-path", path)]
    try:
        done = subprocess.run(
            [PROGRAM, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing",
             "--max-examples", "8", "--max-time", "25", "--seed", "1", "--no-shrink", "--continue-on-failure", "--workers", "1",
             "--request-timeout", "30", "--warnings", "off", "--suppress-health-check", "all", "--no-color",
             "-H", f"X-API-Key: {key['key']}", *excluded],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        print(done.stdout[-2000:])
        assert server.api("GET", "/health")[0] == 204
    finally:
        server.api("DELETE", f"/api-keys/{key['id']}")
