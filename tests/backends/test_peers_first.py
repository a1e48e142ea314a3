"""Bytes are asked of another node first, and a read never fails or waits long for want of that node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forebay.backends.local.memory import MemoryBackend
from forebay.backends.seam import Fetch
from forebay.backends.wrap import peers
from forebay.backends.wrap.counting import BackendCounters
from forebay.backends.wrap.peers import Peer, PeersFirst
from forebay.backends.wrap.retrying import Retrying
from forebay.core.types import RangeSpec
from forebay.ports import chance
from forebay.ports.clock import SystemClock

DATA = bytes(range(256)) * 4096


class Silent(MemoryBackend):
    """A node that gives the first half of a body, and then nothing, with the connection open."""

    def __init__(self) -> None:
        super().__init__("node")
        self.bodies: list[_Half] = []

    async def fetch(  # type: ignore[override]
        self, key: str, range: RangeSpec | None = None, *, version: str = ""
    ) -> Fetch:
        self.bodies.append(_Half(await super().fetch(key, range)))
        return self.bodies[-1]


class _Half:
    def __init__(self, inner: Fetch) -> None:
        self.info, self.start, self.end = inner.info, inner.start, inner.end
        self._inner, self.is_closed = inner, False

    async def __aiter__(self) -> AsyncIterator[Any]:
        body = b"".join([bytes(chunk) async for chunk in self._inner])
        yield body[: len(body) // 2]
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


class Homes:
    """One node, which is asked until it fails."""

    def __init__(self, node: Silent) -> None:
        self.node, self.errors = node, list[BaseException]()

    def to_ask(self, bucket: str, key: str, stripe: int) -> list[Peer]:
        return [] if self.errors else [Peer("n1", self.node)]

    def failed(self, node: str, error: BaseException) -> None:
        self.errors.append(error)


def test_a_node_that_falls_silent_in_a_body_is_left_for_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE_S", 0.2)

    async def story() -> None:
        node, clock = Silent(), SystemClock()
        backend, homes = MemoryBackend("bucket"), Homes(node)
        backend.place("object", DATA, ())
        node.place("object", DATA, ())
        counters = BackendCounters()
        first = PeersFirst(backend, counters, clock, "bucket", homes)
        above = Retrying(first, clock, chance.system, counters)
        fetch = await above.fetch("object", RangeSpec(0, len(DATA) - 1))
        body = b"".join([bytes(chunk) async for chunk in fetch])
        await fetch.aclose()
        assert body == DATA
        assert ["stopped in the middle" in str(error) for error in homes.errors] == [True]
        assert [half.is_closed for half in node.bodies] == [True], "its connection is given back"
        assert counters.peer_bytes == len(DATA) // 2
        assert counters.read_bytes == len(DATA) - len(DATA) // 2, "the backend gives only the rest"

    asyncio.run(asyncio.wait_for(story(), 60))
