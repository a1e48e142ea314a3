"""Simulates a training step under a plan: how long it takes, and what it waits for.

Theory. This does what the runner does, in the same order, at each point (`stretches` has what must be here until the
next one). Stores that are complete free their memory. The moves that leave here are asked for. Then there has to be
memory for the stretch: the step waits for stores under way, and if there are none, what is needed last leaves,
unplanned. All that the stretch uses is brought as soon as it has memory, and waited for. Then the loads that the plan
asks for here begin, if there is memory for them, otherwise at a later point. A load takes its memory when it is asked
for. A store frees its own when it is complete and the next point is reached.

Each tier has one server in each direction, which takes first what is waited for, then what is needed soonest. A tensor
that is needed during its store is kept: what was not written yet is dropped. A tier holds a tensor's bytes from its
first store until the tensor dies, or moves to another tier. What no tier has room for stays. The two tiers share the
link: a host move that begins while the disk's server is busy gets the rest of the link.

A step is replayed until its state is one that it had before, at most LAPS_MAX times. The laps from then to now are the
*cycle*, which would go on for ever, and the numbers are its means. If a plan leaves a tensor away over the end, it is
away at the start.

Invariants. (1) Memory exceeds the budget only where nothing can leave. (2) No operator runs without its tensors.
(3) Compute, stalls for tensors and stalls for memory add up to the step.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from forebay.core.errors import Invalid
from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.plan import Move, Plan
from forebay.offload.planning.stretches import NEVER, Stretches, by_stretch, stretches_of
from forebay.offload.planning.trace import Ints, Trace

LAPS_MAX = 12
SAME_S = 1e-9  # moves under way whose ends differ by less are in the same state


class Residency(IntEnum):
    """Where a tensor is."""

    ABSENT = 0  # not alive
    HERE = 1
    STORING = 2  # here until the store is complete, and a point is reached
    AWAY = 3
    LOADING = 4


class Stall(NamedTuple):
    """The time that an operator waited: for a tensor, or (tensor -1) for memory."""

    operator: int
    tensor: int
    seconds: float


@dataclass(frozen=True)
class Replayed:
    """What one step comes to, on the mean over the cycle that steps end in; what is most, over all of it.

    `memory_bytes` is of each operator as it ran, in the last lap, and `peak_bytes` the most memory at any time.
    """

    step_s: float
    compute_s: float
    stalls: tuple[Stall, ...]
    peak_bytes: int
    memory_bytes: Ints
    written_bytes: int
    read_bytes: int
    unplanned: int
    laps: int
    missing_s: float
    memory_s: float

    @property
    def share_of_ideal(self) -> float:
        """Compute over step time: 1 when nothing is ever waited for."""
        return min(1.0, self.compute_s / self.step_s) if self.step_s else 1.0


class _Transfer:
    """A move that is asked for, under way or over."""

    __slots__ = ("began_s", "dropped", "ends_s", "need", "number", "out", "size_bytes", "tensor", "tier", "urgent")

    def __init__(self, tensor: int, tier: Tier, size_bytes: int, need: int, number: int, *, out: bool) -> None:
        self.tensor, self.tier, self.size_bytes, self.out = tensor, tier, size_bytes, out
        self.need, self.number = need, number
        self.urgent = self.dropped = False
        self.began_s = self.ends_s = math.inf

    def order(self) -> tuple[bool, int, int]:
        return (not self.urgent, self.need, self.number)


class _Server:
    """One direction of one tier: one transfer at a time."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.busy: _Transfer | None = None
        self._waiting: list[tuple[tuple[bool, int, int], _Transfer]] = []  # with entries that are out of date

    def add(self, transfer: _Transfer) -> None:
        """Queue it, or queue it again now that it is urgent."""
        heapq.heappush(self._waiting, (transfer.order(), transfer))

    def take(self) -> _Transfer | None:
        """Who is next, which is busy now; None if nobody waits."""
        while self._waiting:
            order, transfer = heapq.heappop(self._waiting)
            if not transfer.dropped and transfer.began_s == math.inf and order == transfer.order():
                self.busy = transfer
                return transfer
        return None


class Lap(NamedTuple):
    step_s: float
    stalls: list[Stall]
    peak_bytes: int
    away_bytes: list[int]
    written_bytes: int
    read_bytes: int
    unplanned: int


class Machine:
    """The state of a replay. Moves in time by `run_lap`."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._stretches = stretches_of(trace, plan.size_bytes_min)
        self._script = _Script.of(self._stretches)
        self._hardware = plan.hardware
        self._now_s = 0.0
        self._operators = trace.operator_count
        self._sizes = self._script.sizes
        self._residencies = [Residency.HERE if stays else Residency.ABSENT for stays in self._script.persistent]
        self._away_bytes = 0
        self._servers = {
            (tier, out): _Server(self._hardware.out_bytes_s(tier) if out else self._hardware.in_bytes_s(tier))
            for tier in self._hardware.tiers
            for out in (True, False)
        }
        self._free = {tier: self._hardware.room_bytes(tier) for tier in self._hardware.tiers}
        self._slots: dict[int, Tier] = {}  # which tier has room for a tensor
        self._copies: set[int] = set()  # tensors of which the slot has a good copy
        self._transfers: dict[int, _Transfer] = {}  # by tensor: those not over, and stores that nobody looked at
        self._going: dict[int, None] = {}  # stores, as they were asked for
        self._later: list[tuple[int, int]] = []  # loads without memory: tensor, needed
        self._events: list[tuple[float, int, _Transfer]] = []
        self._number = 0
        self._needs = [0] * trace.tensor_count  # when each that is alive is used next
        self._candidates: list[tuple[int, int]] = []  # what may be sent away: (-needed, tensor), some out of date
        self._leaving: dict[int, list[Move]] = defaultdict(list)
        self._coming: dict[int, list[Move]] = defaultdict(list)
        for move in plan.moves:
            self._leaving[self._stretches.point(move.leave)].append(move)
            self._coming[self._stretches.point(move.load)].append(move)
            if move.leave < self._operators <= move.load and self._reserve(move.tensor, move.tier):
                self._residencies[move.tensor] = Residency.AWAY  # over the end of the step: so it is at the start
                self._copies.add(move.tensor)
                self._away_bytes += self._sizes[move.tensor]
        for moves in self._coming.values():
            moves.sort(key=lambda move: move.need - move.load)
        for tensor in self._script.movable:
            if self._residencies[tensor] is Residency.HERE:
                self._needs[tensor] = self._stretches.next_use(tensor, 0)
                self._is_here(tensor)
            elif self._residencies[tensor] is Residency.AWAY:
                self._needs[tensor] = self._stretches.next_use(tensor, 0)

    # --- a lap -------------------------------------------------------------------------------------------------------
    def run_lap(self, lap: int) -> Lap:
        """Run the step once."""
        self._stalls: list[Stall] = []
        self._peak = self._written = self._read = self._unplanned = 0
        script, curve, began_s = self._script, [], self._now_s
        for stretch in range(script.count):
            operator = script.operators[stretch]
            due = lap * self._operators + operator
            self._settle()
            for move in self._leaving.get(stretch, ()):
                if self._residencies[move.tensor] is Residency.HERE:
                    self._send(move.tensor, move.tier, due + move.need - move.leave)
            self._fit(stretch, operator, due)
            self._bring(stretch, due, NEVER)
            self._await(stretch, operator)
            self._fetch(stretch, due)
            curve.append(self._away_bytes - self._counted_bytes(stretch))
            self._peak = max(self._peak, script.need_bytes[stretch] - curve[-1])
            self._pass(self._now_s + script.times_s[stretch])
            for tensor in (*script.born[stretch], *script.used[stretch]):
                self._needs[tensor] = self._stretches.next_use(tensor, script.ends[stretch]) + due - operator
                self._is_here(tensor)
            for tensor in script.written[stretch]:
                self._copies.discard(tensor)
            for tensor in script.dying[stretch]:
                self._die(tensor)
        return Lap(self._now_s - began_s, self._stalls, self._peak, curve, self._written, self._read, self._unplanned)

    def state(self) -> Hashable:
        """Where all is: what two laps that begin alike have in common."""
        under_way = tuple(
            (transfer.number - self._number, tensor, transfer.out, round((transfer.ends_s - self._now_s) / SAME_S))
            if transfer.ends_s < math.inf
            else (transfer.number - self._number, tensor, transfer.out, None)
            for tensor, transfer in self._transfers.items()
        )
        where = bytes(self._residencies), tuple(sorted(self._slots.items())), frozenset(self._copies)
        return *where, under_way, tuple(self._going), tuple(tensor for tensor, _ in self._later)

    # --- the parts of a point, as the runner has them ----------------------------------------------------------------
    def _settle(self) -> None:
        """Stores that are complete free their memory."""
        for tensor in [tensor for tensor in self._going if self._transfers[tensor].ends_s <= self._now_s]:
            del self._going[tensor], self._transfers[tensor]
            self._copies.add(tensor)
            self._go(tensor)

    def _go(self, tensor: int) -> None:
        self._residencies[tensor] = Residency.AWAY
        self._away_bytes += self._sizes[tensor]

    def _reserve(self, tensor: int, tier: Tier) -> bool:
        """Room for it in that tier, for which it gives up that in another."""
        had = self._slots.get(tensor)
        if had is tier:
            return True
        size = self._sizes[tensor]
        if size > self._free[tier]:
            return False
        if had is not None:
            self._free[had] += size
        self._free[tier] -= size
        self._slots[tensor] = tier
        self._copies.discard(tensor)
        return True

    def _send(self, tensor: int, tier: Tier, need: int) -> bool:
        """It leaves, for that tier or another with room: at once if the copy there is good. Whether it goes."""
        for each in (tier, *(other for other in self._hardware.tiers if other is not tier)):
            if tensor in self._copies and self._slots[tensor] is each:
                self._go(tensor)
                return True
            if self._reserve(tensor, each):
                self._residencies[tensor] = Residency.STORING
                self._going[tensor] = None
                self._copies.discard(tensor)
                self._ask(tensor, each, need, out=True, urgent=False)
                return True
        return False

    def _counted_bytes(self, stretch: int) -> int:
        """Of what is away, that whose absence helps nothing in a stretch."""
        return sum(
            self._sizes[tensor]
            for tensor in self._script.counted[stretch]
            if self._residencies[tensor] is Residency.AWAY
        )

    def _fit(self, stretch: int, operator: int, due: int) -> None:
        """Until there is memory for the stretch, or nothing can leave. Loads begin as soon as they have memory."""
        script, budget, since_s = self._script, self._hardware.budget_bytes, self._now_s
        for tensor in script.used[stretch]:
            if self._residencies[tensor] is Residency.STORING:
                self._keep(tensor)
        need = script.need_bytes[stretch]
        counted = set(script.counted[stretch])  # these stay
        while need - self._away_bytes + self._counted_bytes(stretch) > budget:
            self._bring(stretch, due, budget - script.begin_bytes[stretch])
            going = next((tensor for tensor in self._going if tensor not in counted), None)
            if going is None:
                going = self._evict(counted)
            if going is None:  # what comes too early can leave once it is here
                going = next((tensor for tensor in self._transfers if tensor not in counted), None)
            if going is None:
                break
            self._urge(going)
            self._wait_for(going)
            self._settle()
        if self._now_s > since_s:
            self._stalls.append(Stall(operator, -1, self._now_s - since_s))

    def _evict(self, counted: set[int]) -> int | None:
        """Send away, unplanned, what is needed last, of equals the first; None if nothing can go."""
        passed, found = [], None
        while self._candidates and found is None:
            entry = heapq.heappop(self._candidates)
            tensor = entry[1]
            if self._residencies[tensor] is Residency.HERE and -entry[0] == self._needs[tensor]:
                if tensor not in counted and self._send(tensor, self._hardware.tiers[0], NEVER):
                    found = tensor
                    self._unplanned += 1
                else:
                    passed.append(entry)
        for entry in passed:
            heapq.heappush(self._candidates, entry)
        return found

    def _is_here(self, tensor: int) -> None:
        self._residencies[tensor] = Residency.HERE
        heapq.heappush(self._candidates, (-self._needs[tensor], tensor))

    def _bring(self, stretch: int, due: int, room_bytes: int) -> None:
        """Begin to load what the stretch uses, as far as there is room beside what is not away."""
        for tensor in self._script.used[stretch]:
            residency = self._residencies[tensor]
            if residency is Residency.AWAY and self._sizes[tensor] - self._away_bytes <= room_bytes:
                self._load(tensor, due, urgent=True)
            elif residency is Residency.LOADING:
                self._urge(tensor)

    def _await(self, stretch: int, operator: int) -> None:
        """All that the stretch uses."""
        for tensor in self._script.used[stretch]:
            since_s = self._now_s
            self._wait_for(tensor)
            if self._now_s > since_s:
                self._stalls.append(Stall(operator, tensor, self._now_s - since_s))

    def _fetch(self, stretch: int, due: int) -> None:
        """Begin the loads that the plan asks for here, and those that had no memory earlier."""
        coming = self._coming.get(stretch)
        if not coming and not self._later:
            return
        wanted = [*self._later, *((move.tensor, due + move.need - move.load) for move in coming or ())]
        self._later = []
        for tensor, needed in wanted:
            if self._residencies[tensor] is Residency.AWAY:
                living = self._script.need_bytes[stretch] - self._away_bytes + self._counted_bytes(stretch)
                if living + self._sizes[tensor] > self._hardware.budget_bytes:
                    self._later.append((tensor, needed))
                else:
                    self._load(tensor, needed, urgent=False)

    # --- transfers ---------------------------------------------------------------------------------------------------
    def _load(self, tensor: int, need: int, *, urgent: bool) -> None:
        self._away_bytes -= self._sizes[tensor]
        self._residencies[tensor] = Residency.LOADING
        self._ask(tensor, self._slots[tensor], need, out=False, urgent=urgent)

    def _ask(self, tensor: int, tier: Tier, need: int, *, out: bool, urgent: bool) -> None:
        self._number += 1
        transfer = _Transfer(tensor, tier, self._sizes[tensor], need, self._number, out=out)
        transfer.urgent = urgent
        self._transfers[tensor] = transfer
        self._servers[tier, out].add(transfer)
        self._start()

    def _urge(self, tensor: int) -> None:
        transfer = self._transfers.get(tensor)
        if transfer is not None and not transfer.urgent:
            transfer.urgent = True
            if transfer.began_s == math.inf:
                self._servers[transfer.tier, transfer.out].add(transfer)

    def _keep(self, tensor: int) -> None:
        """A tensor that is being stored is wanted: it stays, and what was not written yet never is."""
        transfer = self._transfers.pop(tensor)
        del self._going[tensor]
        self._is_here(tensor)
        if transfer.ends_s <= self._now_s:
            self._copies.add(tensor)
            return
        transfer.dropped = True
        server = self._servers[transfer.tier, True]
        if server.busy is transfer:
            done = (self._now_s - transfer.began_s) / (transfer.ends_s - transfer.began_s)
            self._written += int(done * transfer.size_bytes)
            server.busy = None
            self._start()

    def _start(self) -> None:
        """Begin what can begin now."""
        for (tier, out), server in self._servers.items():
            if server.busy is None and (first := server.take()) is not None:
                takes_s = self._hardware.latency_s + first.size_bytes / self._speed(tier, out, server.bytes_s)
                first.began_s, first.ends_s = self._now_s, self._now_s + takes_s
                heapq.heappush(self._events, (first.ends_s, first.number, first))

    def _speed(self, tier: Tier, out: bool, bytes_s: float) -> float:
        disk = self._servers.get((Tier.DISK, out))
        if tier is Tier.HOST and disk is not None and disk.busy is not None and math.isfinite(bytes_s):
            return max(bytes_s - disk.bytes_s, bytes_s / 8)
        return bytes_s

    def _pass(self, until_s: float) -> None:
        """Let time go on to `until_s`, with what becomes complete meanwhile."""
        while self._events and self._events[0][0] <= until_s:
            self._next_event()
        self._now_s = max(self._now_s, until_s)

    def _wait_for(self, tensor: int) -> None:
        """Until the transfer of a tensor is complete, if there is one."""
        transfer = self._transfers.get(tensor)
        while transfer is not None and transfer.ends_s > self._now_s:
            self._next_event()

    def _next_event(self) -> None:
        """The next transfer becomes complete."""
        at_s, _, transfer = heapq.heappop(self._events)
        if transfer.dropped:
            return
        self._now_s = max(self._now_s, at_s)
        self._servers[transfer.tier, transfer.out].busy = None
        if transfer.out:
            self._written += transfer.size_bytes
        else:
            self._read += transfer.size_bytes
            del self._transfers[transfer.tensor]
            self._is_here(transfer.tensor)
        self._start()

    def _die(self, tensor: int) -> None:
        """The end of a tensor that is not persistent."""
        if self._residencies[tensor] is Residency.AWAY:
            self._away_bytes -= self._sizes[tensor]
        transfer = self._transfers.pop(tensor, None)
        if transfer is not None and transfer.ends_s > self._now_s:
            transfer.dropped = True
            server = self._servers[transfer.tier, transfer.out]
            if server.busy is transfer:
                server.busy = None
                self._start()
        self._going.pop(tensor, None)
        self._copies.discard(tensor)
        if (tier := self._slots.pop(tensor, None)) is not None:
            self._free[tier] += self._sizes[tensor]
        self._residencies[tensor] = Residency.ABSENT


class _Script:
    """What every replay of a trace reads, as lists."""

    def __init__(self, stretches: Stretches) -> None:
        trace = stretches.trace
        self.count = stretches.count
        self.operators: list[int] = stretches.points.tolist()
        self.ends = [*self.operators[1:], trace.operator_count]
        self.times_s: list[float] = stretches.times_s.tolist()
        self.need_bytes: list[int] = stretches.need_bytes.tolist()
        self.begin_bytes: list[int] = stretches.begin_bytes.tolist()
        self.used, self.counted = stretches.used, stretches.counted
        self.sizes: list[int] = trace.sizes_bytes.tolist()
        self.persistent: list[bool] = trace.persistent.tolist()
        self.movable: list[int] = np.flatnonzero(stretches.movable).tolist()
        passing = np.flatnonzero(~trace.persistent & stretches.movable)
        self.born = by_stretch(stretches, passing.tolist(), trace.births[passing].tolist())
        self.dying = by_stretch(stretches, passing.tolist(), trace.deaths[passing].tolist())
        writers = trace.users()[trace.use_writes].tolist()
        self.written = by_stretch(stretches, writers, trace.use_operators[trace.use_writes].tolist())

    @classmethod
    def of(cls, stretches: Stretches) -> _Script:
        """Made once for a trace."""
        found = stretches.script
        if not isinstance(found, cls):
            found = stretches.script = cls(stretches)
        return found


def replay(trace: Trace, plan: Plan) -> Replayed:
    """The step under `plan`, once it repeats. `Invalid` if the plan is of another trace."""
    if any(move.tensor >= trace.tensor_count or move.leave >= 2 * trace.operator_count for move in plan.moves):
        raise Invalid("the plan names tensors or operators that the trace does not have: plan this trace anew")
    machine = Machine(trace, plan)
    laps: list[Lap] = []
    begun: dict[Hashable, int] = {}
    state = machine.state()
    while len(laps) < LAPS_MAX and state not in begun:
        begun[state] = len(laps)
        laps.append(machine.run_lap(len(laps)))
        state = machine.state()
    cycle = laps[begun.get(state, len(laps) // 2) :]  # without one: what came after half of them
    return _mean(stretches_of(trace, plan.size_bytes_min), cycle, len(laps))


def _mean(stretches: Stretches, cycle: list[Lap], laps: int) -> Replayed:
    trace, count = stretches.trace, len(cycle)
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for lap in cycle:
        for stall in lap.stalls:
            seconds[stall.operator, stall.tensor] += stall.seconds / count
    return Replayed(
        step_s=sum(lap.step_s for lap in cycle) / count,
        compute_s=trace.compute_s,
        stalls=tuple(Stall(*key, value) for key, value in sorted(seconds.items())),
        peak_bytes=max(lap.peak_bytes for lap in cycle),
        memory_bytes=trace.need_bytes() - np.repeat(np.array(cycle[-1].away_bytes, np.int64), stretches.lengths),
        written_bytes=sum(lap.written_bytes for lap in cycle) // count,
        read_bytes=sum(lap.read_bytes for lap in cycle) // count,
        unplanned=math.ceil(sum(lap.unplanned for lap in cycle) / count),
        laps=laps,
        missing_s=sum(value for (_, tensor), value in seconds.items() if tensor >= 0),
        memory_s=sum(value for (_, tensor), value in seconds.items() if tensor < 0),
    )
