"""Counts the requests to a backend and its answers, for metrics and tests.

Theory. This layer lies beneath `Retrying`, so every request that leaves for the backend passes here, retries included.
Statements like "each block is fetched exactly once" are statements about these counters. Numbers only grow; a reader
takes differences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import msgspec

from forebay.backends.seam import Backend, Body, Fetch, PartSeen, UploadSeen
from forebay.core.errors import ForebayError
from forebay.core.types import Headers, ListPage, ObjectInfo, RangeSpec
from forebay.ports.clock import Clock

# Upper bounds in seconds: a backend in the same rack answers in 1 ms, one that retries inside in 10 s.
FIRST_BYTE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

ResultT = TypeVar("ResultT")


class BackendCounters(msgspec.Struct):
    """What one bucket's backend did, since it was opened.

    `requests` by verb (fetch, head, check, list, probe, put, delete, copy, begin_upload, put_part, complete_upload,
    abort_upload, list_parts, list_uploads) and `errors` by kind count single attempts; `retries` those made again.
    `written_bytes` are those of puts and parts that the backend took. `first_byte_counts[i]` counts fetches whose first
    byte came within `FIRST_BYTE_BUCKETS_S[i]` but not within the bound before; the last item those that came later than
    all. `uploads_left` may be at the backend without anybody knowing their ids.
    """

    requests: Counter[str] = msgspec.field(default_factory=Counter)
    errors: Counter[str] = msgspec.field(default_factory=Counter)
    retries: int = 0
    read_bytes: int = 0
    peer_bytes: int = 0  # that other nodes sent in the backend's place
    first_byte_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(FIRST_BYTE_BUCKETS_S) + 1))
    first_byte_sum_s: float = 0.0
    written_bytes: int = 0
    uploads_left: int = 0

    def saw_first_byte(self, seconds: float) -> None:
        """A fetch's first body byte came `seconds` after it was asked for."""
        self.first_byte_counts[bisect_left(FIRST_BYTE_BUCKETS_S, seconds)] += 1
        self.first_byte_sum_s += seconds


class CountingFetch:
    """A body whose bytes are counted as they pass."""

    def __init__(self, inner: Fetch, counters: BackendCounters, clock: Clock, asked_s: float) -> None:
        self.info, self.start, self.end = inner.info, inner.start, inner.end
        self._inner, self._chunks = inner, inner.__aiter__()
        self._counters, self._clock, self._asked_s = counters, clock, asked_s
        self._is_first = True

    def __aiter__(self) -> CountingFetch:
        return self

    async def __anext__(self) -> Any:
        try:
            chunk = await self._chunks.__anext__()
        except ForebayError as error:
            self._counters.errors[error.kind] += 1
            raise
        self._counters.read_bytes += len(chunk)
        if self._is_first:
            self._is_first = False
            self._counters.saw_first_byte(self._clock.monotonic_s() - self._asked_s)
        return chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class Counting:
    """See the module."""

    def __init__(self, inner: Backend, counters: BackendCounters, clock: Clock) -> None:
        self.scheme, self.read_only, self.part_bytes_min = inner.scheme, inner.read_only, inner.part_bytes_min
        self._inner, self._counters, self._clock = inner, counters, clock

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        asked_s = self._clock.monotonic_s()
        fetch = await self._count("fetch", self._inner.fetch(key, range, version=version))
        return CountingFetch(fetch, self._counters, self._clock, asked_s)

    async def head(self, key: str) -> ObjectInfo:
        return await self._count("head", self._inner.head(key))

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self._count("check", self._inner.check(key, version))

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return await self._count("list", self._inner.list_page(prefix, delimiter, start_after, limit))

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        info = await self._count("put", self._inner.put(key, body, headers=headers, expect=expect, tags=tags))
        self._counters.written_bytes += body.size_bytes
        return info

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        await self._count("delete", self._inner.delete(key, expect=expect))

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        copied = self._inner.copy(source_key, key, source_version=source_version, headers=headers)
        return await self._count("copy", copied)

    async def read_tags(self, key: str) -> str:
        return await self._count("read_tags", self._inner.read_tags(key))

    async def write_tags(self, key: str, tags: str) -> None:
        await self._count("write_tags", self._inner.write_tags(key, tags))

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        return await self._count("begin_upload", self._inner.begin_upload(key, headers=headers, tags=tags))

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        token = await self._count("put_part", self._inner.put_part(key, upload_id, number, body))
        self._counters.written_bytes += body.size_bytes
        return token

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        return await self._count("complete_upload", self._inner.complete_upload(key, upload_id, parts, expect=expect))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._count("abort_upload", self._inner.abort_upload(key, upload_id))

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        return await self._count("list_parts", self._inner.list_parts(key, upload_id))

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        return await self._count("list_uploads", self._inner.list_uploads(prefix))

    async def probe(self) -> None:
        await self._count("probe", self._inner.probe())

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _count(self, verb: str, call: Awaitable[ResultT]) -> ResultT:
        self._counters.requests[verb] += 1
        try:
            return await call
        except ForebayError as error:
            self._counters.errors[error.kind] += 1
            raise
