"""What dies, dies anywhere: in the midst of a tier's work, on its workers. It is buried by the thread that trains."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.offload.movables import Books, Lasting, Residency, Saved
from forebay.offload.tiers.disk_tier import DiskTier
from forebay.offload.tiers.host_tier import HostTier
from forebay.offload.tiers.tiers import Storage
from tests.torch.offload.test_tiers import Held

SIZE = 64 * 1024
PATIENCE_S = 20  # what takes longer hangs


@pytest.fixture(autouse=True)
def _collector_that_waits() -> Iterator[None]:
    """It runs when a test says so, and looks at what the test made."""
    gc.collect()
    gc.freeze()  # for good: whatever lives now lives on in any case
    gc.disable()
    yield
    gc.enable()


def saved(books: Books, fill: int = 7, size_bytes: int = SIZE) -> Saved:
    return Saved("saved 1", torch.full((size_bytes,), fill, dtype=torch.uint8).untyped_storage(), books)


def stored(books: Books, tier: Storage) -> Saved:
    """One that is away."""
    one = saved(books)
    with books:
        assert one.leave(tier, 0.0)
        one.wait()
    assert one.residency is Residency.AWAY
    return one


def forgotten(what: Any) -> None:
    """Nobody has it any more but itself, as a graph whose loss is kept by an object that knows itself."""
    ring = [what]
    ring.append(ring)


def ends(work: Callable[[], object]) -> None:
    """Do it, on a thread that nobody has to wait for."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert ended, "it failed, or hangs"


def test_the_collector_runs_while_a_tier_is_asked_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier("1MiB")
    tier.open()
    books = Books([tier])
    forgotten(stored(books, tier))
    pieces = HostTier._pieces
    monkeypatch.setattr(HostTier, "_pieces", lambda *args: (gc.collect(), pieces(*args))[1])  # the lock is held
    other = saved(books)

    def leave() -> None:
        with books:
            other.leave(tier, 0.0)
            other.wait()

    ends(leave)
    with books:
        assert books.away_bytes == SIZE, "the other one's"
        assert tier.used_bytes == SIZE
    tier.close()


def test_the_collector_runs_on_the_worker_that_carries_what_dies(tmp_path: Path) -> None:
    """The disk gets the bytes all the same; the slot is free when it has them."""
    begun, dropped, written = threading.Event(), threading.Event(), []

    def pwritev(fd: int, views: list[Any], at: int) -> int:
        begun.set()
        dropped.wait(PATIENCE_S)
        gc.collect()
        torch.full((SIZE,), 1, dtype=torch.uint8)  # may get memory that was let go of
        written.append(b"".join(bytes(view) for view in views))
        return os.pwritev(fd, views, at)

    tier = DiskTier([tmp_path], "1MiB", pwritev=pwritev)
    tier.open()
    books = Books([tier])

    def leave_and_forget() -> None:
        one = saved(books)
        with books:
            one.leave(tier, 0.0)
        forgotten(one)

    def bury() -> None:
        leave_and_forget()
        begun.wait(PATIENCE_S)
        dropped.set()
        while not books.dead:
            threading.Event().wait(0.001)
        with books:
            pass

    ends(bury)
    assert written == [b"\7" * SIZE]
    assert tier.used_bytes == 0
    tier.close()


def test_what_dies_on_another_thread_is_counted_on_this_one() -> None:
    with HostTier("1MiB") as tier:
        books = Books([tier])
        forgotten(stored(books, tier))
        ends(gc.collect)
        assert books.away_bytes == SIZE
        with books:
            assert books.away_bytes == 0
        assert tier.used_bytes == 0


def test_a_storage_without_its_bytes_that_dies_elsewhere_is_counted_on_this_one() -> None:
    with HostTier("1MiB") as tier:
        books = Books([tier])
        tensor = torch.ones(SIZE, dtype=torch.uint8)
        lasting = Lasting("parameter x", tensor, books)
        with books:
            lasting.leave(tier, 0.0)
            lasting.wait()
        assert books.hollow_bytes == SIZE
        forgotten(tensor)
        del tensor
        ends(gc.collect)
        assert books.hollow_bytes == SIZE
        with books:
            assert books.hollow_bytes == 0
            lasting.die()
        assert books.away_bytes == 0


def test_the_room_of_the_dead_is_given_to_the_next() -> None:
    with HostTier(SIZE) as tier:
        books = Books([tier])
        one, next_one = stored(books, tier), saved(books)
        with books:
            assert not next_one.leave(tier, 0.0)
            del one
            assert next_one.leave(tier, 0.0)
            next_one.wait()
        assert books.away_bytes == SIZE


def test_a_burial_that_is_interrupted_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, while it waits for the disk."""
    disk = Held(os.pwritev)
    with DiskTier([tmp_path], "1MiB", pwritev=disk) as tier:
        books = Books([tier])
        one = saved(books)
        with books:
            one.leave(tier, 0.0)
        disk.begun.acquire()
        assert one._ticket is not None
        ended = one._ticket.ended
        del one

        def interrupted() -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ended, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                books.__enter__()
        assert books.own_work == 0
        assert tier.used_bytes == SIZE
        disk.let_go()
        with books:
            pass
        assert tier.used_bytes == 0
