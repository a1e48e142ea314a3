"""Writes to S3, to compatible services, and to Google's XML API (the same protocol with some other names).

Theory. Each method of the seam is one request of our own (`http/requests.py`), because obstore does not offer what
matters here: conditional deletes, ids of uploads, tokens of parts, unchanged user metadata. Bodies are not hashed for
the signature, which would read them twice; small ones in memory are. Every body with a known MD5 sends it, so the
service checks what it got.

A failed condition is a 412, but at Amazon If-Match for a missing object is a 404. Both become `Precondition`. Amazon
answers 409 when two conditional writes met. One of them should try again, so that becomes `Unavailable`. A completion
or a copy may answer 200 and report its failure in the body: the body counts.

Invariants. (1) One request per method, except for the HEAD that describes a completed upload or a copy, and pages of
lists. (2) Nothing is retried here. (3) A header that cannot be stored is an error, never dropped. (4) No error of that
HEAD leaves as one of the write, which was done: whoever hears "not done" does it again, over what others did since.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from forebay.backends import errors
from forebay.backends.http.requests import CONTENT_HEADERS, Answer, Wire, bare_etag, is_condition, version_of
from forebay.backends.s3 import tags as s3tags
from forebay.backends.s3.contents import parse_time
from forebay.backends.s3.listing import parse
from forebay.backends.seam import Body, PartSeen, UploadSeen
from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.s3rules.keeping import (
    ENCRYPTION,
    KMS_KEY,
    NAMES,
    STANDARD,
    STORAGE_CLASS,
    keeping_among,
    kept_as,
    without_keeping,
)
from forebay.core.types import Headers, ObjectInfo

HASHED_BYTES_MAX = 64 * limits.KIB  # a body in memory up to here is signed: 50 us; TLS guards the others
META = "x-amz-meta-"
UPLOADS_LISTED_MAX = 1000
PARTS_PAGE = 1000


class Dialect(NamedTuple):
    """What Amazon and Google name differently. `names`: how extension headers begin."""

    names: str = "x-amz-"
    has_tags: bool = True
    keeping: tuple[str, ...] = NAMES  # what can be said of how an object is kept
    signs_payload: bool = True


AMAZON = Dialect()
GOOGLE = Dialect("x-goog-", has_tags=False, keeping=(STORAGE_CLASS,), signs_payload=False)


class S3Writes:
    """The writing half of a bucket. Keys are those of the bucket behind, prefix included."""

    part_bytes_min = limits.PART_BYTES_MIN

    def __init__(self, wire: Wire, dialect: Dialect = AMAZON, *, looks: bool = False, keeping: Headers = ()) -> None:
        """`looks`: the service knows no conditions; look at the object before, which others may slip in behind.
        `keeping`: how objects are kept of which their own headers do not say it."""
        self._wire, self._dialect, self._looks, self._keeping = wire, dialect, looks, keeping

    async def put(self, key: str, body: Body, headers: Headers, expect: str | None, tags: str) -> ObjectInfo:
        """See `Backend.put`."""
        what = self._what(key)
        check_size(body.size_bytes, what)
        sent = {**self._stored(headers, tags, what), **self._payload(body), **await self._condition(key, expect)}
        answer = await self._wire.tell("PUT", key, headers=sent, body=body)
        if answer.status != 200:
            raise refused(answer, what, expect)
        if not answer.headers.get("etag"):
            return await self._made(key, "", answer)
        return described(key, body.size_bytes, answer, _said(answer, headers, sent))

    async def delete(self, key: str, expect: str | None) -> None:
        """See `Backend.delete`."""
        condition = await self._condition(key, expect)
        answer = await self._wire.tell("DELETE", key, headers=condition)
        if answer.status in (200, 202, 204):
            return
        failed = refused(answer, self._what(key), expect)
        if not (isinstance(failed, NotFound) and failed.code == "NoSuchKey"):
            raise failed

    async def copy(self, source_key: str, key: str, source_version: str, headers: Headers | None) -> ObjectInfo:
        """See `Backend.copy`."""
        names, what = self._dialect.names, self._what(key)
        bucket = self._wire.bucket
        sent = {f"{names}copy-source": quote(f"/{bucket}/{source_key}", safe="/-_.~")}
        if source_version:
            if not is_condition(source_version):
                raise NotSupported(f"{what}: the source has no version that can be a condition: read it and put it")
            sent[f"{names}copy-source-if-match"] = source_version
        if headers is not None:
            sent |= {f"{names}metadata-directive": "REPLACE"}
        sent |= self._stored(headers or (), "", what)
        answer = await self._wire.tell("PUT", key, headers=sent)
        if answer.status == 400 and b"maximum allowable size for a copy source" in answer.body:
            raise NotSupported(f"{what}: the source is too large for one copy: read it and upload it in parts")
        if answer.status != 200:
            raise refused(answer, self._what(source_key), source_version or None)
        root = self._result(answer, "CopyObjectResult", what)
        return await self._made(key, bare_etag(root.findtext("{*}ETag") or ""), answer)

    async def read_tags(self, key: str) -> str:
        """See `Backend.read_tags`."""
        if not self._dialect.has_tags:
            return ""
        answer = await s3tags.ask_tags(self._wire, key, s3tags.AMAZON)
        if answer.status != 200:
            raise refused(answer, self._what(key), None)
        return s3tags.tags_in(answer, self._what(key), s3tags.AMAZON)

    async def write_tags(self, key: str, tags: str) -> None:
        """See `Backend.write_tags`."""
        if not self._dialect.has_tags:
            raise NotSupported(f"{self._what(key)}: this service has no tags on objects: use user metadata")
        answer = await s3tags.tell_tags(self._wire, key, tags, s3tags.AMAZON, {})
        if answer.status not in (200, 204):
            raise refused(answer, self._what(key), None)

    # --- uploads -----------------------------------------------------------------------------------------------------
    async def begin_upload(self, key: str, headers: Headers, tags: str) -> str:
        """See `Backend.begin_upload`."""
        what = self._what(key)
        answer = await self._wire.tell("POST", key, query=[("uploads", "")], headers=self._stored(headers, tags, what))
        if answer.status != 200:
            raise refused(answer, what, None)
        root = self._result(answer, "InitiateMultipartUploadResult", what)
        upload_id = root.findtext("{*}UploadId") or ""
        if not upload_id:
            raise Unavailable(f"{what}: the answer names no upload: check the endpoint")
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """See `Backend.put_part`."""
        what = self._what(key)
        check_size(body.size_bytes, what)
        query = [("partNumber", str(number)), ("uploadId", upload_id)]
        answer = await self._wire.tell("PUT", key, query=query, headers=self._payload(body), body=body)
        if answer.status != 200:
            raise upload_refused(answer, what)
        etag = answer.headers.get("etag", "")
        if not etag:
            raise Unavailable(f"{what}: the answer to part {number} has no ETag: send it again")
        return etag

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], expect: str | None
    ) -> ObjectInfo:
        """See `Backend.complete_upload`."""
        what = self._what(key)
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(token)}</ETag></Part>" for number, token in parts
        )
        data = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        body = Body(len(data), data)
        sent = {"content-type": "application/xml", **self._payload(body), **await self._condition(key, expect)}
        answer = await self._wire.tell("POST", key, query=[("uploadId", upload_id)], headers=sent, body=body)
        if answer.status != 200:
            raise upload_refused(answer, what, expect)
        root = self._result(answer, "CompleteMultipartUploadResult", what)
        return await self._made(key, bare_etag(root.findtext("{*}ETag") or ""), answer)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Backend.abort_upload`."""
        answer = await self._wire.tell("DELETE", key, query=[("uploadId", upload_id)])
        if answer.status not in (200, 202, 204, 404):
            raise refused(answer, self._what(key), None)

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        """See `Backend.list_parts`."""
        return await self._wire.run(functools.partial(self._list_parts, key, upload_id))

    def _list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        found: dict[int, PartSeen] = {}
        replaced: set[int] = set()
        marker = 0
        while True:
            query = [("uploadId", upload_id), ("max-parts", str(PARTS_PAGE)), ("part-number-marker", str(marker))]
            answer = self._wire.ask(query, key=key)
            if answer.status != 200:
                raise upload_refused(answer, self._what(key))
            root = self._result(answer, "ListPartsResult", self._what(key))
            before = marker
            for item in root.iterfind("{*}Part"):
                number, size = int(item.findtext("{*}PartNumber") or 0), int(item.findtext("{*}Size") or 0)
                seen = PartSeen(number, item.findtext("{*}ETag") or "", size)
                if found.setdefault(number, seen) != seen:
                    replaced.add(number)  # SeaweedFS lists both, and which one is the newer is not said
                marker = max(marker, number)
            if (root.findtext("{*}IsTruncated") or "").strip().lower() != "true" or marker == before:
                return [found[number] for number in sorted(found) if number not in replaced]

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        """See `Backend.list_uploads`."""
        return await self._wire.run(functools.partial(self._list_uploads, prefix))

    def _list_uploads(self, prefix: str) -> list[UploadSeen]:
        query = [
            ("uploads", ""),
            ("prefix", prefix),
            ("max-uploads", str(UPLOADS_LISTED_MAX)),
            ("encoding-type", "url"),
        ]
        answer = self._wire.ask(query)
        root = parse(answer, self._wire.url, "ListMultipartUploadsResult")
        decode = unquote_plus if root.findtext("{*}EncodingType") == "url" else str
        found = []
        for item in root.iterfind("{*}Upload"):
            key, upload_id = decode(item.findtext("{*}Key") or ""), item.findtext("{*}UploadId") or ""
            if key.startswith(prefix):
                found.append(UploadSeen(key, upload_id, parse_time(item.findtext("{*}Initiated") or "")))
        return found[:UPLOADS_LISTED_MAX]

    def close(self) -> None:
        """Holds nothing of its own."""

    # --- what requests share -----------------------------------------------------------------------------------------
    def _what(self, key: str) -> str:
        return f"{self._wire.url}/{key}"

    def _stored(self, headers: Headers, tags: str, what: str) -> dict[str, str]:
        """The stored headers and tags as this service takes them."""
        names = self._dialect.names
        sent = stored_headers(headers, f"{names}meta-", what)
        for name, value in keeping_sent(self._keeping, headers, self._dialect.keeping, what):
            sent[names + name.removeprefix("x-amz-")] = value
        if tags:
            if not self._dialect.has_tags:
                raise NotSupported(f"{what}: this service has no tags on objects: leave them out, or use user metadata")
            sent[f"{names}tagging"] = tags
        return sent

    def _payload(self, body: Body) -> dict[str, str]:
        return payload_signed(body) if self._dialect.signs_payload else {}

    async def _condition(self, key: str, expect: str | None) -> dict[str, str]:
        if expect is None:
            return {}
        if self._looks:
            try:
                now = (await self._look(key)).version
            except NotFound:
                now = ""
            if now != expect:
                raise errors.changed(self._what(key)) if expect else errors.exists(self._what(key))
            return {}
        if expect == "":
            return {"if-none-match": "*"}
        return {"if-match": checked_condition(expect, self._what(key))}

    async def _made(self, key: str, etag: str, answer: Answer) -> ObjectInfo:
        """The object that a request made. Somebody may have replaced or deleted it since, or the service may not say
        more of it now: then it is what was asked for all the same, though its size is not known."""
        try:
            info = await self._look(key)
        except ForebayError as error:
            if not etag and not isinstance(error, NotFound):
                raise errors.not_described(error, self._what(key)) from error
            info = described(key, 0, answer, ())
        if etag in ("", info.etag):
            return info
        return ObjectInfo(key, info.size_bytes, f'"{etag}"', etag, info.modified_s)

    async def _look(self, key: str) -> ObjectInfo:
        opened = await self._wire.run(functools.partial(self._wire.open, key, None, "", head=True))
        await opened.aclose()
        return opened.info

    def _result(self, answer: Answer, wanted: str, what: str) -> ElementTree.Element:
        """The document of an answer that says 200; it may hold an error all the same."""
        try:
            root = ElementTree.fromstring(answer.body)
        except ElementTree.ParseError as error:
            raise Unavailable(f"{what}: the answer is not XML ({error}): check the endpoint") from error
        name = root.tag.rpartition("}")[2]
        if name == "Error":
            code = root.findtext("{*}Code") or root.findtext("Code") or ""
            statuses = {"InternalError": 500, "SlowDown": 503, "PreconditionFailed": 412, "NoSuchUpload": 404}
            raise upload_refused(answer._replace(status=statuses.get(code, 400)), what)
        if name != wanted:
            raise Unavailable(f"{what}: the answer is a {name}, not a {wanted}: check the endpoint")
        return root


# --- shared with other services --------------------------------------------------------------------------------------
def check_size(size_bytes: int, what: str) -> None:
    """`Invalid` (`EntityTooLarge`) for more than one request may carry."""
    if size_bytes > limits.PUT_BYTES_MAX:
        raise Invalid(
            f"{what}: {size_bytes} bytes are too many for one request: upload it in parts of at most "
            f"{limits.PUT_BYTES_MAX} bytes",
            code="EntityTooLarge",
        )


def checked_condition(expect: str, what: str) -> str:
    """`expect` if it can be sent as a condition."""
    if not is_condition(expect):
        raise NotSupported(f"{what}: version {expect!r} cannot be a condition: write without one")
    return expect


def stored_headers(headers: Headers, meta: str, what: str) -> dict[str, str]:
    """Content headers as they are, and user metadata under names that begin with `meta`; `Invalid` for others."""
    sent = {}
    for name, value in headers:
        if name in CONTENT_HEADERS:
            sent[name] = value
        elif name.startswith(META):
            sent[meta + name.removeprefix(META)] = value
        elif name not in NAMES:
            raise Invalid(f"{what}: header {name!r} cannot be stored: use x-amz-meta-… for your own")
    return sent


def keeping_sent(keeping: Headers, headers: Headers, known: tuple[str, ...], what: str) -> Headers:
    """How to keep an object with these stored headers, where `keeping` holds for what they do not say. `NotSupported`
    for what is not among the `known`."""
    sent = kept_as(keeping, keeping_among(headers))
    for name, _ in sent:
        if name not in known:
            raise NotSupported(f"{what}: this service takes no {name}: leave it out")
    return sent


def _said(answer: Answer, headers: Headers, sent: Mapping[str, str]) -> Headers:
    """The stored headers of an object that was put with `sent`: how it is encrypted the answer says."""
    encrypted = tuple((name, answer.headers[name]) for name in (ENCRYPTION, KMS_KEY) if name in answer.headers)
    kept = ((STORAGE_CLASS, sent[STORAGE_CLASS]),) if sent.get(STORAGE_CLASS, STANDARD) != STANDARD else ()
    return (*without_keeping(headers), *kept, *encrypted)


def payload_signed(body: Body) -> dict[str, str]:
    """What a signed request says of its body: a digest of a small one, nothing of a large one."""
    if body.data is not None and body.size_bytes <= HASHED_BYTES_MAX:
        return {"x-amz-content-sha256": hashlib.sha256(body.data).hexdigest()}
    return {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}


def refused(answer: Answer, what: str, expect: str | None) -> Exception:
    """The error that an answer to a write stands for. With a condition, what is gone is another version too."""
    text = answer.body.decode(errors="replace")
    failed = errors.from_status(answer.status, text, what, answer.headers, wrote=True)
    if isinstance(failed, NotFound) and expect and failed.code == "NoSuchKey":
        return errors.changed(what)
    if isinstance(failed, Precondition) and expect == "":
        return errors.exists(what)
    return failed


def upload_refused(answer: Answer, what: str, expect: str | None = None) -> Exception:
    """As `refused`, for requests that name an upload: what is not there is the upload."""
    if answer.status == 404 and b"NoSuchBucket" not in answer.body:
        return errors.no_such_upload(what)
    return refused(answer, what, expect)


def described(key: str, size_bytes: int, answer: Answer, headers: Headers) -> ObjectInfo:
    """The object that an answer to a put says it made; its time is the service's own."""
    date = answer.headers.get("last-modified") or answer.headers.get("date", "")
    try:
        modified_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        modified_s = 0.0
    etag = answer.headers.get("etag", "")
    return ObjectInfo(key, size_bytes, version_of(etag, modified_s, size_bytes), bare_etag(etag), modified_s, headers)
