"""Clients of the generations before the current one, each in an environment of its own."""

import asyncio
import os
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import ROOT

HERE = Path(__file__).parent
CLIENTS = ROOT / ".build" / "clients"


class TlsFront:
    """TLS for `*.aenv.test` before a server, as an operator's load balancer does it: bytes in, bytes out."""

    def __init__(self, folder, target):
        self.certificate, key = folder / "certificate.pem", folder / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", "/CN=aenv.test", "-addext", "subjectAltName=DNS:*.aenv.test", "-keyout", key, "-out", self.certificate],
            check=True, capture_output=True,
        )
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.certificate, key)
        self.context.set_alpn_protocols(["http/1.1"])
        self.target, self.port = target, None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    async def serve(self, reader, writer):
        try:
            inward, outward = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return

        async def pump(source, sink):
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, outward), pump(inward, writer))

    def __enter__(self):
        self.thread.start()
        starting = asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.context)
        listening = asyncio.run_coroutine_threadsafe(starting, self.loop).result(20)
        self.port = listening.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)


@pytest.fixture
def by_domain(server, tmp_path):
    """The environment of a client that knows a domain and nothing else."""
    with TlsFront(tmp_path, server.port) as front:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "SSL_CERT")) and "proxy" not in name.lower()}
        yield {
            **env,
            "E2B_API_KEY": server.key,
            "E2B_DOMAIN": f"aenv.test:{front.port}",
            "SSL_CERT_FILE": str(front.certificate),
            "NODE_EXTRA_CA_CERTS": str(front.certificate),
        }


@pytest.fixture
def by_url(server):
    """The environment that README.md names."""
    return {**os.environ, **server.env}


def run(command, env, client, saw):
    """Runs a script, and notes the calls that it came to."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    calls = done.stdout.splitlines()
    for call in calls:
        saw(client, call)
    assert done.returncode == 0, f"after {calls}:\n{done.stderr}"
    assert calls


def python(client):
    program = CLIENTS / client / "bin" / "python"
    assert program.exists(), f"{program} does not exist: scripts/clients.sh makes it"
    return program


def test_python_1(by_domain, saw):
    run([python("python-1"), HERE / "previous/python_1.py"], by_domain, "python-1", saw)


def test_python_by_the_first_paths(by_url, saw):
    run([python("python-v1-paths"), HERE / "previous/python_v1_paths.py"], by_url, "python-v1-paths", saw)


def test_typescript_1(by_domain, saw):
    run(["node", HERE / "typescript/script_1.mjs"], by_domain, "typescript-1", saw)
