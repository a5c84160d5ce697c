"""The script of README.md and what it promises, with the published Python SDK."""

import time
import urllib.error
import urllib.request

import pytest
from conftest import LONG, wait_for
from e2b import CommandExitException, NotFoundException, Sandbox, TimeoutException


def test_the_readme_script(server):
    sandbox = Sandbox.create("base", timeout=LONG)
    assert sandbox.commands.run("python3 -c 'print(6*7)'").stdout == "42\n"
    sandbox.files.write("/home/user/a.txt", "hi")
    assert "a.txt" in [entry.name for entry in sandbox.files.list("/home/user")]
    sandbox.pause()
    assert not sandbox.is_running()
    sandbox = Sandbox.connect(sandbox.sandbox_id)
    assert sandbox.files.read("/home/user/a.txt") == "hi"

    children = sandbox.fork(count=4, timeout=LONG)
    ids = {child.sandbox_id for child in children}
    assert len(ids) == 4 and sandbox.sandbox_id not in ids
    assert sandbox.is_running()
    for child in children:
        assert child.files.read("/home/user/a.txt") == "hi"
        child.files.write("/home/user/a.txt", child.sandbox_id)
    assert sandbox.files.read("/home/user/a.txt") == "hi"

    snapshot = sandbox.create_snapshot(name="prepared")
    assert sandbox.is_running()
    copy = Sandbox.create(snapshot.snapshot_id)
    assert copy.files.read("/home/user/a.txt") == "hi"
    for one in [sandbox, copy, *children]:
        assert one.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


def state(sandbox):
    """What must survive a pause: the boot, a process, memory, and a TCP connection inside the guest."""
    run = sandbox.commands.run
    return {
        "boot": run("cat /proc/sys/kernel/random/boot_id").stdout,
        "memory": run("sha256sum /dev/shm/memory").stdout,
        "file": run("sha256sum ~/file").stdout,
        "pids": run("cat ~/pids").stdout,
        "alive": run("for p in $(cat ~/pids); do cat /proc/$p/comm; done").stdout,
    }


PING = r"""
import os, socket, threading, time
listener = socket.create_server(("127.0.0.1", 7070))
def echo():
    peer, _ = listener.accept()
    while data := peer.recv(100): peer.sendall(data)
threading.Thread(target=echo, daemon=True).start()
client = socket.create_connection(("127.0.0.1", 7070))
count = 0
while True:
    client.sendall(b"ping"); assert client.recv(100) == b"ping"
    count += 1
    with open("/tmp/next", "w") as file: file.write(str(count))
    os.replace("/tmp/next", "/tmp/count")  # A reader never sees the file empty.
    time.sleep(0.05)
"""


def test_pause_and_resume_twice(sandbox):
    run = sandbox.commands.run
    sandbox.files.write("/home/user/ping.py", PING)
    run("head -c 8M /dev/urandom > /dev/shm/memory; head -c 8M /dev/urandom > ~/file")
    sleeper = sandbox.commands.run("sleep 3600", background=True, timeout=0)
    pinger = sandbox.commands.run("python3 ~/ping.py", background=True, timeout=0)
    run(f"echo {sleeper.pid} {pinger.pid} > ~/pids; while [ ! -s /tmp/count ]; do sleep 0.5; done", timeout=600)
    before = state(sandbox)
    for _ in range(2):
        count = int(run("cat /tmp/count").stdout)
        sandbox.pause()
        # Longer than a clock may be late that was set: who sets it needs a moment to be heard.
        time.sleep(3)
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=LONG)
        began = time.time()
        guest = float(sandbox.commands.run("date +%s.%N").stdout)
        ended = time.time()
        assert began - 1 <= guest <= ended + 1, f"the guest's clock is off: {began} {guest} {ended}"
        assert state(sandbox) == before
        # The connection inside the guest goes on.
        sandbox.commands.run(f"while [ $(cat /tmp/count) -le {count} ]; do sleep 0.5; done", timeout=600)


def test_fork_16_with_changed_memory(server):
    source = Sandbox.create("base", timeout=LONG)
    source.commands.run("head -c 32M /dev/urandom > /dev/shm/changed; echo source > ~/who")
    checksum = source.commands.run("sha256sum /dev/shm/changed").stdout
    children = source.fork(count=16, timeout=LONG)
    assert len(children) == 16
    ask = "sha256sum /dev/shm/changed; head -c 16 /dev/urandom | xxd -p 2>/dev/null || head -c 16 /dev/urandom | od -An -tx1; "
    ask += "python3 -c 'import uuid; print(uuid.uuid4())'; cat /etc/machine-id; hostname"
    answers = []
    for number, child in enumerate(children):
        lines = child.commands.run(ask, timeout=60).stdout.splitlines()
        assert lines[0] + "\n" == checksum
        answers.append(lines[1:])
        child.files.write("/home/user/who", f"child {number}")
    for column in zip(*answers):
        assert len(set(column)) == 16, f"two children agree on {column}"
    tokens = {child._envd_access_token for child in children}
    assert len(tokens) == 16
    assert source.files.read("/home/user/who") == "source\n"
    source.files.write("/home/user/who", "changed after")
    for number, child in enumerate(children):
        assert child.files.read("/home/user/who") == f"child {number}"
        assert child.kill()
    source.kill()


def test_errors_read_as_the_sdk_expects(sandbox):
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("exit 7")
    assert failed.value.exit_code == 7
    with pytest.raises(CommandExitException):
        sandbox.commands.run("no-such-command")
    with pytest.raises(Exception, match="does not exist"):
        sandbox.commands.run("true", cwd="/no/such/folder")
    with pytest.raises(NotFoundException):
        sandbox.files.read("/no/such/file")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 30", timeout=2)
    assert Sandbox.kill("nonexistingsandbox") is False


def test_hosts_and_ports(server, sandbox):
    sandbox.commands.run("python3 -m http.server 8123", background=True, timeout=0)
    host = sandbox.get_host(8123)

    def get(port_host):
        request = urllib.request.Request(server.url + "/", headers={"Host": port_host})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    wait_for("the guest's web server", lambda: get(host)[0] == 200, 90)
    status, body = get(sandbox.get_host(9))
    assert status == 502 and b"port is not open" in body
    sandbox.kill()
    status, body = get(host)
    assert status == 502 and b"was not found" in body


def test_ttl_is_kept(server):
    killed = Sandbox.create("base", timeout=5, lifecycle={"on_timeout": "kill"})
    paused = Sandbox.create("base", timeout=5, lifecycle={"on_timeout": "pause"})

    def handled():
        states = {entry["sandboxID"]: entry["state"] for entry in server.api("GET", "/v2/sandboxes")[1]}
        return killed.sandbox_id not in states and states[paused.sandbox_id] == "paused"

    # The second one's deadline is the later one.
    time.sleep(max(0, paused.get_info().end_at.timestamp() - time.time()))
    wait_for("the end of both", handled, 1, every=0.05)
    assert not killed.is_running() and not paused.is_running()
    assert paused.kill()


def test_traffic_wakes_it(server):
    sandbox = Sandbox.create("base", timeout=LONG, lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("/home/user/a.txt", "still here")
    sandbox.pause()
    assert sandbox.files.read("/home/user/a.txt") == "still here"
    assert sandbox.get_info().state.value == "running"
    sandbox.kill()
