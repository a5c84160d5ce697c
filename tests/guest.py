"""Web servers in a sandbox, and requests to them."""

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

# An echo of WebSockets: of RFC 6455 what it needs. Frames of clients are masked, and here short.
WEB_SOCKETS = """
import asyncio, base64, hashlib

async def serve(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).split(b"\\r\\n")
    key = next((line.split(b": ", 1)[1] for line in head if line.lower().startswith(b"sec-websocket-key: ")), None)
    if key is None:
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
        return writer.close()
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    writer.write(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                 b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    while True:
        first, second = await reader.readexactly(2)
        size = second & 127
        mask = await reader.readexactly(4)
        body = bytes(byte ^ mask[at % 4] for at, byte in enumerate(await reader.readexactly(size)))
        writer.write(bytes([first, size]) + body)

async def main():
    async with await asyncio.start_server(serve, "0.0.0.0", PORT, backlog=1024) as listener:
        await listener.serve_forever()

asyncio.run(main())
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
