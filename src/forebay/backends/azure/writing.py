"""Writes to Azure Blob Storage: a blob in one request, or as blocks that a block list commits.

Theory. Azure has no uploads. It keeps uncommitted blocks beside the blob's name for a week, and a list of block names
makes the blob. So an upload is a name of ours with which its blocks' names begin. Azure takes headers and tags last,
with the list, so the upload's id carries them. Beginning an upload therefore costs no request, aborting does nothing
(the blocks expire, or go with the next blob of that name), and uploads cannot be listed.

All block names of one blob must be of one length. Other tools choose other lengths, and Azure refuses a mixture until
the foreign blocks are gone.

Copy Blob makes a copy at once within an account. It cannot change headers, and raises `NotSupported` for that.

Invariants. (1) One request per method, except for a copy, which is looked at, and for a refused completion, which
checks whether it had succeeded before. (2) A token names its block and the block's size. (3) No error of a look that
follows a copy leaves as one of the copy, which was done.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import quote
from xml.sax.saxutils import escape

from forebay.backends import errors
from forebay.backends.http.requests import CONTENT_HEADERS, WRITE_ANSWER_TIMEOUT_S, Answer, Wire
from forebay.backends.s3 import tags as s3tags
from forebay.backends.s3.listing import parse
from forebay.backends.s3.writing import META, checked_condition, described, keeping_sent, refused
from forebay.backends.seam import Body, PartSeen, UploadSeen
from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotSupported, Precondition, Unavailable
from forebay.core.s3rules.keeping import NAMES, STORAGE_CLASS
from forebay.core.types import Headers, ObjectInfo
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

ResultT = TypeVar("ResultT")

BLOB_BYTES_MAX = 5000 * limits.MIB  # of one Put Blob
BLOCK_BYTES_MAX = 4000 * limits.MIB
COPY_POLL_S = 0.5
_MARK_BYTES = 8  # of what an upload's blocks begin with


class AzureWrites:
    """The writing half of a container. Keys are those of the container, prefix included."""

    part_bytes_min = 1

    def __init__(self, wire: Wire, query: str, chance: Chance, clock: Clock, keeping: Headers = ()) -> None:
        """`query`: what a shared access signature adds to the URL of a copy's source. `keeping`: the access tier of
        what is written."""
        self._wire, self._query, self._chance, self._clock, self._keeping = wire, query, chance, clock, keeping

    async def put(self, key: str, body: Body, headers: Headers, expect: str | None, tags: str) -> ObjectInfo:
        """See `Backend.put`."""
        what = self._what(key)
        _check_size(body.size_bytes, BLOB_BYTES_MAX, what)
        sent = {"x-ms-blob-type": "BlockBlob", **self._stored(headers, tags, what), **_condition(expect, what)}
        answer = await self._wire.tell("PUT", key, headers=sent, body=body)
        if answer.status != 201:
            raise _refused(answer, what, expect)
        return described(key, body.size_bytes, answer, headers)

    async def delete(self, key: str, expect: str | None) -> None:
        """See `Backend.delete`."""
        what = self._what(key)
        answer = await self._wire.tell("DELETE", key, headers=_condition(expect, what))
        gone = answer.status == 404 and not expect and b"ContainerNotFound" not in answer.body
        if answer.status not in (200, 202) and not gone:
            raise _refused(answer, what, expect)

    async def copy(self, source_key: str, key: str, source_version: str, headers: Headers | None) -> ObjectInfo:
        """See `Backend.copy`."""
        what = self._what(key)
        if headers is not None:
            raise NotSupported(f"{what}: Azure copies headers as they are: read the source and put it with others")
        source = f"{self._wire.url}/{quote(source_key, safe='/-_.~')}"
        sent = {"x-ms-copy-source": f"{source}?{self._query}" if self._query else source}
        sent |= self._stored((), "", what)
        if source_version:
            sent["x-ms-source-if-match"] = checked_condition(source_version, what)
        answer = await self._wire.tell("PUT", key, headers=sent)
        if answer.status != 202:
            raise _refused(answer, self._what(source_key), source_version or None)
        await self._copied(key, answer)
        opened = await self._look(what, functools.partial(self._wire.open, key, None, "", head=True))
        await opened.aclose()
        return opened.info

    async def _look(self, what: str, look: Callable[[], ResultT]) -> ResultT:
        """What a request says that looks at what one before it has begun or made."""
        try:
            return await self._wire.run(look)
        except ForebayError as error:
            raise errors.not_described(error, what) from error

    async def _copied(self, key: str, answer: Answer) -> None:
        """Wait for a copy that was only begun."""
        until_s = self._clock.monotonic_s() + WRITE_ANSWER_TIMEOUT_S
        status = answer.headers.get("x-ms-copy-status", "success")
        while status == "pending":
            if self._clock.monotonic_s() > until_s:
                raise Unavailable(f"{self._what(key)}: the copy is not finished yet: look at the object later")
            await asyncio.sleep(COPY_POLL_S)
            look = functools.partial(self._wire.ask, [], method="HEAD", key=key)
            now = await self._look(self._what(key), look)
            status = now.headers.get("x-ms-copy-status", "failed")
        if status != "success":
            raise Unavailable(f"{self._what(key)}: the copy ended as {status!r}: read the source and put it")

    async def read_tags(self, key: str) -> str:
        """See `Backend.read_tags`."""
        answer = await s3tags.ask_tags(self._wire, key, s3tags.AZURE)
        if answer.status != 200:
            raise _refused(answer, self._what(key), None)
        return s3tags.tags_in(answer, self._what(key), s3tags.AZURE)

    async def write_tags(self, key: str, tags: str) -> None:
        """See `Backend.write_tags`."""
        answer = await s3tags.tell_tags(self._wire, key, tags, s3tags.AZURE, {})
        if answer.status != 204:
            raise _refused(answer, self._what(key), None)

    def _stored(self, headers: Headers, tags: str, what: str) -> dict[str, str]:
        """Stored headers, tags and tier as Azure takes them."""
        sent = _stored(headers, tags, what)
        for _, value in keeping_sent(self._keeping, headers, (STORAGE_CLASS,), what):
            sent["x-ms-access-tier"] = value
        return sent

    # --- uploads -----------------------------------------------------------------------------------------------------
    async def begin_upload(self, key: str, headers: Headers, tags: str) -> str:
        """See `Backend.begin_upload`. Asks nothing of the service."""
        self._stored(headers, tags, self._what(key))
        packed = zlib.compress(json.dumps([headers, tags]).encode())
        return f"{self._chance.token_hex(_MARK_BYTES)}.{base64.urlsafe_b64encode(packed).decode()}"

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """See `Backend.put_part`."""
        what = self._what(key)
        mark = self._read_id(upload_id, what)[0]
        _check_size(body.size_bytes, BLOCK_BYTES_MAX, what)
        name = _block_name(mark, number)
        answer = await self._wire.tell("PUT", key, query=[("comp", "block"), ("blockid", name)], body=body)
        if answer.status != 201:
            raise _refused(answer, what, None)
        return f"{name}:{body.size_bytes}"

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], expect: str | None
    ) -> ObjectInfo:
        """See `Backend.complete_upload`."""
        what = self._what(key)
        mark, headers, tags = self._read_id(upload_id, what)
        size_bytes, listed = 0, []
        for number, token in parts:
            name, _, size = token.rpartition(":")
            if name != _block_name(mark, number) or not size.isdigit():
                raise Invalid(f"{what}: part {number} is not the one that was sent", code="InvalidPart")
            size_bytes += int(size)
            listed.append(f"<Latest>{escape(name)}</Latest>")
        data = f"<?xml version='1.0' encoding='utf-8'?><BlockList>{''.join(listed)}</BlockList>".encode()
        sent = {"content-type": "application/xml", **self._stored(headers, tags, what), **_condition(expect, what)}
        answer = await self._wire.tell(
            "PUT", key, query=[("comp", "blocklist")], headers=sent, body=Body(len(data), data)
        )
        if answer.status == 201:
            return described(key, size_bytes, answer, headers)
        no_such_upload = answer.status == 400 and b"InvalidBlockList" in answer.body
        if no_such_upload or answer.status in (409, 412):
            names = [token.rpartition(":")[0] for _, token in parts]
            if (made := await self._made(key, names, size_bytes, headers)) is not None:
                return made
        raise errors.no_such_upload(what) if no_such_upload else _refused(answer, what, expect)

    async def _made(self, key: str, names: list[str], size_bytes: int, headers: Headers) -> ObjectInfo | None:
        """The blob, if it is made of exactly these blocks: then an earlier completion, whose answer was lost, made
        it, since no two uploads have blocks of one name."""
        query = [("comp", "blocklist"), ("blocklisttype", "committed")]
        answer = await self._wire.run(functools.partial(self._wire.ask, query, key=key))
        if answer.status == 404:
            return None
        blocks = parse(answer, self._what(key), "BlockList").iterfind("CommittedBlocks/Block")
        if [block.findtext("Name") for block in blocks] != names:
            return None
        return described(key, size_bytes, answer, headers)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Backend.abort_upload`. The blocks go by themselves after a week."""

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        """See `Backend.list_parts`."""
        what = self._what(key)
        mark = self._read_id(upload_id, what)[0]
        query = [("comp", "blocklist"), ("blocklisttype", "uncommitted")]
        answer = await self._wire.run(functools.partial(self._wire.ask, query, key=key))
        if answer.status == 404 and b"ContainerNotFound" not in answer.body:
            return []
        found = []
        for block in parse(answer, what, "BlockList").iterfind("UncommittedBlocks/Block"):
            name, size = block.findtext("Name") or "", int(block.findtext("Size") or 0)
            number = _number_of(name, mark)
            if number:
                found.append(PartSeen(number, f"{name}:{size}", size))
        return sorted(found)

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        """See `Backend.list_uploads`. None are known: Azure has blocks only."""
        return []

    def close(self) -> None:
        """Holds nothing of its own."""

    def _read_id(self, upload_id: str, what: str) -> tuple[str, Headers, str]:
        mark, _, packed = upload_id.partition(".")
        try:
            headers, tags = json.loads(zlib.decompress(base64.urlsafe_b64decode(packed)))
            if len(mark) != 2 * _MARK_BYTES:
                raise ValueError("the mark is missing")
        except (ValueError, zlib.error):
            raise errors.no_such_upload(what) from None
        return mark, tuple((name, value) for name, value in headers), tags

    def _what(self, key: str) -> str:
        return f"{self._wire.url}/{key}"


def _block_name(mark: str, number: int) -> str:
    return base64.b64encode(f"{mark}{number:05}".encode()).decode()


def _number_of(name: str, mark: str) -> int:
    """The part's number in a block's name, 0 if the block is not of this upload."""
    try:
        text = base64.b64decode(name, validate=True).decode()
    except ValueError:
        return 0
    number = text.removeprefix(mark)
    return int(number) if text.startswith(mark) and number.isdigit() else 0


def _stored(headers: Headers, tags: str, what: str) -> dict[str, str]:
    sent = {}
    for name, value in headers:
        if name == "expires":
            raise NotSupported(f"{what}: Azure keeps no Expires: use Cache-Control")
        if name in CONTENT_HEADERS:
            sent["x-ms-blob-cache-control" if name == "cache-control" else f"x-ms-blob-{name}"] = value
        elif name.startswith(META):
            sent["x-ms-meta-" + name.removeprefix(META)] = value
        elif name not in NAMES:
            raise Invalid(f"{what}: header {name!r} cannot be stored: use x-amz-meta-… for your own")
    if tags:
        sent["x-ms-tags"] = tags
    return sent


def _condition(expect: str | None, what: str) -> dict[str, str]:
    if expect is None:
        return {}
    return {"if-none-match": "*"} if expect == "" else {"if-match": checked_condition(expect, what)}


def _refused(answer: Answer, what: str, expect: str | None) -> Exception:
    if answer.status == 409 and expect == "" and b"BlobAlreadyExists" in answer.body:
        return errors.exists(what)
    failed = refused(answer, what, expect)
    if isinstance(failed, Precondition) and b"Lease" in answer.body:
        return Unavailable(f"{what}: somebody holds a lease on the blob: end the lease, or wait for its end")
    return failed


def _check_size(size_bytes: int, size_bytes_max: int, what: str) -> None:
    if size_bytes > size_bytes_max:
        raise Invalid(
            f"{what}: {size_bytes} bytes are too many for one request: upload it in parts of at most {size_bytes_max} "
            "bytes",
            code="EntityTooLarge",
        )
