"""A node that has none of a template's layers launches it from another node's repository, and reads only what it needs."""

import json

import pytest

from conftest import own_server

READ = "cat /usr/bin/* /etc/passwd | sha256sum"


@pytest.fixture
def node(server):
    settings = [
        "network.internal.veth_cidr=10.214.0.0/16",
        f"backend.posix_fs.snapshot_store={server.home}/repository",
        "snapshot.on_demand=always",
        "image.cache.capacity_gb=1",
    ]
    with own_server(settings) as made:
        yield made


def start(server):
    return json.loads(server.cli("start", "base", "--timeout", 600, "-d").stdout)["sandboxID"]


def run(server, id, command):
    return server.cli("exec", id, "--user", "root", "--", "sh", "-c", command).stdout


def test_layers_stay_in_the_repository(server, node):
    elsewhere = start(server)
    expected = run(server, elsewhere, READ)
    server.api("DELETE", f"/sandboxes/{elsewhere}")

    id = start(node)
    notes = list((node.home / "layers").glob("sha256-*.remote"))
    assert notes, "no layer is read from elsewhere"
    assert not [note for note in notes if note.with_suffix("").exists()], "a layer was fetched whole"
    kept = (node.home / "cache" / "blocks" / "blocks").stat()
    whole = sum(json.loads(note.read_text())["size"] for note in notes)
    assert 0 < kept.st_blocks * 512 < whole / 2, f"{kept.st_blocks * 512} of {whole} bytes"

    assert run(node, id, READ) == expected
    run(node, id, "echo new > /root/new; sync")
    node.cli("pause", id)
    node.cli("resume", id)
    assert run(node, id, "cat /root/new") == "new\n"
    # What was read once needs no repository, not even after blockd ended.
    assert run(node, id, "echo 3 > /proc/sys/vm/drop_caches; " + READ) == expected
    node.api("DELETE", f"/sandboxes/{id}")
