"""A batch's answer as a POSIX tar, for people with curl: `curl … | tar x`.

Theory. Each item is a regular file of the archive under its key (`KEY/MEMBER` for a member), with the object's time; an
item that cannot be had is an empty file `KEY.error` whose pax comment says why. `tarfile` makes the headers, long names
and all; bytes pass by as they do in frames, and are never gathered.

Invariant. Every entry fills whole blocks of 512 bytes.
"""

from __future__ import annotations

import tarfile

from forebay.core.batch import Item
from forebay.core.errors import ForebayError
from forebay.node.http.requests import status_of

_BLOCK_BYTES = 512


class TarForm:
    """See the module's header; the methods are those of `FrameForm`."""

    head = b"Content-Type: application/x-tar\r\n"
    sized = False
    end = bytes(2 * _BLOCK_BYTES)

    def begin(self, item: Item, flags: int, size: int, total: int, modified_s: float) -> bytes:
        """The header of an entry."""
        return _header(_name(item), size, modified_s)

    def after(self, size: int) -> bytes:
        """What fills the last block."""
        return bytes(-size % _BLOCK_BYTES)

    def failed(self, item: Item, error: ForebayError) -> bytes:
        """An empty entry that says the error."""
        return _header(_name(item) + ".error", 0, 0.0, f"{status_of(error)} {error.kind}: {error.message}")


def _name(item: Item) -> str:
    return f"{item.key}/{item.member}" if item.member else item.key


def _header(name: str, size: int, modified_s: float, comment: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, max(0, int(modified_s)), 0o644
    if comment:
        entry.pax_headers = {"comment": comment}
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
