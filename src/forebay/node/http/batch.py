"""`POST /-/v1/batch`: many reads in one request, answered by one ordered stream (core/batch.py).

Theory. First a *plan*: each distinct object is looked up once, and each item becomes one of three steps: bytes that are
here (a hit), finished bytes (an error that is known already), or a question to the engine. If nothing must be asked,
every size is known and the answer has a Content-Length. Then the steps are sent in order:

    small hits      read into one buffer beside their headers, which is sent when it is full: no object for each item
    large hits      by sendfile, with what the buffer holds before them
    packed          members of shards that are no range of them: read into memory, or sent, when they are due
    questions       BATCH_COLD_AHEAD of them are with the engine at once, and are taken in order; their bytes go out as
                    they land, so a slow client holds up the engine's windows and nothing here

Where members are is found out first, once for each shard; then most of them are ranges like others, of the version that
their places are true of.

Leases are taken when bytes are read, not when they are planned, since sending may take long: the record is looked up
again then, once for each object, and what is no longer as planned is asked of the engine (for the very version whose
size was announced, if one was). An error before an item's first byte is its frame; one after it cuts the connection.

Bytes that no disk takes lie in the engine's memory, which is promised in the order of asking; what is asked ahead may
so hold what the item that is due waits for. When that one gets nothing for PATIENCE_S, what is ahead and holds memory
is given up, and asked again when it is due.

Rejected: a sendfile for each small item (two system calls where one copy is cheaper, measured up to 64 KiB); `pread`
and joining (a fresh 10 KiB object for each item costs three times the copy).

Invariants. (1) Frames leave in the order of the items. (2) At most BATCH_COLD_AHEAD + 1 reads of a batch are open, and
all are closed when it ends, however. (3) A file's bytes are sent only under a lease, and only if the record that was
read after the lease was taken has them. (4) A batch keeps the loop for at most PIECE_BYTES or LOOKUPS_AT_ONCE look-ups.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque

from forebay.core import batch, limits
from forebay.core.access import Identity
from forebay.core.batch import FRAME, BatchCall, Item
from forebay.core.errors import Bug, ForebayError, NotSupported, Precondition, Unavailable
from forebay.core.members import MemberIndex
from forebay.core.record import Record
from forebay.core.types import Bucket, RangeSpec, check_key
from forebay.core.wire import Opened
from forebay.node.http.auth import Auth
from forebay.node.http.reads import Reads, may_serve
from forebay.node.http.requests import Exchange, Request, status_of
from forebay.node.http.sending import FileFailed
from forebay.node.http.shards import Shards, Span
from forebay.node.http.tar_form import TarForm
from forebay.node.link import Link, Read
from forebay.node.records import is_version
from forebay.node.store.reader import LeasedFile, StoreReader
from forebay.ports import clock as clocks

PIECE_BYTES = 256 * limits.KIB  # gathered for one write: stays in the cache, and is what a socket takes at once
SMALL_BYTES_MAX = 64 * limits.KIB  # up to here a copy is cheaper than a second system call
BUFFER_BYTES = PIECE_BYTES + SMALL_BYTES_MAX + FRAME.size
HELD_MAX = 128  # leases (and inline objects read again) that one batch holds at once
INLINE_BYTES_KEPT_MAX = 16 * limits.MIB  # of small objects between plan and sending; more are looked up again
LOOKUPS_AT_ONCE = 512  # about a millisecond; then others have their turn
PATIENCE_S = 1.0

SHARDS_AT_ONCE = 8  # whose members are found out at once, when nobody knows them yet

_HEADER_BYTES = FRAME.size
log = logging.getLogger("forebay.http")


class Known:
    """One object of a batch, however many items name it. Without a record it must be asked for, or `error` says why
    not."""

    __slots__ = ("bucket", "error", "file", "inline", "key", "members", "object_id", "record", "size", "whole")

    def __init__(self, bucket: str, key: str, record: Record | None, error: ForebayError | None = None) -> None:
        self.bucket, self.key = bucket, key
        self.record = record
        self.error = error
        self.file: LeasedFile | None = None
        self.inline: bytes | None = None
        self.members: MemberIndex | None = None  # set when each of them is a range that is here
        self.whole = False
        self.object_id = self.size = 0
        if record is not None:
            self.inline, self.whole = record.inline, record.complete
            self.object_id, self.size = record.object_id, record.size_bytes


class Ask:
    """A question to the engine. `version`: only that, whose size was announced. `total`: the size of the member that
    the range is of; None for an object's, which the answer says."""

    __slots__ = ("item", "total", "version")

    def __init__(self, item: Item, version: str = "", total: int | None = None) -> None:
        self.item = item
        self.version = version
        self.total = total


class Packed:
    """[start, end) of a member that is no range of its shard."""

    __slots__ = ("end", "span", "start")

    def __init__(self, span: Span, start: int, end: int) -> None:
        self.span, self.start, self.end = span, start, end


Hit = tuple[Known, int, int, int]  # the object, the half-open range of it, and the size of the whole (or of a member)
Step = Hit | bytes | Ask | Packed
Shard = tuple[Record, MemberIndex]


class FrameForm:
    """How items are told apart: by the frames of core/batch.py."""

    head = b"Content-Type: %b\r\n" % batch.MEDIA.encode()
    sized = True  # the length of the answer follows from the items' sizes
    end = b""

    def begin(self, item: Item, flags: int, size: int, total: int, modified_s: float) -> bytes:
        """What goes before the bytes of an item."""
        return FRAME.pack(200, flags, 0, size, total)

    def after(self, size: int) -> bytes:
        """What goes after them."""
        return b""

    def failed(self, item: Item, error: ForebayError) -> bytes:
        """What stands for an item that cannot be had."""
        return batch.failed_frame(error, status_of(error))


Form = FrameForm | TarForm


class Batches:
    """The batches of one front."""

    def __init__(
        self,
        reads: Reads,
        store: StoreReader,
        link: Link,
        auth: Auth,
        *,
        shards: Shards | None = None,
        clock: clocks.Clock = clocks.system,
    ) -> None:
        self.shards = shards
        self.reads = reads
        self.store = store
        self.link = link
        self.auth = auth
        self.clock = clock

    def answer(self, request: Request, exchange: Exchange, identity: Identity) -> None:
        """Answer a request for a batch. `Invalid` for one that is none; what is wrong with an item is in its frame."""
        call = batch.decode_call(request.body, request.header(b"content-type"))
        exchange.spawn(_Answer(self, exchange, call, identity).run())


class _Answer:
    """One batch on its way."""

    def __init__(self, batches: Batches, exchange: Exchange, call: BatchCall, identity: Identity) -> None:
        self._batches = batches
        self._reads, self._store, self._link = batches.reads, batches.store, batches.link
        self._counts = batches.reads.counts
        self._exchange = exchange
        self._items = call.items
        self._form: Form = TarForm() if call.format == "tar" else FrameForm()
        self._identity = identity
        self._buckets: dict[str, Bucket | ForebayError] = {}
        self._plan: list[Step] = []
        self._shards: dict[tuple[str, str], Shard | ForebayError] = {}
        self._packed = False
        self._total = 0  # bytes of the answer, as far as it is known
        self._sized = False
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._used = 0
        self._held: list[Known] = []
        self._unasked: deque[int] = deque()  # positions
        self._ahead: dict[int, Read | ForebayError] = {}
        self._due: Read | None = None
        self._seen = (0, 0)
        self._gone: ForebayError | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        self._counts.batches += 1
        try:
            if any(item.member for item in self._items):
                await self._find_shards()
            await self._make_plan()
            self._unasked.extend(at for at, step in enumerate(self._plan) if type(step) is Ask)
            self._sized = self._form.sized and not self._unasked and not self._packed
            self._exchange.start(200, self._form.head, self._total if self._sized else None)
            if self._unasked:
                self._look_after()
                await self._ask_ahead()
            await self._send()
            await self._exchange.end()
        except ForebayError as error:
            # Even if nothing was sent: what was begun cannot be said otherwise, and whoever asked asks again. What is
            # on its way may arrive, since whole frames are of use.
            log.info("a batch was cut: %s", error)
            self._exchange.cut(orderly=True)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._release()
        for asked in self._ahead.values():
            self._close(asked)
        self._ahead.clear()

    # --- the plan ----------------------------------------------------------------------------------------------------
    async def _find_shards(self) -> None:
        """Where the members of all shards are that are named, several shards at a time."""
        names = dict.fromkeys((item.bucket, item.key) for item in self._items if item.member)
        turns = asyncio.Semaphore(SHARDS_AT_ONCE)

        async def find(name: tuple[str, str]) -> None:
            try:
                async with turns:
                    if self._batches.shards is None:
                        raise NotSupported("members of shards are not served here: ask the node itself")
                    self._shards[name] = await self._batches.shards.index(self._bucket(name[0]), check_key(name[1]))
            except ForebayError as error:
                self._shards[name] = error

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(find(name))

    async def _make_plan(self) -> None:
        known: dict[tuple[str, str], Known] = {}
        plan, room = self._plan, limits.BATCH_BYTES_MAX
        inline_left = INLINE_BYTES_KEPT_MAX
        total = 0
        for item in self._items:
            name = (item.bucket, item.key)
            at = known.get(name)
            if at is None:
                at = known[name] = self._look_up(*name)
                if at.inline is not None:
                    inline_left -= at.size
                    if inline_left < 0 and at.record is not None:
                        at.inline = at.record.inline = None
                self._use_members(at)
            size = at.size
            start, end = item.start, item.end
            if end is None or end > size:
                end = size
            if item.member:
                step = self._member_here(item, at) or self._uncommon(item, at)
            elif at.record is None or item.etag or not 0 <= start < end:
                step = self._uncommon(item, at)
            elif at.whole or at.record.has(start, end):
                step = (at, start, end, size)
            else:
                step = Ask(item)
            if type(step) is tuple:
                length = _HEADER_BYTES + step[2] - step[1]
            elif type(step) is Packed:
                length = _HEADER_BYTES + step.end - step.start
                self._packed = True
            if type(step) in (tuple, Packed) and total + length > room:
                step = self._form.failed(item, batch.full(length))
            if type(step) is bytes:
                self._counts.batch_failed += 1
                length = len(step)
            elif type(step) is Ask:
                length = 0
            total += length
            plan.append(step)
            if not len(plan) % LOOKUPS_AT_ONCE:
                await asyncio.sleep(0)
        self._total = total

    def _uncommon(self, item: Item, at: Known) -> Step:
        """The step for an item that is no plain range of a hit."""
        end = item.end
        try:
            if at.error is not None:
                raise at.error
            if item.member:
                return self._member(item, at)
            record = at.record
            if record is None:
                if item.start < 0 or (end is not None and end <= item.start) or item.start > limits.OBJECT_BYTES_MAX:
                    raise batch.outside(item.start, end, None)
                return Ask(item)
            if item.etag and item.etag != record.etag:
                raise _changed(item)
            size = record.size_bytes
            stop = size if end is None or end > size else end
            if item.start < 0 or (item.start >= stop and not (end is None and size == item.start == 0)):
                raise batch.outside(item.start, end, size)
            return (at, item.start, stop, size) if record.has(item.start, stop) else Ask(item)
        except ForebayError as error:
            return self._form.failed(item, error)

    def _use_members(self, at: Known) -> None:
        """Let members of a shard that is here, and of the version whose members are known, be found at once."""
        found = self._shards.get((at.bucket, at.key))
        if found is None or isinstance(found, ForebayError) or at.record is None:
            return
        if at.whole and found[1].ranged and is_version(at.record, found[1].version):
            at.members = found[1]

    def _member_here(self, item: Item, at: Known) -> Hit | None:
        """The step for a member that is here; None where that takes more to say."""
        place = at.members.place(item.member) if at.members is not None else None
        if place is None or item.etag:
            return None
        offset, size = place
        start, end = item.start, item.end
        if end is None or end > size:
            end = size
        return (at, offset + start, offset + end, size) if 0 <= start < end else None

    def _member(self, item: Item, at: Known) -> Step:
        """The step for a member: of the version that its place is true of."""
        found = self._shards[item.bucket, item.key]
        if isinstance(found, ForebayError):
            raise found
        shard, index = found
        if item.etag and item.etag != shard.etag:
            raise _changed(item)
        member = index.find(item.member)
        member.check_readable()
        size, start = member.size_bytes, item.start
        stop = size if item.end is None or item.end > size else item.end
        if start < 0 or (start >= stop and not (item.end is None and size == start == 0)):
            raise batch.outside(start, item.end, size)
        span = Span(item.bucket, item.key, shard, member, index.plain)
        if not span.ranged:
            return Packed(span, start, stop)
        first, last = member.start + start, member.start + stop
        record = at.record
        if record is not None and is_version(record, index.version) and record.has(first, last):
            return (at, first, last, size)
        if first == last:
            return Packed(span, start, stop)
        return Ask(Item(item.bucket, item.key, first, last), shard.version, size)

    def _look_up(self, name: str, key: str) -> Known:
        """What is here of an object that the caller may read."""
        try:
            bucket = self._bucket(name)
            check_key(key)
        except ForebayError as error:
            return Known(name, key, None, error)
        record = self._store.lookup(name, key)
        if record is None or not may_serve(record, bucket, self._batches.clock.wall_s()):
            return Known(name, key, None)
        return Known(name, key, record)

    def _bucket(self, name: str) -> Bucket:
        found = self._buckets.get(name)
        if found is None:
            try:
                found = self._reads.bucket(name)
                self._batches.auth.require_read(self._identity, found)
            except ForebayError as error:
                found = error
            self._buckets[name] = found
        if isinstance(found, ForebayError):
            raise found
        return found

    # --- sending -----------------------------------------------------------------------------------------------------
    async def _send(self) -> None:
        plan, position = self._plan, 0
        while position < len(plan):
            before = position
            position = self._fill(position)
            if position == before:
                await self._slow(position)
                position += 1
            else:
                await self._flush()
                await asyncio.sleep(0)
        await self._add(self._form.end)
        await self._flush()

    def _fill(self, position: int) -> int:
        """Put steps into the buffer as long as they fit and are at hand; the position of the first that did not."""
        if not self._form.sized:
            return position
        plan, buffer, view, used = self._plan, self._buffer, self._view, self._used
        touched, touched_whole = self._link.touched, self._link.touched_whole
        pack, preadv = FRAME.pack_into, os.preadv
        hits = hit_bytes = 0
        first = position
        for position in range(first, len(plan)):
            step = plan[position]
            if type(step) is not tuple:
                if type(step) is bytes and used + len(step) <= BUFFER_BYTES:
                    buffer[used : used + len(step)] = step
                    used += len(step)
                    continue
                break
            at, start, end, whole = step
            size = end - start
            body_at = used + _HEADER_BYTES
            stop = body_at + size
            if size > SMALL_BYTES_MAX or stop > BUFFER_BYTES or not self._ready(at, start, end):
                break
            pack(buffer, used, 200, 0, 0, size, whole)
            if at.file is None:
                inline = at.inline
                assert inline is not None, "ready without bytes"
                buffer[body_at:stop] = inline if size == len(inline) else inline[start:end]
                touched_whole[at.object_id] = None
            else:
                try:
                    if preadv(at.file.fd, (view[body_at:stop],), start) != size:
                        break
                except OSError:
                    break
                block_bytes = at.file.record.block_bytes
                touched[at.object_id, start // block_bytes, (end - 1) // block_bytes + 1] = None
            used = stop
            hits += 1
            hit_bytes += size
        else:
            position = len(plan)
        self._used = used
        self._count_hits(hits, hit_bytes)
        if len(touched) >= limits.TOUCHES_MAX or len(touched_whole) >= limits.TOUCHES_MAX:
            self._link.flush()
        return position

    def _count_hits(self, hits: int, hit_bytes: int) -> None:
        counts = self._counts
        counts.hits += hits
        counts.hit_bytes += hit_bytes
        counts.batch_hits += hits
        counts.batch_bytes += hit_bytes

    def _ready(self, at: Known, start: int, end: int) -> bool:
        """Whether these bytes of the object can be read now."""
        if at.inline is not None:
            return True
        if at.file is None and not self._open(at):
            return False
        return at.whole or (at.file is not None and at.file.record.has(start, end))

    def _open(self, at: Known) -> bool:
        """Have the object's bytes at hand, if it is still what was planned."""
        if len(self._held) >= HELD_MAX:
            self._release()
        record = self._store.lookup(at.bucket, at.key)
        if record is None or record.object_id != at.object_id:
            return False
        if record.inline is not None:
            at.inline = record.inline
        else:
            file = self._store.acquire(at.bucket, at.key, record)
            if file is None:
                return False
            if file.record.object_id != at.object_id:
                file.release()
                return False
            at.file, at.whole = file, file.record.complete
        self._held.append(at)
        return True

    def _release(self) -> None:
        for at in self._held:
            at.inline = None
            if at.file is not None:
                at.file.release()
                at.file = None
        self._held.clear()

    async def _add(self, data: bytes) -> None:
        """Put finished bytes into the buffer."""
        if self._used + len(data) > BUFFER_BYTES:
            await self._flush()
        if len(data) > BUFFER_BYTES:
            await self._exchange.write(data)
        else:
            self._buffer[self._used : self._used + len(data)] = data
            self._used += len(data)

    async def _flush(self) -> None:
        """Send what the buffer holds."""
        used, self._used = self._used, 0
        if used:
            await self._exchange.write(self._view[:used])

    # --- steps that wait ---------------------------------------------------------------------------------------------
    async def _slow(self, position: int) -> None:
        """One step that does not go into the buffer as it is."""
        step, item = self._plan[position], self._items[position]
        if type(step) is bytes:
            await self._add(step)
        elif type(step) is Packed:
            await self._send_packed(item, step)
        elif type(step) is tuple:
            if not await self._send_hit(item, *step):
                ask = self._asked_instead(item, step)
                await self._send_asked(item, await self._ask(ask), step[2] - step[1], total=ask.total)
        else:
            await self._ask_ahead()
            asked = self._ahead.pop(position, None)
            assert type(step) is Ask
            await self._send_asked(item, await self._ask(step) if asked is None else asked, total=step.total)

    def _asked_instead(self, item: Item, step: Hit) -> Ask:
        """The question for a hit that is not at hand after all."""
        at, start, end, whole = step
        assert at.record is not None, "a hit has a record"
        if item.member:
            return Ask(Item(item.bucket, item.key, start, end), at.record.version, whole)
        return Ask(item, at.record.version if self._sized else "")

    async def _send_packed(self, item: Item, step: Packed) -> None:
        """A member that must be inflated, or is in a plain form. Only a long one can still fail when it has begun."""
        assert self._batches.shards is not None, "its place was found"
        shards, span, size = self._batches.shards, step.span, step.end - step.start
        data = None
        try:
            if size <= limits.MIB:
                data = await shards.read(span, step.start, step.end)
        except ForebayError as error:
            self._counts.batch_failed += 1
            await self._add(self._form.failed(item, error))
            return
        self._count_hits(1, size)
        await self._add(self._form.begin(item, 0, size, span.member.size_bytes, span.record.modified_s))
        if data is not None:
            await self._add(data)
        else:
            await self._flush()
            await shards.send(self._exchange, span, step.start, step.end)
        await self._add(self._form.after(size))

    async def _send_hit(self, item: Item, at: Known, start: int, end: int, whole: int) -> bool:
        """A hit of any size, in any form. False if its bytes are not at hand after all."""
        if self._used + limits.KIB > BUFFER_BYTES:
            await self._flush()
        size = end - start
        small = b""
        if not self._ready(at, start, end):
            return False
        assert at.record is not None
        if size <= SMALL_BYTES_MAX:
            read = at.inline[start:end] if at.inline is not None else self._pread(at, start, size)
            if read is None:
                return False
            small = read
        await self._add(self._form.begin(item, 0, size, whole, at.record.modified_s))
        self._count_hits(1, size)
        if small or not size:
            await self._add(small)
        else:
            assert at.file is not None, "what is inline is small"
            block_bytes = at.file.record.block_bytes
            self._link.touch(at.object_id, start // block_bytes, (end - 1) // block_bytes + 1)
            used, self._used = self._used, 0
            try:
                await self._exchange.write_file(at.file.fd, start, size, self._view[:used])
            except FileFailed as error:
                self._reads.suspect(at.bucket, at.key, at.object_id, error.message)
                if not self._sized:
                    raise  # the chunk is announced, and what would fill it must come from elsewhere
                await self._send_rest(at, end - error.left_bytes, end)
        await self._add(self._form.after(size))
        return True

    async def _send_rest(self, at: Known, start: int, end: int) -> None:
        """The rest of a hit whose file failed: the same version, or nothing."""
        assert at.record is not None
        read, opened = await self._reads.reopen(at.bucket, at.key, at.record.version, start, end)
        try:
            await self._reads.stream(self._exchange, read, opened, start, end)
        finally:
            read.close()

    def _pread(self, at: Known, start: int, size: int) -> bytes | None:
        """A few bytes of a leased file; None if they cannot be had whole, and then the engine knows."""
        assert at.file is not None
        reason = "the file ends before the object does"
        try:
            body = os.pread(at.file.fd, size, start)
        except OSError as error:
            body, reason = b"", str(error)
        if len(body) == size:
            return body
        self._reads.suspect(at.bucket, at.key, at.object_id, reason)
        return None

    async def _send_asked(
        self, item: Item, asked: Read | ForebayError, announced: int | None = None, *, total: int | None = None
    ) -> None:
        """What the engine says of an item: its bytes as they land, or its error. `announced`: a size that was; `total`:
        the size of the member that it is of."""
        counts = self._counts
        await self._flush()
        try:
            try:
                if isinstance(asked, ForebayError):
                    raise asked
                self._due = asked
                opened = await asked.opened()
                size = self._judge(item, opened)
            except ForebayError as error:
                counts.batch_failed += 1
                counts.read_errors += status_of(error) >= 500
                if self._sized:
                    raise
                await self._add(self._form.failed(item, error))
                return
            if self._sized and size != announced:
                raise Bug(f"{size} bytes where {announced} were announced: please report it")
            if opened.hit:
                self._count_hits(1, size)
            else:
                counts.misses += 1
                counts.miss_bytes += size
                counts.batch_misses += 1
                counts.batch_bytes += size
            record = opened.record
            flags = 0 if opened.hit else batch.COLD
            whole = record.size_bytes if total is None else total
            await self._add(self._form.begin(item, flags, size, whole, record.modified_s))
            if size:
                await self._flush()
                await self._reads.stream(self._exchange, asked, opened, opened.start, opened.end)
            await self._add(self._form.after(size))
        finally:
            self._due = None
            self._close(asked)

    def _judge(self, item: Item, opened: Opened) -> int:
        """The size of what was opened, if it is what the item wants and there is room for it."""
        size = opened.end - opened.start
        if item.etag and item.etag != opened.record.etag:
            raise _changed(item)
        if not self._sized:
            if self._total + _HEADER_BYTES + size > limits.BATCH_BYTES_MAX:
                raise batch.full(size)
            self._total += _HEADER_BYTES + size
        return size

    # --- the engine --------------------------------------------------------------------------------------------------
    async def _ask_ahead(self) -> None:
        """Have the next questions with the engine."""
        while self._unasked and len(self._ahead) < limits.BATCH_COLD_AHEAD:
            position = self._unasked.popleft()
            step = self._plan[position]
            assert type(step) is Ask
            self._ahead[position] = await self._ask(step)

    async def _ask(self, ask: Ask) -> Read | ForebayError:
        """Begin a read. Without an engine the first to ask waits for one; who comes after it need not."""
        item = ask.item
        wanted: RangeSpec | None = None
        if item.start or item.end is not None:
            last = None if item.end is None else min(item.end, limits.OBJECT_BYTES_MAX) - 1
            wanted = RangeSpec(item.start, last)
        if self._gone is not None and not self._link.connected:
            return self._gone
        try:
            read = await self._link.open_read(item.bucket, item.key, wanted, version=ask.version)
        except Unavailable as error:
            self._gone = error
            return error
        self._counts.reads_waiting += 1
        return read

    def _close(self, asked: Read | ForebayError) -> None:
        if isinstance(asked, Read) and not asked.closed:
            asked.close()
            self._counts.reads_waiting -= 1

    def _look_after(self) -> None:
        """Now and then: does what is ahead keep what is due from its memory?"""
        due = self._due
        if due is not None and due.waits:
            if self._seen == (due.number, due.taken):
                for position, asked in list(self._ahead.items()):
                    if isinstance(asked, Read) and asked.holds_memory:
                        self._close(asked)
                        del self._ahead[position]
            self._seen = (due.number, due.taken)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._look_after)


def _changed(item: Item) -> Precondition:
    return Precondition(
        f"{item.bucket}/{item.key} is not the version {item.etag!r} any more: read its current state, and decide anew",
        code="PreconditionFailed",
    )
