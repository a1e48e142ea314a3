"""Books capacity: bytes that channels can move during each operator, and bytes that tiers can hold.

Theory. Both are columns over the operators of a step, on a circle: position `N + k` is operator k of the next step. A
store takes capacity forwards from its beginning, a load backwards from where it is needed. With the column's running
sums, a binary search finds where either ends, for many candidates at once. Everything is counted in whole bytes: sums
of floats would vary by rounding, and the ranking with them.

Invariant. Nothing is booked above the capacity.
"""

from __future__ import annotations

import numpy as np

from forebay.offload.planning.trace import Floats, Ints


class Slots:
    """The bytes that one channel can still move during each operator."""

    def __init__(self, room_bytes: Floats) -> None:
        self.free: Ints = np.floor(room_bytes).astype(np.int64)
        self._count = len(self.free)
        self._until: Ints = np.zeros(self._count + 1, np.int64)
        self._sum()

    def _sum(self) -> None:
        np.cumsum(self.free, out=self._until[1:])
        self._total = int(self._until[-1])

    def _before(self, at: Ints) -> Ints:
        """What is free before positions `at`."""
        laps, inner = np.divmod(at, self._count)
        found: Ints = laps * self._total + self._until[inner]
        return found

    def done(self, begins: Ints, sizes_bytes: Ints, limits: Ints) -> Ints:
        """The positions from which on bytes that move from `begins` on have moved; `limits` if not by then."""
        wanted = self._before(begins) + sizes_bytes
        late = self._before(limits) < wanted
        if self._total <= 0:
            return limits
        laps = np.maximum(-(-wanted // self._total) - 1, 0)
        inner = np.searchsorted(self._until, wanted - laps * self._total, "left")
        found: Ints = np.where(late, limits, np.maximum(begins, laps * self._count + inner))
        return np.minimum(found, limits)

    def begin(self, ends: Ints, sizes_bytes: Ints, limits: Ints) -> Ints:
        """The last positions at which bytes that have to be there at `ends` may begin to move; `limits` if that is
        before them."""
        wanted = self._before(ends) - sizes_bytes
        late = self._before(limits) > wanted
        if self._total <= 0:
            return limits
        laps = np.maximum(wanted, 0) // self._total
        inner = np.searchsorted(self._until, wanted - laps * self._total, "right") - 1
        found: Ints = np.where(late, limits, np.minimum(ends, laps * self._count + inner))
        return np.maximum(found, limits)

    def book_from(self, begin: int, size_bytes: int) -> None:
        """Take room for a store, from `begin` on."""
        self._book(begin, size_bytes, 1)

    def book_until(self, end: int, size_bytes: int) -> None:
        """Take room for a load, backwards from `end`."""
        self._book(end - 1, size_bytes, -1)

    def _book(self, first: int, size_bytes: int, step: int) -> None:
        left, at, piece = size_bytes, first, 64
        while left > 0 and abs(at - first) < self._count:
            piece = min(piece, self._count - abs(at - first))
            order: Ints = np.arange(at, at + step * piece, step) % self._count
            free = self.free[order]
            taken = np.minimum(np.maximum(left - (np.cumsum(free) - free), 0), free)
            self.free[order] = free - taken
            left -= int(free.sum())
            at, piece = at + step * piece, 4 * piece
        self._sum()


class Usage:
    """The bytes that one tier holds at each operator."""

    def __init__(self, operators: int, room_bytes: int) -> None:
        self.used: Ints = np.zeros(operators, np.int64)
        self._room = room_bytes

    def has_room(self, begin: int, end: int, size_bytes: int) -> bool:
        """Whether so much more fits from position `begin` until `end`."""
        return begin == end or bool(self.used[self._stretch(begin, end)].max() + size_bytes <= self._room)

    def add(self, begin: int, end: int, size_bytes: int) -> None:
        """Hold so much more."""
        self.used[self._stretch(begin, end)] += size_bytes

    def _stretch(self, begin: int, end: int) -> Ints:
        return np.arange(begin, end) % len(self.used)
