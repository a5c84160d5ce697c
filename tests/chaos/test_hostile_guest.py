"""Root inside a sandbox tries everything to reach the host and its neighbours.

Promised: nothing that a guest sends, honestly or with forged frames, arrives at the host, at another sandbox, at link-local or
always-denied addresses, and with the internet off it arrives nowhere at all. The token of one sandbox opens no other one, and
envd's host-only paths are closed to clients. The machine shows nothing of the host. Memory that a guest gives back is not
missing elsewhere. A guest that crashes or powers itself off takes nobody along, and the server says what became of it.
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from canary import Canary
from conftest import IMAGE, ROOT, wait_for
from e2b import Sandbox
from internet import OTHER, SITE, Internet

SCRIPT = (Path(__file__).parent / "hostile.py").read_text()
OWN, MAC, GATEWAY, GATEWAY_MAC = "169.254.0.21", "02:ae:00:00:00:15", "169.254.0.22", "02:ae:00:00:00:16"
#: In the small internet, where a guest that were let through would find them: link-local, and in each always-denied range.
DENIED = [f"{net}.{os.getpid() % 250 + 1}" for net in ("169.254.213", "10.255.213", "172.31.213", "192.168.213", "100.127.213")]
WEB = 8000


def addresses(family):
    """(interface, address) of this host, loopback left out."""
    listed = json.loads(subprocess.run(["ip", "-j", "addr"], check=True, capture_output=True).stdout)
    return [
        (link["ifname"], info["local"])
        for link in listed if link["ifname"] != "lo"
        for info in link["addr_info"] if info["family"] == family
    ]


def other_end(address):
    first, last = address.rsplit(".", 1)
    return f"{first}.{int(last) ^ 1}"


@pytest.fixture(scope="module")
def internet(server):
    made = Internet(server.test_ca.parent, tempfile.mkdtemp(prefix="aenv-internet-", dir=server.home))
    try:
        made.start()
        for address in DENIED:
            subprocess.run(["ip", "-n", made.netns, "addr", "add", f"{address}/32", "dev", "up0"], check=True)
            # Goes with the link.
            subprocess.run(["ip", "route", "add", f"{address}/32", "dev", made.link], check=True)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def neighbour(server):
    made = Sandbox.create("base", timeout=1800)
    made.files.write("/home/user/name", "neighbour")
    made.commands.run(f"python3 -m http.server {WEB} --bind 0.0.0.0", background=True, timeout=0)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def guest(server, internet):
    made = Sandbox.create("base", timeout=1800)
    made.files.write("/root/hostile.py", SCRIPT, user="root")
    yield made
    made.kill()


@pytest.fixture(scope="module")
def canary(server, internet, guest, neighbour):
    made = Canary()
    made.put("host")
    made.put("gateway of the guest", server.netns(guest.sandbox_id))
    made.put("gateway of the neighbour", server.netns(neighbour.sandbox_id))
    made.put("internet", f"/run/netns/{internet.netns}")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def slots(server, guest, neighbour):
    """A namespace and its link to the host have one name."""
    return [Path(server.netns(one.sandbox_id)).name for one in (guest, neighbour)]


def attack(guest, plan):
    guest.files.write("/root/plan.json", json.dumps(plan), user="root")
    done = guest.commands.run("python3 -IS /root/hostile.py /root/plan.json", user="root", timeout=240)
    return json.loads(done.stdout)


def plan(server, internet, canary, slots, ports_of_gateway):
    """Everything that must not be reached, but for the one honest site."""
    links = [(name, address) for name, address in addresses("inet") if name.startswith("aenv")]
    # Both ends of the slots' links: these two sandboxes' first, then some that others have or wait for.
    links.sort(key=lambda link: (link[0] not in slots, link))
    near = [address for _, address in links[:6]]
    far = [other_end(address) for address in near]
    hosts = [address for name, address in addresses("inet") if not name.startswith("aenv")][:8] + near
    hosts6 = [address for _, address in addresses("inet6")][:8] + ["ff02::1"]
    ports = [canary.port, server.port]
    tcp = [("honest tcp", internet.address(SITE), canary.port)]
    for address in [*hosts, *far, GATEWAY]:
        for port in [*ports, 49983, WEB]:
            tcp.append((f"tcp to {address}:{port}", address, port))
    tcp += [(f"tcp to the gateway:{port}", GATEWAY, port) for port in ports_of_gateway]
    tcp += [(f"tcp to {address}", address, canary.port) for address in [*DENIED, *hosts6[:-1]]]
    tcp += [(f"tcp to metadata:{port}", "169.254.169.254", port) for port in (80, 443)]
    udp = [("honest udp", internet.address(SITE), canary.port)]
    broadcast = ["255.255.255.255", "169.254.0.23", "224.0.0.1", "224.0.0.251"]
    udp += [(f"udp to {address}", address, canary.port) for address in [*hosts, *far, GATEWAY, *DENIED, *hosts6, *broadcast]]
    return {
        "own": OWN, "mac": MAC, "gateway": GATEWAY, "gateway_mac": GATEWAY_MAC, "site": internet.address(SITE),
        "port": canary.port, "sources": ["198.51.100.99", GATEWAY, hosts[0], *far[:2]], "hosts": [*hosts[:2], *near[:2]], "hosts6": hosts6,
        "tcp": tcp, "udp": udp, "seconds": 4,
    }


def test_what_a_guest_sends_arrives_nowhere_but_where_it_may(server, internet, canary, slots, guest, neighbour):
    # The canaries are where the guest will look for them, and would be heard.
    for address in [*DENIED, internet.address(SITE), addresses("inet")[0][1]]:
        socket.create_connection((address, canary.port), timeout=10).close()
    wait_for("the canaries", lambda: {place for place, _, _ in canary.events()} >= {"host", "internet"})
    canary.forget()

    tried = plan(server, internet, canary, slots, [*range(1, 1024), 2049, 15001, 15053])
    outcome = attack(guest, tried)
    assert outcome["tcp"] == ["honest tcp"], "something accepted a connection"
    honest = {("internet", "tcp", "honest tcp"), ("internet", "udp", "honest udp"), ("internet", "udp", "honest frame")}
    wait_for("what may arrive", lambda: honest <= set(canary.events()), 20)
    assert set(canary.events()) - honest <= {("internet", "tcp", "connected")}

    # Neither has the claim to be the gateway moved anything: both are still reached, and reach the site.
    for one in (guest, neighbour):
        found = one.commands.run(f"curl -sS --max-time 15 http://{internet.address(SITE)}/", timeout=60).stdout
        assert found == f"this is {internet.address(SITE)}\n"


def test_without_internet_nothing_leaves(server, internet, canary, slots, guest):
    guest.update_network({"allow_internet_access": False})
    try:
        canary.forget()
        internet.forget()
        tried = plan(server, internet, canary, slots, [53, 2049, 15001, 15053])
        for last in (SITE, OTHER):
            tried["tcp"] += [(f"tcp to a site:{port}", internet.address(last), port) for port in (53, 80, 443)]
            # A tunnel needs no answer: the question is what carries.
            question = b"\0\7\1\0\0\1\0\0\0\0\0\0\6secret\4evil\4test\0\0\x10\0\1".decode("latin-1")
            tried["udp"].append((question, internet.address(last), 53))
        assert attack(guest, tried)["tcp"] == []
        assert canary.events() == []
        assert not internet.events("dns") and not internet.events("connection")
    finally:
        guest.update_network({"allow_internet_access": True})
    # The way was only closed, not broken.
    reached = guest.commands.run(f"curl -sS --max-time 15 http://{internet.address(SITE)}/", timeout=60).stdout
    assert reached == f"this is {internet.address(SITE)}\n"


def through_the_data_plane(server, id, token, method, path, body=None):
    """Status of a request that no library tidies up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"e2b-sandbox-id": id, "X-Access-Token": token, "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_a_siblings_envd_and_the_hosts_own_paths(server, guest, neighbour):
    own, theirs = guest._envd_access_token, neighbour._envd_access_token
    read = "/files?path=/home/user/name&username=user"
    assert through_the_data_plane(server, neighbour.sandbox_id, theirs, "GET", read) == 200
    for token in (own, theirs[:-1], theirs.upper() + "x", ""):
        assert through_the_data_plane(server, neighbour.sandbox_id, token, "GET", read) == 401
        assert through_the_data_plane(server, neighbour.sandbox_id, token, "POST", "/process.Process/List", "{}") == 401
    for path in ("/init", "//init", "/%69nit", "/INIT", "/x/../init", "/proxy/init", "/proxy//init", "/tunnel/22", "/init/."):
        for sandbox, token in [(guest, own), (neighbour, own), (neighbour, theirs)]:
            assert through_the_data_plane(server, sandbox.sandbox_id, token, "POST", path, "{}") == 404, path
    assert neighbour.files.read("/home/user/name") == "neighbour"


# Firmware, too: QEMU's configuration device answers at these ports, whether or not the kernel has a driver for it.
SHOWN = r"""
cat /proc/cmdline /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/iomem /proc/ioports /proc/mounts /sys/class/dmi/id/*
dmesg
find /sys/firmware -type f -exec head -qc 16384 {} +
python3 -IS - <<'END'
import os, struct, sys
try:
    port = os.open("/dev/port", os.O_RDWR)
    def item(key, size):
        os.pwrite(port, struct.pack("<H", key), 0x510)
        return b"".join(os.pread(port, 1, 0x511) for _ in range(size))
    out = item(0, 4)
    count = min(struct.unpack(">I", item(0x19, 4))[0], 64) if out == b"QEMU" else 0
    listing = item(0x19, 4 + 64 * count)[4:]
    for at in range(0, len(listing), 64):
        size, key, _, name = struct.unpack(">IHH56s", listing[at : at + 64])
        out += name + item(key, min(size, 256))
    sys.stdout.buffer.write(out)
except OSError as error:
    print("no ports:", error)
END
"""


def test_the_machine_shows_nothing_of_the_host(server, guest, neighbour):
    guest.files.write("/root/shown.sh", SHOWN, user="root")
    guest.commands.run("sh /root/shown.sh > /root/shown 2>&1", user="root", timeout=240)
    shown = bytes(guest.files.read("/root/shown", format="bytes", user="root"))
    # It has looked: this much is meant for the guest.
    assert b"aenv.net=" in shown and guest.sandbox_id.encode() in shown
    secrets = {
        "the API key": server.key, "the neighbour's token": neighbour._envd_access_token, "the neighbour": neighbour.sandbox_id,
        "the home": server.home, "the runtime folder": server.runtime, "this repository": ROOT, "the image": IMAGE,
        "the host's name": os.uname().nodename,
    }
    told = [what for what, text in secrets.items() if len(str(text)) > 4 and str(text).encode() in shown]
    assert not told


GIVES_BACK = r"""
import mmap, time
area = mmap.mmap(-1, 160 << 20)
for at in range(0, len(area), 4096):
    area[at] = 1
time.sleep(1)
area.close()
"""
# The text of what runs, and a file that no sibling has read.
SUM = "cat /usr/lib/x86_64-linux-gnu/libc.so.6 /usr/bin/perl | sha256sum"


def test_memory_that_is_given_back_is_not_missing_elsewhere(server, guest, neighbour):
    before = neighbour.commands.run(SUM, timeout=120).stdout
    [vmm] = [pid for pid, files in server.vmms().items() if guest.sandbox_id in " ".join(files)]
    resident = lambda: next(
        int(line.split()[1]) for line in Path(f"/proc/{vmm}/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    guest.files.write("/root/gives_back.py", GIVES_BACK, user="root")
    running = guest.commands.run("python3 -IS /root/gives_back.py", background=True, user="root", timeout=240)
    wait_for("the guest's memory", lambda: resident() > 150 << 10, 120)
    running.wait()
    wait_for("its return", lambda: resident() < 150 << 10, 60)
    # And the device, torn off and put back.
    rebind = "cd /sys/bus/virtio/drivers/virtio_balloon; for d in virtio*; do for _ in 1 2 3; do echo $d > unbind; echo $d > bind; done; done"
    guest.commands.run(rebind, user="root", timeout=60)
    sibling = Sandbox.create("base", timeout=300)
    try:
        assert sibling.commands.run(SUM, timeout=120).stdout == before
        assert neighbour.commands.run(SUM, timeout=120).stdout == before
        assert guest.commands.run("echo here", timeout=60).stdout == "here\n"
    finally:
        sibling.kill()


def test_a_guest_that_ends_itself_takes_nobody_along(server, neighbour):
    status, answer = server.api("POST", "/sandboxes/batch", {"count": 3, "templateID": "base", "timeout": 600})
    assert status == 201, answer
    ids = [entry["sandbox"]["sandboxID"] for entry in answer]
    panics = ids[0]
    try:
        for id, key in zip(ids, "cob"):
            # The answer to this may be that it is gone.
            with contextlib.suppress(Exception):
                Sandbox.connect(id).commands.run(f"echo {key} > /proc/sysrq-trigger", user="root", timeout=20)
        listed = lambda: [entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1]]
        for id in ids:
            wait_for(f"the end of {id}", lambda: id not in listed(), 60)
            status, answer = server.api("POST", f"/sandboxes/{id}/pause", {})
            assert (status, answer["error_code"]) == (409, "sandbox_failed") and "has failed: " in answer["message"], answer
            assert through_the_data_plane(server, id, "", "GET", "/health") == 502
        serial = (server.home / "sandboxes" / panics / "serial.log").read_text(errors="replace")
        assert "sysrq triggered crash" in serial
        assert neighbour.commands.run("echo here", timeout=60).stdout == "here\n"
        assert neighbour.files.read("/home/user/name") == "neighbour"
    finally:
        for id in ids:
            assert server.api("DELETE", f"/sandboxes/{id}")[0] == 204
    gone = lambda: not any(id in " ".join(files) for files in server.vmms().values() for id in ids)
    wait_for("the end of their VMMs", gone, 30)
    assert "panicked" not in server.log.read_text(errors="replace")
