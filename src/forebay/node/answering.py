"""Waiting for a volume's disk, as long as it answers.

Theory. Who waits for a disk in a thread cannot be called back, but whoever awaits that thread can stop waiting: when
the disk is stalled. What was begun may still come about, late, so this is only for what does no harm then: reading,
syncing, notes that are replaced only where they are still the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from forebay.core.errors import VolumeMissing
from forebay.core.stall import LOOK_S
from forebay.node.store.volume import Volume, stalled

ResultT = TypeVar("ResultT")


async def by_disk(volume: Volume | None, workers: Executor, work: Callable[[], ResultT], subject: str) -> ResultT:
    """Have it done by the threads of the volume, or by `workers` where there is none. `Unavailable` if its disk stalls
    meanwhile."""
    doing = asyncio.get_running_loop().run_in_executor(volume.desk.bearers if volume is not None else workers, work)
    while volume is not None and not doing.done():
        await asyncio.wait((doing,), timeout=LOOK_S)
        if volume.stall.stalled and not doing.done():
            raise stalled(volume.path, subject)
    return await doing


def check_flushes(volume: Volume | None, subject: str) -> None:
    """`VolumeMissing` while the volume's disk does not answer: it could not be noted there what was sent."""
    if volume is not None and volume.stall.stalled:
        raise VolumeMissing(f"{subject} is flushed when the disk of volume {volume.path} answers: look at the disk")
