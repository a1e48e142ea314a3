"""Uploads in parts: begin, put a part, list parts and uploads, complete, abort.

Theory. The engine keeps the uploads; this module remembers nothing. A part's body is received like an object's. Its MD5
is its ETag, which the client repeats when it completes.

Completing may take longer than a client waits: the engine joins the parts and may send them to a backend. After
COMPLETE_WAIT_S the answer is 202, and the client asks again. That is safe: the engine goes on with what it began, and
repeats the outcome for an hour.

Invariant. What was begun at the engine is completed even if the client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from forebay.core import limits
from forebay.core.messages.calls import (
    Nothing,
    UploadCompleteCall,
    UploadNamed,
    UploadPartsCall,
    UploadsCall,
)
from forebay.core.messages.native import Completion
from forebay.core.types import Bucket, check_key
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.requests import Exchange, Request, decode_query
from forebay.node.front.native.arguments import JSON, decode_body, encode, number_of
from forebay.node.front.objects.object_headers import refuse_unserved, write_conditions
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.reads import Reads
from forebay.node.front.objects.upload_calls import create_call, part_number, send_part
from forebay.node.outcomes import Call

COMPLETE_WAIT_S = 10.0

Taken = dict[str, str]


class UploadAnswers:
    """Answers the rows of `routes.py` whose names its methods bear. The caller has let the client write."""

    def __init__(self, call: Call, puts: Puts, reads: Reads) -> None:
        self._call, self._puts, self._reads = call, puts, reads

    def take_body(self, request: Request, bucket: Bucket, key: str) -> Incoming:
        """A sink for a part. Raises what is wrong with the request."""
        _asked_part(request)
        refuse_unserved(request)
        return self._puts.intake.open(request, None, bucket, key, md5=True)

    def upload_begin(self, request: Request, exchange: Exchange, taken: Taken) -> None:
        """POST: begin an upload."""
        call = create_call(request, self._reads.bucket(taken["bucket"]), check_key(taken["key"]))
        self._spawn(exchange, self._call("upload_create", call))

    def upload_part(self, request: Request, exchange: Exchange, taken: Taken) -> None:
        """PUT: the body is a part."""
        upload_id, number = _asked_part(request)
        bucket, key = self._reads.bucket(taken["bucket"]), check_key(taken["key"])
        if request.sink is None:  # it has no body: an empty part, if it says so
            request.sink = self.take_body(request, bucket, key)
            request.sink.finish()
        assert isinstance(request.sink, Incoming)
        part = send_part(self._call, bucket.name, key, upload_id, number, request.sink)
        self._spawn(exchange, part)

    def upload_parts(self, request: Request, exchange: Exchange, taken: Taken) -> None:
        """GET: a page of the parts that the node has of one upload."""
        query = decode_query(request.query)
        call = UploadPartsCall(
            taken["bucket"],
            check_key(taken["key"]),
            query.get("upload_id", ""),
            number_of(query, "after", 0, most=limits.PARTS_MAX),
            number_of(query, "limit", limits.LIST_KEYS_MAX, least=1, most=limits.LIST_KEYS_MAX),
        )
        self._spawn(exchange, self._call("upload_parts", call))

    def uploads(self, request: Request, exchange: Exchange, taken: Taken) -> None:
        """GET: a page of a bucket's open uploads."""
        query = decode_query(request.query)
        call = UploadsCall(
            taken["bucket"],
            query.get("prefix", ""),
            query.get("after_key", ""),
            query.get("after_id", ""),
            number_of(query, "limit", limits.LIST_KEYS_MAX, least=1, most=limits.LIST_KEYS_MAX),
        )
        self._spawn(exchange, self._call("uploads", call))

    def upload_complete(self, request: Request, exchange: Exchange, taken: Taken) -> None:
        """POST: make the object of the parts that the body names."""
        refuse_unserved(request)
        asked: Completion = decode_body(request, Completion)
        conditions = write_conditions(request)
        call = UploadCompleteCall(
            taken["bucket"],
            check_key(taken["key"]),
            decode_query(request.query).get("upload_id", ""),
            [(part.number, part.etag, part.checksums) for part in asked.parts],
            conditions.if_match,
            conditions.if_none_match,
            asked.checksums,
            asked.size_bytes,
        )
        exchange.spawn(self._complete(exchange, self._begin(self._call("upload_complete", call))))

    def upload_abort(self, request: Request, exchange: Exchange, taken: Taken) -> None:
        """DELETE: forget an upload and its parts."""
        upload_id = decode_query(request.query).get("upload_id", "")
        call = UploadNamed(taken["bucket"], check_key(taken["key"]), upload_id)
        self._spawn(exchange, self._call("upload_abort", call))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Begin `work`, which ends whether or not anybody waits for what is returned."""
        outcome = self._puts.finish(work)
        outcome.add_done_callback(_seen)
        return outcome

    def _spawn(self, exchange: Exchange, work: Coroutine[Any, Any, Any]) -> None:
        exchange.spawn(self._answer(exchange, self._begin(work)))

    async def _answer(self, exchange: Exchange, outcome: asyncio.Future[Any]) -> None:
        exchange.respond(200, JSON, encode(await outcome))

    async def _complete(self, exchange: Exchange, outcome: asyncio.Future[Any]) -> None:
        made, _ = await asyncio.wait((outcome,), timeout=COMPLETE_WAIT_S)
        if made:
            exchange.respond(200, JSON, encode(outcome.result()))
        else:
            exchange.respond(202, JSON, encode(Nothing()))


def _seen(outcome: asyncio.Future[Any]) -> None:
    """The client may be gone, or ask again and hear it then."""
    if not outcome.cancelled():
        outcome.exception()


def _asked_part(request: Request) -> tuple[str, int]:
    query = decode_query(request.query)
    upload_id = query.get("upload_id", "")
    return upload_id, part_number(query.get("number", ""), upload_id)
