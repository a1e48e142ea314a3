"""Room on the volumes: which blocks leave, and how they leave without readers noticing.

Theory. Each volume has its own eviction machine (`core/machines/eviction.py`), because placement fixes a key's volume:
room on one disk does not help another. The machine hears what landed and what was used. When a volume is above its
mark, its victims are dropped from the index at once, the index is flushed, fronts are told to close the files, and a
worker thread frees the space. A file that a front still reads is freed later.

Room is made in the same turn of the loop in which a block exceeded the mark, so a capacity is used up to the last
block. When much must leave at once (a quota was cut), it leaves BATCH_UNITS a turn, and reads go on in between.

On a filesystem that others fill too, the mark keeps a distance (`disk/usage.py`), since free space is checked only from
time to time. Units are weighed by the space they take: a small object by its pages of the index.

The store never reuses object ids, so a unit that comes back has a new one. Its history in the machine's ghost is
therefore kept under a number made from bucket, key and block.

In a cluster, copies of what other nodes are the home of leave first (`core/machines/copies.py`). When the map changes,
and after a start, all units are told anew whether they are copies, a batch a turn.

If jobs give hints, `foresight` hears of all that lands and leaves, and the blocks needed last go first
(`core/machines/hinted_eviction.py`).

Invariants. (1) A unit that the machine forgot is dropped from the store in the same turn of the loop. (2) One reclaim
at a time for each volume. (3) A block that a flight needs is not a victim.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Protocol

import xxhash

from forebay.core import limits
from forebay.core.machines.eviction import split_unit, unit_of
from forebay.core.machines.foreseen import Stay
from forebay.core.machines.hinted_eviction import HintedEviction
from forebay.core.machines.hints import Hints
from forebay.core.record import OWNED, PINNED, Record, present_blocks
from forebay.core.types import Bucket
from forebay.core.versions import whose_versions
from forebay.node.engine.counts import Tally
from forebay.node.store.disk.usage import taken_bytes
from forebay.node.store.disk.volume import Unit, Volume
from forebay.node.store.writer.writer import Store
from forebay.ports.machine import release_memory

log = logging.getLogger("forebay.room")

_KEPT = PINNED | OWNED
RECLAIM_AGAIN_S = 0.5  # for files that a reader still holds
BATCH_BYTES = 64 * limits.MIB  # dropped in one turn of the loop: 16 blocks
TRIM_UNITS = 100_000  # after this many units left, memory is given back
BATCH_UNITS = 256  # units per turn, a few milliseconds' work: then other work has a turn
FLUSH_UNITS = 1024  # units committed together when more must leave


def ghost_name(bucket: str, key: str, block: int) -> int:
    """The number under which a block's history is kept, whatever its object id."""
    return xxhash.xxh3_64_intdigest(f"{bucket}/{key}\0{block}".encode())


class Foresight(Protocol):
    """Knows which units have hints (`node/engine/jobs/hints.py`)."""

    def landed(self, bucket: str, key: str, unit: int, block: int, size_bytes: int) -> bool: ...

    def gone(self, unit: int) -> None: ...

    def touched(self, object_id: int, first: int, end: int) -> None: ...


class OtherHomes(Protocol):
    """Knows which keys are at home on other nodes (`node/engine/peers.py`)."""

    @property
    def map_epoch(self) -> int: ...

    def is_at_another(self, bucket: str, key: str, position: int) -> bool: ...


class _Alone:
    """There is no other node."""

    map_epoch = 0

    def is_at_another(self, bucket: str, key: str, position: int) -> bool:
        return False


class _Blind:
    """Nobody gives hints."""

    def landed(self, bucket: str, key: str, unit: int, block: int, size_bytes: int) -> bool:
        return False

    def gone(self, unit: int) -> None: ...

    def touched(self, object_id: int, first: int, end: int) -> None: ...


class Room:
    """See the module's header. `busy`: whether a flight needs a block. `evicted` hears what left the store, `held` of
    objects whose files somebody still has open. `hints` knows when units are due, `foresight` (set it) which have
    hints, and `other_homes` (set it in a cluster) which are copies."""

    def __init__(
        self,
        store: Store,
        tally: Tally,
        workers: Executor,
        *,
        busy: Callable[[int, int], bool],
        evicted: Callable[[int, list[int]], None],
        flush: Callable[[], None],
        held: Callable[[list[int]], None],
        hints: Hints,
    ) -> None:
        self._store = store
        self._tally = tally
        self._workers = workers
        self._busy = busy
        self._evicted = evicted
        self._flush = flush
        self._held = held
        self._hints = hints
        self.foresight: Foresight = _Blind()
        self.other_homes: OtherHomes = _Alone()
        self._placed_epoch = 0  # of the map by which units were told whether they are copies
        self._placing: asyncio.Task[None] | None = None
        self._machines: dict[str, HintedEviction] = {}
        self._quotas: dict[str, int | None] = {}
        self._reclaiming: dict[str, asyncio.Task[None]] = {}  # by volume
        self._making: asyncio.Handle | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._newest = 0
        self._unflushed = 0  # units that left since the last commit
        self._left = 0  # and since memory was given back

    # --- settings ----------------------------------------------------------------------------------------------------
    def restore(self, buckets: Iterable[Bucket], whole: Callable[[], Awaitable[None]]) -> None:
        """After a start, learn in the background what the store holds, once it is `whole`. Until then unknown units are
        no victims; they count for their volume, but not for their bucket's quota."""
        self._newest = self._store.newest_minute()
        for usage in self._store.usage():
            if usage.state != "out":
                machine = self._machines[usage.volume_id] = HintedEviction(usage.keep_bytes, self._hints)
                machine.restore((), self._newest)
        self.set_quotas(buckets)
        self._restoring = asyncio.create_task(self._restore(whole))

    async def _restore(self, whole: Callable[[], Awaitable[None]]) -> None:
        try:
            await whole()
            await self._learn()
            self._restoring = None
            self.follow_volumes()
        except Exception:
            log.exception("could not read what the volumes hold: unknown objects are not evicted until a restart")

    async def _learn(self) -> None:
        for volume_id, units in self._store.unit_batches():
            machine = self._machines.get(volume_id)
            if machine is not None:
                machine.restore(_restorable(units), self._newest)
            self._follow()
            await asyncio.sleep(0)

    async def learned(self) -> None:
        """Return when everything that the store held at the start is known."""
        if self._restoring is not None:
            await asyncio.wait([self._restoring])

    def set_quotas(self, buckets: Iterable[Bucket]) -> None:
        """Bound buckets' bytes; each volume takes its part of a quota by capacity."""
        for bucket in buckets:
            self._quotas[bucket.name] = bucket.quota_bytes
        marks = {volume_id: machine.capacity_bytes for volume_id, machine in self._machines.items()}
        total = sum(marks.values()) or 1
        for name, quota_bytes in self._quotas.items():
            for volume_id, machine in self._machines.items():
                machine.set_quota(name, None if quota_bytes is None else quota_bytes * marks[volume_id] // total)
        self.make_room()

    def follow_volumes(self) -> None:
        """Every few seconds: the disks' free space changes, volumes go out, and the map changes."""
        self._follow()
        self.make_room()
        epoch = self.other_homes.map_epoch
        if epoch not in (0, self._placed_epoch) and self._restoring is None and self._placing is None:
            self._placing = asyncio.create_task(self._place(epoch))

    async def _place(self, epoch: int) -> None:
        """Tell the machines of all units whether they are copies, by the map of this epoch."""
        try:
            for volume_id, units in self._store.unit_batches(marked=False):  # a mark would wait for a stalled disk
                if (machine := self._machines.get(volume_id)) is not None:
                    for bucket, key, object_id, block, *_ in units:
                        machine.place(unit_of(object_id, block), self._is_copy(bucket, key, block))
                await asyncio.sleep(0)
            self._placed_epoch = epoch
        except Exception:
            log.exception("could not tell which units are copies; it is tried again")
        finally:
            self._placing = None

    def _is_copy(self, bucket: str, key: str, block: int) -> bool:
        return self.other_homes.is_at_another(bucket, key, block * limits.BLOCK_BYTES)

    def _follow(self) -> None:
        usages = {usage.volume_id: usage for usage in self._store.usage() if usage.state != "out"}
        for volume_id in list(self._machines):
            if volume_id not in usages:
                for unit in self._machines.pop(volume_id).units():
                    self.foresight.gone(unit)
        for volume_id, usage in usages.items():
            machine = self._machines.get(volume_id)
            if machine is not None:
                unknown_bytes = 0 if self._restoring is None else max(0, usage.weighed_bytes - machine.used_bytes)
                machine.set_capacity(max(0, usage.keep_bytes - unknown_bytes))

    # --- what reads tell ---------------------------------------------------------------------------------------------
    def landed(
        self, volume_id: str, unit: tuple[int, int], size_bytes: int, bucket: str, key: str, pinned: bool
    ) -> None:
        """A block (or, as block 0, an inline object) was listed in the store; `unit` is (object id, block)."""
        machine = self._machines.get(volume_id)
        if machine is None:
            return
        number = unit_of(*unit)
        name, copy = ghost_name(bucket, key, unit[1]), self._is_copy(bucket, key, unit[1])
        machine.landed(number, size_bytes, whose_versions(bucket) or bucket, name, copy)
        if pinned:
            machine.pin(number)
        if self.foresight.landed(bucket, key, number, unit[1], size_bytes):
            machine.hint(number)
        if machine.excess_bytes:
            self._make_room()

    def wrote(self, bucket: str, key: str, record: Record) -> None:
        """The store has this whole object from a writer. Owned blocks count, but are no victims until `settled`."""
        machine = self._machines.get(self._store.volume_of(bucket, key))
        if machine is None:
            return
        keep = bool(record.state & _KEPT)
        for block, size_bytes in _units_of(record):
            unit = unit_of(record.object_id, block)
            name = ghost_name(bucket, key, block)
            machine.landed(unit, size_bytes, bucket, name, self._is_copy(bucket, key, block))
            if keep:
                machine.pin(unit)
            if self.foresight.landed(bucket, key, unit, block, size_bytes):
                machine.hint(unit)
        if machine.excess_bytes:
            self.make_room()

    def settled(self, record: Record) -> None:
        """The backend has the object now: it may be evicted."""
        if not record.state & _KEPT:
            self.pin(record.object_id, [block for block, _ in _units_of(record)], False)
            self.make_room()

    def touched(self, object_id: int, first: int, end: int) -> None:
        """Blocks were read."""
        for machine in self._machines.values():
            machine.touched_blocks(object_id, first, end)
        self.foresight.touched(object_id, first, end)

    def removed(self, object_id: int, blocks: list[int]) -> None:
        """Blocks left the store other than by eviction."""
        for machine in self._machines.values():
            for block in blocks:
                machine.removed(unit_of(object_id, block))
        for block in blocks:
            self.foresight.gone(unit_of(object_id, block))

    def pin(self, object_id: int, blocks: list[int], pinned: bool) -> None:
        """Never evict these blocks, or (`pinned` False) allow it again."""
        for machine in self._machines.values():
            for block in blocks:
                unit = unit_of(object_id, block)
                if machine.pin(unit, pinned) and not pinned and self._hints.knows(unit):
                    machine.hint(unit)

    # --- hints -------------------------------------------------------------------------------------------------------
    def hint(self, unit: int) -> bool:
        """The unit's due time is known. False if the unit is not here."""
        for machine in self._machines.values():
            if unit in machine:
                machine.hint(unit)
                return True
        return False

    def unhint(self, units: list[int]) -> None:
        """The units' due times are no longer known."""
        for machine in self._machines.values():
            for unit in units:
                machine.unhint(unit)

    def moved(self, units: list[int]) -> None:
        """The units are due later than before."""
        for machine in self._machines.values():
            for unit in units:
                machine.moved(unit)

    def all_moved(self) -> None:
        """Jobs changed their future."""
        for machine in self._machines.values():
            machine.all_moved()

    def stay(self, bucket: str, key: str, block: int, size_bytes: int) -> Stay:
        """How long `size_bytes` of an object, from that block on, would stay if they came now."""
        machine = self._machines.get(self._store.volume_of(bucket, key))
        if machine is None:
            return Stay(0.0, True)
        return machine.stay(bucket, size_bytes, self._is_copy(bucket, key, block))

    def window_bytes(self, share: float) -> int:
        """How far ahead to fetch: the free bytes, or this share of the capacity if that is more."""
        machines = self._machines.values()
        free_bytes = sum(max(0, machine.capacity_bytes - machine.used_bytes) for machine in machines)
        return max(free_bytes, int(sum(machine.capacity_bytes for machine in machines) * share))

    # --- making room -------------------------------------------------------------------------------------------------
    def make_room(self) -> None:
        """Evict what is above the marks, in the next turn of the loop."""
        if self._making is None:
            self._making = asyncio.get_running_loop().call_soon(self._make_room)

    def _make_room(self) -> None:
        if self._making is not None:
            self._making.cancel()  # called directly by a landing before the scheduled call
            self._making = None
        loop = asyncio.get_running_loop()
        began_s, again, dropped_bytes = loop.time(), False, 0
        for machine in self._machines.values():
            excess_bytes = machine.excess_bytes
            if not excess_bytes:
                continue
            chosen = machine.victims(min(excess_bytes, BATCH_BYTES), self._is_busy, units_max=BATCH_UNITS)
            for unit in chosen.units:
                self.foresight.gone(unit)
            self._unflushed += len(chosen.units)
            self._left += len(chosen.units)
            self._take_out([split_unit(unit) for unit in chosen.units])
            self._tally.evictions["capacity"] += len(chosen.units) - machine.by_hint
            self._tally.evictions["hint"] += machine.by_hint
            self._tally.evicted_bytes += chosen.freed_bytes
            dropped_bytes += chosen.freed_bytes
            again |= not chosen.stuck and machine.excess_bytes > 0
        if self._unflushed and (self._unflushed >= FLUSH_UNITS or dropped_bytes >= BATCH_BYTES or not again):
            self._unflushed = 0
            self._flush()
            self.reclaim()
        if again:  # give the same time to other work first
            self._making = loop.call_later(loop.time() - began_s, self._make_room)
        elif self._left >= TRIM_UNITS:
            self._left = 0
            self._workers.submit(release_memory)

    def _is_busy(self, unit: int) -> bool:
        return self._busy(*split_unit(unit))

    def drop(self, units: list[tuple[int, int]]) -> None:
        """Take (object id, block) pairs out of the store. The machines have forgotten them, or hear of them by
        `removed`."""
        if units:
            self._take_out(units)
            self._flush()
            self.reclaim()

    def _take_out(self, units: list[tuple[int, int]]) -> None:
        self._store.drop_units(units)
        blocks: dict[int, list[int]] = {}
        for object_id, block in units:
            blocks.setdefault(object_id, []).append(block)
        for object_id, gone in blocks.items():
            self._evicted(object_id, gone)

    def reclaim(self) -> None:
        """Free the space of dropped blocks, in the background."""
        for volume in self._store.to_reclaim():
            if volume.id not in self._reclaiming:
                self._reclaiming[volume.id] = asyncio.create_task(self._reclaim(volume))

    async def _reclaim(self, volume: Volume) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                done = await loop.run_in_executor(volume.desk.bearers, self._store.reclaim, volume)
                if done.deferred:
                    self._held(done.deferred)  # a front may have opened it again since the drop, and be done with it
                    await asyncio.sleep(RECLAIM_AGAIN_S)
                elif not done.freed_bytes:
                    return
        finally:
            del self._reclaiming[volume.id]

    async def aclose(self) -> None:
        """Stop working in the background."""
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        if self._making is not None:
            self._making.cancel()
        working = [*self._reclaiming.values(), *([self._placing] if self._placing is not None else [])]
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


def _units_of(record: Record) -> Iterator[tuple[int, int]]:
    """(block, bytes it takes) of every block that is here."""
    if record.inline is not None:
        yield 0, taken_bytes(record)
        return
    size_bytes, block_bytes = record.size_bytes, record.block_bytes
    for block in present_blocks(record):
        yield block, min(block_bytes, size_bytes - block * block_bytes)


def _restorable(units: list[Unit]) -> Iterable[tuple[int, int, str, int, bool]]:
    for unit in units:
        pinned = bool(unit.state & _KEPT)
        bucket = whose_versions(unit.bucket) or unit.bucket  # versions count for their bucket's quota
        yield unit_of(unit.object_id, unit.block), unit.size_bytes, bucket, unit.used_minute, pinned
