"""The published command `e2b` against a server."""

import json
import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest
from conftest import IMAGE, wait_for

PROGRAM = Path(__file__).parent / "typescript/node_modules/.bin/e2b"
TEMPLATE = "from-e2b-cli"


@pytest.fixture
def e2b(server, tmp_path):
    """`e2b(words...)`: the command's outcome; with nobody logged in, by the key in the environment alone."""
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, **server.env, "HOME": str(home), "NO_UPDATE_NOTIFIER": "1", "NO_COLOR": "1"}

    def run(*words, status=0, **options):
        done = subprocess.run(
            [PROGRAM, *words], env=env, text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            **({} if "input" in options else {"stdin": subprocess.DEVNULL}), **options,
        )
        assert done.returncode == status, f"e2b {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run.env = env
    return run


def parsed(text):
    """JSON, whatever lines stand before it."""
    return json.loads(text[re.search(r"(?m)^[\[{]", text).start():])


def in_a_terminal(env, words, script, seconds=180):
    """Runs the command on a terminal of its own: for each (typed, expected), types once what was expected before is there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(PROGRAM, [str(PROGRAM), *words], {**env, "TERM": "xterm"})
    seen, deadline = b"", time.monotonic() + seconds
    try:
        for expected, typed in script:
            while not re.search(expected, seen):
                assert time.monotonic() < deadline, f"{expected!r} did not come: {seen!r}"
                if select.select([terminal], [], [], 1)[0]:
                    seen += os.read(terminal, 65536)
            seen = b""
            os.write(terminal, typed)
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    if os.read(terminal, 65536):
                        continue
                except OSError:
                    pass
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pid = None
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the command did not end")
    finally:
        if pid:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.compat("cli", "template create", "template list", "template publish", "template delete", "sandbox create", "sandbox kill")
def test_templates(server, e2b, tmp_path):
    (tmp_path / "greeting").write_text("hello\n")
    (tmp_path / "Dockerfile").write_text(f"FROM oci:{IMAGE}\nCOPY greeting /srv/greeting\nRUN cat /srv/greeting > /srv/copy\n")
    words = [TEMPLATE, "--path", tmp_path, "--cpu-count", "1", "--memory-mb", "512"]
    e2b("template", "create", *words)
    try:
        listed = {name: entry for entry in parsed(e2b("template", "list", "--format", "json")) for name in entry["aliases"]}
        assert listed[TEMPLATE]["cpuCount"] == 1 and not listed[TEMPLATE]["public"]
        e2b("template", "publish", "--yes", TEMPLATE)
        assert server.api("GET", f"/templates/aliases/{TEMPLATE}")[1]["public"] is True
        e2b("sandbox", "create", TEMPLATE, "--detach")
        (id,) = [entry["sandboxID"] for entry in server.api("GET", f"/v2/sandboxes?template={TEMPLATE}")[1]]
        assert e2b("sandbox", "exec", id, "cat", "/srv/copy") == "hello\n"
        e2b("sandbox", "kill", id)
        assert server.api("GET", f"/sandboxes/{id}")[0] == 404
    finally:
        e2b("template", "delete", "--yes", TEMPLATE)
    assert server.api("GET", f"/templates/aliases/{TEMPLATE}")[0] == 404


@pytest.mark.compat(
    "cli", "sandbox list", "sandbox info", "sandbox exec", "sandbox logs", "sandbox metrics", "sandbox pause", "sandbox resume",
    "sandbox connect",
)
def test_a_sandbox(server, e2b):
    status, made = server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 600, "metadata": {"by": "e2b-cli"}})
    assert status == 201
    id = made["sandboxID"]

    def states(state):
        listed = parsed(e2b("sandbox", "list", "--format", "json", "--metadata", "by=e2b-cli", "--state", state))
        return [(entry["sandboxId"], entry["state"]) for entry in listed]

    def shown(what):
        return [json.loads(line) for line in e2b("sandbox", what, "--format", "json", id).splitlines() if line.startswith("{")]

    try:
        assert e2b("sandbox", "exec", id, "tr", "a-z", "A-Z", input="quiet") == "QUIET"
        where = ["--user", "root", "--cwd", "/tmp", "--env", "COLOUR=blue"]
        assert e2b("sandbox", "exec", *where, id, "sh", "-c", "id -un; pwd; echo $COLOUR; exit 9", status=9) == "root\n/tmp\nblue\n"
        assert parsed(e2b("sandbox", "info", "--format", "json", id))["metadata"] == {"by": "e2b-cli"}
        assert "sandbox created" in [entry["message"] for entry in shown("logs")]
        # The server asks its guests every few seconds.
        last = wait_for("the first sample", lambda: shown("metrics"), 60)[-1]
        assert last["cpuCount"] == 1 and last["memTotal"] > last["memUsed"] > 0

        script = [(rb"\$ $", b"echo seen-$((6*7)); tty\n"), (rb"seen-42\r+\n/dev/pts/", b"exit\n")]
        assert in_a_terminal(e2b.env, ["sandbox", "connect", id], script) == 0

        e2b("sandbox", "pause", id)
        assert states("paused") == [(id, "paused")]
        e2b("sandbox", "resume", id)
        assert states("running") == [(id, "running")]
    finally:
        server.api("DELETE", f"/sandboxes/{id}")
    # Of one that is gone, `kill` warns and `info` fails.
    e2b("sandbox", "kill", id)
    e2b("sandbox", "info", id, status=1)
