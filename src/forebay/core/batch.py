"""Many items in one request, and the frames of the answer.

Theory. A batch names objects, ranges of them, or members of shards, and is answered in its own order by one stream: for
each item a header of 24 bytes and then its bytes, or the error that a GET of it would have been. The header is fixed
and flat because it is read hundreds of thousands of times a second, by Python.

Invariants. (1) As many frames as items, in their order, or the answer ends early and is no answer. (2) A frame with
status 200 carries exactly the bytes asked for; any other carries a msgpack `ErrorOnWire`.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

MEDIA = "application/x-forebay-batch"
FRAME = struct.Struct("<HHIQQ")  # status, flags, zero, size of what follows, size of the whole object or member
COLD = 1  # a flag: the bytes were not here when they were asked for


class Item(msgspec.Struct, array_like=True, frozen=True):
    """Bytes [start, end) of an object, or of a member of a shard; end None: to its end. `etag` without quotes: only
    that version will do."""

    bucket: str
    key: str
    start: int = 0
    end: int | None = None
    member: str = ""
    etag: str = ""


class BatchCall(msgspec.Struct, frozen=True):
    """What `POST /-/v1/batch` takes, as msgpack or JSON."""

    items: list[Item]
    format: Literal["frames", "tar"] = "frames"
