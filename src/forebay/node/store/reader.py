"""The readers' side of the store: look up, lease a data file, list. Signatures settled; bodies follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay.core import limits
from forebay.core.errors import NotSupported
from forebay.core.record import Record
from forebay.core.types import ListEntry
from forebay.core.wire import VolumeAt


class LeasedFile:
    """An open data file under a shared lease: while it is held, no listed block of it becomes a hole.

    `fd` is for pread and sendfile (never close it yourself); `record` is what the index said *after* the lease was
    taken: check `record.has(start, end)` again before sending. Call `release()` once when the response is done.
    """

    __slots__ = ("fd", "object_id", "record")
    fd: int
    object_id: int
    record: Record

    def release(self) -> None:
        """The response no longer needs the file. It stays open, leased and cached until it is dropped or the oldest."""
        raise NotSupported("not written yet")


class StoreReader:
    """A process's view of the node's volumes, read-only. Not for use by two threads at once."""

    def __init__(self, volumes: Sequence[VolumeAt], *, files_open_max: int = limits.FRONT_FILES_OPEN_MAX) -> None:
        raise NotSupported("not written yet")

    def refresh(self, volumes: Sequence[VolumeAt]) -> None:
        """Follow a new `Welcome`: open what came, close what went, reopen an index that was rebuilt."""
        raise NotSupported("not written yet")

    def lookup(self, bucket: str, key: str) -> Record | None:
        """The committed record, or None. None too where the volume cannot be read (`failures` says why)."""
        raise NotSupported("not written yet")

    def acquire(self, bucket: str, key: str, record: Record) -> LeasedFile | None:
        """Open (or find open) the data file of `record`, as `lookup` just returned it, under a shared lease.

        None when the object changed, is being evicted or its file cannot be opened: ask the engine instead.
        """
        raise NotSupported("not written yet")

    def open_landing(self, path: str) -> LeasedFile | None:
        """Lease a file that a `Landed` message names; not cached: `release()` closes it. None if it is gone."""
        raise NotSupported("not written yet")

    def dropped(self, object_ids: Iterable[int]) -> None:
        """Close the files of these objects: idle ones now, those in use when they are released."""
        raise NotSupported("not written yet")

    def scan(self, bucket: str, prefix: str = "", start_after: str = "", limit: int = 1000) -> list[tuple[str, Record]]:
        """Up to `limit` records whose keys start with `prefix` and come after `start_after`, in UTF-8 byte order."""
        raise NotSupported("not written yet")

    def scan_entries(self, bucket: str, prefix: str = "", start_after: str = "", limit: int = 1000) -> list[ListEntry]:
        """As `scan`, but only what a listing shows, and several times faster."""
        raise NotSupported("not written yet")

    def close(self) -> None:
        """Close every file and index. Twice is fine."""
        raise NotSupported("not written yet")
