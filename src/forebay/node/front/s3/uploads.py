"""Multipart uploads: create, upload part, part copy, list parts, list uploads, complete, abort.

Theory. `operations.py` asks each of its helpers whether a request is theirs; this one's have `?uploads` or `?uploadId`.
A part's body is received through `Intake` like an object's, and its MD5 is its ETag. The body of
CompleteMultipartUpload is XML in memory, and the checksums in its headers are the object's, not the body's. The engine
keeps the uploads; this module remembers nothing of them.

What was begun at the engine is completed even if the client goes away: a part that the engine knows is the engine's.

The engine lists uploads by key and time. Common prefixes are folded here, from as many pages as that takes.

Rejected: sending blanks while Complete works, as S3 does (that sends a status before it is known): joining takes
seconds at worst, and SDKs wait a minute.

Invariant. No operation is answered before the caller was found to be allowed to write that key, or all that a listing
is of.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import quote

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Invalid
from forebay.core.machines.uploads import AskedPart
from forebay.core.messages.calls import (
    PartState,
    UploadCompleteCall,
    UploadCompleted,
    UploadCreateCall,
    UploadNamed,
    UploadPartCopyCall,
    UploadParts,
    UploadPartsCall,
    Uploads,
    UploadsCall,
    UploadState,
)
from forebay.core.pages import after_prefix, start_of_marker
from forebay.core.s3rules.checksums import ALGORITHMS
from forebay.core.types import Bucket, check_key
from forebay.core.versions import versioned
from forebay.node.front.http.auth import Auth, Caller
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.checksums import HEADERS
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request
from forebay.node.front.objects.object_headers import refuse_unserved, write_conditions
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.upload_calls import create_call, part_number, send_part
from forebay.node.front.s3.listing import OWNER
from forebay.node.front.s3.write import copy_source, source_conditions
from forebay.node.front.s3.xml import CONTENT_TYPE, document, element, escape, malformed, parse, read, timestamp
from forebay.node.outcomes import Call

ELEMENTS_MAX: Final = limits.PARTS_MAX * 10 + 64  # S3 knows seven of a Part
_SOURCE: Final = b"x-amz-copy-source"
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_NUMBER: Final = re.compile(r"[0-9]{1,10}")
_SIZE: Final = re.compile(r"[0-9]{1,18}")
_INT32_MAX: Final = 2**31 - 1
_INITIATOR: Final = OWNER.replace("Owner>", "Initiator>")
_ELEMENTS: Final = {f"Checksum{name}": name for name in ALGORITHMS}
_CHECKSUM_PREFIX: Final = b"x-amz-checksum-"
_NO_VALUES: Final = frozenset((b"x-amz-checksum-algorithm", b"x-amz-checksum-type", b"x-amz-checksum-mode"))


class UploadsApi:
    """`call` asks the engine, `puts` takes bodies, `lines` are the first header lines of each answer, `find` gives a
    bucket's settings by its name."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines, find: Callable[[str], Bucket]) -> None:
        self._call = call
        self._auth = auth
        self._puts = puts
        self._intake = puts.intake
        self._lines = lines
        self._find = find

    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request`, now or in a task, if it is about uploads; False if it is not, and then nothing was done.

        `key` is empty for the bucket itself. A request with a body comes here when that is whole: `request.sink` is
        what `take_body` returned. Raises `ForebayError` for what is wrong with the request.
        """
        if "uploads" not in query and "uploadId" not in query:
            return False
        self._auth.require_write(identity, bucket, key or query.get("prefix", ""))
        method, upload_id = request.method, query.get("uploadId", "")
        if not key:
            if method != b"GET" or "uploads" not in query:
                return False
            asked = parse_uploads(query)
            exchange.spawn(self._list_uploads(exchange, bucket.name, asked))
            return True
        check_key(key)
        if method == b"POST" and "uploads" in query:
            exchange.spawn(self._create(request, exchange, create_call(request, bucket, key)))
        elif "uploadId" not in query:
            return False
        elif method == b"PUT":
            self._part(request, exchange, identity, bucket.name, key, query)
        elif method == b"POST":
            exchange.spawn(self._complete(request, exchange, bucket.name, key, upload_id))
        elif method == b"DELETE":
            exchange.spawn(self._abort(request, exchange, UploadNamed(bucket.name, key, upload_id)))
        elif method == b"GET":
            exchange.spawn(self._list_parts(exchange, _parts_call(bucket.name, key, query), query))
        else:
            return False
        return True

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None if the request is not about uploads. Raises to refuse it before it
        is sent."""
        if "uploads" not in query and "uploadId" not in query:
            return None
        self._auth.require_write(caller.identity, bucket, key)
        if request.method == b"PUT" and "uploadId" in query and key:
            check_key(key)
            part_number(query.get("partNumber", ""), query["uploadId"])
            refuse_unserved(request)
            if _SOURCE not in request.headers:
                return self._intake.open(request, caller, bucket, key, md5=True)
        names_parts = request.method == b"POST" and "uploadId" in query
        bytes_max = limits.XML_BODY_BYTES_MAX if names_parts else limits.SETTING_BYTES_MAX
        return self._intake.document(_without_checksums(request), caller, bytes_max)

    # --- create, abort -----------------------------------------------------------------------------------------------
    async def _create(self, request: Request, exchange: Exchange, call: UploadCreateCall) -> None:
        made: UploadState = await self._puts.finish(self._call("upload_create", call))
        head = b""
        if made.checksum_algorithm:
            head = (
                f"x-amz-checksum-algorithm: {made.checksum_algorithm}\r\nx-amz-checksum-type: {made.checksum_type}\r\n"
            ).encode()
        inner = element("Bucket", made.bucket) + element("Key", made.key) + element("UploadId", made.upload_id)
        exchange.respond(
            200, self._lines(request) + CONTENT_TYPE + head, document("InitiateMultipartUploadResult", inner)
        )

    async def _abort(self, request: Request, exchange: Exchange, call: UploadNamed) -> None:
        await self._puts.finish(self._call("upload_abort", call))
        exchange.respond(204, self._lines(request))

    # --- parts -------------------------------------------------------------------------------------------------------
    def _part(
        self,
        request: Request,
        exchange: Exchange,
        identity: Identity,
        bucket: str,
        key: str,
        query: dict[str, str],
    ) -> None:
        upload_id = query["uploadId"]
        number = part_number(query.get("partNumber", ""), upload_id)
        if _SOURCE in request.headers:
            exchange.spawn(
                self._part_copy(request, exchange, self._copy_call(request, identity, bucket, key, upload_id, number))
            )
            return
        assert isinstance(request.sink, Incoming)
        taking = self._puts.finish(send_part(self._call, bucket, key, upload_id, number, request.sink))
        exchange.spawn(self._part_taken(request, exchange, taking))

    async def _part_taken(self, request: Request, exchange: Exchange, taking: asyncio.Future[PartState]) -> None:
        state = await taking
        head = f'ETag: "{state.etag}"\r\n' + "".join(
            f"{HEADERS[name]}: {value}\r\n" for name, value in state.checksums.items()
        )
        exchange.respond(200, self._lines(request) + head.encode())

    def _copy_call(
        self, request: Request, identity: Identity, bucket: str, key: str, upload_id: str, number: int
    ) -> UploadPartCopyCall:
        if request.body:
            raise Invalid("a copy takes no body: leave it out", code="InvalidRequest")
        source_bucket, source_key, version_id = copy_source(request)
        self._auth.require_read(identity, self._find(source_bucket), source_key)
        if version_id:
            of, source_key = versioned(self._find(source_bucket), source_key, version_id)
            source_bucket = of.name
        start, end = _copy_range(request)
        return UploadPartCopyCall(
            bucket, key, upload_id, number, source_bucket, source_key, start, end, *source_conditions(request)
        )

    async def _part_copy(self, request: Request, exchange: Exchange, call: UploadPartCopyCall) -> None:
        state: PartState = await self._puts.finish(self._call("upload_part_copy", call))
        inner = element("LastModified", timestamp(state.modified_s)) + element("ETag", f'"{state.etag}"')
        exchange.respond(
            200, self._lines(request) + CONTENT_TYPE, document("CopyPartResult", inner + _checksums(state.checksums))
        )

    # --- complete ----------------------------------------------------------------------------------------------------
    async def _complete(self, request: Request, exchange: Exchange, bucket: str, key: str, upload_id: str) -> None:
        conditions = write_conditions(request)
        size = request.header(b"x-amz-mp-object-size")
        if size and not (_SIZE.fullmatch(size) and int(size) <= limits.OBJECT_BYTES_MAX):
            raise Invalid("x-amz-mp-object-size is not the size of an object in bytes", code="InvalidRequest")
        call = UploadCompleteCall(
            bucket,
            key,
            upload_id,
            await read(request.body, parse_parts),
            conditions.if_match,
            conditions.if_none_match,
            _promised(request.headers),
            int(size) if size else None,
        )
        done: UploadCompleted = await self._puts.finish(self._call("upload_complete", call))
        host = request.header(b"host")
        location = f"{'https' if request.secure else 'http'}://{host}/{call.bucket}/{quote(call.key, safe='/~')}"
        inner = (
            element("Location", location)
            + element("Bucket", call.bucket)
            + element("Key", call.key)
            + element("ETag", f'"{done.written.etag}"')
            + _checksums(done.checksums)
        )
        if done.checksum_type:
            inner += element("ChecksumType", done.checksum_type)
        exchange.respond(200, self._lines(request) + CONTENT_TYPE, document("CompleteMultipartUploadResult", inner))

    # --- listings ----------------------------------------------------------------------------------------------------
    async def _list_parts(self, exchange: Exchange, call: UploadPartsCall, query: dict[str, str]) -> None:
        found: UploadParts = await self._call("upload_parts", call)
        name = _url_text if query.get("encoding-type") == "url" else escape
        upload = found.upload
        inner = [
            element("Bucket", call.bucket),
            f"<Key>{name(call.key)}</Key>",
            element("UploadId", call.upload_id),
            _INITIATOR,
            OWNER,
            element("StorageClass", "STANDARD"),
            element("PartNumberMarker", str(call.after)),
        ]
        if found.more:
            inner.append(element("NextPartNumberMarker", str(found.parts[-1].number if found.parts else call.after)))
        inner += [
            element("MaxParts", str(call.limit)),
            element("IsTruncated", "true" if found.more else "false"),
            _algorithm(upload),
        ]
        for part in found.parts:
            said = (
                element("PartNumber", str(part.number))
                + element("LastModified", timestamp(part.modified_s))
                + element("ETag", f'"{part.etag}"')
                + element("Size", str(part.size_bytes))
                + _checksums(part.checksums)
            )
            inner.append(f"<Part>{said}</Part>")
        exchange.respond(200, self._lines(exchange.request) + CONTENT_TYPE, document("ListPartsResult", "".join(inner)))

    async def _list_uploads(self, exchange: Exchange, bucket: str, asked: UploadsRequest) -> None:
        page = await fetch_uploads(self._call, bucket, asked)
        exchange.respond(200, self._lines(exchange.request) + CONTENT_TYPE, render_uploads(bucket, asked, page))


# --- listing uploads -------------------------------------------------------------------------------------------------
class UploadsRequest(NamedTuple):
    """A ListMultipartUploads request, parsed."""

    prefix: str
    delimiter: str
    key_marker: str
    id_marker: str
    limit: int
    url_encoded: bool


class UploadsPage(NamedTuple):
    """One page, and where the next begins: ("", "") on the last."""

    uploads: list[UploadState]
    prefixes: list[str]
    next_key: str = ""
    next_id: str = ""


def parse_uploads(query: dict[str, str]) -> UploadsRequest:
    """The request that a bucket GET's parameters make; `Invalid` (`InvalidArgument`)."""
    _check_encoding(query)
    key_marker = query.get("key-marker", "")
    return UploadsRequest(
        query.get("prefix", ""),
        query.get("delimiter", ""),
        key_marker,
        query.get("upload-id-marker", "") if key_marker else "",
        _bounded(query, "max-uploads"),
        query.get("encoding-type") == "url",
    )


async def fetch_uploads(call: Call, bucket: str, asked: UploadsRequest) -> UploadsPage:
    """The page that `asked` wants. Uploads and common prefixes together are at most its limit."""
    page = UploadsPage([], [])
    after_key, after_id = asked.key_marker, asked.id_marker
    if not after_id:
        after_key = start_of_marker(after_key, asked.prefix, asked.delimiter)
    marker = (asked.key_marker, asked.id_marker)
    more = bool(asked.limit)
    while more:
        found: Uploads = await call("uploads", UploadsCall(bucket, asked.prefix, after_key, after_id))
        more = found.more
        for upload in found.uploads:
            cut = upload.key.find(asked.delimiter, len(asked.prefix)) if asked.delimiter else -1
            group = upload.key[: cut + len(asked.delimiter)] if cut >= 0 else ""
            if group and page.prefixes and page.prefixes[-1] == group:
                continue
            if len(page.uploads) + len(page.prefixes) == asked.limit:
                return page._replace(next_key=marker[0], next_id=marker[1])
            if group:
                page.prefixes.append(group)
                marker = (group, "")
            else:
                page.uploads.append(upload)
                marker = (upload.key, upload.upload_id)
        after_key, after_id = (after_prefix(marker[0]), "") if not marker[1] else marker
    return page


def render_uploads(bucket: str, asked: UploadsRequest, page: UploadsPage) -> bytes:
    """The XML of a page."""
    name = _url_text if asked.url_encoded else escape
    inner = [
        element("Bucket", bucket),
        f"<KeyMarker>{name(asked.key_marker)}</KeyMarker>",
        element("UploadIdMarker", asked.id_marker),
    ]
    if page.next_key:
        inner.append(f"<NextKeyMarker>{name(page.next_key)}</NextKeyMarker>")
        inner.append(element("NextUploadIdMarker", page.next_id))
    inner.append(f"<Prefix>{name(asked.prefix)}</Prefix>")
    if asked.delimiter:
        inner.append(f"<Delimiter>{name(asked.delimiter)}</Delimiter>")
    if asked.url_encoded:
        inner.append("<EncodingType>url</EncodingType>")
    inner.append(element("MaxUploads", str(asked.limit)))
    inner.append(element("IsTruncated", "true" if page.next_key else "false"))
    for upload in page.uploads:
        said = (
            f"<Key>{name(upload.key)}</Key>"
            + element("UploadId", upload.upload_id)
            + _INITIATOR
            + OWNER
            + element("StorageClass", "STANDARD")
            + element("Initiated", timestamp(upload.created_s))
            + _algorithm(upload)
        )
        inner.append(f"<Upload>{said}</Upload>")
    inner += [f"<CommonPrefixes><Prefix>{name(text)}</Prefix></CommonPrefixes>" for text in page.prefixes]
    return document("ListMultipartUploadsResult", "".join(inner))


# --- parsing ---------------------------------------------------------------------------------------------------------
def parse_parts(body: bytes) -> list[AskedPart]:
    """The parts that a CompleteMultipartUpload document names. `Invalid` (`MalformedXML`)."""
    root = parse(body, "CompleteMultipartUpload", ELEMENTS_MAX)
    asked: list[AskedPart] = []
    for part in root:
        if part.tag != "Part":
            raise malformed(f"it holds a {part.tag}, where only Part may be")
        number = (part.findtext("PartNumber") or "").strip()
        etag = part.findtext("ETag")
        if not _NUMBER.fullmatch(number) or etag is None:
            raise malformed("each Part needs a PartNumber and an ETag")
        given = {_ELEMENTS[child.tag]: (child.text or "").strip() for child in part if child.tag in _ELEMENTS}
        asked.append((int(number), etag.strip().strip('"') or "-", given))
    if not 1 <= len(asked) <= limits.PARTS_MAX:
        raise malformed(f"it names {len(asked)} parts, where 1 to {limits.PARTS_MAX} are allowed")
    return asked


def _parts_call(bucket: str, key: str, query: dict[str, str]) -> UploadPartsCall:
    _check_encoding(query)
    after = query.get("part-number-marker") or "0"
    if not _NUMBER.fullmatch(after) or int(after) > _INT32_MAX:
        raise Invalid("part-number-marker must be a whole number", code="InvalidArgument")
    return UploadPartsCall(bucket, key, query["uploadId"], int(after), _bounded(query, "max-parts"))


def _bounded(query: dict[str, str], name: str) -> int:
    text = query.get(name)
    if not text:
        return limits.LIST_KEYS_MAX
    if not _NUMBER.fullmatch(text) or int(text) > _INT32_MAX:
        raise Invalid(f"{name} must be a whole number from 0 to {_INT32_MAX}", code="InvalidArgument")
    return min(int(text), limits.LIST_KEYS_MAX)


def _check_encoding(query: dict[str, str]) -> None:
    if query.get("encoding-type", "url") != "url":
        raise Invalid("Invalid Encoding Method specified in Request: only url is known", code="InvalidArgument")


def _copy_range(request: Request) -> tuple[int | None, int | None]:
    """The half-open range of the source, (None, None) for all of it."""
    text = request.header(b"x-amz-copy-source-range")
    if not text:
        return None, None
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise Invalid(
            "The x-amz-copy-source-range value must be of the form bytes=first-last where first and last are the "
            "zero-based offsets of the first and last bytes to copy",
            code="InvalidArgument",
        )
    return int(match[1]), int(match[2]) + 1


def _promised(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The checksums that the headers of a Complete promise of the object."""
    found = {}
    for name, value in headers.items():
        if name.startswith(_CHECKSUM_PREFIX) and name not in _NO_VALUES:
            found[name[len(_CHECKSUM_PREFIX) :].decode("latin-1").upper()] = value.decode("latin-1").strip()
    return found


def _without_checksums(request: Request) -> Request:
    """The request as far as its body is concerned, where checksums in the headers mean the object."""
    if request.method != b"POST":
        return request
    headers = {
        name: value
        for name, value in request.headers.items()
        if not name.startswith((_CHECKSUM_PREFIX, b"x-amz-sdk-checksum-"))
    }
    return Request(
        request.method,
        request.target,
        request.path,
        request.query,
        headers,
        request.peer,
        request.secure,
        request.started_s,
    )


# --- XML -------------------------------------------------------------------------------------------------------------
def _checksums(checksums: dict[str, str]) -> str:
    return "".join(element(f"Checksum{name}", value) for name, value in checksums.items())


def _algorithm(upload: UploadState) -> str:
    if not upload.checksum_algorithm:
        return ""
    return element("ChecksumAlgorithm", upload.checksum_algorithm) + element("ChecksumType", upload.checksum_type)


def _url_text(text: str) -> str:
    return quote(text, safe="/-_.~*")
