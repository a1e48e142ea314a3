"""The units of one volume of which the future is known, and which of them is needed last.

Theory. Whoever knows the future evicts what is needed last, or never again. `Hints` says when a unit is due, in uses
passed; here is a heap of those that are on the volume, latest first. A due time stays what it is until that use is
passed (`moved`) or the jobs' shares change, so an entry is looked at again only when it comes to the top: if its unit
is due sooner than it says, it is put back where it belongs. Entries of units that left are dropped there too.

Beside units without hints. Their policy counts in ticks of the eviction clock, and how long they will not be used is at
least how long they were not (`core/machines/eviction.py`). A due time is made comparable by the *pace*: how many ticks
pass per use. So what nobody has touched for longer than a hinted unit will have to wait goes before it, and otherwise
it stays: neither kind starves the other.

Invariant. Every unit in `units` has an entry in the heap of its bucket that is not below its due time, as far as
`moved` was told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

PACE_USES = 64  # the pace is measured over as many uses
EARLIER = 0.98  # an entry is put back when its unit is due in less than this share of the time it says


class View(Protocol):
    """What is known of the future (`core/machines/hints.py`)."""

    passed: int

    def due(self, unit: int) -> float: ...


class Latest(NamedTuple):
    """The unit that is needed last."""

    unit: int
    due: float

    @property
    def never(self) -> bool:
        return self.due == inf


class Foreseen:
    """See the module's header. One for each eviction machine."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.units: dict[int, int] = {}  # unit -> its bucket's id
        self._heaps: dict[int, list[tuple[float, int]]] = {}  # by bucket id: (-due, unit)
        self._pace = 0.0
        self._paced_at = (0, view.passed)

    def add(self, unit: int, bucket_id: int) -> None:
        """A unit that has hints is here."""
        self.units[unit] = bucket_id
        heap = self._heaps.setdefault(bucket_id, [])
        if len(heap) > 4 * len(self.units) + 1024:
            heap[:] = [(-self.view.due(each), each) for each, owner in self.units.items() if owner == bucket_id]
            heapq.heapify(heap)
        else:
            heapq.heappush(heap, (-self.view.due(unit), unit))

    def moved(self, unit: int) -> None:
        """Its next use may be later than it was."""
        bucket_id = self.units.get(unit)
        if bucket_id is not None:
            self.add(unit, bucket_id)

    def drop(self, unit: int) -> None:
        """It left, or has no hints any more."""
        self.units.pop(unit, None)

    def latest(self, of: Callable[[int], bool], in_use: Callable[[int], bool]) -> Latest | None:
        """The unit needed last, among those of buckets for whose id `of` says yes and that are not in use."""
        best: Latest | None = None
        for bucket_id, heap in self._heaps.items():
            if heap and of(bucket_id):
                found = self._top(heap, bucket_id, in_use)
                if found is not None and (best is None or found.due > best.due):
                    best = found
        return best

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
        """When something is due, in ticks of the eviction clock from now; `tick_guess` is a unit's size in ticks."""
        at, passed = self._paced_at
        if self.view.passed - passed >= PACE_USES:
            pace = (now - at) / (self.view.passed - passed)
            self._pace = (self._pace + pace) / 2 if self._pace else pace
            self._paced_at = (now, self.view.passed)
        return (due - self.view.passed) * (self._pace or tick_guess)
