"""Who acts on a key changes: what certainly did nothing is asked again, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forebay.core.errors import MAP_CHANGES, Busy, ForebayError, Unavailable, from_wire, map_changes
from forebay.core.messages.calls import PutCall
from forebay.node.engine import asking
from forebay.node.engine.asking import Patience

from .conftest import Rig
from .writing import written

Rigged = Callable[..., None]


class Clock:
    """Stands still, but for pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    async def next_map(self, timeout_s: float) -> None:
        self.now_s += timeout_s


class Asked:
    """Fails so often in this way."""

    def __init__(self, error: ForebayError, times: int) -> None:
        self.error, self.left, self.times = error, times, 0

    async def __call__(self) -> str:
        self.times += 1
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


def again(clock: Any, asked: Asked) -> str:
    return asyncio.run(Patience(clock, clock).again(asked))


def test_what_did_nothing_is_asked_again_for_a_while() -> None:
    clock, asked = Clock(), Asked(map_changes("the map changes", 0.25), 9)
    assert (again(clock, asked), asked.times) == ("done", 10)
    clock, asked = Clock(), Asked(map_changes("the map changes", 0.25), 10**9)
    with pytest.raises(Busy, match="the map changes"):
        again(clock, asked)
    assert asking.AGAIN_FOR_S <= clock.now_s <= asking.AGAIN_FOR_S + 1


@pytest.mark.parametrize("error", [Unavailable("it may have been done"), Busy("slow down")])
def test_nothing_else_is_asked_again(error: ForebayError) -> None:
    asked = Asked(error, 1)
    with pytest.raises(type(error)):
        again(Clock(), asked)
    assert asked.times == 1


def test_it_is_known_on_the_way() -> None:
    error = from_wire(map_changes("the map changes", 0.25).to_wire())
    assert (type(error), error.code) == (Busy, MAP_CHANGES)


@pytest.mark.parametrize("lost", ["", "the lease ended"])
def test_a_write_that_was_under_way_is_not_said_to_have_done_nothing(rigged: Rigged, lost: str) -> None:
    """The node is drained meanwhile, and may end it: it is acknowledged. If it may not, nobody knows."""

    async def story(rig: Rig) -> None:
        await written(rig, "local")
        began: list[int] = []

        def member() -> int:
            if began:
                raise map_changes("the node is drained", 0.25)
            began.append(7)
            return 7

        writes: Any = rig.engine.writes
        writes._member, writes._lost = member, lambda lease: lost if lease == 7 else "another lease"
        call = PutCall("remote", "key", 5, body=b"bytes")
        if lost:
            with pytest.raises(Unavailable, match=r"the lease ended\. It may have been written") as refused:
                await writes.put(call)
            assert refused.value.code != MAP_CHANGES
        else:
            assert (await writes.put(call)).size_bytes == 5
        assert began == [7], "it was not begun again"

    rigged(story)
