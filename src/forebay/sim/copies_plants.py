"""Bugs to plant in how copies are kept and taken over: the world of `copies.py` must find each.

Theory. As `cluster_plants.py`. Those that change the world itself are mistakes that a shell might make.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from forebay.core.cluster.membership import Membership
from forebay.core.cluster.next_map import Succession
from forebay.core.cluster.records import Map, Presence
from forebay.core.cluster.replication import Copy, Kept, Mark, Name, Sent
from forebay.sim.copies import Copies
from forebay.sim.doors import Patch
from forebay.sim.plants import Plants


def _fence() -> list[Patch]:
    """Copies are kept by whatever map they are sent."""

    def takes(self: Kept, agreed: Map, held: int, name: Name, copy: Copy, asked: bool = False) -> bool:
        there = self.copies.get(name)
        return there is None or there.actor != copy.actor or copy.number >= there.number

    return [(Kept, "takes", takes)]


def _floors() -> list[Patch]:
    """A copy that comes late is kept, though it was cleared."""
    real = Kept.takes

    def takes(self: Kept, agreed: Map, held: int, name: Name, copy: Copy, asked: bool = False) -> bool:
        self._floors.clear()
        self._floor.clear()
        return real(self, agreed, held, name, copy, asked)

    return [(Kept, "takes", takes)]


def _astray() -> list[Patch]:
    """Copies of what is being written stay at who keeps them, whoever should."""
    real = Sent.listed

    def listed(
        self: Sent, agreed: Map, node: str, owned: Iterable[tuple[Name, int]]
    ) -> tuple[dict[Name, int], set[Name]]:
        return real(self, agreed, node, owned)[0], set(self.busy.values())

    return [(Sent, "listed", listed)]


def covered() -> list[Patch]:
    """A missing node is taken over whether or not all was covered."""
    real = Succession._taken_over

    def taken_over(self: Succession) -> str | None:
        holders = self._before.holders
        missing = next((node for node in sorted(holders) if self._is_missing(node)), None)
        return real(self) or (missing if len(holders) > 1 else None)

    return [(Succession, "_taken_over", taken_over)]


def _deposed() -> list[Patch]:
    """A node that was taken over comes back with what it had."""
    return [(Copies, "_forget", lambda self, process, agreed: None), (Membership, "member", _member)]


def _member(self: Membership, now_s: float) -> int:
    own = self.nodes.get(self.node)
    return self.hold.lease if own is not None and own.wanted == "active" and self.is_present(now_s) else 0


def _clear_first() -> list[Patch]:
    """Who has flushed forgets what it owed, and the copy stays until it is compared."""
    return [(Copies, "_clears_first", False)]


def _replaced() -> list[Patch]:
    """A copy of another version than the list has leaves before the right one is sent."""
    real = Kept.compare

    def compare(
        self: Kept,
        agreed: Map,
        held: int,
        actor: str,
        number: int,
        listed: Mapping[Name, int],
        busy: Collection[Name],
        **more: Any,
    ) -> tuple[list[Name], list[Name]] | None:
        found = real(self, agreed, held, actor, number, listed, busy, **more)
        if found is None:
            return None
        missing, dropped = found
        other = [
            name
            for name in missing
            if name in self.copies and self.copies[name].actor == actor and self.copies[name].number <= number
        ]
        return missing, [*dropped, *other]

    return [(Kept, "compare", compare)]


def _taken() -> list[Patch]:
    """Who takes over acts before it has made the copies its own."""
    return [
        (Kept, "acts_anew", lambda self, agreed, name: False),
        (Kept, "taken_over", lambda self, agreed: []),
    ]


def _lease() -> list[Patch]:
    """Who was told of no later map goes on, whatever became of its lease."""

    def member(self: Membership, now_s: float) -> int:
        deposed = self.map is not None and self.node in self.map.deposed
        return self.hold.lease or 1 if not deposed and self.node in self.nodes else 0

    return [(Membership, "member", member), (Membership, "acts_until_s", lambda self, now_s: now_s + 1.0)]


def _aside() -> list[Patch]:
    """Who says that it stands aside goes on."""

    def member(self: Membership, now_s: float) -> int:
        return self.hold.lease if self.map is not None and self.node not in self.map.deposed else 0

    def acts_until_s(self: Membership, now_s: float) -> float:
        return self.hold.fenced_s if member(self, now_s) and self.is_present(now_s) else 0.0

    return [(Membership, "member", member), (Membership, "acts_until_s", acts_until_s)]


def _unsaid() -> list[Patch]:
    """Who has lost copies says nothing."""
    return [(Copies, "_says_lost", False)]


def _relook() -> list[Patch]:
    """Nobody compares lists again with who has lost copies."""
    real = Sent.mark

    def mark(self: Sent, agreed: Map, alive: Mapping[str, Presence], node: str) -> Mark:
        return (*real(self, agreed, alive, node)[:3], 0)

    return [(Sent, "mark", mark)]


def _given_up() -> list[Patch]:
    """What is kept for a node that was given up is nobody's."""
    return [(Map, "replaced", property(lambda self: [*self.deposed]))]


def _third() -> list[Patch]:
    """Only the second is sent anything, also where three are to have it."""
    return [(Sent, "seconds", lambda self, agreed, name: agreed.seconds(self.node, *name))]


PLANTS: Plants = {
    "aside": _aside,
    "astray": _astray,
    "clear-first": _clear_first,
    "covered": covered,
    "deposed": _deposed,
    "fence": _fence,
    "floors": _floors,
    "given-up": _given_up,
    "lease": _lease,
    "relook": _relook,
    "replaced": _replaced,
    "taken": _taken,
    "third": _third,
    "unsaid": _unsaid,
}
