"""A node with addresses for two network slots only.

Promised: a launch beyond them is refused at once with a 429 that says when to ask again, and leaves nothing behind; what runs goes on;
a slot that is given back is used again.
"""

import json
import subprocess
import tempfile
import urllib.error
import urllib.request

import pytest

from conftest import LONG, own_server, wait_for


@pytest.fixture(scope="module")
def narrow(server):
    """A server with two pairs of addresses that has the template `base` from a copy of the repository."""
    with tempfile.TemporaryDirectory(prefix="aenv-test-", dir="/var/tmp") as folder:
        subprocess.run(["cp", "-al", server.home / "repository", f"{folder}/repository"], check=True)
        settings = [
            "network.internal.veth_cidr=10.216.0.0/30", f"backend.posix_fs.snapshot_store={folder}/repository",
            "snapshot.gc_interval_secs=0",
        ]
        with own_server(settings) as instance:
            yield instance


def asked(server):
    """(sandbox, None), or (None, when to ask again)."""
    request = urllib.request.Request(
        f"{server.url}/v2/sandboxes", data=json.dumps({"templateID": "base", "timeout": LONG}).encode(), method="POST",
        headers={"X-API-Key": server.key, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer), None
    except urllib.error.HTTPError as refused:
        assert refused.code == 429 and b"sandbox_capacity_unavailable" in refused.read()
        return None, int(refused.headers["Retry-After"])


def test_no_free_network_slots(narrow):
    made = []
    while True:
        sandbox, again = asked(narrow)
        if sandbox is None:
            break
        made.append(sandbox["sandboxID"])
        assert len(made) <= 2
    assert made and 1 <= again <= 60
    assert sorted(entry["sandboxID"] for entry in narrow.api("GET", "/v2/sandboxes")[1]) == sorted(made)
    assert narrow.cli("exec", made[0], "--", "echo", "on").stdout == "on\n"
    assert sorted(entry.name for entry in (narrow.home / "sandboxes").iterdir()) == sorted(made)
    assert narrow.api("DELETE", f"/sandboxes/{made.pop()}")[0] == 204
    # Slots are removed, and made anew, in the background.
    sandbox = wait_for("a slot", lambda: asked(narrow)[0])
    made.append(sandbox["sandboxID"])
    for id in made:
        assert narrow.api("DELETE", f"/sandboxes/{id}")[0] == 204
