"""Writing at the engine: put and delete, as each bucket's write mode requires.

Theory. A write is a short section under its key's lock: judge the conditions against what a read would show now, do
what the bucket's mode says, and make the outcome visible to every front before the answer.

    through        the backend first (`node/engine/write/through_bodies.py`), then a clean record: whole, verified,
                   confirmed now; the earlier version is unconfirmed from before the backend is asked
                   (`core/machines/opening.py`)
    back, local    a dirty or local record (or a tombstone), durable as the bucket says, in a group commit

A write through that finds no room on a volume still succeeds: the backend has it, and the node forgets what it had. If
the backend's answer is lost, nobody knows whether the write happened; then the cached version counts as unconfirmed.

A small write that waits only for its commit (`begin`) is the same section without a task: lock, judgement and change in
one turn of the loop, and the rest when the commit ends. This saves most of the cost of many small writers.

A section runs in a task of its own to its end: the front that asked may die in the middle, and the key's lock is held
until the key is in order. Sections are counted for each bucket, so that a bucket can be changed or removed while no
write is half-way (`quiet`).

A write that replaces an owned object inherits that object's base version (`disk/notes.py`). One that replaces a clean
object is based on its version. One that replaces nothing known here is based on any version ("last writer wins", as in
S3).

Rejected: judging conditions in the front (another front's write may come between); taking the lock while the body
arrives (one slow client would stop all writers of the key).

Invariants. (1) A key has at most one section at a time. (2) A write is answered after it is visible, and durable if the
bucket says so. (3) A temp file that was handed over is gone when the write ends: it became the object, or is removed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import msgspec
import xxhash

from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.cluster.coding import ETAG_HEADER, SLICES, whose_entries
from forebay.core.errors import (
    Busy,
    Closed,
    Denied,
    ForebayError,
    Invalid,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
)
from forebay.core.machines import sent_bodies
from forebay.core.machines.opening import MISSED
from forebay.core.messages.calls import DeleteCall, Nothing, PutCall, Written
from forebay.core.record import PINNED, Record, State, blocks_in, info_of, is_pinned, own_version, present_blocks
from forebay.core.s3rules.conditions import Conditions
from forebay.core.s3rules.keeping import keeping_among, kept_as
from forebay.core.s3rules.tags import with_tags
from forebay.core.types import Bucket, Headers, ObjectInfo, check_key
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.disk_wait import by_disk
from forebay.node.engine.evictions import Room
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.write.commits import Commits
from forebay.node.engine.write.locks import KeyLocks
from forebay.node.engine.write.seams import Owes, Replicas
from forebay.node.engine.write.through_bodies import Through
from forebay.node.store.disk.notes import Note, Owed, digest_of, succeeding
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.writer.puts import Change, Delete, Put
from forebay.node.store.writer.remembered_volumes import KnownVolumes
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.writes")
ResultT = TypeVar("ResultT")
Send = Callable[[str | None], Coroutine[Any, Any, ObjectInfo]]  # makes the object at the backend, on this condition

QUIET_WAIT_S = 10.0  # how long a change of a bucket waits for its writes to end
_DIRTY, _LOCAL = int(State.DIRTY), int(State.LOCAL)
PRESYNC_BYTES_MIN = limits.MIB  # from this size on a file is synced before its change is queued


class Writes:
    """See the module's header. `flush` makes changes of the index visible now."""

    def __init__(
        self,
        store: Store,
        buckets: Buckets,
        cold: ColdReads,
        room: Room,
        owes: Owes,
        clock: Clock,
        workers: Executor,
        *,
        through: Through,
        flush: Callable[[], None],
        known: KnownVolumes | None = None,
        member: Callable[[], int] = lambda: 0,
        lost: Callable[[int], str] = lambda lease: "",
    ) -> None:
        self.locks = KeyLocks()
        self.moved_on: Callable[[str, str], None] = lambda bucket, key: None  # called for each new version and delete
        self.commits = Commits(store, published=self._published, flush=flush)
        self.through = through
        self.replicas: Replicas | None = None  # None: no other node keeps anything for this one
        self._store = store
        self._buckets = buckets
        self._cold = cold
        self._room = room
        self._owes = owes
        self._clock = clock
        self._workers = workers
        self._known = known
        self._member = member  # the lease under which what no backend has may be acknowledged; 0 for a node alone
        self._lost = lost  # why what began under it may not be; "" if it may
        self._closed = False
        self._sections: set[asyncio.Task[Any]] = set()
        self._entered: Counter[str] = Counter()
        self._quiet: dict[str, asyncio.Event] = {}
        self._left: dict[str, asyncio.Event] = {}
        self.closing: set[str] = set()  # buckets that take no writes, so that what they owe comes to an end

    # --- sections ----------------------------------------------------------------------------------------------------
    def lock(self, bucket: str, key: str) -> AbstractAsyncContextManager[None]:
        """Hold the key: no other write, no end of a flush."""
        return self.locks.lock(bucket, key)

    async def finish(self, section: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `section` to its end, even if its caller goes away."""
        if self._closed:
            section.close()
            raise Closed("the node is stopping: write it again in a moment")
        task = asyncio.create_task(section)
        self._sections.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def finish_again(self, section: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """As `finish`; while who acts on the key changes, and nothing was done, `section` is begun again."""
        return await self.finish(self._buckets.again(section))

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._sections.discard(task)
        if not task.cancelled():
            task.exception()  # mark it retrieved: the waiter has it, if there is one

    @asynccontextmanager
    async def entered(self, bucket: str, key: str, *, answers: bool = True) -> AsyncIterator[Served]:
        """Spans a write of this key, whose bucket's settings stay the same meanwhile. If another node acts on the key,
        that stands in the backend's place, and the write goes through to it. `NotFound` if there is no such bucket;
        `Unavailable` if somebody hears of it, no backend does, and the node may not `answer` for it. At the end it may
        have happened all the same."""
        while bucket in self._quiet:
            await self._quiet[bucket].wait()
        if answers and bucket in self.closing:
            raise Busy(
                f"the cluster has changed or deleted bucket {bucket}, and this node first flushes what it has of it: "
                "try again, `forebay status` says when",
                retry_after_s=5.0,
            )
        self._entered[bucket] += 1
        try:
            served = await (self._buckets.acting(bucket, key) if answers else self._buckets.get(bucket))
            if not answers or served.bucket.write == "through" or bucket == SLICES:
                yield served
                return
            lease, homes = self._member(), self._buckets.homes
            with nullcontext() if homes is None else homes.acts(bucket, key):
                yield served
            self._check_lease(lease)
        finally:
            self._leave(bucket)

    def _check_lease(self, lease: int) -> None:
        """Whether the node was allowed to act ever since it had this lease."""
        if why := self._lost(lease):
            raise Unavailable(f"{why}. It may have been written: look before you write it again")

    def _leave(self, bucket: str) -> None:
        self._entered[bucket] -= 1
        if not self._entered[bucket]:
            del self._entered[bucket]
            if bucket in self._left:
                self._left[bucket].set()

    @asynccontextmanager
    async def keeping(self, bucket: str, key: str) -> AsyncIterator[None]:
        """Spans a change to what is kept for another node, or taken over from one: under the key's lock, and judged by
        nobody's conditions."""
        self._entered[bucket] += 1
        try:
            await self.remember(bucket, key)
            async with self.lock(bucket, key):
                yield
        finally:
            self._leave(bucket)

    @asynccontextmanager
    async def quiet(self, bucket: str) -> AsyncIterator[None]:
        """Inside, no write of the bucket is half-way: those under way have ended, others wait. `Busy` after
        QUIET_WAIT_S."""
        while bucket in self._quiet:
            await self._quiet[bucket].wait()
        self._quiet[bucket] = over = asyncio.Event()
        try:
            if self._entered[bucket]:
                self._left[bucket] = left = asyncio.Event()
                try:
                    async with asyncio.timeout(QUIET_WAIT_S):
                        await left.wait()
                except TimeoutError:
                    raise Busy(
                        f"writes to {bucket} are under way: try again when they are done", retry_after_s=5.0
                    ) from None
            yield
        finally:
            self._left.pop(bucket, None)
            del self._quiet[bucket]
            over.set()

    # --- what a key is now -------------------------------------------------------------------------------------------
    async def current(self, served: Served, key: str, *, revalidate: bool = False) -> ObjectInfo | None:
        """What a read would show now: the owed object, the cached one if it is fresh, or the backend's. None if there
        is none."""
        try:
            record = await self._cold.metadata(Ask(served.bucket.name, key, revalidate=revalidate), served)
        except NotFound:
            return None
        return info_of(record, key)

    async def check(
        self,
        served: Served,
        key: str,
        if_match: str | None,
        if_none_match: str | None,
        fits: Callable[[ObjectInfo], bool] | None = None,
    ) -> ObjectInfo | None:
        """Judge a write's conditions; return the object's metadata. `Precondition` (`PreconditionFailed`) if they fail
        or `fits` returns false. `NotFound` for If-Match or `fits` without an object. A refusal never rests on a cached
        answer alone."""
        info = await self.current(served, key)
        if _holds(info, if_match, if_none_match, fits):
            return info
        info = await self.current(served, key, revalidate=True)
        if _holds(info, if_match, if_none_match, fits):
            return info
        if info is None:
            raise NotFound(f"there is no object {key!r} that the condition could mean: leave it out", code="NoSuchKey")
        raise Precondition(
            f"{key!r} does not meet the condition (its ETag is {info.etag!r}): read it again, then decide",
            code="PreconditionFailed",
        )

    async def expected(self, served: Served, key: str, if_match: str | None, if_none_match: str | None) -> str | None:
        """What the backend must have if a write's conditions hold: a version, "" for none, None for any. Errors as
        `check`."""
        if if_match is None and if_none_match is None:
            return None
        judged = await self.check(served, key, if_match, if_none_match)
        return "" if judged is None else judged.version or None

    # --- the verbs ---------------------------------------------------------------------------------------------------
    async def put(self, call: PutCall) -> Written:
        """Make the bytes of `call` the object."""
        return await self.finish(self._put(call))

    async def _put(self, call: PutCall) -> Written:
        try:
            check_key(call.key)
            return await self._buckets.again(lambda: self._put_once(call))
        finally:
            if call.path:
                remove_temp(call.path)

    async def _put_once(self, call: PutCall) -> Written:
        async with self.entered(call.bucket, call.key) as served:
            return await self.put_called(served, call)

    def begin(self, call: PutCall, done: Callable[[Written | ForebayError], None]) -> bool:
        """As `put`, without a task: begin a write that waits only for its commit, and call `done` with the outcome.
        Returns False, with nothing done, if it would wait for more or anything is wrong: `put` it then."""
        body, bucket = call.body, call.bucket
        if body is None or call.path or len(body) != call.size_bytes or len(body) > limits.INLINE_BYTES_MAX:
            return False
        if self._closed or call.if_match is not None or call.if_none_match is not None or bucket in self._quiet:
            return False
        if bucket in self.closing:
            return False
        name, taken, writer, put = (bucket, call.key), False, None, None
        try:
            check_key(call.key)
            served = self._buckets.known(bucket)
            if served is None or served.bucket.write == "through" or not self._buckets.is_here(*name):
                return False
            if (self.replicas is not None and self.replicas.keeps_twice(bucket)) or not self.locks.take_free(name):
                return False
            taken = True
            lease = self._member()
            writer = self._owes.admits(served.bucket, call.size_bytes)
            what = _What(call.key, "", len(body), (), call.headers, _etag_of(call), call.md5, call.tags, body)
            self._store.check_present(bucket, call.key)
            if writer is not None and self._remembers(bucket, call.key):
                put = self._owned(served, what, None, False)
        except Exception:
            log.debug("%s/%s is put step by step", bucket, call.key, exc_info=True)
        if writer is None or put is None:
            if taken:
                self.locks.give(name)
            self._owes.ended(bucket, writer or 0)
            return False
        self._entered[bucket] += 1
        if self._buckets.homes is not None:
            self._buckets.homes.begin(name)
        self.commits.begin(put, functools.partial(self._begun, name, lease, writer, done))
        return True

    def _begun(
        self,
        name: tuple[str, str],
        lease: int,
        writer: int,
        done: Callable[[Written | ForebayError], None],
        outcome: Record | ForebayError | None,
    ) -> None:
        self._owes.ended(name[0], writer)
        self.locks.give(name)
        self._leave(name[0])
        if self._buckets.homes is not None:
            self._buckets.homes.end(name)
        try:
            self._check_lease(lease)
        except Unavailable as error:
            outcome = error
        done(outcome if isinstance(outcome, ForebayError) else _written(outcome))

    async def put_called(self, served: Served, call: PutCall, send: Send | None = None) -> Written:
        """`put_file` as `call` says."""
        return await self.put_file(
            served,
            call.key,
            call.path,
            call.size_bytes,
            call.sums,
            call.headers,
            etag=_etag_of(call),
            md5=call.md5,
            tags=call.tags,
            if_match=call.if_match,
            if_none_match=call.if_none_match,
            body=call.body,
            send=send,
        )

    async def put_file(
        self,
        served: Served,
        key: str,
        path: str,
        size_bytes: int,
        sums: Sequence[int],
        headers: Headers,
        *,
        etag: str,
        md5: str = "",
        tags: str = "",
        if_match: str | None = None,
        if_none_match: str | None = None,
        body: bytes | None = None,
        send: Send | None = None,
    ) -> Written:
        """Make the temp file `path` (or `body`) the object, inside `entered` and `finish`. `etag` is for an owned
        object. `send(expect)` puts it to the backend if that is more than sending the bytes."""
        bucket = served.bucket
        self._store.check_present(bucket.name, key)
        if path and size_bytes <= limits.INLINE_BYTES_MAX:
            body, path, sums = await self._on_disk(bucket.name, key, lambda: _read(path)), "", ()
        if not path and body is None:
            raise Invalid("a put came without a body: please report it")
        if path and len(sums) != blocks_in(size_bytes):
            raise Invalid(f"a put of {size_bytes} bytes came with {len(sums)} checksums: please report it")
        what = _What(key, path, size_bytes, tuple(sums), headers, etag, md5, tags, body)
        if bucket.write == "through":
            check_writable(served)
            async with self.lock(bucket.name, key):
                return await self._put_through(served, what, if_match, if_none_match, send)
        async with self._owes.room(bucket, size_bytes):
            if path and bucket.durability == "disk" and size_bytes >= PRESYNC_BYTES_MIN:
                await self._on_disk(bucket.name, key, lambda: _sync(path))
            async with self.lock(bucket.name, key):
                return await self._put_owned(served, what, if_match, if_none_match)

    async def delete(self, call: DeleteCall) -> Nothing:
        """Delete the object. It is no error if there is none, unless a condition is given."""
        check_key(call.key)
        return await self.finish_again(lambda: self._delete(call))

    async def _delete(self, call: DeleteCall) -> Nothing:
        async with self.entered(call.bucket, call.key) as served:
            self._store.check_present(call.bucket, call.key)
            if served.bucket.write == "through":
                check_writable(served)
            async with self._owes.room(served.bucket, 0), self.lock(call.bucket, call.key):
                judged = await self._check_delete(served, call)
                if served.bucket.write == "through":
                    await self._delete_through(served, call.key, judged)
                else:
                    await self._delete_owned(served, call.key, judged)
        return Nothing()

    async def give_up(self, bucket: str, key: str) -> None:
        """Count a lost object as deleted here, without telling the backend. Does nothing if it is not lost."""
        await self.finish(self._give_up(bucket, key))

    async def _give_up(self, bucket: str, key: str) -> None:
        async with self.entered(bucket, key, answers=False), self.lock(bucket, key):
            if self._store.lost_of(bucket, key) is not None:
                log.warning("%s/%s is lost, and was given up", bucket, key)
                await self.commit(Delete(bucket, key))

    async def disown(self, bucket: str, key: str) -> None:
        """Forget the object and what it owes, for good, without telling the backend. Call it inside `quiet`."""
        async with self.lock(bucket, key):
            await self._owes.stop_key(bucket, key)
            log.warning("%s/%s was given up: no backend has it as it was here", bucket, key)
            await self.commit(Delete(bucket, key, durable=True))

    async def forget(self, bucket: str, key: str) -> None:
        """Forget the object and what it owes: others have taken it over."""
        async with self.lock(bucket, key):
            await self._owes.stop_key(bucket, key)
            await self.commits.commit(Delete(bucket, key, durable=True))

    async def _check_delete(self, served: Served, call: DeleteCall) -> ObjectInfo | None:
        """The object to delete, if the call has conditions."""
        if call.if_match is None and call.if_size_bytes is None and call.if_modified_s is None:
            return None

        def fits(info: ObjectInfo) -> bool:
            return call.if_size_bytes in (None, info.size_bytes) and call.if_modified_s in (None, int(info.modified_s))

        return await self.check(served, call.key, call.if_match, None, fits)

    # --- remembering where something is owned ------------------------------------------------------------------------
    def _remembers(self, bucket: str, key: str) -> bool:
        """Whether the node has noted, outside of its volumes, that the key's volume may own something of the bucket."""
        volume_id = self._store.volume_of(bucket, key)
        return self._known is None or self._known.noted(
            volume_id, bucket, self._store.owners.strays(bucket, key, volume_id)
        )

    async def remember(self, bucket: str, key: str) -> None:
        """Note, outside of the volumes, that the key's volume may own something of the bucket."""
        if self._known is not None:
            await self._known.note(self._store, bucket, key)

    def written_buckets(self) -> set[str]:
        """Buckets in which a write is under way."""
        return set(self._entered)

    # --- written back, or local --------------------------------------------------------------------------------------
    async def _put_owned(self, served: Served, what: _What, if_match: str | None, if_none_match: str | None) -> Written:
        judged, asked = None, if_match is not None or if_none_match is not None
        if asked:
            judged = await self.check(served, what.key, if_match, if_none_match)
        await self.remember(served.bucket.name, what.key)
        return _written(await self.commit(self._owned(served, what, judged, asked)))

    def _owned(self, served: Served, what: _What, judged: ObjectInfo | None, asked: bool) -> Put:
        """Under the key's lock: the change that makes `what` the object, owed or local."""
        bucket, key = served.bucket, what.key
        before = self._store.lookup(bucket.name, key)
        local = bucket.write == "local"
        object_id, now_s = self._store.take_id(), self._clock.wall_s()
        digest = digest_of(what.size_bytes, sums=what.sums, body=what.body)
        told = dict(what.headers).get(ETAG_HEADER, "") if whose_entries(bucket.name) else ""
        etag = told or what.etag or f"{digest}-x"
        info = ObjectInfo(key, what.size_bytes, own_version(object_id), etag, now_s, what.shown)
        note = Note(
            seq=object_id,
            since_s=now_s,
            size_bytes=what.size_bytes,
            object_id=object_id,
            headers=what.headers,
            tags=what.tags,
            md5=what.md5,
            local=local,
            digest=digest,
        )
        return Put(
            bucket.name,
            info,
            object_id,
            _state(bucket, key, _LOCAL if local else _DIRTY, before),
            checked_s=now_s,
            body=what.body,
            path=what.path,
            sums=what.sums,
            note=self._following(bucket, key, note, judged, asked),
            durable=bucket.durability == "disk",
        )

    async def _delete_owned(self, served: Served, key: str, judged: ObjectInfo | None) -> None:
        bucket = served.bucket
        before = self._owes.find(bucket.name, key)
        record = self._store.lookup(bucket.name, key)
        lost = self._store.lost_of(bucket.name, key) is not None
        if record is None and not lost and (bucket.write == "local" or (before is not None and before.is_delete)):
            # A write that failed here may be at another node: that hears of it, of a tombstone with a new one.
            if self.replicas is None or not self.replicas.keeps_twice(bucket.name):
                return
            if bucket.write == "local":
                await self.replicas.clear(bucket.name, key)
                return
        note = None
        if bucket.write == "back":
            await self.remember(bucket.name, key)
            note = Note(seq=self._store.take_id(), since_s=self._clock.wall_s(), size_bytes=0, object_id=0)
            note = self._following(bucket, key, note, judged, judged is not None)
        await self.commit(Delete(bucket.name, key, note, durable=bucket.durability == "disk"))

    def _following(self, bucket: Bucket, key: str, note: Note, judged: ObjectInfo | None, asked: bool) -> Note:
        """The note in its key's history: with its base version, and with earlier bodies that may have been sent."""
        before = self._owes.find(bucket.name, key)
        if before is None and (lost := self._store.lost_of(bucket.name, key)) is not None:
            before = lost.note
        if note.local or before is not None:
            return succeeding(note, before)
        record = self._store.lookup(bucket.name, key)
        based_on: str | None = None
        sent = self._owes.sent(bucket.name, key)
        if record is not None and record.checked_s <= 0:
            pass  # a volume or a stop brought it back, and a write of this node may have replaced it since
        elif record is not None:
            based_on = record.version or None
            # A request of an ended flush may still be on its way, and make this the object again: it is ours.
            digest = self._store.digest(bucket.name, key, record)
            sent = sent_bodies.left(sent, digest or None)
        elif asked:
            based_on = "" if judged is None else judged.version or None
        return msgspec.structs.replace(note, based_on=based_on, **sent._asdict())

    # --- written through ---------------------------------------------------------------------------------------------
    async def _put_through(
        self,
        served: Served,
        what: _What,
        if_match: str | None,
        if_none_match: str | None,
        send: Send | None,
    ) -> Written:
        bucket, key = served.bucket, what.key
        expect = await self.expected(served, key, if_match, if_none_match)
        async with self.asking(bucket, key):
            asked_s = self._clock.wall_s()
            try:
                if send is not None:
                    seen = await send(expect)
                else:
                    body = Body(what.size_bytes, data=what.body, path=what.path, md5=what.md5)
                    seen = await self.through.put(
                        served, key, body, headers=what.headers, expect=expect, tags=what.tags
                    )
            except BaseException as error:
                self.doubt(bucket, key, error, expect)
                raise
            checked_s = asked_s if served.of is None else MISSED  # fronts ask about what is at home elsewhere
            return await self._keep(bucket, what, seen, checked_s)

    async def _keep(self, bucket: Bucket, what: _What, seen: ObjectInfo, checked_s: float) -> Written:
        """Cache the object that the backend has now; if that fails, forget the key."""
        key = what.key
        headers = kept_as(what.shown, keeping_among(seen.headers))
        info = ObjectInfo(key, what.size_bytes, seen.version, seen.etag, seen.modified_s, headers)
        put = Put(
            bucket.name,
            info,
            self._store.take_id(),
            _state(bucket, key, 0, self._store.lookup(bucket.name, key)),
            checked_s=checked_s,
            body=what.body,
            path=what.path,
            sums=what.sums,
        )
        try:
            if not info.version:
                raise NotSupported("the backend names no version: what was written is not kept here")
            await self.commit(put)
        except ForebayError as error:
            log.info("%s/%s was written to the backend, but is not cached: %s", bucket.name, key, error)
            await self.drop(bucket.name, key)
        return Written(info.etag, info.version, info.size_bytes, info.modified_s)

    async def _delete_through(self, served: Served, key: str, judged: ObjectInfo | None) -> None:
        bucket = served.bucket
        expect = None if judged is None else judged.version or None
        async with self.asking(bucket, key):
            try:
                await served.backend.delete(key, expect=expect)
            except BaseException as error:
                self.doubt(bucket, key, error, expect)
                raise
            await self.drop(bucket.name, key)

    @asynccontextmanager
    async def asking(self, bucket: Bucket, key: str) -> AsyncIterator[None]:
        """Under the key's lock: spans both the request that changes the key at the backend, and its outcome here.

        No flush of the key follows the request. Meanwhile the cached version counts as unconfirmed, also for an engine
        that starts after this one was killed: that is committed before this begins (`core/machines/opening.py`).
        """
        self._store.check_present(bucket.name, key)
        if self._owes.find(bucket.name, key) is not None:
            await self._owes.stop_key(bucket.name, key)
        confirmations = self._cold.confirmations
        try:
            if confirmations.open_window(bucket.name, key):
                self.commits.flush()
            self._store.check_answers(bucket.name, key)
            yield
        finally:
            confirmations.close_window(bucket.name, key)

    async def drop(self, bucket: str, key: str) -> None:
        """Under the key's lock: forget the key; its next reader asks the backend."""
        self._cold.written(bucket, key)
        if self._store.lookup(bucket, key) is None:
            self._owes.forget(bucket, key)
            self._store.forget(bucket, key)  # a landing without a whole block would make a record later
        else:
            await self.commit(Delete(bucket, key))

    def doubt(self, bucket: Bucket, key: str, error: BaseException, expect: str | None = None) -> None:
        """In `asking`: the request failed. If the backend refused it, restore the confirmation. If nobody knows whether
        it took effect, the cached version stays unconfirmed and the next reader asks. If the backend does not have the
        version to `expect`, stop serving that."""
        if isinstance(error, Denied | Invalid | NotSupported):
            self._cold.confirmations.restore(bucket.name, key)  # the backend refused it
            return
        self._cold.written(bucket.name, key)
        if expect and isinstance(error, Precondition | NotFound):
            self._cold.replaced((bucket.name, key), expect)

    # --- making it so ------------------------------------------------------------------------------------------------
    async def commit(self, change: Change) -> Record | None:
        """Make `change` durable and visible, together with others; on another node too, where the bucket is kept
        twice. Raises what prevents it."""
        return await (self.commits if self.replicas is None else self.replicas).commit(change)

    def _published(self, change: Change, before: Record | None, after: Record | None) -> None:
        """Update what becomes true with a change: what is owed, what reads find, what may be evicted."""
        bucket = change.bucket
        key = change.info.key if isinstance(change, Put) else change.key
        self._cold.written(bucket, key)
        if before is not None:
            self._room.removed(before.object_id, present_blocks(before))
        if after is not None:
            self._room.wrote(bucket, key, after)
        if before is None or after is None or before.object_id != after.object_id:
            self.moved_on(bucket, key)
        note = change.note
        if note is not None and not note.local:
            self._owes.add(Owed(bucket, key, note, change.durable))
        elif self._owes.find(bucket, key) is not None:
            self._owes.forget(bucket, key)

    async def _on_disk(self, bucket: str, key: str, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in the threads of the key's volume. `Unavailable` if its disk stalls meanwhile, or fails."""
        volume = self._store.volume_at(bucket, key)
        try:
            return await by_disk(volume, self._workers, work, f"{bucket}/{key}")
        except OSError as error:
            if volume is None:
                raise
            raise volume.trouble(error, "taking a body") from error

    async def aclose(self, grace_s: float = 10.0) -> None:
        """Begin nothing more, and end every section: those that wait for a backend after `grace_s` at the latest."""
        self._closed = True
        if self._sections:
            await asyncio.wait(list(self._sections), timeout=grace_s)
        for task in list(self._sections):
            task.cancel()
        if self._sections:
            await asyncio.wait(list(self._sections))
        await self.commits.settled()
        await self.through.aclose()


class _What(msgspec.Struct, frozen=True, gc=False):
    """What an object is to become."""

    key: str
    path: str
    size_bytes: int
    sums: tuple[int, ...]
    headers: Headers
    etag: str
    md5: str
    tags: str
    body: bytes | None

    @property
    def shown(self) -> Headers:
        """The headers kept with the record and sent with reads, tags included; a backend takes tags in another way."""
        return with_tags(self.headers, self.tags)


def _holds(
    info: ObjectInfo | None,
    if_match: str | None,
    if_none_match: str | None,
    fits: Callable[[ObjectInfo], bool] | None,
) -> bool:
    if info is None:
        return if_match is None and fits is None
    if fits is not None and not fits(info):
        return False
    return Conditions(if_match, if_none_match).judge(info.etag, info.modified_s) == 200


def _state(bucket: Bucket, key: str, state: int, before: Record | None) -> int:
    """`state`, with PINNED if the key is pinned."""
    pinned = is_pinned(bucket, key) or (before is not None and bool(before.state & PINNED))
    return state | PINNED if pinned else state


def _written(record: Record | None) -> Written:
    assert record is not None, "a put without a record"
    return Written(record.etag, record.version, record.size_bytes, record.modified_s)


def _etag_of(call: PutCall) -> str:
    """The ETag of an owned object. No client takes a hash with `-` in it for an MD5."""
    if call.md5:
        return call.md5
    if call.hash128:
        return f"{call.hash128}-x"
    if call.body is not None:
        return f"{xxhash.xxh3_128_hexdigest(call.body)}-x"
    return ""


def check_writable(served: Served) -> None:
    if served.backend.read_only:
        raise NotSupported(
            f"the backend of bucket {served.bucket.name} can only be read: write there, or give the bucket a backend "
            "that can be written"
        )


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
