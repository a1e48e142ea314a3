"""The native API under `/-/`: objects, buckets, listings, jobs and the node itself, in JSON.

Theory. Object bytes take the same path as in S3 (`reads.py`), so this file has no data path of its own. The rest is
translation: path and query into the arguments of an engine call, its answer into JSON. Questions that need no engine
are answered without it (listings of what is cached, health), so that a node whose engine restarts can still be
inspected.

Errors are `{"error": {"kind", "message", "code", "retry_after_s"}}`; clients act on `kind`.

Invariant. A listing from the index looks at one page of it at a time, so that hits are served in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import ForebayError, Invalid, NotFound
from forebay.core.machines.hints import HintsCall
from forebay.core.messages import calls
from forebay.core.messages.batch import BatchCall
from forebay.core.messages.calls import CachedEntry, CachedPage
from forebay.core.messages.native import Completion
from forebay.core.messages.node_state import NodeState, part_of
from forebay.core.metrics import Snapshot, of_buckets, render
from forebay.core.pages import after_prefix
from forebay.core.record import Record, State
from forebay.core.types import Bucket, check_bucket_name, check_key
from forebay.core.versions import versioned
from forebay.node.front.batch.batches import Batches
from forebay.node.front.door import Door
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.checksums import check_algorithm
from forebay.node.front.http.requests import (
    BodySink,
    BoundedBody,
    Exchange,
    Request,
    Response,
    decode_component,
    decode_query,
    status_of,
    stray_body,
)
from forebay.node.front.native import openapi
from forebay.node.front.native.arguments import JSON, decode_body, encode, flag_of, number_of
from forebay.node.front.native.hints import BODY_BYTES_MAX as HINTS_BYTES_MAX
from forebay.node.front.native.hints import HintAnswers
from forebay.node.front.native.routes import Route, find
from forebay.node.front.native.uploads import UploadAnswers
from forebay.node.front.objects.answer import DECIDED_BY, asked_range, decide_by
from forebay.node.front.objects.listings import ListingAnswers
from forebay.node.front.objects.members import Members
from forebay.node.front.objects.object_headers import check_stored, write_conditions
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.reads import Reads
from forebay.node.outcomes import Call
from forebay.node.store.reader import StoreReader

TEXT = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
NDJSON = b"Content-Type: application/x-ndjson\r\n"
_OBJECTS = b"/-/v1/objects/"
_BODY_BYTES_MAX = {
    HintsCall: HINTS_BYTES_MAX,
    BatchCall: limits.BATCH_BODY_BYTES_MAX,
    Completion: limits.COMPLETION_BODY_BYTES_MAX,
    calls.ManifestCall: 2 * limits.MANIFEST_BYTES_MAX,
}

_encode_lines = msgspec.json.Encoder().encode_lines


class _Line(msgspec.Struct):
    """One object in an NDJSON listing."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Native:
    """The native handler of one front: see `requests.Handler`. `ready` says what keeps this front from serving."""

    listings: ListingAnswers | None = None

    def __init__(
        self,
        reads: Reads,
        puts: Puts,
        store: StoreReader,
        call: Call,
        auth: Auth,
        ready: Callable[[], str],
        *,
        batches: Batches,
        members: Members | None = None,
        door: Door | None = None,
    ) -> None:
        self._reads = reads
        self._puts = puts
        self._store = store
        self._call = call
        self._auth = auth
        self._missing = ready
        self._batches = batches
        self._shards = members
        self._host_door = door
        self._description: bytes | None = None
        self._hinting = HintAnswers(call, auth)
        self._multipart = UploadAnswers(call, puts, reads)

    # --- the handler's three methods ---------------------------------------------------------------------------------
    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer, now or in a task. Raises `ForebayError` for what is wrong with the request."""
        method = request.method
        if (method == b"GET" or method == b"HEAD") and request.path.startswith(_OBJECTS):
            self._object(request, exchange)
            return
        route, taken = find(method.decode("latin-1"), request.path)
        if route.may is not None:
            identity = self._auth.bearer(request)
            if "bucket" in taken:
                self._allow(identity, request, route, taken)
            elif route.may == "admin" and route.body is None:
                self._auth.require(identity, "admin")
        answer = getattr(self, f"_{route.name}", None) or getattr(self._multipart, route.name, None)
        if answer is None:
            exchange.spawn(self._forward(request, exchange, route, taken))
        else:
            answer(request, exchange, taken)

    def take_body(self, request: Request) -> BodySink:
        """Only what takes a body gets one, from who may send it; anything else is refused before it is sent."""
        route, taken = find(request.method.decode("latin-1"), request.path)
        if route.body is None and request.method not in (b"GET", b"HEAD"):
            raise Invalid(f"{route.method} {route.path} takes no body: leave it out", code="EntityTooLarge")
        if route.may is None:
            return stray_body(proved=self._auth.open)
        identity = self._auth.bearer(request)
        if "bucket" in taken:
            self._allow(identity, request, route, taken)
        if route.body is None:
            return stray_body(proved=True)
        if route.body is not bytes:
            return BoundedBody(_BODY_BYTES_MAX.get(route.body, limits.JSON_BODY_BYTES_MAX))
        bucket, key = self._reads.bucket(taken["bucket"]), check_key(taken["key"])
        if route.name == "member_append":
            return self._members_of_shards.take(request, bucket, key)
        if route.name == "upload_part":
            return self._multipart.take_body(request, bucket, key)
        return self._puts.take(request, None, bucket, key)

    def _allow(self, identity: Identity, request: Request, route: Route, taken: dict[str, str]) -> None:
        """Return if the caller may do that to the key, the prefix or the bucket that the request names."""
        assert route.may is not None
        bucket, name = taken["bucket"], taken.get("key", "")
        if route.name == "bucket":
            self._auth.require(identity, route.may, bucket, None)
        elif route.name == "bucket_put" and self._auth.may(identity, "create", bucket):
            return  # whether it is theirs or new is the engine's to say
        else:
            if any(parameter.name == "prefix" for parameter in route.query):
                name = decode_query(request.query).get("prefix", "")
            self._auth.require(identity, route.may, bucket, name)

    def render_error(self, error: ForebayError, request: Request | None) -> Response:
        """The error as JSON, with Retry-After where waiting helps and Content-Range where the range was outside."""
        said = openapi.ErrorSaid(error.kind, error.message, error.code, error.retry_after_s)
        head = JSON
        if error.retry_after_s:
            head += b"Retry-After: %d\r\n" % max(1, round(error.retry_after_s))
        if error.code == "InvalidRange" and error.size_bytes is not None:
            head += b"Content-Range: bytes */%d\r\n" % error.size_bytes
        return Response(status_of(error), head, encode(openapi.ErrorBody(said)))

    # --- objects -----------------------------------------------------------------------------------------------------
    def _object(self, request: Request, exchange: Exchange) -> None:
        raw, slash, key = request.path[len(_OBJECTS) :].partition(b"/")
        if not raw or not slash or not key:
            raise NotFound("there is nothing at this path: name it objects/BUCKET/KEY", code="NoSuchPath")
        name = decode_component(raw)
        identity = self._auth.bearer(request)
        bucket = self._reads.bucket(name)
        named = check_key(decode_component(key))
        self._auth.require_read(identity, bucket, named)
        if b"member=" in request.query and (member := decode_query(request.query).get("member")) is not None:
            self._members_of_shards.serve(request, exchange, bucket, named, member)
            return
        asked, decide = None, None
        if not DECIDED_BY.isdisjoint(request.headers):
            asked = asked_range(request)
            decide = decide_by(request, asked)
        self._reads.serve(exchange, bucket, named, asked, decide)

    def _object_put(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        if request.sink is None:  # it has no body: an empty object, if it says so
            request.sink = self.take_body(request)
            request.sink.finish()
        assert isinstance(request.sink, Incoming)
        putting = self._puts.put(taken["bucket"], taken["key"], request.sink)

        async def answer() -> None:
            exchange.respond(200, JSON, encode(await putting))

        exchange.spawn(answer())

    def _object_delete(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        if_match = write_conditions(request).if_match
        call = calls.DeleteCall(self._reads.bucket(taken["bucket"]).name, check_key(taken["key"]), if_match)

        async def answer() -> None:
            exchange.respond(200, JSON, encode(await self._call("delete", call)))

        exchange.spawn(answer())

    def _object_copy(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        call: calls.CopyCall = decode_body(request, calls.CopyCall)
        if (call.bucket, call.key) != (taken["bucket"], taken["key"]):
            raise Invalid("the path names another object than the body: make them the same")
        for bucket, key in ((call.source_bucket, call.source_key), (call.bucket, call.key)):
            self._reads.bucket(bucket)
            check_key(key)
        check_stored(call.headers or ())
        if call.checksum_algorithm:
            call = msgspec.structs.replace(call, checksum_algorithm=check_algorithm(call.checksum_algorithm))
        source = self._reads.bucket(call.source_bucket)
        self._auth.require_read(self._auth.bearer(request), source, call.source_key)

        async def answer() -> None:
            exchange.respond(200, JSON, encode(await self._call("copy", call)))

        exchange.spawn(answer())

    @property
    def _members_of_shards(self) -> Members:
        if self._shards is None:
            raise NotFound("this front serves no members of shards", code="NoSuchPath")
        return self._shards

    def _members(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        bucket, key = self._reads.bucket(taken["bucket"]), check_key(taken["key"])
        version_id = decode_query(request.query).get("version", "")
        if version_id:
            bucket, key = versioned(bucket, key, version_id)
        self._members_of_shards.index(request, exchange, bucket, key)

    def _member_append(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        bucket = self._reads.bucket(taken["bucket"])
        self._members_of_shards.append(request, exchange, bucket, check_key(taken["key"]))

    def _batch(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        self._batches.answer(request, exchange, self._auth.bearer(request))

    def _listing(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        if self.listings is None:
            raise NotFound("this front serves no listings: ask the node itself", code="NoSuchPath")
        self.listings.answer(exchange, self._reads.bucket(taken["bucket"]).name)

    def _hints(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        self._hinting.tell(request, exchange, taken["job"])

    def _hints_at(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        self._hinting.at(request, exchange, taken["job"])

    def _hints_state(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        self._hinting.ask(request, exchange, "hints_state", taken["job"])

    def _hints_close(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        self._hinting.ask(request, exchange, "hints_close", taken["job"])

    # --- the node itself ---------------------------------------------------------------------------------------------
    def _health(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        exchange.respond(200, TEXT, b"ok\n")

    def _ready(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        missing = self._missing()
        exchange.respond(503 if missing else 200, JSON, encode({"ready": not missing, "missing": missing}))

    def _describe(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        if self._description is None:
            self._description = openapi.describe()
        exchange.respond(200, JSON, self._description)

    def _door(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        at = None if self._host_door is None else self._host_door.at
        if at is None:
            raise NotFound("this front has no door for clients on its host: read over HTTP", code="NoDoor")
        exchange.respond(200, JSON, encode(at))

    def _metrics(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        identity = self._auth.bearer(request)

        async def answer() -> None:
            found: Snapshot = await self._call("metrics", calls.Nothing())
            if not self._auth.may(identity, "observe"):
                found = of_buckets(found, lambda bucket: self._auth.sees(identity, bucket, whole=True))
            exchange.respond(200, TEXT, render(found).encode())

        exchange.spawn(answer())

    def _status(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        identity = self._auth.bearer(request)

        async def answer() -> None:
            state: NodeState = await self._call("status", calls.Nothing())
            if not self._auth.may(identity, "observe"):
                state = part_of(state, lambda bucket: self._auth.sees(identity, bucket, whole=True))
            exchange.respond(200, JSON, encode(state))

        exchange.spawn(answer())

    # --- jobs: each is its identity's, and its bucket's admins' ------------------------------------------------------
    def _jobs(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        identity = self._auth.bearer(request)

        async def answer() -> None:
            found = await self._call("jobs", calls.Nothing())
            exchange.respond(200, JSON, encode([job for job in found if self._has_job(identity, job)]))

        exchange.spawn(answer())

    def _job(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        exchange.spawn(self._of_job(request, exchange, "job", taken["job"]))

    def _job_cancel(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        exchange.spawn(self._of_job(request, exchange, "job_cancel", taken["job"]))

    async def _of_job(self, request: Request, exchange: Exchange, verb: str, job: str) -> None:
        state: calls.JobState = await self._call("job", calls.JobNamed(job))
        if not self._has_job(self._auth.bearer(request), state):
            raise calls.no_such_job(job)
        if verb != "job":
            state = await self._call(verb, calls.JobNamed(job))
        exchange.respond(200, JSON, encode(state))

    def _has_job(self, identity: Identity, state: calls.JobState) -> bool:
        if self._auth.may(identity, "admin", state.bucket, state.prefix):
            return True
        return state.identity == identity.name and self._auth.sees(identity, state.bucket)

    # --- calls -------------------------------------------------------------------------------------------------------
    async def _forward(self, request: Request, exchange: Exchange, route: Route, taken: dict[str, str]) -> None:
        """An operation whose answer is the engine's, unchanged."""
        arguments: Any = calls.Nothing()
        status = 200
        if route.name == "stat":
            revalidate = flag_of(request, "revalidate")
            arguments = calls.StatCall(taken["bucket"], check_key(taken["key"]), revalidate)
        elif route.name in ("bucket_check", "bucket_delete"):
            maker = self._auth.maker(self._auth.bearer(request), taken["bucket"])
            here = flag_of(request, "here")
            arguments = calls.BucketNamed(taken["bucket"], flag_of(request, "force"), maker, here)
        elif route.name == "lost":
            query = decode_query(request.query)
            after, prefix = query.get("start_after", ""), query.get("prefix", "")
            arguments = calls.LostCall(taken["bucket"], prefix, start_after=after)
        elif route.body is calls.LostCall:
            arguments = decode_body(request, calls.LostCall)
            for name in arguments.keys or [arguments.prefix]:
                self._auth.require(self._auth.bearer(request), "admin", arguments.bucket, name)
        elif route.body is calls.VolumeNamed:
            self._auth.require(self._auth.bearer(request), "admin")
            arguments = decode_body(request, calls.VolumeNamed)
        elif route.body in (calls.WishCall, calls.ManifestCall):
            self._auth.require(self._auth.bearer(request), "admin")
            arguments = decode_body(request, route.body)
        elif route.name == "manifest":
            self._auth.require(self._auth.bearer(request), "admin")
            arguments = calls.ObjectNamed(taken["bucket"], check_key(taken["key"]))
        elif route.body is calls.JobCall:
            arguments = self._job_call(request, route)
            status = 202
        answer = await self._call(route.name, arguments)
        exchange.respond(status, JSON, encode(answer))

    def _job_call(self, request: Request, route: Route) -> calls.JobCall:
        call: calls.JobCall = decode_body(request, calls.JobCall)
        assert route.may is not None
        identity = self._auth.bearer(request)
        if call.keys and call.prefix:
            raise Invalid("both keys and a prefix are given: give one of them")
        if route.name == "rewarm":
            self._auth.require(identity, "admin")  # a manifest names objects of any bucket
        for name in call.keys or [call.prefix]:
            self._auth.require(identity, route.may, call.bucket, name)
        for key in call.keys:
            check_key(key)
        return msgspec.structs.replace(call, identity=self._auth.owner(identity))

    # --- buckets -----------------------------------------------------------------------------------------------------
    def _buckets(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        async def answer() -> None:
            identity = self._auth.bearer(request)
            found = await self._call("buckets", calls.Nothing())
            shown = [shown_to(identity, bucket) for bucket in found if identity.sees(bucket.name, bucket.owner)]
            exchange.respond(200, JSON, encode(shown))

        exchange.spawn(answer())

    def _bucket(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        async def answer() -> None:
            found = await self._known(taken["bucket"])
            exchange.respond(200, JSON, encode(shown_to(self._auth.bearer(request), found)))

        exchange.spawn(answer())

    async def _known(self, name: str) -> Bucket:
        for bucket in await self._call("buckets", calls.Nothing()):
            if bucket.name == name:
                found: Bucket = bucket
                return found
        raise NotFound(f"there is no bucket {name!r} here: add it with `forebay bucket add`", code="NoSuchBucket")

    def _bucket_put(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        async def answer() -> None:
            wanted: Bucket = decode_body(request, Bucket)
            if wanted.name != check_bucket_name(taken["bucket"]):
                raise Invalid(f"the path names {taken['bucket']!r} and the body {wanted.name!r}: make them the same")
            check, force, here = (flag_of(request, flag) for flag in ("check", "force", "here"))
            identity = self._auth.bearer(request)
            free, maker = self._auth.may(identity, "admin"), self._auth.maker(identity, wanted.name)
            kept = await self._call("bucket_put", calls.BucketPutCall(wanted, check, force, free, maker, here))
            exchange.respond(200, JSON, encode(kept))

        exchange.spawn(answer())

    # --- listings ----------------------------------------------------------------------------------------------------
    def _list(self, request: Request, exchange: Exchange, taken: dict[str, str]) -> None:
        query = decode_query(request.query)
        name = self._reads.bucket(taken["bucket"]).name
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start_after = query.get("start_after", "")
        limit = number_of(query, "limit", limits.LIST_KEYS_MAX, least=1, most=limits.LIST_KEYS_MAX)
        form = query.get("format", "json")
        if form not in ("json", "ndjson"):
            raise Invalid(f"format {form!r} is not known: use json or ndjson")
        if form == "ndjson":
            if delimiter:
                raise Invalid("an NDJSON listing is flat: leave the delimiter out")
            exchange.spawn(self._stream_cached(exchange, name, prefix, start_after))
        elif query.get("cached", "") in ("1", "true"):
            page = cached_page(self._store, name, prefix, delimiter, start_after, limit)
            exchange.respond(200, JSON, encode(page))
        else:
            call = calls.ListCall(name, prefix, delimiter, start_after, limit)
            exchange.spawn(self._list_merged(exchange, call))

    async def _list_merged(self, exchange: Exchange, call: calls.ListCall) -> None:
        exchange.respond(200, JSON, encode(await self._call("list", call)))

    async def _stream_cached(self, exchange: Exchange, name: str, prefix: str, start_after: str) -> None:
        exchange.start(200, NDJSON)
        while entries := self._store.scan_entries(name, prefix, start_after, limits.LIST_KEYS_MAX):
            await exchange.write(_encode_lines([_Line(*entry) for entry in entries]))
            start_after = entries[-1].key
        await exchange.end()


def shown_to(identity: Identity, bucket: Bucket) -> Bucket:
    """What somebody may know of a bucket that they see: whose grants are about keys alone, nothing of other keys."""
    if identity.sees(bucket.name, bucket.owner, whole=True):
        return bucket
    pinned = tuple(prefix for prefix in bucket.pinned if identity.may("read", bucket.name, prefix))
    return msgspec.structs.replace(bucket, pinned=pinned, options={}, cors=(), owner="")


def cached_page(
    store: StoreReader, bucket: str, prefix: str, delimiter: str, start_after: str, limit: int
) -> CachedPage:
    """One page of what the index knows, rolled up at `delimiter` behind `prefix`."""
    entries: list[CachedEntry] = []
    prefixes: list[str] = []
    shown = 0
    while True:
        asked = limit + 1 - shown  # one more than fits tells whether there is a next page
        found = store.scan(bucket, prefix, start_after, asked)
        for key, record in found:
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            if at >= 0 and prefixes and key.startswith(prefixes[-1]):
                start_after = key  # holds the highest code point itself, so it was not passed over
                continue
            if shown == limit:
                return CachedPage(entries, prefixes, start_after)
            shown += 1
            if at >= 0:
                prefixes.append(key[: at + len(delimiter)])
                start_after = after_prefix(prefixes[-1])
                break  # the rest of what was found is mostly under it: pass over that in the index
            entries.append(_cached_entry(key, record))
            start_after = key
        else:
            if len(found) < asked:
                return CachedPage(entries, prefixes)


def _cached_entry(key: str, record: Record) -> CachedEntry:
    if record.complete:
        cached_bytes = record.size_bytes
    else:
        bits = int.from_bytes(record.present, "little")
        cached_bytes = bits.bit_count() * record.block_bytes
        last = record.size_bytes // record.block_bytes
        if record.size_bytes % record.block_bytes and bits >> last & 1:
            cached_bytes -= record.block_bytes - record.size_bytes % record.block_bytes
    state = record.state
    return CachedEntry(
        key,
        record.size_bytes,
        record.etag,
        record.modified_s,
        cached_bytes,
        bool(state & State.PINNED),
        bool(state & State.DIRTY),
    )
