"""Derived objects, the readers' side: what the node computes from an object or a listing, kept in the store beside it.

Theory. The index of a shard, the plain form of a compressed one, a listing: each costs a pass over bytes or a listing,
and is the same for everybody who asks. So it is stored like any clean object, in a bucket of its own, and evicted like
one; whoever misses it makes it again. The names of these buckets begin with `-`, which no bucket's name may
(`core.types.check_bucket_name`), so no API can read, list or write them: only `Derived` reaches them.

To make derived objects:

    derived.find(kind, bucket, key, version)          bytes, a `LeasedFile`, or None: not here, make it
    await derived.keep(kind, bucket, key, version, data)   keep bytes; False if the node has no room for them
    writer = derived.writer(kind, bucket, key, version)    the same for what does not fit in memory:
    writer.write(data); await writer.keep()                any thread may write; `abort()` instead of `keep()`

`key` may be any text, "" too (a listing's prefix). `version` names the source's version: it must change whenever the
derived bytes would. Whoever finds a `LeasedFile` releases it. Nothing depends on a derived object: failing to keep one
never fails an answer.

Names (`core/derived.py`) begin with the source's bucket and key. So the objects derived from one bucket, or from what
is under a prefix, stand together, and go together when it is forgotten, moved or evicted.

Rejected: a table in the index (no eviction, no accounting, no rebuild); files beside the data file (its lease, its
eviction and its volume are not theirs).

Invariants. (1) `find` returns only what was kept for exactly this version, whole. (2) A kept object counts as used, is
clean, and is never pinned. (3) A temp file that `writer` made is gone when `keep` or `abort` returned, or became the
object.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import xxhash

from forebay.core import limits
from forebay.core.derived import DerivedKind, KeepAnswer, KeepCall, name_of, reserved
from forebay.core.errors import ForebayError, Unavailable
from forebay.core.machines.stall import STALLED_AFTER_S
from forebay.core.record import Record, State
from forebay.node.outcomes import Call
from forebay.node.store.disk.volume_threads import create_temp, desk_of, remove_temp
from forebay.node.store.reader import LeasedFile, StoreReader
from forebay.ports import clock

log = logging.getLogger("forebay.derived")


_UNVERIFIED = int(State.UNVERIFIED)


class Derived:
    """See the module's header. `touch(object_id, first block, end block)` reports a use to the engine."""

    def __init__(self, store: StoreReader, call: Call, touch: Callable[[int, int, int], None]) -> None:
        self._store = store
        self._call = call
        self._touch = touch

    def find(self, kind: DerivedKind, bucket: str, key: str, version: str) -> bytes | LeasedFile | None:
        """The kept object; None if it is not here (any more), or is of another version. Release a file after use."""
        place, name = reserved(kind), name_of(bucket, key)
        record = self._store.lookup(place, name)
        if record is None or not _is_whole(record, version):
            return None
        if record.inline is not None:
            self._touch(record.object_id, 0, 1)
            return record.inline
        file = self._store.acquire(place, name, record)
        if file is None:
            return None
        if not _is_whole(file.record, version) or os.fstat(file.fd).st_size != record.size_bytes:
            file.release()
            return None
        self._touch(record.object_id, 0, -(-record.size_bytes // record.block_bytes))
        return file

    async def keep(self, kind: DerivedKind, bucket: str, key: str, version: str, data: bytes) -> bool:
        """Keep `data`. False if that is impossible, for lack of room or of an engine."""
        if len(data) <= limits.INLINE_BYTES_MAX:
            return await self._keep(KeepCall(kind, bucket, key, version, len(data), body=data))
        writer = None
        try:
            writer = self.writer(kind, bucket, key, version)
            await asyncio.to_thread(writer.write, data)
        except (OSError, Unavailable) as error:
            log.info("an object derived from %s/%s is not kept: %s", bucket, key, error)
            return False
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        return await writer.keep()

    def writer(self, kind: DerivedKind, bucket: str, key: str, version: str) -> DerivedWriter:
        """A writer for what does not fit in memory. `Unavailable` when there is no usable volume."""
        path = self._store.incoming(reserved(kind), name_of(bucket, key))
        if not path:
            raise Unavailable("no volume is usable: mend a disk (`forebay status`), then ask again")
        return DerivedWriter(path, KeepCall(kind, bucket, key, version, 0), self._keep)

    async def _keep(self, call: KeepCall) -> bool:
        try:
            kept: KeepAnswer = await self._call("keep", call)
        except ForebayError as error:
            if call.path:
                remove_temp(call.path)
            log.info("an object derived from %s/%s is not kept: %s", call.bucket, call.key, error)
            return False
        return kept.kept


class DerivedWriter:
    """Writes a derived object: one thread at a time, front to back, then `keep` or `abort`. The first `write`, even of
    nothing, makes the file."""

    def __init__(self, path: str, call: KeepCall, keep: Callable[[KeepCall], Any]) -> None:
        self.size_bytes = 0
        self._path, self._call, self._keep = path, call, keep
        self._sums: list[int] = []
        self._block = xxhash.xxh3_64()
        self._left = limits.BLOCK_BYTES
        self._fd = -1
        self._ended = False

    def write(self, data: bytes | memoryview) -> None:
        """Append, in a worker thread. OSError when the disk does not take it (`Late`: it does not answer); then nothing
        of the file is left."""
        view = memoryview(data)
        try:
            if self._fd < 0:
                self._fd = create_temp(self._path, STALLED_AFTER_S)
            while view:
                piece, view = view[: self._left], view[self._left :]
                desk_of(self._path).carry(STALLED_AFTER_S, self._write_out, piece)
                self._block.update(piece)
                self._left -= len(piece)
                self.size_bytes += len(piece)
                if not self._left:
                    self._end_block()
        except OSError:
            self.abort()
            raise

    def _write_out(self, piece: memoryview) -> None:
        while piece and not self._ended:  # `abort` closes the file
            piece = piece[os.write(self._fd, piece) :]

    def wait_for_room(self, patience_s: float) -> None:
        """Wait, in a worker thread, until the disk has some room again: writing uses it up, and the engine's eviction,
        which runs from time to time, frees it. OSError (ENOSPC) after `patience_s`."""
        until_s = clock.monotonic_s() + patience_s
        while True:
            at = os.fstatvfs(self._fd)
            if at.f_bavail * at.f_frsize >= min(limits.RESERVE_BYTES_MAX, at.f_blocks * at.f_frsize // 100) // 2:
                return
            if clock.monotonic_s() > until_s:
                raise OSError(errno.ENOSPC, "the disk is full")
            time.sleep(0.1)

    def _end_block(self) -> None:
        self._sums.append(self._block.intdigest())
        self._block.reset()
        self._left = limits.BLOCK_BYTES

    async def keep(self) -> bool:
        """Make it a derived object. False if that is impossible, and then it is gone."""
        if self._left < limits.BLOCK_BYTES:
            self._end_block()
        self._close()
        call = self._call
        kept: bool = await self._keep(
            KeepCall(call.kind, call.bucket, call.key, call.version, self.size_bytes, self._path, sums=self._sums)
        )
        return kept

    def abort(self) -> None:
        """Remove what was written. May be called twice."""
        self._close()
        remove_temp(self._path)

    def _close(self) -> None:
        self._ended = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_whole(record: Record, version: str) -> bool:
    return record.version == version and record.complete and not record.state & _UNVERIFIED
