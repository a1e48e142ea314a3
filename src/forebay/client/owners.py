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

Invariants. (1) A read never fails because of an owner, unless it breaks off bytes that name no version and somebody has
seen. (2) What a client sends with a request (a token) goes to no other scheme than its URL's. (3) What an owner or the
own node breaks off is gone on with at the own node (`resuming.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay.client.connection import CUT, CutOff, parse_url
from forebay.client.flows import Flow, decoded
from forebay.client.resuming import can_go_on, from_own_node, gone_on
from forebay.client.stripes import Large, Measuring, Striped, head_of, span
from forebay.core.errors import ForebayError, Invalid, Unavailable
from forebay.core.limits import STRIPE_BYTES
from forebay.core.messages.http1 import Endpoint, Request, Response, encode_path
from forebay.core.messages.node_state import NodeMap
from forebay.core.placement import Members
from forebay.core.types import FRESH_IMMUTABLE, Bucket
from forebay.ports import clock

FIRST_OBJECTS = 3  # are read before anything is asked
MAP_S = 10.0  # between looks at the map of several nodes
LONE_S = 60.0  # of one node
ASK_BYTES = 4 * STRIPE_BYTES  # of a body: it takes longer than to begin it anew
LARGE_MAX = 1024  # names of large objects that are remembered
REST_S, REST_MAX_S = 3.0, 300.0  # after no answer, doubled each time


class _Seen(NamedTuple):
    """What is known of a bucket: whether it is written through, and whether every node gives the same of it."""

    through: bool
    lasting: bool


class Owners:
    """See the module. One for a client, whichever threads use it: every field is replaced whole."""

    def __init__(self, here: Endpoint) -> None:
        self._here = here
        self._left = FIRST_OBJECTS
        self._look_s = 0.0  # when to look at the map next; 0 until it was looked at once
        self._members: Members | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._buckets: dict[str, _Seen] = {}
        self._again: frozenset[str] = frozenset()  # of these, to be looked at again since the map was
        self._written: set[str] = set()  # buckets that this client wrote to
        self._large: dict[tuple[str, str], None] = {}  # objects of several stripes
        self._reached = False  # some owner, ever
        self._rests: dict[Endpoint, tuple[float, float]] = {}  # until when, and how long the next time

    def stay(self) -> None:
        """Ask the client's own node for everything from now on."""
        self._left, self._look_s, self._members = 0, float("inf"), None

    def asked(self, request: Request, *, may_split: bool = True) -> Flow[Response | Striped]:
        """The answer to a request about an object (`Request.of`): reads of its owner or of the client's own node. Of a
        large object what is left to do: to read it from several nodes. Not so without `may_split`."""
        assert request.of is not None
        bucket, key = request.of
        plain = request._replace(of=None)
        if request.method not in ("GET", "HEAD"):
            self._written.add(bucket)
            return (yield plain)
        if self._here.base:  # behind a proxy nodes have other addresses than in the map
            return (yield from from_own_node(plain))
        if self._left:
            self._left -= 1
        else:
            yield from self._learn(bucket)
        asked = span(request)
        start, end = asked or (0, None)
        pinned = any(name == "If-Match" for name, _ in request.headers)
        if not may_split or asked is None:
            owner = self.owner(bucket, key, start // STRIPE_BYTES, pinned=pinned)
            return (yield from self._at(plain, owner, may_repeat=plain.sink is None))
        if self.is_spread(bucket) and (request.of in self._large or (end is not None and _is_split(start, end))):
            found = yield from self._head(request, start, end)
            if found is not None:
                return Striped(self, request, found)
            self._large.pop(request.of, None)
        most = STRIPE_BYTES if self.is_spread(bucket) else self._may_ask_at
        measuring = Measuring(request.sink, most) if most else None
        try:
            owner = self.owner(bucket, key, start // STRIPE_BYTES, pinned=pinned)
            watched = plain._replace(sink=measuring or plain.sink)
            response = yield from self._at(watched, owner, may_repeat=plain.sink is None)
            return response._replace(body=response.body or measuring.body()) if measuring else response
        except Large as large:
            yield from self._learn(bucket)
            if self.is_spread(bucket):
                self._large = {**dict(list(self._large.items())[-LARGE_MAX:]), request.of: None}
                return Striped(self, request, large.response)
        return (yield from from_own_node(plain))

    def _at(self, plain: Request, owner: Endpoint | None, *, may_repeat: bool = True) -> Flow[Response]:
        """The answer of an owner, or of the client's own node. `may_repeat`: also after bytes have come."""
        if owner is not None:
            try:
                response = yield plain._replace(at=owner)
            except Unavailable as error:
                self.failed(owner)
                if isinstance(error, CutOff) and can_go_on(plain, error):
                    return (yield from gone_on(plain, error))
                if not may_repeat and (isinstance(error, CutOff) or error.code not in ("NoNode", CUT)):
                    raise
            else:
                if self.answered(owner, response):
                    return response
        return (yield from from_own_node(plain))

    def _head(self, request: Request, start: int, end: int | None) -> Flow[Response | None]:
        """The head of the answer to a GET, of who is asked first."""
        assert request.of is not None
        conditions = tuple(field for field in request.headers if field[0] != "Range")
        asked = Request("HEAD", request.target, conditions)
        response = yield from self._at(asked, self.owner(*request.of, 0))
        found = head_of(response, start, end) if response.ok else None
        return found if found is not None and int(found.headers["content-length"]) > STRIPE_BYTES else None

    def owner(self, bucket: str, key: str, stripe: int, *, pinned: bool = False) -> Endpoint | None:
        """Who is asked for bytes of a stripe; None for the client's own node. `pinned`: of one version, which the own
        node named; then any node may be asked, since it has that version or refuses."""
        members, seen = self._members, self._buckets.get(bucket)
        if members is None or seen is None or not seen.through:
            return None
        if not (pinned and stripe) and (not seen.lasting or bucket in self._written):
            return None
        owner = self._endpoints.get(members.owner(bucket, key, stripe))
        if owner is None or owner == self._here:
            return None
        return None if self._rests.get(self._whom(owner), (0.0, 0.0))[0] > clock.monotonic_s() else owner

    def is_spread(self, bucket: str) -> bool:
        """Whether several nodes hold stripes of the bucket's large objects, as far as is known."""
        seen = self._buckets.get(bucket)
        return self._members is not None and seen is not None and seen.through

    @property
    def _may_ask_at(self) -> int:
        """From which size on it is worth to give up an answer that has begun, and to look for other nodes; 0 for no
        size."""
        return ASK_BYTES if clock.monotonic_s() >= self._look_s else 0

    def answered(self, owner: Endpoint, response: Response) -> bool:
        """An owner has answered; whether that is what was asked for."""
        self._reached = True
        if response.ok:
            self._rests.pop(owner, None)
        elif response.status >= 500:
            self.failed(owner)
        return response.ok

    def _whom(self, owner: Endpoint) -> Endpoint:
        """Whose rest counts: the own node stands for all that were never reached."""
        return owner if self._reached else self._here

    def failed(self, owner: Endpoint) -> None:
        """An owner does not answer, or cannot: it is left alone for a while."""
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
            if self._look_s:  # the first time all threads ask, since what they read meanwhile crosses two links
                self._look_s = now_s + MAP_S  # others go on with what was known
            found = yield from _told("/-/v1/map", NodeMap)
            if found is not None:
                self._again = frozenset(self._buckets)
                self._use(found)
                self._look_s = now_s + (MAP_S if self._members is not None else LONE_S)
            elif self._look_s <= now_s:
                self._look_s = now_s + MAP_S
        if self._members is not None and (bucket not in self._buckets or bucket in self._again):
            self._again -= {bucket}
            settings = yield from _told(encode_path("-/v1/buckets", bucket), Bucket)
            if settings is not None:
                lasting = settings.freshness_s in (0.0, FRESH_IMMUTABLE)
                self._buckets[bucket] = _Seen(settings.write == "through", lasting)
            else:
                self._buckets.setdefault(bucket, _Seen(False, False))

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


def _is_split(start: int, end: int) -> bool:
    return end - start > STRIPE_BYTES and start // STRIPE_BYTES != (end - 1) // STRIPE_BYTES
