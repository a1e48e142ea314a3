"""Which blocks of an object are present, which are missing, and how far to read ahead.

Theory. A bitmap has one bit for each block, least significant first, as in `core/record.py`. The functions treat it as
one integer, so a stretch of a thousand present blocks costs one shift and not a thousand tests.

Read-ahead serves a reader that asks for the next range again and again. Most range readers (indexes, footers, samples
by offset) never do, so the window starts at zero. The first sequential request earns one block. Each further one
doubles the window, once the reader has used half of what was fetched for it. A seek sets it back to zero.

Rejected: read-ahead by time (a fast link and a slow reader would fill the disk with data that is never read).

Invariants. (1) Runs of missing blocks are sorted, disjoint, non-empty and maximal. (2) A window is 0 or between one
block and `window_bytes_max`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def end_of_stripe(position: int) -> int:
    """Where the stripe ends that has this byte."""
    return (position // limits.STRIPE_BYTES + 1) * limits.STRIPE_BYTES


# --- bitmaps ---------------------------------------------------------------------------------------------------------
def bitmap_full(blocks: int) -> bytes:
    """A bitmap with the first `blocks` bits set."""
    return ((1 << blocks) - 1).to_bytes(-(-blocks // 8), "little")


def bitmap_with(present: Bitmap, blocks: Iterable[int]) -> bytes:
    """`present` with `blocks` set, grown as needed."""
    bits = bytearray(present)
    for block in blocks:
        if block >> 3 >= len(bits):
            bits.extend(bytes((block >> 3) + 1 - len(bits)))
        bits[block >> 3] |= 1 << (block & 7)
    return bytes(bits)


def iterate_present(present: Bitmap) -> Iterator[int]:
    """Every set block, ascending."""
    for at, byte in enumerate(present):
        while byte:
            low = byte & -byte
            yield at * 8 + low.bit_length() - 1
            byte ^= low


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


# --- read-ahead ------------------------------------------------------------------------------------------------------


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
