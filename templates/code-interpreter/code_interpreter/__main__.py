"""Starts the contexts for Python and JavaScript, and then the service: who reaches it finds them ready."""

import argparse
import asyncio
import logging
import signal

from .contexts import HOME, Contexts
from .kernels import KernelDied, UnknownLanguage
from .server import application

PORT = 49999


async def serve(args):
    contexts = Contexts(args.home)
    try:
        await start(contexts, args.warm_up)
        server = application(contexts).listen(args.port, args.address)
        logging.info("listening on port %d", args.port)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, ended.set)
        await ended.wait()
        server.stop()
    finally:
        await contexts.close()


async def start(contexts, warm_up):
    python = contexts.default("python")
    try:
        await contexts.default("javascript").ready()
    except (KernelDied, UnknownLanguage) as error:
        logging.warning("no JavaScript: %s", error)
    await python.ready()
    if warm_up:
        await python.kernel.warm_up()


def main():
    parser = argparse.ArgumentParser(prog="code_interpreter", description=__doc__)
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--address", default="0.0.0.0")
    parser.add_argument("--home", default=HOME, help="folder of contexts that name none")
    parser.add_argument("--warm-up", action="store_true", help="import what draws and calculates before the service listens")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
