"""A body of unknown length: chunks (RFC 9112 7.1).

Theory. A chunk is a line with its size, its bytes, and a line end. Bytes in memory are framed whole. Bytes of a file
are sent by the kernel from where they lie, so their chunk is opened before them, and its end goes out with what
follows.

Invariant. `last` ends a body that decodes to the pieces that were framed, in their order.
"""

from __future__ import annotations


class ChunkFraming:
    """The chunks of one body."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = b""  # what the chunk that was opened last still lacks

    def whole(self, data: bytes | memoryview) -> bytes:
        """`data`, at least one byte, as a chunk."""
        end, self._end = self._end, b""
        return b"".join((end, b"%x\r\n" % len(data), data, b"\r\n"))

    def opening(self, size_bytes: int) -> bytes:
        """What goes before `size_bytes` that are sent otherwise."""
        end, self._end = self._end, b"\r\n"
        return b"%b%x\r\n" % (end, size_bytes)

    def last(self) -> bytes:
        """What ends the body."""
        return self._end + b"0\r\n\r\n"
