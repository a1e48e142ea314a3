"""Openings: one question to a backend about one object, shared by all who wait for its answer.

Theory. `ColdReads` asks and keeps; these are the first request of an opening, and the values that pass between the
asker and those who wait.

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
    """No disk takes the object: its first body, for whoever comes first; the others fetch for themselves."""

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
    """How an opening ended: confirmed (nothing else is set), an inline object, a flight, a body that no disk takes; or
    `stale`: the backend did not answer, and what is here may be served."""

    asked_s: float
    inline: Record | None = None
    flight: Flight | None = None
    passing: Passing | None = None
    stale: bool = False
    beyond: ObjectInfo | None = None  # the range that was asked for lies outside of this


class Opening:
    """One question to the backend about one key. `overtaken`: the key was written since; keep nothing of the answer.
    `answers`: how many the backend had given when it began."""

    __slots__ = ("answers", "asked_s", "done", "overtaken", "served")

    def __init__(self, asked_s: float, served: Served) -> None:
        self.asked_s, self.served = asked_s, served
        self.answers = served.answers
        self.done: asyncio.Task[Answer]
        self.overtaken = False


class Nowhere(Refusing):
    """Where the bytes of an owned object can be fetched from when a disk lost them."""

    scheme = "local"
    read_only = True

    def __init__(self, bucket: str, still_owned: Callable[[], bool]) -> None:
        """`still_owned()`: whether the object is the key's, and owed. One that was replaced has lost nothing."""
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
    """The range that finds out what an unknown object is, and brings the first bytes that are asked for."""
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
    """The blocks that a first body covers whole."""
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
