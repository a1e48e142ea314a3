"""Bugs to plant in how nodes agree (`core/cluster/`): the world of `cluster.py` must find each.

Theory. As `plants.py`: each changes one function the way a tired programmer might, and `tests/sim` runs seeds until it
is found.
"""

from __future__ import annotations

import msgspec

from forebay.core.cluster import lease, membership
from forebay.core.cluster.lease import LeaseHold
from forebay.core.cluster.membership import Membership, Right, Write
from forebay.core.cluster.mirror import Change, Entry, Mirror
from forebay.core.cluster.records import MAP, Map
from forebay.sim.doors import Patch
from forebay.sim.plants import Plants


def _fence() -> list[Patch]:
    """A holder relies on its lease to its very end."""
    return [(lease, "FENCED_SHARE", 1.0)]


def _answer() -> list[Patch]:
    """A lease is counted from when the renewal was answered."""

    def renewed(self: LeaseHold, now_s: float) -> None:
        self._good_s = now_s
        self.failed(now_s)

    return [(LeaseHold, "renewed", renewed)]


def _activate() -> list[Patch]:
    """A map is made active before everybody acts by it."""
    real = Membership._next_map

    def next_map(self: Membership, now_s: float, map: Map) -> Write | None:
        if not map.active:
            return self._changed({MAP: msgspec.structs.replace(map, active=True)})
        return real(self, now_s, map)

    return [(Membership, "_next_map", next_map)]


def _under_way() -> list[Patch]:
    """A node says that it acts by a map while acts by the one before are under way."""

    def settle(self: Membership) -> list[membership.Effect]:
        if self.map is not None:
            self._asked_epoch = self._settled_epoch = self.map.epoch
        return []

    return [(Membership, "_settle", settle)]


def _moving() -> list[Patch]:
    """The home to be acts while the map is being prepared."""
    return [(Map, "actor", lambda self, bucket, key: self.home(bucket, key))]


def _former() -> list[Patch]:
    """The former home acts until the map is active."""

    def actor(self: Map, bucket: str, key: str) -> str | None:
        return self.home(bucket, key) if self.active else self.former_home(bucket, key)

    return [(Map, "actor", actor)]


def _presence() -> list[Patch]:
    """Who holds a lease acts, in the store or not."""
    return [(Membership, "is_present", lambda self, now_s: self.hold.holds(now_s))]


def _still() -> list[Patch]:
    """What was allowed once is acknowledged."""

    def still(self: Membership, now_s: float, right: Right) -> bool:
        return True

    return [(Membership, "still", still)]


def _gone() -> list[Patch]:
    """A copy never hears of what is gone."""
    real = Mirror.listed

    def listed(self: Mirror, entries: list[Entry], revision: int) -> list[Change]:
        return [change for change in real(self, entries, revision) if change.value is not None]

    return [(Mirror, "listed", listed)]


def _farewell() -> list[Patch]:
    """A node that drains goes when nobody asks it any more, whatever it owes."""
    real = Membership._farewell

    def farewell(self: Membership, map: Map) -> Write | None:
        self._owes_bytes = 0
        return real(self, map)

    return [(Membership, "_farewell", farewell)]


PLANTS: Plants = {
    "activate": _activate,
    "answer": _answer,
    "farewell": _farewell,
    "fence": _fence,
    "former": _former,
    "gone": _gone,
    "moving": _moving,
    "presence": _presence,
    "still": _still,
    "under-way": _under_way,
}
