"""Improves a plan by small changes, each replayed: the last few per cent that greedy leaves.

Theory. Greedy books moves one after the other and never takes one back, and it knows nothing of what the step waits for
in the end. So the chosen plan is changed a little (a move added, dropped, begun earlier or later, or sent to the other
tier), replayed, and kept if the step is no longer than that of LATE changes ago (late acceptance, which needs no
temperature). Half of the changes come from the waits of the replay: what is waited for is fetched earlier or stays, and
where memory is waited for, something leaves or comes later.

The number of replays is fixed by the size of the step, not by a clock, so the same trace gives the same plan on every
machine. Small steps get EVALUATIONS; steps so large that WORK does not suffice for two get none.

Invariant. What comes out is never slower in its replay than what went in, and stays within the budget.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.periods import inactive
from forebay.offload.planning.plan import Move, Plan, left_bytes
from forebay.offload.planning.replay import Replayed, Stall, replay
from forebay.offload.planning.stretches import stretches_of
from forebay.offload.planning.trace import Trace

EVALUATIONS = 800
WORK = 1_500_000  # stretches, moves and uses replayed in all: some ten seconds of one core
LATE = 20
ENOUGH_SHARE = 0.001  # of the step without waiting: who is that close is done

Moved = tuple[Tier, int, int]  # where to; the stretches at which it leaves and at which its load begins
State = dict[int, Moved]  # by period


class _Search:
    """The changes that can be made to a plan."""

    def __init__(self, trace: Trace, start: Plan) -> None:
        self._trace, self._start = trace, start
        self._stretches = stretches = stretches_of(trace, start.size_bytes_min)
        periods = inactive(trace, start.size_bytes_min)
        self._tensors: list[int] = periods.tensors.tolist()
        self._lasts: list[int] = periods.last_uses.tolist()
        self._need_operators: list[int] = periods.needs.tolist()
        self._written: list[bool] = periods.written.tolist()
        self._leaves: list[int] = stretches.of(periods.leaves).tolist()
        self._needs: list[int] = stretches.of(periods.needs).tolist()
        self._rows = [row for row in range(len(periods)) if self._leaves[row] < self._needs[row]]
        self._covering: list[list[int]] = [[] for _ in range(stretches.count)]
        for row in self._rows:
            for stretch in range(self._leaves[row], self._needs[row]):
                self._covering[stretch % stretches.count].append(row)
        self._ending = {(self._tensors[row], self._needs[row] % stretches.count): row for row in self._rows}
        self._chance = random.Random(1)

    def begin(self) -> State:
        """The plan that it starts with."""
        rows = {(self._tensors[row], self._lasts[row]): row for row in self._rows}
        state: State = {}
        for move in self._start.moves:
            row = rows.get((move.tensor, move.last_use))
            if row is not None:
                leave, load = self._stretches.of(np.array([move.leave, move.load])).tolist()
                state[row] = move.tier, leave, max(leave, min(load, self._needs[row]))
        return state

    def plan(self, state: State) -> Plan:
        operator = self._stretches.operator
        moves = []
        for row, (tier, leave, load) in state.items():
            tensor, last, need = self._tensors[row], self._lasts[row], self._need_operators[row]
            gone = min(load, leave + self._written[row])
            moves.append(
                Move(tensor, tier, last, operator(leave), operator(gone), operator(load), need, self._written[row])
            )
        moves.sort(key=lambda move: (move.leave, move.tensor))
        return replace(self._start, moves=tuple(moves), rank=f"{self._start.rank}{IMPROVED}")

    def change(self, state: State, ran: Replayed) -> State:
        """The state with one change; the same if there was none to make."""
        chance, new = self._chance, dict(state)
        if ran.stalls and chance.random() < 0.5:
            stall = chance.choices(ran.stalls, [stall.seconds for stall in ran.stalls])[0]
            if stall.tensor >= 0:
                self._sooner(new, stall)
            else:
                self._lower(new, stall)
        elif self._rows:
            self._any(new, chance.choice(self._rows))
        return new

    def _sooner(self, state: State, stall: Stall) -> None:
        """What is waited for is fetched earlier, or stays."""
        stretch = int(self._stretches.of(np.array([stall.operator]))[0])
        row = self._ending.get((stall.tensor, stretch))
        if row is None:
            return
        earlier = self._chance.choice((0, 1, 2, 4))
        if row not in state:
            leave, need = self._leaves[row], self._needs[row]
            state[row] = self._tier(), leave, max(min(leave + 1, need), need - earlier)
            return
        tier, leave, load = state[row]
        if load > leave + 1 and self._chance.random() >= 0.35:
            state[row] = tier, leave, max(leave + 1, load - max(1, earlier))
        else:
            del state[row]

    def _lower(self, state: State, stall: Stall) -> None:
        """Where memory is waited for, something leaves or comes later."""
        stretch = int(self._stretches.of(np.array([stall.operator]))[0])
        if not self._covering[stretch]:
            return
        row = self._chance.choice(self._covering[stretch])
        at = stretch if stretch >= self._leaves[row] else stretch + self._stretches.count
        if row not in state:
            need = self._needs[row]
            state[row] = self._tier(), self._leaves[row], self._chance.randint(min(at + 1, need), need)
        elif state[row][2] <= at:
            state[row] = state[row][0], state[row][1], at + 1
        else:
            del state[row]

    def _any(self, state: State, row: int) -> None:
        chance, first, need = self._chance, self._leaves[row], self._needs[row]
        if row not in state:
            state[row] = self._tier(), first, chance.randint(first, need)
            return
        tier, leave, load = state[row]
        what = chance.random()
        if what < 0.35:
            del state[row]
        elif what < 0.8:
            state[row] = tier, leave, min(need, max(leave, load + chance.choice((-4, -2, -1, 1, 2, 4))))
        elif what < 0.9:
            state[row] = tier, chance.randint(first, load), load
        else:
            state[row] = self._tier(), first, need

    def _tier(self) -> Tier:
        return self._chance.choice(self._start.hardware.tiers)


IMPROVED = ", improved"


def improved(trace: Trace, start: Plan, ran: Replayed, evaluations_max: int) -> tuple[Plan, Replayed]:
    """A plan whose replay is no slower than that of `start`, which is `ran`; `start` itself if none was found."""
    stretches = stretches_of(trace, start.size_bytes_min)
    size = stretches.count + len(start.moves) + len(trace.use_operators)
    evaluations = min(evaluations_max, WORK // (2 * size))
    budget, enough_s = start.hardware.budget_bytes, ran.compute_s * (1 + ENOUGH_SHARE)
    if evaluations < 2 or ran.step_s <= enough_s or ran.peak_bytes > budget:
        return start, ran
    search = _Search(trace, start)
    best = start, ran
    state, cost = search.begin(), ran.step_s
    earlier = [cost] * LATE
    for number in range(evaluations):
        changed = search.change(state, ran)
        if changed == state:
            continue
        plan = search.plan(changed)
        found = replay(trace, plan)
        if found.peak_bytes <= budget and found.step_s <= max(cost, earlier[number % LATE]):
            state, ran, cost = changed, found, found.step_s
            if cost < best[1].step_s:
                best = plan, found
                if cost <= enough_s:
                    break
        earlier[number % LATE] = cost
    if best[0] is not start:
        best = replace(best[0], left_bytes=left_bytes(stretches, best[0].moves)), best[1]
    return best
