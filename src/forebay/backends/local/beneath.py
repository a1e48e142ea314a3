"""Folders below a root that are opened without leaving it, whatever links are made meanwhile.

Theory. A path that was looked at is not the path that is used: between the two somebody may put a link in its place. So
the kernel is asked for one thing: this folder, below that one, or nothing (openat2 with RESOLVE_BENEATH). What is then
done goes through the descriptor. Relative links that stay below the root are followed, others are refused.

A kernel or sandbox without openat2 (before Linux 5.6) gets the folder name by name with O_NOFOLLOW, and then no link is
followed at all.

Rejected: realpath and a comparison (the look is not the use); RESOLVE_IN_ROOT (a link to /srv/x would quietly mean
another place than it says).

Invariant. What `open_folder` returns lay below the root when it was opened. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct

_SYS_OPENAT2 = 437  # the same number on every architecture
_BENEATH, _NO_MAGIC_LINKS = 0x08, 0x02
_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_HOW = struct.pack("=QQQ", _FLAGS, 0, _BENEATH | _NO_MAGIC_LINKS)
_ABSENT = (errno.ENOSYS, errno.EPERM)  # EPERM: a sandbox that does not know the call
_TRIES_MAX = 100  # a name below the root was renamed while it was resolved
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Outside(OSError):
    """The folder lies behind a link that leaves the root."""


def open_folder(root: str, folder: str, *, make: bool = False) -> int:
    """A descriptor (O_PATH) of `folder`, relative to `root` and "" for the root itself; `make`: with those above it, if
    they are not there. The caller closes it. `OSError`; `Outside`."""
    at = os.open(root, _FLAGS)
    if not folder:
        return at
    try:
        try:
            return _below(at, folder)
        except FileNotFoundError:
            if not make:
                raise
        return _make(at, folder)
    finally:
        os.close(at)


def _make(at: int, folder: str) -> int:
    fd, done = os.dup(at), ""
    for name in folder.split("/"):
        done = f"{done}/{name}" if done else name
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=fd)
            try:
                below = _below(at, done)
            except FileNotFoundError:
                if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, "a link to nothing", done) from None
                raise
        finally:
            os.close(fd)
        fd = below
    return fd


def _below(at: int, folder: str) -> int:
    for _ in range(_TRIES_MAX):
        fd = int(_libc.syscall(_SYS_OPENAT2, at, os.fsencode(folder), _HOW, ctypes.c_size_t(len(_HOW))))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code in _ABSENT:
            return _name_by_name(at, folder)
        if code in (errno.EXDEV, errno.ELOOP):
            raise Outside(code, os.strerror(code), folder)
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code), folder)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), folder)


def _name_by_name(at: int, folder: str) -> int:
    fd = os.dup(at)
    for name in folder.split("/"):
        try:
            below = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=fd)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                raise Outside(errno.EXDEV, "a link, and this kernel cannot say where it leads", folder) from None
            raise
        finally:
            os.close(fd)
        fd = below
    return fd
