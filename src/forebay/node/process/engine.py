"""The engine's process: `python -m forebay.node.process.engine`, which the supervisor starts (`child.py`).

Theory. Settings come on standard input. With `--fronts 0` this process serves a `Front` too, joined to its engine by
the same socket: here alone the two meet.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

import msgspec

from forebay.core.errors import ForebayError
from forebay.node.engine.engine import FILES_NEEDED, Engine
from forebay.node.front.front import Front
from forebay.node.process import child, logs
from forebay.node.settings import Settings
from forebay.node.vitals import raise_file_limit

log = logging.getLogger("forebay.engine")


async def run_until_stopped(
    settings: Settings,
    after_start: Callable[[], None] | None = None,
    *,
    single: bool = False,
    node_log: logs.Log | None = None,
) -> int:
    """Run an engine (with a front in the same process if `single`) until a signal."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    engine = Engine(settings)
    child.follow_parent(loop, engine.told)
    await engine.start()
    front = None
    try:
        if single:
            front = Front(settings, 0)
            await front.start(reuse_port=True)

        def read_anew() -> None:
            if node_log is not None:
                node_log.reopen()
            engine.read_anew()
            if front is not None:
                front.read_anew()

        child.on_hangup(loop, read_anew)
        log.info("engine of node %s is ready", engine.node_id)
        child.beat(loop, settings.hung_after_s)
        if after_start is not None:
            after_start()

        async def leave() -> None:
            await engine.leaving.leaves.wait()
            child.stop_node()
            await stopping.wait()

        ends = [asyncio.create_task(end) for end in (stopping.wait(), engine.starts_again.wait(), leave())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
    finally:
        if front is not None:
            await front.stop()
        await engine.stop(flush=not engine.starts_again.is_set())
    return 0


def main() -> int:
    """The process: settings from standard input; the exit status."""
    import uvloop

    logs.begin("engine")
    if raise_file_limit() < FILES_NEEDED:
        log.error(
            "only %d open files are allowed, and %d are needed: raise `ulimit -n`", raise_file_limit(), FILES_NEEDED
        )
        return child.EXIT_REFUSED
    try:
        settings = child.begin()
        node_log = logs.begin("engine", settings)
        status: int = uvloop.run(run_until_stopped(settings, single=settings.fronts == 0, node_log=node_log))
        return status
    except (ForebayError, msgspec.MsgspecError) as error:
        log.error("engine: %s", error)
        return child.EXIT_REFUSED if getattr(error, "retry", "never") == "never" else 1


if __name__ == "__main__":
    sys.exit(main())
