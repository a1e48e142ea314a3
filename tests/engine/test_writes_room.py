"""Writes where room is short: what may be evicted makes room, what may not is refused, and through goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.errors import ForebayError, Unavailable
from forebay.core.record import State
from tests.store.owned_objects import notes_of

from .conftest import MIB, Rig, pattern, until
from .writing import delete, flushed, put, temp_files, written

Rigged = Callable[..., None]
CAPACITY = 32 * MIB


def used(rig: Rig) -> int:
    return sum(usage.used_bytes for usage in rig.engine.store.usage())


def test_what_can_be_fetched_again_makes_room_for_what_cannot(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", dirty_bytes_max=1 << 40)
        for number in range(6):
            rig.remote.place(f"cached-{number}", pattern(5 * MIB, number))
            await rig.front.get(f"cached-{number}")
        await rig.idle()
        rig.remote.writable.clear()
        bodies = {f"mine-{number}": pattern(9 * MIB, 50 + number) for number in range(3)}
        for key, body in bodies.items():
            await put(rig, key, body)
        await until(lambda: used(rig) <= CAPACITY)
        for key, body in bodies.items():
            assert await rig.front.get(key) == body
            record = rig.engine.store.lookup("remote", key)
            assert record is not None
            assert record.state & State.OWNED
        await flushed(rig)

    rigged(story, capacity_bytes=CAPACITY)


def test_dirty_bytes_are_not_evicted_and_flushed_ones_are(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", dirty_bytes_max=1 << 40)
        rig.remote.writable.clear()
        for number in range(3):
            await put(rig, f"mine-{number}", pattern(9 * MIB, number))
        with pytest.raises(Unavailable) as full:
            await put(rig, "too-much", pattern(9 * MIB, 9))
        assert full.value.code == "InsufficientStorage"
        assert temp_files(rig) == []
        await flushed(rig)
        await put(rig, "too-much", pattern(9 * MIB, 9))
        await flushed(rig)
        await until(lambda: used(rig) <= CAPACITY)
        for number in range(3):
            assert await rig.front.get(f"mine-{number}") == pattern(9 * MIB, number)

    rigged(story, capacity_bytes=CAPACITY)


def test_a_local_bucket_that_is_full_says_so(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        count = 0
        full: Unavailable | None = None
        while full is None and count < 100:
            try:
                await put(rig, f"key-{count}", pattern(5 * MIB, count))
                count += 1
            except Unavailable as error:
                full = error
        assert full is not None
        assert full.code == "InsufficientStorage"
        assert count >= 4
        for number in range(count):
            assert await rig.front.get(f"key-{number}") == pattern(5 * MIB, number)
        await delete(rig, "key-0")
        await delete(rig, "key-1")
        await put(rig, "key-new", pattern(5 * MIB))

    rigged(story, capacity_bytes=CAPACITY)


@pytest.mark.parametrize("mode", ["back", "local"])
def test_small_objects_that_are_deleted_leave_room_for_as_many(rigged: Rigged, mode: str) -> None:
    """While the backend is away, too, and after a restart."""

    async def fill(rig: Rig) -> list[str]:
        kept: list[str] = []
        while len(kept) < 2000:
            keys = [f"k{len(kept) + number:05d}" for number in range(32)]
            outcomes = await asyncio.gather(*(put(rig, key, pattern(9000)) for key in keys), return_exceptions=True)
            kept += [key for key, one in zip(keys, outcomes, strict=True) if not isinstance(one, BaseException)]
            refused = [one for one in outcomes if isinstance(one, BaseException)]
            if refused:
                assert {getattr(one, "code", repr(one)) for one in refused} == {"InsufficientStorage"}
                return kept
        raise AssertionError("it does not fill")

    async def story(rig: Rig) -> None:
        await written(rig, mode, **({"dirty_bytes_max": 1 << 40} if mode == "back" else {}))
        rig.remote.writable.clear()
        first = await fill(rig)
        for restarted in (False, True):
            for key in first:
                await delete(rig, key)
            if restarted:
                await rig.again(clean=False)
            state = await rig.front.call("status")
            assert state.volumes[0].used_bytes < state.volumes[0].capacity_bytes // 4
            again = await fill(rig)
            assert len(again) > 0.8 * len(first)
            assert await rig.front.get(again[-1]) == pattern(9000)
            first = again
        rig.remote.writable.set()

    rigged(story, capacity_bytes=8 * MIB)


def test_through_goes_on_where_the_tier_has_no_room(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        await put(rig, "key", pattern(5 * MIB, 1))
        data = pattern(40 * MIB, 2)
        answer = await put(rig, "key", data)
        assert answer.version == (await rig.remote.objects.head("key")).version
        record = rig.engine.store.lookup("remote", "key")
        assert record is None or record.version == answer.version, "never what was there before"
        assert await rig.front.get("key") == data
        assert temp_files(rig) == []

    rigged(story, capacity_bytes=CAPACITY)


def test_a_volume_that_goes_out_takes_no_write_and_through_goes_on(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        await put(rig, "key", b"one")
        volume = next(iter(rig.engine.store.usable()))
        volume.trouble(OSError(5, "Input/output error"), "a test")
        await asyncio.sleep(0.01)
        await put(rig, "key", b"two")
        assert await rig.front.get("key") == b"two"
        assert rig.remote.objects._find("key")[1] == b"two"
        await written(rig, "back")
        with pytest.raises(ForebayError):
            await put(rig, "key", b"three")
        assert await rig.front.get("key") == b"two"

    rigged(story)


def test_who_writes_more_than_is_flushed_waits(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", dirty_bytes_max=8 * MIB)
        rig.remote.writable.clear()
        await put(rig, "a", pattern(5 * MIB, 1))
        waiting = asyncio.create_task(put(rig, "b", pattern(5 * MIB, 2)))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "it waits until the backend has more of it"
        assert await rig.front.get("a") == pattern(5 * MIB, 1)
        rig.remote.writable.set()
        await waiting
        assert await rig.front.get("b") == pattern(5 * MIB, 2)
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_pinned_prefixes_hold_for_what_is_written(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode, pinned=("keep/",))
        await put(rig, "keep/key", pattern(5 * MIB))
        await put(rig, "other", pattern(5 * MIB))
        await flushed(rig)
        rig.engine.flush()
        kept, other = rig.engine.index.lookup("remote", "keep/key"), rig.engine.index.lookup("remote", "other")
        assert kept is not None
        assert other is not None
        assert bool(kept.state & State.PINNED)
        assert not other.state & State.PINNED

    rigged(story)


def test_memory_is_not_synced(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", durability="memory")
        rig.remote.writable.clear()
        await put(rig, "key", b"one")
        owed = [each for each in notes_of(rig.engine.store) if each.key == "key"]
        assert [each.durable for each in owed] == [False]
        await rig.again(clean=False)
        assert await rig.front.get("key") == b"one", "the process was killed, not the machine"
        rig.remote.writable.set()
        await flushed(rig)

    rigged(story)
