"""Jupyter kernels, over sockets in a folder of the service's: no port is open that a request from outside could reach."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

from . import environment, events
from .kernels import START_SECONDS, Kernel, KernelDied, UnknownLanguage

PACKAGE = Path(__file__).resolve().parent
# How often a silent kernel is looked at: does it live?
LOOK_MS = 500

# Finds the kernel without a variable that the user's programs would inherit.
START_PYTHON = f"import sys; sys.path.append({str(PACKAGE.parent)!r}); from code_interpreter.python_kernel import main; main()"

OWN = {
    "python": [sys.executable, "-c", START_PYTHON, "-f", "{connection_file}"],
    "bash": [sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"],
}


def installed():
    """Languages, and the command of a kernel for each."""
    found = {spec["spec"]["language"].lower(): spec["spec"]["argv"] for spec in KernelSpecManager().get_all_specs().values()}
    return {**found, **OWN}


class Manager(AsyncKernelManager):
    """Takes its kernel's command from its maker, and not from a file with a name."""

    @property
    def kernel_spec(self):
        return self.given


class JupyterKernel(Kernel):
    def __init__(self, language):
        if language not in (commands := installed()):
            raise UnknownLanguage(language)
        self.language, self.command = language, commands[language]
        self.manager = self.client = self.folder = None
        self._fence = None  # The request that followed an interrupt.
        self._in_use = asyncio.Lock()  # By an execution, which must see the kernel's end before its sockets go.

    async def start(self, cwd):
        self.folder = tempfile.mkdtemp(prefix="kernel-")
        self.manager = Manager(transport="ipc", ip=f"{self.folder}/socket", connection_file=f"{self.folder}/connection.json")
        self.manager.given = KernelSpec(argv=self.command, display_name=self.language, language=self.language)
        quiet = subprocess.DEVNULL
        try:
            await self.manager.start_kernel(cwd=cwd, stdin=quiet, stdout=quiet, stderr=quiet)
            self.client = self.manager.client()
            # Whatever a kernel sends is taken: a message that is dropped is output that is lost.
            self.client.context.setsockopt(zmq.RCVHWM, 0)
            self.client.start_channels(stdin=False, hb=False)
            await self.client.wait_for_ready(timeout=START_SECONDS)
        except (RuntimeError, OSError) as error:
            await self.stop()
            raise KernelDied(str(error)) from error

    async def execute(self, code, emit):
        async def take(message):
            event = self._event(message)
            if event:
                await emit(event)

        await self._run(code, take)

    async def change_environment(self, changed):
        code = environment.CODE.get(self.language)
        if code:
            await self._run(code(changed))

    async def warm_up(self):
        """For the Python kernel: see `python_kernel.warm_up`."""
        await self._run("__import__('code_interpreter.python_kernel').python_kernel.warm_up()")

    async def interrupt(self):
        if self.manager.has_kernel:
            await self.manager.interrupt_kernel()
            # An interrupt between two steps of the kernel's own may cost an execution its reply. The next request's says as much.
            self._fence = self.client.kernel_info()

    async def stop(self):
        if self.manager.has_kernel:
            await self.manager.shutdown_kernel(now=True)
        if self.client:
            async with self._in_use:
                self.client.stop_channels()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _run(self, code, take=None):
        """Passes on the messages of one execution, until the kernel is idle again and has given its reply. Silent without `take`."""
        async with self._in_use:
            await self._check()
            identity = self.client.execute(code, silent=not take, store_history=bool(take), allow_stdin=False)
            iopub, shell = self.client.iopub_channel, self.client.shell_channel
            poller = zmq.asyncio.Poller()
            poller.register(iopub.socket, zmq.POLLIN)
            poller.register(shell.socket, zmq.POLLIN)
            idle, replied, self._fence = False, False, None
            while not (idle and replied):
                ready = dict(await poller.poll(LOOK_MS))
                if iopub.socket in ready:
                    message = await iopub.get_msg(timeout=0)
                    # What threads of earlier executions say is nobody's.
                    if message["parent_header"].get("msg_id") == identity:
                        idle = idle or message["content"].get("execution_state") == "idle"
                        if take:
                            await take(message)
                elif shell.socket in ready:
                    reply = await shell.get_msg(timeout=0)
                    replied = replied or reply["parent_header"].get("msg_id") in (identity, self._fence)
                elif replied:
                    return  # Everything was said, if not by a kernel that keeps to the rules.
                else:
                    await self._check()

    def _event(self, message):
        content = message["content"]
        match message["msg_type"]:
            case "execute_input":
                return events.count(content["execution_count"])
            case "stream":
                return events.stream(content["name"], content["text"], message["header"]["date"].isoformat())
            case "display_data":
                return events.result(self._bundle(content), is_main=False)
            case "execute_result":
                return events.result(self._bundle(content), is_main=True)
            case "error":
                return events.error(content["ename"], content["evalue"], "\n".join(content["traceback"]))
        return None

    def _bundle(self, content):
        """The data; a string's text without its quotes, as users of the clients know it."""
        data = dict(content["data"])
        text = data.get("text/plain", "")
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            data["text/plain"] = text[1:-1]
        return data

    async def _check(self):
        if not self.manager.has_kernel or not await self.manager.is_alive():
            process = getattr(self.manager.provisioner, "process", None)
            how = f" (exit status {process.returncode})" if process and process.returncode is not None else ""
            raise KernelDied(f"The kernel died{how}")
