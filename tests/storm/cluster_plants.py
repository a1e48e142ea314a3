"""Faults planted in the steps by which nodes agree who acts on a key; a cluster's storm has to find each.

Each changes one function of the product in every process of every node (`fleet.py` starts them with `FOREBAY_PLANT`),
the way a tired programmer might.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from forebay.core.cluster.records import Map
from forebay.node.engine.homes import Homes


def _earlier() -> None:
    """A new home does not ask who held its keys before."""
    Map.earlier = lambda self, bucket, key: set()  # type: ignore[method-assign]


def _everybody() -> None:
    """Each node takes itself for the home of every key."""
    Homes._is_home = lambda self, name: True  # type: ignore[method-assign]


def _unconfirmed() -> None:
    """Who lets a key go leaves what it has of it as confirmed as it was, and says that it let everything go."""

    async def nothing_left(self: Homes, agreed: Map) -> bool:
        return True

    Homes._let_go = lambda self, name: None  # type: ignore[method-assign]
    Homes._let_all_go = nothing_left  # type: ignore[method-assign]


def _released() -> None:
    """A node says that it let everything go while it owes what nobody else has."""

    async def owes_nothing(self: Homes, agreed: Map, bucket: str) -> bool:
        return False

    Homes._owes = owes_nothing  # type: ignore[method-assign]
    Homes._unconfirm = owes_nothing  # type: ignore[method-assign]


def _listing() -> None:
    """A listing asks no other node what no backend has."""
    Homes.others = lambda self, bucket, prefix: []  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "earlier": _earlier,
    "everybody": _everybody,
    "unconfirmed": _unconfirmed,
    "released": _released,
    "listing": _listing,
}


def plant_as_told() -> None:
    """Plant what the environment names."""
    PLANTS[os.environ["FOREBAY_PLANT"]]()
