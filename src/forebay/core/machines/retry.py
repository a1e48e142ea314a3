"""Whether a failed backend request is tried again, and after how long.

Theory. Exactly one layer retries, and it asks here. Three things decide: the kind of error (only errors that may pass
by themselves are retried), the attempts and time already spent, and a *budget* that all requests of one backend share.
Delays are exponential with full jitter: the draw spreads clients over the whole interval, so that they do not come back
in step. If a backend says when to come back (Retry-After), the delay is at least that long. If that is later than the
request may live, the request fails at once and its error carries that time.

The budget is a token bucket: a retry costs RETRY_COST, a success earns 1. It stays full while most requests succeed. In
an outage it drains, and from then on each request is sent once. So the load on a sick backend is at most (1 +
1/RETRY_COST) of the demand instead of `attempts_max` times it, and no clock is needed for the refill.

Rejected: equal jitter and decorrelated jitter (no better under contention, harder to bound); a circuit breaker (a
second state machine with its own clock; the budget already bounds the load, and requests still probe for recovery).

Invariants. (1) At most `attempts_max` attempts and no delay that would end after `elapsed_max_s`. (2) A delay is at
least what the backend asked for. (3) 0 <= tokens <= TOKENS_MAX. (4) Same inputs, same decision.
"""

from __future__ import annotations

import msgspec

from forebay.core import limits
from forebay.core.errors import MAP_CHANGES, Busy, Corrupt, ForebayError, NoBackendBucket, Unavailable

RETRYABLE: tuple[type[ForebayError], ...] = (Busy, Unavailable, Corrupt)
TOKENS_MAX = 500  # the vendor's SDKs: 500 tokens, 5 per retry: a hundred retries in a row before the budget binds
RETRY_COST = 5


class RetryPolicy(msgspec.Struct, frozen=True):
    """How patient one request is. Seconds throughout."""

    attempts_max: int = limits.BACKEND_ATTEMPTS_MAX
    base_s: float = 0.1  # the first delay is drawn from [0, base_s)
    delay_max_s: float = 10.0
    elapsed_max_s: float = 120.0  # from the first attempt: a reader that waits longer is better served by an error

    def __post_init__(self) -> None:
        assert self.attempts_max >= 1
        assert 0 < self.base_s <= self.delay_max_s <= self.elapsed_max_s


DEFAULT_POLICY = RetryPolicy()


class RetryBudget:
    """The token bucket of one backend, shared by all its requests. Starts full."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = TOKENS_MAX

    def succeeded(self) -> None:
        """A request succeeded: earn a token."""
        self.tokens = min(TOKENS_MAX, self.tokens + 1)

    def spend(self) -> bool:
        """Take the price of one retry. False if there are too few tokens."""
        if self.tokens < RETRY_COST:
            return False
        self.tokens -= RETRY_COST
        return True

    def check(self) -> None:
        assert 0 <= self.tokens <= TOKENS_MAX, self.tokens


def is_retryable(error: ForebayError) -> bool:
    """Whether the same backend may succeed on another try after this kind of error. A node that says that the map
    changes is asked again by another map: that is another backend, and not for this layer."""
    return isinstance(error, RETRYABLE) and not isinstance(error, NoBackendBucket) and error.code != MAP_CHANGES


def delay_before_retry(
    attempt: int,
    error: ForebayError,
    elapsed_s: float,
    draw: float,
    budget: RetryBudget,
    policy: RetryPolicy = DEFAULT_POLICY,
) -> float | None:
    """Seconds to wait before attempt `attempt + 1`, or None: give up and raise `error`.

    `attempt` is the number of the failed attempt, from 1. `elapsed_s` counts from the start of the first attempt.
    `draw` is uniform in [0, 1). A returned delay costs `budget` one retry.
    """
    assert attempt >= 1
    assert 0.0 <= draw < 1.0
    if not is_retryable(error) or attempt >= policy.attempts_max:
        return None
    ceiling_s: float = min(policy.delay_max_s, policy.base_s * 2.0 ** min(attempt - 1, 60))
    delay_s = max(draw * ceiling_s, error.retry_after_s)
    if elapsed_s + delay_s > policy.elapsed_max_s:
        return None
    return delay_s if budget.spend() else None
