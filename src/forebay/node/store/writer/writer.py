"""The writer's side of the store: every change to volumes and indexes goes through `Store`, in one process.

Theory. Each change is made around one index record (docs/disk-format.md has the order of each). What the record relies
on comes before it: bytes, sums, header, name. The record waits in memory for the next `flush`. What it gives up goes
after it: once that flush has committed, readers are told, files unlinked and holes punched. So a stop at any moment
leaves each object whole-old, whole-new or absent, and never takes bytes that a record still names.

`Landing.write`, `check_blocks` and `reclaim` move bytes, and may run in worker threads. A key's volume: `volumes.py`.
Changes by writers: `puts.py`. What is owed at the start: `owned.py`.

Rejected: keeping a table of objects in memory (a gigabyte for a few million); undoing changes of a failed flush one by
one (the index is the truth: pending changes are thrown away, and usage is what was committed).

Invariants. As `node/store/__init__.py`.
"""

from __future__ import annotations

import functools
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, NotFound, Unavailable
from forebay.core.record import OWNED, Record, State, blocks_in, build_head, decode_record
from forebay.core.types import Headers, ObjectInfo
from forebay.node.store.disk import block_checks, files, keys, ledger, presence
from forebay.node.store.disk.notes import Owed, digest_of
from forebay.node.store.disk.volume import Expected, StoreEvent, Volume, stalled
from forebay.node.store.writer import misplaced, owned, rebuild
from forebay.node.store.writer.index_commits import Flushes
from forebay.node.store.writer.index_repair import Catching
from forebay.node.store.writer.landing import Landing
from forebay.node.store.writer.puts import Change, Prepared, Puts
from forebay.node.store.writer.reclaim import Reclaimed, Reclaimer
from forebay.node.store.writer.stored_headers import Headings
from forebay.node.store.writer.volumes import VolumeSet, no_room
from forebay.ports import clock

TOUCHES_HELD_MAX = 65_536
IDS_SINCE_S = 1_700_000_000  # ids are milliseconds from here: an id and a block fit 64 bits (machines/eviction.py)


class Store(VolumeSet):
    """The node's volumes, as their one writer sees them."""

    def __init__(
        self, capacity_bytes: int | None, on_event: Callable[[StoreEvent], None] | None, block_bytes: int
    ) -> None:
        """Use `open`."""
        super().__init__(capacity_bytes, on_event, block_bytes)
        self._landings: dict[tuple[str, str], Landing] = {}
        self._landing_ids: Counter[int] = Counter()  # a landing that lost its object may overlap with its successor
        self._reclaimer = Reclaimer(self.tell)
        self.held = self._reclaimer.held
        self.on_answer: Callable[[], None] = lambda: None
        self._flushes = Flushes(self._reclaimer, self.tell, lambda: self._next_id, lambda: self.on_answer())
        self._touched: dict[int, int] = {}
        self.bad_blocks = 0  # blocks that did not match their checksums
        self._closed = False
        self._puts = Puts(
            self,
            enter=self._enter_written,
            take_out=self._take_out,
            put=self._put,
            set_aside=self._set_aside,
            flush=self.flush,
        )
        self.catching = Catching(self, self._is_busy, self.flush)
        self.headings = Headings(self, put=self._put)

    # --- open and close ---

    @classmethod
    def open(
        cls,
        dirs: Sequence[str | Path],
        *,
        capacity_bytes: int | None = None,
        on_event: Callable[[StoreEvent], None] | None = None,
        xattrs: bool = True,
        block_bytes: int = limits.BLOCK_BYTES,
        expected: Mapping[str, Expected] | None = None,
        may_be_empty: bool = False,
        astray: bool = False,
        later: bool = False,
        epoch: int = 0,
        ids_below: int = 0,
    ) -> Store:
        """Open or create a volume in each directory. `Exists` if another node holds one; `Invalid` for an unknown
        format, or a directory with other files in it.

        A volume that cannot be used (I/O errors) is left out and reported to `on_event`; `Unavailable` if none is left.
        `capacity_bytes` bounds all volumes together; without it, the filesystems do. `xattrs=False` keeps file headers
        in sidecar files. `block_bytes` is for new objects. At a path in `expected` no volume is made, and no other one
        opened. `may_be_empty` allows a store without any volume. `astray`: owed objects may lie on other volumes than
        their own, though the set of volumes is unchanged. `later`: only `catching` restores what the volumes owe or
        hold. `epoch`: the highest of this node's stores so far. `ids_below`: they used no object id from here on.
        """
        store = cls(capacity_bytes, on_event, block_bytes)
        try:
            for path in dirs:
                store._add(os.fspath(path), xattrs, (expected or {}).get(os.fspath(path)), later)
            store._find_missed(epoch)
            if not store._all and not may_be_empty:
                raise Unavailable("no volume can be used: see the events before this, mend a disk or give another")
            store._agree(astray, ids_below)
        except BaseException:
            for volume in store._all:
                volume.close(clean=False)
            raise
        return store

    def _agree(self, astray: bool, ids_below: int) -> None:
        """Settle on the set of volumes, and drop or move what is in the wrong place."""
        epoch = self.epoch
        ids = sorted(volume.id for volume in self._all)
        changed = not ids or any(each.mark.members != ids or each.mark.epoch != epoch for each in self._all)
        self._place()
        start = max(1, ids_below, int((clock.wall_s() - IDS_SINCE_S) * 1e3))
        for volume in self._all:
            kept = int.from_bytes(volume.index.get("meta", b"next_id") or b"", "big")
            start = max(start, kept, volume.mark.ids_below)
        self._next_id = start
        self._reserve_ids()
        self.catching.ids_below = start
        if changed and ids:
            self._tell_absent(ids)
        if (changed or astray) and (len(self._all) > 1 or epoch > 0):
            self.catching.before_moving()
            self.settle()  # a settled note elsewhere would be owed again where a machine stop takes its mark
            self.astray = misplaced.move_owned(self, self._puts, self._all)
            self._drop_misplaced()
        if changed:
            self._write_epoch(epoch + 1)

    def _drop_misplaced(self) -> None:
        for volume in self._all:
            for entry, value in volume.index.walk("records"):
                record = decode_record(value)
                bucket, key = keys.split(entry, record.key)
                if self.volume_of(bucket, key) != volume.id and not record.state & State.OWNED:
                    self._forget(volume, bucket, key, record)
                if volume.index.pending >= 1000:
                    self.flush()
        self.flush()

    def close(self, *, clean: bool = True) -> None:
        """Flush and close. With `clean`, sync first (may take long) and mark the volumes so that the next start trusts
        their index even after a machine stop. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for landing in list(self._landings.values()):
            landing.abandon()
        self._keep_touches()
        self._flushes.settle(list(self._by_id.values()))
        for volume in self._all:
            volume.desk.close()
            self._reclaimer.reclaim(volume, None)
            try:
                volume.close(clean=clean)
            except OSError as error:
                volume.trouble(error, "closing the volume")
        self.deliver()

    # --- events and trouble ---

    def deliver(self) -> None:
        """Deliver the events of worker threads, and follow up on a volume that went out."""
        while self._events:
            self._on_event(self._events.popleft())
        if any(volume.state == "out" for volume in self._by_id.values()):
            for volume in self._all:
                if volume.state == "out" and volume.id in self._by_id:
                    self._forsake(volume)
            self._place()
            self._write_epoch(self.epoch + 1)

    def _forsake(self, volume: Volume) -> None:
        volume.discard()
        self._reclaimer.cancel(volume)
        self.tell_owed_out(volume)
        for landing in [each for each in self._landings.values() if each.volume is volume]:
            self._lose(landing)

    # --- what is there ---

    @property
    def pending(self) -> int:
        """Changes that the next `flush` makes visible."""
        return sum(volume.index.pending for volume in self._by_id.values()) + self._reclaimer.waiting

    def lookup(self, bucket: str, key: str) -> Record | None:
        """The record, pending changes included; also None if its volume cannot be read."""
        volume = self._by_id.get(self.volume_of(bucket, key))
        return None if volume is None else volume.record(keys.index_key(bucket, key), key)

    def find(self, object_id: int) -> tuple[str, str, Record] | None:
        """Bucket, key and record of an object id."""
        found = self._find(object_id)
        return found[1:] if found is not None else None

    def _find(self, object_id: int) -> tuple[Volume, str, str, Record] | None:
        for volume in self._by_id.values():
            found = rebuild.record_by_id(volume, object_id)
            if found is not None:
                return (volume, *found)
        return None

    # --- landing ---

    def begin(self, bucket: str, info: ObjectInfo, *, checked_s: float, pinned: bool = False) -> Landing:
        """Make room for this version's blocks; resumes the file that already holds some blocks of the same version.

        Another version's record is replaced when the first block of this one is whole. While a landing of the same
        version is open, the same landing is returned, and must be closed as often. `Unavailable`: pass through.
        """
        volume = self._roomy(bucket, info.key)
        self._refuse_owned(volume, bucket, info.key)
        landing = self._landings.get((bucket, info.key))
        if landing is not None:
            if landing.info.version == info.version and landing.info.size_bytes == info.size_bytes:
                return landing.share()
            self._lose(landing)
        try:
            fd, header = self._resume(volume, bucket, info) or self._create(volume, bucket, info, checked_s)
        except OSError as error:
            raise volume.trouble(error, "making a data file") from error
        landing = Landing(self, volume, bucket, info, fd, header, checked_s=checked_s, pinned=pinned)
        self._landings[bucket, info.key] = landing
        self._landing_ids[landing.object_id] += 1
        return landing

    def _refuse_owned(self, volume: Volume, bucket: str, key: str) -> None:
        """`Unavailable` if the node owns something of the key, even a tombstone: a fetch must not replace it."""
        entry = keys.index_key(bucket, key)
        note = ledger.note_of(volume, entry)
        if note is None:
            try:
                note = volume.durable.get(entry)
            except (OSError, Corrupt) as error:
                raise volume.trouble(error, "reading the durable index") from error
        if note is not None and not note.settled:
            raise Unavailable(f"{bucket}/{key} was written here and is not flushed yet: it is not fetched meanwhile")

    def _resume(self, volume: Volume, bucket: str, info: ObjectInfo) -> tuple[int, files.Header] | None:
        record = volume.record(keys.index_key(bucket, info.key), info.key)
        if record is None or record.inline is not None:
            return None
        if record.version != info.version or record.size_bytes != info.size_bytes:
            return None
        path = volume.data_path(record.object_id)
        try:
            header = files.Header.read(path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self._missing(volume, bucket, info.key, record)
            return None
        if header is None or header.identity.object_id != record.object_id:
            os.close(fd)
            self._missing(volume, bucket, info.key, record)
            return None
        return fd, header

    def _create(self, volume: Volume, bucket: str, info: ObjectInfo, checked_s: float) -> tuple[int, files.Header]:
        """Temp file, header, rename: every file in data/ says what it is. It has no record yet, so nobody reads it."""
        object_id = self.take_id()
        identity = files.Identity(
            object_id,
            bucket,
            info.key,
            info.size_bytes,
            info.version,
            info.etag,
            info.modified_s,
            info.headers,
            checked_s,
            self.block_bytes,
        )
        temp, path = volume.temp_path(object_id), volume.data_path(object_id)
        create = functools.partial(files.create, temp, path, identity, xattrs=volume.xattrs)
        return volume.desk.call(create, unwanted=files.undo)

    def list_block(self, landing: Landing, block: int, stored_sum: int) -> None:
        """For `Landing.finish_block`."""
        volume, bucket, info = landing.volume, landing.bucket, landing.info
        now = volume.record(keys.index_key(bucket, info.key), info.key)
        assert now is None or not now.state & State.OWNED, "a landing beside what was written here"
        old = now if now is not None and now.object_id != landing.object_id else None
        record = now if now is not None and old is None else self._first_record(landing)
        record = presence.with_block(record, block)
        doubts = ledger.doubts_of(volume, record)
        if doubts >> block & 1:
            record = self._with_doubts(volume, record, doubts & ~(1 << block))
        ledger.keep_sums(volume, landing.object_id, {block: stored_sum})
        self._put(volume, bucket, info.key, record, now)
        if old is not None:
            self._retire(volume, old)

    def _first_record(self, landing: Landing) -> Record:
        info = landing.info
        return Record(
            object_id=landing.object_id,
            size_bytes=info.size_bytes,
            version=info.version,
            etag=info.etag,
            modified_s=info.modified_s,
            checked_s=landing.checked_s,
            head=build_head(info),
            complete=False,
            state=State.PINNED if landing.pinned else State.CLEAN,
            used_minute=int(clock.wall_s() // 60),
            key=keys.record_key(landing.bucket, info.key),
            block_bytes=landing.block_bytes,
        )

    def _with_doubts(self, volume: Volume, record: Record, doubts: int) -> Record:
        """The record with this bitmap of blocks in doubt, and its state in step."""
        ledger.put_doubts(volume, record.object_id, doubts)
        state = record.state | State.UNVERIFIED if doubts else record.state & ~State.UNVERIFIED
        return msgspec.structs.replace(record, state=int(state))

    def before_write(self, path: str, block: int) -> None:
        """For `Landing.write`: any thread."""
        self._reclaimer.keep_block(path, block)

    def end_landing(self, landing: Landing, partial: set[int]) -> None:
        """For `Landing.close`: free what no record will name."""
        if self._landings.get((landing.bucket, landing.info.key)) is landing:
            del self._landings[landing.bucket, landing.info.key]
        self._landing_ids[landing.object_id] -= 1
        if self._landing_ids[landing.object_id]:
            return  # the file is still being written
        del self._landing_ids[landing.object_id]
        volume, record = landing.volume, self.of_object(landing.bucket, landing.info.key, landing.object_id)
        if volume.state == "out":
            return
        if record is None:
            self._reclaimer.unlink(volume, landing.path)
        elif partial:
            bits = presence.bits_of(record)
            self._reclaimer.hollow(volume, landing.path, record, (block for block in partial if not bits >> block & 1))

    def _lose(self, landing: Landing) -> None:
        """Another version or a drop took the landing's object: it lists nothing more."""
        landing.gone = True
        if self._landings.get((landing.bucket, landing.info.key)) is landing:
            del self._landings[landing.bucket, landing.info.key]

    def put_inline(
        self, bucket: str, info: ObjectInfo, data: bytes, *, checked_s: float, pinned: bool = False
    ) -> Record:
        """Store a small object (<= INLINE_BYTES_MAX) whole with the next flush. `Unavailable`: pass through."""
        assert len(data) == info.size_bytes <= limits.INLINE_BYTES_MAX, (len(data), info)
        key = info.key
        volume = self._roomy(bucket, key, small_bytes=len(data))
        self._refuse_owned(volume, bucket, key)
        self._take_over(bucket, key)
        old = volume.record(keys.index_key(bucket, key), key)
        record = Record(
            object_id=self.take_id(),
            size_bytes=info.size_bytes,
            version=info.version,
            etag=info.etag,
            modified_s=info.modified_s,
            checked_s=checked_s,
            head=build_head(info),
            complete=True,
            state=State.PINNED if pinned else State.CLEAN,
            used_minute=int(clock.wall_s() // 60),
            inline=data,
            key=keys.record_key(bucket, key),
        )
        self._put(volume, bucket, key, record, old, xxhash.xxh3_64_intdigest(data))
        if old is not None:
            self._retire(volume, old)
        return record

    def _put(
        self, volume: Volume, bucket: str, key: str, record: Record, old: Record | None, inline_sum: int = 0
    ) -> None:
        if old is not None and old.object_id != record.object_id:
            ledger.remove_traces(volume, old)
        ledger.put_record(volume, bucket, key, record, old, inline_sum)

    # --- written here ---

    def prepare(self, changes: Sequence[Change]) -> Prepared:
        """Decide on changes: at most one per key, and none of a key with another unpublished change.

        A change that is impossible gets its error in `outcomes`, its temp file is removed, and it is left out.
        `Unavailable` with code `InsufficientStorage` when there is no room, without it when the volume is out.
        """
        return self._puts.prepare(changes)

    def make_durable(self, prepared: Prepared) -> None:
        """Bring files into place and sync what must be durable: one transaction per volume. Any thread.

        Never raises for a disk: errors are in `outcomes`, and a failed change leaves nothing.
        """
        self._puts.make_durable(prepared)

    def publish(self, prepared: Prepared) -> list[Record | ForebayError | None] | None:
        """Show what was made durable, replacing the previous records, and flush. Returns per change its record (None
        for a delete) or its error. Then send fronts `take_dropped` and call `reclaim`, as after every flush. None: a
        disk has not answered, and `outcomes` tells after a later flush."""
        return self._puts.publish(prepared)

    def give_up(self, changes: Sequence[Change]) -> None:
        """These will not be prepared: remove their temp files."""
        self._puts.give_up(changes)

    def outcomes(self, prepared: Prepared) -> list[Record | ForebayError | None] | None:
        """The outcomes that `publish` could not return."""
        return self._puts.outcomes(prepared)

    def _enter_written(
        self, volume: Volume, entry: bytes, bucket: str, key: str, record: Record, inline_sum: int, sums: array[int]
    ) -> Record | None:
        self._take_over(bucket, key)
        self._no_more_lost(volume, entry)
        old = volume.record(entry, key)
        if old is not None and old.object_id != record.object_id:
            ledger.remove_traces(volume, old)
        ledger.enter(volume, bucket, entry, record, old, inline_sum)
        if sums:
            ledger.put_all_sums(volume, record.object_id, sums)
        if old is not None and old.inline is None:  # nobody holds a file of an inline object
            self._retire(volume, old)
        return old

    def _take_out(self, volume: Volume, bucket: str, key: str) -> Record | None:
        self._take_over(bucket, key)
        self._no_more_lost(volume, keys.index_key(bucket, key))
        old = volume.record(keys.index_key(bucket, key), key)
        if old is not None:
            self._forget(volume, bucket, key, old)
        return old

    def _no_more_lost(self, home: Volume, entry: bytes) -> None:
        for volume in self._by_id.values():
            if volume.lost and (path := owned.no_more_lost(volume, entry, is_home=volume is home)):
                self._reclaimer.unlink(volume, path)

    def _take_over(self, bucket: str, key: str) -> None:
        landing = self._landings.get((bucket, key))
        if landing is not None:
            self._lose(landing)

    def mark_clean(
        self, bucket: str, key: str, object_id: int, *, version: str, checked_s: float, keeping: Headers = ()
    ) -> Record | None:
        """The backend has this dirty object as `version`: it is clean from the next flush on, its ETag stays, and it
        may be evicted. Returns its record; None, with nothing done, if the key has another object by now.

        `object_id` 0: the backend has done the delete; the tombstone goes. The durable index forgets the note with its
        next transaction (or `settle`): after a machine stop before it, the flush is owed again. `keeping`: how the
        backend says that it keeps the object.
        """
        return self._puts.mark_clean(bucket, key, object_id, version=version, checked_s=checked_s, keeping=keeping)

    def write_notes(self, owed: Iterable[Owed]) -> None:
        """Replace the notes that have the same `seq`; synced if the note is in the durable index. Any thread.
        `Unavailable` when a volume cannot."""
        self._puts.write_notes(owed)

    def settle(self, only: Volume | None = None) -> None:
        """Let the durable indexes, or one, forget settled notes. Any thread; may take long. Call it now and then."""
        for volume in self.usable() if only is None else [only]:
            self._puts.settle_on(volume)

    def digest(self, bucket: str, key: str, record: Record) -> str:
        """The digest of the object's body (`notes.digest_of`); "" unless all of it is here and not in doubt."""
        if record.inline is not None:
            return digest_of(record.size_bytes, body=record.inline)
        if not record.complete or record.state & State.UNVERIFIED or record.block_bytes != limits.BLOCK_BYTES:
            return ""
        found = ledger.sums_of(self.home(bucket, key), record.object_id, range(blocks_in(record.size_bytes)))
        return digest_of(record.size_bytes, sums=list(found.values())) if all(found.values()) else ""

    def data_path(self, record: Record) -> str:
        """Where the object's bytes are; "" for an inline object. `NotFound` if it is gone."""
        if record.inline is not None:
            return ""
        for volume in self._by_id.values():
            if ledger.entry_of(volume, record.object_id) is not None:
                return volume.data_path(record.object_id)
        raise NotFound("the object was replaced or dropped meanwhile: look it up again")

    def free_to_write(self, bucket: str, key: str, size_bytes: int) -> None:
        """`Unavailable` (code `InsufficientStorage`) if that much has no room even if everything evictable were
        evicted; without the code when the volume is out."""
        self.check_present(bucket, key)
        volume = self.home(bucket, key)
        if volume.stall.stalled:
            raise stalled(volume.path, f"{bucket}/{key}")
        if remedy := self.room(volume, fresh=True).refuses_file(size_bytes):
            raise no_room(volume, f"{size_bytes} bytes do not fit", remedy)

    # --- changing records ---

    def confirm(self, confirmed: Iterable[tuple[str, str, str, float]]) -> None:
        """The backend confirmed (bucket, key, version) at `checked_s`. Records of another version are skipped."""
        for bucket, key, version, checked_s in confirmed:
            record = self.lookup(bucket, key)
            if record is not None and record.version == version:
                self._put(
                    self.home(bucket, key), bucket, key, msgspec.structs.replace(record, checked_s=checked_s), record
                )

    def unconfirm(self, bucket: str, key: str, to_s: float = 0.0) -> bool:
        """Make the key's record and its landing unconfirmed (`to_s`: or missed, see `core/machines/opening.py`); return
        whether that takes a `flush`."""
        if (landing := self._landings.get((bucket, key))) is not None:
            landing.checked_s = min(landing.checked_s, to_s)
        record = self.lookup(bucket, key)
        if record is not None and record.checked_s > to_s and not record.state & State.OWNED:
            self.confirm([(bucket, key, record.version, to_s)])
        return bool(self._by_id) and self.home(bucket, key).index.is_pending("records", keys.index_key(bucket, key))

    def set_pinned(self, bucket: str, key: str, pinned: bool) -> bool:
        """Set or clear the record's PINNED state; return whether there is a record."""
        record = self.lookup(bucket, key)
        if record is None:
            return False
        state = record.state | State.PINNED if pinned else record.state & ~State.PINNED
        if state != record.state:
            self._put(self.home(bucket, key), bucket, key, msgspec.structs.replace(record, state=int(state)), record)
        return True

    def touch(self, object_ids: Iterable[int], minute: int) -> None:
        """These were used in `minute` (minutes since the epoch). `housekeep` stores it: a crash may forget it."""
        self._touched.update(dict.fromkeys(object_ids, minute))
        if len(self._touched) > TOUCHES_HELD_MAX:
            self._keep_touches()

    def _keep_touches(self) -> None:
        touched, self._touched = sorted(self._touched.items()), {}
        for volume in self._by_id.values():
            for object_id, minute in touched:
                if ledger.entry_of(volume, object_id) is not None:
                    volume.index.put("used", ledger.id_key(object_id), minute.to_bytes(4, "big"))

    def _is_busy(self, object_id: int) -> bool:
        return object_id in self._landing_ids or self.held[object_id] > 0 or self._puts.is_arriving(object_id)

    # --- dropping ---

    def forget(self, bucket: str, key: str) -> int | None:
        """Drop the object's record (and later its file); return its object id, or None if there was none.

        Also None, with nothing done, for an owned object: only `Delete` removes it.
        """
        record = self.lookup(bucket, key)
        if record is not None and record.state & State.OWNED:
            return None
        self._take_over(bucket, key)
        if record is None:
            return None
        self._forget(self.home(bucket, key), bucket, key, record)
        return record.object_id

    def _forget(self, volume: Volume, bucket: str, key: str, record: Record) -> None:
        landing = self._landings.get((bucket, key))
        if landing is not None and landing.object_id == record.object_id:
            self._lose(landing)
        ledger.remove_record(volume, bucket, key, record)
        self._retire(volume, record)

    def _retire(self, volume: Volume, old: Record) -> None:
        """No record names `old` after the next commit: tell readers then, and unlink its file. A file in which blocks
        still land keeps its name until they have landed: readers know it."""
        self._reclaimer.announce(volume, old.object_id)
        if old.inline is None and not self._landing_ids[old.object_id] > 0:
            self._reclaimer.unlink(volume, volume.data_path(old.object_id))

    def _missing(self, volume: Volume, bucket: str, key: str, record: Record) -> None:
        self.on_missing(record)
        if record.state & State.OWNED:
            self._set_aside(volume, bucket, key, record, "its data file is gone or not its own")
            return
        self._forget(volume, bucket, key, record)
        self.tell(StoreEvent("object-missing", volume.id, f"{bucket}/{key}: its data file is gone or not its own"))

    def _set_aside(self, volume: Volume, bucket: str, key: str, record: Record, problem: str) -> None:
        """Owned bytes are gone: hide and report the object; entry and file stay (`owned.py`)."""
        owned.set_aside(volume, bucket, key, record, problem)
        self._reclaimer.announce(volume, record.object_id)
        if (lost := self.lost_of(bucket, key)) is not None:
            self.on_lost(lost)

    def examine(self, bucket: str, key: str, object_id: int) -> Record | None:
        """A front could not read this object: check that its file is there and its own, else drop the object.

        Returns the record if it can still be used. Follow with `check_blocks` if bytes are in doubt.
        """
        record = self.of_object(bucket, key, object_id)
        if record is None:
            return None
        if record.inline is None:
            volume = self.home(bucket, key)
            try:
                size_bytes = os.stat(volume.data_path(object_id)).st_size
            except FileNotFoundError:
                size_bytes = -1
            except OSError as error:
                volume.trouble(error, "looking at a data file")
                return None
            if size_bytes != record.size_bytes:
                self._missing(volume, bucket, key, record)
                return None
        return record

    def drop_units(self, units: Iterable[tuple[int, int]]) -> list[int]:
        """Take (object id, block) out of the index; return ids of wholly removed objects. Then `flush`, `reclaim`.

        An inline object goes whole, whatever the block. Unknown, absent and owned units are skipped.
        """
        by_object: dict[int, list[int]] = {}
        for object_id, block in units:
            by_object.setdefault(object_id, []).append(block)
        gone: set[int] = set()
        for volume in self._by_id.values():
            try:
                found = ledger.records_of(volume, list(by_object))
            except (OSError, Corrupt) as error:
                volume.trouble(error, "reading the index")
                continue
            found = [each for each in found if not each[2].state & OWNED]
            small = [each for each in found if each[2].inline is not None]  # inline objects have no file
            ledger.remove_small(volume, small)
            gone.update(object_id for object_id, _, _ in small)
            for object_id, entry, record in found:
                if record.inline is None:
                    blocks = presence.mask(by_object[object_id])
                    if self._drop(volume, *keys.split(entry, record.key), record, blocks) is None:
                        gone.add(object_id)
        return [object_id for object_id in by_object if object_id in gone]

    def _drop(self, volume: Volume, bucket: str, key: str, record: Record, victims: int) -> Record | None:
        """Drop blocks of one object; return its record afterwards, None when it went whole."""
        present = presence.bits_of(record)
        victims &= present
        left = present & ~victims
        if record.inline is not None or not left:
            self._forget(volume, bucket, key, record)
            return None
        if not victims:
            return record
        chosen = list(presence.iterate(victims))
        ledger.keep_sums(volume, record.object_id, dict.fromkeys(chosen, 0))
        smaller = presence.with_bits(record, left)
        if record.state & State.UNVERIFIED:
            smaller = self._with_doubts(volume, smaller, ledger.doubts_of(volume, record) & left)
        self._put(volume, bucket, key, smaller, record)
        self._reclaimer.announce(volume, record.object_id)
        self._reclaimer.hollow(volume, volume.data_path(record.object_id), smaller, chosen)
        return smaller

    # --- making it so ---

    def flush(self) -> int:
        """Commit the pending changes, one transaction per volume; return how many. Never raises for a disk.

        If a disk does not answer, its commits are still to come: `on_answer` is called, in another thread, when it
        answers, and the next `flush` goes on. A volume that cannot commit loses its pending changes (reported as
        `changes-lost`; what they would have dropped is still there) and is full or out afterwards.
        """
        done = sum(map(self._flushes.flush, list(self._by_id.values())))
        self.deliver()
        return done

    def take_dropped(self) -> list[int]:
        """Objects of drops committed since the last call, for `Dropped`."""
        return self._reclaimer.take_dropped()

    @property
    def reclaimable(self) -> bool:
        """Whether `reclaim` has something to do."""
        return bool(self._reclaimer.ready())

    def to_reclaim(self) -> list[Volume]:
        """The volumes on which `reclaim` has something to do now."""
        ready = self._reclaimer.ready()
        return [volume for volume in self._by_id.values() if volume.id in ready and not volume.silent]

    def reclaim(self, only: Volume | None = None, *, steps_max: int = 1000) -> Reclaimed:
        """Free the space of committed drops, on all volumes or one. Any thread, one at a time for each volume."""
        done = [self._reclaimer.reclaim(volume, steps_max) for volume in (self.usable() if only is None else [only])]
        return Reclaimed(sum(each.freed_bytes for each in done), [one for each in done for one in each.deferred])

    # --- verifying ---

    def doubtful(self, record: Record, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that must be checked before use: none unless the record is UNVERIFIED."""
        if not record.state & State.UNVERIFIED:
            return []
        doubts = 0
        for volume in self._by_id.values():
            doubts |= ledger.doubts_of(volume, record)  # object ids are unique: at most one has any
        return [block for block in blocks if doubts >> block & 1]

    def check_blocks(self, record: Record, bucket: str, key: str, blocks: Iterable[int]) -> list[int]:
        """Re-read these present blocks (or the inline bytes) and return those that do not match. Any thread.

        `Unavailable` when the disk cannot be read: the volume is then out.
        """
        return block_checks.bad_blocks(self.home(bucket, key), record, list(blocks))

    def settle_checked(
        self, bucket: str, key: str, object_id: int, good: Iterable[int], bad: Iterable[int]
    ) -> Record | None:
        """Record the outcome of `check_blocks`: bad blocks are dropped and reported, good ones are no longer in doubt.

        Returns the record afterwards (None: it is gone). UNVERIFIED is cleared when no present block is in doubt.
        """
        record: Record | None = self.of_object(bucket, key, object_id)
        if record is None:
            return None
        volume = self.home(bucket, key)
        bits = presence.bits_of(record)  # a block dropped meanwhile is gone, not bad
        wrong = [block for block in bad if record.inline is not None or bits >> block & 1]
        self.bad_blocks += len(wrong)  # counted here, so that two finders of one block count once
        if wrong and record.state & State.OWNED:
            return self._puts.lose_blocks(volume, bucket, key, record, wrong)
        if wrong:
            detail = f"{bucket}/{key}: {len(wrong)} blocks from {wrong[0]} did not match their checksum; dropped"
            self.tell(StoreEvent("block-bad", volume.id, detail))
            record = self._drop(volume, bucket, key, record, presence.mask(wrong))
        if record is not None and record.state & State.UNVERIFIED:
            doubts = ledger.doubts_of(volume, record)
            left = doubts & ~presence.mask(good)
            if left != doubts:
                cleared = self._with_doubts(volume, record, left)
                self._put(volume, bucket, key, cleared, record)
                return cleared
        return record

    # --- housekeeping ---

    def sweep(self) -> Iterator[int]:
        """Background: remove files that no record names, records without a file, and space without a block; skips
        volumes whose index is being rebuilt. Yields after each small step how many objects or files it removed."""
        for volume in [volume for volume in self._by_id.values() if not volume.rebuilding]:

            def drop(bucket: str, key: str, record: Record, volume: Volume = volume) -> None:
                self._missing(volume, bucket, key, record)

            def remove(path: str, volume: Volume = volume) -> None:
                if volume.durable.unsettled:  # it may still name the file: first it forgets, then the bytes go
                    self._reclaimer.unlink(volume, path)
                else:
                    volume.desk.call(files.remove, path)

            steps = rebuild.sweep(volume, self._is_busy, drop, remove)
            while volume.id in self._by_id:
                if volume.silent:
                    yield 0
                    continue
                self.flush()
                try:
                    removed = next(steps, None)
                except OSError as error:
                    volume.trouble(error, "sweeping")
                    break
                if removed is None:
                    break
                yield removed

    def housekeep(self) -> None:
        """Every few seconds: clear slots of dead readers, store last uses, check directories, let full volumes heal,
        remove dead processes' bodies."""
        self._keep_touches()
        for volume in list(self._by_id.values()):
            if volume.silent:
                continue
            volume.heal()
            if volume.state != "out":
                volume.index.env.reader_check()
                self._puts.housekeep(volume)
        self.deliver()

    def sync(self) -> None:
        """Sync everything, and find earlier failed writes. Any thread; may take long."""
        for volume in list(self._by_id.values()):
            try:
                volume.index.sync()
                files.syncfs(volume.path)
            except OSError as error:
                volume.trouble(error, "writing to the disk")
