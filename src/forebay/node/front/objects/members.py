"""Members of shards over HTTP: the index of a shard, one member of it, one more.

Theory. A member is answered like an object: it has a size, ranges and conditions hold, and its ETag is the shard's,
since it changes when that does. So what is decided is decided by the same code (`objects/answer.py`), about a record
that stands for the member, and the bytes come from where the member is (`shards.py`).

Appending is the engine's work (`node/engine/write/appends.py`), which needs the shard here and whole: this side fetches
it first, which finds out about its members at the same time.

Invariant. Nothing of a member is sent before it is known to be one of the version whose ETag is said.
"""

from __future__ import annotations

import msgspec

from forebay.core.errors import Busy, Invalid, NotFound, NotSupported
from forebay.core.formats.members import AppendCall, MembersPage, form_of
from forebay.core.formats.tar import header_of
from forebay.core.messages.calls import Written
from forebay.core.record import Record, build_head
from forebay.core.types import Bucket, ObjectInfo
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.requests import Exchange, Request, decode_query
from forebay.node.front.objects.answer import DECIDED_BY, asked_range, decide_by
from forebay.node.front.objects.object_headers import write_conditions
from forebay.node.front.objects.puts import PutOptions, Puts
from forebay.node.front.objects.reads import Answer, Reads, answer_plainly
from forebay.node.front.objects.shards import Shards, Span
from forebay.node.outcomes import Call

PAGE_MAX = 10_000  # members in one page of JSON
TRIES = 4
MEDIA = b"application/msgpack"
_encode_json = msgspec.json.Encoder().encode


class Members:
    """The handler of everything about members, for `native.py`."""

    def __init__(self, shards: Shards, reads: Reads, puts: Puts, call: Call) -> None:
        self.shards = shards
        self._reads, self._puts, self._call = reads, puts, call

    # --- one member --------------------------------------------------------------------------------------------------
    def serve(self, request: Request, exchange: Exchange, bucket: Bucket, key: str, member: str) -> None:
        """Answer with a member's bytes: at once if all is here, else in a task."""
        span = self.shards.known(bucket, key, member)
        if span is not None and span.ranged:
            status, head, start, end = _answer(request, span)
            at = span.member.start
            if self._reads.hit(exchange, bucket.name, key, span.record, Answer(status, head, at + start, at + end)):
                return
        exchange.spawn(self._serve(request, exchange, bucket, key, member))

    async def _serve(self, request: Request, exchange: Exchange, bucket: Bucket, key: str, member: str) -> None:
        span = await self.shards.locate(bucket, key, member)
        answer = _answer(request, span)
        size = answer.end - answer.start
        if request.method == b"HEAD" or not size:
            exchange.respond(answer.status, answer.head, size_bytes=size)
            return
        exchange.start(answer.status, answer.head, size)
        await self.shards.send(exchange, span, answer.start, answer.end)
        await exchange.end()

    # --- the index ---------------------------------------------------------------------------------------------------
    def index(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        """Answer with all members of a shard, or a page of them as JSON."""
        query = decode_query(request.query)
        form = query.get("format", "json" if b"json" in request.headers.get(b"accept", b"") else "msgpack")
        if form not in ("json", "msgpack"):
            raise Invalid(f"format {form!r} is not known: use json or msgpack")
        first, limit = _number(query, "first", 0), _number(query, "limit", PAGE_MAX)
        if not 1 <= limit <= PAGE_MAX:
            raise Invalid(f"limit is not a number from 1 to {PAGE_MAX}: ask for pages of at most that")

        async def respond() -> None:
            record, index = await self.shards.index(bucket, key)
            if form == "json":
                names = index.names[first : first + limit]
                shown = [name.encode("utf-8", "replace").decode() for name in names]
                after = first + len(names)
                page = MembersPage(
                    bucket.name, key, record.version, record.etag, index.kind, index.plain, len(index),
                    list(zip(shown, index.sizes(first, limit), strict=True)),
                    after if after < len(index) else None,
                )  # fmt: skip
                exchange.respond(200, _head(record, b"application/json"), _encode_json(page))
                return
            data = index.encode()
            answer = _decided(request, record, len(data), MEDIA)
            size = answer.end - answer.start
            if request.method == b"HEAD" or not size:
                exchange.respond(answer.status, answer.head, size_bytes=size)
                return
            exchange.start(answer.status, answer.head, size)
            await exchange.write(data if size == len(data) else data[answer.start : answer.end])
            await exchange.end()

        exchange.spawn(respond())

    # --- one more ----------------------------------------------------------------------------------------------------
    def take(self, request: Request, bucket: Bucket, key: str) -> Incoming:
        """A sink for the bytes of a member to be. Raises what is wrong with it before they are sent."""
        name = decode_query(request.query).get("name", "")
        header_of(name, 0, 0)
        form = form_of(key, None)
        if form is not None and (form.kind != "tar" or form.packing):
            raise NotSupported(f"members are appended to plain tars only: {key} is none by its name")
        if bucket.url and bucket.write == "through":
            raise NotSupported(
                f"bucket {bucket.name} is written through, and its backend cannot append: use a bucket written back or "
                "local, or put the whole shard"
            )
        incoming = self._puts.take(request, None, bucket, key)
        incoming.options = PutOptions(conditions=write_conditions(request))
        return incoming

    def append(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        """Make what came a member."""
        if request.sink is None:
            request.sink = self.take(request, bucket, key)
            request.sink.finish()
        incoming = request.sink
        assert isinstance(incoming, Incoming)
        name = decode_query(request.query)["name"]
        appending = self._puts.finish(self._append(bucket, key, name, incoming))

        async def respond() -> None:
            exchange.respond(200, b"Content-Type: application/json\r\n", _encode_json(await appending))

        exchange.spawn(respond())

    async def _append(self, bucket: Bucket, key: str, name: str, incoming: Incoming) -> Written:
        received, options = incoming.result, incoming.options
        assert isinstance(options, PutOptions)
        conditions = options.conditions
        call = AppendCall(
            bucket.name, key, name, received.size_bytes, received.path, received.body,
            conditions.if_match, conditions.if_none_match,
        )  # fmt: skip
        try:
            for attempt in range(1, TRIES + 1):
                try:
                    written: Written = await self._call("append", call)
                    return written
                except Busy as error:
                    if error.code != "NotHere" or attempt == TRIES:
                        raise
                await self._fetched(bucket, key)
            raise AssertionError("unreachable")
        finally:
            received.discard()

    async def _fetched(self, bucket: Bucket, key: str) -> None:
        """The shard is here, if there is one."""
        try:
            await self.shards.have(bucket, key)
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise


def _answer(request: Request, span: Span) -> Answer:
    return _decided(request, span.record, span.member.size_bytes, b"application/octet-stream")


def _decided(request: Request, record: Record, size_bytes: int, media: bytes) -> Answer:
    """What to answer to a request for `size_bytes` that stand for (a part of) the shard."""
    head = _head(record, media)
    stands = Record(
        record.object_id, size_bytes, record.version, record.etag, record.modified_s, record.checked_s, head, True
    )
    if DECIDED_BY.isdisjoint(request.headers):
        return answer_plainly(stands)
    return decide_by(request, asked_range(request))(stands)


def _head(record: Record, media: bytes) -> bytes:
    return build_head(
        ObjectInfo("", 0, record.version, record.etag, record.modified_s, (("content-type", media.decode()),))
    )


def _number(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise Invalid(f"{name} is not a number: give digits")
    return int(text)
