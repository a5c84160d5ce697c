"""Power loss: the home's filesystem stops in the middle of everything, and what was not synced is gone.

Promised: whatever was acknowledged is there after the next start, whole: paused sandboxes with their memory and disks, snapshots,
templates, volumes' files, secrets, keys; and what was removed stays removed. What ran has failed, and says so.

The home lies on an ext4 of its own, which is shut down without writing its log (`EXT4_IOC_SHUTDOWN`): from then on nothing reaches its
device, as if the plug had been pulled. All processes end, the mounts and namespaces of that boot go, and the filesystem is mounted anew.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from e2b import Sandbox

from conftest import IMAGE, LONG, Server, end, wait_for

#: `_IOR('X', 125, __u32)` and "without flushing the log", of Linux's fs/ext4/ext4.h.
EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2


class Machine:
    """A server and its disk."""

    def __init__(self, folder):
        self.image, self.home = folder / "disk", folder / "home"
        self.home.mkdir()
        with open(self.image, "wb") as disk:
            disk.truncate(8 << 30)
        # As `mkfs` and the kernel have it, but for tables that would be made in the background meanwhile.
        options = "lazy_itable_init=0,lazy_journal_init=0"
        subprocess.run(["mkfs.ext4", "-q", "-E", options, self.image], check=True)
        self.mount()
        runtime = tempfile.mkdtemp(prefix="aenv-test-", dir="/run")
        settings = ["network.internal.veth_cidr=10.214.0.0/16", "orchestrator.standby.count=0"]
        self.server = Server(self.home, runtime, settings)
        self.server.log = folder / "server.log"

    def mount(self):
        subprocess.run(["mount", "-o", "loop", self.image, self.home], check=True)

    def lose_power(self):
        home = os.open(self.home, os.O_RDONLY)
        try:
            fcntl.ioctl(home, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(home)
        self.end_all()
        self.mount()
        self.server.start()

    def end_all(self):
        server = self.server
        if server.process.poll() is None:
            server.kill()
        blockd = server.pid("blockd")
        for pid in server.vmms():
            end(pid, signal.SIGKILL)
        wait_for("the VMMs' end", lambda: not server.vmms())
        end(blockd, signal.SIGKILL)
        wait_for("blockd's end", lambda: not Path(f"/proc/{blockd}").exists())
        with open("/proc/self/mounts") as mounts:
            of_boot = [line.split()[1] for line in mounts if line.split()[1].startswith(str(server.runtime))]
        for mount in reversed(of_boot):
            subprocess.run(["umount", "-l", mount], check=True)
        shutil.rmtree(server.runtime)
        server.remove_network()
        subprocess.run(["umount", self.home], check=True)


@pytest.fixture(scope="module")
def machine(server):
    folder = Path(tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp"))
    machine = Machine(folder)
    # The SDK's calls of this module go to this server.
    outer = {name: os.environ[name] for name in server.env}
    try:
        machine.server.setup()
        machine.server.start()
        os.environ.update(machine.server.env)
        machine.server.cli("pull", f"oci:{IMAGE}", "--name", "base", "--cpu", "1", "--memory", "512")
        yield machine
    finally:
        os.environ.update(outer)
        with contextlib.suppress(FileNotFoundError):
            machine.end_all()
        shutil.rmtree(folder)


def filled():
    """A sandbox with something in memory and on its disk, and what that is. Nothing of it was synced by its guest."""
    sandbox = Sandbox.create("base", timeout=LONG)
    told = sandbox.commands.run("head -c 8M /dev/urandom | tee /dev/shm/a > a; sha256sum /dev/shm/a a").stdout
    return sandbox, told


def read(id):
    return Sandbox.connect(id, timeout=LONG).commands.run("sha256sum /dev/shm/a a").stdout


def test_what_was_acknowledged_is_there(machine):
    api = machine.server.api
    running, _ = filled()
    paused, told = filled()
    paused.pause()
    machine.lose_power()
    assert read(paused.sandbox_id) == told
    # No power, no guest: what ran says so, and can be removed.
    assert api("GET", f"/sandboxes/{running.sandbox_id}")[0] == 409
    assert api("DELETE", f"/sandboxes/{running.sandbox_id}")[0] == 204

    # It has been resumed: the pause before does not count any more. A snapshot is acknowledged last.
    volume = api("POST", "/volumes", {"name": "kept"})[1]
    secret = api("POST", "/secrets", {"name": "kept", "value": "x"})[1]["secretID"]
    key = api("POST", "/api-keys", {"name": "kept"})[1]["id"]
    snapshot = paused.create_snapshot().snapshot_id
    machine.lose_power()
    assert key in [key["id"] for key in api("GET", "/api-keys")[1]]
    assert api("GET", f"/secrets/{secret}")[0] == 200
    assert api("GET", f"/volumes/{volume['volumeID']}")[0] == 200
    copy = Sandbox.create(snapshot, timeout=LONG)
    assert read(copy.sandbox_id) == told
    api("DELETE", f"/sandboxes/{paused.sandbox_id}")

    copy.pause()
    copy.kill()
    Sandbox.delete_snapshot(snapshot)
    api("DELETE", f"/secrets/{secret}")
    machine.lose_power()
    assert api("GET", f"/sandboxes/{copy.sandbox_id}")[0] == 404
    assert api("GET", "/v2/sandboxes")[1] == []
    assert api("GET", f"/secrets/{secret}")[0] == 404
    assert snapshot not in [entry["snapshotID"] for entry in api("GET", "/snapshots")[1]]


def test_power_goes_at_any_moment(machine):
    """Verbs go on all the time; whatever was answered before the disk stopped holds."""
    answered, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            with contextlib.suppress(Exception):
                sandbox, told = filled()
                snapshot = sandbox.create_snapshot().snapshot_id
                answered.append(("snapshot", snapshot, told))
                sandbox.pause()
                answered.append(("paused", sandbox.sandbox_id, told))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    wait_for("a few answers", lambda: len(answered) >= 4, 120)
    # What is answered from here on may be answered too late.
    acknowledged = list(answered)
    stop.set()
    machine.lose_power()
    for worker in workers:
        worker.join()
    for kind, id, told in acknowledged:
        if kind == "snapshot":
            id = Sandbox.create(id, timeout=LONG).sandbox_id
        assert read(id) == told, kind
        machine.server.api("DELETE", f"/sandboxes/{id}")
