"""Which blocks of an object to fetch, as few and as long ranges as may be.

Theory. Presence is a bitmap, one bit per block, least significant first, as in `core/record.py`. A reader needs the
half-open block range [first, end); what is neither present nor already in flight is grouped into *runs*: contiguous
blocks fetched by one ranged request. A run is as long as allowed (fewer requests), and stops at a block somebody else
is fetching, so that a block is fetched once. Bitmaps are worked on as integers: a gap of a thousand present blocks
costs one shift, not a thousand tests.

Read-ahead is for a reader that comes back for the next range again and again. It starts at zero, because most range
readers (indexes, footers, samples by offset) never continue; the first continuation earns one block, each further one
doubles it, but only when the reader has used half of what was fetched for it; a seek takes everything back.

Rejected: fetching across small present gaps (saves a round trip, but fetches a block twice, which we promise not to);
read-ahead by time (a fast link and a slow reader would fill the disk with what is never read).

Invariants. (1) Runs are sorted, disjoint, non-empty, at most `run_blocks_max` long, and their union is exactly
needed - present - in flight. (2) A window is 0 or between one block and `window_bytes_max`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from forebay.core import limits

Bitmap = bytes | bytearray


class Run(NamedTuple):
    """Blocks [first, end)."""

    first: int
    end: int


# --- blocks and bytes ------------------------------------------------------------------------------------------------
def blocks_touched(start: int, end: int, block_bytes: int = limits.BLOCK_BYTES) -> Run:
    """The blocks that bytes [start, end) touch; an empty byte range touches none."""
    return Run(start // block_bytes, -(-end // block_bytes)) if start < end else Run(0, 0)


def run_bytes(run: Run, size_bytes: int, block_bytes: int = limits.BLOCK_BYTES) -> tuple[int, int]:
    """The half-open byte range of a run in an object of `size_bytes`: what to ask the backend for."""
    return run.first * block_bytes, min(run.end * block_bytes, size_bytes)


# --- bitmaps ---------------------------------------------------------------------------------------------------------
def bitmap_full(blocks: int) -> bytes:
    """A bitmap with the first `blocks` bits set."""
    return ((1 << blocks) - 1).to_bytes(-(-blocks // 8), "little")


def bitmap_test(present: Bitmap, block: int) -> bool:
    """Whether `block` is set; beyond the bitmap's end nothing is."""
    return block >> 3 < len(present) and bool(present[block >> 3] >> (block & 7) & 1)


def bitmap_with(present: Bitmap, blocks: Iterable[int]) -> bytes:
    """`present` with `blocks` set, grown as needed."""
    bits = bytearray(present)
    for block in blocks:
        if block >> 3 >= len(bits):
            bits.extend(bytes((block >> 3) + 1 - len(bits)))
        bits[block >> 3] |= 1 << (block & 7)
    return bytes(bits)


def bitmap_without(present: Bitmap, blocks: Iterable[int]) -> bytes:
    """`present` with `blocks` cleared; trailing zero bytes are dropped, so an empty bitmap is `b""`."""
    bits = bytearray(present)
    for block in blocks:
        if block >> 3 < len(bits):
            bits[block >> 3] &= ~(1 << (block & 7)) & 0xFF
    return bytes(bits.rstrip(b"\0"))


def bitmap_count(present: Bitmap) -> int:
    """How many bits are set."""
    return int.from_bytes(present, "little").bit_count()


def bitmap_is_full(present: Bitmap, blocks: int) -> bool:
    """Whether the first `blocks` bits are all set."""
    return int.from_bytes(present, "little") & (1 << blocks) - 1 == (1 << blocks) - 1


def iterate_present(present: Bitmap) -> Iterator[int]:
    """Every set block, ascending."""
    for at, byte in enumerate(present):
        while byte:
            low = byte & -byte
            yield at * 8 + low.bit_length() - 1
            byte ^= low


def iterate_absent(present: Bitmap, first: int, end: int) -> Iterator[int]:
    """Every block of [first, end) that is not set, ascending."""
    for run in absent_runs(present, first, end):
        yield from range(run.first, run.end)


def absent_runs(present: Bitmap, first: int, end: int) -> Iterator[Run]:
    """The maximal runs of blocks in [first, end) that are not set, ascending."""
    if first >= end:
        return
    width = end - first
    window = present[first >> 3 : (end + 7) >> 3]
    missing = ~(int.from_bytes(window, "little") >> (first & 7)) & (1 << width) - 1
    at = first
    while missing:
        skip = (missing & -missing).bit_length() - 1
        missing >>= skip
        at += skip
        length = (~missing & missing + 1).bit_length() - 1
        yield Run(at, at + length)
        missing >>= length
        at += length


def next_absent(present: Bitmap, first: int, end: int) -> int:
    """The first block of [first, end) that is not set, or `end`: everything below it may be sent."""
    return next((run.first for run in absent_runs(present, first, end)), end)


# --- the plan --------------------------------------------------------------------------------------------------------
def plan_runs(
    first: int,
    end: int,
    present: Bitmap,
    in_flight: Container[int] = frozenset(),
    run_blocks_max: int = 4,
) -> list[Run]:
    """Runs to fetch so that with what is present and in flight all of [first, end) will be there.

    One run is one ranged request. `in_flight` answers whether a block is being fetched already.
    """
    assert run_blocks_max >= 1
    runs: list[Run] = []
    for gap in absent_runs(present, first, end):
        start = gap.first
        for block in range(gap.first, gap.end + 1):
            cut = block == gap.end or block in in_flight
            if block - start == run_blocks_max or (cut and block > start):
                runs.append(Run(start, block))
                start = block
            if cut:
                start = block + 1
    return runs


class ReadAhead:
    """How far past its request one reader's fetching may run. One per reader and object; all values in bytes."""

    __slots__ = ("block_bytes", "fetched_to", "next_start", "window_bytes", "window_bytes_max")

    def __init__(self, block_bytes: int = limits.BLOCK_BYTES, window_bytes_max: int = limits.READ_WINDOW_BYTES) -> None:
        assert window_bytes_max >= block_bytes > 0
        self.block_bytes = block_bytes
        self.window_bytes_max = window_bytes_max
        self.window_bytes = 0
        self.next_start = -1  # where a sequential reader's next request starts
        self.fetched_to = 0  # end of the last answer: what was asked to be fetched

    def asked(self, start: int, end: int) -> int:
        """The reader asks for bytes [start, end); answers up to where to fetch (>= end; the caller clamps to size).

        Sequential is a request that starts where the last one ended, or within half a block of it (readers overlap a
        little, or skip padding), and brings something new.
        """
        assert 0 <= start <= end
        slack = self.block_bytes // 2
        if abs(start - self.next_start) <= slack and end > self.next_start >= 0:
            if self.window_bytes == 0:
                self.window_bytes = self.block_bytes
            elif self.fetched_to - end <= self.window_bytes // 2:
                self.window_bytes = min(self.window_bytes * 2, self.window_bytes_max)
        else:
            self.window_bytes = 0
            self.fetched_to = end
        self.next_start = end
        if self.fetched_to - end <= self.window_bytes // 2:
            self.fetched_to = end + self.window_bytes
        return max(end, self.fetched_to)

    def check(self) -> None:
        assert self.window_bytes == 0 or self.block_bytes <= self.window_bytes <= self.window_bytes_max
