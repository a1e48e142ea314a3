"""ListBuckets, ListObjects and ListObjectsV2.

Theory. The engine answers `list` one page at a time, merged from everything that knows keys, with the place where the
next page starts. This module turns a request's parameters into that call and the answer into XML. A page here is a page
there, so memory is one page. Version 2's continuation token is the place, with a format number and a checksum: opaque,
and a damaged or foreign one is refused rather than read as a key.

S3 sends version 1's NextMarker only with a delimiter, since otherwise the last key says the same. That fails where a
backend has an order of its own (`backends/s3/listing.py`). There NextMarker is sent too, and clients prefer it.

A backend may answer a short page that is not the last. This module then asks on until the page is full, since clients
(and S3's promise) take a short page for the end.

With encoding-type=url all key text is percent-encoded, except version 1's Prefix where decoding would not change it and
XML can hold it: half of the clients (botocore among them) decode everything there but the prefix.

Rejected: plain keys as tokens (clients start to build them); remembering listings in the node (state per client).

Invariants. (1) Following markers or tokens shows every key once. (2) All outside text is escaped, and percent-encoded
when the client asked for it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, unquote_plus

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.messages.calls import ListCall
from forebay.core.pages import last_shown, marker_of, start_of_marker
from forebay.core.types import Bucket, ListEntry, ListPage
from forebay.node.front.s3.xml import UNREADABLE, document, element, escape, timestamp
from forebay.node.outcomes import Call

_TOKEN_FORMAT: Final = b"1"
_INTEGER: Final = re.compile(r"[0-9]{1,10}")
_INT32_MAX: Final = 2**31 - 1
OWNER: Final = "<Owner><ID>forebay</ID><DisplayName>forebay</DisplayName></Owner>"


class ListRequest(msgspec.Struct, frozen=True):
    """A ListObjects request, parsed. `start_after` is where the page starts; the texts to show back are kept as sent
    (None: not sent, not shown)."""

    version: int
    prefix: str = ""
    delimiter: str = ""
    limit: int = limits.LIST_KEYS_MAX
    url_encoded: bool = False
    start_after: str = ""
    marker: str | None = None
    token: str | None = None
    fetch_owner: bool = False


def encode_token(next_after: str) -> str:
    """The continuation token for a page that starts after `next_after`."""
    body = next_after.encode("utf-8")
    return base64.urlsafe_b64encode(_TOKEN_FORMAT + xxhash.xxh32_digest(body) + body).decode()


def decode_token(token: str) -> str:
    """What `encode_token` was given; `Invalid` for anything else."""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        if raw[:1] == _TOKEN_FORMAT and xxhash.xxh32_digest(raw[5:]) == raw[1:5]:
            return raw[5:].decode("utf-8")
    except (binascii.Error, UnicodeError):
        pass
    raise Invalid("The continuation token provided is incorrect: list again from the start", code="InvalidArgument")


def _max_keys(text: str | None, name: str = "max-keys", most: int = limits.LIST_KEYS_MAX) -> int:
    if not text:
        return most
    if not _INTEGER.fullmatch(text) or int(text) > _INT32_MAX:
        raise Invalid(f"{name} must be a whole number from 0 to {_INT32_MAX}", code="InvalidArgument")
    return min(int(text), most)


def parse_list(query: dict[str, str]) -> ListRequest:
    """The request that a bucket GET's parameters make; `Invalid` (`InvalidArgument`) for values that S3 refuses."""
    kind = query.get("list-type", "1")
    if kind not in ("1", "2"):
        raise Invalid("list-type must be 2, or absent for version 1", code="InvalidArgument")
    encoding = query.get("encoding-type", "")
    if encoding not in ("", "url"):
        raise Invalid("Invalid Encoding Method specified in Request: only url is known", code="InvalidArgument")
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    marker = query.get("marker" if kind == "1" else "start-after")
    token = query.get("continuation-token") if kind == "2" else None
    start_after = decode_token(token) if token else start_of_marker(marker or "", prefix, delimiter)
    return ListRequest(
        version=int(kind),
        prefix=prefix,
        delimiter=delimiter,
        limit=_max_keys(query.get("max-keys")),
        url_encoded=encoding == "url",
        start_after=start_after,
        marker=marker,
        token=token,
        fetch_owner=kind == "1" or query.get("fetch-owner", "").lower() == "true",
    )


async def fetch_page(call: Call, bucket: str, asked: ListRequest) -> ListPage:
    """The page that `asked` wants, filled from as many engine pages as it takes."""
    entries: list[ListEntry] = []
    prefixes: list[str] = []
    after = asked.start_after
    while asked.limit:
        left = asked.limit - len(entries) - len(prefixes)
        page: ListPage = await call("list", ListCall(bucket, asked.prefix, asked.delimiter, after, left))
        entries += page.entries
        prefixes += page.prefixes
        after = page.next_after
        if not after or len(page.entries) + len(page.prefixes) >= left:
            break
    return ListPage(entries, prefixes, after if asked.limit else "")


def render_list(bucket: str, asked: ListRequest, page: ListPage) -> bytes:
    """The XML of one page, for either version."""
    name = url_text if asked.url_encoded else escape
    truncated = bool(page.next_after)
    readable = unquote_plus(asked.prefix) == asked.prefix and not UNREADABLE.search(asked.prefix)
    v1_plain = asked.version == 1 and readable
    shown_prefix = escape(asked.prefix) if v1_plain else name(asked.prefix)
    parts = [element("Name", bucket), f"<Prefix>{shown_prefix}</Prefix>"]
    if asked.version == 1:
        parts.append(f"<Marker>{name(asked.marker or '')}</Marker>")
        marker = marker_of(page.next_after)
        if truncated and (asked.delimiter or marker != last_shown(page)):
            parts.append(f"<NextMarker>{name(marker)}</NextMarker>")
    else:
        if asked.token is not None:
            parts.append(element("ContinuationToken", asked.token))
        if truncated:
            parts.append(element("NextContinuationToken", encode_token(page.next_after)))
        if asked.marker is not None:
            parts.append(f"<StartAfter>{name(asked.marker)}</StartAfter>")
        parts.append(f"<KeyCount>{len(page.entries) + len(page.prefixes)}</KeyCount>")
    parts.append(f"<MaxKeys>{asked.limit}</MaxKeys>")
    if asked.delimiter:
        parts.append(f"<Delimiter>{name(asked.delimiter)}</Delimiter>")
    if asked.url_encoded:
        parts.append("<EncodingType>url</EncodingType>")
    parts.append(f"<IsTruncated>{'true' if truncated else 'false'}</IsTruncated>")
    parts.append(render_entries("Contents", page, name, owner=OWNER if asked.fetch_owner else ""))
    return document("ListBucketResult", "".join(parts))


def render_entries(tag: str, page: ListPage, name: Callable[[str], str], *, first: str = "", owner: str = "") -> str:
    """The objects of a page as elements called `tag`, and its common prefixes. `first` stands behind each key."""
    parts = []
    for key, size_bytes, etag, modified_s in page.entries:
        quoted = f"<ETag>&quot;{escape(etag)}&quot;</ETag>" if etag else ""
        parts.append(
            f"<{tag}><Key>{name(key)}</Key>{first}<LastModified>{timestamp(modified_s)}</LastModified>{quoted}"
            f"<Size>{size_bytes}</Size>{owner}<StorageClass>STANDARD</StorageClass></{tag}>"
        )
    parts += [f"<CommonPrefixes><Prefix>{name(text)}</Prefix></CommonPrefixes>" for text in page.prefixes]
    return "".join(parts)


def url_text(text: str) -> str:
    """`text` percent-encoded as S3 does for encoding-type=url; what that leaves needs no escaping."""
    return quote(text, safe="/-_.~*")


def render_buckets(buckets: list[Bucket], query: dict[str, str]) -> bytes:
    """The XML of ListBuckets, of the buckets that the caller may read, with its prefix and paging parameters."""
    most = _max_keys(query.get("max-buckets"), "max-buckets", 10_000)
    if most == 0:
        raise Invalid("max-buckets must be at least 1", code="InvalidArgument")
    prefix = query.get("prefix", "")
    token = query.get("continuation-token")
    after = decode_token(token) if token else ""
    found = sorted((b for b in buckets if b.name.startswith(prefix) and b.name > after), key=_name)
    shown = found[:most]
    parts = [
        f"<Bucket>{element('Name', b.name)}<CreationDate>{timestamp(b.created_s)}</CreationDate></Bucket>"
        for b in shown
    ]
    inner = f"{OWNER}<Buckets>{''.join(parts)}</Buckets>"
    if len(found) > len(shown):
        inner += element("ContinuationToken", encode_token(shown[-1].name))
    if "prefix" in query:
        inner += element("Prefix", prefix)
    return document("ListAllMyBucketsResult", inner)


def _name(bucket: Any) -> str:
    return str(bucket.name)
