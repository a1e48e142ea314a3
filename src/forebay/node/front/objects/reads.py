"""Reading one object: is it a hit, and how does a miss become a response? The one place that decides, for every API.

Theory. The APIs differ in how they name an object and word an error; what a read *is* stands here once. A record makes
a hit if it is fresh (or owned: then it is the truth), verified, and has every requested byte. Then the answer is made
and sent before `serve` returns. Everything else is a conversation with the engine: the engine says what the object is,
the API decides what to answer (conditions, range), and the bytes are sent from the file they land in, as they land.

If a hit's file cannot be read, the engine is told (`Suspect`) and the read goes through it like a miss. If the head was
sent already, the rest of the same version follows from there. If that version is gone, the connection is cut: a client
sees a short body, never a mixed one.

`objects/arriving_bytes.py` reads landing bytes, and handles those that cannot be read.

Invariants. (1) One response holds bytes of one version. (2) A file's bytes are sent only under a lease, and only if the
record that was read *after* the lease was taken has them. (3) A read given to the engine is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from forebay.core.cluster.coding import is_hidden
from forebay.core.errors import ForebayError, Precondition, Unavailable
from forebay.core.messages.calls import ObjectNamed
from forebay.core.messages.wire import Opened, Welcome
from forebay.core.record import Record, blocks_in, split_head
from forebay.core.types import Bucket, RangeSpec, check_bucket_name
from forebay.node.front.http.counts import FrontCounts
from forebay.node.front.http.requests import Exchange, status_of
from forebay.node.front.http.sender import FileFailed
from forebay.node.front.link import Link, Read
from forebay.node.front.objects.arriving_bytes import REOPENS_MAX, Arriving, check_same
from forebay.node.front.objects.relay import Sources
from forebay.node.store.reader import LeasedFile, StoreReader
from forebay.ports import clock as clocks

PREAD_BYTES_MAX = 16 * 1024  # up to here copying the body beside its head is cheaper than a second system call
WINDOW_BLOCKS = 2  # of a large first use: compared before it is sent, and while what is before it is sent


class Answer(NamedTuple):
    """What to answer, decided from the record: `head` is all header lines, `record.head` included where it belongs.
    `start`/`end` is the half-open range of the body; for an answer without one (304), both are 0."""

    status: int
    head: bytes
    start: int
    end: int


class Question(NamedTuple):
    """What a miss asks, should a first use become one."""

    range: RangeSpec | None
    decide: Decide | None
    extra: bytes


class _Comparing:
    """What a held exchange waits for. When the client goes the comparison goes on: a thread uses the file."""

    is_brief = True

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


Decide = Callable[[Record], Answer]  # may raise ForebayError (Precondition, Invalid InvalidRange, …)


def answer_plainly(record: Record, range: RangeSpec | None = None, extra: bytes = b"") -> Answer:
    """The answer to an unconditional GET, which is told no checksums. `Invalid` (`InvalidRange`) for a range outside
    the object."""
    head = record.head
    if head.startswith(b"x-"):
        head = split_head(head)[1]
    if range is None:
        return Answer(200, head + extra, 0, record.size_bytes)
    start, end = range.resolve(record.size_bytes)
    line = b"Content-Range: bytes %d-%d/%d\r\n" % (start, end - 1, record.size_bytes)
    return Answer(206, head + line + extra, start, end)


def whole_blocks(record: Record, start: int, end: int) -> tuple[range, int]:
    """The object's blocks that lie whole in [start, end), and how many it has."""
    block_bytes = record.block_bytes
    stop = -(-end // block_bytes) if end == record.size_bytes else end // block_bytes
    return range(-(-start // block_bytes), stop), blocks_in(record.size_bytes, block_bytes)


class Reads:
    """See the module's header. One for each front."""

    def __init__(
        self,
        store: StoreReader,
        link: Link,
        counts: FrontCounts,
        *,
        clock: clocks.Clock = clocks.system,
        sources: Sources | None = None,
    ) -> None:
        """`sources`: other nodes, where there are any."""
        self.buckets: dict[str, Bucket] = {}
        self.sources = sources
        self._store = store
        self._link = link
        self.counts = counts
        self._clock = clock
        self._comparing: dict[tuple[int, int, int], asyncio.Task[bool]] = {}

    def follow(self, welcome: Welcome) -> None:
        """Take the buckets and volumes that the engine says there are."""
        self.buckets = {bucket.name: bucket for bucket in welcome.buckets}
        self._store.refresh(welcome.volumes)

    def bucket(self, name: str) -> Bucket:
        """The bucket's settings; `Invalid` for what cannot name one.

        A bucket that is not known here is the engine's to find, or to say `NoSuchBucket`: it may have been added a
        moment ago through another front. It comes without a URL, and nothing of it is fresh.
        """
        known = self.buckets.get(name)
        if known is None and not is_hidden(name):  # other nodes name those, and this one may not have heard of it
            check_bucket_name(name)
        return known or Bucket(name, url="", freshness_s=0.0)

    def serve(
        self,
        exchange: Exchange,
        bucket: Bucket,
        key: str,
        range: RangeSpec | None = None,
        decide: Decide | None = None,
        extra: bytes = b"",
    ) -> None:
        """Answer `exchange` with the object, from here if it is a hit, else through the engine.

        Without `decide`: 200 with everything, or 206 with `range`, but no checksums; `extra` header lines are added.
        With it, what it returns is answered (conditions, overrides); `range` is then only what a miss should ask for
        first. HEAD requests are told from GET by the exchange's request and fetch no body. Call it from
        `Handler.handle`, not from a spawned task. Raises what `decide` or a range outside the object raises, when it is
        a hit.
        """
        name = bucket.name
        record = self._store.fresh(bucket, key, self._clock.wall_s())
        if record is not None:
            answer = answer_plainly(record, range, extra) if decide is None else decide(record)
            if self.hit(exchange, name, key, record, answer):
                return
            if self._first_use(exchange, name, key, record, answer, Question(range, decide, extra)):
                return
        exchange.spawn(self._miss(exchange, name, key, range, decide, extra))

    def prestage(self, exchange: Exchange, bucket: Bucket, key: str, range: RangeSpec, decide: Decide) -> None:
        """Answer a HEAD as `serve` does, but first ask the engine to fetch the whole object in the background. This
        takes as long as the engine takes to put it in line; errors of it are not reported."""
        exchange.spawn(self._prestage(exchange, bucket, key, range, decide))

    async def _prestage(self, exchange: Exchange, bucket: Bucket, key: str, range: RangeSpec, decide: Decide) -> None:
        name = bucket.name
        with contextlib.suppress(ForebayError):
            await self._link.call("prestage", ObjectNamed(name, key))
        record = self._store.fresh(bucket, key, self._clock.wall_s())
        if record is None or not self.hit(exchange, name, key, record, decide(record)):
            await self._miss(exchange, name, key, range, decide, b"")

    # --- hits --------------------------------------------------------------------------------------------------------
    def hit(self, exchange: Exchange, bucket: str, key: str, record: Record, answer: Answer) -> bool:
        """Answer from here. False if that is impossible; then nothing was sent. The record is fresh and verified."""
        status, head, start, end = answer
        counts = self.counts
        size = end - start
        request = exchange.request
        if not size or request.method == b"HEAD":
            exchange.respond(status, head, size_bytes=size)
        elif (inline := record.inline) is not None:
            self._link.touched_whole[record.object_id] = None
            exchange.respond(status, head, inline if size == len(inline) else inline[start:end])
        else:
            if not record.has(start, end):
                return False
            file = self._store.acquire(bucket, key, record)
            if file is None:
                return False
            if file.record.object_id != record.object_id or not file.has(start, end):
                file.release()
                return False
            if size > PREAD_BYTES_MAX:
                self._send_file(exchange, bucket, key, file, answer)
                counts.hits += 1
                counts.hit_bytes += size
                return True
            body = self._pread(bucket, key, file, start, size)
            if body is None:
                return False
            block_bytes = record.block_bytes
            self._link.touch(record.object_id, start // block_bytes, (end - 1) // block_bytes + 1)
            exchange.respond(status, head, body)
        counts.hits += 1
        counts.hit_bytes += size
        counts.hit_seconds.add(self._clock.monotonic_s() - request.started_s)
        return True

    def _pread(self, bucket: str, key: str, file: LeasedFile, start: int, size: int) -> bytes | None:
        """A small range of a file; None if it cannot be had whole, and then the engine knows."""
        reason = "the file ends before the object does"
        try:
            body = os.pread(file.fd, size, start)
        except OSError as error:
            body, reason = b"", str(error)
        object_id = file.object_id
        file.release()
        if len(body) == size:
            return body
        self.suspect(bucket, key, object_id, reason)
        return None

    def _send_file(self, exchange: Exchange, bucket: str, key: str, file: LeasedFile, answer: Answer) -> None:
        status, head, start, end = answer
        record = file.record

        def fault(sent_bytes: int) -> None:
            self.suspect(bucket, key, record.object_id, "the file failed or ended while it was sent")
            exchange.spawn(self._rest(exchange, bucket, key, record.version, start + sent_bytes, end))

        block_bytes = record.block_bytes
        self._link.touch(record.object_id, start // block_bytes, (end - 1) // block_bytes + 1)
        exchange.send_file(status, head, file, start, end - start, fault, self.counts.hit_seconds)

    def suspect(self, bucket: str, key: str, object_id: int, reason: str) -> None:
        """The record lists bytes that are not there: let the engine check before the next reader asks."""
        self.counts.suspects += 1
        self._store.dropped([object_id])
        self._link.suspect(bucket, key, object_id, reason)

    # --- first uses ------------------------------------------------------------------------------------------------
    def compare(self, file: LeasedFile, bucket: str, key: str, start: int, end: int) -> asyncio.Task[bool]:
        """Have listed bytes of a file compared, in a thread, once for all who ask meanwhile; False if they are wrong:
        then the engine knows. The file is leased until that is done."""
        block_bytes = file.record.block_bytes
        name = (file.object_id, start // block_bytes, -(-end // block_bytes))
        task = self._comparing.get(name)
        if task is None:
            task = asyncio.create_task(self._compare(file.again(), bucket, key, start, end))
            self._comparing[name] = task
            task.add_done_callback(lambda done: self._comparing.pop(name, None))
        return task

    async def _compare(self, file: LeasedFile, bucket: str, key: str, start: int, end: int) -> bool:
        try:
            right = await asyncio.get_running_loop().run_in_executor(None, file.prove, start, end)
        finally:
            file.release()
        now = None if right else self._store.of_object(bucket, key, file.object_id)
        if now is not None and now.has(start, end):
            self.suspect(bucket, key, file.object_id, "bytes of the file do not match their checksum")
        return right

    def _first_use(
        self, exchange: Exchange, bucket: str, key: str, record: Record, answer: Answer, question: Question
    ) -> bool:
        """Answer a hit whose bytes were never compared here, once they are; False if that is not what it is.

        The exchange is held, not a task of its own: to a client that has said all it will say (its half of the
        connection is closed) a hit stays a hit.
        """
        file = self._store.acquire(bucket, key, record) if answer.end > answer.start and record.inline is None else None
        if file is None:
            return False
        try:
            if file.record.object_id != record.object_id or not file.record.has(answer.start, answer.end):
                return False
            stop = min(answer.end, (answer.start // record.block_bytes + WINDOW_BLOCKS) * record.block_bytes)
            compared = self.compare(file, bucket, key, answer.start, stop)
        finally:
            file.release()

        def compared_all() -> None:
            if compared.result() and stop < answer.end:
                exchange.spawn(self._by_and_by(exchange, bucket, key, record, answer, question))
            elif not compared.result() or not self.hit(exchange, bucket, key, record, answer):
                exchange.spawn(self._miss(exchange, bucket, key, *question))

        waiting = _Comparing()
        exchange.hold(waiting)
        compared.add_done_callback(lambda done: None if waiting.cancelled else exchange.resume(compared_all))
        return True

    async def _by_and_by(
        self, exchange: Exchange, bucket: str, key: str, record: Record, answer: Answer, question: Question
    ) -> None:
        """A large hit: the blocks that come next are compared while those before are sent."""
        status, head, start, end = answer
        file = self._store.acquire(bucket, key, record)
        if file is None or file.record.object_id != record.object_id or not file.record.has(start, end):
            if file is not None:
                file.release()
            await self._miss(exchange, bucket, key, *question)
            return
        begun, window_bytes = False, WINDOW_BLOCKS * record.block_bytes
        position, stop = start, (start // window_bytes + 1) * window_bytes
        self._link.touch(record.object_id, start // record.block_bytes, (end - 1) // record.block_bytes + 1)
        try:
            right = await asyncio.shield(self.compare(file, bucket, key, start, min(stop, end)))
            if right:
                exchange.start(status, head, end - start)
            while right and position < end:
                stop = min(stop, end)
                following = self.compare(file, bucket, key, stop, min(stop + window_bytes, end)) if stop < end else None
                begun = True
                try:
                    await exchange.write_file(file.fd, position, stop - position)
                except FileFailed as error:
                    self.suspect(bucket, key, record.object_id, "the file failed or ended while it was sent")
                    self.counts.hit_bytes += stop - error.left_bytes - position
                    position = stop - error.left_bytes
                    break
                self.counts.hit_bytes += stop - position
                position, stop = stop, stop + window_bytes
                right = following is None or await asyncio.shield(following)
        finally:
            file.release()
        if not begun:  # there may be another version by now
            await self._miss(exchange, bucket, key, *question)
            return
        self.counts.hits += 1
        if position < end:
            await self._rest(exchange, bucket, key, record.version, position, end)
        else:
            await exchange.end()

    # --- misses ------------------------------------------------------------------------------------------------------
    async def _miss(
        self,
        exchange: Exchange,
        bucket: str,
        key: str,
        range: RangeSpec | None,
        decide: Decide | None,
        extra: bytes,
    ) -> None:
        """Ask the engine. While nothing is said, an object whose version is gone before its first byte (it is
        overwritten again and again) is opened anew, and the client's conditions are judged anew."""
        self.counts.reads_waiting += 1
        try:
            opened = 0
            while not await self._answer(exchange, bucket, key, range, decide, extra):
                opened += 1
                if opened == REOPENS_MAX:
                    raise Unavailable(f"{bucket}/{key} is overwritten faster than it can be read: read again")
        except ForebayError as error:
            if status_of(error) >= 500:  # a key that does not exist is an answer
                self.counts.read_errors += 1
            raise
        finally:
            self.counts.reads_waiting -= 1

    async def _answer(
        self,
        exchange: Exchange,
        bucket: str,
        key: str,
        range: RangeSpec | None,
        decide: Decide | None,
        extra: bytes,
    ) -> bool:
        """False: the version that was opened is gone, and nothing is said yet."""
        counts, begun = self.counts, False
        head_only = exchange.request.method == b"HEAD"
        sources = self.sources
        may_relay = sources is not None and sources.has_room and exchange.can_splice and not head_only
        read = await self._link.open_read(bucket, key, range, head_only=head_only, may_relay=may_relay)
        try:
            opened = await read.opened()
            answer = answer_plainly(opened.record, range, extra) if decide is None else decide(opened.record)
            size = answer.end - answer.start
            if opened.hit:
                counts.hits += 1
                counts.hit_bytes += size
            else:
                counts.misses += 1
                counts.miss_bytes += size
            if head_only or not size:
                exchange.respond(answer.status, answer.head, size_bytes=size)
                return True

            def begin() -> None:
                nonlocal begun
                begun = True
                exchange.start(answer.status, answer.head, size)

            try:
                if (answer.start, answer.end) != (opened.start, opened.end):
                    read.close()  # a condition changed what is wanted (If-Range, a part number): the same version, anew
                    read, opened = await self.reopen(bucket, key, opened.record.version, answer.start, answer.end)
                await self.stream(exchange, read, opened, answer.start, answer.end, begin)
            except Precondition:
                if begun:
                    raise
                return False
            await exchange.end()
            return True
        finally:
            read.close()

    async def _rest(self, exchange: Exchange, bucket: str, key: str, version: str, start: int, end: int) -> None:
        """The rest of a response whose head and first bytes are sent: the same version, or nothing."""
        read, opened = await self.reopen(bucket, key, version, start, end)
        try:
            await self.stream(exchange, read, opened, start, end)
            await exchange.end()
        finally:
            read.close()

    async def reopen(self, bucket: str, key: str, version: str, start: int, end: int) -> tuple[Read, Opened]:
        """A read of exactly these bytes of this version. `Precondition` if there is another now."""
        read = await self._link.open_read(bucket, key, RangeSpec(start, end - 1), version=version)
        try:
            opened = await read.opened()
            check_same(opened, version, start, end)
        except BaseException:
            read.close()
            raise
        return read, opened

    async def stream(
        self,
        exchange: Exchange,
        read: Read,
        opened: Opened,
        start: int,
        end: int,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Send [start, end) as it lands, as pieces of the body that was begun, or that `begin` begins once the first
        piece is at hand. What lands in a file was hashed, or compared, by the engine."""
        assert (opened.start, opened.end) == (start, end), "what was opened is what is sent"
        arriving = Arriving(self._store, self._link, read, opened, self.sources)
        try:
            while arriving.left_bytes:
                piece = await arriving.piece()
                if arriving.position == start:
                    self._first_byte(exchange)
                    if begin is not None:
                        begin()
                        begin = None
                end = piece.end
                try:
                    if piece.source is not None:
                        await exchange.write_spliced(piece.source, piece.size_bytes)
                    elif piece.file is not None:
                        await exchange.write_file(piece.file.fd, piece.offset, piece.size_bytes)
                    else:
                        await exchange.write(piece.body or b"")
                except FileFailed as error:
                    if exchange.framing is not None:
                        raise  # what would fill the piece must come from elsewhere
                    end -= error.left_bytes
                    arriving.failed(error.silent)
                arriving.took(end)
            if arriving.as_stored:
                blocks, count = whole_blocks(opened.record, opened.start, opened.end)
                self._store.compared.add(opened.record.object_id, blocks, count)
        finally:
            arriving.close()
            self.counts.reads_resumed += arriving.reopened

    def _first_byte(self, exchange: Exchange) -> None:
        self.counts.miss_first_byte_seconds.add(self._clock.monotonic_s() - exchange.request.started_s)
