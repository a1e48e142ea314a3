"""Answers whose body is sent in pieces: `start`, `write`, `write_file` or `write_spliced`, `end`.

Theory. This class holds the state that every answer of a connection needs (phase, stage, whether the connection goes on
after it; `connection.py` has the arrows), and sends the answers that take more than one step. The head leaves with the
first piece, so until then an error can still be answered.

Invariants. (1) A body of known size is sent with exactly that size. (2) A HEAD is answered with the head only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.node.front.http.chunks import ChunkFraming
from forebay.node.front.http.requests import STATUS_LINES, Source
from forebay.node.front.http.sender import CAN_SPLICE, ClientGone, FileFailed, Sender

if TYPE_CHECKING:
    from forebay.node.front.http.server import Server

IDLE, HEAD, BODY, BUSY, LINGER, CLOSED = range(6)  # phases; plain numbers, since each request compares some
NONE, WHOLE, PARTS = range(3)  # stages


class Parts(Sender):
    """See the module's header. The methods are those of `requests.Exchange`."""

    __slots__ = (
        "_counts",
        "_head",
        "_http11",
        "_keep",
        "_mute",
        "_owed",
        "_phase",
        "_server",
        "_since_s",
        "_stage",
        "_status",
        "framing",
    )

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._counts = server.counts
        self._phase = IDLE
        self._stage = NONE
        self._since_s = server.now_s  # when the phase began or last made progress
        self._keep = True
        self._head = b""  # the head of a body in parts, until its first piece
        self._owed: int | None = 0  # bytes of a body in parts still to come; None: chunked
        self._mute = False  # HEAD
        self.framing: ChunkFraming | None = None
        self._http11 = True
        self._status = 0

    def _connection_line(self) -> bytes:
        return b"Connection: keep-alive\r\n" if self._keep else b"Connection: close\r\n"

    def start(self, status: int, head: bytes, size_bytes: int | None = None) -> None:
        assert self._stage == NONE, "answered twice"
        self._stage = PARTS
        self._status = status
        self._owed = size_bytes
        self.framing = ChunkFraming() if size_bytes is None and self._http11 else None
        if size_bytes is not None:
            framing = b"Content-Length: %d\r\n" % size_bytes
        elif self.framing is not None:
            framing = b"Transfer-Encoding: chunked\r\n"
        else:
            framing, self._keep = b"", False
        self._head = b"%b%b%b%b%b\r\n" % (
            STATUS_LINES[status],
            self._server.standing,
            head,
            framing,
            b"" if self._keep and self._http11 else self._connection_line(),
        )

    def _spend(self, size_bytes: int) -> None:
        """So many bytes go to the client."""
        raise NotImplementedError

    async def write(self, data: bytes | memoryview) -> None:
        self._owe(len(data))
        if self._mute or not data:
            return
        self._spend(len(data))
        if self.framing is not None:
            data = self.framing.whole(data)
        head, self._head = self._head, b""
        self._counts.sent_bytes += len(head) + len(data)
        self._since_s = self._server.now_s
        await self._put_and_wait(head + data if head else data)

    async def write_file(self, fd: int, offset: int, size_bytes: int, before: bytes | memoryview = b"") -> None:
        assert size_bytes > 0, "an empty piece has no file"
        self._owe(len(before) + size_bytes)
        if self._mute:
            return
        self._spend(len(before) + size_bytes)
        head, self._head = self._head, b""
        if self.framing is not None:
            head += self.framing.opening(len(before) + size_bytes)
        head += before
        self._counts.sent_bytes += len(head) + size_bytes
        self._since_s = self._server.now_s
        await self._put_and_wait(head, fd, offset, size_bytes)

    @property
    def can_splice(self) -> bool:
        return CAN_SPLICE

    async def write_spliced(self, source: Source, size_bytes: int) -> None:
        self._owe(size_bytes)
        assert not self._mute, "HEAD has no body"
        assert self.framing is None, "a piece that breaks off must be gone on with"
        head, self._head = self._head, b""
        self._counts.sent_bytes += len(head)
        self._since_s = self._server.now_s
        first = source.first
        if head or first:
            self._passed_on(len(first))
            await self._put_and_wait(head + first)
        try:
            await self._splice_and_wait(source.socket, source.pipe, size_bytes - len(first))
        except FileFailed as error:
            self._owe(-error.left_bytes)
            raise

    def _passed_on(self, size_bytes: int) -> None:
        """A piece may have gigabytes, of which the client or the source breaks off: they count as they go."""
        self._spend(size_bytes)
        self._counts.sent_bytes += size_bytes
        self._counts.relayed_bytes += size_bytes

    def _owe(self, size_bytes: int) -> None:
        assert self._stage == PARTS, "start the body first"
        if self._phase != BUSY:
            raise ClientGone("the client is gone")
        if self._owed is not None:
            assert self._owed >= size_bytes, "more body than announced"
            self._owed -= size_bytes

    async def end(self) -> None:
        assert self._stage == PARTS, "start the body first"
        assert self._mute or not self._owed, "less body than announced"
        last = self._head + (b"" if self.framing is None or self._mute else self.framing.last())
        self._head = b""
        self.framing = None
        if last:
            self._counts.sent_bytes += len(last)
            await self._put_and_wait(last)
        self._stage = WHOLE
