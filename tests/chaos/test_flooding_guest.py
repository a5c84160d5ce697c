"""A guest that floods: output that nobody reads, its console, its disk, its memory, processes, connections, calls of its envd.

Promised: the server's memory, and each of the host's files, stay bounded; a neighbour goes on answering meanwhile; and the
sandbox that floods can be deleted in the middle of it.
"""

import contextlib
import http.client
import tempfile
import threading
import time
from pathlib import Path

import pytest
from canary import within
from conftest import IMAGE, wait_for
from e2b import Sandbox
from internet import OTHER, Internet

MIB = 1 << 20
#: What the server may grow by while somebody floods.
GROWTH_KIB = 64 << 10
#: In which a neighbour answers, and a flooded sandbox goes. Under emulation on a loaded machine everything takes long.
BOUND = 60


@pytest.fixture(scope="module")
def neighbour(server):
    made = Sandbox.create("base", timeout=1800)
    made.files.write("/home/user/name", "neighbour")
    yield made
    made.kill()


@pytest.fixture
def calm(server, neighbour):
    """Asked during a flood: does the neighbour answer, and has the server kept its size?"""
    before = {name: server.memory_kib(name, "VmRSS") for name in ("server", "blockd")}

    def check():
        began = time.monotonic()
        assert neighbour.files.read("/home/user/name") == "neighbour"
        assert neighbour.commands.run("echo here", timeout=BOUND).stdout == "here\n"
        assert time.monotonic() - began < BOUND
        for name, was in before.items():
            now = server.memory_kib(name, "VmRSS")
            assert now - was < GROWTH_KIB, f"{name} grew from {was} to {now} KiB"

    yield check
    check()


@contextlib.contextmanager
def deleted_in_time(server, id):
    """The sandbox, which is deleted at the end while it still floods."""
    try:
        yield
    finally:
        began = time.monotonic()
        assert server.api("DELETE", f"/sandboxes/{id}")[0] == 204
        wait_for("the VMM's end", lambda: not any(id in " ".join(files) for files in server.vmms().values()), BOUND)
        assert time.monotonic() - began < BOUND


def root(sandbox, script, **options):
    return sandbox.commands.run(script, user="root", **{"timeout": 240, **options})


def taken(folder):
    """Bytes that files below a folder take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_output_that_nobody_reads(server, calm):
    sandbox = Sandbox.create("base", timeout=600)
    with deleted_in_time(server, sandbox.sandbox_id):
        stream = sandbox.commands.run("exec yes a line that nobody reads", background=True, timeout=0)
        for out, _, _ in stream:
            assert out
            break
        written = lambda: int(root(sandbox, f"grep wchar /proc/{stream.pid}/io").stdout.split()[1])

        def stuck():
            first = written()
            return first > 0 and written() == first

        # The reader does not read, so that the writer waits: nothing between them takes what is said.
        wait_for("a writer that waits", stuck, BOUND)
        assert written() < 64 * MIB
        calm()


def test_a_console_that_never_stops(server, calm):
    sandbox = Sandbox.create("base", timeout=600)
    log = server.home / "sandboxes" / sandbox.sandbox_id / "serial.log"
    with deleted_in_time(server, sandbox.sandbox_id):
        root(sandbox, "yes $(head -c 1000 /dev/zero | tr '\\0' x) > /dev/ttyS0 2>&1 &", timeout=60)
        # Once the older half has been thrown away, the bound has held.
        wait_for("the log's second half", lambda: log.with_name("serial.log.1").exists(), 180)
        first = log.with_name("serial.log.1").stat().st_ino
        calm()
        wait_for("the first half's end", lambda: log.with_name("serial.log.1").stat().st_ino != first, 180)
        assert sum(file.stat().st_size for file in log.parent.glob("serial.log*")) <= 2 * (512 << 10) + (64 << 10)


def test_disks_that_are_full_and_written_for_ever(server, calm):
    drive = 64
    body = {
        "image": f"oci:{IMAGE}", "cpuCount": 1, "memoryMB": 512, "timeout": 600,
        "attachedDrives": [{"name": "data", "diskSizeMB": drive}],
    }
    status, answer = server.api("POST", "/sandboxes-cold", body)
    assert status == 201, answer
    id = answer["sandboxID"]
    sandbox = Sandbox.connect(id, timeout=600)
    upper = server.home / "sandboxes" / id / "data"
    with deleted_in_time(server, id):
        full = root(sandbox, "dd if=/dev/zero of=/dev/vdb bs=1M oflag=direct 2>&1 || true").stdout
        assert "No space left on device" in full and f"{drive * MIB} bytes" in full
        assert taken(upper) <= (drive + 16) * MIB
        # Again and again, without ever asking for durability.
        again = f"for _ in 1 2 3 4 5 6 7 8; do dd if=/dev/zero of=/dev/vdb bs=1M count={drive} oflag=direct 2>/dev/null; done"
        root(sandbox, again)
        assert taken(upper) <= 3 * drive * MIB
        calm()


def test_memory_until_there_is_none(server, calm):
    sandbox = Sandbox.create("base", timeout=600)
    with deleted_in_time(server, sandbox.sandbox_id):
        [vmm] = [pid for pid, files in server.vmms().items() if sandbox.sandbox_id in " ".join(files)]
        eats = "import itertools\nkept = [bytearray(b'x') * (8 << 20) for _ in itertools.count()]"
        sandbox.files.write("/tmp/eats.py", eats)
        ended = root(sandbox, "python3 -IS /tmp/eats.py; echo ended with $?")
        assert ended.stdout in ("ended with 137\n", "ended with 1\n"), "it had more than there is"
        with open(f"/proc/{vmm}/status") as file:
            resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        assert resident < (512 + 256) << 10
        assert root(sandbox, "echo here").stdout == "here\n"
        calm()


BOMB = "bomb() { bomb | bomb & }; bomb"


def test_processes_without_end(server, calm):
    sandbox = Sandbox.create("base", timeout=600)
    with deleted_in_time(server, sandbox.sandbox_id):
        # With a limit its own envd is not disturbed.
        sandbox.commands.run(f"(ulimit -u 64; {BOMB}) > /dev/null 2>&1 &", timeout=60)
        assert root(sandbox, "echo here").stdout == "here\n"
        root(sandbox, "pkill -9 -u user; true")
        # Without one it is its own guest that suffers.
        with contextlib.suppress(Exception):
            sandbox.commands.run(f"({BOMB}) > /dev/null 2>&1 &", timeout=20, request_timeout=20)
        calm()


SENDS = """
import socket, sys
errors = 0
for number in range(12000):
    if number % 400 == 0:
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sender.sendto(b"x", (sys.argv[1], 1024 + number))
    except OSError:
        errors += 1
print("done", errors)
"""


def test_connections_without_end(server, calm):
    sandbox = Sandbox.create("base", timeout=600)
    internet = Internet(server.test_ca.parent, tempfile.mkdtemp(prefix="aenv-internet-", dir=server.home))
    with deleted_in_time(server, sandbox.sandbox_id), contextlib.ExitStack() as stack:
        stack.callback(internet.stop)
        internet.start()
        sandbox.files.write("/tmp/sends.py", SENDS)
        said = root(sandbox, f"python3 -IS /tmp/sends.py {internet.address(OTHER)}").stdout
        assert said.startswith("done")
        count = lambda: int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())
        tracked = within(server.netns(sandbox.sandbox_id), count)
        assert 1000 < tracked <= 8192 + 64
        calm()


def test_calls_of_envd_without_end(server, calm):
    sandbox = Sandbox.create("base", timeout=600)
    id, token = sandbox.sandbox_id, sandbox._envd_access_token
    stopping, statuses = threading.Event(), []

    def call():
        headers = {"e2b-sandbox-id": id, "X-Access-Token": token, "Content-Type": "application/json"}
        while not stopping.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND)
            try:
                connection.request("POST", "/process.Process/List", "{}", headers)
                statuses.append(connection.getresponse().status)
            except OSError:
                statuses.append(0)
            finally:
                connection.close()

    callers = [threading.Thread(target=call) for _ in range(32)]
    with deleted_in_time(server, id):
        for caller in callers:
            caller.start()
        try:
            wait_for("answers", lambda: statuses.count(200) >= 64, BOUND)
            calm()
            assert sandbox.commands.run("echo here", timeout=BOUND).stdout == "here\n"
        finally:
            stopping.set()
            for caller in callers:
                caller.join(BOUND)
    assert set(statuses) <= {200, 429, 502, 503}
