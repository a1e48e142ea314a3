"""What the cache remembers of units that left: their last use, and how often they come back.

Theory. A unit that returns after its eviction should find its record, but a machine that remembers every unit grows
without bound. So the memory is a table of fixed size with four places per set and a 16-bit tag per place: 11 bytes
each, no object per unit. A full set forgets its oldest. A tag may by accident be another unit's (once in 16,000
look-ups). That is acceptable: the record is evidence for a decision that may sometimes be wrong.

Invariant. A look-up takes the record out: it is either here or with the resident.
"""

from __future__ import annotations

from array import array

WAYS = 4  # places per set


class Ghost:
    """Last use and mean interval of units that left: a four-way table with tags. Full sets forget their oldest."""

    __slots__ = ("intervals", "last", "means", "sets", "tags")

    def __init__(self, entries: int) -> None:
        self.sets = max(16, entries // WAYS)
        places = self.sets * WAYS
        self.tags = array("H", bytes(2 * places))
        self.last = array("I", bytes(4 * places))
        self.means = array("f", bytes(4 * places))
        self.intervals = bytearray(places)

    def __len__(self) -> int:
        return len(self.tags)

    def _find(self, unit: int) -> tuple[int, int]:
        mixed = unit * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
        mixed = mixed * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        return (mixed >> 16) % self.sets * WAYS, (mixed & 0xFFFF) or 1

    def remember(self, unit: int, last: int, mean: float, intervals: int) -> None:
        """Keep the unit's last use, its mean interval, and the number of intervals in that mean."""
        start, tag = self._find(unit)
        chosen = start
        for at in range(start, start + WAYS):
            if self.tags[at] == tag:
                chosen = at
                break
            if self.last[at] < self.last[chosen]:
                chosen = at
        self.tags[chosen], self.last[chosen] = tag, last
        self.means[chosen], self.intervals[chosen] = mean, intervals

    def recall(self, unit: int) -> tuple[int, float, int] | None:
        """Take out (last use, mean interval, intervals), or None."""
        start, tag = self._find(unit)
        for at in range(start, start + WAYS):
            if self.tags[at] == tag:
                found = self.last[at], self.means[at], self.intervals[at]
                self.tags[at] = self.last[at] = 0
                return found
        return None
