"""When the backend is asked again, what happens when the object changed, and when nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.errors import Busy, NoBackendBucket, NotFound, Precondition, Unavailable
from forebay.core.types import FRESH_IMMUTABLE, RangeSpec

from .conftest import MIB, Rig, pattern

Rigged = Callable[..., None]
AWAY = Unavailable("the backend is away: try again")


def test_a_timed_bucket_asks_again_when_the_time_is_over(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", b"one")
        assert await rig.front.get("object") == b"one"
        rig.clock.ahead_s = 59
        assert await rig.front.get("object") == b"one"
        assert rig.remote.count("check") == 0
        rig.clock.ahead_s = 61
        assert await rig.front.get("object") == b"one"
        assert rig.remote.count("check") == 1
        assert await rig.front.get("object") == b"one", "confirmed: good for a minute again"
        assert rig.remote.count("check") == 1
        rig.remote.place("object", b"three")
        rig.clock.ahead_s = 125
        assert await rig.front.get("object") == b"three"
        assert rig.remote.count("fetch") == 2

    rigged(story, freshness_s=60.0)


def test_immutable_never_asks_again(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", b"one")
        await rig.front.get("object")
        rig.clock.ahead_s = 1e9
        rig.remote.place("object", b"two")
        assert await rig.front.get("object") == b"one"
        assert rig.remote.count("check") == 0
        assert await rig.front.get("object", revalidate=True) == b"two"

    rigged(story, freshness_s=FRESH_IMMUTABLE)


def test_always_asks_on_every_open_but_not_once_for_each_of_many(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(2 * MIB)
        rig.remote.place("object", data)
        await rig.front.get("object")
        for expected in (1, 2, 3):
            assert await rig.front.get("object") == data
            assert rig.remote.count("check") == expected
        rig.remote.asked.clear()
        assert set(await asyncio.gather(*(rig.front.get("object") for _ in range(20)))) == {data}
        assert 1 <= rig.remote.count("check") <= 2, "at most one under way and one for all who came meanwhile"
        newer = pattern(2 * MIB, seed=1)
        rig.remote.place("object", newer)
        assert await rig.front.get("object") == newer

    rigged(story, freshness_s=0.0)


def test_always_is_strict_while_others_read(rigged: Rigged) -> None:
    """A reader that opens after a write sees it, though an older question is still under way."""

    async def story(rig: Rig) -> None:
        for turn in range(20):
            value = b"%d" % turn
            early = [rig.front.open("object") for _ in range(3)]
            rig.remote.place("object", value)
            await asyncio.sleep(0.0005 * (turn % 4))
            assert await rig.front.get("object") == value
            for read in early:
                assert await read.whole() in (value, b"%d" % (turn - 1))

    async def prepared(rig: Rig) -> None:
        rig.remote.place("object", b"-1")
        await story(rig)

    rigged(prepared, freshness_s=0.0)


def test_an_object_that_is_gone_is_forgotten(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(5 * MIB))
        await rig.front.get("object")
        rig.remote.objects.remove("object")
        assert len(await rig.front.get("object")) == 5 * MIB, "still fresh"
        with pytest.raises(NotFound):
            await rig.front.get("object", revalidate=True)
        assert rig.engine.store.lookup("remote", "object") is None
        with pytest.raises(NotFound):
            await rig.front.get("object")

    rigged(story)


def test_a_change_under_an_open_read_is_an_error_and_never_a_mixture(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        old, new = pattern(120 * MIB), pattern(120 * MIB, seed=1)
        rig.remote.place("object", old)
        read = rig.front.open("object")
        read.takes = False  # so that the window holds the rest back
        await read.until(lambda: len(read.data) >= 20 * MIB)
        rig.remote.place("object", new)
        read.takes = True
        read.front.post_taken(read)
        with pytest.raises(Precondition):
            await read.whole()
        assert old.startswith(bytes(read.data))
        await rig.idle()
        assert await rig.front.get("object") == new

    rigged(story)


def test_a_change_before_anything_was_told_goes_unnoticed(rigged: Rigged) -> None:
    """The record is fresh, but the backend has moved on: the reader gets the new version, whole."""

    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(20 * MIB))
        await rig.front.get("object", RangeSpec(0, 9))
        await rig.idle()
        new = pattern(20 * MIB, seed=1)
        rig.remote.place("object", new)
        span = RangeSpec(9 * MIB, 10 * MIB)
        assert await rig.front.get("object", span) == new[9 * MIB : 10 * MIB + 1]
        assert await rig.front.get("object") == new

    rigged(story, freshness_s=3600.0)


def test_a_part_of_one_response_gets_its_version_or_an_error(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        old = rig.remote.place("object", pattern(5 * MIB))
        await rig.front.get("object")
        rig.clock.ahead_s = 100
        before = len(rig.remote.asked)
        part = await rig.front.get("object", RangeSpec(10, 19), version=old.version)
        assert part == pattern(5 * MIB)[10:20]
        assert len(rig.remote.asked) == before, "a version needs no confirmation"
        rig.remote.place("object", b"new")
        assert await rig.front.get("object", revalidate=True) == b"new"
        with pytest.raises(Precondition):
            await rig.front.get("object", RangeSpec(10, 19), version=old.version)

    rigged(story)


def test_a_timed_bucket_serves_what_it_has_while_the_backend_is_away(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(6 * MIB)
        rig.remote.place("object", data)
        await rig.front.get("object")
        rig.remote.down = AWAY
        rig.clock.ahead_s = 1000
        assert await rig.front.get("object") == data
        assert rig.engine.tally.revalidations["unreachable"] == 1
        with pytest.raises(Unavailable):
            await rig.front.get("object", revalidate=True)
        with pytest.raises(Unavailable):
            await rig.front.get("other")
        rig.remote.down = None
        rig.remote.place("object", b"new")
        rig.clock.ahead_s = 1010
        assert await rig.front.get("object") == b"new", "asked again a few seconds later"

    rigged(story)


def test_always_fails_while_the_backend_is_away(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", b"one")
        await rig.front.get("object")
        rig.remote.down = AWAY
        with pytest.raises(Unavailable):
            await rig.front.get("object")
        rig.remote.down = None
        assert await rig.front.get("object") == b"one"

    rigged(story, freshness_s=0.0)


def test_a_bucket_that_is_gone_takes_no_cached_copy_with_it(rigged: Rigged) -> None:
    """Nothing was said of the object: what is stale may be served as while nobody answers, and what is here stays."""

    async def story(rig: Rig) -> None:
        small, large = b"one", pattern(5 * MIB)
        rig.remote.place("small", small)
        rig.remote.place("large", large)
        await rig.front.get("small")
        await rig.front.get("large")
        rig.remote.down = NoBackendBucket("the bucket is not there: bring it back")
        rig.clock.ahead_s = 100
        fetched = rig.remote.count("fetch")
        for _ in range(2):
            assert await rig.front.get("small") == small
            assert await rig.front.get("large") == large
        for revalidate in (False, True):
            with pytest.raises(NoBackendBucket):
                await rig.front.get("never-seen", revalidate=revalidate)
        for key in ("small", "large"):
            with pytest.raises(NoBackendBucket):
                await rig.front.get(key, revalidate=True)
        assert (await rig.front.call("buckets"))[0].name == "remote"
        assert "NoBackendBucket" in rig.engine.buckets.served()[0].error
        rig.remote.down = None
        rig.clock.ahead_s = 200
        assert await rig.front.get("small") == small
        assert await rig.front.get("large") == large
        assert rig.remote.count("fetch") == fetched, "confirmed, not fetched anew"

    rigged(story, freshness_s=60.0)


def test_a_bucket_that_goes_in_the_middle_of_a_read_is_no_change_of_the_object(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(12 * MIB)
        rig.remote.place("object", data)
        assert await rig.front.get("object", range=RangeSpec(0, 10)) == data[:11]
        rig.remote.down = NoBackendBucket("the bucket is not there: bring it back")
        with pytest.raises(NoBackendBucket):
            await rig.front.get("object", range=RangeSpec(9 * MIB, 9 * MIB + 10))
        assert await rig.front.get("object", range=RangeSpec(0, 10)) == data[:11], "what is here stays"
        rig.remote.down = None
        assert await rig.front.get("object") == data

    rigged(story, freshness_s=60.0)


def test_how_long_a_backend_asks_to_be_left_alone_is_handed_on(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(12 * MIB)
        rig.remote.place("object", data)
        assert await rig.front.get("object", range=RangeSpec(0, 10)) == data[:11]
        rig.remote.down = Busy("slow down", retry_after_s=3600.0)
        for ask in (
            rig.front.get("never-seen"),
            rig.front.get("never-seen", head_only=True),
            rig.front.get("object", revalidate=True),
            rig.front.get("object", range=RangeSpec(9 * MIB, 9 * MIB + 10)),
        ):
            with pytest.raises(Busy) as refused:
                await ask
            assert refused.value.retry_after_s == 3600

    rigged(story, freshness_s=60.0)


def test_a_flight_of_a_version_that_is_gone_leaves_no_record_behind(rigged: Rigged) -> None:
    """Its first block had not landed when somebody learned that the object is gone; then the rest arrives."""

    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(8 * MIB))
        rig.remote.free_bytes = MIB
        rig.remote.open.clear()
        early = rig.front.open("object")
        await early.until(lambda: early.opened is not None)
        old = rig.remote.objects
        rig.remote.objects = type(old)("empty")
        with pytest.raises(NotFound):
            await rig.front.get("object", revalidate=True)
        rig.remote.open.set()
        await early.until(lambda: early.error is not None or len(early.data) == 8 * MIB)
        early.close()
        await rig.idle()
        rig.engine.flush()
        assert rig.engine.store.lookup("remote", "object") is None
        with pytest.raises(NotFound):
            await rig.front.get("object")

    rigged(story)
