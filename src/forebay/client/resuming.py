"""Goes on with a read whose answer was cut: the rest of the same version is asked for.

Theory. A front that ends, a machine that is lost, a fetch that fails midway and a kernel that gives up a connection
(Linux does, if for eight seconds each packet finds the queue of its own host full) all look the same from here: the
connection ends before the answer, or in the middle of its body. A read that was not answered is asked again. Else the
head of the answer named the version. So the rest can be asked for by range and If-Match, and no byte comes twice or of
another version. If the node cannot give it, it now says why, before it says anything else. Its word ends the read.

Progress renews the patience: an answer that is cut every megabyte is slow, not broken. There is no pause: a node that
has no engine waits for one before it answers, and one that is gone refuses the connection, which is the caller's error
(`patience.py` waits for such).

Rejected: asking for the whole again (a sink has seen bytes, and of a large object most have come); asking the backend's
errors away (a node alone retries those, and says when it has given up).

Invariants. (1) A read is made of one version. (2) At most CUTS_MAX cuts in a row that brought less than PROGRESS_BYTES
are survived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from urllib.parse import unquote

from forebay.client import flows
from forebay.client.connection import CUT, Collected, CutOff, cut_after
from forebay.client.sinks import IntoBuffer
from forebay.core import limits
from forebay.core.errors import Corrupt, Unavailable
from forebay.core.messages.http1 import Request, Response, Sink

CUTS_MAX = 3  # in a row; a node that restarts its fronts cuts a read once
PROGRESS_BYTES = 1 * limits.MIB  # between two cuts that are not in a row


class Cuts:
    """Those of one read."""

    def __init__(self) -> None:
        self._left, self._renewed_at = CUTS_MAX, 0

    def go_on(self, position: int) -> bool:
        """It was cut at `position`, which counts from anywhere; whether to ask for the rest."""
        if position - self._renewed_at >= PROGRESS_BYTES:
            self._left, self._renewed_at = CUTS_MAX, position
        self._left -= 1
        return self._left >= 0


class Filling(Protocol):
    """A sink that knows how many bytes it has."""

    done_bytes: int


class _Rest:
    """The sink of an answer with the bytes from `done_bytes` on of what `whole` announced."""

    def __init__(self, whole: Response, sink: Sink, done_bytes: int, name: str) -> None:
        self._whole, self._sink, self._name = whole, sink, name
        self.done_bytes = done_bytes

    def begin(self, response: Response) -> None:
        """`Corrupt` for bytes of another place or version."""
        whole, rest = flows.got(self._whole), flows.got(response)
        wanted = (whole.size_bytes, whole.etag, whole.start + self.done_bytes, whole.body_bytes - self.done_bytes)
        if (rest.size_bytes, rest.etag, rest.start, rest.body_bytes) != wanted:
            raise Corrupt(f"{self._name}: a node answered with other bytes than asked for: try again")

    def buffer(self) -> memoryview:
        return self._sink.buffer()

    def wrote(self, size_bytes: int) -> None:
        self._sink.wrote(size_bytes)
        self.done_bytes += size_bytes


def is_pinned(response: Response) -> bool:
    """Whether the answer names its version in a way that If-Match can ask for."""
    return response.headers.get("etag", "").startswith('"')


def can_go_on(request: Request, cut: CutOff) -> bool:
    """Whether the rest of what was cut can be asked for: of an object as it is stored, of a version that is named."""
    whole = cut.response
    return "?" not in request.target and whole.ok and is_pinned(whole) and "content-length" in whole.headers


def from_own_node(request: Request) -> flows.Flow[Response]:
    """The answer of the client's own node to a read, also if it is cut."""
    cuts = Cuts()
    while True:
        try:
            return (yield request)
        except CutOff as cut:
            if not can_go_on(request, cut):
                raise
            return (yield from gone_on(request, cut))
        except Unavailable as error:  # before its first byte, if it has this code
            if error.code != CUT or not cuts.go_on(0):
                raise


def gone_on(request: Request, cut: CutOff) -> flows.Flow[Response]:
    """The answer to `request`, the first bytes of which came before `cut`. The rest is asked of the client's own node.
    What that says if it is no success; `Precondition` if the object is another version by now."""
    whole, name = cut.response, unquote(request.target).removeprefix(flows.object_target("", "")[:-1])
    facts, rest, cuts = flows.got(whole), _Rest(whole, cut.sink, cut.done_bytes, name), Cuts()

    def ask() -> Request:
        span = f"bytes={facts.start + rest.done_bytes}-{facts.start + facts.body_bytes - 1}"
        return Request("GET", request.target, (("Range", span), ("If-Match", whole.headers["etag"])), sink=rest)

    cuts.go_on(rest.done_bytes)  # the first
    try:
        yield from filled(rest, facts.body_bytes, ask, name, cuts)
    except Unavailable as error:
        if error.code != CUT:
            raise
        raise Unavailable(cut_after(rest.done_bytes, facts.body_bytes), code=CUT) from cut
    body = cut.sink.value() if isinstance(cut.sink, Collected) else b""
    return whole._replace(body=body, size_bytes=facts.body_bytes)


def filled(into: Filling, size_bytes: int, ask: Callable[[], Request], name: str, cuts: Cuts) -> flows.Flow[None]:
    """Ask the client's own node until `into` has so many bytes; `ask` makes the request for what it lacks. What the
    node says if it is no success, and the cut that was one too many."""
    while into.done_bytes < size_bytes:
        try:
            response = yield ask()
        except Unavailable as error:
            if error.code != CUT or not cuts.go_on(into.done_bytes):
                raise
        else:
            if not response.ok:
                raise flows.raised(response, name)


def may_begin_again(request: Request) -> bool:
    """Whether any version will do, and nobody has seen a byte of the one that came."""
    unseen = request.sink is None or isinstance(request.sink, IntoBuffer)
    return unseen and not any(name == "If-Match" for name, _ in request.headers)
