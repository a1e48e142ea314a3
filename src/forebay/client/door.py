"""The client's side of the host door: reads objects of a node on this host from their files.

Theory. On the node's own host, bytes need no socket. The client asks the door of a front for descriptors
(`core/messages/doorwire.py`) and reads from them; small objects come inside the answer. The door is looked up once, by
HTTP. Where there is none (another host, another user, an old node), HTTP is used silently. This module returns `None`
for everything it cannot read, and the caller goes on over HTTP, which also words the errors.

A descriptor holds its object's space on the node's disk, even after eviction. So the client keeps at most
CLIENT_FILES_OPEN_MAX, and none that is unused for CLIENT_FILE_IDLE_S. Before each use it looks, without waiting,
whether the node has dropped some. When the freshness that came with a descriptor is over, the client asks for it again.
A descriptor is closed when nothing refers to it (`_Held.__del__`), so nobody waits for a thread that reads from it.

Reads use `pread`: 2.3 µs for 10 KiB. `mmap` takes 1.8, but a failing disk or a truncated file would end the process
with SIGBUS. A read that fails or is short returns `None`: over HTTP the node notices and reads elsewhere.

A member of a shard is a range of its file, if the client has the index of the open version (`members.py`). The index is
fetched when a shard is asked for repeatedly.

A fork gives the child copies of all descriptors. The child closes them at once (the parent's stay, with their leases)
and finds the door anew when it needs it.

Bytes in memory that this process shares (`shared.py`) are handed over at the door instead of being sent, each body at a
connection of its own, which the answer ends.

Rejected: mmap (above); a connection for each thread (one question takes tens of microseconds); asking before each read
whether a descriptor is current (as slow as HTTP).

Invariants. (1) Returned bytes are of one version, whole, and of the size asked for. (2) A descriptor is used only while
its connection is up: without it nobody would say what was dropped. (3) The connection is used under `_lock`; a look
without waiting leaves it to the thread that has it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from forebay.client.connection import CUT
from forebay.client.shared import SharedMemory
from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Unavailable, from_wire
from forebay.core.formats.members import MemberIndex
from forebay.core.messages import doorwire
from forebay.core.messages.batch import Item
from forebay.core.messages.calls import Written
from forebay.core.messages.doorwire import (
    DOOR_VERSION,
    DoorAt,
    DoorClosed,
    DoorDropped,
    DoorFile,
    DoorHello,
    DoorInline,
    DoorOpen,
    DoorOpened,
    DoorTake,
    DoorTook,
    DoorUsed,
    DoorWelcome,
)
from forebay.ports import clock

PATIENCE_S = 20.0  # for one answer of the door: it reads an index and opens files; HTTP has more patience
AWAY_S = 60.0  # how long it is not looked for again where there cannot be one
RETRY_MIN_S, RETRY_MAX_S = 0.25, 15.0  # where there was one and is not now: a front starts within a second
REPORT_S = 1.0  # between reports of what was read
REPORT_BLOCKS_MAX = 2048  # in one message
ASKS_MAX = 2  # questions under way: the front works on one while we read what the other gave
READ_BYTES_MAX = 1 << 30  # of one system call
LARGE_BYTES = 256 * limits.KIB  # to read so much takes longer than to ask for another object
BATCHES_MIN = 4  # so often members of a shard are asked for before its index is fetched
SHARDS_COUNTED_MAX = 65_536
_PATH = re.compile(r"/.*/door-\d+\.sock")
_NOW = getattr(socket, "MSG_DONTWAIT", 0)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_FDS_BYTES = socket.CMSG_SPACE(4 * limits.DOOR_FILES_MAX) if hasattr(socket, "CMSG_SPACE") else 0

Name = tuple[str, str]  # bucket and key
IndexOf = Callable[[str, str], MemberIndex | None]


class Found(NamedTuple):
    """What the door says of one object; `body` is all of it where it is small."""

    size_bytes: int
    etag: str
    body: bytes | None


class _Held:
    """An open object. Closed when nobody refers to it."""

    __slots__ = (
        "block_bytes", "compared", "etag", "fd", "fresh_until_s", "object_id", "size_bytes", "touched", "used_s",
    )  # fmt: skip

    def __init__(self, fd: int, file: DoorFile, now_s: float) -> None:
        self.fd = fd
        self.object_id = file.object_id
        self.size_bytes = file.size_bytes
        self.etag = file.etag
        self.fresh_until_s = file.fresh_until_s
        self.block_bytes = max(1, file.block_bytes)
        self.compared = file.compared
        self.touched: set[int] = set()  # blocks read and not reported
        self.used_s = now_s

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        try:
            close(self.fd)
        except OSError:
            pass

    def read(self, start: int, end: int | None, etag: str) -> bytes | None:
        """These bytes, whole; None if they are not all in the object, or it is another version."""
        if end is None:
            end = self.size_bytes
        size = end - start
        if start < 0 or size <= 0 or end > self.size_bytes or size > READ_BYTES_MAX or (etag and etag != self.etag):
            return None
        body = os.pread(self.fd, size, start)
        if len(body) != size:
            raise _CutShort
        first = start // self.block_bytes
        self.touched.add(first)
        if end > (first + 1) * self.block_bytes:
            self.touch(start, end)
        return body

    def readinto(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from offset `start` on. `OSError` if that cannot be done."""
        done = 0
        while done < len(buffer):
            size = os.preadv(self.fd, [buffer[done : done + READ_BYTES_MAX]], start + done)
            if not size:
                raise _CutShort
            done += size
        self.touch(start, start + done)

    def touch(self, start: int, end: int) -> None:
        self.touched.update(range(start // self.block_bytes, -(-end // self.block_bytes)))

    def take_hits(self) -> list[int]:
        """What was read since the last time, as `DoorUsed` has it."""
        touched, self.touched = self.touched, set()
        hits: list[int] = []
        for block in sorted(touched):
            if hits and hits[-1] == block:
                hits[-1] = block + 1
            else:
                hits += (self.object_id, block, block + 1)
        return hits


class _CutShort(OSError):
    """A file ends before its object does."""


class _Lost(Exception):
    """The connection to the door is no longer."""


class HostDoor:
    """The door of one node, for one process and any number of threads. `ask_where` gets `DoorAt` over HTTP, `token` the
    bearer token ("" for none).
    `known_members` gives the index of a shard where the client has one, of whatever version; `read_members` asks the
    node for it.

    Every method answers None for what the door has not; then ask over HTTP. None raises for what node or disks do.
    """

    def __init__(
        self,
        ask_where: Callable[[], DoorAt],
        token: Callable[[], str] = str,
        *,
        known_members: IndexOf | None = None,
        read_members: IndexOf | None = None,
        files_open_max: int = limits.CLIENT_FILES_OPEN_MAX,
    ) -> None:
        self._ask_where = ask_where
        self._token = token
        self._known_members = known_members
        self._read_members = read_members
        self._files_open_max = files_open_max
        self._off = sys.platform != "linux"
        self._begin()
        _doors.add(self)

    def _begin(self) -> None:
        """As new: nothing open, nothing known."""
        self._lock = threading.Lock()
        self._files: dict[Name, _Held] = {}
        self._names: dict[int, Name] = {}  # by object id: what is in `_files`
        self._closed: list[int] = []  # object ids that the front has still to hear of
        self._hits: list[int] = []  # of these
        self._reads = 0
        self._read_bytes = 0
        self._reported_s = clock.monotonic_s()
        self._sweeping: threading.Event | None = None  # set to have it look now
        self._sock: socket.socket | None = None
        self._frames = doorwire.answer_frames()
        self._fds: deque[int] = deque()  # received, of messages that are not complete
        self._number = 0
        self._waiting: deque[tuple[int, list[Name]]] = deque()  # questions under way
        self._answers: deque[list[tuple[Name, _Held | Found | None]]] = deque()
        self._try_at_s = 0.0
        self._retry_s = RETRY_MIN_S
        self._asked_inside: dict[Name, int] = {}  # batches with members of a shard whose index is not known

    def __repr__(self) -> str:
        return f"<HostDoor {'open' if self._sock else 'closed'}, {len(self._files)} files>"

    @property
    def connected(self) -> bool:
        """Whether there is a connection to a door now."""
        return self._sock is not None

    @property
    def files_open(self) -> int:
        """How many descriptors are kept."""
        return len(self._files)

    def off(self) -> None:
        """Never use it again: everything goes over HTTP."""
        self._off = True
        self.close()

    def close(self) -> None:
        """Let go of the connection and of all descriptors; the next use finds it anew. Twice is fine."""
        with self._lock:
            with contextlib.suppress(_Lost):
                self._report(clock.monotonic_s())
            self._disconnect()
            self._try_at_s = 0.0
            if self._sweeping is not None:
                self._sweeping.set()

    # --- reading -----------------------------------------------------------------------------------------------------
    def read_many(self, items: Sequence[Item]) -> list[bytes | memoryview | None]:
        """The bytes of each item, in order; None where HTTP must be asked."""
        answers: list[bytes | memoryview | None] = [None] * len(items)
        if self._off or not items:
            return answers
        self._look()
        files = self._files
        missing: dict[Name, list[int]] = {}
        now_s, used_s = clock.wall_s(), clock.monotonic_s()
        reads = read_bytes = 0
        indexes: dict[Name, MemberIndex | None] = {}
        inside: dict[int, Item] = {}  # items in members of what is missing, as ranges of their shards
        for at, item in enumerate(items):
            if item.version:  # these are files of a bucket that has no name here
                continue
            start, end, etag = item.start, item.end, item.etag
            name = (item.bucket, item.key)
            if item.member:
                if name not in indexes:
                    indexes[name] = self._index(name)
                index = indexes[name]
                place = None if index is None or etag not in ("", index.etag) else index.place(item.member)
                if place is None or index is None:
                    continue
                begin, size = place
                if end is None:
                    end = size
                if not 0 <= start < end <= size:
                    continue
                start, end, etag = begin + start, begin + end, index.etag
            held = files.get(name)
            if held is None or held.fresh_until_s <= now_s or not held.compared:
                missing.setdefault(name, []).append(at)
                if item.member:
                    inside[at] = Item(*name, start, end, "", etag)
                continue
            try:
                body = held.read(start, end, etag)
            except OSError:
                self._distrust(name, held)
                continue
            if body is not None:
                answers[at] = body
                held.used_s = used_s
                reads += 1
                read_bytes += len(body)
        if missing:
            wanted = items if not inside else [inside.get(at, item) for at, item in enumerate(items)]
            with self._lock:
                large = self._read_missing(wanted, answers, missing)
            for at, held in large:
                answers[at] = self._read_one(wanted[at], held)
        self._count(reads, read_bytes, used_s)
        return answers

    def _read_missing(
        self, items: Sequence[Item], answers: list[bytes | memoryview | None], missing: dict[Name, list[int]]
    ) -> list[tuple[int, _Held]]:
        """Under `_lock`. Of objects that are not open, or not fresh: each as its answer comes, while the front works on
        the next. Returns what is large and still to be read: other threads need not wait for that."""
        large: list[tuple[int, _Held]] = []
        for name, found in self._asked(list(missing)):
            if found is None:
                continue
            for at in missing[name]:
                item = items[at]
                if isinstance(found, Found):
                    answers[at] = _cut(found, item)
                    continue
                size = (found.size_bytes if item.end is None else item.end) - item.start
                if size >= LARGE_BYTES and len(large) < limits.DOOR_FILES_MAX:
                    large.append((at, found))
                    continue
                try:
                    body = answers[at] = found.read(item.start, item.end, item.etag)
                except OSError:
                    self._forget(name, found)
                    break
                if body is not None:
                    self._reads += 1
                    self._read_bytes += len(body)
            if isinstance(found, _Held) and found.size_bytes <= found.block_bytes:
                found.touched.clear()  # the front has counted that when it gave it
        return large

    def _read_one(self, item: Item, held: _Held) -> bytes | None:
        try:
            body = held.read(item.start, item.end, item.etag)
        except OSError:
            self._distrust((item.bucket, item.key), held)
            return None
        if body is not None:
            self._reads += 1
            self._read_bytes += len(body)
            if held.size_bytes <= held.block_bytes:
                held.touched.clear()
        return body

    def _index(self, name: Name) -> MemberIndex | None:
        """The index of a shard whose members are ranges, of the version that is open here if one is. What would be a
        long answer for few members is not asked for: the node has it too, and reads them."""
        if self._known_members is None or self._read_members is None:
            return None
        index = self._known_members(*name)
        held = self._files.get(name)
        if index is not None and (held is None or held.etag == index.etag):
            return index if index.etag and index.ranged else None
        if len(self._asked_inside) >= SHARDS_COUNTED_MAX:
            self._asked_inside.clear()
        asked = self._asked_inside[name] = self._asked_inside.get(name, 0) + 1
        if index is None and (asked < BATCHES_MIN or self.find(*name) is None):
            return None
        with contextlib.suppress(ForebayError):
            index = self._read_members(*name)
            return index if index is not None and index.etag and index.ranged else None
        return None

    def pread(self, bucket: str, key: str, start: int, size_bytes: int, *, etag: str = "") -> bytes | None:
        """`size_bytes` of the object from `start` on."""
        body = self.read_many((Item(bucket, key, start, start + size_bytes, "", etag),))[0]
        assert body is None or isinstance(body, bytes)
        return body

    def readinto(
        self,
        bucket: str,
        key: str,
        start: int,
        buffer: bytearray | memoryview,
        *,
        etag: str = "",
        proves: bool = False,
    ) -> int | None:
        """Bytes of the object from `start` on into `buffer`, as many as both have; how many. `proves`: the caller has
        digests of them and compares, so the node need not have."""
        found = self._open(bucket, key, proves)
        if found is None or (etag and etag != found.etag) or not 0 <= start <= found.size_bytes:
            return None
        with memoryview(buffer).cast("B") as whole:
            size = min(len(whole), found.size_bytes - start)
            with whole[:size] as view:
                if isinstance(found, Found):
                    assert found.body is not None
                    view[:] = found.body[start : start + size]
                    return size
                try:
                    found.readinto(start, view)
                except OSError:
                    self._distrust((bucket, key), found)
                    return None
        self._count(1, size, found.used_s)
        return size

    def find(self, bucket: str, key: str) -> Found | None:
        """Size and ETag of the object, and its bytes where they are few."""
        found = self._open(bucket, key)
        return Found(found.size_bytes, found.etag, None) if isinstance(found, _Held) else found

    def _open(self, bucket: str, key: str, proves: bool = False) -> _Held | Found | None:
        """One object, open, or itself where it is small."""
        if self._off:
            return None
        self._look()
        name = (bucket, key)
        held = self._files.get(name)
        if held is None or held.fresh_until_s <= clock.wall_s() or not (proves or held.compared):
            with self._lock:
                found = [found for _, found in self._asked([name], proves)]
            return found[0] if found else None
        held.used_s = clock.monotonic_s()
        return held

    def forget(self, bucket: str, key: str) -> None:
        """The caller changed the object: what is open here is another version of it."""
        held = self._files.get((bucket, key))
        if held is not None:
            self._distrust((bucket, key), held)

    # --- writing -----------------------------------------------------------------------------------------------------
    def hand_over(
        self, bucket: str, key: str, memory: SharedMemory, size_bytes: int, sums: Sequence[int], patience_s: float
    ) -> Written | None:
        """Have the node make the first `size_bytes` of `memory` the object; `sums` are the xxh3-64 of each 4 MiB. None
        where there is no door that takes bodies, with nothing done. Raises what HTTP would answer; `Unavailable` with
        code `Cut` if no answer came, and the node may have taken it."""
        with self._lock:
            entered = None if self._off else self._enter()
        if entered is None:
            return None
        sock, welcome = entered
        with sock:
            if not welcome.takes:
                return None
            _wait_at_most(sock, patience_s)
            asked = doorwire.encode(DoorTake(1, bucket, key, size_bytes, list(sums)))
            try:
                sent = socket.send_fds(sock, [asked], [memory.fd])
                sock.sendall(memoryview(asked)[sent:])
                took = _first(sock)
            except OSError as error:
                took, why = None, str(error) or "it was too slow"
            else:
                why = "the connection ended"
        if not isinstance(took, DoorTook):
            raise Unavailable(f"the node did not say whether it took {bucket}/{key} ({why}): try again", code=CUT)
        if took.error is not None:
            raise from_wire(took.error)
        return took.written

    # --- what is open ------------------------------------------------------------------------------------------------
    def _keep(self, name: Name, fd: int, file: DoorFile) -> _Held:
        """Under `_lock`."""
        before = self._files.get(name)
        if before is not None and before.object_id != file.object_id:
            self._forget(name, before)  # else the front has one of it on its list, before and after
        held = self._files[name] = _Held(fd, file, clock.monotonic_s())
        self._names[held.object_id] = name
        if len(self._files) > self._files_open_max:
            oldest = sorted(self._files.items(), key=lambda entry: entry[1].used_s)
            for old_name, old in oldest[: max(1, self._files_open_max // 8)]:
                self._forget(old_name, old)
        if self._sweeping is None:
            self._sweeping = now = threading.Event()
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                threading.Thread(target=_sweep, args=(weakref.ref(self), now), name="host-door", daemon=True).start()
        return held

    def _forget(self, name: Name, held: _Held) -> None:
        """Under `_lock`: use it no more, and say so with the next message."""
        if self._files.get(name) is held:
            del self._files[name]
            del self._names[held.object_id]
            self._closed.append(held.object_id)
            self._hits += held.take_hits()

    def _distrust(self, name: Name, held: _Held) -> None:
        with self._lock:
            self._forget(name, held)

    def sweep(self) -> bool:
        """Close what was not used for CLIENT_FILE_IDLE_S or was dropped; whether anything is left to come back for."""
        now_s = clock.monotonic_s()
        with self._lock:
            self._look_locked()
            for name, held in list(self._files.items()):
                if now_s - held.used_s > limits.CLIENT_FILE_IDLE_S:
                    self._forget(name, held)
            try:
                self._report(now_s)
            except _Lost:
                self._lost()
            if not self._files:
                self._sweeping = None
            return self._sweeping is not None

    # --- what was read -----------------------------------------------------------------------------------------------
    def _count(self, reads: int, read_bytes: int, now_s: float) -> None:
        self._reads += reads  # two threads may lose one of these: they are for a rate
        self._read_bytes += read_bytes
        if now_s - self._reported_s > REPORT_S and self._lock.acquire(blocking=False):
            try:
                self._report(now_s)
            except _Lost:
                self._lost()
            finally:
                self._lock.release()

    def _report(self, now_s: float) -> None:
        """Under `_lock`: tell the front which blocks are in use, and what was closed."""
        self._reported_s = now_s
        if self._sock is None:
            return
        hits = self._hits
        for held in self._files.values():
            if held.touched:
                hits += held.take_hits()
        reads, self._reads = self._reads, 0
        read_bytes, self._read_bytes = self._read_bytes, 0
        self._hits = []
        for at in range(0, len(hits), 3 * REPORT_BLOCKS_MAX):
            self._send(DoorUsed(hits[at : at + 3 * REPORT_BLOCKS_MAX]))
        if reads:
            self._send(DoorUsed([], reads, read_bytes))
        self._say_closed()

    def _say_closed(self) -> None:
        if self._hits:  # of what is closed: the front must know the objects still
            hits, self._hits = self._hits, []
            self._send(DoorUsed(hits[-3 * REPORT_BLOCKS_MAX :]))
        if self._closed:
            closed, self._closed = self._closed, []
            self._send(DoorClosed(closed))

    # --- the connection; all under `_lock` ---------------------------------------------------------------------------
    def _look(self) -> None:
        """Close what the node dropped, as far as it has said so; without waiting, and without `_lock`."""
        if self._sock is not None and self._lock.acquire(blocking=False):
            try:
                self._look_locked()
            finally:
                self._lock.release()

    def _look_locked(self) -> None:
        try:
            while self._sock is not None:
                self._receive(_NOW)
        except BlockingIOError:
            return
        except _Lost:
            self._disconnect()

    def _asked(self, names: list[Name], proves: bool = False) -> Iterator[tuple[Name, _Held | Found | None]]:
        """Ask the door for these, and give each as its answer comes. Ends early when there is no door."""
        most = limits.DOOR_FILES_MAX
        parts = deque(names[at : at + most] for at in range(0, len(names), most))
        if self._sock is None and not self._connect():
            return
        try:
            while parts or self._waiting or self._answers:
                while parts and len(self._waiting) < ASKS_MAX:
                    self._say_closed()
                    self._number += 1
                    self._waiting.append((self._number, parts[0]))
                    self._send(DoorOpen(self._number, parts.popleft(), proves))
                if self._answers:
                    yield from self._answers.popleft()
                else:
                    self._receive(0)
            self._retry_s = RETRY_MIN_S
        except (_Lost, BlockingIOError):  # the latter: PATIENCE_S is over
            self._lost()
        finally:
            if self._waiting or self._answers:  # whoever asked stopped listening, and the next would get these
                self._disconnect()

    def _receive(self, flags: int) -> None:
        """What has come, taken in its order. `BlockingIOError` if that is nothing."""
        assert self._sock is not None
        try:
            with self._frames.room() as room:
                size, passed, got, _ = self._sock.recvmsg_into([room], _FDS_BYTES, flags | _CLOSE_ON_EXEC)
        except (BlockingIOError, InterruptedError):
            raise
        except OSError:
            raise _Lost from None
        for level, kind, data in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(array("i", data[: len(data) // 4 * 4]))
        if got & socket.MSG_CTRUNC:  # this process may open no more, and the kernel has dropped some
            self._files_open_max = max(1, self._files_open_max // 2)
            raise _Lost
        if not size:
            raise _Lost
        try:
            for message in self._frames.wrote(size):
                self._take(message)
        except Corrupt:
            raise _Lost from None

    def _take(self, message: doorwire.FromDoor) -> None:
        if isinstance(message, DoorOpened):
            number, names = self._waiting.popleft() if self._waiting else (0, [])
            if message.number != number or len(message.results) != len(names):
                raise _Lost
            self._answers.append([(name, self._accept(name, result)) for name, result in zip(names, message.results)])
        elif isinstance(message, DoorDropped):
            for object_id in message.object_ids:
                name = self._names.pop(object_id, None)
                if name is not None:
                    del self._files[name]
        else:
            raise _Lost

    def _accept(self, name: Name, result: doorwire.Result) -> _Held | Found | None:
        if isinstance(result, DoorFile):
            if not self._fds:
                raise _Lost
            return self._keep(name, self._fds.popleft(), result)
        if isinstance(result, DoorInline):
            return Found(len(result.body), result.etag, result.body)
        return None

    def _send(self, message: doorwire.ToDoor) -> None:
        if self._sock is None:
            raise _Lost
        try:
            self._sock.sendall(doorwire.encode(message))
        except OSError:
            raise _Lost from None

    def _connect(self) -> bool:
        """Find the door and be let in, if it is time to try; whether there is one."""
        entered = self._enter()
        if entered is not None:
            self._sock = entered[0]
        return entered is not None

    def _enter(self) -> tuple[socket.socket, DoorWelcome] | None:
        """A new connection, and what the door said."""
        now_s = clock.monotonic_s()
        if now_s < self._try_at_s:
            return None
        self._try_at_s = now_s + AWAY_S  # unless it turns out to be near
        try:
            at = self._ask_where()
        except ForebayError as error:
            if error.retry != "never":
                self._lost()
            return None
        if not _PATH.fullmatch(at.path):
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _wait_at_most(sock, PATIENCE_S)
            sock.connect(at.path)
            sock.sendall(doorwire.encode(DoorHello(self._token())))
            welcome = _first(sock)
        except ConnectionError:  # it is there, but nobody behind it now
            sock.close()
            self._lost()
            return None
        except OSError:
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        if not isinstance(welcome, DoorWelcome) or (welcome.version, welcome.node_id) != (DOOR_VERSION, at.node_id):
            sock.close()
            return None
        self._try_at_s = 0.0
        return sock, welcome

    def _lost(self) -> None:
        """The door is not where it was: try again later, each time later."""
        self._disconnect()
        self._try_at_s = clock.monotonic_s() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _disconnect(self) -> None:
        """Close everything: without the connection nobody would say what was dropped."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for fd in self._fds:
            os.close(fd)
        self._frames = doorwire.answer_frames()
        for what in (self._files, self._names, self._closed, self._hits, self._fds, self._waiting, self._answers):
            what.clear()

    def after_fork(self) -> None:
        """In a child: close its copies, and begin anew. No other thread runs."""
        self._lock = threading.Lock()
        self._disconnect()
        self._begin()


def _cut(found: Found, item: Item) -> bytes | None:
    """The item's range of a small object."""
    body = found.body
    assert body is not None
    if item.etag and item.etag != found.etag:
        return None
    end = len(body) if item.end is None else item.end
    if item.start == 0 and end == len(body):
        return body
    return body[item.start : end] if 0 <= item.start < end <= len(body) else None


def _wait_at_most(sock: socket.socket, patience_s: float) -> None:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(patience_s), int(patience_s % 1 * 1e6)))


def _first(sock: socket.socket) -> doorwire.FromDoor | None:
    """The answer to the only question at a connection; None when there is none, or none that is understood."""
    frames = doorwire.answer_frames()
    while True:
        with frames.room() as room:
            size = sock.recv_into(room)
        if not size:
            return None
        try:
            for message in frames.wrote(size):
                return message
        except Corrupt:
            return None


def _sweep(ref: weakref.ref[HostDoor], now: threading.Event) -> None:
    """A thread that lives as long as something is open."""
    while True:
        now.wait(limits.CLIENT_FILE_IDLE_S / 4)
        now.clear()
        door = ref()
        if door is None or not door.sweep():
            return
        del door


_doors: weakref.WeakSet[HostDoor] = weakref.WeakSet()


def _after_fork() -> None:
    for door in list(_doors):
        door.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
