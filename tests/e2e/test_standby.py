"""Sandboxes that were launched ahead and warmed up: who claims them, who they are then, whom they reached before, and when they end."""

import json
import re
import subprocess
import tempfile
import time

import pytest

from conftest import LONG, running_server, wait_for

# What two sandboxes must never share, and the clock, which stood while the standby waited.
IDENTITY = """
cat /etc/hostname; hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1
echo "$E2B_SANDBOX_ID"; date +%s.%N
"""


RANDOM = """
cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; openssl rand -hex 16
python3 -c 'import os, random, uuid; print(os.urandom(16).hex(), random.random(), uuid.uuid4())'
"""
BOOT = "/proc/sys/kernel/random/boot_id"

# Sends a packet each 50 ms to an address that nobody has.
CHATTER = """
import socket, time
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    try:
        sender.sendto(b"x", ("203.0.113.9", 9))
    except OSError:
        pass
    time.sleep(0.05)
"""

# All files but what a launch writes, and what runs beside this. The links of /proc are counted by processes, of which some are the
# kernel's and come and go.
TRACES = r"""
find / -xdev ! -path /etc ! -path /proc ! -name hostname ! -name hosts ! -name machine-id ! -name resolv.conf -printf '%p %s %m %u %n %T@\n' | sort
ps -eo user,args --no-headers | grep -v -e 'ps -eo' -e 'grep -v' -e 'find /' -e sort -e 'sh -c' | sed 's/kworker.*/kworker/' | sort -u
"""

VETH_CIDR = "10.216.0.0/16"


@pytest.fixture(scope="module")
def node():
    """A server with memory for six sandboxes and one standby for each template."""
    home = tempfile.mkdtemp(prefix="aenv-test-", dir="/var/tmp")
    settings = [
        f"network.internal.veth_cidr={VETH_CIDR}",
        "orchestrator.memory_mib=3072",
        "orchestrator.standby.count=1",
        "orchestrator.stand_after_deadline_secs=600",
    ]
    with running_server(home, settings) as made:
        yield made


@pytest.fixture
def made(node):
    """Ids of sandboxes that go with the test."""
    ids = []
    yield ids
    for id in ids:
        node.api("DELETE", f"/sandboxes/{id}")


def create(node, made, template="base", **options):
    status, sandbox = node.api("POST", "/v2/sandboxes", {"templateID": template, "timeout": LONG, **options})
    assert status == 201, sandbox
    made.append(sandbox["sandboxID"])
    return sandbox["sandboxID"]


def standby(node):
    wait_for("a standby", lambda: node.metric("aenv_standbys") == 1)


def run(node, id, script):
    return node.cli("exec", id, "--user", "root", "--", "sh", "-c", script).stdout


def waiting(node, made):
    """VMMs of this server with a disk of no sandbox: pids and ids."""
    found = {}
    for pid, files in node.vmms().items():
        ids = set(re.findall(r"\bi[0-9a-z]{19}\b", " ".join(files))) - set(made)
        if ids:
            found[pid] = ids
    return found


def test_a_create_claims_a_standby_and_is_itself(node, made):
    first = create(node, made)
    standby(node)
    [ids] = waiting(node, made).values()
    assert [entry["sandboxID"] for entry in node.api("GET", "/v2/sandboxes")[1]] == [first]
    for id in ids:
        assert node.api("GET", f"/sandboxes/{id}")[0] == 404
    # It waits while the clock goes on.
    time.sleep(3)
    claims = node.metric("aenv_standby_claims_total")
    second = create(node, made, envVars={"COLOUR": "blue"})
    assert node.metric("aenv_standby_claims_total") == claims + 1
    assert {second} == ids, "it has not the standby's id"

    before = time.time()
    one, two = (run(node, id, IDENTITY).splitlines() for id in (first, second))
    after = time.time()
    for id, lines in [(first, one), (second, two)]:
        assert lines[:2] == [id, id] and lines[5] == id
        assert before - 1 < float(lines[6]) < after + 1
    assert all(a != b for a, b in zip(one, two))
    assert run(node, second, "echo $COLOUR") == "blue\n"
    # It is written in the background.
    wait_for("its log", lambda: "queue_ms" in node.cli("logs", second).stdout)


def test_two_that_were_warmed_up_share_nothing(node, made):
    # The first ones find none, or those of another test: all that is promised holds between any two.
    for _ in range(3):
        create(node, made)
        standby(node)
    failures = node.metric("aenv_standby_failures_total")
    assert node.metric("aenv_standby_warm_up_failures_total") == 0
    lines = [run(node, id, RANDOM).split() for id in made]
    for one in range(3):
        for other in range(one):
            assert not set(lines[one]) & set(lines[other])
    # A boot id is drawn when it is first read, unless the template had it.
    boots = [run(node, id, f"cat {BOOT}") for id in made]
    assert len(set(boots)) in (1, 3)
    assert node.metric("aenv_standby_failures_total") == failures


def test_no_trace_of_the_warm_up_is_left(node, made):
    node.kill()
    node.start()
    ordinary = create(node, made)
    standby(node)
    claims = node.metric("aenv_standby_claims_total")
    claimed = create(node, made)
    assert node.metric("aenv_standby_claims_total") == claims + 1
    traces = [run(node, id, TRACES).splitlines() for id in (ordinary, claimed)]
    assert len(traces[0]) > 1000
    assert sorted(set(traces[0]) ^ set(traces[1])) == []
    logs = [node.cli("logs", id).stdout.replace(id, "") for id in (ordinary, claimed)]
    assert len(logs[0].splitlines()) == len(logs[1].splitlines())


def slots(node):
    """Packets that guests have sent, and that have left the slot, of each slot of this server."""
    prefix = VETH_CIDR.split(".0.0")[0] + "."
    shown = json.loads(subprocess.run(["ip", "-j", "addr"], check=True, capture_output=True).stdout)
    names = [link["ifname"] for link in shown if any(a.get("local", "").startswith(prefix) for a in link["addr_info"])]
    counts = []
    for name in names:
        shown = subprocess.run(["ip", "-n", name, "-j", "-s", "link"], capture_output=True)
        # A slot that is just being removed.
        links = {link["ifname"]: link["stats64"] for link in json.loads(shown.stdout or "[]") if link}
        if {"tap0", "veth0"} <= links.keys():
            counts.append((links["tap0"]["rx"]["packets"], links["veth0"]["tx"]["packets"]))
    return counts


def test_one_that_is_warmed_up_reaches_nobody_until_it_is_claimed(node, made):
    source = create(node, made)
    run(node, source, f"setsid python3 -c '{CHATTER}' < /dev/null > /dev/null 2>&1 &")
    status, snapshot = node.api("POST", f"/sandboxes/{source}/snapshots", {})
    assert status == 201
    # One of `base`, and one of the snapshot once that is wanted.
    first = create(node, made, snapshot["snapshotID"])
    wait_for("standbys", lambda: node.metric("aenv_standbys") == 2)
    for id in (source, first):
        assert node.api("DELETE", f"/sandboxes/{id}")[0] == 204
    wait_for("their slots to go", lambda: all(left == 0 for _, left in slots(node)))
    assert max(sent for sent, _ in slots(node)) >= 3, "the guest has not even tried"

    claims = node.metric("aenv_standby_claims_total")
    closed = create(node, made, snapshot["snapshotID"], allow_internet_access=False)
    before = max(sent for sent, _ in slots(node))
    wait_for("the guest to try", lambda: max(sent for sent, _ in slots(node)) > before + 20)
    assert all(left == 0 for _, left in slots(node))
    assert node.api("DELETE", f"/sandboxes/{closed}")[0] == 204

    wait_for("standbys", lambda: node.metric("aenv_standbys") == 2)
    create(node, made, snapshot["snapshotID"])
    wait_for("packets that leave", lambda: any(left > 20 for _, left in slots(node)))
    assert node.metric("aenv_standby_claims_total") == claims + 2
    assert node.api("DELETE", f"/templates/{snapshot['snapshotID'].replace('/', '%2F')}")[0] == 204


def test_kill_9_leaves_none(node, made):
    id = create(node, made)
    standby(node)
    [pid] = waiting(node, made)
    node.kill()
    assert pid in node.vmms(), "a standby's VMM belongs to the node until the next server looks"
    node.start()
    assert not waiting(node, made)
    assert pid not in node.vmms()
    assert node.metric("aenv_standbys") == 0
    for folder in [node.home / "sandboxes", node.runtime / "sandboxes"]:
        assert [entry.name for entry in folder.iterdir()] == [id]
    assert run(node, id, "echo here") == "here\n"


def test_a_stop_leaves_none(node, made):
    id = create(node, made)
    standby(node)
    node.stop()
    assert not waiting(node, made)
    node.start()
    assert run(node, id, "echo here") == "here\n"


def test_sandboxes_have_the_memory(node, made):
    for _ in range(6):
        create(node, made)
    assert node.metric("aenv_standbys") == 0
    # Paused, two of them leave room for a standby and what it leaves alone; both together do not fit beside it.
    for id in made[:2]:
        assert node.api("POST", f"/sandboxes/{id}/pause", {})[0] == 204
    standby(node)
    given_up = node.metric("aenv_standbys_given_up_total")
    for id in made[:2]:
        assert node.api("POST", f"/v2/sandboxes/{id}/connect", {"timeout": LONG})[0] in (200, 201)
    assert node.metric("aenv_standbys_given_up_total") == given_up + 1
    assert node.metric("aenv_standbys") == 0
    assert not waiting(node, made)
    status, answer = node.api("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, answer["error_code"]) == (429, "sandbox_capacity_unavailable")
    assert all(run(node, id, "echo here") == "here\n" for id in made)


def test_a_sandbox_that_was_paused_at_its_deadline_goes_on_in_place(node, made):
    def state():
        return node.api("GET", f"/sandboxes/{id}")[1]["state"]

    def expire():
        assert node.api("POST", f"/sandboxes/{id}/timeout", {"timeout": 1})[0] == 204
        wait_for("the pause", lambda: state() == "paused")
        # It is shown as paused on its way there.
        wait_for("what stands", lambda: node.metric("aenv_sandboxes_standing") == 1)

    def vmm():
        return [pid for pid, files in node.vmms().items() if id in " ".join(files)]

    id = create(node, made, autoPause=True)
    run(node, id, "echo one > /dev/shm/memory; echo one > /root/disk; sync")
    before = vmm()
    expire()
    time.sleep(2)
    assert node.api("POST", f"/sandboxes/{id}/resume", {"timeout": LONG})[0] == 201
    begun = time.time()
    one = run(node, id, "cat /dev/shm/memory /root/disk; date +%s.%N").split()
    assert one[:2] == ["one", "one"]
    assert begun - 1 < float(one[2]) < time.time() + 1
    assert vmm() == before != []
    wait_for("nothing that stands", lambda: node.metric("aenv_sandboxes_standing") == 0)

    # What was changed in place is in the next pause, which a server that was killed finds.
    run(node, id, "echo two > /dev/shm/memory; echo two > /root/disk; sync")
    expire()
    assert vmm() == before
    node.kill()
    node.start()
    assert state() == "paused" and vmm() == []
    assert node.api("POST", f"/sandboxes/{id}/resume", {"timeout": LONG})[0] == 201
    assert run(node, id, "cat /dev/shm/memory /root/disk").split() == ["two", "two"]
    assert vmm() != before
