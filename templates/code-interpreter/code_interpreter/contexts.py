"""The contexts: each has a language, a folder, a kernel, and one execution at a time."""

import asyncio
import logging
import os
import uuid
from pathlib import Path

from . import environment, events
from .jupyter import JupyterKernel, installed
from .kernels import KernelDied
from .node import NodeKernel

HOME = "/home/user"
# After that an interrupt is sent once more: the first one may have come before the kernel had begun.
AGAIN_SECONDS = 2

SHORT = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}
NODE = {"javascript", "typescript"}


class UnknownContext(Exception):
    """No context has this id."""


class UnusableFolder(Exception):
    """A context cannot start there."""


def named(language):
    """The language that a client means."""
    language = (language or "python").strip().lower()
    return SHORT.get(language, language)


def kernel_for(language):
    return NodeKernel(language) if language in NODE else JupyterKernel(language)


class Context:
    def __init__(self, language, cwd):
        self.id, self.language, self.cwd = str(uuid.uuid4()), language, cwd
        self.kernel = kernel_for(language)
        self.ended = None  # Why the user ended the kernel, while an execution may still be under way.
        self.applied = {}
        self._lock = asyncio.Lock()
        self._begin()

    async def ready(self):
        """Waits until the kernel is ready. Whoever stops waiting does not stop the kernel's start."""
        await asyncio.shield(self._starting)

    def describe(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def execute(self, code, env, emit):
        """Runs code, in turn. Cancelled, it interrupts the code, and frees the context when that has ended."""
        async with self._lock:
            if self.ended:
                await emit(events.error(*self.ended))
                return
            run = asyncio.create_task(self._run(code, env, emit))
            try:
                await asyncio.shield(run)
            except KernelDied as death:
                if self.ended:
                    await emit(events.error(*self.ended))
                else:
                    logging.warning("context %s: %s", self.id, death)
                    await self._renew()
                    text = f"{death}. The context was restarted; its variables are lost."
                    await emit(events.error("KernelDied", text))
                await emit(events.UNEXPECTED_END)
            except asyncio.CancelledError:
                await self._quiet(run)
                raise

    async def _run(self, code, env, emit):
        await self.ready()
        changed = environment.changes(self.applied, {**os.environ, **env})
        if changed:
            await self.kernel.change_environment(changed)
            self.applied = {**os.environ, **env}
        await self.kernel.execute(code, emit)

    async def _quiet(self, run):
        """Ends what nobody waits for any more. Code that heeds no interrupt goes on: a restart would lose what the user has."""
        if not self._starting.done():
            run.cancel()
            return
        for patience in (AGAIN_SECONDS, None):
            await self.kernel.interrupt()
            _, running = await asyncio.wait({run}, timeout=patience)
            if not running:
                break
        if run.exception() and not self.ended:
            await self._renew()

    async def restart(self):
        await self._end("ContextRestarting", "Context was restarted")
        async with self._lock:
            await self._renew()
            self.ended = None
        await self.ready()

    async def remove(self):
        await self._end("ContextRemoved", "Context was removed")

    async def _end(self, name, value):
        self.ended = (name, value)
        await asyncio.wait({self._starting})
        await self.kernel.stop()

    async def _renew(self):
        await asyncio.wait({self._starting})
        await self.kernel.stop()
        self.kernel = kernel_for(self.language)
        self._begin()

    def _begin(self):
        self.applied = dict(os.environ)
        self._starting = asyncio.create_task(self.kernel.start(self.cwd))
        # A start that failed is told to whoever asks next, and to nobody if nobody does.
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())


class Contexts:
    def __init__(self, home=HOME):
        self.home, self._all, self._default = home, {}, {}

    def listed(self):
        return [context.describe() for context in self._all.values()]

    def languages(self):
        """What contexts can be made for."""
        return sorted(set(installed()) | NODE)

    def find(self, identity):
        try:
            return self._all[identity]
        except KeyError:
            raise UnknownContext(identity) from None

    def default(self, language):
        """The context for code that names none; made when it is asked for first."""
        context = self._default.get(language)
        if context is None or context.id not in self._all:
            context = self._default[language] = self._add(language, self.home)
        return context

    def create(self, language, cwd):
        cwd = cwd or self.home
        path = Path(self.home, cwd)
        if not path.is_dir() or not os.access(path, os.X_OK):
            raise UnusableFolder(f"cwd '{cwd}' is no folder that can be entered")
        return self._add(language, str(path))

    def _add(self, language, cwd):
        context = Context(language, cwd)
        self._all[context.id] = context
        return context

    async def remove(self, identity):
        context = self.find(identity)
        del self._all[identity]
        await context.remove()

    async def close(self):
        for identity in list(self._all):
            await self.remove(identity)
