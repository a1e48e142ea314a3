"""The backend of a bucket without a backend (`local://`): an empty bucket, so that reads need no special case.

Theory. A `local` bucket lives on this node's volumes alone, and the node looks there before it asks any backend. So
this backend answers like an empty bucket. A write that reaches it was meant for a real backend and raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.backends import errors, pages
from forebay.backends.seam import Body, Fetch, PartSeen, UploadSeen
from forebay.core.errors import NotSupported
from forebay.core.types import LOCAL_URL, Headers, ListPage, ObjectInfo, RangeSpec, check_key


def _nowhere() -> NotSupported:
    return NotSupported(
        f"the bucket has no backend ({LOCAL_URL}) to write to: its objects are on this node alone; give it the URL of "
        "a backend and write=through or write=back to have them elsewhere too"
    )


class LocalBackend:
    """See the module."""

    scheme = "local"
    read_only = False
    part_bytes_min = 0

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket  # for messages

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        raise errors.no_such_key(f"{self._bucket}/{check_key(key)}")

    async def head(self, key: str) -> ObjectInfo:
        raise errors.no_such_key(f"{self._bucket}/{check_key(key)}")

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        raise errors.no_such_key(f"{self._bucket}/{check_key(key)}")

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        pages.check_limit(limit)
        return ListPage([], [])

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        raise _nowhere()

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        raise _nowhere()

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        raise _nowhere()

    async def read_tags(self, key: str) -> str:
        raise errors.no_such_key(f"{self._bucket}/{check_key(key)}")

    async def write_tags(self, key: str, tags: str) -> None:
        raise _nowhere()

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        raise _nowhere()

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        raise _nowhere()

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        raise _nowhere()

    async def abort_upload(self, key: str, upload_id: str) -> None:
        raise _nowhere()

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        raise _nowhere()

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        return []

    async def probe(self) -> None:
        """There is nothing that could be out of order."""

    async def aclose(self) -> None:
        """Holds nothing."""
