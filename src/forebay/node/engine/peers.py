"""The other nodes, as those that a node asks for bytes before it asks the backend.

Theory. Every node computes a key's home from the map (`seat.py`). It asks the home over S3, as an identity that proves
itself by a signature (SigV4: HMAC-SHA256 over the request and its time), whose secret all nodes derive from one file,
the peer key. So a node needs no list of the others' keys, nothing secret travels, and a stranger gets what any stranger
gets. Nodes without identities listen on loopback alone, and ask each other without a signature.

A header says that a request is one between nodes (`PEER_HEADER`). Where there are identities a front takes it from the
peers' own alone (`Auth.admit`): it makes this node answer for itself, where a client is to be told the cluster's word.

*No loops.* A request between nodes names the node that it takes for the home, and the epoch of its map. A node that is
another, or acts by another map, refuses it, and the backend is asked. With the same map the home knows that it is the
home, and asks the backend.

*Where keys were.* A key's home that has not got the bytes asks its homes by earlier maps, drained nodes whose process
still runs too. They know by the map that the key is not theirs, give what they have, and ask nobody.

*No waiting for the dead.* Where a node stands in a backend's place, and for what nodes say to each other about copies,
claims and listings, a request that it has not answered ends when its lease does (`wrap/while_alive.py`).

A node that does not answer rests for REST_S. Backends of peers are made anew for each epoch, since the epoch is among
their headers; bodies under way go on.

Rejected: mTLS between nodes (a certificate for every node, with its address in it, from an authority that somebody has
to run; nodes that speak TLS are trusted by `peer_ca`, or as the system says); a bearer token (whoever reads one request
without TLS has it); a challenge (a round trip, and SigV4 has a clock and the path in what is signed).

Invariants. (1) A request between nodes is never passed on. (2) Nothing is asked of a node that is not in the active
map, or was in it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import TypeVar

import msgspec

from forebay.backends import errors
from forebay.backends.http.requests import NOTHING, Answer, Wire
from forebay.backends.locate import locate, wire_to
from forebay.backends.s3.writing import payload_signed
from forebay.backends.seam import Backend, Body
from forebay.backends.stack import open_backend, open_node
from forebay.backends.wrap.counting import BackendCounters
from forebay.backends.wrap.peers import Peer
from forebay.core.access import PEER_KEY_ID
from forebay.core.cluster.coding import SLICES
from forebay.core.cluster.membership import LOOK_S
from forebay.core.errors import ForebayError, NoBackendBucket, Unavailable, map_changes
from forebay.core.limits import STRIPE_BYTES
from forebay.core.messages.calls import Uploads, UploadsCall
from forebay.core.messages.copied import BACK, ClearCopy, CompareCopies, Copied, CopiesSaid, Posted, on_one_line
from forebay.core.types import (
    CLAIM_QUERY,
    COPY_HEADER,
    COPY_QUERY,
    OWED_QUERY,
    RELAY_HEADER,
    UPLOADS_QUERY,
    Bucket,
    RangeSpec,
)
from forebay.core.versions import whose_versions
from forebay.node.engine.buckets import Served
from forebay.node.engine.read.owed_keys import Found
from forebay.node.engine.seat import Home, Seat
from forebay.ports import chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.peers")
ResultT = TypeVar("ResultT")

REST_S = 3.0
GONE_ANSWERS_S = 5.0  # a write under way when it goes has nothing to wait for
GONE_REST_S = 3600.0  # of one that was drained: nobody starts it again


class Peers:
    """See the module's header. `secret` is "" among nodes without identities; `ca` is a PEM file, or ""."""

    def __init__(self, seat: Seat, node_id: str, clock: Clock, *, secret: str, ca: str) -> None:
        self._seat, self._node_id, self._clock = seat, node_id, clock
        self._options = {"region": "us-east-1"}
        if secret:
            self._options |= {"access_key_id": PEER_KEY_ID, "secret_access_key": secret}
        else:
            self._options["skip_signature"] = "true"
        if ca:
            self._options["root_certificate"] = ca
        self._epoch = 0
        self._backends: dict[tuple[str, Home], Backend] = {}
        self._in_place: dict[tuple[str, Home], tuple[Served, Served]] = {}
        self._wires: dict[tuple[str, Home], Wire] = {}
        self._slices: dict[tuple[str, str], Backend] = {}  # by node and address
        self._counters = BackendCounters()
        self._rests_until_s: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._waits: dict[str, set[asyncio.Timeout]] = defaultdict(set)  # for answers, by node
        seat.left = self._give_up

    def to_ask(self, bucket: str, key: str, stripe: int) -> list[Peer]:
        """Who is asked for the bytes of a key's stripe: its home, or at the home whose it was before."""
        home = self._seat.home(bucket, key, stripe)
        if home is None or whose_versions(bucket):
            return []
        self._go_by(home.epoch)
        places = [home] if home.node != self._node_id else self._seat.former_homes(bucket, key, stripe)
        awake = [place for place in places if not self._rests(place.node)]
        return [Peer(place.node, self._backend(bucket, place)) for place in awake]

    def is_of_another(self, bucket: str, key: str, position: int) -> bool:
        """Whether this node is not the home, by the active map, of what begins there. A node that asks it all the same
        asks for what is here."""
        home = self._seat.home(bucket, key, position // STRIPE_BYTES)
        return home is None or home.node != self._node_id

    @property
    def map_epoch(self) -> int:
        """Of the map by which keys are at home; 0 while there is none that is active."""
        agreed = self._seat.agreed
        return agreed.epoch if agreed is not None and agreed.active else 0

    def is_at_another(self, bucket: str, key: str, position: int) -> bool:
        """Whether another node, which lives, is the home of what begins there, and is asked for it."""
        home = self._seat.home(bucket, key, position // STRIPE_BYTES)
        return home is not None and home.node != self._node_id and not whose_versions(bucket)

    def to_relay_from(self, bucket: str, key: str, stripe: int) -> Home | None:
        """The home of a key's stripe, if that is another node which answers, without TLS."""
        home = self._seat.home(bucket, key, stripe)
        if home is None or home.node == self._node_id or whose_versions(bucket):
            return None
        return self._relays(home)

    def to_relay_from_node(self, node: str) -> Home | None:
        """The node that stands in a backend's place, if it answers, without TLS."""
        home = self._seat.place_of(node)
        return None if home is None else self._relays(home)

    def _relays(self, home: Home) -> Home | None:
        return home if home.address.startswith("http://") and not self._rests(home.node) else None

    def request_of(
        self, bucket: str, key: str, home: Home, range: RangeSpec, etag: str
    ) -> tuple[str, int, bytes] | None:
        """Where a node listens, and the head of a GET of that range of one version there; None if only a proxy, or an
        address without a port, leads there."""
        return self._wire(home, bucket).request_of(key, range, f'"{etag}"', {RELAY_HEADER: "1"})

    def _rests(self, node: str) -> bool:
        return self._rests_until_s.get(node, 0.0) > self._clock.monotonic_s()

    def _backend(self, bucket: str, place: Home) -> Backend:
        backend = self._backends.get((bucket, place))
        if backend is None:
            backend = locate(self._place(bucket, place), self._clock, self._node_id, peer=f"{place.node} {place.epoch}")
            self._backends[bucket, place] = backend
        return backend

    def in_place(self, served: Served, home: Home) -> Served:
        """The bucket with a node in its backend's place: written through to it, confirmed with it at each read."""
        self._go_by(home.epoch)
        bucket = served.bucket
        of, known = self._in_place.get((bucket.name, home), (None, None))
        if known is None or of is not served:
            place = msgspec.structs.replace(self._place(bucket.name, home), pinned=bucket.pinned)
            backend = open_node(
                place,
                clock=self._clock,
                chance=chance.system,
                counters=self._counters,
                node=self._node_id,
                peer=f"{home.node} {home.epoch}",
                while_alive=functools.partial(self._while_alive, home.node),
            )
            known = Served(place, backend, of=served, home=home.node)
            self._in_place[bucket.name, home] = served, known
        return known

    def slices_at(self, node: str) -> Backend | None:
        """A node, or this one, as the backend of the slices that it keeps, by no map; None if it does not live."""
        place = self._seat.place_of(node)
        if place is None:
            return None
        backend = self._slices.get((node, place.address))
        if backend is None:
            backend = self._slices[node, place.address] = open_node(
                self._place(SLICES, place),
                clock=self._clock,
                chance=chance.system,
                counters=self._counters,
                node="" if node == self._node_id else self._node_id,
                peer=node,
                while_alive=functools.partial(self._while_alive, node),
                once=False,
            )
        return backend

    def as_client(self, bucket: str, address: str) -> Backend:
        """A bucket of the cluster as any client has it, by way of the node at that address."""
        place = Bucket(bucket, f"s3://{bucket}", 0.0, options={**self._options, "endpoint": address})
        return open_backend(place, clock=self._clock)

    async def claim(self, home: Home, bucket: str, key: str) -> bool:
        """Ask a node to let go of a key; False if it has something of it that nobody else has."""
        wire = self._wire(home, bucket)
        answer = await self._while_alive(home.node, wire.run(lambda: wire.ask([(CLAIM_QUERY, "")], key=key)))
        if answer.status not in (202, 204):
            raise _refused(home, answer)
        return answer.status == 204

    async def have(self, bucket: str) -> bool:
        """Whether all other nodes that live have the bucket."""
        nodes = [node for node in self._seat.alive if node != self._node_id]
        return all(await asyncio.gather(*(self._has(node, bucket) for node in nodes)))

    async def _has(self, node: str, bucket: str) -> bool:
        home = self._seat.place_of(node)
        if home is None:
            return True  # it is asked by nobody
        try:
            await self._told(home, bucket, [("location", "")])
        except NoBackendBucket:  # to who asks it, a node is a backend
            return False
        except ForebayError:
            pass  # it has trouble of its own
        return True

    async def uploads(self, home: Home, call: UploadsCall) -> Uploads:
        """A page of the open uploads that a node has."""
        query = [(UPLOADS_QUERY, ""), ("prefix", call.prefix), ("max-uploads", str(call.limit))]
        query += [("key-marker", call.after_key), ("upload-id-marker", call.after_id)]
        return msgspec.json.decode(await self._told(home, call.bucket, query), type=Uploads)

    async def owed(self, home: Home, bucket: str, prefix: str, after: str) -> Found:
        """The next keys under a prefix of which a node has what no backend has."""
        query = [(OWED_QUERY, ""), ("prefix", prefix), ("start-after", after)]
        return msgspec.json.decode(await self._told(home, bucket, query), type=Found)

    async def keep_copy(
        self, home: Home, bucket: str, key: str, about: Copied, body: Body, *, back: bool = False
    ) -> None:
        """Have a node keep a copy, or (`back`) have what was kept for it. Raises whatever it answers but that it does;
        nobody knows then."""
        headers = {COPY_HEADER: on_one_line(about)}
        await self._say(home, "PUT", bucket, key, [(COPY_QUERY, BACK if back else "")], headers, body)

    async def clear_copy(self, home: Home, call: ClearCopy) -> None:
        """Have a node forget a copy. One that does not know the bucket keeps nothing of it."""
        query = [(COPY_QUERY, ""), ("actor", call.actor), ("number", str(call.number))]
        with suppress(NoBackendBucket):
            await self._say(home, "DELETE", call.bucket, call.key, query)

    async def compare_copies(self, home: Home, call: CompareCopies) -> list[str]:
        """The keys of which a node keeps no copy of that version; what is not listed it forgets."""
        return (await self.ask_copies(home, call)).missing

    async def ask_copies(self, home: Home, call: Posted) -> CopiesSaid:
        """What a node says of the copies that it keeps."""
        data = msgspec.json.encode(call)
        answer = await self._say(home, "POST", call.bucket, "", [(COPY_QUERY, "")], body=Body(len(data), data))
        return msgspec.json.decode(answer, type=CopiesSaid)

    async def _say(
        self,
        home: Home,
        method: str,
        bucket: str,
        key: str,
        query: list[tuple[str, str]],
        headers: dict[str, str] | None = None,
        body: Body = NOTHING,
    ) -> bytes:
        sent = {**(headers or {}), **payload_signed(body)}
        told = self._wire(home, bucket).tell(method, key, query=query, headers=sent, body=body)
        answer = await self._while_alive(home.node, told)
        if answer.status not in (200, 204):
            raise _refused(home, answer)
        return answer.body

    async def _told(self, home: Home, bucket: str, query: list[tuple[str, str]]) -> bytes:
        wire = self._wire(home, bucket)
        answer = await self._while_alive(home.node, wire.run(lambda: wire.ask(query)))
        if answer.status != 200:
            raise _refused(home, answer)
        return answer.body

    def _wire(self, home: Home, bucket: str) -> Wire:
        self._go_by(home.epoch)
        wire = self._wires.get((bucket, home))
        if wire is None:
            wire = wire_to(self._place(bucket, home), self._clock, self._node_id, f"{home.node} {home.epoch}")
            self._wires[bucket, home] = wire
        return wire

    def _place(self, bucket: str, home: Home) -> Bucket:
        return Bucket(bucket, f"s3://{bucket}", 0.0, options={**self._options, "endpoint": home.address})

    async def _while_alive(self, node: str, call: Awaitable[ResultT]) -> ResultT:
        """What the node answers; `Unavailable` when its lease has ended before: then it may have done it."""
        if node not in self._seat.alive:
            if isinstance(call, Coroutine):
                call.close()
            said = f"node {node} is not heard of: its keys are others' in a moment"
            raise map_changes(said, LOOK_S) if self._seat.is_gone(node) else errors.NotDone(said, retry_after_s=1.0)
        waits = self._waits[node]
        try:
            async with asyncio.timeout(None) as wait:
                waits.add(wait)
                try:
                    return await call
                finally:
                    waits.discard(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise Unavailable(
                f"node {node} was not heard of for a lease, and had not answered. It may have been done: look before "
                "you ask again",
                retry_after_s=1.0,
            ) from error

    def _give_up(self, node: str) -> None:
        """The node lives no more: nobody waits for what it has not answered. One that was drained only said that it
        goes: what it was asked before, it answers."""
        answers_s = GONE_ANSWERS_S if self._seat.is_gone(node) else 0.0
        for wait in self._waits.pop(node, ()):
            wait.reschedule(asyncio.get_running_loop().time() + answers_s)

    def _go_by(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._drop()

    def failed(self, node: str, error: BaseException) -> None:
        """The node did not answer: it is not asked for a while."""
        if not self._rests(node):
            said = error.message if isinstance(error, ForebayError) else "no answer"
            log.warning("node %s gave no bytes (%s): the backend is asked", node, said)
        self._rests_until_s[node] = self._clock.monotonic_s() + (REST_S if self._seat.place_of(node) else GONE_REST_S)

    async def aclose(self) -> None:
        """Ask nobody any more."""
        self._drop()
        closing = (backend.aclose() for backend in self._slices.values())
        await asyncio.gather(*self._closing, *closing, return_exceptions=True)

    def _drop(self) -> None:
        for backend in (*self._backends.values(), *(served.backend for _, served in self._in_place.values())):
            task = asyncio.ensure_future(backend.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for wire in self._wires.values():
            wire.close()
        self._backends.clear()
        self._in_place.clear()
        self._wires.clear()


def _refused(home: Home, answer: Answer) -> ForebayError:
    """What a node's answer stands for."""
    failed = errors.from_status(answer.status, answer.body.decode(errors="replace"), home.address, answer.headers)
    errors.said_of_node(failed, f"node {home.node}")
    return failed
