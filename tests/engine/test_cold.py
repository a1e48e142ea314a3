"""Cold reads: what is asked of the backend, what readers are told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forebay.core.errors import Invalid, NotFound, Unavailable
from forebay.core.messages import wire
from forebay.core.types import RangeSpec

from .conftest import MIB, Rig, pattern

Rigged = Callable[..., None]


def test_a_small_object_comes_whole_and_is_asked_for_once(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("small", b"hello")
        read = rig.front.open("small")
        assert await read.whole() == b"hello"
        assert read.opened is not None
        assert read.opened.body == b"hello"
        assert not read.opened.hit
        assert b"Content-Type: text/x-story" in read.opened.record.head
        again = rig.front.open("small", RangeSpec(1, 3))
        assert await again.whole() == b"ell"
        assert again.opened is not None
        assert again.opened.hit
        assert [verb for verb, *_ in rig.remote.asked] == ["fetch"]

    rigged(story)


@pytest.mark.parametrize("size", [16 * 1024 + 1, MIB, 4 * MIB, 4 * MIB + 1, 16 * MIB])
def test_an_object_of_up_to_16_mib_is_one_request(rigged: Rigged, size: int) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(size)
        rig.remote.place("object", data)
        assert await rig.front.get("object") == data
        assert rig.remote.asked == [("fetch", "object", 0, size)]
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        assert record.complete
        assert await rig.front.get("object") == data
        assert len(rig.remote.asked) == 1

    rigged(story)


def test_the_first_byte_does_not_wait_for_the_last(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(3 * MIB)
        rig.remote.place("object", data)
        rig.remote.open.clear()
        rig.remote.free_bytes = MIB
        read = rig.front.open("object")
        await read.until(lambda: len(read.data) == MIB)
        assert read.opened is not None
        assert read.opened.record.size_bytes == 3 * MIB
        rig.remote.open.set()
        assert await read.whole() == data

    rigged(story)


def test_a_large_object_is_fetched_in_parallel_runs_within_the_window(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(150 * MIB)
        rig.remote.place("object", data)
        rig.remote.open.clear()
        rig.remote.free_bytes = 1
        read = rig.front.open("object")
        await read.until(lambda: len(read.data) > 0)
        for _ in range(50):
            await asyncio.sleep(0.001)
        starts = sorted(start // MIB for _, _, start, _ in rig.remote.asked)
        assert starts[0] == 0
        assert starts[1] == 16, "behind the first request"
        assert len(starts) > 3, "in parallel"
        assert max(end for *_, end in rig.remote.asked) <= 64 * MIB + MIB * 4, "not beyond the window"
        rig.remote.open.set()
        assert await read.whole() == data
        blocks = [
            block for _, _, start, end in rig.remote.asked for block in range(start // (4 * MIB), -(-end // (4 * MIB)))
        ]
        assert sorted(blocks) == list(range(38)), "each block once"

    rigged(story)


def test_thirty_two_readers_fetch_each_block_once(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(30 * MIB + 12_345)
        rig.remote.place("object", data)
        reads = [rig.front.open("object") for _ in range(32)]
        for got in await asyncio.gather(*(read.whole() for read in reads)):
            assert got == data
        assert rig.remote.fetched_bytes() == len(data)

    rigged(story)


def test_a_range_costs_the_blocks_that_it_touches(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(64 * MIB)
        rig.remote.place("object", data)
        first, last = 33 * MIB + 5, 34 * MIB + 4
        assert await rig.front.get("object", RangeSpec(first, last)) == data[first : last + 1]
        assert rig.remote.asked == [("fetch", "object", 32 * MIB, 36 * MIB)]
        across = 12 * MIB - 10
        assert await rig.front.get("object", RangeSpec(across, across + 19)) == data[across : across + 20]
        assert rig.remote.fetched_bytes() == 12 * MIB
        await rig.idle()
        assert await rig.front.get("object", RangeSpec(8 * MIB, 16 * MIB - 1)) == data[8 * MIB : 16 * MIB]
        assert rig.remote.fetched_bytes() == 12 * MIB, "whole blocks were kept"

    rigged(story)


@pytest.mark.parametrize("suffix", [1, 1000, MIB, 5 * MIB, 30 * MIB, 99 * MIB])
def test_a_suffix_of_an_unknown_object(rigged: Rigged, suffix: int) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(41 * MIB + 77)
        rig.remote.place("object", data)
        assert await rig.front.get("object", RangeSpec(None, suffix)) == data[-suffix:]
        assert rig.remote.fetched_bytes() <= suffix + 8 * MIB
        assert rig.remote.count("head") == 0

    rigged(story)


def test_ranges_outside_the_object_and_empty_objects(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("empty", b"")
        rig.remote.place("short", b"12345")
        rig.remote.place("long", pattern(9 * MIB))
        assert await rig.front.get("empty") == b""
        for key, size, first in (
            ("empty", 0, 0),
            ("short", 5, 5),
            ("long", 9 * MIB, 9 * MIB),
            ("long", 9 * MIB, 10**12),
        ):
            with pytest.raises(Invalid) as caught:
                await rig.front.get(key, RangeSpec(first, None))
            assert caught.value.code == "InvalidRange"
            assert caught.value.size_bytes == size
        many = await asyncio.gather(
            *(rig.front.get("new", RangeSpec(first, None)) for first in (0, 100)), return_exceptions=True
        )
        assert all(isinstance(error, NotFound) for error in many)

    rigged(story)


def test_one_readers_bad_range_is_not_anothers(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(5 * MIB)
        rig.remote.place("object", data)
        bad = rig.front.open("object", RangeSpec(50 * MIB, None))
        good = rig.front.open("object")
        assert await good.whole() == data
        with pytest.raises(Invalid):
            await bad.whole()

    rigged(story)


def test_sequential_ranges_are_read_ahead_and_a_seek_ends_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(120 * MIB)
        rig.remote.place("object", data)
        position, misses = 0, 0
        while position < 60 * MIB:
            record = rig.engine.store.lookup("remote", "object")
            if record is None or not record.has(position, position + 2 * MIB):
                misses += 1  # what a front would do: a hit never comes to the engine
                span = RangeSpec(position, position + 2 * MIB - 1)
                assert await rig.front.get("object", span) == data[position : position + 2 * MIB]
                await rig.idle()
            position += 2 * MIB
        assert misses <= 8, "30 ranges, and most were there before they were asked for"
        before = rig.remote.fetched_bytes()
        await rig.front.get("object", RangeSpec(110 * MIB, 110 * MIB + 9))
        await rig.idle()
        assert rig.remote.fetched_bytes() - before == 4 * MIB, "a seek fetches what it touches"

    rigged(story)


def test_a_client_that_leaves_costs_no_more_than_the_block_in_progress(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(100 * MIB))
        rig.remote.open.clear()
        rig.remote.free_bytes = MIB
        read = rig.front.open("object")
        await read.until(lambda: len(read.data) >= MIB)
        read.close()
        await asyncio.sleep(0.02)
        rig.remote.open.set()
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        assert record.has(0, 4 * MIB), "what had begun is kept"
        assert not record.has(8 * MIB, 12 * MIB)
        assert rig.remote.closed_bodies == rig.remote.count("fetch")

    rigged(story)


def test_a_front_that_dies_takes_its_reads_with_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(20 * MIB))
        rig.remote.open.clear()
        rig.remote.free_bytes = 1
        reads = [rig.front.open("object") for _ in range(5)]
        await reads[4].until(lambda: len(reads[4].data) > 0)
        rig.front.vanish()
        rig.remote.open.set()
        await rig.idle()

    rigged(story)


def test_a_body_that_breaks_fails_those_who_wait_for_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(10 * MIB)
        rig.remote.place("object", data)
        rig.remote.cut_after = 6 * MIB
        read = rig.front.open("object")
        with pytest.raises(Unavailable):
            await read.whole()
        assert data[: 6 * MIB].startswith(read.data)  # the flight may go, and its file, before a front has looked
        rig.remote.cut_after = None
        await rig.idle()
        assert await rig.front.get("object") == data
        assert rig.remote.asked[-1] == ("fetch", "object", 4 * MIB, 10 * MIB), "the whole block was kept"

    rigged(story)


def test_an_unknown_bucket_and_an_unknown_key(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        with pytest.raises(NotFound) as no_key:
            await rig.front.get("nothing")
        assert no_key.value.code == "NoSuchKey"
        with pytest.raises(NotFound) as no_bucket:
            await rig.front.get("nothing", bucket="elsewhere")
        assert no_bucket.value.code == "NoSuchBucket"

    rigged(story)


def test_metadata_alone_fetches_no_body(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(9 * MIB))
        read = rig.front.open("object", head_only=True)
        await read.until(lambda: read.opened is not None)
        assert read.opened is not None
        assert read.opened.record.size_bytes == 9 * MIB
        read.close()
        assert [verb for verb, *_ in rig.remote.asked] == ["head"]
        await rig.front.get("object")
        rig.remote.asked.clear()
        read = rig.front.open("object", head_only=True)
        await read.until(lambda: read.opened is not None)
        read.close()
        assert not rig.remote.asked

    rigged(story)


def test_what_nobody_understands_closes_the_connection_only(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("small", b"hello")
        reader, writer = await asyncio.open_unix_connection(str(rig.settings.engine_socket))
        writer.write(b"\x00\x00\x00\x05nonsense")
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_unix_connection(str(rig.settings.engine_socket))
        writer.write(wire.encode(wire.Hello(9, 1, wire_version=99)))
        assert await reader.read() == b""
        writer.close()
        assert await rig.front.get("small") == b"hello"

    rigged(story)


def test_types_of_answers_are_what_the_wire_says(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(5 * MIB))
        read = rig.front.open("object")
        await read.whole()
        seen: Any = read.opened
        assert (seen.start, seen.end) == (0, 5 * MIB)
        assert seen.record.object_id > 0

    rigged(story)
