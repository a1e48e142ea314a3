"""Builds a new index from the data files, and removes files that nothing names.

Theory. `core.machines.recover` judges one file at a time against the index as it is now; this shell streams the listing
past it and performs the actions. After an unclean machine stop (`rebuild`) the new index starts empty and is filled
while it is served; every block it lists is in doubt until its checksum has been compared. After a process stop
(`sweep`) the index is right, and only rubbish is looked for: in the background, a directory at a time, since there may
be millions of files.

A sweep also finds space that no block accounts for. A process that died between taking blocks out of the index and
punching their holes, or while landing a block, leaves bytes that nobody will read.

Rejected: serving nothing until the new index is whole (minutes, where reading a million headers takes them).

Invariants. As `core.machines.recover`. A file that is landing, or about to be removed, is not judged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from forebay.core.machines import recover
from forebay.core.machines.opening import MISSED
from forebay.core.record import Record, State, blocks_in, build_head, decode_record
from forebay.node.store.disk import files, keys, ledger, presence
from forebay.node.store.disk.volume import Volume

Belongs = Callable[[Volume, str, str], bool]


def rebuild(
    volume: Volume, busy: Callable[[int], bool], ids_below: int, belongs: Belongs
) -> Generator[None, None, str]:
    """Fill the volume's new index from its files, one a step, while it is served; return a line that says what was
    found. Owed records are in view before. The caller flushes the index.

    `busy(object id)`: leave it alone now. Objects from `ids_below` on were made since the start, and are not judged.
    `belongs(volume, bucket, key)`: whether the key's place is here. A clean object of another volume was dropped when
    the set of volumes changed, and the stop has brought its file back: nobody would find it.
    """
    kept = blocks = 0
    next_id = int.from_bytes(volume.index.get("meta", b"next_id") or b"", "big")
    lost = {each.record.object_id for each in volume.lost.values()}
    for path in data_files(volume, busy):
        yield
        object_id = _id_of(path)
        if object_id in lost or (object_id is not None and (object_id >= ids_below or busy(object_id))):
            continue
        try:
            seen, header = see(volume, path)
        except FileNotFoundError:
            continue  # reclaimed meanwhile
        known = known_record(volume, path, header)
        if known is not None and busy(known[2].object_id):
            continue
        it = header.identity if header is not None else None
        if known is None and it is not None and not it.owned and not belongs(volume, it.bucket, it.key):
            files.remove(path)
            continue
        for action in recover.judge_file(seen, record_seen(volume, known), trusted=False):
            match action:
                case recover.Rebuild():
                    assert header is not None
                    if known is not None:
                        ledger.remove_traces(volume, known[2])
                    record = _record_from(header)
                    _enter(volume, header, record, known[2] if known else None)
                    next_id = max(next_id, record.object_id + 1)
                    kept += 1
                    blocks += presence.bits_of(record).bit_count()
                case recover.Delete(doomed, _):
                    files.remove(doomed)
                case recover.DropRecord(bucket, key, _):
                    assert known is not None
                    ledger.remove_record(volume, bucket, key, known[2])
    volume.index.put("meta", b"next_id", next_id.to_bytes(8, "big"))
    return f"{kept} objects with {blocks} blocks found, each block to be verified before its first use"


def sweep(
    volume: Volume,
    busy: Callable[[int], bool],
    drop: Callable[[str, str, Record], None],
    remove: Callable[[str], None],
) -> Iterator[int]:
    """Remove files without a record and space without a block. Yields once a directory: how many files it removed.
    `Late` if the disk stops answering: the rest is left for the next start.

    `busy(object id)`: leave it alone now. `drop` forgets a record whose file is not what it should be; `remove` removes
    a file.
    """
    for directory in _directories(volume):
        removed = 0
        lost = {each.record.object_id for each in volume.lost.values()}
        for path in _files_in(volume, directory, busy):
            object_id = _id_of(path)
            if object_id is not None and (busy(object_id) or object_id in lost):
                continue
            try:
                seen, header = see(volume, path)
            except FileNotFoundError:
                continue  # reclaimed meanwhile
            known = known_record(volume, path, header)
            for action in recover.judge_file(seen, record_seen(volume, known), trusted=True):
                match action:
                    case recover.Delete(doomed, _):
                        remove(doomed)
                        removed += 1
                    case recover.DropRecord():
                        assert known is not None
                        drop(*known)
                    case recover.Keep():
                        assert known is not None
                        volume.desk.call(_trim, path, known[2])
        yield removed
    for number, (entry, value) in enumerate(volume.index.walk("records")):
        record = decode_record(value)
        if record.inline is None and not busy(record.object_id):
            bucket, key = keys.split(entry, record.key)
            seen_record = record_seen(volume, (bucket, key, record))
            assert seen_record is not None
            there = os.path.exists(seen_record.path)
            now = None if there else volume.record(entry, key)
            if now is not None and now.object_id == record.object_id and recover.judge_record(seen_record, there):
                drop(bucket, key, now)
        if number % 512 == 511:
            yield 0


def data_files(volume: Volume, busy: Callable[[int], bool] = lambda object_id: False) -> Iterator[str]:
    """Every file below data/, except sidecars (one without its data file is removed)."""
    for directory in _directories(volume):
        yield from _files_in(volume, directory, busy)


def _directories(volume: Volume) -> Iterator[str]:
    data = f"{volume.path}/data"
    for first in sorted(os.listdir(data)):
        for second in sorted(os.listdir(f"{data}/{first}")):
            yield f"{data}/{first}/{second}"


def _files_in(volume: Volume, directory: str, busy: Callable[[int], bool]) -> Iterator[str]:
    names = set(os.listdir(directory))
    for name in sorted(names):
        if name.endswith(files.SIDECAR_SUFFIX):
            owner = name.removesuffix(files.SIDECAR_SUFFIX)
            object_id = _id_of(owner)  # a sidecar comes before its file does
            if owner not in names and not (object_id is not None and busy(object_id)):
                volume.desk.call(Path(directory, name).unlink, True)  # missing or not
        else:
            yield f"{directory}/{name}"


def _id_of(path: str) -> int | None:
    name = os.path.basename(path)
    return int(name, 16) if re.fullmatch("[0-9a-f]{16}", name) else None


def see(volume: Volume, path: str) -> tuple[recover.FileSeen, files.Header | None]:
    """The file at `path`. A header about another file counts as none."""
    size_bytes = os.lstat(path).st_size
    header = files.Header.read(path)
    if header is None or volume.data_path(header.identity.object_id) != path:
        return recover.FileSeen(path, "data", size_bytes), None
    it = header.identity
    blocks = tuple(block for block, value in enumerate(header.sums()) if value)
    identity = recover.Identity(it.bucket, it.key, it.object_id, it.size_bytes, blocks, it.owned)
    return recover.FileSeen(path, "data", size_bytes, identity), header


def known_record(volume: Volume, path: str, header: files.Header | None) -> tuple[str, str, Record] | None:
    """The index's current record of the header's key or, without a header, of the object id in the file's name."""
    if header is not None:
        bucket, key = header.identity.bucket, header.identity.key
        record = volume.record(keys.index_key(bucket, key), key)
        return None if record is None else (bucket, key, record)
    object_id = _id_of(path)
    return None if object_id is None else record_by_id(volume, object_id)


def record_by_id(volume: Volume, object_id: int) -> tuple[str, str, Record] | None:
    """Bucket, key and record of an object id."""
    entry = ledger.entry_of(volume, object_id)
    value = volume.get("records", entry) if entry is not None else None
    if entry is None or value is None:
        return None
    record = decode_record(value)
    return (*keys.split(entry, record.key), record)


def record_seen(volume: Volume, known: tuple[str, str, Record] | None) -> recover.RecordSeen | None:
    if known is None:
        return None
    bucket, key, record = known
    path = volume.data_path(record.object_id) if record.inline is None else ""
    durable = bool(record.state & State.OWNED)
    return recover.RecordSeen(bucket, key, record.object_id, path, record.size_bytes, durable)


def _record_from(header: files.Header) -> Record:
    it = header.identity
    bits = presence.mask(block for block, value in enumerate(header.sums()) if value)
    record = Record(
        object_id=it.object_id,
        size_bytes=it.size_bytes,
        version=it.version,
        etag=it.etag,
        modified_s=it.modified_s,
        checked_s=MISSED,
        head=build_head(it.info()),
        complete=False,
        state=State.UNVERIFIED,
        key=keys.record_key(it.bucket, it.key),
        block_bytes=it.block_bytes,
    )
    return presence.with_bits(record, bits)


def _enter(volume: Volume, header: files.Header, record: Record, old: Record | None) -> None:
    it = header.identity
    ledger.put_record(volume, it.bucket, it.key, record, old)
    ledger.put_all_sums(volume, record.object_id, header.sums())
    ledger.put_doubts(volume, record.object_id, presence.bits_of(record))


def _trim(path: str, record: Record) -> None:
    """Punch blocks that the record does not list, if the file takes clearly more room than its blocks."""
    if record.complete:
        return
    present = presence.bits_of(record)
    if os.lstat(path).st_blocks * 512 <= presence.bytes_of(record) + 256 * 1024:
        return
    absent = [b for b in range(blocks_in(record.size_bytes, record.block_bytes)) if not present >> b & 1]
    files.punch_blocks(path, record.block_bytes, absent)
