"""Moves owned objects and tombstones that placement now puts on another volume, at the start.

Theory. When volumes come or go, keys belong elsewhere. Clean objects are dropped; owned ones must follow their key, or
nobody would find them. A move is a write of the same object on the new volume (`puts.py`, with a copy of the file), and
then the removal on the old one. A stop in between leaves both, and the next start repeats it.

A volume that was away may bring back a key that was written again, or deleted, on the volume that took over. The note
with the higher `seq` is the later write. If the other volume has no note, its clean object may be older or newer,
nobody knows: the write acknowledged here stays owed, and its conditional flush finds out. Settled notes are removed
before anything moves: their keys are written elsewhere from now on, and a note whose mark goes with the visible index
would come back as an old write.

Rejected: leaving objects where they are and asking every volume (each look-up would pay); moving in the background
(until then a key would read as the backend has it, which is older).

Invariants. (1) Nothing owed leaves a volume before it is on another's disk. (2) Only changes of the volume set move
anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.core.errors import Corrupt, ForebayError
from forebay.core.record import Record, State
from forebay.core.types import ObjectInfo
from forebay.node.store.disk import files, keys, ledger
from forebay.node.store.disk.volume import INCOMING, StoreEvent, Volume, has_room
from forebay.node.store.writer import owned
from forebay.node.store.writer.owned import NotedRecord
from forebay.node.store.writer.puts import Change, Delete, Put, Puts

if TYPE_CHECKING:
    from forebay.node.store.writer.volumes import VolumeSet

_BATCH = 64


def move_owned(volumes: VolumeSet, puts: Puts, all_volumes: Sequence[Volume]) -> dict[str, set[str]]:
    """Move what is owed to its key's volume. What cannot move stays and is reported, and `volumes` waits for room on
    the disks that have none (`VolumeSet.finds_room`). Returns by volume id the buckets of which something stayed."""
    stayed: dict[str, set[str]] = {}
    for volume in all_volumes:
        moved = stuck = 0
        batch: list[NotedRecord] = []
        for each in owned.kept(volume):
            if volumes.volume_of(each.bucket, each.key) != volume.id:
                batch.append(each)
            if len(batch) == _BATCH:
                moved, stuck = _count(moved, stuck, _move(volumes, puts, volume, batch))
                batch = []
        moved, stuck = _count(moved, stuck, _move(volumes, puts, volume, batch))
        if moved or stuck:
            detail = f"{moved} objects and deletes not yet flushed went to the volumes that their keys belong to now"
            if stuck:
                detail += (
                    f"; {stuck} could not, and cannot be read until they can: make room on the disk (they go there "
                    "when there is), or raise --capacity and restart"
                )
            volumes.tell(StoreEvent("owed-moved", volume.id, detail))
        if stuck:
            stayed[volume.id] = {
                each.bucket for each in owned.kept(volume) if volumes.volume_of(each.bucket, each.key) != volume.id
            }
    volumes.crowded = [volume for volume in all_volumes if stayed and not has_room(volume.path)]
    return stayed


def _count(moved: int, stuck: int, outcomes: list[bool]) -> tuple[int, int]:
    done = sum(outcomes)
    return moved + done, stuck + len(outcomes) - done


def _move(volumes: VolumeSet, puts: Puts, volume: Volume, batch: list[NotedRecord]) -> list[bool]:
    """For each note, whether it is on its volume now, or no longer needed."""
    wanted = [each for each in batch if not _is_superseded(volumes, each)]
    changes: list[Change] = []
    moving: list[NotedRecord] = []
    failed = 0
    for each in wanted:
        try:
            changes.append(_change(volumes, volume, each))
            moving.append(each)
        except (OSError, ForebayError):
            failed += 1
    prepared = puts.prepare(changes)
    puts.make_durable(prepared)
    outcomes = puts.publish(prepared)
    assert outcomes is not None, "at a start everybody waits for the disk"
    gone = [each for each in batch if each not in wanted]
    gone += [each for each, outcome in zip(moving, outcomes, strict=True) if not isinstance(outcome, ForebayError)]
    _remove(volume, gone)
    return [True] * len(gone) + [False] * (len(batch) - len(gone))


def _is_superseded(volumes: VolumeSet, each: NotedRecord) -> bool:
    """Whether its home volume has a later write of the key."""
    home = volumes.home(each.bucket, each.key)
    there = home.durable.get(each.entry) or ledger.note_of(home, each.entry)
    return there is not None and there.note.seq > each.note.seq and each.entry not in home.lost


def _change(volumes: VolumeSet, volume: Volume, each: NotedRecord) -> Change:
    record = each.record
    if record is None:
        return Delete(each.bucket, each.key, each.note, each.durable)
    if record.inline is not None:
        return Put(
            each.bucket,
            _info(each.key, record, each),
            record.object_id,
            State(record.state),
            record.checked_s,
            body=record.inline,
            note=each.note,
            durable=each.durable,
        )
    if not record.complete:
        raise Corrupt(f"{each.bucket}/{each.key} has bad blocks: it stays where it is, as evidence")
    source = volume.data_path(record.object_id)
    header = files.Header.read(source)
    target = f"{volumes.home(each.bucket, each.key).path}/tmp/{INCOMING}{os.getpid()}-m{record.object_id:x}"
    _copy(source, target)
    return Put(
        each.bucket,
        header.identity.info() if header is not None else _info(each.key, record, each),
        record.object_id,
        State(record.state),
        record.checked_s,
        path=target,
        sums=owned.sums_of(volume, record),
        note=each.note,
        durable=each.durable,
        block_bytes=record.block_bytes,
    )


def _info(key: str, record: Record, each: NotedRecord) -> ObjectInfo:
    return ObjectInfo(key, record.size_bytes, record.version, record.etag, record.modified_s, each.note.headers)


def _copy(source: str, target: str) -> None:
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            at, size_bytes = 0, os.fstat(old.fileno()).st_size
            while at < size_bytes:
                sent = os.sendfile(new.fileno(), old.fileno(), at, min(size_bytes - at, 64 << 20))
                if not sent:
                    raise OSError(f"{source} ended after {at} of {size_bytes} bytes")
                at += sent
    except OSError:
        Path(target).unlink(missing_ok=True)
        raise


def _remove(volume: Volume, gone: list[NotedRecord]) -> None:
    """Remove these here: they are on another volume's disk."""
    if not gone:
        return
    volume.durable.commit({each.entry: None for each in gone if each.durable})
    paths = []
    for each in gone:
        ledger.put_note(volume, each.entry, None)
        record = volume.record(keys.index_key(each.bucket, each.key), each.key)
        if record is not None and each.record is not None and record.object_id == each.record.object_id:
            ledger.remove_record(volume, each.bucket, each.key, record)
            if record.inline is None:
                paths.append(volume.data_path(record.object_id))
    volume.commit()
    for path in paths:
        files.remove(path)
