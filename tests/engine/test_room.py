"""Making room while others want their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.types import Bucket, ObjectInfo
from forebay.node.engine import evictions
from forebay.node.store.disk import ledger
from forebay.node.store.disk.volume import Volume

from .conftest import MIB, Rig, pattern, until

Rigged = Callable[..., None]


def small(rig: Rig, count: int) -> None:
    """Objects that came from reads."""
    engine = rig.engine
    volume_id = engine.store.volume_of("remote", "")
    for number in range(count):
        info = ObjectInfo(f"small/{number:05d}", 100, "v1", "etag", 1e9, ())
        record = engine.store.put_inline("remote", info, bytes(100), checked_s=engine.clock.wall_s())
        engine.room.landed(volume_id, (record.object_id, 0), evictions.taken_bytes(record), "remote", info.key, False)
    engine.flush()


def test_after_a_kill_reads_are_served_before_eviction_knows_what_is_there(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(volume: Volume) -> None:
        raise AssertionError("nothing walks over the index before it is served")

    may, learn = asyncio.Event(), evictions.Room._learn

    async def late(self: evictions.Room) -> None:
        await may.wait()
        await learn(self)

    async def story(rig: Rig) -> None:
        small(rig, 1000)
        rig.engine.store.touch([rig.engine.store.lookup("remote", "small/00007").object_id], 40_000_000)
        await rig.engine.buckets.put(Bucket("remote", "memory://remote", freshness_s=1e9))
        rig.remote.place("cold", pattern(5 * MIB))
        with monkeypatch.context() as patch:
            patch.setattr(Volume, "_walk", walk)
            patch.setattr(Volume, "find_unbacked", walk)
            patch.setattr(evictions.Room, "_learn", late)
            await rig.again(clean=False)
        machine = next(iter(rig.engine.room._machines.values()))
        assert await rig.front.get("small/00999") == bytes(100)
        assert await rig.front.get("cold") == pattern(5 * MIB)
        await rig.idle()
        assert len(machine) == 2, "what came since is all that is known"
        may.set()
        await rig.engine.room.learned()
        usage = rig.engine.store.usage()[0]
        assert (len(machine), machine.used_bytes) == (1002, usage.weighed_bytes)
        machine.check()

    rigged(story)


def test_what_changes_while_eviction_learns_is_counted_once(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "UNITS_BATCH", 8)

    async def story(rig: Rig) -> None:
        small(rig, 3000)
        await rig.again(clean=False)
        engine = rig.engine
        machine = next(iter(engine.room._machines.values()))
        turn = 0
        while engine.room._restoring is not None:
            for number in (turn, 2999 - turn, 1500 + turn):  # known already, not yet, and perhaps
                key = f"small/{number:05d}"
                record = engine.store.lookup("remote", key)
                assert record is not None
                if turn % 2:
                    engine.store.forget("remote", key)
                    engine.room.removed(record.object_id, [0])
                else:
                    info = ObjectInfo(key, 50, "v2", "etag", 1e9, ())
                    engine.room.removed(record.object_id, [0])
                    new = engine.store.put_inline("remote", info, bytes(50), checked_s=1.0)
                    volume_id = engine.store.volume_of("remote", key)
                    engine.room.landed(volume_id, (new.object_id, 0), evictions.taken_bytes(new), "remote", key, False)
            if turn % 3 == 0:
                engine.flush()
            turn += 1
            await asyncio.sleep(0)
        assert turn > 20
        usage = engine.store.usage()[0]
        assert (len(machine), machine.used_bytes) == (usage.objects, usage.weighed_bytes)

    rigged(story)


def test_a_quota_cut_takes_small_objects_some_hundred_at_a_time(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        small(rig, 3000)
        rig.remote.place("cold", b"cold")
        store, turns, left = rig.engine.store, 0, 3000
        await rig.engine.buckets.put(Bucket("remote", "memory://remote", quota_bytes=1))
        while left:
            await asyncio.sleep(0)
            now = store.usage()[0].objects
            assert left - now <= evictions.BATCH_UNITS
            turns += now < left
            left = now
        assert turns >= 3000 // evictions.BATCH_UNITS
        assert store.pending == 0, "and it is committed"
        assert await rig.front.get("cold") == b"cold"
        assert rig.engine.tally.evictions["capacity"] >= 3000

    rigged(story)


def test_one_chain_of_turns_makes_room_however_much_lands_meanwhile(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block that landed above the mark began another chain beside the one that was under way."""
    turns, make_room = 0, evictions.Room._make_room

    def counted(self: evictions.Room) -> None:
        nonlocal turns
        turns += 1
        make_room(self)
        assert self._making is None or isinstance(self._making, asyncio.TimerHandle), "others have as long a turn"

    async def story(rig: Rig) -> None:
        small(rig, 5000)
        monkeypatch.setattr(evictions.Room, "_make_room", counted)
        await rig.engine.buckets.put(Bucket("remote", "memory://remote", quota_bytes=1))
        await until(lambda: turns > 2)
        small(rig, 4)
        while rig.engine.store.usage()[0].objects:
            done = turns
            await asyncio.sleep(0)
            assert turns <= done + 1, "one turn at a time"

    rigged(story)
