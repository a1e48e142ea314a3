"""What is taken for a hang, and what is not: watchers and watched as lists of looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.machines.pulse import WORKING_TIMES, Pulse, interval_s

DEADLINE_S = 10.0


def looks_until_hung(
    pulse: Pulse, beats: int, *, step_s: float, worked_s: float = 0.0, looks: int = 1000
) -> int | None:
    """At which look, from now on, it is found to hang, if nothing comes but `worked_s` of work between two looks."""
    now_s = active_s = 0.0
    for number in range(looks):
        if pulse.look(now_s, beats, active_s):
            return number
        now_s, active_s = now_s + step_s, active_s + worked_s
    return None


def test_silence_and_stillness_are_a_hang() -> None:
    assert looks_until_hung(Pulse(DEADLINE_S), 1, step_s=1.0) == 10


def test_nothing_hangs_before_its_first_beat_nor_without_a_deadline() -> None:
    assert looks_until_hung(Pulse(DEADLINE_S), 0, step_s=1.0) is None
    assert looks_until_hung(Pulse(0.0), 1, step_s=1.0) is None


def test_one_that_works_gets_more_time_but_not_for_ever() -> None:
    found = looks_until_hung(Pulse(DEADLINE_S), 1, step_s=1.0, worked_s=0.2)
    assert found == WORKING_TIMES * 10


def test_one_that_worked_is_given_the_deadline_anew() -> None:
    pulse = Pulse(DEADLINE_S)
    assert looks_until_hung(pulse, 1, step_s=1.0, looks=10) is None
    assert not pulse.look(10.0, 1, 0.9), "it worked"
    assert looks_until_hung(pulse, 1, step_s=1.0, looks=9) is None


def test_a_watcher_that_comes_late_proves_nothing() -> None:
    """The machine, or all of the node, stood still for an hour: one late look, and the beat is there with the next."""
    pulse = Pulse(DEADLINE_S)
    assert not pulse.look(0.0, 5, 1.0)
    assert not pulse.look(3600.0, 5, 1.0)
    assert not pulse.look(3601.0, 6, 1.0)
    assert pulse.silent_s == 0.0


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.floats(0.0, 100.0)), max_size=60),
    st.sampled_from([1.0, 3.0, 10.0]),
)
def test_a_hang_is_never_found_too_early(looks: list[tuple[float, bool, float]], deadline_s: float) -> None:
    """Whatever comes: hung is only who was silent for the deadline, by the clock and by looks."""
    pulse = Pulse(deadline_s)
    now_s = last_beat_s = active_s = 0.0
    beats = silent_looks = 0
    for passed_s, beat, worked_s in looks:
        now_s, active_s = now_s + passed_s, active_s + worked_s
        beats += beat
        last_beat_s, silent_looks = (now_s, 0) if beat else (last_beat_s, silent_looks + 1)
        if pulse.look(now_s, beats, active_s):
            assert beats
            assert now_s - last_beat_s >= deadline_s * 0.999
            assert silent_looks * interval_s(deadline_s) >= deadline_s * 0.999
