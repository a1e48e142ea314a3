"""What nodes agree on, as it stands in the store: who they are, who lives, and which map holds.

Theory. Four kinds of entries (`meta/seam.py`), each with one writer at a time:

* `cluster/node/ID`: what is known of a node, and what its operator wants of it. It outlives the node's process.
* `cluster/alive/ID`: its process, as long as it lives: the entry hangs on the process's lease. It says which map the
  process acts by.
* `cluster/id`: drawn by whoever came first. A node that was here once remembers it, and so knows a wrong cluster.
* `cluster/map`: who owns which keys. Its epoch only grows. A new map is *preparing* first: its `former` owners act only
  on what stays with them. When every living process acts by it, it is *active*.

Placement is weighted rendezvous hashing over the owners (`core/placement.py`), so a map is a list of names and weights
and says where every key is.

*Holders.* What a backend has anybody may serve, so its keys go from a node that is not heard of to the others. What
only nodes have (buckets written back, or local) stays where it is: such keys are at home by `holders`, which a node
leaves when it is drained, given up, or taken over. `past` says who may still have keys from before. A home asks them
before it acts.

*Taken over.* What only nodes have lies on two of them (`replication.py`). `held` is the epoch of the last change of
holders. A holder that finds that copies which it kept for others are gone says so, and that is an epoch of its own
(`lost`). `covered` is the last epoch for which every holder said that all it has lies on two nodes. While it is `due`,
the last of all these, a node that is missing may be taken over: it is `deposed`, and its copies are old until it has
forgotten them. One that is `given_up` is taken over as far as others have what it had; nothing says that this is all,
or at whom it is. It is not taken back: what it had would be a second history of each key.
A bucket may ask for more than two: then the next in a key's order have it as well (`seconds`).

*Releases.* A node says in its record which PROTOCOL it speaks: what stands in these entries, and what nodes ask each
other. Fields may be added with defaults at any time; the number grows when a node of the release before would do harm.
Neighbours may be of one cluster, so that nodes are upgraded one after the other (`may_mix`).

Rejected: a list of changes instead of maps (whoever missed one is wrong for ever); the table of slots in the store
(megabytes, and everybody can compute it).

Invariants. (1) At every moment at most one node may act on a key by all maps that living processes act by (`actor`).
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal

import msgspec

from forebay.core.placement import Members

PREFIX = "cluster/"
ID = PREFIX + "id"
MAP = PREFIX + "map"
NODES = PREFIX + "node/"
ALIVE = PREFIX + "alive/"

TWICE = ", on two nodes"  # how a bucket's line in `NodeRecord.buckets` ends, if all that no backend has is kept twice
LOCAL_TWICE = "local" + TWICE
PROTOCOL = 2  # 1: releases that did not say
PAST_MAX = 8  # changes of holders that somebody still owes keys of

Wanted = Literal["active", "draining", "maintenance", "gone"]
State = Literal["joining", "active", "missing", "draining", "leaving", "maintenance", "gone"]


def may_mix(one: int, other: int) -> bool:
    """Whether nodes that speak these may be of one cluster."""
    return abs(one - other) <= 1


class NodeRecord(msgspec.Struct, frozen=True):
    """A node: where it is reached, how much it holds, what is wanted of it, and how it keeps the buckets that are not
    written through. `protocol`: what it speaks, 1 if it does not say; `release`: of Forebay, for people."""

    address: str
    weight: float  # bytes of capacity
    wanted: Wanted = "active"
    buckets: dict[str, str] = {}
    protocol: int = 1
    release: str = ""
    replaced: bool = False  # others may take over what it had, when it is silent
    hands_over: bool = False  # it says when they may, if it is drained (`Presence.aside`)
    was_gone: bool = False  # it is wanted back, and was not here since: it counts as gone until it is


class Presence(msgspec.Struct, frozen=True):
    """A node's process that lives. `incarnation` is drawn at its start; it acts by the map of `epoch`."""

    incarnation: str
    epoch: int
    lease: int
    released: int = 0  # by the map of this epoch it had nothing that is at home elsewhere
    covered: int = 0  # by this epoch (`Map.due`) all that it has alone lies on another node too
    lost: int = 0  # how often it found that copies which it kept for others are gone
    aside: int = 0  # odd: it acts on nothing that others would take over, so that they may


UNREADABLE = Presence("", 0, 0)  # of a process that lives, perhaps, and whose entry somebody overwrote


class Past(msgspec.Struct, frozen=True):
    """Who may still have what only nodes have, of keys that the map of `epoch` gave to others: those who held them
    until then, and `newcomers`, who may have brought anything."""

    epoch: int
    holders: dict[str, float]
    newcomers: tuple[str, ...] = ()


def bounded(past: tuple[Past, ...]) -> tuple[Past, ...]:
    """At most PAST_MAX changes. Rejected: no further change meanwhile (a cluster whose nodes were all drained and taken
    back several times, with local objects, was left without holders for ever)."""
    while len(past) > PAST_MAX:
        first, second, *rest = past
        nodes = {*first.holders, *first.newcomers, *second.holders, *second.newcomers}
        past = (Past(second.epoch, {}, tuple(sorted(nodes))), *rest)
    return past


class Loss(msgspec.Struct, frozen=True):
    """The last time that a node said that copies are gone: which process, for the how-manieth time, since which epoch
    the others have to look again."""

    incarnation: str
    lost: int
    epoch: int


class Map(msgspec.Struct, frozen=True, dict=True):
    """Who owns which keys: weights by node. `former`: before that. `holders`, `past`: the same of what only nodes
    have. `held`, `covered`, `deposed`, `lost`: see the module. `leaving`: the holder that hands over next, if any.
    `deposed_at`: the epoch by which somebody was deposed or given up last; once all was covered since, what is left of
    their copies is nobody's (0: a release that did not say). `given_up`: by which epoch; until a node is forgotten."""

    epoch: int
    active: bool
    owners: dict[str, float]
    former: dict[str, float]
    holders: dict[str, float] = {}
    past: tuple[Past, ...] = ()
    held: int = 0
    covered: int = 0
    deposed: tuple[str, ...] = ()
    lost: dict[str, Loss] = {}
    leaving: str = ""
    deposed_at: int = 0
    given_up: dict[str, int] = {}

    @property
    def due(self) -> int:
        """The epoch by which all has to lie on two nodes."""
        return max([self.held, *(loss.epoch for loss in self.lost.values())])

    @property
    def is_covered(self) -> bool:
        """Whether all that only nodes have lies on two of them."""
        return self.covered >= self.due

    @property
    def is_taking_over(self) -> bool:
        """Whether somebody was deposed, or given up, whose copies others may still have to make their own."""
        return bool(self.deposed or self.given_up) and self.covered < (self.deposed_at or self.held)

    @property
    def bequeaths(self) -> list[str]:
        """The nodes that were given up and whose copies others may still have to make their own."""
        return [node for node, epoch in self.given_up.items() if self.covered < epoch]

    @property
    def replaced(self) -> list[str]:
        """The nodes of which copies are others' own, or will be."""
        return [*self.deposed, *self.bequeaths]

    def was_made_again(self, node: str, incarnation: str, losses: int) -> bool:
        """Whether all copies are there again that this process of the node found gone, so many times."""
        loss = self.lost.get(node)
        said = loss is not None and (loss.incarnation, loss.lost) == (incarnation, losses)
        return node not in self.losers() and (said or not losses)

    def losers(self) -> set[str]:
        """Nodes whose copies were not all made again."""
        return {node for node, loss in self.lost.items() if loss.epoch > self.covered}

    def actor(self, bucket: str, key: str) -> str | None:
        """Who may act on the key by this map: its home, unless the key is on its way to another."""
        home = self.home(bucket, key)
        return home if self.active or home == self.former_home(bucket, key) else None

    def home(self, bucket: str, key: str, stripe: int = 0) -> str | None:
        """Who owns the key, or a later stripe of it, or will when the map is active."""
        return None if self._owning is None else self._owning.owner(bucket, key, stripe)

    def former_home(self, bucket: str, key: str, stripe: int = 0) -> str | None:
        """Who owned it before: whom the home asks before it asks the backend."""
        return _first(self.former, bucket, key, stripe)

    def holder(self, bucket: str, key: str) -> str | None:
        """Whose word counts for the key, in a bucket that is not written through."""
        return None if self._holding is None else self._holding.owner(bucket, key, 0)

    def earlier(self, bucket: str, key: str) -> set[str]:
        """Whom the holder asks before it acts on the key: they may have it from before."""
        asked = {node for past in self.past for node in (_first(past.holders, bucket, key), *past.newcomers)}
        return {node for node in asked if node is not None} - {self.holder(bucket, key), *self.deposed}

    def seconds(self, actor: str, bucket: str, key: str, copies: int = 2) -> list[str]:
        """Who keeps a copy of what `actor` alone has of the key, in a bucket with so many copies: the home, were
        `actor` no holder, and so on. Where one of all these is `leaving`, one more does: then all is on so many nodes
        still when that has handed over. Fewer, where there are no other holders."""
        if self._holding is None:
            return []
        others = (node for node in self._holding.order(bucket, key) if node != actor)
        found = list(islice(others, copies - 1))
        if found and self.leaving and self.leaving in (actor, *found):
            found += islice(others, 1)
        return found

    # Found once for each map: to look them up by their weights takes 30 µs with 256 nodes, and every miss asks.
    @cached_property
    def _owning(self) -> Members | None:
        return _of(self.owners)

    @cached_property
    def _holding(self) -> Members | None:
        return _of(self.holders)


def encoded(value: NodeRecord | Presence | Map) -> bytes:
    """As it stands in the store: JSON, so that an operator can read it with etcdctl."""
    return msgspec.json.encode(value)


def wanted_record(record: bytes, wanted: Wanted) -> bytes:
    """The entry of a node as it stands in the store, of which its operator now wants this."""
    before = msgspec.json.decode(record, type=NodeRecord)
    was_gone = wanted != "gone" and (before.was_gone or before.wanted == "gone")
    was_gone &= before.hands_over  # else it is of a release that would not take it out again
    return encoded(msgspec.structs.replace(before, wanted=wanted, was_gone=was_gone))


def _first(weights: dict[str, float], bucket: str, key: str, stripe: int = 0) -> str | None:
    members = _of(weights)
    return None if members is None else members.owner(bucket, key, stripe)


def _of(weights: dict[str, float]) -> Members | None:
    return _members(tuple(sorted(weights.items()))) if weights else None


@lru_cache(maxsize=24)
def _members(weights: tuple[tuple[str, float], ...]) -> Members:
    """Maps follow each other, and each has its owners twice: their tables (2 MiB) are made once."""
    return Members(dict(weights))
