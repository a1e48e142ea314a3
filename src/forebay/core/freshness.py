"""Whether a cached version may be served without asking the backend.

Theory. A bucket says how long a confirmation holds (`Bucket.freshness_s`): for ever (immutable), not at all (always
ask) or some seconds. A record says when the backend last confirmed its version. Both are wall-clock seconds, and wall
clocks step: a confirmation from the future is no confirmation, since nothing says how far the clock is off.

Rejected: the backend's own Cache-Control (few set it, most set it for browsers).

What is unconfirmed (`checked_s` 0) is asked about once, whatever the bucket says: what a write through was about to
replace when the engine was killed, or when the backend's answer was lost. While the backend is away it is still served:
nobody was told that the write happened.

What a machine stop brings back, or a volume from a time when the node went on without it (`MISSED`), may be older: a
write or delete that was acknowledged may have replaced it. Until the backend confirms it, it is served only by a bucket
whose backend takes no writes, since nobody can have replaced it through the node there.

Invariant. `always` never answers fresh, `immutable` always does once it was confirmed.
"""

from __future__ import annotations

from forebay.core.types import FRESH_IMMUTABLE

MISSED = -1.0  # `checked_s` of what a machine stop or its volume brought back
CLOCK_SLACK_S = 1.0  # processes of one host may disagree by a scheduling delay, not more


def is_fresh(checked_s: float, freshness_s: float, now_s: float) -> bool:
    """True: serve. False: revalidate first (`OpenRead.revalidate`); the bytes stay valid if the version is unchanged.

    `checked_s` of 0 means unconfirmed, and so does `MISSED`.
    """
    if checked_s <= 0 or freshness_s <= 0:
        return False
    if freshness_s >= FRESH_IMMUTABLE:
        return True
    return -CLOCK_SLACK_S <= now_s - checked_s < freshness_s


def fresh_until_s(checked_s: float, freshness_s: float) -> float:
    """When a confirmation made at `checked_s` ends (Unix time), or FRESH_IMMUTABLE for never."""
    return FRESH_IMMUTABLE if freshness_s >= FRESH_IMMUTABLE else checked_s + freshness_s
