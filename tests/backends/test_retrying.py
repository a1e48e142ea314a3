"""The stack over a faulty backend: passing faults are invisible, lasting ones end in the error that they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.backends.errors import changed, from_status, no_such_upload
from forebay.backends.local.memory import MemoryBackend
from forebay.backends.lost_answers import whole_etag
from forebay.backends.seam import Body
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.backends.wrap.faulty import Fail, Fault, FaultPlan, Faulty, Lie, Lose, Reset, Truncate
from forebay.backends.wrap.retrying import Retrying
from forebay.core import limits
from forebay.core.errors import Busy, Corrupt, Denied, ForebayError, NotFound, Precondition, Unavailable
from forebay.core.machines.retry import RetryPolicy
from forebay.core.types import RangeSpec
from forebay.ports.chance import Seeded
from forebay.ports.clock import SystemClock
from tests.backends.backend_places import list_all, read, run

DATA = os.urandom(5_000_000)


class Stack:
    """Memory, disturbed, counted and retried, on a clock that sleeping moves."""

    def __init__(
        self, *script: Fault, plan: FaultPlan | None = None, policy: RetryPolicy | None = None, once: bool = False
    ) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.memory = MemoryBackend()
        self.memory.place("data", DATA)
        self.faulty = Faulty(self.memory, plan, script=list(script), clock=self, sleep=self._sleep)
        self.counters = BackendCounters()
        counting = Counting(self.faulty, self.counters, SystemClock())
        self.top = Retrying(counting, self, Seeded(1), self.counters, policy or RetryPolicy(), self._sleep, once=once)

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_a_reset_in_the_middle_is_resumed_where_it_was() -> None:
    stack = Stack(Reset(1_234_567), Reset(100), Reset(0))

    async def story() -> None:
        assert await read(stack.top, "data") == DATA
        assert stack.counters.requests["fetch"] == 4
        assert stack.counters.retries == 3
        assert stack.counters.errors == {"Unavailable": 3}
        assert stack.counters.read_bytes == len(DATA), "no byte was asked for twice"

    run(story())


def test_a_body_that_just_ends_is_resumed_too() -> None:
    stack = Stack(Truncate(1), Truncate(2_000_000))

    async def story() -> None:
        assert await read(stack.top, "data", RangeSpec(1000, 4_000_000)) == DATA[1000:4_000_001]

    run(story())


def test_an_object_that_changes_in_the_middle_is_never_glued_together() -> None:
    stack = Stack(Reset(2_000_000))

    async def story() -> None:
        fetch = await stack.top.fetch("data")
        chunks = fetch.__aiter__()
        got = bytes(await chunks.__anext__()) + bytes(await chunks.__anext__())
        stack.memory.place("data", DATA[::-1])
        with pytest.raises(Precondition):
            await chunks.__anext__()
        assert got == DATA[:2_000_000]

    run(story())


def test_a_backend_that_lies_about_its_size_ends_in_an_error_not_in_a_wait() -> None:
    stack = Stack(Lie(10))

    async def story() -> None:
        with pytest.raises(Corrupt, match="5000010 bytes"):
            await read(stack.top, "data")

    run(story())


def test_busy_backends_are_left_alone_for_as_long_as_they_ask() -> None:
    stack = Stack(Fail(Busy("slow down", retry_after_s=7.0)))

    async def story() -> None:
        assert await read(stack.top, "data") == DATA
        assert stack.slept == [pytest.approx(7.0)]

    run(story())


@pytest.mark.parametrize("kind", [NotFound, Denied, Precondition])
def test_what_will_not_pass_by_itself_is_not_tried_again(kind: type[ForebayError]) -> None:
    stack = Stack(Fail(kind("no")), Fail(kind("never asked")))

    async def story() -> None:
        with pytest.raises(kind, match="no"):
            await stack.top.fetch("data")
        assert stack.counters.requests["fetch"] == 1
        assert stack.slept == []

    run(story())


def test_patience_ends_and_the_last_error_is_told() -> None:
    stack = Stack(*[Fail(Unavailable(f"attempt {number}")) for number in range(1, 9)])

    async def story() -> None:
        with pytest.raises(Unavailable, match="attempt 5"):
            await stack.top.fetch("data")
        assert stack.counters.requests["fetch"] == 5
        assert len(stack.slept) == 4

    run(story())


def test_progress_renews_the_patience_of_a_body() -> None:
    """A hundred resets, each after a megabyte less than before: slow, but never given up."""
    stack = Stack(*[Reset(40_000)] * 100)

    async def story() -> None:
        assert await read(stack.top, "data") == DATA

    run(story())


def test_a_body_without_progress_is_given_up() -> None:
    stack = Stack(*[Reset(0)] * 10)

    async def story() -> None:
        with pytest.raises(Unavailable):
            await read(stack.top, "data")
        assert stack.counters.requests["fetch"] == 5

    run(story())


def test_an_outage_drains_the_budget_and_then_costs_one_request_each() -> None:
    stack = Stack(plan=FaultPlan(error_rate=1.0))

    async def story() -> None:
        for _ in range(100):
            with pytest.raises(Unavailable):
                await stack.top.head("data")
        before = stack.counters.requests["head"]
        for _ in range(10):
            with pytest.raises(Unavailable):
                await stack.top.head("data")
        assert stack.counters.requests["head"] - before == 10
        assert before <= 100 + 100

    run(story())


def test_a_closed_body_gives_no_more_and_asks_no_more() -> None:
    stack = Stack(Reset(1_500_000))

    async def story() -> None:
        fetch = await stack.top.fetch("data")
        await fetch.__aiter__().__anext__()
        await fetch.aclose()
        assert [chunk async for chunk in fetch] == []
        assert stack.counters.requests["fetch"] == 1

    run(story())


def test_a_probe_is_one_attempt() -> None:
    stack = Stack(plan=FaultPlan(error_rate=1.0))

    async def story() -> None:
        with pytest.raises(Unavailable):
            await stack.top.probe()
        assert stack.counters.requests["probe"] == 1

    run(story())


def test_a_stale_listing_is_what_the_bucket_said_before() -> None:
    stack = Stack(plan=FaultPlan(stale_rate=1.0))

    async def story() -> None:
        assert await list_all(stack.top) == (["data"], [])
        stack.memory.place("more", b"")
        assert await list_all(stack.top) == (["data"], [])
        assert await list_all(stack.top, after="data") == (["more"], [])

    run(story())


def test_salting_versions_makes_every_object_look_changed() -> None:
    stack = Stack()

    async def story() -> None:
        old = await stack.top.head("data")
        assert await stack.top.check("data", old.version) is None
        stack.faulty.version_salt += 1
        now = await stack.top.check("data", old.version)
        assert now is not None
        with pytest.raises(Precondition):
            await stack.top.fetch("data", version=old.version)
        assert await read(stack.top, "data", version=now.version) == DATA

    run(story())


def test_pacing_and_latency_take_the_time_they_say() -> None:
    stack = Stack(plan=FaultPlan(latency_s=0.5, rate_bytes_s=1e6))

    async def story() -> None:
        assert await read(stack.top, "data") == DATA
        assert stack.now_s == pytest.approx(0.5 + 5.0, rel=0.01)

    run(story())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    resets=st.floats(0, 0.6),
    truncations=st.floats(0, 0.6),
    failures=st.floats(0, 0.3),
    first=st.integers(0, len(DATA) - 1),
    length=st.integers(1, len(DATA)),
)
def test_whatever_goes_wrong_the_bytes_are_right_or_there_is_an_error(
    seed: int, resets: float, truncations: float, failures: float, first: int, length: int
) -> None:
    plan = FaultPlan(
        seed, reset_rate=resets, truncate_rate=truncations, error_rate=failures, change_rate=0.02, lie_rate=0.02
    )
    stack = Stack(plan=plan)
    last = min(first + length, len(DATA)) - 1

    async def story() -> None:
        try:
            got = await read(stack.top, "data", RangeSpec(first, last))
        except (Unavailable, Precondition, Corrupt):
            return
        assert got == DATA[first : last + 1]

    run(story())


# --- writing ---------------------------------------------------------------------------------------------------------
def some(data: bytes) -> Body:
    return Body(len(data), data)


def test_a_body_that_is_cut_off_is_sent_again_whole(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    stack = Stack(Reset(1_000_000), Fail(Busy("slow down", retry_after_s=5.0)), Lose())

    async def story() -> None:
        await stack.top.put("fresh", Body(len(DATA), path=str(tmp_path / "source")))
        assert await read(stack.top, "fresh") == DATA
        assert stack.counters.requests["put"] == 4
        assert stack.slept[1] >= 5
        assert stack.counters.written_bytes == len(DATA), "what the backend is known to have taken"

    run(story())


def test_a_conditional_write_knows_its_own_lost_attempt() -> None:
    stack = Stack(Lose(), Lose())

    async def story() -> None:
        put = await stack.top.put("fresh", some(b"ours"), expect="")
        assert await read(stack.top, "fresh", version=put.version) == b"ours"
        assert stack.counters.requests["put"] == 2, "the first was lost, the second met its work"
        stack.faulty.script.append(Lose())
        again = await stack.top.put("fresh", some(b"once more"), expect=put.version)
        assert await read(stack.top, "fresh", version=again.version) == b"once more"
        stack.faulty.script.append(Lose())
        await stack.top.delete("fresh", expect=again.version)
        with pytest.raises(NotFound):
            await stack.top.head("fresh")

    run(story())


def test_another_node_is_not_asked_twice_for_what_it_may_have_done() -> None:
    """A deletion that happened twice would take what somebody else was told in between."""
    stack = Stack(once=True)

    async def story() -> None:
        body, upload = some(b"body"), await stack.top.begin_upload("large")
        token = await stack.top.put_part("large", upload, 1, body)
        for verb, write in {
            "delete": lambda: stack.top.delete("data"),
            "put": lambda: stack.top.put("fresh", some(b"fresh")),
            "copy": lambda: stack.top.copy("fresh", "again"),
            "complete_upload": lambda: stack.top.complete_upload("large", upload, [(1, token)], expect=""),
        }.items():
            before = stack.counters.requests[verb]
            stack.faulty.script.append(Lose())
            with pytest.raises(Unavailable):
                await write()
            assert stack.counters.requests[verb] == before + 1
            stack.faulty.script.append(Fail(Busy("not now")))
            stack.faulty.script.append(Fail(Unavailable("no answer")))
            with pytest.raises(Unavailable):
                await write()
            assert stack.counters.requests[verb] == before + 3, "what certainly did nothing is asked again"

    run(story())


@pytest.mark.parametrize("theirs", [b"they", b"longer"])
def test_a_lost_attempt_is_not_taken_for_somebody_elses_write(theirs: bytes) -> None:
    """Nor for one that did not happen: another's write that is new may have come after it."""
    stack = Stack(Fail(Unavailable("no answer")))

    async def story() -> None:
        stack.memory.place("key", theirs)
        with pytest.raises(Unavailable, match="not known"):
            await stack.top.put("key", some(b"ours"), expect="")
        assert await read(stack.top, "key") == theirs
        stack.faulty.script.append(Fail(Unavailable("no answer")))
        with pytest.raises(Unavailable, match="not known"):
            await stack.top.delete("key", expect='"another"')
        assert await read(stack.top, "key") == theirs

    run(story())


def test_a_refusal_stands_where_the_object_is_older_than_the_write() -> None:
    """What was there all the time tells that no attempt did anything, the same bytes or not: a lock is not had twice
    because its files look alike."""
    stack = Stack()
    stack.now_s = time.time() + limits.CLOCK_SKEW_MAX_S + 60.0

    async def story() -> None:
        old = stack.memory.place("key", b"locked")
        for body in (b"locked", b"other"):
            stack.faulty.script.append(Fail(Unavailable("no answer")))
            with pytest.raises(Precondition):
                await stack.top.put("key", some(body), expect="")
        stack.faulty.script.append(Fail(Unavailable("no answer")))
        with pytest.raises(Precondition):
            await stack.top.delete("key", expect='"another"')
        assert (await stack.top.head("key")).version == old.version

    run(story())


def test_a_refusal_that_was_heard_before_loses_nothing() -> None:
    """Two conditional writes that met, or a backend that asks for patience: nothing was done, and 412 is the truth."""
    stack = Stack()

    async def story() -> None:
        stack.memory.place("key", b"same")
        for said in (from_status(409, "<Code>ConditionalRequestConflict</Code>", "key"), Busy("slow down")):
            stack.faulty.script.append(Fail(said))
            with pytest.raises(Precondition):
                await stack.top.put("key", some(b"same"), expect="")

    run(story())


def test_a_completion_and_a_copy_know_their_lost_attempt() -> None:
    """A completion by the ETag that its parts make together, a copy by that of its source."""
    stack = Stack()

    async def story() -> None:
        parts = [(1, '"d41d8cd98f00b204e9800998ecf8427e"')]
        upload_id = await stack.top.begin_upload("big")
        ours = stack.memory.place("big", b"")
        named = msgspec.structs.replace(ours, etag=whole_etag(parts))
        stack.memory._objects["big"] = (named, b"")
        for refusal in (changed("big"), no_such_upload("big")):
            stack.faulty.script.extend([Fail(Unavailable("no answer")), Fail(refusal)])
            assert await stack.top.complete_upload("big", upload_id, parts, expect="") == named
            stack.faulty.script.extend([Fail(Unavailable("no answer")), Fail(refusal)])
            with pytest.raises(Unavailable, match="not known"):
                await stack.top.complete_upload("big", upload_id, [(1, "part-1")], expect="")
        stack.faulty.script.append(Fail(no_such_upload("big")))
        with pytest.raises(NotFound):
            await stack.top.complete_upload("big", upload_id, [(1, "part-1")])
        source = await stack.top.head("data")
        stack.faulty.script.extend([Fail(Unavailable("no answer")), Fail(changed("data"))])
        with pytest.raises(Unavailable, match="not known"):
            await stack.top.copy("data", "big", source_version=source.version)
        stack.memory._objects["copied"] = (msgspec.structs.replace(source, key="copied"), DATA)
        stack.faulty.script.extend([Fail(Unavailable("no answer")), Fail(changed("data"))])
        assert (await stack.top.copy("data", "copied", source_version=source.version)).etag == source.etag

    run(story())


def test_a_condition_that_fails_at_once_is_not_looked_into() -> None:
    stack = Stack()

    async def story() -> None:
        stack.memory.place("key", b"same")
        with pytest.raises(Precondition):
            await stack.top.put("key", some(b"same"), expect="")
        assert stack.counters.requests == {"put": 1}

    run(story())


def test_bytes_that_never_come_end_the_matter() -> None:
    stack = Stack()

    async def never(upto: int) -> None:
        raise Unavailable("the client is gone")

    async def story() -> None:
        for call in (
            stack.top.put("key", Body(4, b"data", ready=never)),
            stack.top.put_part("key", await stack.top.begin_upload("key"), 1, Body(4, b"data", ready=never)),
        ):
            with pytest.raises(Unavailable, match="client is gone"):
                await call
        assert stack.slept == []

    run(story())


def test_a_client_that_sends_slowly_does_not_use_up_the_patience(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    stack = Stack(Lose())

    async def slow(upto: int) -> None:
        stack.now_s += 1000.0

    async def story() -> None:
        await stack.top.put("fresh", Body(len(DATA), path=str(tmp_path / "source"), ready=slow))
        assert stack.counters.requests["put"] == 2

    run(story())


def test_a_paced_backend_takes_a_body_as_slowly_as_it_says() -> None:
    stack = Stack(plan=FaultPlan(rate_bytes_s=1_000_000))

    async def story() -> None:
        await stack.top.put("fresh", some(DATA))
        assert stack.now_s == pytest.approx(5.0)

    run(story())


def test_a_lasting_outage_ends_a_write_as_what_it_is() -> None:
    stack = Stack(*[Fail(Unavailable("no answer"))] * 9)

    async def story() -> None:
        for call in (
            stack.top.put("key", some(b"x")),
            stack.top.copy("data", "key"),
        ):
            with pytest.raises(Unavailable):
                await call
            stack.faulty.script.extend([Fail(Unavailable("no answer"))] * 9)
        stack.faulty.script.clear()
        with pytest.raises(NotFound):
            await stack.top.head("key")

    run(story())
