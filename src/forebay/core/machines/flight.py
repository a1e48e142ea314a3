"""The cold reads of one object version: many readers, one fetch per block.

Theory. A *flight* exists while somebody reads a version of an object through the engine. Readers join with the bytes
they want. The flight decides which runs of blocks to fetch, and tells each reader of its bytes in order as they land.
It ends when the last reader has left and the last run has ended. A block is in one of these states:

    absent ── Fetch ──> in flight ── Arrived ──> here (kept on disk, or only passing through memory)
       ^                    └─ Failed ─> absent        │ Lost, or passing and read by all ─> absent
       └────── Verified(bad) ── verifying <── Verify ── doubted (on disk, but must be checked before use)

Runs start in the order in which readers need their bytes, one for each reader in turn. A reader may have `parallel`
runs at work. That number starts low, because on a link that one connection fills, many would only delay the first
bytes. It grows with each run that ends, for backends whose single connections are slow. Runs never reach more than
`window_bytes` ahead of what the reader's client took. Blocks beyond the asked range (*ahead*) are fetched once, and no
reader waits for them.

A reader that failed, or that gets the rest from elsewhere (`Part`), stays until it leaves: it may not have taken all
the bytes it was told of. Until then those blocks are neither evicted nor dropped, and the flight is not idle. A bad
block is lost all the same, and then the bytes of it that a reader has not taken are withdrawn.

When nobody wants the rest of a run, the flight cuts the run after the block in progress. A range of 1 KiB thus leaves
its block whole, and a client that vanishes does not cost the rest of the object.

Rejected: one reader leading and the others following it (the leader's client sets everybody's pace, and its death needs
an election); failing only the reader that reaches a failed block (the fetch was already retried, so the others would
wait for the same answer).

Invariants. (1) A block is in at most one of: here, in flight, verifying, doubted. (2) A reader is told of each byte of
its range once, in order, and then gets `Finish`; or it gets one `Fail`. After either, only one `Withdraw` may follow.
(3) Runs at work are disjoint. (4) A passing block is kept exactly while a reader still needs it. (5) Idle means: no
run, no reader, nothing passing. (6) Bytes that a reader was told of and has not taken stay, or are withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from forebay.core import limits
from forebay.core.errors import ErrorOnWire
from forebay.core.machines.flight_events import (
    Arrived,
    Cut,
    Drop,
    Effect,
    Ended,
    Event,
    Fail,
    Failed,
    Fetch,
    Finish,
    GaveUp,
    Gone,
    Join,
    Land,
    Leave,
    Lost,
    Part,
    Progress,
    Took,
    Verified,
    Verify,
    Withdraw,
)
from forebay.core.ranges import Run, absent_runs, blocks_touched, next_absent

RUN_BLOCKS_MAX = 2  # 8 MiB a request: at 50 MB/s a connection, 20 ms of latency cost an eighth, hidden by parallel runs
PARALLEL_AT_FIRST = 4  # grows by one with each run that ends, to FETCHES_PER_READ_MAX
VERIFY_PARALLEL_MAX = 4  # checks of doubted blocks at once: they read the disk and fill a core


# --- state -----------------------------------------------------------------------------------------------------------
class Seat(msgspec.Struct):
    """A reader's place in a flight."""

    start: int
    end: int
    told: int  # every byte below was announced
    took: int  # every byte below was taken by the client
    finished: bool = False
    withdrawn: bool = False

    def wants_no_more(self) -> None:
        """End the reader's range at the bytes it was told of."""
        self.end, self.finished = self.told, True


class _AtWork(msgspec.Struct):
    first: int
    end: int
    landed: int
    ahead: bool = False  # started for nobody: never cut
    cut: bool = False


class Flight(msgspec.Struct):
    """See the module's header. `present` is the record's bitmap; the `doubted` blocks in it must be verified first.

    `adopted` is a run that is already under way: the request that found out what the object is. It has number 0.
    """

    size_bytes: int
    present: bytes = b""
    doubted: set[int] = msgspec.field(default_factory=set)
    adopted: Run | None = None
    block_bytes: int = limits.BLOCK_BYTES
    window_bytes: int = limits.READ_WINDOW_BYTES
    parallel_max: int = limits.FETCHES_PER_READ_MAX
    run_blocks_max: int = RUN_BLOCKS_MAX
    readers: dict[int, Seat] = msgspec.field(default_factory=dict)
    runs: dict[int, _AtWork] = msgspec.field(default_factory=dict)
    owner: dict[int, int] = msgspec.field(default_factory=dict)  # block in flight -> its run
    passing: set[int] = msgspec.field(default_factory=set)
    verifying: set[int] = msgspec.field(default_factory=set)
    ahead: set[int] = msgspec.field(default_factory=set)  # wanted by no reader, to be fetched once
    gone: ErrorOnWire | None = None
    here: bytearray = msgspec.field(default_factory=bytearray)
    blocks: int = 0
    next_run: int = 1
    parallel: int = PARALLEL_AT_FIRST

    def __post_init__(self) -> None:
        assert min(self.size_bytes, self.block_bytes) > 0
        self.blocks = -(-self.size_bytes // self.block_bytes)
        self.here = bytearray(-(-self.blocks // 8))
        self.here[: len(self.present)] = self.present[: len(self.here)]
        self.parallel = min(self.parallel, self.parallel_max)
        for block in self.doubted:
            self._set_absent(block)
        if self.adopted is not None:
            self._start(0, self.adopted.first, self.adopted.end)

    # --- what is ---------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """Nobody reads and nothing is on its way: forget this flight."""
        return not (self.readers or self.runs or self.verifying)

    def is_here(self, block: int) -> bool:
        return bool(self.here[block >> 3] >> (block & 7) & 1)

    def has(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is here and verified."""
        first, last = blocks_touched(start, end, self.block_bytes)
        return next_absent(self.here, first, last) == last

    def needs(self, block: int) -> bool:
        """Whether somebody may still read this block, or it is being written: it must not be evicted now."""
        low, high = block * self.block_bytes, (block + 1) * self.block_bytes
        return (
            block in self.owner
            or block in self.verifying
            or any(r.start < high and r.took < high and r.end > low for r in self.readers.values())
        )

    def told_of(self, blocks: Iterable[int]) -> list[int]:
        """The readers that were told of bytes of these blocks and have not taken them."""
        spans = [(block * self.block_bytes, (block + 1) * self.block_bytes) for block in blocks]
        return [
            number
            for number, r in self.readers.items()
            if any(max(r.took, low) < min(r.told, high) for low, high in spans)
        ]

    def is_waited_for(self, number: int) -> bool:
        """Whether a reader has taken all that it was told of, and its next byte is in this run."""
        run = self.runs[number]
        low, high = run.first * self.block_bytes, run.end * self.block_bytes
        return any(not r.finished and r.took >= r.told and low <= r.told < high for r in self.readers.values())

    def check(self) -> None:
        """Assert the invariants in the module's header."""
        for block in range(self.blocks) if self.blocks <= 4096 else ():
            states = (self.is_here(block), block in self.owner, block in self.verifying, block in self.doubted)
            assert sum(states) <= 1, (block, states)
        for number, run in self.runs.items():
            assert 0 <= run.first <= run.end <= self.blocks, (number, run)
            assert run.first * self.block_bytes <= run.landed <= max(run.first, run.end) * self.block_bytes
        for block, number in self.owner.items():
            assert self.runs[number].first <= block < self.runs[number].end, (block, number)
        for reader in self.readers.values():
            assert 0 <= reader.start <= reader.told <= reader.end <= self.size_bytes
            assert reader.finished == (reader.told == reader.end)
            assert reader.start <= reader.took <= reader.end
        assert all(self.is_here(block) and self.needs(block) for block in self.passing), self.passing
        if self.idle:
            assert not self.owner
            assert not self.passing

    # --- what happens ------------------------------------------------------------------------------------------------
    def step(self, now: float, event: Event) -> list[Effect]:
        """Take one event and return the effects to perform, in order. `now` is unused: nothing here waits."""
        effects: list[Effect] = []
        match event:
            case Progress(number, upto):
                run = self.runs[number]
                run.landed = max(run.landed, min(upto, run.end * self.block_bytes, self.size_bytes))
                return list(self._tell())
            case Took(number, position):
                return self._took(number, position)
            case Join():
                self._join(event)
            case Leave(number):
                self.readers.pop(number, None)
            case Part(number):
                self.readers[number].wants_no_more()
            case Arrived(number, block, kept):
                self._arrived(number, block, kept)
            case Ended(number):
                lost = self._end(number)
                assert not lost, f"run {number} ended, but blocks {lost} have not arrived"
                self.parallel = min(self.parallel + 1, self.parallel_max)
            case GaveUp(number):
                self._end(number)
            case Failed(number, error):
                effects += self._failed(number, error)
            case Gone(error):
                self.gone = self.gone or error
            case Lost(blocks):
                effects += self._lost(blocks)
            case Verified(block, good):
                self.verifying.remove(block)
                if good:
                    self._set_here(block)
            case _:
                raise TypeError(event)
        effects += self._settle()
        return effects

    def _took(self, number: int, position: int) -> list[Effect]:
        reader = self.readers.get(number)
        if reader is None or position <= reader.took:
            return []
        before = self._fetch_limit(reader)
        reader.took = min(position, reader.end)
        limit = self._fetch_limit(reader)
        opens_block = limit // self.block_bytes > before // self.block_bytes or before < limit == reader.end
        return self._settle() if opens_block or self.passing else []

    def _join(self, event: Join) -> None:
        assert event.reader not in self.readers, "a reader joins once"
        assert 0 <= event.start <= event.end <= self.size_bytes
        self.readers[event.reader] = Seat(event.start, event.end, told=event.start, took=event.start)
        if event.ahead_to > event.end:
            first = -(-event.end // self.block_bytes)
            end = min(-(-event.ahead_to // self.block_bytes), self.blocks)
            self.ahead.update(run for gap in absent_runs(self.here, first, end) for run in range(gap.first, gap.end))

    def _arrived(self, number: int, block: int, kept: bool) -> None:
        assert self.owner.get(block) == number, "a block arrives once, from the run that owns it"
        del self.owner[block]
        run = self.runs[number]
        run.landed = max(run.landed, min((block + 1) * self.block_bytes, self.size_bytes))
        self._set_here(block)
        if not kept:
            self.passing.add(block)

    def _failed(self, number: int, error: ErrorOnWire) -> Iterator[Effect]:
        run = self.runs[number]
        lost = self._end(number)
        if not lost:
            return
        low, high = max(lost[0] * self.block_bytes, run.landed), (lost[-1] + 1) * self.block_bytes
        for number, reader in self.readers.items():
            if self._waits_for(reader, low, high):
                reader.wants_no_more()
                yield Fail(number, error)

    def _waits_for(self, reader: Seat, low: int, high: int) -> bool:
        return not reader.finished and reader.told < high and low < self._fetch_limit(reader)

    def _lost(self, blocks: tuple[int, ...]) -> Iterator[Effect]:
        for block in blocks:
            self._set_absent(block)
            self.passing.discard(block)
            self.doubted.discard(block)
        for number in self.told_of(blocks):
            if not self.readers[number].withdrawn:
                self.readers[number].withdrawn = True
                self.readers[number].wants_no_more()
                yield Withdraw(number)

    def _set_here(self, block: int) -> None:
        self.here[block >> 3] |= 1 << (block & 7)

    def _set_absent(self, block: int) -> None:
        self.here[block >> 3] &= ~(1 << (block & 7)) & 0xFF

    def _start(self, number: int, first: int, end: int) -> None:
        assert all(block not in self.owner for block in range(first, end)), "one fetch per block"
        self.runs[number] = _AtWork(first, end, landed=first * self.block_bytes)
        for block in range(first, end):
            if not self.is_here(block):
                self.doubted.discard(block)
                self.owner[block] = number

    def _end(self, number: int) -> list[int]:
        """Forget the run; return its blocks that had not arrived."""
        run = self.runs.pop(number)
        lost = [block for block in range(run.first, run.end) if self.owner.get(block) == number]
        for block in lost:
            del self.owner[block]
        return lost

    # --- what follows ------------------------------------------------------------------------------------------------
    def _settle(self) -> list[Effect]:
        effects: list[Effect] = []
        effects += self._tell()
        if self.gone is not None:
            effects += self._fail_the_hopeless(self.gone)
        else:
            effects += self._fetch()
        effects += self._cut()
        effects += self._drop()
        return effects

    def _tell(self) -> Iterator[Effect]:
        for number, reader in self.readers.items():
            if reader.finished:
                continue
            upto = self._readable_to(reader.told, reader.end)
            if upto > reader.told:
                yield Land(number, reader.told, upto)
                reader.told = upto
            if reader.told == reader.end:
                reader.finished = True
                yield Finish(number)

    def _readable_to(self, position: int, end: int) -> int:
        """The end of the bytes that may be read without a gap from `position` on, at most `end`."""
        block_end = -(-end // self.block_bytes)
        while position < end:
            block = next_absent(self.here, position // self.block_bytes, block_end)
            position = max(position, min(block * self.block_bytes, end))
            run = self.runs.get(self.owner.get(block, -1))
            if run is None or run.landed <= position:
                break
            position = min(run.landed, (block + 1) * self.block_bytes, end)
            if position < (block + 1) * self.block_bytes:
                break
        return position

    def _fetch_limit(self, reader: Seat) -> int:
        return min(reader.end, reader.took + self.window_bytes)

    def _fail_the_hopeless(self, error: ErrorOnWire) -> Iterator[Effect]:
        self.ahead.clear()
        for number, reader in self.readers.items():
            first, end = blocks_touched(reader.told, reader.end, self.block_bytes)
            gaps = absent_runs(self.here, first, end)
            if any(self.is_absent(block) for gap in gaps for block in range(gap.first, gap.end)):
                reader.wants_no_more()
                yield Fail(number, error)
            else:
                yield from self._verify(first, end)

    def _fetch(self) -> Iterator[Effect]:
        """Start runs, one for each reader in turn, then the runs ahead that nobody waits for."""
        for reader in self.readers.values() if self.doubted else ():
            yield from self._verify(*blocks_touched(reader.told, self._fetch_limit(reader), self.block_bytes))
        waiting = [(r, self._at_work_for(r)) for r in self.readers.values() if self._lacks(r)]
        while waiting:
            still: list[tuple[Seat, int]] = []
            for reader, at_work in waiting:
                # Runs that others started further on must not keep a reader from the bytes it waits for.
                counted = 0 if self.is_absent(reader.told // self.block_bytes) else at_work
                if counted < self.parallel and (run := self._next_run(reader, counted)):
                    yield self._fetch_run(run)
                    still.append((reader, at_work + 1))
            waiting = still
        while self.ahead and len(self.runs) < self.parallel_max:
            first = min(self.ahead)
            self.ahead.discard(first)
            if not self.is_absent(first):
                continue
            end = first + 1
            while end in self.ahead and end - first < self.run_blocks_max and self.is_absent(end):
                self.ahead.discard(end)
                end += 1
            yield self._fetch_run(Run(first, end), ahead=True)

    def _lacks(self, reader: Seat) -> bool:
        """Whether any block within the reader's window is not here."""
        if reader.finished:
            return False
        first, end = blocks_touched(reader.told, self._fetch_limit(reader), self.block_bytes)
        return next_absent(self.here, first, end) < end

    def _fetch_run(self, run: Run, ahead: bool = False) -> Fetch:
        number, self.next_run = self.next_run, self.next_run + 1
        self._start(number, run.first, run.end)
        self.runs[number].ahead = ahead
        self.ahead.difference_update(range(run.first, run.end))
        return Fetch(number, run.first, run.end)

    def _at_work_for(self, reader: Seat) -> int:
        first, end = blocks_touched(reader.told, self._fetch_limit(reader), self.block_bytes)
        return len({self.owner[block] for block in range(first, end) if block in self.owner})

    def _next_run(self, reader: Seat, at_work: int) -> Run | None:
        """The next blocks to fetch for this reader. While other runs are at work, a run that the window would cut short
        waits."""
        limit = self._fetch_limit(reader)
        first, end = blocks_touched(reader.told, limit, self.block_bytes)
        for gap in absent_runs(self.here, first, end):
            start = gap.first
            while start < gap.end and not self.is_absent(start):
                start += 1
            stop = start
            while stop < gap.end and stop - start < self.run_blocks_max and self.is_absent(stop):
                stop += 1
            if stop > start:
                by_window = stop == end and limit < reader.end and stop - start < self.run_blocks_max
                return None if by_window and at_work else Run(start, stop)
        return None

    def is_absent(self, block: int) -> bool:
        """Whether the block is neither here nor on its way, nor to be checked first."""
        return not (self.is_here(block) or block in self.owner or block in self.verifying or block in self.doubted)

    def _verify(self, first: int, end: int) -> Iterator[Effect]:
        if not self.doubted:
            return
        for block in range(first, end):
            if block in self.doubted and len(self.verifying) < VERIFY_PARALLEL_MAX:
                self.doubted.discard(block)
                self.verifying.add(block)
                yield Verify(block)

    def _cut(self) -> Iterator[Effect]:
        """Cut runs whose rest nobody wants, after the block in progress."""
        for number, run in self.runs.items():
            if run.cut or run.ahead:
                continue
            keep = run.end
            in_progress = -(-run.landed // self.block_bytes)  # first block that has not begun to land
            while keep > max(in_progress, run.first) and not self._wanted(keep - 1):
                keep -= 1
            if keep < run.end:
                for block in range(keep, run.end):
                    if self.owner.get(block) == number:
                        del self.owner[block]
                run.end, run.cut = keep, True
                yield Cut(number, keep)

    def _wanted(self, block: int) -> bool:
        low, high = block * self.block_bytes, (block + 1) * self.block_bytes
        return any(not r.finished and r.told < high and r.end > low for r in self.readers.values())

    def _drop(self) -> Iterator[Effect]:
        for block in sorted(self.passing):
            if not self.needs(block):
                self.passing.discard(block)
                self._set_absent(block)
                yield Drop(block)
