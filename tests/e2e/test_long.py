"""What takes long, side by side: the preparation of images of other distributions, and streams on which nothing is said meanwhile.

The registries of Alpine and Fedora are out of reach. The likenesses here are the base image beneath a layer that takes away what they
do not have, puts files where they have them, and gives them a package manager that knows a few packages of its own.
"""

import concurrent.futures
import hashlib
import http.client
import io
import json
import shutil
import struct
import subprocess
import tarfile
import time

import pytest
import websockets.sync.client
from conftest import IMAGE, LONG, wait_for
from e2b import BuildException, Sandbox, Template
from guest import WEB_SOCKETS, get

SIZE = {"cpu_count": 1, "memory_mb": 512}
BUNDLE = "etc/ssl/certs/ca-certificates.crt"
#: Seconds of silence. Nothing on the way waits longer for anything, but for what the server gives a connection without a request;
#: that is tested with a short one in crates/aenv-server/src/proxy/tests.rs.
SILENCE = 45
#: Installs folders of /opt/packages, whole or not at all.
MANAGER = """#!/bin/sh
shift
for name; do
  case $name in -*) ;; *) [ -d "/opt/packages/$name" ] || { echo "ERROR: $name (no such package)" >&2; exit 1; } ;; esac
done
for name; do
  case $name in -*) ;; *) cp -a "/opt/packages/$name/." / ;; esac
done
"""


#: Alpine's busybox has this applet, and Debian's has not: `adduser -D -s SHELL [-G GROUP] NAME`.
ADDUSER = """#!/bin/sh
group=
while [ $# -gt 1 ]; do
  case $1 in -s) shell=$2; shift ;; -G) group=$2; shift ;; esac
  shift
done
id=1000
while grep -q ":x:$id:" /etc/passwd; do id=$((id + 1)); done
echo "$1:x:$id:$id::/home/$1:$shell" >> /etc/passwd
echo "$1:!:20000:0:99999:7:::" >> /etc/shadow
[ -n "$group" ] || echo "$1:x:$id:" >> /etc/group
mkdir -p "/home/$1"
chown "$id:$id" "/home/$1"
"""


class Base:
    """The base image, whose only layer is a tar."""

    def __init__(self):
        self.blobs = IMAGE / "blobs" / "sha256"
        manifest = self.read(self.read(None)["manifests"][0])
        [self.layer], self.config = manifest["layers"], self.read(manifest["config"])
        self.tar = tarfile.open(self.blobs / self.layer["digest"].removeprefix("sha256:"))

    def read(self, descriptor):
        path = self.blobs / descriptor["digest"].removeprefix("sha256:") if descriptor else IMAGE / "index.json"
        return json.loads(path.read_text())

    def file(self, name):
        return self.tar.extractfile(self.tar.getmember(f"./{name}")).read()


class Layer:
    """A layer in the making. Names are those below the root."""

    def __init__(self):
        self.bytes, self.names = io.BytesIO(), set()
        self.tar = tarfile.open(fileobj=self.bytes, mode="w", format=tarfile.PAX_FORMAT)

    def put(self, name, data="", mode=0o644, link=None):
        for at in [place for place, letter in enumerate(name) if letter == "/"]:
            self.folder(name[:at])
        entry = tarfile.TarInfo(name)
        entry.mode = mode
        if link:
            entry.type, entry.linkname = tarfile.SYMTYPE, link
        data = data.encode() if isinstance(data, str) else data
        entry.size = len(data)
        self.tar.addfile(entry, io.BytesIO(data))

    def folder(self, name):
        if name not in self.names:
            self.names.add(name)
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            self.tar.addfile(entry)

    def without(self, *names):
        for name in names:
            folder, _, last = name.rpartition("/")
            self.put(f"{folder}/.wh.{last}")

    def emptied(self, folder):
        self.put(f"{folder}/.wh..wh..opq")

    def done(self):
        self.tar.close()
        return self.bytes.getvalue()


def fedora_like(base, layer):
    layer.put("usr/lib/os-release", 'ID=fedora\nNAME="Fedora Linux"\n')
    layer.without("usr/bin/apt-get", "usr/bin/apt", "usr/bin/dpkg", "var/lib/dpkg", "usr/bin/sudo", "etc/ssl/certs")
    layer.put("etc/pki/tls/certs/ca-bundle.crt", base.file(BUNDLE))
    layer.put("usr/bin/dnf", MANAGER, 0o755)
    layer.put("opt/packages/sudo/usr/bin/sudo", base.file("usr/bin/sudo"), 0o4755)
    # A group of the user's name, whose number is not the user's.
    layer.put("etc/group", base.file("etc/group").replace(b"\nsudo:", b"\nwheel:") + b"user:x:777:\n")
    layer.put("etc/sudoers", base.file("etc/sudoers").replace(b"%sudo", b"%wheel"), 0o440)


def alpine_like(base, layer):
    layer.put("usr/lib/os-release", 'ID=alpine\nNAME="Alpine Linux"\n')
    layer.without("etc/ssl/certs", "var/lib/dpkg")
    layer.put("usr/bin/apk", MANAGER, 0o755)
    busybox(layer)
    layer.put("usr/bin/adduser", ADDUSER, 0o755)
    layer.put("opt/packages/bash/usr/bin/bash", base.file("usr/bin/bash"), 0o755)
    layer.put("opt/packages/sudo/usr/bin/sudo", base.file("usr/bin/sudo"), 0o4755)
    layer.put(f"opt/packages/ca-certificates/{BUNDLE}", base.file(BUNDLE))
    layer.put("etc/sudoers", "root ALL=(ALL:ALL) ALL\n", 0o440)


def bare(base, layer):
    """Neither sudo nor a package manager."""
    busybox(layer)
    layer.put("usr/bin/adduser", ADDUSER, 0o755)
    layer.put("usr/bin/bash", base.file("usr/bin/bash"), 0o755)


def busybox(layer):
    """All programs are applets of busybox."""
    layer.emptied("usr/bin")
    layer.emptied("usr/sbin")
    with open("/bin/busybox", "rb") as file:
        layer.put("usr/bin/busybox", file.read(), 0o755)
    applets = subprocess.run(["/bin/busybox", "--list"], check=True, capture_output=True, text=True).stdout
    for applet in set(applets.split()) - {"busybox"}:
        layer.put(f"usr/bin/{applet}", link="busybox")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """An OCI layout with a tag for each likeness."""
    base, folder = Base(), tmp_path_factory.mktemp("likenesses")
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    name = base.layer["digest"].removeprefix("sha256:")
    shutil.copy(base.blobs / name, blobs / name)

    def store(data):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    manifests = []
    for make in [fedora_like, alpine_like, bare]:
        layer = Layer()
        make(base, layer)
        top = {"mediaType": "application/vnd.oci.image.layer.v1.tar", **store(layer.done())}
        config = {**base.config, "rootfs": {"type": "layers", "diff_ids": [*base.config["rootfs"]["diff_ids"], top["digest"]]}}
        del config["history"]
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **store(config)},
            "layers": [base.layer, top],
        }
        tag = {"org.opencontainers.image.ref.name": make.__name__}
        manifests.append({"mediaType": manifest["mediaType"], **store(manifest), "annotations": tag})
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    return folder


#: Told by steps of the build, which run as the user.
FACTS = {
    "user": "id -un",
    "home": "pwd; stat -c %U /home/user",
    "shell": 'test -n "$BASH_VERSION" && echo bash',
    "root": "sudo -n id -un",
    "skel": "test -f ~/.bashrc && echo copied",
    "bundle": f"head -n 1 /{BUNDLE}",
    "distribution": ". /etc/os-release; echo $ID",
}
EXPECTED = {
    "user": ["user"],
    "home": ["/home/user", "user"],
    "shell": ["bash"],
    "root": ["root"],
    "skel": ["copied"],
    "bundle": ["-----BEGIN CERTIFICATE-----"],
}


def built(images, likeness, template):
    """What a build on a likeness tells, by fact; and its whole log."""
    log = []
    for fact, command in FACTS.items():
        template = template.run_cmd(f"echo 'fact {fact}'; {command}; echo end")
    Template.build(template, f"e2e-{likeness.replace('_', '-')}", on_build_logs=lambda entry: log.append(entry.message), **SIZE)
    facts = {fact: log[log.index(f"fact {fact}") + 1 :] for fact in FACTS}
    return {fact: lines[: lines.index("end")] for fact, lines in facts.items()}, log


class Stream:
    """An answer of envd's in envelopes. It is asked for no keepalives, so that nothing passes while nothing happens."""

    def __init__(self, server, sandbox, method, request):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        message = json.dumps(request).encode()
        headers = {
            "E2b-Sandbox-Id": sandbox.sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": sandbox._envd_access_token,
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": "86400",
        }
        self.connection.request("POST", f"/{method}", struct.pack(">BI", 0, len(message)) + message, headers)
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200

    def next(self):
        _, size = struct.unpack(">BI", self.answer.read(5))
        return json.loads(self.answer.read(size))


@pytest.fixture(scope="module")
def silent(server):
    """Streams that are open from now on."""
    sandbox = Sandbox.create("base", timeout=LONG)
    sandbox.commands.run("mkfifo /tmp/news && mkdir /tmp/watched")
    sandbox.files.write("/tmp/echo.py", WEB_SOCKETS.replace("PORT", "8765"))
    sandbox.commands.run("python3 -IS /tmp/echo.py", background=True, timeout=0)
    wait_for("the guest's server", lambda: get(server, sandbox, 8765)[0] == 200, 90)
    process = {"cmd": "/bin/sh", "args": ["-c", "read news < /tmp/news; echo $news"]}
    command = Stream(server, sandbox, "process.Process/Start", {"process": process, "stdin": False})
    watch = Stream(server, sandbox, "filesystem.Filesystem/WatchDir", {"path": "/tmp/watched"})
    assert "start" in command.next()["event"] and "start" in watch.next()
    # The name in the URL is the Host header; the connection itself goes to the server.
    options = {"address": ("127.0.0.1", server.port), "ping_interval": None, "proxy": None, "compression": None}
    with websockets.sync.client.connect(f"ws://{sandbox.get_host(8765)}/", **options) as socket:
        yield sandbox, command, watch, socket, time.monotonic()
    sandbox.kill()


@pytest.mark.usefixtures("silent")
def test_images_of_other_distributions_are_prepared(server, images, tmp_path):
    (tmp_path / "file").write_text("copied\n")

    def fedora():
        facts, log = built(images, "fedora_like", Template().from_image(f"oci:{images}:fedora_like"))
        assert facts == {**EXPECTED, "distribution": ["fedora"]}, log
        # The bundle is still where this distribution has it.
        assert "Installing sudo" in log

    def alpine():
        template = Template(file_context_path=tmp_path).from_image(f"oci:{images}:alpine_like")
        template = template.copy("file", "made/file").set_user("other").set_workdir("/srv/work").run_cmd("id -un > mine; cat mine /home/user/made/file")
        facts, log = built(images, "alpine_like", template.set_user("user").set_workdir("/home/user"))
        assert facts == {**EXPECTED, "distribution": ["alpine"]}, log
        # It has no curl to install, and gets what it needs all the same.
        assert "ERROR: curl (no such package)" in log and "Installing bash sudo ca-certificates" in log
        assert log[log.index("other") + 1] == "copied", log

    def nothing():
        expected = "the image cannot be prepared: the image lacks sudo, and has none of apt-get, apk and dnf to install it"
        with pytest.raises(BuildException, match=expected):
            Template.build(Template().from_image(f"oci:{images}:bare"), "e2e-bare", **SIZE)

    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for done in [pool.submit(work) for work in (fedora, alpine, nothing)]:
                done.result()
    finally:
        for name in ["e2e-fedora-like", "e2e-alpine-like", "e2e-bare"]:
            server.api("DELETE", f"/templates/{name}")


@pytest.mark.compat("http", "silent streams")
def test_streams_live_however_long_they_are_silent(server, silent):
    sandbox, command, watch, socket, since = silent
    # The kernel asks clients whether they are there; nothing else passes.
    states = subprocess.run(["ss", "-tnoH", f"sport = :{server.port}"], check=True, capture_output=True, text=True).stdout
    assert "timer:(keepalive" in states, states
    time.sleep(max(0, since + SILENCE - time.monotonic()))
    sandbox.commands.run("echo 'at last' > /tmp/news; touch /tmp/watched/file")
    assert command.next()["event"]["data"]["stdout"] == "YXQgbGFzdAo="
    assert command.next()["event"]["end"]["exited"]
    assert watch.next()["filesystem"]["name"] == "file"
    socket.send("still here")
    assert socket.recv(60) == "still here"
