"""The S3 operations that write objects: PutObject, CopyObject, DeleteObject, DeleteObjects.

Theory. `puts.py` takes the bodies; here are S3's headers, XML and codes. DeleteObjects is many deletes at once, each
with its own outcome, so its status is always 200.

A copy onto itself that changes nothing is refused, as in S3: it is nearly always a mistake of the caller.

Invariant. No operation begins before the caller was found to be allowed to write, and to read the source of a copy.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import ForebayError, Invalid, NotFound, NotSupported
from forebay.core.messages.calls import BucketNamed, CopyCall, DeleteCall, Written
from forebay.core.s3rules.conditions import parse_http_date
from forebay.core.s3rules.names import decode_path
from forebay.core.types import Bucket, check_bucket_name, check_key
from forebay.core.versions import versioned
from forebay.node.front.http.auth import Auth, Caller
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.checksums import HEADERS, check_algorithm
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request, decode_query
from forebay.node.front.objects.object_headers import (
    check_acl,
    keeping_in,
    refuse_unserved,
    stored_headers,
    tags_of,
    write_conditions,
)
from forebay.node.front.objects.puts import Puts
from forebay.node.front.s3 import errors
from forebay.node.front.s3.unserved import BUCKET_SUBRESOURCES, OBJECT_SUBRESOURCES, refuse, version_asked
from forebay.node.front.s3.xml import CONTENT_TYPE, document, element, malformed, parse, read, readable, timestamp
from forebay.node.outcomes import Call

ELEMENTS_MAX: Final = limits.DELETE_KEYS_MAX * 8 + 64  # S3 knows five of an Object
DELETES_AT_ONCE: Final = 32  # of one DeleteObjects: enough to hide 20 ms of a backend, few enough to leave it to others
_SOURCE: Final = b"x-amz-copy-source"
_IF_SIZE: Final = b"x-amz-if-match-size"
_IF_MODIFIED: Final = b"x-amz-if-match-last-modified-time"
_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_ISO: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,15}(?:Z|[+-][0-9]{2}:?[0-9]{2})")
_KNOWN_BUCKET: Final = BUCKET_SUBRESOURCES - {"delete"}


class Objects:
    """`call` asks the engine, `puts` takes bodies, `lines` are the first header lines of each answer, `find` gives a
    bucket's settings by its name."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines, find: Callable[[str], Bucket]) -> None:
        self._call = call
        self._auth = auth
        self._intake = puts.intake
        self._puts = puts
        self._lines = lines
        self._find = find

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None for an operation that is not known. Raises to refuse it before it
        is sent."""
        method = request.method
        refuse(request, query, OBJECT_SUBRESOURCES if key else _KNOWN_BUCKET)
        if method == b"PUT" and key:
            self._auth.require_write(caller.identity, bucket, key)
            if _SOURCE in request.headers:
                return self._intake.document(request, caller, limits.SETTING_BYTES_MAX)
            incoming = self._puts.take(request, caller, bucket, check_key(key))
            incoming.put_to = (bucket.name, key)
            return incoming
        if method == b"POST" and not key and "delete" in query:
            self._auth.require_write(caller.identity, bucket, None)
            return self._intake.document(request, caller)
        if method == b"DELETE" and key:
            self._auth.require_write(caller.identity, bucket, key)
            return self._intake.document(request, caller, limits.SETTING_BYTES_MAX)
        return None

    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request`, now or in a task; False for an operation that is not known."""
        method = request.method
        refuse(request, query, OBJECT_SUBRESOURCES if key else _KNOWN_BUCKET)
        self._auth.require_write(identity, bucket, key or None)
        if method == b"PUT" and key:
            if _SOURCE in request.headers:
                call = self._copy_call(request, identity, bucket, key)
                exchange.spawn(self._copy(request, exchange, call))
            else:
                self.put(request, exchange, bucket, key)
        elif method == b"DELETE" and key:
            exchange.spawn(self._delete(request, exchange, bucket.name, key))
        elif method == b"POST" and not key and "delete" in query:
            exchange.spawn(self._delete_many(request, exchange, identity, bucket))
        else:
            return False
        return True

    # --- PutObject ---------------------------------------------------------------------------------------------------
    def put(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        """Make the body that came, for which `take_body` gave the sink, the object."""
        incoming = request.sink
        assert isinstance(incoming, Incoming)
        assert request.caller is not None, "a body is taken from nobody"
        self._auth.require_write(request.caller.identity, bucket, key)
        answer = _PutAnswer(self, request, exchange, incoming)
        if self._puts.begin(bucket.name, key, incoming, answer.take):
            exchange.hold(answer)
        else:
            exchange.spawn(self._put(request, exchange, incoming, self._puts.put(bucket.name, key, incoming)))

    async def _put(
        self, request: Request, exchange: Exchange, incoming: Incoming, putting: asyncio.Future[Written]
    ) -> None:
        self.answer_put(request, exchange, incoming, await putting)

    def answer_put(self, request: Request, exchange: Exchange, incoming: Incoming, written: Written) -> None:
        """Say what was written."""
        head = b'ETag: "%b"\r\n' % written.etag.encode()
        for algorithm, value in incoming.result.checksums.items():
            head += f"{HEADERS[algorithm]}: {value}\r\n".encode()
        if incoming.result.checksums:
            head += b"x-amz-checksum-type: FULL_OBJECT\r\n"
        exchange.respond(200, self._lines(request) + head)

    # --- CopyObject --------------------------------------------------------------------------------------------------
    def _copy_call(self, request: Request, identity: Identity, bucket: Bucket, key: str) -> CopyCall:
        """What a CopyObject asks for. Raises what is wrong with it."""
        if request.body:
            raise Invalid("a copy takes no body: leave it out", code="InvalidRequest")
        refuse_unserved(request, keeps=True)
        check_acl(request, bucket.acl)
        keeping = keeping_in(request, bucket)
        algorithm = request.header(b"x-amz-checksum-algorithm")
        source_bucket, source_key, version_id = copy_source(request)
        self._auth.require_read(identity, self._find(source_bucket), source_key)
        replaced = _directive(request, b"x-amz-metadata-directive")
        tags_replaced = _directive(request, b"x-amz-tagging-directive")
        if version_id:
            of, source_key = versioned(self._find(source_bucket), source_key, version_id)
            source_bucket = of.name
        if (source_bucket, source_key) == (bucket.name, key) and not replaced and not keeping:
            raise Invalid(
                "This copy request is illegal because it is trying to copy an object to itself without changing the "
                "object's metadata, storage class, website redirect location or encryption attributes.",
                code="InvalidRequest",
            )
        conditions = source_conditions(request)
        own = write_conditions(request)
        return CopyCall(
            source_bucket,
            source_key,
            bucket.name,
            check_key(key),
            stored_headers(request) if replaced else None,
            conditions.if_match,
            conditions.if_none_match,
            conditions.if_modified_since,
            conditions.if_unmodified_since,
            own.if_match,
            own.if_none_match,
            tags_of(request) if tags_replaced else None,
            check_algorithm(algorithm) if algorithm else "",
            keeping,
        )

    async def _copy(self, request: Request, exchange: Exchange, call: CopyCall) -> None:
        written: Written = await self._call("copy", call)
        inner = element("LastModified", timestamp(written.modified_s)) + element("ETag", f'"{written.etag}"')
        for name, value in written.checksums.items():
            inner += element("ChecksumType", "FULL_OBJECT") + element(f"Checksum{name}", value)
        exchange.respond(200, self._lines(request) + CONTENT_TYPE, document("CopyObjectResult", inner))

    # --- DeleteObject, DeleteObjects ---------------------------------------------------------------------------------
    async def _delete(self, request: Request, exchange: Exchange, bucket: str, key: str) -> None:
        refuse_unserved(request)
        if b"if-none-match" in request.headers:
            raise NotSupported("if-none-match does not go with a delete: use If-Match")
        size = request.header(_IF_SIZE) if _IF_SIZE in request.headers else None
        modified = request.header(_IF_MODIFIED) if _IF_MODIFIED in request.headers else None
        await self._delete_one(bucket, _Delete(key, write_conditions(request).if_match, size, modified))
        exchange.respond(204, self._lines(request))

    async def _delete_many(self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket) -> None:
        asked, quiet = await read(request.body, parse_deletes)
        if not bucket.url:  # not known here: that there is none is said once, not of each key
            await self._call("bucket_check", BucketNamed(bucket.name))
        gate = asyncio.Semaphore(DELETES_AT_ONCE)

        async def delete(one: _Delete) -> str:
            try:
                if one.unserved:
                    raise NotSupported(f"{one.unserved} of one key is not served: leave it out")
                self._auth.require_write(identity, bucket, one.key)
                async with gate:
                    await self._delete_one(bucket.name, one)
            except ForebayError as error:
                code, status = errors.code_and_status(error)
                request.note(bucket.name, one.key, status, code)
                said = element("Key", one.key) + element("Code", code) + element("Message", readable(error.message))
                return f"<Error>{said}</Error>"
            request.note(bucket.name, one.key, 204, "")
            return "" if quiet else f"<Deleted>{element('Key', one.key)}</Deleted>"

        said = await asyncio.gather(*(delete(one) for one in asked))
        exchange.respond(200, self._lines(request) + CONTENT_TYPE, document("DeleteResult", "".join(said)))

    async def _delete_one(self, bucket: str, one: _Delete) -> None:
        """Delete one key. What a condition is asked of and is not there is deleted already, as for one without."""
        call = DeleteCall(bucket, check_key(one.key), one.if_match, _size(one.size), _time(one.modified))
        try:
            await self._call("delete", call)
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise


class _PutAnswer:
    """Answers a PUT when the engine has, while the client is there."""

    __slots__ = ("_exchange", "_incoming", "_objects", "_outcome", "_request")

    def __init__(self, objects: Objects, request: Request, exchange: Exchange, incoming: Incoming) -> None:
        self._objects, self._request, self._incoming = objects, request, incoming
        self._exchange: Exchange | None = exchange
        self._outcome: Written | ForebayError

    def cancel(self) -> None:
        self._exchange = None

    def take(self, outcome: Written | ForebayError) -> None:
        """What the engine says."""
        if self._exchange is not None:
            self._outcome = outcome
            self._exchange.resume(self._say)

    def _say(self) -> None:
        outcome, exchange = self._outcome, self._exchange
        assert exchange is not None
        if isinstance(outcome, ForebayError):
            raise outcome
        self._objects.answer_put(self._request, exchange, self._incoming, outcome)


class _Delete(NamedTuple):
    """One key to delete, and what must be so of it, as the client wrote it; None where it did not."""

    key: str
    if_match: str | None
    size: str | None = None
    modified: str | None = None
    unserved: str = ""


def parse_deletes(body: bytes) -> tuple[list[_Delete], bool]:
    """The keys of a DeleteObjects document, and whether to be quiet. `Invalid` (`MalformedXML`)."""
    root = parse(body, "Delete", ELEMENTS_MAX)
    asked = []
    for child in root.findall("Object"):
        unserved = "VersionId" if (child.findtext("VersionId") or "null") != "null" else ""
        if_match, size, modified = (child.findtext(name) for name in ("ETag", "Size", "LastModifiedTime"))
        asked.append(_Delete(child.findtext("Key") or "", if_match, size, modified, unserved))
    if not 1 <= len(asked) <= limits.DELETE_KEYS_MAX:
        raise malformed(f"it names {len(asked)} keys, where 1 to {limits.DELETE_KEYS_MAX} are allowed")
    return asked, (root.findtext("Quiet") or "").strip().lower() == "true"


def _size(text: str | None) -> int | None:
    if text is not None and not _DIGITS.fullmatch(text):
        raise Invalid("the size of a delete's condition is not a number of bytes", code="InvalidArgument")
    return None if text is None else int(text)


def _time(text: str | None) -> int | None:
    """Unix time in whole seconds of a time in either of the forms that SDKs send, HTTP's and ISO 8601."""
    if text is None:
        return None
    seconds = parse_http_date(text)
    if seconds is None and _ISO.fullmatch(text):
        with suppress(ValueError):
            seconds = int(datetime.fromisoformat(text).timestamp())
    if seconds is None:
        raise Invalid("the time of a delete's condition is no date: write it as HTTP does", code="InvalidArgument")
    return seconds


def copy_source(request: Request) -> tuple[str, str, str]:
    """Bucket, key and version id ("" for the current object) that x-amz-copy-source names. `Invalid`."""
    raw, _, asked = request.headers[_SOURCE].partition(b"?")
    query = decode_query(asked)
    version_id = version_asked(query)
    if query.keys() - {"versionId"}:
        raise Invalid("x-amz-copy-source takes no query but versionId", code="InvalidArgument")
    path = decode_path(raw)
    bucket, slash, key = path.removeprefix("/").partition("/")
    if not bucket or not slash or not key:
        raise Invalid("x-amz-copy-source must be <bucket>/<key>, percent-encoded", code="InvalidArgument")
    return check_bucket_name(bucket), check_key(key), version_id


class SourceConditions(NamedTuple):
    """The x-amz-copy-source-if-* headers, None where absent."""

    if_match: str | None
    if_none_match: str | None
    if_modified_since: str | None
    if_unmodified_since: str | None


def source_conditions(request: Request) -> SourceConditions:
    """The conditions that a copy sets on its source."""
    names = (b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since")
    headers = [_SOURCE + b"-" + name for name in names]
    return SourceConditions(*(request.header(name) if name in request.headers else None for name in headers))


def _directive(request: Request, name: bytes) -> bool:
    """Whether the copy replaces rather than copies."""
    value = request.headers.get(name, b"COPY")
    if value not in (b"COPY", b"REPLACE"):
        raise Invalid(f"{name.decode()} must be COPY or REPLACE", code="InvalidArgument")
    return value == b"REPLACE"
