"""Deadlines, pause, resume, fork and snapshots, in the details that clients rely on."""

import pytest
from conftest import LONG, wait_for
from guest import get, serve
from e2b import Sandbox, SandboxNotFoundException, SandboxState

BOOT = "cat /proc/sys/kernel/random/boot_id"


@pytest.mark.compat("python", "Sandbox.set_timeout", "Sandbox.connect")
def test_deadlines(server):
    """Later calls replace earlier ones; pausing and waking follow the lifecycle."""
    killed, kept = (Sandbox.create("base", timeout=LONG, lifecycle={"on_timeout": "kill"}) for _ in range(2))
    asleep = Sandbox.create("base", timeout=LONG, lifecycle={"on_timeout": "pause"})
    awake = Sandbox.create("base", timeout=LONG, lifecycle={"on_timeout": "pause", "auto_resume": True})
    boot = awake.commands.run(BOOT).stdout
    serve(server, awake, 8000)
    kept.set_timeout(5)
    kept.set_timeout(LONG)
    for one in [killed, asleep, awake]:
        one.set_timeout(5)

    def over():
        states = {entry["sandboxID"]: entry["state"] for entry in server.api("GET", "/v2/sandboxes")[1]}
        return killed.sandbox_id not in states and states[asleep.sandbox_id] == states[awake.sandbox_id] == "paused"

    wait_for("the deadlines", over, 30)
    # The first deadline of this one was before all of theirs.
    assert not killed.is_running() and kept.is_running()
    # Asking does not wake the one without auto-resume, and connecting does.
    assert not asleep.is_running() and asleep.get_info().state == SandboxState.PAUSED
    assert Sandbox.connect(asleep.sandbox_id, timeout=LONG).is_running()
    assert get(server, awake, 8000)[0] == 200
    assert awake.get_info().state == SandboxState.RUNNING
    assert awake.commands.run(BOOT).stdout == boot

    end = kept.get_info().end_at
    Sandbox.connect(kept.sandbox_id, timeout=10)
    assert kept.get_info().end_at == end
    Sandbox.connect(kept.sandbox_id, timeout=LONG + 600)
    assert kept.get_info().end_at > end
    for one in [kept, asleep, awake]:
        assert one.kill()


@pytest.mark.compat("python", "Sandbox.create", "Sandbox.pause", "Sandbox.is_running", "commands.connect")
def test_pause_and_resume_with_and_without_memory(server):
    sandbox = Sandbox.create("base", timeout=LONG, envs={"COLOUR": "blue"}, lifecycle={"on_timeout": None})
    sleeper = sandbox.commands.run("sleep 3600", background=True, timeout=0)
    sandbox.files.write("kept", "by the disk")
    serve(server, sandbox, 8000)
    boot = sandbox.commands.run(BOOT).stdout
    assert sandbox.pause() is True and sandbox.pause() is False
    assert not sandbox.is_running()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=LONG)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again._envd_access_token == sandbox._envd_access_token and len(again._envd_access_token) >= 32
    # The object from before the pause goes on, and so does everything in the guest.
    assert sandbox.commands.run(f"echo $COLOUR; {BOOT}").stdout == "blue\n" + boot
    assert sleeper.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.connect(sleeper.pid).kill()
    assert get(server, sandbox, 8000)[0] == 200

    assert sandbox.pause(keep_memory=False) is True
    assert Sandbox.connect(sandbox.sandbox_id, timeout=LONG).is_running()
    after = sandbox.commands.run(f"echo $COLOUR; {BOOT}; cat kept").stdout.splitlines()
    assert after[0] == "blue" and after[1] != boot.strip() and after[2] == "by the disk"
    assert sandbox.kill() and not sandbox.is_running()


@pytest.mark.compat("python", "Sandbox.fork", "Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot")
def test_snapshots_and_forks(server):
    source = Sandbox.create("base", timeout=LONG)
    source.files.write("who", "source")
    snapshot = source.create_snapshot(name="shelf")
    assert source.is_running() and any("shelf" in name for name in snapshot.names)
    one, other = (Sandbox.create(snapshot.snapshot_id, timeout=LONG) for _ in range(2))
    one.files.write("who", "one")
    assert [sandbox.files.read("who") for sandbox in [source, one, other]] == ["source", "one", "source"]
    listed = [entry.snapshot_id for entry in source.list_snapshots().next_items()]
    assert listed == [snapshot.snapshot_id]
    assert source.list_snapshots(name="no-such-name").next_items() == []
    (child,) = source.fork(timeout=LONG)
    child.files.write("who", "child")
    assert source.files.read("who") == "source"
    assert len({sandbox.sandbox_id for sandbox in [source, one, other, child]}) == 4
    for sandbox in [source, one, other, child]:
        assert sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        source.fork(count=1)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
