"""A volume that goes out, or is not there at a start.

What it may own is refused, all else goes on, and nothing is forgotten. What it brings back hides no later write."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.errors import Unavailable, VolumeMissing
from forebay.core.machines.opening import DOWN_FOR_S
from forebay.core.messages import calls
from forebay.core.types import FRESH_IMMUTABLE
from forebay.node.store.writer import remembered_volumes

from .conftest import MIB, Front, Rig, pattern
from .writing import AWAY, delete, flushed, names, put, written

Rigged = Callable[..., None]
KEYS = [f"key-{number}" for number in range(16)]


def volume_paths(rig: Rig) -> tuple[str, str]:
    folder = rig.settings.dir
    return f"{folder}/a", f"{folder}/b"


def homes(rig: Rig) -> dict[str, str]:
    return {key: rig.engine.store.volume_of("remote", key) for key in KEYS}


def test_a_volume_goes_out_with_what_it_owes(tmp_path_factory: pytest.TempPathFactory, rigged: Rigged) -> None:
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        for key in KEYS:
            rig.remote.place(key, b"the backend's")
            await rig.front.get(key)
        await written(rig, "back")
        rig.remote.down = AWAY
        data = {key: pattern(2 * MIB if number % 2 else 100, number) for number, key in enumerate(KEYS)}
        for key, body in data.items():
            await put(rig, key, body)
        before = homes(rig)
        lost, kept = (volume.id for volume in rig.engine.store.usable())
        rig.engine.store._by_id[lost].trouble(OSError(errno.EIO, "it errs"), "reading")
        rig.engine.store.housekeep()
        for key in KEYS:
            if before[key] == kept:
                assert await rig.front.get(key) == data[key]
                await put(rig, key, data[key][::-1])
                continue
            for attempt in (rig.front.get(key), put(rig, key, b"newer"), delete(rig, key)):
                with pytest.raises(VolumeMissing, match=lost):
                    await attempt
        with pytest.raises(VolumeMissing, match="give-up"):
            await names(rig)
        with pytest.raises(VolumeMissing):
            await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        rig.remote.down = None
        job = await rig.front.job("flush", calls.JobCall("remote"))
        assert job.units_failed
        status = await rig.front.call("status")
        assert status.buckets[0].missing == [lost]
        assert [volume.state for volume in status.volumes if volume.volume_id == lost] == ["out"]
        assert (await rig.front.call("volume_give_up", calls.VolumeNamed(lost))).owed_buckets == ["remote"]
        for key in KEYS:
            assert await rig.front.get(key) == (b"the backend's" if before[key] == lost else data[key][::-1])
        assert (await rig.front.job("flush", calls.JobCall("remote"))).units_failed == 0

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_what_is_remembered_follows_what_is_owed(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.down = AWAY
        await put(rig, "k", b"x")
        (known,) = rig.engine.known.memory.volumes
        assert known.buckets == ("remote",)
        rig.remote.down = None
        await rig.engine.flusher.flush("remote")
        rig.engine.flush()
        rig.engine.store.settle()
        rig.engine.flush()
        await rig.engine.known.tend(rig.engine.store, rig.engine.writes.written_buckets())
        (known,) = rig.engine.known.memory.volumes
        assert (known.buckets, known.owed_objects) == ((), 0)
        await put(rig, "k", b"y")
        (known,) = rig.engine.known.memory.volumes
        assert known.buckets == ("remote",), "and again before the next write is acknowledged"

    rigged(story)


async def put_all(rig: Rig, body: bytes) -> None:
    for key in KEYS:
        await put(rig, key, body)


async def read_all(rig: Rig) -> set[bytes | None]:
    """What the keys are, None for what cannot be read now."""
    return {await read_or_refused(rig, key) for key in KEYS}


async def restarted(rig: Rig, *, gone: str = "", back: str = "") -> None:
    """Stop; take the volume `gone` away, and bring `back` the other; start."""
    await rig.stop()
    if back:
        Path(f"{back}-away").rename(back)
    if gone:
        Path(gone).rename(f"{gone}-away")
    rig.front = Front()
    await rig.start()


async def read_or_refused(rig: Rig, key: str) -> bytes | None:
    try:
        return await rig.front.get(key)
    except Unavailable:
        return None


def test_what_was_written_while_a_volume_was_away_is_not_hidden_by_its_return(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    """Its copies may be older than what was acknowledged since: the backend confirms each, or nobody reads it."""
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        await put_all(rig, b"one")
        await restarted(rig, gone=f"{folder}/b")
        await put_all(rig, b"two")
        await restarted(rig, back=f"{folder}/b")
        rig.remote.down = AWAY
        assert await read_all(rig) == {b"two", None}
        for key in KEYS:
            with pytest.raises(Unavailable):
                await put(rig, key, b"three")
        assert await read_all(rig) == {b"two", None}, "a write changes nothing of that"
        rig.remote.down = None
        rig.clock.ahead_s += DOWN_FOR_S  # until then nobody would ask about what a write left in doubt
        assert await read_all(rig) == {b"two"}
        rig.remote.down = AWAY
        assert await read_all(rig) == {b"two"}, "confirmed, or fetched"

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_volumes_that_are_away_by_turns_know_of_each_others_sessions(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    """Neither was there when the other served alone, so neither mark says that it missed anything."""
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        await put_all(rig, b"one")
        await restarted(rig, gone=f"{folder}/a")
        await put_all(rig, b"two")
        await restarted(rig, gone=f"{folder}/b", back=f"{folder}/a")
        assert await read_all(rig) == {b"two"}
        await put_all(rig, b"three")
        await restarted(rig, back=f"{folder}/b")
        assert await read_all(rig) == {b"three"}

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_a_session_without_any_volume_is_known_to_the_next(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    folder = tmp_path_factory.mktemp("disk")

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        await put(rig, "key", b"one")
        await restarted(rig, gone=f"{folder}/a")
        await put(rig, "key", b"two")
        await restarted(rig, back=f"{folder}/a")
        rig.remote.down = AWAY
        assert await read_or_refused(rig, "key") is None
        rig.remote.down = None
        assert await rig.front.get("key") == b"two"

    rigged(story, volumes=(str(folder / "a"),))


def test_a_write_over_what_a_volume_brought_back_is_no_conflict_with_our_own(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        await written(rig, "back", freshness_s=FRESH_IMMUTABLE)
        for body, more in ((b"one", {"gone": f"{folder}/b"}), (b"two", {"back": f"{folder}/b"})):
            await put_all(rig, body)
            await flushed(rig)
            await rig.engine.known.tend(rig.engine.store, ())
            await restarted(rig, **more)
        await put_all(rig, b"three")
        await flushed(rig)
        assert sorted(await names(rig)) == sorted(KEYS), "no copy of a conflict"
        for key in KEYS:
            assert await rig.front.get(key, revalidate=True) == b"three"

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_fronts_hear_of_a_volume_that_goes_out_without_anything_to_commit(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    """They were greeted before the store had given it up, and went on reading its index: keys that had been written
    elsewhere since were read as they had been."""
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        await put_all(rig, b"one")
        volume = next(each for each in rig.engine.store.usable() if each.path == f"{folder}/b")
        volume.trouble(OSError(errno.EIO, "injected"), "looking")
        for _ in range(3):
            await asyncio.sleep(0)
        await put_all(rig, b"two")
        assert await read_all(rig) == {b"two"}
        assert {record.inline for key in KEYS if (record := rig.engine.index.lookup("remote", key))} == {b"two"}

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_what_one_volume_owes_for_another_is_known_after_two_starts_without_that_other(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    """The second start took it for the volume's own: when that volume was away and the other back, keys were written
    there, and the older write or delete came over them later."""
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        await written(rig, "back")
        await restarted(rig, gone=f"{folder}/b")
        rig.remote.down = AWAY
        await put_all(rig, b"older")
        await restarted(rig)
        await restarted(rig, gone=f"{folder}/a", back=f"{folder}/b")
        for key in KEYS:
            with pytest.raises((VolumeMissing, Unavailable)):
                await put(rig, key, b"newer")
        await restarted(rig, back=f"{folder}/a")
        assert await read_all(rig) == {b"older"}
        rig.remote.down = None
        await put_all(rig, b"newer")
        await flushed(rig)
        assert await read_all(rig) == {b"newer"}

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_an_id_used_on_a_volume_that_is_away_is_not_used_again(
    tmp_path_factory: pytest.TempPathFactory, rigged: Rigged
) -> None:
    """It was, where ids went up faster than the clock: when both volumes were back, one object's file replaced the
    other's."""
    folder = tmp_path_factory.mktemp("disks")

    async def story(rig: Rig) -> None:
        await restarted(rig, gone=f"{folder}/b")
        used = [rig.engine.store.take_id() for _ in range(200_000)]
        await restarted(rig, gone=f"{folder}/a", back=f"{folder}/b")
        assert rig.engine.store.take_id() > used[-1] > used[0]

    rigged(story, volumes=(str(folder / "a"), str(folder / "b")))


def test_no_id_is_used_that_the_node_has_not_noted(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        monkeypatch.setattr(remembered_volumes, "IDS_AHEAD", 100)
        await restarted(rig)
        store, known = rig.engine.store, rig.engine.known
        while store.next_id < known.memory.ids_below:
            store.take_id()
        with pytest.raises(Unavailable, match="metadata store"):
            store.take_id()
        await known.tend(store, ())
        assert store.take_id() < known.memory.ids_below == store.ids_remembered

    rigged(story)
