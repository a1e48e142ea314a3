"""Tiers: what is stored comes back, in the order asked for, through every trouble of disks and processes."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import Busy, Closed, Corrupt, Denied, ForebayError, Invalid, NotFound, Unavailable
from forebay.offload.tiers import swapfile
from forebay.offload.tiers.disk_tier import DiskTier, Measured
from forebay.offload.tiers.host_tier import HostTier
from forebay.offload.tiers.queues import CATCH_UP_S, Ticket
from forebay.offload.tiers.tiers import Storage, page_aligned

KIB = 1024
PIECE = 64 * KIB
SIZES = (1, 511, 4095, 4096, 4097, PIECE, PIECE + 1, 5 * PIECE + 4097, 9 * PIECE)


def noise(size_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)).clone()


def aligned(size_bytes: int, seed: int = 0) -> torch.Tensor:
    """As pinned buffers are: the disk takes them as they lie."""
    memory = page_aligned(size_bytes)
    memory[:] = noise(size_bytes, seed).numpy()
    return torch.from_numpy(memory)


class Held:
    """A system call that waits until it is let go. `at` are the offsets of the calls in their order."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.at: list[int] = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, fd: int, views: list[Any], at: int) -> int:
        self.at.append(at)
        self.begun.release()
        self.go.acquire()
        return self._call(fd, views, at)

    def let_go(self, calls: int = 1000) -> None:
        self.go.release(calls)


class Failing:
    """A system call that fails with `codes`, one after the other; 0 is a call that works."""

    def __init__(self, call: Callable[..., int], *codes: int) -> None:
        self._call, self._codes = call, list(codes)

    def __call__(self, fd: int, views: list[Any], at: int) -> int:
        code = self._codes.pop(0) if self._codes else 0
        if code:
            raise OSError(code, os.strerror(code))
        return self._call(fd, views, at)


def disk(*directories: Path, room: str | int = "2MiB", **more: Any) -> DiskTier:
    return DiskTier(directories, room, **({"piece_bytes": PIECE} | more))


def tier_of(kind: str, folder: Path) -> Storage:
    """One of TIERS, not open yet."""
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    made: Storage = {
        "host": lambda: HostTier("2MiB"),
        "disk": lambda: disk(one),
        "two disks": lambda: disk(one, other),
        "buffered": lambda: disk(one, direct=False),
    }[kind]()
    return made


TIERS = ["host", "disk", "two disks", "buffered"]


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with tier_of(request.param, tmp_path) as made:
        yield made


# --- what is stored comes back ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", [noise, aligned])
def test_what_was_stored_is_loaded(tier: Storage, memory: Callable[..., torch.Tensor]) -> None:
    stored = []
    for seed, size_bytes in enumerate(SIZES):  # all there at once: none may touch another's bytes
        slot, source = tier.reserve(size_bytes), memory(size_bytes, seed)
        stored.append((slot, source, tier.store(slot, source)))
    for slot, source, ticket in stored:
        assert ticket.wait()
        assert slot.stored_bytes == len(source)
    for slot, source, _ in reversed(stored):
        into = memory(len(source), 99)
        assert tier.load(slot, into).wait()
        assert torch.equal(into, source)
    assert tier.bytes_written >= sum(SIZES)
    assert tier.bytes_read >= sum(SIZES)
    for slot, _, _ in stored:
        tier.release(slot)
    assert tier.used_bytes == 0


def test_a_slot_takes_one_tensor_after_another(tier: Storage) -> None:
    slot = tier.reserve(3 * PIECE)
    for seed, size_bytes in enumerate((3 * PIECE, 5, 2 * PIECE + 1)):
        source, into = noise(size_bytes, seed), torch.empty(size_bytes, dtype=torch.uint8)
        tier.store(slot, source).wait()
        tier.load(slot, into).wait()
        tier.load(slot, into).wait()
        assert torch.equal(into, source)


def test_a_tensor_keeps_a_storage_that_can_be_emptied_and_refilled(tier: Storage) -> None:
    weight = noise(3 * PIECE).view(torch.float32).nan_to_num()
    expected = weight.clone()
    storage = weight.untyped_storage()

    def view() -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    slot = tier.reserve(storage.nbytes())
    tier.store(slot, view()).wait()
    as_bytes = view()
    storage.resize_(0)
    with pytest.raises(Invalid, match="resize it"):
        tier.load(slot, as_bytes)  # it still says that it has its bytes
    storage.resize_(slot.stored_bytes)
    tier.load(slot, view()).wait()
    assert torch.equal(weight, expected)


def test_pieces_of_a_tensor_take_turns_on_the_directories(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with disk(one, other, room=20 * PIECE) as tier:
        slot = tier.reserve(6 * PIECE)
        pieces = tier._pieces(slot, 6 * PIECE)
        assert [piece.lane for piece in pieces] == [0, 1, 0, 1, 0, 1]
        assert [piece.at for piece in pieces] == [0, 0, PIECE, PIECE, 2 * PIECE, 2 * PIECE]
        assert [os.fstat(file.fd).st_size for file in tier._files] == [10 * PIECE, 10 * PIECE]


def test_all_of_an_odd_room_is_there_and_no_more(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "two", "three")]
    for directory in directories:
        directory.mkdir()
    with disk(*directories, room=7 * PIECE + 3 * 4096 + 5) as tier:
        assert tier.room_bytes == 7 * PIECE + 3 * 4096
        sizes = [os.fstat(file.fd).st_size for file in tier._files]
        assert sizes == [3 * PIECE, 2 * PIECE + 3 * 4096, 2 * PIECE]
        slot, source, into = tier.reserve(tier.room_bytes), noise(tier.room_bytes), noise(tier.room_bytes, 1)
        tier.store(slot, source).wait()
        tier.load(slot, into).wait()
        assert torch.equal(into, source)
        assert [os.fstat(file.fd).st_size for file in tier._files] == sizes


def test_many_threads_store_and_load_at_once(tier: Storage) -> None:
    troubles: list[BaseException] = []

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for turn in range(15):
                size_bytes = int(chance.integers(1, 3 * PIECE))
                slot, source, into = tier.reserve(size_bytes), noise(size_bytes, turn), noise(size_bytes, 99)
                tier.store(slot, source, due=float(chance.random()), urgent=bool(chance.integers(2))).wait()
                tier.load(slot, into, due=float(chance.random())).wait()
                assert torch.equal(into, source)
                tier.release(slot)
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []
    assert tier.used_bytes == 0


# --- room ------------------------------------------------------------------------------------------------------------
def test_a_full_tier_is_busy_until_something_is_released(tier: Storage) -> None:
    slots = [tier.reserve(tier.room_bytes // 4) for _ in range(4)]
    with pytest.raises(Busy, match="release slots"):
        tier.reserve(1)
    with pytest.raises(Invalid, match="cannot hold"):
        tier.reserve(tier.room_bytes + 1)
    tier.release(slots[1])
    tier.release(slots[2])
    assert tier.reserve(tier.room_bytes // 2).size_bytes == tier.room_bytes // 2


def test_a_slot_is_refused_after_its_end(tier: Storage) -> None:
    slot, kept = tier.reserve(10), tier.reserve(10)
    tier.store(kept, noise(10)).wait()
    tier.release(slot)
    for doing in (lambda: tier.release(slot), lambda: tier.store(slot, noise(10)), lambda: tier.load(slot, noise(10))):
        with pytest.raises(Invalid, match="reserve one anew"):
            doing()
    tier.close()
    tier.release(kept)
    with pytest.raises(Closed):
        tier.load(kept, noise(10))
    tier.open()
    assert tier.used_bytes == 0
    with pytest.raises(Invalid, match="reserve one anew"):
        tier.load(kept, noise(10))


def test_misuse_is_refused(tier: Storage) -> None:
    slot = tier.reserve(100)
    with pytest.raises(Invalid, match="holds nothing"):
        tier.load(slot, noise(100))
    for wrong in (
        noise(101),
        torch.zeros(4),
        torch.zeros(4, dtype=torch.uint8, device="meta"),
        torch.zeros(10, 2, dtype=torch.uint8).t(),
        "text",
        b"",
    ):
        with pytest.raises(Invalid):
            tier.store(slot, wrong)
    tier.store(slot, b"x" * 60).wait()
    for wrong in (noise(61), bytes(60)):
        with pytest.raises(Invalid):
            tier.load(slot, wrong)
    into = bytearray(60)
    tier.load(slot, into).wait()
    assert into == b"x" * 60
    with pytest.raises(Invalid, match="open already"):
        tier.open()


def test_host_buffers_are_reused_for_what_nearly_fits_and_never_exceed_the_room() -> None:
    with HostTier(100 * 4 * KIB) as tier:
        first = tier.reserve(80 * 4 * KIB)
        assert (tier.used_bytes, tier._idle_bytes) == (80 * 4 * KIB, 0)  # not 128: no power of two
        at = tier.memory(first).data_ptr()
        tier.release(first)
        near = tier.reserve(75 * 4 * KIB)
        assert tier.memory(near).data_ptr() == at
        tier.release(near)
        small = tier.reserve(10 * 4 * KIB)  # too small for that buffer, which stays
        assert (tier.used_bytes, tier._idle_bytes) == (10 * 4 * KIB, 80 * 4 * KIB)
        big = tier.reserve(90 * 4 * KIB)  # and now must go
        assert (tier.used_bytes, tier._idle_bytes) == (100 * 4 * KIB, 0)
        tier.memory(big).fill_(7)  # as an accelerator's copy would
        assert len(tier.memory(big)) == big.size_bytes
        tier.release(small)
    assert (tier.used_bytes, tier._idle_bytes) == (0, 0)


def test_host_memory_is_not_pinned_without_an_accelerator() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with HostTier("1MiB") as tier:
        assert not tier.pinned
    with pytest.raises(Invalid, match="without CUDA"):
        HostTier("1MiB", pinned=True).open()


# --- order -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[DiskTier, Held, list[Any]]]:
    """A disk with one thread, its first write under way and held; slots with one block each."""
    calls = Held(os.pwritev)
    with disk(tmp_path, threads=1, pwritev=calls) as tier:
        slots = [tier.reserve(4096) for _ in range(8)]
        tier.store(slots[0], noise(4096))
        calls.begun.acquire()
        yield tier, calls, slots
        calls.let_go()


Case = tuple[DiskTier, Held, list[Any]]


def order(calls: Held, tickets: list[Ticket]) -> list[int]:
    """Which slots were written, in their order, once everything may go on."""
    calls.let_go()
    for ticket in tickets:
        ticket.wait()
    return [at // 4096 for at in calls.at]


def test_urgent_ones_go_first_then_by_due_then_in_turn(held: Case) -> None:
    tier, calls, slots = held
    tickets = [
        tier.store(slots[1], noise(4096)),
        tier.store(slots[2], noise(4096), due=5),
        tier.store(slots[3], noise(4096), due=3),
        tier.store(slots[4], noise(4096), due=3),
        tier.store(slots[5], noise(4096), due=9, urgent=True),
        tier.store(slots[6], noise(4096), due=1, urgent=True),
    ]
    assert order(calls, tickets) == [0, 6, 5, 3, 4, 2, 1]


def test_what_becomes_urgent_goes_to_the_front(held: Case) -> None:
    tier, calls, slots = held
    tickets = [tier.store(slots[n], noise(4096), due=n) for n in range(1, 6)]
    tickets[3].urge()
    tickets[3].urge()
    tickets[4].urge()
    assert order(calls, tickets) == [0, 4, 5, 1, 2, 3]
    tickets[0].urge()  # done: nothing happens


def test_a_long_transfer_gives_way_between_its_pieces(tmp_path: Path) -> None:
    calls = Held(os.pwritev)
    with disk(tmp_path, threads=1, pwritev=calls) as tier:
        slot, small = tier.reserve(4 * PIECE), tier.reserve(4096)
        long = tier.store(slot, noise(4 * PIECE), due=0)
        calls.begun.acquire()
        urgent = tier.store(small, noise(4096), urgent=True)
        calls.let_go()
        long.wait()
        urgent.wait()
    assert calls.at == [0, 4 * PIECE, PIECE, 2 * PIECE, 3 * PIECE]


def test_loads_do_not_wait_for_stores(tmp_path: Path) -> None:
    calls = Held(os.pwritev)
    with disk(tmp_path, threads=1, pwritev=calls) as tier:
        slot, other, into = tier.reserve(4096), tier.reserve(4096), noise(4096, 1)
        calls.let_go(1)
        tier.store(slot, noise(4096)).wait()
        stuck = tier.store(other, noise(4096))
        tier.load(slot, into).wait()
        assert torch.equal(into, noise(4096))
        assert not stuck.done()
        calls.let_go()


def test_what_has_not_begun_can_be_cancelled(held: Case) -> None:
    tier, calls, slots = held
    told: list[Ticket] = []
    kept, gone = tier.store(slots[1], noise(4096)), tier.store(slots[2], noise(4096), then=told.append)
    with pytest.raises(Invalid, match="wait for its ticket"):
        tier.release(slots[2])
    assert gone.cancel()
    assert gone.done()
    assert told == [gone]
    assert not gone.cancel()  # once is enough
    with pytest.raises(Closed, match="cancelled"):
        gone.wait()
    tier.release(slots[2])
    assert order(calls, [kept]) == [0, 1]
    assert not kept.cancel()


def test_what_has_begun_cannot_be_cancelled(held: Case) -> None:
    tier, calls, slots = held
    ticket = tier.store(slots[1], noise(4096))
    calls.go.release(1)
    calls.begun.acquire()
    assert not ticket.cancel()
    assert not ticket.wait(timeout_s=0.001)
    calls.let_go()
    assert ticket.wait()


def test_a_slot_is_not_loaded_or_stored_while_it_is_stored(held: Case) -> None:
    tier, calls, slots = held
    for doing in (lambda: tier.load(slots[0], noise(4096)), lambda: tier.store(slots[0], noise(4096))):
        with pytest.raises(Invalid, match="wait for its"):
            doing()
    calls.let_go()


def test_a_callback_sees_the_end_and_may_ask_for_more(tier: Storage) -> None:
    slot, source, into, seen = tier.reserve(PIECE + 5), noise(PIECE + 5), noise(PIECE + 5, 1), []
    both = threading.Event()

    def stored(ticket: Ticket) -> None:
        seen.append((ticket.error, ticket.slot.stored_bytes, ticket.done()))
        tier.load(slot, into, then=lambda _: both.set())
        raise RuntimeError("which is logged, and hurts nobody")

    ticket = tier.store(slot, source, then=stored)
    ticket.wait()
    assert seen == [(None, PIECE + 5, False)]
    assert both.wait(60)
    assert torch.equal(into, source)


# --- trouble with disks ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EIO, Unavailable),
        (errno.ENOSPC, Busy),
        (errno.EDQUOT, Busy),
        (errno.EROFS, Denied),
    ],
)
def test_a_write_that_fails_names_the_directory_and_leaves_the_tensor(
    tmp_path: Path, code: int, kind: type[ForebayError]
) -> None:
    with disk(tmp_path, pwritev=Failing(os.pwritev, 0, code)) as tier:
        slot, source, told = tier.reserve(3 * PIECE), noise(3 * PIECE), []
        ticket = tier.store(slot, source, then=told.append)
        with pytest.raises(kind, match=f"{tmp_path}: writing .* failed"):
            ticket.wait()
        assert told == [ticket]
        assert torch.equal(source, noise(3 * PIECE))
        with pytest.raises(Invalid, match="holds nothing"):
            tier.load(slot, source)
        tier.store(slot, source).wait()  # the disk is well again
        tier.release(slot)


def test_a_failed_load_can_be_asked_for_again(tmp_path: Path) -> None:
    with disk(tmp_path, preadv=Failing(os.preadv, errno.EIO)) as tier:
        slot, source, into = tier.reserve(PIECE), noise(PIECE), noise(PIECE, 1)
        tier.store(slot, source).wait()
        with pytest.raises(Unavailable, match=f"{tmp_path}: reading"):
            tier.load(slot, into).wait()
        tier.load(slot, into).wait()
        assert torch.equal(into, source)


def test_a_failed_ticket_is_done_only_when_no_piece_moves_any_more(tmp_path: Path) -> None:
    calls, failed = Held(os.pwritev), threading.Event()

    def second_fails(fd: int, views: list[Any], at: int) -> int:
        if at == PIECE:
            failed.set()
            raise OSError(errno.EIO, "broken")
        return calls(fd, views, at)

    with disk(tmp_path, threads=2, pwritev=second_fails) as tier:
        ticket = tier.store(tier.reserve(4 * PIECE), noise(4 * PIECE))
        assert failed.wait(60)
        assert not ticket.wait(timeout_s=0.05)  # piece 0 still reads the source
        calls.let_go()
        with pytest.raises(Unavailable):
            ticket.wait()
        assert set(calls.at) <= {0, 2 * PIECE}


@pytest.mark.parametrize("memory", [noise, aligned])
@pytest.mark.parametrize("direct", [True, False])
def test_what_moves_in_part_goes_on_and_what_moves_nothing_fails(
    tmp_path: Path, memory: Callable[..., torch.Tensor], direct: bool
) -> None:
    def in_part(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, views, at: call(fd, [views[0][:4096]], at)

    more: dict[str, Any] = {"direct": direct, "preadv": in_part(os.preadv)}
    with disk(tmp_path, pwritev=in_part(os.pwritev), **more) as tier:
        slot, source, into = tier.reserve(PIECE + 77), memory(PIECE + 77), memory(PIECE + 77, 1)
        tier.store(slot, source).wait()
        tier.load(slot, into).wait()
        assert torch.equal(into, source)
    with disk(tmp_path, pwritev=lambda fd, views, at: 0, **more) as tier:
        with pytest.raises(Unavailable, match="cut short"):
            tier.store(tier.reserve(10), memory(10)).wait()


@pytest.mark.parametrize("memory", [noise, aligned])
@pytest.mark.parametrize("at", [0, PIECE + 3, 2 * PIECE + 4100])
def test_a_byte_that_changed_on_the_disk_is_found(tmp_path: Path, memory: Callable[..., torch.Tensor], at: int) -> None:
    with disk(tmp_path) as tier:
        slot, source = tier.reserve(2 * PIECE + 4101), memory(2 * PIECE + 4101)
        tier.store(slot, source).wait()
        with open(f"/proc/self/fd/{tier._files[0].fd}", "r+b", buffering=0) as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(Corrupt, match="go on from a checkpoint"):
            tier.load(slot, memory(2 * PIECE + 4101, 1)).wait()


def test_a_read_into_pages_that_a_fork_took_is_done_again_through_the_bounce_buffer(tmp_path: Path) -> None:
    addresses = []

    def torn(fd: int, views: list[Any], at: int) -> int:
        addresses.append(views[0].__array_interface__["data"][0])
        moved = os.preadv(fd, views, at)
        if len(addresses) == 1:
            views[0][:4096] = 0
        return moved

    with disk(tmp_path, preadv=torn) as tier:
        slot, source, into = tier.reserve(PIECE), aligned(PIECE), aligned(PIECE, 1)
        tier.store(slot, source).wait()
        tier.load(slot, into).wait()
    assert torch.equal(into, source)
    assert addresses[0] == into.data_ptr() != addresses[1]


# --- opening, closing, living and dying ------------------------------------------------------------------------------
def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open_or_in_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = descriptors(), set(threading.enumerate())
    for _ in range(3):
        with disk(tmp_path) as tier:
            assert os.listdir(tmp_path) == []  # it has no name while it is used, either
            tier.store(tier.reserve(PIECE), noise(PIECE)).wait()
    tier.close()
    with pytest.raises(NotFound, match="make the directory"):
        disk(tmp_path, tmp_path / "missing").open()

    def full(fd: int, at: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Busy, match="free room there"):
        disk(tmp_path).open()
    assert descriptors() <= before, "those of tests before this one may be closed meanwhile"
    assert set(threading.enumerate()) <= threads
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_room_ahead_or_direct_io_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: int) -> Callable[..., Any]:
        def refusing(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        return refusing

    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    with monkeypatch.context() as probing:
        probing.setattr(os, "pwritev", refuse(errno.EINVAL))
        tier = disk(tmp_path)
        tier.open()
    assert tier.mode == "buffered"
    slot, into = tier.reserve(PIECE + 1), noise(PIECE + 1, 1)
    tier.store(slot, noise(PIECE + 1)).wait()
    tier.load(slot, into).wait()
    assert torch.equal(into, noise(PIECE + 1))
    tier.close()


def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    calls, told = Held(os.pwritev), []
    tier = disk(tmp_path, threads=1, pwritev=calls)
    tier.open()
    last, long, waiting = (tier.reserve(size) for size in (4096, 2 * PIECE, 4096))
    under_way = tier.store(last, noise(4096), then=told.append)
    calls.begun.acquire()
    tickets = [tier.store(long, noise(2 * PIECE), then=told.append), tier.store(waiting, noise(4096), then=told.append)]
    closing = threading.Thread(target=tier.close)
    closing.start()
    for ticket in tickets:  # told at once, although a piece still moves
        with pytest.raises(Closed, match="was closed"):
            ticket.wait()
    assert not under_way.done()
    with pytest.raises(Closed, match="not open"):
        tier.store(waiting, noise(4096))
    calls.let_go()
    closing.join()
    assert under_way.wait()
    assert sorted(map(id, told)) == sorted(map(id, [*tickets, under_way]))
    assert calls.at == [0]


def test_closing_between_two_pieces_fails_the_transfer(tmp_path: Path) -> None:
    calls = Held(os.pwritev)
    tier = disk(tmp_path, threads=1, pwritev=calls)
    tier.open()
    ticket = tier.store(tier.reserve(3 * PIECE), noise(3 * PIECE))
    calls.begun.acquire()
    closing = threading.Thread(target=tier.close)
    closing.start()
    while tier._queues is not None or ticket.error is None:
        assert not ticket.wait(timeout_s=0.001)
    calls.let_go()
    closing.join()
    with pytest.raises(Closed):
        ticket.wait()
    assert calls.at == [0]


def test_a_tier_is_not_closed_by_its_own_callback(tier: Storage) -> None:
    refused = []

    def close(_: Ticket) -> None:
        try:
            tier.close()
        except Invalid as error:
            refused.append(error)

    tier.store(tier.reserve(5), noise(5), then=close).wait()
    assert len(refused) == 1


def test_a_fork_does_not_use_its_parents_tier(tier: Storage) -> None:
    slot = tier.reserve(5)
    pid = os.fork()
    if not pid:
        try:
            tier.store(slot, noise(5))
        except Closed:
            tier.release(slot)
            tier.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    tier.store(slot, noise(5)).wait()


CHILD = """
import os, signal, sys
from forebay.offload.tiers.disk_tier import DiskTier

directory, how = sys.argv[1:]
really = os.unlink
def unlink(path):
    if how == "dies before it unlinks":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "cannot unlink what is open":
        raise OSError(16, "busy")
    really(path)
os.unlink = unlink
tier = DiskTier([directory], "1MiB")
tier.open()
tier.store(tier.reserve(1 << 20), bytes(1 << 20)).wait()
print("stored", flush=True)
sys.stdin.read()
"""


def child(directory: Path, how: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    process = child(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "stored\n"
    kill(process)
    assert os.listdir(tmp_path) == []


def test_what_is_left_by_a_process_that_died_at_the_wrong_moment_is_removed(tmp_path: Path) -> None:
    process = child(tmp_path, "dies before it unlinks")
    process.communicate()
    (left,) = os.listdir(tmp_path)
    assert left.startswith("forebay-offload-")
    (tmp_path / "forebay-offload-notes.txt").write_text("mine")
    (tmp_path / "forebay-offload-0-1-2.swap").write_text("mine too: no name of ours")
    with disk(tmp_path):
        assert sorted(os.listdir(tmp_path)) == ["forebay-offload-0-1-2.swap", "forebay-offload-notes.txt"]


def test_a_file_that_kept_its_name_is_held_while_its_process_lives_and_removed_afterwards(tmp_path: Path) -> None:
    process = child(tmp_path, "cannot unlink what is open")
    assert process.stdout is not None
    assert process.stdout.readline() == "stored\n"
    (kept,) = os.listdir(tmp_path)
    other_boot = kept.replace(kept[16:52], "0" * 8 + kept[24:52])
    os.link(tmp_path / kept, tmp_path / other_boot)  # as if another machine held it: locked, so it stays
    with disk(tmp_path) as tier:  # two living processes share the directory
        slot, into = tier.reserve(PIECE), noise(PIECE, 1)
        tier.store(slot, noise(PIECE)).wait()
        tier.load(slot, into).wait()
        assert torch.equal(into, noise(PIECE))
        assert sorted(os.listdir(tmp_path)) == sorted([kept, other_boot])
    kill(process)
    assert sorted(swapfile.reclaim(str(tmp_path))) == sorted([kept, other_boot])
    assert os.listdir(tmp_path) == []


# --- speed -----------------------------------------------------------------------------------------------------------
def test_measuring_says_how_and_leaves_the_room_as_it_was(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        found = tier.measure()
        assert found.mode == tier.mode
        assert found.size_bytes == tier.room_bytes // 4
        assert min(found.write_bytes_s, found.read_bytes_s) > 0
        assert tier.used_bytes == 0


def test_a_disk_half_as_quick_as_was_said_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with disk(tmp_path, write_bytes_s=1e9, read_bytes_s=2e9) as tier:
        assert tier.check_speed(Measured(0.51e9, 1.01e9, "O_DIRECT", 1 << 20)).write_bytes_s == 0.51e9
        with pytest.raises(Invalid, match="writes 499 MB/s") as slow:
            tier.check_speed(Measured(0.499e9, 2e9, "buffered", 1 << 20))
        assert "said to write 1000 MB/s" in str(slow.value)
        assert "buffered" in str(slow.value)
        with pytest.raises(Invalid, match="said to read 2000 MB/s"):
            tier.check_speed(Measured(1e9, 0.9e9, "O_DIRECT", 1 << 20))
    with disk(tmp_path, limit_bytes_s=(8e6, 8e6), write_bytes_s=1e9) as tier:
        with pytest.raises(Invalid, match="said to write 1000 MB/s"):
            tier.check_speed()


def test_a_limited_disk_is_no_quicker_than_its_limit(tmp_path: Path) -> None:
    with disk(tmp_path, limit_bytes_s=(10e6, 20e6)) as tier:
        found = tier.measure()
        size_bytes = found.size_bytes
        assert size_bytes / found.write_bytes_s >= size_bytes / 10e6 - CATCH_UP_S
        assert size_bytes / found.read_bytes_s >= size_bytes / 20e6 - CATCH_UP_S


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for wrong in (
        lambda: DiskTier([], "1GiB"),
        lambda: DiskTier([tmp_path, str(tmp_path) + "/"], "1GiB"),
        lambda: DiskTier([tmp_path, tmp_path / "other"], "8MiB"),
        lambda: DiskTier([tmp_path], 4095),
        lambda: DiskTier([tmp_path], "1 bushel"),
        lambda: disk(tmp_path, piece_bytes=5000),
        lambda: disk(tmp_path, threads=17),
        lambda: disk(tmp_path, limit_bytes_s=(0.0, 1.0)),
        lambda: HostTier(0),
    ):
        with pytest.raises(Invalid):
            wrong()
