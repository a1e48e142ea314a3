"""Openings: one question to a backend about one object, shared by all who wait for its answer.

Theory. `ColdReads` asks and keeps; these are the values that pass between the asker and those who wait.

Invariant. The body in a `Passing` is read by one reader or closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from forebay.backends.refusing import Refusing
from forebay.backends.seam import Fetch
from forebay.core.errors import Corrupt, Precondition
from forebay.core.ranges import Run
from forebay.core.record import Record
from forebay.core.types import ListPage, ObjectInfo, RangeSpec
from forebay.node.buckets import Served
from forebay.node.flights import Flight

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

    def __init__(self, still_owned: Callable[[], bool]) -> None:
        """`still_owned()`: whether the object is the key's, and owed. One that was replaced has lost nothing."""
        self._still_owned = still_owned

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Any:
        if not self._still_owned():
            raise Precondition(f"{key} changed under an open read: open it again", code="PreconditionFailed")
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
