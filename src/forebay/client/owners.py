"""Which node is asked for an object: its owner, by the map that a node tells; else the node at the client's URL.

Theory. Any node answers any request, so a client never needs to know the map. But an answer that passes through a
second node takes the links and processors of two. So a client that reads more than a few objects asks for the map, and
computes the owner as nodes do (`core/placement.py`). What it knows may be old: then a node is asked that owns the
object no more, and answers as any node does. Whatever an owner answers but success, the client's own node is asked,
and its answer counts. An owner that does not answer is left alone for a while; until one has answered, so are all,
since nodes may be out of the client's reach (a forwarded port).

*What is read so.* Objects of buckets that are written through and whose objects never change, or are asked about each
time, unless the client writes to the bucket. Elsewhere a node that was not told of a write may give the version before
it for as long as the bucket's freshness says, and this client's node was told of what was written at it. A client that
tells hints reads at the node that hears them.

Rejected: redirects (a round trip for each object); the map in every answer's head (bytes in each, for what changes once
a day); asking at the first object (a program that reads one would pay a round trip for nothing).

Invariants. (1) A read never fails because of an owner, unless bytes have come: then it is as with any node. (2) What a
client sends with a request (a token) goes to no other scheme than its URL's.
"""

from __future__ import annotations

from typing import Any

from forebay.client.connection import parse_url
from forebay.client.flows import Flow, decoded
from forebay.core.errors import ForebayError, Invalid, Unavailable
from forebay.core.messages.http1 import Endpoint, Request, Response, encode_path
from forebay.core.messages.node_state import NodeMap
from forebay.core.placement import Members
from forebay.core.types import FRESH_IMMUTABLE, Bucket
from forebay.ports import clock

FIRST_OBJECTS = 3  # are read before anything is asked
MAP_S = 10.0  # between looks at the map of several nodes
LONE_S = 60.0  # of one node
REST_S, REST_MAX_S = 3.0, 300.0  # after no answer, doubled each time


class Owners:
    """See the module. One for a client, whichever threads use it: every field is replaced whole."""

    def __init__(self, here: Endpoint) -> None:
        self._here = here
        self._left = FIRST_OBJECTS
        self._look_s = 0.0  # when to look at the map next
        self._members: Members | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._fixed: dict[str, bool] = {}  # by bucket: whether every node gives the same of it
        self._written: set[str] = set()  # buckets that this client wrote to
        self._reached = False  # some owner, ever
        self._rests: dict[Endpoint, tuple[float, float]] = {}  # until when, and how long the next time

    def stay(self) -> None:
        """Ask the client's own node for everything from now on."""
        self._left, self._look_s, self._members = 0, float("inf"), None

    def asked(self, request: Request) -> Flow[Response]:
        """The answer to a request about an object (`Request.of`): reads of its owner or of the client's own node."""
        assert request.of is not None
        plain = request._replace(of=None)
        owner: Endpoint | None = None
        if request.method not in ("GET", "HEAD"):
            self._written.add(request.of[0])
        elif self._left:
            self._left -= 1
        elif (
            not self._here.base and request.of[0] not in self._written
        ):  # behind a proxy nodes have other addresses than in the map
            yield from self._learn(request.of[0])
            owner = self._owner(*request.of)
        if owner is not None:
            try:
                response = yield plain._replace(at=owner)
            except Unavailable as error:
                self._failed(owner)
                if plain.sink is not None and error.code != "NoNode":
                    raise  # bytes may have come
            else:
                self._reached = True
                if response.ok:
                    self._rests.pop(owner, None)
                    return response
                if response.status >= 500:
                    self._failed(owner)
        return (yield plain)

    def _owner(self, bucket: str, key: str) -> Endpoint | None:
        members = self._members
        if members is None or not self._fixed.get(bucket, False):
            return None
        owner = self._endpoints.get(members.first(bucket, key))
        if owner is None or owner == self._here:
            return None
        return None if self._rests.get(self._whom(owner), (0.0, 0.0))[0] > clock.monotonic_s() else owner

    def _whom(self, owner: Endpoint) -> Endpoint:
        """Whose rest counts: the own node stands for all that were never reached."""
        return owner if self._reached else self._here

    def _failed(self, owner: Endpoint) -> None:
        now_s = clock.monotonic_s()
        whom = self._whom(owner)
        rest_s = self._rests.get(whom, (0.0, REST_S))[1]
        self._rests[whom] = now_s + rest_s, min(2 * rest_s, REST_MAX_S)
        self._look_s = min(self._look_s, now_s + 1.0)

    # --- what nodes tell ---------------------------------------------------------------------------------------------
    def _learn(self, bucket: str) -> Flow[None]:
        """Look at the map when it is time, and at a bucket that was not looked at since. What cannot be learnt changes
        nothing."""
        now_s = clock.monotonic_s()
        if now_s >= self._look_s:
            self._look_s = now_s + MAP_S  # other threads go on with what was known
            found = yield from _told("/-/v1/map", NodeMap)
            if found is not None:
                self._fixed = {}
                self._use(found)
                self._look_s = now_s + (MAP_S if self._members is not None else LONE_S)
        if self._members is not None and bucket not in self._fixed:
            self._fixed[bucket] = False
            settings = yield from _told(encode_path("-/v1/buckets", bucket), Bucket)
            if settings is not None:
                lasting = settings.freshness_s in (0.0, FRESH_IMMUTABLE)
                self._fixed[bucket] = lasting and settings.write == "through"

    def _use(self, found: NodeMap) -> None:
        endpoints: dict[str, Endpoint] = {}
        for node in found.nodes:
            try:
                endpoint = parse_url(node.endpoint)
            except Invalid:
                continue
            if endpoint.scheme == self._here.scheme:
                endpoints[node.node_id] = endpoint
        self._endpoints = endpoints
        weights = {node.node_id: node.weight for node in found.nodes if node.weight > 0}
        known = self._members
        if len(weights) < 2:
            self._members = None
        elif known is None or dict(zip(known.ids, known.weights, strict=True)) != weights:
            self._members = Members(weights)


def _told(target: str, type_: Any) -> Flow[Any]:
    """What the client's own node says; None if it does not."""
    try:
        response = yield Request("GET", target)
        return decoded(response, target, type_)
    except ForebayError:
        return None
