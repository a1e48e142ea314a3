"""The fast lane: a plain, anonymous GET of an object that is here, answered in one go.

Theory. The normal chain of a request is `http/requests.py`, `s3/operations.py`, `objects/reads.py`. Nearly all requests
of a training job are the same simple case of it: GET, path style, no query, no header that matters for a read, no
identities, and the object is a hit. For these the chain decides nothing, and its calls cost more than the work
(measured at 1 KiB: 8 µs against 3.3). So a connection asks the lane first. The lane either answers exactly what the
chain would have answered, or touches nothing and declines. A test sends the same requests both ways and compares bytes.

What depends only on the header fields (does any of them matter? is the host a virtual one?) is judged once for each
block of fields, when the connection remembers it: `admits`.

Invariants. (1) An answer of the lane is the chain's answer. (2) The lane never answers with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.core import limits
from forebay.core.machines.opening import may_serve
from forebay.core.metrics import BUCKETS
from forebay.core.record import Record
from forebay.core.types import Bucket
from forebay.node.front.http import parser
from forebay.node.front.http.parser import Fields
from forebay.node.front.link import Link
from forebay.node.front.objects.reads import Answer, Reads
from forebay.node.front.s3.errors import RequestIds
from forebay.node.store.reader import StoreReader
from forebay.ports import clock as clocks

if TYPE_CHECKING:
    from forebay.node.front.http.connection import Connection

TARGET_BYTES = bytes(byte for byte in parser.TARGET_BYTES if byte not in b"%?")  # nothing to decode, no query
TARGET_LENGTH_MAX = limits.KEY_BYTES_MAX  # of a bucket and a key: longer ones are for the chain to judge
TOUCHES_MAX = limits.TOUCHES_MAX
# Fields that change nothing about an anonymous read; any other keeps the request in the chain.
_HARMLESS = frozenset(
    (
        b"accept",
        b"accept-charset",
        b"accept-encoding",
        b"accept-language",
        b"amz-sdk-invocation-id",
        b"amz-sdk-request",
        b"connection",
        b"host",
        b"user-agent",
        b"x-amz-request-payer",
    )
)


class Lane:
    """`open_to_all` says whether the node has no identities; `ids` gives each answer its `x-amz-request-id`;
    `path_style` says whether a Host header is a name of the node that leaves the bucket to the path."""

    def __init__(
        self,
        reads: Reads,
        store: StoreReader,
        link: Link,
        *,
        open_to_all: Callable[[], bool],
        ids: RequestIds,
        path_style: Callable[[bytes], bool],
        clock: clocks.Clock,
    ) -> None:
        self._reads = reads
        self._store, self._lookup = store, store.lookup
        self._link = link
        self._touched = link.touched_whole
        self._counts = reads.counts
        self._histogram = reads.counts.hit_seconds
        self._open_to_all = open_to_all
        self._ids = ids
        self._id_start = b"x-amz-request-id: " + ids.prefix
        self.ok = b""  # the first lines of every answer here, made by the server once a second
        self._path_style = path_style
        self._wall_s = clock.wall_s
        self._monotonic_s = clock.monotonic_s
        self._buckets: dict[bytes, Bucket] = {}  # empty while the node has identities

    def follow(self) -> None:
        """Buckets or identities changed."""
        buckets = self._reads.buckets if self._open_to_all() else {}
        self._buckets = {name.encode(): bucket for name, bucket in buckets.items()}

    def admits(self, fields: Fields) -> bool:
        """Whether a GET with these fields may be tried here: HTTP/1.1, kept alive, no body."""
        return (
            fields.length_bytes == 0
            and fields.keep_alive is not False
            and _HARMLESS.issuperset(fields.headers)
            and self._path_style(fields.headers.get(b"host", b""))
        )

    def serve(self, connection: Connection, target: bytes) -> bool:
        """Answer `target` (only TARGET_BYTES in it) on an idle connection whose fields `admits`; return False if it
        cannot."""
        slash = target.find(b"/", 1)
        bucket = self._buckets.get(target[1:slash])
        if bucket is None or len(target) > TARGET_LENGTH_MAX:
            return False
        started_s = self._monotonic_s()
        key = target[slash + 1 :].decode("ascii")
        record = self._lookup(bucket.name, key) if key else None
        if (
            record is None
            or record.head.startswith(b"x-")  # with what only some are told
            or not may_serve(record.state, record.checked_s, bucket.freshness_s, self._wall_s())
            or (bucket.copies > 1 and bucket.is_kept_twice and not self._store.acts())
        ):
            return False
        inline = record.inline
        if not inline:
            return self._serve_file(connection, target, bucket.name, key, record, started_s)
        ids = self._ids
        ids.count = count = ids.count + 1
        size = len(inline)
        at_once = connection.answer_whole(
            b"%b%b%b%08X\r\nContent-Length: %d\r\n\r\n%b" % (self.ok, record.head, self._id_start, count, size, inline)
        )
        touched = self._touched
        touched[record.object_id] = None
        if len(touched) >= TOUCHES_MAX:
            self._link.flush()
        taken_s = self._monotonic_s() - started_s
        counts = self._counts
        if at_once:
            counts.lane_hits += 1
        else:
            counts.hits += 1
        counts.hit_bytes += size
        histogram = self._histogram
        index = int(taken_s * 1e6).bit_length()  # Histogram.add, here without the call
        histogram.counts[index if index < BUCKETS else -1] += 1
        histogram.sum_s += taken_s
        return True

    def _serve_file(
        self, connection: Connection, target: bytes, bucket: str, key: str, record: Record, started_s: float
    ) -> bool:
        if not record.complete or not record.size_bytes:
            return False
        connection.begin_plain_get(target, started_s)
        answer = Answer(200, record.head + self._ids.line(), 0, record.size_bytes)
        if self._reads.hit(connection, bucket, key, record, answer):
            return True
        connection.undo_begin()
        return False
