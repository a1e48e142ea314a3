"""Writes and reads of one key at the same time: readers see the old version or the new one, whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from forebay.core.errors import ForebayError, NotFound, Precondition, Unavailable
from forebay.core.messages import calls
from forebay.core.record import State
from forebay.core.types import FRESH_IMMUTABLE, RangeSpec

from .conftest import MIB, Rig, pattern, until
from .writing import AWAY, delete, flushed, put, written

Rigged = Callable[..., None]


@pytest.mark.parametrize("mode", ["back", "through"])
def test_a_write_under_a_flight_lets_its_readers_finish_or_fail(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        old, new = pattern(24 * MIB, 1), pattern(20 * MIB, 2)
        rig.remote.place("key", old)
        slow = rig.front.open("key")
        slow.takes = False
        await slow.until(lambda: len(slow.data) >= 12 * MIB)
        if mode == "back":
            rig.remote.writable.clear()
        answer = await put(rig, "key", new)
        assert await rig.front.get("key") == new, "whoever comes now reads what was written"
        slow.takes = True
        rig.front.post_taken(slow)
        if mode == "back":
            assert await slow.whole() == old, "the backend has the old version still"
        else:
            try:
                await slow.whole()
            except Precondition:
                pass  # what had not been fetched is nowhere any more
            assert old.startswith(bytes(slow.data))
        await rig.idle()
        rig.engine.flush()
        record = rig.engine.index.lookup("remote", "key")
        assert record is not None
        assert (record.version, record.etag) == (answer.version, answer.etag)
        assert await rig.front.get("key") == new
        await flushed(rig)
        assert await rig.front.get("key") == new

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "through"])
@pytest.mark.parametrize("size", [9, 9 * MIB])
def test_what_was_asked_before_a_write_is_not_kept_after_it(rigged: Rigged, mode: str, size: int) -> None:
    """The backend answered with the old version, slowly; meanwhile the key was written."""

    async def story(rig: Rig) -> None:
        await written(rig, mode, freshness_s=FRESH_IMMUTABLE)
        old, new = pattern(size, 1), pattern(size, 2)
        rig.remote.place("key", old)
        rig.remote.open.clear()
        early = rig.front.open("key")
        await until(lambda: rig.remote.count("fetch") == 1)
        rig.remote.writable.clear() if mode == "back" else None
        await put(rig, "key", new)
        late = rig.front.open("key")
        assert await late.whole() == new, "it did not wait for the old answer"
        rig.remote.open.set()
        try:
            assert await early.whole() in (old, new)
        except Precondition:
            assert mode == "through"
        await rig.idle()
        rig.engine.flush()
        assert await rig.front.get("key") == new
        rig.remote.writable.set()
        await flushed(rig)
        assert await rig.front.get("key") == new

    rigged(story)


def test_what_was_asked_before_a_delete_does_not_come_back(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.place("key", b"old")
        rig.remote.open.clear()
        early = rig.front.open("key")
        await until(lambda: rig.remote.count("fetch") == 1)
        rig.remote.writable.clear()
        await delete(rig, "key")
        rig.remote.open.set()
        assert await early.whole() == b"old", "it was opened before"
        rig.engine.flush()
        asked = len(rig.remote.asked)
        for _ in range(2):
            with pytest.raises(NotFound):
                await rig.front.get("key")
            with pytest.raises(NotFound):
                await rig.front.get("key", revalidate=True)
            with pytest.raises(NotFound):
                await rig.front.open("key", head_only=True).whole()
        assert len(rig.remote.asked) == asked, "nobody asked a backend that does not know yet"
        await flushed(rig)
        with pytest.raises(NotFound):
            await rig.front.get("key")

    rigged(story)


def test_owned_is_never_asked_for_and_after_its_flush_it_is_one_version_on(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", freshness_s=0.0)
        rig.remote.writable.clear()
        data = pattern(20 * MIB)
        mine = await put(rig, "key", data)
        rig.remote.place("key", b"somebody else's")
        asked = rig.remote.count("check") + rig.remote.count("fetch") + rig.remote.count("head")
        assert await rig.front.get("key", revalidate=True) == data
        assert (
            await rig.front.get("key", RangeSpec(5 * MIB, 6 * MIB), version=mine.version) == data[5 * MIB : 6 * MIB + 1]
        )
        assert rig.remote.count("check") + rig.remote.count("fetch") + rig.remote.count("head") == asked
        rig.remote.objects.remove("key")
        slow = rig.front.open("key")
        slow.takes = False
        await slow.until(lambda: slow.opened is not None)
        await flushed(rig)
        slow.takes = True
        rig.front.post_taken(slow)
        assert await slow.whole() == data
        state = await rig.front.call("stat", calls.StatCall("remote", "key"))
        assert (state.dirty, state.etag) == (False, mine.etag)
        assert state.version == (await rig.remote.objects.head("key")).version
        fetched = rig.remote.count("fetch")
        for version in (mine.version, state.version):
            part = await rig.front.get("key", RangeSpec(5 * MIB, 6 * MIB), version=version)
            assert part == data[5 * MIB : 6 * MIB + 1], "a response that began before the flush goes on after it"
        assert await rig.front.get("key") == data
        assert rig.remote.count("fetch") == fetched, "what was flushed is cached"

    rigged(story)


def test_readers_and_writers_of_one_key_never_mix(rigged: Rigged) -> None:
    """Each body is of one byte: a mixture would show."""

    async def story(rig: Rig) -> None:
        for mode in ("through", "back"):
            await written(rig, mode, freshness_s=0.0)
            await put(rig, "key", bytes(3 * MIB))
            done = False
            seen: set[int] = set()

            async def read() -> None:
                while not done:  # noqa: B023
                    try:
                        data = await rig.front.get("key")
                    except (Precondition, Unavailable):
                        continue  # it was replaced while it was read
                    assert len(data) == 3 * MIB
                    assert data == data[:1] * (3 * MIB)
                    seen.add(data[0])  # noqa: B023

            readers = [asyncio.create_task(read()) for _ in range(3)]
            for number in range(1, 9):
                await put(rig, "key", bytes([number]) * (3 * MIB))
                latest = await rig.front.get("key")
                assert latest[0] == number, "a reader who comes after the answer sees the write"
            done = True
            await asyncio.gather(*readers)
            assert seen
            await flushed(rig)

    rigged(story)


def test_bytes_that_only_we_had_and_a_disk_lost_are_an_error_and_not_somebody_elses(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        data = pattern(6 * MIB)
        await put(rig, "key", data)
        rig.remote.place("key", pattern(6 * MIB, 9))
        record = rig.engine.store.lookup("remote", "key")
        assert record is not None
        assert record.state & State.OWNED
        path = rig.engine.store.data_path(record)
        with open(path, "r+b") as file:
            file.seek(5 * MIB)
            file.write(b"rot")
        rig.engine.cold.suspect("remote", "key", record.object_id, "a test")
        await asyncio.sleep(0.05)
        with pytest.raises(ForebayError) as error:
            await rig.front.get("key")
        assert not isinstance(error.value, NotFound), error.value
        await put(rig, "key", b"again")
        assert await rig.front.get("key") == b"again"
        rig.remote.objects.remove("key")
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("size", [9, 9 * MIB])
def test_a_request_of_an_earlier_flush_that_arrives_late_is_not_a_strangers(rigged: Rigged, size: int) -> None:
    """Its answer was given up, the flush was repeated, the key was deleted: then the first request comes through."""

    async def story(rig: Rig) -> None:
        await written(rig, "back")
        await put(rig, "key", pattern(size))
        await flushed(rig)
        rig.remote.writable.clear()
        await delete(rig, "key")
        rig.remote.place("key", pattern(size))
        await flushed(rig)
        state = await rig.front.call("status")
        assert [bucket.conflicts for bucket in state.buckets] == [0]
        with pytest.raises(NotFound):
            await rig.remote.objects.head("key")
        with pytest.raises(NotFound):
            await rig.front.get("key")

    rigged(story)


async def doubted(rig: Rig) -> tuple[str, str]:
    """A bucket written through, and a write of `key` that happened and was not answered; the ETags before and after."""
    await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
    old = await put(rig, "key", b"one")
    rig.remote.lose_answers = 1
    with pytest.raises(Unavailable):
        await put(rig, "key", b"two")
    return old.etag, (await rig.remote.objects.head("key")).etag


def test_what_is_in_doubt_is_asked_about_once_the_backend_answers_anything(rigged: Rigged) -> None:
    """While nobody answers, the version before is as good as the one that may have replaced it. A listing that shows
    the new one ends that: no reader sees the old one after it, however short ago the backend was away."""

    async def story(rig: Rig) -> None:
        old, new = await doubted(rig)
        rig.remote.down = AWAY
        assert await rig.front.get("key") == b"one"
        assert await rig.front.get("key") == b"one"
        rig.remote.down = None
        page = await rig.front.call("list", calls.ListCall("remote"))
        assert [entry.etag for entry in page.entries] == [new] != [old]
        seen = rig.front.open("key", head_only=True)
        await seen.until(lambda: seen.opened is not None)
        assert seen.opened is not None
        assert seen.opened.record.etag == new
        seen.close()
        assert await rig.front.get("key") == b"two"

    rigged(story)


def test_what_is_in_doubt_is_served_no_more_once_the_backend_answered_though_it_is_away_again(rigged: Rigged) -> None:
    """Somebody saw the write that has no outcome, in a listing. The backend is away when the next reader comes."""

    async def story(rig: Rig) -> None:
        _, new = await doubted(rig)
        page = await rig.front.call("list", calls.ListCall("remote"))
        assert [entry.etag for entry in page.entries] == [new]
        rig.remote.down = AWAY
        for _ in range(2):
            with pytest.raises(Unavailable):
                await rig.front.get("key")
        rig.remote.down = None
        assert await rig.front.get("key") == b"two"
        rig.remote.down = AWAY
        assert await rig.front.get("key") == b"two", "it is confirmed"

    rigged(story)


def test_a_later_doubt_is_one_of_its_own(rigged: Rigged) -> None:
    """A write without an outcome was cleared up; of the next one nobody has seen anything when the backend goes."""

    async def story(rig: Rig) -> None:
        await doubted(rig)
        assert await rig.front.get("key") == b"two"
        rig.remote.lose_answers = 1
        with pytest.raises(Unavailable):
            await put(rig, "key", b"three")
        rig.remote.down = AWAY
        assert await rig.front.get("key") == b"two"

    rigged(story)


def test_who_comes_after_an_answer_does_not_share_a_question_from_before_it(rigged: Rigged) -> None:
    """A question about a version in doubt hangs; the backend answers others; the question fails at last."""

    async def story(rig: Rig) -> None:
        _, new = await doubted(rig)
        hung = rig.remote.hung_check = asyncio.get_running_loop().create_future()
        early = asyncio.create_task(rig.front.get("key"))
        await until(lambda: rig.remote.hung_check is None)
        page = await rig.front.call("list", calls.ListCall("remote"))
        assert [entry.etag for entry in page.entries] == [new]
        late = asyncio.create_task(rig.front.get("key"))
        await until(lambda: rig.engine.cold.reads == 2)
        if not hung.done():
            hung.set_exception(AWAY)
        assert await early in (b"one", b"two")
        assert await late == b"two"

    rigged(story)


@pytest.mark.parametrize("gone", [False, True])
def test_a_condition_that_the_backend_refuses_tells_that_what_is_here_is_old(rigged: Rigged, gone: bool) -> None:
    """Whoever was told 412 (or 404) reads nothing afterwards that would have met his condition."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        old = await put(rig, "key", b"one")
        if gone:
            await rig.remote.objects.delete("key")
        else:
            rig.remote.place("key", b"another's")
        for ask in (put(rig, "key", b"two", if_match=old.etag), delete(rig, "key", if_match=old.etag)):
            with pytest.raises((Precondition, NotFound)):
                await ask
            rig.remote.down = AWAY
            with pytest.raises(Unavailable):
                await rig.front.get("key")
            rig.remote.down = None

    rigged(story)


@pytest.mark.parametrize("gone", [False, True])
def test_who_saw_a_write_in_a_listing_reads_nothing_older(rigged: Rigged, gone: bool) -> None:
    """The backend has done what a write or a delete asks, and its answer is on the way; a listing shows it already."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        old = await put(rig, "key", b"one")
        verb = "delete" if gone else "put"
        answered = rig.remote.answers[verb] = asyncio.Event()
        change = asyncio.create_task(delete(rig, "key") if gone else put(rig, "key", b"two"))
        await until(lambda: rig.remote.unheard[verb] == 1)
        assert await rig.front.get("key") == b"one", "nobody has seen anything else"
        page = await rig.front.call("list", calls.ListCall("remote"))
        assert old.etag not in [entry.etag for entry in page.entries]
        rig.remote.down = AWAY
        with pytest.raises(Unavailable):
            await rig.front.get("key")
        rig.remote.down = None
        if gone:
            with pytest.raises(NotFound):
                await rig.front.get("key")
        else:
            assert await rig.front.get("key") == b"two"
        answered.set()
        await change

    rigged(story)


@pytest.mark.parametrize("size", [9, 9 * MIB])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("gone", [False, True])
def test_who_saw_a_write_in_a_head_reads_nothing_older(rigged: Rigged, gone: bool, kept: bool, size: int) -> None:
    """The backend does what a write or a delete asks while it is asked about the key, for a HEAD. A GET that asked
    before the write has the older version: it is `kept` before the HEAD is answered, or would be after that."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        old, new = pattern(size, 1), pattern(size + 1, 2)
        rig.remote.place("key", old)
        rig.remote.may_head.clear()
        head = rig.front.open("key", head_only=True)
        await until(lambda: rig.remote.count("head") == 1)
        if not kept:
            rig.remote.open.clear()
        early = rig.front.open("key")
        await until(lambda: rig.remote.count("fetch") >= 1)
        if kept:
            assert await early.whole() == old
            await until(lambda: not rig.engine.cold.all_flights)
        verb = "delete" if gone else "put"
        answered = rig.remote.answers[verb] = asyncio.Event()
        change = asyncio.create_task(delete(rig, "key") if gone else put(rig, "key", new))
        await until(lambda: rig.remote.unheard[verb] == 1)
        if kept:
            assert await rig.front.get("key") == old, "nobody has seen anything else"
        rig.remote.may_head.set()
        await head.until(lambda: head.opened is not None or head.error is not None)
        if gone:
            assert isinstance(head.error, NotFound)
        else:
            assert head.opened is not None
            assert head.opened.end == size + 1
        head.close()
        late = rig.front.open("key")
        rig.remote.open.set()
        if not kept:
            with contextlib.suppress(Precondition):
                assert await early.whole() == old, "it was opened before"
        if gone:
            with pytest.raises(NotFound):
                await late.whole()
        else:
            assert await late.whole() == new
        answered.set()
        await change

    rigged(story)


@pytest.mark.parametrize("size", [9, 9 * MIB])
@pytest.mark.parametrize("gone", [False, True])
def test_who_saw_a_write_in_a_get_that_another_write_overtook_reads_nothing_older(
    rigged: Rigged, gone: bool, size: int
) -> None:
    """A GET asks, and one write ends; the backend answers it when it has done the next write, which has no answer."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        rig.remote.place("key", pattern(size, 1))
        rig.remote.may_fetch.clear()
        early = rig.front.open("key")
        await until(lambda: bool(rig.engine.cold.openings.under_way))
        await put(rig, "key", pattern(size + 1, 2))
        verb, new = "delete" if gone else "put", pattern(size + 2, 3)
        answered = rig.remote.answers[verb] = asyncio.Event()
        change = asyncio.create_task(delete(rig, "key") if gone else put(rig, "key", new))
        await until(lambda: rig.remote.unheard[verb] == 1)
        assert await rig.front.get("key") == pattern(size + 1, 2), "nobody has seen anything else"
        rig.remote.may_fetch.set()
        for read in early, None:
            if gone:
                with pytest.raises(NotFound):
                    await (read or rig.front.open("key")).whole()
            else:
                assert await (read or rig.front.open("key")).whole() == new
        answered.set()
        await change

    rigged(story)
