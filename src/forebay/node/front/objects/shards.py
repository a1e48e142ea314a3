"""Shards at a front: where a member's bytes are, found out once for each version of a shard, and reading them.

Theory. A read of a member is a look-up in the shard's index (`core/formats/members.py`) and then a read of a range. The
index is in this process's memory, else a derived object of kind `members` (`store/derived.py`), else it is built: the
shard is fetched through the engine as by any reader, so that it is here for the reads that follow, and its headers are
read in a worker thread. What is compressed as a whole (`.tar.gz`, `.tar.zst`, `.mds.zstd`) is unpacked once into a
derived object of kind `plain`; its members are ranges of that. Deflated members of a zip are inflated for whoever asks,
and their checksum is compared before the last bytes are given out.

Everybody in this process who waits for one shard waits for one build; between fronts, who builds holds the name of an
abstract socket, which ends with its holder, and the others look now and then whether the outcome is there. What cannot
be read as a shard, or has no room, is remembered for FAILED_KEPT_S, so that asking again costs nothing.

What is not kept (no room on the disks) is read all the same: the index from ranges of the object, as they pass through.
Only the plain form needs a disk, and is refused without room.

For other rooms:

    span = shards.known(bucket, key, record, member)     at once, or None: then
    span = await shards.locate(bucket, key, member)      raises NotFound (`NoSuchMember`, `NoSuchKey`), Corrupt, …
    span.ranged     the member is bytes [span.member.start, span.member.end) of the object, of version
                    `span.record.version`: read it like any range
    await shards.read(span, start, end)                  else: bytes of the member, for those that fit in memory
    await shards.send(exchange, span, start, end)        pieces of a body that was begun

Rejected: building at the engine (its loop is for the cold reads of all); a lock file (somebody must remove it).

Invariants. (1) An index is used only with the version of the object that it was built from. (2) At most one build of a
shard at a time in one process, and in all fronts as long as builds are shorter than CLAIM_WAIT_S. (3) A worker thread
holds the lease of the file that it reads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import xxhash

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotSupported, Precondition, Unavailable, from_wire
from forebay.core.formats import members
from forebay.core.formats.members import SNIFF_BYTES, Form, Member, MemberIndex, form_of
from forebay.core.formats.zipdir import STORED
from forebay.core.record import Record, is_version, own_version
from forebay.core.types import Bucket, RangeSpec
from forebay.core.versions import object_of
from forebay.node.front.http.requests import Exchange
from forebay.node.front.link import Link
from forebay.node.front.objects.arriving_bytes import Arriving, check_same
from forebay.node.front.objects.decompression import unpack
from forebay.node.front.objects.reads import Reads
from forebay.node.store.derived import Derived, DerivedWriter
from forebay.node.store.disk.volume import stalled
from forebay.node.store.disk.volume_threads import Late
from forebay.node.store.reader import LeasedFile, StoreReader
from forebay.ports import clock as clocks
from forebay.ports import threads

log = logging.getLogger("forebay.shards")
ResultT = TypeVar("ResultT")
_Name = tuple[str, str, str]  # bucket, key and version of a shard

MEMBERS_KEPT_MAX = 2_000_000  # of all indexes in this process's memory: about 400 MB once their names are looked up
FAILED_KEPT_S = 30.0
FAILED_MAX = 1024
CLAIM_WAIT_S = 600.0  # then a build counts as stuck, and is done again beside it; a large cold shard takes minutes
CLAIM_LOOK_S = 0.05
TRIES = 4  # a shard that changes so often while it is looked at is not read
BUILDERS = 2  # threads that read headers and unpack
WORKERS = 4  # threads that read and inflate members
SMALL_BYTES_MAX = 64 * limits.KIB  # up to here a thread costs more than reading and inflating
FAR_WINDOW_BYTES = limits.BLOCK_BYTES  # of a shard that is not here: one request for headers of a block
PIECE_BYTES = limits.MIB
ROOM_WAIT_S = 30.0  # how long unpacking waits for eviction to make room
ROOM_STEP_BYTES = 64 * limits.MIB


class Span(NamedTuple):
    """Where a member is. `record` is the shard's; with `plain` the member lies in its plain form."""

    bucket: str
    key: str
    record: Record
    member: Member
    plain: bool

    @property
    def ranged(self) -> bool:
        """Whether the member is a range of the object itself."""
        return not self.plain and self.member.method == STORED


class Shards:
    """See the module's header. `place` is a name of this node that no other on the machine has."""

    def __init__(
        self,
        reads: Reads,
        store: StoreReader,
        link: Link,
        derived: Derived,
        *,
        place: str,
        clock: clocks.Clock = clocks.system,
    ) -> None:
        self._reads, self._store, self._link, self._derived = reads, store, link, derived
        self._place = place
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], MemberIndex] = OrderedDict()
        self._kept_members = 0
        self._failed: OrderedDict[_Name, tuple[float, ForebayError]] = OrderedDict()
        self._building: dict[_Name, asyncio.Task[MemberIndex]] = {}
        self._unpacking: dict[_Name, asyncio.Task[None]] = {}
        self._builders = threads.pool(BUILDERS, "forebay-shards")
        self._workers = threads.pool(WORKERS, "forebay-members")
        self.builds = 0

    async def aclose(self) -> None:
        """End everything. Call it when the link is stopped: what waits for the engine has failed then."""
        tasks = [*self._building.values(), *self._unpacking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for pool in (self._builders, self._workers):
            await loop.run_in_executor(None, lambda pool=pool: pool.shutdown(cancel_futures=True))  # type: ignore[misc]

    # --- where a member is -------------------------------------------------------------------------------------------
    def known(self, bucket: Bucket, key: str, member: str) -> Span | None:
        """Where the member is, if that can be said without asking anybody. `NotFound` (`NoSuchMember`)."""
        index = self._kept.get((bucket.name, key))
        if index is None:
            return None
        record = self._store.fresh(bucket, key, self._clock.wall_s())
        if record is None or not is_version(record, index.version):
            return None
        self._kept.move_to_end((bucket.name, key))
        return _span(bucket.name, key, record, index, member)

    async def locate(self, bucket: Bucket, key: str, member: str) -> Span:
        """Where the member is. `NotFound` (`NoSuchKey`, `NoSuchMember`), `Corrupt` for what is no shard or was cut,
        `NotSupported` for a member that cannot be read, `Unavailable`."""
        record, index = await self.index(bucket, key)
        return _span(bucket.name, key, record, index, member)

    async def index(self, bucket: Bucket, key: str) -> tuple[Record, MemberIndex]:
        """The shard's record and index, as fresh as the bucket wants. Errors as `locate`."""
        for attempt in range(1, TRIES + 1):
            record = await self._record(bucket, key, revalidate=attempt > 1)
            try:
                return record, await self._index(bucket.name, key, record)
            except Precondition:  # it is another version by now
                if attempt == TRIES:
                    raise
        raise AssertionError("unreachable")

    async def have(self, bucket: Bucket, key: str) -> None:
        """Have the whole shard here, as far as the disks take it, and its index. Errors as `locate`."""
        record, _ = await self.index(bucket, key)
        try:
            await self._fetch(bucket.name, key, record)
        except Precondition:
            pass  # another version by now: whoever asked will see

    async def _record(self, bucket: Bucket, key: str, *, revalidate: bool) -> Record:
        record = None if revalidate else self._store.fresh(bucket, key, self._clock.wall_s())
        if record is not None:
            return record
        read = await self._link.open_read(bucket.name, key, head_only=True, revalidate=revalidate)
        try:
            return (await read.opened()).record
        finally:
            read.close()

    async def _index(self, bucket: str, key: str, record: Record) -> MemberIndex:
        index = self._kept.get((bucket, key))
        if index is not None and is_version(record, index.version):
            self._kept.move_to_end((bucket, key))
            return index
        return await self._joined(self._building, self._find, bucket, key, record)

    async def _joined(
        self,
        tasks: dict[_Name, asyncio.Task[ResultT]],
        work: Callable[[str, str, Record], Coroutine[Any, Any, ResultT]],
        bucket: str,
        key: str,
        record: Record,
    ) -> ResultT:
        """The result of the one task that does `work` for this version of a shard, begun if there is none."""
        name = (bucket, key, record.version)
        self._refuse_failed(name)
        task = tasks.get(name)
        if task is None:
            task = tasks[name] = asyncio.create_task(work(bucket, key, record))
            task.add_done_callback(lambda done: self._ended(tasks, name, done))
        try:
            return await asyncio.shield(task)
        except ForebayError as error:
            raise from_wire(error.to_wire()) from error  # one for each who waits

    def _ended(self, tasks: dict[_Name, asyncio.Task[ResultT]], name: _Name, done: asyncio.Task[ResultT]) -> None:
        del tasks[name]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._remember(name, error)

    def _remember(self, name: _Name, error: BaseException) -> None:
        """What will not be otherwise in a moment need not be tried by each who asks."""
        if isinstance(error, Corrupt | NotSupported | Invalid) or getattr(error, "code", "") == "InsufficientStorage":
            assert isinstance(error, ForebayError), "these are kinds of it"
            self._failed[name] = (self._clock.monotonic_s() + FAILED_KEPT_S, error)
            while len(self._failed) > FAILED_MAX:
                self._failed.popitem(last=False)

    def _refuse_failed(self, name: _Name) -> None:
        failed = self._failed.get(name)
        if failed is not None and self._clock.monotonic_s() < failed[0]:
            raise from_wire(failed[1].to_wire())

    def _keep(self, name: tuple[str, str], index: MemberIndex) -> None:
        old = self._kept.pop(name, None)
        self._kept_members += len(index) - (len(old) if old is not None else 0)
        self._kept[name] = index
        while self._kept_members > MEMBERS_KEPT_MAX and len(self._kept) > 1:
            self._kept_members -= len(self._kept.popitem(last=False)[1])

    # --- from where an index comes -----------------------------------------------------------------------------------
    async def _find(self, bucket: str, key: str, record: Record) -> MemberIndex:
        found = await self._stored(bucket, key, record)
        if found is None:
            async with self._claim("members", bucket, key, record) as alone:
                found = await self._stored(bucket, key, record)
                while found is None and not alone.held:
                    await alone.wait()
                    found = await self._stored(bucket, key, record)
                if found is None:
                    found = await self._build(bucket, key, record)
        self._keep((bucket, key), found)
        return found

    async def _stored(self, bucket: str, key: str, record: Record) -> MemberIndex | None:
        """The index as a derived object. What was made before a flush has the version of before."""
        for version in dict.fromkeys((record.version, own_version(record.object_id))):
            found = self._derived.find("members", bucket, key, version)
            if found is None:
                continue
            try:
                if isinstance(found, bytes):
                    return members.decode(found)
                return await self._in_worker(lambda file=found: members.decode(_whole(file)))  # type: ignore[misc]
            except Corrupt as error:
                log.info("the index of %s/%s is built again: %s", bucket, key, error)
            finally:
                if isinstance(found, LeasedFile):
                    found.release()
        return None

    async def _build(self, bucket: str, key: str, record: Record) -> MemberIndex:
        self.builds += 1
        self._reads.counts.shard_indexes += 1
        began_s = self._clock.monotonic_s()
        form = await self._form(bucket, key, record)
        if form.kind == "tar" or form.packing:
            await self._fetch(bucket, key, record, form)
        if form.packing:
            await self._unpack(bucket, key, record, form)
            index = await self._index_plain(bucket, key, record, form)
        else:
            index = await self._read_index(bucket, key, record, form)
        took_s = self._clock.monotonic_s() - began_s
        log.debug("%s/%s has %d members, found out in %.3f s", bucket, key, len(index), took_s)
        await self._derived.keep("members", bucket, key, record.version, await self._in_worker(index.encode))
        return index

    async def _form(self, bucket: str, key: str, record: Record) -> Form:
        """By its name, else by its first bytes."""
        form = form_of(object_of(bucket, key)[1], None)
        if form is None:
            form = form_of(key, await self._range(bucket, key, record, 0, SNIFF_BYTES))
        assert form is not None, "the first bytes always tell"
        return form

    async def _read_index(self, bucket: str, key: str, record: Record, form: Form) -> MemberIndex:
        async with self._source(bucket, key, record) as source:
            return await self._in_builder(
                lambda: members.build(
                    form.kind,
                    source.read,
                    record.size_bytes,
                    version=record.version,
                    etag=record.etag,
                    window_bytes=65536 if source.here else FAR_WINDOW_BYTES,
                )
            )

    async def _index_plain(self, bucket: str, key: str, record: Record, form: Form) -> MemberIndex:
        plain = self._plain(bucket, key, record)
        if plain is None:
            raise _no_room_for_plain(bucket, key)
        try:
            size_bytes, read = _size(plain), _reader(plain)
            return await self._in_builder(
                lambda: members.build(form.kind, read, size_bytes, version=record.version, etag=record.etag, plain=True)
            )
        finally:
            _release(plain)

    @asynccontextmanager
    async def _claim(self, kind: str, bucket: str, key: str, record: Record) -> AsyncIterator[_Claim]:
        """The right to build something: see the module's header."""
        said = f"{self._place}\0{kind}\0{bucket}\0{key}\0{record.version}"
        claim = _Claim(f"\0forebay-{xxhash.xxh3_128_hexdigest(said.encode('utf-8', 'surrogatepass'))}", self._clock)
        try:
            claim.take()
            yield claim
        finally:
            claim.release()

    # --- the shard's own bytes ---------------------------------------------------------------------------------------
    async def _fetch(self, bucket: str, key: str, record: Record, form: Form | None = None) -> None:
        """Have the whole object here, if a disk takes it. `Precondition` when it is another version by now. `Corrupt`
        as soon as it shows that it is not of that form."""
        found = self._store.of_version(bucket, key, record.version)
        if not record.size_bytes or (found is not None and found.complete):
            return
        async for body, file, offset, length in self._landing(bucket, key, record, 0, record.size_bytes):
            if form is not None:
                head = body[:SNIFF_BYTES] if body is not None else _pread(file, offset, min(length, SNIFF_BYTES))
                members.check_head(form, head, f"{bucket}/{key}")
                form = None

    async def _landing(
        self, bucket: str, key: str, record: Record, start: int, end: int
    ) -> AsyncIterator[tuple[bytes | None, LeasedFile | None, int, int]]:
        """[start, end) of the object through the engine, in order: (bytes, or None and a file with offset and size)."""
        read = await self._link.open_read(bucket, key, RangeSpec(start, end - 1), version=record.version)
        arriving: Arriving | None = None
        try:
            opened = await read.opened()
            check_same(opened, record.version, start, end)
            arriving = Arriving(self._store, self._link, read, opened)
            while arriving.left_bytes:
                piece = await arriving.piece()
                yield piece.body, piece.file, piece.offset, piece.size_bytes
                arriving.took(piece.end)
        finally:
            read.close()
            if arriving is not None:
                arriving.close()

    async def _range(self, bucket: str, key: str, record: Record, start: int, size: int) -> bytes:
        """A small range, from here or through the engine; less where the object ends."""
        end = min(start + size, record.size_bytes)
        if start >= end:
            return b""
        async with self._source(bucket, key, record) as source:
            if source.has(start, end) and end - start <= SMALL_BYTES_MAX:
                return source.read(start, end - start)
            if source.lists(start, end):
                return await self._in_worker(lambda: source.read(start, end - start))
        return await self._range_asked(bucket, key, record, start, end - start)

    @asynccontextmanager
    async def _source(self, bucket: str, key: str, record: Record) -> AsyncIterator[_Source]:
        """The object as worker threads read it."""
        loop = asyncio.get_running_loop()

        def ask(start: int, size: int) -> bytes:
            work = self._range_asked(bucket, key, record, start, size)
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        found = self._store.of_version(bucket, key, record.version)
        inline = record.inline if found is None else found.inline
        file = None
        if inline is None and found is not None:
            file = self._store.acquire(bucket, key, found)
        try:
            yield _Source(record.size_bytes, inline, file, ask)
        finally:
            if file is not None:
                file.release()

    async def _range_asked(self, bucket: str, key: str, record: Record, start: int, size: int) -> bytes:
        pieces = []
        async for body, file, offset, length in self._landing(bucket, key, record, start, start + size):
            pieces.append(body if body is not None else _pread(file, offset, length))
        return b"".join(pieces)

    # --- the plain form ----------------------------------------------------------------------------------------------
    def _plain(self, bucket: str, key: str, record: Record) -> bytes | LeasedFile | None:
        for version in dict.fromkeys((record.version, own_version(record.object_id))):
            found = self._derived.find("plain", bucket, key, version)
            if found is not None:
                return found
        return None

    async def _have_plain(self, span: Span) -> bytes | LeasedFile:
        """The plain form of a shard whose index is known, unpacked again if it was evicted."""
        bucket, key, record = span.bucket, span.key, span.record
        found = self._plain(bucket, key, record)
        if found is None:
            await self._joined(self._unpacking, self._unpack_again, bucket, key, record)
            found = self._plain(bucket, key, record)
        if found is None:
            raise _no_room_for_plain(bucket, key)
        return found

    async def _unpack_again(self, bucket: str, key: str, record: Record) -> None:
        form = await self._form(bucket, key, record)
        async with self._claim("plain", bucket, key, record) as alone:
            while not alone.held and not self._has_plain(bucket, key, record):
                await alone.wait()
            if not self._has_plain(bucket, key, record):
                await self._unpack(bucket, key, record, form)

    def _has_plain(self, bucket: str, key: str, record: Record) -> bool:
        found = self._plain(bucket, key, record)
        _release(found)
        return found is not None

    async def _unpack(self, bucket: str, key: str, record: Record, form: Form) -> None:
        """Make the plain form. `Unavailable` (`InsufficientStorage`) when there is no room for it."""
        if self._has_plain(bucket, key, record):
            return
        await self._fetch(bucket, key, record)
        writer = self._derived.writer("plain", bucket, key, record.version)
        try:
            async with self._source(bucket, key, record) as source:
                await self._in_builder(lambda: _unpack_into(writer, source, form, f"{bucket}/{key}"))
            if not await writer.keep():
                raise _no_room_for_plain(bucket, key)
        except Late as error:
            raise stalled(error.filename, f"unpacking {bucket}/{key}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room_for_plain(bucket, key) from error
            raise Unavailable(f"unpacking {bucket}/{key} failed ({error.strerror}): see `forebay status`") from error
        finally:
            writer.abort()

    # --- reading members ---------------------------------------------------------------------------------------------
    async def read(self, span: Span, start: int, end: int) -> bytes:
        """Bytes [start, end) of a member. For those that fit in memory."""
        pieces = [piece async for piece in self._pieces(span, start, end)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def send(self, exchange: Exchange, span: Span, start: int, end: int) -> None:
        """[start, end) of a member, as pieces of a body that was begun."""
        if span.member.method == STORED:
            first, last = span.member.start + start, span.member.start + end
            if await self._send_file(exchange, span, first, last):
                return
            if span.ranged:
                await self._send_asked(exchange, span, first, last)
                return
        async for piece in self._pieces(span, start, end):
            await exchange.write(piece)

    async def _send_asked(self, exchange: Exchange, span: Span, start: int, end: int) -> None:
        """A range of the shard, as it lands."""
        counts = self._reads.counts
        read = await self._link.open_read(span.bucket, span.key, RangeSpec(start, end - 1), version=span.record.version)
        try:
            opened = await read.opened()
            check_same(opened, span.record.version, start, end)
            if opened.hit:
                counts.hits += 1
                counts.hit_bytes += end - start
            else:
                counts.misses += 1
                counts.miss_bytes += end - start
            await self._reads.stream(exchange, read, opened, start, end)
        finally:
            read.close()

    async def _send_file(self, exchange: Exchange, span: Span, start: int, end: int) -> bool:
        """Plain bytes that are in a file here; False where they are not."""
        file: bytes | LeasedFile | None
        if span.plain:
            file = await self._have_plain(span)
        else:
            found = self._store.of_version(span.bucket, span.key, span.record.version)
            if found is None or found.inline is not None:
                return False
            file = self._store.acquire(span.bucket, span.key, found)
        if not isinstance(file, LeasedFile):
            return False
        try:
            if not file.record.has(start, end):
                return False
            right = span.plain or file.has(start, end)
            if not right and not await asyncio.shield(self._reads.compare(file, span.bucket, span.key, start, end)):
                return False
            block_bytes = file.record.block_bytes
            self._link.touch(file.object_id, start // block_bytes, -(-end // block_bytes))
            await exchange.write_file(file.fd, start, end - start)
            self._reads.counts.hits += 1
            self._reads.counts.hit_bytes += end - start
            return True
        finally:
            file.release()

    async def _pieces(self, span: Span, start: int, end: int) -> AsyncIterator[bytes]:
        member = span.member
        member.check_readable()
        if start >= end:
            return
        if member.method == STORED:
            async for piece in self._stored_pieces(span, member.start + start, member.start + end):
                yield piece
        else:
            async for piece in self._inflated(span, start, end):
                yield piece

    async def _stored_pieces(self, span: Span, start: int, end: int) -> AsyncIterator[bytes]:
        if span.plain:
            plain = await self._have_plain(span)
            try:
                read = _reader(plain)
                for at in range(start, end, PIECE_BYTES):
                    yield await self._in_worker(lambda at=at: _exactly(read, at, min(PIECE_BYTES, end - at)))  # type: ignore[misc]
            finally:
                _release(plain)
            return
        for at in range(start, end, PIECE_BYTES):
            yield await self._range(span.bucket, span.key, span.record, at, min(PIECE_BYTES, end - at))

    async def _inflated(self, span: Span, start: int, end: int) -> AsyncIterator[bytes]:
        """[start, end) of a deflated member. All of it is inflated, so that its checksum can be compared; the last
        piece waits for that."""
        member = span.member
        inflating = _Inflating(member)
        held = b""
        async for packed in self._stored_pieces(span, member.start, member.end):
            left, more = packed, True
            while more:
                if member.size_bytes <= SMALL_BYTES_MAX:
                    data, left, more = inflating.feed(left)
                else:
                    data, left, more = await self._in_worker(lambda left=left: inflating.feed(left))  # type: ignore[misc]
                at = inflating.size_bytes - len(data)
                data = data[max(0, start - at) : max(0, end - at)]
                if data:
                    if held:
                        yield held
                    held = data
        inflating.finish()
        if held:
            yield held

    async def _in_worker(self, work: Callable[[], ResultT]) -> ResultT:
        return await _in_thread(self._workers, work)

    async def _in_builder(self, work: Callable[[], ResultT]) -> ResultT:
        return await _in_thread(self._builders, work)


async def _in_thread(threads: Executor, work: Callable[[], ResultT]) -> ResultT:
    """The result of `work`, done by a thread. It is over when this returns, even if that is by being cancelled: it uses
    descriptors that are closed then."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        future.exception()  # nobody waits for it
        raise


class _Claim:
    """The right to build, between processes. `held`: it is ours, or nobody answers for too long."""

    def __init__(self, name: str, clock: clocks.Clock) -> None:
        self.held = False
        self._name, self._clock = name, clock
        self._until_s = clock.monotonic_s() + CLAIM_WAIT_S
        self._socket: socket.socket | None = None

    def take(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            made.bind(self._name)
        except OSError:
            made.close()
            self.held = self._clock.monotonic_s() >= self._until_s
            return
        self._socket, self.held = made, True

    async def wait(self) -> None:
        """A moment; then try again."""
        await asyncio.sleep(CLAIM_LOOK_S)
        self.take()

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Source:
    """An object as a worker thread reads it: what is here from memory or a leased file, the rest by asking."""

    def __init__(
        self, size_bytes: int, inline: bytes | None, file: LeasedFile | None, ask: Callable[[int, int], bytes]
    ) -> None:
        self.size_bytes = size_bytes
        self._inline, self._file, self._ask = inline, file, ask
        self.here = inline is not None or (file is not None and file.record.complete)

    def has(self, start: int, end: int) -> bool:
        """Whether these bytes can be read at once."""
        return self._inline is not None or (self._file is not None and self._file.has(start, end))

    def lists(self, start: int, end: int) -> bool:
        return self._inline is not None or (self._file is not None and self._file.record.has(start, end))

    def read(self, start: int, size: int) -> bytes:
        """As `core.formats.tar.Read`."""
        end = min(start + size, self.size_bytes)
        if start >= end:
            return b""
        if self._inline is not None:
            return self._inline[start:end]
        if self._file is not None and self.lists(start, end) and self._file.prove(start, end):
            data = os.pread(self._file.fd, end - start, start)
            if len(data) == end - start:
                return data
        return self._ask(start, end - start)


class _Inflating:
    """A deflated member as its bytes come."""

    def __init__(self, member: Member) -> None:
        self.size_bytes = 0
        self._member = member
        self._crc32 = 0
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        if member.size_bytes > limits.MEMBER_INFLATED_BYTES_MAX:
            raise NotSupported(
                f"the member {member.name!r} has {member.size_bytes} bytes when inflated, at most "
                f"{limits.MEMBER_INFLATED_BYTES_MAX} are: store it in the zip without compression"
            )

    def feed(self, packed: bytes) -> tuple[bytes, bytes, bool]:
        """At most PIECE_BYTES of the member, what of `packed` is left, and whether there is more to come of it."""
        try:
            data = self._inflater.decompress(packed, PIECE_BYTES)
        except zlib.error as error:
            raise self._damaged(str(error)) from None
        self._crc32 = zlib.crc32(data, self._crc32)
        self.size_bytes += len(data)
        if self.size_bytes > self._member.size_bytes:
            raise self._damaged("it inflates to more than its size")
        left = self._inflater.unconsumed_tail
        return data, left, bool(left) or len(data) == PIECE_BYTES

    def finish(self) -> None:
        if not self._inflater.eof or self.size_bytes != self._member.size_bytes:
            raise self._damaged(f"it ends after {self.size_bytes} of {self._member.size_bytes} bytes")
        if self._member.crc32 != self._crc32:
            raise self._damaged("its checksum is wrong")

    def _damaged(self, why: str) -> Corrupt:
        return Corrupt(f"the member {self._member.name!r} of the zip is damaged ({why}): write the shard again")


def _span(bucket: str, key: str, record: Record, index: MemberIndex, member: str) -> Span:
    found = index.find(member)
    found.check_readable()
    return Span(bucket, key, record, found, index.plain)


def _unpack_into(writer: DerivedWriter, source: _Source, form: Form, what: str) -> None:
    """In a worker thread: the plain form, bounded by what the disk has."""
    unchecked = ROOM_STEP_BYTES
    writer.write(b"")  # so that there is a file, even if nothing comes
    for piece in unpack(_in_order(source), form.packing, what):
        writer.write(piece)
        unchecked += len(piece)
        if unchecked >= ROOM_STEP_BYTES:
            unchecked = 0
            writer.wait_for_room(ROOM_WAIT_S)
        if writer.size_bytes > limits.PLAIN_RATIO_MAX * source.size_bytes + limits.PLAIN_FREE_BYTES:
            raise NotSupported(
                f"{what} unpacks to more than {limits.PLAIN_RATIO_MAX} times its size: get it whole and unpack it "
                "yourself, if it is what you think"
            )


def _in_order(source: _Source) -> Iterator[bytes]:
    step = PIECE_BYTES if source.here else FAR_WINDOW_BYTES
    for at in range(0, source.size_bytes, step):
        yield source.read(at, step)


def _no_room_for_plain(bucket: str, key: str) -> Unavailable:
    return Unavailable(
        f"{bucket}/{key} must be unpacked to read its members, and there is no room here for its plain form: make room "
        "(`forebay status`), give the node more, or write the shard as a plain tar",
        code="InsufficientStorage",
        retry_after_s=5.0,
    )


def _size(found: bytes | LeasedFile) -> int:
    return len(found) if isinstance(found, bytes) else found.record.size_bytes


def _release(found: bytes | LeasedFile | None) -> None:
    if isinstance(found, LeasedFile):
        found.release()


def _reader(found: bytes | LeasedFile) -> Callable[[int, int], bytes]:
    if isinstance(found, bytes):
        return lambda start, size: found[start : start + size]
    fd = found.fd
    return lambda start, size: os.pread(fd, size, start)


def _exactly(read: Callable[[int, int], bytes], start: int, size: int) -> bytes:
    data = read(start, size)
    if len(data) != size:
        raise Unavailable("the plain form of a shard ended early: read again")
    return data


def _whole(file: LeasedFile) -> bytes:
    return _exactly(_reader(file), 0, file.record.size_bytes)


def _pread(file: LeasedFile | None, offset: int, size: int) -> bytes:
    assert file is not None, "neither bytes nor a file"
    data = os.pread(file.fd, size, offset)
    if len(data) != size:
        raise Unavailable("the file that the bytes landed in ended early: read again")
    return data
