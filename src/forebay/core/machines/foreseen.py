"""Which hinted unit on a volume is needed last.

Theory. If the future is known, the best victim is the unit needed last, or never again. `Hints` says when a unit is
due, counted in uses passed. This module keeps a heap of the hinted units on the volume, latest first. A due time
changes only when that use is passed (`moved`) or when the jobs' shares change. So an entry is checked only when it
reaches the top: if its unit is due sooner than the entry says, it is put back where it belongs; if its unit left, it is
dropped.

Units without hints are judged by their policy in ticks of the eviction clock: a unit will stay unused for at least as
long as it has been unused (`core/machines/eviction.py`). The *pace*, ticks per use, makes the two comparable. An
unhinted unit that has been idle for longer than a hinted unit will wait goes first; otherwise it stays. So neither kind
starves the other.

Invariant. Every unit in `units` has an entry in its bucket's heap that is not below its due time, if `moved` was called
for each change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

PACE_USES = 64  # the pace is measured over this many uses
LOOKED_AT = 64  # units that would leave for one that comes: more are of one kind, and due much alike
EARLIER = 0.98  # an entry is put back when its unit is due in less than this share of the time it says


class View(Protocol):
    """What the jobs told of the future (`core/machines/hints.py`)."""

    passed: int

    def due(self, unit: int) -> float: ...


class Latest(NamedTuple):
    """The unit that is needed last."""

    unit: int
    due: float

    @property
    def never(self) -> bool:
        return self.due == inf


class Stay(NamedTuple):
    """Something that came now would stay `until` it is due later than that, counted in uses passed (inf: there is
    room). `hinted`: what would leave for it are units that a job may need. `first`: when the first of these is due; the
    last is at `until`."""

    until: float
    hinted: bool
    first: float = 0.0


class Foreseen:
    """See the module's header. One for each eviction machine."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.units: dict[int, int] = {}  # unit -> its bucket's id
        self._heaps: dict[int, list[tuple[float, int]]] = {}  # by bucket id: (-due, unit)
        self._pace = 0.0
        self._paced_at = (0, view.passed)

    def add(self, unit: int, bucket_id: int) -> None:
        """Add a unit with hints that is here."""
        self.units[unit] = bucket_id
        heap = self._heaps.setdefault(bucket_id, [])
        if len(heap) > 4 * len(self.units) + 1024:
            heap[:] = [(-self.view.due(each), each) for each, owner in self.units.items() if owner == bucket_id]
            heapq.heapify(heap)
        else:
            heapq.heappush(heap, (-self.view.due(unit), unit))

    def moved(self, unit: int) -> None:
        """Note that the unit's next use may be later than before."""
        bucket_id = self.units.get(unit)
        if bucket_id is not None:
            self.add(unit, bucket_id)

    def drop(self, unit: int) -> None:
        """Remove a unit that left or no longer has hints."""
        self.units.pop(unit, None)

    def latest(self, of: Callable[[int], bool], in_use: Callable[[int], bool]) -> Latest | None:
        """The unit needed last among those not in use whose bucket id satisfies `of`."""
        best: Latest | None = None
        for bucket_id, heap in self._heaps.items():
            if heap and of(bucket_id):
                found = self._top(heap, bucket_id, in_use)
                if found is not None and (best is None or found.due > best.due):
                    best = found
        return best

    def last_for(
        self, size_bytes: int, size_of: Callable[[int], int], of: Callable[[int], bool], in_use: Callable[[int], bool]
    ) -> Latest | None:
        """Of the units that would leave for `size_bytes`, the latest first, the one needed soonest. None if all of them
        have less; it looks at LOOKED_AT of them."""
        leaving: set[int] = set()
        while True:
            found = self.latest(of, lambda unit: unit in leaving or in_use(unit))
            if found is None:
                return None
            leaving.add(found.unit)
            size_bytes -= size_of(found.unit)
            if size_bytes <= 0 or len(leaving) == LOOKED_AT:
                return found

    def _top(self, heap: list[tuple[float, int]], bucket_id: int, in_use: Callable[[int], bool]) -> Latest | None:
        aside: list[tuple[float, int]] = []
        found: Latest | None = None
        passed = self.view.passed
        while heap and found is None:
            key, unit = heap[0]
            if self.units.get(unit) != bucket_id:
                heapq.heappop(heap)
                continue
            due = self.view.due(unit)
            if due < 0 or (due != -key and due - passed < (-key - passed) * EARLIER):
                heapq.heapreplace(heap, (-due, unit))
            elif in_use(unit):
                aside.append(heapq.heappop(heap))
            else:
                found = Latest(unit, due)
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    # --- beside units without hints ----------------------------------------------------------------------------------
    def ticks(self, due: float, now: int, tick_guess: float) -> float:
        """How many ticks of the eviction clock from now something is due. `tick_guess` is a unit's size in ticks."""
        at, passed = self._paced_at
        if self.view.passed - passed >= PACE_USES:
            pace = (now - at) / (self.view.passed - passed)
            self._pace = (self._pace + pace) / 2 if self._pace else pace
            self._paced_at = (now, self.view.passed)
        return (due - self.view.passed) * (self._pace or tick_guess)

    def due_in(self, ticks: float, tick_guess: float) -> float:
        """The opposite: when something is due that is so many ticks from now, at the pace of `ticks`."""
        return self.view.passed + ticks / (self._pace or tick_guess)
