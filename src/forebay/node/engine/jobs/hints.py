"""Hints at work: fetches blocks ahead of the jobs that told of them, and evicts first what they need last.

Theory. The machine (`core/machines/hints.py`) knows numbered blocks of a listing; here they are objects. A job's
listing is loaded with its first call. Blocks that are here, or arrive, are reported to the machine by the key's number
in it. `Room` asks `Hinting` whether what landed has hints, and reports what left; eviction then follows the hints
(`core/machines/hinted_eviction.py`).

Each job has a task that fetches its next missing blocks, through the same flights as any reader. It makes at most
FETCHES fetches at once, stays within WINDOW_BYTES (less in a small cache that is full), and fetches nothing that would
evict something needed sooner (`Room.stay`), or of which too little is read before it leaves again (`Hints.pays`). A
read of such a block asks `keeps`, and gets no more than its range. Every call of the job and the end of each fetch wake
it. A failed fetch is not repeated: the read of that block will report the error.

Hints live in memory only. After a restart of the engine a job's call gets `NoSuchHints`, and the job tells its future
again. Long calls run in steps of PIECE_ACCESSES, so that hits are served in between.

Invariants. (1) The machine knows a unit if and only if an eviction machine treats it as hinted, except pinned units.
(2) Whatever goes wrong here, reads go on as without hints.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid
from forebay.core.formats.listing import Listing
from forebay.core.machines.eviction import unit_of
from forebay.core.machines.foreseen import Stay
from forebay.core.machines.foretold import Dataset
from forebay.core.machines.hints import (
    JOBS_MAX,
    OVERFETCH_MAX,
    TRIPLE_BYTES,
    Hints,
    HintsAtCall,
    HintsCall,
    HintsNamed,
    HintsState,
    Wanted,
    check_job_name,
)
from forebay.core.messages.calls import Nothing
from forebay.core.record import present_blocks
from forebay.core.types import RangeSpec
from forebay.node.engine.counts import Tally
from forebay.node.engine.jobs.prefetch import prefetched
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.listings import Listings
from forebay.node.engine.read.one_read import Ask
from forebay.node.store.reader import StoreReader
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.hinting")

FETCHES = 32  # half of what a bucket may have: readers who wait come first
JOBS_OF_ONE_MAX = JOBS_MAX * 3 // 4  # of one identity: nobody takes all
USES_OF_ONE_MAX = 8 * limits.HINT_ACCESSES_MAX  # 800 MB
FLYING_BYTES_MAX = 256 * limits.MIB
WINDOW_BYTES = 512 * limits.MIB  # half a second of a fast job, and 25 round trips of 20 ms
WINDOW_SHARE = 0.03  # of a full cache: what waits for its use takes the place of what would be kept
PIECE_ACCESSES = 4096
ATTACH_OBJECTS = 500
TEND_S = 10.0
LISTED_LOOKS, LISTED_S = 50, 0.002


class Space(Protocol):
    """What hinting needs of `node/engine/evictions.py`."""

    async def learned(self) -> None: ...

    def hint(self, unit: int) -> bool: ...

    def unhint(self, units: list[int]) -> None: ...

    def moved(self, units: list[int]) -> None: ...

    def all_moved(self) -> None: ...

    def stay(self, bucket: str, key: str, block: int, size_bytes: int) -> Stay: ...

    def window_bytes(self, share: float) -> int: ...


class _Source(NamedTuple):
    """A listing that jobs gave hints for."""

    listing: Listing
    dataset: Dataset


class _Plan:
    """The work for one job."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.wake = asyncio.Event()
        self.flying: set[asyncio.Task[None]] = set()
        self.flying_bytes = 0
        self.tasks: list[asyncio.Task[None]] = []


def _name(call: HintsCall | HintsAtCall | HintsNamed) -> str:
    """What a job is called here: two identities may use one name. The last '/' is ours, since a job's name has none."""
    check_job_name(call.job)
    return f"{call.identity}/{call.job}" if call.identity else call.job


class Hinting:
    """See the module's header."""

    def __init__(
        self,
        listings: Listings,
        cold: ColdReads,
        room: Space,
        index: StoreReader,
        hints: Hints,
        tally: Tally,
        clock: Clock,
        workers: Executor,
    ) -> None:
        self._listings, self._cold, self._room, self._index = listings, cold, room, index
        self._tally, self._clock, self._workers = tally, clock, workers
        self.hints = hints
        self._plans: dict[str, _Plan] = {}
        self._sources: dict[tuple[str, str, str], _Source] = {}
        self._by_bucket: dict[str, list[_Source]] = {}
        self._numbers = 0
        self._telling = asyncio.Lock()
        self._flying: dict[tuple[str, str], int] = {}  # objects with fetches ahead under way
        self._fetched: set[int] = set()  # units fetched ahead and not used yet

    # --- what jobs say -----------------------------------------------------------------------------------------------
    async def tell(self, call: HintsCall) -> HintsState:
        """Take a job's future from an access on. `NotFound` (`NoSuchListing`) when its listing is no longer here."""
        name = _name(call)
        if call.use_bytes < 0:
            raise Invalid(f"use_bytes is {call.use_bytes}: say how many bytes of a block are read, or 0 for all")
        if len(call.accesses) % TRIPLE_BYTES:
            raise Invalid("the accesses are not whole triples of u32: object, first block, end block")
        accesses = array("I", call.accesses)
        async with self._telling:
            now_s = self._clock.monotonic_s()
            self._check_room(name, sum(accesses[2::3]) - sum(accesses[1::3]))
            plan = self._plans.get(name)
            if plan is None or plan.source.listing.id != call.listing or plan.source.listing.prefix != call.prefix:
                plan = await self._begin(name, call)
            again = False
            for at in range(0, len(accesses) or 1, 3 * PIECE_ACCESSES):
                piece = accesses[at : at + 3 * PIECE_ACCESSES]
                again |= self.hints.extend(name, call.start + at // 3, piece, now_s, call.use_bytes)
                await asyncio.sleep(0)
            if again:
                self._room.all_moved()
        plan.wake.set()
        return self._state(name)

    async def at(self, call: HintsAtCall) -> HintsState:
        """A job consumed the accesses before a position. `NotFound` (`NoSuchHints`): it must tell its future again."""
        name = _name(call)
        self._room.moved(self.hints.at(name, call.position, self._clock.monotonic_s()))
        self._plans[name].wake.set()
        return self._state(name)

    async def close(self, named: HintsNamed) -> Nothing:
        """A job is over. It is no error if the job is unknown."""
        self._close(_name(named))
        return Nothing()

    async def state(self, named: HintsNamed) -> HintsState:
        """A job's progress. `NotFound` (`NoSuchHints`)."""
        return self._state(_name(named))

    def _state(self, name: str) -> HintsState:
        said = self.hints.job(name)
        listing = self._plans[name].source.listing
        return HintsState(
            name.rpartition("/")[2], listing.bucket, listing.prefix, listing.id, said.position, said.known, said.ahead
        )

    def _check_room(self, name: str, uses: int) -> None:
        """`Invalid` if whoever tells so many uses would have too many jobs, or fill the engine's memory."""
        others = [one for one in self._plans if one.rpartition("/")[0] == name.rpartition("/")[0] and one != name]
        if len(others) >= JOBS_OF_ONE_MAX:
            raise Invalid(
                f"{JOBS_OF_ONE_MAX} of your jobs give hints already: end one (DELETE /-/v1/hints/JOB), or go on without"
            )
        if uses + sum(map(self.hints.uses_ahead, others)) > USES_OF_ONE_MAX:
            raise Invalid(f"your jobs know more than {USES_OF_ONE_MAX} uses ahead: tell less of the future, or end one")

    async def _begin(self, name: str, call: HintsCall) -> _Plan:
        place = (call.bucket, call.prefix, call.listing)
        source = self._sources.get(place)
        if source is None:
            listing = await self._listings.load(*place)
            loop = asyncio.get_running_loop()
            self._numbers += 1
            dataset = await loop.run_in_executor(self._workers, Dataset, self._numbers, listing.sizes)
            source = _Source(listing, dataset)
        freed = self.hints.begin(name, source.dataset, call.start, self._clock.monotonic_s())
        self._stop(name)
        plan = self._plans[name] = _Plan(source)
        if place not in self._sources:
            self._sources[place] = source
            self._by_bucket.setdefault(call.bucket, []).append(source)
        self._room.unhint(freed)
        self._forget_sources()
        log.info("job %s gives hints of %d objects of %s/%s", name, len(source.listing), call.bucket, call.prefix)
        plan.tasks = [asyncio.create_task(self._attach(source)), asyncio.create_task(self._fetch_ahead(name, plan))]
        return plan

    def _close(self, job: str) -> None:
        self._room.unhint(self.hints.close(job))
        self._stop(job)
        self._forget_sources()

    def _stop(self, job: str) -> None:
        plan = self._plans.pop(job, None)
        if plan is not None:
            for task in [*plan.tasks, *plan.flying]:
                task.cancel()

    def _forget_sources(self) -> None:
        for name, source in list(self._sources.items()):
            if not source.dataset.jobs:
                del self._sources[name]
                self._by_bucket[name[0]].remove(source)

    # --- what is here ------------------------------------------------------------------------------------------------
    def landed(self, bucket: str, key: str, unit: int, block: int, size_bytes: int) -> bool:
        """A unit landed; returns whether a job has it in its listing."""
        known = False
        for source in self._by_bucket.get(bucket, ()):
            known |= self._landed(source, key, unit, block)
        if known and (bucket, key) in self._flying:
            self._fetched.add(unit)
            self._tally.hinted_bytes += size_bytes
        return known

    def _landed(self, source: _Source, key: str, unit: int, block: int) -> bool:
        number = source.listing.find(key)
        place = -1 if number is None else source.dataset.block(number, block)
        if place >= 0:
            self.hints.landed(unit, source.dataset, place)
        return place >= 0

    def covers(self, bucket: str, key: str) -> bool:
        """Whether a job has the object in its listing."""
        return any(source.listing.find(key) is not None for source in self._by_bucket.get(bucket, ()))

    def keeps(self, bucket: str, key: str, blocks: list[int], wanted_bytes: int) -> bool:
        """Whether to fetch these blocks of an object whole, none of them here, for a read of `wanted_bytes` in them. Of
        an object without hints: yes."""
        pays, known = False, False
        for source in self._by_bucket.get(bucket, ()):
            number = source.listing.find(key)
            numbers = [] if number is None else [source.dataset.block(number, block) for block in blocks]
            if not numbers or min(numbers) < 0:
                continue
            known = True
            size_bytes = sum(map(source.dataset.size_of_number, numbers))
            if size_bytes <= wanted_bytes * OVERFETCH_MAX:
                return True
            stay = self._room.stay(bucket, key, blocks[0], size_bytes + self._cold.landing_bytes)
            pays |= self.hints.pays(source.dataset, numbers, stay, self._room.window_bytes(1.0))
        return pays or not known

    def read_apart(self, bucket: str, key: str, start: int, end: int) -> None:
        """These bytes of an object were fetched for a read alone."""
        for source in self._by_bucket.get(bucket, ()):
            number = source.listing.find(key)
            if number is None:
                continue
            for block in range(start // limits.BLOCK_BYTES, -(-end // limits.BLOCK_BYTES)):
                place = source.dataset.block(number, block)
                if place >= 0 and not source.dataset.units[place]:
                    begin = block * limits.BLOCK_BYTES
                    size_bytes = min(end, begin + limits.BLOCK_BYTES) - max(start, begin)
                    self.hints.read_apart(source.dataset, place, size_bytes)

    def gone(self, unit: int) -> None:
        """A unit left the store."""
        self.hints.gone(unit)
        self._fetched.discard(unit)

    def touched(self, object_id: int, first: int, end: int) -> None:
        """Blocks were read."""
        if self._fetched:
            for block in range(first, end):
                unit = unit_of(object_id, block)
                if unit in self._fetched:
                    self._fetched.discard(unit)
                    self._tally.hinted_hits += 1

    async def _attach(self, source: _Source) -> None:
        """Report to the machine which blocks of a listing are here already."""
        await self._room.learned()
        bucket, after = source.listing.bucket, ""
        while found := self._index.scan(bucket, source.listing.prefix, after, ATTACH_OBJECTS):
            for key, record in found:
                for block in present_blocks(record):
                    unit = unit_of(record.object_id, block)
                    if self._landed(source, key, unit, block) and not self._room.hint(unit):
                        self.hints.gone(unit)  # the unit left meanwhile
            after = found[-1][0]
            await asyncio.sleep(0)

    # --- fetching ahead ----------------------------------------------------------------------------------------------
    async def _fetch_ahead(self, job: str, plan: _Plan) -> None:
        await asyncio.wait(plan.tasks[:1])  # first learn what is here
        while True:
            plan.wake.clear()
            window_bytes = min(WINDOW_BYTES, self._room.window_bytes(WINDOW_SHARE))
            while len(plan.flying) < FETCHES and plan.flying_bytes < FLYING_BYTES_MAX:
                wanted = self.hints.wanted(job, window_bytes)
                if wanted is None:
                    if self.hints.is_ahead(job, window_bytes):
                        break
                    await asyncio.sleep(0)  # it scanned enough for one turn
                    continue
                key = plan.source.listing.key(wanted.object)
                size_bytes = wanted.size_bytes + max(plan.flying_bytes, self._cold.landing_bytes)
                stay = self._room.stay(plan.source.listing.bucket, key, wanted.first, size_bytes)
                holds_bytes = self._room.window_bytes(1.0)
                pays = self.hints.pays(plan.source.dataset, wanted.blocks, stay, holds_bytes)
                if stay.first <= wanted.due or not pays:
                    break
                self.hints.fetching(job, wanted)
                self._take_off(plan, key, wanted)
            await plan.wake.wait()

    def _take_off(self, plan: _Plan, key: str, wanted: Wanted) -> None:
        bucket = plan.source.listing.bucket
        task = asyncio.create_task(self._fetch(plan, key, wanted))
        plan.flying.add(task)
        plan.flying_bytes += wanted.size_bytes
        self._flying[bucket, key] = self._flying.get((bucket, key), 0) + 1

        def over(done: asyncio.Task[None]) -> None:
            plan.flying.discard(done)
            plan.flying_bytes -= wanted.size_bytes
            self._flying[bucket, key] -= 1
            if not self._flying[bucket, key]:
                del self._flying[bucket, key]
            plan.wake.set()
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("fetching ahead broke", exc_info=error)

        task.add_done_callback(over)

    async def _fetch(self, plan: _Plan, key: str, wanted: Wanted) -> None:
        size_bytes = plan.source.dataset.sizes[wanted.object]
        start, stop = wanted.first * limits.BLOCK_BYTES, min(wanted.end * limits.BLOCK_BYTES, size_bytes)
        whole = stop - start == size_bytes
        asked = None if whole else RangeSpec(start, stop - 1)
        try:
            await prefetched(self._cold, Ask(plan.source.listing.bucket, key, asked))
            for _ in range(LISTED_LOOKS):  # only listed blocks count as room, and bytes are announced earlier
                if plan.source.dataset.is_here(wanted.object, wanted.first, wanted.end):
                    break
                await asyncio.sleep(LISTED_S)
        except ForebayError as error:
            log.info("%s/%s is not fetched ahead: %s", plan.source.listing.bucket, key, error)

    # --- in the background -------------------------------------------------------------------------------------------
    async def tend(self) -> None:
        """Forget jobs that were silent for HINT_TTL_S."""
        while True:
            await asyncio.sleep(TEND_S)
            for job in self.hints.expired(self._clock.monotonic_s()):
                log.info("job %s has not been heard of for %.0f s: its hints are dropped", job, limits.HINT_TTL_S)
                self._close(job)

    async def aclose(self) -> None:
        """Stop fetching."""
        tasks = [task for plan in self._plans.values() for task in (*plan.tasks, *plan.flying)]
        for job in list(self._plans):
            self._stop(job)
        await asyncio.gather(*tasks, return_exceptions=True)
