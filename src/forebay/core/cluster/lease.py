"""Holding a lease: when to renew it, and until when its holder may act.

Theory. Who holds a lease of T seconds may rely on it, and others rely on it being gone T after its last renewal. The
two count on different clocks, and a renewal takes its time. So the holder counts from the moment when it *asked*, and
trusts half of T: from T/2 on it does not act (it *fences* itself), and others act after T. The other half is for clocks
of different rate, and for a holder that is stopped between looking at its clock and acting.

It renews every T/6: two renewals may fail before it fences. One request is out at a time. A lease that is gone is not
renewed: a new one is taken, and what hung on the old one must be written again.

Rejected: counting from the answer (a slow answer would lengthen the lease on one side only); a renewal by every write
(a node without writes would die).

Invariants. (1) `holds` is never true T/2 or more after the last request that was answered with yes. (2) A lease that
was given up or lost is not held again; only a new one is. (3) At most one request is out.
"""

from __future__ import annotations

import msgspec

RENEWALS_A_LEASE = 6  # at T/6, T/3: then the holder fences
FENCED_SHARE = 0.5


class Take(msgspec.Struct, frozen=True):
    """Ask for a lease of `ttl_s`."""

    ttl_s: float


class Renew(msgspec.Struct, frozen=True):
    """Ask for the lease to last on."""

    lease: int


class LeaseHold:
    """See the module's header. Of one lease at a time. The shell asks at `due_s`, and reports every answer."""

    def __init__(self, ttl_s: float) -> None:
        assert ttl_s > 0, ttl_s
        self.ttl_s = ttl_s
        self.lease = 0  # 0: none
        self.due_s = float("-inf")  # when to ask next; never while a request is out
        self._asked_s = 0.0  # of the request that is out
        self._good_s = float("-inf")  # when the last request was sent that was answered with yes

    def holds(self, now_s: float) -> bool:
        """Whether the holder may act at this moment."""
        return self.lease != 0 and now_s < self.fenced_s

    @property
    def fenced_s(self) -> float:
        """When the holder stops, unless a renewal is answered before."""
        return self._good_s + self.ttl_s * FENCED_SHARE

    def ask(self, now_s: float) -> Take | Renew:
        """It is time: what to ask the store."""
        assert self.due_s <= now_s, (self.due_s, now_s)
        self._asked_s, self.due_s = now_s, float("inf")
        return Renew(self.lease) if self.lease else Take(self.ttl_s)

    def taken(self, now_s: float, lease: int, ttl_s: float) -> None:
        """The store gave a lease of `ttl_s`; only as much is relied on as was asked for. What hung on another lease
        must be written again."""
        assert lease, "leases are numbered from 1"
        assert not self.lease, (lease, self.lease)
        self.lease, self.ttl_s = lease, min(self.ttl_s, ttl_s)
        self.renewed(now_s)

    def renewed(self, now_s: float) -> None:
        """The store let it last on."""
        self._good_s = self._asked_s
        self.failed(now_s)

    def gone(self, now_s: float) -> None:
        """The store does not know the lease: it ran out, or somebody revoked it."""
        self.lease, self._good_s, self.due_s = 0, float("-inf"), now_s

    def failed(self, now_s: float) -> None:
        """Nobody answered. The request may have been granted: nothing is concluded from it."""
        self.due_s = max(now_s, self._asked_s + self.ttl_s / RENEWALS_A_LEASE)
