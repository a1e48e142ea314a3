"""A pool: a share of the cache in which units compete, with its newcomers and its longest interval.

Theory. Each bucket with a quota is a pool of its own; all others together form one. A pool keeps its newcomers in order
of arrival (*probation*), counts its bytes, and measures how long its units take to come back: the *longest* recent
interval between two uses, in ticks of the machine's clock. The longest interval shrinks slowly while no unit takes that
long, so that one straggler does not keep dead units alive for ever. The pool is part of `core/machines/eviction.py`.

Invariant. `probation_bytes` and `main_bytes` are the sums over the pool's units. The queue may also hold units that
have left it; they are skipped when the queue reaches them.
"""

from __future__ import annotations

from collections import deque

PROBATION_SHARE = 0.01
DEAD_FACTOR = 1.3
LONGEST_DECAY = 1 / 16  # of the longest interval, per such interval of time


class Pool:
    """A share of the cache: a bucket with a quota, or all the others together (code 1)."""

    __slots__ = ("code", "hand", "limit_bytes", "longest", "longest_at", "main_bytes", "probation", "probation_bytes")

    def __init__(self, code: int, limit_bytes: int) -> None:
        self.code = code
        self.limit_bytes = limit_bytes
        self.hand = 0
        self.longest = 0.0  # longest recent interval between two uses of a resident, in ticks; 0: none seen
        self.longest_at = 0
        self.main_bytes = 0
        self.probation: deque[int] = deque()
        self.probation_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self.main_bytes + self.probation_bytes

    @property
    def overflow_bytes(self) -> int:
        """How far probation is above its share."""
        return self.probation_bytes - int(self.limit_bytes * PROBATION_SHARE)

    def observe(self, interval: int, now: int) -> None:
        """Note that a unit came back after `interval`."""
        if interval >= self.longest:
            self.longest, self.longest_at = float(interval), now

    def is_dead(self, idle: int, now: int) -> bool:
        """Whether a resident idle for this long is past what residents show. Nothing is dead before the first
        return."""
        if now - self.longest_at > self.longest > 0:
            self.longest -= self.longest * LONGEST_DECAY
            self.longest_at = now
        return 0 < self.longest * DEAD_FACTOR < idle
