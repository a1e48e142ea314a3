"""The two forms of a batch's answer: frames, or a POSIX tar for people with curl.

Theory. A form makes what surrounds an item's bytes, and what stands for an item that failed; the bytes pass in between
and are never gathered. Frames (core/messages/batch.py) have a fixed size, so the length of an answer follows from its
items' sizes. In a tar each item is a regular file under its key (`KEY/MEMBER` for a member), with the object's time. A
failed item is an empty file `KEY.error` whose pax comment has the error. `tarfile` makes the headers, long names
included.

Invariants. (1) A frame is FRAME.size bytes longer than its item. (2) Every entry of a tar fills whole blocks.
"""

from __future__ import annotations

import tarfile

from forebay.core.errors import ForebayError
from forebay.core.messages import batch
from forebay.core.messages.batch import FRAME, Item
from forebay.core.versions import object_of
from forebay.node.front.http.requests import status_of

_BLOCK_BYTES = 512


class FrameForm:
    """The frames of core/messages/batch.py."""

    head = b"Content-Type: %b\r\n" % batch.MEDIA.encode()
    sized = True  # the length of the answer follows from the items' sizes
    end = b""

    def begin(self, item: Item, flags: int, size: int, total: int, modified_s: float) -> bytes:
        """What goes before the bytes of an item."""
        return FRAME.pack(200, flags, 0, size, total)

    def after(self, size: int) -> bytes:
        """What goes after them."""
        return b""

    def failed(self, item: Item, error: ForebayError) -> bytes:
        """What stands for an item that cannot be had."""
        return batch.failed_frame(error, status_of(error))


class TarForm:
    """Entries of a tar; the methods are those of `FrameForm`."""

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


Form = FrameForm | TarForm


def _name(item: Item) -> str:
    _, key = object_of(item.bucket, item.key)
    return f"{key}/{item.member}" if item.member else key


def _header(name: str, size: int, modified_s: float, comment: str = "") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, max(0, int(modified_s)), 0o644
    if comment:
        entry.pax_headers = {"comment": comment}
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
