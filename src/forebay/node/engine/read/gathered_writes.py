"""The bytes of a run on their way to the sink: what comes while a write is under way is gathered for the next.

Theory. Handing bytes to a worker thread and hearing of them again costs about as much as writing 200 KiB, and a backend
may hand over less than that at once. So one write is under way at a time, and the next takes whatever has come by its
end. Nothing waits for company: behind a slow backend each chunk is written when it comes, and the first is written
alone, so that nobody's first byte waits for a second chunk. Behind a fast one a write carries what came in the
time of the last, and the hand-overs are as many as the disk has time for.

Rejected: a write for each chunk (the hand-overs took a third of the CPU of a cold read); waiting for a full gathering
(late bytes for no gain); several writes at once (checksums of blocks need the bytes in order).

Invariants. (1) Bytes are written once, in the order in which they came, by one write at a time. (2) Never more than
GATHERED_BYTES_MAX and a chunk wait, and no more are under way. (3) After `stop`, and after a write that failed, no
write begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forebay.core import limits

# What may wait for the write under way, of each run. A write of 1 MiB takes a millisecond where the disk is well, in
# which no backend sends more; where it is not, more memory would only hide that for a moment.
GATHERED_BYTES_MAX = 1 * limits.MIB


class Gathering:
    """Bytes from `position` on, for `write(position, pieces)`."""

    def __init__(self, position: int, write: Callable[[int, list[memoryview]], Awaitable[None]]) -> None:
        self._position = position  # of the first byte that waits
        self._write = write
        self._waiting: list[memoryview] = []
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def put(self, data: memoryview) -> None:
        """Have these bytes written behind those before; returns when more may come. Raises what a write raised."""
        if self._writer is None or self._writer.done():
            await self.written()
            self._writer = asyncio.create_task(self._write_all())
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= GATHERED_BYTES_MAX:
            self._room.clear()
            await self._room.wait()

    async def written(self) -> None:
        """Return when every byte has been written; raises what a write raised."""
        if self._writer is not None:
            await self._writer

    async def stop(self) -> None:
        """Write nothing more. A write that is under way in a thread is the sink's."""
        self._waiting.clear()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                pieces, self._waiting = self._waiting, []
                position, self._position = self._position, self._position + self._waiting_bytes
                self._waiting_bytes = 0
                self._room.set()
                await self._write(position, pieces)
        finally:
            self._room.set()
