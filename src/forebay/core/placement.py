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

*Stripes of a large object* are dealt out DEAL at a time, so that whoever reads it in order uses all links alike. In
order of their numbers each goes to the first of its ranking who has room: the member has fewer of the deal so far than
its exact share of it (docs/design/0018-stripes.md).
    stripe s, deal d = s // DEAL, place i = s % DEAL: the first m in the ranking of s with
    stripes of m in d before s  <  (i + 1) * weight(m) / total, where total sums the weights in the order of ids.
The first of a deal goes to the first of its ranking, since all have room. So stripe 0 is at the home.

Rejected: a ring (uneven without thousands of points, state to agree on); jump hashing (members must be numbered, one in
the middle cannot leave); scoring every member per request (cost grows with members, 0.4 microseconds each).

Invariants. (1) Same ids and weights, in any order, same answers. (2) Removing a member keeps the others' order.
(3) Of the first stripes of a deal, however many, no member has more than its share rounded up.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

SLOT_BITS = 20
SLOTS = 1 << SLOT_BITS
_SHIFT = 64 - SLOT_BITS
DEAL = 64  # stripes: 1 GiB; dealing them takes 0.2 ms with 4 members, 15 ms with 256
DEALS_KEPT_MAX = 1024  # of recent objects
MEMBERS_MAX = 65_534  # a table entry is 16 bits and 0 means not computed yet


def slot_of(bucket: str, key: str, stripe: int = 0) -> int:
    """The slot of one stripe of a key, 0 <= slot < SLOTS."""
    return xxh3_64_intdigest(f"{bucket}/{key}".encode(), seed=stripe) >> _SHIFT


class Members:
    """An immutable set of weighted members with its winner table. Holds 2 MiB once it is used with several members."""

    __slots__ = ("_deals", "_seeds", "_sole", "_winners", "ids", "weights")

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
        self._deals: dict[tuple[str, str, int], tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"Members({dict(zip(self.ids, self.weights, strict=True))})"

    def first(self, bucket: str, key: str, stripe: int = 0) -> str:
        """`order(…)[0]`, fast: with stripe 0 the key's home. There must be at least one member."""
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

    def owner(self, bucket: str, key: str, stripe: int) -> str:
        """The member that holds this stripe of a large object; of stripe 0 the key's home."""
        if self._sole is not None or stripe == 0:
            return self.first(bucket, key)
        name = (bucket, key, stripe // DEAL)
        deal = self._deals.get(name)
        if deal is None:
            deal = self._dealt(*name)
            if len(self._deals) >= DEALS_KEPT_MAX:
                self._deals = {}  # replaced whole: threads may share this
            self._deals[name] = deal
        return self.ids[deal[stripe % DEAL]]

    def _dealt(self, bucket: str, key: str, deal: int) -> tuple[int, ...]:
        """Who holds the stripes of a deal, as places in `ids`."""
        total, have, owners = sum(self.weights), [0] * len(self.ids), []
        for place in range(DEAL):
            ranked = self._ranked(slot_of(bucket, key, deal * DEAL + place))
            room = (index for _, index in ranked if have[index] < (place + 1) * self.weights[index] / total)
            owner = next(room, ranked[0][1])  # somebody has room, but for how floats are rounded
            have[owner] += 1
            owners.append(owner)
        return tuple(owners)

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
