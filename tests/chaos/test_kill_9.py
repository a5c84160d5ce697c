"""kill -9 of the server at each step of each verb.

Promised: after a restart every sandbox that was acknowledged is there in the state that was acknowledged, the ones that run
have not noticed, and processes, namespaces, exports and folders that belong to no sandbox are gone.
"""

import contextlib
import http.client
import re
import threading

import pytest
from e2b import Sandbox

from conftest import LONG, ROOT, wait_for

SOURCE = (ROOT / "crates/aenv-orchestrator/src/crash.rs").read_text()
POINTS = re.findall(r'^    "([a-z]+\.[a-z]+)",$', SOURCE, re.M)

# The verb that passes each point; `collect.*` are the collector's, which runs by itself, `share.*` lie between two nodes.
VERBS = {
    "create": ["create"],
    "launch": ["create", "resume"],
    "standby": ["claim"],
    "capture": ["pause", "fork"],
    "pause": ["pause"],
    "resume": ["resume"],
    "snapshot": ["snapshot"],
    "fork": ["fork"],
    "merge": ["deepen"],
    "rollback": ["rollback"],
    "kill": ["kill"],
}
CASES = [(point, verb) for point in POINTS for verb in VERBS.get(point.split(".")[0], [])]


def test_every_point_has_a_verb():
    assert len(POINTS) >= 20
    assert {point for point in POINTS if not point.startswith(("collect.", "share."))} == {point for point, _ in CASES}


def start(server, name):
    sandbox = Sandbox.create("base", timeout=LONG, metadata={"chaos": name})
    sleeper = sandbox.commands.run("sleep 86400", background=True, timeout=0)
    # It begins as a shell.
    sandbox.commands.run(f"until grep -qx sleep /proc/{sleeper.pid}/comm; do sleep 0.1; done")
    sandbox.files.write("/home/user/name", name)
    return sandbox


def alive(sandbox, name):
    assert sandbox.files.read("/home/user/name") == name
    assert sandbox.commands.run("pgrep -c sleep").stdout.strip() == "1"


def of_none(server):
    """What is there and belongs to no sandbox of the list."""
    listed = {entry["sandboxID"]: entry["state"] for entry in server.api("GET", "/v2/sandboxes")[1]}
    running = {id for id, state in listed.items() if state == "running"}
    strays = []
    for pid, files in server.vmms().items():
        # One that waits for work has no disk open, and belongs to none.
        ids = set(re.findall(r"\bi[0-9a-z]{19}\b", " ".join(files)))
        if ids and not ids & running:
            strays.append(f"process {pid} of {ids}")
    for folder in [server.home / "sandboxes", server.runtime / "sandboxes"]:
        wanted = listed if folder.parent == server.home else running
        strays += [str(entry) for entry in folder.iterdir() if entry.name not in wanted]
    exports = server.runtime / "jail" / "exports"
    for entry in exports.iterdir():
        ids = re.findall(r"\bi[0-9a-z]{19}\b", entry.name)
        if ids and ids[0] not in running:
            strays.append(str(entry))
    strays += [str(entry) for entry in (server.home / "staging").iterdir()]
    return strays


def standbys(server):
    try:
        return server.metric("aenv_standbys")
    except (OSError, http.client.HTTPException):
        return 0


@pytest.fixture(scope="module")
def acknowledged(server):
    """One that runs and one that is paused, all the time."""
    running, paused = start(server, "witness"), start(server, "sleeper")
    paused.pause()
    yield running, paused
    running.kill()
    paused.kill()


@pytest.mark.parametrize("point, verb", CASES, ids=[f"{point}-{verb}" for point, verb in CASES])
def test_kill_9(server, acknowledged, point, verb):
    running, paused = acknowledged
    victim = start(server, "victim")
    # A stack of the base and 16 captures is one too deep.
    snapshots = [victim.create_snapshot().snapshot_id for _ in range({"rollback": 1, "deepen": 15}.get(verb, 0))]
    if verb == "resume":
        victim.pause()
    before = {entry["sandboxID"]: entry["state"] for entry in server.api("GET", "/v2/sandboxes")[1]}

    server.kill()
    server.start(crash_point=point)
    id = victim.sandbox_id
    calls = {
        "create": ("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG}),
        "claim": ("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG}),
        "pause": ("POST", f"/sandboxes/{id}/pause", {}),
        "resume": ("POST", f"/v2/sandboxes/{id}/connect", {"timeout": LONG}),
        "fork": ("POST", f"/sandboxes/{id}/fork", {"count": 2, "timeout": LONG}),
        "snapshot": ("POST", f"/sandboxes/{id}/snapshots", {}),
        "deepen": ("POST", f"/sandboxes/{id}/snapshots", {}),
        "rollback": ("POST", f"/sandboxes/{id}/rollback", {"snapshotID": next(iter(snapshots), None)}),
        "kill": ("DELETE", f"/sandboxes/{id}", None),
    }
    acknowledgement = []

    def call():
        try:
            acknowledgement.append(server.api(*calls[verb]))
        except (OSError, http.client.HTTPException):
            acknowledgement.append(None)

    if verb == "claim":
        # The first create makes the demand. The server may die as soon as that is met, or with the claim.
        call()
        wait_for("a standby", lambda: server.process.poll() is not None or standbys(server), 60)
    caller = threading.Thread(target=call)
    caller.start()
    wait_for(f"the crash at {point}", lambda: server.process.poll() is not None, 90)
    caller.join(30)
    server.start()

    after = {entry["sandboxID"]: entry["state"] for entry in server.api("GET", "/v2/sandboxes")[1]}
    for other in [running, paused]:
        assert after[other.sandbox_id] == before[other.sandbox_id]
    if verb in ("create", "claim"):
        assert all(answer[1]["sandboxID"] in after for answer in acknowledgement if answer)
    alive(running, "witness")
    if verb == "kill":
        # It was asked for: it may have happened, and must not be half done.
        if id in after:
            alive(victim, "victim")
    else:
        assert id in after
        alive(Sandbox.connect(id, timeout=LONG), "victim")
    wait_for(f"nothing stray after {point}", lambda: not of_none(server))
    for entry in after:
        if entry not in (running.sandbox_id, paused.sandbox_id):
            server.api("DELETE", f"/sandboxes/{entry}")
    for snapshot in snapshots:
        Sandbox.delete_snapshot(snapshot)


def test_a_capture_that_was_cut_off_hides_nothing_from_the_next(server):
    """What was marked as captured, and then lost with the server, is in the next capture all the same."""
    sandbox = Sandbox.create("base", timeout=3600)
    Sandbox.delete_snapshot(sandbox.create_snapshot().snapshot_id)
    for point in ["capture.resumed", "capture.written", "capture.recorded"]:
        written = sandbox.commands.run(f"head -c 4M /dev/urandom > /dev/shm/{point}; sha256sum /dev/shm/*").stdout
        server.kill()
        server.start(crash_point=point)
        with contextlib.suppress(OSError):
            server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/snapshots", {})
        wait_for(f"the crash at {point}", lambda: server.process.poll() is not None, 90)
        server.start()
        snapshot = sandbox.create_snapshot().snapshot_id
        other = Sandbox.create(snapshot, timeout=300)
        assert other.commands.run("sha256sum /dev/shm/*").stdout == written, point
        other.kill()
        Sandbox.delete_snapshot(snapshot)
    sandbox.kill()
