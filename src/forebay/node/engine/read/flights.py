"""Flights at work: the shell of `core/machines/flight.py`, which fetches, writes and tells.

Theory. A `Flight` performs the machine's effects. A run is a task that streams one ranged request into the sink, block
by block. A check re-reads a block in a worker thread. Landed bytes are announced to readers as segments of files. The
machine decides everything that a second reader, a failure or a slow client could change.

Progress is batched: the machine hears of it at most every TELL_EVERY_S, and at once if it heard nothing for that long.
So a fast backend does not cost a message for each packet. The very first bytes are announced before they are written,
and travel in the message itself.

A reader that failed, or reads on elsewhere, keeps its place until it leaves (`core/machines/flight.py`). Until then it
may take the bytes it was told of from the file or memory, whatever became of the flight.

A *private* flight serves one reader from memory (see `node/engine/read/sink.py`), and other readers cannot find it. Its
run begins when there is memory for its first unit, and ends where memory ends. The machine begins another run there. No
byte outside the reader's range (`span`) is fetched for it.

Invariants. (1) Every `Fetch` effect is answered by one of Ended, GaveUp, Failed, whatever happens in the task. (2) A
block is reported kept only after the store listed it. (3) When the machine is idle the sink is closed, and the flight
is out of the books, in the same turn of the loop. (4) The sink stays open until every reader has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from forebay.backends.seam import Backend, Fetch
from forebay.core import limits
from forebay.core.errors import Bug, Corrupt, ErrorOnWire, ForebayError, NotFound, Precondition, Unavailable
from forebay.core.machines import flight as machine
from forebay.core.machines import flight_events as events
from forebay.core.machines.shares import Need
from forebay.core.ranges import Run, bitmap_full, bitmap_with, iterate_present
from forebay.core.record import Record, blocks_in
from forebay.core.types import ObjectInfo, RangeSpec
from forebay.node.engine.read.permits import Claim, Permits
from forebay.node.engine.read.sink import (
    PASS_WINDOW_BYTES,
    BlockHashes,
    DiskSink,
    DiskTrouble,
    Gathering,
    MemorySink,
    Sink,
)
from forebay.node.store.disk.compared_blocks import Compared
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.flights")

TELL_EVERY_S = 0.002  # 400 KiB at 200 MB/s: a message costs a few µs, a reader's wake-up more


class Reader(Protocol):
    """A front's read, or a job's. Called from the engine's loop; must not block."""

    def landed(self, start: int, end: int, path: str, offset: int, body: bytes | None) -> None:
        """Bytes [start, end) of the object may be read from `path` at `offset`, or are `body`. Contiguous."""
        ...

    def finished(self) -> None:
        """The last byte has been announced."""
        ...

    def failed(self, error: ErrorOnWire) -> None:
        """Nothing more will come. Announced bytes can be read until the reader leaves."""
        ...

    def withdrawn(self) -> None:
        """Announced bytes that were not taken are wrong, and nothing more will come."""
        ...


class Surroundings(Protocol):
    """What a flight needs of the engine."""

    store: Store
    clock: Clock
    workers: Executor
    compared: Compared

    def permits(self, bucket: str) -> Permits:
        """The bucket's permits; each of its requests holds one."""
        ...

    def block_kept(self, flight: Flight, block: int) -> None:
        """The store listed a block."""
        ...

    def flight_over(self, flight: Flight) -> None:
        """The flight is idle and closed."""
        ...

    def flight_gone(self, flight: Flight) -> None:
        """The backend has another version now."""
        ...

    def disk_trouble(self, flight: Flight, error: DiskTrouble) -> None:
        """The disk takes no more bytes: move the readers to private flights."""
        ...

    def blocks_bad(self, flight: Flight, blocks: list[int]) -> None:
        """Blocks on disk did not match their checksums and were dropped."""
        ...


class Flight:
    """The reads of one object version. `ColdReads` makes it; it ends when nobody reads and nothing is on its way."""

    def __init__(
        self,
        around: Surroundings,
        bucket: str,
        backend: Backend,
        info: ObjectInfo,
        sink: Sink,
        *,
        checked_s: float,
        record: Record | None = None,
        adopted: tuple[Fetch, Run] | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        """`span`: the bytes that the reader of a private flight asks for."""
        self.bucket = bucket
        self.backend = backend
        self.info = info
        self.sink = sink
        self.record = record
        self.checked_s = checked_s
        self.private = isinstance(sink, MemorySink)
        assert (span is not None) == self.private
        self._span = span or (0, info.size_bytes)
        self.object_id = sink.landing.object_id if isinstance(sink, DiskSink) else record.object_id if record else 0
        self.gone = False
        self.closed = False
        self._holds = False  # whether `store.held` keeps holes out of its file
        self._around = around
        self._readers: dict[int, Reader] = {}
        self._next_reader = 1
        self._tasks: dict[int, asyncio.Task[events.Event]] = {}
        self._claims: dict[int, Claim] = {}  # of runs that wait for a permit
        # By block of the store; one may be several of the machine's.
        self._checked: dict[int, asyncio.Task[bool]] = {}
        self._checks: set[asyncio.Task[Any]] = set()  # also the tasks that close unread bodies
        self._ends: dict[int, int] = {}  # run -> block to stop before
        self._events: deque[events.Event] = deque()
        self._stepping = False
        self._untold: dict[int, int] = {}  # run -> position landed, not yet told to the machine
        self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # In memory the machine's blocks are smaller: memory is claimed and freed by the unit.
        self._units = limits.BLOCK_BYTES // limits.PASS_UNIT_BYTES if self.private else 1  # of a block of the store
        present, doubted = self._known_blocks(record)
        first = adopted and self._asked_of(self._in_units(range(adopted[1].first, adopted[1].end)))
        self.machine = machine.Flight(
            info.size_bytes,
            present if not self.private else bitmap_with(b"", self._in_units(iterate_present(present))),
            doubted=set(self._in_units(doubted)),
            adopted=Run(first[0], first[-1] + 1) if first else None,
            block_bytes=limits.BLOCK_BYTES // self._units,
            window_bytes=PASS_WINDOW_BYTES if self.private else limits.READ_WINDOW_BYTES,
            run_blocks_max=self._units if self.private else machine.RUN_BLOCKS_MAX,
        )
        if adopted and first:
            self._start_run(0, first[0], first[-1] + 1, adopted[0])

    def _in_units(self, blocks: Iterable[int]) -> list[int]:
        """The machine's numbers for these blocks of the store."""
        end = -(-self.info.size_bytes * self._units // limits.BLOCK_BYTES)
        return [u for block in blocks for u in range(block * self._units, min((block + 1) * self._units, end))]

    def _asked_of(self, units: list[int]) -> list[int]:
        """Those of these units that have bytes of the span."""
        unit_bytes, (start, end) = limits.BLOCK_BYTES // self._units, self._span
        return [unit for unit in units if unit * unit_bytes < end and start < (unit + 1) * unit_bytes]

    def _known_blocks(self, record: Record | None) -> tuple[bytes, set[int]]:
        if record is None:
            return b"", set()
        present = bitmap_full(blocks_in(record.size_bytes)) if record.complete else record.present
        blocks, compared = list(iterate_present(present)), self._around.compared
        doubted = set(self._around.store.doubtful(record, blocks))
        if not compared.whole(record.object_id):
            doubted.update(block for block in blocks if not compared.has(record.object_id, block, block + 1))
        return present, doubted

    # --- readers -----------------------------------------------------------------------------------------------------
    def join(self, reader: Reader, start: int, end: int, ahead_to: int = 0) -> int:
        """Serve bytes [start, end) to `reader`. Returns its number, for `took` and `leave`."""
        assert not self.closed
        number, self._next_reader = self._next_reader, self._next_reader + 1
        self._readers[number] = reader
        self._step(events.Join(number, start, end, ahead_to))
        return number

    def took(self, number: int, position: int) -> None:
        """The reader's client has taken every byte below `position`."""
        if number in self._readers and not self.closed:
            self._step(events.Took(number, position))

    def leave(self, number: int) -> None:
        """The reader is done, or its client is gone."""
        if self._readers.pop(number, None) is None:
            return
        if not self.closed:
            self._step(events.Leave(number))
        elif not self._readers:
            self._let_go()

    def needs(self, block: int) -> bool:
        """Whether the block must not be evicted now."""
        return any(self.machine.needs(unit) for unit in self._in_units([block]))

    def has(self, start: int, end: int) -> bool:
        return self.machine.has(start, end)

    def lacks(self, block: int) -> bool:
        """Whether a block is neither here nor on its way."""
        return any(self.machine.is_absent(unit) for unit in self._in_units([block]))

    @property
    def bytes_on_the_way(self) -> int:
        block_bytes, size_bytes = limits.BLOCK_BYTES // self._units, self.info.size_bytes
        return sum(min(block_bytes, size_bytes - block * block_bytes) for block in self.machine.owner)

    def lost(self, blocks: list[int]) -> None:
        """Somebody else evicted these blocks or found them bad."""
        units = self._in_units(blocks)
        if not self._holds and self.machine.told_of(units):
            self._holds = True
            self._around.store.held[self.object_id] += 1
        self._step(events.Lost(tuple(units)))

    def depart(self) -> list[tuple[Reader, int, int]]:
        """Let all unfinished readers go on elsewhere; returns (reader, next byte, end) for each. They keep the bytes
        they were told of until they leave. The runs end."""
        leaving = [(number, state.told, state.end) for number, state in self._unfinished()]
        for number, _, _ in leaving:
            self._step(events.Part(number))
        return [(self._readers[number], told, end) for number, told, end in leaving if number in self._readers]

    def _unfinished(self) -> list[tuple[int, machine.Seat]]:
        return [(number, state) for number, state in self.machine.readers.items() if not state.finished]

    # --- the machine -------------------------------------------------------------------------------------------------
    def _step(self, event: events.Event) -> None:
        """Step the machine and perform its effects. A reader's callback may re-enter: its event waits for its turn."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events and not self.closed:
                event = self._events.popleft()
                for effect in self.machine.step(self._around.clock.monotonic_s(), event):
                    self._perform(effect)
            for run, claim in self._claims.items():
                if self.machine.is_waited_for(run):
                    claim.hasten()
        except Exception as error:
            log.exception("the flight of %s/%s broke at %r", self.bucket, self.info.key, event)
            self.shut(Bug(f"reading {self.bucket}/{self.info.key} broke: {error!r}"))
        finally:
            self._stepping = False
        if self.machine.idle and not self._tasks and not self.closed:
            self._close()

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Land(number, start, end):
                reader = self._readers.get(number)
                if reader is not None:
                    for segment in self.sink.segments(start, end):
                        reader.landed(*segment)
            case events.Finish(number):
                if reader := self._readers.get(number):
                    reader.finished()
            case events.Fail(number, error):
                if reader := self._readers.get(number):
                    reader.failed(error)
            case events.Withdraw(number):
                if reader := self._readers.get(number):
                    reader.withdrawn()
            case events.Fetch(run, first, end):
                self._start_run(run, first, end, None)
            case events.Cut(run, end):
                self._cut(run, end)
            case events.Verify(block):
                check = asyncio.create_task(self._check(block))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
            case events.Drop(block):
                self.sink.drop(block)

    def shut(self, error: ForebayError) -> None:
        """Fail every unfinished reader and stop all work. The flight goes when the last reader leaves."""
        if self.closed:
            return
        self.closed = True
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()
        for task in [*self._tasks.values(), *self._checks]:
            task.cancel()
        failing = [self._readers[number] for number, _ in self._unfinished() if number in self._readers]
        if not self._readers:
            self._let_go()
        for reader in failing:
            reader.failed(error.to_wire())

    def _close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._let_go()

    def _let_go(self) -> None:
        assert not self._readers, "somebody may still take what it was told of"
        if self._holds:
            self._around.store.held[self.object_id] -= 1
        self.sink.close()
        self._around.flight_over(self)

    # --- progress ----------------------------------------------------------------------------------------------------
    def _landed(self, run: int, upto: int) -> None:
        self._untold[run] = upto
        if self._timer is not None:
            return
        every_s = TELL_EVERY_S * (1 + len(self._readers) // 4)  # a message for each reader: fewer when they are many
        wait_s = self._told_s + every_s - self._around.clock.monotonic_s()
        if wait_s <= 0:
            self._tell()
        else:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_s = self._around.clock.monotonic_s()
        untold, self._untold = self._untold, {}
        for run, upto in untold.items():
            if run in self.machine.runs:
                self._step(events.Progress(run, upto))

    # --- runs --------------------------------------------------------------------------------------------------------
    def _start_run(self, run: int, first: int, end: int, fetch: Fetch | None) -> None:
        self._ends[run] = end
        task = self._tasks[run] = asyncio.create_task(self._run(run, first, end, fetch))
        task.add_done_callback(lambda done: self._over(run, fetch, done))

    def _cut(self, run: int, end: int) -> None:
        self._ends[run] = min(self._ends[run], end)
        if end <= self.machine.runs[run].first:
            self._tasks[run].cancel()

    async def _run(self, run: int, first: int, end: int, fetch: Fetch | None) -> events.Event:
        """Do the run; return the event that ends it for the machine."""
        memory = self.sink if isinstance(self.sink, MemorySink) else None
        try:
            if memory is not None:
                end = await self._reserve(run, first, end, memory)
            async with self._permit(run) if fetch is None else _nothing():
                if fetch is None:
                    fetch = await self._open(first, end)
                try:
                    await self._pump(run, first, fetch)
                finally:
                    await fetch.aclose()
        except DiskTrouble as error:
            self._around.disk_trouble(self, error)
            return events.GaveUp(run)
        except (NotFound, Precondition) as error:
            return self._changed(run, error)
        except ForebayError as error:
            return events.Failed(run, error.to_wire())
        except Exception as error:
            log.exception("run %d of %s/%s broke", run, self.bucket, self.info.key)
            return events.Failed(run, Bug(f"reading from the backend broke: {error!r}").to_wire())
        finally:
            if memory is not None:
                memory.unreserve(first, end)
        return events.Ended(run) if self._ends[run] == self.machine.runs[run].end else events.GaveUp(run)

    async def _reserve(self, run: int, first: int, end: int, memory: MemorySink) -> int:
        """Wait for memory for the first unit, and take what is free for the rest. The run ends where the memory
        ends."""
        if not memory.has_memory(first):
            need = Need.AHEAD
            if self.machine.is_waited_for(run):
                need = Need.NEXT if self._told_s else Need.FIRST
            claim = self._claims[run] = memory.claim(need)
            try:
                await claim.take()
            finally:
                del self._claims[run]
            memory.keep(first, claim)
        end = memory.reserve(first + 1, end)
        self._ends[run] = min(self._ends[run], end)
        return end

    @asynccontextmanager
    async def _permit(self, run: int) -> AsyncIterator[None]:
        """Hold the bucket's permit for a request. `_step` hastens the claim when somebody begins to wait for these
        bytes."""
        need = Need.NEXT if self.machine.is_waited_for(run) else Need.AHEAD
        claim = self._around.permits(self.bucket).claim(self, need)
        self._claims[run] = claim
        try:
            async with claim:
                del self._claims[run]
                yield
        finally:
            self._claims.pop(run, None)

    def _over(self, run: int, adopted: Fetch | None, done: asyncio.Task[events.Event]) -> None:
        """The run's task has ended, perhaps cancelled before it began."""
        if adopted is not None and done.cancelled():
            self._checks.add(closing := asyncio.create_task(adopted.aclose()))
            closing.add_done_callback(self._checks.discard)
        if self._untold:
            self._tell()
        del self._tasks[run]
        del self._ends[run]
        self._step(events.GaveUp(run) if done.cancelled() else done.result())

    def _changed(self, run: int, error: ForebayError) -> events.Event:
        changed = Precondition(
            f"{self.bucket}/{self.info.key} changed under an open read: open it again to read the new version",
            code=error.code if isinstance(error, NotFound) else "PreconditionFailed",
        ).to_wire()
        self.gone = True
        self._around.flight_gone(self)
        self._step(events.Gone(changed))
        return events.Failed(run, changed)

    async def _open(self, first: int, end: int) -> Fetch:
        block_bytes, size = self.machine.block_bytes, self.info.size_bytes
        start, stop = max(first * block_bytes, self._span[0]), min(end * block_bytes, self._span[1])
        fetch = await self.backend.fetch(self.info.key, RangeSpec(start, stop - 1), version=self.info.version)
        if fetch.info.version != self.info.version:
            await fetch.aclose()
            raise Precondition(f"{self.info.key} has version {fetch.info.version} now, not {self.info.version}")
        if fetch.info.size_bytes != size or (fetch.start, fetch.end) != (start, stop):
            await fetch.aclose()
            raise Corrupt(
                f"the backend answered bytes {fetch.start}-{fetch.end} of {fetch.info.size_bytes} when asked for "
                f"{start}-{stop} of {size} in {self.info.key}: check the backend for a proxy that rewrites answers"
            )
        return fetch

    async def _pump(self, run: int, first: int, fetch: Fetch) -> None:
        """Stream the body into the sink up to the run's end, which may come closer meanwhile.

        The next bytes arrive while others are written: using disk and network in turn would halve the speed.
        """
        position = fetch.start
        start = max(first * self.machine.block_bytes, position)
        assert self.private or start % self.machine.block_bytes == 0, "a block on disk is whole"
        hashes = BlockHashes(start, self._span[1], self.machine.block_bytes)
        gathering = Gathering(start, partial(self._write, run, hashes))
        try:
            async for chunk in fetch:
                data = memoryview(chunk)
                if position < start:  # the body of a suffix request begins inside a block that it does not cover
                    skip = min(len(data), start - position)
                    data, position = data[skip:], position + skip
                data = data[: max(0, self._stop(run) - position)]
                if data:
                    if not self._told_s:
                        self._landed(run, self.sink.hold(position, data))
                    position += len(data)
                    await gathering.put(data)
                if position >= self._stop(run):
                    break
            await gathering.written()
        except ForebayError:
            await gathering.written()  # the bytes before the break are good
            raise
        finally:
            await gathering.stop()
        if position < self._stop(run):
            raise Corrupt(
                f"the backend's answer for {self.info.key} ended at {position}, before {self._stop(run)}: try again"
            )

    def _stop(self, run: int) -> int:
        """The byte where the run ends now."""
        return min(self._ends[run] * self.machine.block_bytes, self._span[1])

    async def _write(self, run: int, hashes: BlockHashes, position: int, pieces: list[memoryview]) -> None:
        room_bytes = self._stop(run) - position
        while pieces and (over_bytes := sum(map(len, pieces)) - room_bytes) > 0:
            # the run was cut while these waited: bytes behind its end may belong to another run
            last = pieces.pop()
            if len(last) > over_bytes:
                pieces.append(last[: len(last) - over_bytes])
        if not pieces:
            return
        whole = await self.sink.write(position, pieces, hashes)
        position += sum(map(len, pieces))
        if whole:
            self._untold[run] = position
            self._tell()
            await asyncio.sleep(0)  # readers hear of the bytes before the block is booked
        self._wrote(run, position, whole)

    def _wrote(self, run: int, position: int, whole: list[tuple[int, int]]) -> None:
        block_bytes = self.machine.block_bytes
        for block, checksum in whole:
            if block >= self._ends[run]:
                break  # cut while it landed: nobody owns the block
            if isinstance(self.sink, DiskSink):
                try:
                    listed = self.sink.landing.finish_block(block, checksum)
                except Unavailable as error:
                    raise DiskTrouble(str(error)) from error
                if listed:
                    self._around.compared.add(self.object_id, (block,), blocks_in(self.info.size_bytes))
                    self._around.block_kept(self, block)
            self._untold.pop(run, None)
            self._step(events.Arrived(run, block, kept=not self.private))
        if position % block_bytes and position // block_bytes < self._ends[run]:
            self._landed(run, position)

    # --- doubted blocks ----------------------------------------------------------------------------------------------
    async def _check(self, block: int) -> None:
        checking = self._checked.get(block // self._units)
        if checking is None:
            checking = self._checked[block // self._units] = asyncio.create_task(self._compare(block // self._units))
            self._checks.add(checking)
            checking.add_done_callback(self._checks.discard)
        self._step(events.Verified(block, await asyncio.shield(checking)))

    async def _compare(self, block: int) -> bool:
        """Whether a block of the store matches its checksum."""
        good = False
        record, key = self.record, self.info.key
        try:
            if record is not None:
                store = self._around.store
                loop = asyncio.get_running_loop()
                bad = await loop.run_in_executor(
                    self._around.workers, store.check_blocks, record, self.bucket, key, [block]
                )
                good = not bad
                store.settle_checked(self.bucket, key, record.object_id, [block] if good else [], bad)
                if good:
                    self._around.compared.add(record.object_id, (block,), blocks_in(record.size_bytes))
                if bad:
                    self._around.blocks_bad(self, bad)
        except ForebayError as error:
            log.warning("block %d of %s/%s cannot be checked: %s", block, self.bucket, key, error)
        return good


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield
