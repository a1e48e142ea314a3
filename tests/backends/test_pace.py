"""Chunks grow with what an endpoint sends, and say nothing of the time in which nobody asked it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.backends.http.cloud import CloudReads
from forebay.backends.http.pace import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, SAMPLE_BYTES, Pace, pace_of
from tests.backends.backend_places import Place

MB = 1_000_000


def body(pace: Pace, at_s: float, size_bytes: int, rate_bytes_s: float) -> float:
    """One body alone, in chunks of 100 KB; when it ended."""
    pace.began(at_s)
    for _ in range(size_bytes // 100_000):
        at_s += 100_000 / rate_bytes_s
        pace.came(at_s, 100_000)
    pace.ended(at_s)
    return at_s


@pytest.mark.parametrize(
    ("rate_bytes_s", "chunk_bytes"),
    [(5 * MB, CHUNK_BYTES_MIN), (200 * MB, 200_000), (400 * MB, 400_000), (2000 * MB, CHUNK_BYTES_MAX)],
)
def test_a_chunk_is_what_comes_in_a_millisecond(rate_bytes_s: float, chunk_bytes: int) -> None:
    pace = Pace()
    assert pace.chunk_bytes == CHUNK_BYTES_MIN, "nothing is known"
    body(pace, 1000.0, 10 * MB, rate_bytes_s)
    assert pace.chunk_bytes == pytest.approx(chunk_bytes, rel=1e-3)


def test_idle_time_does_not_count_and_a_link_that_slows_down_is_noticed() -> None:
    pace, at_s = Pace(), 0.0
    for _ in range(30):
        at_s = 3600 + body(pace, at_s, 1 * MB, 300 * MB)
    assert pace.chunk_bytes == pytest.approx(300_000, rel=1e-3)
    body(pace, at_s, 10 * MB, 30 * MB)
    assert pace.chunk_bytes == CHUNK_BYTES_MIN


def test_bodies_beside_each_other_are_one_pace() -> None:
    pace = Pace()
    for _ in range(8):
        pace.began(0.0)
    for turn in range(1, 201):  # 8 x 50 MB/s
        for _ in range(8):
            pace.came(turn * 0.002, 100_000)
    assert pace.chunk_bytes == pytest.approx(400_000, rel=0.06)


@given(
    st.lists(st.tuples(st.sampled_from(["began", "came", "ended"]), st.floats(0, 10), st.integers(0, 2 * SAMPLE_BYTES)))
)
@example([("came", 1e-308, SAMPLE_BYTES)])  # the rate is infinite
def test_whatever_happens_a_chunk_has_its_bounds(story: list[tuple[str, float, int]]) -> None:
    pace, now_s = Pace(), 0.0
    for what, passed_s, size_bytes in story:
        now_s += passed_s
        if what == "came":
            pace.came(now_s, size_bytes)
        else:
            getattr(pace, what)(now_s)
        assert CHUNK_BYTES_MIN <= pace.chunk_bytes <= CHUNK_BYTES_MAX


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_buckets_of_an_endpoint_share_its_pace_and_every_body_ends(place: Place) -> None:
    data = bytes(range(256)) * 12_000

    async def story() -> None:
        one, other = place.bare(), place.bare()
        assert isinstance(one, CloudReads)
        assert isinstance(other, CloudReads)
        pace = pace_of(one._wire.url)
        assert pace is one._pace is other._pace
        pace.chunk_bytes = CHUNK_BYTES_MAX
        whole = await one.fetch("object")
        sizes = [len(chunk) async for chunk in whole]
        assert sum(sizes) == len(data)
        assert min(sizes[:-1]) >= CHUNK_BYTES_MAX
        await whole.aclose()
        cut = await other.fetch("object")
        async for _ in cut:
            assert pace._open == 1
            break
        await cut.aclose()
        await cut.aclose()
        assert pace._open == 0
        unread = await other.fetch("object")
        await unread.aclose()
        assert pace._open == 0
        for backend in (one, other):
            await backend.aclose()

    place.put("object", data)
    asyncio.run(story())
