"""Eviction with hints: compare the hinted unit that is due last with the policy's victim; evict whichever will stay
unused longer.

Theory. Units with hints leave the contest of `core/machines/eviction.py`: no clock hand sees them, and no probation
holds them. When room is needed,

* a unit that no job needs again goes first;
* otherwise the hinted unit that is due last stands against the policy's victim, and the one that will probably stay
  unused longer goes (`core/machines/foreseen.py` makes the two comparable). A newcomer without evidence goes before any
  hinted unit that is still needed: a scan beside a job takes nothing from the job.

With hints alone this is Belady's choice, newcomers included: a unit that is needed later than all units here lands, is
read, and leaves first. Without hints every decision is the policy's.

`stay` says how long something would stay that came now: until it is due later than the last of those that leave for it,
of which there are several if they are smaller. It is worth its bytes if enough of them are needed before that
(`Hints.pays`); what is not is read from the backend range by range, and nothing leaves for it.

Invariants. (1) A hinted unit never leaves while another of those that give first (`copies.py`) is due later. (2) A
unit is hinted or pinned, not both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from math import inf

from forebay.core.machines.copies import EvictionOfCopies
from forebay.core.machines.eviction import _PINNED, _PROBATION, INTERVALS_MIN, LOW_MARK, Evicted
from forebay.core.machines.foreseen import Foreseen, Latest, Stay, View
from forebay.core.machines.pool import Pool
from forebay.core.machines.slots import APART

_HINTED = 4  # a flag beside those of eviction.py


class HintedEviction(EvictionOfCopies):
    """See the module's header. `view` knows the future; `hint` names the units it knows."""

    def __init__(self, capacity_bytes: int, view: View) -> None:
        self._foreseen = Foreseen(view)
        self._by_hint = 0
        self._fixed_bytes = 0  # of units that are hinted or pinned
        super().__init__(capacity_bytes)

    # --- events ------------------------------------------------------------------------------------------------------
    def hint(self, unit: int) -> bool:
        """Mark a unit whose due time `view` knows. False if the unit is unknown or pinned."""
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
        """Let a unit that `view` no longer knows compete like any other."""
        slot = self._slots.get(unit)
        self._foreseen.drop(unit)
        if slot is not None and self._flags[slot] & _HINTED:
            self._fixed_bytes -= self._sizes[slot]
            self._flags[slot] = 0
            self._state[slot] = self._pool_of[self._buckets[slot]].code

    def moved(self, unit: int) -> None:
        """Note that the unit is due later than before."""
        self._foreseen.moved(unit)

    def all_moved(self) -> None:
        """Note that jobs changed their future. Scans every hinted unit."""
        for unit in list(self._foreseen.units):
            self._foreseen.moved(unit)

    def pin(self, unit: int, pinned: bool = True) -> bool:
        """As in `Eviction`. A pinned unit has no hints; it may be hinted again after it is unpinned."""
        slot = self._slots.get(unit)
        if slot is None or (not pinned and self._flags[slot] & _HINTED):
            return slot is not None
        self._foreseen.drop(unit)
        before = self._flags[slot] & (_HINTED | _PINNED)
        super().pin(unit, pinned)
        after = self._flags[slot] & _PINNED
        self._fixed_bytes += self._sizes[slot] * (bool(after) - bool(before))
        return True

    def place(self, unit: int, copy: bool) -> None:
        super().place(unit, copy)
        if unit in self._foreseen.units:
            self._foreseen.add(unit, self._buckets[self._slots[unit]])

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

    def units(self) -> list[int]:
        """All units here that have hints."""
        return list(self._foreseen.units)

    def stay(self, bucket: str, size_bytes: int, copy: bool = False) -> Stay:
        """How long `size_bytes` of a bucket would stay if they came now; `copy`: another node is their home."""
        pool = self._pool_of[self._id_of(bucket, copy)]
        over_bytes = self.used_bytes + size_bytes - int(self.capacity_bytes * LOW_MARK)
        own_bytes = 0 if pool is self._open else pool.used_bytes + size_bytes - int(pool.limit_bytes * LOW_MARK)
        if max(over_bytes, own_bytes) <= 0:
            return Stay(inf, False, inf)
        spare_bytes = self._spare_bytes(size_bytes if pool is self._copies else 0)
        among = pool if own_bytes > 0 else self._copies if spare_bytes else None  # who gives first, as `victims` does
        self._busy = None
        leaving_bytes = min(size_bytes, max(over_bytes, own_bytes))  # more may leave at once, but not for this
        last = self._foreseen.last_for(leaving_bytes, self._size_of, self._of(among), self._in_use)
        latest = self._latest(among)
        passed = self._foreseen.view.passed
        until, first = passed if last is None else last.due, passed if latest is None else latest.due
        slot = self._weakest(among) if self.used_bytes - self._fixed_bytes >= size_bytes else -1
        if slot < 0:
            return Stay(until, True, first)
        idle_until = self._foreseen.due_in(self._idle(slot), self._tick_guess)
        return Stay(idle_until, False, idle_until) if idle_until > until else Stay(until, True, first)

    def victims(
        self, excess_bytes: int, busy: Callable[[int], bool] | None = None, *, units_max: int = sys.maxsize
    ) -> Evicted:
        self._by_hint = 0
        return super().victims(excess_bytes, busy, units_max=units_max)

    @property
    def by_hint(self) -> int:
        """How many of the last victims were chosen by their due time."""
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
        return self._foreseen.latest(self._of(pool), self._in_use)

    def _of(self, pool: Pool | None) -> Callable[[int], bool]:
        """Whether a bucket, by its id, is one of the pool; None: of any."""
        pools = self._pool_of
        return lambda bucket_id: pool is None or pools[bucket_id] is pool

    def _size_of(self, unit: int) -> int:
        return self._sizes[self._slots[unit]]

    def _idle(self, slot: int) -> float:
        """The least time, in ticks, that a unit is expected to stay unused. A newcomer must first show that it comes
        back."""
        if self._flags[slot] & _PROBATION and self._intervals[slot] < INTERVALS_MIN:
            return inf
        return max(self._means[slot], self._now - self._last[slot])

    def _ticks(self, due: float) -> float:
        return self._foreseen.ticks(due, self._now, self._tick_guess)

    @property
    def _tick_guess(self) -> float:
        """Ticks per use, where nothing was measured: those of one unit."""
        return max(1, self.used_bytes) / max(1, len(self._slots)) / self._tick_bytes

    def check(self) -> None:
        super().check()
        for unit, slot in self._slots.items():
            hinted = bool(self._flags[slot] & _HINTED)
            assert hinted == (unit in self._foreseen.units), unit
            assert not hinted or self._foreseen.units[unit] == self._buckets[slot]
        assert all(unit in self._slots for unit in self._foreseen.units)
        fixed = (slot for slot in self._slots.values() if self._flags[slot] & (_HINTED | _PINNED))
        assert self._fixed_bytes == sum(self._sizes[slot] for slot in fixed)
