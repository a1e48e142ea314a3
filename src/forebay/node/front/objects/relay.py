"""Connections of a front to other nodes, from which it relays what they own.

Theory. The engine says whom to ask, and with which signed request (`node/engine/read/relays.py`). Here it is sent, and
the head of the answer must say that exactly the bytes of that version follow. Anything else counts as an answer that
was not given: the front asks its engine for the bytes then. Only silence is worth a word to the engine, so that nobody
waits for that node again soon.

A connection carries one request at a time, and goes back to a small pool after a body that was taken whole. One from
the pool that turns out closed is replaced once: the other node closes what idles.

Invariants. (1) A body is handed on only after status, range, length and ETag were compared with what was asked. (2) A
connection whose body was not taken to its end is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable

from forebay.core import limits
from forebay.core.errors import Corrupt
from forebay.core.messages.http1 import parse_head
from forebay.core.messages.wire import Relay
from forebay.node.front.http.requests import Source
from forebay.node.front.http.sender import SOURCE_PATIENCE_S, Pipe

CONNECT_TIMEOUT_S = 2.0  # another node of the cluster: a SYN that is lost once is sent again within it
UNDER_WAY_MAX = 64  # pipes hold 1 MiB each of what slow clients have not taken; Linux lets a user have as many of them
IDLE_MAX = 32  # connections kept
_SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_HEAD_BYTES = 4096  # one read: a whole head as a rule, and little of the body, which Python would have to copy
Dial = Callable[[str, int], Awaitable[socket.socket]]


class Silent(Exception):
    """The node did not answer."""


class Refused(Exception):
    """The node answered something else than the bytes asked for."""


async def dial(host: str, port: int) -> socket.socket:
    """A connection that does not block. OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


class Relayed:
    """A body on its way from another node. `end` it once it was taken whole, `close` it in any case."""

    def __init__(self, sources: Sources, place: tuple[str, int], node: str, source: Source, keeps: bool) -> None:
        self.node, self.source = node, source
        self._sources, self._place, self._keeps = sources, place, keeps
        self._open = True

    def end(self) -> None:
        """All of the body was taken."""
        if self._open and self._keeps:
            self._open = False
            self._sources.give_back(self._place, self.source)
        self.close()

    def close(self) -> None:
        """May be called twice."""
        if self._open:
            self._open = False
            self._sources.under_way -= 1
            self.source.socket.close()
            self.source.pipe.close()


class Sources:
    """See the module's header. One for each front."""

    def __init__(self, dial: Dial = dial) -> None:
        self.under_way = 0
        self._dial = dial
        self._idle: defaultdict[tuple[str, int], list[tuple[socket.socket, Pipe]]] = defaultdict(list)
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether another body may be relayed."""
        return self.under_way < UNDER_WAY_MAX

    async def open(self, relay: Relay, start: int) -> Relayed:
        """The body of `relay`, which begins at `start` of the object. `Silent`, `Refused`."""
        if not self.has_room:
            raise Refused("others came first")  # since the engine was asked
        self.under_way += 1
        try:
            return await self._open(relay, start)
        except BaseException:
            self.under_way -= 1
            raise

    async def _open(self, relay: Relay, start: int) -> Relayed:
        place = (relay.host, relay.port)
        while True:
            connection, pipe, is_new = await self._connect(place)
            try:
                async with asyncio.timeout(SOURCE_PATIENCE_S):
                    first, keeps = await _ask(connection, relay, start)
                return Relayed(self, place, relay.node, Source(connection, pipe, first), keeps)
            except (TimeoutError, OSError, EOFError) as error:
                connection.close()
                pipe.close()
                if is_new or isinstance(error, TimeoutError):
                    raise Silent(f"node {relay.node} does not answer ({error!r})") from error
            except BaseException:
                connection.close()
                pipe.close()
                raise

    async def _connect(self, place: tuple[str, int]) -> tuple[socket.socket, Pipe, bool]:
        """A connection, its pipe, and whether it is new. `Silent`."""
        idle = self._idle[place]
        while idle:
            connection, pipe = idle.pop()
            if _is_quiet(connection):
                return connection, pipe, False
            connection.close()
            pipe.close()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._dial(*place)
        except (OSError, TimeoutError) as error:
            if error.errno in _SHORT:
                raise Refused(f"descriptors are short: {error}") from error  # no fault of that node
            raise Silent(f"{place[0]}:{place[1]} cannot be reached ({error!r})") from error
        try:
            return connection, Pipe(), True
        except OSError as error:
            connection.close()
            raise Refused(f"descriptors are short: {error}") from error

    def give_back(self, place: tuple[str, int], source: Source) -> None:
        """Keep the connection, whose last body was taken whole."""
        self.under_way -= 1
        if self._idle_count >= IDLE_MAX:
            self._drop_closed()
        if self._is_closed or self._idle_count >= IDLE_MAX:
            source.socket.close()
            source.pipe.close()
        else:
            self._idle[place].append((source.socket, source.pipe))

    @property
    def _idle_count(self) -> int:
        return sum(map(len, self._idle.values()))

    def _drop_closed(self) -> None:
        """Keep no connection that the other node closed: it may have left the cluster."""
        before, self._idle = self._idle, defaultdict(list)
        for place, idle in before.items():
            for connection, pipe in idle:
                if _is_quiet(connection):
                    self._idle[place].append((connection, pipe))
                else:
                    connection.close()
                    pipe.close()

    def close(self) -> None:
        """Keep no connection from now on."""
        self._is_closed = True
        for idle in self._idle.values():
            for connection, pipe in idle:
                connection.close()
                pipe.close()
        self._idle.clear()


async def _ask(connection: socket.socket, relay: Relay, start: int) -> tuple[bytes, bool]:
    """Send the request and read the answer's head; what came of the body with it, and whether the connection can be
    used again. `Refused`, EOFError, OSError."""
    loop = asyncio.get_running_loop()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # a head is short
    await loop.sock_sendall(connection, relay.request)
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > limits.HEADER_BYTES_MAX:
            raise Refused("the head of the answer does not end")
        more = await loop.sock_recv(connection, _HEAD_BYTES)
        if not more:
            raise EOFError("the connection was closed")
        data += more
    with contextlib.suppress(Corrupt):
        head, first = parse_head(data[: end + 2], "GET"), data[end + 4 :]
        span, _, _ = head.headers.get("content-range", "").partition("/")
        size_bytes = relay.end - start
        if (
            head.status == 206
            and head.length == size_bytes
            and span == f"bytes {start}-{relay.end - 1}"
            and head.headers.get("etag", "").strip('"') == relay.etag
            and len(first) <= size_bytes
        ):
            return first, head.keep_alive
    raise Refused("the node does not give these bytes of this version")


def _is_quiet(connection: socket.socket) -> bool:
    """Whether an idle connection is open and silent: a byte that nobody asked for would begin the next answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # or fewer bytes than that would not show
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)
