"""How much room a volume's objects take, and how much is left: the accounts behind 507, eviction and `--capacity`.

Theory. There are two measures. *Payload* is the bytes of objects: what a bucket has cached, what is owed. *Taken* is
what they cost the disk, which capacity and quotas bound. A block of a data file takes its bytes. A small object takes
pages of the index (2.1 times its bytes at 4 KiB), and as many of the durable index while it is owed there.
`small_bytes` estimates this for one object, always the same, so that the books balance and eviction can weigh it. The
pages truly in use, counted as a whole (`pages.py`), add the rest: half-empty leaves, records of files, the durable
index.

There are two kinds of room as well. Files need free disk. Small objects need free pages, and free disk when those are
used up. So evicting small objects makes room only for small objects, and evicting files for both.

Invariants. (1) `Usage` is the sum of its records, so it is zero without any. (2) What is taken is never below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.record import OWNED, Record
from forebay.node.store.disk import presence

SLACK_BYTES = 2 * limits.BLOCK_BYTES  # distance kept on a filesystem that others fill too
PAGE_BYTES = 4096
_NODE_BYTES_MAX = 2030  # an entry above that has pages of its own
_FIELDS_BYTES = 100  # of a record, beside its bytes and its head; and its entry among the ids
_EMPTY_BYTES = 64 * PAGE_BYTES  # an almost empty environment takes this


def small_bytes(record: Record, note_bytes: int = 0) -> int:
    """How many bytes an inline object takes in an index; with its note of that size, in the durable one."""
    value_bytes = len(record.inline or b"") + len(record.head) + _FIELDS_BYTES + note_bytes
    if value_bytes > _NODE_BYTES_MAX:
        return -(-(value_bytes + 16) // PAGE_BYTES) * PAGE_BYTES + _FIELDS_BYTES
    return (value_bytes + _FIELDS_BYTES) * 3 // 2  # leaves are two thirds full


def taken_bytes(record: Record) -> int:
    """How many bytes the object takes: its present blocks, or its part of the index."""
    return small_bytes(record) if record.inline is not None else presence.bytes_of(record)


def overhead(small_bytes: int, index_bytes: int, durable_bytes: int) -> int:
    """How many bytes of pages in use the indexes take beyond `small_bytes`."""
    return max(0, index_bytes - _EMPTY_BYTES - small_bytes) + max(0, durable_bytes - _EMPTY_BYTES)


class Usage:
    """Objects and bytes of a volume, or a change of them. Small: one entry per bucket."""

    def __init__(self) -> None:
        self.by_bucket: dict[str, int] = {}  # payload
        self.objects = 0
        self.bytes = 0  # payload
        self.file_bytes = 0  # taken by blocks of data files
        self.small_bytes = 0  # taken by inline objects
        self.owned_objects = 0
        self.owed_bytes = 0  # payload of what is owned
        self.owned_file_bytes = 0
        self.owned_small_bytes = 0

    @property
    def taken_bytes(self) -> int:
        return self.file_bytes + self.small_bytes

    def swap(self, bucket: str, old: Record | None, new: Record | None) -> None:
        """The record of a key was `old` and is `new`."""
        payload_bytes = 0
        for record, sign in ((old, -1), (new, 1)):
            if record is None:
                continue
            size_bytes = sign * presence.bytes_of(record)
            payload_bytes += size_bytes
            self.objects += sign
            owned = record.state & OWNED
            if record.inline is not None:
                taken = sign * small_bytes(record)
                self.small_bytes += taken
                self.owned_small_bytes += taken if owned else 0
            else:
                self.file_bytes += size_bytes
                self.owned_file_bytes += size_bytes if owned else 0
            if owned:
                self.owned_objects += sign
                self.owed_bytes += size_bytes
        self._add(bucket, payload_bytes, new is not None)

    def remove_small(self, bucket: str, records: Sequence[Record]) -> None:
        """As `swap` to None, for many inline objects that are not owned."""
        payloads = [len(record.inline or b"") for record in records]
        self.objects -= len(payloads)
        self.small_bytes -= sum(map(small_bytes, records))
        self._add(bucket, -sum(payloads), False)

    def _add(self, bucket: str, size_bytes: int, stays: bool) -> None:
        self.bytes += size_bytes
        total = self.by_bucket.get(bucket, 0) + size_bytes
        if total or stays:
            self.by_bucket[bucket] = total
        else:
            self.by_bucket.pop(bucket, None)

    def encode(self, other: Usage, minute: int, next_id: bytes) -> bytes:
        """The sum with a change, as the index stores it; see `decode_usage`."""
        numbers = [mine + theirs for mine, theirs in zip(self._numbers(), other._numbers(), strict=True)]
        by_bucket = dict(self.by_bucket)
        for bucket, size_bytes in other.by_bucket.items():
            by_bucket[bucket] = by_bucket.get(bucket, 0) + size_bytes
        return msgspec.msgpack.encode(_Counted(next_id, minute, numbers, by_bucket))

    def _numbers(self) -> tuple[int, ...]:
        return (
            *(self.objects, self.bytes, self.file_bytes, self.small_bytes),
            *(self.owned_objects, self.owed_bytes, self.owned_file_bytes, self.owned_small_bytes),
        )

    def copy(self) -> Usage:
        """A copy that does not change."""
        same = Usage()
        same.merge(self)
        return same

    def merge(self, other: Usage) -> None:
        for bucket, size_bytes in other.by_bucket.items():
            self._add(bucket, size_bytes, False)
        self.objects += other.objects
        self.file_bytes += other.file_bytes
        self.small_bytes += other.small_bytes
        self.owned_objects += other.owned_objects
        self.owed_bytes += other.owed_bytes
        self.owned_file_bytes += other.owned_file_bytes
        self.owned_small_bytes += other.owned_small_bytes


class _Counted(msgspec.Struct, array_like=True, frozen=True):
    next_id: bytes  # of the same transaction; other writers do not count, and leave a newer one
    minute: int
    numbers: list[int]
    by_bucket: dict[str, int]


def decode_usage(value: bytes | None, next_id: bytes) -> tuple[Usage, int] | None:
    """The stored usage, and its minute (since the epoch). None if none is stored, or if later writers did not count."""
    try:
        kept = msgspec.msgpack.decode(value or b"", type=_Counted)
    except msgspec.MsgspecError:
        return None
    usage = Usage()
    if kept.next_id != next_id or len(kept.numbers) != len(usage._numbers()):
        return None
    usage.objects, usage.bytes, usage.file_bytes, usage.small_bytes = kept.numbers[:4]
    usage.owned_objects, usage.owed_bytes, usage.owned_file_bytes, usage.owned_small_bytes = kept.numbers[4:]
    usage.by_bucket = kept.by_bucket
    return usage, kept.minute


class VolumeUsage(NamedTuple):
    volume_id: str
    path: str
    state: str  # ok | full | stalled | out
    reason: str
    used_bytes: int  # taken by all that is here
    capacity_bytes: int  # what may be taken
    keep_bytes: int  # how much eviction may keep, as it weighs units
    objects: int
    buckets: dict[str, int]  # payload by bucket
    owned_bytes: int = 0  # of used_bytes: what only this node has, never evicted
    owned_objects: int = 0
    owed_bytes: int = 0  # payload of that
    weighed_bytes: int = 0  # of used_bytes: the sum over units


class Room(NamedTuple):
    """A volume at one moment: what is taken, and what is free for what."""

    taken_bytes: int
    overhead_bytes: int  # of `taken_bytes`: beyond the sum over objects
    owned_bytes: int
    file_bytes: int  # could be evicted
    small_bytes: int  # could be evicted
    free_bytes: int  # what the filesystem still gives, less the reserve: may be negative
    index_bytes: int  # free pages
    durable_bytes: int  # free pages of the durable index
    share_bytes: int | None  # of the capacity that was set

    @property
    def capacity_bytes(self) -> int:
        free_bytes = max(0, self.free_bytes) + self.index_bytes + self.durable_bytes
        capacity_bytes = self.taken_bytes + free_bytes
        return capacity_bytes if self.share_bytes is None else min(capacity_bytes, self.share_bytes)

    @property
    def keep_bytes(self) -> int:
        """How much eviction may keep: below what the volume takes, or the next object would pass through.

        Free pages count as room for new objects only if small objects are nearly all that can leave. If files can
        leave, they must make room for files.
        """
        weighed_bytes = self.taken_bytes - self.overhead_bytes
        pages_bytes = self.index_bytes if self.file_bytes * 8 < self.small_bytes else 0
        keep_bytes = weighed_bytes + self.free_bytes + pages_bytes - SLACK_BYTES
        if self.share_bytes is not None:
            keep_bytes = min(keep_bytes, weighed_bytes + self.share_bytes - self.taken_bytes - 1)
        return max(limits.BLOCK_BYTES, keep_bytes)

    @property
    def _capacity_left_bytes(self) -> int:
        """How many bytes the capacity leaves for owned objects."""
        if self.share_bytes is None:
            return 1 << 62
        return self.share_bytes - self.owned_bytes - self.overhead_bytes

    def refuses_file(self, size_bytes: int, here_bytes: int = 0) -> str:
        """Why a file of that size, of which `here_bytes` are on the disk already, has no room even if everything
        evictable were evicted; "" if it has."""
        if size_bytes > self._capacity_left_bytes:
            return _CAPACITY
        missing_bytes = size_bytes - here_bytes - self.free_bytes - self.file_bytes
        if missing_bytes <= 0:
            return ""
        return _PAGES if self.index_bytes + self.small_bytes + self.durable_bytes >= missing_bytes else _DISK

    def refuses_small(self, taken_bytes: int, durable_bytes: int) -> str:
        """As `refuses_file`, for small objects that take this much in the index, and that in the durable one."""
        if taken_bytes + durable_bytes > self._capacity_left_bytes:
            return _CAPACITY
        missing_bytes = max(0, taken_bytes - self.index_bytes - self.small_bytes)
        missing_bytes += max(0, durable_bytes - self.durable_bytes)
        return _DISK if missing_bytes > max(0, self.free_bytes + self.file_bytes) else ""


_CAPACITY = "what only this node has takes the whole capacity: flush or delete objects, or raise --capacity"
_DISK = "the disk is full of what only this node has, or of others' files: flush or delete objects, or add a volume"
_PAGES = (
    f"the index holds the disk's free room, for objects up to {limits.INLINE_BYTES_MAX // limits.KIB} KiB only: delete "
    "or flush larger objects, restart the node to give it back, or add a volume"
)
