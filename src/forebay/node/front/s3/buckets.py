"""CreateBucket and DeleteBucket.

Theory. Whoever may `create` a name may make a bucket of it, and owns that one; whoever has `admin` of it may do so too.
CreateBucket makes a bucket that lives here alone (`local://`): the request names no backend to put it behind,
and `forebay bucket add` is how one is named. DeleteBucket of such a bucket needs it empty, since nothing else has its
bytes. Of a bucket with a backend it takes away the name. The backend keeps everything, so the bucket need not be empty;
only what the backend does not have yet stands in the way.

The settings of a bucket are asked of the engine and not read from the front's copy, so a client that changed them
through another front sees its change.

Rejected: CreateBucket at a backend (which one, and with whose credentials, would be a guess).

Invariant. No operation is answered before the caller was found to be allowed to do it.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Busy, Denied, Exists, Invalid, NotFound, NotSupported
from forebay.core.messages.calls import BucketNamed, ListCall, Nothing
from forebay.core.types import LOCAL_URL, Bucket, ListPage, check_bucket_name
from forebay.node.front.http.auth import Auth, Caller
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request
from forebay.node.front.objects.puts import Puts
from forebay.node.front.s3.compat import acl as s3_acl
from forebay.node.front.s3.unserved import refuse
from forebay.node.front.s3.xml import parse
from forebay.node.outcomes import Call

_REGION: Final = re.compile(r"[A-Za-z0-9\-]{0,64}")  # any region is accepted, as in signatures
_NO_NEW_NAME: Final = re.compile(
    r"-\.|\.-|^(?:xn--|sthree-|amzn-s3-demo-)|(?:-s3alias|--ol-s3|\.mrap|--x-s3|--table-s3)$"
)


class BucketsApi:
    """`call` asks the engine, `puts.intake` makes sinks for bodies, `lines` are the first header lines of each
    answer."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines) -> None:
        self._call = call
        self._auth = auth
        self._intake = puts.intake
        self._lines = lines

    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request` in a task if it is one of this module's; False if it is not, and then nothing was done.
        Raises `ForebayError` for what is wrong with the request."""
        if key or not _is_about_a_bucket(request, query):
            return False
        self._allow(identity, request, bucket)
        refuse(request, query, frozenset())
        work = self._put if request.method == b"PUT" else self._delete
        exchange.spawn(work(request, exchange, identity, bucket))
        return True

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None if the request is none of this module's. Raises to refuse it
        before it is sent."""
        if key or not _is_about_a_bucket(request, query):
            return None
        self._allow(caller.identity, request, bucket)
        return self._intake.document(request, caller, limits.SETTING_BYTES_MAX)

    def _allow(self, identity: Identity, request: Request, bucket: Bucket) -> None:
        if request.method != b"PUT":
            self._auth.require(identity, "admin", bucket.name)
            return
        try:
            self._auth.require(identity, "create", bucket.name)
        except Denied:
            if not bucket.url:
                raise
            raise _taken() from None

    async def _put(self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket) -> None:
        region = _asked_region(request.body)
        if request.header(b"x-amz-bucket-object-lock-enabled").lower() == "true":
            raise NotSupported("Object Lock is not served: leave x-amz-bucket-object-lock-enabled out")
        s3_acl.check_ownership(request)
        acl = s3_acl.canned_acl(request) or "private"
        name = _check_new_name(bucket.name)
        try:
            owner = self._auth.maker(identity, name)
            await self._call("bucket_create", Bucket(name, LOCAL_URL, write="local", acl=acl, owner=owner))
        except Exists as error:
            await self._create_again(identity, bucket, region, acl, error)
        exchange.respond(200, self._lines(request) + b"Location: /%b\r\n" % name.encode())

    async def _create_again(self, identity: Identity, bucket: Bucket, region: str, acl: str, error: Exists) -> None:
        """Return if a bucket of theirs is there as it was asked for, as S3 does in us-east-1: programs that begin with
        CreateBucket go on. `Exists` if not; nothing of it changes."""
        settings = await settings_of(self._call, bucket)
        if not identity.may("admin", settings.name, owner=settings.owner):
            raise _taken()
        if error.code != "BucketAlreadyOwnedByYou" or region not in ("", "us-east-1"):
            raise error
        if settings.acl != acl:
            raise Exists(
                f"the bucket is there, and its ACL is {settings.acl}: use it, or change its ACL",
                code="BucketAlreadyExists",
            )

    async def _delete(self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket) -> None:
        settings = await settings_of(self._call, bucket)
        if settings.url == LOCAL_URL:
            page: ListPage = await self._call("list", ListCall(bucket.name, limit=1))
            if page.entries or page.prefixes:
                raise Exists(
                    "The bucket you tried to delete is not empty: this node has the only copy of its objects, delete "
                    "them first",
                    code="BucketNotEmpty",
                )
        try:
            maker = self._auth.maker(identity, bucket.name)
            await self._call("bucket_delete", BucketNamed(bucket.name, maker=maker))
        except Busy as error:  # it owes its backend something, and no retry of an SDK will change that
            raise Exists(error.message) from None
        exchange.respond(204, self._lines(request))


def _taken() -> Exists:
    return Exists(
        "The requested bucket name is not available: somebody else has it, choose another", code="BucketAlreadyExists"
    )


async def settings_of(call: Call, bucket: Bucket) -> Bucket:
    """The bucket as the engine has it now; `NotFound` (`NoSuchBucket`)."""
    for again in (False, True):
        if again:
            await call("bucket_check", BucketNamed(bucket.name))  # the environment's credentials may open it
        for found in await call("buckets", Nothing()):
            if found.name == bucket.name:
                assert isinstance(found, Bucket)
                return found
    raise NotFound(f"there is no bucket {bucket.name!r}: look at the name", code="NoSuchBucket")


def _is_about_a_bucket(request: Request, query: dict[str, str]) -> bool:
    return request.method in (b"PUT", b"DELETE") and not query.keys() - {"x-id"}


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
