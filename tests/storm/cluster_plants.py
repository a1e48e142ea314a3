"""Faults planted in the steps by which nodes agree who acts on a key; a cluster's storm has to find each.

Each changes one function of the product in every process of every node (`fleet.py` starts them with `FOREBAY_PLANT`),
the way a tired programmer might.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from forebay.backends.coded.backend import CodedBackend
from forebay.backends.coded.codec import Codec
from forebay.backends.http.requests import Answer
from forebay.backends.s3.writing import S3Writes, described
from forebay.core.cluster.coding import Entry, Span
from forebay.core.cluster.records import Map
from forebay.core.errors import ForebayError, NotFound
from forebay.core.types import ObjectInfo
from forebay.node.engine.homes import Homes
from forebay.node.engine.slices import Situation, Slices

LATE_S = 3.0
LOOKS_AFTER_S = 0.2


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


def _swapped() -> None:
    """A read takes the first two slices of a group for one another."""
    swap = {0: 1, 1: 0}
    right = CodedBackend.ask

    async def ask(self: CodedBackend, entry: Entry, span: Span) -> bytes | None:
        return await right(self, entry, span._replace(number=swap.get(span.number, span.number)))

    CodedBackend.ask = ask  # type: ignore[method-assign]


def _hasty() -> None:
    """An entry is put before its slices are, and they come if nothing comes in between."""

    async def send(
        self: CodedBackend, key: str, entry: Entry, group: int, slices: dict[int, tuple[str, bytes]]
    ) -> None:
        self._in_background(_late(right(self, key, entry, group, slices)))

    async def _late(sent: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(LATE_S)
        with contextlib.suppress(ForebayError):
            await sent

    right = CodedBackend.send
    CodedBackend.send = send  # type: ignore[method-assign]


def _unmended() -> None:
    """Nobody looks for slices that are missing."""

    async def all_are_there(self: Slices, seen: Situation) -> bool:
        return True

    Slices._look_after = all_are_there  # type: ignore[method-assign]


def _zeros() -> None:
    """What is computed of a lost slice is zeros."""

    def restore(self: Codec, known: Mapping[int, bytes], wanted: Sequence[int]) -> dict[int, bytes]:
        return {number: bytes(len(next(iter(known.values())))) for number in wanted if number not in known}

    Codec.restore = restore  # type: ignore[method-assign]


def _untidy() -> None:
    """Slices of what was replaced stay."""
    CodedBackend._tidy = lambda self, entry: None  # type: ignore[method-assign]
    Slices._is_named = _is_named  # type: ignore[method-assign]


async def _is_named(self: Slices, generation: str, number: int, said: str) -> bool:
    return True


def _named() -> None:
    """Slices that moved are deleted where the entry says that they are."""
    right = CodedBackend.put_entry

    async def put_entry(self: CodedBackend, key: str, entry: Entry, version: str) -> None:
        await right(self, key, entry, version)
        if entry.revision:
            self._tidy(entry)

    CodedBackend.put_entry = put_entry  # type: ignore[method-assign]


def _described() -> None:
    """A copy that another node made fails if that does not say, a moment later, what it is."""

    async def made(self: S3Writes, key: str, etag: str, answer: Answer) -> ObjectInfo:
        await asyncio.sleep(LOOKS_AFTER_S)
        try:
            return await self._look(key)
        except NotFound:
            return described(key, 0, answer, ())

    S3Writes._made = made  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "earlier": _earlier,
    "everybody": _everybody,
    "unconfirmed": _unconfirmed,
    "released": _released,
    "listing": _listing,
    "swapped": _swapped,
    "hasty": _hasty,
    "unmended": _unmended,
    "zeros": _zeros,
    "named": _named,
    "untidy": _untidy,
    "described": _described,
}


def plant_as_told() -> None:
    """Plant what the environment names, if anything."""
    if plant := os.environ["FOREBAY_PLANT"]:
        PLANTS[plant]()
