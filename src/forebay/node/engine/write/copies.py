"""Copies an object: at the backend if it can, else through the node.

Theory. Within one backend a clean object is copied by the backend itself, and the node forgets what it had of the
target. Every other copy (between buckets, from or to objects that only the node has, under conditions on the target)
reads the source, pinned to one version, into a temp file of the target's volume, and then puts it. Pieces that lie in a
file are moved by copy_file_range, so that filesystems can share blocks. The bytes are read once for their checksum: the
one the caller asks for, or the source's algorithm. If the source was assembled from parts, its own checksum is one of
parts; the copy gets a checksum of the whole by the same algorithm, as in S3.

A copy of an object onto itself changes its headers or tags. It must not bring back bytes that another write has
replaced meanwhile, so it insists on the version that it read, and begins again if that is gone.

Rejected: holding the source's lock (a version is pinned; two copies in opposite directions would wait for each other).

Invariants. (1) The target has the bytes of one version of the source. (2) The temp file is gone at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import (
    ErrorOnWire,
    ForebayError,
    Invalid,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
    from_wire,
)
from forebay.core.machines.uploads import stored_checksum, with_checksum, without_own
from forebay.core.messages.calls import CopyCall, PartState, UploadPartCall, UploadPartCopyCall, Written
from forebay.core.messages.wire import Relay
from forebay.core.record import Record, State
from forebay.core.s3rules.checksums import Checksum
from forebay.core.s3rules.conditions import Conditions
from forebay.core.s3rules.keeping import without_keeping
from forebay.core.s3rules.tags import tags_among, without_tags
from forebay.core.types import Headers, ObjectInfo, RangeSpec, check_key
from forebay.core.versions import ID_HEADER, whose_versions
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.disk_wait import by_disk, by_disk_in_steps, threads_of
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.read.sink import BlockHashes
from forebay.node.engine.write.parts import forget
from forebay.node.engine.write.uploads import UploadBook
from forebay.node.engine.write.writes import Writes, check_writable
from forebay.node.store.disk.volume import Volume, refusal
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store

TRIES = 4  # a copy gives up on a source that changes this often meanwhile
_CHUNK = limits.MIB
_STEP_BYTES = 8 * limits.MIB
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _Piece(NamedTuple):
    start: int
    end: int
    path: str
    offset: int
    body: bytes | None


class _Pieces:
    """Where a read's answers go; None at the end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[_Piece | ForebayError | None] = asyncio.Queue()

    def opened(
        self, record: Record, start: int, end: int, hit: bool, body: bytes | None, relay: Relay | None = None
    ) -> None:
        if body is not None:
            self.queue.put_nowait(_Piece(start, end, "", 0, body))

    def landed(self, start: int, end: int, path: str, offset: int, body: bytes | None) -> None:
        self.queue.put_nowait(_Piece(start, end, path, offset, body))

    def finished(self) -> None:
        self.queue.put_nowait(None)

    def failed(self, error: ErrorOnWire) -> None:
        self.queue.put_nowait(from_wire(error))

    def withdrawn(self) -> None:
        self.queue.put_nowait(Unavailable("the source does not match its checksums: try again"))


class _Target(NamedTuple):
    """Where a copy goes: a file of `volume`, or memory ("")."""

    path: str
    volume: Volume | None
    subject: str


class Drawn:
    """The bytes of an object, copied into a new file `path` (into memory when it is ""), and their checksums."""

    def __init__(self, path: str, size_bytes: int, *, md5: bool, algorithm: str = "") -> None:
        self.path = path
        self._digest = Checksum(algorithm) if algorithm else None
        self.sums: list[int] = []
        self._body = bytearray()
        self._blocks = BlockHashes(0, size_bytes, limits.BLOCK_BYTES)
        self._whole = xxhash.xxh3_128()
        self._md5 = hashlib.md5(usedforsecurity=False) if md5 else None
        self._at = 0
        self._fd = -1

    @property
    def body(self) -> bytes | None:
        return None if self.path else bytes(self._body)

    @property
    def md5(self) -> str:
        return self._md5.hexdigest() if self._md5 is not None else ""

    @property
    def checksum(self) -> str:
        """By the requested algorithm, in S3's form; "" for none."""
        return self._digest.base64() if self._digest is not None else ""

    @property
    def etag(self) -> str:
        """The ETag of an owned object with these bytes."""
        return self.md5 or f"{self._whole.hexdigest()}-x"

    def take(self, piece: _Piece) -> Generator[None, None, None]:
        """Add a piece, in steps for a worker thread; `OSError` when the disk errs."""
        if self.path and self._fd < 0:
            self._fd = os.open(self.path, _FLAGS, 0o600)
        if piece.body is not None:
            self._hash(memoryview(piece.body))
            if self._fd >= 0:
                _write(self._fd, piece.body, self._at)
            else:
                self._body += piece.body
        else:
            source = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield from self._take_file(source, piece.offset, piece.end - piece.start)
            finally:
                os.close(source)
        self._at += piece.end - piece.start

    def _take_file(self, source: int, offset: int, length: int) -> Generator[None, None, None]:
        done = 0
        while done < length:
            chunk = os.pread(source, min(_CHUNK, length - done), offset + done)
            if not chunk:
                raise Unavailable("the file that is copied ended early: try again")
            self._hash(memoryview(chunk))
            if self._fd < 0:
                self._body += chunk
            elif not _share(source, self._fd, len(chunk), offset + done, self._at + done):
                _write(self._fd, chunk, self._at + done)
            done += len(chunk)
            if done % _STEP_BYTES < len(chunk):
                yield

    def _hash(self, data: memoryview) -> None:
        self.sums += [checksum for _, checksum in self._blocks.feed(data)]
        self._whole.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        if self._digest is not None:
            self._digest.update(data)

    def close(self) -> None:
        """No more bytes come. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Remove the file. In a worker thread, while none takes a piece. May be called twice."""
        self.close()
        if self.path:
            forget(self.path)


class Copies:
    """See the module's header."""

    def __init__(
        self,
        store: Store,
        index: StoreReader,
        buckets: Buckets,
        cold: ColdReads,
        writes: Writes,
        workers: Executor,
        uploads: Callable[[], UploadBook],
    ) -> None:
        self._uploads = uploads
        self._store, self._index, self._buckets, self._cold = store, index, buckets, cold
        self._writes, self._workers = writes, workers

    async def copy(self, call: CopyCall) -> Written:
        """Copy an object. `NotFound` (`NoSuchKey`) for the source, `Precondition` for conditions on either."""
        check_key(call.source_key)
        check_key(call.key)
        onto_itself = (call.source_bucket, call.source_key) == (call.bucket, call.key)
        if onto_itself and call.headers is None and call.tags is None and not call.keeping:
            raise Invalid(
                "This copy request is illegal because it is trying to copy an object to itself without changing the "
                "object's metadata: give x-amz-metadata-directive: REPLACE",
                code="InvalidRequest",
            )
        return await self._writes.finish_again(lambda: self._copy(call, onto_itself))

    async def _copy(self, call: CopyCall, onto_itself: bool) -> Written:
        async with self._writes.entered(call.bucket, call.key) as served:
            if served.bucket.write == "through":
                check_writable(served)
            for attempt in range(1, TRIES + 1):
                try:
                    return await self._try(call, served, onto_itself, attempt > 1)
                except _SourceChanged as changed:
                    if attempt == TRIES:
                        raise changed.error from None
        raise AssertionError("unreachable")

    async def _try(self, call: CopyCall, served: Served, onto_itself: bool, again: bool) -> Written:
        source = await self._buckets.readable(call.source_bucket, call.source_key)
        info = await self._source(source, call, again=again)
        _check_size(info.size_bytes)
        if served.bucket.write == "through" and served.same_place(source) and self._is_there(call):
            written = await self._at_backend(call, served, info)
            if written is not None:
                return written
        etag_kept = info.etag if onto_itself and call.if_match is None and call.if_none_match is None else None
        path = self._path(call.bucket, call.key, info.size_bytes)
        try:
            md5 = served.bucket.options.get("etag") == "md5" or info.size_bytes <= limits.ETAG_MD5_BYTES_MAX
            algorithm = call.checksum_algorithm or stored_checksum(info.headers)[0]
            drawn = await self._draw(source, info, self._target(call, path), md5=md5, algorithm=algorithm)
            if source.of is not None and call.tags is None:  # a node says of tags no more than their number
                call = msgspec.structs.replace(call, tags=await source.backend.read_tags(call.source_key))
            written = await self._put(call, served, info, drawn, algorithm, etag_kept)
            return msgspec.structs.replace(written, checksums={algorithm: drawn.checksum}) if algorithm else written
        finally:
            if path:
                remove_temp(path)

    async def _put(
        self, call: CopyCall, served: Served, info: ObjectInfo, drawn: Drawn, algorithm: str, etag_kept: str | None
    ) -> Written:
        headers = (*(_headers_of(info) if call.headers is None else call.headers), *call.keeping)
        tags = (tags_among(info.headers) or "") if call.tags is None else call.tags
        try:
            return await self._writes.put_file(
                served,
                call.key,
                drawn.path,
                info.size_bytes,
                drawn.sums if drawn.path else (),
                with_checksum(headers, algorithm, drawn.checksum) if algorithm else headers,
                etag=drawn.etag,
                md5=drawn.md5,
                tags=tags,
                if_match=call.if_match if etag_kept is None else etag_kept,
                if_none_match=call.if_none_match,
                body=drawn.body,
            )
        except Precondition as error:
            if etag_kept is not None:
                raise _SourceChanged(error) from error
            raise

    async def copy_part(self, call: UploadPartCopyCall) -> PartState:
        """Make a part of an upload from (a range of) an object. Errors as for `copy`, and as for `part` of the
        uploads."""
        check_key(call.source_key)
        check_key(call.key)
        return await self._writes.finish_again(lambda: self._copy_part(call))

    async def _copy_part(self, call: UploadPartCopyCall) -> PartState:
        await self._uploads().check(call.bucket, call.key, call.upload_id)
        source = await self._buckets.readable(call.source_bucket, call.source_key)
        for attempt in range(1, TRIES + 1):
            info = await self._source(source, call, again=attempt > 1)
            start = call.start or 0
            end = info.size_bytes if call.end is None else call.end
            if not 0 <= start < end <= info.size_bytes and (start, end) != (0, 0):
                raise Invalid(
                    f"the range of the part lies outside the source of {info.size_bytes} bytes: ask within it",
                    code="InvalidRange",
                    size_bytes=info.size_bytes,
                )
            _check_size(end - start)
            path = self._path(call.bucket, call.key, end - start)
            try:
                drawn = await self._draw(source, info, self._target(call, path), md5=True, start=start, end=end)
                part = UploadPartCall(
                    call.bucket,
                    call.key,
                    call.upload_id,
                    call.number,
                    end - start,
                    drawn.md5,
                    drawn.path,
                    drawn.body,
                )
                return await self._uploads().part(part)
            except _SourceChanged as changed:
                if attempt == TRIES:
                    raise changed.error from None
            finally:
                if path:
                    remove_temp(path)
        raise AssertionError("unreachable")

    async def _source(self, source: Served, call: CopyCall | UploadPartCopyCall, *, again: bool) -> ObjectInfo:
        """The source's metadata, if it meets the conditions."""
        info = await self._writes.current(source, call.source_key, revalidate=again)
        if info is None:
            raise NotFound(f"there is no object {call.source_key!r} to copy: check the name", code="NoSuchKey")
        conditions = Conditions(
            call.source_if_match,
            call.source_if_none_match,
            call.source_if_modified_since,
            call.source_if_unmodified_since,
        )
        if conditions.judge(info.etag, info.modified_s) != 200:
            raise Precondition(
                f"the source {call.source_key!r} does not meet the conditions: look at it again",
                code="PreconditionFailed",
            )
        return info

    def _path(self, bucket: str, key: str, size_bytes: int) -> str:
        """Where the copy goes; "" for memory."""
        if size_bytes <= limits.INLINE_BYTES_MAX:
            return ""
        path = self._index.incoming(bucket, key)
        if not path:
            raise Unavailable("no volume takes the copy: see `forebay status`", code="InsufficientStorage")
        return path

    def _target(self, call: CopyCall | UploadPartCopyCall, path: str) -> _Target:
        volume = self._store.volume_at(call.bucket, call.key) if path else None
        return _Target(path, volume, f"{call.bucket}/{call.key}")

    def _is_there(self, call: CopyCall) -> bool:
        """Whether the backend can make this copy: it has the source, and nothing is asked that it cannot do."""
        record = self._store.lookup(call.source_bucket, call.source_key)
        if (
            call.checksum_algorithm
            or whose_versions(call.source_bucket)
            or (record is not None and record.state & State.OWNED)
        ):
            return False
        return call.tags is None and call.if_match is None and call.if_none_match is None

    async def _at_backend(self, call: CopyCall, served: Served, info: ObjectInfo) -> Written | None:
        """Let the backend copy. None if it cannot."""
        async with self._writes.lock(call.bucket, call.key):
            headers = call.headers
            if call.keeping:
                headers = (*(_headers_of(info) if headers is None else headers), *call.keeping)
            async with self._writes.asking(served.bucket, call.key):
                try:
                    seen = await served.backend.copy(
                        call.source_key, call.key, source_version=info.version, headers=headers
                    )
                except BaseException as error:
                    self._writes.doubt(served.bucket, call.key, error)
                    if isinstance(error, Precondition | NotFound):  # whoever hears it reads no older source after it
                        source = (call.source_bucket, call.source_key)
                        self._cold.openings.shown(source, "")
                        self._cold.replaced(source, info.version)
                    if isinstance(error, NotSupported):
                        return None
                    if isinstance(error, Precondition):
                        raise _SourceChanged(error) from error
                    raise
                await self._writes.drop(call.bucket, call.key)
        return Written(seen.etag, seen.version, info.size_bytes, seen.modified_s)

    async def _draw(
        self,
        source: Served,
        info: ObjectInfo,
        target: _Target,
        *,
        md5: bool,
        algorithm: str = "",
        start: int = 0,
        end: int | None = None,
    ) -> Drawn:
        """Read [start, end) of the source, like any reader. `Unavailable` if the target's disk stalls."""
        out = _Pieces()
        end = info.size_bytes if end is None else end
        drawn = Drawn(target.path, end - start, md5=md5, algorithm=algorithm)
        asked = RangeSpec(start, end - 1) if start < end else None
        read = self._cold.open(Ask(source.bucket.name, info.key, asked, version=info.version), out)
        try:
            while (piece := await self._next(out, drawn, target)) is not None:
                try:
                    await by_disk_in_steps(
                        target.volume, self._workers, drawn.take(piece), target.subject, drawn.discard
                    )
                except FileNotFoundError as error:  # the source was replaced, and its file is gone
                    gone = Precondition("the source changed while it was copied: copy it again")
                    raise _SourceChanged(gone) from error
                except OSError as error:
                    raise refusal(error, "the copy") from error
                read.took(piece.end)
            await by_disk(target.volume, self._workers, drawn.close, target.subject)
        finally:
            read.close()
        return drawn

    async def _next(self, out: _Pieces, drawn: Drawn, target: _Target) -> _Piece | None:
        """The next piece of the source; None at its end."""
        try:
            piece = await out.queue.get()
            if isinstance(piece, ForebayError):
                raise _SourceChanged(piece) if isinstance(piece, Precondition | NotFound) else piece
        except BaseException:
            threads_of(target.volume, self._workers).submit(drawn.discard)
            raise
        return piece


class _SourceChanged(Exception):
    """The source has another version by now: begin again."""

    def __init__(self, error: ForebayError) -> None:
        super().__init__(str(error))
        self.error = error


def _headers_of(info: ObjectInfo) -> Headers:
    """Those of the source that its copy has too. How a copy is kept, its own write says."""
    kept = without_keeping(without_own(without_tags(info.headers)))
    return tuple(each for each in kept if each[0] != ID_HEADER)


def _check_size(size_bytes: int) -> None:
    if size_bytes > limits.PUT_BYTES_MAX:
        raise Invalid(
            f"the source has {size_bytes} bytes and one copy takes {limits.PUT_BYTES_MAX} at most: copy it in "
            "parts (multipart upload)",
            code="InvalidRequest",
        )


def share_file(source: str, path: str, size_bytes: int) -> None:
    """Make the new file `path` of the first bytes of another, by the filesystem if it can. `OSError`; blocks."""
    given, taken = os.open(source, os.O_RDONLY | os.O_CLOEXEC), os.open(path, _FLAGS, 0o600)
    try:
        for at in range(0, size_bytes, _STEP_BYTES):
            length = min(_STEP_BYTES, size_bytes - at)
            if not _share(given, taken, length, at, at):
                _write(taken, os.pread(given, length, at), at)
    finally:
        os.close(given)
        os.close(taken)


def _share(source: int, target: int, length: int, offset: int, at: int) -> bool:
    """Copy by the filesystem, if it can."""
    done = 0
    try:
        while done < length:
            copied = os.copy_file_range(source, target, length - done, offset + done, at + done)
            if not copied:
                return False
            done += copied
    except OSError:
        return False  # another filesystem, or memory: copied by hand, from the start
    return True


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
