"""Reads a large object from several nodes at once, each of which holds some of its stripes.

Theory. The head of an answer says what the object is: its size and ETag. Everything else is asked for with that ETag as
If-Match, stripe by stripe, of whoever holds the stripe (`owners.py`). So all bytes are of one version, whichever node
gives them. What an owner does not give, or the rest of it, the client's own node gives. Only its word fails a read; an
answer of its own that is cut is gone on with (`resuming.py`).

A body that goes to memory is received where it belongs, in whatever order: each owner has a lane of its own, in which
CLIENT_LANE_STRIPES are under way, so that no link waits for another. One that must be in order waits in memory for what
is before it. Then up to CLIENT_STRIPES_MAX stripes are under way, in order: placement deals them so that owners take
turns.

Rejected: lanes for what must be in order (an owner that is slow would leave ever more of the object waiting for it in
memory); smaller requests than stripes (a round trip each, and the owner's read-ahead sees no stream).

Invariants. (1) All bytes are of the version that the head named. (2) What goes to an ordered sink goes in order, each
byte once. (3) After the end of a read no thread writes to the caller's memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from forebay.client import flows
from forebay.client.connection import Collected, copy_into
from forebay.client.resuming import Cuts, filled, is_pinned
from forebay.client.sinks import IntoBuffer
from forebay.core.errors import Busy, Closed, Corrupt, Unavailable
from forebay.core.limits import STRIPE_BYTES
from forebay.core.messages.http1 import Endpoint, Request, Response, Sink
from forebay.core.ranges import end_of_stripe

if TYPE_CHECKING:
    from forebay.client.owners import Owners

VERSIONS_MAX = 3  # of an object that one read begins


class Large(Exception):
    """The body that an answer begins is larger than one node should send; none of it was taken."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


class Measuring:
    """A sink in front of another that stops a body of more than `size_bytes_max` before its first byte (`Large`)."""

    def __init__(self, sink: Sink | None, size_bytes_max: int) -> None:
        self._sink, self._size_bytes_max = sink, size_bytes_max
        self._into: Sink

    def begin(self, response: Response) -> None:
        """`Large`; else what the sink behind says."""
        facts = flows.got(response)
        if facts.body_bytes > self._size_bytes_max and is_pinned(response):
            raise Large(response)
        self._into = self._sink or Collected(facts.body_bytes)
        self._into.begin(response)

    def buffer(self) -> memoryview:
        return self._into.buffer()

    def wrote(self, size_bytes: int) -> None:
        self._into.wrote(size_bytes)

    def body(self) -> bytes:
        """What was collected, if there was no sink."""
        return self._into.value() if isinstance(self._into, Collected) and self._sink is None else b""


def span(request: Request) -> tuple[int, int | None] | None:
    """The bytes that a GET asks for, [start, end), with None for the object's end; None if it is not a GET of a plain
    object whose start it says."""
    start, end = 0, None
    for name, value in request.headers:
        if name == "Range":
            first, _, last = value.removeprefix("bytes=").partition("-")
            if not first:
                return None
            start, end = int(first), int(last) + 1 if last else None
        elif name != "If-Match":
            return None
    return None if "?" in request.target or request.method != "GET" else (start, end)


class Piece(NamedTuple):
    """Bytes [start, end) of the object, all of one stripe, and where they go."""

    start: int
    end: int
    room: memoryview


class _Into:
    """The sink of one answer for a piece."""

    def __init__(self, striped: Striped, piece: Piece) -> None:
        self._striped, self._piece = striped, piece
        self.done_bytes = 0

    def begin(self, response: Response) -> None:
        """`Corrupt` for bytes of another place or version."""
        facts, piece = flows.got(response), self._piece
        wanted = (piece.start + self.done_bytes, piece.end - piece.start - self.done_bytes)
        found = (facts.size_bytes, f'"{facts.etag}"', facts.start, facts.body_bytes)
        if found != (self._striped.facts.size_bytes, self._striped.etag, *wanted):
            raise Corrupt(f"{self._striped.name}: a node answered with other bytes than asked for: try again")

    def buffer(self) -> memoryview:
        if self._striped.stopped:
            raise Closed(f"the read of {self._striped.name} has failed elsewhere")
        return self._piece.room[self.done_bytes :]

    def wrote(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes


class Striped:
    """One read of a large object. `response` is the head of the answer that the caller gets."""

    def __init__(self, owners: Owners, request: Request, response: Response) -> None:
        assert request.of is not None
        self.facts = flows.got(response)
        self.etag = response.headers["etag"]
        self.name = "/".join(request.of)
        self.stopped = False
        self._owners, self._request, self._response = owners, request, response
        self._start, self._end = self.facts.start, self.facts.start + self.facts.body_bytes
        self._collected = Collected(self.facts.body_bytes) if request.sink is None else None
        sink = self._collected or request.sink
        assert sink is not None
        self._sink: Sink = sink
        sink.begin(response)
        self._whole = sink.buffer() if isinstance(sink, Collected | IntoBuffer) else None

    @property
    def pieces(self) -> Iterator[Piece]:
        """What there is to read. The room of each is made when it is asked for."""
        start = self._start
        while start < self._end:
            end = min(end_of_stripe(start), self._end)
            if self._whole is not None:
                room = self._whole[start - self._start : end - self._start]
            else:
                room = memoryview(bytearray(end - start))
            yield Piece(start, end, room)
            start = end

    def lanes(self) -> list[deque[Piece]]:
        """The pieces by who is asked for them, if they may come in any order; else none."""
        if self._whole is None:
            return []
        lanes: defaultdict[Endpoint | None, deque[Piece]] = defaultdict(deque)
        for piece in self.pieces:
            lanes[self._owner(piece)].append(piece)
        return list(lanes.values())

    def _owner(self, piece: Piece) -> Endpoint | None:
        assert self._request.of is not None
        return self._owners.owner(*self._request.of, piece.start // STRIPE_BYTES, pinned=True)

    def read(self, piece: Piece) -> flows.Flow[None]:
        """Fill the piece's room. `Precondition` if the object is another version by now."""
        into = _Into(self, piece)
        owner = self._owner(piece)
        if owner is not None:
            try:
                response = yield self._of(piece, into)._replace(at=owner)
            except (Unavailable, Corrupt):
                self._owners.failed(owner)
            else:
                self._owners.answered(owner, response)
        yield from filled(into, len(piece.room), lambda: self._of(piece, into), self.name, Cuts())

    def _of(self, piece: Piece, into: _Into) -> Request:
        wanted = f"bytes={piece.start + into.done_bytes}-{piece.end - 1}"
        return Request("GET", self._request.target, (("Range", wanted), ("If-Match", self.etag)), sink=into)

    def deliver(self, piece: Piece) -> None:
        """The piece was read, and so were those before it."""
        if self._whole is None:
            copy_into(piece.room, self._sink)

    def stop(self) -> None:
        """Take no more bytes."""
        self.stopped = True

    def answer(self) -> Response:
        """What the caller gets, after the last piece."""
        size_bytes = self.facts.body_bytes
        if self._whole is not None:
            self._sink.wrote(size_bytes)
            self._whole = None  # while a view of it is held, the value is a copy: 0.8 s for 1 GiB
        body = self._collected.value() if self._collected is not None else b""
        return self._response._replace(body=body, size_bytes=size_bytes)


def head_of(response: Response, start: int, end: int | None) -> Response | None:
    """The head of the answer to a GET of these bytes, made of what a HEAD said; None if there would be none."""
    size = flows.got(response).size_bytes
    last = min(size if end is None else end, size) - 1
    if not response.ok or not is_pinned(response) or last < start:
        return None
    if (start, end) == (0, None):
        return Response(200, response.headers)
    ranged = {"content-length": str(last + 1 - start), "content-range": f"bytes {start}-{last}/{size}"}
    return Response(206, response.headers | ranged)


def changing(name: str) -> Busy:
    """The error of a read that began VERSIONS_MAX times."""
    return Busy(f"{name} changed {VERSIONS_MAX} times while it was read: try again when it rests")
