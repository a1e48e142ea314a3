"""A stand-in for an accelerator, because there is none where these tests run: host memory that behaves like a device's.

What is the same as on a device: what a stream is given runs later, on a thread of its own and in order, so bytes come
late; copies wait for the event that they are given, and for nothing else; the current stream is a matter of each
thread. So a transfer that was given no event, the event of another stream, or one that was recorded too late or too
early, moves wrong bytes and is found by who compares them. What is not: speed, the driver, and every call of torch.cuda
(`test_device_memory.py` has a transcript of those, and tests that need a device).

    with stand_in() as device:  # tensors in host memory are a device's from here on; arrays and bytes are not
        go = device.compute.hold()
        device.compute.queue(lambda: tensor.fill_(7))  # runs after `go()`
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forebay.offload.tiers.device_memory import DeviceSum, accelerators, weighted

PATIENCE_S = 60  # a test that waits longer hangs


class Stream:
    """Runs what it is given in order, some time later."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def queue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def event(self) -> threading.Event:
        """Happens when the stream gets here."""
        event = threading.Event()
        self.queue(event.set)
        return event

    def hold(self) -> Callable[[], None]:
        """Nothing that is queued from now on runs until what this returns is called."""
        gate = threading.Event()
        self.queue(lambda: gate.wait(PATIENCE_S))
        return gate.set

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the test ends while a stream is held"


class StandIn:
    """An `Accelerator` without a device. `compute` is every thread's current stream, but within `on`."""

    def __init__(self) -> None:
        self.compute = Stream()
        self.begun = 0  # copies that were begun; they may still wait
        self.copies: list[tuple[int, bool]] = []  # bytes, and whether the host's were pinned
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.trouble: Exception | None = None  # what the next copy fails with
        self.pin_code = 0  # what pinning answers
        self.short = 0  # how often its allocator was
        self._own = threading.local()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """It is this thread's current stream."""
        self._own.stream = stream
        try:
            yield
        finally:
            del self._own.stream

    # --- what tiers need ---------------------------------------------------------------------------------------------
    def event(self, device: Any) -> threading.Event:
        return getattr(self._own, "stream", self.compute).event()

    def copy(self, into: Any, source: Any, device: Any, after: threading.Event) -> None:
        self.begun += 1
        assert after.wait(PATIENCE_S), "a copy waits for what never happens"
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble
        self.copies.append((len(into), self._is_pinned(into) or self._is_pinned(source)))
        into.copy_(source)

    def wait(self, device: Any, after: threading.Event) -> None:
        assert after.wait(PATIENCE_S), "somebody waits for what never happens"

    def checksum(self, source: Any, device: Any, after: threading.Event) -> DeviceSum:
        assert after.wait(PATIENCE_S), "a checksum waits for what never happens"
        return DeviceSum(weighted(source).item())

    def shortages(self, device: Any) -> int:
        return self.short

    def pin(self, address: int, size_bytes: int) -> int:
        assert address not in self.pinned, "pinned twice"
        if not self.pin_code:
            self.pinned[address] = size_bytes
        return self.pin_code

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def _is_pinned(self, tensor: Any) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + len(tensor)
        return any(at <= begin and end <= at + size_bytes for at, size_bytes in list(self.pinned.items()))


@contextmanager
def stand_in(kind: str = "cpu") -> Iterator[StandIn]:
    """While it lasts, tensors on devices of that kind are handled as a device's. Tiers are to be closed before."""
    made = StandIn()
    accelerators[kind] = made
    try:
        yield made
    finally:
        del accelerators[kind]
        made.compute.end()
    assert not made.pinned, "pages stay pinned when their tier is closed"
