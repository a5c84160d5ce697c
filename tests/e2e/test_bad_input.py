"""Whatever is wrong gets the envelope, with a status that equals `code`, and changes nothing."""

import json
import os
import subprocess
import sys
import tarfile

import pytest
from conftest import ROOT, free_port

CASES = [
    ("POST", "/v2/sandboxes", {"templateID": "no-such-template"}, 404),
    ("POST", "/v2/sandboxes", b"{not json", 400),
    ("POST", "/v2/sandboxes", {"templateID": 7}, 400),
    ("POST", "/v2/sandboxes", {}, 400),
    ("POST", "/v2/sandboxes", {"templateID": "base", "timeout": -1}, 400),
    ("POST", "/v2/sandboxes", {"templateID": "base", "timeout": "soon"}, 400),
    ("POST", "/v2/sandboxes", {"templateID": "base", "network": {"denyOut": ["nonsense"]}}, 400),
    ("POST", "/v2/sandboxes", b"[" * 100_000, 400),
    ("POST", "/v2/sandboxes", b'{"templateID": "' + b"x" * (4 << 20) + b'"}', 413),
    ("GET", "/sandboxes/nonexistingsandbox", None, 404),
    ("GET", "/sandboxes/..%2f..%2fetc", None, 404),
    ("DELETE", "/sandboxes/nonexistingsandbox", None, 404),
    ("POST", "/sandboxes/nonexistingsandbox/fork", {"count": 1}, 404),
    ("GET", "/v2/sandboxes?limit=0", None, 400),
    ("GET", "/v2/sandboxes?nextToken=nonsense", None, 400),
    ("POST", "/v3/templates", {"name": "Bad Name!"}, 400),
    ("POST", "/v3/templates", {"name": "x", "cpuCount": 3}, 400),
    ("POST", "/templates/tags", {"target": ":x", "tags": ["y"]}, 400),
    ("GET", "/templates/aliases/no-such-template", None, 404),
    ("GET", "/no/such/path", None, 404),
    ("PATCH", "/v2/sandboxes", None, 405),
]


@pytest.mark.parametrize("method, path, body, status", CASES)
def test_the_envelope(server, shared, method, path, body, status):
    there = lambda: {entry["sandboxID"] for entry in server.api("GET", "/v2/sandboxes")[1]}
    before = there()
    got, answer = server.api(method, path, body)
    assert got == status, answer
    assert answer["code"] == status and answer["message"]
    # The time of another test's may be over meanwhile.
    assert shared.sandbox_id in there() <= before


def test_a_wrong_key_is_401(server):
    status, answer = server.api("GET", "/v2/sandboxes", headers={"X-API-Key": "e2b_" + "0" * 40})
    assert status == 401 and answer["code"] == 401


@pytest.mark.parametrize("count", [0, 101, -1])
def test_fork_of_a_silly_number(server, sandbox, count):
    status, answer = server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/fork", {"count": count})
    assert status == 400 and answer["code"] == 400
    assert sandbox.is_running()


def test_fork_of_a_paused_one_is_409(server, sandbox):
    sandbox.pause()
    status, answer = server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/fork", {"count": 1})
    assert status == 409 and answer["code"] == 409


def test_a_second_server_on_the_home_is_refused(server):
    other = subprocess.run(
        server.command("serve", "--listen", f"127.0.0.1:{free_port()}"), capture_output=True, text=True, timeout=60
    )
    assert other.returncode != 0
    assert "another server" in other.stderr and str(server.process.pid) in other.stderr


def broken_layout(tmp_path, damage):
    """A small image that no node knows, one blob of which is not what its digest says."""
    (tmp_path / "noise").write_bytes(os.urandom(1 << 20))
    with tarfile.open(tmp_path / "rootfs.tar", "w") as rootfs:
        rootfs.add(tmp_path / "noise", "noise")
    image = tmp_path / "image"
    subprocess.run([sys.executable, ROOT / "scripts/oci_layout.py", tmp_path / "rootfs.tar", image], check=True)
    index = json.loads((image / "index.json").read_text())
    manifest = image / "blobs/sha256" / index["manifests"][0]["digest"].split(":")[1]
    damage(image / "blobs/sha256" / json.loads(manifest.read_text())["layers"][0]["digest"].split(":")[1])
    return image


def truncate(layer):
    with open(layer, "r+b") as file:
        file.truncate(layer.stat().st_size // 2)


def flip(layer):
    with open(layer, "r+b") as file:
        file.seek(layer.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_image_fails_the_build(server, tmp_path, damage):
    image = broken_layout(tmp_path, damage)
    name = f"damaged-{damage.__name__}"
    outcome = server.cli("pull", f"oci:{image}", "--name", name, check=False)
    assert outcome.returncode == 1
    assert "damaged" in outcome.stderr
    assert server.api("POST", "/v2/sandboxes", {"templateID": name})[0] == 400
    mounts = open("/proc/mounts").read()
    assert f"{server.home}/staging" not in mounts
