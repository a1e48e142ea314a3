"""Memory of this process that a node on this host can read, so that bytes in it need not be sent.

Theory. It is a memfd: a file without a name, which exists as long as somebody has it open or mapped. A node takes its
descriptor (`door.py`) and reads. It is sealed against shrinking, since the node must never find it short.

Invariant. The memory is freed when nothing refers to it any more, here or at the node.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable


class SharedMemory:
    """`size_bytes` of memory, of zeros at first. `OSError` where the system has no such memory, or none left."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = -1
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory that can be shared")
        self.fd = os.memfd_create("forebay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.map = mmap.mmap(self.fd, size_bytes)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if self.fd >= 0:
            close(self.fd)

    def view(self, size_bytes: int) -> memoryview:
        """The first `size_bytes`."""
        return memoryview(self.map)[:size_bytes]
