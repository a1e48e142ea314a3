"""Where the bytes of a flight go: a data file while the disk takes them, memory when it does not.

Theory. A *disk sink* writes bytes to their natural offset in the object's data file, in a worker thread: a disk that
stalls then stalls one thread, not the engine. A write that fails or takes longer than SLOW_WRITE_S ends the flight's
use of the disk (`DiskTrouble`); its readers go on with private flights over *memory sinks*. There a block lives in an
anonymous file (memfd) that the front opens through /proc, and is freed when its only reader has taken it.

Memory is promised before it is used: a private flight waits, first come first served, until all it can ever hold at
once is free. So it never waits half-way while holding memory, and there is no deadlock to think about.

Rejected: sharing memory blocks between readers (a slow reader then holds what a fast one needs, and with a bound on
the sum both can wait for ever); writing in the event loop (one full disk queue stops every read of the node).

Invariants. (1) `PassBudget.used_bytes` is the sum of promises not given back, at most the limit. (2) Every memfd is
closed at `drop` or `close`. (3) A data file is closed only when no thread writes to it. (4) What `segments` names can
be read at once.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import xxhash

from forebay.core import limits
from forebay.core.errors import Unavailable
from forebay.node.store import Landing

SLOW_WRITE_S = 2.0  # a write is a few MiB at most: a disk that needs longer is slower than any backend worth caching
HELD_BYTES_MAX = 16 * limits.KIB  # it passes two processes: with more, copies and fresh memory cost what it saves
PASS_WINDOW_BYTES = 2 * limits.BLOCK_BYTES  # ahead of a reader in memory: hides latency up to 40 ms at 200 MB/s


class DiskTrouble(Unavailable):
    """The disk is full, failing or too slow (`slow`): pass the bytes through."""

    slow = False


class Segment(NamedTuple):
    """Bytes [start, end) of the object lie in `path` at `offset`; or they are `body`."""

    start: int
    end: int
    path: str
    offset: int
    body: bytes | None = None


class PassBudget:
    """Memory for bytes that no disk takes, promised first come first served."""

    def __init__(self, limit_bytes: int = limits.PASS_BYTES_MAX) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` are free, and hold them. Cancelling the wait takes nothing."""
        assert 0 < size_bytes <= self.limit_bytes
        if not self._waiting and self.used_bytes + size_bytes <= self.limit_bytes:
            self.used_bytes += size_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # a turn that was never given may have stood before one that fits
            self.give(size_bytes if turn.done() and not turn.cancelled() else 0)
            raise

    def give(self, size_bytes: int) -> None:
        """Give back what `take` held."""
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if self.used_bytes + wanted > self.limit_bytes:
                return
            self._waiting.popleft()
            self.used_bytes += wanted
            turn.set_result(None)


class BlockHashes:
    """The xxh3-64 of each block of a run, from chunks in order. `feed` may run in a worker thread."""

    __slots__ = ("_block_bytes", "_hash", "_position", "_size_bytes")

    def __init__(self, position: int, size_bytes: int, block_bytes: int) -> None:
        assert position % block_bytes == 0
        self._position, self._size_bytes, self._block_bytes = position, size_bytes, block_bytes
        self._hash = xxhash.xxh3_64()

    def feed(self, data: memoryview) -> list[tuple[int, int]]:
        """The (block, checksum) pairs that these bytes complete."""
        whole: list[tuple[int, int]] = []
        at = 0
        while at < len(data):
            block = self._position // self._block_bytes
            block_end = min((block + 1) * self._block_bytes, self._size_bytes)
            part = data[at : at + block_end - self._position]
            self._hash.update(part)
            self._position += len(part)
            at += len(part)
            if self._position == block_end:
                whole.append((block, self._hash.intdigest()))
                self._hash.reset()
        return whole


class DiskSink:
    """The data file of a landing. `write` raises `DiskTrouble`; after that the sink only serves what it has."""

    def __init__(self, landing: Landing, writers: Executor) -> None:
        self.landing = landing
        self.broken = False
        self._writers = writers
        self._writing = 0
        self._closed = False
        self._held: Segment | None = None

    def hold(self, position: int, data: memoryview) -> int:
        """Have the first of these bytes readable before the `write` that follows; where those end.

        Only for the first bytes of a flight, which somebody waits for: a write takes a millisecond, and this costs a
        copy.
        """
        body = bytes(data[:HELD_BYTES_MAX])
        self._held = Segment(position, position + len(body), "", 0, body)
        return self._held.end

    async def write(self, position: int, pieces: list[memoryview], hashes: BlockHashes) -> list[tuple[int, int]]:
        """Put bytes at their place, one piece behind the other; the (block, checksum) pairs that became whole."""
        if self.broken or self._closed:  # closed: the flight was shut in the turn in which this write was to begin
            raise DiskTrouble("the disk stopped taking bytes: passing through")

        def work() -> list[tuple[int, int]]:
            self.landing.write(position, *pieces)
            return [whole for piece in pieces for whole in hashes.feed(piece)]

        loop = asyncio.get_running_loop()
        self._writing += 1
        done = loop.run_in_executor(self._writers, work)
        done.add_done_callback(self._written)
        await asyncio.wait((done,), timeout=SLOW_WRITE_S)
        if not done.done():
            self.broken = True
            trouble = DiskTrouble(f"a write took longer than {SLOW_WRITE_S:g} s: passing through")
            trouble.slow = True
            raise trouble
        try:
            whole = done.result()
        except (Unavailable, OSError) as error:
            self.broken = True
            raise DiskTrouble(f"the disk does not take bytes: {error}") from error
        if self._held is not None and position <= self._held.start < position + sum(map(len, pieces)):
            self._held = None  # written: other runs' writes say nothing about these bytes
        return whole

    def _written(self, done: asyncio.Future[list[tuple[int, int]]]) -> None:
        self._writing -= 1
        if not done.cancelled():
            done.exception()  # retrieved: whoever waited has it, and after a timeout nobody does
        if self._closed and not self._writing:
            self.landing.close()

    def segments(self, start: int, end: int) -> list[Segment]:
        held = self._held
        if held is None or end <= held.start or held.end <= start:
            return [Segment(start, end, self.landing.path, start)]
        assert held.body is not None
        first, stop = max(start, held.start), min(end, held.end)
        pieces = [Segment(first, stop, "", 0, held.body[first - held.start : stop - held.start])]
        if start < first:
            pieces.insert(0, Segment(start, first, self.landing.path, start))
        if stop < end:
            pieces.append(Segment(stop, end, self.landing.path, stop))
        return pieces

    def drop(self, block: int) -> None:
        raise AssertionError("blocks on disk are evicted, not dropped")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._writing:
                self.landing.close()


class MemorySink:
    """Blocks of one reader in anonymous files, over what the data file `below` may already hold ("" for none)."""

    def __init__(self, below: str, on_close: Callable[[], None], block_bytes: int = limits.BLOCK_BYTES) -> None:
        self._below = below
        self._block_bytes = block_bytes
        self._on_close = on_close
        self._files: dict[int, int] = {}
        self._closed = False

    async def write(self, position: int, pieces: list[memoryview], hashes: BlockHashes) -> list[tuple[int, int]]:
        """Put bytes at their place. Nothing is hashed by worker threads here: a copy within memory is quick."""
        whole: list[tuple[int, int]] = []
        for data in pieces:
            at = 0
            while at < len(data):
                block, offset = divmod(position + at, self._block_bytes)
                part = data[at : at + self._block_bytes - offset]
                if block not in self._files:
                    self._files[block] = os.memfd_create(f"forebay-block-{block}", os.MFD_CLOEXEC)
                os.pwrite(self._files[block], part, offset)
                at += len(part)
            position += len(data)
            whole += hashes.feed(data)
        return whole

    def segments(self, start: int, end: int) -> list[Segment]:
        pieces: list[Segment] = []
        while start < end:
            block, offset = divmod(start, self._block_bytes)
            stop = min(end, (block + 1) * self._block_bytes)
            fd = self._files.get(block)
            if fd is not None:
                pieces.append(Segment(start, stop, f"/proc/{os.getpid()}/fd/{fd}", offset))
            else:
                assert self._below, "bytes that are neither in memory nor on disk were announced"
                pieces.append(Segment(start, stop, self._below, start))
            start = stop
        return pieces

    def drop(self, block: int) -> None:
        fd = self._files.pop(block, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for block in list(self._files):
                self.drop(block)
            self._on_close()


Sink = DiskSink | MemorySink
