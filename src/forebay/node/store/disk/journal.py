"""The latest changes of the durable index: two files that are appended to, each append synced, before LMDB gets them.

Theory. A synced LMDB transaction writes pages all over its file and waits for the disk twice. A *frame* is one write
and one wait: all changes of one commit in a row, with a checksum. Frames of one *generation* stand in one file, one
after the other, from its beginning. When it is full, the next generation goes to the other file, and the full one is
fed to LMDB in one transaction, which also records the last generation that LMDB has (`durable.py`). Then the full file
may be overwritten. It is not truncated: a disk takes bytes inside a file faster than bytes that extend it.

A frame begins at a multiple of ALIGN_BYTES, so no write touches a sector of an acknowledged frame. The checksum is
seeded with a secret of the volume, so no object's bytes can pass for a frame.

After a stop, the frames of generations that LMDB lacks are read in order. Only the last frame can be torn, since each
was synced before the next was written. A torn last frame was not acknowledged, and is ignored. A frame beyond a torn
one, a missing generation, or a generation with fewer frames than the next one records, means that acknowledged frames
are damaged: that is an error, not an end.

Rejected: LMDB without sync behind one file (a machine stop leaves it torn, since its pages reach the disk in any
order); a checksum without a secret (whoever may write an object could write frames); truncating the file each time (a
transaction of the filesystem for each first write).

Invariants. (1) What `append` returned from is read again after any stop. (2) A generation that LMDB has is never read
again.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress
from typing import NamedTuple

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import Corrupt

MAGIC = b"FBJ1"
ALIGN_BYTES = 4096
GENERATION_BYTES = 8 * limits.MIB  # then the other file; with less, LMDB's syncs would delay the journal's
PROVIDED_BYTES_MIN = limits.MIB
ROOM_TIMES = 256  # with less room than this many times the file, the file is neither extended nor used

_HEAD = struct.Struct("<4sIQII")  # magic, bytes of the body, generation, number, frames of the generation before
_SUM = struct.Struct("<Q")
_HEADER_BYTES = _HEAD.size + _SUM.size

Changes = list[tuple[bytes, bytes | None]]  # index key and entry; None: removed
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Changes).decode


class _Frame(NamedTuple):
    offset: int
    generation: int
    number: int
    before: int
    body: bytes


class Journal:
    """The journal in `directory`; LMDB has the generations up to `heard`. `Corrupt` if the later ones are not whole.
    `found`: their changes, in order, by generation."""

    def __init__(self, directory: str, seed: int, heard: int) -> None:
        self._directory = directory
        self._seed = seed
        self.found: list[list[Changes]] = []
        self.generation = heard + 1
        self._number = 0  # of the next frame
        self._before = 0
        self._offset = 0
        self._last: _Frame | None = None  # the last frame found
        self._provided_bytes = 0
        self._fd = -1
        self._named: set[str] = set()  # files whose names are on the disk
        self._read()

    # --- reading ---

    def _read(self) -> None:
        before = None
        while frames := self._frames_of(self.generation):
            if before is not None and frames[0].before != before:
                raise self._damaged(f"generation {self.generation - 1} has {before} frames of {frames[0].before}")
            self.found.append([_decode(frame.body) for frame in frames])
            self._last = frames[-1]
            before = len(frames)
            self.generation += 1
        if self._frames_of(self.generation + 1):
            raise self._damaged(f"generation {self.generation} is missing")

    def _frames_of(self, generation: int) -> list[_Frame]:
        """The frames of a generation, as far as it was written."""
        try:
            with open(_path(self._directory, generation), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return []
        frames: list[_Frame] = []
        offset = expected = 0
        while offset < len(data):
            frame = self._frame_at(data, offset)
            if frame is None:
                offset += ALIGN_BYTES
                continue
            if frame.generation == generation:
                if frame.number != len(frames) or offset != expected:
                    raise self._damaged(f"frame {len(frames)} of generation {generation} cannot be read")
                frames.append(frame)
            offset += _span(len(frame.body))
            expected = offset
        return frames

    def _frame_at(self, data: bytes, offset: int) -> _Frame | None:
        if data[offset : offset + 4] != MAGIC or offset + _HEADER_BYTES > len(data):
            return None
        _, size_bytes, generation, number, before = _HEAD.unpack_from(data, offset)
        begin = offset + _HEADER_BYTES
        body = data[begin : begin + size_bytes]
        (stored,) = _SUM.unpack_from(data, offset + _HEAD.size)
        if len(body) != size_bytes or self._sum(data[offset : offset + _HEAD.size], body) != stored:
            return None
        return _Frame(offset, generation, number, before, body)

    def _sum(self, head: bytes, body: bytes) -> int:
        digest = xxhash.xxh3_64(head, seed=self._seed)
        digest.update(body)
        return digest.intdigest()

    def _damaged(self, what: str) -> Corrupt:
        return Corrupt(
            f"the journal of {self._directory} is damaged ({what}): acknowledged writes are lost; move the directory "
            "away to go on without what it owes"
        )

    # --- writing ---

    def turn(self) -> None:
        """Begin the next generation. LMDB has the one before this one."""
        self._close_file()
        self.generation += 1
        self._before, self._number, self._offset = self._number, 0, 0

    def resume(self) -> None:
        """Go on behind the last frame found, since LMDB cannot take them. Syncs what was found. `OSError`."""
        assert self._last is not None
        self.generation = self._last.generation
        self._before, self._number = self._last.before, self._last.number + 1
        self._offset = self._last.offset + _span(len(self._last.body))
        for generation in range(self.generation - len(self.found) + 1, self.generation + 1):
            fd = os.open(_path(self._directory, generation), os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)  # a kill may have cut the last write short
            finally:
                os.close(fd)

    def takes(self, size_bytes: int) -> bool:
        """Whether this generation has room for `size_bytes` more. `OSError`."""
        end = self._offset + _span(size_bytes)
        if self._offset == 0:
            return True
        return end <= GENERATION_BYTES and (end <= self._provided_bytes or self._has_room(self._longer(end)))

    def provides(self, size_bytes: int) -> bool:
        """Extend the file for `size_bytes` more; False if the disk has no room to spare. `OSError`."""
        if self._fd < 0:
            self._open_file()
        end = self._offset + _span(size_bytes)
        wanted_bytes = self._provided_bytes if end <= self._provided_bytes else self._longer(end)
        if not self._has_room(wanted_bytes):
            return False
        if wanted_bytes > self._provided_bytes:
            os.pwrite(self._fd, bytes(wanted_bytes - self._provided_bytes), self._provided_bytes)
            self._provided_bytes = os.fstat(self._fd).st_size
        return end <= self._provided_bytes

    def _longer(self, end: int) -> int:
        return max(end, min(2 * self._provided_bytes, GENERATION_BYTES), PROVIDED_BYTES_MIN)

    def _has_room(self, size_bytes: int) -> bool:
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize >= ROOM_TIMES * size_bytes

    def release(self) -> None:
        """Free the files' room. LMDB has everything."""
        for generation in (0, 1):
            with suppress(OSError):
                os.truncate(_path(self._directory, generation), 0)

    def append(self, body: bytes) -> None:
        """Write these changes (`pack`) and sync them. `OSError`: they were not written, and will not be read again."""
        head = _HEAD.pack(MAGIC, len(body), self.generation, self._number, self._before)
        frame = b"".join((head, _SUM.pack(self._sum(head, body)), body))
        try:
            if os.pwrite(self._fd, frame, self._offset) < len(frame):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), _path(self._directory, self.generation))
            os.fdatasync(self._fd)
        except OSError:
            with suppress(OSError):  # or else a start would take it for acknowledged
                os.pwrite(self._fd, bytes(_HEADER_BYTES), self._offset)
                os.fdatasync(self._fd)
            raise
        self._offset += _span(len(body))
        self._number += 1

    def _open_file(self) -> None:
        path = _path(self._directory, self.generation)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._provided_bytes = os.fstat(self._fd).st_size
        if path in self._named:
            return
        directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # also if the file was there: its maker may have been killed before this
        except OSError:
            self._close_file()
            raise
        finally:
            os.close(directory)
        self._named.add(path)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._provided_bytes = -1, 0

    def close(self) -> None:
        """Close the file; its content stays."""
        self._close_file()


def is_in(directory: str) -> bool:
    """Whether there is a journal."""
    return any(os.path.exists(_path(directory, generation)) for generation in (0, 1))


def pack(changes: Changes) -> bytes:
    """The body of a frame."""
    return _encode(changes)


def _path(directory: str, generation: int) -> str:
    return os.path.join(directory, f"journal.{generation % 2}")


def _span(size_bytes: int) -> int:
    """How many bytes a frame with such a body takes in the file."""
    return -(-(_HEADER_BYTES + size_bytes) // ALIGN_BYTES) * ALIGN_BYTES
