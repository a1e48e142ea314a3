"""Whole objects and deletes from writers: from a temp file or bytes in memory to an acknowledged record.

Theory. A change takes three steps, so that what waits for a disk runs in a worker thread and only one thread touches
the visible index: `prepare` decides (volume, room, what must be durable), `make_durable` moves and syncs, `publish`
shows. Many changes go through each step together: directories are synced once, and there is one synced transaction per
volume (group commit). docs/disk-format.md has the order.

An entry of the durable index is replaced or removed only by a synced transaction. So a change that asks for no
durability is durable anyway if the key has a durable entry; otherwise the older entry would come back after a machine
stop.

A file is renamed before it is synced: the durable index, not the name, gives it meaning, and the disk's journal then
takes bytes and name together.

Rejected: copying the body into place (the temp file is on the volume already); undoing a synced change when the visible
index cannot take it (it is true: it comes into view when the volume has room again, or at the next start).

Invariants. (1) `make_durable` returns with each durable change on the disk, or with its error and nothing of it left.
(2) A failed change leaves the key as it was, unless it says that it may have been written. (3) From `prepare` to
`publish` no sweep touches the change's file.
"""

from __future__ import annotations

import errno
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.cluster.coding import SLICES
from forebay.core.errors import Corrupt, ForebayError, Unavailable
from forebay.core.messages.copied import whose_copies
from forebay.core.record import OWNED, Record, State, blocks_in, build_head, info_of
from forebay.core.s3rules.keeping import kept_as
from forebay.core.types import Headers, ObjectInfo
from forebay.node.store.disk import files, keys, ledger, presence
from forebay.node.store.disk.durable import Entry, sync_path
from forebay.node.store.disk.notes import Note, Owed
from forebay.node.store.disk.usage import Room, small_bytes
from forebay.node.store.disk.volume import Volume, stalled
from forebay.node.store.writer import owned
from forebay.node.store.writer.volumes import VolumeSet, no_room
from forebay.ports import clock

log = logging.getLogger("forebay.store")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_SUMS = array("Q")
_SYNCED_TOGETHER = 64  # files open at once while a group of them is synced


class Put(NamedTuple):
    """Make this the object of (bucket, info.key)."""

    bucket: str
    info: ObjectInfo
    object_id: int  # from Store.take_id()
    state: int  # of core.record.State: CLEAN, DIRTY or LOCAL, perhaps | PINNED
    checked_s: float
    body: bytes | None = None  # at most INLINE_BYTES_MAX: lives in the record
    path: str = ""  # else: a temp file in tmp/ of the key's volume (StoreReader.incoming), whole
    sums: Sequence[int] = ()  # xxh3-64 per block of that file
    note: Note | None = None  # set exactly for DIRTY and LOCAL
    durable: bool = False  # sync file, directory and note before make_durable returns
    block_bytes: int = 0  # of `sums`; 0: `Store.block_bytes`
    returns: bool = False  # an absent volume had it: it is the last version of the key


class Delete(NamedTuple):
    """Delete (bucket, key). `note`: the tombstone to keep, or None."""

    bucket: str
    key: str
    note: Note | None = None
    durable: bool = False
    returns: bool = False  # as of a Put


Change = Put | Delete


class _Step(msgspec.Struct):
    """One change under way."""

    change: Change
    bucket: str
    key: str
    entry: bytes = b""
    volume: Volume | None = None
    record: Record | None = None  # what becomes visible
    inline_sum: int = 0
    source: str = ""  # the temp file
    target: str = ""  # its place under data/
    durable: bool = False  # the note goes to the durable index
    forget: bool = False  # the durable index has an entry to remove
    placed: bool = False
    replaced: Record | None = None  # the record that it replaced in view
    error: ForebayError | None = None

    def kept(self) -> Entry | None:
        """The new entry of the durable index."""
        note = self.change.note
        if note is None or not self.durable:
            return None
        return Entry(note, self.record, self.inline_sum, keys.long_key(self.entry, self.key))


class Prepared(msgspec.Struct):
    """Changes that were decided on. Pass each to `make_durable` and then to `publish`, even after a cancellation: until
    it is published, its file is held.

    `outcomes`: per change its error, None as long as it has none. `replaced`: after `publish`, per change the record
    that was in view before.
    """

    steps: list[_Step] = msgspec.field(default_factory=list)
    # volume id: commits of its index, and lost ones
    needs: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)

    @property
    def outcomes(self) -> list[ForebayError | None]:
        return [step.error for step in self.steps]

    @property
    def touches_disk(self) -> bool:
        """Whether `make_durable` has anything to do. If not, it may be called on the loop, or not at all."""
        return any(step.source or step.durable or step.forget for step in self.steps)

    @property
    def replaced(self) -> list[Record | None]:
        return [step.replaced for step in self.steps]

    def by_volume(self) -> list[tuple[Volume, list[_Step]]]:
        found: dict[str, tuple[Volume, list[_Step]]] = {}
        for step in self.steps:
            if step.volume is not None and step.error is None:
                found.setdefault(step.volume.id, (step.volume, []))[1].append(step)
        return list(found.values())


class _Asked(msgspec.Struct):
    """A volume's room, asked once for many changes: nothing is written before `make_durable`."""

    room: Room
    small_bytes: int = 0  # promised to small objects
    durable_bytes: int = 0  # and in the durable index

    def promise(self, step: _Step) -> None:
        """Keep room for a put; `Unavailable` if there is none."""
        record, volume = step.record, step.volume
        assert record is not None
        assert volume is not None
        if record.inline is None:
            remedy = self.room.refuses_file(record.size_bytes, here_bytes=record.size_bytes)
        else:
            taken_bytes, durable_bytes = self.small_bytes + small_bytes(record), self.durable_bytes
            if step.durable:
                durable_bytes += small_bytes(record, len(msgspec.msgpack.encode(step.change.note)))
            remedy = self.room.refuses_small(taken_bytes, durable_bytes)
            if not remedy:
                self.small_bytes, self.durable_bytes = taken_bytes, durable_bytes
        if remedy:
            raise no_room(volume, f"{record.size_bytes} bytes do not fit", remedy)


class Puts:
    """For `Store`, whose methods of the same names document these.

    `enter(volume, entry, bucket, key, record, inline_sum, sums)` and `take_out(volume, bucket, key)` change the visible
    index, retiring the previous record, which they return. `put` changes a record that stays; `flush` commits.
    """

    def __init__(
        self,
        volumes: VolumeSet,
        *,
        enter: Callable[[Volume, bytes, str, str, Record, int, array[int]], Record | None],
        take_out: Callable[[Volume, str, str], Record | None],
        put: Callable[[Volume, str, str, Record, Record | None], None],
        set_aside: Callable[[Volume, str, str, Record, str], None],
        flush: Callable[[], int],
    ) -> None:
        self._volumes = volumes
        self._put = put
        self._set_aside = set_aside
        self._enter = enter
        self._take_out = take_out
        self._flush = flush
        self._arriving: set[int] = set()
        self._synced: set[str] = set()  # directories of data files whose own names are synced; at most 65,536

    def is_arriving(self, object_id: int) -> bool:
        """Whether a change with this object is between `prepare` and `publish`."""
        return object_id in self._arriving

    # --- deciding ---

    def prepare(self, changes: Sequence[Change]) -> Prepared:
        prepared = Prepared()
        names: set[tuple[str, str]] = set()
        rooms: dict[str, _Asked] = {}
        for change in changes:
            key = change.info.key if isinstance(change, Put) else change.key
            assert (change.bucket, key) not in names, f"two changes of {change.bucket}/{key} at once"
            names.add((change.bucket, key))
            step = _Step(change, change.bucket, key)
            prepared.steps.append(step)
            try:
                self._decide(step, rooms)
            except ForebayError as error:
                step.error = error
                self._discard(change.path if isinstance(change, Put) else "", step.volume)
        return prepared

    def give_up(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, Put):
                self._discard(change.path, self._volumes.volume_at(change.bucket, change.info.key))

    def _discard(self, path: str, volume: Volume | None) -> None:
        """Remove the temp file of a change that will not happen."""
        if path and volume is not None:
            volume.desk.begin(_discard, path)

    def _decide(self, step: _Step, rooms: dict[str, _Asked]) -> None:
        change, bucket, key = step.change, step.bucket, step.key
        volume = step.volume = self._volumes.home(bucket, key)
        if volume.state == "out":
            raise self._volumes.unusable(volume)
        step.entry = keys.index_key(bucket, key)
        if volume.stall.stalled:
            raise stalled(volume.path, f"{bucket}/{key}")
        # A copy for another node, or a slice, that was on a volume which is not here is sent again. If that volume
        # comes back, the later one counts (misplaced.py).
        anew = change.returns or bucket == SLICES or bool(whose_copies(bucket))
        (self._volumes.check_in_use if anew else self._volumes.check_present)(bucket, key)
        if change.note is not None:
            self._volumes.check_noted(volume, bucket, key)
        step.durable = change.note is not None and change.durable
        if not step.durable:
            try:
                has_entry = volume.durable.has(step.entry)
            except (OSError, Corrupt) as error:
                raise volume.trouble(error, "reading the durable index") from error
            step.durable = has_entry and change.note is not None
            step.forget = has_entry and change.note is None
        if isinstance(change, Delete):
            assert change.note is None or change.note.is_delete, change
            return
        self._decide_put(step, change, volume)
        if volume.path not in rooms:
            rooms[volume.path] = _Asked(self._volumes.room(volume, fresh=True))
        rooms[volume.path].promise(step)
        if step.source:
            self._arriving.add(change.object_id)

    def _decide_put(self, step: _Step, change: Put, volume: Volume) -> None:
        info, body = change.info, change.body
        block_bytes = change.block_bytes or self._volumes.block_bytes
        owns = bool(change.state & OWNED)
        assert owns == (change.note is not None), change
        assert (body is None) == bool(change.path), change
        if body is None and info.size_bytes <= limits.INLINE_BYTES_MAX:
            body = _read_small(volume, change)
        elif body is None:
            if os.path.dirname(change.path) != f"{volume.path}/tmp":
                raise Unavailable(f"the volume that took the bytes of {info.key} is out meanwhile: send them again")
            assert len(change.sums) == blocks_in(info.size_bytes, block_bytes), change
            step.source, step.target = change.path, volume.data_path(change.object_id)
        if body is not None:
            assert len(body) == info.size_bytes <= limits.INLINE_BYTES_MAX, change
            step.inline_sum = xxhash.xxh3_64_intdigest(body)
        step.record = Record(
            object_id=change.object_id,
            size_bytes=info.size_bytes,
            version=info.version,
            etag=info.etag,
            modified_s=info.modified_s,
            checked_s=change.checked_s,
            head=build_head(info),
            complete=True,
            state=int(change.state),
            used_minute=int(clock.wall_s() // 60),
            inline=body,
            key=keys.long_key(step.entry, step.key),
            block_bytes=block_bytes,
        )

    # --- on the disk ---

    def make_durable(self, prepared: Prepared) -> None:
        for volume, steps in prepared.by_volume():
            volume.desk.timed(self._make_durable_on, volume, steps)

    def _make_durable_on(self, volume: Volume, steps: list[_Step]) -> None:
        self._place(volume, steps)
        synced = [step for step in steps if step.error is None and (step.durable or step.forget)]
        if synced:
            self._commit(volume, synced)
        for step in steps:
            if step.error is not None:
                self._undo(volume, step)

    def _place(self, volume: Volume, steps: list[_Step]) -> None:
        """Write headers and rename; sync files and names that must be durable."""
        for step in steps:
            if step.source:
                with _failing(volume, step, "bringing a data file into place"):
                    try:
                        self._bring(volume, step)
                    except FileNotFoundError as error:
                        if os.path.exists(step.source) or not os.path.isdir(os.path.dirname(step.source)):
                            raise
                        # `sweep_temp` removed it with what else its dead process left: that is no trouble of the disk.
                        raise Unavailable(
                            f"the body of {step.bucket}/{step.key} is gone with the process that received it: send it "
                            "again"
                        ) from error
        durable = [step for step in steps if step.source and step.durable and step.error is None]
        for first in range(0, len(durable), _SYNCED_TOGETHER):
            _sync_files(volume, durable[first : first + _SYNCED_TOGETHER])
        directories = {os.path.dirname(step.target) for step in durable}
        new = directories - self._synced
        for directory in new:  # its maker, perhaps a landing, did not sync its name
            directories |= {os.path.dirname(directory), f"{volume.path}/data"}
        try:
            for directory in sorted(directories, reverse=True):
                sync_path(directory)
            self._synced |= new
        except OSError as error:
            for step in durable:
                _fail(volume, step, error, "syncing a directory")

    def _bring(self, volume: Volume, step: _Step) -> None:
        """Write the header and rename."""
        change, record = step.change, step.record
        assert isinstance(change, Put)
        assert record is not None
        size_bytes = os.stat(step.source).st_size
        if size_bytes != record.size_bytes:
            raise Corrupt(f"{step.bucket}/{step.key}: {size_bytes} of {record.size_bytes} bytes arrived: send it again")
        info = change.info
        identity = files.Identity(
            record.object_id,
            step.bucket,
            step.key,
            info.size_bytes,
            info.version,
            info.etag,
            info.modified_s,
            info.headers,
            change.checked_s,
            record.block_bytes,
            owned=change.note is not None,
        )
        sums = [files.stored_sum(each) for each in change.sums]
        header = files.Header.create(step.source, identity, xattrs=volume.xattrs, sums=sums)
        os.makedirs(os.path.dirname(step.target), exist_ok=True)
        step.placed = True
        if not header.with_xattr:
            os.replace(step.source + files.SIDECAR_SUFFIX, step.target + files.SIDECAR_SUFFIX)
        os.replace(step.source, step.target)

    def _commit(self, volume: Volume, steps: list[_Step]) -> None:
        changes = {step.entry: step.kept() for step in steps}
        try:
            volume.with_ballast(lambda: volume.durable.commit(changes))
        except (OSError, Corrupt) as error:
            refused = _trouble(volume, error, "committing to the durable index")
            for step in steps:
                step.error = refused

    def _undo(self, volume: Volume, step: _Step) -> None:
        """Remove everything of a failed change."""
        try:
            _discard(step.source)
            if step.placed:
                files.remove(step.target)
        except OSError as error:
            volume.trouble(error, "removing what a failed write left")

    # --- in view ---

    def publish(self, prepared: Prepared) -> list[Record | ForebayError | None] | None:
        for volume, steps in prepared.by_volume():
            prepared.needs[volume.id] = (volume.flushes_begun + 1, volume.flushes_lost)
            owned.clear_marks(volume)
            for step in steps:
                if volume.state == "out":
                    step.error = self._volumes.unusable(volume)
                else:
                    self._show(volume, step)
        self._flush()
        outcomes = self.outcomes(prepared)
        if outcomes is None:
            for volume, steps in prepared.by_volume():
                self._volumes.unshown.update({(step.bucket, step.key): volume for step in steps})
        return outcomes

    def outcomes(self, prepared: Prepared) -> list[Record | ForebayError | None] | None:
        shown = prepared.by_volume()
        for volume, _ in shown:
            begun, lost = prepared.needs[volume.id]
            waits = volume.writing is not None or volume.index.pending
            if waits and volume.state != "out" and volume.flushes_done < begun and volume.flushes_lost == lost:
                return None
        for volume, steps in shown:
            if volume.flushes_lost != prepared.needs[volume.id][1]:
                for step in steps:
                    self._not_shown(volume, step)
            for step in steps:
                self._volumes.unshown.pop((step.bucket, step.key), None)
        for step in prepared.steps:
            if isinstance(step.change, Put):
                self._arriving.discard(step.change.object_id)
        return [step.error if step.error is not None else step.record for step in prepared.steps]

    def _show(self, volume: Volume, step: _Step) -> None:
        change = step.change
        kept = None
        if change.note is not None and not step.durable:
            kept = Entry(change.note, None, 0, keys.long_key(step.entry, step.key))
        if isinstance(change, Put):
            assert step.record is not None
            sums = array("Q", map(files.stored_sum, change.sums)) if step.source else _NO_SUMS
            step.replaced = self._enter(volume, step.entry, step.bucket, step.key, step.record, step.inline_sum, sums)
        else:
            step.replaced = self._take_out(volume, step.bucket, step.key)
        ledger.put_note(volume, step.entry, kept)

    def _not_shown(self, volume: Volume, step: _Step) -> None:
        """The index could not take it. A durable change comes into view later; any other is undone."""
        if volume.state == "out" or step.durable or step.forget:
            what = f"failed ({volume.reason})" if volume.state == "out" else "has no room for what it shows"
            why = f"volume {volume.path} {what}"
            step.error = Unavailable(f"{why}. It may have been written: look before you write it again")
        else:
            step.error = no_room(volume, f"the index of volume {volume.path} could not be written")
        if not step.durable:
            volume.desk.begin(self._undo, volume, step)

    # --- clean again ---

    def mark_clean(
        self, bucket: str, key: str, object_id: int, *, version: str, checked_s: float, keeping: Headers = ()
    ) -> Record | None:
        volume = self._volumes.volume_at(bucket, key)
        if volume is None:
            return None
        entry = keys.index_key(bucket, key)
        try:
            kept = volume.durable.get(entry)
        except (OSError, Corrupt) as error:
            volume.trouble(error, "reading the durable index")
            return None
        note = kept or ledger.note_of(volume, entry)
        if object_id == 0:
            if note is not None and note.note.is_delete:
                owned.settle(volume, entry, kept)
            return None
        record = volume.record(entry, key)
        if record is None or record.object_id != object_id or not record.state & State.DIRTY:
            return None
        head = record.head
        if keeping:
            info = info_of(record, key)
            head = build_head(msgspec.structs.replace(info, headers=kept_as(info.headers, keeping)))
        clean = msgspec.structs.replace(
            record, state=int(record.state & ~State.OWNED), version=version, checked_s=checked_s, head=head
        )
        self._put(volume, bucket, key, clean, record)
        owned.settle(volume, entry, kept)
        if record.inline is None:
            volume.desk.begin(self._rename_version, volume, clean, keeping)
        return clean

    def _rename_version(self, volume: Volume, record: Record, keeping: Headers) -> None:
        """Update the file's header from the record. If that fails, a machine stop costs the cached bytes."""
        try:
            with volume.headers:
                header = files.Header.read(volume.data_path(record.object_id))
                if header is not None:
                    identity = msgspec.structs.replace(
                        header.identity,
                        version=record.version,
                        checked_s=record.checked_s,
                        owned=False,
                        headers=kept_as(header.identity.headers, keeping),
                    )
                    header.rename_to(identity)
        except OSError as error:
            log.info("the header of object %d keeps its old version: %s", record.object_id, error)

    # --- bytes that rotted ---

    def lose_blocks(self, volume: Volume, bucket: str, key: str, record: Record, wrong: list[int]) -> Record | None:
        """Acknowledged bytes do not match their checksums: stop serving them. The other blocks are served, and the
        object stays owned but incomplete, so it cannot be flushed. Inline bytes are restored from the durable index if
        they are right there; otherwise the object goes out of view. Returns the record afterwards."""
        entry = keys.index_key(bucket, key)
        kept = volume.durable.get(entry)
        if record.inline is None:
            owned.tell_lost(volume, bucket, key, f"{len(wrong)} blocks from {wrong[0]} do not match their checksums")
            smaller = presence.with_bits(record, presence.bits_of(record) & ~presence.mask(wrong))
            self._put(volume, bucket, key, smaller, record)
            volume.partly_lost[entry] = (bucket, key)
            if kept is not None and kept.record is not None and kept.record.object_id == record.object_id:
                volume.durable.replace_later(entry, msgspec.structs.replace(kept, record=smaller))
            return smaller
        good = kept.record.inline if kept is not None and kept.record is not None else None
        same = kept is not None and kept.note.object_id == record.object_id
        if kept is not None and same and good is not None and xxhash.xxh3_64_intdigest(good) == kept.inline_sum:
            healed = msgspec.structs.replace(record, inline=good)
            self._put(volume, bucket, key, healed, record)
            return healed
        self._set_aside(volume, bucket, key, record, "its bytes do not match their checksum")
        return None

    def housekeep(self, volume: Volume) -> None:
        """Remove settled marks and dead processes' bodies."""
        try:
            owned.clear_marks(volume)
            volume.desk.begin(volume.sweep_temp)
            volume.probe()
        except (OSError, Corrupt) as error:
            volume.trouble(error, "keeping house")

    # --- notes ---

    def write_notes(self, owed: Iterable[Owed]) -> None:
        by_volume: dict[str, tuple[Volume, dict[bytes, Note]]] = {}
        for each in owed:
            volume = self._volumes.home(each.bucket, each.key)
            notes = by_volume.setdefault(volume.id, (volume, {}))[1]
            notes[keys.index_key(each.bucket, each.key)] = each.note
        for volume, notes in by_volume.values():
            if volume.state == "out":
                raise self._volumes.unusable(volume)
            try:
                there = {entry for entry in notes if volume.durable.get(entry) is not None}
                if there:
                    volume.durable.commit({}, {entry: notes[entry] for entry in there})
                ledger.replace_notes(volume, {entry: note for entry, note in notes.items() if entry not in there})
            except (OSError, Corrupt) as error:
                raise _trouble(volume, error, "writing notes") from error

    def settle_on(self, volume: Volume) -> None:
        if volume.state != "out":
            try:
                volume.durable.settle()
            except (OSError, Corrupt) as error:
                volume.trouble(error, "committing to the durable index")


def _trouble(volume: Volume, error: Exception, doing: str) -> Unavailable:
    volume.trouble(error, doing)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return no_room(volume, f"{doing}: {error}")
    return Unavailable(f"volume {volume.path} cannot take the write ({doing}: {error}): write again")


def _fail(volume: Volume, step: _Step, error: Exception, doing: str) -> None:
    if step.error is None:
        step.error = error if isinstance(error, ForebayError) else _trouble(volume, error, doing)


@contextmanager
def _failing(volume: Volume, step: _Step, doing: str) -> Iterator[None]:
    """Errors inside become the step's error."""
    try:
        yield
    except (OSError, ForebayError) as error:
        _fail(volume, step, error, doing)


def _sync_files(volume: Volume, steps: list[_Step]) -> None:
    """fsync data files and their sidecars. Writing starts for all before the first wait."""
    opened: list[tuple[_Step, int]] = []
    try:
        for step in steps:
            with _failing(volume, step, "opening a data file to sync it"):
                opened.append((step, os.open(step.target, os.O_RDONLY | os.O_CLOEXEC)))
        if len(opened) > 1:
            for _, fd in opened:
                files.begin_writeback(fd)
        for step, fd in opened:
            with _failing(volume, step, "syncing a data file"):
                os.fsync(fd)
                if os.path.exists(step.target + files.SIDECAR_SUFFIX):
                    sync_path(step.target + files.SIDECAR_SUFFIX)
    finally:
        for _, fd in opened:
            os.close(fd)


def _read_small(volume: Volume, change: Put) -> bytes:
    """Read and remove a temp file that is small enough for the record."""
    try:
        with open(change.path, "rb") as file:
            body = file.read(limits.INLINE_BYTES_MAX + 1)
        volume.desk.begin(_discard, change.path)
    except OSError as error:
        raise volume.trouble(error, "reading a temp file") from error
    if len(body) != change.info.size_bytes:
        raise Corrupt(f"{change.info.key}: {len(body)} of {change.info.size_bytes} bytes arrived: send it again")
    return body


def _discard(path: str) -> None:
    """Remove a temp file and its sidecar, if they are there."""
    for each in (path, path + files.SIDECAR_SUFFIX) if path else ():
        try:
            os.unlink(each)
        except FileNotFoundError:
            pass
