"""A volume that goes out while it owes: what it may own is refused, all else goes on, and nothing is forgotten."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from forebay.core import calls
from forebay.core.errors import VolumeMissing

from .conftest import MIB, Rig, pattern
from .writing import AWAY, delete, names, put, written

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
