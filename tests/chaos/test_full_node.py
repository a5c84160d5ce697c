"""A node that runs out of disk or memory says so, with a code, and what runs goes on."""

import os
import shutil
import subprocess
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


def test_no_free_memory(small):
    made = []
    try:
        for _ in range(3):
            status, sandbox = create(small)
            assert status == 201, sandbox
            made.append(sandbox)
        request = urllib.request.Request(
            f"{small.url}/v2/sandboxes", data=b'{"templateID": "base"}', method="POST",
            headers={"X-API-Key": small.key, "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 429 and int(refused.value.headers["Retry-After"]) >= 1
        assert b"sandbox_capacity_unavailable" in refused.value.read()
        # A paused one gives its place to another.
        assert small.api("POST", f"/sandboxes/{made[0]['sandboxID']}/pause", {})[0] == 204
        status, sandbox = create(small)
        assert status == 201, sandbox
        made.append(sandbox)
        assert small.api("POST", f"/v2/sandboxes/{made[0]['sandboxID']}/connect", {"timeout": 60})[0] == 429
    finally:
        delete(small, made)


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
