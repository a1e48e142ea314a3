"""The front's end of the socket to the engine: reads, calls, reports.

Theory. One connection carries everything (core/messages/wire.py). When it breaks, the engine died or is restarting.
Everything that waits for it fails at once with `Unavailable`, and a loop reconnects, soon at first and then less often.
Hits need no engine, so a front keeps serving. A miss waits up to `grace_s` for the engine to come back before it fails,
which hides an ordinary restart from clients.

An engine that hangs keeps its connection, so it sends beats. One that is silent for too long (`core/machines/pulse.py`)
counts as dead: its connection is cut. Its supervisor decides whether to replace it.

Hits gather in a dictionary, so that an object read a thousand times in a fifth of a second is one entry: the engine
needs to know that it was used, not how often.

Messages of one turn of the loop go out together, and a function instead of a future may take a call's answer (`begin`).
Both serve many small writes, of which each would otherwise cost a system call, a task and a wake-up more.

Bytes that the engine announced to a read stay until the read is closed, or the engine is gone. So after opening a file
that a message named, the front checks that the engine is still there (`Read.stands`). The loop may not have noticed its
end yet: this process may have been paused while the next engine began to clean up. The socket knows.

Rejected: a connection for each read (a descriptor and a handshake for each miss); asking again after the engine died
(only one layer retries, and that is the engine's; only the rest of an answer that was begun is asked for again:
`objects/arriving_bytes.py`).

Invariants. (1) Every read and call that was sent ends: with an answer, with `Failed`, or with the connection. (2)
Numbers are never used twice, so a late message for a closed read finds nobody. (3) A read that is closed here is closed
at the engine, whatever its answer was.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import select
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from forebay.core import limits
from forebay.core.errors import Bug, ForebayError, Unavailable, from_wire
from forebay.core.machines.pulse import Pulse, interval_s
from forebay.core.messages import calls, wire
from forebay.core.metrics import Snapshot, encode_snapshot
from forebay.core.types import RangeSpec
from forebay.node.outcomes import for_client, from_node, resolve
from forebay.ports import machine
from forebay.ports.clock import Clock, boottime
from forebay.ports.clock import system as system_clock

log = logging.getLogger("forebay.link")

GRACE_S = 3.0  # an engine restart takes about one second
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 0.25  # a try costs microseconds, and each miss waits for it
CONNECT_TIMEOUT_S = 5.0  # from connecting to being welcomed
TOUCH_INTERVAL_S = 0.2
Answered = Callable[[Any], None]
BUFFERED_BYTES_MAX = 8 * limits.MIB  # an engine that does not read for this long loses reports of hits, not reads


class Read:
    """One conversation about one object. Close it in any case."""

    __slots__ = (
        "_error",
        "_landed",
        "_link",
        "_opened",
        "_source",
        "_waiter",
        "_withdrawn",
        "bucket",
        "closed",
        "key",
        "number",
        "taken",
    )

    def __init__(self, link: Link, bucket: str, key: str) -> None:
        self.bucket, self.key = bucket, key
        self._link = link
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, number: int, source: _Wire) -> None:
        """For the link: ask on this connection, from the beginning."""
        self.number = number
        self.closed = False
        self.taken = 0  # how many messages came
        self._source = source
        self._opened: wire.Opened | None = None
        self._landed: deque[wire.Landed] = deque()
        self._error: ForebayError | None = None
        self._withdrawn = False

    async def opened(self) -> wire.Opened:
        """What the object is. Raises the engine's error; `Unavailable` if the engine goes away."""
        while self._opened is None:
            await self._wait()
        return self._opened

    async def landed(self) -> wire.Landed:
        """The next piece. Pieces that landed before a failure still come, in order."""
        while not self._landed:
            await self._wait()
        return self._landed.popleft()

    def consumed(self, position: int) -> None:
        """The client has every byte below `position`."""
        if not self.closed:
            self._link.post(wire.Consumed(self.number, position))

    def close(self) -> None:
        """No more is wanted. May be called twice."""
        if not self.closed:
            self.closed = True
            self._link.forget(self)
            self._link.post(wire.CloseRead(self.number))

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self.closed:
            raise Bug("a closed read was waited for")
        assert self._waiter is None, "two wait for one read"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def stands(self) -> bool:
        """Whether the engine that was asked is still there, and so keeps all that it announced, and withdrew
        nothing."""
        return not self._withdrawn and self._link.is_current(self._source) and not self._source.hung_up

    @property
    def waits(self) -> bool:
        """Whether somebody waits for the next message."""
        return self._waiter is not None

    @property
    def holds_memory(self) -> bool:
        """Whether bytes landed that are in the engine's memory until they are consumed, since no disk takes them."""
        return any(landed.path.startswith("/proc/") for landed in self._landed)

    def take(self, message: wire.Opened | wire.Landed | wire.Withdrawn | ForebayError) -> None:
        self.taken += 1
        if isinstance(message, wire.Opened):
            self._opened = message
        elif isinstance(message, wire.Landed):
            self._landed.append(message)
        elif isinstance(message, wire.Withdrawn):
            self._landed.clear()
            self._withdrawn, self._error = True, Unavailable("the bytes turned out to be wrong: read again")
        else:
            self._error = message
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Wire(asyncio.Protocol):
    """The bytes of one connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._frames = wire.Frames()
        self._outgoing: list[bytes] = []
        self._watch = select.poll()
        self._watched = -1  # our own descriptor of the socket: the transport's may be another's by the time we look

    def send(self, message: wire.Message) -> None:
        """Send at the end of this turn of the loop, with the turn's other messages."""
        if not self._outgoing:
            self._link.loop.call_soon(self.flush)
        self._outgoing.append(wire.encode(message))

    def flush(self) -> None:
        """Send the gathered messages now."""
        outgoing, self._outgoing = self._outgoing, []
        if outgoing:
            self.transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    @property
    def hung_up(self) -> bool:
        """Whether the other side is gone, noticed or not."""
        return self._watched < 0 or bool(self._watch.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._watched = os.dup(transport.get_extra_info("socket").fileno())
        self._watch.register(self._watched, select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._link.take(self, message)
        except Exception:
            log.exception("the engine sent what cannot be understood; connecting again")
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._outgoing.clear()
        os.close(self._watched)
        self._watched = -1
        self._link.lost(self)


class Link:
    """See the module's header. `welcome` and `dropped` take the engine's messages; `report` returns the counters."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        front: int,
        *,
        welcome: Callable[[wire.Welcome], None],
        dropped: Callable[[list[int]], None],
        report: Callable[[], Snapshot],
        grace_s: float = GRACE_S,
        hung_after_s: float = 0.0,
        clock: Clock = system_clock,
    ) -> None:
        self.path = os.fspath(path)
        self.front = front
        self.touched: dict[tuple[int, int, int], None] = {}  # object id, first block, end block
        self.touched_whole: dict[int, None] = {}  # objects of one block, which need no more than their id
        self.connects = 0
        self._welcome = welcome
        self._dropped = dropped
        self._report = report
        self._grace_s = grace_s
        self._pulse = Pulse(hung_after_s)
        self._beats = 0  # of this connection's engine
        self._engine_pid = 0
        self._acts_until_s = 0.0
        self._hangs = False
        self._clock = clock
        self._wire: _Wire | None = None  # set once welcomed
        self._number = 0
        self._reads: dict[int, Read] = {}
        self._calls: dict[int, tuple[str, Answered]] = {}
        self.loop: asyncio.AbstractEventLoop
        self._ready = asyncio.Event()
        self._broken = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def connected(self) -> bool:
        """Whether the engine has welcomed us and is there."""
        return self._wire is not None

    def is_current(self, source: _Wire) -> bool:
        """Whether this is the current connection."""
        return self._wire is source

    def acts(self) -> bool:
        """Whether the node may answer for what others would take over, if it were not heard of."""
        return boottime.monotonic_s() < self._acts_until_s

    @property
    def trouble(self) -> str:
        """What is wrong with the engine; "" when it is there."""
        if self._wire is not None:
            return ""
        if self._hangs:
            return f"the engine hangs: it gave no sign of life for {self._pulse.deadline_s:g} s"
        return "the engine does not answer"

    @property
    def waiting(self) -> int:
        """Reads that are not closed."""
        return len(self._reads)

    def start(self) -> None:
        """Begin to connect; `wait` says when it is done."""
        self.loop = asyncio.get_running_loop()
        self._connecting = self.loop.create_task(self._keep_connected())
        self._flush_later()
        self._look()

    async def stop(self) -> None:
        """Fail everything that waits, and disconnect. May be called twice."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self.flush()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
            self._connecting = None
        current = self._wire
        if current is not None:
            self.lost(current)
            current.flush()
            current.transport.close()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return once connected; `Unavailable` after `timeout_s` (default: the grace time)."""
        if self._wire is not None:
            return
        try:
            async with asyncio.timeout(self._grace_s if timeout_s is None else timeout_s):
                while self._wire is None:  # it may be lost again before we run
                    await self._ready.wait()
        except TimeoutError:
            raise _gone() from None

    # --- asking ------------------------------------------------------------------------------------------------------
    async def open_read(
        self,
        bucket: str,
        key: str,
        range: RangeSpec | None = None,
        *,
        version: str = "",
        head_only: bool = False,
        revalidate: bool = False,
        may_relay: bool = False,
    ) -> Read:
        """Start a read. `Unavailable` if there is no engine within the grace time."""
        read = Read(self, bucket, key)
        await self._begin(read, range, version, head_only=head_only, revalidate=revalidate, may_relay=may_relay)
        return read

    async def open_again(
        self, read: Read, range: RangeSpec, *, version: str, may_relay: bool = False, silent: str = ""
    ) -> None:
        """Close `read`, and ask the present engine for another range of its object. `silent`: the node that did not
        answer when it was to be relayed from there."""
        read.close()
        await self._begin(read, range, version, may_relay=may_relay, silent=silent)

    async def _begin(
        self,
        read: Read,
        range: RangeSpec | None,
        version: str,
        *,
        head_only: bool = False,
        revalidate: bool = False,
        may_relay: bool = False,
        silent: str = "",
    ) -> None:
        await self.wait()
        assert self._wire is not None
        self._number += 1
        read.begin(self._number, self._wire)
        self._reads[read.number] = read
        asked = (read.bucket, read.key, range, version, head_only, revalidate, from_node.get(), may_relay, silent)
        self.post(wire.OpenRead(read.number, *asked, for_client=for_client.get()))

    async def call(self, verb: str, arguments: Any = None) -> Any:
        """Ask the engine and return its answer, typed as core/messages/calls.py says. Raises the engine's error.
        `Unavailable` if there is no engine, or it goes away (it may have performed the call all the same)."""
        body = calls.encode_call(verb, calls.Nothing() if arguments is None else arguments)
        await self.wait()
        future: asyncio.Future[Any] = self.loop.create_future()
        number = self._call(verb, body, functools.partial(resolve, future))
        try:
            return await future
        finally:
            self._calls.pop(number, None)

    def begin(self, verb: str, arguments: Any, answered: Answered) -> bool:
        """As `call`, without waiting: `answered` is called once, later, with the answer or with the `ForebayError`.
        Returns False, with nothing done, while there is no engine."""
        if self._wire is None:
            return False
        self._call(verb, calls.encode_call(verb, arguments), answered)
        return True

    def _call(self, verb: str, body: bytes, answered: Answered) -> int:
        self._number += 1
        self._calls[self._number] = (verb, answered)
        self.post(wire.Call(self._number, verb, body, from_node.get()))
        return self._number

    def grown(self, put: int, upto: int) -> None:
        """The file of the put that `put_open` numbered `put` holds every byte below `upto`."""
        self.post(wire.Grown(put, upto))

    def gave_up(self, put: int) -> None:
        """The body of put `put` will not be completed. Not needed after a `put` with that number."""
        self.post(wire.GaveUp(put))

    def suspect(self, bucket: str, key: str, object_id: int, reason: str) -> None:
        """The record lists bytes that are not there."""
        self.post(wire.Suspect(bucket, key, object_id, reason))

    def touch(self, object_id: int, first_block: int, end_block: int) -> None:
        """Remember a hit for the next report."""
        touched = self.touched
        touched[object_id, first_block, end_block] = None
        if len(touched) >= limits.TOUCHES_MAX:
            self.flush()

    def post(self, message: wire.Message) -> None:
        """Send if connected; what cannot be sent concerns a connection that is gone, and so do those who wait."""
        if self._wire is not None:
            self._wire.send(message)

    # --- the connection ----------------------------------------------------------------------------------------------
    def take(self, source: _Wire, message: wire.Message) -> None:
        """One message from the engine."""
        if isinstance(message, wire.Answer):
            asked = self._calls.pop(message.call, None)
            if asked is not None:
                verb, answered = asked
                _tell(answered, _answer_of(verb, message.body))
        elif isinstance(message, wire.Opened | wire.Landed | wire.Withdrawn):
            read = self._reads.get(message.read)
            if read is not None:
                read.take(message)
        elif isinstance(message, wire.Failed):
            self._take_failed(message)
        elif isinstance(message, wire.Dropped):
            self._dropped(message.object_ids)
        elif isinstance(message, wire.Report):
            self.post(wire.Reported(message.report, self.front, encode_snapshot(self._report())))
        elif isinstance(message, wire.Beat):
            self._beats += 1
        elif isinstance(message, wire.Acts):
            self._acts_until_s = message.until_s
        elif isinstance(message, wire.Welcome):
            self._take_welcome(source, message)
        else:
            raise Bug(f"the engine sent {type(message).__name__}, which only a front sends")

    def _take_failed(self, message: wire.Failed) -> None:
        error = from_wire(message.error)
        read = self._reads.get(message.number)
        if read is not None:
            read.take(error)
        asked = self._calls.pop(message.number, None)
        if asked is not None:
            _tell(asked[1], error)

    def _take_welcome(self, source: _Wire, message: wire.Welcome) -> None:
        if message.wire_version != wire.WIRE_VERSION:
            raise Bug(
                f"the engine speaks version {message.wire_version} and this front {wire.WIRE_VERSION}: restart the node"
            )
        self._welcome(message)
        if self._wire is None:
            self.connects += 1
            self._wire = source
            self._pulse, self._beats, self._hangs = Pulse(self._pulse.deadline_s), 1, False  # it lives
            self._engine_pid = message.pid
            self._ready.set()

    def lost(self, source: _Wire) -> None:
        """A connection ended. If it was the current one, everybody who waits gets an error now."""
        self._broken.set()
        if self._wire is not source:
            return
        self._wire = None
        self._acts_until_s = 0.0
        self._ready.clear()
        error = _gone()
        for read in list(self._reads.values()):
            read.take(error)
        self._reads.clear()
        asked, self._calls = self._calls, {}
        for _, answered in asked.values():
            _tell(answered, error)
        if not self._stopped:
            log.warning("the engine is gone: hits are served, misses wait for it")

    def forget(self, read: Read) -> None:
        self._reads.pop(read.number, None)

    def _look(self) -> None:
        """Cut the connection of an engine that hangs, so that nobody waits for it any longer."""
        current = self._wire
        active_s = machine.active_s(self._engine_pid)
        if current is not None and self._pulse.look(self._clock.monotonic_s(), self._beats, active_s):
            self._hangs = True
            log.error("the engine hangs: it gave no sign of life for %g s", self._pulse.deadline_s)
            current.transport.abort()
        self._looking = self.loop.call_later(interval_s(self._pulse.deadline_s), self._look)

    async def _keep_connected(self) -> None:
        backoff_s = BACKOFF_MIN_S
        loop = asyncio.get_running_loop()
        while True:
            self._broken.clear()
            protocol: _Wire | None = None
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, protocol = await loop.create_unix_connection(lambda: _Wire(self), self.path)
                    protocol.transport.write(wire.encode(wire.Hello(self.front, os.getpid())))
                    await self._either_ready_or_broken()
            except (OSError, TimeoutError):
                if protocol is not None:
                    protocol.transport.abort()
            if self._wire is protocol and protocol is not None:
                backoff_s = BACKOFF_MIN_S
                await self._broken.wait()
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    async def _either_ready_or_broken(self) -> None:
        waits = [asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self._broken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # --- hits --------------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Report the hits gathered so far."""
        touched, whole, current = self.touched, self.touched_whole, self._wire
        if not touched and not whole:
            return
        if current is not None and current.transport.get_write_buffer_size() < BUFFERED_BYTES_MAX:
            hits = [number for hit in touched for number in hit]
            hits += [number for object_id in whole for number in (object_id, 0, 1)]
            self.post(wire.Touched(hits))
        touched.clear()
        whole.clear()

    def _flush_later(self) -> None:
        self.flush()
        self._timer = asyncio.get_running_loop().call_later(TOUCH_INTERVAL_S, self._flush_later)


def _answer_of(verb: str, body: bytes) -> Any:
    try:
        return calls.decode_answer(verb, body)
    except Exception as error:
        log.exception("the engine's answer to %s cannot be understood", verb)
        return Bug(f"the engine's answer to {verb} cannot be understood ({error}): restart the node")


def _tell(answered: Answered, answer: Any) -> None:
    try:
        answered(answer)
    except Exception:
        log.exception("who asked the engine broke at its answer")


def _gone() -> Unavailable:
    return Unavailable("the node's engine does not answer: try again in a moment", retry_after_s=1.0)
