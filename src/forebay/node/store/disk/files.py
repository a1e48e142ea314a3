"""A data file: its name, its header, its blocks, and how a hole is made.

Theory. The file holds only the object's bytes at their offsets, so a hit is one sendfile over any range. What a rebuild
of the index needs travels with it as the *header*: which object it is, and a checksum for each block that is present
(zero: absent). The header is the xattr `user.forebay`. If it does not fit (large objects, much user metadata), or the
filesystem has no xattrs, it is a sidecar file `<name>.head`, whose checksums are written in place, 8 bytes a block.

    0   4  magic "FBH1"
    4   4  length n of the identity, little endian
    8   8  xxh3-64 of the identity, little endian
   16   n  identity: msgpack of `Identity`
    c  8b  one xxh3-64 per block, little endian; 0 = absent (a checksum that is 0 is stored as 1)

In an xattr c is 16 + n; in a sidecar c is the next multiple of 4,096. Checksums may be cut off at the end: absent.

Rejected: a header inside the data file (offsets shift, or the end moves); one xattr per block (slow, and bounded);
trusting the index alone (a machine stop would empty the cache).

Invariants. (1) A file under data/ has a whole header before it has that name. (2) A header is used only if it is whole
and about this file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from array import array
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.record import Record, blocks_in
from forebay.core.types import Headers, ObjectInfo

XATTR = "user.forebay"
SIDECAR_SUFFIX = ".head"
MAGIC = b"FBH1"
_PREFIX = struct.Struct("<4sIQ")
PAGE_BYTES = 4096
_NO_XATTR = (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EPERM)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 0x02
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
_PUNCH_KEEP_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """Which object a data file holds. Another version is another file, with one exception: after its flush, an owed
    object gets the backend's version and is no longer `owned`.

    `owned`: made by a write that only this node has, so only an entry of the durable index gives it meaning.
    """

    object_id: int
    bucket: str
    key: str
    size_bytes: int
    version: str
    etag: str
    modified_s: float
    headers: Headers
    checked_s: float
    block_bytes: int = limits.BLOCK_BYTES
    owned: bool = False

    def info(self) -> ObjectInfo:
        return ObjectInfo(self.key, self.size_bytes, self.version, self.etag, self.modified_s, self.headers)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Identity).decode


def file_name(object_id: int) -> str:
    """Relative path below `data/`: `ab/cd/<object id, 16 hex digits>`; 256 consecutive ids share a directory."""
    name = f"{object_id:016x}"
    return f"{name[10:12]}/{name[12:14]}/{name}"


def stored_sum(xxh3: int) -> int:
    """The checksum's stored form: never 0, which means absent."""
    return xxh3 or 1


def encode_header(identity: Identity) -> bytes:
    """Prefix and identity, without checksums."""
    body = _encode(identity)
    return _PREFIX.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _decode_header(data: bytes) -> Identity | None:
    """The identity at the start of `data`; None when it is not whole."""
    if len(data) < _PREFIX.size:
        return None
    magic, length, check = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or len(body) != length or xxhash.xxh3_64_intdigest(body) != check:
        return None
    try:
        return _decode(body)
    except msgspec.MsgspecError:
        return None


def _header_bytes(data: bytes | bytearray) -> int:
    """How long the header at the start of `data` is, without checksums."""
    return int(_PREFIX.size + _PREFIX.unpack_from(data)[1])


def sums_offset_in_sidecar(header_bytes: int) -> int:
    return -(-header_bytes // PAGE_BYTES) * PAGE_BYTES


class Header:
    """The header of one data file, wherever it is kept. Not for two threads at once on one file. Somebody else may have
    replaced `identity` (`rename_to`), so the file says where its checksums begin."""

    __slots__ = ("identity", "path", "with_xattr")

    def __init__(self, path: str, identity: Identity, *, with_xattr: bool) -> None:
        self.path = path
        self.identity = identity
        self.with_xattr = with_xattr

    @classmethod
    def create(cls, path: str, identity: Identity, *, xattrs: bool = True, sums: Sequence[int] = ()) -> Header:
        """Write the header of a new file at `path`: into a sidecar if `xattrs` is off or there is no room.

        `sums`: stored checksums of all blocks, of a file that is whole already.
        """
        data = encode_header(identity)
        blocks = blocks_in(identity.size_bytes, identity.block_bytes)
        packed = array("Q", sums).tobytes()
        if xattrs and len(data) + 8 * blocks <= limits.FILE_HEADER_BYTES_MAX:
            try:
                # write the full length at once, so that later checksums always have room
                os.setxattr(path, XATTR, data + packed.ljust(8 * blocks, b"\0"))
                return cls(path, identity, with_xattr=True)
            except OSError as error:
                if error.errno not in _NO_XATTR:
                    raise
        _write_sidecar(path + SIDECAR_SUFFIX, data, packed, "xb")
        return cls(path, identity, with_xattr=False)

    @classmethod
    def read(cls, path: str) -> Header | None:
        """The header of the file at `path`; None if it has none, or one that is not whole."""
        try:
            data, with_xattr = os.getxattr(path, XATTR), True
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
            try:
                with open(path + SIDECAR_SUFFIX, "rb") as file:
                    data, with_xattr = file.read(_PREFIX.size), False
                    if len(data) == _PREFIX.size:
                        data += file.read(_PREFIX.unpack(data)[1])
            except FileNotFoundError:
                return None
        identity = _decode_header(data)
        if identity is None:
            return None
        return cls(path, identity, with_xattr=with_xattr)

    def sums(self) -> array[int]:
        """One stored checksum per block, 0 where absent."""
        count = blocks_in(self.identity.size_bytes, self.identity.block_bytes)
        if self.with_xattr:
            data = os.getxattr(self.path, XATTR)
            data = data[_header_bytes(data) :]
        else:
            with open(self.path + SIDECAR_SUFFIX, "rb") as file:
                file.seek(sums_offset_in_sidecar(_header_bytes(file.read(_PREFIX.size))))
                data = file.read(8 * count)
        sums = array("Q", data[: min(len(data) // 8, count) * 8])
        if len(sums) < count:
            sums.extend([0] * (count - len(sums)))
        return sums

    def rename_to(self, identity: Identity) -> None:
        """Replace the file's identity, which may differ only in version, headers and `owned`. All or nothing; not
        synced. `OSError`: the header is unchanged."""
        data, sums = encode_header(identity), self.sums().tobytes()
        if self.with_xattr:
            os.setxattr(self.path, XATTR, data + sums)
        else:
            sidecar = self.path + SIDECAR_SUFFIX
            _write_sidecar(sidecar + ".new", data, sums, "wb")
            os.replace(sidecar + ".new", sidecar)

    def set_sums(self, changes: dict[int, int]) -> None:
        """Set the stored checksums of blocks; 0 takes one out."""
        if self.with_xattr:
            data = bytearray(os.getxattr(self.path, XATTR))
            sums_at = _header_bytes(data)
            if sums_at + 8 * blocks_in(self.identity.size_bytes, self.identity.block_bytes) > len(data):
                return  # it rotted meanwhile: whoever reads it next finds that
            for block, value in changes.items():
                struct.pack_into("<Q", data, sums_at + 8 * block, value)
            os.setxattr(self.path, XATTR, bytes(data))
            return
        fd = os.open(self.path + SIDECAR_SUFFIX, os.O_RDWR | os.O_CLOEXEC)
        try:
            sums_at = sums_offset_in_sidecar(_header_bytes(os.pread(fd, _PREFIX.size, 0)))
            for block, value in changes.items():
                os.pwrite(fd, struct.pack("<Q", value), sums_at + 8 * block)
        finally:
            os.close(fd)


def _write_sidecar(path: str, header: bytes, sums: bytes, mode: str) -> None:
    with open(path, mode) as file:
        file.write(header)
        file.truncate(sums_offset_in_sidecar(len(header)))
        if sums:
            file.seek(sums_offset_in_sidecar(len(header)))
            file.write(sums)


def create(tmp_path: str, path: str, identity: Identity, *, xattrs: bool = True) -> tuple[int, Header]:
    """Make a new data file at `path`, sparse, of the object's size, with its header. Returns its descriptor (read and
    write) and header.

    It appears under its name only when it is whole; a failure leaves nothing.
    """
    fd = os.open(tmp_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, identity.size_bytes)
        header = Header.create(tmp_path, identity, xattrs=xattrs)
        if not header.with_xattr:
            _move(tmp_path + SIDECAR_SUFFIX, path + SIDECAR_SUFFIX)
        _move(tmp_path, path)
        header.path = path
        return fd, header
    except BaseException:
        os.close(fd)
        for leftover in (tmp_path, tmp_path + SIDECAR_SUFFIX, path + SIDECAR_SUFFIX):
            _unlink(leftover)
        raise


def undo(created: tuple[int, Header]) -> None:
    """Remove a file that `create` made."""
    os.close(created[0])
    remove(created[1].path)


def _move(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(source, target)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def remove(path: str) -> int:
    """Unlink a data file and its sidecar; return how many bytes of disk that frees (once nobody has it open)."""
    try:
        freed = os.lstat(path).st_blocks * 512
        os.unlink(path)  # the data file first: a leftover sidecar is the smaller rubbish
    except FileNotFoundError:
        freed = 0
    _unlink(path + SIDECAR_SUFFIX)
    return freed


def punch(fd: int, start: int, size: int) -> None:
    """Make [start, start + size) a hole: it reads as zeros and takes no room. The file's size stays. `OSError`."""
    while _libc.fallocate(fd, _PUNCH_KEEP_SIZE, start, size) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def punch_blocks(path: str, block_bytes: int, blocks: Iterable[int]) -> bool:
    """Punch these blocks under an exclusive lease and take their checksums out; False when a reader holds a lease."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        chosen = sorted(blocks)
        header = Header.read(path)
        if header is not None:
            header.set_sums(dict.fromkeys(chosen, 0))
        for block in chosen:
            # Punch the last block to its natural end too, beyond the file's. Sent bytes may still lie in a socket as
            # references to these pages. A page that leaves the file whole keeps its bytes there; a page covered only in
            # part, as the last would be, is zeroed in place, and a client would read the zeros. (A large page of the
            # kernel, at most 2 MiB on x86, never crosses a block's border: both are aligned.)
            punch(fd, block * block_bytes, block_bytes)
        return True
    finally:
        os.close(fd)


def syncfs(path: str) -> None:
    """Write the whole filesystem that holds `path` to its disk. `OSError` also for earlier failed writes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)


def begin_writeback(fd: int, start: int = 0, size: int = 0) -> None:
    """Start writing a file's dirty pages, of `size` bytes from `start` on or of all; waits only while the disk's queue
    is full. A sync after this waits for less, and several files synced after this share a commit."""
    _libc.sync_file_range(
        fd, start, size, _SYNC_FILE_RANGE_WRITE
    )  # only advice: a failure here shows in the later fsync


def past_cache(fd: int, on: bool = True) -> bool:
    """Have what is written to this file go to the disk itself, or through the page cache again; whether the filesystem
    can. Past the cache, memory, offset and size of a write must be multiples of PAGE_BYTES."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return _DIRECT != 0


def block_range(size_bytes: int, block_bytes: int, block: int) -> tuple[int, int]:
    """Half-open byte range of a block."""
    start = block * block_bytes
    return start, min(start + block_bytes, size_bytes)


def block_sum(fd: int, record: Record, block: int) -> int:
    """The stored form of the checksum of a block as it is on the disk now. `OSError` when it cannot be read."""
    start, end = block_range(record.size_bytes, record.block_bytes, block)
    digest = xxhash.xxh3_64()
    while start < end:
        data = os.pread(fd, min(end - start, 1024 * 1024), start)
        if not data:
            break  # the file is cut short: the sum of what there is will not match
        digest.update(data)
        start += len(data)
    return stored_sum(digest.intdigest())
