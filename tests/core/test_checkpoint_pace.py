"""How long sending pauses, from what the system says of the thread that trains."""

from __future__ import annotations

import pytest

from forebay.core.checkpoint_pace import NONE, REST_MAX, SPENT, CoreTime, Pace


class Training:
    """A thread that is always ready to run."""

    def __init__(self) -> None:
        self.now = NONE

    def goes_on(self, wall_s: float, slowness: float) -> CoreTime:
        ran_s = wall_s / slowness
        self.now = CoreTime(self.now.ran_s + ran_s, self.now.waited_s + wall_s - ran_s)
        return self.now


@pytest.mark.parametrize("alone", [1.0, 4.0])  # a core of its own, and a machine that others use
@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1, 0.2, 0.3])
def test_training_loses_no_more_than_may_be_spent(alone: float, cost: float):
    training, pace = Training(), Pace()
    pace.begin(training.goes_on(10.0, alone))
    sent_s = paused_s = 0.0
    for _ in range(8):
        before = training.now
        pause_s = pace.sent(before, training.goes_on(0.1, alone * (1 + cost)), 0.1)
        training.goes_on(pause_s, alone)
        sent_s, paused_s = sent_s + 0.1, paused_s + pause_s
    lost = cost * sent_s / (sent_s + paused_s)
    assert lost == pytest.approx(min(cost, SPENT))


def test_the_longest_pause_has_a_bound():
    training, pace = Training(), Pace()
    pace.begin(training.goes_on(10.0, 1.0))
    assert pace.sent(training.now, training.goes_on(1.0, 50.0), 1.0) == REST_MAX


def test_what_a_blob_cost_is_forgotten_by_halves_and_others_load_is_not_ours():
    training, pace = Training(), Pace()
    pace.begin(training.goes_on(10.0, 1.0))
    pauses = [pace.sent(training.now, training.goes_on(0.1, 1.32), 0.1)]
    for _ in range(4):
        pauses.append(pace.sent(training.now, training.goes_on(0.1, 1.0), 0.1))
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[0] == pytest.approx(0.7)
    assert pauses[-1] == 0.0
    pace.end(training.now)
    pace.begin(training.goes_on(60.0, 3.0))  # somebody else came
    assert pace.sent(training.now, training.goes_on(0.1, 3.0), 0.1) == 0.0


def test_a_thread_that_waits_for_a_device_is_no_measure():
    training, pace = Training(), Pace()
    pace.begin(training.goes_on(10.0, 1.0))
    now = CoreTime(training.now.ran_s + 0.001, training.now.waited_s + 0.008)
    assert pace.sent(training.now, now, 5.0) == 0.0


def test_where_the_system_says_nothing_and_after_a_change_of_the_thread_nothing_pauses():
    pace = Pace()
    pace.begin(NONE)
    assert pace.sent(NONE, NONE, 1.0) == 0.0
    pace.end(CoreTime(100.0, 50.0))
    pace.begin(CoreTime(3.0, 1.0))
    assert pace.sent(CoreTime(3.0, 1.0), CoreTime(4.0, 1.0), 1.0) == 0.0
