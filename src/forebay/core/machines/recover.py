"""What a volume's files and records mean after a stop: keep, rebuild, delete or set aside.

Theory. There are two kinds of stop. After a *process* stop the kernel has every write, so the clean index is right.
Only rubbish is left over: temp files, and files that no record names. After an unclean *machine* stop the clean index
may be wrong anywhere. It is thrown away and rebuilt from the files' headers, with every block UNVERIFIED: before its
first use, its bytes must match the sum kept in the file. The synced (durable) index is right after every stop.

Decisions are made one file or one record at a time, since a volume may hold ten million. The shell streams its listing
past `judge_file` and applies the actions to the index as it goes. After a process stop it then streams the records past
`judge_record`. A file is judged against the index as it is *now*, so two versions of one key, both with intact headers,
meet here. The higher object id wins, since ids only grow.

The durable index goes first. `judge_owed` compares each durable record with the visible index as it is (empty, after a
machine stop). The record is restored to view, or is in view already, or was settled meanwhile, or its bytes are gone
and the loss is reported. Files are judged after that, so that they meet the durable records.

Rejected: trusting the clean index after a machine stop and hoping (LMDB without sync may tear pages); deleting a file
that a durable record names when it looks wrong (it is evidence, and may be the only copy of an acknowledged write).

Invariants. (1) A block is served only if a record lists it and (after an unclean machine stop) its sum matched. (2) A
file that a durable record names is never deleted. (3) Judging the same things again changes nothing. (4) A durable
write that was cut before its record is undone, never turned into a clean object.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """What a file's header says it is. `blocks` are those whose sums the file holds.

    `durable`: a durable write made the file, so only a durable record gives it meaning.
    """

    bucket: str
    key: str
    object_id: int
    size_bytes: int
    blocks: tuple[int, ...] = ()
    durable: bool = False


class FileSeen(msgspec.Struct, frozen=True):
    """One file found in `tmp/` or `data/`. `header` is None when it is missing or its checksum does not match."""

    path: str
    kind: Literal["temp", "data"]
    size_bytes: int = 0
    header: Identity | None = None


class RecordSeen(msgspec.Struct, frozen=True):
    """One record of a trusted index. `path` is where its file should be; empty for inline objects.

    `durable`: its bytes are only here (dirty or local). `object_id` is 0 for a tombstone.
    """

    bucket: str
    key: str
    object_id: int
    path: str
    size_bytes: int
    durable: bool = False


class Keep(msgspec.Struct, frozen=True):
    """Keep the file. `unverified`: mark the record so; its blocks must be verified before their first use. (A durable
    record's file needs no such mark: it was synced before the record.)"""

    path: str
    unverified: bool = False


class Delete(msgspec.Struct, frozen=True):
    """Remove a file that nothing needs."""

    path: str
    reason: Literal["temp", "orphan", "superseded", "unreadable"]


class Quarantine(msgspec.Struct, frozen=True):
    """Move a file that contradicts its record aside, out of use, and tell the operator."""

    path: str
    reason: str


class Rebuild(msgspec.Struct, frozen=True):
    """Write a clean record, UNVERIFIED, unconfirmed (`checked_s` `MISSED`), listing `identity.blocks`."""

    path: str
    identity: Identity


class DropRecord(msgspec.Struct, frozen=True):
    """Remove a record whose bytes are missing or that another replaces. `lost`: a durable record's bytes are gone;
    report it."""

    bucket: str
    key: str
    object_id: int
    lost: bool = False


class Restore(msgspec.Struct, frozen=True):
    """Put a durable record into view, in place of any other record of its key."""

    record: RecordSeen


class Settle(msgspec.Struct, frozen=True):
    """The durable record's flush ended before the stop: remove the record in the next transaction."""

    record: RecordSeen


Action = Keep | Delete | Quarantine | Rebuild | DropRecord | Restore | Settle


def judge_owed(owed: RecordSeen, now: RecordSeen | None, settled: bool, size_bytes: int | None) -> list[Action]:
    """What to do about one record of the durable index, before any file is judged.

    `now` is the visible index's record of the key (its `durable`: in an owned state). `settled`: the visible index says
    that this record's flush ended. `size_bytes` is the size of the file at `owed.path`, None if there is none.
    """
    same = now is not None and now.object_id == owed.object_id
    if settled or (now is not None and same and not now.durable):
        return [Settle(owed)]
    dropped: list[Action] = [DropRecord(now.bucket, now.key, now.object_id)] if now is not None else []
    if not owed.object_id:
        return dropped  # the stop came between the tombstone and its effect
    if owed.path and size_bytes != owed.size_bytes:
        return [DropRecord(owed.bucket, owed.key, owed.object_id, lost=True), *dropped]
    return [] if same else [Restore(owed)]


def judge_file(seen: FileSeen, record: RecordSeen | None, trusted: bool) -> list[Action]:
    """What to do about one file.

    `record` is the index's current record of the key in the file's header or, if the header is unreadable, of the
    object id in the file's name. `trusted`: the clean index survived (same boot, or a clean stop).
    """
    if seen.kind == "temp":
        return [Delete(seen.path, "temp")]
    header = seen.header
    if record is not None and record.path == seen.path:
        return _judge_named(seen, record, trusted)
    if header is None:
        return [Delete(seen.path, "unreadable" if not trusted else "orphan")]
    if trusted or header.durable or (record is not None and (record.durable or record.object_id > header.object_id)):
        return [Delete(seen.path, "orphan" if record is None else "superseded")]
    if seen.size_bytes != header.size_bytes or not header.blocks:
        return [Delete(seen.path, "unreadable")]
    rebuild: list[Action] = [Rebuild(seen.path, header)]
    if record is not None and record.path:
        rebuild.append(Delete(record.path, "superseded"))
    return rebuild


def _judge_named(seen: FileSeen, record: RecordSeen, trusted: bool) -> list[Action]:
    """Judge a file that is where its record says."""
    header = seen.header
    fits = seen.size_bytes == record.size_bytes and (
        header is None or (header.bucket, header.key, header.object_id) == (record.bucket, record.key, record.object_id)
    )
    if fits and (header is not None or record.durable):
        return [Keep(seen.path, unverified=not trusted and not record.durable)]
    if record.durable:
        return [
            Quarantine(seen.path, f"does not fit its record of {record.bucket}/{record.key}"),
            DropRecord(record.bucket, record.key, record.object_id, lost=True),
        ]
    return [DropRecord(record.bucket, record.key, record.object_id), Delete(seen.path, "unreadable")]


def judge_record(record: RecordSeen, file_is_there: bool) -> list[Action]:
    """What to do about one record, after all files have been judged."""
    if file_is_there or not record.path:
        return []
    return [DropRecord(record.bucket, record.key, record.object_id, lost=record.durable)]
