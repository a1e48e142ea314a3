"""Reads one rank's stream, piece by piece, and gives out no byte whose piece does not match its digest.

Theory. A reader wants a range of the stream: a tensor, or some rows of one. The range is cut at pieces. A piece that
the range covers whole is read straight into the reader's memory and digested there. The pieces at both ends are read
whole into a buffer, digested, and what is wanted of them is copied. So a restore of large tensors copies nothing, and
a row of a large tensor costs two pieces at most.

Several threads share a stream by *cells*: runs of READ_BYTES from a multiple of READ_BYTES on. No piece is in two, so
none is read twice. A thread has a `Stream` of its own, whose buffer for pieces is kept from read to read.

On the node's host bytes come from the object's file (`client.door`), a little at a time, so that they are digested
while they are in the CPU's cache; the node need not have compared them. Elsewhere they come over HTTP. A read of
several pieces is one request of up to READ_BYTES: a request for each 4 MiB would cost a round trip each.

A piece that does not match is read once more from the node before it counts as damaged: the first copy may have been
hit on its way.

Invariant. Memory that `read_into` filled without an error holds bytes that match; after `Corrupt` it may hold anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from forebay.core import limits
from forebay.core.checkpoint import PIECE_BYTES, Index, PieceDigest, piece_digest
from forebay.core.errors import Corrupt
from forebay.core.types import RangeSpec

if TYPE_CHECKING:
    from forebay.client.sync import Client

READERS = min(4, max(2, os.cpu_count() or 2))  # threads: one digests while others wait for bytes
READ_BYTES = 16 * limits.MIB  # of one request; a multiple of PIECE_BYTES that stays in a processor cache shared by few
CACHED_BYTES = 2 * limits.MIB  # digested while they are in a cache; less, and Python's part in each read counts
Task = TypeVar("Task")
Done = TypeVar("Done")
_mine = threading.local()


class Stream:
    """The bytes that `index` describes, in the objects `names` (its blobs, in order). One thread at a time."""

    def __init__(self, client: Client, bucket: str, names: list[str], index: Index) -> None:
        self._client = client
        self._bucket = bucket
        self._names = names
        self._index = index
        self._piece = -1  # which piece `_kept` holds, -1 for none: the next tensor often begins in it
        self._kept = memoryview(b"")

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the stream from `start` on. `Corrupt` if a piece does not match."""
        end = start + len(buffer)
        position = start
        while position < end:
            piece, inside = divmod(position, PIECE_BYTES)
            whole = 0 if inside else self._whole_bytes(position, end)
            if whole:
                self._read_whole(position, buffer[position - start : position - start + whole])
                position += whole
                continue
            size = min(self._size(piece) - inside, end - position)
            buffer[position - start : position - start + size] = self._part(piece)[inside : inside + size]
            position += size

    def verify(self, start: int) -> int:
        """Read and compare the cell that begins at `start`; its size. `Corrupt` if a piece does not match."""
        end = min(start + READ_BYTES, self._index.stream_bytes)
        self.read_into(start, _scratch()[: end - start])
        return end - start

    def _size(self, piece: int) -> int:
        return min(PIECE_BYTES, self._index.stream_bytes - piece * PIECE_BYTES)

    def _whole_bytes(self, position: int, end: int) -> int:
        """How much from `position` (a piece's begin) is whole pieces, in one request; 0 if not even one piece is."""
        size = self._run_bytes(position, end)
        if position + size == self._index.stream_bytes:
            return size
        return size - size % PIECE_BYTES

    def _run_bytes(self, position: int, end: int) -> int:
        """What one request may read from `position` on: not beyond its blob."""
        blob_end = (position // self._index.blob_bytes + 1) * self._index.blob_bytes
        return min(end, blob_end, position + READ_BYTES) - position

    def _part(self, piece: int) -> memoryview:
        if piece != self._piece:
            self._piece = -1
            self._kept = self._kept or memoryview(bytearray(min(PIECE_BYTES, self._index.stream_bytes)))
            self._read_whole(piece * PIECE_BYTES, self._kept[: self._size(piece)])
            self._piece = piece
        return self._kept

    def _read_whole(self, position: int, buffer: memoryview) -> None:
        """Whole pieces of one blob into `buffer`, compared."""
        begin = self._by_door(position, buffer)
        if begin < len(buffer):
            self._fetch(position + begin, buffer[begin:])
        for at in range(begin, len(buffer), PIECE_BYTES):
            view = buffer[at : at + PIECE_BYTES]
            if not self._matches(position + at, view):
                self._fetch(position + at, view)
                if not self._matches(position + at, view):
                    blob, offset = divmod(position + at, self._index.blob_bytes)
                    raise Corrupt(
                        f"{self._bucket}/{self._names[blob]}: {len(view)} bytes from {offset} on do not match their "
                        "digest: restore an older checkpoint"
                    )

    def _matches(self, position: int, view: memoryview) -> bool:
        return piece_digest(view) == self._index.digest(position // PIECE_BYTES)

    def _by_door(self, position: int, buffer: memoryview) -> int:
        """How many bytes of `buffer`, in whole pieces, were filled from the object's file and match."""
        blob, offset = divmod(position, self._index.blob_bytes)
        name, read = self._names[blob], self._client.door.readinto
        for begin in range(0, len(buffer), PIECE_BYTES):
            end, digest = min(begin + PIECE_BYTES, len(buffer)), PieceDigest()
            for at in range(begin, end, CACHED_BYTES):
                part = buffer[at : min(at + CACHED_BYTES, end)]
                if read(self._bucket, name, offset + at, part, proves=True) != len(part):
                    return begin
                digest.update(part)
            if digest.hexdigest() != self._index.digest((position + begin) // PIECE_BYTES):
                return begin
        return len(buffer)

    def _fetch(self, position: int, buffer: memoryview) -> None:
        blob, offset = divmod(position, self._index.blob_bytes)
        name = self._names[blob]
        got = self._client.get_into(self._bucket, name, buffer, range=RangeSpec(offset, offset + len(buffer) - 1))
        if got.body_bytes != len(buffer):
            raise Corrupt(f"{self._bucket}/{name} ends too early: restore an older checkpoint")


def cells(stream_bytes: int) -> range:
    """Where the cells of a stream begin."""
    return range(0, stream_bytes, READ_BYTES)


def by_threads(work: Callable[[Task], Done], tasks: Iterable[Task]) -> Generator[Done, None, None]:
    """What `work` returns for each task, in order, from READERS threads. After an error, or when the caller stops
    asking, no other task is begun."""
    with ThreadPoolExecutor(READERS, "restore") as pool:
        try:
            yield from pool.map(work, tasks)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _scratch() -> memoryview:
    """READ_BYTES of this thread's own, to read what is only compared."""
    kept: memoryview | None = getattr(_mine, "scratch", None)
    if kept is None:
        kept = _mine.scratch = memoryview(bytearray(READ_BYTES))
    return kept
