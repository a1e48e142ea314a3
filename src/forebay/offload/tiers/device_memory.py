"""Copies bytes of an accelerator's memory for tiers, at a safe time, and knows when a copy is over.

Theory. A device executes its work later, in the order of a *stream*. So when a tensor is given to a tier, its bytes may
still have to be computed (a store), or its memory may still be used by work queued before it was freed (a load). Both
are over when the device has passed everything now in the caller's current stream. An *event* marks that place when the
transfer is requested, on the caller's thread, and no byte is copied before it.

The tier's workers make the copies. Each worker has its own stream on each device. The stream waits for the event and
copies, and the worker sleeps until that is over. So a done ticket means what it means in host memory: the bytes are
there, for every stream. The memory is held here until the ticket is done, and no copy touches it afterwards.

A worker that waits for the device holds up the pieces behind it. With one computing stream that costs nothing: later
requests wait for a later place of the same stream.

The event covers one stream, the caller's current one on that device. Whoever wrote the tensor on another stream makes
the current one wait for that first, as before any other use.

`accelerators` says by device type which memory is handled this way. Tiers know nothing else of CUDA, and tests put a
stand-in there.

Rejected: copies on the caller's stream (they would queue behind the computing that is to hide them); tickets that are
done when a copy is queued, with an event for the next user (the disk cannot write what is not there yet, and all users
of tickets would have to know of streams); `record_stream` (frees memory at an unknown time); a blocking `copy_`, or
synchronizing the stream (both spin on a core until the copy is over, and the step needs the cores).

Invariants. (1) No byte is copied before the device passed what the caller's stream held when the transfer was
requested. (2) When `copy_out` or `copy_in` has returned, nothing of it is under way.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from forebay.core.errors import Unavailable
from forebay.offload.tiers.queues import Array

_ODD = 0x1E3779B97F4A7C15  # spreads neighbours' factors over all bits (the golden ratio's, but the sign)
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
_BEFORE_OTHERS = -1  # priority of streams: torch has 32 of each, and the others may be in use by the program


class DeviceSum(int):
    """A checksum as a device makes it: the sum over all words of 64 bit, each times an odd number of its own, modulo
    2^64. An odd factor maps words one to one, so no change of one word is overlooked; of all other changes one in some
    2^64 is, as far as they do not aim at it."""


def weighted(source: Any) -> Any:
    """The sum of a tensor of uint8, as a tensor of one number; it is aligned to words, and whole words long."""
    import torch

    words = source.view(torch.int64)
    # Made anew each time: what one stream makes, another may not use before it is there, nor free it while that does.
    weights = torch.arange(len(words), dtype=torch.int64, device=words.device).mul_(_ODD).bitwise_or_(1)
    return weights.mul_(words).sum()


class Accelerator(Protocol):
    """What tiers need of a kind of device. Any thread may call."""

    def event(self, device: Any) -> Any:
        """The place that this thread's current stream on the device has been filled to."""
        ...

    def copy(self, into: Any, source: Any, device: Any, after: Any) -> None:
        """Copy a tensor to one of the same size, one of the two in host memory, once the device is past the event
        `after`; returns when that is over. `RuntimeError` if the device fails."""
        ...

    def wait(self, device: Any, after: Any) -> None:
        """Until the device is past the event `after`. `RuntimeError` if it fails."""
        ...

    def checksum(self, source: Any, device: Any, after: Any) -> DeviceSum:
        """Of a tensor's bytes, made by the device once it is past the event `after`. `RuntimeError` if it fails."""
        ...

    def shortages(self, device: Any) -> int:
        """How often its allocator gave back what it kept, in search of room."""
        ...

    def pin(self, address: int, size_bytes: int) -> int:
        """Tell the device of pages in host memory, so that it copies to and from them by itself; 0, or its error."""
        ...

    def unpin(self, address: int) -> None:
        """The pages are about to go."""
        ...


class _Sides(threading.local):
    """Of each thread, by device: a stream for its copies, and an event that is after the last of them."""

    def __init__(self) -> None:
        self.of: dict[Any, tuple[Any, Any]] = {}


class Cuda:
    """CUDA, by torch."""

    def __init__(self) -> None:
        self._sides = _Sides()

    def event(self, device: Any) -> Any:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def copy(self, into: Any, source: Any, device: Any, after: Any) -> None:
        import torch

        with torch.cuda.device(device):  # first: a worker's own device is number 0, which another process may have
            stream, over = self._side(device)
            with torch.cuda.stream(stream):
                stream.wait_event(after)
                into.copy_(source, non_blocking=True)
                over.record(stream)
            over.synchronize()

    def wait(self, device: Any, after: Any) -> None:
        import torch

        with torch.cuda.device(device):
            stream, over = self._side(device)
            stream.wait_event(after)
            over.record(stream)
            over.synchronize()

    def checksum(self, source: Any, device: Any, after: Any) -> DeviceSum:
        import torch

        with torch.cuda.device(device):
            stream, over = self._side(device)
            with torch.cuda.stream(stream):
                stream.wait_event(after)
                total = weighted(source)
                over.record(stream)
                over.synchronize()
                return DeviceSum(total.item())  # by the stream that made it

    def _side(self, device: Any) -> tuple[Any, Any]:
        import torch

        sides = self._sides.of
        if device not in sides:
            stream = torch.cuda.Stream(device, priority=_BEFORE_OTHERS)
            sides[device] = stream, torch.cuda.Event(blocking=True)  # who waits for it sleeps
        return sides[device]

    def shortages(self, device: Any) -> int:
        import torch

        return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))

    def pin(self, address: int, size_bytes: int) -> int:
        import torch

        return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(address)


accelerators: dict[str, Accelerator] = {"cuda": Cuda()}  # by type of device


class DeviceBytes:
    """The bytes of a contiguous tensor of uint8 on an accelerator, as they will be when the device gets past what the
    current stream of the calling thread holds now."""

    def __init__(self, tensor: Any, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._tensor = tensor
        self._event = accelerator.event(tensor.device)

    def __len__(self) -> int:
        return int(self._tensor.numel())

    def piece(self, begin: int, end: int) -> Any:
        """Bytes begin..end as they lie on the device."""
        return self._tensor[begin:end]

    def wait(self) -> None:
        """Until the device is past the place that was marked: from then on nobody else uses the memory."""
        device = self._tensor.device
        try:
            self.accelerator.wait(device, self._event)
        except RuntimeError as error:
            raise _failed(f"waiting for {device}", error) from error

    def checksum(self, begin: int, end: int) -> DeviceSum:
        """Of bytes begin..end, once the device is past the place that was marked."""
        device = self._tensor.device
        try:
            return self.accelerator.checksum(self._tensor[begin:end], device, self._event)
        except RuntimeError as error:
            raise _failed(f"summing {end - begin} bytes on {device}", error) from error

    def copy_out(self, begin: int, end: int, into: Array) -> None:
        """Bytes begin..end to host memory of that size; returns when they are there. `Unavailable` if the device
        fails."""
        import torch

        self._copy(torch.from_numpy(into), self._tensor[begin:end])

    def copy_in(self, begin: int, end: int, source: Array) -> None:
        """The same from host memory."""
        import torch

        self._copy(self._tensor[begin:end], torch.from_numpy(source))

    def _copy(self, into: Any, source: Any) -> None:
        assert len(into) == len(source), "a piece and its place differ in size"
        device = self._tensor.device
        try:
            self.accelerator.copy(into, source, device, self._event)
        except RuntimeError as error:
            raise _failed(f"copying {len(into)} bytes to or from {device}", error) from error


def _failed(doing: str, error: RuntimeError) -> Unavailable:
    return Unavailable(
        f"{doing} failed ({error}): a device that failed once mostly fails until the process ends, so go on from a "
        "checkpoint in a new one"
    )
