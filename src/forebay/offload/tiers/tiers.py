"""What the engine may ask of a tier, the place where tensors wait while they are away.

Theory. A tier has room, divided into slots. A plan reserves a slot for each tensor once, so at run time nothing is
allocated or looked up. `store` and `load` return a ticket at once; bytes move on the tier's own threads (queues.py).
`HostTier` is memory, `DiskTier` is files.

The caller passes a buffer of bytes in host memory, or a torch tensor of uint8, there or on an accelerator
(device_memory.py), and must leave it alone until its ticket is done. Tensors in host memory are accessed by address and
never turned into numpy arrays: `.numpy()` forbids torch for good to resize the storage, and that is how the engine
empties storages.

A failed store leaves the tensor in memory, and the engine keeps it. The slot then holds nothing, as during a store. A
failed load leaves its destination undefined.

Rejected: a typing.Protocol beside the class that both tiers share (two lists of the same promises); loads that wait for
the store of the same slot (the bytes are still in memory then: the engine must not read them back).

Invariants. (1) A slot has one store under way, or any number of loads, or nothing. (2) A load without an error returns
what the last store of that slot took. (3) Slots never overlap and never move. (4) The process that opened a tier uses
it: threads do not survive a fork.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from forebay.core.errors import Closed, Invalid
from forebay.core.quantity import parse_size
from forebay.offload.tiers.device_memory import DeviceBytes, accelerators
from forebay.offload.tiers.extents import BLOCK_BYTES
from forebay.offload.tiers.queues import Array, Piece, Queue, Ticket

PIECE_BYTES = 8 << 20  # what one thread moves at once, and the unit in which disks take turns: 2.5 ms of a fast disk
PIECE_BYTES_MAX = 64 << 20  # each thread may own a buffer of one piece

Then = Callable[[Ticket], object]


@dataclass(eq=False)
class Slot:
    """A place in a tier for a tensor of up to `size_bytes`. The engine keeps it and hands it back."""

    size_bytes: int
    begin: int  # in the tier, for people and for disks
    room_bytes: int  # what it takes of the tier
    buffer: Any = None  # of host tiers
    stored_bytes: int = 0  # 0: it holds nothing
    sums: list[int] = field(default_factory=list, repr=False)  # of each piece, where a tier keeps them
    is_storing: bool = False
    loads: int = 0  # under way or waiting
    is_held: bool = True  # not released
    opening: object = field(default=None, repr=False)  # of a tier: slots end when it is closed


class _Borrowed:
    """A tensor's bytes, for numpy; holds the tensor, and leaves its storage resizable."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_of(memory: Any, *, writable: bool = False) -> Array | DeviceBytes:
    """What a caller handed in: a flat array over the same bytes or, on an accelerator, what copies them once the
    calling thread's stream is through with what it holds now. `Invalid` where that cannot be."""
    if hasattr(memory, "untyped_storage"):
        accelerator = accelerators.get(memory.device.type)
        if memory.element_size() != 1 or not memory.is_contiguous():
            raise Invalid("a tier moves contiguous tensors of uint8: view the storage as such, or copy")
        if accelerator is None and memory.device.type != "cpu":
            known = ", ".join(accelerators)
            raise Invalid(f"a tier moves tensors in host memory and on {known}, not on {memory.device}: copy it there")
        if memory.storage_offset() + memory.numel() > memory.untyped_storage().nbytes():
            raise Invalid("the tensor's storage is empty or too small: resize it to its full size first")
        if memory.numel() and not memory.data_ptr():
            raise Invalid("the tensor has no memory: fake tensors cannot be moved")
        if accelerator is not None:
            return DeviceBytes(memory, accelerator)
        return np.asarray(_Borrowed(memory)) if memory.numel() else np.empty(0, np.uint8)
    try:
        array: Array = np.frombuffer(memory, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise Invalid(f"a tier moves tensors of uint8 and contiguous buffers, not this ({error})") from None
    if writable and not array.flags.writeable:
        raise Invalid("a load needs memory that may be written: this buffer is read-only")
    return array


def page_aligned(size_bytes: int) -> Array:
    """New memory that begins at a page. A fork does not get it: pages shared with a child would be copied under a disk
    that is writing into them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


class Storage(ABC):
    """A tier. `with tier:` opens and closes it; all methods may be called from any thread of the process."""

    def __init__(self, name: str, room: str | int) -> None:
        self.name = name
        room_bytes = parse_size(room) if isinstance(room, str) else room
        self.room_bytes = room_bytes // BLOCK_BYTES * BLOCK_BYTES
        if self.room_bytes <= 0:
            raise Invalid(f"{name} with room for {room_bytes} bytes: give at least {BLOCK_BYTES}")
        self._lock = threading.Lock()
        self._queues: tuple[Queue, Queue] | None = None  # out and in; while it is open
        self._moved = (0, 0)  # by queues that are closed
        self._pid = 0

    # --- what a kind of tier is -------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Room that slots take."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Which way bytes take, for people. While it is open: it is not known before, and may change with the first
        transfer of an accelerator's memory."""

    @abstractmethod
    def _start(self) -> tuple[Queue, Queue]:
        """Get what the tier is made of, or raise and leave nothing; queues out and in, not started."""

    @abstractmethod
    def _stop(self) -> None:
        """Give everything back. No thread runs any more."""

    @abstractmethod
    def _place(self, size_bytes: int) -> Slot:
        """Room for so much, `Busy` if there is none now. The lock is held."""

    @abstractmethod
    def _give(self, slot: Slot) -> None:
        """Room back. The lock is held."""

    @abstractmethod
    def _pieces(self, slot: Slot, size_bytes: int) -> list[Piece]:
        """How so many bytes move to or from a slot; the same for both."""

    # --- life --------------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Ready to move. Opening twice is an error."""
        if self._queues is not None:
            raise Invalid(f"{self.name} is open already")
        self._queues = self._start()
        self._pid = os.getpid()
        for queue in self._queues:
            queue.start()

    def close(self) -> None:
        """End all transfers and give everything back, what is stored included. Transfers that did not begin fail with
        `Closed`, and those that wait between two pieces too. May be called again. Not from a callback."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._queues is None:
                return
            queues = self._queues
            if any(queue.owns(threading.current_thread()) for queue in queues):
                raise Invalid(f"{self.name} is closed from a callback of its own: close it from another thread")
            self._queues = None
        for queue in queues:
            queue.close()
        self._moved = (self._moved[0] + queues[0].moved_bytes, self._moved[1] + queues[1].moved_bytes)
        self._stop()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- room --------------------------------------------------------------------------------------------------------
    def reserve(self, size_bytes: int) -> Slot:
        """Room for a tensor. `Busy` where there is none now, `Invalid` where there never is."""
        if not 0 < size_bytes <= self.room_bytes:
            raise Invalid(f"{self.name} cannot hold {size_bytes} bytes: it has room for 1 to {self.room_bytes}")
        with self._opened() as queues:
            slot = self._place(size_bytes)
            slot.opening = queues
            return slot

    def release(self, slot: Slot) -> None:
        """Room back. `Invalid` while something moves to or from it: wait for its ticket, or cancel it. Nothing is left
        to do once the tier is closed, and in a fork."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._queues is None:
                return
            self._check(slot)
            if slot.is_storing or slot.loads:
                raise Invalid(f"{self.name}: a slot is released while it moves: wait for its ticket, or cancel it")
            slot.is_held = False
            slot.stored_bytes = 0
            self._give(slot)

    # --- moving ------------------------------------------------------------------------------------------------------
    def store(
        self, slot: Slot, source: Any, *, due: float = math.inf, urgent: bool = False, then: Then | None = None
    ) -> Ticket:
        """Begin to write `source` into a slot in place of what it holds.

        Of all that is not urgent the smallest `due` goes first: any number that tells by when it has to be done.
        `then(ticket)` is called once when it is over, well or not, mostly on a thread of the tier: let it be short.
        """
        memory = bytes_of(source)
        with self._opened() as (queue, _):
            self._check(slot)
            if not 0 < len(memory) <= slot.size_bytes:
                raise Invalid(f"{self.name}: {len(memory)} bytes for a slot of 1 to {slot.size_bytes}: reserve another")
            if slot.is_storing or slot.loads:
                raise Invalid(f"{self.name}: a store into a slot that is moving: wait for its ticket first")
            pieces = self._pieces(slot, len(memory))
            slot.stored_bytes, slot.is_storing, slot.sums = 0, True, [0] * len(pieces)
            ticket = Ticket(queue, slot, memory, pieces, due=due, urgent=urgent, then=then)
            queue.submit(ticket)
        return ticket

    def load(
        self, slot: Slot, into: Any, *, due: float = math.inf, urgent: bool = False, then: Then | None = None
    ) -> Ticket:
        """Begin to read what a slot holds into memory of exactly that size; the rest as for `store`. `Invalid` while
        the slot is being stored: the tensor is still in memory, or in the ticket's hands."""
        memory = bytes_of(into, writable=True)
        with self._opened() as (_, queue):
            self._check(slot)
            if slot.is_storing or not slot.stored_bytes:
                raise Invalid(
                    f"{self.name}: a load from a slot that holds nothing (yet): wait for its store, or redo it"
                )
            if len(memory) != slot.stored_bytes:
                raise Invalid(
                    f"{self.name}: {slot.stored_bytes} bytes are stored and {len(memory)} asked for: ask for all"
                )
            slot.loads += 1
            pieces = self._pieces(slot, len(memory))
            ticket = Ticket(queue, slot, memory, pieces, due=due, urgent=urgent, then=then)
            queue.submit(ticket)
        return ticket

    @property
    def bytes_written(self) -> int:
        """Bytes that stores have moved since the tier was made, padding included: what wears disks out."""
        return self._moved[0] + (queues[0].moved_bytes if (queues := self._queues) else 0)

    @property
    def bytes_read(self) -> int:
        """Bytes that loads have moved since the tier was made."""
        return self._moved[1] + (queues[1].moved_bytes if (queues := self._queues) else 0)

    # --- for kinds of tiers ------------------------------------------------------------------------------------------
    def _stored(self, ticket: Ticket) -> None:
        """A store is over. The lock is held."""
        ticket.slot.is_storing = False
        ticket.slot.stored_bytes = 0 if ticket.error else ticket.size_bytes

    def _loaded(self, ticket: Ticket) -> None:
        """A load is over. The lock is held."""
        ticket.slot.loads -= 1

    @contextmanager
    def _opened(self) -> Iterator[tuple[Queue, Queue]]:
        """The queues, with the lock held. In a fork the lock may be held by a thread that is not there."""
        if self._pid not in (0, os.getpid()):
            raise Closed(f"{self.name} was opened by the process that forked this one: open one here")
        with self._lock:
            if self._queues is None:
                raise Closed(f"{self.name} is not open: open it first")
            yield self._queues

    def _check(self, slot: Slot) -> None:
        if not slot.is_held or slot.opening is not self._queues:
            raise Invalid(f"{self.name}: the slot was released, or belongs elsewhere: reserve one anew")
