"""Looking after the repository: what is garbage goes, what is named stays, what is damaged is said."""

import json
import subprocess

from conftest import BIN


def test_the_repository_is_looked_after(server):
    status, sandbox = server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 600})
    assert status == 201, sandbox
    id = sandbox["sandboxID"]
    server.cli("exec", id, "--", "sh", "-c", "head -c 8M /dev/urandom > /home/user/only-here")
    snapshot = json.loads(server.cli("snapshot", "create", id).stdout)["snapshotID"]
    server.cli("delete", id)
    server.cli("snapshot", "delete", snapshot)
    usage = json.loads(server.cli("repo", "du").stdout)
    assert usage["bytesUnreferenced"] > 8 << 20
    assert next(team for team in usage["teams"] if team["team"] == "default")["templates"] >= 1
    planned = json.loads(server.cli("repo", "gc", "--dry-run", "--grace", 0).stdout)
    assert planned["removedBytes"] == usage["bytesUnreferenced"]
    # It ends with 1 for damage; garbage is none.
    checked = json.loads(server.cli("repo", "fsck").stdout)
    assert sum(finding.get("bytes", 0) for finding in checked) == usage["bytesUnreferenced"]
    removed = json.loads(server.cli("repo", "gc", "--grace", 0).stdout)
    assert set(removed["removed"]) == set(planned["removed"])
    assert json.loads(server.cli("repo", "du").stdout)["bytesUnreferenced"] == 0
    deep = json.loads(server.cli("repo", "fsck", "--deep").stdout)
    assert not [finding for finding in deep if finding["kind"] != "unnamed_manifest"]
    assert "aenv_repository_gc_removed_bytes_total" in server.api("GET", "/metrics", raw=True)[1].decode()
    # What is still named works as before.
    status, sandbox = server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60})
    assert status == 201, sandbox
    server.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")
    # Damage is found, named, and costs an exit code.
    blob = max((server.home / "repository" / "blobs").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    aside = server.home / "aside"
    blob.rename(aside)
    try:
        found = server.cli("repo", "fsck", check=False)
        assert found.returncode == 1
        missing = next(finding for finding in json.loads(found.stdout) if finding["kind"] == "missing_blob")
        assert blob.name in missing["what"] and "base" in sum((owner["names"] for owner in missing["takes"]), [])
    finally:
        aside.rename(blob)
    assert server.cli("repo", "fsck").returncode == 0
    denied = subprocess.run(
        [BIN / "aenv", "repo", "du"], capture_output=True, text=True,
        env={**server.env, "AENV_API_KEY": "e2b_" + "0" * 40},
    )
    assert denied.returncode == 5
