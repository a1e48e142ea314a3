"""Derived objects: kept beside what they were made from, found for one version only, and gone with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.derived import DERIVED_KINDS, KeepCall, name_of, names_under, reserved
from forebay.core.errors import Invalid, NotFound
from forebay.core.messages import calls
from forebay.core.types import Bucket, check_bucket_name
from forebay.node.store.derived import Derived
from forebay.node.store.reader import LeasedFile, StoreReader

from .conftest import MIB, Front, Rig, pattern, rig, until
from .writing import put, temp_files, written

Rigged = Callable[..., None]
SIZES = [0, 7, limits.INLINE_BYTES_MAX, limits.INLINE_BYTES_MAX + 1, 9 * MIB + 3]


class Asking:
    """A front that makes derived things."""

    def __init__(self, rig: Rig) -> None:
        self.store = StoreReader(rig.engine.store.volumes())
        self.touched: list[int] = []
        self.derived = Derived(self.store, rig.front.call, lambda object_id, first, end: self.touched.append(object_id))

    def read(self, kind: str, key: str, version: str, bucket: str = "remote") -> bytes | None:
        found = self.derived.find(kind, bucket, key, version)  # type: ignore[arg-type]
        if not isinstance(found, LeasedFile):
            return found
        try:
            return os.pread(found.fd, found.record.size_bytes + 1, 0)
        finally:
            found.release()


async def version_of(rig: Rig, key: str) -> str:
    state = await rig.front.call("stat", calls.StatCall("remote", key))
    return str(state.version)


def test_what_was_kept_is_found_for_its_version_alone(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        version = (await put(rig, "a/shard.tar", b"source")).version
        front = Asking(rig)
        for kind in DERIVED_KINDS:
            for size in SIZES:
                data = pattern(size, 5)
                assert await front.derived.keep(kind, "remote", "a/shard.tar", version, data)
                assert front.read(kind, "a/shard.tar", version) == data
                assert front.touched, "it counts as used"
                front.touched.clear()
                assert front.read(kind, "a/shard.tar", "another") is None
                assert front.read(kind, "a/shard.ta", version) is None
                assert front.derived.find(kind, "other", "a/shard.tar", version) is None
        assert temp_files(rig) == []
        front.store.close()

    rigged(story)


def test_it_survives_a_restart_and_a_newer_version_takes_its_place(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        old = (await put(rig, "shard", b"one")).version
        front = Asking(rig)
        await front.derived.keep("members", "remote", "shard", old, pattern(100_000, 1))
        front.store.close()
        await rig.again()
        front = Asking(rig)
        assert front.read("members", "shard", old) == pattern(100_000, 1)
        new = (await put(rig, "shard", b"two!")).version
        assert not await front.derived.keep("members", "remote", "shard", old, b"late"), "nobody will ask for it"
        assert await front.derived.keep("members", "remote", "shard", new, pattern(50, 2))
        assert (front.read("members", "shard", new), front.read("members", "shard", old)) == (pattern(50, 2), None)
        assert temp_files(rig) == []
        front.store.close()

    rigged(story)


def test_no_listing_no_read_and_no_bucket_shows_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        version = (await put(rig, "shard", b"one")).version
        front = Asking(rig)
        await front.derived.keep("plain", "remote", "shard", version, pattern(3 * MIB, 1))
        page = await rig.front.call("list", calls.ListCall("remote"))
        assert [entry.key for entry in page.entries] == ["shard"]
        cached = await rig.front.call("list_cached", calls.ListCall("remote"))
        assert [entry.key for entry in cached.entries] == ["shard"]
        assert [bucket.name for bucket in await rig.front.call("buckets")] == ["remote"]
        for kind in DERIVED_KINDS:
            with pytest.raises(Invalid):
                check_bucket_name(reserved(kind))
            with pytest.raises(Invalid):
                await rig.front.call("list_cached", calls.ListCall(reserved(kind)))
            with pytest.raises(NotFound):
                await rig.front.get(name_of("remote", "shard"), bucket=reserved(kind))
            with pytest.raises(Invalid):
                await rig.front.call("bucket_put", Bucket(reserved(kind), "memory://x"))
        state = await rig.front.call("status")
        assert state.derived_bytes == 3 * MIB
        assert 3 * MIB + 3 <= sum(volume.used_bytes for volume in state.volumes) < 3 * MIB + 1024
        assert [bucket.cached_bytes for bucket in state.buckets] == [3]
        front.store.close()

    rigged(story)


def test_it_goes_with_what_it_was_made_from(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        front = Asking(rig)
        for key in ("a/one", "a/two", "b/one"):
            rig.remote.place(key, b"source of " + key.encode())
            await rig.front.get(key)
            await front.derived.keep("members", "remote", key, await version_of(rig, key), pattern(20_000, 1))
        await rig.front.job("evict", calls.JobCall("remote", keys=["a/one"], dry_run=True))
        assert front.read("members", "a/one", await version_of(rig, "a/one")) is not None
        await rig.front.job("evict", calls.JobCall("remote", keys=["a/one"]))
        assert front.read("members", "a/one", await version_of(rig, "a/one")) is None
        await rig.front.job("evict", calls.JobCall("remote", prefix="a/"))
        assert front.read("members", "a/two", await version_of(rig, "a/two")) is None
        version = await version_of(rig, "b/one")
        assert front.read("members", "b/one", version) is not None
        await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        assert front.read("members", "b/one", version) is None
        assert not await front.derived.keep("members", "remote", "b/one", version, b"late"), "its bucket is gone"
        await until(lambda: rig.engine.store.usage()[0].used_bytes == 0)
        front.store.close()

    rigged(story)


def test_it_is_evicted_like_anything_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path, capacity_bytes=24 * MIB) as made:
            front = Asking(made)
            made.remote.place("shard", b"s")
            await made.front.get("shard")
            version = await version_of(made, "shard")
            assert await front.derived.keep("plain", "remote", "shard", version, pattern(8 * MIB, 1))
            for number in range(12):
                made.remote.place(f"k{number}", pattern(4 * MIB, number))
                for _ in range(3):
                    await made.front.get(f"k{number}")
            await until(lambda: made.engine.store.usage()[0].used_bytes <= 24 * MIB)
            assert front.read("plain", "shard", version) is None, "a part of it is gone: it counts for nothing"
            assert not await front.derived.keep("plain", "remote", "shard", version, pattern(25 * MIB, 1)), "no room"
            assert [name for name in temp_files(made) if "incoming" in name] == []
            front.store.close()

    asyncio.run(story())


def test_a_front_that_dies_keeps_nothing_half(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        version = (await put(rig, "shard", b"one")).version
        front = Asking(rig)
        writer = front.derived.writer("plain", "remote", "shard", version)
        writer.write(pattern(100_000, 1))
        assert front.read("plain", "shard", version) is None
        writer.abort()
        writer.abort()
        assert temp_files(rig) == []
        other = Front()
        await other.connect(rig.settings, 2)
        with pytest.raises(Invalid):
            await other.call("keep", KeepCall("plain", "remote", "shard", version, 3))
        await other.aclose()
        front.store.close()

    rigged(story)


def test_names_are_bounded_distinct_and_stand_under_their_prefixes() -> None:
    keys = ["", "a", "a/", "=", "#", "x" * 1024, "x" * 1023 + "y", "é" * 512, "x" * 980, "x" * 1000 + "é" * 12]
    for bucket in ("abc", "b" * 63):
        names = [name_of(bucket, key) for key in keys]
        assert len(set(names)) == len(keys)
        assert max(len(name.encode()) for name in names) <= limits.KEY_BYTES_MAX
        for key, name in zip(keys, names, strict=True):
            for cut in (0, 1, 5, 400, 900, 990, len(key)):
                assert name.startswith(names_under(bucket, key[:cut])), (key[:20], cut)


def test_names_on_disk_stay_what_they_were() -> None:
    assert [reserved(kind) for kind in DERIVED_KINDS] == ["-members", "-manifests", "-plain"]
