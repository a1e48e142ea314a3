"""Openings: one question to a backend about one object, shared by all who wait for its answer.

Theory. `ColdReads` asks and keeps the openings. This module has an opening's first request, and the values that pass
between the asker and those who wait.

Invariant. The body in a `Passing` is read by one reader or closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from forebay.backends.refusing import Refusing
from forebay.backends.seam import Fetch
from forebay.core import limits
from forebay.core.errors import Corrupt, Precondition, Unavailable
from forebay.core.ranges import Run
from forebay.core.record import Record
from forebay.core.types import ListPage, ObjectInfo, RangeSpec
from forebay.node.engine.buckets import Served
from forebay.node.engine.read.flights import Flight

FIRST_BYTES = 16 * limits.MIB  # an object of that size is one request, as a direct read would be
_BLOCK = limits.BLOCK_BYTES
PASSING_KEPT_S = 1.0  # how long an open body waits for the reader that asked for it


class Passing:
    """The first body of an object that no disk takes. The first reader gets it; the others fetch for themselves."""

    def __init__(self, fetch: Fetch, first: Run) -> None:
        self.info = fetch.info
        self._body: tuple[Fetch, Run] | None = (fetch, first)

    def take(self) -> tuple[Fetch, Run] | None:
        body, self._body = self._body, None
        return body

    async def expire(self) -> None:
        await asyncio.sleep(PASSING_KEPT_S)
        if body := self.take():
            await body[0].aclose()


class Answer(NamedTuple):
    """How an opening ended: confirmed (nothing else is set), an inline object, a flight, or a body that no disk takes.
    `stale`: the backend did not answer, and the cached version may be served."""

    asked_s: float
    inline: Record | None = None
    flight: Flight | None = None
    passing: Passing | None = None
    stale: bool = False
    beyond: ObjectInfo | None = None  # the object, when the range asked for lies outside it


class Opening:
    """One question to the backend about one key. `overtaken`: the key was written since, so nothing of the answer is
    kept. `answers`: how many answers the backend had given when the question began."""

    __slots__ = ("answers", "asked_s", "done", "overtaken", "served")

    def __init__(self, asked_s: float, served: Served) -> None:
        self.asked_s, self.served = asked_s, served
        self.answers = served.answers
        self.done: asyncio.Task[Answer]
        self.overtaken = False


class Nowhere(Refusing):
    """Stands for the backend of an owned object: there is nowhere to fetch bytes from that a disk lost."""

    scheme = "local"
    read_only = True

    def __init__(self, bucket: str, still_owned: Callable[[], bool]) -> None:
        """`still_owned()`: whether the key still has this object and owes it. A replaced object has lost nothing."""
        self._bucket, self._still_owned = bucket, still_owned

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Any:
        if not self._still_owned():
            raise changed_meanwhile(self._bucket, key)
        raise Corrupt(
            f"{key} was written here, its backend does not have it, and its bytes on this node's disk are damaged: "
            "write it again"
        )

    async def head(self, key: str) -> ObjectInfo:
        return await self.fetch(key)  # type: ignore[no-any-return]

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self.fetch(key)  # type: ignore[no-any-return]

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return ListPage([], [])

    async def probe(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


def first_request(asked: RangeSpec | None) -> RangeSpec:
    """The range that finds out what an unknown object is, and fetches the first bytes that the reader wants."""
    if asked is None:
        return RangeSpec(0, FIRST_BYTES - 1)
    if asked.first is None:
        return RangeSpec(None, min((asked.last or 0) + _BLOCK, FIRST_BYTES))
    first = asked.first // _BLOCK * _BLOCK
    last = first + FIRST_BYTES - 1
    return RangeSpec(
        first,
        last if asked.last is None else min(last, (asked.last // _BLOCK + 1) * _BLOCK - 1),
    )


def whole_blocks(fetch: Fetch) -> Run:
    """The blocks that a first body covers completely."""
    first = -(-fetch.start // _BLOCK)
    end = -(-fetch.end // _BLOCK) if fetch.end == fetch.info.size_bytes else fetch.end // _BLOCK
    if first >= end:
        raise Unavailable(
            f"the backend answered bytes {fetch.start}-{fetch.end} of {fetch.info.size_bytes} of {fetch.info.key}, "
            "which is not what was asked for: check the backend for a proxy that rewrites answers"
        )
    return Run(first, end)


def changed_meanwhile(bucket: str, key: str) -> Precondition:
    return Precondition(f"{bucket}/{key} changed under an open read: open it again", code="PreconditionFailed")
