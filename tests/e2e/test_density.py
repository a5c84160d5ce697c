"""Memory: idle guests give it back when the host is short, and have it again when they need it."""

import tempfile
from pathlib import Path

import pytest

from conftest import LONG, running_server, wait_for

MIB = 1 << 20
FILE_MIB = 120
#: Only with all that the guest of 512 MiB was promised.
NEEDED_MIB = 330


@pytest.fixture(scope="module")
def node():
    """A server on a host that is always short: no machine has what is to be kept available."""
    home = tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    settings = [
        "network.internal.veth_cidr=10.223.0.0/16",
        "orchestrator.memory_mib=2048",
        "orchestrator.memory_reserve_mib=100000000",
        "orchestrator.memory_idle_secs=2",
    ]
    with running_server(home, settings) as made:
        yield made


def own_mib(node, id):
    """Memory of a sandbox's VMM that is shared with nobody."""
    [pid] = [pid for pid, files in node.vmms().items() if id in " ".join(files)]
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) >> 10


def given_mib(node):
    return node.metric("aenv_ballooned_memory_bytes") // MIB


def test_an_idle_guest_gives_its_page_cache_and_has_all_its_memory_when_it_needs_it(node):
    def run(script):
        return node.cli("exec", id, "--user", "root", "--", "sh", "-c", script).stdout

    status, sandbox = node.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG})
    assert status == 201, sandbox
    id = sandbox["sandboxID"]
    [shown] = node.api("GET", "/nodes")[1]
    assert shown["memory"]["promisedBytes"] == 512 * MIB and shown["memory"]["limitBytes"] == 2048 * MIB

    written = run(f"yes $(cat /proc/sys/kernel/random/uuid) | head -c {FILE_MIB}M > /root/file; sync; md5sum /root/file")
    full = own_mib(node, id)
    assert full > FILE_MIB
    used = node.api("GET", f"/sandboxes/{id}/metrics")[1][-1]["memUsed"]
    wait_for("memory that is given back", lambda: full - own_mib(node, id) > FILE_MIB // 2, 120)
    assert given_mib(node) > FILE_MIB
    # A client sees what is used: neither the page cache nor what was given.
    wait_for("a sample", lambda: node.api("GET", f"/sandboxes/{id}/metrics")[1][-1]["memUsed"] < used + 100 * MIB)

    # It was paused without that memory, and goes on with it.
    assert node.api("POST", f"/sandboxes/{id}/pause")[0] == 204
    assert node.api("POST", f"/sandboxes/{id}/resume", {"timeout": LONG})[0] == 201
    assert run(f"python3 -c 'print(len(bytes({NEEDED_MIB} << 20)))'") == f"{NEEDED_MIB * MIB}\n"
    assert run("md5sum /root/file") == written

    # One that is asked for much while it lacks memory has it at once, and ends no process.
    full = own_mib(node, id)
    wait_for("memory that is given back again", lambda: full - own_mib(node, id) > FILE_MIB // 2, 120)
    assert run(f"python3 -c 'print(len(b\"x\" * ({NEEDED_MIB} << 20)))'") == f"{NEEDED_MIB * MIB}\n"
    assert run("dmesg | grep -i -e oom -e 'out of memory' || true") == ""
    wait_for("its memory", lambda: given_mib(node) == 0)
    node.api("DELETE", f"/sandboxes/{id}")
