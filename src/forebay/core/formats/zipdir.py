"""Reads the central directory of a zip archive: where each file's bytes are, and how they are packed.

Theory. A zip ends with a record that locates its central directory. The directory lists every file with its size,
checksum and local header. The bytes follow that header, which alone knows its own length. So the directory is read in
one piece, then 30 bytes for each file, and no file's bytes. It understands Zip64, and archives behind other bytes
(programs that unpack themselves), as the standard library's `zipfile` does; `zipfile` is the oracle of the tests.
Members are stored (a range of the archive) or deflated. Others, and encrypted ones, are located, and reading them is
refused.

Rejected: `zipfile` itself (40 µs a member, and an object for each).

Invariants. (1) Every range lies inside the archive. (2) A name holds no NUL.
"""

from __future__ import annotations

import struct
from array import array

from forebay.core.errors import Corrupt, Invalid, NotSupported
from forebay.core.formats.tar import Read

STORED, DEFLATED, ENCRYPTED, UNKNOWN = 0, 8, 255, 254
DIRECTORY_BYTES_MAX = 1024 * 1024 * 1024  # read into memory in one piece; four million members need 400 MB
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s22xHH")
_COMMENT_BYTES_MAX = 65535
_NEAR_BYTES = 65536


class ZipScan:
    """A scan of one archive of `size_bytes`. `run` fills the columns, in the directory's order: `names` (bytes, UTF-8),
    `offsets` of the bytes, `packed` (their number in the archive), `sizes`, `methods` and `crcs`."""

    def __init__(self, read: Read, size_bytes: int, *, members_max: int) -> None:
        self.names: list[bytes] = []
        self.offsets = array("Q")
        self.packed = array("Q")
        self.sizes = array("Q")
        self.methods = bytearray()
        self.crcs = array("I")
        self._read, self._size_bytes, self._members_max = read, size_bytes, members_max
        self._window, self._from = b"", 0

    def run(self) -> None:
        """`Corrupt` for what is no zip or contradicts itself; `NotSupported` for one in several files; `Invalid` for
        too many members."""
        count, start, directory = self._directory()
        if count > self._members_max:
            raise _too_many(self._members_max)
        at = 0
        while at < len(directory):
            at = self._entry(directory, at, start)
        for number in range(len(self.names)):
            self._locate(number, start)

    def _directory(self) -> tuple[int, int, bytes]:
        """How many members it says there are, where its offsets count from, and the directory."""
        size_bytes = self._size_bytes
        tail_start = max(0, size_bytes - _COMMENT_BYTES_MAX - _END.size - _LOCATOR.size)
        tail = self._read(tail_start, size_bytes - tail_start)
        at = _find_end(tail)
        _, disk, first_disk, _, count, length, offset, _ = _END.unpack_from(tail, at)
        end = tail_start + at  # the directory ends here at the latest
        if at >= _LOCATOR.size and tail[at - _LOCATOR.size :][:4] == b"PK\6\7":
            _, disk64, place, disks = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
            if disk64 or disks > 1:
                raise NotSupported("the zip is in several files: join them first")
            end, count, length, offset = self._end64(place, end - _LOCATOR.size)
        elif disk or first_disk:
            raise NotSupported("the zip is in several files: join them first")
        start = end - length - offset
        if start < 0 or length > DIRECTORY_BYTES_MAX:
            raise Corrupt(f"the zip's directory of {length} bytes does not lie before byte {end}: it is damaged")
        directory = self._read(end - length, length)
        if len(directory) != length:
            raise Corrupt(f"the zip's directory is cut at byte {end - length + len(directory)}")
        return count, start, directory

    def _end64(self, place: int, locator: int) -> tuple[int, int, int, int]:
        """The zip64 record: where it begins, and what it says. It stands right before its locator, wherever that is."""
        for start in (locator - _END64.size, place):
            raw = self._read(start, _END64.size) if 0 <= start <= self._size_bytes - _END64.size else b""
            if raw[:4] == b"PK\6\6":
                fields = _END64.unpack(raw)
                return start, fields[7], fields[8], fields[9]
        raise Corrupt("the zip's zip64 record is not where its locator says: it is damaged")

    def _entry(self, directory: bytes, at: int, start: int) -> int:
        """Take the entry at `at`; where the next one is."""
        if at + _ENTRY.size > len(directory) or directory[at : at + 4] != b"PK\1\2":
            raise Corrupt(f"the zip's directory has no entry at its byte {at}: it is damaged")
        (
            _, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes, _, _, _, offset,
        ) = _ENTRY.unpack_from(directory, at)  # fmt: skip
        name_end = at + _ENTRY.size + name_bytes
        end: int = name_end + extra_bytes + comment_bytes
        if end > len(directory):
            raise Corrupt(f"the zip's directory is cut inside the entry at its byte {at}")
        name = directory[at + _ENTRY.size : name_end].partition(b"\0")[0]
        if not flags & 0x800 and not name.isascii():
            name = name.decode("cp437").encode()
        if packed == 0xFFFFFFFF or size == 0xFFFFFFFF or offset == 0xFFFFFFFF:
            extra = directory[name_end : name_end + extra_bytes]
            size, packed, offset = _zip64(extra, size, packed, offset, name)
        if name.endswith(b"/"):
            return end
        if start + offset + packed > self._size_bytes:
            raise Corrupt(f"{_shown(name)} lies outside the zip of {self._size_bytes} bytes: it was cut, or is damaged")
        if len(self.names) >= self._members_max:
            raise _too_many(self._members_max)
        method = ENCRYPTED if flags & 1 else min(method, UNKNOWN)
        if size >= 1 << 63 or (method == STORED and packed != size):
            raise Corrupt(f"{_shown(name)} is stored as {packed} bytes and has {size}: the zip is damaged")
        self.names.append(name)
        self.offsets.append(start + offset)
        self.packed.append(packed)
        self.sizes.append(size)
        self.methods.append(method)
        self.crcs.append(crc)
        return end

    def _locate(self, number: int, start: int) -> None:
        """From the place of a member's local header to that of its bytes."""
        offset = self.offsets[number]
        at = offset - self._from
        if at < 0 or at + _LOCAL.size > len(self._window):
            near = number + 1 < len(self.offsets) and 0 <= self.offsets[number + 1] - offset < _NEAR_BYTES // 4
            self._from = offset
            asked = min(_NEAR_BYTES if near else _LOCAL.size, self._size_bytes - offset)
            self._window = self._read(offset, asked) if asked > 0 else b""
            at = 0
        if len(self._window) < at + _LOCAL.size or self._window[at : at + 4] != b"PK\3\4":
            raise Corrupt(f"there is no header of {_shown(self.names[number])} at byte {offset}: the zip is damaged")
        _, name_bytes, extra_bytes = _LOCAL.unpack_from(self._window, at)
        data = offset + _LOCAL.size + name_bytes + extra_bytes
        if data + self.packed[number] > self._size_bytes:
            raise Corrupt(
                f"{_shown(self.names[number])} goes on to byte {data + self.packed[number]}, and the zip ends at "
                f"{self._size_bytes}: it was cut"
            )
        self.offsets[number] = data


def _find_end(tail: bytes) -> int:
    """Where in the archive's last bytes its end record is: the last one that a comment of the length it says follows,
    else the last one. `Corrupt` if there is none."""
    last = -1
    at = len(tail)
    while (at := tail.rfind(b"PK\5\6", 0, at)) >= 0:
        if at + _END.size <= len(tail):
            if at + _END.size + _END.unpack_from(tail, at)[7] == len(tail):
                return at
            last = max(last, at)
        if not at:
            break
    if last < 0:
        raise Corrupt("the archive has no end of a zip's directory: it was cut, or is no zip")
    return last


def _too_many(members_max: int) -> Invalid:
    return Invalid(f"the archive has more than {members_max} members: split it", code="TooManyMembers")


def _zip64(extra: bytes, size: int, packed: int, offset: int, name: bytes) -> tuple[int, int, int]:
    """The three numbers, from the zip64 field where the entry has no room for them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field, found = extra[at + 4 : at + 4 + length], []
            for number in (size, packed, offset):
                if number == 0xFFFFFFFF:
                    if len(field) < 8:
                        raise Corrupt(f"the zip64 field of {_shown(name)} is too short: the zip is damaged")
                    number, field = int.from_bytes(field[:8], "little"), field[8:]
                found.append(number)
            return found[0], found[1], found[2]
        at += 4 + length
    return size, packed, offset


def _shown(name: bytes) -> str:
    return repr(name[:200].decode("utf-8", "replace"))
