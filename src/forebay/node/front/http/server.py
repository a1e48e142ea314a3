"""The HTTP server of one front: a listening socket, its connections, and one check a second of all of them.

Theory. Header lines that are the same for every response (date, server name) and the coarse time that every connection
needs are made once a second here. The same tick checks every connection's deadline: 4,096 of them take about a
millisecond, while a timer for each would be set and cancelled with every request.

With `tls`, every connection speaks TLS (`tls_connection.py`), and the tick follows the certificate's files. With
`audit`, every connection tells it of its requests.

Invariants. (1) `connections` holds exactly those that are not closed. (2) After `stop` returns there are none.
"""

from __future__ import annotations

import asyncio
import email.utils
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from forebay.core import limits
from forebay.core.errors import Busy, Invalid
from forebay.node.front.http.admission import Admission
from forebay.node.front.http.connection import Connection
from forebay.node.front.http.counts import FrontCounts
from forebay.node.front.http.requests import STATUS_LINES, Handler
from forebay.node.front.objects.fast_lane import Lane
from forebay.ports import clock as clocks
from forebay.ports import threads

if TYPE_CHECKING:
    from forebay.node.front.audit.audit import Audit
    from forebay.node.tls import TlsFiles

# Said with every answer. What is stored here may be a page, and is shown at the node's own address: without these a
# browser would run it, and let it ask the node whatever its user may.
NO_PAGE = b"Server: forebay\r\nX-Content-Type-Options: nosniff\r\nContent-Security-Policy: sandbox\r\n"
WORKERS = 16  # threads that store bodies; each disk is written to by a few of its own
PAUSE_S = 1.0  # a tick so late says that this process did not run: that is not the clients' delay
BACKLOG = 1024  # connections the kernel holds for us; a data loader opens hundreds at once


class Timeouts(NamedTuple):
    """Seconds. Settable for tests; `core/limits.py` has the reasons."""

    header_s: float = limits.HEADER_TIMEOUT_S
    idle_s: float = limits.IDLE_TIMEOUT_S
    stall_s: float = limits.STALL_TIMEOUT_S
    tick_s: float = 1.0


class Server:
    """`native` answers paths that begin with `/-/`, `s3` all others. `s3` also words what could not be parsed."""

    def __init__(
        self,
        s3: Handler,
        native: Handler,
        lane: Lane,
        *,
        counts: FrontCounts | None = None,
        clock: clocks.Clock = clocks.system,
        timeouts: Timeouts = Timeouts(),
        admission: Admission | None = None,
        tls: TlsFiles | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.s3 = s3
        self.native = native
        self.lane = lane
        self.default_handler = s3
        self.counts = counts or FrontCounts()
        self.admission = admission or Admission(self.counts)
        self.clock = clock
        self.timeouts = timeouts
        self.connections: set[Connection] = set()
        self.draining = False
        self.workers = threads.pool(WORKERS, "body")  # they store long bodies
        self.now_s = clock.monotonic_s()
        self.standing = b""
        self.loop: asyncio.AbstractEventLoop
        self._tls = tls
        self._audit = audit
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event

    async def start(self, listener: socket.socket) -> None:
        """Serve connections to `listener`, a bound socket, which now belongs to the server."""
        self.loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._tick()
        self._listener = await self.loop.create_server(self._connection(), sock=listener, backlog=BACKLOG)

    def _connection(self) -> Callable[[], Connection]:
        tls = self._tls
        if self._audit is not None:
            return self._audit.connections(self, tls)
        if tls is None:
            return lambda: Connection(self)
        from forebay.node.front.http.tls_connection import TlsConnection

        return lambda: TlsConnection(self, tls.context)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop listening, let answers under way finish for `grace_s`, then cut what is left. Twice is fine."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.draining = True
        for connection in list(self.connections):
            connection.drain()
        self._set_empty()
        if self.connections:
            try:
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
            except TimeoutError:
                for connection in list(self.connections):
                    connection.cut()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.workers.shutdown(wait=False)

    def opened(self, connection: Connection) -> None:
        """Count a new connection; `Busy` if it is one too many (or we are stopping)."""
        if self.draining:
            self.counts.connections_refused += 1
            raise Busy("this front is stopping: try again", retry_after_s=1.0)
        self.admission.enter(connection.peer)
        self.connections.add(connection)
        self.counts.connections += 1
        self.counts.connections_total += 1

    def closed(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self.admission.leave(connection.peer)
            self.counts.connections -= 1
            if self.draining:
                self._set_empty()

    def _set_empty(self) -> None:
        if not self.connections:
            self._empty.set()

    def _tick(self) -> None:
        now_s = self.clock.monotonic_s()
        paused_s = now_s - self.now_s - self.timeouts.tick_s
        self.now_s = now_s
        date = email.utils.formatdate(self.clock.wall_s(), usegmt=True)
        self.standing = b"Date: %s\r\n%b" % (date.encode(), NO_PAGE)
        self.lane.ok = STATUS_LINES[200] + self.standing
        for connection in list(self.connections):
            if paused_s > PAUSE_S:
                connection.allow(paused_s)
            connection.check_deadline(now_s)
        self.counts.unproved_bytes = self.admission.held_bytes
        self.admission.say(now_s)
        if self._tls is not None:
            self._tls.follow()
        self._timer = self.loop.call_later(self.timeouts.tick_s, self._tick)


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket for `Server.start`. `Invalid` if the address cannot be had: it says what to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setblocking(False)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Invalid(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --listen or stop what uses it"
        ) from None
    return listener
