"""What a process that took a VMM over could reach: a probe with the root folder, network, uid and rights of the VMM tries it."""

import json
import os
import subprocess
import sys

import pytest
from e2b import Sandbox

# Its libraries are loaded before it enters the jail: there are none within.
PROBE = """
import ctypes, json, os, socket, sys

task = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setns(os.open(f"/proc/{task['pid']}/ns/net", os.O_RDONLY), 0) == 0
os.chroot(f"/proc/{task['pid']}/root")
os.chdir("/")
assert libc.prctl(38, 1, 0, 0, 0) == 0
os.setgroups([])
os.setresgid(*[task["uid"]] * 3)
os.setresuid(*[task["uid"]] * 3)
found = {}


def attempt(name, work):
    try:
        work()
        found[name] = "done"
    except OSError as error:
        found[name] = error.strerror


def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def ptrace(pid):
    if libc.ptrace(0x4206, pid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


for path in task["read"]:
    attempt(f"read {path}", lambda: os.close(os.open(path, os.O_RDONLY)))
for path in task["write"]:
    attempt(f"write {path}", lambda: os.close(os.open(path, os.O_RDWR)))
for path in task["list"]:
    attempt(f"list {path}", lambda: os.listdir(path))
for path in task["connect"]:
    attempt(f"connect {path}", lambda: connect(path))
for pid in task["processes"]:
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
    attempt(f"trace {pid}", lambda: ptrace(pid))
print(json.dumps(found))
"""


def status(pid):
    with open(f"/proc/{pid}/status") as lines:
        return dict(line.rstrip("\n").split(":\t", 1) for line in lines)


def vmm(server, sandbox):
    """Pid, uid, and disk as the VMM sees it."""
    disk = f"/{sandbox.sandbox_id}-"
    for pid, files in server.vmms().items():
        # The kernel calls a file so whose name was another export's before.
        for file in (name.removesuffix(" (deleted)") for name in files):
            if disk in file and file.endswith(".disk"):
                return pid, int(status(pid)["Uid"].split()[0]), "/exports/" + os.path.basename(file)
    raise AssertionError(f"no VMM of {sandbox.sandbox_id} in {server.vmms()}")


@pytest.fixture
def pair(server):
    made = [Sandbox.create("base", timeout=300) for _ in range(2)]
    yield made
    for one in made:
        one.kill()


def test_a_vmm_reaches_its_own_disk_and_nothing_else(server, pair):
    (pid, uid, own), (other_pid, other_uid, other) = (vmm(server, one) for one in pair)
    assert uid != other_uid and min(uid, other_uid) >= 1_900_000_000
    for each in (pid, other_pid):
        fields = status(each)
        assert {fields[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
        assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
        assert os.readlink(f"/proc/{each}/root") == str(server.runtime / "jail")
    hidden = [str(server.home), str(server.home / "secrets" / "api-key"), str(server.runtime), "/etc/shadow", "/proc", "/dev"]
    sockets = [str(server.runtime / "blockd.sock"), str(server.runtime / "sandboxes" / pair[1].sandbox_id / "qmp.sock")]
    assert all(map(os.path.exists, hidden + sockets))
    task = {
        "pid": pid,
        "uid": uid,
        "write": [own, other],
        "read": [other, *hidden],
        "list": ["/exports"],
        "connect": sockets,
        "processes": [other_pid, server.pid("server"), server.pid("blockd"), 1],
    }
    run = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(task), capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop(f"write {own}") == "done"
    expected = {f"{what} {other}": "Permission denied" for what in ("read", "write")}
    expected["list /exports"] = "Permission denied"
    expected |= {f"read {path}": "No such file or directory" for path in hidden}
    expected |= {f"connect {path}": "No such file or directory" for path in sockets}
    for process in task["processes"]:
        expected |= {f"{what} {process}": "Operation not permitted" for what in ("signal", "trace")}
    assert found == expected
    # Both are as they were.
    assert [one.commands.run("echo well").stdout for one in pair] == ["well\n"] * 2


def test_a_life_in_the_jail(server, pair):
    """What opens files anew: a pause and a resume, a snapshot, and what comes from it."""
    first = pair[0]
    first.files.write("/home/user/kept", "yes")
    before = vmm(server, first)
    first.pause()
    resumed = Sandbox.connect(first.sandbox_id)
    after = vmm(server, resumed)
    assert after[0] != before[0] and after[1] != before[1], "another process, another uid"
    assert resumed.files.read("/home/user/kept") == "yes"


def test_the_doctor_says_whether_it_is_on(server):
    def said(*settings):
        words = server.command("doctor", "--json", *settings)
        return [f for f in json.loads(subprocess.run(words, capture_output=True).stdout) if f["check"] == "jail"]

    (on,) = said()
    assert on["verdict"] == "ok" and str(server.runtime / "jail") in on["detail"]
    (off,) = said("--set", "qemu.jail.enabled=false")
    assert off["verdict"] == "warning" and "root" in off["detail"]
