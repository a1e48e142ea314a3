"""The host door, the front's side: descriptors of whole objects for clients on this host.

Theory. A client on the node's host can read bytes itself: it asks here which file has them. Each descriptor it gets is
an open file description of its own, read-only, under a shared `flock` that was taken before the look-up that is
trusted. So it carries its own lease (design 0001), and bytes read through it are never holes, however long it is kept.
Whether an object may be given is decided as for HTTP. For one that is not whole, fresh and verified
the answer is `DoorCold`, and the client asks over HTTP, which fetches it. Small objects go along in the answer.

The front remembers what each client holds, and tells it what the engine dropped. If the front cannot know (the engine
was away), or a decision may no longer hold (identities or a bucket changed), it ends the connections. A client that
loses its connection closes what it was given and asks again.

A client may also hand over a body instead of sending it, as memory that it shares (`objects/handed_memory.py`).

Sockets are our own and not the loop's: no transport passes descriptors. One question is answered in one turn of the
loop, at most DOOR_FILES_MAX objects, and only when the answer before has left.

Rejected: giving the descriptors that the front has open (one file description has one lock, and the client could drop
the front's lease); letting clients open paths (they would need the store's format, and its rights).

Invariants. (1) A descriptor is given, or closed, exactly once. (2) Nothing is answered before an accepted `DoorHello`.
(3) A connection holds at most DOOR_GIVEN_MAX descriptors that the client has not reported closed, and a client that
does not read is cut after `stall_s`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Bug, Corrupt, ForebayError, Invalid, NotSupported
from forebay.core.machines.opening import fresh_until_s, may_serve
from forebay.core.messages import doorwire
from forebay.core.messages.calls import Written
from forebay.core.messages.doorwire import (
    DOOR_VERSION,
    DoorAt,
    DoorClosed,
    DoorCold,
    DoorDropped,
    DoorError,
    DoorFile,
    DoorHello,
    DoorInline,
    DoorOpen,
    DoorOpened,
    DoorRefused,
    DoorTake,
    DoorTook,
    DoorUsed,
    DoorWelcome,
)
from forebay.core.messages.wire import Welcome
from forebay.core.record import Record, blocks_in
from forebay.core.types import Bucket, check_key
from forebay.node.front.http.auth import Auth
from forebay.node.front.link import Link
from forebay.node.front.objects.reads import Reads
from forebay.node.store.reader import StoreReader
from forebay.ports import clock as clocks

log = logging.getLogger("forebay.door")

BACKLOG = 256  # processes of a job that start at once
HELLO_TIMEOUT_S = limits.HEADER_TIMEOUT_S
QUEUED_BYTES_MAX = 2 * limits.DOOR_ANSWER_BYTES_MAX  # an answer under way, and what was dropped meanwhile
COMPARED_BYTES_MAX = 64 * limits.MIB  # of an object that a client waits for: some 30 ms in memory
TICK_S = 1.0
READS_MAX, READ_BYTES_MAX = 1 << 32, 1 << 50  # in one report
_FD_BYTES = socket.CMSG_SPACE(4)
_COLD = DoorCold()


# Makes memory that was handed over an object; it asks whether the client has gone.
Take = Callable[[Identity, DoorTake, int, Callable[[], bool]], Coroutine[None, None, Written]]
# Who asked for what (identity, operation, bucket, key), and why it was refused.
Tell = Callable[[str, str, str, str, ForebayError | None], None]


class _Guest:
    """One connection."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self._door = door
        self._sock = sock
        self._fd = sock.fileno()
        self._frames = doorwire.ask_frames()
        self._asks: deque[DoorOpen] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self._fds: deque[int] = deque()  # that came, of a message that is not complete
        self._taking: asyncio.Task[None] | None = None
        self._comparing = False  # what the first of `_asks` is about
        self._compared = False
        self.identity: Identity | None = None
        self.given: dict[int, int] = {}  # object id to its number of blocks
        self.waits_since_s = door.clock.monotonic_s()  # for a hello, or for the client to take what is in `_out`
        self.ending = False  # nothing more is read, and it ends when `_out` has left
        self.closed = False
        door.loop.add_reader(self._fd, self._readable)

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn, and has a time limit."""
        return self.identity is None or bool(self._out)

    def close(self) -> None:
        """End it now. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        self._door.guests.discard(self)
        self._door.loop.remove_reader(self._fd)
        self._door.loop.remove_writer(self._fd)
        for _, fds in self._out:
            _close(fds)
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._out.clear()
        self._asks.clear()
        self._sock.close()

    # --- what comes in -----------------------------------------------------------------------------------------------
    def _readable(self) -> None:
        try:
            with self._frames.room() as room:
                size, passed, got, _ = self._sock.recvmsg_into([room], _FD_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size, passed, got = 0, [], 0
        for level, kind, data in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(array("i", data[: len(data) // 4 * 4]))
        if not size or got & socket.MSG_CTRUNC or len(self._fds) > 1:
            self.close()
            return
        try:
            for message in self._frames.wrote(size):
                if self.closed or self.ending:
                    return
                self._take(message)
        except (Corrupt, Invalid) as error:
            log.warning("a client at the door is cut: %s", error)
            self.close()

    def _take(self, message: doorwire.ToDoor) -> None:
        if isinstance(message, DoorHello):
            self._hello(message)
        elif self.identity is None:
            raise Invalid("it did not say hello")
        elif isinstance(message, DoorOpen):
            if len(self._asks) >= limits.DOOR_ASKS_MAX or not 0 < len(message.objects) <= limits.DOOR_FILES_MAX:
                raise Invalid("it asks for too much at once")
            self._asks.append(message)
            if len(self._asks) == 1:
                self._door.loop.call_soon(self._answer)
        elif isinstance(message, DoorClosed):
            for object_id in message.object_ids:
                self.given.pop(object_id, None)
        elif isinstance(message, DoorTake):
            self._handed(message)
        else:
            self._used(message)

    def _hello(self, hello: DoorHello) -> None:
        if self.identity is not None:
            raise Invalid("it said hello twice")
        try:
            if hello.version != DOOR_VERSION:
                raise Invalid(f"the door speaks version {DOOR_VERSION}, not {hello.version}: use HTTP")
            identity = self._door.auth.holder(hello.token.encode())
            if identity.limits is not None:  # what is read from a descriptor cannot be counted
                raise NotSupported(f"{identity.name} has limits, which the door cannot hold it to: use HTTP")
            self.identity = identity
        except ForebayError as error:
            self.ending = True
            self._post(DoorRefused(error.to_wire()))
            if self._door.tell is not None:
                self._door.tell("", "DoorHello", "", "", error)
            return
        self._post(DoorWelcome(self._door.node_id, takes=self._door.take is not None))

    def _handed(self, message: DoorTake) -> None:
        if self._taking is not None or not self._fds or self._door.take is None:
            raise Invalid("it hands over two bodies at once, or no memory")
        self._taking = asyncio.ensure_future(self._took(message, self._fds.popleft(), self._door.take))

    async def _took(self, message: DoorTake, fd: int, take: Take) -> None:
        assert self.identity is not None
        name, told = self.identity.name, DoorTook(message.number, None)
        failed: ForebayError | None = None
        try:
            told.written = await take(self.identity, message, fd, lambda: self.closed)
        except ForebayError as error:
            failed, told.error = error, error.to_wire()
        except Exception as error:
            log.exception("a body that was handed over could not be taken")
            failed = Bug(f"taking a body failed: {error!r}: please report it with the node's log")
            told.error = failed.to_wire()
        finally:
            os.close(fd)
            self._taking = None
        if self._door.tell is not None:
            self._door.tell(name, "DoorTake", message.bucket, message.key, failed)
        if not self.closed:
            self._post(told)

    def _used(self, used: DoorUsed) -> None:
        hits = used.hits
        if len(hits) % 3 or not 0 <= used.reads <= READS_MAX or not 0 <= used.read_bytes <= READ_BYTES_MAX:
            raise Invalid("its report makes no sense")
        touch = self._door.link.touch
        for at in range(0, len(hits), 3):
            object_id, first, end = hits[at : at + 3]
            blocks = self.given.get(object_id)
            if blocks is None:
                continue  # closed, or dropped, meanwhile
            if not 0 <= first < end <= blocks:
                raise Invalid("its report names blocks that the object has not")
            touch(object_id, first, end)
        self._door.reads.counts.hits += used.reads
        self._door.reads.counts.hit_bytes += used.read_bytes

    # --- what goes out -----------------------------------------------------------------------------------------------
    def _answer(self) -> None:
        """One question. The next follows in another turn, when this answer has left."""
        if self._out or not self._asks or self.closed or self._comparing:
            return
        ask = self._asks[0]
        if not (self._compared or ask.proves) and (waiting := self._door.compare(self, ask.objects)):
            self._comparing = True
            asyncio.gather(*waiting, return_exceptions=True).add_done_callback(self._done_comparing)
            return
        self._compared = False
        self._asks.popleft()
        assert self.identity is not None
        fds: list[int] = []
        try:
            results = self._door.results(self, ask.objects, fds, ask.proves)
            message = DoorOpened(ask.number, results)
        except BaseException:
            _close(fds)
            self.close()
            raise
        self._post(message, fds)
        if self._asks:
            self._door.loop.call_soon(self._answer)

    def _done_comparing(self, done: object) -> None:
        self._comparing, self._compared = False, True
        self._answer()

    def dropped(self, object_ids: Iterable[int]) -> None:
        """Tell the client, of those that it has."""
        given = self.given
        told = [object_id for object_id in object_ids if object_id in given]
        if told:
            for object_id in told:
                del given[object_id]
            self._post(DoorDropped(told))

    def _post(self, message: doorwire.FromDoor, fds: list[int] | None = None) -> None:
        frame = memoryview(doorwire.encode(message))
        if not self._out:
            self.waits_since_s = self._door.clock.monotonic_s()
        self._out.append((frame, fds or []))
        self._queued_bytes += len(frame)
        if len(self._out) == 1:
            self._send()
        if self._queued_bytes > QUEUED_BYTES_MAX:
            log.warning("a client at the door does not read: it is cut")
            self.close()

    def _send(self) -> None:
        while self._out:
            frame, fds = self._out[0]
            try:
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
                size = self._sock.sendmsg([frame], passed)
            except (BlockingIOError, InterruptedError):
                self._door.loop.add_writer(self._fd, self._writable)
                return
            except OSError as error:
                if not isinstance(error, ConnectionError):
                    log.warning("descriptors cannot be passed (%s): a client is sent to HTTP", error)
                self.close()
                return
            _close(fds)  # the message under way has its own
            self._queued_bytes -= size
            self.waits_since_s = self._door.clock.monotonic_s()
            if size < len(frame):
                self._out[0] = (frame[size:], [])
            else:
                self._out.popleft()
        if self.ending:
            self.close()

    def _writable(self) -> None:
        self._send()
        if not self.closed and not self._out:
            self._door.loop.remove_writer(self._fd)
            self._answer()


class Door:
    """The door of one front. `start`, then `stop`, on the loop; the rest says what happened elsewhere."""

    def __init__(
        self,
        path: Path,
        reads: Reads,
        store: StoreReader,
        link: Link,
        auth: Auth,
        *,
        clock: clocks.Clock = clocks.system,
        stall_s: float = limits.STALL_TIMEOUT_S,
        connections_max: int = limits.DOOR_CONNECTIONS_MAX,
    ) -> None:
        self.path = path
        self.reads = reads
        self.link = link
        self.auth = auth
        self.clock = clock
        self.node_id = ""
        self.files_given = 0
        self.tell: Tell | None = None  # the audit log
        self.take: Take | None = None  # None: bodies come over HTTP
        self.guests: set[_Guest] = set()
        self.loop: asyncio.AbstractEventLoop
        self._store = store
        self._stall_s = stall_s
        self._connections_max = connections_max
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._identities = (b"", b"")  # and issuers
        self._buckets: dict[str, Bucket] = {}

    @property
    def at(self) -> DoorAt | None:
        """Where clients find it; None when it could not be made."""
        return None if self._listener is None else DoorAt(self.node_id, str(self.path))

    def start(self) -> None:
        """Listen. A path that cannot be had leaves the node without a door: clients use HTTP, and the log says why."""
        self.loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            listener.setblocking(False)
            listener.bind(str(self.path))
            self.path.chmod(0o600)  # until now the directory kept others out
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            log.warning("there is no door for clients on this host (%s at %s): they use HTTP", error, self.path)
            return
        self._listener = listener
        self.loop.add_reader(listener.fileno(), self._accept)
        self._timer = self.loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Close everything. Twice is fine."""
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.let_go()

    def follow(self, welcome: Welcome) -> None:
        """Identities or buckets may have changed: what was let in or given under others ends."""
        buckets = {bucket.name: bucket for bucket in welcome.buckets}
        changed = any(buckets.get(name) != bucket for name, bucket in self._buckets.items())
        identities = (welcome.identities, welcome.trusted)
        if changed or identities != self._identities or welcome.node_id != self.node_id:
            self.let_go()
        self.node_id, self._identities, self._buckets = welcome.node_id, identities, buckets

    def dropped(self, object_ids: list[int]) -> None:
        """These were evicted or replaced."""
        for guest in list(self.guests):
            guest.dropped(object_ids)

    def let_go(self) -> None:
        """End all connections; clients close what they were given, and come again."""
        for guest in list(self.guests):
            guest.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # no descriptor is left: look again with the next tick
            log.warning("a client at the door cannot be let in (%s)", error)
            self.loop.remove_reader(self._listener.fileno())
            return
        if len(self.guests) >= self._connections_max:
            sock.close()
            return
        sock.setblocking(False)
        self.guests.add(_Guest(self, sock))

    def _tick(self) -> None:
        now_s = self.clock.monotonic_s()
        if self._listener is not None:
            self.loop.add_reader(self._listener.fileno(), self._accept)
        for guest in list(self.guests):
            limit_s = self._stall_s if guest.identity is not None else HELLO_TIMEOUT_S
            if guest.waits and now_s - guest.waits_since_s > limit_s:
                guest.close()
            elif guest.identity is not None and 0 < guest.identity.until_s < self.clock.wall_s():
                guest.close()  # its token has ended: it comes again with another
        self._timer = self.loop.call_later(TICK_S, self._tick)

    # --- the decision ------------------------------------------------------------------------------------------------
    def results(
        self, guest: _Guest, objects: list[tuple[str, str]], fds: list[int], proves: bool
    ) -> list[doorwire.Result]:
        """One for each; the descriptors of `DoorFile` results are appended to `fds` in their order."""
        now_s = self.clock.wall_s()
        readable: dict[str, Bucket] = {}  # of these the guest may read everything
        results: list[doorwire.Result] = []
        for name, key in objects:
            bucket = readable.get(name) or self._bucket(guest, name, key)
            denied = bucket if isinstance(bucket, ForebayError) else None
            if isinstance(bucket, ForebayError):
                results.append(DoorError(bucket.to_wire()))
            else:
                if name not in readable and guest.identity and self.auth.may(guest.identity, "read", name):
                    readable[name] = bucket
                results.append(self._result(guest, bucket, key, now_s, fds, proves))
            if self.tell is not None and results[-1] is not _COLD and guest.identity is not None:
                self.tell(guest.identity.name, "DoorOpen", name, key, denied)
        if len(self.link.touched_whole) >= limits.TOUCHES_MAX:
            self.link.flush()
        return results

    def compare(self, guest: _Guest, objects: list[tuple[str, str]]) -> list[asyncio.Task[bool]]:
        """What must be compared before these are given: a client reads past everybody. It waits for objects of a
        moderate size; a larger one is compared too, but first comes over HTTP."""
        waiting = []
        for name, key in objects:
            if name not in self.reads.buckets or isinstance(self._bucket(guest, name, key), ForebayError):
                continue
            record = self._store.lookup(name, key)
            if record is None or record.inline is not None or not record.complete or not record.size_bytes:
                continue
            if self._store.compared.whole(record.object_id):
                continue
            file = self._store.acquire_apart(name, key, record)
            if file is not None:
                if file.record.object_id == record.object_id and file.record.complete:
                    task = self.reads.compare(file, name, key, 0, record.size_bytes)
                    waiting += [task] if record.size_bytes <= COMPARED_BYTES_MAX else []
                file.release()
        return waiting

    def _bucket(self, guest: _Guest, name: str, key: str) -> Bucket | ForebayError:
        assert guest.identity is not None
        try:
            bucket = self.reads.bucket(name)
            self.auth.require_read(guest.identity, bucket, key)
        except ForebayError as error:
            return error
        return bucket

    def _result(
        self, guest: _Guest, bucket: Bucket, key: str, now_s: float, fds: list[int], proves: bool
    ) -> doorwire.Result:
        try:
            record = self._store.fresh(bucket, check_key(key), now_s)
        except Invalid as error:
            return DoorError(error.to_wire())
        if record is None:
            return _COLD
        inline = record.inline if record.size_bytes else b""
        if inline is not None:
            self.link.touched_whole[record.object_id] = None
            counts = self.reads.counts
            counts.hits += 1
            counts.hit_bytes += len(inline)
            return DoorInline(inline, record.etag, record.version)
        if bucket.is_kept_twice:  # who has the file would read it when this node is taken over
            return _COLD
        if not record.complete or len(guest.given) >= limits.DOOR_GIVEN_MAX:
            return _COLD
        if not proves and not self._store.compared.whole(record.object_id):
            return _COLD
        opened = self._store.open_apart(bucket.name, key, record)
        if opened is None:
            return _COLD
        fd, record = opened
        if not record.complete or not may_serve(record.state, record.checked_s, bucket.freshness_s, now_s):
            os.close(fd)
            return _COLD
        fds.append(fd)
        self.files_given += 1
        return self._file(guest, bucket, record)

    def _file(self, guest: _Guest, bucket: Bucket, record: Record) -> DoorFile:
        blocks = guest.given[record.object_id] = blocks_in(record.size_bytes, record.block_bytes)
        if blocks == 1:  # who asks for it reads it; of larger ones the client reports which blocks
            self.link.touch(record.object_id, 0, 1)
        until_s = fresh_until_s(record.state, record.checked_s, bucket.freshness_s)
        compared = self._store.compared.whole(record.object_id)
        return DoorFile(
            record.object_id, record.size_bytes, record.etag, record.version, until_s, record.block_bytes, compared
        )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
