"""Receives bodies into a caller's buffer or a file descriptor.

Theory. A sink hands out memory and the driver receives into it. A buffer gets the bytes without any copy. A descriptor
costs one copy, the kernel's own, through a piece of memory that stays in the processor's cache and is used again and
again.

Rejected for now: `os.splice` from socket to file through a pipe. It is a fifth to two fifths faster on memory here. But
it is a second way for the same bytes (no TLS, no terminals, no files opened for appending, a pipe for each connection),
and disks limit a copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid
from forebay.core.messages.http1 import Response

_PIECE_BYTES = 256 * limits.KIB


class IntoBuffer:
    """Fills a caller's buffer from its start."""

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self._view = memoryview(buffer).cast("B")
        self._position = 0

    def begin(self, response: Response) -> None:
        """`Invalid` if the body is known to be longer than the buffer."""
        self._position = 0  # it may begin again, with another version
        length = int(response.headers.get("content-length", "0"))
        if length > len(self._view):
            raise Invalid(f"the buffer holds {len(self._view)} bytes and the body has {length}: pass a larger one")

    def buffer(self) -> memoryview:
        if self._position == len(self._view):
            raise Invalid(f"the body is longer than the buffer of {len(self._view)} bytes: pass a larger one")
        return self._view[self._position :]

    def wrote(self, size_bytes: int) -> None:
        self._position += size_bytes


class IntoFd:
    """Writes to a descriptor in order, wherever it stands. `OSError` from the descriptor passes through."""

    def __init__(self, fd: int, progress: Callable[[int], None] | None = None) -> None:
        self._fd = fd
        self._progress = progress
        self._piece = memoryview(bytearray(_PIECE_BYTES))

    def begin(self, response: Response) -> None:
        """Any success is welcome."""

    def buffer(self) -> memoryview:
        return self._piece[:]

    def wrote(self, size_bytes: int) -> None:
        done = 0
        while done < size_bytes:
            written = os.write(self._fd, self._piece[done:size_bytes])
            if written <= 0:
                raise Corrupt("the descriptor took no bytes: check the file or pipe behind it")
            done += written
        if self._progress is not None:
            self._progress(size_bytes)
