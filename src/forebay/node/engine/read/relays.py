"""Which reads a node relays: their bytes come from the object's home to the client, and nothing of them is kept here.

Theory. Any node serves any object. Of one that is at home elsewhere a node keeps a copy, so that it is nearer the next
time. A copy costs the engine its receiving, hashing and writing, and takes the place of others; of what is read once
it is worth nothing. So the first read of many bytes is relayed: the engine asks the backend what the object is, as for
a copy, and hands the front a signed request for that version. The front asks the home and moves the answer to its
client in the kernel (`node/front/http/sender.py`). Whoever reads the same again gets a copy.

Where a node stands in a backend's place (buckets written back, or local), only a range with both its ends is relayed:
to learn the size of anything else first would cost each small read a round trip.

Not relayed is what somebody said will be read here (pins, a job's hints), what is short, what nodes ask each other,
and what would come over TLS, which the kernel cannot move. Whatever goes wrong on the way, the front asks again for
the rest, and gets it as a copy.

A large object lies in stripes, so a front is told of one stripe at a time.

Rejected: no copies of what others own (a hot object has the link of its home alone); the front's own choice (it has no
map, no key of the nodes, and does not see what other fronts were asked).

Invariants. (1) What is relayed is of the version that the backend named after the read was asked, or that the read
named itself. (2) A request between nodes is never relayed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from forebay.core.errors import Invalid, Unavailable
from forebay.core.limits import RELAY_BYTES_MIN, STRIPE_BYTES
from forebay.core.messages.wire import Relay
from forebay.core.ranges import end_of_stripe
from forebay.core.record import is_pinned
from forebay.core.types import ObjectInfo, RangeSpec
from forebay.node.engine.buckets import Served
from forebay.node.engine.peers import Peers
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.seat import Home
from forebay.node.outcomes import from_node

ASKED_MAX = 65_536  # reads that are remembered: 64 GiB of the shortest. About 8 MB
INFOS_MAX = 512  # objects that are being relayed, stripe by stripe


class Offer(NamedTuple):
    """A read of [start, end) of the object is to be relayed: the one that asked so, and no other."""

    ask: Ask
    info: ObjectInfo
    start: int
    end: int
    relay: Relay


class Relays:
    """See the module's header."""

    def __init__(self, peers: Peers) -> None:
        self.alone: tuple[str, ...] = ("memory://", "local://")  # each node has its own behind these
        self._peers = peers
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._infos: OrderedDict[tuple[str, str], ObjectInfo] = OrderedDict()

    def place(self, ask: Ask, served: Served) -> Home | None:
        """Whose bytes the read is to get; None if it is not relayed. Remembers that it was asked."""
        first = 0 if ask.range is None else ask.range.first
        if not ask.may_relay or first is None or from_node.get():
            return None
        last = None if ask.range is None else ask.range.last
        if last is not None and last + 1 - first < RELAY_BYTES_MIN:
            return None
        bucket = served.bucket
        if is_pinned(bucket, ask.key):
            return None
        if served.of is not None:
            place = self._peers.to_relay_from_node(served.home) if last is not None else None
        elif bucket.write == "through" and not bucket.url.startswith(self.alone):
            place = self._peers.to_relay_from(bucket.name, ask.key, first // STRIPE_BYTES)
        else:
            return None
        return None if place is None or self._was_asked(hash((bucket.name, ask.key, first))) else place

    def known(self, ask: Ask) -> ObjectInfo | None:
        """What the backend said of the version that the read names."""
        info = self._infos.get((ask.bucket, ask.key)) if ask.version else None
        return info if info is not None and info.version == ask.version else None

    def offer(self, ask: Ask, served: Served, place: Home, info: ObjectInfo) -> Offer | None:
        """How to relay the read of that object; None if it is not worth it, or not possible."""
        try:
            start, end = (0, info.size_bytes) if ask.range is None else ask.range.resolve(info.size_bytes)
        except Invalid:
            return None  # whoever answers it otherwise says so
        upto = (
            end if served.of is not None else min(end, end_of_stripe(start))
        )  # what has a home in place has no stripes
        if upto - start < RELAY_BYTES_MIN or not info.etag or ask.version not in ("", info.version):
            return None
        request = self._peers.request_of(ask.bucket, ask.key, place, RangeSpec(start, upto - 1), info.etag)
        if request is None:
            return None
        self._infos[ask.bucket, ask.key] = info
        self._infos.move_to_end((ask.bucket, ask.key))
        if len(self._infos) > INFOS_MAX:
            self._infos.popitem(last=False)
        host, port, head = request
        return Offer(ask, info, start, end, Relay(place.node, host, port, head, info.etag, upto))

    def silent(self, node: str) -> None:
        """A front asked the node, and it did not answer."""
        self._peers.failed(node, Unavailable(f"node {node} did not answer a front"))

    def _was_asked(self, read: int) -> bool:
        """Whether the same was asked before. Reads are told apart by their hashes: keys would take 70 MB."""
        known = read in self._asked
        self._asked[read] = None
        self._asked.move_to_end(read)
        if len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)
        return known
