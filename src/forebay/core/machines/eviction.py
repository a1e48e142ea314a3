"""Which units leave a volume, and when.

Theory. A *unit* is a block of a data file or a whole inline object: `object_id << 24 | block`. Every missed byte lands
first; the policy decides what to keep when it needs room. Training reads everything once per epoch in random order, so
all units are equally good. The best answer without hints is then to keep what is in: a cache of size C over data of
size D hits C/D, and replacing a resident before its turn loses a certain hit. So a newcomer replaces a resident only
with *clearly better evidence*, of two kinds:

* The newcomer comes back faster. T is a unit's mean interval between uses, in bytes used meanwhile. A newcomer wins if
  its T, over at least two intervals, is MARGIN times shorter than the resident's T or idle time. In random epochs two
  intervals in a row average at least D/2 and no resident idles for 2 D, so chance hardly ever makes a factor of 3.5.
  One interval proves nothing: the end of one epoch and the start of the next can be close.
* The resident is dead: idle for longer than DEAD_FACTOR times the longest interval that residents show. So the cache
  follows a changed dataset: the old data is dead after 1.3 times its longest interval without use.

Newcomers wait in a small *probation* queue (1 %). When room is needed, the oldest newcomer meets the weakest of a few
residents (the *main* clock: a hand over the slots), and one of the two leaves. The *ghost*, a table of bounded size,
keeps the T and last use of units that left, for when they come back. Uses closer together than the probation queue is
long count once: a reader that takes a block in four pieces used it once.

A bucket with a quota is a *pool* with its own probation, hand and longest interval. Above its quota it gives up its own
units. Otherwise pools compete. Time here is the *clock*: bytes used, in 1/4096 of capacity.

A unit costs about 160 bytes (`core/machines/slots.py`). docs/design/0002-eviction.md has measurements. Rejected: LRU
and its kin (keep nothing of a random epoch); S3-FIFO and CLOCK as they are (every second-time newcomer replaces a
resident); TinyLFU's sketch (halving leaves differences of two between equals, and collisions pass for evidence); random
admission (hits C/D, never learns a hot set).

Invariants. (1) Pinned and held units are never victims. (2) `victims` frees what is asked, or chooses `units_max`, or
reports `stuck`. (3) Bytes per bucket, per pool and in all equal the sums over units. (4) Same events, same victims.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from forebay.core.errors import Invalid
from forebay.core.machines.ghost import Ghost
from forebay.core.machines.pool import PROBATION_SHARE, Pool
from forebay.core.machines.slots import ANY, APART, FREE, Slots

BLOCK_BITS = 24
TICKS = 4096  # of the clock per capacity
LOW_MARK = 0.995  # once above capacity (the high mark), evict down to this share of it
MARGIN = 3.5
INTERVALS_MIN = 2
SAMPLE = 12  # residents sampled per contest
SAMPLE_DOOMED = 128  # residents sampled at once when more than one in SAMPLE must go
POOLS_MAX = 250

_PROBATION, _PINNED = 1, 2  # flags


def unit_of(object_id: int, block: int) -> int:
    """The unit of a block (0 for an inline object)."""
    return object_id << BLOCK_BITS | block


def split_unit(unit: int) -> tuple[int, int]:
    """(object id, block) of a unit."""
    return unit >> BLOCK_BITS, unit & (1 << BLOCK_BITS) - 1


class Evicted(NamedTuple):
    """What to drop. The machine has already forgotten these units: the caller must drop them from the store.

    `stuck`: less than asked, because everything else is pinned or held. Pass reads through until something changes.
    """

    units: list[int]
    freed_bytes: int
    stuck: bool


class Eviction(Slots):
    """The cache policy of one volume. Not thread-safe. A call takes a few microseconds; `victims` takes that per
    unit."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self._held: Counter[int] = Counter()
        self._busy: Callable[[int], bool] | None = None
        self._units_max = sys.maxsize
        self._share = 0.0  # of the units that must go, while they are chosen
        self._doomed: list[int] = []  # slots chosen together, the weakest last
        self._bucket_ids: dict[str, int] = {}
        self._bucket_names: list[str] = []
        self._bucket_bytes: list[int] = []
        self._pool_of: list[Pool] = []  # by bucket id
        self._open = Pool(1, capacity_bytes)  # buckets without a quota
        self._pools: dict[int, Pool] = {1: self._open}
        self._ghost = Ghost(256)
        self._now = 0
        self._carry_bytes = 0
        self._tick_bytes = max(1, capacity_bytes // TICKS)
        self.used_bytes = 0
        self.capacity_bytes = 0
        self._burst_ticks = 1
        self._hand = 0
        self.set_capacity(capacity_bytes)

    # --- settings ----------------------------------------------------------------------------------------------------
    def set_capacity(self, capacity_bytes: int) -> None:
        """Set how many bytes may be kept: the high mark. Cheap; call it whenever the disks' free space changes."""
        assert capacity_bytes >= 0
        self.capacity_bytes = self._open.limit_bytes = capacity_bytes
        self._burst_ticks = max(1, int(capacity_bytes * PROBATION_SHARE) // self._tick_bytes)

    def set_quota(self, bucket: str, quota_bytes: int | None) -> None:
        """Bound a bucket's bytes; None removes the bound. Scans every unit. `Invalid` when too many buckets have a
        quota."""
        bucket_id = self._bucket_id(bucket)
        pool = self._pool_of[bucket_id]
        if quota_bytes is not None and pool is not self._open:
            pool.limit_bytes = quota_bytes
        elif quota_bytes is not None:
            code = next((code for code in range(2, POOLS_MAX + 2) if code not in self._pools), 0)
            if not code:
                raise Invalid(f"{POOLS_MAX} buckets have a quota already: remove one first, or leave this one without")
            self._pools[code] = Pool(code, quota_bytes)
            self._move(bucket_id, pool, self._pools[code])
        elif pool is not self._open:
            self._move(bucket_id, pool, self._open)
            del self._pools[pool.code]

    def _move(self, bucket_id: int, old: Pool, new: Pool) -> None:
        self._pool_of[bucket_id] = new
        new.observe(int(old.longest), self._now)
        for unit, slot in self._slots.items():
            if self._buckets[slot] != bucket_id:
                continue
            if self._flags[slot] & _PROBATION:
                old.probation_bytes -= self._sizes[slot]
                new.probation_bytes += self._sizes[slot]
                new.probation.append(unit)
            else:
                old.main_bytes -= self._sizes[slot]
                new.main_bytes += self._sizes[slot]
                if self._state[slot] != APART:
                    self._state[slot] = new.code
        self._compact(old)

    def _bucket_id(self, bucket: str) -> int:
        found = self._bucket_ids.get(bucket)
        if found is None:
            found = self._bucket_ids[bucket] = len(self._bucket_names)
            self._bucket_names.append(bucket)
            self._bucket_bytes.append(0)
            self._pool_of.append(self._open)
        return found

    # --- events ------------------------------------------------------------------------------------------------------
    def landed(self, unit: int, size_bytes: int, bucket: str, name: int = 0) -> None:
        """Add a unit (block, inline object) that came into the store; then check `excess_bytes`. When the unit leaves,
        its history is kept under `name` (0: the unit itself), because a unit that comes back has a new number."""
        known = self._slots.get(unit)
        if known is not None and self._sizes[known] == size_bytes:
            self.touched(unit)
            return
        self.removed(unit)
        slot = self._add(unit, size_bytes, self._bucket_id(bucket))
        pool = self._pool_of[self._buckets[slot]]
        self._use(size_bytes)
        self._last[slot] = self._now
        self._names[slot] = name or unit
        past = self._ghost.recall(name or unit)
        if past is not None:
            last, mean, intervals = past
            self._means[slot], self._intervals[slot] = mean, intervals
            self._came_back(slot, self._now - last, pool)
        self._state[slot], self._flags[slot] = APART, _PROBATION
        pool.probation.append(unit)
        pool.probation_bytes += size_bytes
        while pool.overflow_bytes > 0:
            oldest = self._oldest(pool)
            if oldest < 0 or not self._has_room(pool, self._sizes[oldest]):
                break
            self._promote(oldest)

    def touched(self, unit: int) -> bool:
        """Note that a unit was read. Returns False, and changes nothing, if the unit is unknown (evicted meanwhile)."""
        slot = self._slots.get(unit)
        if slot is None:
            return False
        interval = self._now - self._last[slot]
        if interval >= self._burst_ticks:
            self._use(self._sizes[slot])
            self._last[slot] = self._now
            self._came_back(slot, interval, self._pool_of[self._buckets[slot]])
        return True

    def touched_blocks(self, object_id: int, first: int, end: int) -> None:
        """Blocks [first, end) of an object were read (`wire.Touched`)."""
        base = object_id << BLOCK_BITS
        for unit in range(base + first, base + end):
            self.touched(unit)

    def removed(self, unit: int) -> bool:
        """Forget a unit that left the store other than through `victims`. False if it is unknown."""
        if (slot := self._slots.get(unit)) is not None:
            self._remove(slot)
        return slot is not None

    def pin(self, unit: int, pinned: bool = True) -> bool:
        """Never evict the unit until it is unpinned (`pinned` False). False if the unit is unknown."""
        slot = self._slots.get(unit)
        if slot is None:
            return False
        if self._flags[slot] & _PROBATION and not pinned:
            return True
        if self._flags[slot] & _PROBATION:
            self._promote(slot)
        self._flags[slot] = _PINNED if pinned else 0
        self._state[slot] = APART if pinned else self._pool_of[self._buckets[slot]].code
        return True

    def hold(self, unit: int) -> None:
        """Keep a unit from eviction while somebody reads it from a flight. Each call needs one `release`. Any unit may
        be held."""
        self._held[unit] += 1

    def release(self, unit: int) -> None:
        """Undo one `hold`."""
        self._held[unit] -= 1
        if not self._held[unit]:
            del self._held[unit]

    def restore(self, units: Iterable[tuple[int, int, str, int, bool]], newest: int) -> None:
        """Add what the store holds after a start: (unit, size_bytes, bucket, used_minute, pinned), in any order, in any
        number of calls. Units that landed since stay as they are. Only the minute of last use was kept, so a day before
        the `newest` use counts as one capacity's worth of uses."""
        self._now = max(self._now, 16 * TICKS)
        for unit, size_bytes, bucket, used_minute, pinned in units:
            if unit in self._slots:
                continue
            slot = self._add(unit, size_bytes, self._bucket_id(bucket))
            pool = self._pool_of[self._buckets[slot]]
            pool.main_bytes += size_bytes
            self._state[slot], self._flags[slot] = (APART, _PINNED) if pinned else (pool.code, 0)
            self._last[slot] = max(0, 16 * TICKS - max(0, newest - used_minute) * TICKS // 1440)

    # --- questions ---------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, unit: int) -> bool:
        return unit in self._slots

    @property
    def excess_bytes(self) -> int:
        """How many bytes to ask of `victims` now: 0 below every high mark, else enough to bring all under their low
        marks."""
        over = 0
        if len(self._pools) > 1:
            for pool in self._pools.values():
                if pool is not self._open and pool.used_bytes > pool.limit_bytes:
                    over += pool.used_bytes - int(pool.limit_bytes * LOW_MARK)
        if self.used_bytes > self.capacity_bytes:
            over = max(over, self.used_bytes - int(self.capacity_bytes * LOW_MARK))
        return over

    def victims(
        self, excess_bytes: int, busy: Callable[[int], bool] | None = None, *, units_max: int = sys.maxsize
    ) -> Evicted:
        """Choose units of at least `excess_bytes`, but at most `units_max` units, and forget them. Buckets above their
        quota give first. A unit for which `busy` returns true is passed over, as if it were held."""
        self._busy, self._units_max = busy, units_max
        units: list[int] = []
        freed = 0
        stuck = False
        for code in sorted(self._pools):
            pool = self._pools[code]
            if pool is not self._open and pool.used_bytes > pool.limit_bytes:
                freed += self._drain(pool, pool.used_bytes - int(pool.limit_bytes * LOW_MARK), units)
                stuck |= pool.used_bytes > pool.limit_bytes
        freed += self._drain_all(excess_bytes - freed, units)
        if (moved := self._shrink()) is not None:
            self._hand = moved(self._hand)
            for pool in self._pools.values():
                pool.hand = moved(pool.hand)
        return Evicted(units, freed, (stuck or freed < excess_bytes) and len(units) < units_max)

    # --- choosing ----------------------------------------------------------------------------------------------------
    def _drain_all(self, need_bytes: int, units: list[int]) -> int:
        return self._drain(None, need_bytes, units)

    def _drain(self, pool: Pool | None, need_bytes: int, units: list[int]) -> int:
        """Forget units of `pool` (None: of all) until `need_bytes` are free or nothing is left to choose."""
        freed = 0
        if len(self._ghost) < len(self._slots) * 3 // 2:
            self._ghost = Ghost(2 * len(self._slots))  # a new ghost starts empty; this happens while a cache fills
        ghost, used_bytes = self._ghost, pool.used_bytes if pool else self.used_bytes
        keep_bytes = (pool.limit_bytes if pool else self.capacity_bytes) * LOW_MARK
        self._share = min(0.5, 1 - keep_bytes / max(1, used_bytes))
        while freed < need_bytes and len(units) < self._units_max:
            slot = self._choose(pool)
            if slot < 0:
                break
            unit = self._units[slot]
            units.append(unit)
            freed += self._sizes[slot]
            ghost.remember(self._names[slot], self._last[slot], self._means[slot], self._intervals[slot])
            self._remove(slot)
        self._share, self._doomed = 0.0, []
        return freed

    def _choose(self, pool: Pool | None) -> int:
        """The slot to give up next, or -1."""
        source = pool or self._open
        if not pool and len(self._pools) > 1:
            source = max(self._pools.values(), key=lambda each: (each.overflow_bytes, each.code))
        while source.overflow_bytes > 0:
            candidate = self._oldest(source)
            if candidate < 0:
                break
            if self._has_room(source, self._sizes[candidate]):
                self._promote(candidate)
                continue
            resident = self._weakest(pool)
            if resident < 0 or not self._wins(candidate, resident):
                return candidate
            self._promote(candidate)
            return resident
        resident = self._weakest(pool)
        if resident >= 0:
            return resident
        pools = [pool] if pool else list(self._pools.values())
        return next((slot for each in pools if (slot := self._oldest(each)) >= 0), -1)

    def _wins(self, candidate: int, resident: int) -> bool:
        """Whether the evidence for the candidate is clearly better."""
        idle = self._now - self._last[resident]
        if self._pool_of[self._buckets[resident]].is_dead(idle, self._now):
            return True
        if self._intervals[candidate] < INTERVALS_MIN:
            return False
        return max(self._means[resident], idle) > MARGIN * self._means[candidate]

    def _weakest(self, pool: Pool | None) -> int:
        """The slot with the longest interval or idle time among the next few residents under the hand, or -1."""
        if self._share > 1 / SAMPLE:
            return self._next_doomed(pool)
        slots, scores = self._sample(pool, SAMPLE)
        if not slots:
            return -1
        best = slots[scores.index(max(scores))]
        if not self._in_use(self._units[best]):
            return best
        others = [(-score, at) for at, score in enumerate(scores) if not self._in_use(self._units[slots[at]])]
        return slots[min(others)[1]] if others else self._any_resident(pool)

    def _next_doomed(self, pool: Pool | None) -> int:
        """As `_weakest`, when a large share must go: sample many residents under the hand and doom the weakest share of
        them at once. Sampling a few at a time, round after round, would end at the same units."""
        for _ in range(2):
            while self._doomed:
                slot = self._doomed.pop()
                if FREE < self._state[slot] < APART and not self._in_use(self._units[slot]):
                    return slot
            slots, scores = self._sample(pool, SAMPLE_DOOMED)
            doomed = sorted(dict(zip(slots, scores, strict=True)).items(), key=itemgetter(1))
            self._doomed = [slot for slot, _ in doomed[int(len(doomed) * (1 - self._share)) :]]
        return self._any_resident(pool)

    def _sample(self, pool: Pool | None, count: int) -> tuple[Sequence[int], list[float]]:
        """The next residents under the hand, which moves on, and how long each is expected to stay unused."""
        slots = self._after(self._code(pool), pool.hand if pool else self._hand, count)
        if slots and pool:
            pool.hand = slots[-1] + 1
        elif slots:
            self._hand = slots[-1] + 1
        now, last, means = self._now, self._last, self._means
        return slots, [mean if (mean := means[slot]) > (idle := now - last[slot]) else idle for slot in slots]

    def _code(self, pool: Pool | None) -> int:
        """The state of a pool's residents (None: of any pool) if one value covers them; else ANY."""
        return pool.code if pool else 1 if len(self._pools) == 1 else ANY

    def _in_use(self, unit: int) -> bool:
        return unit in self._held or (self._busy is not None and self._busy(unit))

    def _any_resident(self, pool: Pool | None) -> int:
        """Some resident that is not held, found by scanning all."""
        hand, code = 0, self._code(pool)
        while (slot := self._next(code, hand)) >= hand and self._in_use(self._units[slot]):
            hand = slot + 1
        return slot if slot >= hand else -1

    def _oldest(self, pool: Pool) -> int:
        """The slot at the head of probation. Held units go to the back. -1 if there is none."""
        queue = pool.probation
        for _ in range(len(queue)):
            slot = self._waiting(queue[0], pool)
            if slot < 0:
                queue.popleft()
            elif self._in_use(queue[0]):
                queue.rotate(-1)
            else:
                return slot
        return -1

    def _waiting(self, unit: int, pool: Pool) -> int:
        """The unit's slot if it is in this pool's probation, else -1. Queue entries may be outdated."""
        slot = self._slots.get(unit, -1)
        if slot >= 0 and self._flags[slot] & _PROBATION and self._pool_of[self._buckets[slot]] is pool:
            return slot
        return -1

    # --- books -------------------------------------------------------------------------------------------------------
    def _use(self, size_bytes: int) -> None:
        """Move the clock by a use of `size_bytes`."""
        carry = self._carry_bytes + size_bytes
        if carry >= self._tick_bytes:
            self._now += carry // self._tick_bytes
            carry %= self._tick_bytes
            if self._now >> 31:
                self._rebase()
        self._carry_bytes = carry

    def _rebase(self) -> None:
        """Keep the clock within 32 bits. Needed once in half a million capacities."""
        shift = self._now - (1 << 24)
        for slot, last in enumerate(self._last):
            self._last[slot] = max(0, last - shift)
        self._ghost = Ghost(len(self._ghost))
        for pool in self._pools.values():
            pool.longest_at = max(0, pool.longest_at - shift)
        self._now -= shift

    def _came_back(self, slot: int, interval: int, pool: Pool) -> None:
        count = self._intervals[slot]
        mean = self._means[slot] if count else 0.0
        self._means[slot] = mean + (interval - mean) / (count + 1)
        if count < 3:
            self._intervals[slot] = count + 1
        pool.observe(interval, self._now)

    def _has_room(self, pool: Pool, size_bytes: int) -> bool:
        """Whether a newcomer may become a resident without another leaving, beside a full probation."""
        share = LOW_MARK - PROBATION_SHARE
        if pool.main_bytes + size_bytes > pool.limit_bytes * share:
            return False
        return self.used_bytes - pool.probation_bytes + size_bytes <= self.capacity_bytes * share

    def _promote(self, slot: int) -> None:
        """Move a unit from probation to the residents. Its queue entry is dropped when the queue reaches it."""
        pool = self._pool_of[self._buckets[slot]]
        pool.probation_bytes -= self._sizes[slot]
        pool.main_bytes += self._sizes[slot]
        self._flags[slot] &= ~_PROBATION
        self._state[slot] = pool.code

    def _add(self, unit: int, size_bytes: int, bucket_id: int) -> int:
        slot = self._take_slot(unit, size_bytes, bucket_id)
        self.used_bytes += size_bytes
        self._bucket_bytes[bucket_id] += size_bytes
        return slot

    def _remove(self, slot: int) -> None:
        size_bytes, bucket_id = self._sizes[slot], self._buckets[slot]
        pool = self._pool_of[bucket_id]
        if self._flags[slot] & _PROBATION:
            pool.probation_bytes -= size_bytes
            if len(pool.probation) > 2 * len(self._slots) + 64:
                self._compact(pool)
        else:
            pool.main_bytes -= size_bytes
        self.used_bytes -= size_bytes
        self._bucket_bytes[bucket_id] -= size_bytes
        self._give_slot(slot)

    def _compact(self, pool: Pool) -> None:
        """Drop queue entries whose units are no longer in this probation."""
        pool.probation = deque(unit for unit in dict.fromkeys(pool.probation) if self._waiting(unit, pool) >= 0)

    def check(self) -> None:
        """Assert the books against a full recount. Slow: for tests and the simulator."""
        main: dict[int, int] = dict.fromkeys(self._pools, 0)
        probation: dict[int, int] = dict.fromkeys(self._pools, 0)
        buckets = [0] * len(self._bucket_names)
        for unit, slot in self._slots.items():
            assert self._units[slot] == unit
            pool, flags = self._pool_of[self._buckets[slot]], self._flags[slot]
            (probation if flags & _PROBATION else main)[pool.code] += self._sizes[slot]
            buckets[self._buckets[slot]] += self._sizes[slot]
            assert self._state[slot] == (APART if flags else pool.code), (unit, flags)
            assert not flags & _PROBATION or unit in pool.probation, unit
        assert buckets == self._bucket_bytes
        assert sum(buckets) == self.used_bytes
        for code, pool in self._pools.items():
            assert (pool.main_bytes, pool.probation_bytes) == (main[code], probation[code]), code
        assert self._state.count(FREE) == len(self._free) == len(self._units) - len(self._slots)
        assert all(count > 0 for count in self._held.values())
