"""Where the bytes of a flight go: a data file while the disk takes them, memory when it does not.

Theory. A *disk sink* writes bytes to their natural offset in the object's data file, in a worker thread. A disk that
stalls then stalls one thread, not the engine. A write that fails or takes longer than SLOW_WRITE_S ends the flight's
use of the disk (`DiskTrouble`). Its readers go on with private flights over *memory sinks*. There a block lives in an
anonymous file (memfd) that the front opens through /proc; it is freed when its only reader has taken it.

Memory is claimed before use, in units (a private flight's blocks are smaller than a file's) and by need
(`core/machines/shares.py`). A run begins when it has a unit for its first bytes, takes the units that are free for the
bytes behind them, and fetches no more than that. So a waiting reader holds memory only for bytes ahead of those it
waits for, and never all memory. Every other holder has bytes to take, or on their way.

Handing bytes to a worker thread and hearing back costs about as much as writing 200 KiB, and a backend may deliver less
than that at a time. So one write of a run is under way at a time, and the next takes whatever has arrived by its end
(`Gathering`). Nothing waits for more bytes. Behind a slow backend each chunk is written when it arrives, and the first
chunk is always written alone, so no first byte waits for a second chunk.

Rejected: a write for each chunk (the hand-overs took a third of the CPU of a cold read); waiting for a full buffer
(late bytes for no gain); several writes of a run at once (checksums of blocks need the bytes in order); sharing memory
blocks between readers (a slow reader then holds what a fast one needs, and with a bound on the sum both can wait for
ever); writing in the event loop (one full disk queue stops every read of the node); claiming all the memory that a
reader can ever use, first come first served (twenty slow readers kept everybody else out).

Invariants. (1) A unit that is in memory, or on its way there, has a claim. (2) `drop` or `close` closes every memfd and
leaves its claim. (3) A data file is closed only when no thread writes to it. (4) Bytes that `segments` names can be
read at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import NamedTuple

import xxhash

from forebay.core import limits
from forebay.core.errors import Unavailable
from forebay.core.machines.shares import Need
from forebay.node.engine.read.permits import Claim, Permits
from forebay.node.store.writer.landing import Landing

SLOW_WRITE_S = 2.0  # a write is a few MiB at most: a disk that needs longer is slower than any backend worth caching
HELD_BYTES_MAX = 16 * limits.KIB  # larger bodies cost more, in copies and fresh memory, than they save
PASS_WINDOW_BYTES = 2 * limits.BLOCK_BYTES  # fetched ahead of a reader in memory: hides latency up to 40 ms at 200 MB/s
# How much may wait for the write under way, per run. A write of 1 MiB takes a millisecond on a healthy disk, and no
# backend sends more in that time. On a sick disk more memory would only hide the trouble for a moment.
GATHERED_BYTES_MAX = 1 * limits.MIB


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


def pass_memory() -> Permits:
    """The memory for bytes that no disk takes, in units."""
    unit_bytes = limits.PASS_UNIT_BYTES
    return Permits(limits.PASS_BYTES_MAX // unit_bytes, limits.PASS_AHEAD_BYTES_MAX // unit_bytes)


class BlockHashes:
    """The xxh3-64 of each block of a run, from chunks in order: from `position`, where a block begins, to `size_bytes`.
    (In memory, where nothing is compared, both may lie within a block.) `feed` may run in a worker thread."""

    __slots__ = ("_block_bytes", "_hash", "_position", "_size_bytes")

    def __init__(self, position: int, size_bytes: int, block_bytes: int) -> None:
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
        """Make the first of these bytes readable before the `write` that follows; return where they end.

        Only for the first bytes of a flight, which somebody waits for: a write takes a millisecond, and this costs a
        copy.
        """
        body = bytes(data[:HELD_BYTES_MAX])
        self._held = Segment(position, position + len(body), "", 0, body)
        return self._held.end

    async def write(self, position: int, pieces: list[memoryview], hashes: BlockHashes) -> list[tuple[int, int]]:
        """Write the pieces in order, from `position` on. Returns the (block, checksum) pairs that became whole."""
        if self.broken or self._closed:  # closed: the flight was shut just before this write
            raise DiskTrouble("the disk stopped taking bytes: passing through")

        def work() -> list[tuple[int, int]]:
            self.landing.write(position, *pieces)
            whole = [whole for piece in pieces for whole in hashes.feed(piece)]
            self.landing.keep_sums(whole)
            return whole

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
            raise DiskTrouble(f"the disk refuses writes: {error}") from error
        if self._held is not None and position <= self._held.start < position + sum(map(len, pieces)):
            self._held = None  # it is on disk now; other runs' writes do not count
        return whole

    def _written(self, done: asyncio.Future[list[tuple[int, int]]]) -> None:
        self._writing -= 1
        if not done.cancelled():
            done.exception()  # retrieved: the waiter has it; after a timeout nobody does
        if self._closed and not self._writing:
            self.landing.close()

    def segments(self, start: int, end: int) -> list[Segment]:
        return _around(self._held, start, end, lambda first, stop: [Segment(first, stop, self.landing.path, first)])

    def drop(self, block: int) -> None:
        raise AssertionError("blocks on disk are evicted, not dropped")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._writing:
                self.landing.close()


class MemorySink:
    """One reader's units in anonymous files, over the data file `below` that may already have some blocks ("" for
    none)."""

    def __init__(self, below: str, memory: Permits) -> None:
        self._below = below
        self._block_bytes = limits.PASS_UNIT_BYTES
        self._memory = memory
        self._claims: dict[int, Claim] = {}
        self._files: dict[int, int] = {}
        self._held: Segment | None = None

    def claim(self, need: Need) -> Claim:
        """A claim to one unit of memory, not taken yet."""
        return self._memory.claim(self, need)

    def has_memory(self, unit: int) -> bool:
        """Whether bytes of the unit may be written already: an earlier run may have broken in the middle of it."""
        return unit in self._claims

    def keep(self, unit: int, claim: Claim) -> None:
        """Use this claim for the unit."""
        self._claims[unit] = claim

    def reserve(self, first: int, end: int) -> int:
        """Claim the memory that is free now for these units; return the end of those that may be written."""
        for unit in range(first, end):
            if unit not in self._claims:
                claim = self.claim(Need.AHEAD)
                if not claim.take_now():
                    return unit
                self._claims[unit] = claim
        return end

    def unreserve(self, first: int, end: int) -> None:
        """Give back the memory of those units that received no bytes."""
        for unit in range(first, end):
            if unit in self._claims and unit not in self._files:
                self._claims.pop(unit).leave()

    def hold(self, position: int, data: memoryview) -> int:
        """As `DiskSink.hold`: a small range travels in the message, and nobody opens a file for it."""
        body = bytes(data[:HELD_BYTES_MAX])
        self._held = Segment(position, position + len(body), "", 0, body)
        return self._held.end

    async def write(self, position: int, pieces: list[memoryview], hashes: BlockHashes) -> list[tuple[int, int]]:
        """Write the pieces in order. No thread is needed: a copy within memory is quick."""
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
        return _around(self._held, start, end, self._in_files)

    def _in_files(self, start: int, end: int) -> list[Segment]:
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
            self._claims.pop(block).leave()

    def close(self) -> None:
        for block in list(self._files):
            self.drop(block)
        self.unreserve(0, max(self._claims, default=-1) + 1)


Sink = DiskSink | MemorySink


def _around(
    held: Segment | None, start: int, end: int, otherwise: Callable[[int, int], list[Segment]]
) -> list[Segment]:
    """Where [start, end) is: what is `held` in the message, and the rest where `otherwise` says."""
    if held is None or end <= held.start or held.end <= start:
        return otherwise(start, end)
    assert held.body is not None
    first, stop = max(start, held.start), min(end, held.end)
    pieces = [Segment(first, stop, "", 0, held.body[first - held.start : stop - held.start])]
    before = otherwise(start, first) if start < first else []
    return [*before, *pieces, *(otherwise(stop, end) if stop < end else [])]


class Gathering:
    """A run's bytes from `position` on, on their way to `write(position, pieces)`. They are written once, in order of
    arrival, by one write at a time; after `stop` and after a failed write none begins. At most GATHERED_BYTES_MAX and
    one chunk wait, and no more are under way."""

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
