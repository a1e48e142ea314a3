"""What a handler gets: a request, and an exchange on which to answer it.

Theory. A connection reads requests and answers them in order, one at a time. A *handler* (native, S3) decides the
answer. The interface between them is shaped by the budget of a hit: `handle` is a plain function, a hit is answered
before it returns, and only what must wait becomes a task (`spawn`). Header fields are finished bytes, `b"Name:
value\\r\\n"`, since most of them were made when the object landed.

    handle(request, exchange)      exactly one of respond, send_file, stream, spawn must follow, now or in the task
    raise ForebayError             the connection renders it with the handler's own `render_error`
    take_body(request)             where a body goes; raise to refuse it before the client sends it

Rejected: ASGI (an await and a dictionary per event: 30 k requests/s where this does four times that).

Invariants. (1) Requests with the same header block share `Request.headers`: nobody changes it. (2) Outside text enters
a response only through `header_line`, which passes no control character.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import ForebayError, Invalid
from forebay.core.metrics import Histogram
from forebay.core.types import LOOP_STATUS

if TYPE_CHECKING:
    from forebay.node.front.http.accounts import Account
    from forebay.node.front.http.sender import Pipe


class Request:
    """One request, body and all. Everything is as the client sent it; nothing is decoded.

    `target` is the raw request target, `path` what is before its first `?` and `query` what is after (both still
    percent-encoded). `headers` maps lower-case names to values without surrounding blanks; repeated fields are joined
    with a comma, as RFC 9110 5.3 allows. `secure`: it came over TLS. `started_s` is monotonic seconds. `sink` took the
    body, if one was announced; `caller` is for the handler, to remember who was let in before the body. `account` is
    that of the identity that proved itself, if it has limits, and `held` the one that the connection counts for.

    For the audit log alone, and not there until somebody sets them: `identity`, who proved to have sent it, and
    `noted`, what came of each of several objects (`note`).
    """

    __slots__ = (
        "account", "body", "caller", "headers", "held", "identity", "method", "noted", "path", "peer", "query",
        "secure", "sink", "started_s", "target",
    )  # fmt: skip

    identity: Identity
    noted: list[tuple[str, str, int, str]]

    def __init__(
        self,
        method: bytes,
        target: bytes,
        path: bytes,
        query: bytes,
        headers: dict[bytes, bytes],
        peer: str = "",
        secure: bool = False,
        started_s: float = 0.0,
    ) -> None:
        self.method = method
        self.target = target
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.sink: BodySink | None = None
        self.caller: Any = None
        self.account: Account | None = None
        self.held: Account | None = None
        self.peer = peer
        self.secure = secure
        self.started_s = started_s

    def note(self, bucket: str, key: str, status: int, error: str) -> None:
        """Remember what came of one object of several: the status that it alone would have had, and the code."""
        try:
            self.noted.append((bucket, key, status, error))
        except AttributeError:
            self.noted = [(bucket, key, status, error)]

    def header(self, name: bytes) -> str:
        """The header `name` (lower case) as text, "" when it is not there."""
        return self.headers.get(name, b"").decode("latin-1")


class Response(NamedTuple):
    """A whole answer that fits in memory. `head` holds finished header lines, without Content-Length, Date, Server
    and Connection, which the connection adds."""

    status: int
    head: bytes
    body: bytes = b""


class File(Protocol):
    """An open data file under a lease (`node/store`): it stays whole until `release`."""

    fd: int

    def release(self) -> None: ...


class Source(NamedTuple):
    """A body that another node sends: `first` has come, the rest is still in `socket`, and goes through `pipe`."""

    socket: socket.socket
    pipe: Pipe
    first: bytes


class Waiting(Protocol):
    """What a request waits for. One whose `is_brief` is true goes on for a client that has closed its own half of the
    connection; the others take that for a client that is gone."""

    def cancel(self) -> object:
        """Nobody waits any more."""
        ...


class Exchange(Protocol):
    """The answering side of one request. For HEAD, bodies are counted but not sent: handlers need no special case.

    While `framing` is not None each piece of the body says its length: one that breaks off cannot be gone on with."""

    request: Request

    @property
    def framing(self) -> object: ...

    def respond(self, status: int, head: bytes = b"", body: bytes = b"", size_bytes: int | None = None) -> None:
        """Answer with a whole response. `head` as in `Response`. `size_bytes`: what Content-Length says instead of the
        length of `body`, for HEAD."""
        ...

    def fail(self, error: ForebayError) -> None:
        """Answer with the handler's rendering of `error`; if a body has begun, cut the connection instead."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for this request. What it raises is answered by `fail`; it is cancelled when the client goes."""
        ...

    def hold(self, waiting: Waiting) -> None:
        """The answer comes later without a task: from what is given to `resume`. `waiting.cancel` is called if the
        client goes before."""
        ...

    def resume(self, answer: Callable[[], None]) -> None:
        """Answer a request that was held: `answer` responds now, and what it raises is answered by `fail`."""
        ...

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
        """Answer with `size_bytes` from `file`, which is released when they are sent or the client is gone.

        If the file errs or ends early, it is released and `fault` is called with how many bytes of the body went out;
        the exchange is then as `start` leaves it, with the rest of the body owed. `latency` gets the time taken.
        """
        ...

    def start(self, status: int, head: bytes, size_bytes: int | None = None) -> None:
        """Begin a body that comes in pieces; the head leaves with the first piece, so until then `fail` still answers.
        Without a size the body is chunked (HTTP/1.0: ended by closing)."""
        ...

    async def write(self, data: bytes | memoryview) -> None:
        """Send a piece of the body; returns when the socket has taken it, and `data` may change again."""
        ...

    async def write_file(self, fd: int, offset: int, size_bytes: int, before: bytes | memoryview = b"") -> None:
        """Send a piece of the body, `before` and then `size_bytes` of a file by sendfile; returns when the socket has
        taken it. The caller keeps `fd` open until then. `FileFailed` if the file ends early: of a body of known size
        the rest of the piece is then owed still."""
        ...

    @property
    def can_splice(self) -> bool:
        """Whether `write_spliced` works here: not over TLS, whose bytes the kernel cannot make."""
        ...

    async def write_spliced(self, source: Source, size_bytes: int) -> None:
        """Send a piece of a body of known size: what came from the source already, and the rest of `size_bytes` from
        socket to socket in the kernel. `FileFailed` if the source ends early or falls silent: the rest of the piece is
        then owed still."""
        ...

    async def end(self) -> None:
        """The body begun by `start` is complete."""
        ...

    def cut(self, orderly: bool = False) -> None:
        """Abort the connection: the only honest answer once a body that cannot be finished has begun. `orderly`: what
        was written may still arrive, where the client sees by the body's framing that it is not whole."""
        ...


class BodySink(Protocol):
    """Where the body of one request goes while it arrives. `large`: it is stored elsewhere than in memory, which may
    take a while: if it is long, another thread calls `write`. Two methods are never called at the same time."""

    large: bool

    @property
    def proved(self) -> bool:
        """Whether who sends it has shown who that is, or need not; else its bytes count as held for anybody."""
        ...

    def write(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes, which are the caller's again when this returns. Raising refuses the rest: the error is
        answered and the connection closed."""
        ...

    def wrote(self) -> None:
        """What the last `write` took is stored; called by the loop's own thread."""
        ...

    def finish(self) -> bytes:
        """All bytes came. What it returns becomes `Request.body` (empty for a sink that stored them elsewhere)."""
        ...

    def abort(self) -> None:
        """The body will not be completed: drop what was taken. May be called once, instead of `finish`."""
        ...


class BoundedBody:
    """A sink that keeps a small body in memory, in as many bytes as it has; beyond `limit_bytes` it raises `Invalid`
    (`EntityTooLarge`, 413)."""

    large = False

    def __init__(self, limit_bytes: int, *, proved: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.proved = proved
        self._body = bytearray()

    def write(self, chunk: bytes | memoryview) -> None:
        if len(self._body) + len(chunk) > self.limit_bytes:
            self._body.clear()
            raise too_large(self.limit_bytes)
        self._body += chunk

    def wrote(self) -> None:
        pass

    def finish(self) -> bytes:
        return bytes(self._body)

    def abort(self) -> None:
        self._body.clear()


def stray_body(*, proved: bool) -> BoundedBody:
    """A sink for a body where none has a meaning: what is short is read and ignored."""
    return BoundedBody(limits.STRAY_BODY_BYTES_MAX, proved=proved)


def too_large(limit_bytes: int) -> Invalid:
    return Invalid(f"the body is longer than {limit_bytes} bytes: send less", code="EntityTooLarge")


class Handler(Protocol):
    """A kind of API. One instance serves all connections of a front."""

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer, or spawn what will. Called when the whole body is there. May raise `ForebayError`."""
        ...

    def take_body(self, request: Request) -> BodySink:
        """Called when a request announces a body, before any of it is read and before `100 Continue` is said (the
        headers are known, `content-length` may be absent). Raise to refuse: the error is answered and the connection
        closed. Return a `BoundedBody` for a small one."""
        ...

    def render_error(self, error: ForebayError, request: Request | None) -> Response:
        """How this API says an error. `request` is None when it could not even be parsed."""
        ...


Begin = Callable[[str, Any, Callable[[Any], None]], bool]  # Link.begin

Lines = Callable[[Request], bytes]  # the finished header lines that the answer to a request begins with

REASONS = {
    100: "Continue",
    200: "OK",
    201: "Created",
    202: "Accepted",
    204: "No Content",
    206: "Partial Content",
    301: "Moved Permanently",
    304: "Not Modified",
    307: "Temporary Redirect",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    411: "Length Required",
    412: "Precondition Failed",
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    421: "Misdirected Request",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
    507: "Insufficient Storage",
    508: "Loop Detected",
}
STATUS_LINES = {status: b"HTTP/1.1 %d %s\r\n" % (status, reason.encode()) for status, reason in REASONS.items()}

# Statuses that an error's code refines, the same for every API; otherwise the kind's own status holds.
STATUS_OF_CODE = {
    "InvalidRange": 416,
    "EntityTooLarge": 413,
    "RequestTimeout": 408,
    "MethodNotAllowed": 405,
    "URITooLong": 414,
    "HeadersTooLarge": 431,
    "MissingContentLength": 411,
    "VersionNotSupported": 505,
    "ConditionalRequestConflict": 409,
    "InsufficientStorage": 507,
    "TooManyRequests": 429,
    "LoopDetected": LOOP_STATUS,
}


def status_of(error: ForebayError) -> int:
    """The HTTP status that says `error`."""
    return STATUS_OF_CODE.get(error.code, error.status)


_CONTROLS = bytes([*range(32), 127])


def header_line(name: bytes, value: str | bytes) -> bytes:
    """A finished header line. A value with a control character could split the response: `Invalid`."""
    raw = value.encode("utf-8", "strict") if isinstance(value, str) else value
    if len(raw.translate(None, _CONTROLS)) != len(raw):
        raise Invalid(f"the value for {name.decode()} holds a control character: percent-encode or remove it")
    return b"%s: %s\r\n" % (name, raw)


def decode_component(raw: bytes) -> str:
    """A percent-encoded piece of a path as text. `Invalid` (`InvalidURI`) for a bad escape or what is not UTF-8.

    `+` stays `+`: only query strings of forms mean a blank by it.
    """
    if b"%" in raw:
        escapes = raw.count(b"%")
        decoded = unquote_to_bytes(raw)
        if len(raw) - len(decoded) != 2 * escapes:
            raise Invalid("a % in the path is not followed by two hexadecimal digits: write %25", code="InvalidURI")
        raw = decoded
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid("the path is not UTF-8: percent-encode it from UTF-8 bytes", code="InvalidURI") from None


def decode_query(raw: bytes) -> dict[str, str]:
    """The query as names to values, percent-decoded, `+` meaning a blank; the first of repeated names wins."""
    result: dict[str, str] = {}
    if raw:
        for part in raw.split(b"&"):
            if part:
                name, _, value = part.replace(b"+", b" ").partition(b"=")
                result.setdefault(decode_component(name), decode_component(value))
    return result
