"""Follows an itinerary through one step after the other.

Theory. At each point the runner does this, and the replay does the same (`planning.replay`, tests hold them against
each other). It notes what finished. It begins the stores that the plan asks for. If memory until the next point does
not suffice, it waits for stores under way, and then evicts what is needed last, unplanned. It brings what is used until
the next point as soon as that has memory, and waits for it. It begins the loads that the plan asks for, now if there is
memory, otherwise at a later point.

A point with another name than expected means that the step differs from the profiled one (an evaluation in between, one
more accumulation). So does a saved tensor that is larger than it was (`is_larger`): another batch. Then the runner is
*lost* for the rest of the step: it moves nothing more, and `demand` takes over. Points between the passes are no such
sign (`tracing.between`): a program clips or logs in some steps only. Where there are fewer than expected, what was to
move at them moves at the next point. At others nothing moves, and what is touched there is brought by the guard.

What comes unplanned (`make_room`), and what an accelerator has no memory for (`relieve`), sends away what is needed
last, but nothing of the stretch under way and nothing of the call that wants it.

A tier that fails to store is not used for the rest of the step: its tensors go to another tier, or stay. If the step
then does not fit, it fails, but never once the optimizer has begun to update: half a step would be worse than memory
above the budget.

Invariant. What a stretch uses, as far as the trace knows, is here before the stretch begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from forebay.core.errors import ForebayError, Unavailable
from forebay.offload.movables import Books, Movable, Residency
from forebay.offload.planning.itinerary import Itinerary, Stop
from forebay.offload.tiers.tiers import Storage
from forebay.offload.tracing.between import BETWEEN
from forebay.offload.tracing.points import CHUNK

Find = Callable[[str], Movable | None]  # by name; None for what is not there in this step


@dataclass
class StepFacts:
    """What one step came to. `missing_s`: waiting for what was not here; `memory_s`: for memory."""

    step_s: float = 0.0
    missing_s: float = 0.0
    memory_s: float = 0.0
    written_bytes: int = 0
    read_bytes: int = 0
    unplanned: int = 0
    most_bytes: int = 0  # as the trace has it, with what was away taken off
    lost: bool = False
    over_bytes: int = 0  # above the budget, where that could not be helped
    watched: bool = False  # its operators passed a mode, which takes time


class Runner:
    """Follows `itinerary` with what `find` gives. `tiers` are those that the plan's numbers mean; `lost()` is called
    once in a step that turns out to be another one. `under_way`: what is on its way already, for another plan."""

    def __init__(
        self,
        itinerary: Itinerary,
        find: Find,
        lost: Callable[[], None],
        books: Books,
        tiers: dict[int, Storage],
        budget_bytes: int,
        under_way: Iterable[Movable] = (),
    ) -> None:
        self._itinerary, self._find, self._lost = itinerary, find, lost
        self._books, self._tiers, self._budget = books, tiers, budget_bytes
        self._at = 0
        self._lap = 0
        # Asked to leave, in order, and to come. Nobody else waits for what is not in these.
        self._going = [movable for movable in under_way if movable.residency is Residency.STORING]
        self._coming = [movable for movable in under_way if movable.residency is Residency.LOADING]
        self._later: list[tuple[str, float]] = []  # planned fetches without memory
        self.is_updating = False
        self.is_larger = self.is_left = False
        self.facts = StepFacts()

    @property
    def has_begun(self) -> bool:
        """Whether a point after the first was reached in this step."""
        return self._at > 1

    @property
    def operator(self) -> int:
        """The one that is next, as far as the plan was followed."""
        stops = self._itinerary.stops
        return stops[min(self._at, len(stops) - 1)].operator

    def begin_step(self) -> None:
        """The first point is next."""
        self._at = 0
        self._lap += 1
        self.is_updating = self.is_larger = self.is_left = False
        self._books.failed.clear()  # whoever failed in the last step may try again
        self.facts = StepFacts()
        self._waited_s = self._books.waited_s

    def leave(self) -> None:
        """The rest of this step is somebody else's."""
        self.facts.lost = self.is_left = True
        self._later.clear()

    def end_step(self) -> None:
        """No more points come."""
        self.facts.missing_s = self._books.waited_s - self._waited_s
        if self._at != len(self._itinerary.stops):
            self.facts.lost = True

    def at(self, name: str) -> None:
        """A point is reached."""
        if self.facts.lost:
            return
        if name.startswith(BETWEEN):
            if self._at >= len(self._itinerary.stops) or self._itinerary.stops[self._at].name != name:
                return
        else:
            self._pass_by()
        stops = self._itinerary.stops
        if self.is_larger or self._at >= len(stops) or stops[self._at].name != name:
            self._lose()
            return
        stop = stops[self._at]
        self._at += 1
        self.is_updating = self.is_updating or name.startswith(
            CHUNK
        )  # from here on a step is finished, whatever it takes
        due = self._begin(stop)
        used = [found for name in stop.used if (found := self._find(name)) is not None]
        self._fit(stop, used, due)
        self._bring(used, due, math.inf)
        for movable in used:
            movable.ensure()
        self._fetch(stop, due)

    def make_room(self, size_bytes: int) -> None:
        """So much comes that no plan foresaw. If not enough can leave, the budget is exceeded."""
        stop = self._under_way()
        if stop is None:
            return
        began_s = perf_counter()
        wanted = self._wanted(stop)
        while self._living(stop, []) + size_bytes > self._budget and (
            self._wait_one(wanted) or self._evict(stop, wanted)
        ):
            pass
        living = self._living(stop, []) + size_bytes
        self.facts.memory_s += perf_counter() - began_s
        self.facts.over_bytes = max(self.facts.over_bytes, living - self._budget)
        self.facts.most_bytes = max(self.facts.most_bytes, living)

    def relieve(self) -> bool:
        """There was no memory, whatever the plan says; False if nothing is left that could go."""
        stop = self._under_way()
        if stop is None:
            return False
        wanted = self._wanted(stop)
        return self._wait_one(wanted) or self._evict(stop, wanted)

    # --- the parts of a point ----------------------------------------------------------------------------------------
    def _under_way(self) -> Stop | None:
        """The stretch that the step is in; None where that is not known."""
        if self.facts.lost:
            return None
        passed = self._itinerary.stops[: self._at]
        return next((stop for stop in reversed(passed) if stop.need_bytes), None)

    def _wanted(self, stop: Stop) -> set[int]:
        """What may not leave now."""
        names = (*stop.used, *stop.dying)
        return {id(self._find(name)) for name in names} | {id(movable) for movable in self._books.together}

    def _pass_by(self) -> None:
        """Points between the passes that did not come: what moves at them moves now."""
        stops = self._itinerary.stops
        while self._at < len(stops) and stops[self._at].name.startswith(BETWEEN):
            stop = stops[self._at]
            self._at += 1
            due = self._begin(stop)
            self._later.extend((coming.name, due + coming.in_operators) for coming in stop.coming)

    def _begin(self, stop: Stop) -> int:
        """What is over, and what leaves; when the stretch is due."""
        for written in stop.written:
            if (movable := self._find(written)) is not None:
                movable.written()
        self._settle()
        due = self._lap * self._itinerary.operators + stop.operator
        for leaving in stop.leaving:
            self._send(self._find(leaving.name), self._tiers[leaving.tier], due + leaving.in_operators)
        return due

    def _settle(self) -> None:
        for movable in (*self._going, *self._coming):
            movable.settle()
        self._coming = [movable for movable in self._coming if movable.residency is Residency.LOADING]
        self._going = [movable for movable in self._going if movable.residency is Residency.STORING]

    def _send(self, movable: Movable | None, tier: Storage, due: float) -> bool:
        """Have it leave for the tier, or for another one if that has failed or is full; whether it goes."""
        if movable is None:
            return False
        for each in (tier, *(other for other in self._books.tiers if other is not tier)):
            if each not in self._books.failed and movable.leave(each, due):
                if movable.residency is Residency.STORING:
                    self._going.append(movable)
                return True
        return False

    def _living(self, stop: Stop, used: list[Movable]) -> int:
        """What lives until the next point at the most, once all that is used is here."""
        dying = [found for name in stop.dying if (found := self._find(name)) is not None]
        coming = sum(movable.size_bytes for movable in (*used, *dying) if movable.residency is Residency.AWAY)
        return stop.need_bytes - self._books.away_bytes + coming

    def _fit(self, stop: Stop, used: list[Movable], due: float) -> None:
        """See to it that the stretch fits into the budget. Loads begin as soon as they have memory."""
        for movable in used:
            if movable.residency is Residency.STORING:
                movable.ensure()  # before its store is complete, and it is away
        if not stop.need_bytes:
            return
        living = self._living(stop, used)
        if living > self._budget:
            began_s = perf_counter()
            wanted = {id(movable) for movable in used} | {id(self._find(name)) for name in stop.dying}
            while living > self._budget:
                self._bring(used, due, self._budget - max(stop.begin_bytes, stop.here_bytes))
                if not (self._wait_one(wanted) or self._evict(stop, wanted) or self._wait_coming(wanted)):
                    break
                living = self._living(stop, used)
            self.facts.memory_s += perf_counter() - began_s
            self.facts.over_bytes = max(self.facts.over_bytes, living - self._budget)
        self.facts.most_bytes = max(self.facts.most_bytes, living)

    def _bring(self, used: list[Movable], due: float, room_bytes: float) -> None:
        """Begin to load what is used, as far as there is room beside what is not away."""
        for movable in used:
            if movable.residency is Residency.LOADING or (
                movable.residency is Residency.AWAY and movable.size_bytes - self._books.away_bytes <= room_bytes
            ):
                movable.come(due, urgent=True)

    def _wait_one(self, wanted: set[int]) -> bool:
        """Wait for a store under way; False if there is none."""
        for movable in self._going:
            if movable.residency is Residency.STORING and id(movable) not in wanted:
                movable.wait()
                self._settle()
                return True
        return False

    def _wait_coming(self, wanted: set[int]) -> bool:
        """Wait for a load that began too early, so that it can leave again; False if there is none."""
        for movable in self._coming:
            if movable.residency is Residency.LOADING and id(movable) not in wanted:
                movable.wait()
                self._settle()
                return True
        return False

    def _evict(self, stop: Stop, wanted: set[int]) -> bool:
        """Send away what is needed last; False if nothing is left that could go."""
        here = []
        for name in self._itinerary.uses:
            movable = self._find(name)
            if movable is not None and movable.residency is Residency.HERE and id(movable) not in wanted:
                here.append((self._itinerary.next_use(name, stop.operator), movable))
        for ahead, movable in sorted(here, key=lambda each: each[0], reverse=True):
            if ahead > 0 and self._send(movable, self._books.tiers[0], math.inf):
                self.facts.unplanned += 1
                movable.wait()
                self._settle()
                return True
        if here and self._books.failed and not self.is_updating:
            raise self._cannot(self._books.failures[-1])
        return False

    def _cannot(self, error: ForebayError) -> ForebayError:
        told = Unavailable(
            f"the step does not fit into {self._budget:,} bytes, since a tier failed ({error.message}): mend the tier "
            "or give a larger budget, and take the step again; weights and optimizer state are as before it"
        )
        told.__cause__ = error
        return told

    def _fetch(self, stop: Stop, due: float) -> None:
        """Begin to load what the plan fetches here, and what had no memory earlier."""
        wanted = [*self._later, *((coming.name, due + coming.in_operators) for coming in stop.coming)]
        if not stop.need_bytes:  # no operator follows, so nobody knows what there is room for
            self._later = wanted
            return
        self._later = []
        for name, needed in wanted:
            movable = self._find(name)
            if movable is None or movable.residency is not Residency.AWAY:
                continue
            living = max(self._living(stop, []), stop.here_bytes - self._books.away_bytes)
            if living + movable.size_bytes > self._budget:
                self._later.append((name, needed))
            else:
                movable.come(needed)
                self._coming.append(movable)

    def _lose(self) -> None:
        self.facts.lost = True
        self._later.clear()
        self._lost()
