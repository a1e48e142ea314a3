"""The file in which a disk tier keeps its bytes in one directory: makes, opens and cleans it up.

Theory. The bytes are worthless to every other process, so they must end with this one, however it ends. The file is
made, locked and unlinked at once, and only then gets its room. From there on the kernel frees it when the last
descriptor closes, also after SIGKILL and power failures. The price: `ls` and `du` do not show a file without a name
(`df` does, and `lsof +L1` names its process). A forked child has the descriptors too, and keeps the room until it ends.

A name stays if a process dies between making and unlinking (an empty file), and on file systems that refuse to unlink
an open file (a full one; it keeps its name until it is closed). So every open removes files of ours that nobody has
locked and whose maker is gone: the machine was restarted, or no such process runs. Even a wrong guess is harmless
(process numbers of another container mean nothing here): the maker goes on through its descriptor.

Direct I/O (O_DIRECT) keeps a stream of gigabytes out of the page cache, which would take the memory that the offload is
to save. Trying shows whether a file system has it, and with which alignment. Where it has not, pieces are written back
and dropped from the cache one by one (`buffered`): slower, and reported.

Rejected: O_TMPFILE (not on all file systems, so there would be two ways to test); a fixed name for the next run (its
contents are worthless, and two jobs may share a directory); STATX_DIOALIGN (absent before Linux 6.1; trying answers
everywhere).

Invariants. (1) While it is open the owner locks the file (flock). (2) All its room is allocated before it is used,
where the file system can. (3) `close` leaves no name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
from typing import Literal

from forebay.core.errors import Busy, Denied, ForebayError, NotFound, Unavailable
from forebay.offload.tiers.extents import BLOCK_BYTES
from forebay.offload.tiers.tiers import page_aligned
from forebay.ports.machine import alive, boot_id

Mode = Literal["O_DIRECT", "buffered"]
ALIGNMENTS = (64, 512)  # of addresses, tried in turn before a block's: what torch gives, and a sector
_NAME = re.compile(r"forebay-offload-([0-9a-f-]{36})-(\d+)-(\d+)\.swap")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_NO_ROOM_AHEAD = (errno.EOPNOTSUPP, errno.ENOSYS)


def trouble(directory: str, doing: str, error: OSError) -> ForebayError:
    """The error of ours that stands for a disk's."""
    said = f"offload directory {directory}: {doing} failed ({error.strerror or error})"
    if error.errno in _FULL:
        return Busy(f"{said}: free room there, or give the tier less")
    if error.errno in _REFUSED:
        return Denied(f"{said}: let this user write there, or give another directory")
    if error.errno in _MISSING:
        return NotFound(f"{said}: make the directory, or mount its disk")
    return Unavailable(f"{said}: look at the disk (dmesg), or take the directory out of the tier")


def reclaim(directory: str) -> list[str]:
    """Remove the files of processes that are gone; their names. Files that others hold or own stay."""
    removed = []
    here = boot_id()
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is None or (match[1] == here and alive(int(match[2])) and int(match[2]) != os.getpid()):
            continue
        path = os.path.join(directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            removed.append(name)
        except OSError:
            continue  # held, or gone meanwhile
        finally:
            os.close(fd)
    return removed


class SwapFile:
    """A file of `size_bytes` in a directory, open and locked. `mode` says how it is read and written; reads and writes
    begin at multiples of `block_bytes`, are whole multiples long, and take addresses that are multiples of
    `align_bytes`."""

    def __init__(self, directory: str, size_bytes: int, *, direct: bool) -> None:
        """Make it, or raise the kind that says what to do and leave nothing."""
        self.directory = directory
        self.mode: Mode = "buffered"
        self.block_bytes = self.align_bytes = 1
        self._path = ""  # while it has a name
        self.fd = -1
        try:
            reclaim(directory)
            self._make()
            self._reserve(size_bytes)
            if direct:
                self._go_direct()
        except OSError as error:
            self.close()
            raise trouble(directory, f"making a file of {size_bytes} bytes", error) from error
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for number in itertools.count():
            path = os.path.join(self.directory, f"forebay-offload-{boot_id()}-{os.getpid()}-{number}.swap")
            try:
                self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileExistsError:
                continue
            self._path = path
            break
        with contextlib.suppress(OSError):  # some network file systems have no locks: then process numbers decide
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._forget_name()

    def _forget_name(self) -> None:
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass  # someone who took us for dead
        except OSError:
            return  # a file system that keeps what is open: `close` tries again
        self._path = ""

    def _reserve(self, size_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM_AHEAD:
                raise
            os.ftruncate(self.fd, size_bytes)

    def _go_direct(self) -> None:
        """Direct I/O if a write and a read show that it works, with the least alignment that does."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        memory = page_aligned(2 * BLOCK_BYTES)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(self.fd, [memory[:BLOCK_BYTES]], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            return
        self.mode, self.block_bytes, self.align_bytes = "O_DIRECT", BLOCK_BYTES, BLOCK_BYTES
        for align_bytes in ALIGNMENTS:
            with contextlib.suppress(OSError):
                os.preadv(self.fd, [memory[align_bytes : align_bytes + BLOCK_BYTES]], 0)
                self.align_bytes = align_bytes
                return

    def close(self) -> None:
        """Give the room back. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = ""
