"""Chooses the best of several plans: each is replayed, and the quickest step wins.

Theory. No rank is best on all traces, and a replay costs less than a wrong guess. So each rank makes a plan, once as it
is and once with its loads hoisted, and each plan is replayed. The quickest predicted step wins. Between steps that
differ by less than TIE_SHARE, the plan that moves fewer bytes wins, then the one with fewer moves. All plans are kept
for people to see.

Overbooking. Disks are often too slow for the budget; with one disk that is the normal case. Greedy then stops with
memory above the budget, since no remaining period finds free slots. The step must wait there anyway, and unplanned
moves start late in both directions. So plans are also made as if the disks were OVERBOOKED times as fast, and replayed
with the real disks: their moves are late too, but begin as early as they can. On a network of 24 layers at 40 to 80 %
of its need and 2 to 32 GB/s this took 4 to 40 % off the step. Neither TERAIO nor G10 has it, and at 2 GB/s their greedy
without it is slower than moving everything each time.

`whole_layer` stands for offloaders without lifetimes (ZeRO-Infinity and its like): everything persistent leaves after
every use and comes back one point ahead, whether or not memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from forebay.core.errors import Invalid
from forebay.offload.planning.hardware import RESERVE_SHARE, Hardware, Tier
from forebay.offload.planning.periods import inactive, last_point
from forebay.offload.planning.plan import (
    RANKS,
    SIZE_BYTES_MIN,
    Move,
    Plan,
    Rank,
    check_feasible,
    hoisted,
    left_bytes,
    plan,
)
from forebay.offload.planning.replay import Replayed, replay
from forebay.offload.planning.trace import Trace

TIE_SHARE = 0.002
LOWERED = 4  # the least size that moves is divided by this, where nothing of that size can
PORTFOLIO: tuple[Rank, ...] = ("ratio", "area", "area_then_ratio")
OVERBOOKING: tuple[Rank, ...] = ("ratio", "area")
OVERBOOKED = (4.0, 32.0)
HOISTED = ", hoisted"


@dataclass(frozen=True)
class Choice:
    """A plan and what its replay came to."""

    plan: Plan
    replayed: Replayed

    @property
    def moved_bytes(self) -> int:
        return self.replayed.written_bytes + self.replayed.read_bytes


def choose(
    trace: Trace,
    hardware: Hardware,
    ranks: tuple[Rank, ...] = PORTFOLIO,
    *,
    size_bytes_min: int = SIZE_BYTES_MIN,
) -> tuple[Choice, list[Choice]]:
    """The best plan, and all that were tried. Nothing below `size_bytes_min` moves, unless nothing would move and
    the step does not fit so: then that is lowered. `Invalid`, with the bytes that would do, if none can make it fit."""
    check_feasible(trace, hardware)
    while True:
        choices = [Choice(plan_, replay(trace, plan_)) for plan_ in _plans(trace, hardware, ranks, size_bytes_min)]
        chosen = best([choice for choice in choices if choice.plan.moves] or choices)
        if chosen.plan.moves or int(trace.need_bytes().max()) <= hardware.budget_bytes:
            return chosen, choices
        if size_bytes_min <= 1:
            would_do = math.ceil(int(trace.need_bytes().max()) / (1 - RESERVE_SHARE)) + 1
            raise Invalid(
                f"no tensor of this step can leave for long enough, so it does not fit into {hardware.budget_bytes:,} "
                f"bytes: give at least {would_do:,}, faster tiers, or a smaller batch"
            )
        size_bytes_min //= LOWERED


def compare(trace: Trace, hardware: Hardware) -> tuple[Choice, list[Choice]]:
    """As `choose`, with the ranks among the choices that are there to be compared with only."""
    chosen, choices = choose(trace, hardware)
    if chosen.plan.moves:
        for rank in RANKS:
            if rank not in PORTFOLIO:
                found = plan(trace, hardware, rank)
                choices.append(Choice(found, replay(trace, found)))
    return chosen, choices


def _plans(trace: Trace, hardware: Hardware, ranks: tuple[Rank, ...], size_bytes_min: int) -> Iterator[Plan]:
    if int(trace.need_bytes().max()) <= hardware.target_bytes:
        yield Plan("nothing moves", (), trace.need_bytes(), hardware)
        return
    for rank in ranks:
        found = plan(trace, hardware, rank, size_bytes_min)
        yield from _with_hoisted(trace, found)
        for times in OVERBOOKED if found.excess_bytes and rank in OVERBOOKING else ():
            faster = plan(trace, hardware.faster(times), rank, size_bytes_min)
            named = replace(faster, hardware=hardware, rank=f"{rank}, overbooked {times:g}×")
            yield from _with_hoisted(trace, named)
    yield whole_layer(trace, hardware, size_bytes_min)


def _with_hoisted(trace: Trace, found: Plan) -> Iterator[Plan]:
    yield found
    if found.excess_bytes:
        return  # there is no spare memory to hoist into
    early = hoisted(trace, found)
    if early.moves != found.moves:
        yield replace(early, rank=found.rank + HOISTED)


def best(choices: list[Choice]) -> Choice:
    """The quickest; of those as quick, the one that moves least."""
    quickest = min(choice.replayed.step_s for choice in choices)
    tied = [choice for choice in choices if choice.replayed.step_s <= quickest * (1 + TIE_SHARE)]
    return min(tied, key=lambda choice: (choice.moved_bytes, len(choice.plan.moves)))


def whole_layer(trace: Trace, hardware: Hardware, size_bytes_min: int = SIZE_BYTES_MIN) -> Plan:
    """All that persists leaves after each use and comes back one point before the next, to the first tier with room."""
    check_feasible(trace, hardware)
    periods = inactive(trace, size_bytes_min)
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
    moves.sort(key=lambda move: (move.leave, move.tensor))
    return Plan("whole_layer", tuple(moves), left_bytes(trace, moves), hardware)
