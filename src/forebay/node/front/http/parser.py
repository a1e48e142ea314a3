"""A strict parser for the head of an HTTP/1.1 request and for both ways to frame its body. Pure.

Theory. Input that two parsers read differently is a way to smuggle a request past one of them (RFC 9112, 11.2). So this
parser accepts only unambiguous input and refuses the rest with 400. Lines end in CRLF; there is no control character,
no folded line and no blank before a colon; there is one Host, one Content-Length of digits, never both Content-Length
and Transfer-Encoding, and no transfer coding but `chunked`. A refused request ends its connection, since nobody knows
where the next one begins.

Speed. A few C-speed passes check a whole head (`translate`, `count`, `split`). Field names come from a table of those
seen before. A connection remembers its last block of fields, since most clients repeat it. Measured: 0.5 µs for a head
whose fields are remembered, 2.2 µs for four new fields. httptools took 1.0 µs for either, before the checks that it
leaves to us.

Rejected: httptools (twice the time on the hit path; its limits and strictness are llhttp's, and ours would come on top,
in callbacks; the tests use it as an oracle); one regular expression over the head (slower still).

Invariants. (1) Bytes that break a rule above return nothing. (2) No input costs more than its length times a constant,
and the limits in `core/limits.py` bound what is buffered.
"""

from __future__ import annotations

import re

from forebay.core import limits
from forebay.core.errors import Invalid, NotSupported

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HOST = re.compile(rb"[A-Za-z0-9.\-_~!$&'()*+,;=%:\[\]]*")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,19}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?")
TARGET_BYTES = bytes(c for c in range(0x21, 0x7F) if c != 0x23)  # RFC 3986 forbids more, clients send it
_FIELD_BYTES = bytes(c for c in range(256) if c >= 0x20 and c != 0x7F) + b"\t\r\n"
_NAMES_KEPT_MAX = 1024  # field names seen before; beyond it a new name is checked each time
_SINGLE = frozenset((b"host", b"content-length", b"transfer-encoding", b"authorization", b"expect"))
_CHUNK_LINE_BYTES_MAX = 256
_TRAILER_LINE_BYTES_MAX = 4096
_names: dict[bytes, bytes] = {}


class Fields:
    """A block of header fields, understood. Shared between requests with the same block: never changed.

    `headers` as in `Request`; `length_bytes` is the announced size of the body (0 without one), or None when it is
    chunked; `keep_alive` is what the Connection field says, or None where it says nothing; `expects_continue`.
    """

    __slots__ = ("expects_continue", "headers", "keep_alive", "length_bytes")

    def __init__(self, headers: dict[bytes, bytes]) -> None:
        self.headers = headers
        self.length_bytes: int | None = 0
        self.keep_alive: bool | None = None
        self.expects_continue = False


def parse_fields(block: bytes) -> Fields:
    """The fields of `block`: all lines of a head after the first, joined by CRLF, without the empty line that ends it.

    `Invalid` for what breaks the rules; code `HeadersTooLarge` for too many bytes or fields.
    """
    if len(block) > limits.HEADER_BYTES_MAX:
        raise headers_too_large()
    fields = Fields({})
    if not block:
        return fields
    if block.translate(None, _FIELD_BYTES):
        raise _malformed("a header holds a control character")
    lines = block.split(b"\r\n")
    breaks = len(lines) - 1
    if block.count(b"\r") != breaks or block.count(b"\n") != breaks:
        raise _malformed("a header line does not end in CR LF")
    if breaks >= limits.HEADERS_MAX:
        raise headers_too_large()
    headers = fields.headers
    for line in lines:
        raw, colon, value = line.partition(b":")
        name = _names.get(raw) or _learn_name(raw)
        if not colon:
            raise _malformed("a header line has no colon")
        value = value.strip(b" \t")
        if name in headers:
            if name in _SINGLE:
                raise _malformed(f"the header {name.decode()} is given twice")
            value = headers[name] + b"," + value
        headers[name] = value
    if b"connection" in headers:
        tokens = [token.strip() for token in headers[b"connection"].lower().split(b",")]
        fields.keep_alive = False if b"close" in tokens else True if b"keep-alive" in tokens else None
    if b"content-length" in headers or b"transfer-encoding" in headers:
        fields.length_bytes = _framing(headers)
    if b"expect" in headers:  # what else may be expected is ignored, as RFC 9110 10.1.1 lets one, and as S3 does
        fields.expects_continue = headers[b"expect"].lower() == b"100-continue"
    return fields


def _learn_name(raw: bytes) -> bytes:
    if not _TOKEN.fullmatch(raw):
        raise _malformed("a header name holds a character that is not allowed")
    name = raw.lower()
    if len(_names) < _NAMES_KEPT_MAX and len(raw) <= 64:
        _names[raw] = name
    return name


def _framing(headers: dict[bytes, bytes]) -> int | None:
    """How many bytes the body has, None for chunked."""
    length = headers.get(b"content-length")
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise _malformed("both Content-Length and Transfer-Encoding are given")
        if coding.lower() != b"chunked":
            raise NotSupported("no transfer coding but 'chunked' is served: send Content-Length or chunked")
        return None
    assert length is not None
    if not _LENGTH.fullmatch(length):
        raise _malformed("Content-Length is not a number")
    return int(length)


def parse_line(line: bytes) -> tuple[bytes, bytes, bytes, bool]:
    """(method, target in origin form, authority of an absolute target or b"", whether HTTP/1.1) of a request line.

    `Invalid`, with code `VersionNotSupported` for HTTP/2 and later in plain text.
    """
    parts = line.split(b" ")
    if len(parts) != 3:
        raise _malformed("the request line is not 'METHOD TARGET HTTP/1.1'")
    method, target, version = parts
    if version != b"HTTP/1.1" and version != b"HTTP/1.0":
        if re.fullmatch(rb"HTTP/[0-9]\.[0-9]", version):
            raise Invalid("only HTTP/1.1 and HTTP/1.0 are served here: use HTTP/1.1", code="VersionNotSupported")
        raise _malformed("the request line is not 'METHOD TARGET HTTP/1.1'")
    if method not in _METHODS and not _TOKEN.fullmatch(method):
        raise _malformed("the method is not a word")
    if target.translate(None, TARGET_BYTES) or not target:
        raise _malformed("the target holds a character that must be percent-encoded")
    if target[0] == 0x2F:
        return method, target, b"", version == b"HTTP/1.1"
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise _malformed("the target does not begin with '/'")
    rest = match[2]
    return method, rest if rest[:1] == b"/" else b"/" + rest, match[1], version == b"HTTP/1.1"


_METHODS = frozenset((b"GET", b"HEAD", b"PUT", b"POST", b"DELETE", b"OPTIONS"))


def check_host(fields: Fields, http11: bool) -> None:
    """HTTP/1.1 requires exactly one Host field (RFC 9112, 3.2), made of what a host may be made of."""
    host = fields.headers.get(b"host")
    if host is None:
        if http11:
            raise _malformed("the Host header is missing")
    elif not _HOST.fullmatch(host):
        raise _malformed("the Host header is not a host")


class Chunked:
    """Takes a chunked body apart. Feed what arrived; it gives the pieces of the body and how far it has read.

    Trailer fields are checked and dropped. After `done`, feed nothing more.
    """

    __slots__ = ("_framing_bytes", "_left", "_line", "_state", "_trailer_bytes", "done")

    def __init__(self) -> None:
        self.done = False
        self._state = "size"  # size | data | end (the CRLF after data) | trailer
        self._left = 0
        self._line = b""  # the unfinished line
        self._trailer_bytes = 0
        self._framing_bytes = 0  # beyond the bytes of the body

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """(pieces, bytes used). All of `data` is used unless the body ended inside it. `Invalid` for bad framing."""
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self._state == "data":
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._framing_bytes = max(0, self._framing_bytes - len(piece))
                pieces.append(piece)
                if self._left == 0:
                    self._state = "end"
                continue
            newline = data.find(b"\n", at)
            stop = len(data) if newline < 0 else newline + 1
            self._line += data[at:stop]
            at = stop
            if len(self._line) > (_TRAILER_LINE_BYTES_MAX if self._state == "trailer" else _CHUNK_LINE_BYTES_MAX):
                raise _malformed("a line between chunks is too long")
            if newline >= 0:
                line, self._line = self._line, b""
                self._framing_bytes += len(line)
                if self._framing_bytes > limits.CHUNK_FRAMING_BYTES_MAX:
                    raise _malformed("its chunks are a few bytes each: send longer ones")
                if not line.endswith(b"\r\n"):
                    raise _malformed("a line between chunks does not end in CR LF")
                self._take_line(line[:-2])
        return pieces, at

    def _take_line(self, line: bytes) -> None:
        if self._state == "end":
            if line:
                raise _malformed("a chunk is longer than it said")
            self._state = "size"
        elif self._state == "size":
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise _malformed("a chunk does not begin with its size")
            self._left = int(match[1], 16)
            self._state = "data" if self._left else "trailer"
        elif line:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > limits.HEADER_BYTES_MAX:
                raise headers_too_large()
            parse_fields(line)
        else:
            self.done = True


def headers_too_large() -> Invalid:
    return Invalid(
        f"the headers exceed {limits.HEADER_BYTES_MAX} bytes or {limits.HEADERS_MAX} fields: send fewer",
        code="HeadersTooLarge",
    )


def line_too_long() -> Invalid:
    return Invalid(
        f"the request line exceeds {limits.REQUEST_LINE_BYTES_MAX} bytes: shorten the key or the query",
        code="URITooLong",
    )


def _malformed(what: str) -> Invalid:
    return Invalid(f"the request is not valid HTTP: {what}", code="BadRequest")
