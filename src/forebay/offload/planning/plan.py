"""Plans which tensors leave when and when they return: greedy over inactive periods, with booked bandwidth.

Theory (TERAIO, arXiv 2506.06472, algorithm 1; G10, MICRO 2023). On each channel every operator has capacity for
`bandwidth * time` bytes. A period is worth the pressure that it removes: operators above the budget between the end of
its store and the beginning of its load. Greedy takes the period of the highest rank, books its slots and subtracts its
bytes from the memory curve, until nothing is above the budget or no period is worth anything. Memory that stays above
is no error: the step then waits, and `replay` says how long.

Differences from the paper. Slots lie on a circle, so moves around the end of the step are booked like others. A tensor
that was not written since its last store leaves without a store. There are several ranks (`Rank`), since none is best
on all traces: the paper's printed benefit over cost does not depend on the size; `area` is G10's. Between tiers, disk
is taken if it relieves as much, otherwise host memory while it has room.

Moves begin and end only at points, so the circle consists of *stretches* from point to point (`stretches`). There are
thousands of them for tens of thousands of operators. A store counts as complete, and a tensor as needed, at the edge on
the safe side.

Ranking everything anew after each choice would take too long. A period's worth never rises while slots fill and
pressure falls, so its earlier worth is a bound. The planner keeps a *front*, the FRONT periods with the highest bounds,
and ranks only these anew after a choice, all at once. The front's best is the best of all unless a bound outside is
higher; then the front is drawn anew. The one exception: a planned copy of a tensor lifts the bounds of its other
periods. So the choice is that of ranking everything each time (tests compare). A heap that ranks only its top gives the
same, one period at a time: it took eighty times as long.

Invariants. (1) No channel of an operator and no tier is booked above its capacity. (2) A tensor is away only between
two of its uses. (3) The same trace, hardware and rank give the same plan on every machine: ties go to the earlier
period.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from forebay.core.errors import Invalid
from forebay.offload.planning.booking import Slots, Usage
from forebay.offload.planning.hardware import CHANNELS_IN, CHANNELS_OUT, RESERVE_SHARE, Channel, Hardware, Tier
from forebay.offload.planning.periods import Periods, inactive
from forebay.offload.planning.stretches import Stretches, stretches_of
from forebay.offload.planning.trace import Flags, Floats, Ints, Trace

Rank = Literal["ratio", "area", "area_then_ratio"]
RANKS: tuple[Rank, ...] = ("ratio", "area", "area_then_ratio")
SIZE_BYTES_MIN = 4 << 20  # below, a move's latency is longer than its bytes take on most disks
AREA_SHARE = 0.05  # `area_then_ratio`: of the excess that `area` leaves to `ratio`
FRONT = 2048  # periods ranked at once: a choice changes the rank of some hundreds


class Move(NamedTuple):
    """A tensor leaves at `leave` (an operator with a point before it), is away from operator `gone` on, is loaded from
    `load` on (another such) and must be here at `need`. All counted on into the next step. `stores`: bytes have to be
    written; else its copy in the tier is still good."""

    tensor: int
    tier: Tier
    last_use: int
    leave: int
    gone: int
    load: int
    need: int
    stores: bool


@dataclass(frozen=True)
class Plan:
    """Moves by the operator at which they leave. `left_bytes`: the memory of each stretch under them, as planned.
    Tensors below `size_bytes_min` stay."""

    rank: str
    moves: tuple[Move, ...]
    left_bytes: Ints
    hardware: Hardware
    size_bytes_min: int = 1

    @property
    def excess_bytes(self) -> int:
        """How much is above the target where it is worst; 0 if all fits."""
        return max(0, int(self.left_bytes.max()) - self.hardware.target_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether the step fits as it is, and nothing has to be done."""
        return not self.moves and not self.excess_bytes

    def written_bytes(self, trace: Trace, tier: Tier | None = None) -> int:
        """Bytes stored in a step, to one tier or all."""
        return int(sum(trace.sizes_bytes[m.tensor] for m in self.moves if m.stores and tier in (None, m.tier)))

    def read_bytes(self, trace: Trace) -> int:
        """Bytes loaded in a step."""
        return int(sum(trace.sizes_bytes[m.tensor] for m in self.moves))


def check_feasible(trace: Trace, hardware: Hardware, size_bytes_min: int = 1) -> None:
    """`Invalid`, with the bytes that would do, if no plan that leaves tensors below `size_bytes_min` where they are can
    make the step fit: for what one operator or the stretch to the next point uses at once, or for the tiers' room."""
    stretches, budget = stretches_of(trace, size_bytes_min), hardware.budget_bytes
    active = trace.active_bytes()
    worst = int(active.argmax())
    would_do = math.ceil(int(stretches.required_bytes.max()) / (1 - RESERVE_SHARE)) + 1
    if active[worst] > budget:
        raise Invalid(
            f"operator {worst} ({trace.operators[worst]}) uses {int(active[worst]):,} bytes at once, "
            f"{int(active[worst]) - budget:,} more than the budget of {budget:,}: "
            f"give at least {would_do:,}, a smaller batch, or shard that layer"
        )
    tightest = int(stretches.required_bytes.argmax())
    if (required := int(stretches.required_bytes[tightest])) > budget:
        at = int(np.searchsorted(trace.points, stretches.points[tightest], "right")) - 1
        raise Invalid(
            f"from {trace.point_names[at]!r} to the next point {required:,} bytes have to be here at once, "
            f"{required - budget:,} more than the budget of {budget:,}: "
            f"give at least {would_do:,}, a smaller batch, or a smaller chunk_bytes"
        )
    room, least = sum(map(hardware.room_bytes, hardware.tiers)), int(stretches.need_bytes.max()) - budget
    if hardware.tiers and room < least:
        raise Invalid(f"{least:,} bytes have to be elsewhere, and there is room for {room:,}: give larger tiers")


def movable_from(trace: Trace, hardware: Hardware, size_bytes_min: int) -> int:
    """The size from which on tensors have to move for the step to fit: `size_bytes_min`, or as much less as it takes to
    keep the reserve too, or at least the budget. `Invalid` if it cannot fit though all may move."""
    sizes = [max(1, size_bytes_min)]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // 4))
    for most in (hardware.target_bytes, hardware.budget_bytes):
        for size_bytes in sizes:
            if int(stretches_of(trace, size_bytes).required_bytes.max()) <= most:
                check_feasible(trace, hardware, size_bytes)
                return size_bytes
    check_feasible(trace, hardware)
    raise AssertionError("a step that does not fit was not refused")


class Ranked(NamedTuple):
    """What periods would give if they were taken now, by column: `worths` is their rank, 0 for nothing."""

    worths: Floats
    tiers: Ints
    gone: Ints
    loads: Ints
    stores: Flags


class _Taken(NamedTuple):
    """A period that was chosen; `gone` and `load` are stretches."""

    row: int
    tier: Tier
    gone: int
    load: int
    stores: bool


class _Pressure:
    """The memory curve, and how long it is above the target in any stretch of operators."""

    def __init__(self, need_bytes: Ints, times_s: Floats, target_bytes: int) -> None:
        self.left, self._times_s, self._target = need_bytes.copy(), times_s, target_bytes
        self._times_ns: Ints = np.maximum(1, np.rint(times_s * 1e9).astype(np.int64))  # whole: sums are exact
        self._count = len(times_s)
        self._over = self.left > target_bytes
        self._above_ns: Ints = np.zeros(self._count + 1, np.int64)
        self._sum()

    def _sum(self) -> None:
        np.cumsum(np.where(self._over, self._times_ns, 0), out=self._above_ns[1:])

    @property
    def excess(self) -> float:
        """Bytes above the target, times seconds."""
        over = np.maximum(self.left - self._target, 0)
        return float(over @ self._times_s)

    def is_over(self) -> bool:
        return bool(self._over.any())

    def above_ns(self, begins: Ints, ends: Ints) -> Ints:
        """Nanoseconds above the target among operators begins..ends."""
        found: Ints = self._until(ends) - self._until(begins)
        return found

    def _until(self, operators: Ints) -> Ints:
        laps, inner = np.divmod(operators, self._count)
        found: Ints = laps * self._above_ns[-1] + self._above_ns[inner]
        return found

    def lower(self, begin: int, end: int, size_bytes: int) -> None:
        changed = False
        for part in _laps(begin, end, self._count):
            left = self.left[part]
            left -= size_bytes
            over = left > self._target
            if not np.array_equal(over, self._over[part]):
                self._over[part] = over
                changed = True
        if changed:
            self._sum()


def _laps(begin: int, end: int, count: int) -> list[slice]:
    """A stretch of the circle as slices of one lap. It is shorter than a lap."""
    assert begin <= end <= begin + count, "a stretch of more than a lap"
    if end <= count:
        return [slice(begin, end)]
    if begin >= count:
        return [slice(begin - count, end - count)]
    return [slice(begin, count), slice(0, end - count)]


class Planner:
    """One greedy run: `rank` and `take` are its two halves, `plan` puts them together."""

    def __init__(self, trace: Trace, hardware: Hardware, rank: Rank, size_bytes_min: int = SIZE_BYTES_MIN) -> None:
        if rank not in RANKS:
            raise Invalid(f"rank {rank!r} is not known: use one of {', '.join(RANKS)}")
        size_bytes_min = movable_from(trace, hardware, size_bytes_min)
        if not hardware.tiers:
            raise Invalid("there is no tier to move anything to: give a disk or host memory, with its room")
        self.trace, self.hardware, self.by = trace, hardware, rank
        self.circle = stretches_of(trace, size_bytes_min)
        self.periods: Periods = inactive(trace, size_bytes_min)
        self._leaves, self._needs = (
            self.circle.of(self.periods.leaves),
            self.circle.of(self.periods.needs),
        )
        self.pressure = _Pressure(self.circle.need_bytes, self.circle.times_s, hardware.target_bytes)
        self._by_area = rank in ("area", "area_then_ratio")
        self._area_until = AREA_SHARE * self.pressure.excess
        self.slots = {
            channel: Slots(self.circle.times_s * hardware.channel_bytes_s(channel))
            for channel in Channel
            if math.isfinite(hardware.channel_bytes_s(channel)) and hardware.channel_bytes_s(channel) > 0
        }
        self.usage = {tier: Usage(self.circle.count, hardware.room_bytes(tier)) for tier in hardware.tiers}
        self._sizes = trace.sizes_bytes[self.periods.tensors]
        self._rows_of: Ints = np.searchsorted(self.periods.tensors, np.arange(trace.tensor_count + 1))
        self.taken: Flags = np.zeros(len(self.periods), bool)
        self._tiers_of: dict[int, Tier] = {}  # of what is taken
        self._taken: list[_Taken] = []
        none: Flags = np.zeros(len(self.periods), bool)
        self._copies = {tier: none.copy() for tier in hardware.tiers}  # where a copy would still be good
        self._barred = {tier: none.copy() for tier in hardware.tiers}  # where there is no room, for good
        self._held_from: dict[tuple[int, Tier], int] = {}  # since when a tier holds a tensor

    # --- ranking -----------------------------------------------------------------------------------------------------
    def rank(self, rows: Ints) -> Ranked:
        """What taking each of these periods would give now, in the tier that suits it best."""
        best: Ranked | None = None
        for tier in self.hardware.tiers:  # disk first: host memory is for what disks are too slow for
            found = self._in_tier(rows, tier)
            if best is None:
                best = found
                continue
            better = found.worths > best.worths
            best = Ranked(*(np.where(better, new, old) for new, old in zip(found, best, strict=True)))
        assert best is not None, "there is a tier"
        return best

    def _in_tier(self, rows: Ints, tier: Tier) -> Ranked:
        sizes, leaves, needs = self._sizes[rows], self._leaves[rows], self._needs[rows]
        stores = ~self._copies[tier][rows]
        gone = leaves
        for channel in CHANNELS_OUT[tier]:
            if channel in self.slots:
                gone = np.maximum(gone, self.slots[channel].done(leaves, sizes, needs))
        gone = np.where(stores, gone, leaves)
        loads = needs
        for channel in CHANNELS_IN[tier]:
            if channel in self.slots:
                loads = np.minimum(loads, self.slots[channel].begin(needs, sizes, gone))
        above_ns = self.pressure.above_ns(gone, loads)
        useful = (loads > gone) & (above_ns > 0) & ~self._barred[tier][rows]
        worths = np.where(useful, self._worths(rows, above_ns), 0.0)
        return Ranked(worths, np.full(len(rows), int(tier)), gone, loads, stores)

    def _worths(self, rows: Ints, above_ns: Ints) -> Floats:
        return above_ns.astype(np.float64) * (self._sizes[rows] if self._by_area else 1)

    def _held(self, row: int, tier: Tier) -> tuple[int, int]:
        """The stretch in which a tier would newly hold the tensor: always, or until it dies."""
        tensor = int(self.periods.tensors[row])
        since = self._held_from.get((tensor, tier))
        if self.trace.persistent[tensor]:
            return (0, self.circle.count) if since is None else (0, 0)
        leave = int(self._leaves[row])
        end = int(self.circle.of(self.trace.deaths[tensor])) + 1 if since is None else since
        return leave, max(leave, end)

    # --- taking ------------------------------------------------------------------------------------------------------
    def has_room(self, row: int, tier: Tier) -> bool:
        """Whether the tier can hold it. One that cannot never will: it is not offered again."""
        if self.usage[tier].has_room(*self._held(row, tier), int(self._sizes[row])):
            return True
        self._barred[tier][row] = True
        return False

    def take(self, row: int, tier: Tier, gone: int, load: int, *, stores: bool) -> Ints:
        """Book a period; the rows of the same tensor, which may be worth more now."""
        size, tensor = int(self._sizes[row]), int(self.periods.tensors[row])
        leave, need = int(self._leaves[row]), int(self._needs[row])
        if stores:
            for channel in CHANNELS_OUT[tier]:
                if channel in self.slots:
                    self.slots[channel].book_from(leave, size)
        for channel in CHANNELS_IN[tier]:
            if channel in self.slots:
                self.slots[channel].book_until(need, size)
        begin, end = self._held(row, tier)
        self.usage[tier].add(begin, end, size)
        if begin < end:
            self._held_from[tensor, tier] = begin
        self.pressure.lower(gone, load, size)
        self._taken.append(_Taken(row, tier, gone, load, stores))
        self._tiers_of[row] = tier
        self.taken[row] = True
        same = np.arange(int(self._rows_of[tensor]), int(self._rows_of[tensor + 1]))
        for other in same.tolist():
            for at, copies in self._copies.items():
                copies[other] = self._has_copy(other, at)
        return same

    def _has_copy(self, row: int, tier: Tier) -> bool:
        """Whether a copy from an earlier period of the tensor would still be good in that tier."""
        tensor = int(self.periods.tensors[row])
        first, end = int(self._rows_of[tensor]), int(self._rows_of[tensor + 1])
        at = row
        for _ in range(end - first):
            if self.periods.written[at]:
                return False
            at = at - 1 if at > first else end - 1
            if at in self._tiers_of:
                return self._tiers_of[at] == tier
        return False

    def switches(self) -> bool:
        """Whether the rank changes now, so that all has to be ranked anew."""
        if self.by == "area_then_ratio" and self._by_area and self.pressure.excess <= self._area_until:
            self._by_area = False
            return True
        return False

    def result(self) -> Plan:
        """The plan so far, before hoisting. A store that a later choice made needless (it came to be the second of two
        without a write between) is left out: the tensor is gone at once."""
        moves = []
        operator, periods = self.circle.operator, self.periods
        for row, tier, gone, load, stores in self._taken:
            leave = int(periods.leaves[row])
            still_stores = stores and not self._has_copy(row, tier)
            moves.append(
                Move(
                    int(periods.tensors[row]),
                    tier,
                    int(periods.last_uses[row]),
                    leave,
                    operator(gone) if still_stores else leave,
                    operator(load),
                    int(periods.needs[row]),
                    still_stores,
                )
            )
        moves.sort(key=lambda move: (move.leave, move.tensor))
        size_bytes_min = self.circle.size_bytes_min
        return Plan(self.by, tuple(moves), left_bytes(self.circle, moves), self.hardware, size_bytes_min)


def left_bytes(stretches: Stretches, moves: Iterable[Move]) -> Ints:
    """The memory curve under `moves`, stretch by stretch."""
    left = stretches.need_bytes.copy()
    for move in moves:
        begin, end = stretches.of(np.array([move.gone, move.load])).tolist()
        for part in _laps(begin, end, stretches.count):
            left[part] -= int(stretches.trace.sizes_bytes[move.tensor])
    return left


def plan(trace: Trace, hardware: Hardware, rank: Rank, size_bytes_min: int = SIZE_BYTES_MIN) -> Plan:
    """A plan by one rank. `Invalid` if no plan can make the step fit, naming the operator and the missing bytes."""
    planner = Planner(trace, hardware, rank, size_bytes_min)
    everything = np.arange(len(planner.periods))
    bounds = planner.rank(everything).worths
    front, outside = _front(bounds)
    while planner.pressure.is_over() and len(front):
        ranked = planner.rank(front)
        bounds[front] = ranked.worths
        at = int(np.lexsort((front, -ranked.worths))[0])
        row, worth = int(front[at]), float(ranked.worths[at])
        if worth <= 0 or (-worth, row) > outside:
            front, outside = _front(bounds)  # something else may be better: look again at all
            continue
        tier = Tier(int(ranked.tiers[at]))
        if not planner.has_room(row, tier):
            continue
        same = planner.take(row, tier, int(ranked.gone[at]), int(ranked.loads[at]), stores=bool(ranked.stores[at]))
        if planner.switches():
            bounds = np.where(planner.taken, 0.0, planner.rank(everything).worths)
            front, outside = _front(bounds)
            continue
        bounds[same] = np.where(planner.taken[same], 0.0, planner.rank(same).worths)
        front = front[front != row]
        risen = same[int(bounds[same].argmax())]
        if not len(front) or (-float(bounds[risen]), int(risen)) < outside:
            front, outside = _front(bounds)
    return planner.result()


def _front(bounds: Floats) -> tuple[Ints, tuple[float, int]]:
    """The rows of the highest bounds above 0, of equal ones the first; and the best bound that is left, negative, with
    its row."""
    some = np.flatnonzero(bounds)
    if len(some) <= FRONT:
        return some, (0.0, len(bounds))
    least = np.partition(bounds[some], len(some) - FRONT)[len(some) - FRONT]
    above, equal = some[bounds[some] > least], some[bounds[some] == least]
    missing = FRONT - len(above)
    front = np.sort(np.concatenate([above, equal[:missing]]))
    rest = bounds.copy()
    rest[front] = 0.0
    best = int(rest.argmax())
    return front, (-float(rest[best]), best)


def hoisted(trace: Trace, plan: Plan) -> Plan:
    """The plan with loads begun as much earlier as memory allows: spare memory takes up jitter (G10's second pass)."""
    stretches = stretches_of(trace, plan.size_bytes_min)
    left, target = plan.left_bytes.copy(), plan.hardware.target_bytes
    moves = list(plan.moves)
    for at in sorted(range(len(moves)), key=lambda at: (moves[at].load, at)):
        move = moves[at]
        size = int(trace.sizes_bytes[move.tensor])
        begin, end = stretches.of(np.array([move.gone, move.load])).tolist()
        away: Ints = np.arange(begin, end) % stretches.count
        full = np.flatnonzero(left[away] + size > target)
        earliest = begin + (int(full[-1]) + 1 if full.size else 0)
        if earliest < end:
            left[np.arange(earliest, end) % stretches.count] += size
            moves[at] = move._replace(load=stretches.operator(earliest))
    kept = tuple(move for move in moves if move.gone < move.load)  # the others have no need to go at all
    return replace(plan, moves=kept, left_bytes=left)
