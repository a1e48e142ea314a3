"""One connection to a node: sends a request and receives the answer where it should lie.

Theory. The socket blocks and the kernel keeps the time (`SO_RCVTIMEO`): a timeout of Python's would put a `poll` before
each `recv`. The first `recv` takes the head and the part of the body that came with it. `recv_into` receives the rest
of a body of known length directly into the sink's buffer. (`MSG_WAITALL` would save most of those calls, without
measurable gain, and hide progress on a slow link.) A file's body is sent by `sendfile`, or in pieces over TLS. A long
body is announced first (`Expect`), so a node can refuse it before it is sent. If an answer arrives while a body is
sent, it is read and the connection closed.

Errors. If a kept connection fails before the first byte of an answer, the node had closed it: that is `Stale`, and a
request that is safe to repeat may be sent again on a new connection. Anything later is an error of the request: half an
answer is never mixed with another. An error in the middle of a body says what has come (`CutOff`), so that the rest of
the same version can be asked for (`resuming.py`).

Invariants. (1) After an error the connection is closed. (2) It is reusable only if the last body was read to its end
and nothing follows it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, Unavailable
from forebay.core.messages.http1 import (
    EXPECT_BYTES_MIN,
    Chunks,
    Endpoint,
    Head,
    Request,
    Response,
    Sink,
    Source,
    build_request,
    parse_head,
)

if TYPE_CHECKING:
    import ssl

    Trust = Callable[[], ssl.SSLContext]

_FIRST_BYTES = 16 * limits.KIB  # of the first recv: a head, and the whole body of a small object
_COLLECT_BYTES = 256 * limits.KIB  # room for a body of unknown length that is collected in memory
_SEND_BYTES = 4 * limits.MIB  # one sendfile: how often progress is told
_PIECE_BYTES = 256 * limits.KIB  # of a file that is read here
_NOW = getattr(socket, "MSG_DONTWAIT", 0)
OWNER_GONE_S = 5  # with what a node waits for another (5 s), less than a lease
CUT = "Cut"  # the code of the error for a connection that ended before the whole answer came


class Stale(Exception):
    """A kept connection turned out closed before it answered anything."""


class CutOff(Unavailable):
    """The connection ended in the middle of a body. The first `done_bytes` of what `response` announced are in `sink`,
    which takes more. Any other error with the code CUT was raised before the sink heard of an answer."""

    def __init__(self, message: str, response: Response, sink: Sink, done_bytes: int) -> None:
        super().__init__(message, code=CUT)
        self.response, self.sink, self.done_bytes = response, sink, done_bytes

    @property
    def plain(self) -> Unavailable:
        """The same, for who keeps it: without what has come."""
        return Unavailable(self.message, code=CUT)

    def __reduce__(self) -> tuple[type[Unavailable], tuple[str], dict[str, str]]:
        return Unavailable, (self.message,), {"code": CUT}  # another process has no use for the sink

    @property
    def kind(self) -> str:
        return "Unavailable"


def parse_url(url: str) -> Endpoint:
    """The endpoint at `http://host:port`, `https://…` or `host:port`. `Invalid` says what is wrong with `url`."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise Invalid(f"the node's URL {url!r} is not valid ({error}): write it like http://127.0.0.1:9400") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise Invalid(f"the node's URL {url!r} is not valid: write it like http://127.0.0.1:9400")
    return Endpoint(
        parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 9400), parts.path.rstrip("/")
    )


class Connection:
    """A socket to one node, one request at a time. Not safe to share between threads; the pool sees to that."""

    def __init__(
        self, endpoint: Endpoint, patience_s: float = limits.CLIENT_STALL_TIMEOUT_S, trust: Trust | None = None
    ) -> None:
        self.endpoint = endpoint
        self.patience_s = patience_s
        self.pid = os.getpid()
        self.served = 0  # requests answered whole
        self.reusable = False
        self._body_sent = True
        self._keep_alive = False
        self._sock = _open(endpoint, patience_s, trust or default_trust)
        self._tls = endpoint.scheme == "https"

    def watch_closely(self) -> None:
        """See `watch_closely`, for an owner that may be asked no more."""
        watch_closely(self._sock)

    def close(self) -> None:
        self.reusable = False
        with contextlib.suppress(OSError):
            self._sock.close()

    def is_quiet(self) -> bool:
        """Whether a kept connection looks alive: nothing to read, and not closed by the other side."""
        if self._tls or not _NOW:
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK | _NOW)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # end of file, or bytes that nobody asked for

    def exchange(self, request: Request, more: tuple[tuple[str, str], ...] = ()) -> Response:
        """Send `request` and read its whole answer. `Stale`, or `Unavailable`/`Corrupt` saying what happened."""
        self.reusable = False
        try:
            return self._exchange(request, more)
        except BaseException:
            self.close()
            raise

    def begin(self, request: Request, more: tuple[tuple[str, str], ...] = ()) -> tuple[Response, bytes]:
        """Send `request` and read the head of its answer, for a body that is taken as somebody asks for it.

        Of a success with a Content-Length the body is left: its first bytes are returned, the rest comes by
        `receive_into`, and `end` says that all was taken. The body of anything else is in the response. Errors as of
        `exchange`.
        """
        self.reusable = False
        try:
            head, data = self._ask(request, more)
            response = Response(head.status, head.headers)
            if not response.ok or head.length is None or head.chunked:
                body = self._collect(head, data)
                self.served += 1
                self.reusable = self.reusable and head.keep_alive
                return Response(head.status, head.headers, body, len(body)), b""
            if len(data) > head.length:
                raise Corrupt("the answer is longer than its Content-Length says: check what listens at this URL")
        except BaseException:
            self.close()
            raise
        self._keep_alive = head.keep_alive
        return response, data

    def receive_into(self, view: memoryview) -> int:
        """More of the body that `begin` left; 0 when the other side has ended it."""
        try:
            return self._receive_into(view)
        except BaseException:
            self.close()
            raise

    def end(self) -> None:
        """The body that `begin` left was taken to its end."""
        self.served += 1
        self.reusable = self._keep_alive

    def _exchange(self, request: Request, more: tuple[tuple[str, str], ...]) -> Response:
        head, data = self._ask(request, more)
        response = Response(head.status, head.headers)
        if request.sink is not None and response.ok:
            request.sink.begin(response)
            size = self._pour(head, data, request.sink)
            body = b""
        else:
            body = self._collect(head, data)
            size = len(body)
        self.served += 1
        self.reusable = self.reusable and head.keep_alive and self._body_sent
        return Response(head.status, head.headers, body, size)

    def _ask(self, request: Request, more: tuple[tuple[str, str], ...]) -> tuple[Head, bytes]:
        """Send all of it; the head of the answer, and what came along of its body."""
        try:
            self._sock.sendall(build_request(request, self.endpoint.authority, more))
            data = self._send_body(request)
            if not data:
                data = self._sock.recv(_FIRST_BYTES)
        except (BlockingIOError, TimeoutError) as error:
            raise self._silent(error) from None
        except OSError as error:
            raise self._gone(error) from error
        if not data:
            raise self._gone(None)
        return self._head(data, request.method)

    def _send_body(self, request: Request) -> bytes:
        """Send what `build_request` left out; what has arrived of the answer meanwhile. An answer that comes instead of
        an invitation, or that ends the sending, leaves `_body_sent` false."""
        self._body_sent = True
        data = b""
        if request.body_bytes >= EXPECT_BYTES_MIN:
            self._body_sent = False
            data = self._sock.recv(_FIRST_BYTES)
            while data and b"\r\n\r\n" not in data:
                more = self._sock.recv(_FIRST_BYTES)
                if not more:
                    return data
                data += more
            if not data or parse_head(data[: data.find(b"\r\n\r\n") + 2], request.method).status != 100:
                return data
            data = data[data.find(b"\r\n\r\n") + 4 :]
        elif request.source is None:
            return b""
        self._body_sent = False
        try:
            if request.source is None:
                self._sock.sendall(request.body)
            else:
                self._send_source(request.source)
        except (BlockingIOError, TimeoutError):
            raise
        except (BrokenPipeError, ConnectionResetError):
            return data or self._receive()  # it may have said why it wants no more
        self._body_sent = True
        return data

    def _send_source(self, source: Source) -> None:
        done = 0
        whole = not self._tls and sys.platform == "linux"
        while done < source.size_bytes:
            left = source.size_bytes - done
            if whole:
                size = os.sendfile(self._sock.fileno(), source.fd, source.offset + done, min(left, _SEND_BYTES))
            else:
                piece = os.pread(source.fd, min(left, _PIECE_BYTES), source.offset + done)
                self._sock.sendall(piece)
                size = len(piece)
            if not size:
                raise Invalid(
                    f"the file ended after {done} of {source.size_bytes} bytes while it was sent: nothing was written; "
                    "send it again when nobody changes it"
                )
            done += size
            if source.progress is not None:
                source.progress(size)

    def _gone(self, error: OSError | None) -> Exception:
        if self.served:
            return Stale()
        why = f" ({error.strerror})" if error and error.strerror else ""
        return Unavailable(
            f"the node at {self.endpoint.url} closed the connection without an answer{why}: see its log, or run "
            "`forebay doctor`",
            code=CUT,
        )

    def _head(self, data: bytes, method: str) -> tuple[Head, bytes]:
        """The final head (1xx skipped) and what came after it."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > limits.HEADER_BYTES_MAX:
                    raise Corrupt(f"the head of the answer is over {limits.HEADER_BYTES_MAX} bytes: check the URL")
                more = self._receive()
                if not more:
                    raise Unavailable(
                        f"the node at {self.endpoint.url} stopped in the middle of an answer: try again", code=CUT
                    )
                data += more
                continue
            head, data = parse_head(data[: end + 2], method), data[end + 4 :]
            if head.status >= 200:
                return head, data

    def _receive(self, size_bytes: int = _FIRST_BYTES) -> bytes:
        """More of an answer that has begun; nothing when the other side has ended it, however."""
        try:
            return self._sock.recv(size_bytes)
        except (BlockingIOError, TimeoutError) as error:
            raise self._silent(error) from None
        except OSError:
            return b""

    def _receive_into(self, view: memoryview) -> int:
        try:
            return self._sock.recv_into(view)
        except (BlockingIOError, TimeoutError) as error:
            raise self._silent(error) from None
        except OSError:
            return 0

    def _silent(self, error: OSError) -> Unavailable:
        if error.errno == errno.ETIMEDOUT:  # the kernel's word: nobody acknowledges
            return Unavailable(
                f"the machine at {self.endpoint.url} is gone, or the network to it: check both", code=CUT
            )
        return Unavailable(
            f"the node at {self.endpoint.url} sent nothing for {self.patience_s:g} s: "
            "check it with `forebay status`, then try again"
        )

    def _pour(self, head: Head, data: bytes, sink: Sink) -> int:
        """The body into `sink`; its size."""
        if head.chunked:
            return self._pour_chunks(head, data, sink)
        length = head.length
        if length is not None and len(data) > length:
            raise Corrupt("the answer is longer than its Content-Length says: check what listens at this URL")
        done = copy_into(data, sink)
        while length is None or done < length:
            view = sink.buffer()
            if length is not None and len(view) > length - done:
                view = view[: length - done]
            try:
                size = self._receive_into(view)
            except Unavailable as error:
                if length is None or error.code != CUT:
                    raise
                raise CutOff(error.message, Response(head.status, head.headers), sink, done) from None
            if not size:
                if length is None:
                    return done
                raise CutOff(cut_after(done, length), Response(head.status, head.headers), sink, done)
            sink.wrote(size)
            done += size
        self.reusable = True
        return done

    def _pour_chunks(self, head: Head, data: bytes, sink: Sink) -> int:
        chunks, done = Chunks(), 0
        while True:
            done += copy_into(chunks.feed(data), sink)
            if chunks.done:
                self.reusable = not chunks.rest
                return done
            more = True
            while more and chunks.body_left:
                view = sink.buffer()
                size = self._receive_into(view[: chunks.body_left])
                chunks.took(size)
                sink.wrote(size)
                done += size
                more = size > 0
            data = self._receive() if more else b""
            if not data:
                raise CutOff(cut_after(done), Response(head.status, head.headers), sink, done)

    def _collect(self, head: Head, data: bytes) -> bytes:
        if head.length is not None and not head.chunked and len(data) == head.length:
            self.reusable = True
            return data
        sink = Collected(head.length)
        self._pour(head, data, sink)
        return sink.value()


class Collected:
    """A sink that keeps the body in memory.

    A room is the buffer of a `BytesIO`, which gives out its own bytes without a copy: a body of known length is
    received into what is returned. Rooms never move, since a view of one may still be held.
    """

    def __init__(self, length: int | None = None) -> None:
        self._rooms: list[io.BytesIO] = []
        self._add(length or _COLLECT_BYTES)

    def _add(self, size_bytes: int) -> None:
        self._rooms.append(io.BytesIO(bytes(size_bytes)))
        self._room_bytes = size_bytes
        self._used_bytes = 0

    def begin(self, response: Response) -> None:
        """Any answer is welcome."""

    def buffer(self) -> memoryview:
        if self._used_bytes == self._room_bytes:
            self._add(_COLLECT_BYTES)
        return self._rooms[-1].getbuffer()[self._used_bytes :]

    def wrote(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes

    def value(self) -> bytes:
        *full, last = (room.getvalue() for room in self._rooms)
        if self._used_bytes < self._room_bytes:
            last = last[: self._used_bytes]
        return b"".join((*full, last)) if full else last


def copy_into(data: bytes | memoryview, sink: Sink) -> int:
    """Write `data` into the sink's buffers; how many bytes that were."""
    position = 0
    while position < len(data):
        view = sink.buffer()
        size = min(len(view), len(data) - position)
        view[:size] = data[position : position + size]
        view.release()
        sink.wrote(size)
        position += size
    return position


def cut_after(done_bytes: int, size_bytes: int | None = None) -> str:
    """What is said of a body that was cut."""
    whole = "" if size_bytes is None else f" of {size_bytes}"
    return (
        f"the answer was cut after {done_bytes}{whole} bytes: see the node's log (a fetch that fails midway ends like "
        "this), then try again"
    )


def default_trust() -> ssl.SSLContext:
    """Trust what this machine trusts."""
    import ssl  # 20 ms to import, and most nodes are on loopback

    return ssl.create_default_context()


def trust_file(path: str) -> ssl.SSLContext:
    """Trust only the certificates in the PEM file `path`. `Invalid` if there are none."""
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None) or error
        raise Invalid(f"the certificates {path} cannot be used ({why}): name a PEM file (FOREBAY_CA)") from None


def _open(endpoint: Endpoint, patience_s: float, trust: Trust) -> socket.socket:
    try:
        timeout_s = min(patience_s, limits.CLIENT_CONNECT_TIMEOUT_S)
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    except (ConnectionRefusedError, ConnectionResetError):
        raise Unavailable(
            f"no node answers at {endpoint.url}: start one with `forebay up`, or name another with --url or "
            "FOREBAY_URL",
            code="NoNode",
        ) from None
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unavailable(
            f"cannot reach a node at {endpoint.url} ({why}): check --url or FOREBAY_URL, and the network", code="NoNode"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    if endpoint.scheme == "https":
        return _wrap(sock, endpoint, patience_s, trust)
    sock.settimeout(None)
    patience = struct.pack("ll", int(patience_s), int(patience_s % 1 * 1e6))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    except OSError:  # a platform with another timeval: Python keeps the time, at the price of a poll
        sock.settimeout(patience_s)
    return sock


def keep_alive(sock: socket.socket, gone_s: int = 30) -> None:
    """Have the kernel notice after so long that the other machine is gone without a word, while an answer is waited
    for."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        between_s = max(1, gone_s // 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, gone_s - 2 * between_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def watch_closely(sock: socket.socket) -> None:
    """The same within OWNER_GONE_S, also of a request that nobody acknowledges. Not where bodies are sent: a node that
    takes none for a while would be given up."""
    keep_alive(sock, OWNER_GONE_S)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, OWNER_GONE_S * 1000)


def _wrap(sock: socket.socket, endpoint: Endpoint, patience_s: float, trust: Trust) -> socket.socket:
    try:
        sock.settimeout(patience_s)
        return trust().wrap_socket(sock, server_hostname=endpoint.host)
    except ForebayError:
        sock.close()
        raise
    except OSError as error:  # TLS's errors are of this kind
        sock.close()
        raise Unavailable(
            f"no TLS with {endpoint.url} ({error}): check the scheme (http or https?) and the certificate, which "
            "FOREBAY_CA can vouch for",
            code="NoNode",
        ) from error
