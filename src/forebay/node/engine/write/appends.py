"""Appends a member to a tar at the engine: a new version of the object, built beside the old one.

Theory. The new shard is the old one up to its end mark, a header, the member's bytes, and an end mark. It is built in a
temp file on the key's volume, with copy_file_range if there are files, so that filesystems can share blocks. It is
hashed once, and committed like any put, on the condition that the old version is still there. So it appears whole or
not at all, and readers have the old version until then. If the filesystem cannot share blocks, an append costs a copy
of the shard.

The old shard's index, a derived object, says where the shard ends; without an index its headers are read. The new
shard's index is the old one plus one entry, and is kept at once, so that nobody reads headers again.

Appends to one shard run one after another. A put in between makes a new shard, and the append begins again with that.

The whole shard must be here. If it is not, `Busy` (`NotHere`) makes the front fetch it, as for readers.

Rejected: appending in place (readers of the old version, and a stop in the middle); appends to buckets written through
(the backend has no such thing, and the whole shard would go there for each member).

Invariants. (1) The temp file is gone at the end. (2) A member is in the shard exactly if the answer says so, unless the
connection was lost before the answer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from typing import NamedTuple

import xxhash

from forebay.core import limits
from forebay.core.errors import Busy, Corrupt, Invalid, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.formats import members, tar
from forebay.core.formats.members import AppendCall, MemberIndex
from forebay.core.messages.calls import Written
from forebay.core.record import Record, State, own_version
from forebay.core.s3rules.tags import tags_among, without_tags
from forebay.core.types import ObjectInfo, check_key
from forebay.node.engine.buckets import Served
from forebay.node.engine.disk_wait import by_disk_in_steps
from forebay.node.engine.write.locks import KeyLocks
from forebay.node.engine.write.parts import forget
from forebay.node.engine.write.writes import Writes
from forebay.node.store.derived import Derived
from forebay.node.store.disk.volume import refusal
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.reader import LeasedFile, StoreReader
from forebay.node.store.writer.writer import Store

TRIES = 8  # an append gives up on a shard that is overwritten this often meanwhile
_CHUNK = limits.MIB
_STEP_BYTES = 8 * limits.MIB
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_HEADERS = (("content-type", "application/x-tar"),)


class _Old(NamedTuple):
    """The shard as it is. All fields are None if there is none."""

    info: ObjectInfo | None
    record: Record | None
    file: LeasedFile | None


class _Built(NamedTuple):
    """The new shard. `start`: of the member's bytes; `end`: of the last member's."""

    size_bytes: int
    sums: list[int]
    md5: str
    hash128: str
    before: MemberIndex
    start: int
    end: int


class Appends:
    """See the module's header. `flush` makes pending changes of the index visible."""

    def __init__(
        self,
        store: Store,
        index: StoreReader,
        writes: Writes,
        derived: Derived,
        workers: Executor,
        *,
        flush: Callable[[], None],
        wall_s: Callable[[], float],
    ) -> None:
        self._store, self._index, self._writes, self._derived = store, index, writes, derived
        self._workers = workers
        self._wall_s = wall_s
        self._flush = flush
        self._locks = KeyLocks()

    async def append(self, call: AppendCall) -> Written:
        """Append a member. `Precondition` and `NotFound` for conditions, `NotSupported` in buckets written through,
        `Corrupt` if the object is no tar, `Busy` (`NotHere`)."""
        check_key(call.key)
        if (call.body is None) == (not call.path):
            raise Invalid("a member came without a body: please report it")
        written: Written = await self._writes.finish_again(lambda: self._append(call))
        return written

    async def _append(self, call: AppendCall) -> Written:
        async with self._locks.lock(call.bucket, call.key):
            async with self._writes.entered(call.bucket, call.key) as served:
                if served.of is not None:
                    raise NotSupported(f"{call.key} is at home on another node of the cluster: append there")
                if served.bucket.write == "through":
                    raise NotSupported(
                        f"bucket {call.bucket} is written through, and its backend cannot append: use a bucket "
                        "written back or local, or put the whole shard"
                    )
                written, built = await self._until_done(served, call)
            index = built.before.appended(
                call.name, built.start, call.size_bytes, version=written.version, etag=written.etag, end=built.end
            )
            await self._derived.keep("members", call.bucket, call.key, written.version, index.encode())
        return written

    async def _until_done(self, served: Served, call: AppendCall) -> tuple[Written, _Built]:
        for attempt in range(1, TRIES + 1):
            info = await self._writes.check(served, call.key, call.if_match, call.if_none_match)
            try:
                return await self._once(served, call, info)
            except (Precondition, NotFound):
                if attempt == TRIES:
                    raise Busy(
                        f"{call.key} is overwritten all the time: append when that is over", retry_after_s=1.0
                    ) from None
        raise AssertionError("unreachable")

    async def _once(self, served: Served, call: AppendCall, info: ObjectInfo | None) -> tuple[Written, _Built]:
        """One try. `Precondition` when the shard changed meanwhile."""
        path = self._index.incoming(call.bucket, call.key)
        if not path:
            raise Unavailable("no volume takes the shard: see `forebay status`", code="InsufficientStorage")
        md5 = served.bucket.options.get("etag") == "md5"
        old = self._old(call, info)
        kept = self._kept(call, old)
        try:
            volume = self._store.volume_at(call.bucket, call.key)
            steps = self._build(call, old, kept, path, md5=md5)
            try:
                built = await by_disk_in_steps(
                    volume, self._workers, steps, f"{call.bucket}/{call.key}", lambda: forget(path)
                )
            except OSError as error:
                raise refusal(error, "the shard") from error
            written = await self._writes.put_file(
                served,
                call.key,
                path,
                built.size_bytes,
                built.sums,
                without_tags(info.headers) if info is not None else _HEADERS,
                etag=built.md5 or f"{built.hash128}-x",
                md5=built.md5,
                tags=(tags_among(info.headers) or "") if info is not None else "",
                if_match=f'"{info.etag}"' if info is not None else None,
                if_none_match="*" if info is None else None,
            )
        finally:
            for file in (old.file, kept):
                if isinstance(file, LeasedFile):
                    file.release()
            remove_temp(path)
        return written, built

    def _kept(self, call: AppendCall, old: _Old) -> bytes | LeasedFile | None:
        """The old shard's kept index."""
        record = old.record
        for version in (record.version, own_version(record.object_id)) if record is not None else ():
            found = self._derived.find("members", call.bucket, call.key, version)
            if found is not None:
                return found
        return None

    def _old(self, call: AppendCall, info: ObjectInfo | None) -> _Old:
        """The shard's bytes. `Busy` (`NotHere`) if they are not here."""
        if info is None:
            return _Old(None, None, None)
        self._flush()
        record = self._index.lookup(call.bucket, call.key)
        if record is not None and record.version == info.version and record.complete:
            if record.state & State.UNVERIFIED:
                record = None
            elif record.inline is not None:
                return _Old(info, record, None)
            elif (file := self._index.acquire(call.bucket, call.key, record)) is not None:
                return _Old(info, record, file)
        raise Busy(f"{call.key} is not here: fetch it, then append", code="NotHere", retry_after_s=0.1)

    # --- in a worker thread ------------------------------------------------------------------------------------------
    def _build(
        self, call: AppendCall, old: _Old, kept: bytes | LeasedFile | None, path: str, *, md5: bool
    ) -> Generator[None, None, _Built]:
        index = _index_of(old, kept)
        fd = os.open(path, _FLAGS, 0o600)
        try:
            if old.file is not None:
                yield from _copy(old.file.fd, fd, min(index.end, index.size_bytes))
            elif old.record is not None:
                _write(fd, (old.record.inline or b"")[: index.end])
            os.ftruncate(fd, index.end)  # pads a last member that was cut short with zeros
            os.lseek(fd, index.end, os.SEEK_SET)
            head = tar.header_of(call.name, call.size_bytes, self._wall_s())
            _write(fd, head)
            if call.body is not None:
                _write(fd, call.body)
            else:
                source = os.open(call.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    yield from _copy(source, fd, call.size_bytes)
                finally:
                    os.close(source)
            _write(fd, tar.padding(call.size_bytes) + tar.END)
            size_bytes = os.lseek(fd, 0, os.SEEK_CUR)
            sums, digest, hash128 = yield from _hashes(fd, size_bytes, md5=md5)
        finally:
            os.close(fd)
        return _Built(size_bytes, sums, digest, hash128, index, index.end + len(head), size_bytes - len(tar.END))


def _index_of(old: _Old, kept: bytes | LeasedFile | None) -> MemberIndex:
    """The old shard's index: the kept one, or built from its headers."""
    record, file = old.record, old.file
    if record is None:
        return members.empty()
    if kept is not None:
        try:
            data = kept if isinstance(kept, bytes) else os.pread(kept.fd, kept.record.size_bytes, 0)
            index = members.decode(data)
            if index.kind == "tar" and not index.plain and index.size_bytes == record.size_bytes:
                return index
        except Corrupt:
            pass  # build it from the headers
    inline = record.inline

    def read(start: int, size: int) -> bytes:
        if inline is not None:
            return inline[start : start + size]
        assert file is not None, "neither inline nor a file"
        return os.pread(file.fd, size, start)

    return members.build("tar", read, record.size_bytes, version=record.version, etag=record.etag)


def _copy(source: int, target: int, size_bytes: int) -> Generator[None, None, None]:
    """Copy from the source's beginning to the target's position, by the filesystem if it can."""
    done = 0
    while done < size_bytes:
        try:
            copied = os.copy_file_range(source, target, min(_STEP_BYTES, size_bytes - done), done)
        except OSError:
            copied = 0
        if not copied:
            data = os.pread(source, min(_CHUNK, size_bytes - done), done)
            if not data:
                raise Corrupt("the shard's file ended early: read it again, then append")
            _write(target, data)
            copied = len(data)
        done += copied
        yield


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _hashes(fd: int, size_bytes: int, *, md5: bool) -> Generator[None, None, tuple[list[int], str, str]]:
    """xxh3-64 of each block, MD5 if wanted, xxh3-128."""
    sums: list[int] = []
    digest = hashlib.md5(usedforsecurity=False) if md5 else None
    whole = xxhash.xxh3_128()
    for start in range(0, size_bytes, limits.BLOCK_BYTES):
        block = xxhash.xxh3_64()
        for at in range(start, min(start + limits.BLOCK_BYTES, size_bytes), _CHUNK):
            data = os.pread(fd, min(_CHUNK, size_bytes - at, start + limits.BLOCK_BYTES - at), at)
            block.update(data)
            whole.update(data)
            if digest is not None:
                digest.update(data)
        sums.append(block.intdigest())
        yield
    return sums, digest.hexdigest() if digest is not None else "", whole.hexdigest()
