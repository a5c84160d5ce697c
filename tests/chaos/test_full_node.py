"""A node that runs out of disk or memory says so, with a code, and what runs goes on.

Promised: of creates beyond what fits, also of many at once, each ends in a sandbox or in a 429 that says when to ask again; none
hangs, and those that were refused leave nothing behind.
"""

import concurrent.futures
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from conftest import LONG, running_server, wait_for

MIB = 1 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server whose home is a filesystem of 2 GiB, with memory for three sandboxes."""
    folder = tmp_path_factory.mktemp("small")
    disk, home = folder / "disk", folder / "home"
    home.mkdir()
    with open(disk, "wb") as file:
        file.truncate(2048 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, home], check=True)
    settings = ["network.internal.veth_cidr=10.215.0.0/16", "orchestrator.memory_mib=1536", "orchestrator.disk_reserve_mib=16"]
    try:
        with running_server(home, settings) as server:
            yield server
    finally:
        subprocess.run(["umount", home], check=True)
        disk.unlink()


def create(server):
    return server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": LONG})


def delete(server, made):
    for sandbox in made:
        server.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def asked(server):
    """(sandbox, None), or (None, when to ask again) of a node that has no room."""
    request = urllib.request.Request(
        f"{server.url}/v2/sandboxes", data=b'{"templateID": "base", "timeout": 3600}', method="POST",
        headers={"X-API-Key": server.key, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == 201
            return json.load(answer), None
    except urllib.error.HTTPError as refused:
        assert refused.code == 429 and b"sandbox_capacity_unavailable" in refused.read()
        return None, int(refused.headers["Retry-After"])


def test_no_free_memory(small):
    made = []
    try:
        for _ in range(3):
            status, sandbox = create(small)
            assert status == 201, sandbox
            made.append(sandbox)
        refused, again = asked(small)
        assert refused is None and again >= 1
        # A paused one gives its place to another.
        assert small.api("POST", f"/sandboxes/{made[0]['sandboxID']}/pause", {})[0] == 204
        status, sandbox = create(small)
        assert status == 201, sandbox
        made.append(sandbox)
        assert small.api("POST", f"/v2/sandboxes/{made[0]['sandboxID']}/connect", {"timeout": 60})[0] == 429
    finally:
        delete(small, made)


def test_many_at_once(small):
    folders = lambda: sorted(entry.name for place in (small.home, small.runtime) for entry in (place / "sandboxes").iterdir())
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda _: asked(small), range(24)))
        assert time.monotonic() - began < 120
        made = [sandbox for sandbox, _ in answers if sandbox]
        try:
            assert len(made) == 3
            assert all(1 <= again <= 60 for sandbox, again in answers if not sandbox)
            ids = sorted(sandbox["sandboxID"] for sandbox in made)
            listed = sorted(entry["sandboxID"] for entry in small.api("GET", "/v2/sandboxes")[1])
            assert listed == ids and all(small.cli("exec", id, "--", "true").returncode == 0 for id in ids)
            # A full node has no standby, so that every folder is a sandbox's.
            assert folders() == sorted(ids * 2)
        finally:
            delete(small, made)
    # The room is there again, at once.
    sandbox, again = asked(small)
    assert sandbox, f"refused, and told to ask again in {again} s"
    delete(small, [sandbox])


def test_a_full_disk(small):
    status, sandbox = create(small)
    assert status == 201, sandbox
    id = sandbox["sandboxID"]
    run = lambda script: small.cli("exec", id, "--", "sh", "-c", script).stdout
    filler = small.home / "filler"
    try:
        run("head -c 64M /dev/urandom > /dev/shm/changed; md5sum < /dev/shm/changed > /dev/shm/sum")
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small.home).free - 4 * MIB)
        status, answer = create(small)
        assert (status, answer["error_code"]) == (507, "disk_full")
        status, answer = small.api("POST", f"/sandboxes/{id}/pause", {})
        assert (status, answer["error_code"]) == (507, "disk_full")
        # It runs as if nobody had asked.
        assert small.api("GET", f"/sandboxes/{id}")[1]["state"] == "running"
        assert run("md5sum < /dev/shm/changed | cmp - /dev/shm/sum && echo same") == "same\n"
        filler.unlink()
        assert small.api("POST", f"/sandboxes/{id}/pause", {})[0] == 204
        assert small.api("POST", f"/v2/sandboxes/{id}/connect", {"timeout": LONG})[0] in (200, 201)
        assert run("md5sum < /dev/shm/changed | cmp - /dev/shm/sum && echo same") == "same\n"
        wait_for("an empty staging folder", lambda: not list((small.home / "staging").iterdir()))
    finally:
        filler.unlink(missing_ok=True)
        delete(small, [sandbox])
