"""The seam to object storage: five methods, each with its promise. Everything behind it is interchangeable.

Theory. A backend reads and lists one bucket (a place with an optional prefix). Behaviour (retry, rate, faults,
counting) is added by wrapping, and `stack.py` shows the whole stack in one function. Exactly one layer retries: the
`Retrying` wrapper; obstore's own retry is off. Errors are `core.errors` kinds only (`backends/errors.py` translates).

A fetch is a stream of `bytes`-like chunks that arrive in order. Its `info` is known before the first chunk. A stream
that ends early raises `Unavailable`; it never just ends. Closing a stream early frees its connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from forebay.core.types import ListPage, ObjectInfo, RangeSpec


class Fetch(Protocol):
    """A body on its way. `start`/`end` are the half-open range this body covers, resolved against `info.size_bytes`."""

    info: ObjectInfo
    start: int
    end: int

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Give up the rest. May be called twice, and after the end."""


class Backend(Protocol):
    """One bucket of some object storage. All methods are safe to call concurrently and to cancel."""

    scheme: str  # s3, gs, az, https, file, memory: for metrics and messages
    read_only: bool

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        """Open `key` (or a range of it) for streaming in one request.

        With `version`, only that version will do: `Precondition` if the backend has another now. `NotFound` (code
        `NoSuchKey` or `NoSuchBucket`); `Invalid` code `InvalidRange` for a range outside the object; `Denied`;
        `Unavailable`. A range on an empty object is `InvalidRange`.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Metadata now. Errors as `fetch`."""
        ...

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        """None if the backend still has `version`, else what it has now; `NotFound` if it has nothing. One request."""
        ...

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        """The next page in byte order, `limit` at most 1,000. Uses O(page) memory whatever the bucket's size."""
        ...

    async def probe(self) -> None:
        """Return if the bucket answers with these credentials, else raise the kind that says why not."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
