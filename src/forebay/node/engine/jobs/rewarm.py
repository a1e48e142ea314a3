"""What a node fetches of what all nodes are asked to fetch: its share; and a rewarm, which is that of a manifest.

Theory. Each stripe of an object has a home (`core/placement.py`), and the home fetches it. So all nodes together fetch
everything once, each over its own link, and what is read later at another node comes from the home.

A rewarm goes by a manifest (`core/formats/manifest.py`), what was used last first, as far as the volumes and the
bucket's quota have room: nothing leaves for it. It is a job like any other: begun again after a stop, it reads the
manifest again and passes over what is here. What is not at the backend any more is passed over too.

Invariant. Work is shared by one map, that of when the plan begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from forebay.core.errors import Invalid, NotFound, Unavailable
from forebay.core.formats.manifest import Span, Warm, joined
from forebay.core.limits import STRIPE_BYTES
from forebay.core.messages.calls import JobCall
from forebay.core.ranges import end_of_stripe
from forebay.core.record import Record
from forebay.core.types import Bucket, RangeSpec
from forebay.node.engine.buckets import Buckets
from forebay.node.engine.jobs.prefetch import prefetched
from forebay.node.engine.jobs.runner import JobUnit, Moved
from forebay.node.engine.leaving import read_manifest
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.seat import Seat

log = logging.getLogger("forebay.jobs")

MAP_LOOKS, MAP_S = 300, 60.0  # for the cluster's map
IsHome = Callable[[Bucket, str, int], bool]  # whether a stripe of a key is at home at this node


async def is_home_by(seat: Seat | None, node_id: str) -> IsHome:
    """Which node brings in what. `Unavailable` if this one does not learn the cluster's map in time."""
    if seat is None:
        return lambda bucket, key, stripe: True
    for _ in range(MAP_LOOKS):
        agreed = seat.agreed
        if agreed is not None and agreed.active and agreed.owners:
            break
        await asyncio.sleep(MAP_S / MAP_LOOKS)
    else:
        raise Unavailable(f"this node does not know the cluster's map ({seat.trouble or 'not yet'}): try again")

    def is_home(bucket: Bucket, key: str, stripe: int) -> bool:
        back = bucket.write != "through"
        home = agreed.holder(bucket.name, key) if back else agreed.home(bucket.name, key, stripe)
        return home == node_id

    return is_home


def share_of(bucket: Bucket, key: str, spans: Iterable[Span], is_home: IsHome) -> tuple[Span, ...]:
    """The parts of these that are at home here."""
    found = []
    for start, end in spans:
        while start < end:
            stop = min(end, end_of_stripe(start))
            if is_home(bucket, key, start // STRIPE_BYTES):
                found.append((start, stop))
            start = stop
    return tuple(joined(found))


class Rewarm:
    """Plan and action of a rewarm; see the module's header."""

    def __init__(self, buckets: Buckets, cold: ColdReads, is_home: Callable[[], Awaitable[IsHome]]) -> None:
        self._buckets, self._cold, self._is_home = buckets, cold, is_home

    async def plan(self, call: JobCall) -> AsyncIterator[JobUnit]:
        """What the manifest names and is at home here, as far as there is room for it."""
        manifest, _ = await read_manifest(await self._buckets.get(call.bucket), call.keys[0])
        is_home, room, left_out = await self._is_home(), self._room(), 0
        for warm in manifest.warm:
            served = self._buckets.known(warm.bucket)
            whole = ((0, warm.size_bytes),)
            spans = () if served is None else share_of(served.bucket, warm.key, warm.spans or whole, is_home)
            if not spans:
                continue
            unit = JobUnit(f"{warm.bucket}/{warm.key}", sum(end - start for start, end in spans), spans)
            if not self._is_here(warm, spans) and not self._claim(room, warm, unit.size_bytes):
                left_out += 1
                continue
            yield unit
        if left_out:
            log.info("%d objects of the manifest find no room here, and are fetched when they are read", left_out)

    def _room(self) -> dict[str, int]:
        """How many bytes may come, by volume, and by bucket (its name ends with a slash) where it has a quota."""
        usages = self._cold.store.usage()
        room = {usage.volume_id: usage.keep_bytes - usage.weighed_bytes for usage in usages}
        for bucket in self._buckets.all():
            if bucket.quota_bytes is not None:
                used_bytes = sum(usage.buckets.get(bucket.name, 0) for usage in usages)
                room[f"{bucket.name}/"] = bucket.quota_bytes - used_bytes
        return room

    def _claim(self, room: dict[str, int], warm: Warm, size_bytes: int) -> bool:
        places = [
            place for place in (self._cold.store.volume_of(warm.bucket, warm.key), f"{warm.bucket}/") if place in room
        ]
        if any(room[place] < size_bytes for place in places):
            return False
        for place in places:
            room[place] -= size_bytes
        return True

    def _is_here(self, warm: Warm, spans: Iterable[Span]) -> bool:
        record: Record | None = self._cold.store.lookup(warm.bucket, warm.key)
        return record is not None and all(record.has(start, end) for start, end in spans)

    async def action(self, unit: JobUnit, moved: Moved) -> int:
        """Fetch the parts that are not here."""
        bucket, _, key = unit.key.partition("/")
        try:
            return await fetch_spans(self._cold, bucket, unit._replace(key=key), moved)
        except NotFound:
            return 0  # it was deleted since
        except Invalid as error:
            if error.code != "InvalidRange":
                raise
            return 0  # it is another one, and shorter


async def fetch_spans(cold: ColdReads, bucket: str, unit: JobUnit, moved: Moved) -> int:
    """Fetch these parts of an object, all of it where none are named; how many bytes were not here before."""
    if not unit.spans:
        return await prefetched(cold, Ask(bucket, unit.key), moved)
    fetched_bytes = done_bytes = 0
    for start, end in unit.spans:
        before_bytes = done_bytes

        def said(so_far_bytes: int, _: int, before_bytes: int = before_bytes) -> None:
            moved(before_bytes + so_far_bytes, unit.size_bytes)

        fetched_bytes += await prefetched(cold, Ask(bucket, unit.key, RangeSpec(start, end - 1)), said)
        done_bytes += end - start
    return fetched_bytes
