"""Two nodes with one repository: a sandbox that one of them paused is resumed on the other, and never on both."""

import concurrent.futures
import contextlib
import json
import subprocess
import tempfile

import pytest

from conftest import LONG, own_server, wait_for


@pytest.fixture(scope="module")
def nodes(server):
    """Two servers that share a folder with the template `base` in it."""
    with tempfile.TemporaryDirectory(prefix="aenv-test-", dir="/var/tmp") as shared, contextlib.ExitStack() as stack:
        # Blobs and documents are never written in place, so that names of the same files will do.
        subprocess.run(["cp", "-al", server.home / "repository", f"{shared}/repository"], check=True)
        settings = [
            "snapshot.publish_paused=true", f"backend.posix_fs.snapshot_store={shared}/repository",
            "network.internal.veth_cidr=10.214.0.0/16", "snapshot.gc_interval_secs=0", "orchestrator.standby.count=0",
        ]
        yield [stack.enter_context(own_server([*settings, f"node_identity.id={name}"])) for name in ("red", "blue")]


def publication(node, id):
    return node.api("GET", f"/sandboxes/{id}")[1].get("publication")


def pause(node, id):
    assert node.api("POST", f"/sandboxes/{id}/pause", {})[0] == 204
    wait_for("the publication", lambda: publication(node, id) == "published", 120)


def connect(node, id):
    return node.api("POST", f"/v2/sandboxes/{id}/connect", {"timeout": LONG})


def listed(node):
    return [entry["sandboxID"] for entry in node.api("GET", "/v2/sandboxes")[1]]


def test_a_paused_sandbox_moves_and_runs_once(nodes):
    red, blue = nodes
    status, made = red.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG, "metadata": {"of": "red"}, "secure": True})
    assert status == 201, made
    id = made["sandboxID"]
    red.cli("exec", id, "--", "sh", "-c", "echo in memory > /dev/shm/note; sleep 86400 > /dev/null 2>&1 &")
    assert connect(blue, id)[0] == 404
    pause(red, id)
    # A list is of what a node has; a look finds what it may have.
    assert listed(red) == [id] and listed(blue) == []
    status, seen = blue.api("GET", f"/sandboxes/{id}")
    assert (status, seen["state"], seen["publication"], seen["metadata"]) == (200, "paused", "published", {"of": "red"})

    status, moved = connect(blue, id)
    assert status == 201, moved
    assert moved["envdAccessToken"] == made["envdAccessToken"]
    there = "cat /dev/shm/note; pgrep -c sleep"
    assert blue.cli("exec", id, "--", "sh", "-c", there).stdout == "in memory\n1\n"
    for method, path in [("POST", f"/v2/sandboxes/{id}/connect"), ("GET", f"/sandboxes/{id}"), ("DELETE", f"/sandboxes/{id}")]:
        status, answer = red.api(method, path, {"timeout": 60} if method == "POST" else None)
        assert (status, answer["error_code"]) == (404, "sandbox_on_another_node"), answer
        assert "blue" in answer["message"]
    assert listed(red) == [] and listed(blue) == [id]

    blue.cli("exec", id, "--", "sh", "-c", "echo twice > /dev/shm/note")
    pause(blue, id)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda node: connect(node, id), nodes))
    assert sorted(status for status, _ in answers) == [201, 404], answers
    winner, loser = nodes if answers[0][0] == 201 else (blue, red)
    assert answers[nodes.index(loser)][1]["error_code"] == "sandbox_on_another_node"
    assert winner.cli("exec", id, "--", "sh", "-c", there).stdout == "twice\n1\n"

    # What it was resumed from stays for it, and nothing of it is damage.
    json.loads(winner.cli("repo", "gc", "--grace", 0).stdout)
    assert winner.cli("repo", "fsck").returncode == 0
    team = next(team for team in json.loads(winner.cli("repo", "du").stdout)["teams"] if team["team"] == "default")
    assert team["paused"] == 1
    pause(winner, id)
    assert loser.api("DELETE", f"/sandboxes/{id}")[0] == 204
    assert [connect(node, id)[0] for node in nodes] == [404, 404]
    assert listed(red) == listed(blue) == []
    assert winner.metric("aenv_paused_published_total") >= 1
    # Counted every few seconds.
    wait_for("none on its way", lambda: winner.metric("aenv_paused_unpublished") == 0)
