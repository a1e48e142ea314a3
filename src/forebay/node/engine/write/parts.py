"""Parts of uploads on a disk: placed, listed, joined, removed. Everything here blocks, so it runs in worker threads.

Theory. An upload's directory holds one file for each part. The file's name describes the part
(`core/machines/uploads.py`), so one rename makes the part whole and described at once. Joining needs no second copy of
the first part: its file gets a second name (a hard link), and the other parts are appended to it, shared by the
filesystem if it can (reflink), else copied. The appended bytes are cut off again if the object is not made, or after a
stop in the middle: the name says how long the part is. If a second name is impossible (another filesystem), all parts
are copied.

The checksum of each block is made in the same pass as the copy.

Invariants. (1) A part's file gets its name only when it is whole and, if durable, on disk. (2) A part's bytes never
change: a file only grows behind them, and is cut back to them. (3) A file with two names is never cut.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Sequence

import xxhash

from forebay.core import limits
from forebay.core.machines.uploads import Part, latest, name_of, parse_name
from forebay.core.s3rules.checksums import Checksum

log = logging.getLogger("forebay.uploads")

COPY_BYTES = 1024 * 1024
_FICLONERANGE = 0x4020940D  # share a range of another file: whole blocks of the filesystem
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
_ALIGNED = 64 * 1024  # every filesystem's block size divides it


def place(source: str, directory: str, part: Part, *, durable: bool) -> None:
    """Make the file `source` the part. If the disk raises `OSError`, `source` may still be there."""
    if durable:
        _sync(source)
    ensure(directory, durable=durable)
    _rename(source, os.path.join(directory, name_of(part)))
    if durable:
        _sync(directory)


def ensure(directory: str, *, durable: bool) -> None:
    """Make an upload's directory and its parent if they are missing."""
    for each in (os.path.dirname(directory), directory):
        if not os.path.isdir(each):
            os.makedirs(each, mode=0o700, exist_ok=True)
            if durable:
                _sync(os.path.dirname(each))


def _rename(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target + ".new")  # the key is on another volume by now
        _sync(target + ".new")
        os.replace(target + ".new", target)
        os.unlink(source)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path: str, data: bytes) -> None:
    """Write a new file with these bytes; a failure leaves nothing."""
    try:
        with open(path, "xb") as file:
            file.write(data)
    except OSError:
        forget(path)
        raise


def forget(path: str) -> None:
    """Unlink. It is no error if the file is missing, or stays on a disk that fails: the write it was for has an outcome
    of its own."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("a file that nobody needs stays at %s: %s", path, error)


def remove(directory: str) -> None:
    """Remove an upload's directory with its contents. It is no error if it is missing."""
    shutil.rmtree(directory, ignore_errors=True)


def directories(holder: str) -> list[str]:
    """Names of the directories in `holder`."""
    try:
        return [entry.name for entry in os.scandir(holder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def checksum(path: str, algorithm: str) -> str:
    """The checksum of a file, in base64."""
    digest = Checksum(algorithm)
    with open(path, "rb", buffering=0) as file:
        while data := file.read(COPY_BYTES):
            digest.update(data)
    return digest.base64()


def scan(directory: str) -> dict[int, Part]:
    """The parts that are here, by number. Removes files that are no part, were replaced or are too short, and cuts off
    what a join appended."""
    found = []
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    for name in names:
        part = parse_name(name)
        path = os.path.join(directory, name)
        if part is None or os.stat(path).st_size < part.size_bytes:
            forget(path)
        else:
            found.append(part)
    parts, replaced = latest(found)
    for part in replaced:
        forget(os.path.join(directory, name_of(part)))
    for part in parts.values():
        cut_back(directory, part)
    return parts


def holds(directory: str, parts: Sequence[Part], data_path: str) -> bool:
    """Whether the object's data file is one of these parts, grown: then the parts were joined and committed."""
    try:
        inode = os.stat(data_path)
    except OSError:
        return False
    for part in parts:
        try:
            if os.path.samestat(inode, os.stat(os.path.join(directory, name_of(part)))):
                return True
        except OSError:
            continue
    return False


def cut_back(directory: str, part: Part) -> None:
    """Cut off what a join appended to the part's file, unless the file has another name: it may be the object by
    now."""
    path = os.path.join(directory, name_of(part))
    seen = os.stat(path)
    if seen.st_size > part.size_bytes and seen.st_nlink == 1:
        os.truncate(path, part.size_bytes)


def join(directory: str, parts: Sequence[Part], target: str) -> list[int]:
    """Make `target` from the parts, in order; return the xxh3-64 of each block. On `OSError` everything is as before.

    On success the first part's file is `target`; `unjoin` undoes it while the object is not committed.
    """
    try:
        first = os.path.join(directory, name_of(parts[0]))
        linked = _link(first, target)
        fd = os.open(target, os.O_RDWR | (0 if linked else os.O_CREAT | os.O_EXCL) | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, parts[0].size_bytes if linked else 0)
            sums, at = _Sums(), 0
            for part in parts:
                if linked and at == 0 and part is parts[0]:
                    sums.read(fd, 0, part.size_bytes)
                else:
                    _append(os.path.join(directory, name_of(part)), fd, at, part.size_bytes, sums)
                at += part.size_bytes
            return sums.finish()
        finally:
            os.close(fd)
    except OSError:
        unjoin(directory, parts[0], target)
        raise


def unjoin(directory: str, first: Part, target: str) -> None:
    """The object was not made: make the first part's file itself again. If the disk fails, the next join or start does
    it."""
    forget(target)
    try:
        cut_back(directory, first)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("a part of %s stays longer than it was: %s", directory, error)


def _link(first: str, target: str) -> bool:
    if os.stat(first).st_nlink > 1:
        return False  # it is an object's file, which must not change
    try:
        os.link(first, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _append(path: str, target: int, at: int, size_bytes: int, sums: _Sums) -> None:
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _share(source, target, at, size_bytes):
            sums.read(target, at, size_bytes)
            return
        done, window = 0, sums.window
        while done < size_bytes:
            piece = window[: _read(source, window[: size_bytes - done], done)]
            sums.update(piece)
            _write(target, piece, at + done)
            done += len(piece)
    finally:
        os.close(source)


def _share(source: int, target: int, at: int, size_bytes: int) -> bool:
    """Let the filesystem share the bytes; return whether it did."""
    whole_bytes = size_bytes if size_bytes % _ALIGNED == 0 else 0
    if at % _ALIGNED or not whole_bytes:
        return False
    argument = b"".join(
        (source.to_bytes(8, "little"), bytes(8), whole_bytes.to_bytes(8, "little"), at.to_bytes(8, "little"))
    )
    try:
        fcntl.ioctl(target, _FICLONERANGE, argument)
    except OSError:
        return False
    return True


def _read(fd: int, window: memoryview, offset: int) -> int:
    count = os.preadv(fd, [window], offset)
    if count == 0:
        raise OSError(errno.EIO, "a part's file is shorter than it was")
    return count


def _write(fd: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.pwrite(fd, piece, offset)
        piece, offset = piece[count:], offset + count


class _Sums:
    """The xxh3-64 of each block of bytes that pass in order."""

    def __init__(self) -> None:
        self.window = memoryview(bytearray(COPY_BYTES))
        self._sums: list[int] = []
        self._digest = xxhash.xxh3_64()
        self._left_bytes = limits.BLOCK_BYTES

    def update(self, piece: memoryview) -> None:
        while piece:
            taken = piece[: self._left_bytes]
            self._digest.update(taken)
            self._left_bytes -= len(taken)
            piece = piece[len(taken) :]
            if self._left_bytes == 0:
                self._close_block()

    def read(self, fd: int, start: int, size_bytes: int) -> None:
        """Hash bytes that are in place already."""
        done = 0
        while done < size_bytes:
            count = _read(fd, self.window[: size_bytes - done], start + done)
            self.update(self.window[:count])
            done += count

    def finish(self) -> list[int]:
        if self._left_bytes < limits.BLOCK_BYTES:
            self._close_block()
        return self._sums

    def _close_block(self) -> None:
        self._sums.append(self._digest.intdigest())
        self._digest = xxhash.xxh3_64()
        self._left_bytes = limits.BLOCK_BYTES
