"""Units in numbered slots: parallel arrays instead of an object per unit, which shrink when most units have left.

Theory. A machine that knows millions of units keeps each fact about them in its own array, at the unit's slot. One
dictionary maps units to slots. Free slots are used again. When at most one slot in eight is in use, the rest move
together (`_shrink`) in order, so a hand that goes round the slots keeps its place.

Invariant. A unit has one slot; every slot is a unit's or free.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter

SHRINK_SLOTS_MIN = 1 << 16
FREE, APART = 0, 255  # states of a slot; 1..254: one of the group of that number
ANY = 0  # of any of those groups
_GROUPED = re.compile(rb"[\x01-\xfe]")


class Slots:
    """The columns. `core/machines/eviction.py` gives them their meaning, except for the unit, its size, its bucket and
    FREE."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: array[int] = array("I")
        self._units, self._names, self._sizes = array("Q"), array("Q"), array("I")  # one entry per slot
        self._last, self._means, self._buckets, self._intervals = array("I"), array("f"), array("H"), bytearray()
        self._state, self._flags = bytearray(), bytearray()

    def _take_slot(self, unit: int, size_bytes: int, bucket_id: int) -> int:
        """A slot for a unit that has none. Its other facts are zero."""
        assert 0 <= size_bytes < 1 << 32, size_bytes
        if self._free:
            slot = self._free.pop()
            self._means[slot] = self._intervals[slot] = 0
        else:
            slot = len(self._units)
            for column in (self._units, self._names, self._sizes, self._last, self._buckets):
                column.append(0)
            self._means.append(0)
            for facts in (self._intervals, self._state, self._flags):
                facts.append(0)
        self._units[slot] = self._names[slot] = unit
        self._sizes[slot], self._buckets[slot] = size_bytes, bucket_id
        self._slots[unit] = slot
        return slot

    def _give_slot(self, slot: int) -> None:
        del self._slots[self._units[slot]]
        self._state[slot], self._flags[slot] = FREE, 0
        self._free.append(slot)

    def _next(self, group: int, hand: int) -> int:
        """The first slot of a group (or ANY) at or after `hand`, going round; -1 if there is none."""
        if group != ANY:
            slot = self._state.find(group, hand)
            return slot if slot >= 0 or not hand else self._state.find(group)
        match = _GROUPED.search(self._state, hand) or _GROUPED.search(self._state)
        return match.start() if match else -1

    def _after(self, group: int, hand: int, count: int) -> Sequence[int]:
        """The next `count` slots of a group from `hand` on, going round (repeating if there are few); none if the group
        is empty."""
        if group != ANY and self._state[hand : hand + count] == bytes((group,)) * count:
            return range(hand, hand + count)
        slots = []
        for _ in range(count):
            slot = self._next(group, hand)
            if slot < 0:
                return ()
            slots.append(slot)
            hand = slot + 1
        return slots

    def _shrink(self) -> Callable[[int], int] | None:
        """Move the remaining units together if few are left; then return the function from old slot numbers to new
        ones."""
        if len(self._units) < SHRINK_SLOTS_MIN or len(self._slots) * 8 > len(self._units) or len(self._slots) < 2:
            return None
        left = sorted(self._slots.values())
        chosen = itemgetter(*left)
        for name in ("_units", "_names", "_sizes", "_last", "_means", "_buckets"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, chosen(column)))
        self._intervals, self._state, self._flags = map(
            bytearray, (chosen(self._intervals), chosen(self._state), chosen(self._flags))
        )
        self._slots = {unit: slot for slot, unit in enumerate(self._units)}
        self._free = array("I")
        return lambda slot: bisect_left(left, slot)
