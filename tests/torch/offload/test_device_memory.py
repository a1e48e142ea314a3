"""Memory of an accelerator in tiers: no byte moves before its time, and a ticket that is done means what it says.

There is no device where these tests were written. So most of them run on a stand-in (`stand_in.py`), calls of
torch.cuda are compared with a transcript, and what is at the end runs only where CUDA is.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import Closed, Corrupt, Invalid, Unavailable
from forebay.offload.tiers import host_tier
from forebay.offload.tiers.device_memory import Cuda
from forebay.offload.tiers.disk_tier import DiskTier
from forebay.offload.tiers.host_tier import HostTier
from forebay.offload.tiers.queues import CATCH_UP_S
from forebay.offload.tiers.tiers import Storage, page_aligned
from tests.patience import until
from tests.torch.offload.stand_in import StandIn, Stream, stand_in
from tests.torch.offload.test_tiers import PIECE, TIERS, disk, noise, tier_of

SIZES = (1, 511, 4096, 4097, PIECE, PIECE + 1, 3 * PIECE + 4097)
A_WHILE_S = 0.05  # in which what is wrong would go wrong; what is right does not depend on it


def zeros(size_bytes: int) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


@pytest.fixture
def device() -> Iterator[StandIn]:
    with stand_in() as made:
        yield made


@pytest.fixture(params=TIERS)
def tier(
    request: pytest.FixtureRequest, tmp_path: Path, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    monkeypatch.setattr(host_tier, "HOST_PIECE_BYTES", PIECE)
    with tier_of(request.param, tmp_path) as made:
        yield made


def stored(tier: Storage, source: Any) -> Any:
    """A slot with that in it."""
    slot = tier.reserve(len(source))
    tier.store(slot, source).wait()
    return slot


def bytes_in(tier: Storage, slot: Any) -> torch.Tensor:
    """What is in a slot, read into host memory that is no device's."""
    into = np.empty(slot.stored_bytes, np.uint8)
    tier.load(slot, into).wait()
    return torch.from_numpy(into)


# --- bytes and when they move ----------------------------------------------------------------------------------------
def test_what_was_stored_is_loaded_by_way_of_pinned_memory(tier: Storage, device: StandIn) -> None:
    slots = [(tier.reserve(size_bytes), noise(size_bytes, seed)) for seed, size_bytes in enumerate(SIZES)]
    tickets = [tier.store(slot, source) for slot, source in slots]
    for ticket in tickets:
        assert ticket.wait()
    for slot, source in reversed(slots):
        into = zeros(len(source))
        assert tier.load(slot, into).wait()
        assert torch.equal(into, source)
    assert sum(size_bytes for size_bytes, _ in device.copies) == 2 * sum(SIZES)
    assert max(size_bytes for size_bytes, _ in device.copies) == PIECE
    assert all(is_pinned for _, is_pinned in device.copies)


def test_a_store_takes_the_bytes_that_the_device_will_have_computed(tier: Storage, device: StandIn) -> None:
    source, late = zeros(3 * PIECE + 5), noise(3 * PIECE + 5)
    slot = tier.reserve(len(source))
    go = device.compute.hold()
    device.compute.queue(lambda: source.copy_(late))
    ticket = tier.store(slot, source)
    assert not ticket.wait(timeout_s=A_WHILE_S)
    go()
    ticket.wait()
    assert torch.equal(bytes_in(tier, slot), late)


def test_a_store_does_not_wait_for_what_the_device_is_given_afterwards(tier: Storage, device: StandIn) -> None:
    source = noise(3 * PIECE + 5)
    before, slot = source.clone(), tier.reserve(len(source))
    ticket = tier.store(slot, source)
    go = device.compute.hold()
    device.compute.queue(lambda: source.fill_(0))  # as who was told "done" may do at once
    ticket.wait()
    go()
    device.compute.event().wait()
    assert not source.any()
    assert torch.equal(bytes_in(tier, slot), before)


def test_a_load_leaves_memory_to_what_was_queued_while_it_was_anothers(tier: Storage, device: StandIn) -> None:
    source, memory, seen = noise(3 * PIECE + 5), noise(3 * PIECE + 5, 1), zeros(3 * PIECE + 5)
    anothers, slot = memory.clone(), stored(tier, source)
    go = device.compute.hold()
    device.compute.queue(lambda: seen.copy_(memory))  # its tensor is gone for Python, and its memory is given away
    ticket = tier.load(slot, memory)
    assert not ticket.wait(timeout_s=A_WHILE_S)
    assert torch.equal(memory, anothers)
    go()
    ticket.wait()
    assert torch.equal(seen, anothers)
    assert torch.equal(memory, source)


def test_the_stream_that_counts_is_the_one_of_who_asks(tier: Storage, device: StandIn) -> None:
    other = Stream()
    source, late = zeros(PIECE), noise(PIECE)
    slot, unrelated = tier.reserve(PIECE), tier.reserve(PIECE)
    go_on, go_compute = other.hold(), device.compute.hold()
    other.queue(lambda: source.copy_(late))
    with device.on(other):
        ticket = tier.store(slot, source)
    assert not ticket.wait(timeout_s=A_WHILE_S)
    go_on()
    ticket.wait()  # although what computes is held
    assert not tier.store(unrelated, source).wait(timeout_s=A_WHILE_S)  # and this is asked of what computes
    go_compute()
    assert torch.equal(bytes_in(tier, slot), late)
    other.end()


def test_a_disk_reads_ahead_of_the_device(tmp_path: Path, device: StandIn) -> None:
    was_read = threading.Event()

    def preadv(fd: int, views: list[Any], at: int) -> int:
        moved = os.preadv(fd, views, at)
        was_read.set()
        return moved

    with disk(tmp_path, preadv=preadv) as tier:
        source, into = noise(PIECE), zeros(PIECE)
        slot = stored(tier, source)
        go = device.compute.hold()
        ticket = tier.load(slot, into)
        assert was_read.wait(60)
        assert not ticket.done()
        assert not into.any()
        go()
        ticket.wait()
        assert torch.equal(into, source)


def test_time_that_a_store_waits_for_the_device_is_not_the_slow_disks(tmp_path: Path, device: StandIn) -> None:
    limit_bytes_s, size_bytes = 1e6, 4 * PIECE
    with disk(tmp_path, limit_bytes_s=(limit_bytes_s, 1e9)) as tier:
        slot = tier.reserve(size_bytes)
        go = device.compute.hold()
        ticket = tier.store(slot, noise(size_bytes))
        time.sleep(A_WHILE_S)
        began_s = time.monotonic()
        go()
        ticket.wait()
        assert time.monotonic() - began_s >= size_bytes / limit_bytes_s - CATCH_UP_S


def test_memory_is_held_until_its_ticket_is_done_and_no_longer(tier: Storage, device: StandIn) -> None:
    source = noise(2 * PIECE)
    expected, gone, slot = source.clone(), weakref.ref(source), tier.reserve(2 * PIECE)
    go = device.compute.hold()
    ticket = tier.store(slot, source)
    del source
    assert gone() is not None
    go()
    ticket.wait()
    assert gone() is None
    assert torch.equal(bytes_in(tier, slot), expected)


def test_storages_come_and_go_in_place(tier: Storage, device: StandIn) -> None:
    weight = torch.arange(PIECE, dtype=torch.float32)
    expected, storage = weight.clone(), weight.untyped_storage()
    for _ in range(3):
        slot = stored(tier, torch.empty(0, dtype=torch.uint8).set_(storage))
        storage.resize_(0)
        storage.resize_(slot.stored_bytes)
        tier.load(slot, torch.empty(0, dtype=torch.uint8).set_(storage)).wait()
        assert torch.equal(weight, expected)
        tier.release(slot)


def test_host_memory_moves_as_ever(tier: Storage, device: StandIn) -> None:
    before = tier.path
    source = np.frombuffer(bytes(range(256)) * 700, np.uint8)
    assert torch.equal(bytes_in(tier, stored(tier, source)), torch.from_numpy(source.copy()))
    assert device.copies == []
    assert device.pinned == {}
    assert tier.path == before


# --- trouble ---------------------------------------------------------------------------------------------------------
def test_a_device_that_fails_fails_the_transfer_and_not_the_tier(tier: Storage, device: StandIn) -> None:
    source, into = noise(PIECE), zeros(PIECE)
    slot = tier.reserve(PIECE)
    device.trouble = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(Unavailable, match=r"illegal memory access .* in a new one"):
        tier.store(slot, source).wait()
    with pytest.raises(Invalid, match="holds nothing"):
        tier.load(slot, into)
    tier.store(slot, source).wait()
    device.trouble = RuntimeError("unspecified launch failure")
    with pytest.raises(Unavailable, match="launch failure"):
        tier.load(slot, into).wait()
    tier.load(slot, into).wait()
    assert torch.equal(into, source)


def test_memory_that_cannot_be_pinned_is_said_so_and_loses_nothing(tier: Storage, device: StandIn) -> None:
    source, into = noise(PIECE), zeros(PIECE)
    slot = tier.reserve(PIECE)
    device.pin_code = 2
    with pytest.raises(Unavailable, match=r"pinning .* error 2\): raise the limit on locked memory"):
        tier.store(slot, source).wait()
    assert "pinned" not in tier.path
    device.pin_code = 0
    tier.store(slot, source).wait()
    tier.load(slot, into).wait()
    assert torch.equal(into, source)
    assert "pinned" in tier.path


@pytest.mark.parametrize("at", [0, PIECE + 3, 2 * PIECE + 4100])
def test_a_byte_that_changed_on_the_disk_never_gets_to_the_device(tmp_path: Path, device: StandIn, at: int) -> None:
    reads = []

    def preadv(fd: int, views: list[Any], at: int) -> int:
        reads.append(at)
        return os.preadv(fd, views, at)

    with disk(tmp_path, threads=1, preadv=preadv) as tier:
        source, into = noise(2 * PIECE + 4101), zeros(2 * PIECE + 4101)
        slot = stored(tier, source)
        with open(f"/proc/self/fd/{tier._files[0].fd}", "r+b", buffering=0) as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(Corrupt, match="go on from a checkpoint"):
            tier.load(slot, into).wait()
        broken = at // PIECE
        assert not into[broken * PIECE :].any()
        assert torch.equal(into[: broken * PIECE], source[: broken * PIECE])
        assert reads == [number * PIECE for number in range(broken + 1)], "no fork can have torn a bounce buffer"


def test_closing_waits_for_the_copy_under_way_and_unpins(tier: Storage, device: StandIn) -> None:
    slots, source = [tier.reserve(PIECE) for _ in range(12)], noise(PIECE)
    stored(tier, source)
    go, begun = device.compute.hold(), device.begun
    tickets = [tier.store(slot, source) for slot in slots]
    until(lambda: device.begun > begun, "a copy is under way")
    closing = threading.Thread(target=tier.close)
    closing.start()
    with pytest.raises(Closed):
        tickets[-1].wait()
    assert closing.is_alive()
    assert device.pinned
    go()
    closing.join()
    assert all(ticket.done() for ticket in tickets)
    assert device.pinned == {}


def test_what_is_no_memory_of_the_device_is_refused(tier: Storage, device: StandIn) -> None:
    slot = tier.reserve(100)
    emptied = zeros(10)
    emptied.untyped_storage().resize_(0)
    for wrong, said in (
        (torch.zeros(4), "of uint8"),
        (zeros(20).view(10, 2).t(), "contiguous"),
        (torch.zeros(4, dtype=torch.uint8, device="meta"), "on cuda, cpu, not on meta"),
        (emptied, "resize it"),
        (zeros(101), "101 bytes for a slot"),
    ):
        with pytest.raises(Invalid, match=said):
            tier.store(slot, wrong)
    assert device.copies == []


# --- pinning and paths -----------------------------------------------------------------------------------------------
def test_each_buffer_is_pinned_once_and_stays_so_for_the_next_slot(device: StandIn) -> None:
    with HostTier("1MiB") as tier:
        assert (tier.pinned, tier.path) == (False, "host memory")
        slot = stored(tier, noise(PIECE))
        assert (tier.pinned, tier.path) == (True, "pinned host memory")
        assert list(device.pinned.values()) == [PIECE]
        tier.release(slot)
        slot = stored(tier, noise(PIECE, 1))  # in the same buffer: the stand-in refuses to pin it again
        into = zeros(PIECE)
        tier.load(slot, into).wait()
        assert torch.equal(into, noise(PIECE, 1))
        tier.release(slot)
        tier.reserve(2**20)  # the buffer has to go
        assert device.pinned == {}


def test_who_wants_nothing_pinned_gets_that(device: StandIn) -> None:
    with HostTier("1MiB", pinned=False) as tier:
        slot, into = stored(tier, noise(PIECE)), zeros(PIECE)
        tier.load(slot, into).wait()
        assert torch.equal(into, noise(PIECE))
        assert device.pinned == {}
        assert device.copies == [(PIECE, False)] * 2
        assert (tier.pinned, tier.path) == (False, "host memory")


def test_a_disk_says_which_way_bytes_take(tmp_path: Path, device: StandIn) -> None:
    with disk(tmp_path, direct=False) as tier:
        assert tier.path == "buffered"
        stored(tier, noise(PIECE))
        assert tier.path == "buffered through pinned memory"
        assert set(device.pinned.values()) == {PIECE}
    with disk(tmp_path) as tier:
        assert tier.path == tier.mode
        stored(tier, noise(PIECE))
        assert tier.path == f"{tier.mode} through pinned memory"
    with pytest.raises(Closed):
        assert tier.path


def test_pieces_of_host_tiers_are_four_times_a_disks() -> None:
    with HostTier("80MiB") as tier:
        slot = tier.reserve(70 << 20)
        pieces = [(piece.begin >> 20, piece.end >> 20) for piece in tier._pieces(slot, 70 << 20)]
        assert pieces == [(0, 32), (32, 64), (64, 70)]


# --- what torch.cuda is asked for ------------------------------------------------------------------------------------
class Recorded:
    """torch.cuda as far as it is used, writing down what it is asked for. Streams belong to threads, as there."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.made = 0
        self._own = threading.local()
        outer = self

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                self.name = "blocking event" if blocking else "event"

            def record(self, stream: Any) -> None:
                outer.said.append(f"{self.name} recorded on {stream.name}")

            def synchronize(self) -> None:
                outer.said.append(f"{self.name} waited for")

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
                outer.made += not name
                self.name = name or f"side {outer.made} of {device} with priority {priority}"

            def wait_event(self, event: Event) -> None:
                outer.said.append(f"{self.name} waits for {event.name}")

        self.Event, self.Stream = Event, Stream

    def current_stream(self, device: Any = None) -> Any:
        return getattr(self._own, "stream", None) or self.Stream(name=f"current of {device}")

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.said.append(f"on {device}")
        yield
        self.said.append(f"off {device}")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._own.stream = stream
        yield
        del self._own.stream

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.said.append(f"register {address} {size_bytes} {flags}")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.said.append(f"unregister {address}")
        return 0


class Queued:
    """A tensor that writes down who copies to it, and on which stream."""

    def __init__(self, cuda: Recorded) -> None:
        self._cuda = cuda

    def copy_(self, source: Any, non_blocking: bool = False) -> None:
        self._cuda.said.append(f"copy on {self._cuda.current_stream().name}, non_blocking={non_blocking}")


def test_cuda_is_asked_for_a_copy_after_the_event_on_a_stream_of_the_workers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded, cuda = Recorded(), Cuda()
    for name in ("Event", "Stream", "current_stream", "device", "stream", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorded, name))
    after = cuda.event("cuda:1")
    assert recorded.said == ["event recorded on current of cuda:1"]

    def copy() -> list[str]:
        recorded.said.clear()
        worker = threading.Thread(target=lambda: [cuda.copy(Queued(recorded), None, "cuda:1", after) for _ in range(2)])
        worker.start()
        worker.join()
        return recorded.said

    for number in (1, 2):  # one stream for each thread, for all of its copies
        side = f"side {number} of cuda:1 with priority -1"
        once = [
            "on cuda:1",
            f"{side} waits for event",
            f"copy on {side}, non_blocking=True",
            f"blocking event recorded on {side}",
            "blocking event waited for",
            "off cuda:1",
        ]
        assert copy() == once * 2
    recorded.said.clear()
    assert cuda.pin(4096, 8192) == 0
    cuda.unpin(4096)
    assert recorded.said == ["register 4096 8192 1", "unregister 4096"]


# --- on a device -----------------------------------------------------------------------------------------------------
on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
LONG_CYCLES = 200_000_000  # of a GPU's clock: a tenth of a second


@on_a_device
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_on_a_device_bytes_are_those_that_were_computed_late(tmp_path: Path, kind: str) -> None:
    make: dict[str, Callable[[], Storage]] = {
        "host": lambda: HostTier("160MiB"),
        "disk": lambda: DiskTier([tmp_path], "160MiB"),
    }
    with make[kind]() as tier:
        source = torch.zeros(70 << 20, dtype=torch.uint8, device="cuda")
        late, slot = torch.randint(0, 256, (70 << 20,), dtype=torch.uint8, device="cuda"), tier.reserve(70 << 20)
        for _ in range(3):
            torch.cuda._sleep(LONG_CYCLES)
            source.copy_(late)
            ticket = tier.store(slot, source)
            ticket.wait()
            seen, into = torch.empty_like(late), torch.full_like(late, 3)
            torch.cuda._sleep(LONG_CYCLES)
            seen.copy_(into)
            tier.load(slot, into).wait()
            assert torch.equal(into, late)
            assert bool((seen == 3).all())
            late.add_(1)
        assert "pinned" in tier.path


@on_a_device
def test_on_a_device_pinned_pages_are_pinned_for_torch_too() -> None:
    with HostTier("2MiB", pinned=True) as tier:
        assert tier.memory(tier.reserve(2**20)).is_pinned()
    assert not torch.from_numpy(page_aligned(4096)).is_pinned()
