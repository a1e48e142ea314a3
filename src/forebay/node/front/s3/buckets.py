"""What S3 lets one do to a bucket as such, and what hangs on an object beside its bytes: create and delete bucket,
ACLs, CORS, tags, uploads by HTML forms.

Theory. `s3.py` asks each of its helpers in turn whether a request is theirs; this one knows its own by the method (PUT
and DELETE of a bucket), by `?acl`, `?cors` and `?tagging`, by settings that no bucket here has (locks of its objects
among them), and by a body that is a form. What each means stands in a module of its own (`compat/acl.py`, …); here it
is decided who may do it, and the engine is asked. What a bucket's settings are is asked of the engine too, not read
from the front's copy, so that a client that changed them through another front sees what it did.

CreateBucket makes a bucket that lives here alone (`local://`): there is no backend in the request to put it behind, and
`forebay bucket add` is how one is named. DeleteBucket of such a bucket needs it empty, since nothing else has its
bytes. Of a bucket with a backend it takes away the name: the backend keeps everything, so it need not be empty; only
what the backend does not have yet stands in the way.

Rejected: CreateBucket at a backend (which one, and with whose credentials, would be a guess).

Invariant. No operation is answered before the caller was found to be allowed to do it.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Busy, Denied, Exists, Invalid, NotFound, NotSupported
from forebay.core.messages.calls import (
    BucketNamed,
    BucketRulesCall,
    ListCall,
    Nothing,
    ObjectNamed,
    StatCall,
    TagCall,
    TagsSaid,
)
from forebay.core.s3rules.tags import format_tags, parse_tags
from forebay.core.types import LOCAL_URL, Bucket, ListPage, check_bucket_name, check_key
from forebay.node.front.http.auth import Auth, Caller
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request
from forebay.node.front.objects.puts import Puts
from forebay.node.front.s3 import tagging
from forebay.node.front.s3.compat import acl as s3_acl
from forebay.node.front.s3.compat import cors
from forebay.node.front.s3.compat.absent import LOCKS, find_absent, no_bucket_lock, no_object_lock, render_absent
from forebay.node.front.s3.compat.post import Forms
from forebay.node.front.s3.compat.unserved import refuse
from forebay.node.front.s3.xml import CONTENT_TYPE, document, element, parse
from forebay.node.outcomes import Call

_REGION: Final = re.compile(r"[A-Za-z0-9\-]{0,64}")  # any region is accepted, as in signatures
_NO_NEW_NAME: Final = re.compile(
    r"-\.|\.-|^(?:xn--|sthree-|amzn-s3-demo-)|(?:-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)$"
)


class BucketsApi:
    """`call` asks the engine, `puts` takes objects and `puts.intake` makes sinks for bodies, `lines` are the first
    header lines of each answer."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines) -> None:
        self._call = call
        self._auth = auth
        self._intake = puts.intake
        self._lines = lines
        self._forms = Forms(auth, puts, lines)

    # --- what s3.py asks ---------------------------------------------------------------------------------------------
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
        self._allow(identity, request, bucket, operation)
        refuse(request, query, frozenset())
        exchange.spawn(getattr(self, "_" + operation)(request, exchange, bucket, check_key(key) if key else ""))
        return True

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None if the request is none of this module's. Raises to refuse it
        before it is sent."""
        operation = self._operation(request, key, query)
        if not operation:
            return None
        self._allow(caller.identity, request, bucket, operation)
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
        if not query.keys() - {"x-id"} and verb != "get":
            return verb + "_bucket"
        return ""

    def _allow(self, identity: Identity, request: Request, bucket: Bucket, operation: str) -> None:
        if request.method == b"GET":
            self._auth.require(identity, "read", bucket.name)
        elif operation.endswith(("_tagging", "_object_acl", "_object_lock")):
            self._auth.require(identity, "write", bucket.name)
        else:
            try:
                self._auth.require(identity, "admin", bucket.name)
            except Denied:
                if operation != "put_bucket" or not bucket.url:
                    raise
                raise Exists(
                    "The requested bucket name is not available: somebody else has it, choose another",
                    code="BucketAlreadyExists",
                ) from None

    async def _settings(self, bucket: Bucket) -> Bucket:
        """The bucket as the engine has it now; `NotFound` (`NoSuchBucket`)."""
        for again in (False, True):
            if again:
                await self._call("bucket_check", BucketNamed(bucket.name))  # the environment's credentials may open it
            for found in await self._call("buckets", Nothing()):
                if found.name == bucket.name:
                    assert isinstance(found, Bucket)
                    return found
        raise NotFound(f"there is no bucket {bucket.name!r}: look at the name", code="NoSuchBucket")

    def _document(self, request: Request, exchange: Exchange, body: bytes) -> None:
        exchange.respond(200, self._lines(request) + CONTENT_TYPE, body)

    # --- the bucket itself -------------------------------------------------------------------------------------------
    async def _put_bucket(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        region = _asked_region(request.body)
        if request.header(b"x-amz-bucket-object-lock-enabled").lower() == "true":
            raise NotSupported("Object Lock is not served: leave x-amz-bucket-object-lock-enabled out")
        s3_acl.check_ownership(request)
        acl = s3_acl.canned_acl(request) or "private"
        name = _check_new_name(bucket.name)
        try:
            await self._call("bucket_create", Bucket(name, LOCAL_URL, write="local", acl=acl))
        except Exists as error:
            await self._create_again(bucket, region, acl, error)
        exchange.respond(200, self._lines(request) + b"Location: /%b\r\n" % name.encode())

    async def _create_again(self, bucket: Bucket, region: str, acl: str, error: Exists) -> None:
        """Return if a bucket that is there is as it was asked for, as S3 does in us-east-1: programs that begin with
        CreateBucket go on. `Exists` if not; nothing of it changes."""
        if error.code != "BucketAlreadyOwnedByYou" or region not in ("", "us-east-1"):
            raise error
        settings = await self._settings(bucket)
        if settings.acl != acl:
            raise Exists(
                f"the bucket is there, and its ACL is {settings.acl}: use it, or change its ACL",
                code="BucketAlreadyExists",
            )

    async def _delete_bucket(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        settings = await self._settings(bucket)
        if settings.url == LOCAL_URL:
            page: ListPage = await self._call("list", ListCall(bucket.name, limit=1))
            if page.entries or page.prefixes:
                raise Exists(
                    "The bucket you tried to delete is not empty: this node has the only copy of its objects, delete "
                    "them first",
                    code="BucketNotEmpty",
                )
        try:
            await self._call("bucket_delete", BucketNamed(bucket.name))
        except Busy as error:  # it owes its backend something, and no retry of an SDK will change that
            raise Exists(error.message) from None
        exchange.respond(204, self._lines(request))

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

    async def _put_acl(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._call("bucket_rules", BucketRulesCall(bucket.name, acl=s3_acl.asked_acl(request)))
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

    async def _put_cors(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._call("bucket_rules", BucketRulesCall(bucket.name, cors=cors.read_rules(request.body)))
        exchange.respond(200, self._lines(request))

    async def _delete_cors(self, request: Request, exchange: Exchange, bucket: Bucket, key: str) -> None:
        await self._call("bucket_rules", BucketRulesCall(bucket.name, cors=()))
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


def _check_new_name(name: str) -> str:
    """`name` if S3 would let one make a bucket of that name: a little less than what may name one."""
    check_bucket_name(name)
    if _NO_NEW_NAME.search(name):
        raise Invalid(
            f"bucket name {name!r} is not valid: '.' and '-' may not stand beside each other, and xn--, sthree-, "
            "amzn-s3-demo- in front and -s3alias, --ol-s3, .mrap, --x-s3, --table-s3 at the end are reserved",
            code="InvalidBucketName",
        )
    return name


def _asked_region(body: bytes) -> str:
    """The region that the CreateBucketConfiguration names, "" if none. `Invalid` for what cannot be had."""
    if not body:
        return ""
    root = parse(body, "CreateBucketConfiguration")
    region = (root.findtext("LocationConstraint") or "").strip()
    if not _REGION.fullmatch(region):
        raise Invalid("The specified location-constraint is not valid: name a region", code="InvalidLocationConstraint")
    for name in ("Location", "Bucket"):
        if root.find(name) is not None:
            raise Invalid(
                "directory buckets are not served: leave Location and Bucket out of the configuration",
                code="InvalidRequest",
            )
    return region
