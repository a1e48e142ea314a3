"""A plan as the engine follows it: for each point, what leaves, what is fetched, and what is needed until the next.

Theory. A plan speaks of operators, but an engine sees only points. Plans are made on points, so each move begins at
one. What must be here until the next one, and the memory that takes, is what `stretches` says. So following a plan
takes a few short lists and a number at each point, which are made once. Of several points before one operator, moves
begin at the first, and the last is that of the stretch; the others need nothing.

Invariant. Names of points are those of the trace, in its order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.plan import Plan
from forebay.offload.planning.stretches import NEVER, stretches_of
from forebay.offload.planning.trace import KINDS, Ints, Trace

NOWHERE: Mapping[str, int] = MappingProxyType({})


class Leaving(NamedTuple):
    """A storage leaves for a tier; it is needed again `in_operators` after the point's operator."""

    name: str
    tier: Tier
    in_operators: int


class Coming(NamedTuple):
    """A storage is fetched, and needed that many operators later."""

    name: str
    in_operators: int


@dataclass(frozen=True)
class Stop:
    """One point. `used`: what can move and is used until the next point; `dying`: what can move and dies (or is born)
    until then unused, so that its absence does not count; `need_bytes`: the most that lives there, 0 where no operator
    follows; `here_bytes`: what lives when it is reached, some of which may be about to go, and `begin_bytes`, what of
    it is to live on; `written`: what lasts and was written since the point before."""

    name: str
    operator: int
    leaving: tuple[Leaving, ...]
    coming: tuple[Coming, ...]
    used: tuple[str, ...]
    need_bytes: int
    written: tuple[str, ...]
    here_bytes: int = 0
    begin_bytes: int = 0
    dying: tuple[str, ...] = ()


@dataclass(frozen=True)
class Itinerary:
    """All points of a step, and for each storage that can move the operators that use it."""

    stops: tuple[Stop, ...]
    uses: dict[str, tuple[int, ...]]
    operators: int
    passing: frozenset[str] = frozenset()  # of these, what is not used again in the next step

    def next_use(self, name: str, operator: int) -> int:
        """How many operators after `operator` a storage is used next, in this step or the next one; NEVER if not."""
        uses = self.uses[name]
        if (found := next((use for use in uses if use >= operator), None)) is not None:
            return found - operator
        return NEVER if name in self.passing else self.operators + uses[0] - operator


def itinerary(trace: Trace, plan: Plan, here_bytes: Mapping[str, int] = NOWHERE) -> Itinerary:
    """The plan, by points; with what lived when they were reached, by their names."""
    count = trace.operator_count
    points = trace.points
    leaving: dict[int, list[Leaving]] = defaultdict(list)
    coming: dict[int, list[Coming]] = defaultdict(list)
    for move in plan.moves:
        name = trace.tensors[move.tensor]
        leaving[_point(points, move.leave % count)].append(Leaving(name, move.tier, move.need - move.leave))
        coming[_point(points, move.load % count)].append(Coming(name, move.need - move.load))
    stretches = stretches_of(trace, plan.size_bytes_min)
    movable = stretches.movable
    uses = {trace.tensors[t]: tuple(trace.uses(t).tolist()) for t in np.flatnonzero(movable).tolist()}
    passing = frozenset(trace.tensors[t] for t in np.flatnonzero(movable & ~trace.persistent).tolist())
    lasts_of: Ints = np.searchsorted(points, stretches.points, "right") - 1  # the last point of each stretch
    at_points = {point: stretch for stretch, point in enumerate(lasts_of.tolist())}
    written: dict[int, dict[str, None]] = defaultdict(dict)
    lasts = (trace.kinds != KINDS.index("temporary")) & (
        trace.kinds != KINDS.index("activation")
    )  # what is saved is not written
    writes = trace.use_writes & lasts[trace.users()]
    first: Ints = np.searchsorted(points, trace.use_operators[writes], "right")  # the point behind each write
    for at, tensor in zip(first.tolist(), trace.users()[writes].tolist(), strict=True):
        written[min(at, len(points) - 1)][trace.tensors[tensor]] = None
    stops = []
    for at, (name, begin) in enumerate(zip(trace.point_names, points.tolist(), strict=True)):
        stretch = at_points.get(at)
        used = stretches.used[stretch] if stretch is not None else []
        counted = stretches.counted[stretch] if stretch is not None else []
        stops.append(
            Stop(
                name,
                begin,
                tuple(leaving[at]),
                tuple(sorted(coming[at], key=lambda move: move.in_operators)),
                tuple(trace.tensors[tensor] for tensor in used),
                int(stretches.need_bytes[stretch]) if stretch is not None else 0,
                tuple(written[at]),
                here_bytes.get(name, 0),
                int(stretches.begin_bytes[stretch]) if stretch is not None else 0,
                tuple(trace.tensors[tensor] for tensor in counted if tensor not in used),
            )
        )
    return Itinerary(tuple(stops), uses, count, passing)


def _point(points: object, operator: int) -> int:
    """The first of the points that are before an operator."""
    return int(np.searchsorted(points, operator, "left"))
