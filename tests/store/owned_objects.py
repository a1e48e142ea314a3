"""Writes as an engine makes them: bodies in temp files, notes, and the three steps of a change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from forebay.core import limits
from forebay.core.errors import ForebayError
from forebay.core.record import Record, State
from forebay.node.store.disk.notes import Note, Owed
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer import owned
from forebay.node.store.writer.puts import Change, Delete, Put
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects
from tests.store.store_objects import BUCKET, Bench

KIB = 1024
SMALL, LARGE = 700, 200 * KIB


class Writer:
    """Makes changes with growing `seq`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seq = 0
        self.paths = Paths(bench)

    def put(
        self,
        key: str,
        size_bytes: int = LARGE,
        version: str = "w1",
        state: State = State.DIRTY,
        *,
        durable: bool = True,
        bucket: str = BUCKET,
    ) -> Put:
        """A change that is whole in its temp file, or in memory where it is small."""
        store = self.bench.store
        info, data = objects.make(key, size_bytes, version)
        object_id = store.take_id()
        self.seq += 1
        note = None
        if state & State.OWNED:
            note = Note(self.seq, 1000.0 + self.seq, size_bytes, object_id, "", local=bool(state & State.LOCAL))
        if size_bytes <= limits.INLINE_BYTES_MAX:
            return Put(bucket, info, object_id, state, 5.0, body=data, note=note, durable=durable)
        path = self.paths.incoming(bucket, key)
        Path(path).write_bytes(data)
        step = store.block_bytes
        sums = [xxhash.xxh3_64_intdigest(data[at : at + step]) for at in range(0, size_bytes, step)]
        return Put(bucket, info, object_id, state, 5.0, path=path, sums=sums, note=note, durable=durable)

    def delete(self, key: str, *, note: bool = True, durable: bool = True) -> Delete:
        self.seq += 1
        return Delete(BUCKET, key, Note(self.seq, 1000.0 + self.seq, 0, 0, "") if note else None, durable and note)

    def write(self, key: str, size_bytes: int = LARGE, version: str = "w1", **options: object) -> Record:
        """Put it and see it done."""
        (outcome,) = commit(self.bench.store, [self.put(key, size_bytes, version, **options)])  # type: ignore[arg-type]
        assert isinstance(outcome, Record), outcome
        return outcome

    def remove(self, key: str, **options: bool) -> None:
        assert commit(self.bench.store, [self.delete(key, **options)]) == [None]


class Paths:
    """Where bodies go, asked of a reader that follows the store."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.reader: StoreReader | None = None
        self.store: Store | None = None

    def incoming(self, bucket: str, key: str) -> str:
        if self.reader is None or self.store is not self.bench.store or self.reader not in self.bench.readers:
            self.store, self.reader = self.bench.store, self.bench.reader()
        return self.reader.incoming(bucket, key)


def commit(store: Store, changes: Sequence[Change]) -> list[Record | ForebayError | None]:
    prepared = store.prepare(changes)
    store.make_durable(prepared)
    return store.publish(prepared)


def notes_of(store: Store) -> list[Owed]:
    """What is to be flushed, in committed state."""
    kept = [each for volume in store.usable() for each in owned.kept(volume) if not each.note.local]
    return [Owed(each.bucket, each.key, each.note, each.durable) for each in kept]


def owed(store: Store) -> dict[str, Note]:
    """Notes by key; each once."""
    found: dict[str, Note] = {}
    for each in notes_of(store):
        assert each.key not in found
        found[each.key] = each.note
    return found


def machine_stop(bench: Bench, *, reopen: bool = True) -> None:
    """The visible index is gone; what was synced, and here also the rest of the files, is there."""
    bench.close(clean=False)
    unclean(bench)
    if reopen:
        bench.open()


def unclean(bench: Bench) -> None:
    """Let the marks say that another kernel ran."""
    for directory in bench.dirs:
        mark = directory / "volume.json"
        mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))


def read(bench: Bench, key: str, bucket: str = BUCKET) -> bytes | None:
    """What a front would send."""
    reader = bench.reader()
    try:
        return objects.read(reader, key, bucket)
    finally:
        reader.close()
        bench.readers.remove(reader)


def files_in(directory: Path) -> list[Path]:
    """Data files and temp files of a volume."""
    return sorted(path for name in ("data", "tmp") for path in (directory / name).rglob("*") if path.is_file())
