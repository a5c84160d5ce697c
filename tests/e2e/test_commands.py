"""Commands and terminals through the SDK, in the details that only a whole path shows."""

import pytest
from conftest import wait_for
from e2b import NotFoundException, PtySize, TimeoutException


@pytest.mark.compat("python", "commands.run")
def test_output_environment_and_folder(shared):
    run = shared.commands.run
    # A character that is cut at the edge of a piece, and one that never ends.
    assert run("head -c 8191 /dev/zero | tr '\\0' a; printf '\\342'").stdout == "a" * 8191 + "\ufffd"
    odd = "Grüße \"$HOME\" 'x' \\ 世界\n\ttab\n"
    shared.files.write("odd", odd)
    assert run("cat odd").stdout == odd
    both = run("echo out; echo err >&2")
    assert (both.stdout, both.stderr) == ("out\n", "err\n")
    # The variables of the sandbox, of the command, of sudo; none of them stays.
    tell = "echo $COLOUR/$FOO; python3 -ISc 'import os; print(os.environ[\"FOO\"])'; sudo sh -c 'echo \"[$FOO]\"'; pwd"
    assert run(tell, envs={"FOO": "bar"}).stdout == "blue/bar\nbar\n[]\n/home/user\n"
    assert run('echo "[$FOO]"').stdout == "[]\n"
    shared.files.write("beside", "x")
    assert run("cat $PWD/beside").stdout == "x"


@pytest.mark.compat("python", "commands.list", "commands.kill", "commands.send_stdin", "commands.close_stdin")
def test_processes(shared):
    one, two = (shared.commands.run("sleep 3600", background=True, timeout=0) for _ in range(2))
    assert {one.pid, two.pid} <= {process.pid for process in shared.commands.list()}
    for each in [one, two]:
        assert each.kill()
    pids = f"{one.pid} {two.pid}"
    shared.commands.run(f"for p in {pids}; do while kill -0 $p; do sleep 0.1; done; done", user="root")
    assert shared.commands.kill(999_999) is False and shared.pty.kill(999_999) is False
    with pytest.raises(NotFoundException):
        shared.commands.connect(999_999)
    slow = shared.commands.run("sleep 30", background=True, timeout=2)
    with pytest.raises(TimeoutException):
        slow.wait()

    cat = shared.commands.run("cat", background=True, stdin=True)
    shared.commands.send_stdin(cat.pid, "typed\n")
    shared.commands.send_stdin(cat.pid, "")
    seen = ""
    for out, _, _ in cat:
        seen += out or ""
        if seen == "typed\n":
            shared.commands.send_stdin(cat.pid, "more\n")
            shared.commands.close_stdin(cat.pid)
    ended = cat.wait()
    assert ended.exit_code == 0 and ended.stdout == "typed\nmore\n"


@pytest.mark.compat("python", "pty.create", "pty.resize", "pty.send_stdin", "pty.connect", "pty.kill")
def test_terminals(shared):
    first = shared.pty.create(PtySize(rows=24, cols=80), envs={"FOO": "bar"}, cwd="/tmp")
    pid = first.pid
    shared.pty.send_stdin(pid, b"echo begin-$FOO-$(tput cols)-$PWD\n")
    seen = b""
    for _, _, data in first:
        seen += data or b""
        if b"begin-bar-80-/tmp" in seen:
            break
    first.disconnect()
    again = shared.pty.connect(pid)
    shared.pty.resize(pid, PtySize(rows=24, cols=100))
    shared.pty.send_stdin(pid, b"echo later-$(tput cols); exit 3\n")
    seen = []
    with pytest.raises(Exception) as ended:
        again.wait(on_pty=seen.append)
    assert ended.value.exit_code == 3
    assert b"later-100" in b"".join(seen)
    other = shared.pty.create(PtySize(rows=24, cols=80))
    assert shared.pty.kill(other.pid) is True
    wait_for("its end", lambda: other.pid not in [process.pid for process in shared.commands.list()])
