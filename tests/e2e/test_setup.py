"""`aenv-server setup`: what it gets by its manifest, and what it makes of it."""

import hashlib
import http.server
import io
import json
import subprocess
import tarfile
import threading

import pytest
from conftest import GUEST, Server

MEMBER = "release-v9.9.9-x86_64/firecracker-v9.9.9-x86_64"
ARCHIVE = "firecracker-v9.9.9-x86_64.tgz"


class Place:
    """An HTTP server of files, which notes what it was asked for."""

    def __init__(self, files):
        place = self
        self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                place.asked.append(self.path.lstrip("/"))
                content = files.get(self.path.lstrip("/"))
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def files(server):
    """A kernel package, and an archive that has a program which is no Firecracker."""
    packages = sorted((server.home / "artifacts").glob("linux-image-*.deb"))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        member = tarfile.TarInfo(MEMBER)
        member.size = len(b"program")
        tar.addfile(member, io.BytesIO(b"program"))
    return {packages[0].name: packages[0].read_bytes(), ARCHIVE: archive.getvalue()}


def manifest(folder, files, url):
    (kernel,) = [name for name in files if name.endswith(".deb")]
    entries = []
    for section, name in [("firecracker", ARCHIVE), ("kernel", kernel)]:
        digest = hashlib.sha256(files[name]).hexdigest()
        entries += [f"[{section}]", 'version = "9.9.9"', f'file = "{name}"', f'sha256 = "sha256:{digest}"']
        entries += [f'urls = ["{url}/{name}"]']
        entries += [f'member = "{MEMBER}"'] if section == "firecracker" else []
    path = folder / "manifest.toml"
    path.write_text("\n".join(entries))
    return path


@pytest.fixture
def setup(tmp_path):
    node = Server(tmp_path / "home", tmp_path / "run")

    def run(*words):
        words = node.command("setup", "--guest", GUEST, "--set", "engine=firecracker", *words)
        return subprocess.run(words, capture_output=True, text=True)

    run.node = node
    return run


def test_files_are_got_once_and_used(files, setup, tmp_path):
    place = Place(files)
    words = ["--manifest", manifest(tmp_path, files, place.url)]
    first = setup(*words)
    assert first.returncode == 0, first.stdout + first.stderr
    assert sorted(place.asked) == sorted(files)
    program = setup.node.home / "artifacts" / "firecracker-9.9.9"
    assert program.read_bytes() == b"program" and program.stat().st_mode & 0o777 == 0o755
    assert str(program) in first.stdout

    again = setup(*words)
    assert again.returncode == 0 and sorted(place.asked) == sorted(files), "something was fetched again"
    assert f"{ARCHIVE} is there" in again.stdout

    # It is the node's Firecracker now, such as it is.
    words = setup.node.command("doctor", "--json", "--set", "engine=firecracker")
    findings = json.loads(subprocess.run(words, capture_output=True).stdout)
    assert any(str(program) in finding["detail"] for finding in findings), findings


def test_what_is_not_in_the_manifest_is_not_kept(files, setup, tmp_path):
    place = Place({**files, ARCHIVE: files[ARCHIVE] + b"!"})
    refused = setup("--manifest", manifest(tmp_path, files, place.url))
    assert refused.returncode == 1 and "sha256:" in refused.stderr and ARCHIVE in refused.stderr, refused.stderr
    assert not list((setup.node.home / "artifacts").glob("firecracker*"))


def test_a_folder_will_do_without_a_network(files, setup, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    words = ["--manifest", manifest(tmp_path, files, "http://127.0.0.1:1"), "--from", folder]
    lacking = setup(*words)
    assert lacking.returncode == 1 and str(folder) in lacking.stderr, lacking.stderr
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert setup(*words).returncode == 0
    assert (setup.node.home / "artifacts" / "firecracker-9.9.9").exists()
