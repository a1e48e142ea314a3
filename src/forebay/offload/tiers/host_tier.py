"""Host memory as a tier: buffers of exactly the size of their tensors, reused, and pinned for an accelerator.

Theory. Each slot has its own buffer, so an accelerator copies to and from it directly, by a worker or by the caller
(`memory`). Making a buffer is expensive: its pages are zeroed, and pinning takes milliseconds. So the buffer of a
released slot stays for the next slot of its size, or of up to an eighth less. When the room is used up, the buffers
that have waited longest go first. The first transfer of an accelerator's memory pins the buffer (pinned.py), on the
worker, so the training thread does not wait for it.

A transfer here is a copy in memory or over the accelerator's link, so one thread in each direction is enough, and
pieces only serve to let urgent moves pass. They are larger than a disk's. Between two pieces the link rests until the
worker has noticed the end and given the device the next one. At 50 GB/s a piece of 8 MiB would be over in 0.17 ms, so
the rests would count; one of 32 MiB takes 0.67 ms, and in memory, at 10 GB/s, 3.4 ms, for which an urgent move can
wait. Nothing has a checksum: bytes that memory got wrong would be wrong anywhere.

Rejected: one range with slots in it, as on disks (pinned ahead, it costs all of the room at the start; pinned as it is
used, a copy may not cross from one pinned part to the next).

Invariants. (1) Buffers of slots and idle ones together never exceed the room. (2) A buffer belongs to one slot, or is
idle.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from forebay.core.errors import Busy, Invalid
from forebay.offload.tiers.device_memory import DeviceBytes, accelerators
from forebay.offload.tiers.extents import blocks
from forebay.offload.tiers.pinned import Pages
from forebay.offload.tiers.queues import Piece, Queue, Ticket
from forebay.offload.tiers.tiers import Slot, Storage

NEAR_SHARE = 8  # a buffer may be longer than its slot by an eighth
HOST_PIECE_BYTES = 32 << 20  # four of a disk's


class HostTier(Storage):
    """Up to `room` of host memory. A buffer is pinned when an accelerator's memory first moves to or from it; with
    `pinned=True` when it is made, for who copies by `memory`; with False never, and those moves are slower."""

    def __init__(self, room: str | int, *, pinned: bool | None = None) -> None:
        super().__init__("host tier", room)
        self._wanted = pinned
        self.pinned = False  # as it is: whether buffers were pinned since it was opened
        self._used_bytes = 0
        self._idle_bytes = 0
        self._idle: deque[Pages] = deque()  # those that wait longest first
        self._held: set[Pages] = set()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def path(self) -> str:
        return "pinned host memory" if self.pinned else "host memory"

    def memory(self, slot: Slot) -> Any:
        """The bytes of a slot as a tensor of uint8: where an accelerator may copy to and from by itself, while no
        ticket is under way for the slot. Not after the slot is released or the tier closed."""
        with self._lock:
            self._check(slot)
            return torch.from_numpy(slot.buffer.bytes[: slot.size_bytes])

    # --- life --------------------------------------------------------------------------------------------------------
    def _start(self) -> tuple[Queue, Queue]:
        if self._wanted and not torch.cuda.is_available():
            raise Invalid("pinned=True without CUDA: leave it out, memory is pinned as soon as an accelerator needs it")
        self.pinned = False
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
            buffer = Pages(room_bytes)
            if self._wanted:
                buffer.pin(accelerators["cuda"])
                self.pinned = True
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
        begins = range(0, size_bytes, HOST_PIECE_BYTES)
        ends = [*begins[1:], size_bytes]
        return [Piece(at, 0, begin, begin, end) for at, (begin, end) in enumerate(zip(begins, ends, strict=True))]

    # --- moving, on the workers --------------------------------------------------------------------------------------
    def _copy_out(self, ticket: Ticket, piece: Piece, worker: int) -> int:
        memory, buffer = ticket.memory, ticket.slot.buffer
        into = buffer.bytes[piece.begin : piece.end]
        if isinstance(memory, DeviceBytes):
            self._pin(buffer, memory)
            memory.copy_out(piece.begin, piece.end, into)
        else:
            np.copyto(into, memory[piece.begin : piece.end])
        return len(into)

    def _copy_in(self, ticket: Ticket, piece: Piece, worker: int) -> int:
        memory, buffer = ticket.memory, ticket.slot.buffer
        source = buffer.bytes[piece.begin : piece.end]
        if isinstance(memory, DeviceBytes):
            self._pin(buffer, memory)
            memory.copy_in(piece.begin, piece.end, source)
        else:
            np.copyto(memory[piece.begin : piece.end], source)
        return len(source)

    def _pin(self, buffer: Pages, memory: DeviceBytes) -> None:
        """Nobody else pins it meanwhile: of its slot either a store is under way or loads are, each on one thread."""
        if self._wanted is not False:
            buffer.pin(memory.accelerator)
            self.pinned = True
