"""Fetches an object as a reader without a client.

Theory. A prefetch reads like any reader, through the same flights, but has no client: it takes landed bytes at once. It
never passes bytes through memory: if no disk takes them, prefetching is pointless.
"""

from __future__ import annotations

import asyncio

from forebay.core.errors import ErrorOnWire, ForebayError, Unavailable, from_wire
from forebay.core.messages.wire import Relay
from forebay.core.record import Record
from forebay.node.engine.jobs.runner import Moved
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.one_read import Ask, Read


class Prefetch:
    """A reader without a client."""

    def __init__(self, moved: Moved) -> None:
        self.read: Read | None = None
        self._moved = moved
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def opened(
        self, record: Record, start: int, end: int, hit: bool, body: bytes | None, relay: Relay | None = None
    ) -> None:
        self._size_bytes = 0 if hit else end - start
        self._start, self._whole_bytes = start, end - start
        self._moved(0, self._whole_bytes)

    def landed(self, start: int, end: int, path: str, offset: int, body: bytes | None) -> None:
        if path.startswith("/proc/"):
            self._end(Unavailable("no disk takes bytes now: make room (`forebay status`), then prefetch again"))
        elif self.read is not None:
            self.read.took(end)
            self._moved(end - self._start, self._whole_bytes)

    def finished(self) -> None:
        if not self.done.done():
            self.done.set_result(self._size_bytes)

    def failed(self, error: ErrorOnWire) -> None:
        self._end(from_wire(error))

    def withdrawn(self) -> None:
        self._end(Unavailable("the fetched bytes do not match their checksums: prefetch again"))

    def _end(self, error: ForebayError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


async def prefetched(cold: ColdReads, ask: Ask, moved: Moved = lambda done, of: None) -> int:
    """Fetch what `ask` names; return how many bytes were not here before. Raises if that fails."""
    out = Prefetch(moved)
    out.read = cold.open(ask, out)
    try:
        return await out.done
    finally:
        out.read.close()
