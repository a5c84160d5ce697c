"""A real S3 server behind a proxy that can fail: slow, wrong, cut off, silent, gone."""

import contextlib
import http.client
import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

BUCKET, REGION, KEY = "aenv", "us-east-1", ("test", "test")
#: Not passed on by a proxy.
OWN_HEADERS = {"connection", "transfer-encoding", "content-length", "server", "date"}


def is_blob(path):
    return path.startswith(f"/{BUCKET}/blobs/")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        store = self.server.store
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else b""
        path = self.path.split("?")[0]
        fault = store.fault(self.command, path)
        kind = fault[0] if fault else None
        store.count(self.command, path, kind)
        if kind == "slow":
            time.sleep(fault[1])
        elif kind == "silent":
            store.released.wait(300)
            kind = "drop"
        if kind == "drop":
            self.close_connection = True
            return
        if kind == "status":
            text = b"<Error><Code>ServiceUnavailable</Code><Message>a test</Message></Error>"
            return self.answer(fault[1], [("Content-Type", "application/xml")], text)
        status, headers, answer = store.ask(self.command, self.path, self.headers, body)
        if kind == "wrong" and answer:
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 0xFF]) + answer[middle + 1 :]
        self.answer(status, headers, answer, cut=kind == "cut")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def answer(self, status, headers, body, cut=False):
        self.send_response(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value
            if name.lower() not in OWN_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut

    def log_message(self, *_):
        pass


class Front(http.server.ThreadingHTTPServer):
    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def handle_error(self, *_):
        pass


class Store:
    """`fault` decides for each request: None, ("status", 503), ("slow", seconds), ("cut",), ("wrong",), ("drop",), ("silent",)."""

    def __init__(self, free_port):
        self.behind, self.port = free_port(), free_port()
        self.released, self.lock = threading.Event(), threading.Lock()
        self.seen, self.kept = [], {}
        self.front = self.process = None
        self.well()

    @property
    def settings(self):
        return [
            "snapshot.repository_backend=oss", f"backend.oss.endpoint=http://127.0.0.1:{self.port}",
            f"backend.oss.bucket={BUCKET}", f"backend.oss.region={REGION}",
            f"backend.oss.access_key_id={KEY[0]}", f"backend.oss.access_key_secret={KEY[1]}",
        ]

    def start(self, wait_for):
        words = [Path(sys.executable).parent / "moto_server", "-H", "127.0.0.1", "-p", str(self.behind)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def bucket():
            with contextlib.suppress(OSError):
                return self.ask("PUT", f"/{BUCKET}", {}, b"")[0] == 200

        wait_for("the S3 server", bucket, 60)
        self.back()
        return self

    def stop(self):
        self.gone()
        if self.process:
            self.process.kill()
            self.process.wait()

    # How it is.

    def well(self):
        self.fault = lambda method, path: None
        self.released.set()

    def ill(self, fault):
        """`fault` is asked for each request, or holds for all."""
        self.released.clear()
        self.fault = fault if callable(fault) else lambda method, path: fault

    def gone(self):
        """Nobody listens, and what was connected is cut off."""
        self.ill(("drop",))
        self.released.set()
        if self.front:
            self.front.shutdown()
            self.front.server_close()
            self.front = None

    def back(self):
        self.well()
        if not self.front:
            self.front = Front(("127.0.0.1", self.port), Handler)
            self.front.store = self
            threading.Thread(target=self.front.serve_forever, args=(0.05,), daemon=True).start()

    # What it does.

    def count(self, method, path, kind):
        with self.lock:
            self.seen.append((method, path, kind))

    def ask(self, method, path, headers, body):
        """(status, headers, body) of the server behind."""
        span = headers.get("Range")
        bare = path.split("?")[0]
        if method == "GET" and span and is_blob(bare):
            return self.range(bare, span, headers)
        connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=60)
        try:
            connection.request(method, path, body, dict(headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def range(self, path, span, headers):
        """That server reads a whole object for each range. Blobs never change: they are kept here."""
        if path not in self.kept:
            plain = {name: value for name, value in headers.items() if name.lower() != "range"}
            status, found, whole = self.ask("GET", path, plain, b"")
            if status != 200:
                return status, found, whole
            self.kept[path] = (found, whole)
        found, whole = self.kept[path]
        first, last = span.removeprefix("bytes=").split("-")
        first, last = int(first), min(int(last or len(whole)), len(whole) - 1)
        found = [(name, value) for name, value in found if name.lower() != "content-length"]
        return 206, [*found, ("Content-Range", f"bytes {first}-{last}/{len(whole)}")], whole[first : last + 1]

    def put(self, key, bytes):
        status, _, answer = self.ask("PUT", f"/{BUCKET}/{key}", {}, bytes)
        assert status == 200, answer

    def copy_template(self, repository, name):
        """Brings a template here from a repository that is a folder: its documents, its manifest, its blobs."""
        repository = Path(repository)
        [owner] = repository.glob(f"teams/*/names/{name}.json")
        template = json.loads(owner.read_text())["value"]["template"]
        document = owner.parent.parent / "templates" / f"{template}.json"
        checkpoints = {build["checkpoint"] for build in json.loads(document.read_text())["value"]["builds"] if build.get("checkpoint")}
        files = [owner, document, repository / "format.json"]
        for checkpoint in checkpoints:
            manifest = repository / "checkpoints" / f"{checkpoint}.json"
            files.append(manifest)
            text = manifest.read_text()
            files += [blob for blob in (repository / "blobs").glob("*/*/*") if blob.name in text]
        for file in files:
            self.put(file.relative_to(repository), file.read_bytes())
