"""What has to be in memory from one point to the next: the one model of planner, replay and runner.

Theory. An engine acts at points only. So the operators between two points are one *stretch*: all that any of them uses
has to be here when the stretch begins, and stays here until it ends. A stretch takes the time of its operators, and
memory for the most that lives at any of them (`need_bytes`). What is away lowers that by its bytes. Loads may begin
before there is memory for all of it, as soon as they fit beside what lives when the stretch begins (`begin_bytes`).

Movable is what is no `temporary` and has at least `size_bytes_min`. All else is always here. A tensor that is born in a
stretch, or dies in it before its last operator, *counts* as here though nothing there uses it: nobody can send it away
before its birth, and the most may come after its death.

`required_bytes` is what a stretch needs if all is away that may be. No plan can do with less.

Invariants. (1) Stretches are in order, begin at the points of the trace without doublets, and cover its operators.
(2) What counts in a stretch is movable and lives in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from forebay.offload.planning.trace import KINDS, Flags, Floats, Ints, Trace

NEVER = 1 << 62  # an operator that no step has


class Stretches:
    """The stretches of `trace`, if tensors below `size_bytes_min` stay. Numbers count on over laps, as operators do."""

    def __init__(self, trace: Trace, size_bytes_min: int) -> None:
        self.trace, self.size_bytes_min = trace, size_bytes_min
        count = trace.operator_count
        self.points: Ints = np.unique(trace.points[trace.points < count])
        self.count = len(self.points)
        self.lengths: Ints = np.diff(self.points, append=count)  # in operators
        self.times_s: Floats = np.add.reduceat(trace.times_s, self.points)
        need = trace.need_bytes()
        self.need_bytes: Ints = np.maximum.reduceat(need, self.points)
        self.begin_bytes: Ints = self._at_begin()
        self.movable: Flags = (trace.sizes_bytes >= size_bytes_min) & (trace.kinds != KINDS.index("temporary"))
        users = trace.users()
        self.used = self._lists(users, self.of(trace.use_operators))
        lasts = trace.use_operators[trace.use_ends - 1]
        dies: Ints = self.of(trace.deaths)
        unused = (
            ~trace.persistent & (self.of(lasts) < dies) & (trace.deaths < np.append(self.points[1:], count)[dies] - 1)
        )
        dying, passing = np.flatnonzero(unused & self.movable), np.flatnonzero(~trace.persistent & self.movable)
        self.counted = self._lists(
            np.concatenate([users, dying, passing]),
            self.of(np.concatenate([trace.use_operators, trace.deaths[dying], trace.births[passing]])),
        )
        self.required_bytes: Ints = np.maximum.reduceat(need - self._spared(), self.points)
        self._uses = [trace.uses(tensor).tolist() for tensor in range(trace.tensor_count)]
        self.script: object = None  # of the replay

    def of(self, operators: Ints) -> Ints:
        """The stretch that each operator is in."""
        laps, inner = np.divmod(operators, self.trace.operator_count)
        found: Ints = np.searchsorted(self.points, inner, "right") - 1 + laps * self.count
        return found

    def operator(self, stretch: int) -> int:
        """The first operator of a stretch."""
        laps, inner = divmod(stretch, self.count)
        return int(self.points[inner]) + laps * self.trace.operator_count

    def point(self, operator: int) -> int:
        """The stretch whose point is the first at or after an operator, of any lap."""
        return int(np.searchsorted(self.points, operator % self.trace.operator_count)) % self.count

    def next_use(self, tensor: int, operator: int) -> int:
        """The first operator from that one (of the first lap) on that uses a tensor; NEVER if none does any more."""
        uses = self._uses[tensor]
        at = bisect_left(uses, operator)
        if at < len(uses):
            return int(uses[at])
        return int(uses[0]) + self.trace.operator_count if self.trace.persistent[tensor] else NEVER

    def _lists(self, tensors: Ints, stretches: Ints) -> list[list[int]]:
        """The movable ones of the tensors, by the stretch that is said of each."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        kept = self.movable[tensors]
        pairs = np.unique(np.stack([stretches[kept], tensors[kept]], axis=1), axis=0)
        for stretch, tensor in pairs.tolist():
            found[stretch].append(tensor)
        return found

    def _at_begin(self) -> Ints:
        """What lives when each stretch begins, and is not born in it."""
        trace = self.trace
        change: Ints = np.zeros(trace.operator_count + 2, np.int64)
        np.add.at(change, np.where(trace.persistent, 0, trace.births + 1), trace.sizes_bytes)
        np.add.at(change, trace.deaths + 1, -trace.sizes_bytes)
        found: Ints = np.cumsum(change)[self.points]
        return found

    def _spared(self) -> Ints:
        """For each operator, the bytes that live there and may be away."""
        trace = self.trace
        spared = trace.living_bytes(self.movable)
        stretches: Ints = np.repeat(np.arange(self.count), [len(each) for each in self.counted])
        tensors: Ints = np.array([tensor for each in self.counted for tensor in each], np.int64)
        ends: Ints = np.append(self.points[1:], trace.operator_count)
        change: Ints = np.zeros(trace.operator_count + 1, np.int64)
        begins = np.maximum(trace.births[tensors], self.points[stretches])
        lasts = np.minimum(trace.deaths[tensors], ends[stretches] - 1)
        np.add.at(change, begins, trace.sizes_bytes[tensors])
        np.add.at(change, lasts + 1, -trace.sizes_bytes[tensors])
        return spared - np.cumsum(change[:-1])


def stretches_of(trace: Trace, size_bytes_min: int) -> Stretches:
    """The same each time: they are made once for a trace."""
    found = trace.known.get(size_bytes_min)
    if not isinstance(found, Stretches):
        found = trace.known[size_bytes_min] = Stretches(trace, size_bytes_min)
    return found


def by_stretch(stretches: Stretches, tensors: Sequence[int], operators: Sequence[int]) -> list[list[int]]:
    """Tensors by the stretches of the operators said of each."""
    found: list[list[int]] = [[] for _ in range(stretches.count)]
    for tensor, stretch in zip(tensors, stretches.of(np.array(operators, np.int64)).tolist(), strict=True):
        found[stretch].append(tensor)
    return found
