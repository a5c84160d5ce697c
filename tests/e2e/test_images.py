"""An image is converted once and published; a template is built on it where it is, and boots without fetching it."""

import json

import pytest

from conftest import IMAGE, own_server
from registry import registry


@pytest.fixture
def published(server, tmp_path):
    """The base image, converted, in a registry."""
    with registry(tmp_path) as port:
        name = f"127.0.0.1:{port}/base:converted"
        made = json.loads(server.cli("image", "convert", f"oci:{IMAGE}", name).stdout)
        assert made["sentBytes"] == made["bytes"] > 1 << 20
        again = json.loads(server.cli("image", "convert", f"oci:{IMAGE}", name).stdout)
        assert (again["manifest"], again["sentBytes"]) == (made["manifest"], 0)
        yield name, made


def run(server, id, command):
    return server.cli("exec", id, "--user", "root", "--", "sh", "-c", command).stdout


def test_a_converted_image_is_used_where_it_is(server, published):
    name, made = published
    settings = [
        "network.internal.veth_cidr=10.215.0.0/16",
        "snapshot.background_fill=false",
        "image.cache.capacity_gb=1",
    ]
    with own_server(settings) as node:
        node.cli("pull", name, "--name", "in-place", "--cpu", "1", "--memory", "512")
        notes = [json.loads(path.read_text()) for path in (node.home / "layers").glob("sha256-*.remote")]
        assert {note["place"]["in"] for note in notes} == {"registry"}
        kept = (node.home / "cache" / "blocks" / "blocks").stat().st_blocks * 512
        # Preparing a template runs much of what is in the image.
        assert 0 < kept < made["bytes"], f"{kept} of {made['bytes']} bytes"
        id = json.loads(node.cli("start", "in-place", "--timeout", 600, "-d").stdout)["sandboxID"]
        assert run(node, id, "cat /etc/debian_version && echo new > /root/new && cat /root/new").endswith("new\n")
        node.api("DELETE", f"/sandboxes/{id}")


def test_who_may_publish(server, published):
    name, _ = published
    member = json.loads(server.cli("key", "create", "publisher", "--team", "publishers").stdout)["key"]
    key = {"X-API-Key": member}
    status, answer = server.api("POST", "/images/push", {"image": f"oci:{IMAGE}", "target": name}, headers=key)
    assert status == 403, answer
    body = {"image": name, "target": "oci:/tmp/somewhere"}
    assert server.api("POST", "/images/convert", body, headers=key)[0] == 403
    # It is in overlaybd format already.
    failed = server.cli("image", "convert", name, name + "-twice", check=False)
    assert failed.returncode == 1 and "already" in failed.stderr, failed.stderr
    failed = server.cli("image", "convert", f"oci:{IMAGE}", "127.0.0.1:9/base:1", check=False)
    assert failed.returncode == 1 and "nothing was published" in failed.stderr, failed.stderr
