"""Reads the headers of a tar archive: where each file's bytes are, and where the archive ends. Also appends a file.

Theory. A tar has headers of 512 bytes, each followed by its file's bytes, rounded up to 512. So hopping from header to
header finds all members, and each member is a range of the archive. It understands ustar, GNU (long names, sizes in
base 256) and pax (`path` and `size`, for one header or globally), as the standard library's `tarfile` does; `tarfile`
is the oracle of the tests. Members are regular files: directories, links and devices have no bytes. Sparse files are
refused, because their bytes are no range.

The scan reads through small gaps and hops over large ones: a system call costs as much as copying some kilobytes.

A header's checksum comes from Adler-32, whose lower half is the sum of the bytes modulo 65,521, plus 1. Adler-32 is in
C; a sum in Python would be half of the cost of a member.

Rejected: `tarfile` itself (30 µs a member, and it accepts an archive that ends early).

Invariants. (1) Every range lies inside the archive. (2) `tarfile` reads what is written here.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable

from forebay.core.errors import Corrupt, Invalid, NotSupported

Read = Callable[[int, int], bytes]  # (start, size) -> exactly these bytes, fewer only where the archive ends

BLOCK = 512
TEXT_BYTES_MAX = 1024 * 1024  # of a long name or a pax header: ten thousand times what tools write
END = bytes(2 * BLOCK)
_HEAD = struct.Struct("100s24x12s12x8s1s100x6s82x155s12x")  # name, size, checksum, type, magic, prefix
_ZERO = bytes(BLOCK)
_MODULUS = 65521  # of Adler-32
_FILES = frozenset((b"0", b"\0", b"7"))
_NO_BYTES = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, directories, pipes: a header alone
_HOP_BYTES = 2048
_OCTAL_MAX = 8**11 - 1


class TarScan:
    """A scan of one archive of `size_bytes`. `run` fills `names` (bytes), `offsets` and `sizes`, in archive order, and
    sets `end`: where the next header would go. At most `members_max`."""

    def __init__(self, read: Read, size_bytes: int, *, members_max: int, window_bytes: int = 65536) -> None:
        self.names: list[bytes] = []
        self.offsets = array("Q")
        self.sizes = array("Q")
        self.end = 0
        self._read, self._size_bytes = read, size_bytes
        self._members_max, self._window_bytes = members_max, window_bytes
        self._global: dict[str, bytes] = {}
        self._window, self._from = b"", 0

    def run(self, until: int | None = None) -> None:
        """To the archive's end, or to the first member whose header does not begin before byte `until`. `Corrupt` where
        a header is none, or the archive ends early; `NotSupported` for sparse files; `Invalid` for too many members."""
        position, gap, size_bytes = 0, 0, self._size_bytes
        if not size_bytes:
            raise Corrupt("the archive is empty: a tar without members has 1,024 bytes")
        special: dict[str, bytes] = {}
        while position < size_bytes:
            at = position - self._from
            window = self._window
            if at < 0 or at + BLOCK > len(window):
                window, at = self._look(position, gap), 0
            fields = _HEAD.unpack_from(window, at)
            header = window[at : at + BLOCK]
            if not window[at] and header == _ZERO:
                break
            if until is not None and position >= until and not special:
                break
            _check_sum(header, fields[2], position)
            size, type_ = _number(fields[1], position), fields[3]
            data = position + BLOCK
            if type_ in _FILES:
                size = self._file(fields, special, data, size)
                special = {}
            elif type_ in _NO_BYTES:
                size, special = 0, {}
            elif type_ == b"S":
                raise NotSupported(f"the file at byte {position} is sparse (GNU): write it without holes (no --sparse)")
            elif data + size > size_bytes:
                raise _ends_early(data + size, size_bytes)
            elif type_ in (b"L", b"x", b"X", b"g"):
                self._note(type_, special, data, size)
            elif type_ != b"K":
                special = {}  # what we do not know is passed over, as its size says
            gap = -(-size // BLOCK) * BLOCK
            position = data + gap
        self.end = position

    def _file(self, fields: tuple[bytes, ...], special: dict[str, bytes], data: int, size: int) -> int:
        """Add a member; its size."""
        name, prefix = fields[0], fields[5]
        name = name[: name.index(0)] if 0 in name else name
        if fields[3] == b"\0" and name.endswith(b"/"):
            return 0  # a directory, as tar wrote it before it had a type for them
        if prefix[0] and fields[4] == b"ustar\0":
            name = prefix.partition(b"\0")[0] + b"/" + name
        if special or self._global:
            said = {**self._global, **special}
            if any(key.startswith("GNU.sparse.") for key in said):
                raise NotSupported(f"the file at byte {data - BLOCK} is sparse (pax): write it without holes")
            name = said.get("path", name)
            if "size" in said:
                if not said["size"].isdigit() or len(said["size"]) > 20:
                    raise Corrupt(f"the pax header before byte {data} gives the size {said['size'][:40]!r}")
                size = int(said["size"])
        if data + size > self._size_bytes:
            raise _ends_early(data + size, self._size_bytes, name)
        if 0 in name:
            raise Corrupt(f"the name of the file at byte {data} holds a NUL: the archive is damaged")
        if len(self.names) >= self._members_max:
            raise Invalid(f"the archive has more than {self._members_max} members: split it", code="TooManyMembers")
        self.names.append(name)
        self.offsets.append(data)
        self.sizes.append(size)
        return size

    def _note(self, type_: bytes, special: dict[str, bytes], data: int, size: int) -> None:
        """What an extended header says of the next one, or of all."""
        if size > TEXT_BYTES_MAX:
            raise Corrupt(f"the extended header before byte {data} has {size} bytes: this is no tar, or a damaged one")
        at = data - self._from
        text = self._window[at : at + size] if at + size <= len(self._window) else self._read(data, size)
        if len(text) != size:
            raise _ends_early(data + size, data + len(text))
        if type_ == b"L":
            special["path"] = text.partition(b"\0")[0]
        else:
            (self._global if type_ == b"g" else special).update(_pax(text, data))

    def _look(self, position: int, gap: int) -> bytes:
        """Have the header at `position` at the window's beginning."""
        asked = self._window_bytes if gap <= self._window_bytes // 4 else _HOP_BYTES
        self._from, self._window = position, self._read(position, min(asked, self._size_bytes - position))
        if len(self._window) < BLOCK:
            raise _ends_early(position + BLOCK, position + len(self._window))
        return self._window


def check_head(head: bytes) -> None:
    """`Corrupt` if an archive that begins with `head` is no tar. Less than a block says nothing."""
    if len(head) >= BLOCK and head[:BLOCK] != _ZERO:
        _check_sum(head[:BLOCK], head[148:156], 0)


def begins(block: bytes, name: str, size_bytes: int) -> bool:
    """Whether `block` is the header of a regular file of that name (or its beginning, where a name is too long for a
    header) and size."""
    if len(block) != BLOCK or block[156:157] not in (b"0", b"\0"):
        return False
    try:
        _check_sum(block, block[148:156], 0)
        said_bytes = _number(block[124:136], 0)
    except Corrupt:
        return False
    said = block[:100].rstrip(b"\0")
    prefix = block[345:500].partition(b"\0")[0] if block[257:262] == b"ustar" and block[262:263] == b"\0" else b""
    said = prefix + b"/" + said if prefix else said
    raw = name.encode("utf-8", "surrogateescape")
    return said_bytes == size_bytes and (said == raw or (len(said) >= 99 and raw.startswith(said)))


def _check_sum(header: bytes, field: bytes, position: int) -> None:
    low = (zlib.adler32(header) & 0xFFFF) - 1
    try:
        said = int(field.partition(b"\0")[0], 8)
    except ValueError:
        said = -1
    if said < 0 or (low - sum(field) + 8 * 32 - said) % _MODULUS:
        signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + b" " * 8 + header[156:])
        if said < 0 or signed != said:  # some old tars took bytes for signed numbers
            raise Corrupt(
                f"there is no tar header at byte {position} (its checksum is wrong): this is no tar, or a damaged one"
            )


def _number(field: bytes, position: int) -> int:
    number = -1
    try:
        if field[11] in b"\0 ":
            number = int(field[:11], 8)
    except ValueError:
        pass
    if number < 0 and field[0] & 0xC0 == 0x80:  # base 256, not negative
        number = int.from_bytes(field, "big") & ~(0x80 << 88)
    elif number < 0:
        text = field.partition(b"\0")[0].strip()
        try:
            number = int(text, 8) if text else 0
        except ValueError:
            pass
    if number < 0:
        raise Corrupt(f"the header at byte {position} gives the size {field!r}: the archive is damaged")
    return number


def _pax(text: bytes, data: int) -> dict[str, bytes]:
    """The records of a pax header: `LENGTH KEY=VALUE\\n` each."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(text) and text[at]:
        head, _, _ = text[at : at + 20].partition(b" ")
        if not head.isdigit():
            raise Corrupt(f"the pax header before byte {data} is damaged")
        length = int(head)
        record = text[at + len(head) + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if length < 5 or at + length > len(text) or not equals or not value.endswith(b"\n"):
            raise Corrupt(f"the pax header before byte {data} is damaged")
        found[key.decode("utf-8", "replace")] = value[:-1]
        at += length
    return found


def _ends_early(wanted: int, size_bytes: int, name: bytes = b"") -> Corrupt:
    inside = f" inside {name[:200].decode('utf-8', 'replace')!r}" if name else ""
    return Corrupt(f"the archive ends at byte {size_bytes}{inside}, and goes on to {wanted} by its headers: it was cut")


# --- writing ---------------------------------------------------------------------------------------------------------
def header_of(name: str, size_bytes: int, modified_s: float) -> bytes:
    """The header (with a pax header before it, where it must be) of a file of `size_bytes`; its bytes follow, then
    `padding`. `Invalid` for a name that a member cannot have."""
    raw = name.encode("utf-8")
    if not raw or b"\0" in raw or len(raw) > TEXT_BYTES_MAX // 2:
        raise Invalid("a member's name is 1 to 524,288 bytes without NUL: give another", code="InvalidArgument")
    short, prefix = _split(raw)
    pax = b""
    if not short or not raw.isascii():
        pax += _record(b"path", raw)
        short, prefix = raw.decode("ascii", "replace").replace("\ufffd", "?").encode()[:100], b""
    if size_bytes > _OCTAL_MAX:
        pax += _record(b"size", b"%d" % size_bytes)
    head = _header(short, min(size_bytes, _OCTAL_MAX), modified_s, b"0", prefix)
    if not pax:
        return head
    return _header(b"././@PaxHeader", len(pax), 0, b"x") + pax + padding(len(pax)) + head


def padding(size_bytes: int) -> bytes:
    """What fills the last block of a file of `size_bytes`."""
    return bytes(-size_bytes % BLOCK)


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """The name as ustar's two fields; empty where it does not fit."""
    if len(raw) <= 100:
        return raw, b""
    cut = raw.find(b"/", len(raw) - 101)
    if 0 < cut <= 155 and cut + 1 < len(raw):
        return raw[cut + 1 :], raw[:cut]
    return b"", b""


def _record(key: bytes, value: bytes) -> bytes:
    body = b" %b=%b\n" % (key, value)
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d%b" % (length, body)


def _header(name: bytes, size_bytes: int, modified_s: float, type_: bytes, prefix: bytes = b"") -> bytes:
    modified = min(max(0, int(modified_s)), _OCTAL_MAX)
    head = bytearray(BLOCK)
    struct.pack_into(
        "100s8s8s8s12s12s8s1s100s8s", head, 0,
        name, b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size_bytes, b"%011o\0" % modified,
        b" " * 8, type_, b"", b"ustar\x0000",
    )  # fmt: skip
    struct.pack_into("155s", head, 345, prefix)
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)
