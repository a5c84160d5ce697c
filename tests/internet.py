"""A small internet in a network namespace of its own: DNS, HTTP, HTTPS and a SOCKS5 proxy, which note what they see.

As a module: `Internet`, for tests. As a script: what runs inside the namespace."""

import contextlib
import http.server
import json
import os
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

#: Last number of each address.
HOST, SITE, OTHER, NAMELESS, PROXY = 1, 2, 3, 4, 5
#: What the DNS knows: a last number, or a whole address.
ZONE = {"site.test": SITE, "www.site.test": SITE, "other.test": OTHER, "proxy.test": PROXY, "inside.test": "10.9.9.9"}
LOGIN = ("someone", "correct horse")


def make_ca(folder):
    """A CA, and a certificate of its for every name of the zone; returns the CA's file."""
    folder = Path(folder)
    run = lambda *words: subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=folder)
    run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
        "-subj", "/CN=test CA", "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
        "-keyout", "ca.key", "-out", "ca.pem")
    run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=leaf",
        "-keyout", "leaf.key", "-out", "leaf.csr")
    names = ",".join(f"DNS:{name}" for name in ZONE)
    (folder / "leaf.ext").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth\n")
    run("x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30",
        "-extfile", "leaf.ext", "-out", "leaf.pem")
    return folder / "ca.pem"


class Internet:
    """Linked to the host by a veth pair; the host's server sends its sandboxes' traffic there by an ordinary route."""

    def __init__(self, certificates, folder):
        pid = os.getpid()
        self.netns, self.link, self.net = f"internet-{pid}", f"inet{pid}"[:15], f"198.18.{pid % 250 + 1}"
        self.certificates, self.events_file = Path(certificates), Path(folder) / "events"
        self.process = None

    def address(self, last):
        return f"{self.net}.{last}"

    def start(self):
        ip = lambda line: subprocess.run(["ip", *line.split()], check=True)
        ip(f"netns add {self.netns}")
        ip(f"link add {self.link} type veth peer name up0 netns {self.netns}")
        ip(f"addr add {self.address(HOST)}/24 dev {self.link}")
        ip(f"link set {self.link} up")
        ip(f"-n {self.netns} link set lo up")
        ip(f"-n {self.netns} link set up0 up")
        for last in (SITE, OTHER, NAMELESS, PROXY):
            ip(f"-n {self.netns} addr add {self.address(last)}/24 dev up0")
        self.events_file.touch()
        words = [sys.executable, __file__, self.net, str(self.certificates), str(self.events_file)]
        self.process = subprocess.Popen(["ip", "netns", "exec", self.netns, *words])
        deadline = time.monotonic() + 60
        while not self.events("ready"):
            assert self.process.poll() is None and time.monotonic() < deadline, "the internet did not come up"
            time.sleep(0.05)
        return self

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
        subprocess.run(["ip", "link", "del", self.link], check=False)
        subprocess.run(["ip", "netns", "del", self.netns], check=False)

    def events(self, kind, **having):
        """What was seen so far."""
        # What stands behind the last end of a line is still being written.
        whole, _, _ = self.events_file.read_text().rpartition("\n")
        found = [json.loads(line) for line in whole.splitlines()]
        return [one for one in found if one["kind"] == kind and having.items() <= one.items()]

    def forget(self):
        self.events_file.write_text("")


# What runs inside.

net, certificates, events_file = "", Path(), Path()


def note(kind, **what):
    with open(events_file, "a") as file:
        file.write(json.dumps({"kind": kind, **what}) + "\n")


class Http(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        at = self.connection.getsockname()[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        note("http", at=at, tls=isinstance(self.connection, ssl.SSLSocket), path=self.path, headers=headers)
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"tick\n")
                    self.wfile.flush()
                    time.sleep(0.2)
            note("stream ended")
            self.close_connection = True
            return
        body = f"this is {at}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class HttpServer(http.server.ThreadingHTTPServer):
    tls = None

    def server_bind(self):
        # Without asking for its own name, which nobody here knows.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address

    def get_request(self):
        stream, peer = super().get_request()
        note("connection", at=self.server_address[0], port=self.server_address[1])
        stream.settimeout(60)
        # The handshake is the handler's thread's business.
        wrapped = self.tls and self.tls.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
        return wrapped or stream, peer

    def handle_error(self, *_):
        pass


def answer(query):
    """The answer to a DNS query, and what was asked."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
        at += 1 + query[at]
    kind = struct.unpack(">H", query[at + 1 : at + 3])[0]
    question, name = query[12 : at + 5], ".".join(labels).lower()
    found = ZONE.get(name)
    records = b""
    if found and kind == 1:
        address = found if isinstance(found, str) else f"{net}.{found}"
        records = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(address)
    code = 0 if found else 3
    flags = struct.pack(">HHHHHH", struct.unpack(">H", query[:2])[0], 0x8180 | code, 1, 1 if records else 0, 0, 0)
    note("dns", name=name, type=kind)
    return flags + question + records


class DnsUdp(socketserver.BaseRequestHandler):
    def handle(self):
        self.request[1].sendto(answer(self.request[0]), self.client_address)


class DnsTcp(socketserver.StreamRequestHandler):
    def handle(self):
        length = struct.unpack(">H", self.rfile.read(2))[0]
        reply = answer(self.rfile.read(length))
        self.wfile.write(struct.pack(">H", len(reply)) + reply)


class Socks(socketserver.StreamRequestHandler):
    # Nothing of what follows the handshake may be in a buffer.
    rbufsize = 0

    def read(self, size):
        data = b""
        while len(data) < size:
            piece = self.rfile.read(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def handle(self):
        read, write = self.read, self.wfile.write
        methods = read(read(2)[1])
        login = None
        if 2 in methods:
            write(b"\x05\x02")
            read(1)
            login = [read(read(1)[0]).decode() for _ in range(2)]
            write(b"\x01\x00" if tuple(login) == LOGIN else b"\x01\x01")
        else:
            write(b"\x05\x00")
        _, _, _, kind = read(4)
        host = socket.inet_ntoa(read(4)) if kind == 1 else read(read(1)[0]).decode()
        port = struct.unpack(">H", read(2))[0]
        note("socks", target=f"{host}:{port}", login=login)
        outside = socket.create_connection((host, port), timeout=10)
        write(b"\x05\x00\x00\x01" + bytes(6))

        def copy(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        outside.settimeout(None)
        there = threading.Thread(target=copy, args=(self.connection, outside), daemon=True)
        there.start()
        copy(outside, self.connection)
        there.join()


def main():
    global net, certificates, events_file
    net, certificates, events_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "leaf.pem", certificates / "leaf.key")
    servers = []
    for last in (SITE, OTHER, NAMELESS):
        for port in (80, 443):
            server = HttpServer((f"{net}.{last}", port), Http)
            server.tls = tls if port == 443 else None
            servers.append(server)
    for last in (SITE, OTHER):
        servers.append(socketserver.ThreadingUDPServer((f"{net}.{last}", 53), DnsUdp))
        servers.append(socketserver.ThreadingTCPServer((f"{net}.{last}", 53), DnsTcp))
    servers.append(socketserver.ThreadingTCPServer((f"{net}.{PROXY}", 1080), Socks))
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    note("ready")
    threading.Event().wait()


if __name__ == "__main__":
    main()
