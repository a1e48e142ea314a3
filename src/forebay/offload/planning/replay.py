"""Simulates a training step under a plan: how long it takes, and what it waits for.

Theory. Operators run in order, each as long as the trace says. An operator starts when its tensors are here and there
is memory for its outputs and its workspace. A point requests the moves bound to it. Each tier has one server in each
direction, which takes first the moves that an operator waits for, then those needed soonest. A store frees its memory
when it is complete. A load takes memory when it starts, and waits until there is some. A tensor that is needed during
its store is kept.

If an operator waits for memory and nothing under way would free any, the tensor that is needed last leaves, unplanned.
So a step always ends if each operator's own tensors fit.

The two tiers share the link. A host move that begins while the disk's server is busy gets the rest of the link.

A step is replayed until its state is one that it had before, at most LAPS_MAX times: tensors that are away over the end
of a step make the first one easier or harder. The laps from then to now are the *cycle*, and would go on for ever;
the numbers are its means. Of steps that are quick and slow by turns, neither is what training takes. If a plan leaves a
tensor away over the end, it is away at the start.

Invariants. (1) Memory exceeds the budget only where an operator's own tensors do. (2) No operator runs without its
tensors. (3) Compute, stalls for tensors and stalls for memory add up to the step.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from forebay.core.errors import Invalid
from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.plan import Move, Plan
from forebay.offload.planning.trace import Ints, Trace

LAPS_MAX = 12
SAME_S = 1e-9  # moves under way whose ends differ by less are in the same state
_NEVER = 1 << 62


class Residency(IntEnum):
    """Where a tensor is."""

    ABSENT = 0  # not alive
    HERE = 1
    STORING = 2  # here until the store is complete
    AWAY = 3
    LOADING = 4


class Stall(NamedTuple):
    """The time that an operator waited: for a tensor, or (tensor -1) for memory."""

    operator: int
    tensor: int
    seconds: float


@dataclass(frozen=True)
class Replayed:
    """What one step comes to, on the mean of the cycle that steps end in. `peak_bytes` is the most memory at any time,
    `memory_bytes` that of each operator as it ran in the last lap."""

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

    __slots__ = ("need", "number", "out", "over", "size_bytes", "tensor", "tier", "urgent")

    def __init__(self, tensor: int, tier: Tier, size_bytes: int, need: int, number: int, *, out: bool) -> None:
        self.tensor, self.tier, self.size_bytes, self.out = tensor, tier, size_bytes, out
        self.need, self.number = need, number
        self.urgent = False
        self.over = False  # waiting: it was begun or called off

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

    def first(self) -> _Transfer | None:
        """Who is next."""
        while self._waiting:
            order, transfer = self._waiting[0]
            if not transfer.over and order == transfer.order():
                return transfer
            heapq.heappop(self._waiting)
        return None

    def take(self) -> None:
        """Begin with the first."""
        _, self.busy = heapq.heappop(self._waiting)
        self.busy.over = True


class Lap(NamedTuple):
    step_s: float
    stalls: list[Stall]
    peak_bytes: int
    written_bytes: int
    read_bytes: int
    unplanned: int


class Machine:
    """The state of a replay. Moves in time by `run_lap`."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace, self.hardware = trace, plan.hardware
        self.now_s = 0.0
        self.count = trace.operator_count
        self._sizes = trace.sizes_bytes.tolist()
        self._used_by, self._born_at, self._dying_at = _by_operator(trace)
        self._uses = [trace.uses(tensor).tolist() for tensor in range(trace.tensor_count)]
        self.residencies = [Residency.HERE if stays else Residency.ABSENT for stays in trace.persistent.tolist()]
        self.memory = int(trace.sizes_bytes[trace.persistent].sum())
        self.servers = {
            (tier, out): _Server(self.hardware.out_bytes_s(tier) if out else self.hardware.in_bytes_s(tier))
            for tier in self.hardware.tiers
            for out in (True, False)
        }
        self.transfers: dict[int, _Transfer] = {}  # by tensor, those not over
        self.copies: dict[int, Tier] = {}  # tensors of which a tier has a good copy
        self._events: list[tuple[float, int, _Transfer]] = []
        self._number = 0
        self._leaving: dict[int, list[Move]] = defaultdict(list)
        self._loading: dict[int, list[Move]] = defaultdict(list)
        for move in plan.moves:
            self._leaving[move.leave % self.count].append(move)
            self._loading[move.load % self.count].append(move)
            if move.leave < self.count <= move.load:  # away over the end of the step: so it is at the start
                self._away_at_start(move)
        self._persistent = trace.persistent.tolist()
        self._needs = [uses[0] for uses in self._uses]  # when each is used next
        self._resident: list[tuple[int, int]] = []  # what may be sent away: (-needed, tensor), with some out of date
        for tensor, residency in enumerate(self.residencies):
            if residency is Residency.HERE:
                self._is_here(tensor)
        self._clear()

    def _away_at_start(self, move: Move) -> None:
        self.residencies[move.tensor] = Residency.AWAY
        self.copies[move.tensor] = move.tier
        self.memory -= self._sizes[move.tensor]

    def _clear(self) -> None:
        self.stalls: list[Stall] = []
        self.peak = self.memory
        self.curve = [0] * self.count
        self.written = self.read = self.unplanned = 0

    # --- a lap -------------------------------------------------------------------------------------------------------
    def run_lap(self, lap: int) -> Lap:
        """Run the step once."""
        self._clear()
        began_s = self.now_s
        times, workspaces = self.trace.times_s.tolist(), self.trace.workspace_bytes.tolist()
        writes = self._writes_by_operator()
        for operator in range(self.count):
            at = lap * self.count + operator
            for move in self._leaving.get(operator, ()):
                self._leave(move, at)
            for move in self._loading.get(operator, ()):
                self._ask_load(move.tensor, at + move.need - move.load, urgent=False)
            self._start()
            self._await_tensors(operator, at)
            self._await_memory(operator, at, workspaces[operator])
            for tensor in self._born_at.get(operator, ()):
                self._needs[tensor] = at
                self._is_here(tensor)
                self.memory += self._sizes[tensor]
            self.memory += workspaces[operator]
            self.peak = max(self.peak, self.memory)
            self.curve[operator] = self.memory
            self._was_used(operator, at)
            self._pass(self.now_s + times[operator])
            self.memory -= workspaces[operator]
            for tensor in writes.get(operator, ()):
                self.copies.pop(tensor, None)
            for tensor in self._dying_at.get(operator, ()):
                self._die(tensor)
        taken_s = self.now_s - began_s
        return Lap(taken_s, self.stalls, self.peak, self.written, self.read, self.unplanned)

    def state(self) -> Hashable:
        """Where all is: what laps that begin alike have in common."""
        ends = {id(transfer): round((at_s - self.now_s) / SAME_S) for at_s, _, transfer in self._events}
        under_way = tuple(
            (tensor, transfer.out, transfer.urgent, transfer.number - self._number, ends.get(id(transfer)))
            for tensor, transfer in self.transfers.items()
        )
        forgotten = sorted(ends.values())  # transfers of what was kept or died
        return bytes(self.residencies), tuple(sorted(self.copies.items())), under_way, tuple(forgotten)

    def _writes_by_operator(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        trace = self.trace
        users = trace.users()
        for tensor, operator in zip(users[trace.use_writes].tolist(), trace.use_operators[trace.use_writes].tolist()):
            found[operator].append(tensor)
        return found

    def _await_tensors(self, operator: int, at: int) -> None:
        """Until every tensor that the operator uses is here."""
        born = self._born_at.get(operator, ())
        missing = []
        for tensor in self._used_by[operator]:
            residency = self.residencies[tensor]
            if residency is Residency.STORING:
                self._keep(tensor)
            elif residency in (Residency.AWAY, Residency.LOADING):
                missing.append(tensor)
            assert residency is not Residency.ABSENT or tensor in born, "a tensor is used before it is born"
        for tensor in missing:
            self._ask_load(tensor, at, urgent=True)
        for tensor in missing:
            since_s = self.now_s
            while self.residencies[tensor] is not Residency.HERE:
                self._start()
                if not self._next_event():
                    self._make_room(operator, at)
            if self.now_s > since_s:
                self.stalls.append(Stall(operator, tensor, self.now_s - since_s))

    def _await_memory(self, operator: int, at: int, workspace: int) -> None:
        """Until what the operator brings forth fits."""
        wanted = workspace + sum(self._sizes[tensor] for tensor in self._born_at.get(operator, ()))
        since_s = self.now_s
        while self.memory + wanted > self.hardware.budget_bytes:
            if not self._any_out() and not self._make_room(operator, at):
                break  # the operator's own: nothing can leave
            if not self._next_event():
                self._make_room(operator, at)
        if self.now_s > since_s:
            self.stalls.append(Stall(operator, -1, self.now_s - since_s))

    # --- moves -------------------------------------------------------------------------------------------------------
    def _leave(self, move: Move, at: int) -> None:
        """A planned departure."""
        if self.residencies[move.tensor] is Residency.HERE:
            self._send(move.tensor, move.tier, at + move.need - move.leave)

    def _send(self, tensor: int, tier: Tier, need: int) -> None:
        """A tensor leaves: at once if its copy in the tier is good, else when it is stored."""
        if self.copies.get(tensor) == tier:
            self.residencies[tensor] = Residency.AWAY
            self.memory -= self._sizes[tensor]
            return
        self.residencies[tensor] = Residency.STORING
        self._enqueue(_Transfer(tensor, tier, self._sizes[tensor], need, self._next_number(), out=True))

    def _keep(self, tensor: int) -> None:
        """A tensor that is being stored is wanted again: it stays, and its store is forgotten or useless."""
        self.transfers.pop(tensor).over = True
        self._is_here(tensor)

    def _ask_load(self, tensor: int, need: int, *, urgent: bool) -> None:
        residency = self.residencies[tensor]
        if residency is Residency.STORING:
            self._keep(tensor)
        elif residency is Residency.AWAY:
            transfer = _Transfer(tensor, self.copies[tensor], self._sizes[tensor], need, self._next_number(), out=False)
            transfer.urgent = urgent
            self.residencies[tensor] = Residency.LOADING
            self._enqueue(transfer)
        elif residency is Residency.LOADING and urgent and not self.transfers[tensor].urgent:
            transfer = self.transfers[tensor]
            transfer.urgent = True
            if not transfer.over:
                self.servers[transfer.tier, False].add(transfer)

    def _enqueue(self, transfer: _Transfer) -> None:
        self.transfers[transfer.tensor] = transfer
        self.servers[transfer.tier, transfer.out].add(transfer)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _start(self) -> None:
        """Begin what can begin now."""
        for (tier, out), server in self.servers.items():
            first = None if server.busy is not None else server.first()
            if first is None:
                continue
            if not out:
                if self.memory + first.size_bytes > self.hardware.budget_bytes and self.memory:
                    continue  # no memory for it yet
                self.memory += first.size_bytes
                self.peak = max(self.peak, self.memory)
            server.take()
            takes_s = self.hardware.latency_s + first.size_bytes / self._speed(tier, out, server.bytes_s)
            heapq.heappush(self._events, (self.now_s + takes_s, first.number, first))

    def _speed(self, tier: Tier, out: bool, bytes_s: float) -> float:
        disk = self.servers.get((Tier.DISK, out))
        if tier is Tier.HOST and disk is not None and disk.busy is not None and math.isfinite(bytes_s):
            return max(bytes_s - disk.bytes_s, bytes_s / 8)
        return bytes_s

    def _pass(self, until_s: float) -> None:
        """Let time go on to `until_s`, with what becomes complete meanwhile."""
        while self._events and self._events[0][0] <= until_s:
            self._next_event()
            self._start()
        self.now_s = max(self.now_s, until_s)

    def _next_event(self) -> bool:
        """The next transfer becomes complete; False if none is under way."""
        if not self._events:
            return False
        at_s, _, transfer = heapq.heappop(self._events)
        self.now_s = max(self.now_s, at_s)
        self.servers[transfer.tier, transfer.out].busy = None
        tensor = transfer.tensor
        if transfer.out:
            self.written += transfer.size_bytes
            if self.transfers.get(tensor) is transfer:  # else it was kept, or died
                self.copies[tensor] = transfer.tier
                self.residencies[tensor] = Residency.AWAY
                self.memory -= transfer.size_bytes
                del self.transfers[tensor]
        else:
            self.read += transfer.size_bytes
            if self.transfers.get(tensor) is transfer:
                self._is_here(tensor)
                del self.transfers[tensor]
            else:
                self.memory -= transfer.size_bytes
        self._start()
        return True

    def _any_out(self) -> bool:
        return any(server.busy or server.first() for (_, out), server in self.servers.items() if out)

    def _make_room(self, operator: int, at: int) -> bool:
        """Send away, unplanned, the tensor that is needed last; False if there is none."""
        used = set(self._used_by[operator])
        passed, best = [], None
        while self._resident and best is None:
            entry = heapq.heappop(self._resident)
            need, tensor = -entry[0], entry[1]
            if self.residencies[tensor] is Residency.HERE and need == self._needs[tensor]:
                if tensor in used:
                    passed.append(entry)
                else:
                    best = tensor
        for entry in passed:
            heapq.heappush(self._resident, entry)
        if best is None:
            return False
        self.unplanned += 1
        self._send(best, self.hardware.tiers[0], self._needs[best])
        self._start()
        return True

    def _is_here(self, tensor: int) -> None:
        """A tensor can be used, and can be sent away."""
        self.residencies[tensor] = Residency.HERE
        heapq.heappush(self._resident, (-self._needs[tensor], tensor))

    def _was_used(self, operator: int, at: int) -> None:
        """When the tensors of an operator that ran are needed next."""
        for tensor in self._used_by[operator]:
            self._needs[tensor] = self._next_use(tensor, operator, at)
            if self.residencies[tensor] is Residency.HERE:
                heapq.heappush(self._resident, (-self._needs[tensor], tensor))

    def _next_use(self, tensor: int, operator: int, at: int) -> int:
        uses = self._uses[tensor]
        following = bisect_right(uses, operator)
        if following < len(uses):
            return at - operator + int(uses[following])
        return at - operator + self.count + int(uses[0]) if self._persistent[tensor] else _NEVER

    def _die(self, tensor: int) -> None:
        """The end of a tensor that is not persistent."""
        if self.residencies[tensor] in (Residency.HERE, Residency.STORING):
            self.memory -= self._sizes[tensor]
        transfer = self.transfers.pop(tensor, None)
        if transfer is not None:
            transfer.over = True
        self.copies.pop(tensor, None)
        self.residencies[tensor] = Residency.ABSENT


def _by_operator(trace: Trace) -> tuple[list[list[int]], dict[int, list[int]], dict[int, list[int]]]:
    """The tensors that each operator uses; those that are born and that die there, but for persistent ones."""
    used: list[list[int]] = [[] for _ in range(trace.operator_count)]
    for tensor, operator in zip(trace.users().tolist(), trace.use_operators.tolist(), strict=True):
        used[operator].append(tensor)
    born: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        born[int(trace.births[tensor])].append(tensor)
        dying[int(trace.deaths[tensor])].append(tensor)
    return used, born, dying


def replay(trace: Trace, plan: Plan) -> Replayed:
    """The step under `plan`, once it repeats. `Invalid` if the plan is of another trace."""
    if any(move.tensor >= trace.tensor_count or move.leave >= 2 * trace.operator_count for move in plan.moves):
        raise Invalid("the plan names tensors or operators that the trace does not have: plan this trace anew")
    machine = Machine(trace, plan)
    laps: list[Lap] = []
    begun: dict[Hashable, int] = {}
    while len(laps) < LAPS_MAX and (state := machine.state()) not in begun:
        begun[state] = len(laps)
        laps.append(machine.run_lap(len(laps)))
    cycle = laps[begun.get(machine.state(), len(laps) // 2) :]  # without one: what came after half of them
    count = len(cycle)
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for lap in cycle:
        for stall in lap.stalls:
            seconds[stall.operator, stall.tensor] += stall.seconds / count
    return Replayed(
        step_s=sum(lap.step_s for lap in cycle) / count,
        compute_s=trace.compute_s,
        stalls=tuple(Stall(*key, value) for key, value in seconds.items()),
        peak_bytes=max(lap.peak_bytes for lap in cycle),
        memory_bytes=np.array(machine.curve, np.int64),
        written_bytes=sum(lap.written_bytes for lap in cycle) // count,
        read_bytes=sum(lap.read_bytes for lap in cycle) // count,
        unplanned=math.ceil(sum(lap.unplanned for lap in cycle) / count),
        laps=len(laps),
        missing_s=sum(value for (_, tensor), value in seconds.items() if tensor >= 0),
        memory_s=sum(value for (_, tensor), value in seconds.items() if tensor < 0),
    )
