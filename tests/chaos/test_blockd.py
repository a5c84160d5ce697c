"""kill -9 of blockd, which shows every guest its disk and its memory.

Promised: the server starts it again, and creates work again. Paused sandboxes and snapshots are not affected. Sandboxes that ran
have lost their disks: they see I/O errors or are reported as failed; a rollback or a delete works, and what a guest had flushed
before a snapshot is there.
"""

import os
import signal
import time

import pytest
from conftest import own_server, wait_for
from e2b import Sandbox

#: A file that no test reads before blockd is killed, so that no guest has it in its memory.
UNREAD = "/usr/bin/git"


@pytest.fixture(scope="module")
def node(server):
    """A server of its own, because its guests suffer; it has the other one's templates."""
    settings = [
        "network.internal.veth_cidr=10.217.0.0/16",
        f"backend.posix_fs.snapshot_store={server.home}/repository",
        "orchestrator.standby.count=1",
    ]
    with own_server(settings) as made:
        # The SDK speaks to the server that the environment names.
        os.environ.update(made.env)
        try:
            yield made
        finally:
            os.environ.update(server.env)


def start(name):
    sandbox = Sandbox.create("base", timeout=1800)
    sandbox.commands.run(f"echo {name} > name; sync", timeout=120)
    return sandbox


def named(sandbox):
    return sandbox.commands.run("cat name", timeout=120).stdout.strip()


def kill_blockd(node):
    before = node.pid("blockd")
    os.kill(before, signal.SIGKILL)

    def another():
        try:
            return node.pid("blockd") != before and (node.runtime / "blockd.sock").exists()
        except (OSError, ValueError):
            return False

    wait_for("another blockd", another, 60)


def state(node, id):
    """`running` or `failed`: as what it is reported."""
    listed = {entry["sandboxID"]: entry["state"] for entry in node.api("GET", "/v2/sandboxes")[1]}
    if id in listed:
        return listed[id]
    status, answer = node.api("POST", f"/sandboxes/{id}/pause", {})
    assert (status, answer["error_code"]) == (409, "sandbox_failed"), answer
    return "failed"


def test_kill_9_of_blockd(node):
    victim, doomed, sleeper = start("victim"), start("doomed"), start("sleeper")
    kept = victim.create_snapshot().snapshot_id
    sleeper.pause()
    wait_for("a standby", lambda: node.metric("aenv_standbys") == 1)
    kill_blockd(node)

    # New ones, also from the template that had a standby of the dead one's.
    began = time.monotonic()
    fresh = Sandbox.create("base", timeout=600)
    assert fresh.commands.run(f"cat {UNREAD} | wc -c", timeout=120).stdout.strip() != "0"
    assert time.monotonic() - began < 120
    # What did not run has lost nothing.
    assert named(Sandbox.connect(sleeper.sandbox_id, timeout=600)) == "sleeper"
    copy = Sandbox.create(kept, timeout=600)
    assert named(copy) == "victim"

    # What ran has lost its disk, and does not hide it.
    for one in (victim, doomed):
        if state(node, one.sandbox_id) == "running":
            try:
                read = one.commands.run(f"cat {UNREAD} > /dev/null && echo read", timeout=60).stdout
            except Exception:
                read = "failed"
            assert read != "read\n", "it reads from a disk that is gone"
    # A rollback gives it a new one; a delete takes it away.
    status, answer = node.api("POST", f"/sandboxes/{victim.sandbox_id}/rollback", {"snapshotID": kept})
    if state(node, victim.sandbox_id) == "running":
        assert status == 200, answer
        assert named(Sandbox.connect(victim.sandbox_id, timeout=600)) == "victim"
    else:
        assert (status, answer["error_code"]) == (409, "sandbox_failed"), answer
    ids = [one.sandbox_id for one in (victim, doomed, sleeper, fresh, copy)]
    for id in ids:
        assert node.api("DELETE", f"/sandboxes/{id}")[0] == 204
    assert Sandbox.delete_snapshot(kept)
    left = lambda: [file for files in node.vmms().values() for file in files if any(id in file for id in ids)]
    wait_for("the end of all", lambda: not left(), 60)
    exports = lambda: [entry.name for entry in (node.runtime / "jail" / "exports").iterdir() if any(id in entry.name for id in ids)]
    wait_for("no export of theirs", lambda: not exports(), 60)
    assert not [entry for entry in (node.home / "sandboxes").iterdir() if entry.name in ids]


def test_blockd_that_dies_again_and_again(node):
    for _ in range(3):
        kill_blockd(node)
    sandbox = Sandbox.create("base", timeout=600)
    try:
        assert sandbox.commands.run("echo here", timeout=120).stdout == "here\n"
    finally:
        sandbox.kill()
