"""Bitmaps against sets of numbers, and read-ahead against what readers do."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.ranges import (
    ReadAhead,
    Run,
    absent_runs,
    bitmap_full,
    bitmap_with,
    blocks_touched,
    iterate_present,
    next_absent,
    run_bytes,
)

BLOCK = limits.BLOCK_BYTES
sets = st.sets(st.integers(0, 70), max_size=60)


@settings(max_examples=300, deadline=None)
@given(sets, sets)
def test_bitmaps_behave_like_sets(have, change):
    bits = bitmap_with(b"", have)
    assert list(iterate_present(bits)) == sorted(have)
    assert set(iterate_present(bitmap_with(bits, change))) == have | change


@settings(max_examples=300, deadline=None)
@given(sets, st.integers(0, 80), st.integers(0, 80))
def test_absent_blocks_are_those_not_set(have, first, end):
    bits = bitmap_with(b"", have)
    expected = [block for block in range(first, end) if block not in have]
    runs = list(absent_runs(bits, first, end))
    assert [block for run in runs for block in range(run.first, run.end)] == expected
    assert next_absent(bits, first, end) == (expected[0] if expected else end)
    assert all(left.end < right.first for left, right in itertools.pairwise(runs)), "runs must be maximal"


@given(st.integers(0, 100))
def test_a_full_bitmap_has_every_block(blocks):
    assert list(iterate_present(bitmap_full(blocks))) == list(range(blocks))


def test_a_huge_sparse_object_is_searched_without_walking_its_present_blocks():
    blocks = 2_000_000
    bits = bytearray(bitmap_full(blocks))
    for missing in (1_000_000, 1_999_999):
        bits[missing >> 3] &= ~(1 << (missing & 7))
    assert list(absent_runs(bits, 0, blocks)) == [Run(1_000_000, 1_000_001), Run(1_999_999, 2_000_000)]


@given(st.integers(0, 10 * BLOCK), st.integers(0, 10 * BLOCK))
def test_bytes_and_blocks_convert_both_ways(start, end):
    run = blocks_touched(start, end)
    touched = {position // BLOCK for position in (start, end - 1)} if start < end else set()
    assert set(range(run.first, run.end)) >= touched
    if touched:
        assert (run.first, run.end) == (min(touched), max(touched) + 1)
        low, high = run_bytes(run, end)
        assert low <= start
        assert high == end, "the last block is cut at the object's size"


# --- read-ahead ------------------------------------------------------------------------------------------------------
def test_one_range_of_a_large_object_fetches_nothing_beyond_its_blocks():
    assert ReadAhead().asked(500 * BLOCK, 500 * BLOCK + 1000) == 500 * BLOCK + 1000


def test_a_sequential_reader_earns_a_doubling_window_up_to_the_limit():
    reader, windows, position = ReadAhead(), [], 0
    for _ in range(400):
        reader.asked(position, position + limits.MIB)
        reader.check()
        windows.append(reader.window_bytes)
        position += limits.MIB
    grown = [window for at, window in enumerate(windows) if at == 0 or window != windows[at - 1]]
    assert grown == [0, BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK, 16 * BLOCK]
    assert limits.READ_WINDOW_BYTES == 16 * BLOCK


def test_the_window_does_not_grow_before_the_reader_has_used_what_it_got():
    reader = ReadAhead()
    reader.asked(0, 1000)
    ahead = reader.asked(1000, 2000)
    assert ahead == 2000 + BLOCK
    for start in range(2000, 100_000, 1000):
        assert reader.asked(start, start + 1000) == ahead, "nearly all of the window is still unread"


def test_a_seek_takes_the_window_back():
    reader, position = ReadAhead(), 0
    for _ in range(100):
        reader.asked(position, position + limits.MIB)
        position += limits.MIB
    assert reader.window_bytes > 0
    assert reader.asked(7 * limits.GIB, 7 * limits.GIB + 10) == 7 * limits.GIB + 10
    assert reader.window_bytes == 0


def test_reading_the_same_range_again_and_again_is_not_sequential():
    reader = ReadAhead()
    for _ in range(20):
        assert reader.asked(0, limits.MIB) == limits.MIB


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=60))
def test_a_window_never_promises_less_than_asked_nor_more_than_the_limit(requests):
    reader = ReadAhead(block_bytes=4, window_bytes_max=32)
    for start, length in requests:
        ahead = reader.asked(start, start + length)
        reader.check()
        assert start + length <= ahead <= start + length + 32
