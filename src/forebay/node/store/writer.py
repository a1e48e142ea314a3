"""The writer's side of the store. Signatures settled; bodies follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from forebay.core.errors import NotSupported
from forebay.core.record import Record
from forebay.core.types import ObjectInfo
from forebay.core.wire import VolumeAt


class StoreEvent(NamedTuple):
    """Something an operator may want to know. `kind`: volume-full, volume-healed, volume-failed, index-rebuilt,
    block-bad, orphan-removed, …; `volume_id` may be empty."""

    kind: str
    volume_id: str
    detail: str


class Unit(NamedTuple):
    """What eviction counts: one present block of a data file, or a whole inline object (`block` is then 0)."""

    bucket: str
    key: str
    object_id: int
    block: int
    size_bytes: int
    used_minute: int
    state: int  # core.record.State


class VolumeUsage(NamedTuple):
    volume_id: str
    path: str
    state: str  # ok | full | failed
    reason: str
    used_bytes: int  # bytes of present blocks and inline objects
    capacity_bytes: int  # what the store may fill
    free_bytes: int  # what the filesystem still gives, less the reserve
    objects: int
    buckets: dict[str, int]  # bytes by bucket


class Reclaimed(NamedTuple):
    freed_bytes: int
    deferred: list[int]  # object ids whose holes a reader's lease still forbids: send `Dropped`, call `reclaim` later


class Landing:
    """An object (one version) whose blocks are landing in a data file. Made by `Store.begin`; call `close()` at the end.

    `path` is where fronts may read landed bytes, at their natural offsets, from the start to long after `close`.
    """

    bucket: str
    info: ObjectInfo
    object_id: int
    path: str

    @property
    def record(self) -> Record | None:
        """The object's record, pending changes included; None while no block is whole (or if it was superseded)."""
        raise NotSupported("not written yet")

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes at their place. Releases the GIL. `Unavailable` when the disk is full or failing: pass through."""
        raise NotSupported("not written yet")

    def finish_block(self, block: int, xxh3: int) -> None:
        """The block is whole and `xxh3` (xxh3-64, seed 0) is the checksum of its bytes: list it with the next flush."""
        raise NotSupported("not written yet")

    def close(self) -> None:
        """No more bytes. A landing without a single whole block leaves nothing behind. Twice is fine."""
        raise NotSupported("not written yet")


class Store:
    """The node's volumes, as their one writer sees them."""

    @classmethod
    def open(
        cls,
        dirs: Sequence[str | Path],
        *,
        capacity_bytes: int | None = None,
        on_event: Callable[[StoreEvent], None] | None = None,
    ) -> Store:
        """Open or create a volume in each directory. `Exists` if another node holds one; `Invalid` for an unknown format.

        A volume that cannot be used (I/O errors) is left out and told to `on_event`; `Unavailable` if none is left.
        `capacity_bytes` bounds all volumes together; without it, what the filesystems have.
        """
        raise NotSupported("not written yet")

    @property
    def pending(self) -> int:
        """Changes that the next `flush` makes visible."""
        raise NotSupported("not written yet")

    def volumes(self) -> list[VolumeAt]:
        """The usable volumes, for `Welcome`."""
        raise NotSupported("not written yet")

    def begin(self, bucket: str, info: ObjectInfo, *, checked_s: float) -> Landing:
        """Make room for this version's blocks; resumes the file that already holds some blocks of the same version.

        Another version's record is replaced when the first block of this one is whole. While a landing of the same
        version is open, the same landing is returned and must be closed as often. `Unavailable`: pass through.
        """
        raise NotSupported("not written yet")

    def put_inline(self, bucket: str, info: ObjectInfo, data: bytes, *, checked_s: float) -> Record:
        """Store a small object (<= INLINE_BYTES_MAX) whole with the next flush. `Unavailable`: pass through."""
        raise NotSupported("not written yet")

    def flush(self) -> int:
        """Commit what is pending, one LMDB transaction per volume; how many changes. `Unavailable` if a volume fails."""
        raise NotSupported("not written yet")

    def lookup(self, bucket: str, key: str) -> Record | None:
        """The record, pending changes included."""
        raise NotSupported("not written yet")

    def find(self, object_id: int) -> tuple[str, str, Record] | None:
        """Bucket, key and record of an object id."""
        raise NotSupported("not written yet")

    def confirm(self, confirmed: Iterable[tuple[str, str, str, float]]) -> None:
        """The backend confirmed (bucket, key, version) at `checked_s`; those whose version differs are passed over."""
        raise NotSupported("not written yet")

    def forget(self, bucket: str, key: str) -> int | None:
        """Drop the object's record (and later its file); its object id, or None if there was none."""
        raise NotSupported("not written yet")

    def drop_units(self, units: Iterable[tuple[int, int]]) -> list[int]:
        """Take (object id, block) out of the index; object ids that are wholly gone. `flush`, then `reclaim`.

        An object whose last block goes loses its record. Unknown units are passed over.
        """
        raise NotSupported("not written yet")

    def reclaim(self, *, steps_max: int = 1000) -> Reclaimed:
        """Give the space of committed drops back to the filesystem. May run in a worker thread."""
        raise NotSupported("not written yet")

    def touch(self, object_ids: Iterable[int], minute: int) -> None:
        """These were used in `minute` (minutes since the epoch). Kept lazily: a crash may forget it."""
        raise NotSupported("not written yet")

    def set_pinned(self, bucket: str, key: str, pinned: bool) -> bool:
        """Set or clear the record's PINNED state; whether there is a record."""
        raise NotSupported("not written yet")

    def check_blocks(self, record: Record, bucket: str, key: str, blocks: Sequence[int]) -> list[int]:
        """Re-read these present blocks (or the inline bytes) and return those that do not match. Worker threads may."""
        raise NotSupported("not written yet")

    def settle_checked(
        self, bucket: str, key: str, object_id: int, good: Sequence[int], bad: Sequence[int]
    ) -> Record | None:
        """Note the outcome of `check_blocks`: bad blocks are dropped (and told), good ones stop being unverified.

        The record afterwards; UNVERIFIED goes when no present block is in doubt.
        """
        raise NotSupported("not written yet")

    def doubtful(self, record: Record, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that must be checked before use: none unless the record is UNVERIFIED."""
        raise NotSupported("not written yet")

    def usage(self) -> list[VolumeUsage]:
        """Every volume, failed ones too."""
        raise NotSupported("not written yet")

    def units(self) -> Iterator[Unit]:
        """Every unit present, to rebuild the eviction machine after a start. Streams: memory does not grow."""
        raise NotSupported("not written yet")

    def sweep(self) -> Iterator[int]:
        """Background: remove data files without a record. Yields after each directory (how many were removed)."""
        raise NotSupported("not written yet")

    def housekeep(self) -> None:
        """Every few seconds: clear slots of dead readers, let full volumes heal, look whether directories are there."""
        raise NotSupported("not written yet")

    def sync(self) -> None:
        """Put everything on the disks. May run in a worker thread, and take long."""
        raise NotSupported("not written yet")

    def close(self, *, clean: bool = True) -> None:
        """Flush and close. With `clean`, sync first and leave the mark that lets the next start trust the index."""
        raise NotSupported("not written yet")
