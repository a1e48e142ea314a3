"""A bucket in this process's memory, for tests and for trying things out.

Theory. The bucket is a dictionary of versions and a sorted list of keys, rebuilt when the keys change. Any key works,
versions are numbers that only grow, and a body keeps the bytes of the version it was opened on. `memory://name` opens
the same bucket everywhere in this process, so a test can put objects where the code under test looks.

Rejected: obstore's MemoryStore (no keys with `//`, `..` or a trailing `/`, and listings out of order).
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from forebay.backends import errors, pages
from forebay.backends.http import bodies
from forebay.backends.seam import Body, PartSeen, UploadSeen
from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid
from forebay.core.types import Headers, ListEntry, ListPage, ObjectInfo, RangeSpec, check_key
from forebay.ports import clock

CHUNK_BYTES = 1 << 20  # a body arrives in pieces here too, so that whoever reads it must cope with pieces

_named: dict[str, MemoryBackend] = {}


class MemoryFetch:
    """A body from memory."""

    def __init__(self, info: ObjectInfo, data: bytes, start: int, end: int) -> None:
        self.info, self.start, self.end = info, start, end
        self._rest = memoryview(data)[start:end]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._rest:
            chunk, self._rest = self._rest[:CHUNK_BYTES], self._rest[CHUNK_BYTES:]
            yield bytes(chunk)

    async def aclose(self) -> None:
        self._rest = memoryview(b"")


class _Upload(NamedTuple):
    key: str
    headers: Headers
    started_s: float
    parts: dict[int, tuple[str, bytes]]


class MemoryBackend:
    """See the module. `place` and `remove` are for whoever owns the bucket, not part of the seam.

    Tags are kept in `tags`.
    """

    scheme = "memory"
    read_only = False
    part_bytes_min = 1

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._keys: list[str] | None = []
        self._version = 0
        self._uploads: dict[str, _Upload] = {}
        self.tags: dict[str, str] = {}

    def place(self, key: str, data: bytes, headers: Headers = ()) -> ObjectInfo:
        """Store a new version of `key`."""
        check_key(key)
        self._version += 1
        version = f'"{self._version}"'
        info = ObjectInfo(key, len(data), version, version.strip('"'), clock.wall_s(), headers)
        if key not in self._objects:
            self._keys = None
        self.tags.pop(key, None)
        self._objects[key] = (info, bytes(data))
        return info

    def remove(self, key: str) -> None:
        """Forget `key`; it need not exist."""
        if self._objects.pop(key, None):
            self._keys = None
            self.tags.pop(key, None)

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> MemoryFetch:
        info, data = self._find(key)
        if version and version != info.version:
            raise errors.changed(self._name(key))
        start, end = range.resolve(len(data)) if range else (0, len(data))
        return MemoryFetch(info, data, start, end)

    async def head(self, key: str) -> ObjectInfo:
        return self._find(key)[0]

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        info = self._find(key)[0]
        return None if info.version == version else info

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return pages.page(self, prefix, delimiter, start_after, limit)

    def entries(self, prefix: str, after: str, from_key: str) -> Iterator[ListEntry]:
        """The walk that `pages.page` cuts from."""
        if self._keys is None:
            self._keys = sorted(self._objects)
        first = max(bisect_right(self._keys, after), bisect_left(self._keys, max(prefix, from_key)))
        for index in range(first, len(self._keys)):
            key = self._keys[index]
            if not key.startswith(prefix):
                return
            info = self._objects[key][0]
            yield ListEntry(key, info.size_bytes, info.etag, info.modified_s)

    # --- writing -----------------------------------------------------------------------------------------------------
    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        data = await self._whole(body, self._name(key))
        self._check_expected(key, expect)
        info = self.place(key, data, headers)
        if tags:
            self.tags[key] = tags
        return info

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        check_key(key)
        if expect == "":
            raise errors.expects_nothing(self._name(key))
        self._check_expected(key, expect)
        self.remove(key)

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        info, data = self._find(source_key)
        if source_version and info.version != source_version:
            raise errors.changed(self._name(source_key))
        return self.place(key, data, info.headers if headers is None else headers)

    async def read_tags(self, key: str) -> str:
        await self.head(key)
        return self.tags.get(key, "")

    async def write_tags(self, key: str, tags: str) -> None:
        await self.head(key)
        self.tags[key] = tags

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        check_key(key)
        self._version += 1
        upload_id = f"upload-{self._version}"
        self._uploads[upload_id] = _Upload(key, headers, clock.wall_s(), {})
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        errors.check_part_number(number)
        self._upload(key, upload_id)
        data = await self._whole(body, self._name(key))
        self._version += 1
        token = f'"part-{self._version}"'
        self._upload(key, upload_id).parts[number] = (token, data)
        return token

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        upload = self._upload(key, upload_id)
        for number, token in parts:
            if upload.parts.get(number, ("", b""))[0] != token:
                raise Invalid(f"{self._name(key)}: part {number} is not the one that was sent", code="InvalidPart")
        self._check_expected(key, expect)
        del self._uploads[upload_id]
        return self.place(key, b"".join(upload.parts[number][1] for number, _ in parts), upload.headers)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        self._uploads.pop(upload_id, None)

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        parts = self._upload(key, upload_id).parts
        return [PartSeen(number, token, len(data)) for number, (token, data) in sorted(parts.items())]

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        found = [
            UploadSeen(upload.key, upload_id, upload.started_s)
            for upload_id, upload in self._uploads.items()
            if upload.key.startswith(prefix)
        ]
        return sorted(found)[: limits.LIST_KEYS_MAX]

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise errors.no_such_upload(self._name(key))
        return upload

    async def _whole(self, body: Body, what: str) -> bytes:
        await body.ready(body.size_bytes)
        data = await asyncio.to_thread(bodies.whole, body)
        if body.md5 and hashlib.md5(data, usedforsecurity=False).hexdigest() != body.md5:
            raise Corrupt(f"{what}: the bytes do not have the MD5 that came with them: send them again")
        return data

    def _check_expected(self, key: str, expect: str | None) -> None:
        check_key(key)
        found = self._objects.get(key)
        if expect == "" and found is not None:
            raise errors.exists(self._name(key))
        if expect and (found is None or found[0].version != expect):
            raise errors.changed(self._name(key))

    async def probe(self) -> None:
        """Memory always answers."""

    async def aclose(self) -> None:
        """Objects stay for the next who opens the name."""

    def _find(self, key: str) -> tuple[ObjectInfo, bytes]:
        check_key(key)
        try:
            return self._objects[key]
        except KeyError:
            raise errors.no_such_key(self._name(key)) from None

    def _name(self, key: str) -> str:
        return f"memory://{self.name}/{key}"


def named(name: str) -> MemoryBackend:
    """The one bucket `memory://name` of this process, made on first use."""
    return _named.setdefault(name, MemoryBackend(name))
