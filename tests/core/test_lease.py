"""A holder never relies on its lease when the store may have ended it, whatever is lost, late or slow."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.cluster.lease import FENCED_SHARE, LeaseHold, Take

TTL_S = 10.0


@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.8, 1.0, 1.25]))
def test_what_the_holder_relies_on_the_store_still_has(seed: int, rate: float) -> None:
    """The holder's clock runs at `rate`. The store is a deadline on the true clock."""
    chance = random.Random(seed)
    hold, now_s, ends_s, leases = LeaseHold(TTL_S), 0.0, float("-inf"), 0
    for _ in range(60):
        asked = hold.ask(now_s * rate)
        asked_s, heard = now_s, chance.random() < 0.7
        now_s += chance.choice([0.0, 0.1, 3.0])  # on its way
        gone = not isinstance(asked, Take) and now_s >= ends_s
        if heard and not gone:
            ends_s = now_s + TTL_S
            leases += isinstance(asked, Take)
        now_s += chance.choice([0.0, 0.1, 6.0])  # the answer is
        if not heard or chance.random() < 0.1:
            hold.failed(now_s * rate)
        elif gone:
            hold.gone(now_s * rate)
        elif isinstance(asked, Take):
            hold.taken(now_s * rate, leases, TTL_S)
        else:
            hold.renewed(now_s * rate)
        if heard and not gone and hold.holds(now_s * rate):
            assert now_s - asked_s < TTL_S * FENCED_SHARE / rate
        while now_s * rate < hold.due_s or chance.random() < 0.3:  # it sleeps, or is paused
            assert not hold.holds(now_s * rate) or now_s < ends_s, "it would act under a lease that has ended"
            now_s += chance.choice([0.3, 1.0, 7.0])
        assert not hold.holds(now_s * rate) or now_s < ends_s


def test_two_renewals_may_fail_and_the_third_is_too_late() -> None:
    hold = LeaseHold(12.0)
    hold.ask(100.0)
    hold.taken(101.0, 7, 12.0)
    for asked_s in (102.0, 104.0):
        assert hold.due_s == asked_s, "counted from when it asked"
        hold.ask(asked_s)
        hold.failed(asked_s + 1.0)
        assert hold.holds(asked_s + 1.0)
    assert hold.holds(105.99)
    assert not hold.holds(106.0)
    hold.ask(106.0)
    hold.renewed(107.0)
    assert hold.holds(107.0), "the store had it still"
    hold.ask(108.0)
    hold.gone(109.0)
    assert not hold.holds(109.0)
    assert isinstance(hold.ask(109.0), Take)


def test_a_store_that_gives_less_time_is_believed_and_one_that_gives_more_is_not_relied_on() -> None:
    for given_s, relied_on_s in ((4.0, 2.0), (60.0, 5.0)):
        hold = LeaseHold(TTL_S)
        hold.ask(0.0)
        hold.taken(0.0, 1, given_s)
        assert hold.fenced_s == relied_on_s
