"""One version of each object that is asked for, of a bucket that keeps versions: a backend that can only be read.

Theory. Keys are the names of `core/versions.py`. A request names the version (`versionId`), and the answer must say
that it is that one: a service that does not know versions would send the current object. What comes is described as the
bucket's own objects are, with the version's id among its headers.

Invariants. (1) No bytes of another version than the one that was named leave here. (2) Nothing is written or listed.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from forebay.backends.http.cloud import Unwritten
from forebay.backends.seam import Fetch
from forebay.core.errors import Invalid, NotFound, NotSupported
from forebay.core.types import ListPage, ObjectInfo, RangeSpec
from forebay.core.versions import split_name

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
        raise NotSupported("versions cannot be listed here: ask the bucket itself")

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
