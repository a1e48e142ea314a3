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

`whole_layer` knows no lifetimes: everything persistent leaves after every use and comes back one point ahead, whether
or not memory is short. It is no measure of ZeRO-Infinity, which fetches as many layers ahead as its bucket holds and
keeps what is used again soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from forebay.core.errors import Invalid
from forebay.offload.planning import improve
from forebay.offload.planning.hardware import Hardware, Tier
from forebay.offload.planning.periods import inactive, last_point
from forebay.offload.planning.plan import (
    RANKS,
    SIZE_BYTES_MIN,
    Move,
    Plan,
    Rank,
    hoisted,
    left_bytes,
    movable_from,
    plan,
)
from forebay.offload.planning.replay import Replayed, replay
from forebay.offload.planning.stretches import stretches_of
from forebay.offload.planning.trace import Trace

TIE_SHARE = 0.002
OVERBOOKING: tuple[Rank, ...] = ("ratio", "area")
OVERBOOKED = (4.0, 32.0)
HOISTED = ", hoisted"


@dataclass(frozen=True)
class Choice:
    """A plan and what its replay came to."""

    plan: Plan
    replayed: Replayed

    @property
    def fits(self) -> bool:
        """Whether the step stays within the budget."""
        return self.replayed.peak_bytes <= self.plan.hardware.budget_bytes

    @property
    def moved_bytes(self) -> int:
        return self.replayed.written_bytes + self.replayed.read_bytes


def choose(
    trace: Trace,
    hardware: Hardware,
    ranks: tuple[Rank, ...] = RANKS,
    *,
    size_bytes_min: int = SIZE_BYTES_MIN,
    replays_max: int | None = None,
) -> tuple[Choice, list[Choice]]:
    """The best plan, and all that were tried. Nothing below `size_bytes_min` moves, unless it does not fit without. The
    best is improved with at most `replays_max` replays (default: EVALUATIONS of `improve.py`).
    `Invalid`, with the bytes that would do, if no plan keeps the step within the budget."""
    size_bytes_min = movable_from(trace, hardware, size_bytes_min)
    choices = [Choice(plan_, replay(trace, plan_)) for plan_ in _plans(trace, hardware, ranks, size_bytes_min)]
    chosen = best(choices)
    replays_max = improve.EVALUATIONS if replays_max is None else replays_max
    better = Choice(*improve.improved(trace, chosen.plan, chosen.replayed, replays_max))
    if better.plan is not chosen.plan:
        choices.append(better)
        chosen = best(choices)
    if not chosen.fits:
        raise Invalid(
            f"no plan that was tried keeps this step within {hardware.budget_bytes:,} bytes, since the tiers have no "
            f"room for what leaves: give larger tiers, or a budget of {chosen.replayed.peak_bytes:,}"
        )
    return chosen, choices


def _plans(trace: Trace, hardware: Hardware, ranks: tuple[Rank, ...], size_bytes_min: int) -> Iterator[Plan]:
    if int(trace.need_bytes().max()) <= hardware.target_bytes:
        yield Plan("nothing moves", (), stretches_of(trace, size_bytes_min).need_bytes, hardware, size_bytes_min)
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
    """The quickest of those that fit, or of all; of those as quick, the one that moves least."""
    choices = [choice for choice in choices if choice.fits] or choices
    quickest = min(choice.replayed.step_s for choice in choices)
    tied = [choice for choice in choices if choice.replayed.step_s <= quickest * (1 + TIE_SHARE)]
    return min(tied, key=lambda choice: (choice.moved_bytes, len(choice.plan.moves)))


def whole_layer(trace: Trace, hardware: Hardware, size_bytes_min: int = SIZE_BYTES_MIN) -> Plan:
    """All that persists leaves after each use and comes back one point before the next, to the first tier with room."""
    size_bytes_min = movable_from(trace, hardware, size_bytes_min)
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
    left = left_bytes(stretches_of(trace, size_bytes_min), moves)
    return Plan("whole_layer", tuple(moves), left, hardware, size_bytes_min)
