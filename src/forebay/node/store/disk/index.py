"""One volume's index: an LMDB environment, its tables, changes not yet committed, and ordered scans.

Theory. LMDB gives one writer and many readers in other processes a consistent view at memory speed; a reader never
waits. It is opened without sync: what the kernel has survives any process, and after a machine stop the index is
rebuilt from the data files (`volume.py` decides). Changes gather in a dictionary per table and are written sorted, in
one transaction: group commit. The writer's own look-ups see the dictionary first. Another thread may do the writing,
since the disk may make it wait: `seal` sets changes aside, and look-ups see them between later changes and committed
ones.

One process may open an environment only once (LMDB's locks belong to the process), yet engine and front may share a
process (`--fronts 0`). So environments are counted here by directory, and shared.

Rejected: a write transaction kept open between flushes (a full map loses the batch; here it is retried); a table of
secondary keys for listings (the order of the index is the order of a listing).

Invariants. (1) `flush` writes exactly what `get` returned before. (2) A failed flush leaves index and pending changes
as they were.
"""

from __future__ import annotations

import errno
import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import lmdb
import msgspec

from forebay.core import limits
from forebay.core.errors import Bug, Corrupt
from forebay.core.record import Record, decode_record
from forebay.core.types import ListEntry
from forebay.node.store.disk import keys, pages, reader_tables
from forebay.node.store.disk.pages import Pages

TABLES = ("records", "ids", "sums", "doubts", "used", "meta", "notes")

CUT_SHORT_BYTES = 16 * limits.MIB  # where less is free, a transaction may not have found room

Item = TypeVar("Item")
_Changes = dict[str, dict[bytes, bytes | None]]


class _Shared:
    """An open environment and how many in this process use it."""

    def __init__(self, env: Any, writable: bool) -> None:
        self.env = env
        self.writable = writable
        self.uses = 1


_open: dict[str, _Shared] = {}


def _open_shared(path: str, map_bytes: int, *, write: bool) -> _Shared:
    shared = _open.get(path)
    if shared is not None:
        if write and not shared.writable:
            raise Bug(f"the index {path} is open for reading in this process: open the Store before its readers")
        shared.uses += 1
        return shared
    shared = _open[path] = _Shared(open_env(path, map_bytes, write=write, sync=False, tables=len(TABLES)), write)
    return shared


def open_env(path: str, map_bytes: int, *, write: bool, sync: bool, tables: int) -> Any:
    """Open an LMDB environment. If address space is bounded (ulimit -v, a container), with a smaller map, which
    grows."""
    while True:
        try:
            with reader_tables.seated(path):
                return lmdb.open(
                    path,
                    map_size=map_bytes,
                    readonly=not write,
                    create=write,
                    sync=sync,
                    metasync=sync,
                    max_dbs=tables,
                    max_readers=limits.INDEX_READERS_MAX,
                    max_spare_txns=4,
                )
        except (lmdb.MemoryError, MemoryError):
            if map_bytes <= limits.GIB:
                raise
            map_bytes //= 4


def close_env(path: str, env: Any, *, write: bool) -> None:
    """Close what `open_env` opened."""
    table = reader_tables.place(path)
    env.close()
    reader_tables.left(path, table, wrote=write)


def check_size(env: Any, data: str) -> None:
    """Raise `Corrupt` for a file that is shorter than its map: touching the missing part would kill the process
    (SIGBUS).

    LMDB may leave a few allocated pages at the end unwritten. That much is filled up; more means that the file was cut.
    """
    need = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    have = os.path.getsize(data)
    if have < need - 1024 * 1024:
        raise Corrupt(f"the index {data} has {have} of {need} bytes")
    if have < need:
        os.truncate(data, need)


class Index:
    """An open index. Threads: `get` and `write` from any; everything else from the one that opened it."""

    def __init__(self, path: str, *, write: bool = False, map_bytes: int = limits.INDEX_MAP_BYTES) -> None:
        """Open; with `write`, make what is missing. `Corrupt` when the files are not a whole index."""
        self.path = path
        data = os.path.join(path, "data.mdb")
        if os.path.exists(data) and 0 < os.path.getsize(data) < 8192:
            raise Corrupt(f"the index {path} is cut short: it is rebuilt from the data files when the node starts")
        try:
            self._shared = _open_shared(path, map_bytes, write=write)
        except lmdb.Error as error:
            raise as_error(error, path) from error
        self.env = self._shared.env
        try:
            if write:
                check_size(self.env, data)
            self.tables = {name: self.env.open_db(name.encode(), create=write) for name in TABLES}
        except lmdb.Error as error:
            self.close()
            raise as_error(error, path) from error
        except Corrupt:
            self.close()
            raise
        self.records = self.tables["records"]
        self.begin = self.env.begin
        self._pending: _Changes = {name: {} for name in TABLES}
        self._sealed: _Changes = {}  # being written, or empty

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value, pending changes first. `Corrupt` when LMDB finds its file broken."""
        pending = self._pending[table]
        if pending and key in pending:
            return pending[key]
        if self._sealed and key in self._sealed[table]:
            return self._sealed[table][key]
        try:
            value: bytes | None = self.begin(self.tables[table]).get(key)
        except lmdb.Error as error:
            raise as_error(error, self.path) from error
        return value

    def get_many(self, table: str, keys: Iterable[bytes]) -> list[bytes | None]:
        """As `get`, for many keys at once."""
        pending = {**self._sealed[table], **self._pending[table]} if self._sealed else self._pending[table]
        try:
            with self.begin(self.tables[table]) as txn:
                if not pending:
                    return list(map(txn.get, keys))
                return [pending[key] if key in pending else txn.get(key) for key in keys]
        except lmdb.Error as error:
            raise as_error(error, self.path) from error

    def delete_many(self, table: str, keys: Iterable[bytes]) -> None:
        """Delete these with the next `flush`; missing ones are no error."""
        self._pending[table].update(dict.fromkeys(keys))

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Set the value with the next `flush`; None deletes."""
        self._pending[table][key] = value

    def pending_or(self, table: str, key: bytes, value: bytes) -> bytes | None:
        """What a committed value becomes with the next `flush`."""
        if self._sealed:
            value = self._sealed[table].get(key, value)  # type: ignore[assignment]
        return self._pending[table].get(key, value)

    def is_pending(self, table: str, key: bytes) -> bool:
        """Whether the value that `get` returns is not committed yet."""
        return key in self._pending[table] or (bool(self._sealed) and key in self._sealed[table])

    @property
    def pending(self) -> int:
        """How many changes the next `flush` or `seal` takes."""
        return sum(map(len, self._pending.values()))

    def discard(self) -> None:
        """Forget pending and sealed changes."""
        self._pending, self._sealed = {name: {} for name in TABLES}, {}

    def seal(self) -> int:
        """Set aside the pending changes for `write`; return how many. The last `write` must have been reported
        `written`."""
        assert not self._sealed, "two commits of one index at once"
        count = self.pending
        if count:
            self._sealed, self._pending = self._pending, {name: {} for name in TABLES}
        return count

    def write(self) -> bool:
        """Write the sealed changes in one transaction. Any thread. False: the map must `grow` first, while nobody
        reads.

        `OSError` (ENOSPC, EIO, …) or `Corrupt` if it cannot: nothing was changed.
        """
        sealed = self._sealed
        try:
            with self.env.begin(write=True) as txn:
                for name, changes in sealed.items():
                    if changes:
                        self._write(txn, self.tables[name], changes)
        except lmdb.MapFullError:
            return False
        except lmdb.Error as error:
            raise as_error(error, self.path) from error
        return True

    def grow(self) -> None:
        """Make the map twice as large."""
        self.env.set_mapsize(self.env.info()["map_size"] * 2)

    def written(self) -> None:
        """The sealed changes are committed."""
        self._sealed = {}

    def flush(self) -> int:
        """Write the pending changes in one transaction; return how many.

        `OSError` (ENOSPC, EIO, …) or `Corrupt` if it cannot: nothing was changed, everything is still pending.
        """
        done = self.seal()
        if not done:
            return 0
        try:
            while not self.write():
                self.grow()
        except BaseException:
            self._pending, self._sealed = self._sealed, {}
            raise
        self.written()
        return done

    @staticmethod
    def _write(txn: Any, table: Any, changes: dict[bytes, bytes | None]) -> None:
        puts = sorted(item for item in changes.items() if item[1] is not None)
        if puts:
            with txn.cursor(table) as cursor:
                cursor.putmulti(puts)
        if len(puts) < len(changes):
            delete = txn.delete  # in order: neighbours lie on one page
            for key in sorted(key for key, value in changes.items() if value is None):
                delete(key, b"", table)

    def walk(self, table: str, start: bytes = b"", *, batch: int = 512) -> Iterator[tuple[bytes, bytes]]:
        """Committed entries from `start` on, in order. Each batch is a transaction of its own, and sees changes made in
        between.

        Flush first if pending changes matter.
        """
        while True:
            try:
                with self.begin(self.tables[table]) as txn:
                    cursor = txn.cursor()
                    found = []
                    if cursor.set_range(start) if start else cursor.first():
                        for item in cursor.iternext():
                            found.append(item)
                            if len(found) == batch:
                                break
            except lmdb.Error as error:
                raise as_error(error, self.path) from error
            yield from found
            if len(found) < batch:
                return
            start = found[-1][0] + b"\0"

    def count(self, table: str) -> int:
        """How many entries are committed."""
        with self.begin() as txn:
            return int(txn.stat(self.tables[table])["entries"])

    def pages(self) -> Pages:
        """Pages in use, and pages free for reuse."""
        try:
            return pages.count(self.env, self.tables.values())
        except lmdb.Error as error:
            raise as_error(error, self.path) from error

    def sync(self) -> None:
        self.env.sync(True)

    _shared: _Shared | None

    def close(self) -> None:
        """Give the environment back; the last user in this process closes it."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        shared.uses -= 1
        if not shared.uses:
            _open.pop(self.path, None)
            close_env(self.path, shared.env, write=shared.writable)


def as_error(error: lmdb.Error, path: str) -> Exception:
    """LMDB's exceptions in the form the volume acts on: OSError with its errno, or `Corrupt`."""
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.DiskError) or (code == errno.EIO and _is_full(path)):
        code = errno.ENOSPC
    if code and code > 0:
        return OSError(code, os.strerror(code), path)
    return Corrupt(f"the index {path} is broken ({error}): restart the node, which rebuilds it from the data files")


def _is_full(path: str) -> bool:
    """Whether a write there may have been cut short for lack of room: LMDB calls that EIO."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < CUT_SHORT_BYTES


# --- scans -----------------------------------------------------------------------------------------------------------


class _Listed(msgspec.Struct, array_like=True, gc=False):
    """The first fields of a `Record`: a listing needs and decodes only these."""

    object_id: msgspec.Raw
    size_bytes: int
    version: msgspec.Raw
    etag: str
    modified_s: float


_decode_listed = msgspec.msgpack.Decoder(_Listed).decode


def scan(
    index: Index, bucket: str, prefix: str, start_after: str, limit: int, make: Callable[[str, bytes], Item]
) -> list[Item]:
    """Up to `limit` items `make(key, value)` in byte order of the keys, after `start_after`, starting with `prefix`."""
    base, after, cut = f"{bucket}\0{prefix}".encode(), f"{bucket}\0{start_after}".encode(), len(bucket) + 1
    start = max(base, after)
    stem = base[: keys.STEM_BYTES]
    found: list[Item] = []
    if limit <= 0:
        return found
    try:
        with index.begin(index.records, buffers=False) as txn:
            cursor = txn.cursor()
            if not cursor.set_range(start[: keys.STEM_BYTES]):
                return found
            entries = cursor.iternext()
            entry, value = next(entries, (b"", b""))
            while entry.startswith(stem) and entry:
                if len(entry) <= keys.STEM_BYTES:
                    if entry > after and len(entry) >= len(base):
                        found.append(make(entry[cut:].decode(), value))
                        if len(found) == limit:
                            return found
                    entry, value = next(entries, (b"", b""))
                    continue
                group = _Group(entries, entry, value)
                wanted = (pair for pair in group if pair[0] > after and pair[0].startswith(base))
                smallest = heapq.nsmallest(limit - len(found), wanted, key=_raw_key)
                found += [make(raw[cut:].decode(), value) for raw, value in smallest]
                if len(found) == limit:
                    return found
                entry, value = group.beyond
    except lmdb.Error as error:
        raise as_error(error, index.path) from error
    return found


def scan_entries(index: Index, bucket: str, prefix: str, start_after: str, limit: int) -> list[ListEntry]:
    """`scan` for listings: decodes only the listed fields."""
    return scan(index, bucket, prefix, start_after, limit, _entry)


def scan_records(index: Index, bucket: str, prefix: str, start_after: str, limit: int) -> list[tuple[str, Record]]:
    return scan(index, bucket, prefix, start_after, limit, _pair)


def _entry(key: str, value: bytes) -> ListEntry:
    listed = _decode_listed(value)
    return ListEntry(key, listed.size_bytes, listed.etag, listed.modified_s)


def _pair(key: str, value: bytes) -> tuple[str, Record]:
    return key, decode_record(value)


def _raw_key(pair: tuple[bytes, bytes]) -> bytes:
    return pair[0]


class _Group:
    """The entries that share a stem, with true keys, in index order; then `beyond` is the first entry after them."""

    def __init__(self, entries: Iterator[tuple[bytes, bytes]], entry: bytes, value: bytes) -> None:
        self._entries = entries
        self.beyond = (entry, value)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        entry, value = self.beyond
        stem = entry[: keys.STEM_BYTES]
        while len(entry) > keys.STEM_BYTES and entry.startswith(stem):
            if keys.is_hashed(entry):
                bucket, _, _ = entry.partition(b"\0")
                yield bucket + b"\0" + decode_record(value).key.encode(), value
            else:
                yield entry, value
            entry, value = next(self._entries, (b"", b""))
        self.beyond = (entry, value)
