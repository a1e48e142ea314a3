"""The best of several plans: each is replayed, and the quickest step wins.

Theory. No rank is best on all traces, and a replay costs less than a wrong guess. So each rank plans, as it is and with
its loads hoisted, and each plan is replayed. The quickest predicted step wins; of steps that differ by less than
TIE_SHARE, the one that moves fewer bytes, then fewer moves. All of them are kept for people to see.

`whole_layer` stands for what offloaders without lifetimes do (ZeRO-Infinity and its like): all that persists leaves
after every use and comes back one point ahead, whether memory is short then or not. It is there to be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from forebay.torch.offload.hardware import Hardware, Tier
from forebay.torch.offload.periods import inactive, last_point
from forebay.torch.offload.plan import RANKS, SIZE_BYTES_MIN, Move, Plan, Rank, check_feasible, hoisted, plan
from forebay.torch.offload.replay import Replayed, replay
from forebay.torch.offload.trace import Trace

TIE_SHARE = 0.002
PORTFOLIO: tuple[Rank, ...] = ("ratio", "area", "area_then_ratio")
HOISTED = ", hoisted"


@dataclass(frozen=True)
class Choice:
    """A plan and what its replay came to."""

    plan: Plan
    replayed: Replayed

    @property
    def moved_bytes(self) -> int:
        return self.replayed.written_bytes + self.replayed.read_bytes


def choose(trace: Trace, hardware: Hardware, ranks: tuple[Rank, ...] = PORTFOLIO) -> tuple[Choice, list[Choice]]:
    """The best plan, and all that were tried. `Invalid` if none can make the step fit."""
    check_feasible(trace, hardware)
    choices = []
    for plan_ in _plans(trace, hardware, ranks):
        choices.append(Choice(plan_, replay(trace, plan_)))
    return best(choices), choices


def _plans(trace: Trace, hardware: Hardware, ranks: tuple[Rank, ...]) -> list[Plan]:
    if int(trace.need_bytes().max()) <= hardware.target_bytes:
        return [Plan("nothing moves", (), trace.need_bytes(), hardware)]
    made = []
    for rank in ranks:
        found = plan(trace, hardware, rank)
        early = hoisted(trace, found)
        made.append(found)
        if early.moves != found.moves:
            made.append(replace(early, rank=rank + HOISTED))
    return made


def best(choices: list[Choice]) -> Choice:
    """The quickest; of those as quick, the one that moves least."""
    quickest = min(choice.replayed.step_s for choice in choices)
    tied = [choice for choice in choices if choice.replayed.step_s <= quickest * (1 + TIE_SHARE)]
    return min(tied, key=lambda choice: (choice.moved_bytes, len(choice.plan.moves)))


def whole_layer(trace: Trace, hardware: Hardware, size_bytes_min: int = SIZE_BYTES_MIN) -> Plan:
    """All that persists leaves after each use and comes back one point before the next, to the first tier with room."""
    check_feasible(trace, hardware)
    periods = inactive(trace, size_bytes_min)
    left = trace.need_bytes()
    room = {tier: hardware.room_bytes(tier) for tier in hardware.tiers}
    homes: dict[int, Tier] = {}
    moves = []
    early = last_point(trace, periods.needs - 1)
    rows = zip(
        periods.tensors.tolist(),
        periods.last_uses.tolist(),
        periods.leaves.tolist(),
        early.tolist(),
        periods.needs.tolist(),
        periods.written.tolist(),
        strict=True,
    )
    for tensor, last_use, leave, load, need, written in rows:
        size = int(trace.sizes_bytes[tensor])
        if not trace.persistent[tensor] or load <= leave:
            continue
        if tensor not in homes:
            tier = next((tier for tier in room if room[tier] >= size), None)
            if tier is None:
                continue
            room[tier] -= size
            homes[tensor] = tier
        moves.append(Move(tensor, homes[tensor], last_use, leave, leave, load, need, written))
        left[np.arange(leave, load) % trace.operator_count] -= size
    return Plan("whole_layer", tuple(sorted(moves, key=lambda move: (move.leave, move.tensor))), left, hardware)


def compare(trace: Trace, hardware: Hardware) -> list[Choice]:
    """Every rank and `whole_layer`, replayed, for a table."""
    plans = [*_plans(trace, hardware, RANKS), whole_layer(trace, hardware)]
    return [Choice(plan_, replay(trace, plan_)) for plan_ in plans]
