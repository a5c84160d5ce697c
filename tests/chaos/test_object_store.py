"""An object store that is slow, refuses, cuts off, lies, is silent, or is gone.

Promised: what passes is tried again, and nobody notices. What does not ends in an error with a code and within a bound, and what
runs goes on: sandboxes run, pause, resume and fork, and templates whose layers are on the node are launched. Wrong bytes are never
launched from. Once the store is back everything works, and nothing that was published is lost.
"""

import concurrent.futures
import contextlib
import time

import pytest
from bucket import Store, is_blob
from conftest import free_port, own_server, wait_for

#: In which each call ends, whatever the store does.
BOUND = 120


@pytest.fixture(scope="module")
def store(server):
    made = Store(free_port)
    try:
        made.start(wait_for)
        made.copy_template(server.home / "repository", "base")
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def server_on(store, network, on_demand):
    """A server whose repository is the store; it has no layer of its own at first."""
    settings = [
        f"network.internal.veth_cidr={network}", f"snapshot.on_demand={on_demand}", "orchestrator.standby.count=0",
        "image.cache.capacity_gb=1", *store.settings,
    ]
    with own_server(settings) as made:
        try:
            yield made
        finally:
            store.back()


@pytest.fixture(scope="module")
def far(store):
    """A node whose guests read from the store what they need of their template."""
    with server_on(store, "10.218.0.0/16", "always") as node:
        yield node


@pytest.fixture(scope="module")
def near(store):
    """A node that fetches the layers of a template before it launches it."""
    with server_on(store, "10.219.0.0/16", "never") as node:
        yield node


@pytest.fixture(autouse=True)
def well(store):
    yield
    store.back()


@pytest.fixture
def made():
    """Nodes, and ids of sandboxes on them, that go with the test."""
    sandboxes = []
    yield sandboxes
    remove(sandboxes)


def remove(made):
    while made:
        node, id = made.pop()
        node.api("DELETE", f"/sandboxes/{id}")


def create(node, made, template="base"):
    status, answer = node.api("POST", "/v2/sandboxes", {"templateID": template, "timeout": 1800})
    if status == 201:
        made.append((node, answer["sandboxID"]))
    return status, answer


def started(node, made, template="base"):
    status, answer = create(node, made, template)
    assert status == 201, answer
    return answer["sandboxID"]


def snapshot(node, id, **options):
    return node.api("POST", f"/sandboxes/{id}/snapshots", options)


def run(node, id, script, check=True):
    return node.cli("exec", id, "--user", "root", "--", "sh", "-c", script, check=check).stdout


def forget(node):
    """The node's copies of what is in the store; they only save time. No sandbox may run."""
    for file in (node.home / "layers").glob("sha256-*"):
        file.unlink()


def refused(answered):
    """An error with a code, that says when to ask again."""
    status, answer = answered
    assert (status, answer["code"], answer["error_code"]) == (503, 503, "repository_unavailable"), answer
    return True


def test_wrong_bytes_are_not_launched_from(far, store, made):
    # Of what a launch needs only the vm state comes whole, and its digest is looked at.
    forget(far)
    store.ill(lambda method, path: ("wrong",) if method == "GET" and is_blob(path) else None)
    status, answer = create(far, made)
    assert (status, answer["error_code"]) == (409, "checkpoint_unusable"), answer
    assert [kind for _, _, kind in store.seen if kind == "wrong"]
    # Nothing of it was kept.
    store.well()
    id = started(far, made)
    assert run(far, id, "echo here") == "here\n"


def test_a_store_that_stumbles(far, store, made):
    forget(far)
    counts = {}

    def fault(method, path):
        """The first requests for each object go wrong, each in another way; all are slow."""
        number = counts[method, path] = counts.get((method, path), 0) + 1
        if method == "GET":
            return {1: ("status", 503), 2: ("drop",), 3: ("cut",) if is_blob(path) else ("status", 500)}.get(number, ("slow", 0.02))
        return ("status", 503 if number == 1 else 500) if number <= 2 else ("slow", 0.02)

    store.ill(fault)
    id = started(far, made)
    run(far, id, "head -c 4M /dev/urandom > /home/user/kept; md5sum /home/user/kept > /home/user/sum; sync")
    status, taken = snapshot(far, id)
    assert status == 201, taken
    copy = started(far, made, taken["snapshotID"])
    assert run(far, copy, "md5sum -c /home/user/sum") == "/home/user/kept: OK\n"
    assert far.api("DELETE", f"/templates/{taken['snapshotID']}")[0] < 300


@pytest.mark.parametrize("how", ["refuses", "is gone"])
def test_a_store_that_does_not_come_back_for_a_while(near, store, made, how):
    runs, sleeps = started(near, made), started(near, made)
    run(near, runs, "echo kept > /root/name; sync")
    status, elsewhere = snapshot(near, sleeps)
    assert status == 201, elsewhere
    assert near.api("POST", f"/sandboxes/{sleeps}/pause", {})[0] == 204

    if how == "refuses":
        store.ill(("status", 500))
    else:
        store.gone()
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        publish = pool.submit(snapshot, near, runs)
        unknown = pool.submit(create, near, made, elsewhere["snapshotID"])
        launch = pool.submit(create, near, made)
        # What does not need the store does not wait for it.
        assert near.api("POST", f"/v2/sandboxes/{sleeps}/connect", {"timeout": 600})[0] in (200, 201)
        assert refused(publish.result()) and refused(unknown.result())
        status, answer = launch.result()
        assert status == 201, answer
    assert time.monotonic() - began < BOUND
    assert run(near, runs, "cat /root/name") == "kept\n"
    status, children = near.api("POST", f"/sandboxes/{runs}/fork", {"count": 1, "timeout": 600})
    assert status == 201 and "sandbox" in children[0], children
    child = children[0]["sandbox"]["sandboxID"]
    made.append((near, child))
    assert run(near, child, "cat /root/name") == "kept\n"

    store.back()
    status, taken = snapshot(near, runs)
    assert status == 201, taken
    assert run(near, started(near, made, taken["snapshotID"]), "cat /root/name") == "kept\n"
    # What was half published is no damage, and what was published before is there.
    assert near.cli("repo", "fsck").returncode == 0
    for known in (elsewhere, taken):
        assert near.api("DELETE", f"/templates/{known['snapshotID']}")[0] < 300


def test_a_store_that_is_silent(near, store, made):
    id = started(near, made)
    store.ill(("silent",))
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        publish = pool.submit(snapshot, near, id)
        unknown = pool.submit(create, near, made, "never-heard-of")
        assert run(near, id, "echo here") == "here\n"
        assert refused(publish.result()) and refused(unknown.result())
    assert time.monotonic() - began < BOUND
    store.well()
    status, taken = snapshot(near, id)
    assert status == 201, taken
    assert near.api("DELETE", f"/templates/{taken['snapshotID']}")[0] < 300


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_server_starts_while_the_store_is_away(near, store, made, how):
    runs, sleeps = started(near, made), started(near, made)
    run(near, runs, "echo kept > /root/name")
    assert near.api("POST", f"/sandboxes/{sleeps}/pause", {})[0] == 204
    near.stop()
    if how == "gone":
        store.gone()
    else:
        store.ill(("silent",))
    near.start()
    # It has what lies on the node.
    assert run(near, runs, "cat /root/name") == "kept\n"
    assert near.api("POST", f"/v2/sandboxes/{sleeps}/connect", {"timeout": 600})[0] in (200, 201)
    assert refused(create(near, made, "never-heard-of"))
    store.back()
    started(near, made)


def test_guests_read_while_the_store_is_away(far, store, made):
    source = started(far, made)
    # Only its disk: a page of memory that cannot be had would end the VMM.
    run(far, source, "head -c 8M /dev/urandom > /root/far; sync")
    expected = run(far, source, "md5sum < /root/far")
    status, taken = snapshot(far, source, memory=False)
    assert status == 201, taken
    remove(made)
    forget(far)

    id = started(far, made, taken["snapshotID"])
    # Whatever reading takes is in the guest's memory, but for the file.
    run(far, id, "md5sum < /etc/hostname")
    store.gone()
    began = time.monotonic()
    said = run(far, id, "md5sum < /root/far 2>&1; echo ended", check=False)
    assert "Input/output error" in said and said.endswith("ended\n"), said
    assert time.monotonic() - began < BOUND
    assert run(far, id, "echo here") == "here\n"
    store.back()
    assert run(far, id, "md5sum < /root/far") == expected
    assert far.api("DELETE", f"/templates/{taken['snapshotID']}")[0] < 300


def test_memory_that_cannot_be_read_ends_its_sandbox_only(far, store, made):
    source = started(far, made)
    run(far, source, "head -c 32M /dev/urandom > /dev/shm/far; md5sum /dev/shm/far > /dev/shm/sum")
    status, taken = snapshot(far, source)
    assert status == 201, taken
    remove(made)
    forget(far)

    id = started(far, made, taken["snapshotID"])
    neighbour = started(far, made)
    run(far, neighbour, "md5sum < /etc/hostname")
    store.gone()
    began = time.monotonic()
    run(far, id, "md5sum -c /dev/shm/sum", check=False)

    def failed():
        status, answer = far.api("GET", f"/sandboxes/{id}")
        return status == 409 and answer["error_code"] == "sandbox_failed"

    wait_for("the sandbox's end", failed, BOUND)
    assert time.monotonic() - began < BOUND
    # A neighbour that needs nothing new goes on; and what the sandbox was made from is unharmed.
    assert far.api("GET", f"/sandboxes/{neighbour}")[1]["state"] == "running"
    store.back()
    again = started(far, made, taken["snapshotID"])
    assert run(far, again, "md5sum -c /dev/shm/sum") == "/dev/shm/far: OK\n"
    assert far.api("DELETE", f"/templates/{taken['snapshotID']}")[0] < 300
