"""HTTP/1.1 from the client's side, as values: requests, heads of answers, and how bodies are framed.

Theory. Everything here is bytes in, values out, so both drivers read answers by the same rules. An answer's body ends
in one of three ways: after `length` bytes; after a last chunk; or when the other side closes (`length` is None and not
`chunked`), which also ends the connection. A flow (`flows.py`) yields a `Request` and is sent a `Response`. A body that
should not be collected in memory goes to the request's `sink`.

Rejected: http.client (copies each body, and reads heads line by line: a third of the speed at 1 KiB, see `bench`);
httptools (native, so platforms without wheels would need a compiler, for a head of ten lines).

Invariants. (1) A head that could be read in two ways (two lengths, length and chunks together) is an error, never a
guess. (2) Outside text enters a request line or header only after a check for line breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlencode

from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid

_BODYLESS = frozenset((204, 304))
_WRITE_CONDITIONS = frozenset(("If-Match", "If-None-Match"))
EXPECT_BYTES_MIN = 1 * limits.MIB  # a body at least this long waits for the node's word that it wants it


class Sink(Protocol):
    """Where the bytes of a body go. The driver asks for room, fills some of it from the socket, and says how much."""

    def begin(self, response: Response) -> None:
        """The head of a success has arrived; its body follows. May raise to refuse it."""

    def buffer(self) -> memoryview:
        """Room for the next bytes: at least one byte, valid until `wrote`."""
        ...

    def wrote(self, size_bytes: int) -> None:
        """The first `size_bytes` of the last `buffer()` now hold the next bytes of the body."""


class Source(NamedTuple):
    """A body that lies in a file: `size_bytes` of `fd` from `offset` on, whatever its position is. `progress` is called
    with the size of each piece sent; what it raises ends the request."""

    fd: int
    offset: int
    size_bytes: int
    progress: Callable[[int], None] | None = None


class Endpoint(NamedTuple):
    """Where a node listens. `base` is a path in front of every target ('' or '/x'), for nodes behind a proxy."""

    scheme: str
    host: str
    port: int
    base: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Request(NamedTuple):
    """One request. `target` is the path and query, already percent-encoded. With `sink`, the body of a 2xx answer goes
    there; any other body is collected into the response. What is sent is `body`, or `source` instead. `repeatable`: to
    send it twice is as to send it once, whatever its method. `of`: the bucket and key of the object that it reads or
    writes. `at`: the node to ask, if it is not the client's own."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | memoryview = b""
    sink: Sink | None = None
    source: Source | None = None
    repeatable: bool = False
    of: tuple[str, str] | None = None
    at: Endpoint | None = None

    @property
    def safe_to_repeat(self) -> bool:
        """Whether sending it twice has the effect of sending it once (RFC 9110 section 9.2.2). A write under a
        condition has not: the first may have made the condition untrue."""
        if self.repeatable:
            return True
        if self.method in ("PUT", "DELETE"):
            return not any(name in _WRITE_CONDITIONS for name, _ in self.headers)
        return self.method in ("GET", "HEAD")

    @property
    def body_bytes(self) -> int:
        return len(self.body) if self.source is None else self.source.size_bytes


class Response(NamedTuple):
    """The answer: header names in lower case. `body` is empty when a sink took it; `size_bytes` counts either way."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    size_bytes: int = 0

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class Head(NamedTuple):
    """The parsed head of an answer and how its body is framed (see the module's header)."""

    status: int
    headers: dict[str, str]
    length: int | None
    chunked: bool
    keep_alive: bool


def encode_path(*parts: str) -> str:
    """The parts joined by `/` and percent-encoded from UTF-8; a `/` inside a part stays one, dots are not special."""
    return "/" + "/".join(quote(part, safe="/-._~!$'()*,:@") for part in parts)


def with_query(path: str, query: Iterable[tuple[str, str]]) -> str:
    """`path` with the pairs appended as a query; pairs with an empty value are left out."""
    pairs = [(name, value) for name, value in query if value != ""]
    return f"{path}?{urlencode(pairs, quote_via=quote, safe='')}" if pairs else path


def build_request(request: Request, host: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """The bytes of `request` to `host`, but for a body that is a `source` or long. `Invalid` if its line or a header
    holds a line break or is over the limit."""
    lines = [f"{request.method} {request.target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in (*more, *request.headers)]
    if request.body_bytes or request.method in ("POST", "PUT"):
        lines.append(f"Content-Length: {request.body_bytes}")
    if request.body_bytes >= EXPECT_BYTES_MIN:
        lines.append("Expect: 100-continue")
    for line in lines:
        if "\r" in line or "\n" in line or "\0" in line:
            raise Invalid("a request line or header holds a line break or a zero byte: remove it")
    if len(lines[0]) > limits.REQUEST_LINE_BYTES_MAX:
        raise Invalid(f"the request line is over {limits.REQUEST_LINE_BYTES_MAX} bytes: shorten the key or the query")
    lines += ["", ""]
    head = "\r\n".join(lines).encode("utf-8", "surrogateescape")
    return head if request.body_bytes >= EXPECT_BYTES_MIN else head + request.body


def parse_head(data: bytes, method: str) -> Head:
    """The head in `data`, which ends with the empty line; `method` is the request's. `Corrupt` if it is not HTTP/1.x.

    A field that is repeated is joined by commas, except for `content-length`, where repeating is an error.
    """
    lines = data.decode("utf-8", "surrogateescape").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()) or len(code) != 3:
        raise Corrupt(f"the answer starts with {lines[0][:60]!r}, which is not HTTP/1.1: check the URL and its port")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or not name or name[0] in " \t":
            raise Corrupt(f"the answer has the malformed header line {line[:60]!r}: check what listens at this URL")
        name = name.lower()
        if name in headers:
            if name == "content-length":
                raise Corrupt("the answer has two Content-Length headers: check what listens at this URL")
            value = headers[name] + "," + value
        headers[name] = value.strip(" \t")
    return _framed(int(code), headers, method, version)


def _framed(status: int, headers: dict[str, str], method: str, version: str) -> Head:
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
    chunked = "transfer-encoding" in headers
    length: int | None = None
    if chunked:
        if headers["transfer-encoding"].lower() != "chunked" or "content-length" in headers:
            raise Corrupt("the answer frames its body in a way that can be read twice: check what listens at this URL")
    elif "content-length" in headers:
        text = headers["content-length"]
        if not (text.isascii() and text.isdigit()):
            raise Corrupt(f"the answer's Content-Length is {text[:40]!r}: check what listens at this URL")
        length = int(text)
    if method == "HEAD" or status in _BODYLESS or 100 <= status < 200:
        return Head(status, headers, 0, False, keep_alive)
    if length is None and not chunked:
        keep_alive = False
    return Head(status, headers, length, chunked, keep_alive)


class Chunks:
    """Takes chunked framing off. Feed what arrived, get the body's bytes; `done` after the last chunk and trailer.

    `Corrupt` when the framing is broken. Bytes after the end are in `rest` (a sound server sends none).
    """

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self._pending = b""
        self._left = 0  # bytes of the current chunk still to come, its CRLF included
        self._in_trailer = False

    @property
    def body_left(self) -> int:
        """How many bytes of the chunk that has begun are still to come; they may be received past `feed` (`took`)."""
        return max(0, self._left - 2)

    def took(self, size_bytes: int) -> None:
        """So many of `body_left` were received elsewhere."""
        assert not self._pending, "bytes wait before those"
        assert 0 <= size_bytes <= self._left - 2, "more than the chunk has left"
        self._left -= size_bytes

    def feed(self, data: bytes) -> bytes:
        out: list[bytes] = []
        data = self._pending + data
        while data and not self.done:
            if self._left:
                data = self._take(data, out)
                continue
            line, newline, after = data.partition(b"\r\n")
            if not newline:
                if len(data) > limits.HEADER_BYTES_MAX:
                    raise Corrupt("a chunk's size line does not end: check what listens at this URL")
                break
            data = after
            if self._in_trailer:
                self.done = not line
            else:
                self._size(line)
        self._pending = b"" if self.done else data
        self.rest = data if self.done else b""
        return b"".join(out)

    def _take(self, data: bytes, out: list[bytes]) -> bytes:
        body = data[: max(0, self._left - 2)]
        out.append(body)
        used = len(body)
        self._left -= used
        if self._left <= 2:
            end = data[used : used + self._left]
            if not b"\r\n"[2 - self._left :].startswith(end):
                raise Corrupt("a chunk is longer than it said: check what listens at this URL")
            self._left -= len(end)
            used += len(end)
        return data[used:]

    def _size(self, line: bytes) -> None:
        text = line.split(b";", 1)[0].strip()
        if not text or len(text) > 16 or any(byte not in b"0123456789abcdefABCDEF" for byte in text):
            raise Corrupt(f"a chunk's size reads {line[:40]!r}: check what listens at this URL")
        size = int(text, 16)
        self._in_trailer = size == 0
        self._left = size + 2 if size else 0
