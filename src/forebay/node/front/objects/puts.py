"""One object on its way from a request's body to the engine. The one place that does this, for every API.

Theory. A PUT is judged before its body: by its headers, its length, and the room there is. The body then goes where
`Intake` says. When it is whole, one call tells the engine where it lies. The engine judges the conditions under the
key's lock, since only there do they still hold when the write happens.

For a bucket written through, a large body is sent on to the backend while it arrives. `_Stream` opens the put with the
engine when the body is expected, and reports how far the file has grown. The engine decides whether it wants that. A
body that breaks off is given up.

The engine finishes a write that it was told of, whether or not the client is still there. So the clean-up afterwards is
not left to the request's task, which ends with the client.

Rejected: repeating `put` when the engine went away in between (it may have happened: the client decides).

Invariants. (1) A file belongs to the engine from the call on; if the call fails, the file is removed here. (2) A stream
that was opened ends with a `put` of its number or is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol

from forebay.core import limits
from forebay.core.errors import Closed, ForebayError, NotSupported
from forebay.core.messages.calls import PutCall, PutOpenCall, Written
from forebay.core.types import Bucket, Headers
from forebay.node.front.http.auth import Caller
from forebay.node.front.http.bodies import Incoming, Received, Stream
from forebay.node.front.http.checksums import HEADERS
from forebay.node.front.http.requests import Begin, Request
from forebay.node.front.objects.body_intake import Intake, promised_checksums
from forebay.node.front.objects.object_headers import (
    WriteConditions,
    check_acl,
    keeping_in,
    refuse_unserved,
    stored_headers,
    tags_of,
    write_conditions,
)
from forebay.node.outcomes import Call

GROWN_BYTES: Final = 1024 * 1024  # how often the engine hears of a body that arrives


class Streams(Protocol):
    """What tells the engine of bodies that arrive: the link to it."""

    def grown(self, put: int, upto: int) -> None: ...

    def gave_up(self, put: int) -> None: ...


class PutOptions(NamedTuple):
    """What an object is to be, but for its bytes."""

    headers: Headers = ()
    tags: str = ""
    conditions: WriteConditions = WriteConditions()


# Fields that say how a body comes and who sends it, and nothing of the object that it is to be.
OF_THE_TRANSFER: Final = frozenset(
    (
        b"accept",
        b"accept-encoding",
        b"amz-sdk-invocation-id",
        b"amz-sdk-request",
        b"authorization",
        b"connection",
        b"content-length",
        b"content-md5",
        b"date",
        b"expect",
        b"host",
        b"user-agent",
        b"x-amz-content-sha256",
        b"x-amz-date",
        b"x-amz-security-token",
    )
)
_PLAIN: Final = PutOptions()


def options_of(request: Request, bucket: Bucket) -> PutOptions:
    """What the headers of a PUT ask for. `Invalid`, `NotSupported`."""
    refuse_unserved(request, keeps=True)
    headers = (*stored_headers(request), *keeping_in(request, bucket))
    return PutOptions(headers, tags_of(request), write_conditions(request))


def _options_for(bucket: Bucket, request: Request) -> PutOptions:
    if bucket.write == "through" and bucket.url.startswith(("http://", "https://")):
        raise NotSupported("the backend of this bucket is a web server: it can only be read")
    if OF_THE_TRANSFER.issuperset(request.headers):
        return _PLAIN
    check_acl(request, bucket.acl)
    return options_of(request, bucket)


def _digests(bucket: Bucket) -> tuple[bool, bool]:
    """Whether MD5 and xxh3-128 of a body are wanted for its ETag."""
    md5 = bucket.options.get("etag", "") == "md5"
    return md5, not md5 and (bucket.write != "through" or not bucket.url)


class Puts:
    """`call` asks the engine, `begin` (None: never) does so without a task, `streams` (None: never) tells it of bodies
    that arrive."""

    def __init__(self, call: Call, intake: Intake, streams: Streams | None, begin: Begin | None = None) -> None:
        self._call = call
        self._begin = begin
        self.intake = intake
        self._streams = streams
        self._busy: set[asyncio.Task[Any]] = set()

    def take(
        self, request: Request, caller: Caller | None, bucket: Bucket, key: str, *, hashed: bool = True
    ) -> Incoming:
        """A sink for the body of the PUT `request`, whose caller may write. Not `hashed`: the ETag may be one of the
        blocks' sums. Raises what is wrong with the headers."""
        options = _options_for(bucket, request)
        md5, hash128 = _digests(bucket)
        hash128 = hash128 and hashed
        incoming = self.intake.open(request, caller, bucket, key, md5=md5, hash128=hash128)
        incoming.options = options
        incoming.synced_soon = bucket.write != "through" and bucket.durability == "disk"
        size_bytes = incoming.size_bytes
        through = bucket.write == "through" and bool(bucket.url)
        long = size_bytes is not None and size_bytes >= limits.STREAM_BYTES_MIN
        if self._streams is not None and through and incoming.path and long:
            assert size_bytes is not None
            promised = tuple((HEADERS[name], value) for name, value in promised_checksums(request).items())
            opening = PutOpenCall(
                bucket.name,
                key,
                size_bytes,
                incoming.path,
                (*options.headers, *promised),
                options.conditions.if_match,
                options.conditions.if_none_match,
                options.tags,
            )
            incoming.stream = _Stream(self._call, self._streams, opening)
        return incoming

    def take_file(self, request: Request, bucket: Bucket, key: str, bytes_max: int) -> Incoming:
        """As `take`, for the file of a form: `request` has the form's fields for headers, and nobody says how long the
        file is."""
        options = _options_for(bucket, request)
        md5 = any(_digests(bucket))  # how long it is nobody knows, and of a short one clients expect the MD5
        incoming = self.intake.open(request, None, bucket, key, md5=md5, bytes_max=bytes_max, measured=False)
        incoming.options = options
        return incoming

    def put(self, bucket: str, key: str, incoming: Incoming) -> asyncio.Future[Written]:
        """Make what came the object; wait for the result with `await`. Raises what the engine raises; then nothing of
        the body is left. What is begun is finished, also when the caller is cancelled."""
        assert isinstance(incoming.options, PutOptions)
        return self.finish(self.put_received(bucket, key, incoming.result, incoming.options, incoming.stream))

    def begin(
        self, bucket: str, key: str, incoming: Incoming, answered: Callable[[Written | ForebayError], None]
    ) -> bool:
        """As `put`, without a task, for a body in memory: `answered` is called later with the outcome. Returns False,
        with nothing done, if that is impossible: `put` it then."""
        options, received = incoming.options, incoming.result
        assert isinstance(options, PutOptions)
        if self._begin is None or received.body is None or incoming.stream is not None:
            return False
        return self._begin("put", _call_of(bucket, key, received, options, 0), answered)

    async def put_received(
        self, bucket: str, key: str, received: Received, options: PutOptions, stream: Stream | None = None
    ) -> Written:
        """As `put`, for bytes that came in another way than as a body; begin it with `finish`."""
        try:
            number = await stream.number() if stream is not None else 0
            written: Written = await self._call("put", _call_of(bucket, key, received, options, number))
        except BaseException:
            received.discard()
            raise
        return written

    def finish(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Begin `work` and see it to its end, whether or not anybody still waits for what it returns."""
        task = asyncio.ensure_future(work)
        self._busy.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._busy.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited got it too, and nobody may be waiting


def _call_of(bucket: str, key: str, received: Received, options: PutOptions, number: int) -> PutCall:
    checksums = received.checksums
    return PutCall(
        bucket,
        key,
        received.size_bytes,
        (*options.headers, *((HEADERS[name], value) for name, value in checksums.items())),
        received.path,
        received.body,
        received.sums,
        received.md5,
        received.hash128,
        options.conditions.if_match,
        options.conditions.if_none_match,
        options.tags,
        number,
    )


class _Stream:
    """A put that the engine knows before its body is whole."""

    def __init__(self, call: Call, streams: Streams, opening: PutOpenCall) -> None:
        self._streams = streams
        self._told = self._upto = 0
        self._put = 0
        self._given_up = False
        self._size_bytes = opening.size_bytes
        self._task = asyncio.ensure_future(self._open(call, opening))

    async def _open(self, call: Call, opening: PutOpenCall) -> int:
        try:
            put: int = (await call("put_open", opening)).put
        except ForebayError:
            return 0  # the put will say what is wrong, if it still is
        if put and self._given_up:
            self._streams.gave_up(put)
            return 0
        self._put = put
        if put and self._upto:
            self._tell()
        return put

    def grown(self, upto: int) -> None:
        """The file holds every byte below `upto`."""
        self._upto = upto
        if self._put and (upto - self._told >= GROWN_BYTES or upto == self._size_bytes):
            self._tell()

    def _tell(self) -> None:
        self._told = self._upto
        self._streams.grown(self._put, self._upto)

    async def number(self) -> int:
        """The engine's number of this put; 0 if it has none."""
        if self._given_up:
            raise Closed("this body was given up: send it again")
        return await asyncio.shield(self._task)

    def give_up(self) -> None:
        """The body will not be completed. Twice is fine."""
        if not self._given_up:
            self._given_up = True
            if self._put:
                self._streams.gave_up(self._put)
