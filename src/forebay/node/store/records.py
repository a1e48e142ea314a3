"""Small facts about records: which blocks are here, and records of objects that are not stored.

Theory. The index keeps what a front needs to answer (`core/record.py`). The engine needs the same facts in other forms:
block lists for eviction, the backend's metadata for a new landing, a record to show for an object that no disk took.

Invariant. `info_of(make_record(info, …), info.key)` equals `info`, except for a content type that was not given.
"""

from __future__ import annotations

from forebay.core.ranges import iterate_present
from forebay.core.record import Record, blocks_in, build_head
from forebay.core.types import Bucket, Headers, ObjectInfo


def is_pinned(bucket: Bucket, key: str) -> bool:
    """Whether a pinned prefix covers the key."""
    return any(key.startswith(prefix) for prefix in bucket.pinned)


def present_blocks(record: Record) -> list[int]:
    """Every block of the record that is here; an inline object counts as block 0."""
    if record.inline is not None:
        return [0]
    return list(range(blocks_in(record.size_bytes))) if record.complete else list(iterate_present(record.present))


def cached_bytes(record: Record) -> int:
    """How many bytes of the object are here."""
    if record.complete:
        return record.size_bytes
    size, block_bytes = record.size_bytes, record.block_bytes
    return sum(min(block_bytes, size - block * block_bytes) for block in iterate_present(record.present))


def make_record(info: ObjectInfo, checked_s: float, *, object_id: int = 0, inline: bytes | None = None) -> Record:
    """A record of an object that the store does not have."""
    return Record(
        object_id=object_id,
        size_bytes=info.size_bytes,
        version=info.version,
        etag=info.etag,
        modified_s=info.modified_s,
        checked_s=checked_s,
        head=build_head(info),
        complete=inline is not None,
        inline=inline,
    )


def own_version(object_id: int) -> str:
    """The version of an object that was written here and exists nowhere else yet. No backend makes one like it."""
    return f"~{object_id:x}"


def is_version(record: Record, version: str) -> bool:
    """Whether the record holds the bytes of `version`. An object written here still answers to its version from before
    its flush, so that a read that began earlier goes on."""
    return version == record.version or version == own_version(record.object_id)


_MADE_HEADERS = (b"etag", b"last-modified", b"accept-ranges")  # `build_head` makes these itself


def headers_of(record: Record) -> Headers:
    """The stored content headers and user metadata, read back from the record's head."""
    lines = (line.partition(b": ") for line in record.head.split(b"\r\n") if line)
    return tuple(
        (name.lower().decode(), value.decode()) for name, _, value in lines if name.lower() not in _MADE_HEADERS
    )


def info_of(record: Record, key: str) -> ObjectInfo:
    """The backend's metadata of the record's version."""
    return ObjectInfo(key, record.size_bytes, record.version, record.etag, record.modified_s, headers_of(record))
