"""Large streams pass in constant memory: the server, blockd and envd stay below 100 MB each."""

import hashlib
import io
import os
import tempfile

import pytest
from conftest import LONG, running_server, wait_for
from e2b import Sandbox

MIB = 1 << 20
LIMIT_KIB = 100 * 1024


@pytest.fixture(scope="module")
def quiet(server):
    """A server of the streams' own: what others did on it would be in the peaks too."""
    outer = {name: os.environ[name] for name in server.env}
    home = tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    settings = ["network.internal.veth_cidr=10.225.0.0/16", "orchestrator.standby.count=0"]
    try:
        with running_server(home, settings) as made:
            os.environ.update(made.env)
            yield made
    finally:
        os.environ.update(outer)


@pytest.fixture
def watched(quiet):
    """A sandbox; at the end no process may have been above the limit since the beginning."""
    server, sandbox = quiet, Sandbox.create("base", timeout=LONG)
    for name in ["server", "blockd"]:
        # What the capture of the template took goes back when there was none for a while.
        wait_for(f"{name} at rest", lambda: server.memory_kib(name, "VmRSS") < LIMIT_KIB, 90)
        server.forget_peak(name)
    yield sandbox
    for name in ["server", "blockd"]:
        peak = server.memory_kib(name, "VmHWM")
        assert peak < LIMIT_KIB, f"{name} reached {peak} KiB"
    status = sandbox.commands.run("cat /proc/$(pgrep -o envd)/status", user="root").stdout
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    assert peak < LIMIT_KIB, f"envd reached {peak} KiB"
    sandbox.kill()


def test_200_mb_through_stdout(watched):
    size = 0

    def count(text):
        nonlocal size
        size += len(text)

    watched.commands.run("head -c 200000000 /dev/zero | tr '\\0' 'x'", on_stdout=count, timeout=900)
    assert size == 200_000_000


class Pattern(io.RawIOBase):
    """A GiB that is made as it is read."""

    def __init__(self, size):
        self.left, self.hash = size, hashlib.sha256()
        self.block = hashlib.sha256(b"x").digest() * 2048

    def readable(self):
        return True

    def read(self, size=-1):
        size = min(self.left, size if size > 0 else MIB, len(self.block))
        piece = self.block[:size]
        self.left -= size
        self.hash.update(piece)
        return piece


def test_a_gib_up_and_down(watched):
    source = Pattern(1024 * MIB)
    watched.files.write("/home/user/big", source, request_timeout=1500, use_octet_stream=True)
    down = hashlib.sha256()
    size = 0
    for piece in watched.files.read("/home/user/big", format="stream", request_timeout=1500):
        down.update(piece)
        size += len(piece)
    assert size == 1024 * MIB
    assert down.digest() == source.hash.digest()
