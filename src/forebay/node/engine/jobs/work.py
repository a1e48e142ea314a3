"""What each kind of job does: prefetch, evict, refresh, pin and unpin, flush, as plans and actions.

Theory. `prefetch` plans from the backend's listing, since it is about objects that are not here. `pin` plans from the
index and then the listing, so that objects that are here are pinned even if the backend does not answer. The others
plan from the index, since they concern only what is here. How bytes come is in `prefetch.py`.

`flush` plans from what is owed when it begins, and ignores later writes. It only asks and waits: the flusher sends, and
tries again if that can help.

Pinning by prefix is a setting of the bucket, so it also holds for later objects; the job marks the objects that are
here and fetches the rest. `evict` leaves pinned objects: two contradictory orders must not cost a second fetch.

Where all nodes of a cluster are asked (`share`), each fetches what is at home there (`rewarm.py`).

Invariant. Every action may be done twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import msgspec

from forebay.core import limits
from forebay.core.errors import Busy, ForebayError, Invalid, NotFound, Unavailable
from forebay.core.messages.calls import JobCall, JobVerb
from forebay.core.record import State, cached_bytes, present_blocks
from forebay.core.types import Bucket, check_key
from forebay.node.engine.buckets import Buckets
from forebay.node.engine.counts import Tally
from forebay.node.engine.derived import names_in
from forebay.node.engine.evictions import Room
from forebay.node.engine.flush.flusher import ASKED_AT_ONCE, Flusher
from forebay.node.engine.jobs.rewarm import IsHome, Rewarm, fetch_spans, share_of
from forebay.node.engine.jobs.runner import JobUnit, Moved, Work
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.shared_buckets import SharedBuckets
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.volumes import missing, object_lost

log = logging.getLogger("forebay.jobs")

SCAN_LIMIT = 1000


class JobWork:
    """Makes the work of each verb."""

    def __init__(
        self,
        buckets: Buckets,
        cold: ColdReads,
        room: Room,
        index: StoreReader,
        tally: Tally,
        flusher: Flusher,
        *,
        flush: Callable[[], None],
        flush_soon: Callable[[], None],
        is_home: Callable[[], Awaitable[IsHome]],
    ) -> None:
        self.shared: SharedBuckets | None = None  # set it in a cluster, which is told of pins
        self._is_home = is_home
        self._rewarm = Rewarm(buckets, cold, is_home)
        self._buckets = buckets
        self._cold = cold
        self._room = room
        self._index = index
        self._tally = tally
        self._flusher = flusher
        self._flush = flush
        self._flush_soon = flush_soon

    async def make(self, verb: JobVerb, call: JobCall) -> Work:
        """The work of a call. `NotFound` for an unknown bucket, `Invalid` for an invalid key."""
        await self._buckets.get(call.bucket)
        for key in call.keys:
            check_key(key)
        if verb == "prefetch":
            return Work(
                lambda: self._listed(call), lambda unit, moved: fetch_spans(self._cold, call.bucket, unit, moved)
            )
        if verb == "rewarm":
            if len(call.keys) != 1:
                raise Invalid("a rewarm goes by one manifest: name it as the one key")
            return Work(lambda: self._rewarm.plan(call), self._rewarm.action)
        if verb == "flush":
            return self._flush_owed(call)
        if verb in ("pin", "unpin") and not call.dry_run:
            await self._pin_prefixes(call, verb == "pin")

        def plan() -> AsyncIterator[JobUnit]:
            if verb == "pin":
                return self._pinning(call)
            return self._evicting(call) if verb == "evict" else self._cached(call)

        actions: dict[str, Callable[[JobUnit, Moved], Awaitable[int]]] = {
            "evict": lambda unit, _: self._evict_unpinned(call.bucket, unit),
            "refresh": lambda unit, _: self._refresh(call.bucket, unit),
            "pin": lambda unit, moved: self._fetch_and_pin(call.bucket, unit, moved),
            "unpin": lambda unit, _: self._pin(call.bucket, unit, False),
        }
        return Work(plan, actions[verb])

    async def evict_bucket(self, bucket: str) -> None:
        """Drop everything cached of a bucket."""
        await self._evict_derived(JobCall(bucket))
        async for unit in self._cached(JobCall(bucket)):
            await self._evict(bucket, unit)
        self._flush()

    # --- plans -------------------------------------------------------------------------------------------------------
    async def _cached(self, call: JobCall, but: State = State.CLEAN) -> AsyncIterator[JobUnit]:
        """Objects that are here, except records in the states `but`."""
        self._flush()  # the scan sees only committed records
        if call.keys:
            for key in call.keys:
                record = self._index.lookup(call.bucket, key)
                if record is not None and not record.state & but:
                    yield JobUnit(key, cached_bytes(record))
            return
        after = ""
        while found := self._index.scan(call.bucket, call.prefix, after, SCAN_LIMIT):
            for key, record in found:
                if not record.state & but:
                    yield JobUnit(key, cached_bytes(record))
            after = found[-1][0]
            await asyncio.sleep(0)

    async def _listed(self, call: JobCall) -> AsyncIterator[JobUnit]:
        """What the backend has; each page is asked with the settings that the bucket has then (a newer key, say)."""
        after, is_home = "", await self._is_home() if call.share else None
        for key in call.keys:
            served = await self._buckets.get(call.bucket)
            size_bytes = (await served.backend.head(key)).size_bytes if call.dry_run or call.share else 0
            for unit in _here(served.bucket, JobUnit(key, size_bytes), is_home):
                yield unit
        while not call.keys:
            served = await self._buckets.get(call.bucket)
            page = await served.backend.list_page(call.prefix, "", after, limits.LIST_KEYS_MAX)
            for entry in page.entries:
                for unit in _here(served.bucket, JobUnit(entry.key, entry.size_bytes), is_home):
                    yield unit
            after = page.next_after
            if not after:
                return

    async def _pinning(self, call: JobCall) -> AsyncIterator[JobUnit]:
        """Objects that are here, then listed objects that are missing or incomplete."""
        async for unit in self._cached(call):
            yield unit
        async for unit in self._listed(call):
            record = self._cold.store.lookup(call.bucket, unit.key)
            if record is None or not all(record.has(*span) for span in unit.spans or ((0, record.size_bytes),)):
                yield unit

    async def _evicting(self, call: JobCall) -> AsyncIterator[JobUnit]:
        """Objects that are here and may go. Objects derived from them go first, since they belong to no bucket's
        keys."""
        if not call.dry_run:
            await self._evict_derived(call)
        async for unit in self._cached(call, State.PINNED | State.OWNED):
            yield unit

    def _flush_owed(self, call: JobCall) -> Work:
        owed = self._flusher.owing(call.bucket, call.prefix, call.keys)
        writes = {key: seq for key, seq, _ in owed}

        owners = self._cold.store.owners
        absent = owners.of_bucket(call.bucket)
        if call.keys:
            absent = [known for known in absent if any(owners.of_key(call.bucket, key) is known for key in call.keys)]

        lost = self._cold.store.lost_in(call.bucket, call.prefix)
        troubles: list[ForebayError] = [missing(known, f"bucket {call.bucket}") for known in absent]
        troubles += [object_lost(each) for each in lost if not call.keys or each.key in call.keys]

        async def plan() -> AsyncIterator[JobUnit]:
            for _ in troubles:
                yield JobUnit("", 0)
            for key, _, size_bytes in owed:
                yield JobUnit(key, size_bytes)

        async def action(unit: JobUnit, _: Moved) -> int:
            if not unit.key:
                raise troubles.pop()
            await self._flusher.flushed(call.bucket, unit.key, writes[unit.key])
            return unit.size_bytes

        return Work(plan, action, parallel=ASKED_AT_ONCE)

    # --- actions -----------------------------------------------------------------------------------------------------
    async def _fetch_and_pin(self, bucket: str, unit: JobUnit, moved: Moved) -> int:
        record, fetched_bytes = self._cold.store.lookup(bucket, unit.key), 0
        if record is None or not record.complete:
            fetched_bytes = await fetch_spans(self._cold, bucket, unit, moved)
        return max(fetched_bytes, await self._pin(bucket, unit, True))

    async def _evict_unpinned(self, bucket: str, unit: JobUnit) -> int:
        record = self._cold.store.lookup(bucket, unit.key)
        if record is None or record.state & (State.PINNED | State.OWNED):
            return 0  # an owned object exists nowhere else
        return await self._evict(bucket, unit)

    async def _evict(self, bucket: str, unit: JobUnit) -> int:
        freed_bytes = self._cold.forget(bucket, unit.key)
        self._tally.evictions["asked"] += 1
        self._tally.evicted_bytes += freed_bytes
        self._room.reclaim()
        await asyncio.sleep(0)
        return freed_bytes

    async def _evict_derived(self, call: JobCall) -> None:
        self._flush()
        for place, name in names_in(self._index, call.bucket, call.prefix, call.keys):
            self._tally.evicted_bytes += self._cold.forget(place, name)
            await asyncio.sleep(0)
        self._flush()
        self._room.reclaim()

    async def _refresh(self, bucket: str, unit: JobUnit) -> int:
        served = await self._buckets.get(bucket)
        try:
            await self._cold.metadata(Ask(bucket, unit.key, revalidate=True), served)
        except NotFound:
            pass  # gone at the backend, and now here too
        return unit.size_bytes

    async def _pin(self, bucket: str, unit: JobUnit, pinned: bool) -> int:
        store = self._cold.store
        record = store.lookup(bucket, unit.key)
        if record is None:
            return 0
        store.set_pinned(bucket, unit.key, pinned)
        if not record.state & State.OWNED:  # an owned object is never a victim anyway
            self._room.pin(record.object_id, present_blocks(record), pinned)
        self._flush_soon()
        await asyncio.sleep(0)
        return unit.size_bytes

    async def _pin_prefixes(self, call: JobCall, pinned: bool) -> None:
        names: Iterable[str] = call.keys or [call.prefix]

        async def pin_here() -> Bucket:
            async with self._buckets.settings:
                bucket = (await self._buckets.get(call.bucket)).bucket
                before = set(bucket.pinned)
                after = before | set(names) if pinned else before - set(names)
                if after != before:
                    bucket = await self._buckets.put(msgspec.structs.replace(bucket, pinned=tuple(sorted(after))))
                return bucket

        if self.shared is not None and call.share:
            try:
                await self.shared.change(call.bucket, pin_here, stays=True)
            except (Busy, Unavailable) as error:  # every node has this job, so only those that come later miss it
                log.warning("nodes that come later do not hear of the pins of %s: %s", call.bucket, error)
        await pin_here()


def _here(bucket: Bucket, unit: JobUnit, is_home: IsHome | None) -> list[JobUnit]:
    """What of the object is to be fetched here: all, or this node's share of it, if it has one."""
    if is_home is None:
        return [unit]
    spans = share_of(bucket, unit.key, [(0, unit.size_bytes)], is_home)
    return [JobUnit(unit.key, sum(end - start for start, end in spans), spans)] if spans else []
