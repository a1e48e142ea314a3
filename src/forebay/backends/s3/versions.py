"""One version of each object that is asked for, of a bucket that keeps versions: a backend that can only be read.

Theory. Keys are the names of `core/versions.py`. A request names the version (`versionId`), and the answer must say
that it is that one: a service that does not know versions would send the current object. What comes is described as the
bucket's own objects are, with the version's id among its headers.

A listing has the newest version of each object that is there, under those names. It may start after any name: the
service continues behind that version of that key. What was replaced is passed over, so a page may be short, or empty.

Invariants. (1) No bytes of another version than the one that was named leave here. (2) Nothing is written. (3) An
object without a version of its own is never listed: whoever writes it replaces it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from forebay.backends.http.cloud import Unwritten
from forebay.backends.http.requests import Wire
from forebay.backends.pages import check_limit
from forebay.backends.s3.contents import parse_time
from forebay.backends.s3.listing import parse
from forebay.backends.seam import Fetch
from forebay.core.errors import Invalid, NotFound, NotSupported, Unavailable
from forebay.core.types import ListEntry, ListPage, ObjectInfo, RangeSpec
from forebay.core.versions import CURRENT, name_of_version, split_name

ResultT = TypeVar("ResultT")


class Versions(Unwritten):
    """See the module. `locate.py` makes these."""

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        return await _found(super().fetch(key, range, version=version))

    async def head(self, key: str) -> ObjectInfo:
        return await _found(super().head(key))

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await _found(super().check(key, version))

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        assert not delimiter, "nobody asks for groups of versions"
        own = self._prefix
        page = await self._answered(
            self._wire.run(functools.partial(list_newest, self._wire, own + prefix, own + start_after, limit)), 0.0
        )
        entries = [entry._replace(key=entry.key[len(own) :]) for entry in page.entries]
        return ListPage(entries, [], page.next_after[len(own) :])

    def _full(self, key: str) -> tuple[str, str]:
        full, what = super()._full(split_name(key)[0])
        return full, f"{what}?versionId={split_name(key)[1]}"

    def _version_id(self, key: str) -> str:
        return split_name(key)[1]


async def _found(answer: Awaitable[ResultT]) -> ResultT:
    """What the answer is, in the words that S3 has for versions."""
    try:
        return await answer
    except NotFound as error:
        if error.code != "NoSuchKey":
            raise
        raise NotFound(f"The specified version does not exist: {error.message}", code="NoSuchVersion") from error
    except NotSupported as error:
        if "HTTP 405" not in error.message:
            raise
        raise Invalid(
            f"That version marks a delete and has no bytes: {error.message}", code="MethodNotAllowed"
        ) from error


def list_newest(wire: Wire, prefix: str, start_after: str, limit: int) -> ListPage:
    """One answer about versions: of the objects under `prefix` that are there, the newest. Blocks. `NotSupported` where
    an object has no version of its own."""
    key, _, version_id = start_after.partition("\0")
    query = [("versions", ""), ("encoding-type", "url"), ("max-keys", str(check_limit(limit)))]
    for name, value in (("prefix", prefix), ("key-marker", key), ("version-id-marker", version_id)):
        if value and not (name == "key-marker" and value != prefix and prefix.startswith(value)):
            query.append((name, value))
    root = parse(wire.ask(query), wire.url, "ListVersionsResult")
    decode = unquote_plus if root.findtext("{*}EncodingType") == "url" else str
    entries = []
    for item in root.iterfind("{*}Version"):
        said = {child.tag.rpartition("}")[2]: child.text or "" for child in item}
        key, version_id = decode(said.get("Key", "")), said.get("VersionId", "")
        if said.get("IsLatest", "").strip().lower() != "true" or not key.startswith(prefix):
            continue
        if version_id in ("", CURRENT) or "\0" in key:
            raise NotSupported(
                f"{wire.url}: {key!r} has no version of its own, so whoever writes it replaces it: let the bucket keep "
                "versions (PutBucketVersioning) and write it again, or name the objects by listing=, which says what "
                "has changed"
            )
        etag = said.get("ETag", "").strip('"')
        name = name_of_version(key, version_id)
        entries.append(ListEntry(name, int(said.get("Size") or 0), etag, parse_time(said.get("LastModified", ""))))
    return ListPage(sorted(entries), [], _next_after(root, decode, start_after, wire.url))


def _next_after(root: ElementTree.Element, decode: Callable[[str], str], start_after: str, url: str) -> str:
    """Where the next answer begins; "" after the last."""
    if (root.findtext("{*}IsTruncated") or "").strip().lower() != "true":
        return ""
    key, version_id = decode(root.findtext("{*}NextKeyMarker") or ""), root.findtext("{*}NextVersionIdMarker") or ""
    found = f"{key}\0{version_id}" if version_id else key
    if not key or found == start_after:
        raise Unavailable(f"{url}: an answer about versions says that more follows, but not where: try again")
    return found
