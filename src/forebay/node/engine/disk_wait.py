"""Waiting for a volume's disk, as long as it answers.

Theory. A thread that waits for a disk cannot be called back, but the coroutine that awaits the thread can stop waiting
when the disk stalls. The work may still complete late. So this is only for work that does no harm then: reading,
syncing, replacing notes that are still the same, writing a file that nobody knows of.

Long work runs in steps: a disk that is busy with one request for seconds looks stalled.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from forebay.core.errors import ForebayError, VolumeMissing
from forebay.core.machines.stall import LOOK_S
from forebay.node.store.disk.volume import Volume, refusal, stalled
from forebay.node.store.writer.volumes import VolumeSet

DISK_THREADS = 8  # of the shared ones that one disk may take: a quarter of them

ResultT = TypeVar("ResultT")


async def by_disk(volume: Volume | None, workers: Executor, work: Callable[[], ResultT], subject: str) -> ResultT:
    """Run `work` in the volume's threads, or in `workers` if there is no volume. `Unavailable` if the disk stalls
    meanwhile."""
    return await _answered(
        volume, asyncio.get_running_loop().run_in_executor(threads_of(volume, workers), work), subject
    )


class SharedThreads:
    """Of threads that all disks share each disk takes a few at most, so that one which does not answer takes no more.
    For work that may last longer than an answer of a disk, as joining parts does: in the disk's own threads it would
    count as a disk that does not answer."""

    def __init__(self, volumes: VolumeSet, workers: Executor) -> None:
        self._volumes, self._workers = volumes, workers
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(DISK_THREADS))

    async def work(self, call: Callable[..., ResultT], at: str, *arguments: object, doing: str = "a write") -> ResultT:
        """`call(at, *arguments)` in a thread; `at` is a path on the disk that it waits for. `Unavailable` if the disk
        refuses; `doing` names what then failed."""
        volume = next((each.path for each in self._volumes.volumes() if at.startswith(each.path + "/")), "")
        async with self._turns[volume]:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._workers, call, at, *arguments)
            except ForebayError:
                raise
            except OSError as error:
                raise refusal(error, doing) from error


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
    """As `by_disk`, for work in steps; returns what `steps` returns. If anything interrupts it, `steps` is closed and
    `undo` called in the same threads: late if the disk stalled, but never beside a step."""
    loop, threads = asyncio.get_running_loop(), threads_of(volume, workers)

    def end() -> None:
        steps.close()
        undo()

    def leave(done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # mark it retrieved: nobody else asks
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
    """The threads that wait for the volume's disk."""
    return volume.desk.bearers if volume is not None else workers


def _next(steps: Generator[None, None, ResultT]) -> tuple[ResultT] | None:
    """Take a step. After the last one, return the result in a tuple."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None


def check_flushes(volume: Volume | None, subject: str) -> None:
    """`VolumeMissing` while the volume's disk does not answer: the node could not note there what it sent."""
    if volume is not None and volume.stall.stalled:
        raise VolumeMissing(f"{subject} is flushed when the disk of volume {volume.path} answers: look at the disk")
