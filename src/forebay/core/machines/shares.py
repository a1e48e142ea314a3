"""Who gets the next permit when all the requests that a bucket may have at once are under way.

Theory. A bucket has a number of *permits*, one for each request under way. Each claim states its need: *first* bytes of
an object, for a client that has nothing yet; the *next* bytes, for a reader that took all it was told of; or bytes
*ahead*, which nobody waits for yet. A free permit goes to the greatest need; among equals to the owner (a flight) that
holds the fewest, then to the oldest claim. Claims ahead never hold more than `ahead_max` permits, so that a needed
request usually finds one free. Requests are not taken back, so without this bound read-ahead at a silent backend would
lock newcomers out. `hasten` raises the need of a claim that somebody has begun to wait for.

Rejected: first come, first served (two hundred slow readers' read-ahead kept one quick reader's first byte waiting for
nineteen seconds); a quota for each owner (idle permits while others wait, or a quota that changes with each of them);
shares for each client (the engine knows flights, which many clients share).

Invariants. (1) At most `permits` are held, of them at most `ahead_max` that were given for bytes ahead. (2) No claim
waits that could be given a permit. (3) A claim is given once, and held until it leaves.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable

import msgspec


class Need(enum.IntEnum):
    """How much a request is needed: the smaller the number, the greater the need."""

    FIRST = 0
    NEXT = 1
    AHEAD = 2


class _Claim(msgspec.Struct):
    owner: Hashable
    need: Need


class Shares(msgspec.Struct):
    """See the module's header. Claims are growing numbers. Each method returns the claims that get a permit now."""

    permits: int
    ahead_max: int
    claims: dict[int, _Claim] = msgspec.field(default_factory=dict)
    given: set[int] = msgspec.field(default_factory=set)
    held: Counter[Hashable] = msgspec.field(default_factory=Counter)  # by owner
    ahead: int = 0  # permits given to claims that were ahead at that moment
    queues: dict[Need, dict[Hashable, dict[int, None]]] = msgspec.field(
        default_factory=lambda: {need: {} for need in Need}
    )

    def __post_init__(self) -> None:
        assert 0 < self.ahead_max < self.permits

    def ask(self, claim: int, owner: Hashable, need: Need) -> list[int]:
        """Enter a claim for one more request."""
        assert claim not in self.claims, "a claim is made once"
        self.claims[claim] = _Claim(owner, need)
        self.queues[need].setdefault(owner, {})[claim] = None
        return self._give()

    def hasten(self, claim: int) -> list[int]:
        """Somebody waits for this claim now. Nothing happens if it was given, or has left."""
        asked = self.claims.get(claim)
        if asked is None or claim in self.given or asked.need <= Need.NEXT:
            return []
        self._unqueue(claim, asked)
        asked.need = Need.NEXT
        self.queues[Need.NEXT].setdefault(asked.owner, {})[claim] = None
        return self._give()

    def leave(self, claim: int) -> list[int]:
        """The request is over, or is no longer wanted."""
        asked = self.claims.pop(claim)
        if claim not in self.given:
            self._unqueue(claim, asked)
            return []
        self.given.discard(claim)
        self.ahead -= asked.need == Need.AHEAD
        self.held[asked.owner] -= 1
        if not self.held[asked.owner]:
            del self.held[asked.owner]
        return self._give()

    def check(self) -> None:
        """Assert the invariants in the module's header."""
        assert self.given <= self.claims.keys()
        assert len(self.given) == self.held.total() <= self.permits
        assert self.ahead == sum(self.claims[claim].need == Need.AHEAD for claim in self.given) <= self.ahead_max
        waiting = {claim for queue in self.queues.values() for claims in queue.values() for claim in claims}
        assert waiting == self.claims.keys() - self.given
        if len(self.given) < self.permits:
            assert not self.queues[Need.FIRST]
            assert not self.queues[Need.NEXT]
            assert not self.queues[Need.AHEAD] or self.ahead == self.ahead_max

    # --- inside ------------------------------------------------------------------------------------------------------
    def _unqueue(self, claim: int, asked: _Claim) -> None:
        queue = self.queues[asked.need]
        del queue[asked.owner][claim]
        if not queue[asked.owner]:
            del queue[asked.owner]

    def _give(self) -> list[int]:
        given: list[int] = []
        while len(self.given) < self.permits and (need := self._neediest()) is not None:
            queue = self.queues[need]
            claim = min((self.held[owner], next(iter(claims))) for owner, claims in queue.items())[1]
            asked = self.claims[claim]
            self._unqueue(claim, asked)
            self.given.add(claim)
            self.held[asked.owner] += 1
            self.ahead += need == Need.AHEAD
            given.append(claim)
        return given

    def _neediest(self) -> Need | None:
        for need, queue in self.queues.items():
            if queue and (need != Need.AHEAD or self.ahead < self.ahead_max):
                return need
        return None
