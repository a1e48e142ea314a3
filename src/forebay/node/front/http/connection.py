"""One client connection: reads requests and answers them, one at a time and in order.

Theory. A connection is in one *phase*, and only these arrows exist:

    IDLE -> HEAD      some of a request is here
    IDLE, HEAD -> BODY  the head announced a body that a handler takes
    IDLE, HEAD, BODY -> BUSY  the handler has the request
    BUSY -> IDLE      answered, and the connection goes on with what was pipelined meanwhile
    any -> LINGER     answered for the last time: our side is shut, and what still arrives is read and dropped, so that
                      no reset destroys the answer; then CLOSED
    any -> CLOSED

While BUSY, an answer is at a *stage*: NONE (anything may still be answered, an error too), WHOLE (one answer is being
sent), PARTS (a body in pieces: only cutting the connection can report an error). A hit goes from `buffer_updated` to
the socket without an unneeded await, task or allocation. All connections read into one buffer: the loop fills it and
calls `buffer_updated` before it reads for anybody else.

`check_deadline` checks all connections once a second: a timer for each would cost more than the request.

Invariants. (1) Every request is answered once, or its connection is cut. (2) When CLOSED, no descriptor, lease, task or
body sink is left. (3) At most PIPELINE_MAX requests or one read buffer of bytes wait behind the one being answered.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

from forebay.core import limits
from forebay.core.errors import Bug, Busy, ForebayError, Invalid
from forebay.core.metrics import Histogram
from forebay.node.front.http import parser
from forebay.node.front.http.counts import VERB_AT, VERB_OTHER
from forebay.node.front.http.long_bodies import PIECE_BYTES, Receiver
from forebay.node.front.http.parts import BODY, BUSY, CLOSED, HEAD, IDLE, LINGER, NONE, PARTS, WHOLE, Parts
from forebay.node.front.http.requests import (
    STATUS_LINES,
    BodySink,
    BoundedBody,
    File,
    Handler,
    Request,
    Waiting,
    status_of,
    too_large,
)
from forebay.node.front.http.sender import ClientGone
from forebay.node.front.objects.fast_lane import TARGET_BYTES as LANE_BYTES

if TYPE_CHECKING:
    from forebay.node.front.http.accounts import Account
    from forebay.node.front.http.server import Server

log = logging.getLogger("forebay.http")

READ_BYTES = 64 * 1024  # one read: more than the longest head, so that a whole one is usually parsed in place
FIELDS_KEPT_BYTES_MAX = 1024  # a longer block of fields is not remembered: 4,096 connections x 32 KiB would be too much
LINGER_S = 5.0  # how long a client may take to see our end and close
BODY_PROGRESS_BYTES = 16 * 1024  # a body must bring this much within the stall timeout
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_NO_TAIL = b"\0"  # no request ends so
_buffer = memoryview(bytearray(READ_BYTES))
_NO_REQUEST = Request(b"", b"", b"", b"", {})  # until the first one

assert limits.REQUEST_LINE_BYTES_MAX + limits.HEADER_BYTES_MAX < READ_BYTES < PIECE_BYTES
assert limits.HEADER_BYTES_MAX >= FIELDS_KEPT_BYTES_MAX


class Connection(Parts, asyncio.BufferedProtocol):
    """See the module's header. It is the `Exchange` of whatever request it is answering."""

    __slots__ = (
        "_block",
        "_body_left",
        "_body_progress",
        "_chunked",
        "_eof",
        "_file",
        "_file_size",
        "_handler",
        "_held_by",
        "_in_loop",
        "_lane",
        "_latency",
        "_on_fault",
        "_paused",
        "_pending",
        "_receiver",
        "_scanned",
        "_sink",
        "_tail",
        "_task",
        "_transport",
        "_unproved",
        "_verb",
        "fields",
        "peer",
        "request",
    )

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.request = _NO_REQUEST
        self._pending = bytearray()  # read, not yet understood
        self._scanned = 0  # no end of a head before this
        self._held_by: Account | None = None  # what this connection counts for
        self._unproved = 0  # bytes held for a client that may be anybody
        self._in_loop = False
        self._paused = False
        self._block: bytes | None = None  # the last block of fields, and what it means
        self.fields = parser.Fields({})
        self._lane = server.lane
        self._tail = _NO_TAIL  # what follows the target when the remembered fields are sent and the lane admits them
        self._handler: Handler = server.default_handler
        self._verb = VERB_OTHER
        self._sink: BodySink | None = None
        self._receiver: Receiver | None = None  # of a long body
        self._body_left = 0
        self._body_progress = 0
        self._chunked: parser.Chunked | None = None
        self._task: Waiting | None = None  # what will answer: a task, or what is held
        self._file: File | None = None
        self._file_size = 0
        self._on_fault: Callable[[int], None] | None = None
        self._latency: Histogram | None = None
        self.peer = ""
        self._eof = False

    # --- the loop calls ----------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        try:
            self._open_socket(self._server.loop, transport.get_extra_info("socket").fileno())
        except OSError as error:
            log.warning("a connection was refused: %s; raise the limit of open files (ulimit -n)", error)
            self._counts.connections_refused += 1
            self._phase = CLOSED
            self._transport.abort()
            return
        try:
            self._server.opened(self)
        except Busy as error:
            self.turn_away(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer if self._receiver is None else self._receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        receiver = self._receiver
        if receiver is not None:
            receiver.took(nbytes)
            self._spend(nbytes)
            self._progress(nbytes)
            self._pause_if(receiver.full)
            return
        data = bytes(_buffer[:nbytes])
        phase = self._phase
        if phase == IDLE:
            tail = self._tail
            if data.endswith(tail) and data.startswith(b"GET /"):
                target = data[4 : -len(tail)]  # more than one request would show as characters not allowed in it
                if not target.translate(None, LANE_BYTES) and self._lane.serve(self, target):
                    return
            self._take(data)
        elif phase == BODY:
            rest = self._take_body(data)
            if rest:
                self._go_on(rest)
        elif phase == HEAD:
            self._pending += data
            self._take_pending()
        elif phase == BUSY:
            self._pending += data
            size = len(self._pending)
            roomy = self._hold(size)
            if not roomy or size >= READ_BYTES or self._pending.count(b"\r\n\r\n") >= limits.PIPELINE_MAX:
                self._paused = True
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        if self._phase == BUSY and (self._task is None or getattr(self._task, "is_brief", False)):
            self._keep = False  # the client may still read the answer that is under way
            self._eof = True
            self._pending.clear()
            return True
        self._close("client" if self._phase == BUSY else "")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._close("client" if self._phase == BUSY else "")

    # --- requests ----------------------------------------------------------------------------------------------------
    def _take_pending(self) -> None:
        """More of an unfinished head came, or a pipelined request waits."""
        if self._pending.find(b"\r\n\r\n", max(0, self._scanned - 3)) < 0:
            self._check_partial()
            return
        data = bytes(self._pending)
        self._pending.clear()
        self._hold(0)
        self._scanned = 0
        self._phase = IDLE
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Requests from `data` until it is used up or one must be waited for."""
        assert not self._in_loop
        self._in_loop = True
        while data:
            if data.startswith(b"\r\n"):  # RFC 9112 2.2: empty lines before a request are skipped
                empty = _EMPTY_LINES.match(data)
                assert empty is not None
                data = data[empty.end() :]
                continue
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._pending += data
                self._phase = HEAD
                self._since_s = self._server.now_s
                self._check_partial()
                break
            try:
                data = self._take_head(data, end)
            except ForebayError as error:
                self._refuse(error)
                break
            if self._phase != IDLE:
                if self._phase == BUSY and data:
                    self._pending += data
                break
        self._in_loop = False

    def _check_partial(self) -> None:
        """Limits on a head that is not complete."""
        pending = self._pending
        self._scanned = len(pending)
        line_end = pending.find(b"\r\n", 0, limits.REQUEST_LINE_BYTES_MAX + 2)
        if line_end < 0:
            if len(pending) > limits.REQUEST_LINE_BYTES_MAX:
                self._refuse(parser.line_too_long())
        elif len(pending) - line_end - 2 > limits.HEADER_BYTES_MAX:
            self._refuse(parser.headers_too_large())
        if self._phase == HEAD and not self._hold(len(pending)):
            self._refuse(_no_room())

    def _hold(self, size_bytes: int) -> bool:
        """Account for `size_bytes` that are kept here of a client that may be anybody. False: there is no room."""
        if size_bytes != self._unproved and not self._server.admission.hold(self.peer, size_bytes - self._unproved):
            return False
        self._unproved = size_bytes
        return True

    def _take_head(self, data: bytes, end: int) -> bytes:
        """Understand a whole head and act on it; what of `data` is left over."""
        line_end = data.find(b"\r\n")
        if line_end > limits.REQUEST_LINE_BYTES_MAX:
            raise parser.line_too_long()
        method, target, authority, http11 = parser.parse_line(data[:line_end])
        block = data[line_end + 2 : end]
        if known := block == self._block and not authority:
            fields = self.fields
        else:
            fields = parser.parse_fields(block)
            if authority:
                fields.headers[b"host"] = authority  # RFC 9112 3.2.2: the target's authority replaces the field
            elif len(block) <= FIELDS_KEPT_BYTES_MAX:
                self._block, self.fields = block, fields
                admitted = http11 and self._lane.admits(fields) and not self._server.draining
                self._tail = b" HTTP/1.1\r\n%b\r\n\r\n" % block if admitted else _NO_TAIL
        if not known or b"host" not in fields.headers:  # a remembered one was checked
            parser.check_host(fields, http11)
        keep_alive = fields.keep_alive
        self._keep = (keep_alive is not False if http11 else keep_alive is True) and not self._server.draining
        path, _, query = target.partition(b"?")
        self._verb = VERB_AT.get(method, VERB_OTHER)
        self._http11 = http11
        server = self._server
        self._handler = server.native if path.startswith(b"/-/") else server.s3
        self.request = request = Request(
            method, target, path, query, fields.headers, self.peer, False, server.clock.monotonic_s()
        )
        request.held = self._held_by
        self._mute = method == b"HEAD"
        if fields.length_bytes == 0:
            self._handle()
            return data[end + 4 :]
        return self._begin_body(fields, data[end + 4 :])

    def _begin_body(self, fields: parser.Fields, data: bytes) -> bytes:
        self._phase = BODY
        self._since_s = self._server.now_s
        self._body_progress = 0
        self._chunked = None
        if fields.length_bytes is None:
            if not self._http11:
                raise Invalid("a chunked body needs HTTP/1.1: send Content-Length", code="BadRequest")
            self._chunked = parser.Chunked()
        else:
            self._body_left = fields.length_bytes
        self._sink = self.request.sink = sink = self._handler.take_body(self.request)
        if self.request.account is not self._held_by:
            self._count_for(self.request.account)
        if isinstance(sink, BoundedBody) and self._chunked is None and self._body_left > sink.limit_bytes:
            raise too_large(sink.limit_bytes)
        if fields.expects_continue and not data and self._http11 and not self._put(b"HTTP/1.1 100 Continue\r\n\r\n"):
            # 25 bytes do not fit into an idle client's socket: it is not reading, or gone
            self._close("client")
            return b""
        if not sink.large or self._chunked is not None or self._body_left <= PIECE_BYTES:
            return self._take_body(data) if data else b""
        self._receiver = receiver = Receiver(
            sink, self._body_left, self._loop, self._server.workers, self._body_moved, self._body_failed
        )
        if data:  # what came with the head: less than a piece
            receiver.buffer()[: len(data)] = data
            receiver.took(len(data))
            self._spend(len(data))
            self._progress(len(data))
        return b""

    def _take_body(self, data: bytes) -> bytes:
        """Hand bytes of the body on; what of `data` belongs to the next request."""
        sink = self._sink
        assert sink is not None
        try:
            if self._chunked is not None:
                pieces, used = self._chunked.feed(data)
                if pieces:  # one write for all: however small a client makes them
                    sink.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                    sink.wrote()
                complete, rest = self._chunked.done, data[used:]
            else:
                piece, rest = data[: self._body_left], data[self._body_left :]
                sink.write(piece)
                sink.wrote()
                self._body_left -= len(piece)
                complete = self._body_left == 0
            self._spend(len(data) - len(rest))
            if not sink.proved and not self._hold(self._unproved + len(data)):
                raise _no_room()
            if self._unproved and (complete or sink.proved):
                self._hold(0)
            if complete:
                self._sink = None
                self.request.body = sink.finish()
        except ForebayError as error:
            self._refuse(error)
            return b""
        if complete:
            self._handle()
            return rest
        self._progress(len(data))
        return b""

    def _progress(self, size_bytes: int) -> None:
        self._body_progress += size_bytes
        if self._body_progress >= BODY_PROGRESS_BYTES:
            self._body_progress = 0
            self._since_s = self._server.now_s

    def _body_moved(self) -> None:
        """A piece of the body is stored."""
        receiver, sink = self._receiver, self._sink
        if receiver is None or sink is None:
            return
        if receiver.done:
            self._receiver = self._sink = None
            try:
                self.request.body = sink.finish()
            except ForebayError as error:
                self._refuse(error)
            else:
                self._handle()
        self._pause_if(self._receiver is not None and receiver.full)

    def _body_failed(self, error: Exception) -> None:
        if isinstance(error, ForebayError):
            self._refuse(error)
        else:
            log.error("a bug while receiving %r", self.request.path, exc_info=error)
            self._refuse(Bug(f"{type(error).__name__} while receiving: see the node's log, and please report it"))

    def _pause_if(self, wait: bool) -> None:
        """Stop or go on reading."""
        if wait and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        elif self._paused and not wait and self._phase != CLOSED:
            self._paused = False
            self._resume()

    def _resume(self) -> None:
        """Reading goes on."""
        self._transport.resume_reading()

    def _go_on(self, rest: bytes) -> None:
        """Bytes behind a body that came in several reads."""
        if self._phase == IDLE:
            self._take(rest)
        elif self._phase == BUSY:
            self._pending += rest

    def _handle(self) -> None:
        self._phase = BUSY
        self._stage = NONE
        try:
            self._handler.handle(self.request, self)
        except Exception as error:
            if self.request.sink is not None:
                self.request.sink.abort()  # nobody took what came
            if isinstance(error, ForebayError):
                self.fail(error)
            else:
                self._failed_badly(error)
        if self.request.account is not self._held_by:
            self._count_for(self.request.account)
        if self._phase == BUSY and self._stage == NONE and self._task is None:
            self.fail(Bug(f"nothing answered {self.request.method!r} {self.request.path!r}: please report it"))

    def _count_for(self, account: Account | None) -> None:
        """The last request was that account's, if it has one: the connection counts for it until it ends."""
        if account is None or self._phase == CLOSED:
            return
        if self._held_by is not None:
            self._held_by.hold(-1)
        account.hold(1)
        self._held_by = account

    def _spend(self, size_bytes: int) -> None:
        """So many bytes come from the client, or go to it."""
        account = self.request.account
        if account is not None:
            account.spent(size_bytes)

    def _refuse(self, error: ForebayError) -> None:
        """Answer what could not be read to its end; the connection ends with it, since the next request is lost."""
        if self._phase == CLOSED:
            return
        self._counts.requests_refused += 1
        self._keep = False
        self._pending.clear()
        self._hold(0)
        self._let_sink_go()
        request = self.request if self._phase == BODY else None
        if self._phase != BODY:
            self._mute, self._verb, self._http11 = False, VERB_OTHER, True
            self._handler = self._server.default_handler
        self._phase = BUSY
        self._stage = NONE
        response = self._handler.render_error(error, request)
        # What is not a request of any API yet gets HTTP's own status: S3, for one, says 400 for a timeout.
        self.respond(status_of(error) if request is None else response.status, response.head, response.body)

    def _let_sink_go(self) -> None:
        """The body that is being received will not be completed."""
        if self._receiver is not None:
            self._receiver.drop()
            self._receiver = None
        elif self._sink is not None:
            self._sink.abort()
        self._sink = None

    # --- answers (Exchange) ------------------------------------------------------------------------------------------
    def respond(self, status: int, head: bytes = b"", body: bytes = b"", size_bytes: int | None = None) -> None:
        assert self._stage == NONE, "answered twice"
        self._stage = WHOLE
        self._status = status
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        if status == 304 or status == 204:
            data = b"%b%b%b%b\r\n" % (
                line,
                self._server.standing,
                head,
                b"" if self._keep else b"Connection: close\r\n",
            )
        else:
            data = b"%b%b%bContent-Length: %d\r\n%b\r\n%b" % (
                line,
                self._server.standing,
                head,
                len(body) if size_bytes is None else size_bytes,
                b"" if self._keep and self._http11 else self._connection_line(),
                b"" if self._mute else body,
            )
        self._counts.sent_bytes += len(data)
        if self.request.account is not None:
            self.request.account.spent(len(data))
        if self._put(data):
            self._finish()

    def fail(self, error: ForebayError) -> None:
        if self._phase != BUSY:
            return
        if self._stage == NONE or (self._stage == PARTS and self._head):
            self._stage, self._head = NONE, b""
            response = self._handler.render_error(error, self.request)
            self.respond(response.status, response.head, response.body)
        else:
            log.info("cut %s while answering %r: %s", self.peer, self.request.path, error)
            self.cut()

    def _failed_badly(self, error: Exception) -> None:
        if isinstance(error, ClientGone):
            self._close("client")
            return
        log.error("a bug while answering %r", self.request.path, exc_info=error)
        self.fail(Bug(f"{type(error).__name__} while answering: see the node's log, and please report it"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._phase != BUSY:
            work.close()
            return
        assert self._task is None, "one task for each request"
        self._task = self._loop.create_task(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._task
        failure: Exception | None = None
        try:
            await work
        except Exception as error:
            failure = error
        if self._task is not task or self._phase != BUSY:
            return
        self._task = None
        if isinstance(failure, ForebayError):
            self.fail(failure)
        elif failure is not None:
            self._failed_badly(failure)
        elif self._stage == NONE:
            self.fail(Bug(f"nothing answered {self.request.path!r}: please report it"))
        elif self._stage == WHOLE:
            if not self._sending:
                self._finish()
        else:
            self._end_parts()

    def hold(self, waiting: Waiting) -> None:
        if self._phase != BUSY:
            waiting.cancel()
            return
        assert self._task is None, "one task for each request"
        self._task = waiting

    def resume(self, answer: Callable[[], None]) -> None:
        assert self._phase == BUSY, "what was held is cancelled when the client goes"
        self._task = None
        try:
            answer()
        except ForebayError as error:
            self.fail(error)
        except Exception as error:
            self._failed_badly(error)

    def send_file(
        self,
        status: int,
        head: bytes,
        file: File,
        offset: int,
        size_bytes: int,
        fault: Callable[[int], None],
        latency: Histogram | None = None,
    ) -> None:
        assert self._stage == NONE, "answered twice"
        assert size_bytes > 0, "an empty body has no file"
        assert not self._mute, "HEAD has no body"
        server = self._server
        self._stage = WHOLE
        self._status = status
        data = b"%b%b%bContent-Length: %d\r\n%b\r\n" % (
            STATUS_LINES[status],
            server.standing,
            head,
            size_bytes,
            b"" if self._keep and self._http11 else self._connection_line(),
        )
        self._counts.sent_bytes += len(data) + size_bytes
        if self.request.account is not None:
            self.request.account.spent(len(data) + size_bytes)
        self._file = file
        self._file_size = size_bytes
        self._on_fault = fault
        self._latency = latency
        if self._put(data, file.fd, offset, size_bytes):
            self._finish()

    def _end_parts(self) -> None:
        """A task ended without `end`."""
        self.fail(Bug("an answer was left unfinished: please report it"))

    def cut(self, orderly: bool = False) -> None:
        self._close("error", reset=not orderly or (self._owed is None and self.framing is None))

    # --- the fast lane (objects/fast_lane.py) ------------------------------------------------------------------------
    def answer_whole(self, data: bytes) -> bool:
        """Send a finished 200 from IDLE. True if the socket took it at once: then the request is over, and the caller
        counts it; else it goes on as any other."""
        counts = self._counts
        counts.sent_bytes += len(data)
        try:
            taken = self._send(data)
        except (BlockingIOError, InterruptedError):
            taken = 0
        except OSError:
            self._vanished()
            return False
        if taken == len(data):
            self._since_s = self._server.now_s
            return True
        self._phase, self._stage, self._status, self._verb, self._keep = BUSY, WHOLE, 200, 0, True
        if self._put(data[taken:]):
            self._finish()
        return False

    def begin_plain_get(self, target: bytes, started_s: float) -> None:
        """IDLE to BUSY for a GET without body or query, whose fields are the remembered ones."""
        self._phase, self._stage, self._verb = BUSY, NONE, 0
        self._keep = self._http11 = True
        self._mute = False
        self._handler = self._server.s3
        self.request = Request(b"GET", target, target, b"", self.fields.headers, self.peer, False, started_s)

    def undo_begin(self) -> None:
        """Nothing was answered: the chain shall take the same bytes from the start."""
        assert self._stage == NONE, "answered already"
        self._phase = IDLE

    # --- what follows sending ----------------------------------------------------------------------------------------
    def _finish(self) -> None:
        """The answer is complete."""
        if self._task is not None:
            return  # `_run` finishes when the task has ended
        counts = self._counts
        counts.requests[self._verb + self._status // 100] += 1
        if self._file is not None:
            self._file.release()
            self._file = None
            self._on_fault = None
        if self._latency is not None:
            self._latency.add(self._server.clock.monotonic_s() - self.request.started_s)
            self._latency = None
        self._since_s = self._server.now_s
        if not self._keep:
            self._linger()
            return
        self._phase = IDLE
        self._pause_if(False)
        if self._pending and not self._in_loop:
            data = bytes(self._pending)
            self._pending.clear()
            self._hold(0)
            self._scanned = 0
            self._take(data)

    def _linger(self) -> None:
        if self._eof:
            self._close("")
            return
        self._phase = LINGER
        self._pending.clear()
        self._hold(0)
        self._pause_if(False)
        try:
            self._socket.shutdown(1)
        except OSError:
            self._close("")

    def _sent(self) -> None:
        if not self._wake():
            self._finish()

    def _fault(self, error: OSError) -> None:
        if self._wake(error):
            self._owe(-self._file_left)
            return
        file, fault = self._file, self._on_fault
        assert file is not None
        assert fault is not None
        self._file = self._on_fault = self._latency = None
        file.release()
        log.warning("a data file failed while it was sent: %s; the rest is read through the engine", error)
        self._stage = PARTS
        self._owed = self._file_left
        self.framing = None
        self._head = b""
        fault(self._file_size - self._file_left)
        if self._task is None:
            self.cut()

    def _vanished(self) -> None:
        self._close("client")

    def _progressed(self) -> None:
        self._since_s = self._server.now_s

    # --- ends --------------------------------------------------------------------------------------------------------
    def _close(self, reason: str, reset: bool = False) -> None:
        """Let go of everything; once. `reason` is counted when an answer was cut short."""
        if self._phase == CLOSED:
            return
        self._phase = CLOSED
        if self._held_by is not None:
            self._held_by.hold(-1)
            self._held_by = None
        if reason:
            self._counts.cuts[reason] += 1
        self._close_socket(reset)
        if self._file is not None:
            self._file.release()
            self._file = None
        self._let_sink_go()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._on_fault = None
        self._pending = bytearray()
        self._hold(0)
        self._transport.abort()
        self._server.closed(self)

    def allow(self, paused_s: float) -> None:
        """This process did not run for so long: what the client sent meanwhile has not been looked at."""
        self._since_s += paused_s

    def check_deadline(self, now_s: float) -> None:
        """Once a second: has this phase lasted too long?"""
        waited_s = now_s - self._since_s
        timeouts = self._server.timeouts
        if self._phase == IDLE:
            if waited_s >= timeouts.idle_s:
                self._close("idle")
        elif self._phase == BODY and self._receiver is not None and self._receiver.busy:
            self._since_s = now_s  # it is the disk that is slow
        elif self._phase in (HEAD, BODY):
            if waited_s >= (timeouts.header_s if self._phase == HEAD else timeouts.stall_s):
                self._counts.cuts["header-timeout" if self._phase == HEAD else "stall"] += 1
                self._refuse(
                    Invalid("the request did not arrive in time: send it faster, or again", code="RequestTimeout")
                )
        elif self._phase == BUSY:
            if self._sending and self._client_reads():
                self._since_s = now_s
            elif self._sending and waited_s >= timeouts.stall_s:
                self._close("stall", reset=True)
        elif self._phase == LINGER and waited_s >= (LINGER_S if not self._server.draining else timeouts.tick_s):
            self._close("")

    def drain(self) -> bool:
        """The node stops: close if idle, else after this answer. True if the connection is closed."""
        self._keep = False
        self._tail = _NO_TAIL
        if self._phase in (IDLE, HEAD):
            self._close("")
        return self._phase == CLOSED

    def turn_away(self, busy: Busy) -> None:
        """Too many connections: say so, if the socket takes it at once, and close."""
        self._keep = False
        self._phase = BUSY
        response = self._server.default_handler.render_error(busy, None)
        self.respond(response.status, response.head, response.body)
        self._close("")


def _no_room() -> Busy:
    return Busy(
        "this front holds as much as it may for clients that have not shown who they are: try again",
        retry_after_s=1.0,
    )
