"""Takes an object's bytes from the nodes that are its homes, or were, before the backend is asked for them.

Theory. What an object is (version, size, headers) the backend says, as it does to a node alone: nothing changes about
freshness, and no peer is believed. The bytes of exactly that version are asked of the home, which has them, is fetching
them, or fetches them for all who ask: many nodes that read one cold object cost the backend its bytes once. The home is
asked as any S3 client would ask it, with the version's ETag as If-Match. A home that has not got them asks those whose
key it was by earlier maps (`node/engine/seat.py`), who give what they have and ask nobody.

A large object lies in stripes (`core/placement.py`), and each stripe's home is asked for what is in it. A range over
several of them is read from one after another, all of one version.

A peer in trouble is no error. Whatever it answers but the bytes, and if all together do not answer within PATIENCE_S,
the backend is asked; a body that breaks, or of which nothing comes for PATIENCE_S, goes on there (`Retrying`, above
this layer). This layer counts what it asks
the backend, since only it knows what is asked there.

Rejected: the home's word about the version (two freshness times would add up); asking the home for small objects
without a look at the backend (the same); a layer of its own above `Counting` (each would have the seam's twenty
methods for one).

Invariants. (1) What is handed on is of the version that the backend named. (2) A read never fails for want of a peer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

from forebay.backends import errors
from forebay.backends.seam import Backend, Fetch
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.core.errors import ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.limits import STRIPE_BYTES
from forebay.core.ranges import end_of_stripe
from forebay.core.types import ObjectInfo, RangeSpec
from forebay.ports.clock import Clock

PATIENCE_S = 5.0  # until a peer begins to answer, or goes on: a home may have to ask the backend first
INFOS_MAX = 512  # objects that are being read


class Peer(NamedTuple):
    """Another node, as a backend."""

    node: str
    backend: Backend


class Peers(Protocol):
    """The other nodes (`node/engine/peers.py`)."""

    def to_ask(self, bucket: str, key: str, stripe: int) -> list[Peer]:
        """Who is asked for the bytes of a key's stripe, in this order."""
        ...

    def failed(self, node: str, error: BaseException) -> None:
        """The node did not answer: it is not asked for a while."""
        ...


class PeerFetch:
    """A body from a peer. `info` is what the backend said."""

    def __init__(self, peers: PeersFirst, node: str, inner: Fetch, info: ObjectInfo) -> None:
        self.info, self.start, self.end = info, inner.start, inner.end
        self._peers, self._node, self._inner, self._chunks = peers, node, inner, inner.__aiter__()

    def __aiter__(self) -> PeerFetch:
        return self

    async def __anext__(self) -> Any:
        try:
            async with asyncio.timeout(PATIENCE_S):
                chunk = await self._chunks.__anext__()
        except TimeoutError:
            error = Unavailable(f"node {self._node} stopped in the middle of {self.info.key}: try again")
            self._peers.failed(self._node, error)
            raise error from None
        except ForebayError as error:
            self._peers.failed(self._node, error)
            raise
        self._peers.counters.peer_bytes += len(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class Joined:
    """A body of several stripes, which are asked for one after another. `info` is what the first of them is of."""

    def __init__(self, peers: PeersFirst, first: Fetch, end: int) -> None:
        self.info, self.start, self.end = first.info, first.start, end
        self._peers, self._inner, self._chunks = peers, first, first.__aiter__()

    def __aiter__(self) -> Joined:
        return self

    async def __anext__(self) -> Any:
        while True:
            try:
                return await self._chunks.__anext__()
            except StopAsyncIteration:
                position = self._inner.end
                if position == self.end:
                    raise
            rest = RangeSpec(position, min(end_of_stripe(position), self.end) - 1)
            await self._inner.aclose()
            self._inner = await self._peers.fetch(self.info.key, rest, version=self.info.version)
            if self._inner.info.version != self.info.version or self._inner.start != position:
                raise errors.changed(self.info.key)
            self._chunks = self._inner.__aiter__()

    async def aclose(self) -> None:
        await self._inner.aclose()


class PeersFirst(Counting):
    """See the module. `bucket` is the name under which all nodes serve it."""

    def __init__(self, inner: Backend, counters: BackendCounters, clock: Clock, bucket: str, peers: Peers) -> None:
        super().__init__(inner, counters, clock)
        self.counters = counters
        self._bucket, self._peers = bucket, peers
        self._infos: OrderedDict[str, ObjectInfo] = OrderedDict()

    def failed(self, node: str, error: BaseException) -> None:
        """Ask the node no more for a while."""
        self._peers.failed(node, error)

    async def head(self, key: str) -> ObjectInfo:
        info = self._infos[key] = await super().head(key)
        self._infos.move_to_end(key)
        if len(self._infos) > INFOS_MAX:
            self._infos.popitem(last=False)
        return info

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        first = range.first or 0 if range is not None else 0  # before its size is known, a suffix is of stripe 0
        last = range.last if range is not None and range.first is not None else None
        end = end_of_stripe(first)
        if last is None or last < end:
            return await self._fetch(key, first // STRIPE_BYTES, range, version)
        fetch = await self._fetch(key, first // STRIPE_BYTES, RangeSpec(first, end - 1), version)
        return fetch if fetch.info.size_bytes <= end else Joined(self, fetch, min(last + 1, fetch.info.size_bytes))

    async def _fetch(self, key: str, stripe: int, range: RangeSpec | None, version: str) -> Fetch:
        peers = self._peers.to_ask(self._bucket, key, stripe)
        info = await self._info(key, version) if peers else None
        if info is not None and info.etag:
            until_s = asyncio.get_running_loop().time() + PATIENCE_S
            for peer in peers:
                fetch = await self._fetch_from(peer, info, range, until_s)
                if fetch is not None:
                    return fetch
        return await super().fetch(key, range, version=version)

    async def _fetch_from(
        self, peer: Peer, info: ObjectInfo, range: RangeSpec | None, until_s: float
    ) -> PeerFetch | None:
        """The bytes of that version; None if the peer does not give them."""
        try:
            async with asyncio.timeout_at(until_s):
                fetch = await peer.backend.fetch(info.key, range, version=f'"{info.etag}"')
            if fetch.info.size_bytes == info.size_bytes:
                return PeerFetch(self, peer.node, fetch, info)
            await fetch.aclose()
        except (NotFound, Precondition, Invalid):
            pass  # it has another version or none
        except (ForebayError, TimeoutError) as error:
            self.failed(peer.node, error)
        return None

    async def _info(self, key: str, version: str) -> ObjectInfo | None:
        """What the backend says of the version, asked once for all pieces of it; None if it is another by now."""
        known = self._infos.get(key) if version else None
        if known is None or known.version != version:
            known = await self.head(key)
        return known if version in ("", known.version) else None
