"""A bucket in memory behind the datasets' seam, with faults on request; and shards to put into it."""

from __future__ import annotations

import gzip
import hashlib
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zstandard

from forebay.core.errors import ForebayError, Invalid, NotFound, Precondition
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.formats.members import MemberIndex, form_of
from forebay.core.formats.members import build as build_members
from forebay.core.messages.batch import Item
from forebay.core.types import ListEntry
from forebay.torch.source import Answers
from tests.core.archives import tar_of


class MemorySource:
    """`objects` by key, of one bucket. `fail` is called with each item and returns the error to put in its place, or
    None; `before` is called with each batch. Both stay behind when it is pickled."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.fail: Callable[[Item], ForebayError | None] | None = None
        self.before: Callable[[Sequence[Item]], None] | None = None
        self.cold = 0
        self.batches: list[int] = []  # how many items each get_many asked for
        self.told: Callable[[str, Listing], Any] | None = None  # makes what hints are told to
        self.listed = 0
        self.room: int | None = None  # how many bytes the node can hold
        self._etags: dict[str, tuple[bytes, str]] = {}
        self.listings: dict[str, Listing] = {}
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _remembering, (self.objects, [bytes(found.data) for found in self.listings.values()])

    def etag(self, key: str) -> str:
        data = self.objects[key]
        if key not in self._etags or self._etags[key][0] is not data:
            self._etags[key] = data, hashlib.md5(data).hexdigest()
        return self._etags[key][1]

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        self.listed += 1
        keys = sorted((key for key in self.objects if key.startswith(prefix)), key=lambda key: key.encode())
        entries = [ListEntry(key, len(self.objects[key]), self.etag(key), 1.0) for key in keys]
        found = Listing(build(bucket, prefix, [pack(entries)]))
        self.listings[found.id] = found
        if id not in ("", found.id):
            raise Precondition(f"{bucket}/{prefix} is not what it was: {self.listings[id].difference(found)}")
        return found

    def get_many(self, items: Sequence[Item]) -> Answers:
        if self.before is not None:
            self.before(items)
        with self.lock:
            self.batches.append(len(items))
        return Answers([self._get(item) for item in items], self.cold)

    def room_bytes(self, bucket: str, *, cluster: bool = False) -> int | None:
        return self.room

    def hints(self, job: str, listing: Listing) -> Any:
        return None if self.told is None else self.told(job, listing)

    def _get(self, item: Item) -> bytes | memoryview | ForebayError:
        error = self.fail(item) if self.fail is not None else None
        if error is not None:
            return error
        if item.key not in self.objects:
            return NotFound(f"{item.bucket}/{item.key} does not exist: see `forebay ls`")
        if item.etag and item.etag != self.etag(item.key):
            return Precondition(f"{item.bucket}/{item.key} has changed: read it again")
        data = self.objects[item.key]
        if item.member:
            index = self.members(item.bucket, item.key, "")
            data = self._plain(item.key)
            found = index.find(item.member)
            data = data[found.start : found.end]
            data = zlib.decompress(data, -15) if found.method else data
        assert item.end != item.start, "nobody can ask for a range of nothing"
        if item.end is not None and item.start >= len(data):
            return Invalid(f"the range is outside the object of {len(data)} bytes: ask within 0..{len(data)}")
        return memoryview(data)[item.start : item.end]

    def _plain(self, key: str) -> bytes:
        """The object, unpacked if it is compressed as a whole."""
        form, data = form_of(key, None), self.objects[key]
        if form is None or not form.packing:
            return data
        if form.packing == "gzip":
            return gzip.decompress(data)
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        data, form = self._plain(key), form_of(key, None)
        kind = form.kind if form else "tar"
        return build_members(kind, lambda start, size: data[start : start + size], len(data), version="v", etag=etag)


def _remembering(objects: dict[str, bytes], listings: list[bytes]) -> MemorySource:
    source = MemorySource(objects)
    source.listings = {found.id: found for found in map(Listing, listings)}
    return source


def numbered_shard(first: int, samples: int) -> bytes:
    """Samples `first`..: each a `.cls` with its number and a `.bin` of bytes that depend on it."""
    return tar_of(
        part
        for number in range(first, first + samples)
        for part in (
            (f"{number:06d}.bin", bytes([number % 251]) * (number % 700)),
            (f"{number:06d}.cls", b"%d" % number),
        )
    )


def label(sample: dict[str, Any]) -> int:
    """The number of one of those samples, which is whole."""
    number: int = sample["cls"]
    assert sample["bin"] == bytes([number % 251]) * (number % 700)
    return number


def as_int(_key: str, data: bytes | memoryview) -> int:
    """Decodes an object that says its number."""
    return int(bytes(data))


def tokens(count: int, first: int = 0, dtype: str = "<u2") -> bytes:
    """Tokens that count up, so that a window says where it is from."""
    return (np.arange(first, first + count) % (1 << 16)).astype(dtype).tobytes()
