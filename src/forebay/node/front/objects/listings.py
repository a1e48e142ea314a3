"""A listing as an answer: from the store as a file, or from the engine in parts.

Theory. The engine says which listing it is and has it made; the bytes come from where it was kept, as those of any
object do. While the listing is under way the answer is 202 with how far it is, so that no connection waits for longer
than a few seconds, whatever the bucket's size.

Invariant. An answer with status 200 is exactly the listing that its ETag names, or it is cut.
"""

from __future__ import annotations

import re

import msgspec

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound, Unavailable
from forebay.core.formats.listing import MEDIA_TYPE, ListingCall, ListingPartCall, ListingState, derived_key
from forebay.core.versions import versions_of
from forebay.node.front.http.requests import Exchange, decode_query, header_line
from forebay.node.outcomes import Call
from forebay.node.store.derived import Derived

_SECONDS = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,20})?")
_JSON = b"Content-Type: application/json\r\n"
_encode = msgspec.json.Encoder().encode


class ListingAnswers:
    """Answers `GET /-/v1/listing/BUCKET`."""

    def __init__(self, derived: Derived, call: Call) -> None:
        self._derived, self._call = derived, call

    def answer(self, exchange: Exchange, bucket: str) -> None:
        """Answer, in a task of the exchange. `Invalid` for a query that makes no sense."""
        query = decode_query(exchange.request.query)
        since = query.get("since", "0")
        if not _SECONDS.fullmatch(since):
            raise Invalid("since is not a time in seconds: send what the answer before said, or leave it out")
        refresh = query.get("refresh", "") in ("1", "true")
        if query.get("versions", "") in ("1", "true"):
            bucket = versions_of(bucket)
        call = ListingCall(bucket, query.get("prefix", ""), query.get("id", ""), refresh, float(since))
        exchange.spawn(self._answer(exchange, call))

    async def _answer(self, exchange: Exchange, call: ListingCall) -> None:
        state: ListingState = await self._call("listing", call)
        if not state.id:
            exchange.respond(202, _JSON, _encode(state))
            return
        head = header_line(b"Content-Type", MEDIA_TYPE) + header_line(b"ETag", f'"{state.id}"')
        if exchange.request.header(b"if-none-match").strip().strip('"') == state.id:
            exchange.respond(304, head)
            return
        if exchange.request.method == b"HEAD":
            exchange.respond(200, head, size_bytes=state.size_bytes)
            return
        found = self._derived.find("listings", state.bucket, derived_key(state.prefix, state.id), state.id)
        if isinstance(found, bytes):
            exchange.respond(200, head, found)
        elif found is not None:
            try:
                exchange.start(200, head, found.record.size_bytes)
                await exchange.write_file(found.fd, 0, found.record.size_bytes)
                await exchange.end()
            finally:
                found.release()
        else:
            await self._in_parts(exchange, head, state)

    async def _in_parts(self, exchange: Exchange, head: bytes, state: ListingState) -> None:
        exchange.start(200, head, state.size_bytes)
        for start in range(0, state.size_bytes, limits.LISTING_PART_BYTES_MAX):
            end = min(start + limits.LISTING_PART_BYTES_MAX, state.size_bytes)
            try:
                part: bytes = await self._call("listing_part", ListingPartCall(state.id, start, end))
            except NotFound:
                raise Unavailable("the listing left the store as it was sent: ask for it again") from None
            await exchange.write(part)
        await exchange.end()
