"""The index record: everything a front needs to serve a hit, in one small value.

Theory. A hit is one index lookup, one decode and one send. So everything that can be computed when an object lands is
computed then: `head` holds the response's static header lines, ready to send. Block checksums are stored elsewhere, by
object id. Fronts never check them, and they would make a lookup as heavy as the object is large.

An object is a run of blocks of `block_bytes`. If `complete` is set all are present; otherwise `present` is a bitmap,
least significant bit first. A block is marked present only when all of it has landed and its checksum is stored.

Invariants. (1) `inline` is set exactly when the object's bytes are in its record (size <= INLINE_BYTES_MAX); then it is
complete. (2) `complete` implies `present == b""`. (3) An object id belongs to one (bucket, key, version) for ever.
(4) `info_of(make_record(info, …), info.key)` equals `info`, except for a content type that was not given.
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import functools
import math
import re
from enum import IntFlag
from typing import Final

import msgspec

from forebay.core import limits
from forebay.core.ranges import iterate_present
from forebay.core.types import Bucket, Headers, ObjectInfo

OWN_HEADERS: Final = ("x-amz-checksum-", "x-forebay-")  # how stored headers begin that stay here and only some are told
_OWN: Final = tuple(name.encode() for name in OWN_HEADERS)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WORD_START: Final = "=?ISO-8859-1?B?"
_WORD: Final = re.compile(r"=\?ISO-8859-1\?B\?([A-Za-z0-9+/]+={0,2})\?=")


class State(IntFlag):
    """What is true of a record beyond its bytes."""

    CLEAN = 0
    DIRTY = 1  # acknowledged bytes that the backend has not
    PINNED = 2  # never evicted
    UNVERIFIED = 4  # rebuilt after an unclean machine stop: each block must be verified before its first use
    LOCAL = 8  # of a bucket without a backend: these bytes are the only ones
    OWNED = 9  # dirty or local: the truth however old, and never a victim


PINNED: Final = int(State.PINNED)  # as plain numbers, for what runs with every write: `&` of a flag costs 0.5 µs
OWNED: Final = int(State.OWNED)


class Record(msgspec.Struct, array_like=True, gc=False):
    """See the module's header. `checked_s` is when the backend last confirmed the version (Unix time; 0 and `MISSED` of
    `core/machines/opening.py`: it did not); `used_minute` is the last use in minutes since the epoch, coarse because
    exact order costs a write per read. `key` is set only where the index key cannot hold it whole."""

    object_id: int
    size_bytes: int
    version: str
    etag: str
    modified_s: float
    checked_s: float
    head: bytes
    complete: bool
    state: int = 0
    used_minute: int = 0
    inline: bytes | None = None
    present: bytes = b""
    key: str = ""
    block_bytes: int = limits.BLOCK_BYTES

    def has(self, start: int, end: int) -> bool:
        """Whether every byte of the half-open range is present."""
        if self.complete or start >= end:
            return True
        present, block_bytes = self.present, self.block_bytes
        for block in range(start // block_bytes, -(-end // block_bytes)):
            if block >> 3 >= len(present) or not present[block >> 3] >> (block & 7) & 1:
                return False
        return True


encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Record).decode


def blocks_in(size_bytes: int, block_bytes: int = limits.BLOCK_BYTES) -> int:
    """How many blocks an object of `size_bytes` has; an empty object has none."""
    return -(-size_bytes // block_bytes)


@functools.lru_cache(maxsize=1024)
def _http_date(second_s: int) -> str:
    """What is written in one second has one date."""
    return email.utils.formatdate(second_s, usegmt=True)


def header_text(raw: bytes) -> str:
    """The value of a stored header as text: UTF-8 as it is, other bytes as RFC 2047 writes them. Backends get that
    text: it is ASCII, and S3 itself shows such values so."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = ""
    if text.encode() == raw == header_bytes(text):
        return text
    return f"{_WORD_START}{base64.b64encode(raw).decode()}?="


def header_bytes(text: str) -> bytes:
    """The bytes that `header_text` wrote as `text`. Any other text, or one that hides a control character, stands for
    itself."""
    match = _WORD.fullmatch(text)
    if match is not None:
        try:
            raw = base64.b64decode(match[1], validate=True)
        except binascii.Error:
            raw = b""
        if raw and not _CONTROL.search(raw.decode("latin-1")) and header_text(raw) == text:
            return raw
    return text.encode()


def build_head(info: ObjectInfo) -> bytes:
    """The static header lines of a 200 or 206 for `info`: ETag, Last-Modified, Accept-Ranges and the stored headers.

    What only some are told (OWN_HEADERS) stands before all else, where `split_head` finds it at once. Control
    characters cannot pass: a stored header that holds one is dropped, since it could split the response.
    """
    own = shown = ""
    kind = "Content-Type: binary/octet-stream\r\n"
    for name, value in info.headers:
        if name == "content-type":
            kind = ""
        if _CONTROL.search(name) or _CONTROL.search(value):
            continue
        if value.startswith(_WORD_START):
            value = header_bytes(value).decode(errors="surrogateescape")
        if name.startswith(OWN_HEADERS):
            own += f"{name}: {value}\r\n"
        else:
            shown += f"{name if name.startswith('x-amz-') else name.title()}: {value}\r\n"
    etag = f'ETag: "{info.etag}"\r\n' if info.etag and not _CONTROL.search(info.etag) else ""
    date = _http_date(math.floor(info.modified_s))
    return f"{own}{etag}Last-Modified: {date}\r\nAccept-Ranges: bytes\r\n{kind}{shown}".encode(errors="surrogateescape")


def split_head(head: bytes) -> tuple[bytes, bytes]:
    """What stands first in a head that `build_head` made and only some are told, and the rest of it."""
    at = 0
    while head.startswith(_OWN, at):
        at = head.index(b"\r\n", at) + 2
    return head[:at], head[at:]


# --- facts about records ---------------------------------------------------------------------------------------------
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
        (name.lower().decode(), header_text(value)) for name, _, value in lines if name.lower() not in _MADE_HEADERS
    )


def info_of(record: Record, key: str) -> ObjectInfo:
    """The backend's metadata of the record's version."""
    return ObjectInfo(key, record.size_bytes, record.version, record.etag, record.modified_s, headers_of(record))
