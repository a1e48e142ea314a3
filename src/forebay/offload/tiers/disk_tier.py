"""Disks as a tier: one file in each directory, read and written with direct I/O, with a checksum for each piece.

Theory. The tier's room is one range, dealt out to the directories a piece at a time. A tensor larger than a piece moves
on several disks at once, and small ones spread over them. The place of a slot follows from its beginning: nothing is
looked up, and the disk holds nothing about it.

Direct I/O needs aligned addresses and lengths. Aligned memory (pinned buffers) goes to the disk as it is. Only the
last, partial block goes through a bounce buffer, in the same call. Other memory goes through bounce buffers whole. Each
thread owns one, made when the tier opens, so none is allocated, awaited or shared while pieces move. An accelerator's
memory also goes through them whole: the disk cannot reach it, and its checksum is computed on the way. The first such
piece has its thread's buffer pinned. A store that waits for the device does not occupy the disk, and a load has its
bytes in host memory before it needs the device.

Each piece has a 64-bit checksum, computed when it is written and compared when it is read: a wrong byte would be a
wrong gradient that nobody sees. Bytes for an accelerator are compared before they are copied there. If a piece read
straight into the caller's memory does not match, it is read once more through the bounce buffer before it is `Corrupt`.
A fork during a direct read into private memory may leave the parent with a page that the disk did not write to
(open(2)); bounce buffers are kept out of forks.

Where GPUDirect Storage really works (`gpudirect`), an accelerator's pieces of whole blocks use it, and the device
computes their checksums. The first failure ends that for the tier, and the piece goes through host memory like all
others. So does a piece that comes back with other bytes, before it is `Corrupt`.

Without direct I/O each piece is written back before it counts as stored. So a transfer sees its own disk errors, and
memory does not fill with dirty pages.

`limit_bytes_s` emulates slower disks: (write, read), each shared by all directories. Tests use it, and benchmarks that
say so.

Rejected: io_uring and libaio (no client in the standard library; the kernel splits a piece of 8 MiB into concurrent
requests, so a few threads fill the disk's queue); one checksum for a slot (pieces end in any order); RAID 0 by the user
as the only way to use several disks (one more thing to set up, and it cannot say which disk fails); larger pieces for
accelerators, as host_tier.py has them (noticing the end of a copy is nothing beside the disk's time for a piece).

Invariants. (1) Reads and writes stay within a slot's own pieces. (2) A load ends without an error only if each piece
has the checksum of the store. (3) The caller's source is only read.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from forebay.core.errors import Busy, Closed, Corrupt, Invalid
from forebay.offload.tiers.device_memory import DeviceBytes, DeviceSum, weighted
from forebay.offload.tiers.extents import BLOCK_BYTES, Extents, blocks
from forebay.offload.tiers.gpudirect import Way, gpudirect, ways
from forebay.offload.tiers.pinned import Pages
from forebay.offload.tiers.queues import Array, Piece, Queue, Throttle, Ticket
from forebay.offload.tiers.swapfile import Mode, SwapFile, trouble
from forebay.offload.tiers.tiers import PIECE_BYTES, PIECE_BYTES_MAX, Slot, Storage, page_aligned
from forebay.ports import clock
from forebay.ports.clock import Clock

MEASURED_BYTES_MAX = 256 << 20  # a tenth of a second of a fast disk, five of a slow one
MEASURED_SHARE = 4  # at most a quarter of the room
SLOWER_THAN_SAID_MAX = 2.0  # a plan for a disk twice as fast is worth nothing
THREADS = 2  # for each disk and direction: while one sums or copies, the other moves
THREADS_MAX = 16  # more only stand in line at the disk

_FREE: list[Throttle | None] = [None, None]  # out and in

Vector = Callable[[int, list[Array], int], int]  # os.preadv and os.pwritev


class Measured(NamedTuple):
    """What moving `size_bytes` there and back came to."""

    write_bytes_s: float
    read_bytes_s: float
    mode: Mode
    size_bytes: int


class DiskTier(Storage):
    """Directories on local disks, best one on each disk; `room` is for all of them together.

    `write_bytes_s` and `read_bytes_s` are what the disks are believed to do, for `check_speed`. `threads` are for each
    directory and direction. `experimental` tries GPUDirect Storage, which has run nowhere yet. `preadv`, `pwritev` and
    `ways` are the system's; tests give others, that fail.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        room: str | int,
        *,
        direct: bool = True,
        write_bytes_s: float | None = None,
        read_bytes_s: float | None = None,
        threads: int | None = None,
        limit_bytes_s: tuple[float, float] | None = None,
        piece_bytes: int = PIECE_BYTES,
        experimental: bool = False,
        preadv: Vector = os.preadv,
        pwritev: Vector = os.pwritev,
        ways: Callable[[Sequence[int], Sequence[str]], list[Way]] = ways,
        time_from: Clock = clock.system,
    ) -> None:
        self.directories = tuple(os.path.realpath(directory) for directory in directories)
        super().__init__(f"disk tier at {', '.join(self.directories)}", room)
        if not self.directories or len(set(self.directories)) < len(self.directories):
            raise Invalid("a disk tier needs directories, each of them once: name one on each disk")
        if not BLOCK_BYTES <= piece_bytes <= PIECE_BYTES_MAX or piece_bytes % BLOCK_BYTES:
            raise Invalid(f"pieces of {piece_bytes} bytes: give a multiple of {BLOCK_BYTES}, up to {PIECE_BYTES_MAX}")
        if self.room_bytes < piece_bytes * len(self.directories) > piece_bytes:
            raise Invalid(f"{self.name}: give room for a piece of {piece_bytes} bytes in each directory")
        if limit_bytes_s is not None and min(limit_bytes_s) <= 0:
            raise Invalid(f"a limit of {limit_bytes_s} bytes a second: give two positive numbers")
        self.write_bytes_s, self.read_bytes_s = write_bytes_s, read_bytes_s
        self._direct, self._piece_bytes = direct, piece_bytes
        self._threads = threads if threads is not None else 1 if limit_bytes_s else THREADS
        if not 1 <= self._threads <= THREADS_MAX:
            raise Invalid(f"{threads} threads for each disk and direction: give 1 to {THREADS_MAX}")
        self._preadv, self._pwritev, self._clock = preadv, pwritev, time_from
        self._throttles = (
            [Throttle(bytes_s, time_from=time_from) for bytes_s in limit_bytes_s] if limit_bytes_s else _FREE
        )
        self._extents = Extents(self.room_bytes)
        self._files: list[SwapFile] = []
        self._bounces: list[list[Pages]] = []  # out and in, of each worker
        self._experimental, self._open_ways = experimental, ways
        self._ways: list[Way] = []  # of GPUDirect, by lane
        self._goes_straight = self._went_straight = False

    @property
    def used_bytes(self) -> int:
        return self.room_bytes - self._extents.free_bytes

    @property
    def mode(self) -> Mode:
        """How the disks are read and written: `buffered` as soon as one of them is. `Closed` before it is open."""
        if not self._files:
            raise Closed(f"{self.name} is not open: open it first")
        return "O_DIRECT" if all(file.mode == "O_DIRECT" for file in self._files) else "buffered"

    @property
    def path(self) -> str:
        if self._went_straight:
            return "GPUDirect Storage" if self._goes_straight else f"{self.mode}, after GPUDirect Storage failed"
        is_pinned = any(bounce.pinned for bounces in self._bounces for bounce in bounces)
        return f"{self.mode} through pinned memory" if is_pinned else self.mode

    def gpudirect(self) -> tuple[bool, str]:
        """Whether GPUDirect Storage can be used for these directories; if not, why, and what is used instead."""
        return gpudirect(self.directories)

    # --- life --------------------------------------------------------------------------------------------------------
    def _start(self) -> tuple[Queue, Queue]:
        try:
            for lane, directory in enumerate(self.directories):
                self._files.append(SwapFile(directory, self._file_bytes(lane), direct=self._direct))
        except BaseException:
            self._stop()
            raise
        self._extents = Extents(self.room_bytes)
        if self._experimental and self.mode == "O_DIRECT" and self._throttles == _FREE:
            self._ways = self._open_ways([file.fd for file in self._files], self.directories)
        self._goes_straight, self._went_straight = bool(self._ways), False
        lanes = len(self._files)
        self._bounces = [[Pages(self._piece_bytes) for _ in range(lanes * self._threads)] for _ in range(2)]
        return (
            Queue("disk-out", lanes, self._threads, self._write, self._stored, self._lock),
            Queue("disk-in", lanes, self._threads, self._read, self._loaded, self._lock),
        )

    def _stop(self) -> None:
        for way in self._ways:
            with contextlib.suppress(OSError, RuntimeError):
                way.close()
        self._ways, self._goes_straight = [], False
        for file in self._files:
            file.close()
        for bounces in self._bounces:
            for bounce in bounces:
                bounce.free()
        self._files, self._bounces = [], []
        self._extents = Extents(self.room_bytes)

    # --- room --------------------------------------------------------------------------------------------------------
    def _file_bytes(self, lane: int) -> int:
        """What one directory has of the room."""
        turns, rest = divmod(self.room_bytes, self._piece_bytes * len(self.directories))
        return turns * self._piece_bytes + min(max(rest - lane * self._piece_bytes, 0), self._piece_bytes)

    def _place(self, size_bytes: int) -> Slot:
        room_bytes = blocks(size_bytes)
        begin = self._extents.take(room_bytes)
        if begin is None:
            free, largest = self._extents.free_bytes, self._extents.largest_bytes
            raise Busy(
                f"{self.name} has no {room_bytes} bytes in one stretch ({free} of {self.room_bytes} are free, at most "
                f"{largest} in one): release slots, or give the tier more room"
            )
        return Slot(size_bytes, begin, room_bytes)

    def _give(self, slot: Slot) -> None:
        self._extents.give(slot.begin, slot.room_bytes)

    def _pieces(self, slot: Slot, size_bytes: int) -> list[Piece]:
        pieces: list[Piece] = []
        begin = 0
        while begin < size_bytes:
            turn, inner = divmod(slot.begin + begin, self._piece_bytes)
            row, lane = divmod(turn, len(self.directories))
            end = min(size_bytes, begin + self._piece_bytes - inner)
            pieces.append(Piece(len(pieces), lane, row * self._piece_bytes + inner, begin, end))
            begin = end
        return pieces

    # --- moving, on the workers --------------------------------------------------------------------------------------
    def _write(self, ticket: Ticket, piece: Piece, worker: int) -> int:
        file, pages, throttle = self._files[piece.lane], self._bounces[0][worker], self._throttles[0]
        memory, bounce = ticket.memory, pages.bytes
        if isinstance(memory, DeviceBytes) and self._write_straight(memory, ticket, piece):
            return piece.end - piece.begin
        if isinstance(memory, DeviceBytes):
            pages.pin(memory.accelerator)
            source = bounce[: piece.end - piece.begin]
            memory.copy_out(piece.begin, piece.end, source)  # before time is booked: the disk rests until then
        else:
            source = memory[piece.begin : piece.end]
        straight, views = _views(source, bounce, file)
        moved = sum(map(len, views))
        until_s = throttle.book(moved) if throttle else 0.0
        ticket.slot.sums[piece.number] = xxhash.xxh3_64_intdigest(source)
        np.copyto(bounce[: len(source) - straight], source[straight:])
        try:
            _move(self._pwritev, file.fd, views, piece.at)
            if file.mode == "buffered":
                os.fdatasync(file.fd)
                os.posix_fadvise(file.fd, piece.at, moved, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise trouble(file.directory, f"writing {moved} bytes", error) from error
        if throttle:
            throttle.wait(until_s)
        return moved

    def _read(self, ticket: Ticket, piece: Piece, worker: int) -> int:
        file, pages, throttle = self._files[piece.lane], self._bounces[1][worker], self._throttles[1]
        memory, bounce, expected = ticket.memory, pages.bytes, ticket.slot.sums[piece.number]
        is_far = isinstance(memory, DeviceBytes)
        if is_far and isinstance(expected, DeviceSum) and self._read_straight(memory, piece, expected):
            return piece.end - piece.begin
        if is_far:
            pages.pin(memory.accelerator)
            into = bounce[: piece.end - piece.begin]
        else:
            into = memory[piece.begin : piece.end]
        straight, views = _views(into, bounce, file)
        until_s = throttle.book(len(into)) if throttle else 0.0
        moved = self._fetch(file, piece.at, views)
        np.copyto(into[straight:], bounce[: len(into) - straight])
        is_whole = _sum_as(expected, into) == expected
        if straight and not is_whole and not is_far:
            moved += self._fetch(file, piece.at, [bounce[: _padded(len(into), file)]])
            np.copyto(into, bounce[: len(into)])
            is_whole = _sum_as(expected, into) == expected
        if not is_whole:
            raise Corrupt(
                f"offload directory {file.directory}: {len(into)} bytes at {piece.at} are not what was stored there "
                "(if that was not changed meanwhile): the tensor is lost, so go on from a checkpoint, and look at the "
                "disk before it is used again"
            )
        if is_far:
            memory.copy_in(piece.begin, piece.end, into)
        if throttle:
            throttle.wait(until_s)
        return moved

    # --- without a stop in host memory -------------------------------------------------------------------------------
    def _write_straight(self, memory: DeviceBytes, ticket: Ticket, piece: Piece) -> bool:
        """From the device to the disk, if there is a way; False if it has to go by host memory."""
        if not self._goes_straight or (piece.end - piece.begin) % BLOCK_BYTES:
            return False
        total = memory.checksum(piece.begin, piece.end)
        if not self._goes(lambda way: way.write(memory.piece(piece.begin, piece.end), piece.at), piece.lane):
            return False
        ticket.slot.sums[piece.number] = total
        return True

    def _read_straight(self, memory: DeviceBytes, piece: Piece, expected: int) -> bool:
        """The same back. False also if what came is not what was stored: the disk is asked once more, the usual way."""
        if not self._goes_straight:
            return False
        memory.wait()
        if not self._goes(lambda way: way.read(memory.piece(piece.begin, piece.end), piece.at), piece.lane):
            return False
        return memory.checksum(piece.begin, piece.end) == expected

    def _goes(self, work: Callable[[Way], None], lane: int) -> bool:
        try:
            work(self._ways[lane])
        except (OSError, RuntimeError):
            self._goes_straight = False
            return False
        self._went_straight = True
        return True

    def _fetch(self, file: SwapFile, at: int, views: list[Array]) -> int:
        moved = sum(map(len, views))
        try:
            _move(self._preadv, file.fd, views, at)
            if file.mode == "buffered":
                os.posix_fadvise(file.fd, at, moved, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise trouble(file.directory, f"reading {moved} bytes", error) from error
        return moved

    # --- how quick it is ---------------------------------------------------------------------------------------------
    def measure(self, size_bytes: int | None = None) -> Measured:
        """Store and load so much (by default MEASURED_BYTES_MAX, at most a quarter of the room) from aligned memory,
        and time it. It takes a slot and as much memory meanwhile; `Busy` if there is no such room."""
        most = max(self.room_bytes // MEASURED_SHARE, BLOCK_BYTES)
        size_bytes = min(size_bytes or MEASURED_BYTES_MAX, most)
        memory = page_aligned(blocks(size_bytes))[:size_bytes]
        memory[:] = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)  # some disks compress
        slot = self.reserve(size_bytes)
        try:
            begun_s = self._clock.monotonic_s()
            self.store(slot, memory).wait()
            stored_s = self._clock.monotonic_s()
            self.load(slot, memory).wait()
            loaded_s = self._clock.monotonic_s()
        finally:
            self.release(slot)
        return Measured(
            size_bytes / max(stored_s - begun_s, 1e-9),
            size_bytes / max(loaded_s - stored_s, 1e-9),
            self.mode,
            size_bytes,
        )

    def check_speed(self, measured: Measured | None = None) -> Measured:
        """Measure, unless that was done; `Invalid` if the disks are less than half as quick as they were said to be."""
        found = measured or self.measure()
        for doing, said, is_so in (
            ("write", self.write_bytes_s, found.write_bytes_s),
            ("read", self.read_bytes_s, found.read_bytes_s),
        ):
            if said and is_so * SLOWER_THAN_SAID_MAX < said:
                raise Invalid(
                    f"{self.name} {doing}s {is_so / 1e6:.0f} MB/s ({found.mode}, over {found.size_bytes} bytes) and "
                    f"was said to {doing} {said / 1e6:.0f} MB/s: a plan for that is worth nothing. Say "
                    f"{doing}_bytes_s={is_so:.3g}, or find out what holds the disk up"
                )
        return found


def _sum_as(expected: int, memory: Array) -> int:
    """The checksum of what is in host memory, of the kind that was taken when it was stored."""
    if isinstance(expected, DeviceSum):
        import torch

        return int(weighted(torch.from_numpy(memory)).item())
    return xxhash.xxh3_64_intdigest(memory)


def _padded(size_bytes: int, file: SwapFile) -> int:
    return -(-size_bytes // file.block_bytes) * file.block_bytes


def _address(memory: Array) -> int:
    return int(memory.__array_interface__["data"][0])


def _views(memory: Array, bounce: Array, file: SwapFile) -> tuple[int, list[Array]]:
    """How many bytes of `memory` the disk can take or give as they lie; and all that is moved: they, then the rest in
    the bounce buffer, padded to a block. What is in the bounce buffer anyway lies well."""
    straight, address = 0, _address(memory)
    if address == _address(bounce):
        return len(memory), [bounce[: _padded(len(memory), file)]]
    if address % file.align_bytes == 0:
        straight = len(memory) // file.block_bytes * file.block_bytes
    padded = _padded(len(memory), file) - straight
    return straight, [view for view in (memory[:straight], bounce[:padded]) if len(view)]


def _move(vector: Vector, fd: int, views: list[Array], at: int) -> None:
    """All bytes of the views, or OSError. A disk may do less than it was asked for; how it goes on says why."""
    while views:
        moved = vector(fd, views, at)
        if moved <= 0:
            raise OSError(errno.EIO, "it moved no byte: the file is cut short")
        at += moved
        rest = []
        for view in views:
            rest += [view[moved:]] if moved < len(view) else []
            moved = max(0, moved - len(view))
        views = rest
