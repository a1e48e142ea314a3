"""What a volume may not lose: entries of owed objects, first in a journal and then in a second LMDB environment.

Theory. An entry holds the note, the record and the checksum of inline bytes. With the data file, whose header has the
other checksums, that is enough to restore the object to the visible index. A commit appends its changes to the journal
(`journal.py`: one write, one wait for the disk) and keeps them in memory, in a *layer* that look-ups see before LMDB.
When a generation of the journal is full, a thread feeds its layer to LMDB in one synced transaction, which also records
that LMDB has this generation. Meanwhile commits go to the next one. If a bucket's backend is near, most entries are
settled by then, and LMDB never gets them.

On a disk with hardly any room nothing is deferred: the transaction is made at once, and if it is refused, the write is.
A start on a full disk, where LMDB cannot take what the journal holds, keeps it in layers as before the stop.

A settled note (its flush ended) need not be removed at once: its removal goes with the next commit, or with `settle`.
Until then the transaction of the visible index that made the record clean marks the entry as settled. So only a machine
stop in between can make a flush begin again.

One process opens it, and any of its threads may use it. A commit holds `_commits`, which no look-up takes. Look-ups and
growing the map exclude each other by `_gate`, since LMDB allows no transaction while the map grows. The tuple of layers
is replaced as a whole, and a look-up reads it before LMDB's transaction begins, so nothing falls between.

Rejected: each commit a synced transaction (twice the waits, and 16 writes of pages for 16 writers); the journal alone
(it would have to be compacted, and all of it be in memory).

Invariants. (1) What `commit` returned from is on the disk. (2) A commit that fails changes nothing. (3) At most two
layers: one being written, one being fed.
"""

from __future__ import annotations

import errno
import itertools
import logging
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
from forebay.node.store.disk import journal, keys, pages
from forebay.node.store.disk.index import as_error, check_size, close_env, open_env
from forebay.node.store.disk.journal import Journal
from forebay.node.store.disk.notes import Note
from forebay.node.store.disk.pages import FreePages, Pages
from forebay.ports import chance, threads

_NODE_BYTES_MAX = 2030  # LMDB keeps a longer entry in pages of its own
_HEARD, _SEED = b"heard", b"seed"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("forebay.store")

Updates = dict[bytes, bytes | None]  # index key to entry; None: removed


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """What is owed of one key. `record` is None for a tombstone, and in the visible index, which has the record.

    `key` is set only if the index key cannot hold it whole. `settled`: only in the visible index, see above.
    """

    note: Note
    record: Record | None = None
    inline_sum: int = 0
    key: str = ""
    settled: bool = False


encode_entry = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


def decode_entry(value: bytes) -> Entry:
    """The entry; `Corrupt` if it cannot be decoded."""
    try:
        return _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a durable index holds an entry that cannot be read ({error}): restart the node") from error


class _Layer(dict[bytes, bytes | None]):
    """Updates of one generation. `coming_bytes`: by how much LMDB will grow when they are fed to it."""

    coming_bytes = 0


class Durable:
    """The durable index of one volume, open. `commits` counts synced frames and transactions."""

    def __init__(self, path: str, *, map_bytes: int = limits.DURABLE_MAP_BYTES) -> None:
        """Open it, or make it and sync its names. `OSError`, or `Corrupt` when the files are not whole."""
        self.path = path
        self.commits = 0
        self._commits = threading.Lock()
        self._gate = threading.Lock()
        self._later: dict[bytes, int] = {}  # settled: to remove if the note still has this seq
        self._settled: deque[bytes] = deque()  # filled by committing threads, emptied by the store's thread
        self._replaced: dict[bytes, Entry] = {}
        self._layers: tuple[_Layer, ...] = (_Layer(),)  # the newest first
        self._feeder: threads.Started | None = None
        self.free_pages = FreePages(self._pages)
        data = os.path.join(path, "data.mdb")
        fresh = not os.path.exists(data)
        if not fresh and os.path.getsize(data) < 8192:
            raise Corrupt(f"the durable index {path} is cut short: what it held is lost; move it away to go on without")
        os.makedirs(path, exist_ok=True)
        self._env: Any
        try:
            self._open(map_bytes)
            self._take_journal()
            if self._compacted():
                self._open(map_bytes)
        except lmdb.Error as error:
            raise as_error(error, path) from error

    def _open(self, map_bytes: int) -> None:
        self._env = open_env(self.path, map_bytes, write=True, sync=True, tables=2)
        try:
            check_size(self._env, os.path.join(self.path, "data.mdb"))
            self._table = self._env.open_db(b"owed")
            self._about = self._env.open_db(b"journal")
        except BaseException:
            close_env(self.path, self._env, write=True)
            raise

    def _take_journal(self) -> None:
        """Feed LMDB the generations that it lacks. Repeating this changes nothing."""
        with self._env.begin(self._about) as txn:
            seed, heard = txn.get(_SEED), int.from_bytes(txn.get(_HEARD, b""), "little")
        try:
            if seed is None:
                if journal.is_in(self.path):
                    raise Corrupt(
                        f"the durable index {self.path} is not the one that its journal belongs to: what it held is "
                        "lost; move it away to go on without"
                    )
                self._env.sync(True)
                for directory in (self.path, os.path.dirname(self.path)):
                    sync_path(directory)  # before there is a seed: without one, the next start does it again
                seed = bytes.fromhex(chance.token_hex(8))
                with self._env.begin(self._about, write=True) as txn:
                    txn.put(_SEED, seed)
            self._journal = Journal(self.path, int.from_bytes(seed, "little"), heard)
            if self._journal.found:
                self._hear()
        except BaseException:
            close_env(self.path, self._env, write=True)
            raise

    def _hear(self) -> None:
        """Feed LMDB what the journal holds. If it has no room for that, go on with layers, as before the stop."""
        found = self._journal.found
        changes = itertools.chain.from_iterable(itertools.chain.from_iterable(found))
        try:
            self._feed(dict(changes), self._journal.generation - 1)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._journal.resume()
            self._layers = ()
            for generation in found:
                self._layers = (_Layer(), *self._layers)
                for each in generation:
                    self._enter(dict(each))
        found.clear()

    def _compacted(self) -> bool:
        """Replace a file that is mostly free pages by a smaller copy. True if it did; then the environment is
        closed."""
        copy = self.path + ".new"
        if not pages.compact(self._env, self._pages(), copy):
            shutil.rmtree(copy, ignore_errors=True)
            return False
        close_env(self.path, self._env, write=True)
        sync_path(os.path.join(copy, "data.mdb"))
        os.replace(os.path.join(copy, "data.mdb"), os.path.join(self.path, "data.mdb"))
        sync_path(self.path)
        shutil.rmtree(copy, ignore_errors=True)
        return True

    # --- looking ---

    def get(self, entry: bytes) -> Entry | None:
        """What is owed of an index key. `OSError` or `Corrupt`."""
        value = self._value(entry)
        return None if value is None else decode_entry(value)

    def has(self, entry: bytes) -> bool:
        """Whether anything is owed of an index key. `OSError` or `Corrupt`."""
        return self._value(entry) is not None

    def _value(self, entry: bytes) -> bytes | None:
        for layer in self._layers:
            if entry in layer:
                return layer[entry]
        try:
            with self._gate:
                value: bytes | None = self._env.begin(self._table).get(entry)
        except lmdb.Error as error:
            raise as_error(error, self.path) from error
        return value

    def _bytes_of(self, entry: bytes) -> int:
        """How many bytes the entry takes in LMDB, now or once it is fed."""
        for layer in self._layers:
            if entry in layer:
                return _taken_bytes(layer[entry] or b"")
        try:
            with self._gate:
                return _taken_bytes(self._env.begin(self._table, buffers=True).get(entry) or b"")
        except lmdb.Error as error:
            raise as_error(error, self.path) from error

    def walk(self, start: bytes = b"", *, batch: int = 512) -> Iterator[tuple[bytes, Entry]]:
        """Every entry from `start` on, in order. Each batch is a read of its own."""
        while True:
            layers = self._layers
            try:
                with self._gate, self._env.begin(self._table) as txn:
                    cursor = txn.cursor()
                    found: Updates = {}
                    if cursor.set_range(start) if start else cursor.first():
                        found.update(itertools.islice(cursor.iternext(), batch))
            except lmdb.Error as error:
                raise as_error(error, self.path) from error
            last = max(found) if len(found) == batch else None
            if layers[-1] is not self._layers[-1]:
                continue  # it was fed meanwhile, so LMDB's answer may be newer
            for layer in reversed(layers):
                for entry in list(layer):  # one atomic copy: others may write it
                    if start <= entry and (last is None or entry <= last):
                        found[entry] = layer[entry]
            for entry, value in sorted(found.items()):
                if value is not None:
                    yield entry, decode_entry(value)
            if last is None:
                return
            start = last + b"\0"

    def _pages(self) -> Pages:
        """The pages that LMDB will use once everything is fed."""
        try:
            with self._gate:
                found = pages.count(self._env, [self._table, self._about])
        except lmdb.Error as error:
            raise as_error(error, self.path) from error
        coming = sum(layer.coming_bytes for layer in self._layers) // found.page_bytes
        return Pages(max(0, found.used + coming), max(0, found.free - coming), found.page_bytes)

    # --- changing ---

    def commit(self, changes: Mapping[bytes, Entry | None], notes: Mapping[bytes, Note] | None = None) -> set[bytes]:
        """Put entries (None removes them), all or none; they are on the disk when this returns. Any thread.

        `notes` replace those with the same seq; returns the entries that had one. Also commits the removals of settled
        notes. `OSError` (ENOSPC, EIO, …) or `Corrupt`: nothing was changed.
        """
        encoded = {entry: None if value is None else encode_entry(value) for entry, value in changes.items()}
        with self._commits:
            later, replaced_later = list(self._later.items()), list(self._replaced.items())
            updates = self._settlements(later, replaced_later, encoded)
            replaced = set()
            for entry, note in (notes or {}).items():
                now = self._now(entry, updates)
                if now is not None and now.note.seq == note.seq:
                    updates[entry] = encode_entry(msgspec.structs.replace(now, note=note))
                    replaced.add(entry)
            updates |= encoded
            if updates:
                self._record(updates)
            for entry, seq in later:
                if self._later.get(entry) == seq:
                    del self._later[entry]
                self._settled.append(entry)
            for entry, entered in replaced_later:
                if self._replaced.get(entry) is entered:
                    del self._replaced[entry]
            return replaced

    def _settlements(
        self, later: list[tuple[bytes, int]], entered: list[tuple[bytes, Entry]], changes: Updates
    ) -> Updates:
        """The updates of settled notes and of late replacements, beside `changes`."""
        updates: Updates = {}
        for entry, seq in later:
            now = self._now(entry, updates) if entry not in changes else None
            if now is not None and now.note.seq == seq:
                updates[entry] = None
        for entry, late in entered:
            now = self._now(entry, updates)
            if now is not None and now.note.seq == late.note.seq:
                updates[entry] = encode_entry(msgspec.structs.replace(late, note=now.note))
        return updates

    def _now(self, entry: bytes, updates: Updates) -> Entry | None:
        value = updates[entry] if entry in updates else self._value(entry)
        return None if value is None else decode_entry(value)

    def _record(self, updates: Updates) -> None:
        """Put `updates` on the disk and into view."""
        body = journal.pack(list(updates.items()))
        if not self._journal.takes(len(body)):
            self._turn()
        kept = False
        try:
            if self._journal.provides(len(body)):
                self._journal.append(body)
                self._enter(updates)
                kept = True
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
        if not kept:
            self._feed_all(updates)
            self._journal.release()
        self.commits += 1
        self.free_pages.changed()

    def _enter(self, updates: Updates) -> None:
        """Put `updates` into view: the journal has them."""
        layer = self._layers[0]
        coming_bytes = sum(_taken_bytes(value) for value in updates.values() if value)
        layer.coming_bytes += coming_bytes - sum(map(self._bytes_of, updates))
        layer.update(updates)

    def _turn(self) -> None:
        """Begin the next generation, while this one is fed to LMDB."""
        self._fed()
        generation = self._journal.generation
        full = self._layers[0]
        self._layers = (_Layer(), full)
        self._journal.turn()
        self._feeder = threads.start(self._feed_later, full, generation, name="forebay-feed")

    def _feed_later(self, full: Updates, generation: int) -> None:
        try:
            self._feed(full, generation)
            self._layers = self._layers[:1]
            self.free_pages.changed()
        except (OSError, Corrupt) as error:  # the layer stays; the next turn tries again and gets the error
            log.warning("the durable index %s does not take what is in its journal: %s", self.path, error)

    def _fed(self) -> None:
        """Return when LMDB has every generation but the present one."""
        if self._feeder is not None:
            self._feeder.join()
            self._feeder = None
        if len(self._layers) > 1:
            self._feed(self._layers[1], self._journal.generation - 1)
            self._layers = self._layers[:1]

    def _feed_all(self, updates: Updates) -> None:
        """Feed LMDB everything, with `updates`, in one transaction."""
        self._fed()
        self._feed(self._layers[0] | updates, self._journal.generation)
        self._layers = (_Layer(),)
        self._journal.turn()

    def _feed(self, layer: Updates, generation: int) -> None:
        """Feed LMDB a layer, and record its generation. `OSError` or `Corrupt`: nothing was changed."""
        while True:
            try:
                with self._env.begin(self._table, write=True) as txn:
                    puts = sorted(item for item in layer.items() if item[1] is not None)
                    with txn.cursor() as cursor:
                        cursor.putmulti(puts)
                    for entry, value in layer.items():
                        if value is None:
                            txn.delete(entry)
                    txn.put(_HEARD, generation.to_bytes(8, "little"), db=self._about)
                break
            except lmdb.MapFullError:
                with self._gate:
                    self._env.set_mapsize(self._env.info()["map_size"] * 2)
            except lmdb.Error as error:
                refused = as_error(error, self.path)
                if isinstance(refused, OSError):
                    self.free_pages.refused()
                raise refused from error
        self.free_pages.changed()

    # --- settled notes ---

    def replace_later(self, entry: bytes, value: Entry) -> None:
        """Replace the entry with the next commit, if the key's note still has its seq by then."""
        self._replaced[entry] = value

    def settle_later(self, entry: bytes, seq: int) -> None:
        """Remove the entry with the next commit, if its note still has this seq."""
        self._later[entry] = seq

    def take_settled(self) -> list[bytes]:
        """Entries whose removal was committed since the last call: remove their marks."""
        return [self._settled.popleft() for _ in range(len(self._settled))]

    @property
    def unsettled(self) -> int:
        """How many changes wait for the next commit."""
        return len(self._later) + len(self._replaced)

    def settle(self) -> None:
        """Commit what waits. If the disk has hardly any room left, feed everything to LMDB while there is some.
        `OSError` or `Corrupt`: what was not done still waits."""
        self.commit({})
        with self._commits:
            if any(self._layers) and not self._journal.provides(0):
                self._feed_all({})
                self._journal.release()

    def close(self) -> None:
        """Commit what waits, feed it all to LMDB if the disk allows, and close."""
        try:
            self.commit({})
            with self._commits:
                if any(self._layers):
                    self._feed_all({})
        except (OSError, Corrupt):
            pass  # a settled note that stays makes one flush begin again; the rest is in the journal
        if self._feeder is not None:
            self._feeder.join()
        self._journal.close()
        close_env(self.path, self._env, write=True)


def _taken_bytes(value: bytes | memoryview) -> int:
    """How many bytes an entry takes in LMDB; 0 if there is none."""
    if not value:
        return 0
    if len(value) > _NODE_BYTES_MAX:
        return -(-(len(value) + 16) // 4096) * 4096
    return (len(value) + 100) * 3 // 2


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
