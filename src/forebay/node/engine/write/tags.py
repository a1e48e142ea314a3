"""Tags of existing objects: read, and changed without rewriting a byte.

Theory. Whoever is the authority for an object is the authority for its tags. For an owned object that is this node: its
record and its note have the tags, and the flush sends them. For any other object it is the backend: tags are changed
there at once, whatever the bucket's write mode, since the backend has the object and nothing needs to wait. The cached
record is then updated. Reading asks the same authority.

To the flusher new tags are a new write of the same bytes. The note gets a `seq` of its own, so a flush under way with
the old tags is followed by another, and nothing waits.

Invariants. (1) The answer comes after the tags are set at the authority, durably if the object is durable. (2) Neither
bytes nor version nor ETag of an object change.
"""

from __future__ import annotations

import asyncio

import msgspec

from forebay.core.errors import NotFound, NotSupported
from forebay.core.messages.calls import Nothing, ObjectNamed, TagCall, TagsSaid
from forebay.core.record import Record, State, headers_of, info_of
from forebay.core.s3rules.tags import parse_tags, tags_among
from forebay.core.types import check_key
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.write.seams import Owes
from forebay.node.engine.write.writes import Writes, check_writable
from forebay.node.store.disk.notes import succeeding
from forebay.node.store.writer.writer import Store


class Tags:
    """See the module's header."""

    def __init__(self, store: Store, buckets: Buckets, writes: Writes, owes: Owes) -> None:
        self._store = store
        self._buckets = buckets
        self._writes = writes
        self._owes = owes

    async def read(self, named: ObjectNamed) -> TagsSaid:
        """The object's tags. `NotFound`; `NotSupported` if only a backend knows them and does not tell."""
        check_key(named.key)
        return await self._buckets.again(lambda: self._read(named.bucket, named.key))

    async def _read(self, bucket: str, key: str) -> TagsSaid:
        served = await self._buckets.acting(bucket, key)
        record = self._owned(bucket, key, served)
        if record is not None:
            return TagsSaid(tags_among(headers_of(record)) or "")
        info = await self._writes.current(served, key)
        if info is None:
            raise _no_such_key(key)
        try:
            return TagsSaid(await served.backend.read_tags(key))
        except NotSupported:
            known = tags_among(info.headers)
            if known is None:
                raise
            return TagsSaid(known)

    async def tag(self, call: TagCall) -> Nothing:
        """Set the object's tags. `NotFound`, `Invalid`; `NotSupported` if the backend has none."""
        check_key(call.key)
        parse_tags(call.tags)
        return await self._writes.finish_again(lambda: self._tag(call))

    async def _tag(self, call: TagCall) -> Nothing:
        bucket, key = call.bucket, call.key
        async with self._writes.entered(bucket, key) as served, self._writes.lock(bucket, key):
            record = self._owned(bucket, key, served)
            if record is not None:
                await self._rehead(bucket, key, record, call.tags)
                return Nothing()
            check_writable(served)
            await served.backend.write_tags(key, call.tags)
            record = self._store.lookup(bucket, key)
            if record is not None:
                await self._rehead(bucket, key, record, call.tags)
        return Nothing()

    def _owned(self, bucket: str, key: str, served: Served) -> Record | None:
        """The record if this node is the authority for the object. `NotFound` if it knows that there is none."""
        self._store.check_present(bucket, key)
        record = self._store.lookup(bucket, key)
        if record is not None and record.state & State.OWNED:
            return record
        if record is None:
            self._store.check_lost(bucket, key)
        note = self._owes.find(bucket, key)
        if (note is not None and note.is_delete) or served.bucket.write == "local":
            raise _no_such_key(key)
        return None

    async def _rehead(self, bucket: str, key: str, record: Record, tags: str) -> None:
        headings, before = self._store.headings, self._owes.find(bucket, key)
        owes = None
        if before is not None and before.object_id == record.object_id:
            seq = self._store.take_id()
            owes = msgspec.structs.replace(before, seq=seq, tags=tags, upload_id="", upload_key="", part_bytes=0)
            owes = succeeding(owes, before)
        tagged = headings.plan(bucket, info_of(record, key), record, tags, owes)

        async def keep() -> None:
            await asyncio.get_running_loop().run_in_executor(tagged.volume.desk.bearers, headings.keep, tagged)
            owed = headings.show(tagged)
            if owed is not None:
                self._owes.add(owed)
            self._writes.commits.flush()

        if self._writes.replicas is None:
            await keep()
        else:
            await self._writes.replicas.retag(bucket, tagged.info, tagged.note, keep)


def _no_such_key(key: str) -> NotFound:
    return NotFound(f"there is no object {key!r} to have tags: check the name", code="NoSuchKey")
