"""Where LMDB keeps its table of readers: in memory, not on the volume.

Theory. LMDB notes each read in a table that all processes map, `lock.mdb` beside the data. On a disk that takes no
writes (it hangs, or is frozen for a snapshot) the first look-up would wait in that page as long as the disk does, and
so would the one thread that serves all other disks. So `lock.mdb` is a symbolic link into memory (MEMORY_DIR), and
every process that opens the index by its path follows the link. A machine stop makes the table worthless anyway, so
keeping it only in memory loses nothing.

The table is named after the device and inode of its directory: a copied volume, which has copied the link, does not
share its original's table. Its pages are allocated when it is made, so memory that runs out later kills nobody. The
last process that leaves removes it. If there is no such memory, or none is left, the table is a file on the volume,
LMDB's default.

A table is replaced only while nobody has it open. Readers with different tables would not see each other, and pages
would be overwritten under a reader. LMDB's own lock on the table's first byte shows whether anybody has it open; a
`flock` on the directory keeps others from opening it meanwhile.

Rejected: no table (`MDB_NOLOCK`: a writer would reuse pages that are being read); tables in the node's directory (it is
on a disk, too); a new table at each start of the writer (fronts live longer than engines).

Invariants. (1) All processes that have an index open share one table. (2) With the table in memory no look-up writes to
a disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forebay.core import limits
from forebay.ports import clock

MEMORY_DIR = "/dev/shm"
NAME = "lock.mdb"
_BYTES = 64 * (limits.INDEX_READERS_MAX + 8)  # LMDB's head and a cache line for each reader
_GATE_WAIT_S = 2.0


@contextmanager
def seated(directory: str) -> Iterator[None]:
    """Around LMDB's opening of `directory`: move the table into memory if possible. `OSError`: the directory cannot be
    read, or another process has been replacing its table for too long."""
    gate = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not is_in_memory(directory):
            _lock(gate, fcntl.LOCK_EX)
            with suppress(OSError):  # it stays where it is
                _bring_into_memory(directory)
        _lock(gate, fcntl.LOCK_SH)
        yield
    finally:
        os.close(gate)


def is_in_memory(directory: str) -> bool:
    """Whether the table of this directory is in memory, and its own."""
    found = _target(directory)
    return bool(found) and found == _target_of(directory) and os.path.exists(found)


def left(directory: str, table: str, *, wrote: bool) -> None:
    """This process has closed the index whose table was at `table`: remove the table if nobody else has it open. The
    writer (`wrote`) removes the link too, so that the directory can be copied as it is."""
    if not table:
        return
    with suppress(OSError):
        try:
            gate = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            _remove_unused(table)  # nobody can open it any more
            return
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _remove_unused(table) and wrote:
                os.unlink(os.path.join(directory, NAME))
        finally:
            os.close(gate)


def place(directory: str) -> str:
    """The path of the table in memory; "" where it is on the volume."""
    return _target(directory)


def _target(directory: str) -> str:
    try:
        return str(Path(directory, NAME).readlink())
    except OSError:
        return ""


def _target_of(directory: str) -> str:
    """The path in memory for this directory's table."""
    found = os.stat(directory)
    return f"{MEMORY_DIR}/forebay-{os.geteuid()}/{found.st_dev:x}-{found.st_ino:x}"


def _bring_into_memory(directory: str) -> None:
    """Make the link point there. `OSError`: everything is as it was, or the link is gone."""
    target, name = _target_of(directory), os.path.join(directory, NAME)
    if os.path.exists(name) and not _unused(name):
        return
    try:
        if not os.path.exists(target):
            _allocate(target)
        with suppress(FileNotFoundError):
            os.unlink(name + ".new")
        Path(name + ".new").symlink_to(target)
        os.replace(name + ".new", name)
    except OSError:
        if _target(directory):
            os.unlink(name)  # a link that leads nowhere, or to another's table
        raise


def _allocate(path: str) -> None:
    own = os.path.dirname(path)
    with suppress(FileExistsError):
        Path(own).mkdir(0o700)
    found = os.lstat(own)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "somebody else's", own)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, _BYTES)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _unused(path: str) -> bool:
    """Whether no process has this table open. This process must not have: closing the file would drop its lock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _remove_unused(path: str) -> bool:
    unused = _unused(path)
    if unused:
        os.unlink(path)
    return unused


def _lock(gate: int, operation: int) -> None:
    until_s = clock.monotonic_s() + _GATE_WAIT_S
    while True:
        try:
            fcntl.flock(gate, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if clock.monotonic_s() > until_s:
                raise
            time.sleep(0.002)
