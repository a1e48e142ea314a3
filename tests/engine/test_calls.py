"""Buckets, listings, jobs, room and metrics, as a front asks for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.backend_options import HIDDEN
from forebay.core.errors import Invalid, NoBackendBucket, NotFound, Unavailable
from forebay.core.messages import calls
from forebay.core.types import Bucket
from forebay.node.engine.buckets import environment_has_credentials

from .conftest import MIB, Rig, pattern, rig

Rigged = Callable[..., None]


def test_buckets_come_and_go_and_fronts_hear_of_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", b"hello")
        made = await rig.front.call(
            "bucket_put", Bucket("second", "memory://x", options={"secret_access_key": "s3cr3t"})
        )
        assert made.options == {"secret_access_key": HIDDEN}
        assert made.created_s > 0
        assert [bucket.name for bucket in await rig.front.call("buckets")] == ["remote", "second"]
        welcome = rig.front.welcomes[-1]
        assert {bucket.name: bucket.options for bucket in welcome.buckets}["second"] == {"secret_access_key": "s3cr3t"}
        await rig.front.call("bucket_put", made)
        kept = {bucket.name: bucket for bucket in rig.engine.buckets.all()}["second"]
        assert kept.options == {"secret_access_key": "s3cr3t"}, "what was hidden stays as it was"
        assert await rig.front.get("object", bucket="second") == b"hello"
        await rig.front.call("bucket_delete", calls.BucketNamed("second"))
        assert rig.engine.store.lookup("second", "object") is None
        with pytest.raises(NotFound):
            await rig.front.get("object", bucket="second")
        rig.remote.down = Unavailable("away")
        with pytest.raises(Unavailable):
            await rig.front.call(
                "bucket_put", calls.BucketPutCall(Bucket("third", "memory://y"), check=True, free=True)
            )
        with pytest.raises(Invalid):
            await rig.front.call("bucket_put", Bucket("no such name", "memory://y"))
        with pytest.raises(Unavailable):
            await rig.front.call("bucket_check", calls.BucketNamed("remote"))
        assert "away" in (await rig.front.call("status")).buckets[0].error

    rigged(story)


def test_a_bucket_that_moves_forgets_what_was_cached_elsewhere(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(5 * MIB))
        await rig.front.get("object")
        await rig.idle()
        rig.engine.flush()
        await rig.front.call("bucket_put", Bucket("remote", "memory://other"))
        assert rig.engine.store.lookup("remote", "object") is None

    rigged(story)


def test_buckets_are_remembered_over_a_restart_and_kept_from_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            await made.front.call("bucket_put", Bucket("second", "memory://x", freshness_s=5.0))
            node_id = made.engine.node_id
            await made.again()
            assert [bucket.freshness_s for bucket in await made.front.call("buckets")] == [60.0, 5.0]
            assert made.engine.node_id == node_id
            for path in (made.settings.meta_file, made.settings.engine_socket):
                assert os.stat(path).st_mode & 0o077 == 0, path

    asyncio.run(story())


def test_listings_from_the_backend_and_from_the_index(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for number in range(30):
            rig.remote.place(f"a/{number:02}/x", b"%d" % number)
            rig.remote.place(f"b{number:02}", b"%d" % number)
        page = await rig.front.call("list", calls.ListCall("remote", delimiter="/", limit=5))
        assert page.prefixes == ["a/"]
        assert [entry.key for entry in page.entries] == ["b00", "b01", "b02", "b03"]
        assert (await rig.front.call("list_cached", calls.ListCall("remote"))).entries == []
        for number in range(0, 30, 2):
            await rig.front.get(f"a/{number:02}/x")
            await rig.front.get(f"b{number:02}")
        rig.engine.flush()
        entries: list[str] = []
        prefixes: list[str] = []
        after = ""
        while True:
            call = calls.ListCall("remote", delimiter="/", start_after=after, limit=4)
            cached = await rig.front.call("list_cached", call)
            assert len(cached.entries) + len(cached.prefixes) <= 4
            entries += [entry.key for entry in cached.entries]
            prefixes += cached.prefixes
            after = cached.next_after
            if not after:
                break
        assert prefixes == ["a/"]
        assert entries == [f"b{number:02}" for number in range(0, 30, 2)]

    rigged(story)


def test_stat_tells_what_is_cached(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        info = rig.remote.place("object", pattern(9 * MIB))
        state = await rig.front.call("stat", calls.StatCall("remote", "object"))
        assert (state.size_bytes, state.cached_bytes, state.etag) == (9 * MIB, 0, info.etag)
        await rig.front.get("object")
        await rig.idle()
        state = await rig.front.call("stat", calls.StatCall("remote", "object"))
        assert (state.cached_bytes, state.cached_blocks, state.blocks) == (9 * MIB, 3, 3)
        assert state.headers["content-type"] == "text/x-story"
        assert state.fresh_until_s > rig.clock.wall_s() + 30
        with pytest.raises(NotFound):
            await rig.front.call("stat", calls.StatCall("remote", "nothing"))

    rigged(story)


def test_prefetch_evict_and_refresh(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = {f"train/{number}": pattern(2 * MIB + number, number) for number in range(6)}
        for key, value in data.items():
            rig.remote.place(key, value)
        rig.remote.place("other", b"x")
        dry = await rig.front.job("prefetch", calls.JobCall("remote", "train/", dry_run=True))
        assert (dry.units_total, dry.bytes_total) == (6, sum(map(len, data.values())))
        assert rig.remote.count("fetch") == 0
        done = await rig.front.job("prefetch", calls.JobCall("remote", "train/"))
        assert (done.state, done.units_done, done.units_failed) == ("done", 6, 0)
        assert done.bytes_done == sum(map(len, data.values()))
        await rig.idle()
        rig.remote.asked.clear()
        for key, value in data.items():
            assert await rig.front.get(key) == value
        assert not rig.remote.asked
        again = await rig.front.job("prefetch", calls.JobCall("remote", keys=["train/1", "missing"]))
        assert (again.state, again.units_done, again.units_failed) == ("done", 1, 1)
        assert "missing" in again.errors[0]
        newer = rig.remote.place("train/3", b"new")
        refreshed = await rig.front.job("refresh", calls.JobCall("remote", "train/"))
        assert refreshed.units_done == 6
        assert rig.remote.count("check") == 6
        assert await rig.front.get("train/3") == b"new"
        state = await rig.front.call("stat", calls.StatCall("remote", "train/3"))
        assert state.version == newer.version
        await rig.idle()
        evicted = await rig.front.job("evict", calls.JobCall("remote", "train/"))
        assert evicted.state == "done"
        rig.engine.flush()
        assert (await rig.front.call("list_cached", calls.ListCall("remote"))).entries == []
        assert len(await rig.front.call("jobs")) == 5
        with pytest.raises(NotFound):
            await rig.front.call("job", calls.JobNamed("never"))

    rigged(story)


@pytest.mark.parametrize("verb", ["prefetch", "pin"])
def test_progress_moves_inside_an_object(rigged: Rigged, verb: str) -> None:
    async def story(rig: Rig) -> None:
        size = 9 * MIB
        rig.remote.place("large", pattern(size))
        rig.remote.free_bytes = 5 * MIB
        rig.remote.open.clear()
        begun = await rig.front.call(verb, calls.JobCall("remote", keys=["large"]))

        async def look() -> calls.JobState:
            return await rig.front.call("job", calls.JobNamed(begun.job))  # type: ignore[no-any-return]

        while (state := await look()).bytes_done < 4 * MIB:
            assert state.state == "running"
            await asyncio.sleep(0.001)
        assert (state.units_done, state.bytes_total) == (0, size)
        assert state.bytes_done < size
        rig.remote.open.set()
        state = await rig.front.ended(state)
        assert (state.units_done, state.bytes_done, state.bytes_total) == (1, size, size)

    rigged(story)


def test_a_job_is_cancelled_and_another_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            for number in range(40):
                made.remote.place(f"{number:02}", pattern(MIB, number))
            made.remote.open.clear()
            job = await made.front.call("prefetch", calls.JobCall("remote"))
            assert (await made.front.call("job_cancel", calls.JobNamed(job.job))).state == "cancelled"
            await made.idle()
            job = await made.front.call("prefetch", calls.JobCall("remote"))
            await asyncio.sleep(0.05)
            await made.again()
            made.remote.open.set()
            assert (await made.front.ended(job)).units_done == 40
            await made.again()
            assert await made.front.call("jobs") == [], "what is done is not done again"

    asyncio.run(story())


def test_the_cache_stays_within_its_bound_and_keeps_what_is_pinned(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for number in range(4):
            rig.remote.place(f"keep/{number}", pattern(4 * MIB, number))
            await rig.front.get(f"keep/{number}")
        rig.remote.place("keep/4", pattern(3 * MIB, 4))
        pinned = await rig.front.job("pin", calls.JobCall("remote", "keep/"))
        assert (pinned.state, pinned.units_done) == ("done", 5), "what was not here is fetched"
        evicted = await rig.front.job("evict", calls.JobCall("remote", "keep/"))
        assert (evicted.state, evicted.units_done, evicted.bytes_done) == ("done", 0, 0), "what is pinned stays"
        for number in range(30):
            rig.remote.place(f"scan/{number}", pattern(5 * MIB, number))
            assert await rig.front.get(f"scan/{number}") == pattern(5 * MIB, number)
            usage = rig.engine.store.usage()[0]
            assert usage.used_bytes <= 64 * MIB
        await rig.idle()
        rig.remote.asked.clear()
        for number in range(4):
            assert await rig.front.get(f"keep/{number}") == pattern(4 * MIB, number)
        assert await rig.front.get("keep/4") == pattern(3 * MIB, 4)
        assert not rig.remote.asked, "pinned"
        assert rig.engine.tally.evictions["capacity"] > 10
        assert usage.used_bytes > 40 * MIB, "the room is used"
        data_bytes = sum(
            os.stat(path).st_blocks * 512 for path in Path(usage.path, "data").rglob("*") if path.is_file()
        )
        assert data_bytes <= 80 * MIB, "the space came back"
        await rig.front.job("unpin", calls.JobCall("remote", "keep/"))
        assert rig.engine.buckets.all()[0].pinned == ()

    rigged(story, capacity_bytes=64 * MIB)


def test_an_object_larger_than_the_cache_is_read_whole(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(90 * MIB)
        rig.remote.place("object", data)
        assert await rig.front.get("object") == data
        assert rig.engine.store.usage()[0].used_bytes <= 32 * MIB
        assert await rig.front.get("object") == data

    rigged(story, capacity_bytes=32 * MIB)


def test_metrics_are_documented_and_add_up(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(3 * MIB))
        await rig.front.get("object")
        await rig.idle()
        rig.front.vanish()
        rig.front = type(rig.front)()
        await rig.front.connect(rig.settings)
        snapshot = rig.engine.verbs.snapshot()
        snapshot.check()
        assert snapshot.values['forebay_backend_read_bytes_total{bucket="remote"}'] == 3 * MIB
        assert snapshot.values["forebay_objects"] == 1
        assert snapshot.values["forebay_flights"] == 0
        assert sum(snapshot.histograms["forebay_backend_first_byte_seconds"].counts) == 1

    rigged(story)


def test_credentials_of_the_environment() -> None:
    assert not environment_has_credentials({"HOME": "/nonexistent"})
    assert environment_has_credentials({"AWS_ACCESS_KEY_ID": "x"})
    assert environment_has_credentials({"AWS_PROFILE": "x"})


def test_an_unknown_bucket_is_looked_for_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    async def story() -> None:
        async with rig(tmp_path) as made:
            made.engine.buckets._auto = True
            made.remote.place("object", b"hello")
            assert await made.front.get("object", bucket="found-by-name") == b"hello"
            assert [bucket.url for bucket in await made.front.call("buckets")] == [
                "s3://found-by-name",
                "memory://remote",
            ]
            made.remote.down = NoBackendBucket("no such bucket")
            for _ in range(2):
                with pytest.raises(NotFound):
                    await made.front.get("object", bucket="not-there")
            made.remote.down = None
            await made.again()
            assert [bucket.name for bucket in await made.front.call("buckets")] == ["remote"], "found, not kept"

    asyncio.run(story())
