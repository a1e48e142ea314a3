"""The order in which a volume changes, so that a cut anywhere leaves each object whole-old, whole-new or absent.

Theory. The index decides what is served: a file without a record is rubbish, a block that its record does not list is
not read. So every change is a list of effects, performed in order, around one point where it becomes true: the commit
of an index record. What must be there for the record to be right comes before it; what the record no longer needs goes
after it. Records of several plans may share one transaction (group commit); what follows a record in its plan then
waits until that transaction has committed.

    new version     create temp, header, rename into place | write, sums, RECORD, … | retire the old
    evict blocks    RECORD without them, announce, then punch under an exclusive lease
    evict, forget   REMOVE RECORD, announce, unlink
    durable put     create temp, write all, header, fsync file, rename, fsync directory, RECORD (synced), acknowledge
    write           temp (a front wrote it), sums, header, rename | fsync file, fsync directory, RECORD (synced) |
                    RECORD (visible), acknowledge | retire the old
    delete          TOMBSTONE or REMOVE RECORD (synced) | REMOVE RECORD (visible), acknowledge | retire the old
    flushed         RECORD (visible, clean), header | REMOVE RECORD (synced, whenever there is another)

A write has two records. The visible one is what readers see; it is not synced. The durable one says what no stop may
lose, and what it says is put into view again at the start. Where the durable index names a key, a change of that key
goes through it first, whether or not it asks to be durable: else what was replaced would come back. A write that asks
for no more than memory (and replaces nothing durable) skips the middle part of its line. Since the durable record
alone gives a written file its meaning, the file may have its name before it is synced: one journal commit carries both.

A clean file is in place before it is full, because readers send from it while it lands; its header (bucket, key,
version, size) is set while it is still a temp file, so a file in `data/` always says what it is. Nothing of clean data
is synced: after an unclean machine stop its records are not trusted, and each block is verified against the sums kept
in the file before it is used. Sums are written after the bytes and dropped after the record; a sum that outlives its
bytes, or bytes that a cut lost, fail the comparison and the block is fetched again.

Rejected: a journal of intents (a second thing to recover); syncing clean files (a hundred times slower than the
bucket, and what is lost can be fetched).

Invariants (`check_plan` holds a plan to them). (1) A file is renamed into place only with its header. (2) A record that
lists a block comes after the block's bytes and sum. (3) Punch and unlink come after the record that gives the bytes
up, and after readers were told. (4) Acknowledge comes after a durable record, which comes after fsync of the file
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
    """Put `length` bytes at `offset`; the shell holds the bytes."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class KeepSums:
    """Store the checksums of these blocks where a rebuild finds them; of blocks no longer named, drop them."""

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
    """Make the record of (bucket, key) name this object with exactly these blocks. The point where a change is true.

    `durable`: into the synced index, returning only when it is on the disk. `path` is empty for an inline object.
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
    """Note that the delete of (bucket, key) is owed to the backend; nothing durable names an object of the key then."""

    bucket: str
    key: str
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell fronts to close their descriptors of this object (`wire.Dropped`)."""

    object_id: int


@dataclass(frozen=True, slots=True)
class Punch:
    """Give back the bytes [start, end) of the file, under an exclusive lease; if it is refused, come back later."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove the file; who has it open keeps its bytes. Missing already is fine."""

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
class Place:
    """One version of one object on a volume: who it is and where its file is (`path` empty: inline, no file)."""

    bucket: str
    key: str
    object_id: int
    path: str = ""
    durable: bool = False


def plan_begin(new: Place, temp: str, size_bytes: int, header: bytes) -> list[Effect]:
    """Bring a clean object's empty file into place, so that blocks can land in it. No record yet: it is not served."""
    return [CreateTemp(temp, size_bytes), SetHeader(temp, header), Rename(temp, new.path)]


def plan_land(
    new: Place,
    writes: Sequence[tuple[int, int]],
    landed: Iterable[int],
    present: Iterable[int],
    replaces: Place | None = None,
) -> list[Effect]:
    """Blocks `landed` are whole after `writes` (offset, length); `present` were listed before.

    `replaces` is the version that the record names until now, if it is another; it goes once the new record is true.
    """
    blocks = tuple(sorted({*present, *landed}))
    return [
        *(WriteBytes(new.path, offset, length) for offset, length in writes),
        KeepSums(new.path, blocks),
        PutRecord(new.bucket, new.key, new.object_id, new.path, blocks),
        *plan_retire(replaces),
    ]


def plan_inline(new: Place, replaces: Place | None = None) -> list[Effect]:
    """A small object, whole inside its record."""
    return [PutRecord(new.bucket, new.key, new.object_id, "", (), new.durable), *plan_retire(replaces)]


def plan_retire(old: Place | None) -> list[Effect]:
    """What to do with a version that no record names any more."""
    if old is None:
        return []
    return [Announce(old.object_id), *([Unlink(old.path)] if old.path else [])]


def plan_forget(old: Place) -> list[Effect]:
    """Drop an object whole: eviction, deletion, a bad file."""
    return [RemoveRecord(old.bucket, old.key, old.object_id, old.durable), *plan_retire(old)]


def plan_evict_blocks(
    old: Place, present: Iterable[int], victims: Iterable[int], block_bytes: int, size_bytes: int
) -> list[Effect]:
    """Drop some blocks of a clean file; the whole object when none would be left."""
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
    new: Place,
    temp: str,
    writes: Sequence[tuple[int, int]],
    blocks: int,
    header: bytes,
    replaces: Place | None = None,
) -> list[Effect]:
    """An acknowledged write: whole and on the disk, name and all, before its writer hears of it."""
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
    new: Place,
    temp: str,
    writes: Sequence[tuple[int, int]],
    blocks: int,
    header: bytes,
    replaces: Place | None = None,
) -> list[Effect]:
    """A whole object from a writer, shown as well as kept. `new.durable`: it must outlive the machine's next stop.

    Nothing is in a file where `new.path` is empty: the bytes are in the records.
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


def plan_delete(old: Place, *, tombstone: bool, durable: bool) -> list[Effect]:
    """A writer's delete of what is here. `tombstone`: the backend is still to hear of it."""
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


def plan_flushed(old: Place, blocks: int, header: bytes) -> list[Effect]:
    """The backend has the object: a clean one from here on, whose file says so too.

    The durable record goes last: until then a machine stop makes the flush begin again, and nothing worse.
    """
    every = tuple(range(blocks)) if old.path else ()
    effects: list[Effect] = [PutRecord(old.bucket, old.key, old.object_id, old.path, every)]
    if old.path:
        effects.append(SetHeader(old.path, header))
    if old.durable:
        effects.append(RemoveRecord(old.bucket, old.key, old.object_id, durable=True))
    return effects


def check_plan(effects: Sequence[Effect]) -> None:
    """Assert the module's invariants over one plan that starts from nothing pending."""
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
