"""Reading one object: is it a hit, and how does a miss become a response? The one place that knows, for every API."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from forebay.core.record import Record
from forebay.core.types import Bucket, RangeSpec
from forebay.node.http.requests import Exchange


class Plan(NamedTuple):
    """What to answer, decided from the record: `head` is all header lines, `record.head` included where it belongs.
    `start`/`end` is the half-open range of the body; for an answer without one (304), both are 0."""

    status: int
    head: bytes
    start: int
    end: int


Decide = Callable[[Record], Plan]  # may raise ForebayError (Precondition, Invalid InvalidRange, …)


class Reads(Protocol):
    def bucket(self, name: str) -> Bucket:
        """The bucket's settings; `NotFound` (`NoSuchBucket`)."""
        ...

    def serve(
        self,
        exchange: Exchange,
        bucket: Bucket,
        key: str,
        range: RangeSpec | None = None,
        decide: Decide | None = None,
        extra: bytes = b"",
    ) -> None:
        """Answer `exchange` with the object, from here if it is a hit, else through the engine.

        Without `decide`: 200 with everything, or 206 with `range`; `extra` header lines are added. With it, what it
        returns is answered (conditions, overrides); `range` is then only what a miss should ask for first. HEAD
        requests are told from GET by the exchange's request and fetch no body.
        """
        ...


def plan_plain(record: Record, range: RangeSpec | None = None, extra: bytes = b"") -> Plan:
    """The plan of an unconditional GET. `Invalid` (`InvalidRange`) for a range outside the object."""
    if range is None:
        return Plan(200, record.head + extra, 0, record.size_bytes)
    start, end = range.resolve(record.size_bytes)
    line = b"Content-Range: bytes %d-%d/%d\r\n" % (start, end - 1, record.size_bytes)
    return Plan(206, record.head + line + extra, start, end)
