"""Host memory as a tier: buffers of just the size of their tensors, reused, and pinned where there is an accelerator.

Theory. A slot has a buffer of its own, so an accelerator can copy to and from it without a stop in between (`memory`).
Making one costs: its pages are zeroed, and pinning takes milliseconds. So a buffer whose slot is released stays for the
next slot that it fits: one of its size, or smaller by at most an eighth. When the room is used up, those that have
waited longest go first.

Buffers are pages from the kernel, registered with CUDA afterwards. torch's own allocator of pinned memory rounds up to
powers of two, so that a tensor of 1.1 GiB takes 2 (see MemAscend, arXiv 2505.23254).

Here an operator's wait is a copy in memory, so one thread in each direction is enough, and pieces only keep urgent
moves from waiting. Nothing has a checksum: bytes that memory got wrong would be wrong anywhere.

Rejected: one range with slots in it, like the disks' (pinned ahead it costs all of the room at the start, and pinned as
it is used a copy may not cross from one pinned part to the next).

Invariants. (1) Buffers of slots and idle ones together are never more than the room. (2) A buffer is of one slot, or
idle.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from forebay.core.errors import Busy, Invalid, Unavailable
from forebay.torch.offload.extents import blocks
from forebay.torch.offload.queues import Array, Piece, Queue, Ticket
from forebay.torch.offload.tiers import PIECE_BYTES, Slot, Storage, page_aligned

NEAR_SHARE = 8  # a buffer may be longer than its slot by an eighth
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class _Buffer:
    """Pages from the kernel, pinned if that is asked for."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.size_bytes, self.pinned = size_bytes, pinned
        self.bytes: Array = page_aligned(size_bytes)
        self._address: int = self.bytes.__array_interface__["data"][0]
        if pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(self._address, size_bytes, _PORTABLE))
            if code:
                raise Unavailable(
                    f"pinning {size_bytes} bytes of host memory failed (CUDA error {code}): raise the limit on locked "
                    "memory (ulimit -l), give the host tier less room, or pinned=False"
                )

    def free(self) -> None:
        """Give the pages back, as soon as nobody looks at them."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self.bytes = None


class HostTier(Storage):
    """Up to `room` of host memory; pinned by default where CUDA is available."""

    def __init__(self, room: str | int, *, pinned: bool | None = None) -> None:
        super().__init__("host tier", room)
        self._wanted = pinned
        self.pinned = False  # as it is, once open
        self._used_bytes = 0
        self._idle_bytes = 0
        self._idle: deque[_Buffer] = deque()  # those that wait longest first
        self._held: set[_Buffer] = set()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory that no slot has, kept for the next."""
        return self._idle_bytes

    def memory(self, slot: Slot) -> Any:
        """The bytes of a slot as a tensor of uint8: where an accelerator may copy to and from by itself, while no
        ticket is under way for the slot. Not after the slot is released or the tier closed."""
        with self._lock:
            self._check(slot)
            return torch.from_numpy(slot.buffer.bytes[: slot.size_bytes])

    # --- life --------------------------------------------------------------------------------------------------------
    def _start(self) -> tuple[Queue, Queue]:
        has_cuda = torch.cuda.is_available()
        if self._wanted and not has_cuda:
            raise Invalid("pinned=True without CUDA: leave it out, memory is pinned where there is an accelerator")
        self.pinned = has_cuda if self._wanted is None else self._wanted
        return (
            Queue("host-out", 1, 1, self._copy_out, self._stored, self._lock),
            Queue("host-in", 1, 1, self._copy_in, self._loaded, self._lock),
        )

    def _stop(self) -> None:
        for buffer in [*self._held, *self._idle]:
            buffer.free()
        self._held.clear()
        self._idle.clear()
        self._used_bytes = self._idle_bytes = 0

    # --- room --------------------------------------------------------------------------------------------------------
    def _place(self, size_bytes: int) -> Slot:
        room_bytes = blocks(size_bytes)
        near = [buffer for buffer in self._idle if 0 <= buffer.size_bytes - room_bytes <= room_bytes // NEAR_SHARE]
        if near:
            buffer = min(near, key=lambda buffer: buffer.size_bytes)
            self._idle.remove(buffer)
            self._idle_bytes -= buffer.size_bytes
        else:
            if self._used_bytes + room_bytes > self.room_bytes:
                raise Busy(
                    f"{self.name} has no {room_bytes} bytes ({self.room_bytes - self._used_bytes} of {self.room_bytes} "
                    "are free): release slots, or give the tier more room"
                )
            while self._used_bytes + self._idle_bytes + room_bytes > self.room_bytes:
                oldest = self._idle.popleft()
                self._idle_bytes -= oldest.size_bytes
                oldest.free()
            buffer = _Buffer(room_bytes, pinned=self.pinned)
        self._held.add(buffer)
        self._used_bytes += buffer.size_bytes
        return Slot(size_bytes, 0, buffer.size_bytes, buffer)

    def _give(self, slot: Slot) -> None:
        buffer, slot.buffer = slot.buffer, None
        self._held.remove(buffer)
        self._used_bytes -= buffer.size_bytes
        self._idle_bytes += buffer.size_bytes
        self._idle.append(buffer)

    def _pieces(self, slot: Slot, size_bytes: int) -> list[Piece]:
        begins = range(0, size_bytes, PIECE_BYTES)
        return [Piece(at, 0, begin, begin, min(size_bytes, begin + PIECE_BYTES)) for at, begin in enumerate(begins)]

    # --- moving, on the workers --------------------------------------------------------------------------------------
    def _copy_out(self, ticket: Ticket, piece: Piece, worker: int) -> int:
        np.copyto(ticket.slot.buffer.bytes[piece.begin : piece.end], ticket.memory[piece.begin : piece.end])
        return piece.end - piece.begin

    def _copy_in(self, ticket: Ticket, piece: Piece, worker: int) -> int:
        np.copyto(ticket.memory[piece.begin : piece.end], ticket.slot.buffer.bytes[piece.begin : piece.end])
        return piece.end - piece.begin
