"""The retry decision: what, when, how often, and how much of it in an outage."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import KINDS, Busy, Unavailable
from forebay.core.machines.retry import (
    DEFAULT_POLICY,
    RETRY_COST,
    TOKENS_MAX,
    RetryBudget,
    RetryPolicy,
    delay_before_retry,
    is_retryable,
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_only_what_may_pass_by_itself_is_tried_again(kind):
    delay_s = delay_before_retry(1, KINDS[kind]("…"), 0.0, 0.5, RetryBudget())
    assert (delay_s is not None) == (kind in {"Busy", "Unavailable", "Corrupt"}) == is_retryable(KINDS[kind]("…"))


def test_delays_spread_over_a_doubling_interval():
    budget = RetryBudget()
    policy = RetryPolicy(attempts_max=20, base_s=0.1, delay_max_s=1.0)
    highest = [delay_before_retry(n, Unavailable("…"), 0.0, 0.999999, budget, policy) for n in range(1, 8)]
    assert highest == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0], rel=1e-4)
    assert delay_before_retry(5, Unavailable("…"), 0.0, 0.0, budget, policy) == 0.0


def test_the_backends_own_time_is_obeyed_or_the_request_fails_at_once():
    assert delay_before_retry(1, Busy("…", retry_after_s=7.0), 0.0, 0.1, RetryBudget()) == 7.0
    assert delay_before_retry(1, Busy("…", retry_after_s=3600.0), 0.0, 0.1, RetryBudget()) is None
    assert (
        delay_before_retry(1, Busy("…", retry_after_s=7.0), DEFAULT_POLICY.elapsed_max_s - 6, 0.1, RetryBudget())
        is None
    )


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from(sorted(KINDS)),
    st.floats(0, 300),
    st.floats(0, 0.999),
    st.floats(0, 200),
    st.integers(0, TOKENS_MAX),
)
def test_every_decision_keeps_the_bounds(attempt, kind, elapsed_s, draw, after_s, tokens):
    budget = RetryBudget()
    budget.tokens = tokens
    delay_s = delay_before_retry(attempt, KINDS[kind]("…", retry_after_s=after_s), elapsed_s, draw, budget)
    budget.check()
    if delay_s is None:
        assert budget.tokens == tokens, "a request that gives up costs nothing"
    else:
        assert attempt < DEFAULT_POLICY.attempts_max
        assert after_s <= delay_s <= max(after_s, DEFAULT_POLICY.delay_max_s)
        assert elapsed_s + delay_s <= DEFAULT_POLICY.elapsed_max_s
        assert budget.tokens == tokens - RETRY_COST


def requests_sent(demand: int, failing: float, seed: int) -> int:
    """How many requests reach a backend that fails this share of them, for `demand` wanted."""
    chance, budget, sent = random.Random(seed), RetryBudget(), 0
    for _ in range(demand):
        for attempt in range(1, 100):
            sent += 1
            if chance.random() >= failing:
                budget.succeeded()
                break
            if delay_before_retry(attempt, Unavailable("…"), 0.0, chance.random(), budget) is None:
                break
    return sent


def test_an_outage_does_not_multiply_the_load():
    assert requests_sent(10_000, failing=1.0, seed=1) <= 10_000 + TOKENS_MAX // RETRY_COST


def test_rare_failures_are_always_tried_again():
    sent = requests_sent(10_000, failing=0.05, seed=2)
    assert 10_400 < sent < 10_700, "about one extra request per failure"
