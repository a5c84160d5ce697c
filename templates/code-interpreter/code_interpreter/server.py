"""The HTTP interface, as the published clients call it."""

import asyncio
import json

from tornado.web import Application, HTTPError, RequestHandler

from . import environment, events
from .contexts import UnknownContext, UnusableFolder, named
from .kernels import KernelDied, UnknownLanguage

KEEPALIVE_SECONDS = 5
# Events that wait for a slow client; beyond that the code's output waits where it is made.
QUEUED_EVENTS = 4096


class Handler(RequestHandler):
    def initialize(self, contexts):
        self.contexts = contexts

    def set_default_headers(self):
        # Pages call sandboxes too.
        for name in ("Origin", "Methods", "Headers"):
            self.set_header(f"Access-Control-Allow-{name}", "*")

    def options(self, *_):
        self.set_status(204)

    def body(self):
        """The request's object; a field that is null is as if it were not there."""
        try:
            given = json.loads(self.request.body or b"{}")
        except ValueError:
            raise HTTPError(400, log_message="The body is no JSON") from None
        if not isinstance(given, dict):
            raise HTTPError(400, log_message="The body is no JSON object")
        return {name: value for name, value in given.items() if value is not None}

    def text(self, given, name):
        value = given.get(name)
        if value is not None and not isinstance(value, str):
            raise HTTPError(400, log_message=f"{name} is no string")
        return value

    def answer(self, value):
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(value))

    def write_error(self, status, exc_info=None, **_):
        """Plain text, for the clients show it as it is."""
        error = exc_info[1] if exc_info else None
        match error:
            case UnknownContext():
                status, text = 404, f"Context {error} not found"
            case UnknownLanguage():
                there = ", ".join(self.contexts.languages())
                status, text = 400, f"Nothing runs the language '{error}' here; there are: {there}"
            case UnusableFolder():
                status, text = 400, str(error)
            case KernelDied():
                status, text = 500, f"The kernel could not be started: {error}"
            case HTTPError():
                text = error.log_message or self._reason
            case _:
                text = "Internal error"
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(text)

    def log_exception(self, kind, error, trace):
        if not isinstance(error, (UnknownContext, UnknownLanguage, UnusableFolder)):
            super().log_exception(kind, error, trace)


class Health(Handler):
    def get(self):
        self.answer("OK")


class Execute(Handler):
    run = None

    async def post(self):
        given = self.body()
        code, identity, language = (self.text(given, name) for name in ("code", "context_id", "language"))
        env = given.get("env_vars", {})
        if code is None:
            raise HTTPError(400, log_message="code is missing")
        if identity and language:
            raise HTTPError(400, log_message="Only one of context_id or language can be provided")
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise HTTPError(400, log_message="env_vars is no object of strings")
        context = self.contexts.find(identity) if identity else self.contexts.default(named(language))
        token = self.request.headers.get("X-Access-Token")
        await self.follow(context, code, {**await environment.of_sandbox(token), **env})

    async def follow(self, context, code, env):
        """Streams the execution's events, and a sign of life whenever there was none for a while."""
        self.set_header("Content-Type", "application/x-ndjson")
        self.queue = asyncio.Queue(QUEUED_EVENTS)
        self.run = asyncio.create_task(self.produce(context, code, env))
        if self.gone():
            self.run.cancel()
        await self.flush()
        event = None
        while event is not events.END:
            waiting = asyncio.ensure_future(self.queue.get())
            while not (await asyncio.wait({waiting}, timeout=KEEPALIVE_SECONDS))[0]:
                await self.send(events.KEEPALIVE)
            event = waiting.result()
            await self.send(event)
        if not self.gone():
            await self.run

    async def produce(self, context, code, env):
        try:
            await context.execute(code, env, self.emit)
        finally:
            await self.emit(events.END)

    async def emit(self, event):
        if not self.gone() or event is events.END:
            await self.queue.put(event)

    async def send(self, event):
        # To a client that is gone nothing is written, but its execution is waited for.
        if not self.gone():
            self.write(events.line(event))
            try:
                await self.flush()
            except OSError:
                self.on_connection_close()

    def gone(self):
        return self.request.connection.stream is None or self.request.connection.stream.closed()

    def on_connection_close(self):
        if self.run:
            self.run.cancel()


class ContextList(Handler):
    def get(self):
        self.answer(self.contexts.listed())

    async def post(self):
        given = self.body()
        context = self.contexts.create(named(self.text(given, "language")), self.text(given, "cwd"))
        try:
            await context.ready()
        except KernelDied:
            await self.contexts.remove(context.id)
            raise
        self.answer(context.describe())


class OneContext(Handler):
    async def delete(self, identity):
        await self.contexts.remove(identity)
        self.answer(None)


class Restart(Handler):
    async def post(self, identity):
        await self.contexts.find(identity).restart()
        self.answer(None)


def application(contexts):
    routes = [
        (r"/health", Health),
        (r"/execute", Execute),
        (r"/contexts", ContextList),
        (r"/contexts/([^/]+)", OneContext),
        (r"/contexts/([^/]+)/restart", Restart),
    ]
    return Application([(path, handler, {"contexts": contexts}) for path, handler in routes], log_function=lambda _: None)
