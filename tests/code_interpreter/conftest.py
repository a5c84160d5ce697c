"""The code interpreter's service as a process of this machine, and a stand-in for the envd beside it."""

import http.client
import http.server
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from conftest import ROOT, free_port, wait_for

SOURCE = ROOT / "templates" / "code-interpreter"
PYTHON = Path(os.environ.get("AENV_INTERPRETER_PYTHON", ROOT / ".build/clients/code_interpreter_service/bin/python"))
TOKEN = "a token"


class Execution:
    """What an execution gave, by the lines of its stream."""

    def __init__(self, lines):
        self.lines = lines

    def of(self, *kinds):
        return [line for line in self.lines if line["type"] in kinds]

    def stdout(self):
        return "".join(line["text"] for line in self.of("stdout"))

    @property
    def results(self):
        return self.of("result")

    @property
    def text(self):
        return next((one["text"] for one in self.results if one["is_main_result"]), None)

    @property
    def error(self):
        return next(iter(self.of("error")), None)


class Service:
    def __init__(self, port):
        self.port = port

    def open(self, method, path, body=None, headers=None):
        """A connection, with an answer whose body was not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        connection.request(method, path, data, headers or {})
        return connection, connection.getresponse()

    def call(self, method, path, body=None, headers=None):
        connection, answer = self.open(method, path, body, headers)
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def lines(self, answer):
        for line in answer:
            assert line.endswith(b"\n") and line.strip() and line.isascii(), line
            yield json.loads(line)

    def run(self, code, language=None, context=None, env=None, token=TOKEN):
        body = {"code": code, "language": language, "context_id": context, "env_vars": env}
        connection, answer = self.open("POST", "/execute", body, {"X-Access-Token": token})
        assert answer.status == 200, answer.read()
        found = Execution(list(self.lines(answer)))
        connection.close()
        assert found.lines[-1] == {"type": "end_of_execution"}
        return found

    def contexts(self):
        return json.loads(self.call("GET", "/contexts")[1])

    def create(self, **options):
        status, text = self.call("POST", "/contexts", options)
        assert status == 200, text
        return json.loads(text)

    def remove(self, identity):
        assert self.call("DELETE", f"/contexts/{identity}") == (200, "null")


class Envd(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/envs" and self.headers["X-Access-Token"] == TOKEN
        body = json.dumps(self.server.envs if known else {"code": 401}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def envd():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Envd)
    server.envs = {"OF_SANDBOX": "all"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def service(envd, home, tmp_path_factory):
    assert PYTHON.exists(), f"{PYTHON} does not exist: run scripts/clients.sh first"
    port, log = free_port(), tmp_path_factory.mktemp("log") / "service.log"
    command = [PYTHON, "-m", "code_interpreter", "--port", str(port), "--address", "127.0.0.1", "--home", home]
    env = {**os.environ, "CODE_INTERPRETER_ENVD": f"http://127.0.0.1:{envd.server_port}", "HOME": str(home)}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=SOURCE, env=env, stdout=file, stderr=file)
    service = Service(port)

    def healthy():
        assert process.poll() is None, log.read_text()
        try:
            return service.call("GET", "/health") == (200, '"OK"')
        except OSError:
            return False

    try:
        wait_for("the service's health", healthy, 300)
        yield service
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()
