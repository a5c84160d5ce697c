"""Sandboxes that were launched ahead: who claims them, who they are then, and when they end."""

import re
import tempfile
import time

import pytest

from conftest import LONG, running_server, wait_for

# What two sandboxes must never share, and the clock, which stood while the standby waited.
IDENTITY = """
cat /etc/hostname; hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1
echo "$E2B_SANDBOX_ID"; date +%s.%N
"""


@pytest.fixture(scope="module")
def node():
    """A server with memory for six sandboxes and one standby for each template."""
    home = tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    settings = [
        "network.internal.veth_cidr=10.216.0.0/16",
        "orchestrator.memory_mib=3072",
        "orchestrator.standby.count=1",
    ]
    with running_server(home, settings) as made:
        yield made


@pytest.fixture
def made(node):
    """Ids of sandboxes that go with the test."""
    ids = []
    yield ids
    for id in ids:
        node.api("DELETE", f"/sandboxes/{id}")


def create(node, made, **options):
    status, sandbox = node.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG, **options})
    assert status == 201, sandbox
    made.append(sandbox["sandboxID"])
    return sandbox["sandboxID"]


def standby(node):
    wait_for("a standby", lambda: node.metric("aenv_standbys") == 1)


def run(node, id, script):
    return node.cli("exec", id, "--user", "root", "--", "sh", "-c", script).stdout


def waiting(node, made):
    """VMMs of this server with a disk of no sandbox: pids and ids."""
    found = {}
    for pid, files in node.vmms().items():
        ids = set(re.findall(r"\bi[0-9a-z]{19}\b", " ".join(files))) - set(made)
        if ids:
            found[pid] = ids
    return found


def test_a_create_claims_a_standby_and_is_itself(node, made):
    first = create(node, made)
    standby(node)
    [ids] = waiting(node, made).values()
    assert [entry["sandboxID"] for entry in node.api("GET", "/v2/sandboxes")[1]] == [first]
    for id in ids:
        assert node.api("GET", f"/sandboxes/{id}")[0] == 404
    # It waits while the clock goes on.
    time.sleep(3)
    claims = node.metric("aenv_standby_claims_total")
    second = create(node, made, envVars={"COLOUR": "blue"})
    assert node.metric("aenv_standby_claims_total") == claims + 1
    assert {second} == ids, "it has not the standby's id"

    before = time.time()
    one, two = (run(node, id, IDENTITY).splitlines() for id in (first, second))
    after = time.time()
    for id, lines in [(first, one), (second, two)]:
        assert lines[:2] == [id, id] and lines[5] == id
        assert before - 1 < float(lines[6]) < after + 1
    assert all(a != b for a, b in zip(one, two))
    assert run(node, second, "echo $COLOUR") == "blue\n"
    # It is written in the background.
    wait_for("its log", lambda: "queue_ms" in node.cli("logs", second).stdout)


def test_kill_9_leaves_none(node, made):
    id = create(node, made)
    standby(node)
    [pid] = waiting(node, made)
    node.kill()
    assert pid in node.vmms(), "a standby's VMM belongs to the node until the next server looks"
    node.start()
    assert not waiting(node, made)
    assert pid not in node.vmms()
    assert node.metric("aenv_standbys") == 0
    for folder in [node.home / "sandboxes", node.runtime / "sandboxes"]:
        assert [entry.name for entry in folder.iterdir()] == [id]
    assert run(node, id, "echo here") == "here\n"


def test_a_stop_leaves_none(node, made):
    id = create(node, made)
    standby(node)
    node.stop()
    assert not waiting(node, made)
    node.start()
    assert run(node, id, "echo here") == "here\n"


def test_sandboxes_have_the_memory(node, made):
    for _ in range(6):
        create(node, made)
    assert node.metric("aenv_standbys") == 0
    # Paused, two of them leave room for a standby and what it leaves alone; both together do not fit beside it.
    for id in made[:2]:
        assert node.api("POST", f"/sandboxes/{id}/pause", {})[0] == 204
    standby(node)
    given_up = node.metric("aenv_standbys_given_up_total")
    for id in made[:2]:
        assert node.api("POST", f"/v2/sandboxes/{id}/connect", {"timeout": LONG})[0] in (200, 201)
    assert node.metric("aenv_standbys_given_up_total") == given_up + 1
    assert node.metric("aenv_standbys") == 0
    assert not waiting(node, made)
    status, answer = node.api("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, answer["error_code"]) == (429, "sandbox_capacity_unavailable")
    assert all(run(node, id, "echo here") == "here\n" for id in made)
