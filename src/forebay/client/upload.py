"""Uploads bytes to an object: in one request where they fit, otherwise in parts.

Theory. Data in memory or in a file has a size, and up to PUT_BYTES_MAX it is one PUT: the file's bytes go from the page
cache to the socket. A pipe has no size, and HTTP wants one. So a stream is gathered a part at a time; if the first part
is all, it is one PUT too. Everything else is an upload in parts, which its last request makes visible as a whole.

Parts grow as an upload goes on, since there may be only PARTS_MAX of them and nobody knows how many it takes.

A file's upload can be resumed. The node keeps the parts of an upload that was cut off. The next attempt looks for an
open upload of the same key and headers in which every part has the size and MD5 of the file's bytes in that place. It
sends what is missing and completes. Nothing is remembered here, so this works after a crash, and on another machine.

Completing may outlast a request, and its answer may be lost. The node says 202 while it is at work and repeats its
answer for an hour. So the client asks again, and can tell a lost answer from an upload that was never completed.

Rejected: resuming an upload of which only some parts match (it may be another writer's); resuming a stream (it cannot
be read twice).

Invariants. (1) After an error the object is what it was, unless no answer to the last request came. (2) At most one
part of a stream is in memory. (3) After an error no upload is left at the node, unless it can be resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import IO, NamedTuple, TypeGuard

import msgspec

from forebay.client import flows
from forebay.client.connection import CUT
from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotFound, Unavailable
from forebay.core.messages.calls import PartState, UploadCompleted, UploadParts, Uploads, UploadState, Written
from forebay.core.messages.http1 import Request, Response, Source, encode_path, with_query
from forebay.core.messages.native import ChosenPart, Completion

STREAM_PART_BYTES = 16 * limits.MIB  # of a stream, in memory; doubles every PARTS_PER_SIZE parts
FILE_PART_BYTES = 64 * limits.MIB
PARTS_PER_SIZE = 1000
_PIECE_BYTES = 256 * limits.KIB

Data = bytes | bytearray | memoryview | str | os.PathLike[str] | IO[bytes]
Fields = tuple[tuple[str, str], ...]


class PutOptions(NamedTuple):
    """What an object is to be but for its bytes. Conditions: an ETag that must be the object's now, or that there must
    be none (`only_new`)."""

    headers: Fields = ()
    if_match: str = ""
    only_new: bool = False

    @classmethod
    def of(cls, content_type: str, metadata: Mapping[str, str] | None, etag: str, only_new: bool) -> PutOptions:
        """The options that a client's `put` was given."""
        headers = [("Content-Type", content_type)] if content_type else []
        headers += [(f"x-amz-meta-{name}", value) for name, value in (metadata or {}).items()]
        return cls(tuple(headers), etag, only_new)

    @property
    def conditions(self) -> Fields:
        conditions = [("If-Match", f'"{self.if_match}"')] if self.if_match else []
        conditions += [("If-None-Match", "*")] if self.only_new else []
        return tuple(conditions)

    def all_headers(self) -> Fields:
        return (*self.headers, *self.conditions)


def put_file(
    bucket: str,
    key: str,
    fd: int,
    size_bytes: int,
    options: PutOptions,
    progress: Callable[[int], None] | None = None,
    part_bytes: int = FILE_PART_BYTES,
    whole_bytes_max: int = limits.PUT_BYTES_MAX,
    *,
    resumable: bool = True,
) -> flows.Flow[Written]:
    """The first `size_bytes` of `fd` to the object. Of parts that an earlier attempt sent, `progress` hears too. Not
    `resumable`: nobody will put this file again."""
    if size_bytes <= whole_bytes_max:
        source = Source(fd, 0, size_bytes, progress)
        return (yield from flows.put(bucket, key, options.all_headers(), source=source))
    if size_bytes > limits.OBJECT_BYTES_MAX:
        raise Invalid(
            f"{size_bytes} bytes are more than an object may have ({limits.OBJECT_BYTES_MAX}): split the file"
        )
    part_bytes = max(part_bytes, -(-size_bytes // limits.PARTS_MAX))

    sent = (yield from _sent_before(bucket, key, options, fd, size_bytes, part_bytes)) if resumable else None
    there = frozenset(sent.etags) if sent is not None else frozenset()

    def pieces() -> Iterator[_Piece]:
        for number, offset in enumerate(range(0, size_bytes, part_bytes), 1):
            source = Source(fd, offset, min(part_bytes, size_bytes - offset), progress)
            if number in there and progress is not None:
                progress(source.size_bytes)
            yield _Piece(number, source=source)

    if sent is not None:
        try:
            return (yield from _in_parts(bucket, key, options, pieces(), sent, resumable=resumable))
        except NotFound as error:
            if error.code != "NoSuchUpload":
                raise
            there = frozenset()  # somebody ended it: perhaps its own client, which is alive after all
    return (yield from _in_parts(bucket, key, options, pieces(), resumable=resumable))


def put_stream(
    bucket: str,
    key: str,
    stream: IO[bytes],
    options: PutOptions,
    progress: Callable[[int], None] | None = None,
    part_bytes: int = STREAM_PART_BYTES,
) -> flows.Flow[Written]:
    """All that `stream` still gives to the object. Reads from it block."""
    first = _fill(stream, part_bytes)
    if len(first) < part_bytes:
        written = yield from flows.put(bucket, key, options.all_headers(), body=first)
        if progress is not None:
            progress(len(first))
        return written

    def pieces() -> Iterator[_Piece]:
        data, number = first, 1
        while data:
            yield _Piece(number, data)
            if progress is not None:
                progress(len(data))
            data = _fill(stream, part_bytes << number // PARTS_PER_SIZE)
            number += 1

    return (yield from _in_parts(bucket, key, options, pieces()))


def put_data(
    bucket: str, key: str, data: Data, options: PutOptions, progress: Callable[[int], None] | None = None
) -> flows.Flow[Written]:
    """Bytes, the file at a path, or what an open binary file still gives, to the object."""
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        if len(view) <= limits.PUT_BYTES_MAX:
            written = yield from flows.put(bucket, key, options.all_headers(), body=view)
            if progress is not None:
                progress(len(view))
            return written
        return (yield from put_stream(bucket, key, io.BytesIO(view), options, progress, FILE_PART_BYTES))
    if isinstance(data, str | os.PathLike):
        with open(data, "rb", buffering=0) as file:
            return (yield from _put_open(bucket, key, file, options, progress))
    return (yield from put_stream(bucket, key, data, options, progress))


def _put_open(
    bucket: str, key: str, file: io.FileIO, options: PutOptions, progress: Callable[[int], None] | None
) -> flows.Flow[Written]:
    at = os.fstat(file.fileno())
    if not stat.S_ISREG(at.st_mode):
        return (yield from put_stream(bucket, key, file, options, progress))
    return (yield from put_file(bucket, key, file.fileno(), at.st_size, options, progress))


def _fill(stream: IO[bytes], size_bytes: int) -> bytes:
    pieces = []
    while size_bytes:
        piece = stream.read(size_bytes)
        if not piece:
            break
        pieces.append(piece)
        size_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Piece(NamedTuple):
    """A part that is to be sent: `body`, or `source` instead."""

    number: int
    body: bytes = b""
    source: Source | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.body) if self.source is None else self.source.size_bytes


class _Sent(NamedTuple):
    """An upload at the node, and the ETags of the parts that it has, by number."""

    upload_id: str
    etags: dict[int, str]


def _in_parts(
    bucket: str,
    key: str,
    options: PutOptions,
    pieces: Iterator[_Piece],
    resumed: _Sent | None = None,
    *,
    resumable: bool = False,
) -> flows.Flow[Written]:
    """Send the pieces that an earlier attempt has not sent, and make the object. What fails is aborted, unless it is
    `resumable` and another attempt may succeed."""
    if resumed is None:
        begin = Request("POST", encode_path("-/v1/uploads", bucket, key), options.headers, of=(bucket, key))
        state: UploadState = yield from flows.ask_json(begin, f"{bucket}/{key}", UploadState)
        resumed = _Sent(state.upload_id, {})
    upload_id, etags = resumed
    size_bytes = 0
    try:
        for piece in pieces:
            if piece.number > limits.PARTS_MAX:
                raise Invalid(f"the stream is longer than {limits.PARTS_MAX} parts hold: write it to a file first")
            if piece.number not in etags:
                etags[piece.number] = yield from _put_part(bucket, key, upload_id, piece)
            size_bytes += piece.size_bytes
        chosen = [ChosenPart(number, etags[number]) for number in sorted(etags)]
        return (yield from _complete(bucket, key, upload_id, options, Completion(chosen, size_bytes)))
    except GeneratorExit:
        raise
    except BaseException as error:
        if resumable and etags and _may_pass(error):
            raise type(error)(
                f"{error.message}; the node keeps the parts that it has: put the same file again to send the rest",
                code=error.code,
                retry_after_s=error.retry_after_s,
            ) from error
        with contextlib.suppress(ForebayError):  # uploads that are left end by themselves, after days
            yield Request("DELETE", _of_upload("-/v1/uploads", bucket, key, upload_id))
        raise


def _may_pass(error: BaseException) -> TypeGuard[ForebayError]:
    """Whether the rest may be sent later. A full disk is better off without the parts, and a lost one has none."""
    return (
        isinstance(error, ForebayError)
        and error.retry != "never"
        and error.code not in ("InsufficientStorage", "UploadNotHere")
    )


def _of_upload(path: str, bucket: str, key: str, upload_id: str, **query: int) -> str:
    more = ((name, str(value)) for name, value in query.items())
    return with_query(encode_path(path, bucket, key), (("upload_id", upload_id), *more))


def _put_part(bucket: str, key: str, upload_id: str, piece: _Piece) -> flows.Flow[str]:
    target = _of_upload("-/v1/parts", bucket, key, upload_id, number=piece.number)
    request = Request("PUT", target, (), piece.body, source=piece.source)
    state: PartState = yield from flows.ask_json(request, f"part {piece.number} of {bucket}/{key}", PartState)
    return state.etag


def _complete(
    bucket: str, key: str, upload_id: str, options: PutOptions, completion: Completion
) -> flows.Flow[Written]:
    """Make the object. Asks again while the node is at it, and once if the answer was lost: of an upload that was
    completed the node says the same again."""
    target = _of_upload("-/v1/complete", bucket, key, upload_id)
    headers = (("Content-Type", "application/json"), *options.conditions)
    request = Request("POST", target, headers, msgspec.json.encode(completion), repeatable=True)
    lost = False
    while True:
        try:
            response: Response = yield request
        except Unavailable as error:
            if error.code != CUT or lost:
                raise
            lost = True
            continue
        if response.status != 202:
            done: UploadCompleted = flows.decoded(response, f"{bucket}/{key}", UploadCompleted)
            return done.written


# --- what an earlier attempt sent ------------------------------------------------------------------------------------
def _sent_before(
    bucket: str, key: str, options: PutOptions, fd: int, size_bytes: int, part_bytes: int
) -> flows.Flow[_Sent | None]:
    """The latest open upload that holds parts of exactly this file and nothing else, if there is one."""
    target = with_query(encode_path("-/v1/uploads", bucket), (("prefix", key),))
    page: Uploads = yield from flows.ask_json(Request("GET", target), f"uploads of {bucket}/{key}", Uploads)
    headers = {name.lower(): value.strip() for name, value in options.headers}
    for state in reversed(page.uploads):  # the key itself comes first of those that begin with it
        if state.key == key and not state.checksum_algorithm:
            etags = yield from _same_parts(state, headers, fd, size_bytes, part_bytes)
            if etags:
                return _Sent(state.upload_id, etags)
    return None


def _same_parts(
    state: UploadState, headers: dict[str, str], fd: int, size_bytes: int, part_bytes: int
) -> flows.Flow[dict[int, str]]:
    """The ETags of an upload's parts, if it has these headers and each part is the file's of that number; else none."""
    etags: dict[int, str] = {}
    more, after = True, 0
    while more:
        # One part a page: an asyncio driver has its loop back between two digests.
        target = _of_upload("-/v1/uploads", state.bucket, state.key, state.upload_id, after=after, limit=1)
        try:
            page: UploadParts = yield from flows.ask_json(Request("GET", target), "an upload", UploadParts)
        except NotFound:  # it ended meanwhile
            return {}
        if dict(page.upload.headers) != headers:
            return {}
        for part in page.parts:
            offset, after = (part.number - 1) * part_bytes, part.number
            same_size = part.size_bytes == min(part_bytes, size_bytes - offset)
            if not same_size or part.etag != _md5(fd, offset, part.size_bytes):
                return {}
            etags[part.number] = part.etag
        more = page.more
    return etags


def _md5(fd: int, offset: int, size_bytes: int) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    end = offset + size_bytes
    while offset < end:
        piece = os.pread(fd, min(_PIECE_BYTES, end - offset), offset)
        if not piece:
            break
        digest.update(piece)
        offset += len(piece)
    return digest.hexdigest()
