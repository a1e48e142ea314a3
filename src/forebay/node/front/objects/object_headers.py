"""What the headers of a write say about the object to be: stored headers, tags, conditions, and what is refused.

Theory. A stored header is kept exactly as it came and sent back with every read. User metadata may be any line of
bytes; other headers must be UTF-8. What an object cannot be here (encrypted by a customer's key, locked) is refused
with NotImplemented: a header that asks for it and is dropped would be a lie that is noticed too late. In which class of
storage an object is kept, and how it is encrypted, an S3 backend is told, by whatever write mode the object gets there;
no other keeps it so.

Invariant. `stored_headers` yields names in lower case, each once, and nothing that describes the transfer alone.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from forebay.core import limits
from forebay.core.errors import Invalid, NotSupported
from forebay.core.record import header_text
from forebay.core.s3rules.keeping import NAMES, STANDARD, check_encryption
from forebay.core.s3rules.tags import format_tags, parse_tags
from forebay.core.types import Bucket, Headers
from forebay.node.front.http.requests import Request

_CONTENT: Final = (
    b"content-type",
    b"cache-control",
    b"content-disposition",
    b"content-encoding",
    b"content-language",
    b"expires",
)
_META: Final = b"x-amz-meta-"
_META_NAME: Final = re.compile(rb"x-amz-meta-[!#$%&'*+\-.^_`|~0-9a-z]+")
# fmt: off
_REFUSED: Final = (  # beginnings of names
    b"x-amz-server-side-encryption", b"x-amz-object-lock-", b"x-amz-grant-", b"x-amz-website-redirect-location",
    b"x-amz-write-offset-bytes", b"x-amz-expected-bucket-owner", b"x-amz-source-expected-bucket-owner",
    b"x-amz-copy-source-server-side-encryption",
)
_STORAGE_CLASSES: Final = frozenset((  # all that S3 has: another is a mistake
    b"STANDARD", b"REDUCED_REDUNDANCY", b"STANDARD_IA", b"ONEZONE_IA", b"INTELLIGENT_TIERING", b"GLACIER",
    b"DEEP_ARCHIVE", b"OUTPOSTS", b"GLACIER_IR", b"SNOW", b"EXPRESS_ONEZONE", b"FSX_OPENZFS", b"FSX_ONTAP",
))
# fmt: on
_KEEPING: Final = tuple(name.encode() for name in NAMES)
_CLASS, _ENCRYPTION, _KMS_KEY = _KEEPING
_ENCRYPTING: Final = (_ENCRYPTION, _KMS_KEY)
_CUSTOMER_KEY: Final = (_ENCRYPTION + b"-customer-", b"x-amz-copy-source" + _ENCRYPTION.removeprefix(b"x-amz"))
_STANDARD: Final = STANDARD.encode()
_OWNERS_ACLS: Final = (b"bucket-owner-full-control", b"bucket-owner-read")  # so it is anyway
_BUCKETS_ACLS: Final = (b"private", b"public-read", b"public-read-write", b"authenticated-read", b"aws-exec-read")


class WriteConditions(NamedTuple):
    """The If-* headers of a write, None where absent."""

    if_match: str | None = None
    if_none_match: str | None = None


def stored_headers(request: Request) -> Headers:
    """What shall be sent back with the object. `Invalid` for a content header that is no UTF-8, `MetadataTooLarge`."""
    headers = request.headers
    kept = []
    for name in _CONTENT:
        if name in headers:
            value = _text(name, headers[name])
            if name == b"content-encoding":
                value = ", ".join(part for part in (part.strip() for part in value.split(",")) if part != "aws-chunked")
            if value:
                kept.append((name.decode(), value))
    size = 0
    for name, raw in headers.items():
        if name.startswith(_META):
            size += len(name) - len(_META) + len(raw)
            kept.append((name.decode("ascii"), header_text(raw)))
    if size > limits.METADATA_BYTES_MAX:
        raise Invalid(
            f"Your metadata headers exceed the maximum allowed metadata size of {limits.METADATA_BYTES_MAX} bytes",
            code="MetadataTooLarge",
        )
    return tuple(kept)


def check_stored(headers: Headers) -> None:
    """`Invalid` for headers that no object is stored with: sent back, they would say something of the answer itself."""
    size = 0
    for name, value in headers:
        raw = name.encode("utf-8", "replace")
        if raw not in _CONTENT and not _META_NAME.fullmatch(raw):
            raise Invalid(f"no object is stored with the header {name[:60]!r}: name it x-amz-meta-…, in lower case")
        if not value.isprintable():
            raise Invalid(f"the value for {name} holds a control character: percent-encode or remove it")
        size += len(raw) + len(value.encode())
    if size > limits.HEADER_BYTES_MAX // 2:
        raise Invalid("the headers of the object are longer than what a request holds: send less")


def _text(name: bytes, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid(f"the header {name.decode()} is not UTF-8: percent-encode it", code="InvalidArgument") from None


def tags_of(request: Request) -> str:
    """The x-amz-tagging header in its one spelling; `Invalid` (`InvalidTag`)."""
    raw = request.headers.get(b"x-amz-tagging", b"")
    return format_tags(parse_tags(_text(b"x-amz-tagging", raw))) if raw else ""


def write_conditions(request: Request) -> WriteConditions:
    """The conditions of a write. `NotSupported` for those that S3 does not have there."""
    headers = request.headers
    for name in (b"if-modified-since", b"if-unmodified-since"):
        if name in headers:
            raise NotSupported(f"{name.decode()} does not go with a write: use If-Match or If-None-Match")
    if_match = request.header(b"if-match") if b"if-match" in headers else None
    if_none_match = request.header(b"if-none-match") if b"if-none-match" in headers else None
    if if_match is not None and not if_match.strip():
        raise Invalid("If-Match is empty: give an entity tag", code="InvalidArgument")
    return WriteConditions(if_match, if_none_match)


def refuse_unserved(request: Request, *, keeps: bool = False) -> None:
    """`NotSupported` for headers of a write whose meaning would have to be dropped. `keeps`: `keeping_in` sees to those
    that say how the object is kept."""
    headers = request.headers
    for name in headers:
        if name.startswith(b"x-amz-") and name.startswith(_REFUSED) and not (keeps and name in _ENCRYPTING):
            if name.startswith(_CUSTOMER_KEY):
                raise NotSupported(
                    f"{name.decode()} is not served: the node would hand out what only your key may open; have the "
                    "backend encrypt (SSE-S3 or SSE-KMS), or write to the bucket itself"
                )
            raise NotSupported(f"{name.decode()} is not served: leave it out, or write to the bucket itself")
    storage_class = headers.get(_CLASS, _STANDARD)
    if storage_class not in _STORAGE_CLASSES:
        raise Invalid("The storage class you specified is not valid: leave it out", code="InvalidStorageClass")
    if storage_class != _STANDARD and not keeps:
        raise NotSupported("a storage class means nothing to this request: leave x-amz-storage-class out")


def keeping_in(request: Request, bucket: Bucket) -> Headers:
    """How the backend is to keep what the request writes, among its stored headers. `Invalid` for what S3 does not
    know, `NotSupported` where no backend keeps it so: only S3 does, as far as headers go."""
    headers = request.headers
    asked = [name for name in _KEEPING if name in headers]
    if asked == [_CLASS] and headers[_CLASS] == _STANDARD and "storage_class" not in bucket.options:
        return ()
    said = tuple((name.decode(), request.header(name)) for name in asked)
    check_encryption(request.header(_ENCRYPTION), request.header(_KMS_KEY))
    if asked and bucket.url and (bucket.write == "local" or not bucket.url.startswith("s3://")):
        raise NotSupported(
            f"bucket {bucket.name} has no S3 backend that could keep {asked[0].decode()}: leave it out, or set what "
            "the backend has as an option of the bucket (docs/backends.md)"
        )
    return said


def check_acl(request: Request, acl: str) -> None:
    """Return if the canned ACL that a write names is what its object has anyway: that of its bucket, `acl`.
    `NotSupported` if it is another, `Invalid` if it is none of S3's."""
    word = request.headers.get(b"x-amz-acl", b"")
    if not word or word in _OWNERS_ACLS or word == acl.encode():
        return
    if word not in _BUCKETS_ACLS:
        raise Invalid(f"the canned ACL {word[:60].decode('latin-1')!r} is not known to S3", code="InvalidArgument")
    raise NotSupported(
        f"objects have no ACL of their own, and this one's bucket is {acl}: leave x-amz-acl out, or change the bucket's"
    )
