"""Bytes to an object: in one request where they fit, else as a multipart upload of the node's S3 side.

Theory. What is in memory or in a file has a size, and up to PUT_BYTES_MAX it is one PUT of the native API: the file's
bytes go from the page cache to the socket. What comes from a pipe has none, and HTTP wants one: it is gathered a part
at a time, and if the first part was all, that is one PUT too. Everything else is an upload in parts, made visible whole
by its last request; if anything fails, or Ctrl-C comes, it is aborted, so that nothing is left at the node.

Parts grow as an upload goes on, since there may be only PARTS_MAX of them and nobody knows how many it takes.

Invariants. (1) After an error the object is what it was. (2) At most one part of a stream is in memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import IO, Any, NamedTuple
from urllib.parse import quote

from forebay.client import flows
from forebay.client.http1 import Request, Response, Source, encode_path
from forebay.core import limits
from forebay.core.errors import KINDS, Bug, Busy, Corrupt, Denied, ForebayError, Invalid, NotFound
from forebay.core.messages.calls import Written

STREAM_PART_BYTES = 16 * limits.MIB  # of a stream, in memory; doubles every PARTS_PER_SIZE parts
FILE_PART_BYTES = 64 * limits.MIB
PARTS_PER_SIZE = 1000
_UPLOAD_ID = re.compile(r"<UploadId>([^<]+)</UploadId>").search
_ETAG = re.compile(r"<ETag>([^<]+)</ETag>").search
_CODE = re.compile(r"<Code>([^<]+)</Code>").search
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>").search
_KINDS = {"NoSuchKey": NotFound, "NoSuchBucket": NotFound, "AccessDenied": Denied, "SlowDown": Busy}

Data = bytes | bytearray | memoryview | str | os.PathLike[str] | IO[bytes]


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _unescape(text: str) -> str:
    for name, sign in (("lt", "<"), ("gt", ">"), ("quot", '"'), ("#34", '"'), ("apos", "'"), ("amp", "&")):
        text = text.replace(f"&{name};", sign)
    return text


class Plan(NamedTuple):
    """What an object is to be but for its bytes. Conditions: an ETag that must be the object's now, or that there must
    be none (`only_new`)."""

    headers: tuple[tuple[str, str], ...] = ()
    if_match: str = ""
    only_new: bool = False

    @classmethod
    def of(cls, content_type: str, metadata: Mapping[str, str] | None, etag: str, only_new: bool) -> Plan:
        """The plan that a client's `put` was given."""
        headers = [("Content-Type", content_type)] if content_type else []
        headers += [(f"x-amz-meta-{name}", value) for name, value in (metadata or {}).items()]
        return cls(tuple(headers), etag, only_new)

    def all_headers(self) -> tuple[tuple[str, str], ...]:
        conditions = [("If-Match", f'"{self.if_match}"')] if self.if_match else []
        conditions += [("If-None-Match", "*")] if self.only_new else []
        return (*self.headers, *conditions)


def put_file(
    bucket: str,
    key: str,
    fd: int,
    size_bytes: int,
    plan: Plan,
    progress: Callable[[int], None] | None = None,
    part_bytes: int = FILE_PART_BYTES,
    whole_bytes_max: int = limits.PUT_BYTES_MAX,
) -> flows.Flow[Written]:
    """The first `size_bytes` of `fd` to the object."""
    if size_bytes <= whole_bytes_max:
        source = Source(fd, 0, size_bytes, progress)
        return (yield from flows.put(bucket, key, plan.all_headers(), source=source))
    if size_bytes > limits.OBJECT_BYTES_MAX:
        raise Invalid(
            f"{size_bytes} bytes are more than an object may have ({limits.OBJECT_BYTES_MAX}): split the file"
        )
    part_bytes = max(part_bytes, -(-size_bytes // limits.PARTS_MAX))

    def parts() -> Iterator[tuple[bytes, Source | None]]:
        for offset in range(0, size_bytes, part_bytes):
            yield b"", Source(fd, offset, min(part_bytes, size_bytes - offset), progress)

    return (yield from _in_parts(bucket, key, plan, parts()))


def put_stream(
    bucket: str,
    key: str,
    stream: IO[bytes],
    plan: Plan,
    progress: Callable[[int], None] | None = None,
    part_bytes: int = STREAM_PART_BYTES,
) -> flows.Flow[Written]:
    """All that `stream` still gives to the object. Reads from it block."""
    first = _fill(stream, part_bytes)
    if len(first) < part_bytes:
        written = yield from flows.put(bucket, key, plan.all_headers(), body=first)
        if progress is not None:
            progress(len(first))
        return written

    def parts() -> Iterator[tuple[bytes, Source | None]]:
        data, number = first, 0
        while data:
            yield data, None
            if progress is not None:
                progress(len(data))
            number += 1
            data = _fill(stream, part_bytes << number // PARTS_PER_SIZE)

    return (yield from _in_parts(bucket, key, plan, parts()))


def put_data(
    bucket: str, key: str, data: Data, plan: Plan, progress: Callable[[int], None] | None = None
) -> flows.Flow[Written]:
    """Bytes, the file at a path, or what an open binary file still gives, to the object."""
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        if len(view) <= limits.PUT_BYTES_MAX:
            written = yield from flows.put(bucket, key, plan.all_headers(), body=view)
            if progress is not None:
                progress(len(view))
            return written
        return (yield from put_stream(bucket, key, io.BytesIO(view), plan, progress, FILE_PART_BYTES))
    if isinstance(data, str | os.PathLike):
        with open(data, "rb", buffering=0) as file:
            return (yield from _put_open(bucket, key, file, plan, progress))
    return (yield from put_stream(bucket, key, data, plan, progress))


def _put_open(
    bucket: str, key: str, file: io.FileIO, plan: Plan, progress: Callable[[int], None] | None
) -> flows.Flow[Written]:
    at = os.fstat(file.fileno())
    if not stat.S_ISREG(at.st_mode):
        return (yield from put_stream(bucket, key, file, plan, progress))
    return (yield from put_file(bucket, key, file.fileno(), at.st_size, plan, progress))


def _fill(stream: IO[bytes], size_bytes: int) -> bytes:
    pieces = []
    while size_bytes:
        piece = stream.read(size_bytes)
        if not piece:
            break
        pieces.append(piece)
        size_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _in_parts(
    bucket: str, key: str, plan: Plan, parts: Iterator[tuple[bytes, Source | None]]
) -> Generator[Request, Response, Written]:
    """A multipart upload, aborted if anything fails on the way."""
    target = encode_path(bucket, key)
    answer = yield from _ask(Request("POST", f"{target}?uploads=", plan.headers), bucket, key)
    found = _UPLOAD_ID(answer)
    if found is None:
        raise Corrupt("the answer names no upload: check that a Forebay node answers at this URL")
    upload = f"uploadId={quote(_unescape(found[1]), safe='')}"
    try:
        done, size_bytes = [], 0
        for number, (body, source) in enumerate(parts, 1):
            if number > limits.PARTS_MAX:
                raise Invalid(f"the stream is longer than {limits.PARTS_MAX} parts hold: write it to a file first")
            request = Request("PUT", f"{target}?partNumber={number}&{upload}", (), body, None, source)
            response = yield request
            if not response.ok:
                raise _raised(response, f"part {number} of {bucket}/{key}")
            done.append((number, response.headers.get("etag", "")))
            size_bytes += request.body_bytes
        rows = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{_escape(etag)}</ETag></Part>" for n, etag in done)
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        conditions = tuple(pair for pair in plan.all_headers() if pair not in plan.headers)
        answer = yield from _ask(Request("POST", f"{target}?{upload}", conditions, body), bucket, key)
    except GeneratorExit:
        raise
    except BaseException:
        with contextlib.suppress(ForebayError):  # uploads that are left end by themselves, after days
            yield Request("DELETE", f"{target}?{upload}")
        raise
    etag = _ETAG(answer)
    if etag is None:  # a completion that fails late says 200 and an error
        raise _raised(Response(500, {}, answer.encode()), f"{bucket}/{key}")
    return Written(_unescape(etag[1]).strip('"'), "", size_bytes, 0.0)  # who may write may not be one who may ask


def _ask(request: Request, bucket: str, key: str) -> flows.Flow[str]:
    response = yield request
    if not response.ok:
        raise _raised(response, f"{bucket}/{key}")
    return response.body.decode("utf-8", "replace")


def _raised(response: Response, what: str) -> ForebayError:
    """The error that S3's side of the node answered."""
    text = response.body.decode("utf-8", "replace")
    code, message = _CODE(text), _MESSAGE(text)
    if code is None:
        return flows.raised(response, what)
    kind: Any = _KINDS.get(code[1]) or flows.kind_of(response.status) or KINDS.get(code[1], Bug)
    said = _unescape(message[1]) if message else code[1]
    hint = "; an upload in parts is signed with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if kind is Denied else ""
    error: ForebayError = kind(f"{what}: {said}{hint}", code=code[1])
    return error
