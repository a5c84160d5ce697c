"""A web server in a sandbox, and requests to it."""

import urllib.error
import urllib.request

from conftest import wait_for

# As little Python as possible: under emulation each import counts.
ECHO = """
import socket
listener = socket.create_server(("0.0.0.0", PORT))
while True:
    peer, _ = listener.accept()
    request = b""
    while b"\\r\\n\\r\\n" not in request and (piece := peer.recv(65536)):
        request += piece
    peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n%s" % (len(request), request))
    peer.close()
"""


def get(server, sandbox, port, headers=None):
    """(status, body) of a GET to a port of a sandbox, by host name."""
    request = urllib.request.Request(server.url + "/", headers={"Host": sandbox.get_host(port), **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def serve(server, sandbox, port, headers=None):
    """A web server that answers with the request it got, once it does."""
    sandbox.files.write("/tmp/echo.py", ECHO.replace("PORT", str(port)))
    sandbox.commands.run("python3 -IS /tmp/echo.py", background=True, timeout=0)
    wait_for("the guest's web server", lambda: get(server, sandbox, port, headers)[0] == 200, 90)
