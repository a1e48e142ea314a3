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

Rejected: a list of changes instead of maps (whoever missed one is wrong for ever); the table of slots in the store
(megabytes, and everybody can compute it).

Invariants. (1) At every moment at most one node may act on a key by all maps that living processes act by (`actor`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from forebay.core.placement import Members

PREFIX = "cluster/"
ID = PREFIX + "id"
MAP = PREFIX + "map"
NODES = PREFIX + "node/"
ALIVE = PREFIX + "alive/"

Wanted = Literal["active", "draining", "maintenance", "gone"]
State = Literal["joining", "active", "missing", "draining", "leaving", "maintenance", "gone"]


class NodeRecord(msgspec.Struct, frozen=True):
    """A node: where it is reached, how much it holds, and what is wanted of it."""

    address: str
    weight: float  # bytes of capacity
    wanted: Wanted = "active"


class Presence(msgspec.Struct, frozen=True):
    """A node's process that lives. `incarnation` is drawn at its start; it acts by the map of `epoch`."""

    incarnation: str
    epoch: int
    lease: int


UNREADABLE = Presence("", 0, 0)  # of a process that lives, perhaps, and whose entry somebody overwrote


class Map(msgspec.Struct, frozen=True):
    """Who owns which keys: weights by node. `former`: before that."""

    epoch: int
    active: bool
    owners: dict[str, float]
    former: dict[str, float]

    def actor(self, bucket: str, key: str) -> str | None:
        """Who may act on the key by this map: its home, unless the key is on its way to another."""
        home = self.home(bucket, key)
        return home if self.active or home == self.former_home(bucket, key) else None

    def home(self, bucket: str, key: str) -> str | None:
        """Who owns the key, or will when the map is active."""
        return _first(self.owners, bucket, key)

    def former_home(self, bucket: str, key: str) -> str | None:
        """Who owned it before: whom the home asks before it asks the backend."""
        return _first(self.former, bucket, key)


def encoded(value: NodeRecord | Presence | Map) -> bytes:
    """As it stands in the store: JSON, so that an operator can read it with etcdctl."""
    return msgspec.json.encode(value)


def _first(weights: dict[str, float], bucket: str, key: str) -> str | None:
    return _members(tuple(sorted(weights.items()))).first(bucket, key) if weights else None


@lru_cache(maxsize=16)
def _members(weights: tuple[tuple[str, float], ...]) -> Members:
    """Maps follow each other, and each has its owners twice: their tables (2 MiB) are made once."""
    return Members(dict(weights))
