"""Copies that another node has this one keep: PUT, DELETE and POST with `?forebay-copy`, between nodes alone.

Theory. A copy comes as any body does, into a file of the volume where it will lie (`core/messages/copied.py`); what
goes with it is a header. The engine decides. A request that is not one between nodes is none of these.
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Invalid
from forebay.core.messages.copied import (
    BACK,
    ClearCopy,
    Copied,
    CopiesCall,
    CopiesSaid,
    KeepCopy,
    Posted,
    copies_of,
    of_line,
)
from forebay.core.types import COPY_HEADER, COPY_QUERY, Bucket, check_key
from forebay.node.front.http.auth import Auth, Caller
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request
from forebay.node.front.objects.puts import Puts
from forebay.node.outcomes import Call, from_node

_HEADER: Final = COPY_HEADER.encode()


class KeptApi:
    """`call` asks the engine, `puts` takes bodies, `lines` are the first header lines of each answer."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines) -> None:
        self._call, self._auth, self._puts, self._lines = call, auth, puts, lines

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes; None if it is none of these."""
        if COPY_QUERY not in query or not from_node.get():
            return None
        self._auth.require_write(caller.identity, bucket, key or None)
        if request.method != b"PUT":
            return self._puts.intake.document(request, caller, limits.BATCH_BODY_BYTES_MAX)
        place = bucket if query[COPY_QUERY] == BACK else msgspec.structs.replace(bucket, name=copies_of(bucket.name))
        incoming = self._puts.intake.open(request, caller, place, check_key(key), bytes_max=limits.OBJECT_BYTES_MAX)
        incoming.synced_soon = True
        incoming.options = of_line(request.headers.get(_HEADER, b""))
        return incoming

    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request` in a task; False if it is none of these."""
        if COPY_QUERY not in query or not from_node.get():
            return False
        self._auth.require_write(identity, bucket, key or None)
        if request.method == b"PUT":
            incoming = request.sink
            assert isinstance(incoming, Incoming)
            assert isinstance(incoming.options, Copied)
            back = query[COPY_QUERY] == BACK
            work = self._puts.finish(self._keep(bucket.name, key, incoming, incoming.options, back))
        elif request.method == b"DELETE":
            call: CopiesCall | Posted = ClearCopy(bucket.name, check_key(key), query.get("actor", ""), _number(query))
            work = self._puts.finish(self._call("copies", call))
        else:
            try:
                call = msgspec.json.decode(request.body, type=Posted)
            except msgspec.MsgspecError as error:
                raise Invalid(f"what is asked of copies is unknown ({error}): nodes must be of one release") from None
            work = self._puts.finish(self._call("copies", call))
        exchange.spawn(self._answer(exchange, work))
        return True

    async def _keep(self, bucket: str, key: str, incoming: Incoming, about: Copied, back: bool) -> CopiesSaid:
        received = incoming.result
        body = None if received.path else received.body or b""
        try:
            said: CopiesSaid = await self._call(
                "copies", KeepCopy(bucket, key, about, received.size_bytes, received.path, body, received.sums, back)
            )
        except BaseException:
            received.discard()
            raise
        return said

    async def _answer(self, exchange: Exchange, work: object) -> None:
        said: CopiesSaid = await work  # type: ignore[misc]
        head = b"Content-Type: application/json\r\n"
        exchange.respond(200, self._lines(exchange.request) + head, msgspec.json.encode(said))


def _number(query: dict[str, str]) -> int:
    number = query.get("number", "")
    if not number.isascii() or not number.isdigit():
        raise Invalid("the number of a copy is not a number: the nodes must be of one release")
    return int(number)
