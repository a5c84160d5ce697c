"""A repository on a network filesystem that stalls: its calls do not fail, they wait.

Promised: what needs the repository ends with 503 `repository_unavailable` within a bound, and what does not goes on: sandboxes run,
pause, resume and fork, and templates whose layers are on the node are launched. When the folder answers again everything works,
and nothing that was published is lost.
"""

import concurrent.futures
import shutil
import time

import pytest
from conftest import LONG, own_server, wait_for
from stall import Stalling

#: In which each call ends, whatever the folder does: one operation is given up after 15 s, and a verb has a few.
BOUND = 90


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory):
    place = tmp_path_factory.mktemp("shared")
    shutil.copytree(server.home / "repository", place / "behind")
    made = Stalling(place / "repository", place / "behind", wait_for)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def node(folder):
    settings = [
        "network.internal.veth_cidr=10.221.0.0/16", "orchestrator.standby.count=0",
        f"backend.posix_fs.snapshot_store={folder.folder}",
    ]
    with own_server(settings) as made:
        yield made
        folder.go_on()


def create(node, template):
    return node.api("POST", "/v2/sandboxes", {"templateID": template, "timeout": LONG})


def snapshot(node, id):
    return node.api("POST", f"/sandboxes/{id}/snapshots", {})


def refused(answer):
    return answer[0] == 503 and answer[1]["error_code"] == "repository_unavailable"


def test_a_folder_that_stalls(node, folder):
    status, source = create(node, "base")
    assert status == 201, source
    id = source["sandboxID"]
    run = lambda *words: node.cli("exec", id, "--", *words).stdout
    status, before = snapshot(node, id)
    assert status == 201, before

    folder.stall()
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        # Several at once, each of which hangs in the folder.
        waiting = [pool.submit(create, node, f"never-heard-of-{number}") for number in range(16)]
        waiting += [pool.submit(snapshot, node, id)]
        assert run("echo", "here") == "here\n"
        assert node.api("POST", f"/sandboxes/{id}/pause", {})[0] == 204
        assert node.api("POST", f"/v2/sandboxes/{id}/connect", {"timeout": LONG})[0] in (200, 201)
        (child,) = node.api("POST", f"/sandboxes/{id}/fork", {"count": 1, "timeout": LONG})[1]
        assert node.api("DELETE", f"/sandboxes/{child['sandbox']['sandboxID']}")[0] == 204
        assert node.api("GET", "/v2/sandboxes")[0] == 200
        answers = [future.result() for future in waiting]
    assert all(map(refused, answers)), answers
    assert time.monotonic() - began < BOUND

    folder.go_on()
    assert run("echo", "again") == "again\n"
    status, after = snapshot(node, id)
    assert status == 201, after
    for known in (before, after):
        status, copy = create(node, known["snapshotID"])
        assert status == 201, copy
        assert node.api("DELETE", f"/sandboxes/{copy['sandboxID']}")[0] == 204
    assert node.cli("repo", "fsck").returncode == 0
    assert node.api("DELETE", f"/sandboxes/{id}")[0] == 204
