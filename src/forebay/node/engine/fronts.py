"""The fronts as the engine sees them: connections on the engine's socket, with their reads and calls.

Theory. Each front has one connection, which carries everything (`core/messages/wire.py`). A front that goes away takes
its reads and calls with it. Messages for all (`Welcome`, `Dropped`) go to each front. A `Report` asks all fronts, and
those that do not answer within REPORT_TIMEOUT_S are left out. A front takes messages in their order, so one that
reported acts on all that it was told before: a change of a bucket is acknowledged then (`heard`).

A front that does not read its socket would fill the engine's memory: above BUFFERED_BYTES_MAX its connection is cut.

What a front was told stays true while it sees the connection (`wire.Landed`). So its reads close when the socket has
closed, and not a moment sooner.

Invariants. (1) A read number of a front is open at most once. (2) When a connection is lost, all its reads are closed
and the bodies that its front was receiving are given up. (3) No read is closed for its front while the socket is open.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from forebay.core import limits
from forebay.core.errors import Bug, ErrorOnWire, ForebayError
from forebay.core.machines import pulse
from forebay.core.messages import wire
from forebay.core.messages.calls import PutCall, PutOpened, Written, decode_call, encode_answer
from forebay.core.metrics import Snapshot, decode_snapshot
from forebay.core.record import Record
from forebay.node.engine.read.one_read import Ask, Out, Read
from forebay.node.outcomes import for_client, from_node
from forebay.node.store.disk.volume import of_broken

log = logging.getLogger("forebay.fronts")

REPORT_TIMEOUT_S = 1.0
HEARD_TIMEOUT_S = 10.0  # busy cores: a front that answers nobody for longer is as good as gone
BUFFERED_BYTES_MAX = 64 * limits.MIB


class Reads(Protocol):
    """Opens reads (`node/engine/read/cold.py`)."""

    def open(self, ask: Ask, out: Out) -> Read: ...

    def silent(self, node: str) -> None: ...

    def suspect(self, bucket: str, key: str, object_id: int, reason: str) -> None: ...


class Puts(Protocol):
    """Follows bodies that fronts receive (`node/engine/write/through_streams.py`)."""

    def grown(self, number: int, upto: int) -> None: ...

    def gave_up(self, number: int) -> None: ...


class FrontSeen(NamedTuple):
    front: int
    pid: int


class _Answers:
    """Where one read's answers go."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number

    def opened(
        self, record: Record, start: int, end: int, hit: bool, body: bytes | None, relay: wire.Relay | None = None
    ) -> None:
        self._connection.post(wire.Opened(self._number, record, start, end, hit, body, relay))

    def landed(self, start: int, end: int, path: str, offset: int, body: bytes | None) -> None:
        self._connection.post(wire.Landed(self._number, start, end, path, offset, body))

    def finished(self) -> None:
        pass  # the front knows the range, so it knows the end

    def failed(self, error: ErrorOnWire) -> None:
        self._connection.read_failed(self._number, error)

    def withdrawn(self) -> None:
        self._connection.post(wire.Withdrawn(self._number))


class Connection(asyncio.Protocol):
    """One front."""

    def __init__(self, fronts: Fronts) -> None:
        self._fronts = fronts
        self._frames = wire.Frames()
        self._reads: dict[int, Read] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._puts: set[int] = set()  # opened, and neither completed nor given up
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self.hello: wire.Hello | None = None

    # --- the socket --------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the same methods, but is no subclass
        self._fronts.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except Exception:
            log.exception("a front sent what cannot be understood; its connection is closed")
            self.cut()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fronts.connections.discard(self)
        if self.hello is not None:
            log.info("front %d (process %d) is gone", self.hello.front, self.hello.pid)
        asyncio.get_running_loop().call_soon(self._close_reads)  # when the transport has closed the socket
        for call in self._calls:
            call.cancel()
        puts, self._puts = self._puts, set()
        for put in puts:
            self._fronts.puts.gave_up(put)

    def _close_reads(self) -> None:
        reads, self._reads = self._reads, {}
        for read in reads.values():
            read.close()

    def post(self, message: wire.Message) -> None:
        """Send, if the front is there. Messages of one turn of the loop go out together."""
        if self._transport is None:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._send)
        self._outgoing.append(wire.encode(message))

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        transport = self._transport
        if transport is None:
            return
        transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        if transport.get_write_buffer_size() > BUFFERED_BYTES_MAX:
            log.error("a front does not read its socket: its connection is closed")
            self.cut()

    def cut(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()

    # --- messages ----------------------------------------------------------------------------------------------------
    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Call):
            if message.verb != "put" or not self._begin_put(message):
                call = asyncio.create_task(self._call(message))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        elif isinstance(message, wire.Consumed):
            if read := self._reads.get(message.read):
                read.took(message.position)
        elif isinstance(message, wire.OpenRead):
            if message.silent:
                self._fronts.reads.silent(message.silent)
            ask = Ask(
                message.bucket,
                message.key,
                message.range,
                message.version,
                message.head_only,
                message.revalidate,
                message.may_relay,
            )
            if message.read in self._reads:
                raise Bug(f"read {message.read} is open already")
            before, relayed = from_node.set(message.from_node), for_client.set(message.for_client)
            self._reads[message.read] = self._fronts.reads.open(ask, _Answers(self, message.read))
            for_client.reset(relayed)
            from_node.reset(before)
        elif isinstance(message, wire.CloseRead):
            if read := self._reads.pop(message.read, None):
                read.close()
        elif isinstance(message, wire.Touched):
            hits = message.hits
            for at in range(0, len(hits) - 2, 3):
                self._fronts.touched(hits[at], hits[at + 1], hits[at + 2])
        elif isinstance(message, wire.Grown):
            if message.put in self._puts:
                self._fronts.puts.grown(message.put, message.upto)
        elif isinstance(message, wire.GaveUp):
            if message.put in self._puts:
                self._puts.discard(message.put)
                self._fronts.puts.gave_up(message.put)
        elif isinstance(message, wire.Suspect):
            self._fronts.reads.suspect(message.bucket, message.key, message.object_id, message.reason)
        elif isinstance(message, wire.Reported):
            self._fronts.reported(message.report, message.body)
        elif isinstance(message, wire.Hello):
            self._greet(message)
        else:
            raise Bug(f"a front sent {type(message).__name__}, which only the engine sends")

    def _greet(self, hello: wire.Hello) -> None:
        if hello.wire_version != wire.WIRE_VERSION:
            raise Bug(
                f"the front speaks version {hello.wire_version}, the engine {wire.WIRE_VERSION}: restart the node"
            )
        self.hello = hello
        log.info("front %d (process %d) is here", hello.front, hello.pid)
        self.post(self._fronts.welcome())

    def read_failed(self, number: int, error: ErrorOnWire) -> None:
        """Tell the front that nothing more will come. It closes the read when it has taken what it was told of."""
        self.post(wire.Failed(number, error))

    def _begin_put(self, message: wire.Call) -> bool:
        """Begin a put that waits only for its commit. Returns False, with nothing done, for any other."""
        try:
            arguments: PutCall = decode_call("put", message.body)
        except ForebayError:
            return False
        if arguments.put:
            return False
        return self._fronts.begin(arguments, functools.partial(self._put, message.call))

    def _put(self, call: int, outcome: Written | ForebayError) -> None:
        if isinstance(outcome, ForebayError):
            self.post(wire.Failed(call, outcome.to_wire()))
        else:
            self.post(wire.Answer(call, encode_answer(outcome)))

    async def _call(self, message: wire.Call) -> None:
        from_node.set(message.from_node)
        try:
            arguments = decode_call(message.verb, message.body)
            if isinstance(arguments, PutCall) and arguments.put not in self._puts:
                arguments = msgspec.structs.replace(arguments, put=0)  # it was opened with an earlier engine
            elif isinstance(arguments, PutCall):
                self._puts.discard(arguments.put)
            answer = await self._fronts.answer(message.verb, arguments)
            if isinstance(answer, PutOpened) and answer.put:
                self._opened(answer.put)
            self.post(wire.Answer(message.call, encode_answer(answer)))
        except ForebayError as error:
            self.post(wire.Failed(message.call, error.to_wire()))
        except Exception as error:
            log.exception("the call %s broke", message.verb)
            self.post(wire.Failed(message.call, of_broken(error, message.verb).to_wire()))

    def _opened(self, put: int) -> None:
        if self._transport is None:
            self._fronts.puts.gave_up(put)  # the front went away meanwhile
        else:
            self._puts.add(put)


class Fronts:
    """All connections. `welcome` makes the greeting. `answer` serves a call. `begin` begins a put and calls its
    callback with the outcome, or returns False. `touched` hears of hits."""

    def __init__(
        self,
        reads: Reads,
        puts: Puts,
        *,
        welcome: Callable[[], wire.Welcome],
        answer: Callable[[str, Any], Awaitable[Any]],
        begin: Callable[[PutCall, Callable[[Written | ForebayError], None]], bool],
        touched: Callable[[int, int, int], None],
        beat_s: float = pulse.INTERVAL_MAX_S,
    ) -> None:
        self.connections: set[Connection] = set()
        self.reads = reads
        self.puts = puts
        self.welcome = welcome
        self.answer = answer
        self.begin = begin
        self.touched = touched
        self._beat_s = beat_s
        self._beating: asyncio.TimerHandle | None = None
        self._report = 0
        self._reports: dict[int, tuple[asyncio.Event, list[Snapshot], int]] = {}

    def present(self) -> list[FrontSeen]:
        """The fronts that have said hello, by number."""
        return sorted(FrontSeen(c.hello.front, c.hello.pid) for c in self.connections if c.hello is not None)

    def greet_again(self) -> None:
        """Send `Welcome` again: something in it changed."""
        message = self.welcome()
        for connection in list(self.connections):
            if connection.hello is not None:
                connection.post(message)

    def dropped(self, object_ids: list[int]) -> None:
        """Close cached files of these objects."""
        for connection in list(self.connections):
            connection.post(wire.Dropped(object_ids))

    def acts(self, until_s: float) -> None:
        """Serve hits of buckets that are kept on two nodes until then."""
        for connection in list(self.connections):
            connection.post(wire.Acts(until_s))

    async def snapshots(self) -> list[Snapshot]:
        """What each front counted. Fronts that do not answer in time are left out."""
        return await self._ask_all(REPORT_TIMEOUT_S)

    async def heard(self) -> bool:
        """Return when every front acts on all that it was told before, or False: one that does not answer in time
        hangs."""
        asked = sum(connection.hello is not None for connection in self.connections)
        return len(await self._ask_all(HEARD_TIMEOUT_S)) >= asked

    async def _ask_all(self, timeout_s: float) -> list[Snapshot]:
        asked = [connection for connection in self.connections if connection.hello is not None]
        if not asked:
            return []
        self._report += 1
        number = self._report
        done = asyncio.Event()
        answers: list[Snapshot] = []
        self._reports[number] = (done, answers, len(asked))
        try:
            for connection in asked:
                connection.post(wire.Report(number))
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            log.warning("%d of %d fronts did not report in time", len(asked) - len(answers), len(asked))
        finally:
            del self._reports[number]
        return answers

    def reported(self, number: int, body: bytes) -> None:
        """A front answered a `Report`."""
        waiting = self._reports.get(number)
        if waiting is not None:
            done, answers, count = waiting
            answers.append(decode_snapshot(body))
            if len(answers) >= count:
                done.set()

    def beat(self) -> None:
        """Send a sign of life to all fronts, regularly until `aclose`."""
        for connection in list(self.connections):
            if connection.hello is not None:
                connection.post(wire.Beat())
        self._beating = asyncio.get_running_loop().call_later(self._beat_s, self.beat)

    async def aclose(self) -> None:
        """Cut every connection; returns when their reads are closed."""
        if self._beating is not None:
            self._beating.cancel()
        while self.connections:
            for connection in list(self.connections):
                connection.cut()
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the last one's reads
