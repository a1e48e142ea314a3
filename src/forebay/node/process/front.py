"""A front's process: `python -m forebay.node.process.front NUMBER FD`, which the supervisor starts (`child.py`).

Theory. Settings come on standard input; the front's number, and the descriptor of the memory that fronts share
(`front/http/accounts.py`), on the command line.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

import msgspec

from forebay.core.errors import ForebayError
from forebay.node.front.front import Front
from forebay.node.process import child, logs
from forebay.node.settings import Settings
from forebay.node.vitals import raise_file_limit

log = logging.getLogger("forebay.front")


async def _serve(settings: Settings, number: int, accounts_fd: int, node_log: logs.Log) -> int:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    child.follow_parent(loop, lambda line: None)
    front = Front(settings, number, accounts_fd=accounts_fd)
    starting = asyncio.ensure_future(front.start(reuse_port=True))
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done():
            await starting

            def read_anew() -> None:
                node_log.reopen()
                front.read_anew()

            child.on_hangup(loop, read_anew)
            child.beat(loop, settings.hung_after_s)
            gc.freeze()  # what exists now stays: collecting it again and again would stop requests for milliseconds
            log.info("front %d serves port %d", number, front.port)
            await stopped
    finally:
        starting.cancel()
        stopped.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        await front.stop()
    return 0


def main(arguments: list[str]) -> int:
    """The process: settings from standard input, number and descriptor from the command line; the exit status."""
    import uvloop

    logs.begin(f"front-{arguments[0]}")
    raise_file_limit()
    try:
        settings = child.begin()
        node_log = logs.begin(f"front-{arguments[0]}", settings)
        status: int = uvloop.run(_serve(settings, int(arguments[0]), int(arguments[1]), node_log))
        return status
    except (ForebayError, msgspec.MsgspecError) as error:
        log.error("front: %s", error)
        return child.EXIT_REFUSED if getattr(error, "retry", "never") == "never" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
