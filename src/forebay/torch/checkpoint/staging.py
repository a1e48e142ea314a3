"""Copies a state to memory of our own, in the order and at the places of the stream, so that training can go on.

Theory. A save may stall training only as long as one copy of the state takes. The copy goes to buffers that are kept
from save to save: memory that the kernel must first find and clear costs about as much again as the copy. A buffer is
one blob. Where all blobs fit into the memory that may be used, the whole state is copied before any byte is sent, so
that sending does not take bandwidth and cores from the copy. Where they do not, blobs are sent while others wait to
be copied, and training waits for that.

Several threads copy, each the next piece that nobody has taken. torch's own copy gives each of its threads an equal
part, and so takes as long as the one whose core somebody else uses, too.

From a GPU the copies are queued on the current stream into pinned memory. What the training queues after them waits
for them on the device, so `save` may return before they are done; whoever sends waits for the event, and sleeps
meanwhile.

Where the system can, the buffers are memory that a node on this host reads by itself, so that nothing is sent; for a
GPU the same memory is pinned. (torch's allocator of pinned memory rounds up to powers of two, and keeps what was freed:
more than the cap.) A forked child would share it with its parent, each saving over the other's copy: so it makes
buffers of its own.

Between two tensors the buffer has zeros, never what an earlier save left there.

Invariants. (1) A buffer is filled, or sent, or free: never two of them. (2) The bytes of a buffer do not change between
the event of its last copy and its release.
"""

from __future__ import annotations

import ctypes
import os
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from forebay.client.shared import SharedMemory
from forebay.core import checkpoint as form
from forebay.core.checkpoint import PIECE_BYTES, Entry
from forebay.core.errors import Invalid
from forebay.torch.checkpoint.ranks import Share
from forebay.torch.checkpoint.tree import dtype_name

BUFFERS_MIN = 2  # one is filled while another is sent
CUT_BYTES = 4 << 20  # that a thread copies at once
COPIERS = 8  # more threads than this find no more bandwidth
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


Pair = tuple[torch.Tensor, torch.Tensor]  # bytes of a buffer, and those that are copied there


class Layout(NamedTuple):
    """Where everything lies in a rank's stream."""

    shares: list[Share]
    entries: tuple[Entry, ...]
    stream_bytes: int
    blob_bytes: int

    @property
    def blobs(self) -> int:
        return -(-self.stream_bytes // self.blob_bytes)

    def blob_size(self, blob: int) -> int:
        return min(self.blob_bytes, self.stream_bytes - blob * self.blob_bytes)


def lay_out(shares: Sequence[Share], memory_bytes: int | None) -> Layout:
    """Large tensors first, so that only the last pages of the stream hold small ones."""
    ordered = sorted(shares, key=lambda share: -_size_bytes(share.local))
    entries, end = [], 0
    for share in ordered:
        size_bytes = _size_bytes(share.local)
        offset = form.place_after(end, size_bytes)
        end = offset + size_bytes
        shape = tuple(share.local.shape)
        entries.append(
            Entry(share.path, dtype_name(share.local.dtype), shape, offset, size_bytes, share.whole, share.at)
        )
    blob_bytes = form.blob_bytes_for(end)
    held_bytes = end if end <= blob_bytes else BUFFERS_MIN * blob_bytes
    if memory_bytes is not None and held_bytes > memory_bytes:
        blob_bytes = max(memory_bytes // BUFFERS_MIN // PIECE_BYTES, 1) * PIECE_BYTES
    return Layout(ordered, tuple(entries), end, blob_bytes)


def _size_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


class Pinned:
    """Memory that GPUs copy to and from by themselves, until nobody refers to this. `OSError` if it cannot be."""

    def __init__(self, shared: SharedMemory, tensor: torch.Tensor) -> None:
        self._shared = shared  # its pages may not go before they are unpinned
        self._address, self._pid = 0, os.getpid()
        ctypes.memset(tensor.data_ptr(), 0, tensor.numel())  # so that pages come while other threads go on
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), _PORTABLE))
        if code:
            raise OSError(f"pinning {tensor.numel()} bytes failed with CUDA's error {code}")
        self._address = tensor.data_ptr()

    def __del__(self, pid: Callable[[], int] = os.getpid) -> None:
        if self._address and pid() == self._pid:  # a forked child has no CUDA
            torch.cuda.cudart().cudaHostUnregister(self._address)


class Buffer(NamedTuple):
    """Memory for a blob. `shared`: the same memory, where a node may read it."""

    tensor: torch.Tensor
    shared: SharedMemory | None
    pinned: Pinned | None = None


class Filled(NamedTuple):
    """A blob that is copied, or will be when `ready` returns: it says for how many seconds that held a device."""

    blob: int
    buffer: Buffer
    size_bytes: int
    ready: Callable[[], float]

    def view(self) -> memoryview:
        return memoryview(self.buffer.tensor.numpy())[: self.size_bytes]


class Arena:
    """The buffers of one rank. `memory_bytes`: how much they may take together, None for as much as the state needs."""

    def __init__(self, memory_bytes: int | None) -> None:
        if memory_bytes is not None and memory_bytes < BUFFERS_MIN * PIECE_BYTES:
            raise Invalid(f"staging_bytes={memory_bytes}: at least {BUFFERS_MIN * PIECE_BYTES} are needed")
        self.memory_bytes = memory_bytes
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._buffer_bytes = 0
        self._made = 0
        self._pid = os.getpid()
        self._helpers: ThreadPoolExecutor | None = None

    @property
    def held_bytes(self) -> int:
        return self._made * self._buffer_bytes

    def prepare(self, layout: Layout, pinned: bool) -> None:
        """Have buffers for this layout. Only between saves."""
        wanted = max(1, layout.blobs)
        if self.memory_bytes is not None:
            wanted = max(min(wanted, self.memory_bytes // layout.blob_bytes), min(wanted, BUFFERS_MIN))
        size = min(layout.blob_bytes, max(layout.stream_bytes, 1))
        inherited = self._pid != os.getpid()
        fits = size <= self._buffer_bytes <= 2 * size and self._made <= wanted
        if self.memory_bytes is not None and wanted * self._buffer_bytes > self.memory_bytes:
            fits = fits and self._buffer_bytes == size
        if inherited or not fits:
            self._pid = os.getpid()
            self._free, self._made, self._buffer_bytes = queue.SimpleQueue(), 0, size
        if inherited:  # its threads are the parent's
            self._helpers = None
        missing = wanted - self._made
        if not pinned or missing < 2:
            made = [_buffer(self._buffer_bytes, pinned) for _ in range(missing)]
        else:  # the kernel finds and clears pages to be pinned with the core that asks for them
            with ThreadPoolExecutor(COPIERS) as pool:
                made = list(pool.map(lambda _: _buffer(self._buffer_bytes, pinned), range(missing)))
        for buffer in made:
            self._free.put(buffer)
            self._made += 1

    def holds(self, layout: Layout) -> bool:
        """Whether all blobs of what it was prepared for have a buffer each."""
        return self._made >= layout.blobs

    def take(self, when_none: Callable[[], None]) -> Buffer:
        """A free buffer; waits for one, after `when_none` was called."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            when_none()
            return self._free.get()

    def give(self, buffer: Buffer) -> None:
        self._free.put(buffer)

    def copy(self, copies: Sequence[Pair]) -> None:
        """Copy the second of each pair to the first: bytes in a row, in this machine's memory."""
        cuts = [
            (to.data_ptr() + at, source.data_ptr() + at, min(CUT_BYTES, to.numel() - at))
            for to, source in copies
            for at in range(0, to.numel(), CUT_BYTES)
        ]
        left = iter(cuts)

        def work() -> None:
            for cut in left:
                ctypes.memmove(*cut)

        helpers = min(torch.get_num_threads(), COPIERS, len(cuts)) - 1
        if helpers > 0 and self._helpers is None:
            self._helpers = ThreadPoolExecutor(COPIERS - 1, thread_name_prefix="checkpoint-copy")
        begun = [self._helpers.submit(work) for _ in range(helpers)] if self._helpers is not None else []
        try:
            work()
        finally:
            deque(left, maxlen=0)  # after Ctrl-C nobody begins another piece: the job may free what is copied
            for each in begun:
                if not each.cancel():  # it runs, perhaps in its last piece
                    each.result()


def _buffer(size_bytes: int, pinned: bool) -> Buffer:
    try:
        shared = SharedMemory(size_bytes)
        tensor = torch.frombuffer(shared.map, dtype=torch.uint8)
        return Buffer(tensor, shared, Pinned(shared, tensor) if pinned else None)
    except OSError:
        pass
    return Buffer(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned), None)


def stage(layout: Layout, arena: Arena, when_none: Callable[[], None], at_once: bool = False) -> Iterator[Filled]:
    """Copy the state, blob by blob. `at_once`: all of it before the first blob is given, where the arena holds it all.
    Then no thread waits for another at the end of each blob."""
    copies = _Copies(layout)
    together = max(1, layout.blobs) if at_once and arena.holds(layout) else 1
    for first in range(0, layout.blobs, together):
        filled: deque[Filled] = deque()  # and not given yet
        copied: list[Pair] = []
        try:
            for blob in range(first, first + together):
                buffer = arena.take(when_none)
                filled.append(Filled(blob, buffer, layout.blob_size(blob), lambda: 0.0))
                begun = copies.fill(blob, buffer.tensor, copied)
                filled[-1] = filled[-1]._replace(ready=_ready(begun))
            arena.copy(copied)
            while filled:
                yield filled.popleft()
        finally:
            for each in filled:
                arena.give(each.buffer)


class _Copies:
    """What is copied to each blob, in order."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._copies = _copies(layout)
        self._pending = next(self._copies, None)

    def fill(self, blob: int, buffer: torch.Tensor, copied: list[Pair]) -> dict[torch.device, Any]:
        """Copy the next blob's bytes, but for what is still to be copied from plain memory: that is added to `copied`.
        For devices that copy some of them: the event with which they begin to."""
        begin, size_bytes = blob * self._layout.blob_bytes, self._layout.blob_size(blob)
        filled, begun = 0, {}
        while self._pending is not None and self._pending.start < begin + size_bytes:
            start, source, passing = self._pending
            passing = passing or not is_run(source)
            if source.is_cuda and source.device not in begun:
                begun[source.device] = _event(source.device)
            here = min(begin + size_bytes - start, _size_bytes(source))
            at = start - begin
            buffer[filled:at].zero_()
            place, rest = buffer[at : at + here], None
            is_plain = source.device.type == "cpu" and type(source) is torch.Tensor
            if is_plain and here == _size_bytes(source) and not is_run(source):
                place.view(source.dtype).view(source.shape).copy_(source)
            else:  # on a GPU what is conjugated is so there: torch does it here before the bytes have come
                data = bytes_of(source)
                rest = data[here:]
                # What is made of tensors copies itself; and what was put in order is copied now, so that it can go.
                if data.device.type == "cpu" and type(data) is torch.Tensor and not passing:
                    copied.append((place, data[:here]))
                else:
                    place.copy_(data[:here], non_blocking=source.is_cuda)
            filled = at + here
            more = rest is not None and rest.numel()
            self._pending = _Copy(start + here, rest, passing) if more else next(self._copies, None)
        buffer[filled:size_bytes].zero_()  # the next tensor begins in the next blob
        return begun


class _Copy(NamedTuple):
    """What goes to the stream from `start` on."""

    start: int
    source: torch.Tensor
    passing: bool = False  # memory that was taken to put it in order


def _copies(layout: Layout) -> Iterator[_Copy]:
    for entry, share in zip(layout.entries, layout.shares, strict=True):
        start = entry.offset
        for part in _parts(share.local.detach()):
            if part.numel():
                yield _Copy(start, part)
                start += _size_bytes(part)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, in row-major order; one that does not lie in this order in parts of CUT_BYTES at most, since where a
    blob ends within a part, memory is taken to put it in order."""
    size_bytes = _size_bytes(tensor)
    if size_bytes <= CUT_BYTES or is_run(tensor) or type(tensor) is not torch.Tensor:
        yield tensor
        return
    rows = CUT_BYTES * tensor.shape[0] // size_bytes
    for part in tensor.split(rows) if rows else tensor.unbind():
        yield from _parts(part)


def is_run(tensor: torch.Tensor) -> bool:
    """Whether its memory is its elements in row-major order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in row-major order as one run of bytes; its own memory if that is in this order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain).view(torch.uint8)


def _event(device: torch.device) -> Any:
    """Happens when the device has done what was queued so far. Who waits for it sleeps: training needs the cores."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _ready(begun: dict[torch.device, Any]) -> Callable[[], float]:
    if not begun:
        return lambda: 0.0
    ended = {device: _event(device) for device in begun}

    def ready() -> float:
        for event in ended.values():
            event.synchronize()
        return max(float(begun[device].elapsed_time(ended[device])) for device in begun) / 1000  # it says milliseconds

    return ready
