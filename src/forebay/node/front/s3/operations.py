"""The S3 API: which operation a request is, and for reads also what it answers.

Theory. Nearly every request is a plain GET of an object, and its whole budget is ten microseconds: name, identity,
bucket, and on to `Reads`. So `handle` takes that path first; conditions, ranges, overrides and everything else branch
off it. What remains undecided until the object is known (does If-Match hold? is the range inside?) is a `decide`
function given to `Reads`, which calls it once with the record, whether that came from the index or from the backend.

A GET with a *subresource* in its query (`?acl`, `?tagging`) is another operation, so it must never be answered with the
object: those not served are listed and refused with NotImplemented. Parameters that are no subresource (SDKs add
`x-id`) are ignored, as S3 does.

Whatever is no plain read is offered in turn to those who know a kind of operation: `UploadsApi` (multipart),
`CompatApi` (ACLs, CORS, tags, forms), `BucketsApi` (buckets), `Objects` (the rest of writing). Each says whether it is
its own. A form for the service itself is for `Sts` (temporary keys). A request with a body is looked at twice: before
the body (`take_body`: may the caller do this at all?), and when it is there (`handle`); who was let in is remembered
with the request, since a signature is verified once.

Rejected: answering what we do not keep with plausible defaults (an empty tag set, an owner's ACL): a client that acts
on it would act on an invention. What is so is said: a bucket here never had versions, a policy, a web site.

Invariants. (1) Every answer has an `x-amz-request-id`. (2) No answer for an object or a listing is sent before the
caller was found to be allowed to read that key, or everything under that prefix. (3) A response header taken from the
query has passed `header_line`.
"""

from __future__ import annotations

import email.utils
from typing import Final

import msgspec

from forebay.core.access import ANONYMOUS, Identity
from forebay.core.errors import ForebayError, Invalid, NotSupported
from forebay.core.messages.calls import BucketNamed, ListCall, Nothing, ObjectNamed, StatCall, UploadsCall
from forebay.core.s3rules.names import Addressing
from forebay.core.types import CLAIM_QUERY, OWED_QUERY, UPLOADS_QUERY, Bucket, RangeSpec, check_key
from forebay.core.versions import versioned
from forebay.node.front.http.auth import PEER_NAME, RELAY_NAME, Auth
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.requests import (
    BodySink,
    Exchange,
    Request,
    Response,
    decode_query,
    header_line,
    stray_body,
)
from forebay.node.front.objects.answer import DECIDED_BY, asked_range, decide_by
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.reads import Reads
from forebay.node.front.s3 import errors, listing, sts
from forebay.node.front.s3.buckets import BucketsApi
from forebay.node.front.s3.compat import attributes
from forebay.node.front.s3.compat.api import CompatApi
from forebay.node.front.s3.compat.versions import parse_versions, render_versions
from forebay.node.front.s3.kept import KeptApi
from forebay.node.front.s3.unserved import (
    BUCKET_SUBRESOURCES,
    OBJECT_SUBRESOURCES,
    refuse,
    version_asked,
)
from forebay.node.front.s3.uploads import UploadsApi, parse_uploads
from forebay.node.front.s3.write import Objects
from forebay.node.front.s3.xml import CONTENT_TYPE, document
from forebay.node.outcomes import Call, for_client, from_node

REGION: Final = "us-east-1"  # what an S3-compatible endpoint without regions says; any region is accepted in signatures

_SPECIAL: Final = frozenset(
    (
        *DECIDED_BY,
        b"x-amz-checksum-mode",
        b"x-amz-server-side-encryption-customer-algorithm",
        b"x-amz-expected-bucket-owner",
        b"origin",
    )
)
_OVERRIDES: Final = {
    "response-content-type": b"Content-Type",
    "response-content-language": b"Content-Language",
    "response-expires": b"Expires",
    "response-cache-control": b"Cache-Control",
    "response-content-disposition": b"Content-Disposition",
    "response-content-encoding": b"Content-Encoding",
}
_WHOLE_BEFOREHAND: Final = RangeSpec(0, 0)  # of a HEAD: have the whole object here before it is read
_UNSERVED_OF_OBJECTS: Final = OBJECT_SUBRESOURCES - {"attributes"}
_OF_ANY_READER: Final = frozenset(("location", "versioning"))  # answered alike for every bucket that is there
_UNSERVED_OF_BUCKETS: Final = BUCKET_SUBRESOURCES - {"versioning", "versions"}


class S3:
    """The S3 handler of one front: see `requests.Handler`.

    `call` asks the engine; `node_id` is shown as HostId; `base_domains` make virtual-host style names.
    """

    def __init__(
        self,
        reads: Reads,
        call: Call,
        auth: Auth,
        puts: Puts,
        node_id: str = "forebay",
        base_domains: tuple[str, ...] = (),
    ) -> None:
        self._reads = reads
        self._call = call
        self._auth = auth
        self._node_id = node_id
        self._addressing = Addressing((*base_domains, "localhost", "s3.localhost"))
        self._ids = errors.RequestIds()
        self._uploads = UploadsApi(call, auth, puts, self._lines, reads.bucket)
        self._buckets = BucketsApi(call, auth, puts, self._lines)
        self._compat = CompatApi(call, auth, puts, self._lines)
        self._objects = Objects(call, auth, puts, self._lines, reads.bucket)
        self._kept = KeptApi(call, auth, puts, self._lines)
        self._sts = sts.Sts(auth, self._lines)

    # --- the handler's three methods ---------------------------------------------------------------------------------
    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer, now or in a task. Raises `ForebayError` for what is wrong with the request."""
        if PEER_NAME not in request.headers:
            self._handle(request, exchange)
            return
        before = from_node.set(True)  # also for the tasks that begin meanwhile
        relayed = for_client.set(RELAY_NAME in request.headers)
        try:
            self._handle(request, exchange)
        finally:
            for_client.reset(relayed)
            from_node.reset(before)

    def _handle(self, request: Request, exchange: Exchange) -> None:
        sink = request.sink
        if isinstance(sink, Incoming) and sink.put_to is not None:  # which operation it is was found before its body
            name, key = sink.put_to
            self._objects.put(request, exchange, self._reads.bucket(name), key)
            return
        self._auth.check_host(request)
        headers = request.headers
        name, key = self._addressing.split(request.path, headers.get(b"host", b""))
        method = request.method
        if key and (method == b"GET" or method == b"HEAD"):
            bucket = self._reads.bucket(name)
            identity = self._auth.reader(request, bucket, key)
            if request.query or not _SPECIAL.isdisjoint(headers):
                self._read(request, exchange, identity, bucket, key)
            else:
                self._reads.serve(exchange, bucket, key, None, None, self._ids.line())
        elif method in (b"PUT", b"POST", b"DELETE"):
            self._write(request, exchange, name, key)
        elif method == b"OPTIONS":
            self._compat.preflight(request, exchange, self._reads.bucket(name))
        elif method not in (b"GET", b"HEAD"):
            raise _no_such_method()
        elif name:
            self._bucket_operation(request, exchange, name)
        else:
            identity = self._auth.signed(request)
            if method == b"HEAD":
                raise Invalid(
                    "there is no HEAD of the service itself: use GET for ListBuckets", code="MethodNotAllowed"
                )
            exchange.spawn(self._list_buckets(request, exchange, identity))

    def take_body(self, request: Request) -> BodySink:
        """Bodies belong to writes; who may not write is refused before the body. A GET's is read and ignored."""
        before = from_node.set(PEER_NAME in request.headers)
        try:
            return self._take_body(request)
        finally:
            from_node.reset(before)

    def _take_body(self, request: Request) -> BodySink:
        if request.method not in (b"PUT", b"POST", b"DELETE"):
            return stray_body(proved=self._auth.open)
        self._auth.check_host(request)
        name, key = self._addressing.split(request.path, request.headers.get(b"host", b""))
        if not name and sts.is_sts(request):
            return self._sts.take_body(request)
        if not name:
            raise _no_such_method()
        bucket = self._reads.bucket(name)
        self._check_origin(request, bucket)
        if not key and _is_form(request):
            return self._compat.take_form(request, bucket)
        request.caller = caller = self._auth.caller(request, _needed(request, bucket, key))
        query = decode_query(request.query) if request.query else {}
        for api in self._writers(key, query):
            sink = api.take_body(request, caller, bucket, key, query)
            if sink is not None:
                return sink
        raise _unserved_write(query)

    def render_error(self, error: ForebayError, request: Request | None) -> Response:
        """The S3 error document; that of STS for what is asked of it."""
        if request is not None and sts.is_sts(request) and request.path == b"/" and self._named(request) == ("", ""):
            return sts.render_error(error, self._ids.line())
        lines = self._cors_lines(request) if request is not None and b"origin" in request.headers else b""
        named = self._named(request) if request is not None and error.status == 404 else ("", "")
        return errors.render(error, request, self._ids.line(), self._node_id, lines, named)

    def _named(self, request: Request) -> tuple[str, str]:
        """The bucket and key that a request is about; empty where it is not that alone (a copy)."""
        if b"x-amz-copy-source" in request.headers:
            return "", ""
        try:
            return self._addressing.split(request.path, request.headers.get(b"host", b""))
        except ForebayError:
            return "", ""

    # --- writing -----------------------------------------------------------------------------------------------------
    def _write(self, request: Request, exchange: Exchange, name: str, key: str) -> None:
        """PUT, POST or DELETE, whose body is there."""
        if request.sink is None and request.method != b"DELETE":
            request.sink = self.take_body(request)  # it has no body; what takes one knows what to make of that
            request.body = request.sink.finish()
        if not name and sts.is_sts(request):
            self._sts.handle(request, exchange)
            return
        if not name:
            raise _no_such_method()
        bucket = self._reads.bucket(name)
        if request.method == b"POST" and not key and _is_form(request):
            self._compat.handle_form(request, exchange, bucket)
            return
        if request.caller is None:
            self._check_origin(request, bucket)
        needed = _needed(request, bucket, key)
        identity = self._auth.signed(request, needed) if request.caller is None else request.caller.identity
        query = decode_query(request.query) if request.query else {}
        for api in self._writers(key, query):
            if api.handle(request, exchange, identity, bucket, key, query):
                return
        raise _unserved_write(query)

    def _writers(
        self, key: str, query: dict[str, str]
    ) -> tuple[UploadsApi | CompatApi | BucketsApi | Objects | KeptApi, ...]:
        """Who may know a write, in the order of asking."""
        plain = key and not query
        return (self._objects,) if plain else (self._uploads, self._compat, self._kept, self._buckets, self._objects)

    def _check_origin(self, request: Request, bucket: Bucket) -> None:
        """`Denied` for a write to an open node from a page that the bucket's rules do not allow. Only browsers say
        where a request comes from."""
        if b"origin" in request.headers or b"sec-fetch-site" in request.headers:
            self._compat.check_origin(request, bucket)

    def _lines(self, request: Request) -> bytes:
        """What the answer to `request` begins with: its id, and what the bucket's CORS rules say."""
        if b"origin" not in request.headers:
            return self._ids.line()
        return self._ids.line() + self._cors_lines(request)

    def _cors_lines(self, request: Request) -> bytes:
        try:
            name, _ = self._addressing.split(request.path, request.headers.get(b"host", b""))
            return self._compat.cors_lines(request, self._reads.bucket(name)) if name else b""
        except ForebayError:
            return b""

    # --- objects -----------------------------------------------------------------------------------------------------
    def _read(self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str) -> None:
        """GET or HEAD of an object with anything beyond its name."""
        query = decode_query(request.query) if request.query else {}
        if CLAIM_QUERY in query and from_node.get():
            self._auth.require_write(identity, bucket, key)
            exchange.spawn(self._claim(exchange, ObjectNamed(bucket.name, check_key(key))))
            return
        for api in (self._uploads, self._compat):
            if query and api.handle(request, exchange, identity, bucket, key, query):
                return
        version_id = version_asked(query)
        refuse(request, query, _UNSERVED_OF_OBJECTS)
        if "attributes" in query:
            asked = attributes.parse_attributes(request)
            exchange.spawn(self._attributes(exchange, StatCall(bucket.name, check_key(key)), asked))
            return
        if identity is ANONYMOUS and not _OVERRIDES.keys().isdisjoint(query):
            raise Invalid(
                "Request specific response headers cannot be used for anonymous GET requests.", code="InvalidRequest"
            )
        if version_id:  # what was replaced or deleted is public no more
            self._auth.require_read(identity, bucket, key)
        wanted = asked_range(request)
        overrides = b""
        if not _OVERRIDES.keys().isdisjoint(query):
            self._auth.check_override(request)
        replaced = []
        for name, header in _OVERRIDES.items():
            if name in query:
                overrides += header_line(header, query[name])
                replaced.append(header.lower() + b":")
        part = query.get("partNumber")
        if part is not None:
            if b"range" in request.headers:
                raise Invalid("Cannot specify both Range header and partNumber query parameter", code="InvalidRequest")
            if not part.isascii() or not part.isdigit() or not 1 <= int(part[:6]) <= 10_000:
                raise Invalid("Part number must be a whole number from 1 to 10000", code="InvalidArgument")
        extra = overrides + self._lines(request)
        decide = decide_by(request, wanted, part=int(part) if part else None, replaced=tuple(replaced), extra=extra)
        if version_id:
            self._reads.serve(exchange, *versioned(bucket, check_key(key), version_id), wanted, decide)
        elif request.method == b"HEAD" and wanted == _WHOLE_BEFOREHAND:
            self._reads.prestage(exchange, bucket, key, wanted, decide)
        else:
            self._reads.serve(exchange, bucket, key, wanted, decide)

    async def _claim(self, exchange: Exchange, named: ObjectNamed) -> None:
        """Another node claims the key: 204 if it is that one's, 202 if this one keeps it."""
        given = await self._call("claim", named)
        exchange.respond(204 if given else 202, self._lines(exchange.request))

    async def _attributes(self, exchange: Exchange, call: StatCall, asked: attributes.Asked) -> None:
        state = await self._call("stat", call)
        modified = b"Last-Modified: %b\r\n" % email.utils.formatdate(state.modified_s, usegmt=True).encode()
        body = attributes.render_attributes(asked, state)
        exchange.respond(200, self._lines(exchange.request) + CONTENT_TYPE + modified, body)

    # --- buckets -----------------------------------------------------------------------------------------------------
    def _bucket_operation(self, request: Request, exchange: Exchange, name: str) -> None:
        bucket = self._reads.bucket(name)
        query = decode_query(request.query)
        if OWED_QUERY in query and from_node.get():
            self._auth.require_read(self._auth.signed(request, bucket), bucket, query.get("prefix", ""))
            call = ListCall(name, query.get("prefix", ""), "", query.get("start-after", ""))
            exchange.spawn(self._tell_node(exchange, "owed", call))
            return
        if UPLOADS_QUERY in query and from_node.get():
            self._auth.require_read(self._auth.signed(request, bucket), bucket, query.get("prefix", ""))
            asked = parse_uploads(query)
            exchange.spawn(
                self._tell_node(
                    exchange, "uploads", UploadsCall(name, asked.prefix, asked.key_marker, asked.id_marker, asked.limit)
                )
            )
            return
        about_it = request.method == b"HEAD" or not _OF_ANY_READER.isdisjoint(query)
        identity = self._auth.reader(request, bucket, None if about_it else query.get("prefix", ""))
        for api in (self._uploads, self._compat):
            if query and api.handle(request, exchange, identity, bucket, "", query):
                return
        if request.method == b"HEAD":
            refuse(request, query, frozenset())
            self._answer_if_there(exchange, bucket, b"x-amz-bucket-region: " + REGION.encode() + b"\r\n", b"")
            return
        refuse(request, query, _UNSERVED_OF_BUCKETS)
        if "location" in query:  # an empty element is S3's way to say us-east-1
            self._answer_if_there(exchange, bucket, b"", document("LocationConstraint", ""))
        elif "versioning" in query:  # an empty element is S3's way to say never enabled
            self._answer_if_there(exchange, bucket, b"", document("VersioningConfiguration", ""))
        elif "versions" in query:
            exchange.spawn(self._list_versions(exchange, name, query))
        else:
            exchange.spawn(self._list_objects(exchange, name, listing.parse_list(query)))

    async def _tell_node(self, exchange: Exchange, verb: str, call: ListCall | UploadsCall) -> None:
        """Another node lists what this one has."""
        found = await self._call(verb, call)
        head = b"Content-Type: application/json\r\n"
        exchange.respond(200, self._lines(exchange.request) + head, msgspec.json.encode(found))

    def _answer_if_there(self, exchange: Exchange, bucket: Bucket, head: bytes, body: bytes) -> None:
        """Answer about a bucket; one that is not configured but looked for (no URL) is asked for first."""
        if bucket.url:
            exchange.respond(200, self._lines(exchange.request) + CONTENT_TYPE + head, body)
        else:
            exchange.spawn(self._answer_once_found(exchange, bucket, head, body))

    async def _answer_once_found(self, exchange: Exchange, bucket: Bucket, head: bytes, body: bytes) -> None:
        await self._call("bucket_check", BucketNamed(bucket.name))
        exchange.respond(200, self._lines(exchange.request) + CONTENT_TYPE + head, body)

    async def _list_objects(self, exchange: Exchange, bucket: str, asked: listing.ListRequest) -> None:
        page = await listing.fetch_page(self._call, bucket, asked)
        self._answer_xml(exchange, listing.render_list(bucket, asked, page))

    async def _list_versions(self, exchange: Exchange, bucket: str, query: dict[str, str]) -> None:
        asked = parse_versions(query)
        page = await listing.fetch_page(self._call, bucket, asked)
        self._answer_xml(exchange, render_versions(bucket, asked, page, query.get("version-id-marker", "")))

    async def _list_buckets(self, request: Request, exchange: Exchange, identity: Identity) -> None:
        buckets = await self._call("buckets", Nothing())
        allowed = [bucket for bucket in buckets if identity.sees(bucket.name, bucket.owner)]
        self._answer_xml(exchange, listing.render_buckets(allowed, decode_query(request.query)))

    def _answer_xml(self, exchange: Exchange, body: bytes) -> None:
        exchange.respond(200, self._lines(exchange.request) + CONTENT_TYPE, body)


def _needed(request: Request, bucket: Bucket, key: str) -> Bucket | None:
    """The bucket that a write is about; None for one that it makes."""
    return None if request.method == b"PUT" and not key else bucket


def _is_form(request: Request) -> bool:
    kind = request.headers.get(b"content-type", b"")
    return request.method == b"POST" and kind[:19].lower() == b"multipart/form-data"


def _no_such_method() -> Invalid:
    return Invalid(
        "The specified method is not allowed against this resource: see docs/s3.md for what is", code="MethodNotAllowed"
    )


def _unserved_write(query: dict[str, str]) -> NotSupported:
    what = f"?{next(iter(sorted(query)))}" if query else "this"
    return NotSupported(f"{what} is not served: docs/s3.md lists what is")
