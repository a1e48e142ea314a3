"""The eviction machine with hints: what is needed last goes first, and the rest by its own policy.

Theory. Units of which jobs told the future are taken out of the contest of `core/machines/eviction.py`: no clock hand
sees them, and no probation holds them. When room is needed,

* what no job needs again goes first;
* else the hinted unit that is due last stands against the unit that the policy gives up, and the one that will
  probably not be used for longer goes (`core/machines/foreseen.py` makes the two comparable). A newcomer without
  evidence goes before any unit that somebody will need: a scan beside a job takes nothing from it.

So with hints alone this is Belady's choice, newcomers included: what is needed later than all that is here lands, is
read, and leaves first. Without hints nothing is decided otherwise than before.

`spares` says whether something may be fetched ahead of its use: there is room, or what leaves for it is needed later.

Invariants. (1) A unit with hints never leaves while another hinted unit that could is due later. (2) A unit is hinted
or pinned, not both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from math import inf

from forebay.core.machines.eviction import _PINNED, _PROBATION, INTERVALS_MIN, LOW_MARK, Evicted, Eviction
from forebay.core.machines.foreseen import Foreseen, Latest, View
from forebay.core.machines.pool import Pool
from forebay.core.machines.slots import APART

_HINTED = 4  # a flag beside those of eviction.py


class HintedEviction(Eviction):
    """See the module's header. `view` knows the future; `hint` says of which units."""

    def __init__(self, capacity_bytes: int, view: View) -> None:
        self._foreseen = Foreseen(view)
        self._by_hint = 0
        self._fixed_bytes = 0  # of units that are hinted or pinned
        super().__init__(capacity_bytes)

    # --- events ------------------------------------------------------------------------------------------------------
    def hint(self, unit: int) -> bool:
        """`view` knows when it is due. False if the unit is not known, or pinned."""
        slot = self._slots.get(unit)
        if slot is None or self._flags[slot] & _PINNED:
            return False
        if self._flags[slot] & _PROBATION:
            self._promote(slot)
        if not self._flags[slot] & _HINTED:
            self._fixed_bytes += self._sizes[slot]
        self._flags[slot] = _HINTED
        self._state[slot] = APART
        self._foreseen.add(unit, self._buckets[slot])
        return True

    def unhint(self, unit: int) -> None:
        """`view` knows it no longer: it competes like any other."""
        slot = self._slots.get(unit)
        self._foreseen.drop(unit)
        if slot is not None and self._flags[slot] & _HINTED:
            self._fixed_bytes -= self._sizes[slot]
            self._flags[slot] = 0
            self._state[slot] = self._pool_of[self._buckets[slot]].code

    def moved(self, unit: int) -> None:
        """It is due later than it was."""
        self._foreseen.moved(unit)

    def all_moved(self) -> None:
        """Jobs said something else than before. Looks at every hinted unit."""
        for unit in list(self._foreseen.units):
            self._foreseen.moved(unit)

    def pin(self, unit: int, pinned: bool = True) -> bool:
        """As of any unit. One that is pinned has no hints; it may be hinted again when it is unpinned."""
        slot = self._slots.get(unit)
        if slot is None or (not pinned and self._flags[slot] & _HINTED):
            return slot is not None
        self._foreseen.drop(unit)
        before = self._flags[slot] & (_HINTED | _PINNED)
        super().pin(unit, pinned)
        after = self._flags[slot] & _PINNED
        self._fixed_bytes += self._sizes[slot] * (bool(after) - bool(before))
        return True

    def restore(self, units: Iterable[tuple[int, int, str, int, bool]], newest: int) -> None:
        known = [each for each in units if each[0] not in self._slots]
        super().restore(known, newest)
        self._fixed_bytes += sum(size_bytes for _, size_bytes, _, _, pinned in known if pinned)

    def _remove(self, slot: int) -> None:
        if self._flags[slot] & (_HINTED | _PINNED):
            self._foreseen.drop(self._units[slot])
            self._fixed_bytes -= self._sizes[slot]
        super()._remove(slot)

    # --- questions ---------------------------------------------------------------------------------------------------
    @property
    def hinted_units(self) -> int:
        """How many units here have hints."""
        return len(self._foreseen.units)

    def units(self) -> list[int]:
        """All units here that have hints."""
        return list(self._foreseen.units)

    def spares(self, size_bytes: int, due: float) -> bool:
        """Whether `size_bytes` that are due then may be fetched ahead: there is room, or what leaves is due later."""
        if self.used_bytes + size_bytes <= int(self.capacity_bytes * LOW_MARK):
            return True
        self._busy = None
        latest = self._latest(None)
        if latest is not None and latest.due > due:
            return True
        slot = self._weakest(None) if self.used_bytes - self._fixed_bytes >= size_bytes else -1
        return slot >= 0 and self._idle(slot) > self._ticks(due)

    def victims(
        self, excess_bytes: int, busy: Callable[[int], bool] | None = None, *, units_max: int = sys.maxsize
    ) -> Evicted:
        self._by_hint = 0
        return super().victims(excess_bytes, busy, units_max=units_max)

    @property
    def by_hint(self) -> int:
        """How many of the last victims were chosen because of when they are due."""
        return self._by_hint

    # --- choosing ----------------------------------------------------------------------------------------------------
    def _choose(self, pool: Pool | None) -> int:
        if not self._foreseen.units:
            return super()._choose(pool)
        latest = self._latest(pool)
        slot = -1 if latest is not None and latest.never else super()._choose(pool)
        if latest is None or (slot >= 0 and self._idle(slot) >= self._ticks(latest.due)):
            return slot
        self._by_hint += 1
        return self._slots[latest.unit]

    def _latest(self, pool: Pool | None) -> Latest | None:
        pools = self._pool_of
        return self._foreseen.latest(lambda bucket_id: pool is None or pools[bucket_id] is pool, self._in_use)

    def _idle(self, slot: int) -> float:
        """How long it will not be used, at least, in ticks. A newcomer has to show that it comes back at all."""
        if self._flags[slot] & _PROBATION and self._intervals[slot] < INTERVALS_MIN:
            return inf
        return max(self._means[slot], self._now - self._last[slot])

    def _ticks(self, due: float) -> float:
        guess = self.used_bytes / max(1, len(self._slots)) / self._tick_bytes
        return self._foreseen.ticks(due, self._now, guess)

    def check(self) -> None:
        super().check()
        for unit, slot in self._slots.items():
            hinted = bool(self._flags[slot] & _HINTED)
            assert hinted == (unit in self._foreseen.units), unit
            assert not hinted or self._foreseen.units[unit] == self._buckets[slot]
        assert all(unit in self._slots for unit in self._foreseen.units)
        fixed = (slot for slot in self._slots.values() if self._flags[slot] & (_HINTED | _PINNED))
        assert self._fixed_bytes == sum(self._sizes[slot] for slot in fixed)
