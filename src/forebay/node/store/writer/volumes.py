"""The node's volumes as a set: which are usable, which one a key belongs to, how full each is, and object ids.

Theory. A key's volume is computed from the usable volumes, as in the readers (`whereabouts.py`). When one goes out, its
keys go to the others. When volumes come or come back, objects that are in the wrong place are dropped (clean) or moved
(owned) at the start.

A write needs less than a landing read: bytes that only this node has may push out bytes that can be fetched again. So
there are two questions: `_roomy`, whether a volume takes cached bytes now, and `room`, what it could take if everything
evictable were evicted.

Invariants. (1) An object id is never used twice: ids are noted on every volume ahead of their use.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from forebay.core.cluster.coding import SLICES
from forebay.core.errors import Corrupt, Invalid, ObjectLost, Unavailable, VolumeMissing
from forebay.core.messages.copied import whose_copies
from forebay.core.messages.wire import VolumeAt
from forebay.core.quantity import counted
from forebay.core.ranges import absent_runs, run_bytes
from forebay.core.record import Record, State, blocks_in
from forebay.core.volumes import KnownVolume, LostObject, Owners
from forebay.node.store.disk import keys, ledger, volume_threads
from forebay.node.store.disk.usage import PAGE_BYTES, Room, VolumeUsage
from forebay.node.store.disk.volume import Expected, Lost, StoreEvent, Unit, Volume, has_room, stalled
from forebay.node.store.whereabouts import Whereabouts
from forebay.node.store.writer import index_repair, owned

FULL = "InsufficientStorage"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
IDS_RESERVED = 1 << 16  # object ids noted at once in volume.json
IDS_MAX = 1 << 40
RANGES_SHOWN = 3  # of an object that is lost in part, in words


class VolumeSet(Whereabouts[Volume]):
    """What `Store` knows of its volumes."""

    def __init__(
        self, capacity_bytes: int | None, on_event: Callable[[StoreEvent], None] | None, block_bytes: int
    ) -> None:
        super().__init__()
        self.block_bytes = block_bytes
        self._all: list[Volume] = []
        self._capacity_bytes = capacity_bytes
        self._on_event = on_event or (lambda event: None)
        self._owner = threading.get_ident()
        self._events: deque[StoreEvent] = deque()
        self._next_id = self._ids_below = 0
        self.ids_remembered = IDS_MAX  # ids from here on are in no memory outside of the volumes: none is used
        self._known: Sequence[KnownVolume] = ()
        self._noted: Callable[[str, str, bool], bool] = lambda volume_id, bucket, astray: True
        self.owners = Owners()
        self.any_stalled = False
        self.roomless: dict[str, bool] = {}  # by path: volumes without room to be opened; whether some seemed free
        self.crowded: list[Volume] = []  # volumes without room when something owed could not be moved to its own
        self.on_lost: Callable[[Lost], None] = lambda lost: None  # called for each object lost from now on
        self.on_missing: Callable[[Record], None] = lambda record: None  # whose file is gone: it is out of the index
        self.unshown: dict[tuple[str, str], Volume] = {}  # keys with a change that the index has not taken yet
        self.epoch = 0  # counts the sets of volumes that served; see volume.py
        self.any_missed = False  # one was away while others served, and what it keeps for other nodes may be old
        self.missed: set[str] = set()  # volumes that were away, or may have been
        self.superseded: set[tuple[str, str]] = set()  # volume id, bucket: made again while it was away
        self.astray: dict[str, set[str]] = {}  # by volume id: buckets of which something could not move to its place

    def _add(self, path: str, xattrs: bool, expected: Expected | None, later: bool) -> None:
        try:
            volume = Volume(path, self.tell, xattrs=xattrs, expected=expected)
        except OSError as error:
            self.tell(StoreEvent("volume-out", "", f"{path}: {error}; left out: mend it and restart the node"))
            return
        try:
            if any(other.id == volume.id for other in self._all):
                raise Invalid(f"{path} is a copy of another volume (both say {volume.id}): remove one of them")
            volume.start()
            if not later or not volume.mark.ids_below:  # without that number the files must show which ids were used
                index_repair.at_once(volume)
            volume.behind = later
        except (OSError, Corrupt) as error:
            volume.release()
            if isinstance(error, OSError) and error.errno in NO_ROOM and volume.drop_ballast():
                self._add(path, xattrs, expected, later)
                return
            self._leave_out(volume, error)
            return
        except BaseException:
            volume.release()
            raise
        self._all.append(volume)

    def _leave_out(self, volume: Volume, error: OSError | Corrupt) -> None:
        """The volume could not be made ready, and is closed."""
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            self.roomless[volume.path] = has_room(volume.path)
            what = f"there is no room to open it ({error}); it is opened when there is: make room on its disk"
            self.tell(StoreEvent("volume-out", volume.id, f"{volume.path}: {what}"))
        else:
            volume.trouble(error, "opening the volume")

    def _find_missed(self, epoch: int) -> None:
        """Learn the epoch of this start. What volumes that missed one hold counts as unconfirmed; one that has no room
        to note that is left out."""
        self.epoch = max([epoch, *(volume.mark.epoch for volume in self._all)])
        for volume in list(self._all):
            if 0 < volume.mark.epoch < self.epoch:
                self.any_missed = True
                self.missed.add(volume.id)
                try:
                    volume.missed_session()
                except (OSError, Corrupt) as error:
                    self._all.remove(volume)
                    volume.release()
                    self._leave_out(volume, error)

    def _place(self) -> None:
        usable = [volume for volume in self._all if volume.state != "out"]
        self._settle({volume.id: volume for volume in usable}, {volume.id: volume.mark.weight for volume in usable})
        self.owners = Owners(self._known, self._by_id)

    def finds_room(self) -> bool:
        """Whether a volume may have room now that had none to be opened, or to take what is its own: open the store
        again."""
        lacking = [path for path, seemed in self.roomless.items() if not seemed]
        lacking += [volume.path for volume in self.crowded if volume.state != "out"]
        return any(map(has_room, lacking))

    def serve(self) -> None:
        """Others are served from now on: limit how long the store's thread waits for a disk."""
        for volume in self._all:
            volume.desk.patience_s = volume_threads.CALL_S

    # --- what volumes that are not here may own ---

    def know(self, known: Sequence[KnownVolume], noted: Callable[[str, str, bool], bool]) -> None:
        """Set the node's volumes, present or not. `noted(volume_id, bucket, astray)`: whether the node remembers that a
        volume may own something of a bucket; otherwise nothing may be owned there."""
        self._known, self._noted = known, noted
        self.owners = Owners(known, self._by_id)

    def check_present(self, bucket: str, key: str) -> None:
        """`VolumeMissing` if a volume that cannot be read may have the only copy of the key. `Unavailable` if a stalled
        one does, or if a change of the key waits for its disk: look-ups see it, and fronts do not. A slice is never the
        only copy: who misses it asks others."""
        if self.owners and bucket != SLICES and (absent := self.owners.of_key(bucket, key)) is not None:
            raise missing(absent, f"{whose_copies(bucket) or bucket}/{key}")
        self.check_in_use(bucket, key)

    def check_in_use(self, bucket: str, key: str) -> None:
        """As `check_present`, of the volumes in use alone."""
        if self.astray:
            self._check_astray(bucket, key)
        volume = self._by_id.get(self.volume_of(bucket, key)) if self.any_stalled else None
        if volume is not None and volume.stall.stalled and owned.owes(volume, keys.index_key(bucket, key)):
            raise stalled(volume.path, f"{bucket}/{key}")
        if self.unshown and (bucket, key) in self.unshown:
            raise stalled(self.unshown[bucket, key].path, f"{bucket}/{key}")

    def check_reads(self, bucket: str, key: str) -> None:
        """`Unavailable` if the disk with the key's bytes does not answer now."""
        volume = self.volume_at(bucket, key)
        if volume is not None and volume.silent:
            raise stalled(volume.path, f"{bucket}/{key}")

    def check_answers(self, bucket: str, key: str) -> None:
        """`Unavailable` if the key's record here could not be changed: its disk does not answer, or a change is not
        done yet."""
        volume = self._by_id.get(self.volume_of(bucket, key))
        if volume is None:
            return
        entry = keys.index_key(bucket, key)
        here = volume.get("records", entry) is not None or volume.index.is_pending("records", entry)
        if (volume.stall.stalled and here) or (volume.desk.late and volume.index.is_pending("records", entry)):
            raise stalled(volume.path, f"{bucket}/{key}")

    def check_bucket(self, bucket: str) -> None:
        """What `check_present` would raise for any key of the bucket, stalled volumes apart."""
        for absent in self.owners.of_bucket(bucket):
            raise missing(absent, f"bucket {bucket}")
        for volume_id, buckets in self.astray.items():
            if bucket in buckets and volume_id in self._by_id:
                raise _stuck(self._by_id[volume_id], f"bucket {bucket}")
        for (of_bucket, key), volume in self.unshown.items():
            if of_bucket == bucket:
                raise stalled(volume.path, f"{bucket}/{key}")

    def lost_of(self, bucket: str, key: str) -> Lost | None:
        """The lost object of a key; None if there is none, or the key was written since."""
        entry = keys.index_key(bucket, key)
        for volume in self._by_id.values():
            if volume.lost and (lost := volume.lost.get(entry)) is not None and lost.key == key:
                return lost
        return None

    def check_lost(self, bucket: str, key: str) -> None:
        """`ObjectLost` if the key's object is lost. Ask when it has no record."""
        if (lost := self.lost_of(bucket, key)) is not None:
            raise object_lost(lost)

    def lost_in(self, bucket: str, prefix: str = "", start_after: str = "", limit: int = sys.maxsize) -> list[Lost]:
        """The lost objects of a bucket under `prefix` and after `start_after`, by key."""
        found = (lost for volume in self._by_id.values() for lost in volume.lost.values() if lost.bucket == bucket)
        chosen = [lost for lost in found if lost.key.startswith(prefix) and lost.key > start_after]
        return sorted(chosen, key=lambda lost: lost.key)[:limit]

    def partly_lost(self, bucket: str) -> Iterator[LostObject]:
        """The owned objects of a bucket with rotted blocks, and which bytes those are."""
        for volume in self._by_id.values():
            for entry, name in list(volume.partly_lost.items()):
                record = volume.record(entry, name[1])
                if record is None or not record.state & State.OWNED or record.complete or record.inline is not None:
                    del volume.partly_lost[entry]  # the object was written again or deleted
                elif name[0] == bucket:
                    blocks = blocks_in(record.size_bytes, record.block_bytes)
                    runs = absent_runs(record.present, 0, blocks)
                    ranges = tuple(run_bytes(run, record.size_bytes, record.block_bytes) for run in runs)
                    shown = ", ".join(f"{start}-{end - 1}" for start, end in ranges[:RANGES_SHOWN])
                    more = f" and {len(ranges) - RANGES_SHOWN} ranges more" if len(ranges) > RANGES_SHOWN else ""
                    problem = f"bytes {shown}{more} rotted"
                    yield LostObject(*name, record.size_bytes, record.modified_s, problem, ranges)

    def check_noted(self, volume: Volume, bucket: str, key: str) -> None:
        """`Unavailable` if the node does not remember that this volume may own something of the bucket."""
        if not self._noted(volume.id, bucket, self.owners.strays(bucket, key, volume.id)):
            raise Unavailable(f"the volumes changed while {bucket}/{key} was written: write it again")

    def _check_astray(self, bucket: str, key: str) -> None:
        entry, home = keys.index_key(bucket, key), self.volume_of(bucket, key)
        for volume_id, buckets in self.astray.items():
            volume = self._by_id.get(volume_id)
            if bucket in buckets and volume is not None and volume_id != home and owned.owes(volume, entry):
                raise _stuck(volume, f"{bucket}/{key}")

    def doubt_buckets(self, buckets: Iterable[str]) -> None:
        """An absent volume may have newer versions in these buckets: serve no version here before the backend confirms
        it."""
        for bucket in sorted(set(buckets)):
            for volume in self._by_id.values():
                volume.age_records(bucket)

    def owing_buckets(self, volume: Volume) -> tuple[str, ...]:
        """Every bucket of which this volume owns or owes something, lost or not; committed state."""
        return owned.buckets_of(volume)

    def owes_in(self, volume: Volume, bucket: str) -> bool:
        """As `owing_buckets`, for one bucket."""
        return next(owned.entries_in(volume, bucket), None) is not None

    def _write_epoch(self, epoch: int) -> None:
        ids, self.epoch = sorted(self._by_id), epoch
        for volume in self._by_id.values():
            volume.mark.epoch, volume.mark.members = epoch, ids
        self._write_marks()

    def _write_marks(self) -> None:
        for volume in self._by_id.values():
            try:
                volume.desk.call(volume.write_mark)
            except OSError as error:
                volume.trouble(error, "writing volume.json")

    # --- events ---

    def tell(self, event: StoreEvent) -> None:
        if threading.get_ident() == self._owner:
            self._on_event(event)
        else:
            self._events.append(event)

    def tell_owed_out(self, volume: Volume) -> None:
        """A volume went out: report what only it has."""
        if volume.usage.owned_objects:
            what = f"{counted(volume.usage.owned_objects, 'object')} with {volume.usage.owed_bytes} bytes"
            detail = (
                f"{what} that the backend has not got are on {volume.path}: they are flushed when it is back; do not "
                "erase it"
            )
            self.tell(StoreEvent("owed-out", volume.id, detail))

    def _tell_absent(self, ids: list[str]) -> None:
        """Report volumes that served with these before and are absent now."""
        latest = max(self._all, key=lambda volume: volume.mark.epoch)
        for volume_id in sorted(set(latest.mark.members) - set(ids)):
            detail = "it is not here this time: what it had cached is fetched again; what it owed comes back with it"
            self.tell(StoreEvent("volume-absent", volume_id, detail))

    # --- where ---

    def unusable(self, volume: Volume) -> Unavailable:
        return Unavailable(f"volume {volume.path} is {volume.state} ({volume.reason}): the bytes pass through instead")

    def home(self, bucket: str, key: str) -> Volume:
        """The usable volume of a key."""
        if not self._by_id:
            raise Unavailable("every volume is out: reads pass through until a disk is mended and the node restarted")
        return self._by_id[self.volume_of(bucket, key)]

    def volume_at(self, bucket: str, key: str) -> Volume | None:
        """As `home`; None when it is out."""
        volume = self._by_id.get(self.volume_of(bucket, key))
        return None if volume is None or volume.state == "out" else volume

    def _roomy(self, bucket: str, key: str, small_bytes: int | None = None) -> Volume:
        """The key's volume if it takes more bytes now, or a small object of `small_bytes`; else `Unavailable`."""
        volume = self.home(bucket, key)
        if volume.silent:
            raise stalled(volume.path, f"{bucket}/{key}")
        room = self.room(volume)
        if room.share_bytes is not None and room.taken_bytes >= room.share_bytes:
            raise Unavailable(
                f"volume {volume.path} holds what it may: the bytes pass through until eviction made room"
            )
        if small_bytes is not None and room.index_bytes > 2 * PAGE_BYTES + small_bytes:
            return volume
        if volume.state != "ok":
            raise self.unusable(volume)
        if room.free_bytes <= 0:
            raise volume.trouble(OSError(errno.ENOSPC, "less than the reserve is free", volume.path), "making room")
        return volume

    def room(self, volume: Volume, *, fresh: bool = False) -> Room:
        """What the volume has taken and free. `Unavailable` if its disk does not tell."""
        if volume.state == "out":
            raise self.unusable(volume)
        try:
            return volume.room(None if self._capacity_bytes is None else self._share(volume), fresh=fresh)
        except (OSError, Corrupt) as error:
            raise volume.trouble(error, "asking for free space") from error

    def _share(self, volume: Volume) -> int:
        """This volume's part of `capacity_bytes`."""
        assert self._capacity_bytes is not None
        total = sum(self._members.weights) or 1.0
        return int(self._capacity_bytes * volume.mark.weight / total)

    def volumes(self) -> list[VolumeAt]:
        """The usable volumes, for `Welcome`."""
        return [VolumeAt(volume.id, volume.path, volume.stall.stalled) for volume in self._by_id.values()]

    def watch(self, now_s: float) -> list[Volume]:
        """Check whether every disk answers; return the volumes for which that changed. Every `stall.LOOK_S`."""
        changed = [volume for volume in self._by_id.values() if volume.watch(now_s)]
        self.any_stalled = any(volume.stall.stalled for volume in self._by_id.values())
        return changed

    def usable(self) -> list[Volume]:
        """The usable volumes themselves."""
        return list(self._by_id.values())

    # --- how full ---

    def usage(self) -> list[VolumeUsage]:
        """Every volume, also those that are out. Pending changes count."""
        return [self._usage(volume) for volume in self._all]

    def _usage(self, volume: Volume) -> VolumeUsage:
        usage, change = volume.usage, volume.change
        buckets = dict(usage.by_bucket)
        for bucket, size_bytes in change.by_bucket.items():
            buckets[bucket] = buckets.get(bucket, 0) + size_bytes
        taken_bytes = capacity_bytes = usage.taken_bytes + change.taken_bytes
        keep_bytes = 0
        try:
            room = self.room(volume)
            taken_bytes, capacity_bytes, keep_bytes = room.taken_bytes, room.capacity_bytes, room.keep_bytes
        except Unavailable:
            pass  # its state says why
        return VolumeUsage(
            volume.id,
            volume.path,
            "stalled" if volume.stall.stalled and volume.state != "out" else volume.state,
            volume.reason or ("its disk does not answer" if volume.stall.stalled else ""),
            taken_bytes,
            capacity_bytes,
            keep_bytes,
            usage.objects + change.objects,
            buckets,
            usage.owned_file_bytes + change.owned_file_bytes + usage.owned_small_bytes + change.owned_small_bytes,
            usage.owned_objects + change.owned_objects,
            usage.owed_bytes + change.owed_bytes,
            usage.taken_bytes + change.taken_bytes,
        )

    def newest_minute(self) -> int:
        """When the volumes were last in use before the start, in minutes since the epoch."""
        return max((volume.used_minute for volume in self._by_id.values()), default=0)

    def unit_batches(self, *, marked: bool = True) -> Iterator[tuple[str, list[Unit]]]:
        """(volume id, units), for the eviction machines. Each batch is right until something changes. After a start
        this is the first walk over the indexes, and `marked`: a volume with damage is then out."""
        for volume in list(self._by_id.values()):
            try:
                for batch in ledger.unit_batches(volume, marked=marked):
                    yield volume.id, batch
                    if volume.state == "out":
                        break
            except (OSError, Corrupt, msgspec.MsgspecError, UnicodeDecodeError) as error:
                damage = f"the index is damaged ({error}): restart the node, which rebuilds it"
                volume.trouble(error if isinstance(error, OSError) else Corrupt(damage), "walking over the index")

    def units(self) -> Iterator[Unit]:
        """Every unit, streamed in bounded memory."""
        for _, batch in self.unit_batches():
            yield from batch

    # --- object ids ---

    def take_id(self) -> int:
        """An object id, larger than all before. `Unavailable` while the node cannot remember that it is used."""
        if self._next_id >= self.ids_remembered:
            raise Unavailable(
                "the node cannot note which object ids it uses: its metadata store in its directory takes no writes "
                "(is that disk full?); mend it and write again",
                retry_after_s=1.0,
            )
        self._next_id += 1
        if self._next_id >= self._ids_below:
            self._reserve_ids()
        return self._next_id - 1

    @property
    def next_id(self) -> int:
        """What `take_id` returns next."""
        return self._next_id

    def _reserve_ids(self) -> None:
        """Note on each volume which ids may be used from now on, so that none is used twice if an index is lost."""
        self._ids_below = self._next_id + IDS_RESERVED
        for volume in self._by_id.values():
            volume.mark.ids_below = self._ids_below
        self._write_marks()


def missing(absent: KnownVolume, subject: str) -> VolumeMissing:
    """The error for what an absent volume may own."""
    return VolumeMissing(
        f"{subject}: the only copy may be on volume {absent.volume_id} at {absent.path or 'an unknown path'}, which is "
        "not in use: bring it back (is its disk mounted, and has it room?) and restart the node, or give it up with "
        f"`forebay volume give-up {absent.volume_id}`; `forebay volume ls` says more"
    )


def object_lost(lost: Lost) -> ObjectLost:
    """The error for a lost object."""
    name = f"{lost.bucket}/{lost.key}"
    return ObjectLost(
        f"{name} was acknowledged and is lost: {lost.problem}, and no backend has it; write it again, delete it, or "
        f"give it up with `forebay lost give-up {name}`"
    )


def _stuck(volume: Volume, subject: str) -> VolumeMissing:
    return VolumeMissing(
        f"{subject}: the only copy is on volume {volume.id} at {volume.path} and could not be moved to the volume it "
        "belongs to: make room there or raise --capacity (`forebay status`), then restart the node"
    )


def no_room(volume: Volume, detail: str, remedy: str = "flush or delete objects, or add a volume") -> Unavailable:
    """The error for a write that a full volume cannot take."""
    return Unavailable(
        f"{detail}: there is no room on {volume.path}; {remedy}, and write again",
        code=FULL,
    )
