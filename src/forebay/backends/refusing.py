"""The write methods of a backend that cannot write: each raises `NotSupported`.

It serves `read_only` backends, and as a base for backends that support only some writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.backends.seam import Body, PartSeen, UploadSeen
from forebay.core.errors import NotSupported
from forebay.core.types import Headers, ObjectInfo


def _refused() -> NotSupported:
    return NotSupported("this backend cannot be written to: give the bucket a backend that can, or write it there")


class Refusing:
    """See the module."""

    part_bytes_min = 0

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        raise _refused()

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        raise _refused()

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        raise _refused()

    async def read_tags(self, key: str) -> str:
        return ""

    async def write_tags(self, key: str, tags: str) -> None:
        raise NotSupported("this backend keeps no tags: leave them out, or use user metadata (x-amz-meta-…)")

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        raise _refused()

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        raise _refused()

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        raise _refused()

    async def abort_upload(self, key: str, upload_id: str) -> None:
        raise _refused()

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        raise _refused()

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        raise _refused()
