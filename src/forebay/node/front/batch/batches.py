"""`POST /-/v1/batch`: many reads in one request, answered by one ordered stream (core/messages/batch.py).

Theory. First comes a plan (`batch/plan.py`): each item becomes a step. If the engine need not be asked, every size is
known and the answer has a Content-Length. Then the steps are sent in order:

    small hits      read into one buffer beside their headers, which is sent when it is full: no object for each item
    large hits      by sendfile, with what the buffer holds before them
    packed          members of shards that are no range of them: read into memory, or sent, when they are due
    questions       BATCH_COLD_AHEAD of them are with the engine at once, and are taken in order; their bytes go out as
                    they land, so a slow client holds up the engine's windows and nothing here

Sending may take long, so a lease is taken when bytes are read, not when they are planned. The record is then looked up
again, once for each object. If it has changed, the engine is asked (for the version whose size was announced, if one
was). An error before an item's first byte is its frame; a later one cuts the connection.

Bytes that no disk takes lie in the engine's memory, which it promises in the order of asking. So items asked ahead may
hold the memory that the item due waits for. When that item gets nothing for PATIENCE_S, the reads ahead that hold
memory are given up, and asked again when they are due.

Rejected: a sendfile for each small item (two system calls where one and a copy cost no more: measured from 10 to 64
KiB); `pread` and joining (a fresh 10 KiB object for each item costs three times the copy).

Invariants. (1) Frames leave in the order of the items. (2) At most BATCH_COLD_AHEAD + 1 reads of a batch are open, and
all are closed when it ends. (3) A file's bytes are sent only under a lease, and only if the record that was read after
the lease was taken has them. (4) A batch keeps the loop for at most PIECE_BYTES.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from itertools import islice

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Bug, ForebayError, Unavailable
from forebay.core.messages import batch
from forebay.core.messages.batch import FRAME, BatchCall, Item
from forebay.core.messages.wire import Opened
from forebay.core.types import RangeSpec
from forebay.node.front.batch.forms import Form, FrameForm, TarForm
from forebay.node.front.batch.plan import Ask, BatchPlan, Hit, Known, Packed, Sources, changed
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import Exchange, Request, status_of
from forebay.node.front.http.sender import FileFailed
from forebay.node.front.link import Link, Read
from forebay.node.front.objects.reads import Reads
from forebay.node.front.objects.shards import Shards
from forebay.node.store.reader import StoreReader
from forebay.ports import clock as clocks

PIECE_BYTES = 256 * limits.KIB  # gathered for one write: stays in the cache, and is what a socket takes at once
SMALL_BYTES_MAX = 64 * limits.KIB  # up to here a copy costs no more than a second system call
BUFFER_BYTES = PIECE_BYTES + SMALL_BYTES_MAX + FRAME.size
HELD_MAX = 128  # leases (and inline objects read again) that one batch holds at once
PATIENCE_S = 1.0
COMPARED_AHEAD = 32  # hits whose first use they are, at a time

DENIED_NOTED_MAX = 100  # items of a batch that the audit log hears of
_HEADER_BYTES = FRAME.size
log = logging.getLogger("forebay.http")


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
        self.link = link
        self.sources = Sources(reads, store, auth, shards, clock)

    def answer(self, request: Request, exchange: Exchange, identity: Identity) -> None:
        """Answer a request for a batch. `Invalid` for one that is none; what is wrong with an item is in its frame."""
        call = batch.decode_call(request.body, request.header(b"content-type"))
        exchange.spawn(_Answer(self, exchange, call, identity).run())


class _Answer:
    """One batch on its way."""

    def __init__(self, batches: Batches, exchange: Exchange, call: BatchCall, identity: Identity) -> None:
        self._sources, self._link = batches.sources, batches.link
        self._reads, self._store = batches.sources.reads, batches.sources.store
        self._counts = self._reads.counts
        self._exchange = exchange
        self._form: Form = TarForm() if call.format == "tar" else FrameForm()
        self._plan = BatchPlan(batches.sources, identity, self._form, call.items)
        self._total = 0  # bytes of the answer, as far as it is known
        self._sized = False
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._used = 0
        self._held: list[Known] = []
        self._wrong: set[int] = set()  # objects that did not match their checksums: they are asked for
        self._unasked: deque[int] = deque()  # positions
        self._ahead: dict[int, Read | ForebayError] = {}
        self._due: Read | None = None
        self._seen = (0, 0)
        self._gone: ForebayError | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        self._counts.batches += 1
        try:
            await self._plan.make()
            for (bucket, key), error in islice(self._plan.denied.items(), DENIED_NOTED_MAX):
                self._exchange.request.note(bucket, key, error.status, error.code)
            self._total = self._plan.total
            self._counts.batch_failed += self._plan.failed
            self._unasked.extend(self._plan.questions())
            self._sized = self._form.sized and not self._unasked and not self._plan.packed
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

    # --- sending -----------------------------------------------------------------------------------------------------
    async def _send(self) -> None:
        steps, position = self._plan.steps, 0
        while position < len(steps):
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
        steps, buffer, view, used = self._plan.steps, self._buffer, self._view, self._used
        touched, touched_whole = self._link.touched, self._link.touched_whole
        pack, preadv = FRAME.pack_into, os.preadv
        hits = hit_bytes = misses = miss_bytes = 0
        first = position
        for position in range(first, len(steps)):
            step = steps[position]
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
            pack(buffer, used, 200, at.cold, 0, size, whole)
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
            if at.cold:
                misses += 1
                miss_bytes += size
            else:
                hits += 1
                hit_bytes += size
        else:
            position = len(steps)
        self._used = used
        self._count(hits, hit_bytes, misses, miss_bytes)
        if len(touched) >= limits.TOUCHES_MAX or len(touched_whole) >= limits.TOUCHES_MAX:
            self._link.flush()
        return position

    def _count(self, hits: int, hit_bytes: int, misses: int = 0, miss_bytes: int = 0) -> None:
        counts = self._counts
        counts.hits += hits
        counts.hit_bytes += hit_bytes
        counts.misses += misses
        counts.miss_bytes += miss_bytes
        counts.batch_hits += hits
        counts.batch_misses += misses
        counts.batch_bytes += hit_bytes + miss_bytes

    def _count_one(self, size: int, cold: bool) -> None:
        if cold:
            self._count(0, 0, 1, size)
        else:
            self._count(1, size)

    def _ready(self, at: Known, start: int, end: int) -> bool:
        """Whether these bytes of the object can be read now."""
        if at.inline is not None:
            return True
        if at.file is None and not self._open(at):
            return False
        return at.whole or (at.file is not None and at.file.has(start, end))

    def _open(self, at: Known) -> bool:
        """Have the object's bytes at hand, if it is still what was planned."""
        if len(self._held) >= HELD_MAX:
            self._release()
        record = self._store.of_object(at.bucket, at.key, at.object_id)
        if record is None:
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
            at.file, at.whole = file, file.record.complete and file.has(0, record.size_bytes)
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
        step, item = self._plan.steps[position], self._plan.items[position]
        if type(step) is bytes:
            await self._add(step)
        elif type(step) is Packed:
            await self._send_packed(item, step)
        elif type(step) is tuple:
            await self._compare(position)
            if not await self._send_hit(item, *step):
                ask = self._asked_instead(item, step)
                await self._send_asked(item, await self._ask(ask), step[2] - step[1], total=ask.total)
        else:
            await self._ask_ahead()
            asked = self._ahead.pop(position, None)
            assert type(step) is Ask
            await self._send_asked(item, await self._ask(step) if asked is None else asked, total=step.total)

    async def _compare(self, position: int) -> None:
        """Have the hit at `position` compared if it never was, and of those that follow what was never either."""
        waiting = {}
        for step in self._plan.steps[position : position + COMPARED_AHEAD]:
            if type(step) is not tuple:
                continue
            at, start, end, _ = step
            if at.object_id in self._wrong or (at.inline is None and at.file is None and not self._open(at)):
                continue
            file = at.file
            if file is not None and start < end and file.record.has(start, end) and not file.has(start, end):
                waiting[self._reads.compare(file, at.bucket, at.key, start, end)] = at.object_id
        if waiting:
            await asyncio.wait(waiting)
        self._wrong.update(object_id for task, object_id in waiting.items() if not task.result())

    def _asked_instead(self, item: Item, step: Hit) -> Ask:
        """The question for a hit that is not at hand after all."""
        at, start, end, whole = step
        assert at.record is not None, "a hit has a record"
        if item.member:
            return Ask(Item(item.bucket, item.key, start, end), at.record.version, whole)
        return Ask(item, at.record.version if self._sized else "")

    async def _send_packed(self, item: Item, step: Packed) -> None:
        """A member that must be inflated, or is in a plain form. Only a long one can still fail when it has begun."""
        assert self._sources.shards is not None, "its place was found"
        shards, span, size = self._sources.shards, step.span, step.end - step.start
        data = None
        try:
            if size <= limits.MIB:
                data = await shards.read(span, step.start, step.end)
        except ForebayError as error:
            self._counts.batch_failed += 1
            await self._add(self._form.failed(item, error))
            return
        cold = (item.bucket, item.key) in self._plan.brought
        self._count_one(size, cold)
        await self._add(self._form.begin(item, cold, size, span.member.size_bytes, span.record.modified_s))
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
        await self._add(self._form.begin(item, at.cold, size, whole, at.record.modified_s))
        self._count_one(size, at.cold)
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
        try:
            await self._flush()
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
            self._count_one(size, not opened.hit)
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
            raise changed(item)
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
            step = self._plan.steps[position]
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
