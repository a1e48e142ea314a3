"""A run's bytes on their way to the sink: bytes that arrive during a write are gathered for the next.

Theory. Handing bytes to a worker thread and hearing back costs about as much as writing 200 KiB, and a backend may
deliver less than that at a time. So one write is under way at a time, and the next takes whatever has arrived by its
end. Nothing waits for more bytes. Behind a slow backend each chunk is written when it arrives, and the first chunk is
always written alone, so no first byte waits for a second chunk. Behind a fast backend each write carries what arrived
during the last one.

Rejected: a write for each chunk (the hand-overs took a third of the CPU of a cold read); waiting for a full buffer
(late bytes for no gain); several writes at once (checksums of blocks need the bytes in order).

Invariants. (1) Bytes are written once, in order of arrival, by one write at a time. (2) At most GATHERED_BYTES_MAX and
one chunk wait, and no more are under way. (3) After `stop`, and after a failed write, no write begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forebay.core import limits

# How much may wait for the write under way, per run. A write of 1 MiB takes a millisecond on a healthy disk, and no
# backend sends more in that time. On a sick disk more memory would only hide the trouble for a moment.
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
        """Queue these bytes behind those before; return when more may come. Raises what a write raised."""
        if self._writer is None or self._writer.done():
            await self.written()
            self._writer = asyncio.create_task(self._write_all())
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= GATHERED_BYTES_MAX:
            self._room.clear()
            await self._room.wait()

    async def written(self) -> None:
        """Return when every byte has been written. Raises what a write raised."""
        if self._writer is not None:
            await self._writer

    async def stop(self) -> None:
        """Write nothing more. A write that is under way in a thread belongs to the sink."""
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
