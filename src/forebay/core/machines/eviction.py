"""Which units leave the node's volumes, and when.

Theory. A *unit* is a block of a data file or a whole inline object, `object_id << 24 | block`. Every byte that misses
lands first and competes afterwards; what to keep is decided when room is needed. Training reads everything once per
epoch in random order: all units are equally good, so the best answer without hints is to keep what is in (a cache of C
over data D then hits C/D; whatever replaces a resident before its turn loses a certain hit). So a newcomer takes a
resident's place only with *clearly better evidence*, of two kinds:

* It comes back faster. T is a unit's mean interval between uses, in bytes used meanwhile. A newcomer whose T, measured
  over two intervals or more, is MARGIN times shorter than the resident's (or than the time the resident has been idle)
  wins. In random epochs two intervals in a row average at least D/2 and no resident idles for 2 D, so luck hardly ever
  makes a factor of 3.5. A single interval says nothing: the end of one epoch and the start of the next can be close.
* The resident is dead: idle for longer than DEAD_FACTOR times the longest interval that residents show. That is how a
  changed dataset is followed: the old one stops being used, and one and a third of its longest interval on it is dead.

Newcomers wait in a small *probation* queue (1 %); when room is needed its oldest meets the weakest of a few residents
(the *main* clock: a hand over the slots) and one of the two goes. What goes leaves its T and last use in the *ghost*, a
table of bounded size, so a unit that comes back finds its record again. Uses closer together than the probation queue
is long count once: a reader that takes a block in four pieces has used it once.

A bucket with a quota is a *pool* with its own probation, hand and longest interval, and gives up its own units when it
is above the quota. Otherwise pools compete. Time here is the *clock*: bytes used, in 1/4096 of capacity.

About 160 bytes a unit (`core/machines/slots.py`). Rejected: LRU and its kin (keep nothing of a random epoch), S3-FIFO
and CLOCK as they are (every second-time newcomer replaces a resident), TinyLFU's counting sketch (halving leaves
differences of two between equals, and collisions pass for evidence), random admission (hits C/D, never learns a hot
set). Measured against these: docs/design/0002-eviction.md.

Invariants. (1) Pinned and held units are never victims. (2) `victims` frees what is asked, or chooses `units_max`, or
says `stuck`. (3) Books balance: bytes per bucket, pool, in all equal sums over units. (4) Same events, same victims.
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
SAMPLE = 12  # residents looked at per contest
SAMPLE_DOOMED = 128  # and at once, where a larger share than one of SAMPLE must go
POOLS_MAX = 250

_PROBATION, _PINNED = 1, 2  # flags


def unit_of(object_id: int, block: int) -> int:
    """The unit of a block (0 for an inline object)."""
    return object_id << BLOCK_BITS | block


def split_unit(unit: int) -> tuple[int, int]:
    """(object id, block) of a unit."""
    return unit >> BLOCK_BITS, unit & (1 << BLOCK_BITS) - 1


class Evicted(NamedTuple):
    """What to drop. The machine has forgotten these units already: the caller must drop them from the store.

    `stuck`: less than asked, because all else is pinned or held. Pass reads through until something changes.
    """

    units: list[int]
    freed_bytes: int
    stuck: bool


class Eviction(Slots):
    """The cache policy of one node. Not thread-safe. A call takes a few microseconds, `victims` that per unit."""

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
        """How much may be kept: the high mark. Cheap; may be called whenever the disks' free space changes."""
        assert capacity_bytes >= 0
        self.capacity_bytes = self._open.limit_bytes = capacity_bytes
        self._burst_ticks = max(1, int(capacity_bytes * PROBATION_SHARE) // self._tick_bytes)

    def set_quota(self, bucket: str, quota_bytes: int | None) -> None:
        """Bound a bucket's share; None: no bound. Looks at every unit. `Invalid` when too many buckets have one."""
        bucket_id = self._bucket_id(bucket)
        pool = self._pool_of[bucket_id]
        if quota_bytes is not None and pool is not self._open:
            pool.limit_bytes = quota_bytes
        elif quota_bytes is not None:
            if len(self._pools) > POOLS_MAX:
                raise Invalid(f"{POOLS_MAX} buckets have a quota already: remove one first, or leave this one without")
            code = next(code for code in range(2, POOLS_MAX + 2) if code not in self._pools)
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
        """A unit (block, inline object) came into the store. Then look at `excess_bytes`. Its history is filed under
        `name` (0: the unit) when it leaves: units that come back have new numbers."""
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
        """A present unit was read. False if it is not known (evicted meanwhile): nothing happens then."""
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
        """A unit left the store by another way than `victims`. False if it is not known."""
        if (slot := self._slots.get(unit)) is not None:
            self._remove(slot)
        return slot is not None

    def pin(self, unit: int, pinned: bool = True) -> bool:
        """Never evict it until it is unpinned (`pinned` False). False if the unit is not known."""
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
        """Not while somebody is reading it from a flight: no victim until `release` was called as often. Any unit."""
        self._held[unit] += 1

    def release(self, unit: int) -> None:
        """Undo one `hold`."""
        self._held[unit] -= 1
        if not self._held[unit]:
            del self._held[unit]

    def restore(self, units: Iterable[tuple[int, int, str, int, bool]], newest: int) -> None:
        """After a start: (unit, size_bytes, bucket, used_minute, pinned) of what is in the store, in any order, and as
        often as is wanted; what landed since stays as it is. Only the minute of last use was kept: a day before the
        `newest` use counts as one capacity's worth of uses."""
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

    def bucket_bytes(self, bucket: str) -> int:
        """What units of this bucket take."""
        return self._bucket_bytes[self._bucket_ids[bucket]] if bucket in self._bucket_ids else 0

    @property
    def excess_bytes(self) -> int:
        """How much to ask of `victims` now: 0 below every high mark, else what brings all under their low marks."""
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
        """Choose units of at least `excess_bytes`, but at most so many, and forget them. Buckets above their quota give
        first. A unit for which `busy` says yes is passed over, as if it were held.
        """
        self._busy, self._units_max = busy, units_max
        units: list[int] = []
        freed = 0
        stuck = False
        for code in sorted(self._pools):
            pool = self._pools[code]
            if pool is not self._open and pool.used_bytes > pool.limit_bytes:
                freed += self._drain(pool, pool.used_bytes - int(pool.limit_bytes * LOW_MARK), units)
                stuck |= pool.used_bytes > pool.limit_bytes
        freed += self._drain(None, excess_bytes - freed, units)
        if (moved := self._shrink()) is not None:
            self._hand = moved(self._hand)
            for pool in self._pools.values():
                pool.hand = moved(pool.hand)
        return Evicted(units, freed, (stuck or freed < excess_bytes) and len(units) < units_max)

    # --- choosing ----------------------------------------------------------------------------------------------------
    def _drain(self, pool: Pool | None, need_bytes: int, units: list[int]) -> int:
        """Forget units of `pool` (None: of all) until `need_bytes` are free or nothing is left to choose."""
        freed = 0
        if len(self._ghost) < len(self._slots) * 3 // 2:
            self._ghost = Ghost(2 * len(self._slots))  # it forgets; that happens while a cache fills
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
        """As `_weakest`, where a large share must go: of many residents under the hand that share goes at once, the
        weakest of them, which is what going round and round would come to."""
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
        """The next residents under the hand, which goes on, and how long each will not be used, as far as is seen."""
        slots = self._after(self._code(pool), pool.hand if pool else self._hand, count)
        if slots and pool:
            pool.hand = slots[-1] + 1
        elif slots:
            self._hand = slots[-1] + 1
        now, last, means = self._now, self._last, self._means
        return slots, [mean if (mean := means[slot]) > (idle := now - last[slot]) else idle for slot in slots]

    def _code(self, pool: Pool | None) -> int:
        """The state of residents of a pool (None: of any), where that is one; else ANY."""
        return pool.code if pool else 1 if len(self._pools) == 1 else ANY

    def _in_use(self, unit: int) -> bool:
        return unit in self._held or (self._busy is not None and self._busy(unit))

    def _any_resident(self, pool: Pool | None) -> int:
        """Some resident that is not held, looking at all."""
        hand, code = 0, self._code(pool)
        while (slot := self._next(code, hand)) >= hand and self._in_use(self._units[slot]):
            hand = slot + 1
        return slot if slot >= hand else -1

    def _oldest(self, pool: Pool) -> int:
        """The slot at the head of probation, skipping held ones (they go to the back); -1 if there is none."""
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
        """The unit's slot if it is in this pool's probation (a place in the queue may be outdated), else -1."""
        slot = self._slots.get(unit, -1)
        if slot >= 0 and self._flags[slot] & _PROBATION and self._pool_of[self._buckets[slot]] is pool:
            return slot
        return -1

    # --- books -------------------------------------------------------------------------------------------------------
    def _use(self, size_bytes: int) -> None:
        """Move the clock by a use of so many bytes."""
        carry = self._carry_bytes + size_bytes
        if carry >= self._tick_bytes:
            self._now += carry // self._tick_bytes
            carry %= self._tick_bytes
            if self._now >> 31:
                self._rebase()
        self._carry_bytes = carry

    def _rebase(self) -> None:
        """Keep the clock within 32 bits: half a million capacities from now, once."""
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
        """Whether a unit may become a resident without another leaving."""
        share = LOW_MARK - PROBATION_SHARE
        if pool.main_bytes + size_bytes > pool.limit_bytes * share:
            return False
        main_bytes = sum(each.main_bytes for each in self._pools.values())
        return main_bytes + size_bytes <= self.capacity_bytes * share

    def _promote(self, slot: int) -> None:
        """From probation to the residents. Its place in the queue is dropped when it is met."""
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
        """Drop places in the probation queue whose units are elsewhere."""
        pool.probation = deque(unit for unit in dict.fromkeys(pool.probation) if self._waiting(unit, pool) >= 0)

    def check(self) -> None:
        """Assert the books against a count from nothing. Slow: for tests and the simulator."""
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
