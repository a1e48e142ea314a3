"""The storm's clients and its judge find every kind of fault that is planted, and nothing where there is none."""

from __future__ import annotations

import threading
from typing import get_args

import pytest

from tests.patience import until
from tests.storm.fake import FakeStore, Fault
from tests.storm.judging import Crew, stalled

FAULTS = [fault for fault in get_args(Fault) if fault]
ROUNDS_MAX = 40


def storm(store: FakeStore, seed: int, rounds: int) -> list[str]:
    """What the judge found wrong in so many rounds of some hundred calls."""
    lossy, store._lossy = store._lossy, 0.0
    crew = Crew(store.ask, ["one", "two"], seed)
    store._lossy = lossy
    with crew.at_work():
        for _ in range(rounds):
            done = crew.board.answered
            until(lambda done=done: crew.board.wrong or crew.board.answered > done + 150)
            crew.quiet()
            if wrong := crew.judge():
                return wrong
            crew.go_on()
    return []


@pytest.mark.parametrize("seed", range(3))
def test_a_right_store_is_right(seed: int) -> None:
    assert storm(FakeStore(seed), seed, 5) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    store = FakeStore(1, fault)
    assert storm(store, 1, ROUNDS_MAX)
    assert store.struck


def test_a_stall_of_what_is_healthy_is_found() -> None:
    """A store that hangs while one disk of two does: what lies on the other one is asked for meanwhile."""
    never = threading.Event()

    def waits() -> bool:
        never.wait()
        return True

    right = {"status": lambda: True, "GET of a healthy key": lambda: True}
    assert stalled(right) == []
    wrong = {"a hit that waits": waits, "an answer that is wrong": lambda: False, "none at all": _cut}
    found = stalled(right | wrong, patience_s=0.5)
    assert [each.partition(" (")[0] for each in found] == sorted(wrong)
    never.set()


def _cut() -> bool:
    raise ConnectionResetError
