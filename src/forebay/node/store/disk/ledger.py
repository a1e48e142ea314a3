"""What a change of one object means in every table of an index, and in the volume's usage.

Theory. Seven tables, so that a look-up reads one and stays small:

    records  index key            -> Record
    ids      object id            -> checksum of inline bytes (8, little endian; 0 for a data file), index key
    sums     object id, group     -> checksums of up to 128 blocks, 8 bytes each, little endian, 0 = absent
    doubts   object id            -> bitmap of blocks to verify before use; only while the record is UNVERIFIED
    used     object id            -> minute of last use (4), only if later than the record says
    notes    index key            -> Entry (durable.py): what is owed in memory, and marks of settled notes
    meta     name                 -> next_id, scrub, usage, rebuilding

Object ids are 8 bytes big endian, groups 4. Checksums are stored in groups, so that landing one block of a huge object
rewrites 1 KiB and not megabytes. Last use has its own table, so that a hit never rewrites inline bytes.

Invariants. (1) A record has its `ids` entry, in the same transaction. (2) A removed record leaves nothing in any table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Protocol

import lmdb
import msgspec

from forebay.core.record import Record, State, blocks_in, decode_record, encode_record
from forebay.node.store.disk import files, keys, presence
from forebay.node.store.disk.durable import Entry, decode_entry, encode_entry
from forebay.node.store.disk.index import as_error
from forebay.node.store.disk.notes import Note
from forebay.node.store.disk.usage import small_bytes
from forebay.node.store.disk.volume import Unit, Volume

GROUP_BLOCKS = 128
UNITS_BATCH = 256  # records per batch of units
_NO_SUM = bytes(8)


def id_key(object_id: int) -> bytes:
    return object_id.to_bytes(8, "big")


def _group_key(object_id: int, group: int) -> bytes:
    return object_id.to_bytes(8, "big") + group.to_bytes(4, "big")


def put_record(volume: Volume, bucket: str, key: str, record: Record, old: Record | None, inline_sum: int = 0) -> None:
    """Make `record` the record of the key; `old` was there before. Remove another object's traces first."""
    enter(volume, bucket, keys.index_key(bucket, key), record, old, inline_sum)


def enter(volume: Volume, bucket: str, entry: bytes, record: Record, old: Record | None, inline_sum: int) -> None:
    """As `put_record`, when the index key is known."""
    index = volume.index
    index.put("records", entry, encode_record(record))
    if old is None or old.object_id != record.object_id:
        index.put("ids", id_key(record.object_id), inline_sum.to_bytes(8, "little") + entry)
    volume.change.swap(bucket, old, record)


def remove_record(volume: Volume, bucket: str, key: str, record: Record) -> None:
    """Remove the key's record and its traces."""
    volume.index.put("records", keys.index_key(bucket, key), None)
    remove_traces(volume, record)
    volume.change.swap(bucket, record, None)


def records_of(volume: Volume, object_ids: Sequence[int]) -> list[tuple[int, bytes, Record]]:
    """(object id, index key, record) of those that the volume has. `OSError` or `Corrupt`."""
    index = volume.index
    values = index.get_many("ids", map(id_key, object_ids))
    known = [(object_id, value[8:]) for object_id, value in zip(object_ids, values, strict=True) if value is not None]
    found = index.get_many("records", [entry for _, entry in known])
    return [(*each, decode_record(value)) for each, value in zip(known, found, strict=True) if value is not None]


def remove_small(volume: Volume, found: Sequence[tuple[int, bytes, Record]]) -> None:
    """As `remove_record`, for many inline objects that are not owned."""
    index, names = volume.index, [id_key(object_id) for object_id, _, _ in found]
    index.delete_many("records", [entry for _, entry, _ in found])
    index.delete_many("ids", names)
    index.delete_many("used", [name for name, value in zip(names, index.get_many("used", names), strict=True) if value])
    by_bucket: dict[bytes, list[Record]] = {}
    for _, entry, record in found:
        by_bucket.setdefault(entry[: entry.index(b"\0")], []).append(record)
    for bucket, records in by_bucket.items():
        volume.change.remove_small(bucket.decode(), records)


def remove_traces(volume: Volume, record: Record) -> None:
    """Remove an object that no record names from the other tables."""
    index, name = volume.index, id_key(record.object_id)
    index.put("ids", name, None)
    index.put("used", name, None)
    if record.inline is None:
        groups = -(-blocks_in(record.size_bytes, record.block_bytes) // GROUP_BLOCKS)
        for group in range(groups):
            index.put("sums", _group_key(record.object_id, group), None)
        index.put("doubts", name, None)


def keep_sums(volume: Volume, object_id: int, sums: dict[int, int]) -> None:
    """Store the checksums of blocks; 0 removes one."""
    by_group: dict[int, dict[int, int]] = {}
    for block, value in sums.items():
        by_group.setdefault(block // GROUP_BLOCKS, {})[block % GROUP_BLOCKS] = value
    for group, changes in by_group.items():
        name = _group_key(object_id, group)
        data = bytearray(volume.get("sums", name) or b"")
        need = (max(changes) + 1) * 8
        if len(data) < need:
            data.extend(bytes(need - len(data)))
        for place, value in changes.items():
            data[place * 8 : place * 8 + 8] = value.to_bytes(8, "little")
        volume.index.put("sums", name, bytes(data))


class Tables(Protocol):
    """An index, or a volume with its pending changes."""

    def get(self, table: str, key: bytes) -> bytes | None: ...


def sums_of(volume: Tables, object_id: int, blocks: Iterable[int]) -> dict[int, int]:
    """The stored checksums of these blocks, 0 if there is none. Any thread."""
    groups: dict[int, bytes] = {}
    found = {}
    for block in blocks:
        group, place = divmod(block, GROUP_BLOCKS)
        if group not in groups:
            groups[group] = volume.get("sums", _group_key(object_id, group)) or b""
        found[block] = int.from_bytes(groups[group][place * 8 : place * 8 + 8], "little")
    return found


def put_all_sums(volume: Volume, object_id: int, sums: array[int]) -> None:
    """Store the checksums of a whole object, in the form of its file's header."""
    for group in range(-(-len(sums) // GROUP_BLOCKS)):
        part = sums[group * GROUP_BLOCKS : (group + 1) * GROUP_BLOCKS]
        if any(part):
            volume.index.put("sums", _group_key(object_id, group), part.tobytes())


def inline_sum(volume: Volume, object_id: int) -> int:
    """The stored checksum of an inline object's bytes; 0 if there is none."""
    return int.from_bytes((volume.get("ids", id_key(object_id)) or _NO_SUM)[:8], "little")


def entry_of(volume: Volume, object_id: int) -> bytes | None:
    """The index key of an object id."""
    value = volume.get("ids", id_key(object_id))
    return value[8:] if value is not None else None


def doubts_of(volume: Volume, record: Record) -> int:
    """Bitmap of blocks that must be verified before use."""
    if not record.state & State.UNVERIFIED:
        return 0
    return int.from_bytes(volume.get("doubts", id_key(record.object_id)) or b"", "little")


def put_doubts(volume: Volume, object_id: int, bits: int) -> None:
    """Set that bitmap. The caller keeps the record's state in step (UNVERIFIED exactly while the bitmap is not
    zero)."""
    data = bits.to_bytes((bits.bit_length() + 7) // 8, "little") if bits else None
    volume.index.put("doubts", id_key(object_id), data)


def note_of(volume: Volume, entry: bytes) -> Entry | None:
    """The visible index's note of an index key, or the mark that it was settled."""
    value = volume.get("notes", entry)
    return None if value is None else decode_entry(value)


def put_note(volume: Volume, entry: bytes, note: Entry | None) -> None:
    """Store that note; None removes it."""
    if note is not None:
        volume.index.put("notes", entry, encode_entry(note))
    elif volume.get("notes", entry) is not None:
        volume.index.put("notes", entry, None)


def replace_notes(volume: Volume, notes: Mapping[bytes, Note]) -> None:
    """Replace committed notes with the same seq, in a transaction of its own. Any thread. `OSError`."""
    if not notes:
        return
    table = volume.index.tables["notes"]
    try:
        with volume.index.env.begin(table, write=True) as txn:
            for entry, note in notes.items():
                value = txn.get(entry)
                if value is None:
                    continue
                now = decode_entry(value)
                if now.note.seq == note.seq and not now.settled:
                    txn.put(entry, encode_entry(msgspec.structs.replace(now, note=note)))
    except lmdb.Error as error:
        raise as_error(error, volume.index.path) from error


def unit_batches(volume: Volume, *, marked: bool = True) -> Iterator[list[Unit]]:
    """Every unit of a volume, pending changes included, in batches. Each batch is right until the volume changes.
    `marked`: a mark on the volume says so meanwhile (`Volume.walking`), which waits for a disk that takes no writes."""
    index = volume.index
    with volume.walking() if marked else nullcontext():
        start: bytes | None = b""
        while start is not None:
            batch = list(islice(index.walk("records", start, batch=UNITS_BATCH), UNITS_BATCH))
            start = batch[-1][0] + b"\0" if len(batch) == UNITS_BATCH else None
            records = [(entry, index.pending_or("records", entry, value)) for entry, value in batch]
            yield list(_units(volume, [(entry, decode_record(value)) for entry, value in records if value is not None]))


def _units(volume: Volume, found: list[tuple[bytes, Record]]) -> Iterator[Unit]:
    used = volume.index.get_many("used", [id_key(record.object_id) for _, record in found])
    for (entry, record), touched in zip(found, used, strict=True):
        bucket, key = keys.split(entry, record.key)
        object_id = record.object_id
        minute = max(record.used_minute, int.from_bytes(touched or b"", "big"))
        if record.inline is not None:
            yield Unit(bucket, key, object_id, 0, small_bytes(record), minute, record.state)
            continue
        for block in presence.iterate(presence.bits_of(record)):
            start, end = files.block_range(record.size_bytes, record.block_bytes, block)
            yield Unit(bucket, key, object_id, block, end - start, minute, record.state)
