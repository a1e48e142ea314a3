"""The readers' side of the store: look up, lease a data file, list. Many processes may; none disturbs another.

Theory. A hit is one LMDB get and one decode. The read transaction lasts for that get only: beginning one costs a tenth
of the look-up, and a kept one would pin old pages and never see new blocks. Data files stay open between requests, each
under a shared `flock` that prevents the punching of holes.

A record is trustworthy under a lease only if it is read *after* the lease is taken. The engine first takes blocks out
of the index and then punches under an exclusive lock, so the blocks that the index lists under the lease stay in the
file. For an open file this order holds by itself: its lease is older than the look-up.

A key's volume is computed (`whereabouts.py`) from the volumes and the weights in their marks. A rebuilt index has
another directory, named by the mark; `refresh` notices.

Bytes are compared with their checksums before their first use in a process (`disk/compared_blocks.py`). `lookup`
compares inline records, which costs a few microseconds once. A caller with a thread compares a file's blocks (`prove`),
since they are large. A lease `has` only what was compared.

Rejected: one read transaction per event-loop turn (0.1 microseconds less, and a stalled front keeps the index growing).

Invariants. (1) A `LeasedFile` holds its lease as long as it is open. (2) Files in use are never closed. (3) At most
`files_open_max` idle files are open.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import count, islice
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid
from forebay.core.messages.wire import VolumeAt
from forebay.core.record import Record, blocks_in, decode_record
from forebay.core.types import ListEntry
from forebay.node.store.disk import files, index, ledger, volume
from forebay.node.store.disk.compared_blocks import PAGE_BITS, PLACE, Compared
from forebay.node.store.disk.keys import index_key
from forebay.node.store.whereabouts import Whereabouts
from forebay.ports import clock

_NOTHING = Record(0, 0, "", "", 0.0, 0.0, b"", complete=False)
_incoming = count(int(clock.wall_s() * 1e6))  # process ids are reused, and a dead process's file may still be there
_LOCKED = -2  # no descriptor: holes are being made in the file
LANDING_LEASE_WAIT_S = 30.0  # as long as a disk may take to punch holes before it counts as stuck
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC


class LeasedFile:
    """An open data file under a shared lease: while it is held, no listed block of it becomes a hole.

    `fd` is for pread and sendfile (never close it yourself). `record` is what the index said *after* the lease was
    taken: check `has(start, end)` again before sending. Call `release()` once when the response is done.
    """

    __slots__ = ("_doomed", "_reader", "_uses", "_view", "fd", "object_id", "record")

    def __init__(
        self, reader: StoreReader, fd: int, object_id: int, record: Record, view: _View | None, *, cached: bool = True
    ) -> None:
        self._reader, self._view = reader, view
        self._uses = 1
        self._doomed = not cached
        self.fd = fd
        self.object_id = object_id
        self.record = record

    def has(self, start: int, end: int) -> bool:
        """Whether every byte of the half-open range is listed, and was compared in this process."""
        if self._reader.compared.whole(self.object_id):
            return self.record.has(start, end)
        first, stop = self._blocks(start, end)
        return self.record.has(start, end) and self._reader.compared.has(self.object_id, first, stop)

    def prove(self, start: int, end: int) -> bool:
        """Compare those of these listed bytes that were not compared yet. False if something does not match or cannot
        be read: ask the engine for it. Reads the disk: any thread."""
        assert self._view is not None, "landing bytes are hashed by who lands them"
        compared, record = self._reader.compared, self.record
        blocks = [
            block for block in range(*self._blocks(start, end)) if not compared.has(self.object_id, block, block + 1)
        ]
        try:
            sums = ledger.sums_of(self._view.index, self.object_id, blocks)
            right = all(files.block_sum(self.fd, record, block) == sums[block] for block in blocks)
        except (OSError, Corrupt):
            return False
        if right:
            compared.add(self.object_id, blocks, blocks_in(record.size_bytes, record.block_bytes))
        return right

    def _blocks(self, start: int, end: int) -> tuple[int, int]:
        block_bytes = self.record.block_bytes
        return start // block_bytes, -(-end // block_bytes)

    def again(self) -> LeasedFile:
        """The same lease, to be released once more."""
        self._uses += 1
        return self

    def release(self) -> None:
        """The response no longer needs the file. It stays open and leased until it is dropped or among the oldest."""
        self._uses -= 1
        if self._uses == 0:
            self._reader.put_back(self)


class _View:
    """One volume as a reader sees it."""

    __slots__ = ("begin", "data", "generation", "index", "path", "records", "weight")

    def __init__(self, path: str) -> None:
        mark = volume.read_mark(path)
        if mark is None:
            raise Corrupt(f"volume {path} has no volume.json: restart the node")
        self.path = path
        self.generation = mark.index
        self.weight = mark.weight
        self.index = index.Index(volume.index_path(str(Path(path).absolute()), mark.index))
        self.begin = self.index.begin
        self.records = self.index.records
        self.data = f"{path}/data/"


class StoreReader(Whereabouts[_View]):
    """A process's view of the node's volumes, read-only. For one thread."""

    def __init__(
        self,
        volumes: Sequence[VolumeAt],
        *,
        files_open_max: int = limits.FRONT_FILES_OPEN_MAX,
        suspect: Callable[[str, str, int, str], None] = lambda bucket, key, object_id, reason: None,
    ) -> None:
        """Open every volume that can be opened; `failures` has the others' errors, by volume id. `lookup` calls
        `suspect` with bucket, key, object id and reason of an inline object that does not match its checksum."""
        super().__init__()
        self.compared = Compared()
        self._pages = self.compared.pages
        self._suspect = suspect
        self.failures: dict[str, str] = {}
        self._sole: _View | None = None
        self._stalled: dict[str, str] = {}  # volume id to path
        self._files: dict[int, LeasedFile] = {}
        self._idle: OrderedDict[int, LeasedFile] = OrderedDict()
        self._files_open_max = files_open_max
        self.refresh(volumes)

    # --- volumes ---

    def refresh(self, volumes: Sequence[VolumeAt]) -> None:
        """Follow a new `Welcome`: open new volumes, close removed ones, reopen an index that was rebuilt."""
        wanted = {at.volume_id: at.path for at in volumes}
        self.failures = {}
        weights = {}
        for volume_id in list(self._by_id):
            if volume_id not in wanted:
                self._drop_view(volume_id)
        for volume_id, path in wanted.items():
            weights[volume_id] = self._follow(volume_id, path)
        self._settle(self._by_id, weights)
        self._stalled = {at.volume_id: at.path for at in volumes if at.stalled}
        alone = len(self._by_id) == 1 == len(wanted) and not self._stalled
        self._sole = next(iter(self._by_id.values())) if alone else None

    def _follow(self, volume_id: str, path: str) -> float:
        """Open the volume as it is now; return its weight."""
        view = self._by_id.get(volume_id)
        mark = None
        try:
            mark = volume.read_mark(path)
            if view is not None and (mark is None or mark.index != view.generation or view.path != path):
                self._drop_view(volume_id)
                view = None
            if view is None:
                view = self._by_id[volume_id] = _View(path)
            return view.weight
        except (OSError, Corrupt, Invalid, lmdb.Error) as error:  # Invalid: of a newer format
            self.failures[volume_id] = str(error)
            return mark.weight if mark is not None else 1.0

    def _drop_view(self, volume_id: str) -> None:
        self._by_id.pop(volume_id).index.close()
        self.dropped(list(self._files))

    def _view(self, bucket: str, key: str) -> _View | None:
        if self._sole is not None:
            return self._sole
        volume_id = self.volume_of(bucket, key)
        return None if volume_id in self._stalled else self._by_id.get(volume_id)

    def _failed(self, view: _View, error: Exception) -> None:
        for volume_id, each in self._by_id.items():
            if each is view:
                self.failures[volume_id] = str(error)

    # --- look up ---

    def lookup(self, bucket: str, key: str) -> Record | None:
        """The committed record, or None; also None if the volume cannot be read (`failures` says why)."""
        view = self._sole or self._view(bucket, key)
        if view is None:
            return None
        entry = index_key(bucket, key)
        try:
            value = view.begin(view.records).get(entry)
            if value is None:
                return None
            record: Record = decode_record(value)
        except lmdb.MapResizedError:
            view.index.env.set_mapsize(0)  # the engine let the index grow: follow
            return self.lookup(bucket, key)
        except (lmdb.Error, msgspec.MsgspecError) as error:
            self._failed(view, error)
            return None
        if record.inline is not None:
            page = self._pages.get(record.object_id >> PAGE_BITS)  # `Compared.whole`, without the call
            if page is None or not page[record.object_id & PLACE]:
                return self._first_look(view, bucket, key, record)
        return None if record.key and record.key != key else record

    def _first_look(self, view: _View, bucket: str, key: str, record: Record) -> Record | None:
        """An inline record whose bytes were not compared yet; None, after a call of `suspect`, if they are wrong."""
        if record.key and record.key != key:
            return None
        assert record.inline is not None, "of a file only blocks are compared"
        try:
            there = view.index.get("ids", ledger.id_key(record.object_id))
        except Corrupt as error:
            self._failed(view, error)
            return None
        if there is None:
            return None  # it was just replaced: the engine knows
        if xxhash.xxh3_64_intdigest(record.inline) != int.from_bytes(there[:8], "little"):
            self._suspect(bucket, key, record.object_id, "its bytes in the index do not match their checksum")
            return None
        self.compared.add(record.object_id, (0,), 1)
        return record

    # --- data files ---

    def acquire(self, bucket: str, key: str, record: Record) -> LeasedFile | None:
        """Open (or find open) the data file of `record`, as `lookup` just returned it, under a shared lease.

        None when the object changed, is being evicted or its file cannot be opened: ask the engine instead.
        """
        leased = self._files.get(record.object_id)
        if leased is not None:
            if leased._uses == 0:
                del self._idle[record.object_id]
            leased._uses += 1
            leased.record = record
            return leased
        opened = self.open_apart(bucket, key, record)
        if opened is None:
            return None
        leased = self._files[record.object_id] = LeasedFile(
            self, opened[0], record.object_id, opened[1], self._view(bucket, key)
        )
        return leased

    def acquire_apart(self, bucket: str, key: str, record: Record) -> LeasedFile | None:
        """As `acquire`, but the file closes with its last `release`."""
        opened = self.open_apart(bucket, key, record)
        if opened is None:
            return None
        return LeasedFile(self, opened[0], record.object_id, opened[1], self._view(bucket, key), cached=False)

    def open_apart(self, bucket: str, key: str, record: Record) -> tuple[int, Record] | None:
        """As `acquire`, but returns a read-only descriptor with its own lease, and the record read under it. The caller
        closes it, or gives it to another process, which then holds the lease."""
        view = self._view(bucket, key)
        fd = self._open(view.data + files.file_name(record.object_id)) if view is not None else -1
        if fd < 0:
            return None
        again = self.of_object(bucket, key, record.object_id)
        if again is None:
            os.close(fd)
            return None
        return fd, again

    async def open_landing(self, path: str) -> LeasedFile | None:
        """Lease a file that a `Landed` message names; not cached: `release()` closes it. None if it is gone.

        Its `record` lists nothing: only what `Landed` named may be read. While holes are punched in the file (for
        blocks evicted earlier; landed blocks are held for their readers) no lease is available. That must not fail a
        read that nobody else can serve, so this waits, at most LANDING_LEASE_WAIT_S.
        """
        wait_s, until_s = 0.0005, clock.monotonic_s() + LANDING_LEASE_WAIT_S
        while (fd := self._open(path)) == _LOCKED and clock.monotonic_s() < until_s:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.02)
        return LeasedFile(self, fd, 0, _NOTHING, None, cached=False) if fd >= 0 else None

    def _open(self, path: str) -> int:
        """A descriptor with a shared lease; negative if there is none."""
        try:
            fd = os.open(path, _OPEN_FLAGS)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._idle:
                return -1
            self._trim(0)
            try:
                fd = os.open(path, _OPEN_FLAGS)
            except OSError:
                return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            return _LOCKED if isinstance(error, BlockingIOError) else -1
        return fd

    def put_back(self, leased: LeasedFile) -> None:
        """For `LeasedFile.release`."""
        if leased._doomed:
            os.close(leased.fd)
            return
        self._idle[leased.object_id] = leased
        if len(self._idle) > self._files_open_max:
            self._trim(self._files_open_max)

    def _trim(self, keep: int) -> None:
        while len(self._idle) > keep:
            object_id, leased = self._idle.popitem(last=False)
            del self._files[object_id]
            os.close(leased.fd)

    def dropped(self, object_ids: Iterable[int]) -> None:
        """Close the files of these objects: idle ones now, those in use when they are released."""
        for object_id in object_ids:
            self.compared.forget(object_id)
            leased = self._files.pop(object_id, None)
            if leased is None:
                continue
            leased._doomed = True
            if leased._uses == 0:
                del self._idle[object_id]
                os.close(leased.fd)

    def let_go(self) -> None:
        """Close all files, as `dropped`: drops may have been missed while the engine was away."""
        self.dropped(list(self._files))

    @property
    def files_open(self) -> int:
        """How many data files are open, in use or idle (those being closed on release not counted)."""
        return len(self._files)

    # --- writing ---

    def incoming(self, bucket: str, key: str) -> str:
        """A fresh path on the key's volume for a body that is to become this object; no file is there yet. "" if there
        is no usable volume. Remove the file if it does not become one: the store removes only files of dead processes.
        `Unavailable` while the volume's disk does not answer."""
        view = self._sole or self._view(bucket, key)
        if view is None and (path := self._stalled.get(self.volume_of(bucket, key))):
            raise volume.stalled(path, f"{bucket}/{key}")
        return "" if view is None else f"{view.path}/tmp/{volume.INCOMING}{os.getpid()}-{next(_incoming):x}"

    # --- listings ---

    def scan(self, bucket: str, prefix: str = "", start_after: str = "", limit: int = 1000) -> list[tuple[str, Record]]:
        """Up to `limit` records whose keys start with `prefix` and come after `start_after`, in UTF-8 byte order."""
        return self._scan(index.scan_records, bucket, prefix, start_after, limit)

    def scan_entries(self, bucket: str, prefix: str = "", start_after: str = "", limit: int = 1000) -> list[ListEntry]:
        """As `scan`, but only with the fields of a listing, and faster."""
        return self._scan(index.scan_entries, bucket, prefix, start_after, limit)

    def _scan(
        self,
        scan: Callable[[index.Index, str, str, str, int], list[Any]],
        bucket: str,
        prefix: str,
        start_after: str,
        limit: int,
    ) -> list[Any]:
        pages = []
        for view in self._by_id.values():
            try:
                pages.append(scan(view.index, bucket, prefix, start_after, limit))
            except (OSError, Corrupt, msgspec.MsgspecError) as error:
                self._failed(view, error)
        if len(pages) <= 1:
            return pages[0] if pages else []
        return list(islice(merge(*pages, key=_key_bytes), limit))

    # --- end ---

    def close(self) -> None:
        """Close every idle file and every index; files in use close when they are released. May be called twice."""
        for volume_id in list(self._by_id):
            self._drop_view(volume_id)
        self._sole = None
        self._settle({}, {})


def _key_bytes(item: tuple[Any, ...]) -> bytes:
    key: str = item[0]
    return key.encode()
