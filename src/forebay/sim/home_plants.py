"""Bugs to plant in how nodes agree on whose word counts for a key: stories of several nodes must find each.

Theory. As `plants.py`: each changes one function of the product, the way a tired programmer might.
"""

from __future__ import annotations

import msgspec

from forebay.core.cluster.records import Map
from forebay.core.types import Bucket
from forebay.node.engine.homes import Homes, Name
from forebay.node.engine.peers import Peers
from forebay.node.engine.seat import Home
from forebay.sim.doors import Patch
from forebay.sim.plants import Plants


def _past() -> list[Patch]:
    """A new home asks nobody who may have the key from before."""
    return [(Homes, "_asked", lambda homes, agreed, name: [])]


def _claim() -> list[Patch]:
    """Who is asked for a key says that it has nothing of it."""

    async def claim(homes: Homes, bucket: str, key: str) -> bool:
        return True

    return [(Homes, "claim", claim)]


def _released() -> list[Patch]:
    """A node says that it let everything go when it has not."""

    async def let_all_go(homes: Homes, agreed: Map) -> bool:
        return True

    return [(Homes, "_let_all_go", let_all_go)]


def _confirmed() -> list[Patch]:
    """What is cached of a key that is let go still counts as confirmed."""

    async def unconfirm(homes: Homes, agreed: Map, bucket: str) -> bool:
        return False

    return [(Homes, "_let_go", lambda homes, name: None), (Homes, "_unconfirm", unconfirm)]


def _fresh() -> list[Patch]:
    """A node that is not the home believes what it knows for a minute."""
    real = Peers._place

    def place(peers: Peers, bucket: str, home: Home) -> Bucket:
        return msgspec.structs.replace(real(peers, bucket, home), freshness_s=60.0)

    return [(Peers, "_place", place)]


def _listing() -> list[Patch]:
    """A listing does not ask the other nodes what no backend has."""
    return [(Homes, "others", lambda homes, bucket, prefix: [])]


def _home() -> list[Patch]:
    """Every node takes itself for every key's home."""

    def is_home(homes: Homes, name: Name) -> bool:
        return True

    return [(Homes, "_is_home", is_home)]


PLANTS: Plants = {
    "claim": _claim,
    "confirmed": _confirmed,
    "fresh": _fresh,
    "home": _home,
    "listing": _listing,
    "past": _past,
    "released": _released,
}
