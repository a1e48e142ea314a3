"""Making room while others want their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forebay.core.types import Bucket, ObjectInfo
from forebay.node import room

from .conftest import Rig

Rigged = Callable[..., None]


def small(rig: Rig, count: int) -> None:
    """Objects that came from reads."""
    engine = rig.engine
    volume_id = engine.store.volume_of("remote", "")
    for number in range(count):
        info = ObjectInfo(f"small/{number:05d}", 100, "v1", "etag", 1e9, ())
        record = engine.store.put_inline("remote", info, bytes(100), checked_s=engine.clock.wall_s())
        engine.room.landed(volume_id, (record.object_id, 0), room.taken_bytes(record), "remote", info.key, False)
    engine.flush()


def test_a_quota_cut_takes_small_objects_some_hundred_at_a_time(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        small(rig, 3000)
        rig.remote.place("cold", b"cold")
        store, turns, left = rig.engine.store, 0, 3000
        await rig.engine.buckets.put(Bucket("remote", "memory://remote", quota_bytes=1))
        while left:
            await asyncio.sleep(0)
            now = store.usage()[0].objects
            assert left - now <= room.BATCH_UNITS
            turns += now < left
            left = now
        assert turns >= 3000 // room.BATCH_UNITS
        assert store.pending == 0, "and it is committed"
        assert await rig.front.get("cold") == b"cold"
        assert rig.engine.tally.evictions["capacity"] >= 3000

    rigged(story)
