"""The order of an epoch: a permutation for every size, the same in every release, and well mixed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.torch.order import BlockShuffled, InOrder, Permuted

VECTORS = Path(__file__).parents[2] / "docs" / "order-vectors.json"
MASK = (1 << 64) - 1


# --- an oracle that shares nothing with the code but the description --------------------------------------------------
def splitmix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def oracle(samples: int, seed: int, epoch: int, stream: int, position: int) -> int:
    """One index, in plain integers."""
    state = 0
    for number in (seed, epoch, stream):
        state = splitmix(state ^ number)
    keys = [splitmix((state + turn * 0x9E3779B97F4A7C15) & MASK) for turn in range(1, 9)]
    bits = max(1, (samples - 1).bit_length())
    low_bits = bits // 2
    high_bits = bits - low_bits

    def hashed(value: int, key: int, width: int) -> int:
        mixed = ((value + key) & MASK) * 0xBF58476D1CE4E5B9 & MASK
        mixed ^= mixed >> 32
        mixed = mixed * 0x94D049BB133111EB & MASK
        return mixed >> (64 - width) if width else 0

    value = position
    while True:
        high, low = value >> low_bits, value % (1 << low_bits)
        for turn, key in enumerate(keys):
            if turn % 2 == 0:
                high ^= hashed(low, key, high_bits)
            else:
                low ^= hashed(high, key, low_bits)
        value = (high << low_bits) | low
        if value < samples:
            return value


def dumb_blocks(counts: list[int], sizes: list[int], window: int, seed: int, epoch: int) -> list[int]:
    """A block shuffle with lists."""
    starts = [sum(counts[:block]) for block in range(len(counts))]
    order = [oracle(len(counts), seed, epoch, 1, position) for position in range(len(counts))]
    windows: list[list[int]] = []
    for block in order:
        if windows and sum(sizes[b] for b in windows[-1]) + sizes[block] <= window:
            windows[-1].append(block)
        else:
            windows.append([block])
    found = []
    for number, blocks in enumerate(windows):
        samples = [starts[block] + at for block in blocks for at in range(counts[block])]
        found += [samples[oracle(len(samples), seed, epoch, 2 + number, at)] for at in range(len(samples))]
    return found


# --- permutations -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("samples", [*range(70), 127, 128, 129, 1000, 4096, 4097])
def test_every_size_is_permuted_and_nothing_is_lost_or_repeated(samples: int):
    for seed in range(3):
        indices = Permuted(samples, seed, epoch=seed + 1).at(np.arange(samples))
        assert sorted(indices.tolist()) == list(range(samples))
        assert indices.dtype == np.int64


@given(
    st.integers(1, 10**13),
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 10**13), max_size=5),
)
@example(10**12, 7, 3, [0, 1, 10**12 - 1])
@example(2**62, 2**63 - 1, 10**9, [0, 2**62 - 1])
@settings(max_examples=60, deadline=None)
def test_it_is_what_the_description_says(samples: int, seed: int, epoch: int, positions: list[int]):
    positions = [position % samples for position in positions]
    found = Permuted(samples, seed, epoch).at(np.array(positions, np.int64)).tolist()
    assert found == [oracle(samples, seed, epoch, 0, position) for position in positions]
    assert all(0 <= index < samples for index in found)


def test_a_trillion_samples_are_still_one_to_one_where_we_look():
    samples = 10**12
    positions = np.concatenate([np.arange(20_000), np.arange(samples - 20_000, samples)])
    found = Permuted(samples, 1, 0).at(positions)
    assert len(np.unique(found)) == len(positions)


def test_the_published_vectors_hold():
    for vector in json.loads(VECTORS.read_text())["vectors"]:
        samples, seed, epoch = vector["samples"], vector["seed"], vector["epoch"]
        positions = np.array(vector["positions"], np.int64)
        if "counts" in vector:
            order: Permuted | BlockShuffled = BlockShuffled(
                vector["counts"], vector["sizes_bytes"], vector["window_bytes"], seed, epoch
            )
        else:
            order = Permuted(samples, seed, epoch, vector["stream"])
        assert order.samples == samples
        assert order.at(positions).tolist() == vector["indices"]


def test_more_samples_than_indices_can_count_are_refused():
    with pytest.raises(Invalid, match="shuffle shards"):
        Permuted(2**62 + 1, 0, 0)


def test_without_a_shuffle_the_order_is_the_position():
    assert InOrder(5).at(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


# --- quality ----------------------------------------------------------------------------------------------------------
def chi_square(counts: np.ndarray) -> float:
    """In units of standard deviations from what fair dice give."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2) / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("samples", [1000, 4096, 65_537, 1_000_000])
def test_neighbours_in_the_epoch_are_anywhere_in_the_data(samples: int):
    indices = Permuted(samples, 5, 2).at(np.arange(samples))
    distances = np.diff(indices) % samples
    assert abs(chi_square(np.bincount(distances * 50 // samples, minlength=50))) < 6
    halves = np.bincount((indices[: samples // 2] * 50) // samples, minlength=50)
    assert chi_square(halves) < 6  # below what dice give is fine: nothing is drawn twice


def test_positions_seeds_and_epochs_all_matter():
    """Over many seeds and epochs, what stands at a fixed position is anything, equally often."""
    for samples in (7, 10, 64):
        first = np.array(
            [Permuted(samples, seed, epoch).at(np.array([3]))[0] for seed in range(50) for epoch in range(40)]
        )
        assert abs(chi_square(np.bincount(first, minlength=samples))) < 6
    a, b = (Permuted(10_000, 1, epoch).at(np.arange(10_000)) for epoch in (0, 1))
    assert int((a == b).sum()) < 10


def test_the_check_of_quality_finds_a_bad_order():
    samples = 10_000
    rotated = (np.arange(samples) + 4321) % samples
    assert chi_square(np.bincount((np.diff(rotated) % samples) * 50 // samples, minlength=50)) > 100


# --- blocks -----------------------------------------------------------------------------------------------------------
blocks = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), min_size=1, max_size=12)


@given(blocks, st.integers(1, 120), st.integers(0, 5), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_blocks_are_shuffled_as_lists_would_be(blocks: list[tuple[int, int]], window: int, seed: int, epoch: int):
    counts, sizes = [list(column) for column in zip(*blocks, strict=True)]
    order = BlockShuffled(counts, sizes, window, seed, epoch)
    found = order.at(np.arange(order.samples)).tolist()
    assert found == dumb_blocks(counts, sizes, window, seed, epoch)
    assert sorted(found) == list(range(sum(counts)))


def test_a_window_holds_no_more_than_it_may():
    counts, size, window = [100] * 50, 1000, 5000
    order = BlockShuffled(counts, [size] * 50, window, 3, 1)
    indices = order.at(np.arange(order.samples))
    for start in range(0, order.samples, 500):
        assert len(np.unique(indices[start : start + 500] // 100)) == 5, "five blocks fill a window"
    assert chi_square(np.bincount(indices[:500] % 100 // 10, minlength=10)) < 6, "all of a block is mixed"


def test_positions_may_be_asked_in_any_order():
    order = BlockShuffled([10, 0, 20, 5], [10, 0, 20, 5], 25, 1, 2)
    whole = order.at(np.arange(35))
    back = order.at(np.arange(34, -1, -1))
    assert back.tolist() == whole[::-1].tolist()


def test_a_window_of_nothing_is_refused():
    with pytest.raises(Invalid, match="window"):
        BlockShuffled([1], [1], 0, 0, 0)
