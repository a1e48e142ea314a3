"""A plan as the engine follows it: for each point, what leaves, what is fetched, and what is needed until the next.

Theory. A plan speaks of operators, but an engine sees only points. Plans are made on points, so each move begins at
one. Between two points lies a stretch. The storages that its operators use must be here when it begins, and the trace
gives its peak memory. So following a plan takes three short lists and a number at each point, which are made once.

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
    """One point. `used`: what can move and is used until the next point; `need_bytes`: the most that lives there;
    `here_bytes`: what lives when it is reached, some of which may be about to go; `written`: what lasts and was written
    since the point before."""

    name: str
    operator: int
    leaving: tuple[Leaving, ...]
    coming: tuple[Coming, ...]
    used: tuple[str, ...]
    need_bytes: int
    written: tuple[str, ...]
    here_bytes: int = 0


@dataclass(frozen=True)
class Itinerary:
    """All points of a step, and for each storage that can move the operators that use it."""

    stops: tuple[Stop, ...]
    uses: dict[str, tuple[int, ...]]
    operators: int

    def next_use(self, name: str, operator: int) -> int:
        """How many operators after `operator` a storage is used next, in this step or the next one."""
        uses = self.uses[name]
        return next((use for use in uses if use >= operator), self.operators + uses[0]) - operator


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
    movable = trace.kinds != KINDS.index("temporary")
    uses = {trace.tensors[t]: tuple(trace.uses(t).tolist()) for t in np.flatnonzero(movable).tolist()}
    used: dict[int, list[str]] = defaultdict(list)
    last: Ints = np.searchsorted(points, np.arange(count), "right") - 1  # of operator k, the point before it
    for name, operators in uses.items():
        for at in dict.fromkeys(last[list(operators)].tolist()):
            used[at].append(name)
    written: dict[int, dict[str, None]] = defaultdict(dict)
    lasts = movable & (trace.kinds != KINDS.index("activation"))  # what is saved is not written
    writes = trace.use_writes & lasts[trace.users()]
    first: Ints = np.searchsorted(points, trace.use_operators[writes], "right")  # the point behind each write
    for at, tensor in zip(first.tolist(), trace.users()[writes].tolist(), strict=True):
        written[min(at, len(points) - 1)][trace.tensors[tensor]] = None
    need = trace.need_bytes()
    ends = [*points[1:].tolist(), count]
    stops = tuple(
        Stop(
            name,
            begin,
            tuple(leaving[at]),
            tuple(sorted(coming[at], key=lambda move: move.in_operators)),
            tuple(used[at]),
            int(need[begin:end].max()) if end > begin else 0,
            tuple(written[at]),
            here_bytes.get(name, 0),
        )
        for at, (name, begin, end) in enumerate(zip(trace.point_names, points.tolist(), ends, strict=True))
    )
    return Itinerary(stops, uses, count)


def _point(points: object, operator: int) -> int:
    """The first of the points that are before an operator."""
    return int(np.searchsorted(points, operator, "left"))
