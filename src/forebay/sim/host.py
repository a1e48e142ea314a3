"""The machine that a node runs on, as far as it must be able to fail: files, their names, and stops.

Theory. Files are real, in a directory in memory, so every read is the kernel's own. The calls by which a process
changes files go through here for as long as a world runs (`installed`): they may be refused, and what they did to names
is written down. `fsync` of a file keeps a copy of what it holds; `fsync` of a directory makes what was done to its
names permanent. So when the machine stops, what may be there afterwards is known, and one such state is made: names
that were not synced are lost from some moment on or one by one, contents that were not synced are lost, torn at
sectors, or there. LMDB and SQLite write by themselves: what they sync is there after a stop; the visible index, which
is not synced, is taken away then, cut, or left as it is.

A process that dies leaves its files as they are. Nothing that it had begun has an effect afterwards (`dead`), though
Python runs `finally` clauses of its coroutines when it gets rid of them.

Invariants. (1) Outside of the world's directory nothing is different. (2) What was synced is there after every stop.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import io
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import lmdb

from forebay.node.store.disk import files, index, volume_threads
from forebay.sim.doors import Patch, patched
from forebay.sim.loop import Killed

SECTOR_BYTES = 512
DISK_BYTES = 16 << 30
FIRST_PID = 4_000_000  # above what this kernel gives
_DIRECTORY = -1
_real = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)}, open_file=builtins.open)
_Socket = socket.socket


class _Change(NamedTuple):
    """Of the names in a volume. `inode` is what `path` names afterwards."""

    what: str  # put, move, remove
    path: str
    inode: int
    source: str = ""


class _Content(NamedTuple):
    data: bytes
    attributes: dict[str, bytes]


class Host:
    """One machine. `chance` decides what a stop leaves."""

    def __init__(self, root: str, chance: Random) -> None:
        self.root = root
        self.chance = chance
        self.boot = 1
        self.pid = FIRST_PID
        self.dead = False
        self.full: set[str] = set()  # volumes that take nothing more
        self.failing: set[str] = set()  # volumes whose next sync fails
        self.volumes: list[str] = []
        self.changes: Callable[[str], None] = lambda volume: None  # hears of each change to a volume, before it is made
        self.changes_left = -1  # calls that change something until the process is killed; negative: it is not
        self._paths: dict[int, str] = {}  # of open descriptors
        self._sockets: set[socket.socket] = set()
        self._environments: list[Any] = []
        self._connections: list[sqlite3.Connection] = []
        self._tables: set[str] = set()  # of LMDB's readers, outside of the root
        self._names: dict[str, int] = {}  # that are permanent
        self._changes: list[_Change] = []  # that are not
        self._contents: dict[int, _Content] = {}  # that are permanent
        self._unlinked: dict[int, _Content] = {}

    # --- what a process may do ---------------------------------------------------------------------------------------
    def installed(self) -> AbstractContextManager[None]:
        """For as long as this lasts, the calls of this process come here."""
        return Hosts(self).installed()

    def opened(self, connection: socket.socket) -> None:
        """A socket that is closed with the process."""
        self._sockets.add(connection)

    def _path(self, path: Any, dir_fd: int | None = None) -> str:
        """The path as text; "" for a descriptor that is not of a file here."""
        if isinstance(path, int):
            return self._paths.get(path, "")
        text = os.fsdecode(path)
        return f"{self._paths.get(dir_fd, '')}/{text}" if dir_fd is not None else text

    def _volume(self, path: str) -> str:
        return next((each for each in self.volumes if path.startswith(each + "/") or path == each), "")

    def _check(self, path: str, *, grows: bool = False) -> None:
        """Raise what keeps a change from being made."""
        if self.dead:
            raise OSError(errno.EBADF, "the process has ended", path)
        if self.changes_left >= 0:
            self.changes_left -= 1
            if self.changes_left < 0:
                self.dead = True
                raise Killed
        volume = self._volume(path)
        if volume:
            self.changes(volume)
        if grows and volume in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _note(self, what: str, path: str, source: str = "", *, directory: bool = False) -> None:
        if self._volume(path):
            inode = _DIRECTORY if directory else _real.lstat(path).st_ino if what != "remove" else 0
            self._changes.append(_Change(what, os.path.normpath(path), inode, os.path.normpath(source or path)))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = self._path(path, dir_fd)
        own = f"/proc/{self.pid}/"
        if text.startswith(own):
            text = "/proc/self/" + text[len(own) :]
        if not text.startswith(self.root):
            fd: int = _real.open(text if dir_fd is None else path, flags, mode, dir_fd=dir_fd)
            self._paths[fd] = text
            return fd
        made = bool(flags & os.O_CREAT) and not os.path.lexists(text)
        if self.dead or made:
            self._check(text, grows=True)
        fd = _real.open(text, flags, mode)
        self._paths[fd] = text
        if made:
            self._note("put", text)
        return fd

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if isinstance(file, int):
            return _real.open_file(file, mode, *args, **named)
        text = os.fsdecode(file)
        if text == "/proc/sys/kernel/random/boot_id":
            return io.StringIO(f"boot-{self.boot}\n")
        if text.startswith("/proc/4") and text.endswith("/stat"):
            if text != f"/proc/{self.pid}/stat":
                raise FileNotFoundError(errno.ENOENT, "no such process", text)
            return io.StringIO("1 (x) R 0\n")
        if not text.startswith(self.root):
            return _real.open_file(file, mode, *args, **named)
        changes = any(letter in mode for letter in "wxa+")
        made = changes and not os.path.lexists(text)
        if changes:
            self._check(text, grows=True)
        found = _real.open_file(file, mode, *args, **named)
        if made:
            self._note("put", text)
        return found

    def _close(self, fd: int) -> None:
        if not self.dead:
            self._paths.pop(fd, None)
            _real.close(fd)

    def _dup(self, fd: int) -> int:
        other: int = _real.dup(fd)
        self._paths[other] = self._paths.get(fd, "")
        return other

    def _memfd_create(self, name: str, flags: int = 0) -> int:
        fd: int = _real.memfd_create(name, flags)
        self._paths[fd] = "memfd"
        return fd

    def _getpid(self) -> int:
        return self.pid

    def _statvfs(self, path: Any) -> Any:
        free = 0 if self._volume(self._path(path)) in self.full else DISK_BYTES // 2
        return SimpleNamespace(f_frsize=4096, f_blocks=DISK_BYTES // 4096, f_bavail=free // 4096, f_bfree=free // 4096)

    def _posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        self._check(self._path(fd), grows=True)  # room is not what this machine lacks

    def _changing(name: str) -> Callable[..., Any]:  # type: ignore[misc]
        real = getattr(_real, name)

        def change(self: Host, file: Any, *args: Any, **named: Any) -> Any:
            self._check(self._path(file), grows=name in ("pwrite", "pwritev", "write", "setxattr"))
            return real(file, *args, **named)

        return change

    _pwrite, _pwritev, _write = _changing("pwrite"), _changing("pwritev"), _changing("write")
    _ftruncate, _truncate, _setxattr = _changing("ftruncate"), _changing("truncate"), _changing("setxattr")
    _utime = _changing("utime")
    del _changing

    def _copy_file_range(self, source: int, target: int, count: int, *args: Any, **named: Any) -> Any:
        self._check(self._path(target), grows=True)
        return _real.copy_file_range(source, target, count, *args, **named)

    def _rename(self, source: Any, target: Any) -> None:
        before, after = self._path(source), self._path(target)
        self._check(after)
        self._keep(after)
        directory = os.path.isdir(before)
        _real.replace(before, after)
        self._note("move", after, before, directory=directory)

    _replace = _rename

    def _link(self, source: Any, target: Any, **named: Any) -> None:
        after = self._path(target)
        self._check(after)
        _real.link(source, target, **named)
        self._note("put", after)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        text = self._path(path, dir_fd)
        self._check(text)
        self._keep(text)
        _real.unlink(path, dir_fd=dir_fd)
        self._note("remove", text)

    _remove = _unlink

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._check(self._path(path, dir_fd))
        _real.rmdir(path, dir_fd=dir_fd)
        self._note("remove", self._path(path, dir_fd))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._check(self._path(path, dir_fd))
        _real.mkdir(path, mode, dir_fd=dir_fd)
        self._note("put", self._path(path, dir_fd), directory=True)

    # --- syncing -----------------------------------------------------------------------------------------------------
    def _fsync(self, fd: int) -> None:
        self._check("")
        path = _real.readlink(f"/proc/self/fd/{fd}")
        volume = self._volume(path)
        if volume in self.failing:
            self.failing.discard(volume)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if not volume:
            return
        if os.path.isdir(path):
            self._sync_names(path)
        else:
            self._contents[_real.fstat(fd).st_ino] = _content(path if os.path.exists(path) else f"/proc/self/fd/{fd}")

    _fdatasync = _fsync

    def _sync_names(self, directory: str) -> None:
        """What was done to names in this directory is permanent, and so is that it is there."""
        left = []
        for change in self._changes:
            made = change.inode == _DIRECTORY and f"{directory}/".startswith(f"{change.path}/")
            if made or directory in (os.path.dirname(change.path), os.path.dirname(change.source)):
                _apply(self._names, change)
            else:
                left.append(change)
        self._changes = left

    def _syncfs(self, path: str) -> None:
        self._check(path)
        self._settle(self._volume(path))

    def _settle(self, volume: str) -> None:
        """Everything in this volume is permanent as it is."""
        self._changes = [change for change in self._changes if self._volume(change.path) != volume]
        self._names = {name: inode for name, inode in self._names.items() if self._volume(name) != volume}
        for folder, _, names in os.walk(volume):
            self._names[folder] = _DIRECTORY
            for name in names:
                path = f"{folder}/{name}"
                if not _real.path.islink(path):
                    inode = self._names[path] = _real.lstat(path).st_ino
                    self._contents[inode] = _content(path)

    def _keep(self, path: str) -> None:
        """A file is about to lose its name, which a stop may give back."""
        if self._volume(path) and os.path.isfile(path) and not _real.path.islink(path):
            self._unlinked[_real.lstat(path).st_ino] = _content(path)

    # --- stops -------------------------------------------------------------------------------------------------------
    def _open_environment(self, *args: Any, **named: Any) -> Any:
        self._check("")
        environment = _real_lmdb(*args, **named)
        self._environments.append(environment)
        with contextlib.suppress(OSError):
            self._tables.add(_real.readlink(f"{args[0]}/lock.mdb"))
        return environment

    def _connect(self, *args: Any, **named: Any) -> Any:
        connection = _real_connect(*args, **named)
        self._connections.append(connection)
        return connection

    def kill(self) -> None:
        """The process ends here: what it had open is closed, and nothing else happens."""
        for connection in self._connections:
            connection.close()
        for environment in self._environments:
            environment.close()
        for each in list(self._sockets):
            each.close()
        for fd, path in self._paths.items():
            with contextlib.suppress(OSError):
                if path and (path == "memfd" or _real.readlink(f"/proc/self/fd/{fd}").startswith(self.root)):
                    _real.close(fd)
        for held in (self._connections, self._environments, self._sockets, self._paths):
            held.clear()
        for known in (index._open, volume_threads._of_files):
            for path in [path for path in known if path.startswith(self.root + "/")]:
                known.pop(path)
        self.pid += 1
        self.changes_left = -1

    def hide(self, volume: str) -> None:
        """Its disk is not there, until `show`."""
        _real.rename(volume, volume + ".hidden")

    def show(self, volume: str) -> None:
        """It is there again, as it was."""
        if os.path.isdir(volume):
            _remove_tree(volume)  # a mount point, at most
        _real.rename(volume + ".hidden", volume)

    def stop(self) -> None:
        """The machine stops (its processes have been killed), and starts again."""
        self.boot += 1
        for volume in self.volumes:
            self._lose(volume)
        for table in self._tables:
            with contextlib.suppress(OSError):
                _real.unlink(table)

    def _lose(self, volume: str) -> None:
        """Make what is left of a volume."""
        names = {name: inode for name, inode in self._names.items() if self._volume(name) == volume}
        changes = [change for change in self._changes if self._volume(change.path) == volume]
        chance = self.chance
        if chance.random() < 0.5:
            changes = changes[: chance.randrange(len(changes) + 1)]
        else:
            share = chance.random()
            changes = [change for change in changes if chance.random() < share]
        for change in changes:
            _apply(names, change)
        there, alone, inodes = self._there(volume)
        _real.rename(volume, volume + ".before")
        _real.mkdir(volume)
        for name, inode in sorted(names.items()):
            if inode == _DIRECTORY and os.path.isdir(os.path.dirname(name)) and name != volume:
                _real.mkdir(name)
        for name, inode in sorted(names.items()):
            if inode != _DIRECTORY and os.path.isdir(os.path.dirname(name)) and name not in alone:
                _restore(name, self._survives(inode, there))
        for name, content in alone.items():
            if os.path.isdir(os.path.dirname(name)):
                self._restore_environment(name, content, self._contents.get(inodes[name]))
        _remove_tree(volume + ".before")
        self._unlinked.clear()
        self._settle(volume)

    def _there(self, volume: str) -> tuple[dict[int, _Content], dict[str, _Content], dict[str, int]]:
        """What files hold now: by inode, and, of LMDB's, by name, with their inodes."""
        there, alone, inodes = dict(self._unlinked), {}, {}
        for folder, _, names in os.walk(volume):
            for name in names:
                path = f"{folder}/{name}"
                if name == "data.mdb":
                    alone[path], inodes[path] = _content(path), _real.lstat(path).st_ino
                elif not _real.path.islink(path):
                    there[_real.lstat(path).st_ino] = _content(path)
        return there, alone, inodes

    def _survives(self, inode: int, there: dict[int, _Content]) -> _Content:
        """One of the things that may be in a file now."""
        nothing = _Content(b"", {})
        synced, now = self._contents.get(inode, nothing), there.get(inode, nothing)
        if synced == now:
            return now
        fate = self.chance.randrange(4)
        if fate < 2:
            return (synced, now)[fate]
        data = bytearray(synced.data.ljust(len(now.data), b"\0") if fate == 2 else synced.data)
        for at in range(0, min(len(data), len(now.data)), SECTOR_BYTES):
            if self.chance.random() < 0.5:
                data[at : at + SECTOR_BYTES] = now.data[at : at + SECTOR_BYTES][: len(data) - at]
        return _Content(bytes(data), (synced, now)[self.chance.randrange(2)].attributes)

    def _restore_environment(self, name: str, content: _Content, synced: _Content | None) -> None:
        if "/index/" in name and content != synced:  # nobody believes it
            fate = self.chance.randrange(3)
            if fate == 0:
                return
            content = _Content(content.data if fate == 1 else b"", {})
        _restore(name, content)

    def clean_up(self) -> None:
        """Leave nothing outside of the root."""
        for table in self._tables:
            with contextlib.suppress(OSError):
                _real.unlink(table)


class Hosts:
    """The machines of one world, of which `current` is the one whose process runs."""

    def __init__(self, current: Host) -> None:
        self.current = current

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For as long as this lasts, the calls of this process come to the current machine."""
        hosts = self

        class Tracked(_Socket):
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                hosts.current.opened(self)

            __hash__ = object.__hash__

        replaced: list[Patch] = [
            *((os, name, self._passed(f"_{name}")) for name in _CALLS),
            (builtins, "open", self._passed("_open_file")),
            (io, "open", self._passed("_open_file")),
            (files, "syncfs", self._passed("_syncfs")),
            (files, "begin_writeback", lambda fd, start=0, size=0: None),
            (lmdb, "open", self._passed("_open_environment")),
            (sqlite3, "connect", self._passed("_connect")),
            (socket, "socket", Tracked),
        ]
        with patched(replaced):
            try:
                yield
            finally:
                self.current.dead = True
                gc.collect()

    def _passed(self, name: str) -> Callable[..., Any]:
        call = vars(Host)[name]

        def passed(*args: Any, **named: Any) -> Any:
            return call(self.current, *args, **named)

        return passed


def _apply(names: dict[str, int], change: _Change) -> None:
    if change.what == "move":
        names.pop(change.source, None)
        if change.inode == _DIRECTORY:
            for name in [name for name in names if name.startswith(change.source + "/")]:
                names[change.path + name[len(change.source) :]] = names.pop(name)
    if change.what == "remove":
        names.pop(change.path, None)
    else:
        names[change.path] = change.inode


def _remove_tree(path: str) -> None:
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            _real.unlink(f"{folder}/{name}")
        for name in folders:
            _real.rmdir(f"{folder}/{name}")
    _real.rmdir(path)


def _content(path: str) -> _Content:
    with _real.open_file(path, "rb") as file:
        data = file.read()
    names = _real.listxattr(path) if path[:6] != "/proc/" else []
    return _Content(data, {name: _real.getxattr(path, name) for name in names})


def _restore(path: str, content: _Content) -> None:
    with _real.open_file(path, "wb") as file:
        file.write(content.data)
    for name, value in content.attributes.items():
        _real.setxattr(path, name, value)


_real_lmdb, _real_connect = lmdb.open, sqlite3.connect
_CALLS = (
    *("open", "close", "dup", "memfd_create", "getpid", "statvfs", "posix_fallocate", "pwrite", "pwritev", "write"),
    *("ftruncate", "truncate", "setxattr", "utime", "copy_file_range", "rename", "replace", "link", "unlink", "remove"),
    *("rmdir", "mkdir", "fsync", "fdatasync"),
)
