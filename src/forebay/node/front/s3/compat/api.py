"""The door of the fence: every operation of S3 that stands in `compat/`.

Theory. A request comes here only if its query, its Origin header or its form says so, so a plain GET or PUT of an
object never does. ACLs, CORS, tags, settings that no bucket here has, and uploads by HTML forms each have a module
here. This one finds the operation, decides who may do it, and asks the engine.

Invariant. No operation is answered before the caller was found to be allowed to do it.
"""

from __future__ import annotations

from typing import Final

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import NotFound
from forebay.core.messages.calls import BucketRulesCall, ObjectNamed, StatCall, TagCall, TagsSaid
from forebay.core.s3rules.tags import format_tags, parse_tags
from forebay.core.types import Bucket, check_key
from forebay.node.front.http.auth import Auth, Caller
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request
from forebay.node.front.objects.puts import Puts
from forebay.node.front.s3.buckets import settings_of
from forebay.node.front.s3.compat import acl as s3_acl
from forebay.node.front.s3.compat import cors, tagging
from forebay.node.front.s3.compat.absent import LOCKS, find_absent, no_bucket_lock, no_object_lock, render_absent
from forebay.node.front.s3.compat.post import Forms
from forebay.node.front.s3.unserved import refuse
from forebay.node.front.s3.xml import CONTENT_TYPE, document, element
from forebay.node.outcomes import Call

_RULES: Final = ("put_acl", "put_cors", "delete_cors")  # what changes the bucket itself


class CompatApi:
    """`call` asks the engine, `puts` takes objects and `puts.intake` makes sinks for bodies, `lines` are the first
    header lines of each answer."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines) -> None:
        self._call = call
        self._auth = auth
        self._intake = puts.intake
        self._lines = lines
        self._forms = Forms(auth, puts, lines)

    # --- what `operations.py` asks -----------------------------------------------------------------------------------
    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request`, now or in a task, if it is one of this module's; False if it is not, and then nothing was
        done.

        `key` is empty for the bucket itself. A request with a body comes here when that is whole (`request.body`).
        Raises `ForebayError` for what is wrong with the request.
        """
        operation = self._operation(request, key, query)
        if not operation:
            return False
        self._allow(identity, request, bucket, key, operation)
        refuse(request, query, frozenset())
        work = getattr(self, "_" + operation)
        if operation in _RULES:
            exchange.spawn(work(request, exchange, bucket, self._auth.maker(identity, bucket.name)))
        else:
            exchange.spawn(work(request, exchange, bucket, check_key(key) if key else ""))
        return True

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None if the request is none of this module's. Raises to refuse it
        before it is sent."""
        operation = self._operation(request, key, query)
        if not operation:
            return None
        self._allow(caller.identity, request, bucket, key, operation)
        return self._intake.document(request, caller, limits.SETTING_BYTES_MAX)

    def take_form(self, request: Request, bucket: Bucket) -> BodySink:
        """Where the form of a POST upload goes. Its signature is inside: nobody is known yet."""
        return self._forms.take(request, bucket)

    def handle_form(self, request: Request, exchange: Exchange, bucket: Bucket) -> None:
        """Answer a POST upload whose form is whole: `request.sink` is what `take_form` returned."""
        self._forms.handle(request, exchange, bucket)

    def preflight(self, request: Request, exchange: Exchange, bucket: Bucket) -> None:
        """Answer an OPTIONS request."""
        exchange.respond(200, self._lines(request) + cors.preflight_lines(request, bucket))

    def cors_lines(self, request: Request, bucket: Bucket) -> bytes:
        """Header lines that the bucket's CORS rules add to the answer to `request`, which has an Origin header."""
        return cors.actual_lines(request, bucket)

    def check_origin(self, request: Request, bucket: Bucket) -> None:
        """`Denied` for a write to an open node that comes from a page which the bucket's rules do not allow."""
        if self._auth.open:
            cors.check_origin(request, bucket)

    # --- which operation ---------------------------------------------------------------------------------------------
    def _operation(self, request: Request, key: str, query: dict[str, str]) -> str:
        """The method here that answers the request, without its underscore; "" if none does."""
        method = request.method
        if method not in (b"GET", b"PUT", b"DELETE"):
            return ""
        verb = method.decode().lower()
        if key:
            if "tagging" in query:
                return verb + "_tagging"
            if verb == "delete":
                return ""
            return verb + "_object_acl" if "acl" in query else "ask_object_lock" if LOCKS & query.keys() else ""
        if find_absent(method, query):
            return verb + "_absent"
        if verb == "get" and "policyStatus" in query:
            return "get_policy_status"
        if verb == "put" and "object-lock" in query:
            return "put_bucket_lock"
        for name in ("acl", "cors"):
            if name in query and (name, verb) != ("acl", "delete"):
                return f"{verb}_{name}"
        return ""

    def _allow(self, identity: Identity, request: Request, bucket: Bucket, key: str, operation: str) -> None:
        if request.method == b"GET":
            self._auth.require(identity, "read", bucket.name, key)
        elif operation.endswith(("_tagging", "_object_acl", "_object_lock")):
            self._auth.require(identity, "write", bucket.name, key)
        else:
            self._auth.require(identity, "admin", bucket.name)

    async def _settings(self, bucket: Bucket) -> Bucket:
        return await settings_of(self._call, bucket)

    def _document(self, request: Request, exchange: Exchange, body: bytes) -> None:
        exchange.respond(200, self._lines(request) + CONTENT_TYPE, body)

    # --- what no bucket has ------------------------------------------------------------------------------------------
    async def _get_absent(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._settings(bucket)
        query = {part.partition(b"=")[0].decode("latin-1"): "" for part in request.query.split(b"&")}
        self._document(request, exchange, render_absent(find_absent(b"GET", query)))

    async def _delete_absent(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._settings(bucket)
        exchange.respond(204, self._lines(request))

    async def _put_bucket_lock(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._settings(bucket)
        raise no_bucket_lock()

    async def _ask_object_lock(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._settings(bucket)
        raise no_object_lock()

    async def _get_policy_status(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        public = (await self._settings(bucket)).acl == "public-read"  # there are no policies that could make it so
        inner = element("IsPublic", "true" if public else "false")
        self._document(request, exchange, document("PolicyStatus", inner))

    # --- ACLs --------------------------------------------------------------------------------------------------------
    async def _get_acl(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        self._document(request, exchange, s3_acl.render_policy((await self._settings(bucket)).acl))

    async def _put_acl(self, request: Request, exchange: Exchange, bucket: Bucket, maker: str) -> None:
        await self._call("bucket_rules", BucketRulesCall(bucket.name, acl=s3_acl.asked_acl(request), maker=maker))
        exchange.respond(200, self._lines(request))

    async def _get_object_acl(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._call("stat", StatCall(bucket.name, key))
        self._document(request, exchange, s3_acl.render_policy((await self._settings(bucket)).acl))

    async def _put_object_acl(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        s3_acl.check_object_acl(request, (await self._settings(bucket)).acl)
        await self._call("stat", StatCall(bucket.name, key))
        exchange.respond(200, self._lines(request))

    # --- CORS --------------------------------------------------------------------------------------------------------
    async def _get_cors(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        rules = (await self._settings(bucket)).cors
        if not rules:
            raise NotFound("The CORS configuration does not exist: put one", code="NoSuchCORSConfiguration")
        self._document(request, exchange, cors.render_rules(rules))

    async def _put_cors(self, request: Request, exchange: Exchange, bucket: Bucket, maker: str) -> None:
        rules = cors.read_rules(request.body)
        await self._call("bucket_rules", BucketRulesCall(bucket.name, cors=rules, maker=maker))
        exchange.respond(200, self._lines(request))

    async def _delete_cors(self, request: Request, exchange: Exchange, bucket: Bucket, maker: str) -> None:
        await self._call("bucket_rules", BucketRulesCall(bucket.name, cors=(), maker=maker))
        exchange.respond(204, self._lines(request))

    # --- tags --------------------------------------------------------------------------------------------------------
    async def _get_tagging(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        said: TagsSaid = await self._call("tags", ObjectNamed(bucket.name, key))
        self._document(request, exchange, tagging.render_tags(parse_tags(said.tags)))

    async def _put_tagging(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        tags = format_tags(tagging.read_tags(request.body))
        await self._call("tag", TagCall(bucket.name, key, tags))
        exchange.respond(200, self._lines(request))

    async def _delete_tagging(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._call("tag", TagCall(bucket.name, key, ""))
        exchange.respond(204, self._lines(request))
