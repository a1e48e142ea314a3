"""Receives long bodies with the help of worker threads.

Theory. A disk with a full queue makes its writers wait. If the loop were the writer, every hit of this front would wait
too. So a thread hashes and writes the pieces of a long body while the loop reads the next piece into another buffer.
That pipeline also makes a single connection faster. While both buffers of a body are in use its connection is not read,
and TCP slows the client down.

A piece goes to a thread when it fills a buffer or is the last: a hand-over costs as much as writing 64 KiB.

Rejected: a thread for each body (there would be 4,096); writing on the loop (a full disk's queue stopped hits).

Invariants. (1) At most one piece of a body is with a worker, and pieces go in order. (2) One thread at a time touches
the sink, and the loop releases it. (3) Bytes behind the body are never read here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from forebay.node.front.http.requests import BodySink

PIECE_BYTES = 512 * 1024  # hashed while it is in the CPU's cache, and long enough to be worth handing over
SPARE_MAX = 16  # buffers kept for the next body
_spare: list[memoryview] = []
_NOTHING = memoryview(b"")


class Receiver:
    """One body of `left` bytes for `sink`. `moved` is called on the loop when a piece was taken (reading may go on),
    and when all of them were; `failed` when the sink refused one, and then nothing more is called."""

    __slots__ = ("_buffer", "_dropped", "_filled", "_loop", "_workers", "busy", "failed", "left", "moved", "sink")

    def __init__(
        self,
        sink: BodySink,
        left: int,
        loop: asyncio.AbstractEventLoop,
        workers: Executor,
        moved: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.sink = sink
        self.left = left
        self.busy = False
        self.moved = moved
        self.failed = failed
        self._loop = loop
        self._workers = workers
        self._buffer: memoryview | None = None
        self._filled = 0
        self._dropped = False

    @property
    def full(self) -> bool:
        """Reading must wait."""
        return self._filled == PIECE_BYTES or not self.left

    @property
    def done(self) -> bool:
        """All of the body is with the sink."""
        return not self.left and not self._filled and not self.busy

    def buffer(self) -> memoryview:
        """Where to read the next bytes to; empty when reading must wait."""
        if self.full:
            return _NOTHING
        if self._buffer is None:
            self._buffer = _spare.pop() if _spare else memoryview(bytearray(PIECE_BYTES))
        return self._buffer[self._filled : min(PIECE_BYTES, self._filled + self.left)]

    def took(self, size_bytes: int) -> None:
        """So many bytes were read into `buffer`."""
        self._filled += size_bytes
        self.left -= size_bytes
        if self.full and not self.busy:
            self._hand_over()

    def drop(self) -> None:
        """The body will not be completed: the sink is aborted, as soon as no thread uses it."""
        self._dropped = True
        if not self.busy:
            self._let_go()

    def _hand_over(self) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None, "bytes were read into no buffer"
        piece, self._filled = buffer[: self._filled], 0
        self.busy = True
        future = self._loop.run_in_executor(self._workers, self.sink.write, piece)
        future.add_done_callback(lambda future: self._written(future, buffer))

    def _written(self, future: asyncio.Future[None], buffer: memoryview) -> None:
        self.busy = False
        late = getattr(self.sink, "late", False)  # the disk may still take bytes from this buffer
        if len(_spare) < SPARE_MAX and not late:
            _spare.append(buffer)
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if self._dropped:
            self._let_go()
        elif isinstance(error, Exception):
            self._dropped = True
            self.failed(error)
        elif error is None:
            self.sink.wrote()
            if self._filled and self.full:
                self._hand_over()
            self.moved()

    def _let_go(self) -> None:
        if self._buffer is not None and len(_spare) < SPARE_MAX:
            _spare.append(self._buffer)
        self._buffer = None
        self.sink.abort()
