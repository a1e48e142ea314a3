"""Names for unfinished files of a directory bucket: one folder at its root, where a killed process's files are found.

Theory. A file that replaces another needs a temporary name before its rename, and without nameless files it needs one
from the start. A process killed in between leaves that name. Beside the object, only a walk of the whole tree would
find it. In one folder a single look is enough, and whoever writes or lists first takes that look. The folder exists
only while it is needed.

A name tells its owner: the machine's boot, the process, a number. Files of a dead process of this boot are removed at
once. Files from elsewhere (another machine on a shared file system, an earlier boot) are removed when they are old.

A root may contain other file systems, and folders that alone may be written. Files for those have their folder there
(`near`), where only this process finds it again.

Invariants. (1) A file of a living process is never removed. (2) The folder is empty or absent when nobody writes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forebay.ports import clock, machine

PREFIX = ".forebay-put-"  # what begins like this is no object
FOLDER = PREFIX + "unfinished"
_NO_LINK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
STRANGE_AGE_S = 86_400.0  # a file of another machine that nobody has touched for so long is nobody's

_numbers = itertools.count(int(clock.wall_s() * 1e6))  # a process id comes again: its numbers do not
ResultT = TypeVar("ResultT")


def boot() -> str:
    """Names this machine since it started."""
    try:
        return machine.boot_id().replace("-", "")[:12]
    except OSError:
        return "unknown"  # not Linux: nothing is known to be dead, all waits until it is old


class Unfinished:
    """The names under one root. Everything here blocks."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = f"{root}/{FOLDER}"
        self._boot = boot()
        self._swept = False

    def near(self, folder: str) -> Unfinished:
        """These names, or others in `folder` if a file cannot go from here to there by a rename."""
        if os.stat(folder).st_dev == os.stat(self._root).st_dev and os.access(self._root, os.W_OK | os.X_OK):
            return self
        return Unfinished(folder)

    def name(self, make: Callable[[str], ResultT], places: list[int]) -> tuple[str, ResultT]:
        """A new name and what `make` made under it. It begins with a descriptor that is added to `places`, to be closed
        when the name is no more. `OSError` as of `make`, and where a link has the folder's name."""
        while True:
            with contextlib.suppress(FileExistsError):
                Path(self._folder).mkdir()
            with contextlib.suppress(FileNotFoundError):  # another write just ended, and took the folder away
                places.append(os.open(self._folder, _NO_LINK))
                path = f"/proc/self/fd/{places[-1]}/{self._boot}-{os.getpid()}-{next(_numbers)}"
                return path, make(path)
            if not os.path.isdir(self._root):
                raise FileNotFoundError(errno.ENOENT, "the directory is gone", self._root)

    def done(self) -> None:
        """A name was renamed or removed: the folder goes if it was the last."""
        with contextlib.suppress(OSError):
            Path(self._folder).rmdir()

    def sweep(self) -> None:
        """Once for each `Unfinished`: remove what processes that are gone have left."""
        if self._swept:
            return
        self._swept = True
        try:
            fd = os.open(self._folder, _NO_LINK & ~os.O_PATH)  # what a link leads to is nothing that we left
        except OSError:
            return
        try:
            for name in os.listdir(fd):
                with contextlib.suppress(OSError):
                    if self._is_left(name, fd):
                        os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        self.done()

    def _is_left(self, name: str, fd: int) -> bool:
        whose, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if whose == self._boot and pid.isascii() and pid.isdigit():
            return not machine.alive(int(pid))
        return clock.wall_s() - os.stat(name, dir_fd=fd, follow_symlinks=False).st_ctime > STRANGE_AGE_S
