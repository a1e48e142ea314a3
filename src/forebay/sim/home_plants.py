"""Bugs to plant in how nodes agree on whose word counts for a key, and keep copies: stories of several must find each.

Theory. As `plants.py`: each changes one function of the product, the way a tired programmer might. `copies_plants.py`
has those of the ledgers of copies alone, some of which only many worlds find.
"""

from __future__ import annotations

from socket import socket
from typing import Any

import msgspec

from forebay.core.cluster.membership import Membership
from forebay.core.cluster.records import Map, Presence
from forebay.core.cluster.replication import Kept, Sent
from forebay.core.machines import sent_bodies
from forebay.core.messages.wire import Relay
from forebay.core.record import Record
from forebay.core.types import Bucket
from forebay.node.engine.homes import Homes, Name
from forebay.node.engine.kept import KeptCopies
from forebay.node.engine.peers import Peers
from forebay.node.engine.replicas import Replicas
from forebay.node.engine.seat import Home
from forebay.node.front.objects import relay
from forebay.node.store.writer.puts import Change
from forebay.sim.copies_plants import covered
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


def _unkept() -> list[Patch]:
    """A write is acknowledged when it is here, whether a second keeps it or not."""

    async def place(replicas: Replicas, name: Name, copy: Any) -> int:
        return replicas._agreed().held

    return [(Replicas, "_place", place)]


def _lease() -> list[Patch]:
    """Whoever was told of no later map answers for its keys, whatever became of its lease."""

    def acts_until_s(machine: Membership, now_s: float) -> float:
        deposed = machine.map is None or machine.node in machine.map.deposed
        return 0.0 if deposed else now_s + 3600.0

    return [(Membership, "acts_until_s", acts_until_s)]


def _clear() -> list[Patch]:
    """What has been flushed leaves its copy where it is."""

    async def clear(replicas: Replicas, bucket: str, key: str) -> None: ...

    return [(Replicas, "clear", clear)]


def _deposed() -> list[Patch]:
    """A node that was taken over comes back with what it had."""

    def acts_until_s(machine: Membership, now_s: float) -> float:
        return machine.hold.fenced_s if machine.is_present(now_s) else 0.0

    async def forget_all(replicas: Replicas) -> None: ...

    return [
        (Membership, "acts_until_s", acts_until_s),
        (Replicas, "is_deposed", False),
        (Replicas, "_forget_all", forget_all),
    ]


def _taken() -> list[Patch]:
    """Whoever takes over acts before it has made the copies its own."""
    return [(Kept, "acts_anew", lambda ledger, agreed, name: False)]


def _unsent() -> list[Patch]:
    """Whoever takes over knows neither what the dead node's write was based on, nor what of it may have been sent."""
    real = KeptCopies._own

    async def own(copies: KeptCopies, name: Name, record: Record) -> Change | None:
        change = await real(copies, name, record)
        if change is None or change.note is None:
            return change
        note = msgspec.structs.replace(change.note, based_on="", **sent_bodies.Sent()._asdict())
        return change._replace(note=note)

    return [(KeptCopies, "_own", own)]


def _returned() -> list[Patch]:
    """A node that was taken over holds again, and has forgotten nothing of what it had."""

    async def forget_all(replicas: Replicas) -> None: ...

    return [(Replicas, "_forget_all", forget_all), (Replicas, "is_settled", lambda replicas: True)]


def _useless() -> list[Patch]:
    """Whoever takes over leaves what its copies were made from in their place."""
    real = KeptCopies._take_over

    async def take_over(copies: KeptCopies, name: Name) -> None:
        there = copies.ledger.copies.get(name)
        await real(copies, name)
        if there is not None:
            copies.ledger.keep(name, there)

    return [(KeptCopies, "_take_over", take_over)]


def _relay() -> list[Patch]:
    """What comes of a relayed body together with the answer's head is lost."""
    real = relay._ask

    async def ask(connection: socket, of: Relay, start: int) -> tuple[bytes, bool]:
        _, keeps = await real(connection, of, start)
        return b"", keeps

    return [(relay, "_ask", ask)]


def _compared() -> list[Patch]:
    """After a change of holders nobody compares lists again."""
    real = Sent.to_compare

    def to_compare(sent: Sent, agreed: Map, alive: dict[str, Presence]) -> str | None:
        found = real(sent, agreed, alive)
        return found if found not in sent._compared else None

    return [(Sent, "to_compare", to_compare)]


PLANTS: Plants = {
    "claim": _claim,
    "clear": _clear,
    "compared": _compared,
    "confirmed": _confirmed,
    "covered": covered,
    "deposed": _deposed,
    "fresh": _fresh,
    "home": _home,
    "lease": _lease,
    "listing": _listing,
    "past": _past,
    "relay": _relay,
    "released": _released,
    "returned": _returned,
    "taken": _taken,
    "unkept": _unkept,
    "unsent": _unsent,
    "useless": _useless,
}
