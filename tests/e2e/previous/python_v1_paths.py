"""The last Python SDK that creates and connects by the first version's paths. Prints each call that gave what it should."""

from e2b import CommandExitException, PtySize, Sandbox, SandboxQuery, SandboxState


def came_to(*calls):
    for call in calls:
        print(call, flush=True)


sandbox = Sandbox.create("base", timeout=3600, metadata={"by": "python-v1-paths"}, envs={"COLOUR": "blue"})
came_to("Sandbox.create")
children = []
try:
    assert sandbox.commands.run("echo $COLOUR; id -un").stdout == "blue\nuser\n"
    try:
        sandbox.commands.run("exit 7")
        raise AssertionError("no exit code")
    except CommandExitException as error:
        assert error.exit_code == 7
    came_to("commands.run")
    sleeper = sandbox.commands.run("sleep 3600", background=True, timeout=0)
    sandbox.files.write_files([{"path": "a.txt", "data": "hi"}, {"path": "b/c.txt", "data": "there"}])
    assert sandbox.files.read("b/c.txt") == "there"
    assert [entry.path for entry in sandbox.files.list("b", depth=2)] == ["/home/user/b/c.txt"]
    assert sandbox.files.get_info("a.txt").size == 2
    came_to("files.write_files", "files.read", "files.list", "files.get_info")
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(terminal.pid, b"echo cols=$(tput cols); exit\n")
    seen = []
    terminal.wait(on_pty=seen.append)
    assert b"cols=80" in b"".join(seen), seen
    came_to("pty.create", "pty.send_stdin")

    assert sandbox.pause() and not sandbox.is_running() and not sandbox.beta_pause()
    came_to("Sandbox.pause", "Sandbox.beta_pause", "Sandbox.is_running")
    query = SandboxQuery(metadata={"by": "python-v1-paths"}, state=[SandboxState.PAUSED])
    assert [entry.sandbox_id for entry in Sandbox.list(query).next_items()] == [sandbox.sandbox_id]
    came_to("Sandbox.list")
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=3600)
    assert sleeper.pid in [process.pid for process in sandbox.commands.list()]
    came_to("Sandbox.connect", "commands.list")
    before = sandbox.get_info().end_at
    sandbox.set_timeout(7200)
    assert sandbox.get_info().end_at > before
    came_to("Sandbox.get_info", "Sandbox.set_timeout")

    children = sandbox.fork(count=2, timeout=3600)
    assert [child.files.read("a.txt") for child in children] == ["hi", "hi"]
    came_to("Sandbox.fork")
    snapshot = sandbox.create_snapshot()
    assert snapshot.snapshot_id in [entry.snapshot_id for entry in sandbox.list_snapshots().next_items()]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) and not Sandbox.delete_snapshot(snapshot.snapshot_id)
    came_to("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot")
finally:
    for one in [sandbox, *children]:
        assert one.kill()
assert not Sandbox.kill("nonexistingsandbox")
came_to("Sandbox.kill")
