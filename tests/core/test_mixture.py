"""The places of a mixture, held against a dumb one that sorts all points."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.core.mixture import CHUNK, Mixture, by_proportion, by_repeat

SHARES = st.lists(st.integers(0, 3000), min_size=1, max_size=5).filter(any)


def dumb_chunks(shares: list[int]) -> list[list[tuple[int, int]]]:
    """The (source, sample) of each chunk, from the points of all samples."""
    total = sum(shares)
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(-(-total // CHUNK))]
    for source, share in enumerate(shares):
        for k in range(share):
            point = Fraction(2 * k + 1, 2 * share) * total
            # a point on the edge belongs before it
            chunks[max(0, -(-point // CHUNK) - 1)].append((source, k))
    return chunks


@given(SHARES)
def test_chunks_are_the_dumb_ones(shares: list[int]) -> None:
    mixture = Mixture(tuple(shares))
    first = 0
    for number, expected in enumerate(dumb_chunks(shares)):
        chunk = mixture.chunk(number)
        assert (chunk.first, chunk.end) == (first, first + len(expected))
        found = [
            (source, k)
            for source, (before, count) in enumerate(zip(chunk.before, chunk.counts, strict=True))
            for k in range(before, before + count)
        ]
        assert sorted(found) == sorted(expected)
        first = chunk.end
    assert first == mixture.samples == sum(shares)


@given(SHARES, st.data())
def test_a_position_is_in_its_chunk(shares: list[int], data: st.DataObject) -> None:
    mixture = Mixture(tuple(shares))
    position = data.draw(st.integers(0, mixture.samples - 1))
    chunk = mixture.chunk_at(position)
    assert chunk.first <= position < chunk.end
    assert chunk == mixture.chunk(chunk.number)


def test_numbers_beyond_64_bits_are_exact() -> None:
    shares = (10**30, 3 * 10**30, 1)
    mixture = Mixture(shares)
    last = mixture.chunk_at(mixture.samples - 1)
    assert last.end == sum(shares)
    assert tuple(map(sum, zip(last.before, last.counts, strict=True))) == shares
    middle = mixture.chunk_at(mixture.samples // 2)
    assert abs(middle.counts[1] - 3 * middle.counts[0]) <= 3


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any), st.integers(0, 10**6))
def test_proportions_are_kept_to_less_than_one_sample(weights: list[float], samples: int) -> None:
    mixture = by_proportion(weights, samples)
    assert mixture.samples == samples
    for weight, share in zip(weights, mixture.shares, strict=True):
        assert abs(share - samples * weight / sum(weights)) < 1 + 1e-6
        assert weight or not share


def test_factors_repeat_and_thin_out() -> None:
    assert by_repeat([2, 0.5, 0], [10, 11, 5]).shares == (20, 6, 0)


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [float("nan"), 1], [float("inf"), 1], []])
def test_weights_that_say_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(Invalid, match="at least 0"):
        by_proportion(weights, 10)
    with pytest.raises(Invalid, match="at least 0"):
        by_repeat(weights, [1] * len(weights))
