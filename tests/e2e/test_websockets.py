"""Many WebSockets to one sandbox at once, through the proxy."""

import asyncio
import resource

import pytest
import websockets
from conftest import LONG, wait_for
from e2b import Sandbox
from guest import get

PORT = 8765
MANY = 3000
#: Handshakes at once: the guest's CPU is emulated.
AT_ONCE = 50
#: What the server may grow by for each: two connections, their buffers and their tasks.
KIB_EACH = 64

# Of RFC 6455 what an echo needs. Frames of clients are masked, and here short.
ECHO = """
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


@pytest.mark.compat("http", "WebSocket")
def test_thousands_live_and_break_with_the_sandbox(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sandbox = Sandbox.create("base", timeout=LONG)
    try:
        sandbox.files.write("/tmp/echo.py", ECHO.replace("PORT", str(PORT)))
        sandbox.commands.run("ulimit -n 8192; exec python3 -IS /tmp/echo.py", user="root", background=True, timeout=0)
        wait_for("the guest's server", lambda: get(server, sandbox, PORT)[0] == 200, 90)
        before = server.memory_kib("server", "VmRSS")
        asyncio.run(live(server, sandbox, before))
    finally:
        sandbox.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def live(server, sandbox, before):
    turns = asyncio.Semaphore(AT_ONCE)

    async def connect():
        async with turns:
            # The name in the URL is the Host header; the connection itself goes to the server.
            return await websockets.connect(
                f"ws://{sandbox.get_host(PORT)}/", host="127.0.0.1", port=server.port,
                open_timeout=120, ping_interval=None, proxy=None, compression=None,
            )

    async def echo(socket, text):
        async with turns:
            await socket.send(text)
            assert await asyncio.wait_for(socket.recv(), 120) == text

    sockets = await asyncio.gather(*(connect() for _ in range(MANY)))
    # Each has its own stream, and all are there at the same time.
    await asyncio.gather(*(echo(socket, f"of {number}") for number, socket in enumerate(sockets)))
    grown = server.memory_kib("server", "VmRSS") - before
    assert grown < MANY * KIB_EACH, f"{grown} KiB for {MANY} connections"
    await asyncio.to_thread(sandbox.kill)
    for socket in sockets:
        with pytest.raises(websockets.ConnectionClosedError):
            await asyncio.wait_for(socket.recv(), 30)
