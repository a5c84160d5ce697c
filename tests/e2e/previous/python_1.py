"""The first generation of the Python SDK, 1.x: no routing headers, hosts below one domain, TLS.

Prints the name of each call once it has given what it should.
"""

import socket
import time

REAL = socket.getaddrinfo
# Every host name of the test's domain is this machine.
socket.getaddrinfo = lambda host, *rest, **more: REAL("127.0.0.1" if str(host).endswith(".test") else host, *rest, **more)

from e2b import CommandExitException, NotFoundException, Sandbox  # noqa: E402
from e2b.sandbox.commands.command_handle import PtySize  # noqa: E402


def came_to(*calls):
    for call in calls:
        print(call, flush=True)


sandbox = Sandbox("base", timeout=3600, metadata={"by": "python-1"}, envs={"COLOUR": "blue"})
came_to("Sandbox()")
try:
    assert sandbox.is_running()
    came_to("Sandbox.is_running")
    assert sandbox.commands.run("echo $COLOUR; pwd; id -un").stdout == "blue\n/home/user\nuser\n"
    try:
        sandbox.commands.run("exit 7", user="root", cwd="/tmp", envs={"A": "b"})
        raise AssertionError("no exit code")
    except CommandExitException as error:
        assert error.exit_code == 7
    came_to("commands.run")
    cat = sandbox.commands.run("cat", background=True)
    assert cat.pid in [process.pid for process in sandbox.commands.list()]
    came_to("commands.list")
    sandbox.commands.send_stdin(cat.pid, "typed\n")
    came_to("commands.send_stdin")
    assert sandbox.commands.connect(cat.pid).pid == cat.pid
    came_to("commands.connect")
    assert cat.kill() and not sandbox.commands.kill(999_999)
    came_to("commands.kill")

    watch = sandbox.files.watch_dir("/home/user")
    written = sandbox.files.write("notes/a.txt", "hi")
    assert (written.name, written.path) == ("a.txt", "/home/user/notes/a.txt")
    sandbox.files.write("b.txt", b"\x00\xff")
    # They are collected in the background.
    events, deadline = [], time.monotonic() + 60
    while not (events := watch.get_new_events()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert events[0].name == "notes"
    watch.stop()
    came_to("files.watch_dir")
    assert sandbox.files.read("b.txt", format="bytes") == b"\x00\xff" and sandbox.files.read("notes/a.txt") == "hi"
    came_to("files.write", "files.read")
    assert {entry.name for entry in sandbox.files.list("/home/user")} >= {"notes", "b.txt"}
    came_to("files.list")
    assert sandbox.files.make_dir("deep/er") and not sandbox.files.make_dir("deep/er")
    came_to("files.make_dir")
    assert sandbox.files.rename("b.txt", "deep/c.txt").path == "/home/user/deep/c.txt"
    came_to("files.rename")
    sandbox.files.remove("deep")
    assert not sandbox.files.exists("deep")
    came_to("files.remove", "files.exists")
    try:
        sandbox.files.read("deep")
        raise AssertionError("nothing was missing")
    except NotFoundException:
        pass

    terminal = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.resize(terminal.pid, PtySize(rows=24, cols=100))
    sandbox.pty.send_stdin(terminal.pid, b"echo cols=$(tput cols); exit\n")
    seen = []
    terminal.wait(on_pty=seen.append)
    assert b"cols=100" in b"".join(seen), seen
    came_to("pty.create", "pty.resize", "pty.send_stdin")

    info = sandbox.get_info()
    assert info.metadata == {"by": "python-1"}
    sandbox.set_timeout(7200)
    assert sandbox.get_info().end_at > info.end_at
    came_to("Sandbox.get_info", "Sandbox.set_timeout")
    assert sandbox.sandbox_id in [entry.sandbox_id for entry in Sandbox.list()]
    came_to("Sandbox.list")
    assert Sandbox.connect(sandbox.sandbox_id).files.read("notes/a.txt") == "hi"
    came_to("Sandbox.connect")
finally:
    sandbox.kill()  # Says nothing in this version.
assert not sandbox.is_running()
came_to("Sandbox.kill")
