"""What a volume may not lose: a second LMDB environment, synced by each commit, with one entry per object owed.

Theory. An entry holds the note, the record and the checksum of inline bytes: with the data file, whose header has the
other checksums, all that it takes to put the object into the visible index again. Its transactions are few and carry
many changes, since each waits for the disk twice (pages, then the page that names them).

A note that was settled (its flush ended) need not be forgotten at once: its removal goes with the next commit, or with
`settle`. Until then the visible index, in the transaction that made the record clean, marks the entry as settled, so
that only a machine stop in between can make a flush begin again.

A disk takes pages that lie inside a file faster than pages that make it longer, which changes metadata too. So the file
is kept longer than LMDB needs, filled with zeros, by as much as it holds (`_provide`): LMDB does not mind.

One process opens it, any thread of it may use it: a commit waits under `_commits`, which no look-up takes; look-ups
and growing the map exclude each other under `_gate`, since LMDB allows no transaction while the map grows.

Rejected: a log of appended entries (half the syncs, and a second format to compact and to recover).

Invariants. (1) What `commit` returned from is on the disk. (2) A commit that fails changes nothing.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import lmdb
import msgspec

from forebay.core import limits
from forebay.core.errors import Corrupt
from forebay.core.record import Record
from forebay.node.store import keys, pages
from forebay.node.store.index import as_error, check_size, open_env
from forebay.node.store.notes import Note
from forebay.node.store.pages import FreePages, Pages

PROVIDED_BYTES_MIN = limits.MIB
PROVIDED_BYTES_MAX = 32 * limits.MIB


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """What is owed of one key. `record` is None for a tombstone, and in the visible index, which has the record.

    `key` is set only where the index key cannot hold it whole. `settled`: only in the visible index, see above.
    """

    note: Note
    record: Record | None = None
    inline_sum: int = 0
    key: str = ""
    settled: bool = False


encode_entry = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


def decode_entry(value: bytes) -> Entry:
    """The entry; `Corrupt` if it is none."""
    try:
        return _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a durable index holds an entry that cannot be read ({error}): restart the node") from error


class Durable:
    """The durable index of one volume, open. `commits` counts synced transactions."""

    def __init__(self, path: str, *, map_bytes: int = limits.DURABLE_MAP_BYTES) -> None:
        """Open, or make it and sync its names. `OSError`, or `Corrupt` when the file is not a whole environment."""
        self.path = path
        self.commits = 0
        self._commits = threading.Lock()
        self._gate = threading.Lock()
        self._later: dict[bytes, int] = {}  # settled: to be removed if the note still has this seq
        self._settled: deque[bytes] = deque()  # filled by whoever commits, emptied by the store's thread
        self._replaced: dict[bytes, Entry] = {}
        self._file_bytes = 0
        self.free_pages = FreePages(self._pages)
        data = os.path.join(path, "data.mdb")
        fresh = not os.path.exists(data)
        if not fresh and os.path.getsize(data) < 8192:
            raise Corrupt(f"the durable index {path} is cut short: what it held is lost; move it away to go on without")
        os.makedirs(path, exist_ok=True)
        self._env: Any
        try:
            self._open(map_bytes)
            if self._compacted():
                self._open(map_bytes)
        except lmdb.Error as error:
            raise as_error(error, path) from error
        if fresh:
            self._env.sync(True)
            for directory in (path, os.path.dirname(path)):
                sync_path(directory)

    def _open(self, map_bytes: int) -> None:
        self._env = open_env(self.path, map_bytes, write=True, sync=True, tables=1)
        try:
            check_size(self._env, os.path.join(self.path, "data.mdb"))
            self._table = self._env.open_db(b"owed")
        except BaseException:
            self._env.close()
            raise

    def _compacted(self) -> bool:
        """Put a smaller copy in the place of a file that is mostly free pages; closed if so."""
        copy = self.path + ".new"
        if not pages.compact(self._env, self._pages(), copy):
            shutil.rmtree(copy, ignore_errors=True)
            return False
        self._env.close()
        sync_path(os.path.join(copy, "data.mdb"))
        os.replace(os.path.join(copy, "data.mdb"), os.path.join(self.path, "data.mdb"))
        sync_path(self.path)
        shutil.rmtree(copy, ignore_errors=True)
        return True

    def get(self, entry: bytes) -> Entry | None:
        """What is owed of an index key. `OSError` or `Corrupt`."""
        try:
            with self._gate:
                value = self._env.begin(self._table).get(entry)
        except lmdb.Error as error:
            raise as_error(error, self.path) from error
        return None if value is None else decode_entry(value)

    def has(self, entry: bytes) -> bool:
        """Whether anything is owed of an index key. `OSError` or `Corrupt`."""
        try:
            with self._gate:
                return self._env.begin(self._table, buffers=True).get(entry) is not None
        except lmdb.Error as error:
            raise as_error(error, self.path) from error

    def walk(self, start: bytes = b"", *, batch: int = 512) -> Iterator[tuple[bytes, Entry]]:
        """Every entry from `start` on, in order. Each batch is a transaction of its own."""
        while True:
            try:
                with self._gate, self._env.begin(self._table) as txn:
                    cursor = txn.cursor()
                    found = []
                    if cursor.set_range(start) if start else cursor.first():
                        for item in cursor.iternext():
                            found.append(item)
                            if len(found) == batch:
                                break
            except lmdb.Error as error:
                raise as_error(error, self.path) from error
            for entry, value in found:
                yield entry, decode_entry(value)
            if len(found) < batch:
                return
            start = found[-1][0] + b"\0"

    def _pages(self) -> Pages:
        try:
            with self._gate:
                return pages.count(self._env, [self._table])
        except lmdb.Error as error:
            raise as_error(error, self.path) from error

    def count(self) -> int:
        """How many entries there are."""
        with self._gate, self._env.begin() as txn:
            return int(txn.stat(self._table)["entries"])

    def commit(self, changes: Mapping[bytes, Entry | None], notes: Mapping[bytes, Note] | None = None) -> set[bytes]:
        """Put entries (with None: remove them) in one transaction that is on the disk when this returns. Any thread.

        `notes` replace those whose seq is the same; returns which entries had one. Carries the removals of settled
        notes. `OSError` (ENOSPC, EIO, …) or `Corrupt`: nothing was changed.
        """
        encoded = {entry: None if value is None else encode_entry(value) for entry, value in changes.items()}
        with self._commits:
            later, replaced_later = list(self._later.items()), list(self._replaced.items())
            if not encoded and not later and not replaced_later and not notes:
                return set()
            self._provide()
            while True:
                try:
                    replaced = self._write(encoded, later, replaced_later, notes or {})
                    break
                except lmdb.MapFullError:
                    with self._gate:
                        self._env.set_mapsize(self._env.info()["map_size"] * 2)
                except lmdb.Error as error:
                    refused = as_error(error, self.path)
                    if isinstance(refused, OSError):
                        self.free_pages.refused()
                    raise refused from error
            self.commits += 1
            self.free_pages.changed()
            for entry, seq in later:
                if self._later.get(entry) == seq:
                    del self._later[entry]
                self._settled.append(entry)
            for entry, entered in replaced_later:
                if self._replaced.get(entry) is entered:
                    del self._replaced[entry]
            return replaced

    def _provide(self) -> None:
        """Have pages at the end of the file for this transaction and many more, as far as the disk lets us."""
        info, path = self._env.info(), os.path.join(self.path, "data.mdb")
        used_bytes = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        if used_bytes + PROVIDED_BYTES_MIN // 2 <= self._file_bytes:
            return
        step_bytes = min(max(used_bytes, PROVIDED_BYTES_MIN), PROVIDED_BYTES_MAX)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                end = max(used_bytes, os.fstat(fd).st_size)
                if os.fstatvfs(fd).f_bavail * os.fstatvfs(fd).f_frsize > 64 * step_bytes:
                    os.pwrite(fd, bytes(step_bytes), end)
                self._file_bytes = end + step_bytes  # where it was refused, ask again that much later
            finally:
                os.close(fd)
        except OSError:
            self._file_bytes = used_bytes + step_bytes  # the commit will say what is wrong

    def _write(
        self,
        changes: Mapping[bytes, bytes | None],
        later: list[tuple[bytes, int]],
        entered: list[tuple[bytes, Entry]],
        notes: Mapping[bytes, Note],
    ) -> set[bytes]:
        replaced = set()
        with self._env.begin(self._table, write=True) as txn:
            for entry, seq in later:
                value = txn.get(entry) if entry not in changes else None
                if value is not None and decode_entry(value).note.seq == seq:
                    txn.delete(entry)
            for entry, late in entered:
                value = txn.get(entry)
                if value is not None and (now := decode_entry(value)).note.seq == late.note.seq:
                    txn.put(entry, encode_entry(msgspec.structs.replace(late, note=now.note)))
            for entry, note in notes.items():
                value = txn.get(entry)
                if value is not None and (now := decode_entry(value)).note.seq == note.seq:
                    txn.put(entry, encode_entry(msgspec.structs.replace(now, note=note)))
                    replaced.add(entry)
            puts = sorted(item for item in changes.items() if item[1] is not None)
            if puts:
                with txn.cursor() as cursor:
                    cursor.putmulti(puts)
            if len(puts) < len(changes):
                for entry, new in changes.items():
                    if new is None:
                        txn.delete(entry)
        return replaced

    # --- settled notes ---

    def replace_later(self, entry: bytes, value: Entry) -> None:
        """Put this with the next commit, if the key's note still has its seq by then."""
        self._replaced[entry] = value

    def settle_later(self, entry: bytes, seq: int) -> None:
        """Remove this entry with the next commit, if it is still the note of that seq."""
        self._later[entry] = seq

    @property
    def unsettled(self) -> int:
        """How many changes wait for a commit of others."""
        return len(self._later) + len(self._replaced)

    def take_settled(self) -> list[bytes]:
        """Entries whose removal was committed since the last call: their marks may go."""
        return [self._settled.popleft() for _ in range(len(self._settled))]

    def close(self) -> None:
        """Commit what waits, as far as the disk lets us, and close."""
        try:
            self.commit({})
        except (OSError, Corrupt):
            pass  # a settled note that stays makes one flush begin again
        self._env.close()


def sync_path(path: str) -> None:
    """fsync a file or directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def owner_of(entry: bytes, value: Entry) -> tuple[str, str]:
    """Bucket and key of an entry."""
    return keys.split(entry, value.key or (value.record.key if value.record is not None else ""))
