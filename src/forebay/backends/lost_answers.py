"""Finds out whether a write happened whose answer was lost.

Theory. A write whose answer is lost is sent again. A conditional write then meets the result of its own first attempt,
so a refusal (412, 409, no such upload) proves nothing. `Retrying` raises `Unheard` instead, and this module looks at
the object. `core/machines/sent_bodies.py` decides whose it is.

* The object is what was sent: the write happened. A put is recognised by its bytes (the ETag is the MD5, or the bytes
  are read and hashed), a completed upload by the ETag that its parts give, a copy by the ETag of its source, a delete
  by the object's absence.
* The object is older than the first attempt: the write never happened, and the refusal stands.
* The object is new and different: another write came before or after ours. The error says that nobody can know.

"Older" allows clocks to differ by as much as a signature may (CLOCK_SKEW_MAX_S).

Rejected: a refusal whenever the bytes differ (ours may have been stored, read and replaced); marking objects with our
own metadata (users would see it).

Invariant. A refusal leaves here only if nothing of the write happened. An object leaves here only if it is the one that
was sent, or has the same bytes and was written within the same quarter of an hour.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from forebay.backends.errors import NotDone
from forebay.backends.seam import Backend, Body
from forebay.core import limits
from forebay.core.errors import Closed, ForebayError, NoBackendBucket, NotFound, Unavailable
from forebay.core.machines.sent_bodies import Ours, Whose, judge
from forebay.core.s3rules.keeping import without_keeping
from forebay.core.types import Headers, ObjectInfo


class Unheard(Unavailable):
    """Whether the write happened is not known: an answer was lost, and the next attempt met `refusal`."""

    def __init__(self, refusal: ForebayError) -> None:
        super().__init__(
            f"whether it was written is not known (an answer was lost, and then: {refusal.message}): look, then decide",
            retry_after_s=refusal.retry_after_s,
        )
        self.refusal = refusal

    @property
    def kind(self) -> str:
        return Unavailable.__name__


def says_no(error: ForebayError) -> bool:
    """Whether a request that failed so did nothing, for certain."""
    if isinstance(error, Unavailable):
        return isinstance(error, NotDone | NoBackendBucket)
    return not isinstance(error, Closed)


def whole_etag(parts: Sequence[tuple[int, str]]) -> str:
    """The ETag that S3 gives to an upload of parts whose tokens are MD5s; "" where they are not."""
    try:
        digests = b"".join(bytes.fromhex(token.strip('"')) for _, token in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


async def look(backend: Backend, key: str) -> ObjectInfo | None:
    """What is there; None for nothing."""
    try:
        return await backend.head(key)
    except NotFound:
        return None


class Digest(Protocol):
    """A running digest, as those of hashlib."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


async def digest_there(backend: Backend, seen: ObjectInfo, digest: Digest) -> str:
    """The digest of an object, which is read and discarded. `Precondition` or `NotFound` if it is another now."""
    if seen.size_bytes:
        fetch = await backend.fetch(seen.key, version=seen.version)
        try:
            async for chunk in fetch:
                await asyncio.to_thread(digest.update, chunk)
        finally:
            await fetch.aclose()
    return digest.hexdigest()


class PartsDigest:
    """The digest of a body that came in parts of these sizes: the ETag that S3 would give it."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes = sizes_bytes
        self._md5s = [hashlib.md5(usedforsecurity=False) for _ in sizes_bytes]
        self._part = self._at = 0

    def update(self, data: Any, /) -> None:
        left = memoryview(data)
        while left and self._part < len(self._sizes):
            piece = left[: self._sizes[self._part] - self._at]
            self._md5s[self._part].update(piece)
            self._at += len(piece)
            left = left[len(piece) :]
            if self._at == self._sizes[self._part]:
                self._part, self._at = self._part + 1, 0

    def hexdigest(self) -> str:
        return whole_etag([(number, md5.hexdigest()) for number, md5 in enumerate(self._md5s, 1)])


# --- after an answer was lost: the object that was made, or what is raised instead ------------------------------------
async def put(backend: Backend, key: str, body: Body, error: Unavailable, since_s: float) -> ObjectInfo:
    """After a put that was begun at `since_s` (Unix time)."""
    seen = await _looked(backend, key, error)
    if seen is not None:
        _check_age(seen, error, since_s)
        if await _holds(backend, seen, body):
            return seen
    raise error


async def put_in_silence(
    backend: Backend, key: str, body: Body, headers: Headers, error: Unavailable, since_s: float
) -> ObjectInfo:
    """After a put without a condition or tags that began at `since_s` and had no answer that says what became of it:
    only what is known at a glance counts. An object with the same bytes may have been there before, so it has to have
    the same headers; how it is kept not every answer says."""
    is_told = bool(body.md5) and without_keeping(headers) == headers
    seen = await _looked(backend, key, error) if is_told else None
    if seen is None or judge(seen, Ours(body.size_bytes, body.md5)) is not Whose.THIS:
        raise error
    is_same = set(headers) <= set(seen.headers) and _metadata(headers) == _metadata(seen.headers)
    if not is_same or _is_older(seen, since_s):
        raise error
    return seen


def _metadata(headers: Headers) -> set[tuple[str, str]]:
    return {each for each in headers if each[0].startswith("x-amz-meta-")}


async def complete(
    backend: Backend, key: str, parts: Sequence[tuple[int, str]], error: ForebayError, since_s: float
) -> ObjectInfo:
    """After a completion; also after one that found no such upload, since a process before this one may have made
    it."""
    seen = await _looked(backend, key, error)
    if seen is not None:
        if judge(seen, Ours(-1, parts_etag=whole_etag(parts))) is Whose.THIS:
            return seen
        _check_age(seen, error, since_s)
    raise error


async def refused_completion(
    backend: Backend, key: str, parts: Sequence[tuple[int, str, int]], refusal: ForebayError, since_s: float
) -> ObjectInfo:
    """After a completion that was refused, where one of the same upload since `since_s` had no answer. Of each part its
    number, MD5 and size. Where the ETag does not tell whose the object is, its bytes are read."""
    unheard = Unheard(refusal)
    seen = await _looked(backend, key, unheard)
    if seen is not None:
        etag = whole_etag([(number, md5) for number, md5, _ in parts])
        if judge(seen, Ours(-1, parts_etag=etag)) is Whose.THIS:
            return seen
        _check_age(seen, unheard, since_s)
        sizes = [size_bytes for _, _, size_bytes in parts]
        if seen.size_bytes == sum(sizes):
            try:
                found = await digest_there(backend, seen, PartsDigest(sizes))
            except ForebayError:
                raise unheard from None
            if found == etag:
                return seen
    raise unheard


async def copy(backend: Backend, key: str, source_version: str, error: Unheard, since_s: float) -> ObjectInfo:
    """After a copy of that version."""
    seen = await _looked(backend, key, error)
    if seen is not None:
        _check_age(seen, error, since_s)
        if source_version and seen.version == source_version:
            return seen
    raise error


async def delete(backend: Backend, key: str, error: Unheard, since_s: float) -> None:
    """After a delete."""
    seen = await _looked(backend, key, error)
    if seen is not None:
        _check_age(seen, error, since_s)
        raise error


def _check_age(seen: ObjectInfo, error: ForebayError, since_s: float) -> None:
    """Raise the refusal if what is there was there before."""
    if isinstance(error, Unheard) and _is_older(seen, since_s):
        raise error.refusal


def _is_older(seen: ObjectInfo, since_s: float) -> bool:
    return 0 < seen.modified_s < since_s - limits.CLOCK_SKEW_MAX_S


async def _looked(backend: Backend, key: str, error: ForebayError) -> ObjectInfo | None:
    """What is there; `error` if that cannot be known either."""
    try:
        return await look(backend, key)
    except ForebayError:
        raise error from None


async def _holds(backend: Backend, seen: ObjectInfo, body: Body) -> bool:
    """Whether the object is exactly the body."""
    if seen.size_bytes != body.size_bytes:
        return False
    md5 = body.md5 or await asyncio.to_thread(_md5, body)
    ours = Ours(body.size_bytes, md5, digest=md5)
    whose = judge(seen, ours)
    if whose is None:
        try:
            whose = judge(seen, ours, await digest_there(backend, seen, hashlib.md5(usedforsecurity=False)))
        except ForebayError:
            return False
    return whose is Whose.THIS


def _md5(body: Body) -> str:
    found = hashlib.md5(usedforsecurity=False)
    if body.data is not None:
        found.update(body.data)
        return found.hexdigest()
    with open(body.path, "rb") as file:
        file.seek(body.offset)
        left = body.size_bytes
        while left and (data := file.read(min(left, 1 << 20))):
            found.update(data)
            left -= len(data)
    return found.hexdigest()
