"""The S3 handler with nothing real around it: objects in a dictionary, an exchange that remembers what was answered.

Writes are kept in the same dictionary, so that a read then sees them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from forebay.core import limits
from forebay.core.access import Identity, encode_identities
from forebay.core.errors import Bug, ForebayError, NotFound, Precondition
from forebay.core.messages.calls import CopyCall, DeleteCall, ListCall, Nothing, PutCall, PutOpened, Written
from forebay.core.pages import after_prefix
from forebay.core.record import Record, build_head
from forebay.core.s3rules.conditions import Conditions
from forebay.core.s3rules.names import BASE_DOMAINS, Addressing
from forebay.core.types import Bucket, ListEntry, ListPage, ObjectInfo, RangeSpec, WriteMode, check_bucket_name
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import Exchange, Request
from forebay.node.front.objects.body_intake import Intake
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.reads import Decide, answer_plainly
from forebay.node.front.s3.operations import S3

MODIFIED_S = 784903526.75
MODIFIED = "Tue, 15 Nov 1994 12:45:26 GMT"


OTHER_CALLS = (  # which the fake engine does not know, but S3 makes
    *("stat", "tag", "upload_create", "upload_part", "upload_complete", "upload_abort", "uploads", "upload_parts"),
    *("bucket_create", "bucket_rules", "bucket_delete", "upload_part_copy"),
)


@dataclass
class Object:
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    etag: str = ""
    tags: str = ""

    def __post_init__(self) -> None:
        self.etag = self.etag or hashlib.md5(self.data).hexdigest()

    def record(self, key: str) -> Record:
        info = ObjectInfo(key, len(self.data), self.etag, self.etag, MODIFIED_S, tuple(self.headers.items()))
        return Record(1, info.size_bytes, self.etag, self.etag, MODIFIED_S, MODIFIED_S, build_head(info), True)


@dataclass
class Answer:
    status: int
    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        lines = [line.split(": ", 1) for line in self.head.decode().split("\r\n") if line]
        assert len({name.lower() for name, _ in lines}) == len(lines), f"a header twice: {lines}"
        return {name.lower(): value for name, value in lines}

    @property
    def xml(self) -> ElementTree.Element:
        root = ElementTree.fromstring(self.body)
        for element in root.iter():
            element.tag = element.tag.partition("}")[2] or element.tag
        return root

    @property
    def code(self) -> str:
        """The S3 error code."""
        return self.xml.findtext("Code") or ""


class FakeExchange:
    """Answers end here. What is spawned is run by whoever made this."""

    def __init__(self, handler: S3, request: Request) -> None:
        self._handler = handler
        self.request = request
        self.answers: list[Answer] = []
        self.work: list[Coroutine[Any, Any, None]] = []

    def respond(self, status: int, head: bytes = b"", body: bytes = b"") -> None:
        self.answers.append(Answer(status, head, body))

    def fail(self, error: ForebayError) -> None:
        response = self._handler.render_error(error, self.request)
        self.respond(*response)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.work.append(work)

    def hold(self, waiting: Any) -> None:
        self.held = waiting

    def resume(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except ForebayError as error:
            self.fail(error)


def list_dumbly(
    keys: Collection[str], prefix: str, delimiter: str, start_after: str, limit: int
) -> tuple[list[str], list[str], str]:
    """Keys, common prefixes, at most `limit` together, and where the next page starts."""
    plain: list[str] = []
    rolled: list[str] = []
    after = start_after
    for key in sorted(keys, key=lambda key: key.encode()):
        if not key.startswith(prefix) or key.encode() <= start_after.encode():
            continue
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut >= 0 and key[: cut + len(delimiter)] in rolled:
            continue
        if len(plain) + len(rolled) == limit:
            return plain, rolled, after
        if cut < 0:
            plain.append(key)
            after = key
        else:
            rolled.append(key[: cut + len(delimiter)])
            after = after_prefix(rolled[-1])
    return plain, rolled, ""


class FakeReads:
    def __init__(self, buckets: dict[str, dict[str, Object]]) -> None:
        self.buckets = buckets
        self.found_later: set[str] = set()
        self.asked: list[tuple[str, str, RangeSpec | None]] = []
        self.prestaged: list[tuple[str, str]] = []
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.write: WriteMode = "back"
        self.options: dict[str, str] = {}
        self.said: list[tuple[str, int, int]] = []
        self.volumes = 1
        self.places = 0
        self.dir = ""
        self.begins = True  # puts of small bodies need no task
        self.begun: list[tuple[str, Any, Callable[[Any], None]]] = []

    def bucket(self, name: str) -> Bucket:
        if name in self.found_later:
            return Bucket(name, "", freshness_s=0.0)
        if name not in self.buckets:
            return Bucket(check_bucket_name(name), "", freshness_s=0.0)
        return Bucket(name, "memory://", write=self.write, options=self.options)

    def serve(
        self,
        exchange: Exchange,
        bucket: Bucket,
        key: str,
        range: RangeSpec | None = None,
        decide: Decide | None = None,
        extra: bytes = b"",
    ) -> None:
        self.asked.append((bucket.name, key, range))
        if bucket.name not in self.buckets:
            raise NotFound(f"no bucket {bucket.name!r}", code="NoSuchBucket")
        found = self.buckets[bucket.name].get(key)
        if found is None:
            raise NotFound(f"no object {key!r} in {bucket.name}", code="NoSuchKey")
        record = found.record(key)
        plan = decide(record) if decide else answer_plainly(record, range, extra)
        exchange.respond(plan.status, plan.head, found.data[plan.start : plan.end])

    def prestage(self, exchange: Exchange, bucket: Bucket, key: str, range: RangeSpec, decide: Decide) -> None:
        self.prestaged.append((bucket.name, key))
        self.serve(exchange, bucket, key, range, decide)

    async def call(self, verb: str, arguments: Any) -> Any:
        """The engine's calls that S3 needs."""
        self.calls.append((verb, arguments))
        answer = self.answers.get(verb)
        if isinstance(answer, ForebayError):
            raise answer
        if answer is not None:
            return answer(arguments) if callable(answer) else answer
        await asyncio.sleep(0)
        if verb == "buckets":
            return [Bucket(name, "memory://", created_s=MODIFIED_S) for name in self.buckets]
        if verb == "bucket_check":
            if arguments.name not in self.buckets:
                raise NotFound(f"no bucket {arguments.name!r}", code="NoSuchBucket")
            return Nothing()
        if verb == "put":
            return self._put(arguments)
        if verb == "put_open":
            return PutOpened(0)
        if verb == "delete":
            return self._delete(arguments)
        if verb == "copy":
            return self._copy(arguments)
        if verb != "list":
            raise Bug(f"S3 needs no call {verb}")
        assert isinstance(arguments, ListCall)
        assert 1 <= arguments.limit <= limits.LIST_KEYS_MAX
        if arguments.bucket not in self.buckets:
            raise NotFound(f"no bucket {arguments.bucket!r}", code="NoSuchBucket")
        objects = self.buckets[arguments.bucket]
        plain, rolled, after = list_dumbly(
            objects, arguments.prefix, arguments.delimiter, arguments.start_after, arguments.limit
        )
        entries = [ListEntry(key, len(objects[key].data), objects[key].etag, MODIFIED_S) for key in plain]
        return ListPage(entries, rolled, after)

    def _objects(self, bucket: str) -> dict[str, Object]:
        if bucket not in self.buckets:
            raise NotFound(f"no bucket {bucket!r}", code="NoSuchBucket")
        return self.buckets[bucket]

    def _judge(self, found: Object | None, if_match: str | None, if_none_match: str | None) -> None:
        if if_match is not None and found is None:
            raise NotFound("there is no such object", code="NoSuchKey")
        if found is not None and Conditions(if_match, if_none_match).judge(found.etag, MODIFIED_S) != 200:
            raise Precondition("it is another", code="PreconditionFailed")

    def _put(self, call: PutCall) -> Written:
        objects = self._objects(call.bucket)
        self._judge(objects.get(call.key), call.if_match, call.if_none_match)
        data = call.body
        if data is None:
            with open(call.path, "rb") as file:
                data = file.read()
            os.unlink(call.path)
        assert len(data) == call.size_bytes
        made = Object(data, dict(call.headers), call.md5 or call.hash128 + "-x" if call.hash128 else "", call.tags)
        objects[call.key] = made
        return Written(made.etag, made.etag, len(data), MODIFIED_S)

    def _delete(self, call: DeleteCall) -> Nothing:
        objects = self._objects(call.bucket)
        found = objects.get(call.key)
        if found is None and (call.if_match, call.if_size_bytes, call.if_modified_s) != (None, None, None):
            raise NotFound("there is no such object", code="NoSuchKey")
        if found is not None and (
            call.if_size_bytes not in (None, len(found.data)) or call.if_modified_s not in (None, int(MODIFIED_S))
        ):
            raise Precondition("it is another", code="PreconditionFailed")
        self._judge(found, call.if_match, None)
        objects.pop(call.key, None)
        return Nothing()

    def _copy(self, call: CopyCall) -> Written:
        source = self._objects(call.source_bucket).get(call.source_key)
        if source is None:
            raise NotFound("there is no such object", code="NoSuchKey")
        conditions = Conditions(
            call.source_if_match,
            call.source_if_none_match,
            call.source_if_modified_since,
            call.source_if_unmodified_since,
        )
        if conditions.judge(source.etag, MODIFIED_S) != 200:
            raise Precondition("the source is another", code="PreconditionFailed")
        objects = self._objects(call.bucket)
        self._judge(objects.get(call.key), call.if_match, call.if_none_match)
        headers = source.headers if call.headers is None else dict(call.headers)
        made = Object(source.data, headers, "", source.tags if call.tags is None else call.tags)
        objects[call.key] = made
        return Written(made.etag, made.etag, len(made.data), MODIFIED_S)

    # what `Puts` needs
    def begin(self, verb: str, arguments: Any, answered: Callable[[Any], None]) -> bool:
        if self.begins:
            self.begun.append((verb, arguments, answered))
        return self.begins

    async def go_on(self) -> None:
        """Answer what was begun."""
        begun, self.begun = self.begun, []
        for verb, arguments, answered in begun:
            try:
                answer = await self.call(verb, arguments)
            except ForebayError as error:
                answer = error
            answered(answer)

    def place(self, bucket: str, key: str) -> str:
        if not self.volumes:
            return ""
        if not self.dir:
            self.dir = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, self.dir, True)
        self.places += 1
        return os.path.join(self.dir, f"in-{self.places}")

    def grown(self, put: int, upto: int) -> None:
        self.said.append(("grown", put, upto))

    def gave_up(self, put: int) -> None:
        self.said.append(("gave up", put, 0))


class Front:
    """`ask` what a client would ask and get what it would get."""

    def __init__(self, *identities: Identity, now_s: float = MODIFIED_S, **buckets: dict[str, Object]) -> None:
        self.reads = FakeReads(dict(buckets))
        self.auth = Auth(lambda: now_s, Addressing((*BASE_DOMAINS, "s3.example.com")))
        self.auth.update(encode_identities(list(identities)) if identities else b"")
        puts = Puts(self.reads.call, Intake(self.reads.place), self.reads, self.reads.begin)
        self.handler = S3(self.reads, self.reads.call, self.auth, puts, "node-1", ("s3.example.com",))

    def ask(
        self,
        method: str,
        target: str | bytes,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        pieces: int = 1 << 20,
        announced: bool = True,
        **more: str,
    ) -> Answer:
        """One request; `more` are headers too, `_` for `-`. The body arrives `pieces` bytes at a time; its length is
        in the headers if `announced`."""
        raw = target.encode() if isinstance(target, str) else target
        sent = {b"host": b"127.0.0.1:9400"}
        sent |= {name.lower().encode(): value.encode() for name, value in (headers or {}).items()}
        sent |= {name.replace("_", "-").encode(): value.encode() for name, value in more.items()}
        path, _, query = raw.partition(b"?")
        if body is not None and announced:
            sent.setdefault(b"content-length", b"%d" % len(body))
        request = Request(method.encode(), raw, path, query, sent)
        exchange = FakeExchange(self.handler, request)
        asyncio.run(self._ask(request, exchange, body, pieces))
        assert len(exchange.answers) == 1, "exactly one answer for a request"
        answer = exchange.answers[0]
        assert answer.headers["x-amz-request-id"]
        return answer

    async def _ask(self, request: Request, exchange: FakeExchange, body: bytes | None, pieces: int) -> None:
        """What a connection does with a request."""
        try:
            if body:
                sink = request.sink = self.handler.take_body(request)
                try:
                    for at in range(0, len(body), pieces):
                        sink.write(memoryview(body)[at : at + pieces])
                        sink.wrote()
                except BaseException:
                    sink.abort()
                    raise
                request.body = sink.finish()
            self.handler.handle(request, exchange)  # type: ignore[arg-type]
            await self.reads.go_on()
            for work in exchange.work:
                await work
        except ForebayError as error:
            exchange.fail(error)

    def put(self, target: str, body: bytes, headers: dict[str, str] | None = None, **more: str) -> Answer:
        return self.ask("PUT", target, headers, body, **more)

    @property
    def left_over(self) -> list[str]:
        """Files of bodies that nobody took."""
        return os.listdir(self.reads.dir) if self.reads.dir else []

    def get(self, target: str | bytes, headers: dict[str, str] | None = None, **more: str) -> Answer:
        return self.ask("GET", target, headers, **more)
