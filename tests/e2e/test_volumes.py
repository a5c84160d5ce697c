"""Volumes with the published Python SDK: shared by sandboxes, kept over pauses and restarts, read and written from outside."""

import http.client
import io
import urllib.error
import urllib.parse
import urllib.request
import uuid

import pytest
from e2b import Sandbox, Volume
from e2b.exceptions import (
    AuthenticationException,
    VolumeException,
    VolumeNotFoundException,
    VolumePathNotFoundException,
)

from conftest import LONG


@pytest.fixture
def volume(server, monkeypatch):
    monkeypatch.setenv("E2B_VOLUME_API_URL", server.url)
    made = Volume.create(f"v-{uuid.uuid4().hex[:12]}")
    yield made
    for sandbox in server.api("GET", "/v2/sandboxes")[1]:
        if any(mount["name"] == made.name for mount in sandbox.get("volumeMounts", [])):
            server.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")
    Volume.destroy(made.volume_id)


def start(volume, path="/mnt/shared"):
    return Sandbox.create("base", timeout=LONG, volume_mounts={path: volume.name})


def content(server, volume, what, path, token=None, method="GET", body=None, extra=""):
    """Status of a call of the content API, past the SDK."""
    query = urllib.parse.urlencode({"path": path}) + extra
    url = f"{server.url}/volumecontent/{volume.volume_id}/{what}?{query}"
    request = urllib.request.Request(url, data=body, method=method)
    if token is not False:
        request.add_header("Authorization", f"Bearer {token or volume.token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_control_api(server, volume):
    assert volume.name in [found.name for found in Volume.list()]
    info = Volume.get_info(volume.volume_id)
    assert (info.volume_id, info.name, info.token) == (volume.volume_id, volume.name, volume.token)
    with pytest.raises(VolumeException, match="400"):
        Volume.create(volume.name)
    with pytest.raises(VolumeException, match="400"):
        Volume.create("no/slashes")
    with pytest.raises(VolumeNotFoundException):
        Volume.connect("volnonexistent")
    assert Volume.destroy("../../etc") is False
    status, answer = server.api("POST", "/v2/sandboxes", {
        "templateID": "base", "volumeMounts": [{"name": "nobody-made-this", "path": "/mnt"}]})
    assert (status, answer["error_code"]) == (400, "volume_not_found")

    _, key = server.api("POST", "/api-keys", {"name": "other", "team": "volumes-other"})
    other = {"X-API-Key": key["key"]}
    assert server.api("GET", "/volumes", headers=other)[1] == []
    assert server.api("GET", f"/volumes/{volume.volume_id}", headers=other)[0] == 404
    assert server.api("DELETE", f"/volumes/{volume.volume_id}", headers=other)[0] == 404
    status, _ = server.api("POST", "/v2/sandboxes", {
        "templateID": "base", "volumeMounts": [{"name": volume.name, "path": "/mnt"}]}, headers=other)
    assert status in (400, 404)


def test_the_content_api(server, volume):
    written = volume.write_file("a.txt", "hello", mode=0o640, uid=1000, gid=1000)
    assert (written.path, written.size, written.mode, written.uid) == ("/a.txt", 5, 0o640, 1000)
    assert volume.read_file("/a.txt") == "hello"
    with pytest.raises(VolumeException, match="409"):
        volume.write_file("a.txt", "again")
    volume.write_file("a.txt", "again", force=True)
    assert volume.read_file("a.txt") == "again"
    with pytest.raises(VolumePathNotFoundException):
        volume.write_file("no/folder.txt", "x")
    volume.make_dir("d/e", force=True)
    with pytest.raises(VolumeException, match="409"):
        volume.make_dir("d")
    blob = bytes(range(256)) * 40_000
    volume.write_file("d/e/blob", io.BytesIO(blob))
    assert b"".join(volume.read_file("d/e/blob", format="stream")) == blob
    assert [entry.path for entry in volume.list("/", depth=3)] == ["/a.txt", "/d", "/d/e", "/d/e/blob"]
    assert volume.update_metadata("d", mode=0o700).mode == 0o700
    volume.remove("d")
    assert not volume.exists("d/e/blob") and volume.exists("a.txt")
    with pytest.raises(VolumePathNotFoundException):
        volume.read_file("d/e/blob")


def test_hostile_paths_and_tokens(server, volume):
    other = Volume.create(f"other-{uuid.uuid4().hex[:8]}")
    try:
        assert content(server, volume, "path", "/") == 200
        for token in [False, "wrong", other.token]:
            for what, method in [("path", "GET"), ("dir", "GET"), ("file", "GET"), ("path", "DELETE"), ("file", "PUT")]:
                body = b"x" if method == "PUT" else None
                assert content(server, volume, what, "/x", token, method, body) == 401, (token, what, method)
        with pytest.raises(AuthenticationException):
            volume.get_info("/", token="wrong")
        for path in ["../etc/passwd", "/../../etc/passwd", "a/../../b", "..", "x" * 300, "a\0b"]:
            for what in ["path", "file", "dir"]:
                assert content(server, volume, what, path) == 400, (path, what)
            assert content(server, volume, "file", path, method="PUT", body=b"x") == 400
        assert content(server, volume, "path", "/", method="DELETE") == 404
        for extra in ["&mode=8388608", "&uid=-1", "&force=maybe", "&gid=x"]:
            assert content(server, volume, "file", "/x", method="PUT", body=b"x", extra=extra) == 400, extra
        # An upload that breaks off leaves nothing.
        host, port = server.url.removeprefix("http://").split(":")
        broken = http.client.HTTPConnection(host, int(port), timeout=10)
        broken.putrequest("PUT", f"/volumecontent/{volume.volume_id}/file?path=/half")
        broken.putheader("Authorization", f"Bearer {volume.token}")
        broken.putheader("Content-Length", "1000000")
        broken.endheaders(b"half of it")
        broken.close()
        assert volume.list("/") == []
    finally:
        assert Volume.destroy(other.volume_id)
    assert not Volume.destroy(other.volume_id)


def test_two_sandboxes_share_one(server, volume):
    volume.write_file("from-outside", "early")
    one, two = start(volume), start(volume, "/srv/other place")
    listed = server.api("GET", f"/sandboxes/{one.sandbox_id}")[1]
    assert listed["volumeMounts"] == [{"name": volume.name, "path": "/mnt/shared"}]
    assert one.commands.run("cat /mnt/shared/from-outside").stdout == "early"

    # As the ordinary user; seen by the other sandbox and from outside, and the other way round.
    one.commands.run("cd /mnt/shared && mkdir d && echo one > d/file && ln -s file d/link && chmod 600 d/file")
    two.commands.run("cd '/srv/other place' && cat d/link && echo two >> d/file && mv d/file d/moved")
    assert one.commands.run("sleep 1.1; cat /mnt/shared/d/moved").stdout == "one\ntwo\n"
    assert volume.read_file("d/moved") == "one\ntwo\n"
    entry = volume.get_info("d/moved")
    assert (entry.mode, entry.uid) == (0o600, int(one.commands.run("id -u").stdout))
    assert volume.get_info("d/link").target == "file"
    two.commands.run("head -c 3000000 /dev/urandom > '/srv/other place/big'")
    sums = [one.commands.run("sha256sum < /mnt/shared/big"), two.commands.run("sha256sum < '/srv/other place/big'")]
    assert sums[0].stdout == sums[1].stdout
    # Users are kept apart; a link out of the volume leads nowhere from outside.
    refused = one.commands.run(
        "sudo sh -c 'echo secret > /mnt/shared/r; chmod 600 /mnt/shared/r'; cat /mnt/shared/r; chmod 777 /mnt/shared/r;"
        " ln -s /etc/passwd /mnt/shared/out; true")
    assert "secret" not in refused.stdout
    assert volume.get_info("r").mode == 0o600
    with pytest.raises(VolumePathNotFoundException):
        volume.read_file("out")
    # An ordinary user cannot speak to the server past the kernel; nothing else of the gateway is open.
    probe = ("import socket\ns = socket.create_connection(('169.254.0.22', {port}), 3)\ns.settimeout(3)\n"
             "s.sendall(b'\\x80\\0\\0\\x28' + b'\\0' * 40)\nprint('answer', s.recv(1))")
    for port in (2049, 111):
        asked = one.commands.run(f'python3 -c "{probe.format(port=port)}" 2>&1 || true')
        assert "answer b'\\x" not in asked.stdout, (port, asked.stdout)

    with pytest.raises(VolumeException, match="409"):
        Volume.destroy(volume.volume_id)

    # A pause, a fork, a restart: the mount goes on.
    one.commands.run("tail -f /dev/null < /mnt/shared/d/moved", background=True, timeout=0)
    one.commands.run("until pgrep -x tail; do sleep 0.1; done")
    one.pause()
    two.commands.run("echo while-paused > '/srv/other place/note'")
    one = Sandbox.connect(one.sandbox_id, timeout=LONG)
    assert one.commands.run("cat /mnt/shared/note; pgrep -c tail").stdout == "while-paused\n1\n"
    (child,) = one.fork(count=1, timeout=LONG)
    child.commands.run("echo child > /mnt/shared/child")
    assert two.commands.run("cat '/srv/other place/child'").stdout == "child\n"
    server.kill()
    server.start()
    # The guest's kernel finds the server again at its own pace; what it has closed is written.
    assert one.commands.run("cat /mnt/shared/child && echo again > /mnt/shared/after", timeout=300).exit_code == 0
    assert volume.read_file("after") == "again\n"

    # A boot from the disk mounts it as well; a snapshot that is started without it lets it go.
    one.pause(keep_memory=False)
    one = Sandbox.connect(one.sandbox_id, timeout=LONG)
    assert one.commands.run("cat /mnt/shared/child").stdout == "child\n"
    snapshot = two.create_snapshot()
    copy = Sandbox.create(snapshot.snapshot_id, timeout=LONG)
    assert copy.commands.run("ls -A '/srv/other place' | wc -l", timeout=60).stdout == "0\n"
    for sandbox in [one, two, child, copy]:
        sandbox.kill()
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_the_command(server):
    name = f"cli-{uuid.uuid4().hex[:8]}"
    server.cli("volume", "create", name)
    assert name in server.cli("volume", "list").stdout
    import json

    made = json.loads(server.cli("start", "base", "--volume", f"{name}:/data", "-d", "--output", "json").stdout)
    try:
        shown = server.cli("exec", made["sandboxID"], "--", "stat", "-f", "-c", "%T", "/data").stdout
        assert shown.strip() == "nfs"
        assert server.cli("volume", "delete", name, check=False).returncode == 1
    finally:
        server.cli("delete", made["sandboxID"])
    server.cli("volume", "delete", name)
    assert server.cli("volume", "delete", name, check=False).returncode == 4
