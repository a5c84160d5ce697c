"""Captures of a sandbox that goes on: each holds what changed since the one before, and all of it is there."""

import json

from e2b import Sandbox

MIB = 1 << 20
LOOK = "sha256sum < /dev/shm/large; cat /dev/shm/small"


def snapshot(server, sandbox):
    """Its id, and the memory layers that its manifest names."""
    folder = server.home / "repository" / "checkpoints"
    before = set(folder.iterdir())
    id = sandbox.create_snapshot().snapshot_id
    [manifest] = set(folder.iterdir()) - before
    return id, json.loads(manifest.read_text())["memory"]["layers"]


def test_a_snapshot_costs_what_changed_since_the_one_before(server):
    sandbox = Sandbox.create("base", timeout=600)
    sandbox.commands.run("head -c 32M /dev/urandom > /dev/shm/large; echo one > /dev/shm/small")
    one = sandbox.commands.run(LOOK).stdout
    first, layers = snapshot(server, sandbox)
    assert layers[-1]["size"] > 32 * MIB
    sandbox.commands.run("echo two > /dev/shm/small")
    second, more = snapshot(server, sandbox)
    assert more[:-1] == layers
    assert more[-1]["size"] < 16 * MIB
    two = one.replace("one", "two")
    # A pause counts from the snapshots, too, and what it is resumed from is whole.
    sandbox.commands.run("echo three > /dev/shm/small")
    sandbox.pause()
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert sandbox.commands.run(LOOK).stdout == one.replace("one", "three")
    for id, expected in [(first, one), (second, two)]:
        other = Sandbox.create(id, timeout=300)
        assert other.commands.run(LOOK).stdout == expected
        other.kill()
        Sandbox.delete_snapshot(id)
    sandbox.kill()
