"""Which member (node or volume) holds which key: weighted rendezvous hashing over 2^20 slots.

Theory. A key's digest names a *slot*; each slot ranks the members by an exponential race: member m draws a number
u in (0, 1) from (slot, m) and finishes at -ln(u) / weight; the earliest is first. Shares are proportional to weights,
the loser's order never depends on who else takes part, so a member that leaves moves only its own keys and one that
comes takes only what it wins. Nobody is asked and nothing is stored: every node and client computes the same answer.

Going through slots makes the answer a table look-up: 16 bits per slot hold the winner, filled as slots are met, so a
volume is chosen in about a microsecond however many there are. 2^20 slots leave each of 64 members 16,384 of them, a
share within 2 % of its weight; of 256 members, within 5 % (docs/design/0016-placement-balance.md).

The function, for other languages: xxh3_64 throughout; strings in UTF-8.
    slot(bucket, key, stripe) = xxh3_64(bucket + "/" + key, seed = stripe) >> 44
    u(slot, id)               = ((xxh3_64(slot as 4 bytes little endian, seed = xxh3_64(id)) >> 11) + 0.5) / 2^53
    rank by -ln(u) / weight ascending, then by id.
Stripe 0 is the key's home. Vectors: docs/placement-vectors.json.

Rejected: a ring (uneven without thousands of points, state to agree on); jump hashing (members must be numbered, one in
the middle cannot leave); scoring every member per request (cost grows with members, 0.4 microseconds each).

Invariants. (1) Same ids and weights, in any order, same answers. (2) Removing a member keeps the others' order.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

SLOT_BITS = 20
SLOTS = 1 << SLOT_BITS
_SHIFT = 64 - SLOT_BITS
MEMBERS_MAX = 65_534  # a table entry is 16 bits and 0 means not computed yet


def slot_of(bucket: str, key: str, stripe: int = 0) -> int:
    """The slot of one stripe of a key, 0 <= slot < SLOTS."""
    return xxh3_64_intdigest(f"{bucket}/{key}".encode(), seed=stripe) >> _SHIFT


class Members:
    """An immutable set of weighted members with its winner table. Holds 2 MiB once it is used with several members."""

    __slots__ = ("_seeds", "_sole", "_winners", "ids", "weights")

    def __init__(self, weights: Mapping[str, float] | Sequence[str]) -> None:
        """`weights` maps ids to positive weights (bytes of capacity do); a sequence of ids means equal weights."""
        pairs = weights if isinstance(weights, Mapping) else dict.fromkeys(weights, 1.0)
        assert len(pairs) <= MEMBERS_MAX, len(pairs)
        assert all(weight > 0 and math.isfinite(weight) for weight in pairs.values()), pairs
        self.ids: tuple[str, ...] = tuple(sorted(pairs))
        self.weights: tuple[float, ...] = tuple(float(pairs[name]) for name in self.ids)
        self._seeds = tuple(xxh3_64_intdigest(name.encode()) for name in self.ids)
        self._sole = self.ids[0] if len(self.ids) == 1 else None
        self._winners: array[int] | None = None

    def __repr__(self) -> str:
        return f"Members({dict(zip(self.ids, self.weights, strict=True))})"

    def first(self, bucket: str, key: str, stripe: int = 0) -> str:
        """The member that owns this stripe: `order(…)[0]`, fast. There must be at least one member."""
        if self._sole is not None:
            return self._sole
        slot = xxh3_64_intdigest(f"{bucket}/{key}".encode(), seed=stripe) >> _SHIFT
        winners = self._winners
        if winners is None:
            winners = self._winners = array("H", bytes(2 * SLOTS))
        winner = winners[slot]
        if not winner:
            winner = winners[slot] = self._ranked(slot)[0][1] + 1
        return self.ids[winner - 1]

    def order(self, bucket: str, key: str, stripe: int = 0) -> tuple[str, ...]:
        """All members, owner first; the second is who takes over if the first leaves."""
        return tuple(self.ids[index] for _, index in self._ranked(slot_of(bucket, key, stripe)))

    def _ranked(self, slot: int) -> list[tuple[float, int]]:
        data = slot.to_bytes(4, "little")
        log = math.log
        # ids are sorted, so an (all but impossible) tie falls to the lower id
        return sorted(
            (-log(((xxh3_64_intdigest(data, seed=seed) >> 11) + 0.5) * 2.0**-53) / weight, index)
            for index, (seed, weight) in enumerate(zip(self._seeds, self.weights, strict=True))
        )


def place(bucket: str, key: str, stripe: int, members: Members) -> tuple[str, ...]:
    """`members.order(bucket, key, stripe)`: ids in the order in which they should hold the stripe."""
    return members.order(bucket, key, stripe)
