"""Writing at the engine: what an acknowledged write means, in each mode."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core import limits
from forebay.core.errors import Busy, Denied, Exists, Invalid, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.messages import calls
from forebay.core.types import FRESH_IMMUTABLE, LOCAL_URL, Bucket
from forebay.node.engine.write.locks import KeyLocks
from forebay.node.store.disk.volume_threads import remove_temp
from tests import patience

from .conftest import MIB, Front, Rig, pattern, rig, until
from .writing import AWAY, as_written, delete, flushed, incoming, names, put, temp_files, written

Rigged = Callable[..., None]
SIZES = [0, 5, limits.INLINE_BYTES_MAX, limits.INLINE_BYTES_MAX + 1, 9 * MIB + 7]


@pytest.mark.parametrize("mode", ["back", "local", "through"])
@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read_at_once_on_every_front(rigged: Rigged, mode: str, size: int) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode, freshness_s=0.0)
        if mode == "back":
            rig.remote.writable.clear()
        data = pattern(size, 3)
        answer = await put(rig, "a/key", data, headers=(("content-type", "text/plain"),))
        assert answer.size_bytes == size
        record = rig.engine.index.lookup("remote", "a/key")
        assert record is not None
        assert (record.etag, record.complete) == (answer.etag, True)
        assert b"text/plain" in record.head
        other = Front()
        await other.connect(rig.settings, 2)
        assert await other.get("a/key") == data
        await other.aclose()
        assert temp_files(rig) == []
        state = await rig.front.call("stat", calls.StatCall("remote", "a/key"))
        assert (state.size_bytes, state.dirty, state.version) == (size, mode == "back", record.version)
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_deleted_is_gone_at_once(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        await put(rig, "key", b"one")
        await delete(rig, "key")
        with pytest.raises(NotFound):
            await rig.front.get("key")
        with pytest.raises(NotFound):
            await rig.front.call("stat", calls.StatCall("remote", "key"))
        assert await names(rig) == []
        await delete(rig, "key")

    rigged(story)


# --- one writer per key, many in one sync ----------------------------------------------------------------------------
def test_writes_that_arrive_together_share_a_sync(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        commits = rig.engine.writes.commits
        before = commits.groups
        answers = await asyncio.gather(*(put(rig, f"key-{number:02}", b"%d" % number) for number in range(16)))
        assert commits.groups - before <= 3, "one that came first, and those that came while it was synced"
        assert len({answer.version for answer in answers}) == 16
        for number in range(16):
            assert await rig.front.get(f"key-{number:02}") == b"%d" % number

    rigged(story)


def test_writers_of_one_key_take_turns_and_the_last_one_stays(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for mode in ("back", "through"):
            await written(rig, mode)
            bodies = [pattern(20_000 + number, number) for number in range(12)]
            answers = await asyncio.gather(*(put(rig, "key", body) for body in bodies))
            seen = await rig.front.get("key")
            last = rig.engine.index.lookup("remote", "key")
            assert last is not None
            assert bodies.index(seen) == [answer.etag for answer in answers].index(last.etag)
            await flushed(rig)
            assert (await rig.remote.objects.head("key")).size_bytes == len(seen)
            assert len(rig.engine.writes.locks) == 0, "a lock that nobody holds is nowhere"
            assert temp_files(rig) == []
            await rig.front.call("bucket_delete", calls.BucketNamed("remote"))

    rigged(story)


def test_puts_and_deletes_of_one_key_leave_one_of_the_two(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for mode in ("back", "local", "through"):
            name = f"{mode}-bucket"
            bucket = msgspec.structs.replace(as_written(rig, mode), name=name)
            await rig.front.call("bucket_put", bucket)
            for turn in range(6):
                calls_now: list[Any] = []
                for number in range(4):
                    body = b"%d-%d" % (turn, number)
                    calls_now.append(rig.front.call("put", calls.PutCall(name, "key", len(body), body=body)))
                    calls_now.append(rig.front.call("delete", calls.DeleteCall(name, "key")))
                await asyncio.gather(*calls_now)
                with pytest.raises(NotFound):
                    await rig.front.get("key", bucket=name)
                assert (await rig.front.call("list", calls.ListCall(name))).entries == []

    rigged(story)


def test_the_lock_of_a_key_goes_round_in_order_and_survives_those_who_leave() -> None:
    async def story() -> None:
        locks = KeyLocks()
        order: list[int] = []

        async def hold(number: int) -> None:
            async with locks.lock("bucket", "key"):
                order.append(number)
                await asyncio.sleep(0)

        async with locks.lock("bucket", "key"):
            tasks = [asyncio.create_task(hold(number)) for number in range(6)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            tasks[4].cancel()
            async with locks.lock("bucket", "another"):
                assert len(locks) == 2
        locks_given = asyncio.create_task(asyncio.sleep(0))
        tasks[0].cancel()  # its turn has come, and it does not want it any more
        await asyncio.gather(*tasks, locks_given, return_exceptions=True)
        assert order == [2, 3, 5]
        assert len(locks) == 0

    asyncio.run(story())


# --- conditions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_conditions_are_judged_against_what_a_read_would_show(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        with pytest.raises(NotFound):
            await put(rig, "key", b"one", if_match="abc")
        first = await put(rig, "key", b"one", if_none_match="*")
        with pytest.raises(Precondition):
            await put(rig, "key", b"two", if_none_match="*")
        with pytest.raises(Precondition):
            await put(rig, "key", b"two", if_match='"not-this"')
        with pytest.raises(Precondition):
            await delete(rig, "key", if_match='"not-this"')
        assert await rig.front.get("key") == b"one"
        second = await put(rig, "key", b"two", if_match=f'"{first.etag}"')
        assert await rig.front.get("key") == b"two"
        with pytest.raises(Precondition):
            await put(rig, "key", b"three", if_match=f'"{first.etag}"')
        await delete(rig, "key", if_match=second.etag)
        with pytest.raises(NotFound):
            await delete(rig, "key", if_match="*")
        await put(rig, "key", b"four", if_none_match="*")
        assert await rig.front.get("key") == b"four"
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_entity_tags_sizes_and_times_as_conditions(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        first = await put(rig, "key", b"one", if_none_match='"any"')
        with pytest.raises(Precondition):
            await put(rig, "key", b"two", if_none_match=f'"other", "{first.etag}"')
        await put(rig, "key", b"other", if_none_match='"other"')
        modified_s = int((await rig.front.call("stat", calls.StatCall("remote", "key"))).modified_s)
        for wrong in ({"if_size_bytes": 3}, {"if_modified_s": modified_s - 1}, {"if_size_bytes": 5, "if_match": "x"}):
            with pytest.raises(Precondition):
                await delete(rig, "key", **wrong)
        assert await rig.front.get("key") == b"other"
        await delete(rig, "key", if_size_bytes=5, if_modified_s=modified_s)
        with pytest.raises(NotFound):
            await delete(rig, "key", if_size_bytes=5)
        await flushed(rig)

    rigged(story)


def test_only_one_of_many_creates_a_key(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for mode in ("back", "through"):
            await written(rig, mode)
            results = await asyncio.gather(
                *(put(rig, f"lock-{mode}", b"%d" % number, if_none_match="*") for number in range(10)),
                return_exceptions=True,
            )
            winners = [number for number, result in enumerate(results) if isinstance(result, calls.Written)]
            assert len(winners) == 1
            assert sum(isinstance(result, Precondition) for result in results) == 9
            assert await rig.front.get(f"lock-{mode}") == b"%d" % winners[0]
            await flushed(rig)

    rigged(story)


def test_a_condition_is_not_refused_because_a_cached_answer_is_old(rigged: Rigged) -> None:
    """Somebody writes to the backend itself; who knows the new ETag may write, though we have the old one cached."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=3600.0)
        old = await put(rig, "key", b"old")
        newer = rig.remote.place("key", b"newer")
        with pytest.raises(Precondition):
            await put(rig, "key", b"mine", if_match=old.etag)  # the backend says no, and we look again
        rig.remote.place("key2", b"there")
        await rig.front.get("key2")
        again = rig.remote.place("key2", b"there, newer")
        await put(rig, "key2", b"mine", if_match=again.etag)
        assert await rig.front.get("key2") == b"mine"
        assert await rig.front.get("key") == b"newer", "what was cached turned out to be old"
        await put(rig, "key", b"mine", if_match=newer.etag)
        assert await rig.front.get("key") == b"mine"

    rigged(story)


def test_a_backend_without_conditions_says_so(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        rig.remote.unconditional = True
        with pytest.raises(NotSupported):
            await put(rig, "key", b"one", if_none_match="*")
        await put(rig, "key", b"one")

    rigged(story)


# --- the way to the backend ------------------------------------------------------------------------------------------
def test_through_is_in_the_backend_when_it_is_answered(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        data = pattern(5 * MIB)
        headers = (("content-type", "text/plain"), ("x-amz-meta-a", "b"))
        answer = await put(rig, "key", data, headers=headers, tags="a=b")
        info = await rig.remote.objects.head("key")
        assert (answer.etag, answer.version, answer.modified_s) == (info.etag, info.version, info.modified_s)
        assert dict(info.headers) == dict(headers)
        assert rig.remote.objects.tags["key"] == "a=b"
        asked = len(rig.remote.asked)
        assert await rig.front.get("key") == data
        assert len(rig.remote.asked) == asked, "it is whole, verified and confirmed"
        await delete(rig, "key")
        with pytest.raises(NotFound):
            await rig.remote.objects.head("key")

    rigged(story)


def test_a_backend_that_is_away_is_told_and_nothing_changed(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        await put(rig, "key", b"one")
        rig.remote.down = AWAY
        with pytest.raises(Unavailable):
            await put(rig, "key", b"two")
        with pytest.raises(Unavailable):
            await put(rig, "large", pattern(5 * MIB))
        with pytest.raises(Unavailable):
            await delete(rig, "key")
        assert await rig.front.get("key") == b"one", "nobody knows better"
        assert temp_files(rig) == []
        rig.remote.down = None
        rig.clock.ahead_s = 20  # the backend is asked again after a while
        assert await rig.front.get("key") == b"one"
        with pytest.raises(NotFound):
            await rig.front.get("large")

    rigged(story)


def test_back_acknowledges_while_the_backend_is_away(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.down = AWAY
        data = pattern(6 * MIB)
        await put(rig, "key", data)
        await put(rig, "small", b"small")
        await delete(rig, "gone")
        assert await rig.front.get("key") == data
        assert await rig.front.get("small") == b"small"
        with pytest.raises(NotFound):
            await rig.front.get("gone")
        rig.remote.down = None
        rig.clock.ahead_s = 100
        await flushed(rig)
        assert (await rig.remote.objects.head("key")).size_bytes == len(data)
        assert await rig.front.get("key") == data

    rigged(story)


def test_a_lost_answer_is_looked_for(rigged: Rigged) -> None:
    """The put happened, its answer did not arrive. With the MD5 known we can tell; without, the truth is asked for."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        await put(rig, "key", b"one")
        await put(rig, "kept", b"one")
        rig.remote.lose_answers = 1
        with pytest.raises(Unavailable):
            await put(rig, "key", b"two")
        assert await rig.front.get("key") == b"two", "the backend was asked, immutable or not"
        rig.remote.lose_answers = 1
        with pytest.raises(Unavailable):
            await delete(rig, "kept")
        with pytest.raises(NotFound):
            await rig.front.get("kept")

    rigged(story)


def test_a_backend_that_can_only_be_read_says_so_before_the_body(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.read_only = True
        await written(rig, "through")
        with pytest.raises(NotSupported, match="only be read"):
            await rig.front.call("put_open", calls.PutOpenCall("remote", "key", 10, ""))
        with pytest.raises(NotSupported):
            await put(rig, "key", b"one")
        with pytest.raises(NotSupported):
            await delete(rig, "key")
        with pytest.raises(Invalid, match="only be read"):
            await written(rig, "back")

    rigged(story)


# --- what was written, and stops -------------------------------------------------------------------------------------
@pytest.mark.parametrize("clean", [True, False])
def test_dirty_data_is_there_after_a_restart(tmp_path: Path, clean: bool) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            for mode in ("back", "local"):
                bucket = msgspec.structs.replace(as_written(made, mode), name=f"{mode}-bucket")
                await made.front.call("bucket_put", bucket)
            made.remote.down = AWAY
            large, small = pattern(5 * MIB, 1), b"small"
            for name in ("back-bucket", "local-bucket"):
                path, sums = incoming(made, "large", large, name)
                call = calls.PutCall(name, "large", len(large), path=path, sums=sums, headers=(("x-amz-meta-a", "b"),))
                await made.front.call("put", call)
                await made.front.call("put", calls.PutCall(name, "small", 5, body=small))
            made.remote.objects.place("deleted", b"still there")
            await made.front.call("delete", calls.DeleteCall("back-bucket", "deleted"))
            await made.again(clean=clean)
            for name in ("back-bucket", "local-bucket"):
                assert await made.front.get("large", bucket=name) == large
                assert await made.front.get("small", bucket=name) == small
                state = await made.front.call("stat", calls.StatCall(name, "large"))
                assert (state.dirty, state.headers["x-amz-meta-a"]) == (name == "back-bucket", "b")
            with pytest.raises(NotFound):
                await made.front.get("deleted", bucket="back-bucket")
            made.remote.down = None
            made.clock.ahead_s = 100
            await made.engine.flusher.flush("back-bucket")
            assert (await made.remote.objects.head("large")).headers == (("x-amz-meta-a", "b"),)
            with pytest.raises(NotFound):
                await made.remote.objects.head("deleted")
            with pytest.raises(NotFound):
                await made.front.get("deleted", bucket="back-bucket")

    asyncio.run(story())


def test_a_front_that_dies_after_its_put_was_sent_leaves_it_done(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        rig.remote.writable.clear()
        other = Front()
        await other.connect(rig.settings, 2)
        asked = asyncio.create_task(put(rig, "key", pattern(MIB), front=other))
        await until(lambda: rig.remote.count("put") == 1)
        other.vanish()
        await until(lambda: len(rig.engine.fronts.connections) == 1)
        mine = asyncio.create_task(put(rig, "key", b"after"))
        await asyncio.sleep(0.01)
        assert rig.remote.count("put") == 1, "the key is not free before its writer has ended"
        rig.remote.writable.set()
        await mine
        assert await rig.front.get("key") == b"after"
        asked.cancel()
        await asyncio.gather(asked, other.aclose(), return_exceptions=True)
        assert temp_files(rig) == []

    rigged(story)


# --- buckets ---------------------------------------------------------------------------------------------------------
def test_a_bucket_that_owes_something_is_neither_changed_nor_removed(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.down = AWAY
        await put(rig, "key", b"one")
        with pytest.raises(Busy, match="forebay flush"):
            await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        with pytest.raises(Busy, match="forebay flush"):
            await written(rig, "through")
        rig.remote.down = None
        with pytest.raises(Busy, match="forebay flush"):
            await rig.front.call("bucket_put", Bucket("remote", "memory://elsewhere", write="back"))
        await written(rig, "back", freshness_s=5.0)  # what does not concern the data may change
        assert await rig.front.get("key") == b"one"
        rig.clock.ahead_s = 100
        await flushed(rig)
        await written(rig, "through")
        assert await rig.front.get("key") == b"one"
        await rig.front.call("bucket_delete", calls.BucketNamed("remote"))

    rigged(story)


@pytest.mark.parametrize("clean", [True, False])
def test_what_is_given_up_with_force_never_reaches_the_new_place(tmp_path: Path, clean: bool) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            await written(made, "back")
            made.remote.objects.place("deleted", b"of the new place")
            await made.front.get("deleted")
            made.remote.down = AWAY
            await put(made, "key", b"only here")
            await delete(made, "deleted")
            moved = Bucket("remote", "memory://elsewhere", write="back")
            with pytest.raises(Busy, match="--force"):
                await made.front.call("bucket_put", moved)
            with pytest.raises(Unavailable):  # what is given up is given up only for a place that answers
                await made.front.call("bucket_put", calls.BucketPutCall(moved, check=True, force=True, free=True))
            assert made.engine.flusher.totals("remote").objects == 2
            await made.front.call("bucket_put", calls.BucketPutCall(moved, force=True, free=True))
            await made.again(clean=clean)
            made.remote.down = None
            await flushed(made)
            assert made.engine.flusher.totals("remote").objects == 0
            assert await made.front.get("deleted") == b"of the new place"
            with pytest.raises(NotFound):
                await made.front.get("key")

    asyncio.run(story())


def test_other_keys_for_the_same_place_are_always_taken_and_evict_nothing(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", options={"access_key_id": "old"})
        rig.remote.refuses = Denied("the old key has run out: take the new one")
        await put(rig, "key", b"one")
        await until(lambda: bool(rig.engine.flusher.totals("remote").error))
        checked = calls.BucketPutCall(as_written(rig, "back", options={"access_key_id": "new"}), check=True, free=True)
        with pytest.raises(Denied, match="can be read, but not written back to"):
            await rig.front.call("bucket_put", checked)
        rig.remote.refuses = None
        await rig.front.call("bucket_put", checked)
        await until(lambda: rig.engine.flusher.totals("remote").objects == 0)
        assert rig.engine.store.lookup("remote", "key") is not None
        with pytest.raises(NotFound):
            await rig.remote.objects.head(".forebay-write-check")

    rigged(story)


def test_a_local_bucket_with_objects_is_not_removed(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        await put(rig, "key", b"one")
        for change in ("bucket_delete", "bucket_put"):
            named = calls.BucketNamed("remote") if change == "bucket_delete" else Bucket("remote", "memory://remote")
            with pytest.raises(Exists) as refused:
                await rig.front.call(change, named)
            assert refused.value.code == "BucketNotEmpty"
        assert await rig.front.get("key") == b"one"
        await delete(rig, "key")
        await rig.front.call("bucket_delete", calls.BucketNamed("remote"))

    rigged(story)


def test_local_and_its_url_go_together(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for bucket in (Bucket("scratch", LOCAL_URL), Bucket("scratch", "memory://x", write="local")):
            with pytest.raises(Invalid, match="local://"):
                await rig.front.call("bucket_put", bucket)
        made = await rig.front.call("bucket_create", Bucket("scratch", LOCAL_URL, write="local", durability="memory"))
        assert made.write == "local"
        with pytest.raises(Exists):
            await rig.front.call("bucket_create", Bucket("scratch", LOCAL_URL, write="local"))
        await rig.front.call("put", calls.PutCall("scratch", "key", 3, body=b"one"))
        assert await rig.front.get("key", bucket="scratch") == b"one"

    rigged(story)


def test_a_bucket_is_changed_only_between_writes(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        rig.remote.writable.clear()
        writing = asyncio.create_task(put(rig, "key", b"one"))
        await until(lambda: rig.remote.count("put") == 1)
        removing = asyncio.create_task(rig.front.call("bucket_delete", calls.BucketNamed("remote")))
        await asyncio.sleep(0.01)
        assert not removing.done()
        late = asyncio.create_task(put(rig, "late", b"late"))
        rig.remote.writable.set()
        await writing
        await removing
        with pytest.raises(NotFound):
            await late

    rigged(story)


# --- what jobs do to it ----------------------------------------------------------------------------------------------
def test_jobs_leave_what_is_owned_where_it_is(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        data = pattern(5 * MIB)
        await put(rig, "a/large", data)
        await put(rig, "a/small", b"small")
        for verb in ("evict", "refresh", "pin", "unpin", "evict"):
            state = await rig.front.job(verb, calls.JobCall("remote", keys=["a/large", "a/small"]))
            assert (state.state, state.units_failed) == ("done", 0), state
        assert await rig.front.get("a/large") == data
        assert await rig.front.get("a/small") == b"small"
        assert await rig.front.get("a/small", revalidate=True) == b"small"
        await flushed(rig)
        await rig.front.job("evict", calls.JobCall("remote", prefix="a/"))
        assert rig.engine.store.lookup("remote", "a/large") is None, "now it is like any other"
        assert await rig.front.get("a/large") == data

    rigged(story)


def test_a_temp_file_is_removed_without_waiting_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    gone, left = tmp_path / "tmp" / "gone", tmp_path / "tmp" / "left"
    left.write_bytes(b"bytes")
    answers, unlink, asked = threading.Event(), os.unlink, []

    def slow(path: str) -> None:
        asked.append(path)
        assert answers.wait(patience.PATIENCE_S)
        unlink(path)

    monkeypatch.setattr(os, "unlink", slow)
    remove_temp(str(gone))
    assert asked == [], "the disk is not asked about what became the object"
    remove_temp(str(left))
    assert left.exists()
    answers.set()
    patience.until(lambda: not left.exists(), "it is removed once the disk answers")
