"""Decodes aws-chunked bodies: chunks that may be signed, and a trailer behind them.

Theory. An SDK that does not want to read a body twice sends it in chunks of its own, inside the HTTP body:

    size-in-hex[;chunk-signature=…] CRLF data CRLF   … the last one has size 0 and no data …   name:value CRLF … CRLF

`Content-Encoding: aws-chunked`, or an `x-amz-content-sha256` that begins with STREAMING-, announces the coding, and
`x-amz-decoded-content-length` gives the size without framing. Trailers carry checksums and, behind signed chunks, a
signature. A chunk may be as large as the body, so its bytes are handed on before its signature is checked. Nothing that
came through here may be shown before `finish` was called.

Some clients leave out the empty line at the end. It carries no information, so `finish` does not insist on it.

Rejected: S3's least chunk of 8 KiB (it keeps S3's bookkeeping small; ours does not need it).

Invariants. (1) However the bytes are cut, the joined pieces and the trailers are the same. (2) No input costs more than
its length times a constant, and at most one line is kept.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from forebay.core import limits
from forebay.core.errors import Denied, Invalid
from forebay.core.s3rules.signedbody import ChunkVerifier

LINE_BYTES_MAX: Final = 1024  # a size with its signature is 100 bytes, a trailer with one 120
TRAILERS_MAX: Final = 16
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[ \t]*chunk-signature=([0-9a-f]{64}))?[ \t]*").fullmatch
_TRAILER = re.compile(rb"([A-Za-z0-9-]{1,64})[ \t]*:[ \t]*([\x21-\x7e]*)[ \t]*").fullmatch
_SIGNATURE: Final = b"x-amz-trailer-signature"
_LINE, _DATA, _DATA_END, _TRAILERS, _DONE = range(5)


class AwsChunked:
    """Takes one body apart. `verifier` checks signatures where they are made; `signed_trailer`: there is one more
    behind. `trailers` are the fields that came, by lower-case name, once `finish` was called."""

    def __init__(self, verifier: ChunkVerifier | None = None, *, signed_trailer: bool = False) -> None:
        self.trailers: dict[bytes, bytes] = {}
        self._verifier = verifier
        self._signed_trailer = signed_trailer
        self._state = _LINE
        self._left = 0  # of the chunk
        self._line = b""  # the unfinished line
        self._hash = hashlib.sha256()
        self._signature = b""
        self._trailer_signature = b""
        self._framing_bytes = 0  # beyond the bytes of the body

    def feed(self, data: memoryview) -> list[memoryview]:
        """The pieces of the body in `data`: views of it. `Invalid` for bad framing, `Denied` for a bad signature."""
        pieces = []
        at, end = 0, len(data)
        while at < end:
            if self._state == _DATA:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._framing_bytes = max(0, self._framing_bytes - len(piece))
                if self._verifier is not None:
                    self._hash.update(piece)
                pieces.append(piece)
                if not self._left:
                    self._end_chunk()
                    self._state = _DATA_END
            elif self._state == _DONE:
                raise _malformed("there is more behind its end")
            else:
                at = self._take_line(data, at)
        return pieces

    def finish(self) -> None:
        """All bytes came. `Invalid` (`IncompleteBody`) if they are not a whole body; `Denied`."""
        if self._state not in (_TRAILERS, _DONE) or self._line:
            raise Invalid("the chunked body ends before its last chunk: send all of it", code="IncompleteBody")
        if self._verifier is None or not self._signed_trailer:
            return
        if not self._trailer_signature:
            raise Denied("the trailer is not signed: send x-amz-trailer-signature", code="SignatureDoesNotMatch")
        self._verifier.check_trailer(self.trailers.items(), self._trailer_signature)

    def _take_line(self, data: memoryview, at: int) -> int:
        """Take what of `data` from `at` on belongs to the current line; where it ends."""
        upto = min(len(data), at + LINE_BYTES_MAX + 1)
        part = bytes(data[at:upto])
        newline = part.find(b"\n")
        if newline >= 0:
            part = part[: newline + 1]
        self._line += part
        if len(self._line) > LINE_BYTES_MAX:
            raise _malformed("a line is too long")
        if newline >= 0:
            line, self._line = self._line, b""
            self._framing_bytes += len(line)
            if self._framing_bytes > limits.CHUNK_FRAMING_BYTES_MAX:
                raise _malformed("its chunks are a few bytes each: send longer ones")
            if not line.endswith(b"\r\n"):
                raise _malformed("a line does not end in CR LF")
            self._take(line[:-2])
        return at + len(part)

    def _take(self, line: bytes) -> None:
        if self._state == _LINE:
            match = _SIZE(line)
            if match is None:
                raise _malformed("a chunk does not begin with its size")
            self._left, self._signature = int(match[1], 16), match[2] or b""
            if self._left:
                self._state = _DATA
            else:
                self._end_chunk()
                self._state = _TRAILERS
        elif self._state == _DATA_END:
            if line:
                raise _malformed("a chunk is longer than it said")
            self._state = _LINE
        elif line:
            self._take_trailer(line)
        else:
            self._state = _DONE

    def _end_chunk(self) -> None:
        if self._verifier is not None:
            self._verifier.check(self._hash.hexdigest(), self._signature)
            self._hash = hashlib.sha256()

    def _take_trailer(self, line: bytes) -> None:
        match = _TRAILER(line)
        if match is None:
            raise Invalid("the trailer holds a line that is no field", code="MalformedTrailerError")
        name, value = match[1].lower(), match[2]
        if name == _SIGNATURE:
            self._trailer_signature = value
        elif name in self.trailers or len(self.trailers) >= TRAILERS_MAX:
            raise Invalid("the trailer holds a field twice, or too many", code="MalformedTrailerError")
        else:
            self.trailers[name] = value


def _malformed(what: str) -> Invalid:
    return Invalid(f"the aws-chunked body is malformed: {what}", code="IncompleteBody")
