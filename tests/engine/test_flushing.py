"""Flushing through a whole engine: the job, what status and metrics say, stops and starts, conflicts, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.errors import Busy, Denied, NotFound, Unavailable
from forebay.core.messages import calls
from forebay.core.messages.node_state import BucketState
from forebay.core.record import State
from forebay.core.types import Bucket
from forebay.node.settings import Settings

from .conftest import MIB, FakeClock, Front, Remote, Rig, pattern, until
from .writing import AWAY, delete, flushed, names, put, written

Rigged = Callable[..., None]


async def bucket_state(rig: Rig) -> BucketState:
    state = await rig.front.call("status")
    return next(bucket for bucket in state.buckets if bucket.name == "remote")


def test_the_flush_job_brings_what_was_dirty_to_the_backend(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        bodies = {"a/1": b"one", "a/2": pattern(2 * MIB), "b/3": b"three"}
        for key, body in bodies.items():
            await put(rig, key, body)
        rig.remote.place("a/gone", b"theirs")
        await delete(rig, "a/gone")
        plan = await rig.front.job("flush", calls.JobCall("remote", dry_run=True))
        assert (plan.units_total, plan.bytes_total) == (4, 2 * MIB + 8)
        job = await rig.front.call("flush", calls.JobCall("remote", "a/"))
        await asyncio.sleep(0.01)
        assert (await rig.front.call("job", calls.JobNamed(job.job))).state == "running"
        rig.remote.writable.set()
        done = await rig.front.ended(job)
        assert (done.state, done.units_done, done.bytes_done) == ("done", 3, 2 * MIB + 3)
        done = await rig.front.job("flush", calls.JobCall("remote", keys=["b/3", "a/1"]))
        assert (done.state, done.units_failed) == ("done", 0)
        for key, body in bodies.items():
            record = rig.engine.store.lookup("remote", key)
            assert record is not None
            assert not record.state & State.DIRTY
            assert record.version == (await rig.remote.objects.head(key)).version
            assert await rig.front.get(key) == body
        assert await names(rig) == sorted(bodies)

    rigged(story)


def test_a_flush_that_the_backend_refuses_says_so_in_the_job_and_in_status(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.down = Denied("the credentials may not write: fix them")
        await put(rig, "a", b"one")
        job = await rig.front.job("flush", calls.JobCall("remote"))
        assert (job.units_done, job.units_failed) == (0, 1)
        assert "may not write" in job.errors[0]
        state = await bucket_state(rig)
        assert "flush of a: Denied" in state.error
        assert (state.dirty_bytes, state.dirty_objects) == (3, 1)
        rig.remote.down = None
        assert (await rig.front.job("flush", calls.JobCall("remote"))).units_done == 1
        state = await bucket_state(rig)
        assert (state.error, state.dirty_objects) == ("", 0)

    rigged(story)


def test_a_cancelled_job_leaves_the_flush_to_the_flusher(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        await put(rig, "a", b"one")
        job = await rig.front.call("flush", calls.JobCall("remote"))
        state = await rig.front.call("job_cancel", calls.JobNamed(job.job))
        assert state.state == "cancelled"
        assert rig.engine.flusher.find("remote", "a") is not None
        await flushed(rig)
        assert (await rig.remote.objects.head("a")).size_bytes == 3

    rigged(story)


def test_status_and_metrics_tell_what_is_dirty_and_how_old(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        began_s = rig.clock.wall_s()
        await put(rig, "a", pattern(MIB))
        rig.remote.place("b", b"theirs")
        await delete(rig, "b")
        await until(lambda: rig.engine.flusher.totals("remote").flushing == 2)
        rig.clock.ahead_s += 90
        state = await bucket_state(rig)
        assert (state.dirty_bytes, state.dirty_objects, state.flushing, state.conflicts) == (MIB, 2, 2, 0)
        assert state.dirty_since_s is not None
        assert began_s <= state.dirty_since_s < began_s + 60
        values = (await rig.front.call("metrics")).values
        assert values['forebay_dirty_bytes{bucket="remote"}'] == MIB
        assert values['forebay_dirty_objects{bucket="remote"}'] == 2
        assert 90 <= values['forebay_dirty_age_seconds{bucket="remote"}'] < 150
        await flushed(rig)
        values = (await rig.front.call("metrics")).values
        assert values['forebay_dirty_bytes{bucket="remote"}'] == 0
        assert values['forebay_flushes_total{bucket="remote"}'] == 2
        assert values['forebay_flushed_bytes_total{bucket="remote"}'] == MIB

    rigged(story)


def test_a_clean_stop_flushes_and_an_impatient_one_leaves_it_to_the_next_start(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path, Remote(), FakeClock(), flush_timeout_s=0.3)
        await rig.start(Bucket("remote", "memory://remote", write="back"))
        body = pattern(3 * MIB)
        rig.remote.writable.clear()
        await put(rig, "file", body)
        await put(rig, "small", b"small")
        rig.remote.place("gone", b"theirs")
        await delete(rig, "gone")
        await rig.front.aclose()
        await rig.engine.stop(flush=True)  # the backend takes nothing: time is up
        assert json.loads(rig.settings.owed_file.read_text()) == {"objects": 3, "bytes": 3 * MIB + 5}
        rig.settings.no_flush_file.touch()
        rig.front = Front()
        await rig.start()
        assert [key for key, _ in rig.engine.flusher.window("remote", "", "", 9)] == ["file", "gone", "small"]
        assert await rig.front.get("file") == body
        with pytest.raises(NotFound):
            await rig.front.get("gone")
        await rig.front.aclose()
        rig.settings = Settings(**{**_fields(rig.settings), "flush_timeout_s": 600.0})
        await rig.engine.stop(flush=True)  # somebody said `--no-flush`
        rig.settings.no_flush_file.unlink()
        rig.settings.owed_file.unlink()
        rig.front = Front()
        await rig.start()
        rig.remote.writable.set()
        await rig.front.aclose()
        await rig.engine.stop(flush=True)
        assert not rig.settings.owed_file.exists()
        assert await _whole(rig.remote, "file") == body
        assert await _whole(rig.remote, "small") == b"small"

    asyncio.run(story())


def _fields(settings: Settings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


async def _whole(remote: Remote, key: str) -> bytes:
    fetch = await remote.objects.fetch(key)
    return b"".join([chunk async for chunk in fetch])


def test_a_large_upload_survives_a_restart_of_the_engine(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path, Remote(), FakeClock())
        rig.remote.part_bytes_min = MIB
        await rig.start(Bucket("remote", "memory://remote", write="back"))
        body = pattern(limits.MULTIPART_BYTES_MIN + 3 * MIB, 7)
        rig.remote.writable.clear()
        await put(rig, "big", body)
        await until(lambda: rig.remote.count("begin") == 1)
        rig.remote.writable.set()
        await until(lambda: rig.remote.count("part") >= 1)
        await rig.again()
        await flushed(rig)
        assert rig.remote.count("begin") == 1
        assert await _whole(rig.remote, "big") == body
        assert await rig.remote.objects.list_uploads("") == []
        assert not rig.engine.flusher.metrics().get('forebay_flush_conflicts_total{bucket="remote",policy="keep-both"}')
        await rig.stop()

    asyncio.run(story())


def test_after_a_conflict_readers_find_theirs_and_ours_beside_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", freshness_s=1e18)
        rig.remote.place("k", b"base")
        assert await rig.front.get("k") == b"base"
        rig.remote.writable.clear()
        await put(rig, "k", b"ours")
        rig.remote.place("k", b"theirs")
        assert await rig.front.get("k") == b"ours"  # acknowledged here, and nobody has looked there yet
        await flushed(rig)
        assert await rig.front.get("k") == b"theirs"
        [kept] = [name for name in await names(rig) if name != "k"]
        assert kept.startswith(f"k.conflict-{rig.engine.node_id}-")
        assert await rig.front.get(kept) == b"ours"
        assert (await bucket_state(rig)).conflicts == 1

    rigged(story)


def test_writes_beyond_the_bound_wait_and_are_then_told_to_slow_down(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", dirty_bytes_max=MIB)
        rig.remote.writable.clear()
        await put(rig, "a", pattern(MIB))
        waiting = asyncio.create_task(put(rig, "b", pattern(MIB)))
        await until(lambda: rig.engine.flusher.metrics()['forebay_write_waits_total{bucket="remote"}'] == 1)
        assert not waiting.done()
        rig.clock.ahead_s += limits.DIRTY_WAIT_S
        again = asyncio.create_task(put(rig, "c", pattern(MIB)))  # who comes makes the gate look at its clock
        with pytest.raises(Busy) as caught:
            await waiting
        assert caught.value.code == "SlowDown"
        assert caught.value.retry_after_s > 0
        assert await rig.front.get("a") == pattern(MIB)
        rig.remote.writable.set()
        await again
        assert await names(rig) == ["a", "c"]
        await flushed(rig)

    rigged(story)


def test_a_backend_that_is_away_for_a_while_loses_nothing(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.down = AWAY
        for number in range(30):
            await put(rig, f"k{number:02}", b"%d" % number)
        await delete(rig, "k07")
        await until(lambda: rig.engine.flusher.totals("remote").error != "")
        rig.remote.down = None
        rig.clock.ahead_s += 120
        job = await rig.front.job("flush", calls.JobCall("remote"))
        assert (job.units_done, job.units_failed) == (30, 0)
        kept = {f"k{number:02}": b"%d" % number for number in range(30) if number != 7}
        assert {key: await _whole(rig.remote, key) for key in kept} == kept
        with pytest.raises(NotFound):
            await rig.remote.objects.head("k07")

    rigged(story)


def test_who_was_taken_over_while_it_flushed_decides_no_conflict(rigged: Rigged) -> None:
    """Others act on the key by then, and what they wrote looks like a stranger's."""

    async def story(rig: Rig) -> None:
        rig.remote.place("key", b"before")
        await written(rig, "back")
        await rig.front.get("key")
        rig.remote.down = AWAY
        await delete(rig, "key")
        rig.remote.place("key", b"what others wrote since")
        rig.remote.may_head.clear()
        looks = rig.remote.count("head")
        rig.remote.down = None
        await until(lambda: rig.remote.count("head") > looks)

        def may_send(bucket: str, under_way: bool) -> None:
            raise Unavailable("this node lost its place in the cluster: what it owes waits")

        rig.engine.flusher.may_send = may_send
        rig.remote.may_head.set()
        await rig.front.job("flush", calls.JobCall("remote"))
        assert (await bucket_state(rig)).conflicts == 0
        assert rig.engine.flusher.find("remote", "key") is not None, "it is not this node's to drop"

    rigged(story)
