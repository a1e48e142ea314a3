"""When a disk counts as stalled: by what it does not finish, and only while somebody was awake to see it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.machines.stall import COUNTED_MAX, LOOK_S, Stall


def looks(stall: Stall, oldest: list[int | None], every_s: float = LOOK_S) -> list[bool]:
    return [stall.look(100.0 + number * every_s, each) for number, each in enumerate(oldest)]


def test_what_never_comes_back_is_a_stall_and_its_coming_back_ends_it() -> None:
    stall = Stall(5.0)
    assert looks(stall, [None, 7, *[7] * 9]) == [False] * 11
    assert looks(stall, [7]) == [False], "an end of the clock that went back counts nothing"
    assert stall.look(101.0, 7)
    assert stall.look(101.5, 7)
    assert not stall.look(102.0, 8), "the next one has its own time"
    assert not stall.look(102.5, None)


def test_a_disk_that_is_slow_and_finishes_is_none() -> None:
    assert not any(looks(Stall(5.0), [number // 9 for number in range(500)]))


def test_a_process_that_slept_has_seen_nothing() -> None:
    stall = Stall(5.0)
    assert not any(looks(stall, [1, 1]))
    assert not stall.look(10_000.0, 1), "stopped for hours: the disk had no time to answer"
    assert not any(stall.look(10_000.0 + 3600 * look, 1) for look in range(1, 4))
    assert stall.look(30_000.0, 1)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from([None, 1, 2])), max_size=80))
def test_a_stall_needs_the_time_and_the_looks(steps: list[tuple[float, int | None]]) -> None:
    stall, now_s, since_s, count, before = Stall(5.0), 0.0, 0.0, 0, None
    for passed_s, oldest in steps:
        now_s += passed_s
        if oldest is None or oldest != before:
            since_s, count, before = now_s, 0, oldest
        else:
            count += 1
        if stall.look(now_s, oldest):
            assert oldest is not None
            assert now_s - since_s >= 5.0 - 1e-6
            assert count * COUNTED_MAX * LOOK_S >= 5.0 - 1e-6
