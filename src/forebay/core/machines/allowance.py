"""How much an identity may do in a second, and how long one waits who did more.

Theory. All that was taken is *paid off* at the identity's rate, and one number says when the last of it is
(`paid_s`, monotonic seconds). Whoever is at most BURST_S behind may take more; anybody else is told how long to wait.
What is taken may be more than a second's worth, since nobody knows how long an answer will be before it is asked for:
then it is paid for afterwards. So over any time the rate holds, but for one burst and the last answer.

One number of eight bytes can be shared between processes without a lock: a write of it is whole. Two fronts that
charge in the same instant may lose one of the charges, which is less than a burst.

Rejected: slowing down answers under way (a slow answer holds a connection, a lease and maybe a flight, and looks like a
sick node); windows of a second (twice the rate at their edges); a share of the rate for each front (a client with one
connection would get one share).

Invariants. (1) `paid_s` never falls. (2) Nothing waits longer than it takes to pay for what was taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from forebay.core.errors import Invalid
from forebay.core.quantity import parse_rate

BURST_S: Final = 1.0  # what may be taken at once, in seconds of the rate


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an identity may do on a node; 0: as much as there is. `bytes_per_s` counts bodies both ways, with heads of
    answers; `connections` those that are open and were last used by it."""

    requests_per_s: float = 0.0
    bytes_per_s: float = 0.0
    connections: int = 0


def check_limits(limits: Limits) -> None:
    """`Invalid` for what can be no limit."""
    if not (0 <= limits.requests_per_s < 1e12 and 0 <= limits.bytes_per_s < 1e15 and 0 <= limits.connections < 1e6):
        raise Invalid("a limit is a number from 0, which means none: requests_per_s, bytes_per_s, connections")


class Limited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits as people write them: bytes a second as a number or as `100MiB/s`."""

    requests_per_s: float = 0.0
    bytes_per_s: float | str = 0.0
    connections: int = 0

    def read(self) -> Limits:
        """`Invalid` for what can be no limit."""
        per_s = parse_rate(self.bytes_per_s) if isinstance(self.bytes_per_s, str) else self.bytes_per_s
        limits = Limits(self.requests_per_s, per_s, self.connections)
        check_limits(limits)
        return limits


def loosest(given: Iterable[Limits]) -> Limits | None:
    """Of each number the largest, where 0 is as much as there is; None if none are given."""
    found = list(given)
    if not found:
        return None
    each = zip(*(msgspec.structs.astuple(one) for one in found), strict=True)
    return Limits(*(0 if 0 in numbers else max(numbers) for numbers in each))


def wait_s(paid_s: float, now_s: float) -> float:
    """How long who has taken so much waits before taking more; 0.0: not at all."""
    return max(0.0, paid_s - BURST_S - now_s)


def charge(paid_s: float, now_s: float, amount: float, per_s: float) -> float:
    """The new `paid_s` of who takes `amount` at `now_s`."""
    assert per_s > 0
    return max(paid_s, now_s) + amount / per_s
