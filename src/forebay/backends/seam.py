"""The seam to object storage: the methods that every backend has, and what each promises.

Theory. A backend reads and lists one bucket, or one prefix of it. Wrappers add behaviour (retries, counts, faults), and
`stack.py` composes them in one function. Exactly one layer retries: `Retrying`. obstore's own retry is off. Backends
raise `core.errors` kinds only; `backends/errors.py` translates.

A fetch is a stream of `bytes`-like chunks in order. Its `info` is known before the first chunk. A stream that ends
early raises `Unavailable`. Closing a stream early frees its connection.

A put is atomic: it stores the whole body or nothing. The body is a `Body`: bytes in memory, or a piece of a file that
may still be growing. A failed method may be called again with the same body. `expect` makes a write conditional: None
for no condition, "" for "no such object", else the version that must be there. `Precondition` means that the condition
failed and nothing changed. A `read_only` backend raises `NotSupported` for every write.

Large bodies go as an *upload* (S3's multipart): parts in any order, then one completion. A backend without uploads has
`part_bytes_min` 0 and raises `NotSupported` from the five upload methods: use `put` there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from forebay.core.types import Headers, ListPage, ObjectInfo, RangeSpec


class Fetch(Protocol):
    """A body on its way. `start`/`end` are the half-open range this body covers, resolved against `info.size_bytes`."""

    info: ObjectInfo
    start: int
    end: int

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Give up the rest. May be called twice, and after the end."""


async def _whole(upto: int) -> None:
    """Every byte is there."""


class Body(NamedTuple):
    """`size_bytes` bytes to send: `data`, or those of the file `path` from `offset` on.

    `ready(upto)` returns when the first `upto` of them may be read, and raises if they will never be there.
    `md5` is the MD5 of them all in hex, if it is known: it goes along, so that the backend checks what it got.
    """

    size_bytes: int
    data: bytes | None = None
    path: str = ""
    offset: int = 0
    ready: Callable[[int], Awaitable[None]] = _whole
    md5: str = ""


class PartSeen(NamedTuple):
    """A part that the backend holds. `token` is what `complete_upload` wants."""

    number: int
    token: str
    size_bytes: int


class UploadSeen(NamedTuple):
    """An upload that is neither completed nor aborted."""

    key: str
    upload_id: str
    started_s: float


class Backend(Protocol):
    """One bucket of some object storage. All methods are safe to call concurrently and to cancel."""

    scheme: str  # s3, gs, az, https, file, memory, local: for metrics and messages
    read_only: bool
    part_bytes_min: int  # of a part but the last; 0: no uploads

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        """Open `key` (or a range of it) for streaming in one request.

        With `version`, only that version will do: `Precondition` if the backend has another now. `NotFound` (code
        `NoSuchKey`); `Invalid` code `InvalidRange` for a range outside the object; `Denied`; `Unavailable`. A range on
        an empty object is `InvalidRange`. Every method raises `NoBackendBucket` where the bucket itself is not there.
        """
        ...

    async def head(self, key: str) -> ObjectInfo:
        """Metadata now. Errors as `fetch`."""
        ...

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        """None if the backend still has `version`, else what it has now; `NotFound` if it has nothing. One request,
        and one more where a `NotFound` must be told from `NoBackendBucket`."""
        ...

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        """The next page in byte order, `limit` at most 1,000. Uses O(page) memory whatever the bucket's size."""
        ...

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        """Make `body` the object, with these stored headers (and tags, as a query string); what it is now.

        When the answer is lost the write may have happened: the caller may put the same body again. `Invalid`,
        `Denied`, `Precondition`, `Busy`, `Unavailable`; `NotSupported` for `expect` or `tags` that this backend cannot
        honour.
        """
        ...

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        """There is no such object afterwards. One that was not there is fine, unless `expect` names a version."""
        ...

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        """Copy within this bucket, at the backend. `headers` None: the source's. `Precondition` if the source is
        another version; `NotSupported` where the backend cannot, and the caller must read and put."""
        ...

    async def read_tags(self, key: str) -> str:
        """The object's tags now, as `core` spells them; "" for none, also where there can be none. `NotFound`;
        `NotSupported` where they cannot be read."""
        ...

    async def write_tags(self, key: str, tags: str) -> None:
        """Make these the object's tags, "" for none; it keeps its bytes and its version. Errors as `read_tags`."""
        ...

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        """The id of a new upload."""
        ...

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Send part `number` (1 to 10,000), replacing an earlier one; its token. `NotFound` (`NoSuchUpload`)."""
        ...

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        """Make the object of these (number, token) in order. `NotFound` (`NoSuchUpload`) also when an earlier call,
        whose answer was lost, completed it: look at the object."""
        ...

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Forget the upload and its parts. One that is gone is fine."""
        ...

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        """Every part the backend holds, by number. `NotFound` (`NoSuchUpload`)."""
        ...

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        """Open uploads under `prefix`; at most 1,000."""
        ...

    async def probe(self) -> None:
        """Return if the bucket answers with these credentials, else raise the kind that says why not."""
        ...

    async def aclose(self) -> None:
        """Keep no connection from now on. What is under way goes on, and so does whoever still holds this."""
