"""What a volume owes, after a start: restores durable entries to view, and reports what is lost.

Theory. The visible index may lack what the durable one has: the process was killed between the two, or the visible one
was rebuilt. It may also mark a note as settled whose removal from the durable index was not committed. So each durable
entry is compared with the visible record; if all is well, nothing changes.

That takes about 10 µs an entry, so it runs entry by entry while the node serves. A request for a key restores that key
first (`restore_key`), and nobody else changes it meanwhile. So an acknowledged write is always answered for.

A note that is only in the visible index (`durability = memory`) is right after a process stop, since it was committed
with its record; a machine stop removes it with the index.

An object whose bytes are gone stays out of view and is remembered as lost; reading its key is an error. Its entry and
its file, if there is one, stay as evidence until the key is written again, deleted or given up, and each start reports
it. If the file is back by then, so is the object.

Invariants. (1) After `restore`, an owned record in view has its note, and its file of the right size. (2) Repeating it
changes nothing. (3) No file that a durable entry names is removed. (4) A key whose write is under way is left alone: it
is between the two indexes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, takewhile
from typing import NamedTuple

import msgspec
import xxhash

from forebay.core.errors import Corrupt
from forebay.core.machines import recover
from forebay.core.record import Record, State, blocks_in, decode_record
from forebay.node.store.disk import files, keys, ledger
from forebay.node.store.disk.durable import Entry, decode_entry, owner_of
from forebay.node.store.disk.notes import Note
from forebay.node.store.disk.volume import Lost, StoreEvent, Volume
from forebay.node.store.writer import rebuild

_ROTTEN = "?"  # stands for the path of inline bytes that do not match their checksum


class NotedRecord(NamedTuple):
    """One note and its record, from either index."""

    bucket: str
    key: str
    entry: bytes
    note: Note
    record: Record | None
    durable: bool


Name = tuple[str, str]  # bucket, key


def restore(volume: Volume, held: Callable[[Name], bool], ids_below: int) -> Iterator[NotedRecord | None]:
    """Make the visible index agree with the durable one, as far as there are bytes. Yields what the volume owes, or
    None after a step that found nothing. `held`: keys with a write under way. `ids_below`: older objects were written
    before the start. The caller flushes the index. `OSError` or `Corrupt`."""
    backed = 0
    notes = ((entry, decode_entry(value)) for entry, value in volume.index.walk("notes"))
    for entry, value in chain(volume.durable.walk(), notes):
        name = owner_of(entry, value)
        if held(name):
            yield None
            continue
        kept = restore_key(volume, entry, *name)
        backed += kept is not None and not kept.note.is_delete and kept.note.seq < ids_below
        yield kept
    if volume.unbacked is None and backed == volume.owned_before:
        volume.unbacked = []
    for unbacked in volume.find_unbacked() if volume.unbacked is None else volume.unbacked:
        if unbacked is not None:
            _drop_unbacked(volume, unbacked, held)
        yield None
    volume.unbacked = []


def restore_key(volume: Volume, entry: bytes, bucket: str, key: str) -> NotedRecord | None:
    """As `restore`, for one key, at once; returns what it owes. Flush afterwards if that changed anything."""
    owed = volume.durable.get(entry)
    if owed is not None:
        if owner_of(entry, owed) != (bucket, key):
            return None
        _restore_entry(volume, entry, owed)
        mark = ledger.note_of(volume, entry)
        if entry in volume.lost or (mark is not None and mark.settled and mark.note.seq == owed.note.seq):
            return None
        return _in_view(volume, NotedRecord(bucket, key, entry, owed.note, owed.record, True))
    note = ledger.note_of(volume, entry)
    if note is None:
        _drop_unbacked(volume, entry)
    elif note.settled:
        volume.index.put("notes", entry, None)
    elif note.note.is_delete:
        return NotedRecord(bucket, key, entry, note.note, None, False)
    elif owner_of(entry, note) == (bucket, key) and _check_note(volume, bucket, key, entry, note):
        return _in_view(volume, NotedRecord(bucket, key, entry, note.note, volume.record(entry, key), False))
    return None


def _in_view(volume: Volume, kept: NotedRecord) -> NotedRecord:
    """Note again which blocks of a restored record are known to have rotted."""
    if kept.record is not None and kept.record.inline is None and not kept.record.complete:
        volume.partly_lost[kept.entry] = (kept.bucket, kept.key)
    return kept


def _restore_entry(volume: Volume, entry: bytes, owed: Entry) -> None:
    bucket, key = owner_of(entry, owed)
    now, mark, record = volume.record(entry, key), ledger.note_of(volume, entry), owed.record
    settled = mark is not None and mark.settled and mark.note.seq == owed.note.seq
    seen = recover.RecordSeen(bucket, key, 0, "", 0, True)
    size_bytes, path = None, ""
    if record is not None:
        path = volume.data_path(record.object_id) if record.inline is None else ""
        if record.inline is not None and xxhash.xxh3_64_intdigest(record.inline) != owed.inline_sum:
            path = _ROTTEN
        seen = recover.RecordSeen(bucket, key, record.object_id, path, record.size_bytes, True)
        size_bytes = _size_of(path) if path not in ("", _ROTTEN) else None
    seen_now = rebuild.record_seen(volume, (bucket, key, now) if now is not None else None)
    lost_before = volume.lost.pop(entry, None)
    if mark is not None and not settled:  # the note of a write that the durable entry replaced
        ledger.put_note(volume, entry, None)
    for action in recover.judge_owed(seen, seen_now, settled, size_bytes):
        match action:
            case recover.Settle():
                volume.durable.settle_later(entry, owed.note.seq)
            case recover.Restore():
                assert record is not None
                _show(volume, bucket, key, entry, record, now, owed.inline_sum)
            case recover.DropRecord(lost=True):
                assert record is not None
                problem = _problem(size_bytes, seen.size_bytes) if path != _ROTTEN else "its bytes rotted"
                volume.lost[entry] = Lost(bucket, key, owed.note, record, problem)
                if lost_before is None or lost_before.record.object_id != seen.object_id:
                    tell_lost(volume, bucket, key, problem)
            case recover.DropRecord():
                assert now is not None
                ledger.remove_record(volume, bucket, key, now)


def _show(
    volume: Volume, bucket: str, key: str, entry: bytes, record: Record, now: Record | None, inline_sum: int
) -> None:
    if now is not None:
        ledger.remove_traces(volume, now)
    volume.owned_before += now is None or not now.state & State.OWNED
    ledger.put_record(volume, bucket, key, record, now, inline_sum)
    ledger.put_note(volume, entry, None)
    if record.inline is None:
        ledger.put_all_sums(volume, record.object_id, sums_of(volume, record))


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _problem(size_bytes: int | None, right_bytes: int) -> str:
    return "its data file is gone" if size_bytes is None else f"its data file has {size_bytes} bytes of {right_bytes}"


def tell_lost(volume: Volume, bucket: str, key: str, problem: str) -> None:
    """Report that acknowledged bytes are gone."""
    volume.tell(
        StoreEvent(
            "object-lost",
            volume.id,
            f"{bucket}/{key}: {problem}, and the backend has not got it; write it again, or delete it",
        )
    )


def sums_of(volume: Volume, record: Record) -> array[int]:
    """Checksums of all blocks: from the file's header, or else computed from its bytes (which were synced)."""
    path = volume.data_path(record.object_id)
    header = files.Header.read(path)
    if header is not None and header.identity.object_id == record.object_id:
        return header.sums()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        count = blocks_in(record.size_bytes, record.block_bytes)
        return array("Q", (files.block_sum(fd, record, block) for block in range(count)))
    finally:
        os.close(fd)


def _check_note(volume: Volume, bucket: str, key: str, entry: bytes, kept: Entry) -> bool:
    """Check an object owed with durability `memory`: restore it if its file is whole, else report it lost. Returns
    whether it is in view and owned afterwards."""
    now = volume.record(entry, key)
    record = now if now is not None else kept.record
    if record is None:
        return False
    size_bytes = _size_of(volume.data_path(record.object_id)) if record.inline is None else None
    if now is not None and (record.inline is not None or size_bytes == record.size_bytes):
        return bool(now.state & State.OWNED)
    if now is None and record.inline is None and size_bytes == record.size_bytes:  # it is back
        _show(volume, bucket, key, entry, record, None, 0)
        ledger.put_note(volume, entry, msgspec.structs.replace(kept, record=None))
        return True
    problem = _problem(size_bytes, record.size_bytes) if record.inline is None else "its bytes rotted"
    if now is not None:
        ledger.remove_record(volume, bucket, key, now)
        ledger.put_note(volume, entry, msgspec.structs.replace(kept, record=now))
    if entry not in volume.lost:
        tell_lost(volume, bucket, key, problem)
    volume.lost[entry] = Lost(bucket, key, kept.note, record, problem)
    return False


def _drop_unbacked(volume: Volume, entry: bytes, held: Callable[[Name], bool] = lambda name: False) -> None:
    """Drop an owned record without a note: its successor, which the backend has, was about to replace it."""
    value = volume.get("records", entry)
    if value is None:
        return
    record = decode_record(value)
    bucket, key = keys.split(entry, record.key)
    if held((bucket, key)):
        return
    if record.state & State.OWNED and volume.durable.get(entry) is None and ledger.note_of(volume, entry) is None:
        ledger.remove_record(volume, bucket, key, record)


def kept(volume: Volume, start: bytes = b"") -> Iterator[NotedRecord]:
    """Everything the volume owes or alone has, local objects too, without lost or settled ones.

    Committed entries, each once; the durable ones first.
    """
    for entry, owed in volume.durable.walk(start):
        mark = ledger.note_of(volume, entry)
        if entry not in volume.lost and not (mark is not None and mark.settled and mark.note.seq == owed.note.seq):
            yield NotedRecord(*owner_of(entry, owed), entry, owed.note, owed.record, True)
    for entry, value in volume.index.walk("notes", start):
        owed = decode_entry(value)
        if not owed.settled and entry not in volume.lost:
            bucket, key = owner_of(entry, owed)
            record = None if owed.note.is_delete else volume.record(entry, key)
            yield NotedRecord(bucket, key, entry, owed.note, record, False)


def kept_under(volume: Volume, prefix: str) -> Iterator[tuple[str, str, Note]]:
    """Durable entries of buckets whose names begin so: bucket, key, note."""
    start = prefix.encode()
    for entry, value in takewhile(lambda item: item[0].startswith(start), volume.durable.walk(start)):
        mark = ledger.note_of(volume, entry)
        if not (mark is not None and mark.settled and mark.note.seq == value.note.seq):
            yield *owner_of(entry, value), value.note


def entry_at(volume: Volume, bucket: str, key: str) -> Entry | None:
    """The durable entry of a key. `OSError`, `Corrupt`."""
    entry = keys.index_key(bucket, key)
    found = volume.durable.get(entry)
    return found if found is not None and owner_of(entry, found) == (bucket, key) else None


def set_aside(volume: Volume, bucket: str, key: str, record: Record, problem: str) -> None:
    """An owned object in view is lost: take it out of view with the next flush."""
    entry = keys.index_key(bucket, key)
    try:
        there = volume.durable.get(entry)
    except (OSError, Corrupt) as error:
        volume.trouble(error, "reading the durable index")
        return
    kept = there or ledger.note_of(volume, entry)
    assert kept is not None, "an owned record has its note"
    ledger.remove_record(volume, bucket, key, record)
    ledger.put_note(volume, entry, None if there is not None else msgspec.structs.replace(kept, record=record))
    volume.lost[entry] = Lost(bucket, key, kept.note, record, problem)
    tell_lost(volume, bucket, key, problem)


def no_more_lost(volume: Volume, entry: bytes, *, is_home: bool) -> str:
    """The key was written, deleted or given up on its home volume: forget that it was lost here. Returns the path of
    the file that may be left, or ""."""
    lost = volume.lost.pop(entry, None)
    if lost is None:
        return ""
    if not is_home:
        volume.durable.settle_later(entry, lost.note.seq)
        ledger.put_note(volume, entry, None)
    return volume.data_path(lost.record.object_id) if lost.record.inline is None else ""


def entries_in(volume: Volume, bucket: str) -> Iterator[bytes]:
    """Index keys of a bucket that the volume owns or owes, lost ones and those about to be removed too. Lazy: the first
    one costs no more than itself."""
    prefix = bucket.encode() + b"\0"
    for entry, _ in takewhile(lambda item: item[0].startswith(prefix), volume.durable.walk(prefix, batch=1)):
        yield entry
    for entry, value in takewhile(lambda item: item[0].startswith(prefix), volume.index.walk("notes", prefix, batch=1)):
        if not decode_entry(value).settled:
            yield entry


def buckets_of(volume: Volume) -> tuple[str, ...]:
    """Every bucket with such an entry; skips over the entries themselves."""
    found: set[str] = set()
    for walk in (volume.durable.walk, partial(volume.index.walk, "notes")):
        start = b""
        while (item := next(iter(walk(start, batch=1)), None)) is not None:
            found.add(item[0].partition(b"\0")[0].decode())
            start = item[0].partition(b"\0")[0] + b"\1"
    return tuple(sorted(found))


def owes(volume: Volume, entry: bytes) -> bool:
    """Whether the volume owns or owes something of this index key."""
    mark = ledger.note_of(volume, entry)
    return not mark.settled if mark is not None else volume.durable.has(entry)


def settle(volume: Volume, entry: bytes, kept_note: Entry | None) -> None:
    """The key's note is settled, pending changes included: remove it, or mark it for removal. `kept_note` is the
    durable entry, if there is one."""
    if kept_note is None:
        ledger.put_note(volume, entry, None)
        return
    mark = msgspec.structs.replace(kept_note, record=None, key=owner_key(entry, kept_note), settled=True)
    ledger.put_note(volume, entry, mark)
    volume.durable.settle_later(entry, kept_note.note.seq)


def owner_key(entry: bytes, value: Entry) -> str:
    """The key if its index key is hashed, else empty."""
    return owner_of(entry, value)[1] if keys.is_hashed(entry) else ""


def clear_marks(volume: Volume) -> None:
    """Remove the marks of settled notes whose removal was committed."""
    for entry in volume.durable.take_settled():
        mark = ledger.note_of(volume, entry)
        if mark is not None and mark.settled:
            ledger.put_note(volume, entry, None)
