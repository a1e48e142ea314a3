"""Waiting for a volume's disk, as long as it answers.

Theory. Who waits for a disk in a thread cannot be called back, but whoever awaits that thread can stop waiting: when
the disk is stalled. What was begun may still come about, late, so this is only for what does no harm then: reading,
syncing, notes that are replaced only where they are still the same, a file that nobody knows of.

What takes long is done in steps: a disk that is busy with one thing for seconds looks like one that has stalled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from forebay.core.errors import VolumeMissing
from forebay.core.machines.stall import LOOK_S
from forebay.node.store.disk.volume import Volume, stalled

ResultT = TypeVar("ResultT")


async def by_disk(volume: Volume | None, workers: Executor, work: Callable[[], ResultT], subject: str) -> ResultT:
    """Have it done by the threads of the volume, or by `workers` where there is none. `Unavailable` if its disk stalls
    meanwhile."""
    return await _answered(
        volume, asyncio.get_running_loop().run_in_executor(threads_of(volume, workers), work), subject
    )


async def _answered(volume: Volume | None, doing: asyncio.Future[ResultT], subject: str) -> ResultT:
    while volume is not None and not doing.done():
        await asyncio.wait((doing,), timeout=LOOK_S)
        if volume.stall.stalled and not doing.done():
            raise stalled(volume.path, subject)
    return await asyncio.shield(doing)


async def by_disk_in_steps(
    volume: Volume | None,
    workers: Executor,
    steps: Generator[None, None, ResultT],
    subject: str,
    undo: Callable[[], None],
) -> ResultT:
    """As `by_disk`, and what `steps` returns. Whatever keeps it from that, `steps` is closed and `undo` called in the
    same threads: late if the disk stalled, but never beside a step."""
    loop, threads = asyncio.get_running_loop(), threads_of(volume, workers)

    def end() -> None:
        steps.close()
        undo()

    def leave(done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # nobody else asks for it
        with suppress(RuntimeError):  # the node stops
            threads.submit(end)

    while True:
        doing = loop.run_in_executor(threads, _next, steps)
        try:
            ended = await _answered(volume, doing, subject)
        except BaseException:
            doing.add_done_callback(leave)
            raise
        if ended is not None:
            return ended[0]


def threads_of(volume: Volume | None, workers: Executor) -> Executor:
    """Those that wait for its disk."""
    return volume.desk.bearers if volume is not None else workers


def _next(steps: Generator[None, None, ResultT]) -> tuple[ResultT] | None:
    """Take a step; what came of all of them after the last."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None


def check_flushes(volume: Volume | None, subject: str) -> None:
    """`VolumeMissing` while the volume's disk does not answer: it could not be noted there what was sent."""
    if volume is not None and volume.stall.stalled:
        raise VolumeMissing(f"{subject} is flushed when the disk of volume {volume.path} answers: look at the disk")
