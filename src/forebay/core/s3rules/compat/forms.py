"""Parses a browser's form as it arrives (multipart/form-data): its fields, then its file.

Theory. A form upload is one body: parts between boundary lines, small fields first, the file last. The file may have
five gigabytes, so the parser takes pieces and returns what is complete: a `Field`, `FileStarts` after the file's head,
then the file's bytes. Of a file it holds back only what may begin a boundary. A boundary line starts with a carriage
return and has no other, so only the last one in a piece can begin it, and the bytes are searched once.

S3 takes everything up to the file for the form and ignores the rest; so do we. The part named `file` is the file,
whether or not it has a file name (some clients give every part one).

Rejected: the standard library's e-mail parser (wants the whole body, and guesses where a form must be refused).

Invariants. (1) The bytes between `FileStarts` and `FileEnds` are the file's, complete and in order, however the body
was cut. (2) At most FORM_BYTES_MAX bytes are held between two pieces.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from forebay.core import limits
from forebay.core.errors import Invalid

BOUNDARY_BYTES_MAX: Final = 70  # RFC 2046, 5.1.1
_BOUNDARY = re.compile(r"multipart/form-data\s*;(?:[^\"]*;)?\s*boundary=(?:\"([^\"]+)\"|([^\s;\"]+))\s*(?:;.*)?", re.I)
_DISPOSITION = re.compile(r"form-data\s*(;.*)?", re.I | re.S)
_PARAMETER = re.compile(r";\s*([\w\-*]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;\"]*))", re.S)

_PREAMBLE, _AFTER, _HEAD, _FIELD, _FILE, _BEHIND, _DONE = range(7)


class Field(NamedTuple):
    """A whole field. The name is in lower case: S3's fields are told apart without regard to it."""

    name: str
    value: str


class FileStarts(NamedTuple):
    """The file begins: all that counts as a field has come. `filename` is without directories, "" where there is
    none."""

    filename: str


class FileEnds(NamedTuple):
    """The file is complete."""


Event = Field | FileStarts | bytes | FileEnds


def parse_boundary(content_type: str) -> bytes:
    """The boundary that the header announces; `Invalid` (`MalformedPOSTRequest`) where it is no form's."""
    match = _BOUNDARY.fullmatch(content_type.strip())
    boundary = (match[1] or match[2]).encode("latin-1") if match else b""
    if not 1 <= len(boundary) <= BOUNDARY_BYTES_MAX or b"\r" in boundary or b"\n" in boundary:
        raise _malformed("its Content-Type names no boundary of 1 to 70 bytes")
    return boundary


class FormParser:
    """`feed` it the body, then `finish`."""

    def __init__(self, boundary: bytes) -> None:
        self._line = b"\r\n--" + boundary
        self._held = b"\r\n"  # so that the first line of the body is a boundary like all others
        self._state = _PREAMBLE
        self._taken = 0  # bytes that are none of the file's
        self._name = ""
        self._fresh = False  # the blank line in front of the part's body is still there
        self.has_file = False

    def feed(self, chunk: bytes) -> list[Event]:
        """What the next bytes of the body bring. `Invalid` (`MalformedPOSTRequest`, `MaxPostPreDataLengthExceeded`) for
        what is no form, or has too much before its file."""
        events: list[Event] = []
        data = self._held + chunk if self._held else chunk
        while data and self._state != _DONE:
            before = self._state
            data = self._step(data, events)
            if self._state == before:
                break
        self._held = b"" if self._state == _DONE else data
        if self._state != _FILE and self._taken + len(self._held) > limits.FORM_BYTES_MAX:
            raise _too_long()
        return events

    def finish(self) -> None:
        """The body ended. `Invalid` if the form did not, or has no file."""
        if self._state != _DONE:
            raise _malformed("it ends before its last boundary")
        if not self.has_file:
            raise Invalid(
                "POST requires exactly one file upload per request: send a part named 'file'", code="InvalidArgument"
            )

    def _step(self, data: bytes, events: list[Event]) -> bytes:
        """Do what the state wants with `data`; what is left of it. The state stays as it is where more is needed."""
        state = self._state
        if state == _FILE:
            return self._file(data, events)
        if state == _AFTER:
            return self._after(data)
        if state == _HEAD:
            return self._head(data, events)
        end = data.find(self._line)
        if state == _FIELD:
            if end < 0:
                return data
            events.append(Field(self._name, _text(data[2:end])))
        elif end < 0:  # before the first boundary, or behind the file: nobody wants it
            kept = _held_back(data, self._line)
            self._count(len(data) - len(kept))
            return kept
        self._count(end)
        self._state = _AFTER
        return data[end + len(self._line) :]

    def _file(self, data: bytes, events: list[Event]) -> bytes:
        if self._fresh and not data.startswith(self._line):
            if self._line.startswith(data):
                return data
            self._fresh = False
            data = data[2:]
        end = data.find(self._line)
        if end < 0:
            kept = _held_back(data, self._line)
            if len(kept) < len(data):
                events.append(data[: len(data) - len(kept)] if kept else data)
            return kept
        if end:
            events.append(data[:end])
        events.append(FileEnds())
        self._state = _AFTER
        return data[end + len(self._line) :]

    def _after(self, data: bytes) -> bytes:
        """Behind a boundary: two hyphens end the form, a line's end begins the next part."""
        if len(data) < 2:
            return data
        if data.startswith(b"--"):
            self._state = _DONE
            return b""
        end = data.find(b"\r\n")
        if end < 0 and len(data) < 256 and not data.strip(b" \t\r"):
            return data
        if end < 0 or data[:end].strip(b" \t"):
            raise _malformed("something stands behind a boundary in its line")
        self._count(len(self._line) + end + 2)
        self._state = _BEHIND if self.has_file else _HEAD
        return data[end + 2 :]

    def _head(self, data: bytes, events: list[Event]) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return data
        self._count(end)
        self._name, filename = _part_name(data[:end])
        if self._name == "file":
            self.has_file = self._fresh = True
            self._state = _FILE
            events.append(FileStarts(re.split(r"[/\\]", filename)[-1]))
        else:
            self._state = _FIELD
        return data[end + 2 :]  # the blank line stays: a part without a body ends with it (RFC 2046, 5.1.1)

    def _count(self, size: int) -> None:
        self._taken += size
        if self._taken > limits.FORM_BYTES_MAX:
            raise _too_long()


def _held_back(data: bytes, line: bytes) -> bytes:
    """The end of `data` that may be the beginning of `line`."""
    start = data.rfind(b"\r", max(0, len(data) - len(line) + 1))
    return data[start:] if start >= 0 and line.startswith(data[start:]) else b""


def _part_name(head: bytes) -> tuple[str, str]:
    """Name (in lower case) and file name of a part from its header lines; no file name is ""."""
    for line in _text(head).split("\r\n"):
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() == "content-disposition":
            match = _DISPOSITION.fullmatch(value.strip())
            if match is None:
                break
            found = {
                parameter[1].lower(): _unquoted(parameter[2]) if parameter[2] is not None else parameter[3]
                for parameter in _PARAMETER.finditer(match[1] or "")
            }
            if not found.get("name"):
                break
            return found["name"].lower(), found.get("filename", "")
    raise _malformed("a part has no Content-Disposition: form-data with a name")


def _unquoted(text: str) -> str:
    """A quoted parameter: browsers write a quote as %22, older clients escape it; other backslashes are themselves."""
    return text.replace('\\"', '"').replace("%22", '"')


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _malformed("a field is not UTF-8") from None


def _malformed(what: str) -> Invalid:
    return Invalid(
        f"The body of your POST request is not well-formed multipart/form-data: {what}", code="MalformedPOSTRequest"
    )


def _too_long() -> Invalid:
    return Invalid(
        "Your POST request fields preceding the upload file were too large: "
        f"at most {limits.FORM_BYTES_MAX} bytes may come before and beside the file",
        code="MaxPostPreDataLengthExceededError",
    )
