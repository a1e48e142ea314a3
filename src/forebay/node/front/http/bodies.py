"""Receives a body: into memory if it is small, otherwise into a file on the volume that its key belongs to.

Theory. Everything that must be known of the bytes is computed once, as they pass: an xxh3-64 for each block (the
store's checksums), and the checksums that the client promised or requested. Bytes are read into a buffer, hashed while
they are in the CPU's cache, and written from there (`http/long_bodies.py`). Python never holds a piece of a large body
as an object.

What comes from another file's memory and is synced when it is whole goes past the page cache (measured with many large
files under way: 1.8 s of CPU a GB through it against 0.4, and a third of the rate; why so much is not known, perhaps
the search for large pages). Its last bytes, and all of it where the filesystem cannot, go through the cache. So who
reads it first, a flush above all, reads from the disk.

A body counts only as a whole: it must have the announced length and every promised checksum, from the headers or a
trailer. Until `finish` says so only a nameless file exists, and `abort` removes it.

Invariants. (1) After `abort`, or a `finish` that raised, no file and no descriptor is left. (2) `result` exists exactly
after `finish` returned. (3) No more than `size_bytes` are taken.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import xxhash

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, Unavailable
from forebay.core.machines.stall import STALLED_AFTER_S
from forebay.core.s3rules.checksums import Checksum
from forebay.core.s3rules.chunked import AwsChunked
from forebay.core.s3rules.signedbody import check_payload_sha256, signs_sha256
from forebay.node.front.http.checksums import ALGORITHM_OF, check_value, mismatch
from forebay.node.front.http.requests import too_large
from forebay.node.store.disk import files
from forebay.node.store.disk.volume import stalled
from forebay.node.store.disk.volume_threads import Desk, Late, create_temp, desk_of, remove_temp

log = logging.getLogger("forebay.bodies")

LOOP_WAIT_S = 2.0  # how long the loop waits for a disk that does not answer; then nobody waits for it
COPIED_BYTES = limits.MIB  # at once: more, and the kernel looks for large pages that are hard to find (measured)
WRITEBACK_BYTES = 16 * limits.MIB  # are worth a request to the disk
FEW_PIECES = 16  # of one read: SDKs' chunks are 64 KiB and more
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Received(NamedTuple):
    """A body that came whole and right. It is `body` (if it fits into memory) or the file `path`, which belongs to
    whoever takes the result, with `sums`: the xxh3-64 of each block. `md5` and `hash128` are hex, "" where nobody
    asked; `checksums` maps S3's algorithm names to base64."""

    size_bytes: int
    body: bytes | None
    path: str
    sums: list[int]
    md5: str
    hash128: str
    checksums: dict[str, str]

    def discard(self) -> None:
        """Remove the file. Fine when there is none, or somebody took it."""
        if self.path:
            remove_temp(self.path)


class Wanted(NamedTuple):
    """What shall be known of a body. `promised` maps algorithms to base64 as the headers say it, `md5_promised` is hex,
    `payload` the signer's word (`x-amz-content-sha256`); `trailer` names an algorithm whose value comes behind."""

    md5: bool = False
    hash128: bool = False
    algorithms: tuple[str, ...] = ()
    promised: dict[str, str] = {}
    md5_promised: str = ""
    payload: bytes = b""
    trailer: str = ""


class Stream(Protocol):
    """Who hears of a body while it arrives."""

    def grown(self, upto: int) -> None:
        """The file holds every byte below `upto`."""
        ...

    async def number(self) -> int:
        """The engine's number of this put; 0 if it has none."""
        ...

    def give_up(self) -> None:
        """The body will not be completed. May come twice."""
        ...


class Incoming:
    """See the module's header. `size_bytes` is the announced length (without the aws-chunked framing, which `chunked`
    takes off), None if it is not known; then `bytes_max` bounds it. `place` gives the path of a new file for a body
    above `memory_bytes_max`; "" from it means that there is no room. `stream` is told how far the file is; `plan` is
    for whoever made this, to remember what the bytes are for."""

    def __init__(
        self,
        wanted: Wanted,
        size_bytes: int | None,
        *,
        place: Callable[[], str] | None,
        bytes_max: int = limits.PUT_BYTES_MAX,
        memory_bytes_max: int = limits.INLINE_BYTES_MAX,
        chunked: AwsChunked | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self.proved = True  # nobody is given a place for a body before
        self.large = size_bytes is None or size_bytes > memory_bytes_max
        self.stream: Stream | None = None
        self.options: object = None
        self.put_to: tuple[str, str] | None = None  # of a PutObject: bucket and key
        self.result: Received
        self.path = ""
        self.synced_soon = False  # when it is whole: so its bytes may go to the disk while others come
        self._begun = 0  # below it they do
        self._wanted = wanted
        self._place = place
        self._bytes_max = bytes_max if size_bytes is None else size_bytes
        self._memory_bytes_max = memory_bytes_max
        self._chunked = chunked
        self._body: bytearray | None = bytearray()
        self._fd = -1
        self._room = memoryview(b"")  # that another file's bytes pass through: new memory costs the kernel time
        self._past_cache = False  # what is written goes to the disk itself
        self.late = False  # its disk did not answer, and may still take what it was given last
        self._desk: Desk
        self._taken = 0
        self._sums: list[int] = []
        self._block_left = limits.BLOCK_BYTES
        names: dict[str, None] = {}
        if wanted.algorithms or wanted.promised or wanted.trailer:
            names = dict.fromkeys((*wanted.algorithms, *wanted.promised, wanted.trailer))
            names.pop("", None)
        if wanted.md5 or wanted.md5_promised:
            names["MD5"] = None
        if signs_sha256(wanted.payload):
            names["SHA256"] = None
        self._running = [Checksum(name) for name in names]
        self._hash128 = xxhash.xxh3_128() if wanted.hash128 else None
        if size_bytes is not None and size_bytes > memory_bytes_max:
            self._open()

    @property
    def taken_bytes(self) -> int:
        """How much came."""
        return self._taken

    # --- the connection's side (BodySink) ----------------------------------------------------------------------------
    def write(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes. `Invalid` for framing and length, `Denied` for a chunk's signature, `Unavailable`
        (`InsufficientStorage`) when the disk has no room."""
        view = chunk if isinstance(chunk, memoryview) else memoryview(chunk)
        if self._chunked is None:
            self._take(view)
            return
        pieces = self._chunked.feed(view)
        if len(pieces) > FEW_PIECES:  # each is hashed and written: a copy is less work
            pieces = [memoryview(b"".join(pieces))]
        for piece in pieces:
            self._take(piece)

    def take_from(self, fd: int, offset: int, size_bytes: int) -> None:
        """Take the next `size_bytes` from another file, from `offset` on; for a body that is a file. In a thread of its
        disk, so that each piece is read, hashed and written while it is in the CPU's cache. Errors as `write`."""
        assert self._fd >= 0, "a body in memory"
        if self._taken + size_bytes > self._bytes_max:
            raise Invalid("the body is longer than was announced: say its true length", code="IncompleteBody")
        self._by_disk(self._copy_from, fd, offset, size_bytes)

    def _copy_from(self, fd: int, offset: int, size_bytes: int) -> None:
        if not self._room:
            self._room = memoryview(mmap.mmap(-1, COPIED_BYTES))
            long = (self.size_bytes or 0) >= WRITEBACK_BYTES
            self._past_cache = self.synced_soon and long and files.past_cache(self._fd)
        buffer, end = self._room, offset + size_bytes
        while offset < end and not self.late:
            with buffer[: min(len(buffer), end - offset)] as room:
                size = os.preadv(fd, [room], offset)
            if not size:
                raise Invalid("the memory is shorter than the body: say its true length", code="IncompleteBody")
            with buffer[:size] as piece:
                self._hash(piece)
                self._sum(piece)
                self._write_out(piece, self._taken)
            offset, self._taken = offset + size, self._taken + size

    def wrote(self) -> None:
        """Tell who follows the file how far it is."""
        if self.stream is not None and self._fd >= 0:
            self.stream.grown(self._taken)

    def finish(self) -> bytes:
        """The body is whole: judge it. What it returns is the body where it is in memory."""
        try:
            self._judge()
        except BaseException:
            self.abort()
            raise
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return self.result.body or b""

    def abort(self) -> None:
        """Remove what came. Twice is fine, and after `finish` while nobody took the result."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self.path:
            remove_temp(self.path)
            self.path = ""
        self._body = None
        if self.stream is not None:
            self.stream.give_up()

    # --- inside ------------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        """From here on the body is a file."""
        path = self._place() if self._place is not None else ""
        if not path:
            raise _no_room("no volume is usable")
        self._desk = desk_of(path)
        try:
            self._fd = create_temp(path, _patience_s())
        except Late:
            raise stalled(os.path.dirname(os.path.dirname(path)), "a body") from None
        except OSError as error:
            raise self._refused(error) from None
        self.path = path
        self._block = xxhash.xxh3_64()
        kept, self._body = self._body, None
        if kept:
            self._store(memoryview(kept), 0)

    def _take(self, piece: memoryview) -> None:
        size, at = len(piece), self._taken
        if at + size > self._bytes_max:
            if self.size_bytes is None:
                raise too_large(self._bytes_max)
            raise Invalid(
                f"the body is longer than the {self.size_bytes} bytes that were announced: say its true length",
                code="IncompleteBody",
            )
        self._hash(piece)
        body = self._body
        if body is not None and at + size > self._memory_bytes_max:
            if self._place is None:
                raise too_large(self._memory_bytes_max)
            self._open()
            body = None
        self._taken = at + size
        if body is not None:
            body += piece
        else:
            self._store(piece, at)

    def _hash(self, piece: memoryview) -> None:
        for running in self._running:
            running.update(piece)
        if self._hash128 is not None:
            self._hash128.update(piece)

    def _store(self, piece: memoryview, at: int) -> None:
        """Write `piece` to the file at `at`, and keep the sums of its blocks."""
        self._sum(piece)
        self._by_disk(self._write_out, piece, at)

    def _sum(self, piece: memoryview) -> None:
        rest = piece
        while rest:
            part = rest[: self._block_left]
            self._block.update(part)
            self._block_left -= len(part)
            if not self._block_left:
                self._end_block()
            rest = rest[len(part) :]

    def _by_disk(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have a thread of the disk do it."""
        try:
            self._desk.carry(_patience_s(), work, *arguments)
        except Late:
            self.late = True
            raise stalled(os.path.dirname(os.path.dirname(self.path)), "a body") from None
        except OSError as error:
            raise self._refused(error) from None

    @staticmethod
    def _refused(error: OSError) -> ForebayError:
        """What the disk's refusal means for whoever sent the body."""
        if error.errno in _FULL:
            return _no_room("the disk is full")
        log.warning("a body could not be written: %s", error)
        return Unavailable(f"the disk failed ({error.strerror}): try again")

    def _write_out(self, piece: memoryview, at: int) -> None:
        while piece and not self.late:  # the file is closed then
            written = self._written(piece, at)
            piece, at = piece[written:], at + written
        if self.synced_soon and not self._past_cache and at - self._begun >= WRITEBACK_BYTES and not self.late:
            files.begin_writeback(self._fd, self._begun, at - self._begun)
            self._begun = at

    def _written(self, piece: memoryview, at: int) -> int:
        """How much of `piece` was written."""
        if self._past_cache:
            pages = len(piece) - len(piece) % files.PAGE_BYTES
            try:
                if pages and at % files.PAGE_BYTES == 0:
                    return os.pwrite(self._fd, piece[:pages], at)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the disk wants larger pages
                    raise
            files.past_cache(self._fd, False)
            self._past_cache = False
        return os.pwrite(self._fd, piece, at)

    def _end_block(self) -> None:
        self._sums.append(self._block.intdigest())
        self._block.reset()
        self._block_left = limits.BLOCK_BYTES

    def _judge(self) -> None:
        wanted = self._wanted
        if self.size_bytes is not None and self._taken != self.size_bytes:
            raise Invalid(
                f"You did not provide the number of bytes specified by the Content-Length HTTP header: "
                f"{self._taken} of {self.size_bytes} came; send all of it",
                code="IncompleteBody",
            )
        promised = wanted.promised
        if self._chunked is not None:
            self._chunked.finish()
            promised = promised | self._trailing(self._chunked.trailers.items())
        digests = {running.algorithm: running for running in self._running}
        if signs_sha256(wanted.payload):
            check_payload_sha256(wanted.payload, digests["SHA256"].digest().hex())
        md5 = digests["MD5"].digest().hex() if "MD5" in digests else ""
        if wanted.md5_promised and md5 != wanted.md5_promised:
            raise mismatch("MD5")
        for algorithm, value in promised.items():
            if digests[algorithm].base64() != value:
                raise mismatch(algorithm)
        kept = dict.fromkeys((*promised, *wanted.algorithms)) if promised or wanted.algorithms else {}
        if self._block_left < limits.BLOCK_BYTES:
            self._end_block()
        self.result = Received(
            self._taken,
            None if self._body is None else bytes(self._body),
            self.path,
            self._sums,
            md5,
            self._hash128.hexdigest() if self._hash128 is not None else "",
            {algorithm: digests[algorithm].base64() for algorithm in kept} if kept else {},
        )
        self._body = None

    def _trailing(self, fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """The checksums in the trailer; `Invalid` for one that was not announced or did not come."""
        found = {}
        for name, value in fields:
            algorithm = ALGORITHM_OF.get(name.decode("ascii"))
            if algorithm is None or algorithm != self._wanted.trailer:
                raise Invalid(f"the trailer {name.decode('ascii')} was not announced", code="MalformedTrailerError")
            found[algorithm] = check_value(algorithm, value.decode("ascii"))
        if self._wanted.trailer and not found:
            raise Invalid("the trailer announced in x-amz-trailer did not come", code="MalformedTrailerError")
        return found


def _no_room(why: str) -> ForebayError:
    return Unavailable(
        f"there is no room for the body here ({why}): free some, or write to the bucket itself",
        code="InsufficientStorage",
        retry_after_s=5.0,
    )


def _patience_s() -> float:
    """How long this thread may wait for a disk."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return STALLED_AFTER_S
    return LOOP_WAIT_S
