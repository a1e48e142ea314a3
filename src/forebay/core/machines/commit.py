"""The order of a volume's changes. A cut at any point leaves each object whole-old, whole-new or absent.

Theory. The index decides what is served. A file without a record is rubbish; a block that its record does not list is
never read. So every change is a list of effects, performed in order, around the commit of one index record. What the
record relies on comes before it. What the record no longer needs goes after it. Records of several plans may share one
transaction (group commit); the effects after a record then wait until that transaction has committed.

    new version     create temp, header, rename into place | write, sums, RECORD, … | retire the old
    evict blocks    RECORD without them, announce, then punch under an exclusive lease
    evict, forget   REMOVE RECORD, announce, unlink
    durable put     create temp, write all, header, fsync file, rename, fsync directory, RECORD (synced), acknowledge
    write           temp (a front wrote it), sums, header, rename | fsync file, fsync directory, RECORD (synced) |
                    RECORD (visible), acknowledge | retire the old
    delete          TOMBSTONE or REMOVE RECORD (synced) | REMOVE RECORD (visible), acknowledge | retire the old
    flushed         RECORD (visible, clean), header | REMOVE RECORD (synced, whenever there is another)

A write has two records. Readers see the visible one, which is not synced. The durable one survives every stop, and the
start restores the visible record from it. If the durable index names a key, a change of that key goes through the
durable index first, whether or not the change asks to be durable; otherwise the replaced version would come back after
a stop. A write that asks only for memory, and replaces nothing durable, skips the middle part of its line. A written
file may get its name before it is synced, because only the durable record gives it meaning: one journal commit carries
both.

A clean file is in place before it is full, because readers send from it while blocks land. Its header (bucket, key,
version, size) is set while it is still a temp file, so every file in `data/` says what it is. Clean data is never
synced. After an unclean machine stop its records are not trusted: each block is compared with the sum kept in the file
before its first use. Sums are written after the bytes and dropped after the record. If bytes were lost, or a sum
outlived its bytes, the comparison fails and the block is fetched again.

Rejected: a journal of intents (a second thing to recover); syncing clean files (a hundred times slower than the bucket,
and lost clean data can be fetched).

Invariants (`check_plan` asserts them). (1) A file is renamed into place only with its header. (2) A record lists a
block only after the block's bytes and sum are written. (3) Punch and unlink come after the record that gives up the
bytes, and after readers were told. (4) Acknowledge comes after a durable record, which comes after fsync of the file
(after its last write) and of the directory (after the rename).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CreateTemp:
    """Create `path` exclusively under `tmp/`, sparse, `size_bytes` long."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SetHeader:
    """Write the file's own description (encoded, with its checksum) into its header xattr."""

    path: str
    header: bytes


@dataclass(frozen=True, slots=True)
class WriteBytes:
    """Write `length` bytes at `offset`. The shell holds the bytes."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class KeepSums:
    """Store the checksums of these blocks where a rebuild finds them. Drop the sums of all other blocks."""

    path: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncFile:
    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SyncDir:
    """fsync the directory that holds `path`."""

    path: str


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Make the record of (bucket, key) name this object with exactly these blocks. The change becomes true here.

    `durable`: write to the synced index, and return only when the record is on disk. `path` is empty for an inline
    object.
    """

    bucket: str
    key: str
    object_id: int
    path: str
    blocks: tuple[int, ...]
    durable: bool = False


@dataclass(frozen=True, slots=True)
class RemoveRecord:
    """Remove the record of (bucket, key) if it still names this object."""

    bucket: str
    key: str
    object_id: int
    durable: bool = False


@dataclass(frozen=True, slots=True)
class PutTombstone:
    """Note that the backend has yet to delete (bucket, key). From then on nothing durable names an object of the
    key."""

    bucket: str
    key: str
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell fronts to close their descriptors of this object (`wire.Dropped`)."""

    object_id: int


@dataclass(frozen=True, slots=True)
class Punch:
    """Free the bytes [start, end) of the file, under an exclusive lease. If the lease is refused, try again later."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove the file. Whoever has it open keeps its bytes. It is no error if the file is missing."""

    path: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the writer that its bytes are safe, or (`durable` false: it asked for no more) that they are here."""

    object_id: int
    durable: bool = True


Effect = (
    CreateTemp
    | SetHeader
    | WriteBytes
    | KeepSums
    | SyncFile
    | Rename
    | SyncDir
    | PutRecord
    | RemoveRecord
    | PutTombstone
    | Announce
    | Punch
    | Unlink
    | Acknowledge
)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version of one object on a volume, and the path of its file (`path` empty: inline, no file)."""

    bucket: str
    key: str
    object_id: int
    path: str = ""
    durable: bool = False


def plan_begin(new: StoredVersion, temp: str, size_bytes: int, header: bytes) -> list[Effect]:
    """Bring a clean object's empty file into place, so that blocks can land in it. It has no record yet, so nobody
    reads it."""
    return [CreateTemp(temp, size_bytes), SetHeader(temp, header), Rename(temp, new.path)]


def plan_land(
    new: StoredVersion,
    writes: Sequence[tuple[int, int]],
    landed: Iterable[int],
    present: Iterable[int],
    replaces: StoredVersion | None = None,
) -> list[Effect]:
    """Record that blocks `landed` are whole after `writes` (offset, length). The record listed `present` before.

    `replaces` is the other version that the record names until now, if any; it is retired after the new record is true.
    """
    blocks = tuple(sorted({*present, *landed}))
    return [
        *(WriteBytes(new.path, offset, length) for offset, length in writes),
        KeepSums(new.path, blocks),
        PutRecord(new.bucket, new.key, new.object_id, new.path, blocks),
        *plan_retire(replaces),
    ]


def plan_inline(new: StoredVersion, replaces: StoredVersion | None = None) -> list[Effect]:
    """Put a small object, whole, into its record."""
    return [PutRecord(new.bucket, new.key, new.object_id, "", (), new.durable), *plan_retire(replaces)]


def plan_retire(old: StoredVersion | None) -> list[Effect]:
    """Drop a version that no record names any more."""
    if old is None:
        return []
    return [Announce(old.object_id), *([Unlink(old.path)] if old.path else [])]


def plan_forget(old: StoredVersion) -> list[Effect]:
    """Drop a whole object: evicted, deleted, or its file is bad."""
    return [RemoveRecord(old.bucket, old.key, old.object_id, old.durable), *plan_retire(old)]


def plan_evict_blocks(
    old: StoredVersion, present: Iterable[int], victims: Iterable[int], block_bytes: int, size_bytes: int
) -> list[Effect]:
    """Drop some blocks of a clean file, or the whole object when no block would be left."""
    gone = sorted(set(victims))
    left = tuple(sorted(set(present) - set(gone)))
    if not left:
        return plan_forget(old)
    return [
        PutRecord(old.bucket, old.key, old.object_id, old.path, left),
        KeepSums(old.path, left),
        Announce(old.object_id),
        *(Punch(old.path, block * block_bytes, min((block + 1) * block_bytes, size_bytes)) for block in gone),
    ]


def plan_durable(
    new: StoredVersion,
    temp: str,
    writes: Sequence[tuple[int, int]],
    blocks: int,
    header: bytes,
    replaces: StoredVersion | None = None,
) -> list[Effect]:
    """Write an object; sync its bytes and its name before its writer is told."""
    size_bytes = sum(length for _, length in writes)
    every = tuple(range(blocks))
    return [
        CreateTemp(temp, size_bytes),
        *(WriteBytes(temp, offset, length) for offset, length in writes),
        KeepSums(temp, every),
        SetHeader(temp, header),
        SyncFile(temp),
        Rename(temp, new.path),
        SyncDir(new.path),
        PutRecord(new.bucket, new.key, new.object_id, new.path, every, durable=True),
        Acknowledge(new.object_id),
        *(
            [RemoveRecord(replaces.bucket, replaces.key, replaces.object_id)]
            if replaces and not replaces.durable
            else []
        ),
        *plan_retire(replaces),
    ]


def plan_put(
    new: StoredVersion,
    temp: str,
    writes: Sequence[tuple[int, int]],
    blocks: int,
    header: bytes,
    replaces: StoredVersion | None = None,
) -> list[Effect]:
    """Take a whole object from a writer, and make it visible. `new.durable`: it must survive the machine's next stop.

    If `new.path` is empty there is no file: the bytes are in the records.
    """
    every = tuple(range(blocks)) if new.path else ()
    effects: list[Effect] = []
    if new.path:
        effects = [
            CreateTemp(temp, sum(length for _, length in writes)),
            *(WriteBytes(temp, offset, length) for offset, length in writes),
            KeepSums(temp, every),
            SetHeader(temp, header),
            Rename(temp, new.path),
        ]
    if new.durable:
        if new.path:
            effects += [SyncFile(new.path), SyncDir(new.path)]
        effects.append(PutRecord(new.bucket, new.key, new.object_id, new.path, every, durable=True))
    elif replaces is not None and replaces.durable:
        effects.append(RemoveRecord(replaces.bucket, replaces.key, replaces.object_id, durable=True))
    return [
        *effects,
        PutRecord(new.bucket, new.key, new.object_id, new.path, every),
        Acknowledge(new.object_id, durable=new.durable),
        *plan_retire(replaces),
    ]


def plan_delete(old: StoredVersion, *, tombstone: bool, durable: bool) -> list[Effect]:
    """Delete an object for a writer. `tombstone`: the backend has yet to delete it."""
    first: list[Effect] = []
    if tombstone:
        first = [PutTombstone(old.bucket, old.key, durable or old.durable)]
    elif old.durable:
        first = [RemoveRecord(old.bucket, old.key, old.object_id, durable=True)]
    return [
        *first,
        RemoveRecord(old.bucket, old.key, old.object_id),
        Acknowledge(old.object_id, durable=durable),
        *plan_retire(old),
    ]


def plan_flushed(old: StoredVersion, blocks: int, header: bytes) -> list[Effect]:
    """Mark the object clean, in its record and its file: the backend has it now.

    The durable record goes last. A machine stop before that only makes the flush begin again.
    """
    every = tuple(range(blocks)) if old.path else ()
    effects: list[Effect] = [PutRecord(old.bucket, old.key, old.object_id, old.path, every)]
    if old.path:
        effects.append(SetHeader(old.path, header))
    if old.durable:
        effects.append(RemoveRecord(old.bucket, old.key, old.object_id, durable=True))
    return effects


def check_plan(effects: Sequence[Effect]) -> None:
    """Assert the module's invariants over one plan that starts with nothing pending."""
    dirty: set[str] = set()  # written or renamed since the last sync
    unsynced_names: set[str] = set()
    headed: set[str] = set()
    unsummed: set[str] = set()  # written since its sums were kept
    created: set[str] = set()
    announced: set[int] = set()
    given_up = durable = False
    for effect in effects:
        match effect:
            case CreateTemp(path):
                created.add(path)
                dirty.add(path)
            case SetHeader(path):
                headed.add(path)
                dirty.add(path)
            case WriteBytes(path):
                dirty.add(path)
                unsummed.add(path)
            case KeepSums(path):
                dirty.add(path)
                unsummed.discard(path)
            case SyncFile(path):
                dirty.discard(path)
            case Rename(source, target):
                assert source in created, effect
                assert source in headed, f"no header yet: {effect}"
                for marks in (dirty, headed, unsummed):
                    if source in marks:
                        marks.add(target)
                unsynced_names.add(target)
            case SyncDir(path):
                unsynced_names.discard(path)
            case PutRecord(path=path, durable=is_durable):
                assert path not in unsummed, f"listed before its sums: {effect}"
                if is_durable:
                    assert path not in dirty, f"durable record of unsynced bytes: {effect}"
                    assert path not in unsynced_names, f"durable record of an unsynced name: {effect}"
                    durable = True
                given_up = True
            case RemoveRecord(durable=is_durable) | PutTombstone(durable=is_durable):
                given_up = True
                durable = durable or is_durable
            case Announce(object_id):
                assert given_up, f"announced before it is true: {effect}"
                announced.add(object_id)
            case Punch() | Unlink():
                assert given_up, f"bytes taken while a record may name them: {effect}"
                assert announced, f"bytes taken before readers were told: {effect}"
            case Acknowledge(durable=must_be):
                assert durable or not must_be, f"acknowledged before it is durable: {effect}"
                assert given_up, f"acknowledged before it is true: {effect}"
