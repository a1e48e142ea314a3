"""Another node in a backend's place: a request that it has not answered ends with its lease.

Theory. A node that stands still, or whose machine died, closes no connection. A request to it would wait for as long as
a slow backend may take (limits.BACKEND_STALL_TIMEOUT_S, or two minutes for a write), and hold its key's lock meanwhile.
But the cluster says when the node's lease has ended. From then on it acknowledges nothing that only nodes have, and
others may act in its place. So nothing that it still says is worth waiting for.

What was asked of it may have happened, or happen yet, as with any answer that was lost; `Retrying` above treats it so.

Rejected: short time-outs (a body of gigabytes that is synced takes its time; only the lease tells slow from silent);
closing the node's connections (bodies are read through obstore, whose connections nobody else can close).

Invariants. (1) Nobody waits here for a node that does not live. (2) What it is asked after its lease has ended is not
sent.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from forebay.backends.seam import Backend, Fetch
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.core.types import RangeSpec
from forebay.ports.clock import Clock

ResultT = TypeVar("ResultT")


class WhileAlive(Protocol):
    """The answer of a request to a node; `Unavailable` when its lease has ended before it came."""

    def __call__(self, call: Awaitable[ResultT], /) -> Awaitable[ResultT]: ...


class AnotherNode(Counting):
    """See the module."""

    def __init__(self, inner: Backend, counters: BackendCounters, clock: Clock, while_alive: WhileAlive) -> None:
        super().__init__(inner, counters, clock)
        self._while_alive = while_alive

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        return _Body(await super().fetch(key, range, version=version), self._while_alive)

    async def _count(self, verb: str, call: Awaitable[ResultT]) -> ResultT:
        return await super()._count(verb, self._while_alive(call))


class _Body:
    """A body whose pieces come while the node lives."""

    def __init__(self, inner: Fetch, while_alive: WhileAlive) -> None:
        self.info, self.start, self.end = inner.info, inner.start, inner.end
        self._inner, self._chunks, self._while_alive = inner, inner.__aiter__(), while_alive

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> Any:
        return await self._while_alive(self._chunks.__anext__())

    async def aclose(self) -> None:
        await self._inner.aclose()
