"""Writes a file that becomes visible whole, durable and under its conditions, or not at all.

Theory. The bytes go to a file without a name (O_TMPFILE) in the target directory, so a killed process leaves nothing
behind. They are synced. Then the file gets its name: by link(2) if nothing may be there yet, which is atomic among all
programs, otherwise by a temporary name and rename(2). Then the directory is synced. File systems without nameless files
use a temporary name from the start. `unfinished.py` says where those names are and who removes what a killed process
left; `is_temporary` says which names listings leave out.

A condition on a version is checked just before the rename, under a lock that every writer of this process takes. A
foreign program that replaces the file in that moment is not noticed: file systems have no such condition.

All this happens in a folder that was opened below the bucket's root (`beneath.py`) and is named by its descriptor: a
link that leads out of the root, made before or meanwhile, leads nowhere.

Headers are stored in an extended attribute where the file system has them, and otherwise nowhere.

Invariants. (1) The final name always has the old file or the new one, whole. (2) `close` leaves no unpublished file.
(3) Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from forebay.backends import errors
from forebay.backends.local import unfinished
from forebay.backends.local.beneath import Outside, open_folder
from forebay.backends.local.unfinished import Unfinished
from forebay.core.errors import Corrupt, Denied, Invalid, Unavailable
from forebay.core.types import Headers

HEADERS_ATTRIBUTE = "user.forebay.headers"
PIECE_BYTES = 1 << 20
TRIES_MAX = 100  # a directory that deletes remove while it is being made

# One lock per key would be a table that only grows; two keys that share one merely wait for a rename.
_locks = [threading.Lock() for _ in range(64)]
_NO_ATTRIBUTES = (errno.ENOTSUP, errno.EPERM, errno.ENOSYS)
_NO_RANGE_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)

ResultT = TypeVar("ResultT")
Check = Callable[[str], None]
VersionOf = Callable[[os.stat_result], str]


def is_temporary(name: str) -> bool:
    """Whether a file of this name (without directories) is one that is still being written."""
    return name.startswith(unfinished.PREFIX)


class NewFile:
    """One file on its way to `key` below `root`. `what` names the object in messages; `names` gives it a name
    meanwhile; `check` raises for a folder, once it is open, in which nothing may be written."""

    def __init__(self, root: str, key: str, what: str, names: Unfinished, check: Check) -> None:
        self._root, self._key, self._what = root, key, what
        self._check = check
        self._names = names
        self._named = ""
        self._fd = -1
        self._places: list[int] = []  # descriptors of the folders where it has a name meanwhile
        self._folders: list[int] = []  # descriptors of the folder it is to lie in; the last is the one that is there
        self._hash: hashlib._Hash | None = None
        try:
            self._open()
        except OSError as error:
            raise self._failed(error) from error

    @property
    def _folder(self) -> str:
        return f"/proc/self/fd/{self._folders[-1]}"

    @property
    def _path(self) -> str:
        return f"{self._folder}/{self._key.rpartition('/')[2]}"

    def _open(self) -> None:
        try:
            self._fd = self._in_folder(lambda: os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            self._names = self._in_folder(lambda: self._names.near(self._folder))
            self._named, self._fd = self._names.name(lambda path: os.open(path, flags, 0o666), self._places)

    def _in_folder(self, act: Callable[[], ResultT]) -> ResultT:
        """Do what needs the folder, making it as often as a delete takes it away, since it is empty until then."""
        for attempt in range(TRIES_MAX):
            try:
                if attempt or not self._folders:
                    self._folders.append(open_folder(self._root, self._key.rpartition("/")[0], make=True))
                    self._check(self._folder)
                return act()
            except FileNotFoundError:
                pass
            except PermissionError:
                if os.stat(self._folder).st_nlink:  # ext4 says EPERM, too, of a folder that was removed
                    raise
        raise FileNotFoundError(errno.ENOENT, "the directory vanishes", self._key)

    def hash(self) -> None:
        """Keep an MD5 of what is appended, for `publish` to compare."""
        self._hash = hashlib.md5(usedforsecurity=False)

    def append(self, data: bytes | memoryview) -> None:
        """Write `data` at the end."""
        if self._hash is not None:
            self._hash.update(data)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise self._failed(error) from error

    def append_from(self, fd: int, offset: int, size_bytes: int) -> None:
        """Copy a piece of another file to the end, inside the kernel where it can."""
        try:
            while size_bytes:
                if self._hash is not None:
                    data = os.pread(fd, min(PIECE_BYTES, size_bytes), offset)
                    self.append(data)
                    copied = len(data)
                else:
                    copied = self._copy(fd, offset, size_bytes)
                if not copied:
                    raise Corrupt(f"{self._what}: the bytes to write end too early: write the object again")
                offset, size_bytes = offset + copied, size_bytes - copied
        except OSError as error:
            raise self._failed(error) from error

    def _copy(self, fd: int, offset: int, size_bytes: int) -> int:
        try:
            return os.copy_file_range(fd, self._fd, size_bytes, offset)
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
        return os.sendfile(self._fd, fd, offset, size_bytes)

    def publish(self, headers: Headers, expect: str | None, md5: str, version_of: VersionOf) -> os.stat_result:
        """Make it the file at `path`, durably; its status. `Precondition` if `expect` does not hold."""
        if self._hash is not None and md5 and self._hash.hexdigest() != md5:
            raise Corrupt(f"{self._what}: the bytes do not have the MD5 {md5} that came with them: send them again")
        try:
            self._keep_headers(headers)
            os.fsync(self._fd)
            status = os.fstat(self._fd)
            with _lock(f"{self._root}/{self._key}"):
                if expect:
                    check_version(self._path, self._what, expect, version_of)
                self._name(exclusively=expect == "")
            sync_directory(self._folder)
        except OSError as error:
            raise self._failed(error) from error
        return status

    def _name(self, *, exclusively: bool) -> None:
        """Give the file its final name; one that may not be there makes `Precondition`."""
        if exclusively:
            try:
                self._in_folder(lambda: self._link(self._path))
            except FileExistsError:
                raise errors.exists(self._what) from None
            return
        if not self._named:
            self._names = self._in_folder(lambda: self._names.near(self._folder))
            self._named, _ = self._names.name(self._link, self._places)
        self._in_folder(lambda: os.replace(self._named, self._path))
        self._named = ""
        self._names.done()

    def _link(self, path: str) -> None:
        source = self._named or f"/proc/self/fd/{self._fd}"
        # With a directory descriptor Python uses linkat(2), which follows the link in /proc; link(2) does not.
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(source, path, src_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)

    def _keep_headers(self, headers: Headers) -> None:
        if not headers:
            return
        try:
            os.setxattr(self._fd, HEADERS_ATTRIBUTE, json.dumps(headers).encode())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.E2BIG, errno.ERANGE):
                raise Invalid(
                    f"{self._what}: the metadata is too large for this file system: use less", code="MetadataTooLarge"
                ) from error
            if error.errno not in _NO_ATTRIBUTES:
                raise

    def _failed(self, error: OSError) -> Exception:
        if isinstance(error, Outside):
            return _outside(self._what)
        if isinstance(error, NotADirectoryError | FileExistsError | IsADirectoryError):
            return Invalid(
                f"{self._what}: in a directory no object can have a name that others use as a folder, nor lie below "
                "another object: choose another key"
            )
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return Invalid(f"{self._what}: the file system has no such name: choose a shorter key", code="InvalidURI")
        if isinstance(error, FileNotFoundError):
            return Unavailable(f"{self._what}: the directory vanishes while it is written to: try again")
        return errors.from_os(error, self._what)

    def close(self) -> None:
        """Forget the file unless it was published. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        named, self._named = self._named, ""
        if named:
            with contextlib.suppress(OSError):
                os.unlink(named)
            self._names.done()
        while self._folders:
            os.close(self._folders.pop())
        while self._places:
            os.close(self._places.pop())

    def __del__(self) -> None:
        self.close()  # a caller that was cancelled while the file was made never got it


def remove(root: str, key: str, what: str, expect: str | None, version_of: VersionOf, check: Check) -> None:
    """Remove a file durably, and the directories below `root` that this leaves empty. One that is gone is fine.
    `check` as in `NewFile`."""
    folder, _, name = key.rpartition("/")
    try:
        fd = open_folder(root, folder)
    except (FileNotFoundError, NotADirectoryError):
        if expect is not None:
            raise errors.changed(what) from None
        return
    except OSError as error:
        raise _outside(what) if isinstance(error, Outside) else errors.from_os(error, what) from error
    try:
        check(f"/proc/self/fd/{fd}")
        path = f"/proc/self/fd/{fd}/{name}"
        with _lock(f"{root}/{key}"):
            if expect is not None:
                check_version(path, what, expect, version_of)
            if os.path.isdir(path):
                return  # a folder is not an object
            os.unlink(path)
        sync_directory(os.path.dirname(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise errors.from_os(error, what) from error
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # it is not empty, or not ours to remove
        while folder:
            folder, _, name = folder.rpartition("/")
            fd = open_folder(root, folder)
            try:
                os.rmdir(name, dir_fd=fd)
            finally:
                os.close(fd)


def _outside(what: str) -> Denied:
    return Denied(
        f"{what}: it lies behind a link that leaves the bucket's directory, where nothing is written or deleted: make "
        "the place it leads to a bucket of its own, or mount it there",
        code="AccessDenied",
    )


def check_version(path: str, what: str, expect: str, version_of: VersionOf) -> None:
    """`Precondition` unless the file at `path` has version `expect`."""
    try:
        now = version_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        now = ""
    if now != expect:
        raise errors.changed(what)


def kept_headers(file: int | str) -> Headers:
    """The stored headers of a file (by descriptor or path); none if it has none that can be read."""
    try:
        found = json.loads(os.getxattr(file, HEADERS_ATTRIBUTE))
        return tuple((str(name), str(value)) for name, value in found)
    except (OSError, ValueError, TypeError):
        return ()


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # removed meanwhile, and the names with it
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(path: str) -> threading.Lock:
    return _locks[hash(path) % len(_locks)]
