"""One volume: a directory on one disk, with its mark, its lock, its index, and the state of its disk.

Theory. `volume.json`, the *mark*, says whose directory this is and whether its index can be trusted. The index is not
synced, so it is right after a process stop, and unknown after a machine stop. The mark therefore has the kernel's boot
id, written (synced) when the volume opens, and `clean`, written when everything was synced and closed. Same boot id or
clean: trust the index. Otherwise, or when LMDB or the walk over it finds damage, a new index begins in a new directory,
`index/<n>`, which the mark then names. `rebuild.py` fills it from the files' headers while it is served, and it is
marked as incomplete meanwhile. Each commit updates the index's own usage, so a start needs no walk over it; the first
walk comes while it is served. During a walk a marker file lies beside the index: if walks kill the process again and
again (a torn page may), or meet damage, the next start finds it and rebuilds.

A failing disk is not retried. Out of space marks the volume `full`: nothing new goes there until space is back. Any
other trouble puts it `out`: it leaves placement, and only a restart brings it back.

Missed sessions. A volume that was out while others went on may hold versions that were replaced since. So volumes
record which volumes they last served with, and a counter of such sets, the *epoch*. On a volume that comes back with an
older epoch, every record's `checked_s` becomes `MISSED`: its bytes are served only after the backend confirmed them.
The node remembers the epoch too (`writer/remembered_volumes.py`), since some sessions may have had none of the volumes
that come back later.

Rejected: checking the whole index page by page at each start (minutes per million objects); trusting a mount id
(containers change it at every start).

Invariants. (1) An index is trusted only by the rule above. (2) One process holds a volume (flock). (3) `out` is final.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from forebay.core import limits
from forebay.core.errors import Bug, Corrupt, Exists, ForebayError, Invalid, Unavailable
from forebay.core.machines.opening import MISSED
from forebay.core.machines.stall import Stall
from forebay.core.record import Record, State, decode_record, encode_record
from forebay.node.store.disk import files, keys, pages
from forebay.node.store.disk.durable import Durable
from forebay.node.store.disk.index import Index
from forebay.node.store.disk.notes import Note
from forebay.node.store.disk.pages import FreePages
from forebay.node.store.disk.usage import Room, Usage, decode_usage, overhead
from forebay.node.store.disk.volume_threads import Desk, Late
from forebay.ports import chance, clock
from forebay.ports.machine import alive, boot_id

FORMAT = 2
FORMATS_READ = (1, 2)  # 1 had no journal; the mark says 2 before anything new to it is written
OWN_NAMES = frozenset(
    {"volume.json", "lock", "tmp", "data", "index", "durable", "parts", "ballast", "volume.json.new", "lost+found"}
    | {"durable.new"}
)
INCOMING = "in-"  # temp files of bodies on their way: `in-<pid>-<n>`
WALKS_CUT_MAX = 3
REBUILDING = b"rebuilding"  # in the index while it is: why
STALLED_RETRY_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_THE_DISK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
_DEAD = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EUCLEAN)

log = logging.getLogger("forebay.store")
Result = TypeVar("Result")


class StoreEvent(NamedTuple):
    """Something an operator may want to know. `kind`: volume-full, volume-healed, volume-out, index-rebuilt,
    volume-missed-session, block-bad, object-missing, orphans-removed, changes-lost; `volume_id` may be empty.

    Of what only this node has: object-lost (acknowledged bytes are gone, or wrong), owed-out (a volume went out that
    owes), volume-absent (one that served with these before is not here), owed-moved."""

    kind: str
    volume_id: str
    detail: str


class Unit(NamedTuple):
    """What eviction counts: one present block of a data file, or a whole inline object (`block` is then 0)."""

    bucket: str
    key: str
    object_id: int
    block: int
    size_bytes: int
    used_minute: int
    state: int  # core.record.State


class Lost(NamedTuple):
    """An owned object whose bytes are gone. `record` describes it."""

    bucket: str
    key: str
    note: Note
    record: Record
    problem: str


class Expected(NamedTuple):
    """What a directory must be to be opened: this volume, which gets its mark back if that was lost. Missing volumes
    are not made. An empty id expects any volume."""

    volume_id: str = ""
    weight: float = 0.0


class Mark(msgspec.Struct, omit_defaults=False):
    """`volume.json`. Unknown fields are ignored; a higher `format` is refused."""

    format: int
    id: str
    created_s: float
    weight: float  # for placement: gibibytes when the volume was made; never changes
    boot_id: str = ""
    clean: bool = False
    index: int = 0
    epoch: int = 0
    members: list[str] = []
    ids_below: int = 0  # all used object ids are below; matters if the index is lost


def read_mark(path: str) -> Mark | None:
    """The mark of the volume at `path`; None if there is none or it is unreadable. `Invalid` for a newer format."""
    try:
        with open(os.path.join(path, "volume.json"), "rb") as file:
            mark = msgspec.json.decode(file.read(), type=Mark)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    if mark.format not in FORMATS_READ:
        raise Invalid(
            f"volume {path} has format {mark.format}, this version reads up to {FORMAT}: use the version that wrote "
            "it, or give another directory"
        )
    return mark


class Volume:
    """An open volume, held by this process. `state` is ok, full or out."""

    def __init__(
        self,
        path: str,
        tell: Callable[[StoreEvent], None],
        *,
        xattrs: bool = True,
        expected: Expected | None = None,
    ) -> None:
        """Take the lock and read the mark; `start` does the rest. Without `expected`, a missing volume is made.
        `Exists`, `Invalid`, or OSError of the disk."""
        self.path = str(Path(path).absolute())
        self.tell = tell
        self.xattrs = xattrs
        self.state = "ok"
        self.reason = ""
        self.usage = Usage()
        self.change = Usage()  # of the pending changes
        self.index: Index
        self.durable: Durable
        self.lost: dict[bytes, Lost] = {}  # by index key: owned objects whose bytes are gone, out of view
        self.partly_lost: dict[bytes, tuple[str, str]] = {}  # in view with rotted blocks, or was; check again
        self.unbacked: list[bytes] | None = []  # index keys of owned records without a note; None: not looked for
        self.used_minute = int(clock.wall_s() // 60)  # of the last commit before the start
        self.flushes_lost = 0
        self.behind = True  # owed records may not be in view: since a start, or since a flush was lost
        self.rebuilding = ""  # why the index is being rebuilt from the files, until it is whole
        self.owned_before = 0  # owned objects in view at the start, and what came into view since
        self.flushes_begun = self.flushes_done = 0
        self.writing: Future[bool] | None = None  # the index, by the hand
        self._before = Usage()
        self.stall = Stall()
        self.headers = threading.Lock()  # holes, and the checksums in files' headers
        self.desk = Desk(self.path)
        self.opened = False
        self._free: tuple[float, int] = (float("-inf"), 0)
        self.free_pages = FreePages(lambda: self.index.pages())
        if expected is None:
            os.makedirs(self.path, exist_ok=True)
        else:
            self._refuse_other(expected)
        self._refuse_foreign()
        self._lock_fd = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take_lock(expected)
            for name in ("tmp", "data", "index", "parts"):
                os.makedirs(os.path.join(self.path, name), exist_ok=True)
            self.root_inode = os.stat(self.path).st_ino
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _refuse_other(self, expected: Expected) -> None:
        mark = read_mark(self.path)
        if mark is None and not os.path.exists(os.path.join(self.path, "data")):
            raise FileNotFoundError(errno.ENOENT, "no volume is there any more", self.path)
        if mark is not None and expected.volume_id not in ("", mark.id):
            raise FileNotFoundError(errno.ENOENT, f"volume {mark.id} is there instead", self.path)

    def _refuse_foreign(self) -> None:
        foreign = sorted(set(os.listdir(self.path)) - OWN_NAMES)
        if foreign and read_mark(self.path) is None:
            raise Invalid(
                f"{self.path} holds other files ({', '.join(foreign[:3])}): a volume needs an empty directory"
            )

    def _take_lock(self, expected: Expected | None) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise Exists(
                f"volume {self.path} is in use by another node (process {holder}): stop it, or give another directory"
            ) from None
        text = str(os.getpid()).encode()
        with suppress(OSError):  # a full disk may have no room for it
            os.pwrite(self._lock_fd, text, 0)
            os.ftruncate(self._lock_fd, len(text))
        total_bytes, _ = self._statvfs()
        mark = read_mark(self.path)
        self.fresh = mark is None and not os.path.exists(os.path.join(self.path, "data"))
        self.mark = mark or Mark(
            format=FORMAT,
            id=(expected.volume_id if expected is not None else "") or "v" + chance.token_hex(8),
            created_s=clock.wall_s(),
            weight=(expected.weight if expected is not None else 0) or max(1.0, round(total_bytes / limits.GIB, 1)),
        )

    # --- names ---

    @property
    def id(self) -> str:
        return self.mark.id

    def index_path(self, generation: int | None = None) -> str:
        return index_path(self.path, self.mark.index if generation is None else generation)

    def data_path(self, object_id: int) -> str:
        return f"{self.path}/data/{files.file_name(object_id)}"

    def temp_path(self, object_id: int) -> str:
        return f"{self.path}/tmp/{object_id:016x}"

    # --- start and stop ---

    def start(self) -> None:
        """Sweep tmp/, trust the index or begin a new one, and record in the mark that the volume is in use. What the
        durable index owes is not in view yet (`behind`); nor, in a new index, what the files hold (`rebuilding`)."""
        self.sweep_temp()
        self.durable = Durable(os.path.join(self.path, "durable"))
        reason = self._believe_index()
        generation = self.mark.index + 1
        if not reason and pages.compact(self.index.env, self.free_pages.now, self.index_path(generation)):
            self.index.close()
            self.index, self.mark.index = Index(self.index_path(generation), write=True), generation
            self.free_pages.changed()
        if reason:
            shutil.rmtree(self.index_path(generation), ignore_errors=True)
            os.makedirs(self.index_path(generation))
            self.index = Index(self.index_path(generation), write=True)
            self.opened = True
            self.mark.index = generation
            self.usage, self.unbacked = Usage(), []  # a walk that met damage counted some
            self.index.put("meta", REBUILDING, reason.encode())
            self.commit()
        self.rebuilding = (self.index.get("meta", REBUILDING) or b"").decode()
        self.owned_before = self.usage.owned_objects
        self.mark.format, self.mark.boot_id, self.mark.clean = FORMAT, boot_id(), False
        self.write_mark()
        for name in os.listdir(os.path.join(self.path, "index")):
            if name != str(self.mark.index):
                shutil.rmtree(os.path.join(self.path, "index", name), ignore_errors=True)
        self.make_ballast()

    def rebuilt(self, outcome: str) -> None:
        """The index will be whole with the next flush; `outcome` says what was found."""
        self.index.put("meta", REBUILDING, None)
        if not self.fresh:
            self.tell(StoreEvent("index-rebuilt", self.id, f"{self.rebuilding}: {outcome}"))
        self.rebuilding = ""

    def sweep_temp(self) -> None:
        """Remove leftovers in tmp/. Bodies that a living process is receiving stay. At the start everything else goes;
        later (`opened`), only bodies of dead processes."""
        for name in os.listdir(os.path.join(self.path, "tmp")):
            incoming = name.startswith(INCOMING)
            pid = name.split("-")[1] if incoming else ""
            if pid.isdigit() and alive(int(pid)):
                continue
            if incoming or not self.opened:
                os.unlink(os.path.join(self.path, "tmp", name))

    def _believe_index(self) -> str:
        """Open and walk the index; "" if it is good, else why it must be rebuilt."""
        path = self.index_path()
        if self.fresh:
            return "new volume"
        if not self.mark.clean and self.mark.boot_id != boot_id():
            return "the machine stopped without a clean stop of the node"
        try:
            if not os.path.getsize(os.path.join(path, "data.mdb")):
                return "the index is empty"
        except FileNotFoundError:
            return "the index is missing"
        if self._walks_cut() >= WALKS_CUT_MAX:
            return f"the last {WALKS_CUT_MAX} starts died while they read the index"
        try:
            self.index = Index(path, write=True)
            try:
                if not self._take_count():
                    with self.walking():
                        self._walk()
            except BaseException:
                self.index.close()
                raise
        except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"the index is damaged ({error})"
        self.opened = True
        return ""

    def _walks_cut(self) -> int:
        """How many starts in a row ended while they walked over this index."""
        try:
            return os.path.getsize(self._walk_marker())
        except FileNotFoundError:
            return 0

    def _walk_marker(self) -> str:
        return os.path.join(self.index_path(), "opening")

    @contextmanager
    def walking(self) -> Iterator[None]:
        """Around a walk over the whole index. A page that kills the process would do so again at the next start, so a
        byte in a file warns of it. A disk that has stopped meanwhile writes it later."""
        cut = False
        with suppress(OSError):  # a full disk may have no room for the byte
            self.desk.call(self._mark_walk, 1)
        try:
            yield
        except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
            cut = True
            with suppress(Late):
                self.desk.call(self._mark_walk, WALKS_CUT_MAX)
            raise
        finally:
            if not cut:
                with suppress(Late):
                    self.desk.call(Path(self._walk_marker()).unlink, True)  # missing or not

    def _mark_walk(self, count: int) -> None:
        with open(self._walk_marker(), "ab") as file:
            file.write(b"." * count)

    def _take_count(self) -> bool:
        """Take the usage that the index stores, so that no walk is needed before it is served. False if there is
        none."""
        found = decode_usage(self.index.get("meta", b"usage"), self.index.get("meta", b"next_id") or b"")
        if found is None or found[0].objects != self.index.count("records"):
            return False
        (self.usage, self.used_minute), self.unbacked = found, None
        return True

    def find_unbacked(self) -> Iterator[bytes | None]:
        """Index keys of owned records without a note, None for each other record. Scans every record."""
        for entry, value in self.index.walk("records"):
            owned = decode_record(value).state & State.OWNED
            alone = owned and self.index.get("notes", entry) is None and self.durable.get(entry) is None
            yield entry if alone else None

    def _walk(self) -> None:
        """Read every record once: counts usage, and finds damage."""
        entries = 0
        self.unbacked = [entry for entry in self.find_unbacked() if entry is not None]
        for entry, value in self.index.walk("records"):
            record = decode_record(value)
            self.usage.swap(keys.split(entry, record.key)[0], None, record)
            entries += 1
        if entries != self.index.count("records"):
            raise Corrupt(f"it lists {entries} records and counts {self.index.count('records')}")

    def write_mark(self) -> None:
        """Replace volume.json, synced. If it would not change, no room is needed, even on a full disk."""
        path = os.path.join(self.path, "volume.json")
        if read_mark(self.path) != self.mark:
            with open(path + ".new", "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self.mark)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(path + ".new", path)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def age_records(self, bucket: str = "", checked_s: float = 0.0) -> None:
        """Let no record here, or of this bucket, count as confirmed later than `checked_s`."""
        prefix = f"{bucket}\0".encode() if bucket else b""
        for entry, value in takewhile(lambda item: item[0].startswith(prefix), self.index.walk("records", prefix)):
            record = decode_record(value)
            aged = msgspec.structs.replace(record, checked_s=min(record.checked_s, checked_s))
            self.index.put("records", entry, encode_record(aged))
            if self.index.pending >= 1000:
                self.commit()
        self.commit()

    def missed_session(self) -> None:
        """Others went on without this volume: its versions may have been replaced since."""
        self.age_records(checked_s=MISSED)
        self.tell(StoreEvent("volume-missed-session", self.id, "its objects are asked about before they are served"))

    def close(self, *, clean: bool) -> None:
        """Close. With `clean`, everything is synced first and the mark says so."""
        self.desk.close()
        try:
            if clean and self.state != "out":
                self.index.sync()
                files.syncfs(self.path)
                self.mark.clean = True
                self.write_mark()
        finally:
            self.durable.close()
            self.index.close()
            os.close(self._lock_fd)

    def release(self) -> None:
        """Close a volume that did not start, as it is."""
        self.desk.close()
        if self.opened:
            self.index.close()
        if hasattr(self, "durable"):
            self.durable.close()
        os.close(self._lock_fd)

    # --- trouble ---

    @property
    def silent(self) -> bool:
        """Whether its disk has stalled, or a call has just waited for it in vain."""
        return self.stall.stalled or self.desk.late

    def watch(self, now_s: float) -> bool:
        """Check whether the disk answers; return whether that changed. The store's thread calls it every
        `stall.LOOK_S`."""
        before, oldest = self.stall.stalled, self.desk.oldest()
        return self.stall.look(now_s, oldest) != before

    def probe(self) -> None:
        """Give an idle disk something to do, to see whether it answers, and does it."""
        self.desk.begin(self._touch)

    def _touch(self) -> None:
        try:
            os.utime(self._lock_fd)
        except OSError as error:
            if error.errno in _DEAD:  # others are a filesystem's that knows no times
                self.trouble(error, "touching a file")

    def trouble(self, error: Exception, doing: str) -> Unavailable:
        """Note the failure and return the error to raise. Any thread."""
        code = error.errno if isinstance(error, OSError) else None
        if isinstance(error, Late):
            return stalled(self.path, doing)
        detail = f"{doing}: {error}"
        if code in _FULL:
            if self.state == "ok":
                self.state, self.reason = "full", detail
                self.tell(StoreEvent("volume-full", self.id, f"{detail}; reads pass it by until there is room"))
        elif code not in _NOT_THE_DISK and self.state != "out":
            self.state, self.reason = "out", detail
            self.tell(StoreEvent("volume-out", self.id, f"{detail}; taken out: mend the disk and restart the node"))
            log.error("volume %s is out: %s", self.path, detail)
        return Unavailable(f"volume {self.path} cannot be used ({detail}): the read goes to the backend instead")

    def _statvfs(self) -> tuple[int, int]:
        """Bytes of the filesystem, and bytes that may still be written."""
        stat = os.statvfs(self.path)
        return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize

    def free_bytes(self, *, fresh: bool = False) -> int:
        """How many bytes may be written beyond the reserve, up to 0.2 s old, or (`fresh`) now."""
        now_s = clock.monotonic_s()
        if fresh or now_s - self._free[0] > 0.2:
            total_bytes, free_bytes = self._statvfs()
            self._free = (now_s, free_bytes - min(limits.RESERVE_BYTES_MAX, total_bytes // 100))
        return self._free[1]

    def make_ballast(self) -> None:
        """Reserve some room that a full disk can give to the index, so that eviction stays possible."""
        size_bytes = min(8 * limits.MIB, self._statvfs()[0] // 100)
        try:
            with open(os.path.join(self.path, "ballast"), "ab") as file:  # a full disk may still hold it from before
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError:
            self.drop_ballast()

    def drop_ballast(self) -> bool:
        """Free the reserved room; return whether there was any."""
        try:
            os.unlink(os.path.join(self.path, "ballast"))
        except OSError:
            return False
        return True

    def with_ballast(self, commit: Callable[[], Result]) -> Result:
        """What `commit` returns; if the disk is full, once more with the reserved room."""
        try:
            return commit()
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.drop_ballast():
                raise
            return commit()

    def heal(self) -> None:
        """Check whether the directory is still there, and whether a full volume has room again."""
        try:
            if os.stat(self.path).st_ino != self.root_inode or not os.path.exists(self.path + "/volume.json"):
                raise FileNotFoundError(errno.ENOENT, "the directory was removed or replaced", self.path)
            if self.state == "full":
                self._free = (float("-inf"), 0)
                if has_room(self.path):
                    self.desk.call(self._reserve)
                    self.state, self.reason = "ok", ""
                    self.tell(StoreEvent("volume-healed", self.id, "there is room again"))
        except OSError as error:
            self.trouble(error, "looking at the directory")

    def _reserve(self) -> None:
        """Write what found no room while the disk was full."""
        self.make_ballast()
        self.write_mark()

    # --- changes ---

    def commit(self) -> int:
        """Commit the pending changes, with the usage; return how many. `OSError` or `Corrupt`: nothing was changed."""
        self._count()
        try:
            done = self.with_ballast(self.index.flush)
        except OSError as error:
            self._refused(error)
            raise
        self.usage.merge(self.change)
        self.change = Usage()
        if done:
            self.free_pages.changed()
        return done

    def seal(self) -> int:
        """Set aside the pending changes for `write`; return how many. The usage includes them from now on."""
        if self.index.pending:
            self._count()
            self._before = self.usage.copy()
            self.usage.merge(self.change)
            self.change = Usage()
            self.flushes_begun += 1
        return self.index.seal()

    def write(self) -> bool:
        """Commit the sealed changes, in the hand; see `Index.write`."""
        return self.with_ballast(self.index.write)

    def written(self) -> None:
        """The sealed changes are committed."""
        self.index.written()
        self.flushes_done = self.flushes_begun
        self.free_pages.changed()

    def flush_lost(self, error: Exception) -> None:
        """The sealed changes cannot be committed: forget them, and all that came after."""
        self._refused(error)
        self.flushes_lost += 1
        self.behind = True
        self.usage = self._before
        self.discard()

    def _count(self) -> None:
        if self.index.pending:
            next_id = self.index.get("meta", b"next_id") or b""
            self.index.put("meta", b"usage", self.usage.encode(self.change, int(clock.wall_s() // 60), next_id))

    def _refused(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in _FULL:
            self.free_pages.refused()

    def discard(self) -> None:
        """Forget the pending changes."""
        self.index.discard()
        self.change = Usage()

    def room(self, share_bytes: int | None, *, fresh: bool = False) -> Room:
        """What is taken and free, pending changes included. `share_bytes` is this volume's share of the capacity.
        OSError or `Corrupt` of the disk."""
        usage, change = self.usage, self.change
        weighed_bytes = usage.taken_bytes + change.taken_bytes
        small_bytes = usage.small_bytes + change.small_bytes
        owned_small_bytes = usage.owned_small_bytes + change.owned_small_bytes
        owned_file_bytes = usage.owned_file_bytes + change.owned_file_bytes
        overhead_bytes = overhead(small_bytes, self.free_pages.now.used_bytes, self.durable.free_pages.now.used_bytes)
        return Room(
            weighed_bytes + overhead_bytes,
            overhead_bytes,
            owned_small_bytes + owned_file_bytes,
            weighed_bytes - small_bytes - owned_file_bytes,
            small_bytes - owned_small_bytes,
            self.free_bytes(fresh=fresh),
            self.free_pages.bytes,
            self.durable.free_pages.bytes,
            share_bytes,
        )

    # --- records ---

    def get(self, table: str, name: bytes) -> bytes | None:
        """A value of the index, pending changes included. Also None if it cannot be read: the volume is then out."""
        try:
            return self.index.get(table, name)
        except (OSError, Corrupt) as error:
            self.trouble(error, "reading the index")
            return None

    def record(self, entry: bytes, key: str) -> Record | None:
        """The record at an index key, pending changes included."""
        value = self.get("records", entry)
        if value is None:
            return None
        record = decode_record(value)
        return None if record.key and record.key != key else record


def has_room(path: str) -> bool:
    """Whether the disk of the volume at `path` is no longer full."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return False
    reserve_bytes = min(limits.RESERVE_BYTES_MAX, stat.f_blocks * stat.f_frsize // 100)
    return stat.f_bavail * stat.f_frsize - reserve_bytes > min(64 * limits.MIB, reserve_bytes)


def stalled(path: str, subject: str) -> Unavailable:
    """The error for a request that needs the disk of the volume at `path`, which does not answer."""
    return Unavailable(
        f"{subject}: the disk of volume {path} does not answer; it is used again when it does: look at the disk "
        "(`forebay status`, `dmesg`; is it frozen?), or try again later",
        retry_after_s=STALLED_RETRY_S,
    )


def refusal(error: OSError, doing: str) -> Unavailable:
    """The error for a request whose bytes a disk does not take."""
    if error.errno in _FULL:
        return Unavailable(
            f"there is no room for {doing}: free space on the node (`forebay status`), then send it again",
            code="InsufficientStorage",
        )
    return Unavailable(f"{doing} failed ({error}): check the node's disks (`forebay status`), then send it again")


def of_broken(error: Exception, doing: str) -> ForebayError:
    """What is answered where `error` was not foreseen: a disk that is full or fails is no bug of the node."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, OSError) and error.errno in (*_FULL, *_DEAD):
        return refusal(error, doing)
    return Bug(f"{doing} broke: {error!r}: please report it with the node's log")


def index_path(volume_path: str, generation: int) -> str:
    """The directory of that generation's index."""
    return f"{volume_path}/index/{generation}"
