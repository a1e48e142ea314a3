"""A client connection over TLS: `connection.py` with TLS records between it and the socket.

Theory. Bytes are wrapped only here, so the plain path pays nothing. Received bytes go through OpenSSL's memory into the
same buffer that a plain connection reads into. Sent bytes are encrypted and then take the plain path: straight into the
socket, resumed when it is writable. Files differ: the kernel cannot encrypt them here, so they are read and sent in
pieces.

Nothing is buffered in between, so a "sent" answer is in the kernel, as without TLS, and a stop cuts nothing off. A
client that speaks plain HTTP gets its error in plain HTTP.

Rejected: the loop's TLS transport (it hides what it still holds, so a stop might cut the last answer; and it has no
half-closed state, which lingering needs); kernel TLS (`SSL_OP_ENABLE_KTLS` needs the socket in OpenSSL's hands, and a
kernel module).

Invariants. (1) Ciphertext leaves in the order in which it was made. (2) Until the handshake is over, only it, an alert,
or one plain refusal is sent. (3) At most one piece of a file is encrypted ahead of the socket.
"""

from __future__ import annotations

import errno
import os
import ssl
from typing import TYPE_CHECKING

from forebay.core.errors import Busy
from forebay.node.front.http import parser
from forebay.node.front.http.connection import Connection
from forebay.node.front.http.parts import BUSY, CLOSED, LINGER, WHOLE
from forebay.node.front.http.sender import SENDFILE_BYTES_MAX

if TYPE_CHECKING:
    from forebay.node.front.http.server import Server

CIPHER_READ_BYTES = 256 * 1024
FILE_PIECE_BYTES = 128 * 1024  # read, encrypted and sent while it is in the cache; eight records of TLS
_TOLD = b"this port speaks TLS: use https:// in the URL\r\n"
_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
) % (len(_TOLD), _TOLD)
_cipher = memoryview(bytearray(CIPHER_READ_BYTES))  # one for all connections: it is copied at once


class TlsConnection(Connection):
    """See the module's header. `context` is the one new connections get now."""

    __slots__ = ("_incoming", "_outgoing", "_secured", "_tls")

    def __init__(self, server: Server, context: ssl.SSLContext) -> None:
        super().__init__(server)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._secured = False

    @property
    def can_splice(self) -> bool:
        return False

    # --- bytes in ----------------------------------------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        return _cipher

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase in (LINGER, CLOSED):
            return
        self._incoming.write(_cipher[:nbytes])
        if self._secured or self._shake_hands():
            self._take_plain()

    def _resume(self) -> None:
        super()._resume()
        self._loop.call_soon(self._take_plain)  # what was decrypted no further while reading had to wait

    def _take_plain(self) -> None:
        """Hand on what can be decrypted, as long as it is taken."""
        while self._phase not in (LINGER, CLOSED) and not self._paused:
            buffer = super().get_buffer(-1)
            size = 0
            ended = False
            try:
                while size < len(buffer):
                    taken = self._tls.read(len(buffer) - size, buffer[size:])
                    if not taken:
                        ended = True
                        break
                    size += int(taken)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                ended = True  # a broken record, or an end without one: nothing after it can be trusted
            if size:
                super().buffer_updated(size)
            if ended:
                self._end_of_input()
            if ended or not size:
                return

    def _end_of_input(self) -> None:
        """The client said that it sends no more."""
        if self._phase not in (LINGER, CLOSED) and not self.eof_received():
            self._close("client" if self._phase == BUSY else "")

    def _shake_hands(self) -> bool:
        """Go on with the handshake; whether it is over."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_now(self._outgoing.read())
            return False
        except ssl.SSLError as error:
            self._counts.requests_refused += 1
            self._send_now(_PLAIN if error.reason == "HTTP_REQUEST" else self._outgoing.read())
            self._keep = False
            super()._linger()
            return False
        self._secured = True
        return self._send_now(self._outgoing.read())  # the tickets of TLS 1.3 are in it

    def _send_now(self, data: bytes) -> bool:
        """Send what fits into any idle socket. A client that has no room for it is gone, and then the answer is no."""
        if data:
            try:
                if self._send(data) == len(data):
                    return True
            except OSError:
                pass
            self._vanished()
            return False
        return True

    # --- bytes out ---------------------------------------------------------------------------------------------------
    def _encrypt(self, data: bytes | memoryview) -> bytes:
        view = memoryview(data)
        while view:  # one record for each call
            view = view[self._tls.write(view) :]
        return self._outgoing.read()

    def _put(self, data: bytes | memoryview, file_fd: int = -1, offset: int = 0, left: int = 0) -> bool:
        if self._fd < 0:
            return False
        try:
            encrypted = self._encrypt(data)
        except ssl.SSLError:  # it was ended by the other side
            self._vanished()
            return False
        return super()._put(encrypted, file_fd, offset, left)

    def _pump_file(self) -> bool:
        sent = 0
        while self._file_left and sent < SENDFILE_BYTES_MAX:
            try:
                piece = os.pread(self._file_fd, min(self._file_left, FILE_PIECE_BYTES), self._file_offset)
            except OSError as error:
                self._disarm()
                self._fault(error)
                return False
            if not piece:
                self._disarm()
                self._fault(OSError(errno.EIO, "the file ends before the object does"))
                return False
            self._file_offset += len(piece)
            self._file_left -= len(piece)
            sent += len(piece)
            data = b""
            try:
                data = self._encrypt(piece)
                taken = self._send(data)
            except (BlockingIOError, InterruptedError):
                taken = 0
            except OSError:  # TLS's errors are of this kind too
                self._vanished()
                return False
            if taken != len(data):
                self._out = memoryview(data)[taken:]
                self._progressed()
                self._arm()
                return False
        if self._file_left:
            self._progressed()
            self._arm()  # others have their turn
            return False
        self._disarm()
        return True

    def answer_whole(self, data: bytes) -> bool:
        self._counts.sent_bytes += len(data)
        self._phase, self._stage, self._status, self._verb, self._keep = BUSY, WHOLE, 200, 0, True
        if self._put(data):
            self._finish()
        return False  # counted by `_finish`, not by the lane

    # --- a request, and the ends -------------------------------------------------------------------------------------
    def _begin_body(self, fields: parser.Fields, data: bytes) -> bytes:
        self.request.secure = True
        return super()._begin_body(fields, data)

    def _handle(self) -> None:
        self.request.secure = True
        super()._handle()

    def _linger(self) -> None:
        """Say in TLS's own words that nothing follows, before the socket says it."""
        try:
            self._tls.unwrap()
        except (ssl.SSLError, OSError):
            pass  # the client has not said so itself yet, or never will
        try:
            self._send(self._outgoing.read())
        except OSError:
            pass  # it did not matter to who is gone
        super()._linger()

    def turn_away(self, busy: Busy) -> None:
        self._close("")

    def check_deadline(self, now_s: float) -> None:
        if not self._secured and self._phase not in (LINGER, CLOSED):
            if now_s - self._since_s >= self._server.timeouts.header_s:
                self._counts.cuts["header-timeout"] += 1
                self._close("")
            return
        super().check_deadline(now_s)
