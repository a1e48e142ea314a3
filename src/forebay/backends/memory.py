"""A bucket in this process's memory: for tests, the simulator's friends and trying things out.

Theory. A dictionary of versions and a sorted list of keys, made anew when the keys have changed. Any key works, every
version is a number that only grows, and a body keeps the bytes of the version it was opened on: what the seam promises,
with nothing between. `memory://name` opens the same bucket wherever it is opened in this process, so that a test can
put objects where the code under test will look.

Rejected: obstore's MemoryStore (it cannot hold keys with `//`, `..` or a trailing `/`, and lists out of order).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator

from forebay.backends import errors, pages
from forebay.backends.refusing import Refusing
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


class MemoryBackend(Refusing):
    """See the module. `put` and `delete` are for whoever owns the bucket, not part of the seam."""

    scheme = "memory"
    read_only = False

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._keys: list[str] | None = []
        self._version = 0

    def place(self, key: str, data: bytes, headers: Headers = ()) -> ObjectInfo:
        """Store a new version of `key`."""
        check_key(key)
        self._version += 1
        version = f'"{self._version}"'
        info = ObjectInfo(key, len(data), version, version.strip('"'), clock.wall_s(), headers)
        if key not in self._objects:
            self._keys = None
        self._objects[key] = (info, bytes(data))
        return info

    def remove(self, key: str) -> None:
        """Forget `key`; it need not exist."""
        if self._objects.pop(key, None):
            self._keys = None

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
