"""The published Python SDK against the daemon alone: a control plane of twenty lines hands out one sandbox.

Run it with the path of a daemon:  AENV_ENVD=target/release/aenv-envd pytest crates/aenv-envd/tests/sdk
Needs root (processes run as other users) and the packages e2b and pytest.
"""

import http.server
import json
import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

TOKEN = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
SANDBOX = {
    "templateID": "base",
    "sandboxID": "iabc",
    "clientID": "c",
    "envdVersion": "0.6.13",
    "envdAccessToken": TOKEN,
}


class ControlPlane(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        body = json.dumps(SANDBOX).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self):
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def sandbox():
    envd = subprocess.Popen(
        [os.environ["AENV_ENVD"], "--bind", "127.0.0.1", "--port", "0", "--no-system", "--host", "127.0.0.1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    address = None
    while address is None:
        found = re.search(r"listening on (\S+)", envd.stderr.readline())
        address = found and found.group(1)
    threading.Thread(target=lambda: [print(line) for line in envd.stderr], daemon=True).start()
    init = {"accessToken": TOKEN, "defaultUser": "root", "envVars": {"GLOBAL": "yes"}, "lifecycleID": "1"}
    request = urllib.request.Request(
        f"http://{address}/init", json.dumps(init).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()

    plane = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ControlPlane)
    threading.Thread(target=plane.serve_forever, daemon=True).start()
    from e2b import Sandbox

    made = Sandbox.create(
        api_key="e2b_" + "0" * 40,
        api_url=f"http://127.0.0.1:{plane.server_port}",
        sandbox_url=f"http://{address}",
    )
    yield made
    envd.kill()
    envd.wait()
    plane.shutdown()


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def test_is_running(sandbox):
    assert sandbox.is_running()


def test_run(sandbox):
    result = sandbox.commands.run("echo $GLOBAL $X; echo err >&2", envs={"X": "own"})
    assert (result.stdout, result.stderr, result.exit_code) == ("yes own\n", "err\n", 0)
    text = "line\n\ttab 'quote' \"double\" $HOME \\ äöü\n"
    assert sandbox.commands.run("cat <<'EOF'\n" + text + "EOF").stdout == text


def test_run_split_utf8(sandbox):
    result = sandbox.commands.run("head -c 8191 /dev/zero | tr '\\0' a; printf '\\342'")
    assert result.stdout == "a" * 8191 + "\ufffd"


def test_run_failures(sandbox):
    from e2b import CommandExitException, NotFoundException, TimeoutException
    from e2b.exceptions import AuthenticationException

    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo out; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "out\n")
    started = time.monotonic()
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 30", timeout=2)
    assert time.monotonic() - started < 15
    with pytest.raises(AuthenticationException):
        sandbox.commands.run("true", user="root123")
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999999)
    assert sandbox.commands.kill(999999) is False


def test_run_as_user(sandbox):
    assert sandbox.commands.run("id -un; pwd", user="nobody", cwd="/tmp").stdout == "nobody\n/tmp\n"


def test_background(sandbox):
    one = sandbox.commands.run("sleep 1000", background=True)
    two = sandbox.commands.run("sleep 1001", background=True)
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert {one.pid, two.pid} <= set(listed)
    assert listed[one.pid].cmd == "/bin/bash"
    assert one.kill() and sandbox.commands.kill(two.pid)
    assert not one.kill()
    alive = sandbox.commands.run(f"kill -0 {one.pid} 2>/dev/null || echo gone")
    assert alive.stdout == "gone\n"


def test_stdin(sandbox):
    seen = []
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "")
    sandbox.commands.send_stdin(handle.pid, "hello\n")
    sandbox.commands.close_stdin(handle.pid)
    result = handle.wait(on_stdout=seen.append)
    assert (result.stdout, result.exit_code, "".join(seen)) == ("hello\n", 0, "hello\n")


def test_reconnect(sandbox):
    handle = sandbox.commands.run("sleep 1; echo later", background=True)
    handle.disconnect()
    assert sandbox.commands.connect(handle.pid).wait().stdout == "later\n"


def test_pty(sandbox):
    from e2b.sandbox.commands.command_handle import PtySize

    output = []
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24), envs={"FOO": "bar"}, cwd="/tmp")
    sandbox.pty.send_stdin(terminal.pid, b"tput cols; echo $FOO-$PWD\n")
    sandbox.pty.resize(terminal.pid, PtySize(cols=100, rows=24))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    result = terminal.wait(on_pty=lambda data: output.append(data.decode(errors="replace")))
    text = "".join(output)
    assert result.exit_code == 0
    assert "bar-/tmp" in text and "24 100" in text, text


def test_files(sandbox, folder):
    from e2b import FileNotFoundException

    written = sandbox.files.write(f"{folder}/deep/a.txt", "hällo")
    assert (written.name, written.path, written.type.value) == ("a.txt", f"{folder}/deep/a.txt", "file")
    assert written.metadata is None
    assert sandbox.files.read(f"{folder}/deep/a.txt") == "hällo"
    assert sandbox.files.read(f"{folder}/deep/a.txt", format="bytes") == "hällo".encode()
    assert b"".join(sandbox.files.read(f"{folder}/deep/a.txt", format="stream")) == "hällo".encode()
    assert sandbox.files.read(f"{folder}/deep/a.txt", gzip=True) == "hällo"
    sandbox.files.write(f"{folder}/zip.txt", "z" * 100_000, gzip=True)
    assert sandbox.files.read(f"{folder}/zip.txt") == "z" * 100_000
    sandbox.files.write(f"{folder}/empty", "")
    assert sandbox.files.read(f"{folder}/empty") == ""
    many = sandbox.files.write_files([{"path": f"{folder}/{name}", "data": name} for name in ("x", "y", "z")])
    assert [file.name for file in many] == ["x", "y", "z"]
    with pytest.raises(FileNotFoundException):
        sandbox.files.read(f"{folder}/none")
    with pytest.raises(FileNotFoundException):
        list(sandbox.files.read(f"{folder}/none", format="stream"))


def test_entries(sandbox, folder):
    from e2b import FileNotFoundException

    sandbox.files.write(f"{folder}/f", "four")
    info = sandbox.files.get_info(f"{folder}/f")
    assert (info.mode, info.permissions, info.owner, info.group, info.size) == (0o644, "-rw-r--r--", "root", "root", 4)
    assert info.modified_time.tzinfo is not None
    os.symlink(f"{folder}/f", f"{folder}/link")
    link = sandbox.files.get_info(f"{folder}/link")
    assert (link.type.value, link.symlink_target) == ("file", f"{folder}/f")
    assert sandbox.files.make_dir(f"{folder}/d/e") is True
    assert sandbox.files.make_dir(f"{folder}/d/e") is False
    names = [entry.path[len(folder) + 1 :] for entry in sandbox.files.list(folder, depth=5)]
    assert names == ["d", "d/e", "f", "link"]
    moved = sandbox.files.rename(f"{folder}/f", f"{folder}/new/g")
    assert moved.path == f"{folder}/new/g"
    assert not sandbox.files.exists(f"{folder}/f") and sandbox.files.exists(f"{folder}/new/g")
    sandbox.files.remove(f"{folder}/new")
    sandbox.files.remove(f"{folder}/new")
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename(f"{folder}/none", f"{folder}/x")
    with pytest.raises(FileNotFoundException):
        sandbox.files.list(f"{folder}/none")


def test_metadata(sandbox):
    folder = "/var/tmp"
    path = f"{folder}/envd-sdk-{os.getpid()}"
    try:
        written = sandbox.files.write(path, "x", metadata={"Author": "me"})
        assert written.metadata == {"author": "me"}
        assert sandbox.files.get_info(path).metadata == {"author": "me"}
        sandbox.files.write(path, "y")
        assert not sandbox.files.get_info(path).metadata
    finally:
        os.remove(path)


def test_watch(sandbox, folder):
    handle = sandbox.files.watch_dir(folder)
    sandbox.files.write(f"{folder}/f", "x")
    events = []
    while len(events) < 3:
        events += handle.get_new_events()
    assert [(event.name, event.type.value) for event in events] == [("f", "create"), ("f", "chmod"), ("f", "write")]
    handle.stop()
    tree = sandbox.files.watch_dir(folder, recursive=True)
    os.mkdir(f"{folder}/nested")
    with open(f"{folder}/nested/file", "w") as file:
        file.write("x")
    names = set()
    while "nested/file" not in names:
        names |= {event.name for event in tree.get_new_events()}
    tree.stop()


def test_signed_urls(sandbox, folder):
    path = f"{folder}/signed +.txt"
    sandbox.files.write(path, "signed")

    def get(url):
        try:
            with urllib.request.urlopen(url) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    assert get(sandbox.download_url(path, user="root")) == (200, b"signed")
    assert get(sandbox.download_url(path, user="root", use_signature_expiration=60)) == (200, b"signed")
    expired = sandbox.download_url(path, user="root", use_signature_expiration=-120)
    assert get(expired) == (401, b'{"code":401,"message":"signature is already expired"}')


def test_much(sandbox, folder):
    received = [0]

    def count(piece):
        received[0] += len(piece)

    sandbox.commands.run("head -c 20000000 /dev/zero | tr '\\0' x", on_stdout=count, timeout=120)
    assert received[0] == 20_000_000
    data = os.urandom(30_000_000)
    sandbox.files.write(f"{folder}/big", data)
    assert sandbox.files.read(f"{folder}/big", format="bytes") == data
