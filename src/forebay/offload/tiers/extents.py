"""Allocates stretches of a range.

Theory. Plans place tensors before the step that moves them, so allocation is rare and may search all free stretches.
It takes the smallest stretch that suffices (best fit keeps big ones whole for big tensors), from its beginning. A
released stretch merges with its free neighbours at once.

Everything is in blocks of BLOCK_BYTES: direct I/O needs that alignment, and so no two tensors share a block.

Rejected: buddies and powers of two (up to half of the room lost inside slots); first fit (saves a search that nobody
waits for, and breaks big stretches for small tensors).

Invariants (`check`). (1) Free stretches rise, do not touch and lie within the range. (2) Free and taken stretches make
up the range.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from operator import itemgetter

BLOCK_BYTES = 4096


def blocks(size_bytes: int) -> int:
    """So many bytes, rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Extents:
    """The free stretches of a range of `room_bytes`."""

    def __init__(self, room_bytes: int) -> None:
        assert room_bytes % BLOCK_BYTES == 0, "a range of broken blocks"
        self.room_bytes = self.free_bytes = room_bytes
        self._free = [(0, room_bytes)] if room_bytes else []  # (begin, end)

    @property
    def largest_bytes(self) -> int:
        """The most that one `take` can have."""
        return max((end - begin for begin, end in self._free), default=0)

    def take(self, size_bytes: int) -> int | None:
        """Where `size_bytes` (whole blocks) are from now on; None where no stretch is big enough."""
        assert size_bytes > 0, "a stretch of nothing"
        assert size_bytes % BLOCK_BYTES == 0, "a stretch of broken blocks"
        fitting = [(end - begin, at) for at, (begin, end) in enumerate(self._free) if end - begin >= size_bytes]
        if not fitting:
            return None
        _, at = min(fitting)
        begin, end = self._free[at]
        self._free[at : at + 1] = [(begin + size_bytes, end)] if begin + size_bytes < end else []
        self.free_bytes -= size_bytes
        return begin

    def give(self, begin: int, size_bytes: int) -> None:
        """Free again what `take` gave."""
        end, at = begin + size_bytes, bisect_left(self._free, begin, key=itemgetter(0))
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        assert before is None or before[1] <= begin, "given back twice"
        assert after is None or end <= after[0], "given back twice"
        first, last = at, at
        if before is not None and before[1] == begin:
            begin, first = before[0], at - 1
        if after is not None and after[0] == end:
            end, last = after[1], at + 1
        self._free[first:last] = [(begin, end)]
        self.free_bytes += size_bytes

    def check(self) -> None:
        """The invariants of the module's header."""
        edges = [edge for stretch in self._free for edge in stretch]
        assert all(one < other for one, other in pairwise(edges)), "stretches touch or overlap"
        assert not edges or (edges[0] >= 0 and edges[-1] <= self.room_bytes), "a stretch outside the range"
        assert sum(end - begin for begin, end in self._free) == self.free_bytes, "bytes are lost"
