"""A server of the tests' own: real VMs, the real base image, nothing shared with a server that runs on this machine."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from internet import make_ca

pytest_plugins = ["compatibility"]

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
GUEST = BIN.parent / "x86_64-unknown-linux-musl" / "guest"
IMAGE = Path(os.environ.get("AENV_BASE_IMAGE", ROOT / ".build" / "base-image"))
#: Seconds that no test takes, nor a whole run, on whatever machine.
LONG = 6 * 3600


def wait_for(what, check, seconds=60.0, every=0.1):
    """Waits for a level, not for time: `check` is asked until it gives something true, once more when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline
        found = check()
        if found:
            return found
        if late:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(every)


FIRST_PORT = 10_000
PORT_NUMBERS = itertools.count(random.randrange(FIRST_PORT))


def free_port():
    """A port that nobody gets between this and its use: the kernel gives none below its range to whoever asks for any, and a run
    gets none twice. A server that is started again needs the same one."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in itertools.islice(PORT_NUMBERS, 1000):
        port = FIRST_PORT + number % max(end - FIRST_PORT, FIRST_PORT)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Server:
    """An aenv-server process on a home of its own."""

    def __init__(self, home, runtime, settings=(), variables=None):
        self.home, self.runtime, self.settings = Path(home), Path(runtime), list(settings)
        self.variables = variables or {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = self.home / "server.log"
        self.process = self.key = None
        self.env = {}

    def command(self, *words):
        return [BIN / "aenv-server", *words, "--home", self.home, "--runtime", self.runtime]

    def setup(self):
        subprocess.run(self.command("setup", "--guest", GUEST), check=True)

    def start(self, crash_point=None, wait=True):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_"))}
        env.update(self.variables)
        if crash_point:
            env["AENV_CRASH_POINT"] = crash_point
        flags = ["--listen", f"127.0.0.1:{self.port}"]
        for setting in self.settings:
            flags += ["--set", setting]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command("serve", *flags), stdout=log, stderr=log, env=env, start_new_session=True
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self):
        def ready():
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=2).status < 300
            except (OSError, urllib.error.URLError):
                return False

        wait_for("the server's health", ready, 60)
        self.key = (self.home / "secrets" / "api-key").read_text().strip()
        self.env = {
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "E2B_API_KEY": self.key,
            "AENV_URL": self.url,
            "AENV_API_KEY": self.key,
        }

    def tail(self, lines=40):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self):
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            # The longest that docs/operations.md gives it, and some more.
            self.process.wait(timeout=90)

    def api(self, method, path, body=None, headers=None, raw=False):
        """(status, parsed body) of a control-plane call."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("X-API-Key", self.key)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, text if raw else (json.loads(text) if text else None)

    def cli(self, *words, check=True, env=None, **kwargs):
        done = subprocess.run(
            [BIN / "aenv", *map(str, words)], capture_output=True, text=True, timeout=1500,
            env={**os.environ, **self.env, **(env or {})}, **kwargs,
        )
        assert done.returncode == 0 or not check, f"aenv {words}: {done.returncode}: {done.stderr}"
        return done

    def vmms(self):
        """Pids of this server's VMMs (their environment names its runtime folder), with the files that each has open."""
        mark = f"AENV_VMM_OWNER={self.runtime}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = [os.readlink(file) for file in (entry / "fd").iterdir()]
            except OSError:
                continue
        return found

    def netns(self, id):
        """Where a sandbox's traffic passes, as the journal has it."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home}/journal.db?mode=ro", uri=True)) as journal:
            [[note]] = journal.execute("SELECT value FROM note WHERE sandbox = ? AND key = 'slot'", [id])
        return json.loads(note)["netns"]

    def metric(self, name):
        """A number of `GET /metrics`; 0 before it was counted."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        values = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
        return int(float(values[0])) if values else 0

    def pid(self, name):
        """Of the server or of its blockd."""
        return self.process.pid if name == "server" else int((self.runtime / "blockd.pid").read_text())

    def memory_kib(self, name, what):
        """`VmRSS` or `VmHWM`, its peak."""
        status = Path(f"/proc/{self.pid(name)}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1])

    def forget_peak(self, name):
        """`VmHWM` begins anew (proc_pid_clear_refs(5))."""
        Path(f"/proc/{self.pid(name)}/clear_refs").write_text("5")

    def destroy(self):
        """Ends everything that belongs to this server."""
        if self.key and self.process.poll() is None:
            for sandbox in self.api("GET", "/v2/sandboxes")[1] or []:
                self.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")
        self.stop()
        for pid in self.vmms():
            end(pid, signal.SIGKILL)
        wait_for("the VMMs' end", lambda: not self.vmms())
        pid_file = self.runtime / "blockd.pid"
        if pid_file.exists():
            pid = int(pid_file.read_text())
            end(pid, signal.SIGTERM)
            wait_for("blockd's end", lambda: not Path(f"/proc/{pid}").exists())
        self.remove_network()
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def remove_network(self):
        """The namespaces of free slots and the host's rules, which a server leaves for the next one on its home."""
        name = network_name(self.home)
        for slot in Path("/run/netns").glob(f"{name}-*"):
            # First the veth pair: the kernel takes its time to remove it with the namespace.
            subprocess.run(["ip", "link", "del", slot.name], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", slot.name], check=True)
        tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True).stdout
        if f"table inet {name}" in tables.splitlines():
            subprocess.run(["nft", "delete", "table", "inet", name], check=True)


def end(pid, number):
    """Sends a signal to a process, which may have ended by itself just now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def network_name(home):
    """What aenv-net's `InstanceTag::of_home` makes of a home: the beginning of all names that its server gives."""
    hashed = 0xCBF2_9CE4_8422_2325
    for byte in os.fsencode(home):
        hashed = (hashed ^ byte) * 0x0100_0000_01B3 % 2**64
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "aenv" + "".join(digits[(hashed >> shift) % 36] for shift in (48, 32, 16, 0))


@contextlib.contextmanager
def own_server(settings, home=None, variables=None):
    """A server that has no template of its own yet; nothing of it stays."""
    home = home or tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    instance = Server(home, tempfile.mkdtemp(prefix="aenv-test-", dir="/run"), settings, variables)
    try:
        instance.setup()
        yield instance.start()
    finally:
        keep = os.environ.get("AENV_TEST_LOG")
        if keep and instance.log.exists():
            shutil.copy(instance.log, keep)
        instance.destroy()


@contextlib.contextmanager
def running_server(home, settings, variables=None):
    """A server on this home with the template `base`; nothing of it stays."""
    assert IMAGE.exists(), f"{IMAGE} does not exist: run `make image` first"
    with own_server(settings, home, variables) as instance:
        instance.cli("pull", f"oci:{IMAGE}", "--name", "base", "--cpu", "1", "--memory", "512")
        yield instance


@pytest.fixture(scope="session")
def server():
    """One server for all tests of a run."""
    home = tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    with tempfile.TemporaryDirectory() as certificates:
        test_ca = make_ca(certificates)
        settings = [
            "network.internal.veth_cidr=10.213.0.0/16",
            "orchestrator.memory_mib=32768",
            # Tests collect the repository, and compare what is there before and afterwards.
            "snapshot.gc_interval_secs=0",
            f"network.egress.extra_ca={test_ca}",
        ]
        # Where a test may listen in Amazon's place.
        ecr = f"http://127.0.0.1:{free_port()}"
        with running_server(home, settings, {"AWS_ENDPOINT_URL_ECR": ecr}) as instance:
            instance.test_ca, instance.ecr = test_ca, ecr
            # For the SDK's calls in this process: they go to this server, whichever others are started.
            os.environ.update(instance.env)
            yield instance


@pytest.fixture
def sandbox(server):
    """A fresh sandbox, through the SDK; gone afterwards."""
    from e2b import Sandbox

    made = Sandbox.create("base", timeout=LONG)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def shared(server):
    """One sandbox for all tests that leave nothing behind which could disturb the next."""
    from e2b import Sandbox

    made = Sandbox.create("base", timeout=LONG, metadata={"made-for": "all"}, envs={"COLOUR": "blue"})
    yield made
    made.kill()
