"""A flight against a dumb oracle: whatever readers, backends and disks do, each byte is told once, in order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.errors import ErrorOnWire
from forebay.core.machines import flight as f

BLOCK = 10
BAD = ErrorOnWire("Unavailable", "the backend is away: try again")
CHANGED = ErrorOnWire("Precondition", "changed")


class ReaderSeen:
    """What one reader was told, and what the oracle expects."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.told, self.took = start, end, start, start
        self.finished = False


class FlightStory(RuleBasedStateMachine):
    """The shell's part is played by rules: they deliver, fail, cut and verify in any order hypothesis likes."""

    def __init__(self) -> None:
        super().__init__()
        self.started = False

    # --- the oracle's books ------------------------------------------------------------------------------------------
    @precondition(lambda self: not self.started)
    @rule(
        size=st.integers(1, 25 * BLOCK),
        window=st.sampled_from([BLOCK, 3 * BLOCK, 100 * BLOCK]),
        data=st.data(),
        adopt=st.booleans(),
        run_max=st.integers(1, 3),
    )
    def begin(self, size: int, window: int, data: st.DataObject, adopt: bool, run_max: int) -> None:
        blocks = -(-size // BLOCK)
        here = data.draw(st.sets(st.integers(0, blocks - 1)))
        doubted = data.draw(st.sets(st.sampled_from(sorted(here)))) if here else set()
        adopted = None
        if adopt:
            first = data.draw(st.integers(0, blocks - 1))
            adopted = f.Run(first, data.draw(st.integers(first + 1, blocks)))
            here -= set(range(*adopted))
            doubted &= here
        present = bytearray(-(-blocks // 8))
        for block in here:
            present[block >> 3] |= 1 << (block & 7)
        self.size, self.blocks, self.window = size, blocks, window
        self.flight = f.Flight(
            size,
            bytes(present),
            doubted=set(doubted),
            adopted=adopted,
            block_bytes=BLOCK,
            window_bytes=window,
            run_blocks_max=run_max,
        )
        self.on_disk = here - doubted  # readable blocks, to the oracle's knowledge
        self.in_memory: set[int] = set()
        self.runs: dict[int, list[int]] = {}  # number -> [next block, end, bytes of the next block that landed]
        if adopted:
            self.runs[0] = [*adopted, 0]
        self.verifying: set[int] = set()
        self.readers: dict[int, ReaderSeen] = {}
        self.ended: set[int] = set()
        self.withdrawn: set[int] = set()
        self.rotten: set[int] = set()
        self.next_reader = 1
        self.ahead: set[int] = set()
        self.gone = False
        self.started = True

    def step(self, event: Any) -> None:
        for effect in self.flight.step(0.0, event):
            self.perform(effect)
        self.flight.check()

    def perform(self, effect: Any) -> None:
        match effect:
            case f.Fetch(run, first, end):
                assert run not in self.runs
                near = [seen.took + self.window for n, seen in self.readers.items() if n not in self.ended]
                assert first * BLOCK < max(near, default=0) or first in self.ahead, "beyond every reader's window"
                assert 0 <= first < end <= self.blocks
                for block in range(first, end):
                    assert block not in self.on_disk | self.in_memory, "fetched what is here"
                    assert not any(r[0] <= block < r[1] for r in self.runs.values()), "one fetch per block"
                self.runs[run] = [first, end, 0]
            case f.Cut(run, end):
                assert self.runs[run][0] <= end < self.runs[run][1] or self.runs[run][0] == end
                assert not (self.runs[run][2] and end == self.runs[run][0]), "a block in progress is finished"
                self.runs[run][1] = end
            case f.Verify(block):
                assert block not in self.verifying
                self.verifying.add(block)
            case f.Land(reader, start, end):
                seen = self.readers[reader]
                assert reader not in self.ended
                assert start == seen.told < end <= seen.end, "in order, without a gap"
                assert all(self.readable(position) for position in range(start, end)), "told before it landed"
                seen.told = end
            case f.Finish(reader):
                seen = self.readers[reader]
                assert not seen.finished
                assert seen.told == seen.end
                seen.finished = True
            case f.Fail(reader, _):
                assert reader in self.readers
                assert not self.readers[reader].finished
                assert reader not in self.ended
                self.end(reader)
            case f.Withdraw(reader):
                seen = self.readers[reader]
                assert any(self.may_take(seen, block) for block in self.rotten), "what it was told of is right"
                assert reader not in self.withdrawn
                self.withdrawn.add(reader)
                self.end(reader)
            case f.Drop(block):
                self.in_memory.remove(block)
                self.nobody_was_told_of(block)
            case _:
                raise AssertionError(effect)

    def may_take(self, seen: ReaderSeen, block: int) -> bool:
        """Whether a reader was told of bytes of the block, and has not taken them."""
        return any(seen.took <= position < seen.told for position in range(block * BLOCK, (block + 1) * BLOCK))

    def end(self, reader: int) -> None:
        """It is told nothing more, and has a right to what it was told."""
        self.ended.add(reader)
        self.readers[reader].end = self.readers[reader].told

    def nobody_was_told_of(self, block: int) -> None:
        """The block goes: nobody who reads may still want it, nor anybody who was told of it and has not taken it."""
        for seen in self.readers.values():
            touches = seen.start < (block + 1) * BLOCK and seen.end > block * BLOCK
            assert not touches or seen.took >= min((block + 1) * BLOCK, seen.end), "dropped too early"

    def readable(self, position: int) -> bool:
        block = position // BLOCK
        if block in self.on_disk or block in self.in_memory:
            return True
        return any(block == run[0] and position % BLOCK < run[2] for run in self.runs.values())

    # --- what may happen ---------------------------------------------------------------------------------------------
    @precondition(lambda self: self.started and len(self.readers) < 6)
    @rule(data=st.data(), ahead=st.just(0) | st.integers(1, 8 * BLOCK))
    def join(self, data: st.DataObject, ahead: int) -> None:
        start = data.draw(st.integers(0, self.size))
        end = data.draw(st.integers(start, self.size))
        number, self.next_reader = self.next_reader, self.next_reader + 1
        self.readers[number] = ReaderSeen(start, end)
        ahead_to = min(self.size, end + ahead) if ahead else 0
        self.ahead.update(range(-(-end // BLOCK), -(-ahead_to // BLOCK)))
        self.step(f.Join(number, start, end, ahead_to))

    @precondition(lambda self: self.started and any(self.readers))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.readers)))
        seen = self.readers[number]
        seen.took = data.draw(st.integers(seen.took, seen.told))
        self.step(f.Took(number, seen.took))

    @precondition(lambda self: self.started and any(self.readers))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.readers)))
        del self.readers[number]
        self.ended.discard(number)
        self.withdrawn.discard(number)
        self.step(f.Leave(number))

    @precondition(lambda self: self.started and any(not self.readers[n].finished for n in self.live()))
    @rule(data=st.data())
    def part(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(n for n in self.live() if not self.readers[n].finished)))
        self.end(number)
        self.step(f.Part(number))

    @precondition(lambda self: self.started and any(self.runs))
    @rule(data=st.data(), kept=st.booleans(), whole=st.booleans())
    def deliver(self, data: st.DataObject, kept: bool, whole: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.runs)))
        run = self.runs[number]
        if run[0] >= run[1]:
            del self.runs[number]
            self.step(f.Ended(number))
            return
        block_size = min(BLOCK, self.size - run[0] * BLOCK)
        if not whole:
            run[2] = data.draw(st.integers(run[2], block_size))
            self.step(f.Progress(number, run[0] * BLOCK + run[2]))
            return
        block = run[0]
        run[0], run[2] = block + 1, 0
        (self.on_disk if kept else self.in_memory).add(block)
        self.step(f.Arrived(number, block, kept))

    @precondition(lambda self: self.started and any(self.runs))
    @rule(data=st.data(), polite=st.booleans())
    def break_off(self, data: st.DataObject, polite: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.runs)))
        del self.runs[number]
        self.step(f.GaveUp(number) if polite else f.Failed(number, BAD))

    @precondition(lambda self: self.started and any(self.verifying))
    @rule(data=st.data(), good=st.booleans())
    def verify(self, data: st.DataObject, good: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.verifying)))
        self.verifying.remove(block)
        if good:
            self.on_disk.add(block)
        self.step(f.Verified(block, good))

    @precondition(lambda self: self.started and any(b for b in self.on_disk if not self.flight.needs(b)))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(b for b in self.on_disk if not self.flight.needs(b))))
        self.on_disk.remove(block)
        self.nobody_was_told_of(block)
        self.step(f.Lost((block,)))

    @precondition(lambda self: self.started and any(self.on_disk))
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A block turns out to be wrong, whoever was told of it."""
        block = data.draw(st.sampled_from(sorted(self.on_disk)))
        self.on_disk.remove(block)
        self.rotten = {block}
        told = {number for number, seen in self.readers.items() if self.may_take(seen, block)}
        self.step(f.Lost((block,)))
        assert told <= self.withdrawn
        self.rotten = set()

    @precondition(lambda self: self.started and not self.gone)
    @rule()
    def change(self) -> None:
        self.gone = True
        self.step(f.Gone(CHANGED))

    # --- what must hold ----------------------------------------------------------------------------------------------
    def live(self) -> list[int]:
        return [number for number in self.readers if number not in self.ended]

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """A reader that could take more has a run or a check under way for its next byte, or bytes to take first."""
        if not self.started:
            return
        for number in self.live():
            seen = self.readers[number]
            if not seen.finished and seen.told <= seen.took:
                block = seen.told // BLOCK
                at_work = any(r[0] <= block < r[1] for r in self.runs.values())
                queued = len(self.verifying) >= f.VERIFY_PARALLEL_MAX
                assert at_work or block in self.verifying or queued, (number, seen.told)

    @invariant()
    def memory_is_for_somebody(self) -> None:
        if self.started:
            assert self.in_memory == self.flight.passing
            if not self.readers:
                assert not self.in_memory
            assert not (self.readers and self.flight.idle), "somebody may still take what it was told of"

    def teardown(self) -> None:
        """Let everything finish: every reader must be served or failed, and nothing may be left."""
        if not self.started:
            return
        for _ in range(2000):
            if self.runs:
                number = min(self.runs)
                run = self.runs[number]
                if run[0] >= run[1]:
                    del self.runs[number]
                    self.step(f.Ended(number))
                else:
                    block = run[0]
                    run[0], run[2] = block + 1, 0
                    self.on_disk.add(block)
                    self.step(f.Arrived(number, block, True))
            elif self.verifying:
                block = self.verifying.pop()
                self.on_disk.add(block)
                self.step(f.Verified(block, True))
            else:
                behind = [n for n in self.live() if self.readers[n].took < self.readers[n].told]
                if not behind:
                    break
                self.readers[behind[0]].took = self.readers[behind[0]].told
                self.step(f.Took(behind[0], self.readers[behind[0]].told))
        for number in sorted(self.readers):
            assert number in self.ended or self.readers[number].finished, "a reader was forgotten"
            del self.readers[number]
            self.step(f.Leave(number))
        assert self.flight.idle
        assert not self.in_memory


FlightStory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFlightStory = FlightStory.TestCase


def test_a_late_reader_does_not_wait_for_runs_that_others_started_further_on():
    """Found by chance: four runs were at work ahead of it, so nobody fetched the block it stood at."""
    flight = f.Flight(51, b"\x03", adopted=f.Run(2, 3), block_bytes=BLOCK, window_bytes=1000, run_blocks_max=1)
    flight.step(0.0, f.Lost((0,)))
    started = flight.step(0.0, f.Join(1, 20, 51, ahead_to=0))
    assert len([effect for effect in started if isinstance(effect, f.Fetch)]) == flight.parallel
    flight.step(0.0, f.Lost((1,)))
    assert [(effect.first, effect.end) for effect in flight.step(0.0, f.Join(2, 0, 51, ahead_to=0))] == [(0, 1)]
    flight.check()
