"""Many WebSockets to one sandbox at once, through the proxy."""

import asyncio
import resource

import pytest
import websockets
from conftest import LONG, wait_for
from e2b import Sandbox
from guest import WEB_SOCKETS, get

PORT = 8765
MANY = 3000
#: Handshakes at once: the guest's CPU is emulated.
AT_ONCE = 50
#: What the server may grow by for each: two connections, their buffers and their tasks.
KIB_EACH = 64


@pytest.mark.compat("http", "WebSocket")
def test_thousands_live_and_break_with_the_sandbox(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sandbox = Sandbox.create("base", timeout=LONG)
    try:
        sandbox.files.write("/tmp/echo.py", WEB_SOCKETS.replace("PORT", str(PORT)))
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
