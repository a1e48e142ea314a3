"""Files that are appended to for as long as a node runs, and put aside when they have grown.

Theory. A file that is full gets a number: `node.log` becomes `node.log.1`, what that was becomes `node.log.2`, and so
on; of more than `ROTATED_KEPT` the oldest goes. Whoever writes to it finds out by itself, before it writes, that the
path is another file now (`is_at`), and opens that. So a rotation by somebody else (logrotate) works as well, and
nobody has to be told.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ROTATED_KEPT = 5


def rotate(path: Path) -> None:
    """Put the file aside. `OSError` if that cannot be done; then it is where it was."""
    for number in range(ROTATED_KEPT - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.replace(f"{path}.{number}", f"{path}.{number + 1}")
    os.replace(path, f"{path}.1")


def open_to_append(path: Path) -> int:
    """A descriptor that appends to the file, which is made if it is not there; only the node's user may read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def is_at(path: Path, fd: int) -> bool:
    """Whether the file at `path` is the one that is open as `fd`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
