"""Disks that are full, slow, wrong or gone: reads pass through, no wrong byte, nothing kept in memory."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.machines.shares import Need, Shares
from forebay.core.messages import wire
from forebay.core.types import RangeSpec
from forebay.node.engine import engine

from .conftest import MIB, Rig, pattern, rig, until

Rigged = Callable[..., None]
SLOW = 200


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own with 40 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", path], check=False).returncode:
        pytest.skip("mounting a small filesystem needs root")
    yield path
    subprocess.run(["umount", path], check=True)


def spread(data: bytes, read: bytes) -> None:
    assert len(read) == len(data)
    assert read == data


def test_a_cache_full_of_pinned_objects_passes_the_rest_through(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for number in range(8):
            rig.remote.place(f"pinned/{number}", pattern(4 * MIB, number))
            await rig.front.get(f"pinned/{number}")
        await rig.idle()
        data = pattern(37 * MIB, 99)
        rig.remote.place("object", data)
        rig.remote.asked.clear()
        spread(data, await rig.front.get("object"))
        assert rig.engine.tally.passed_bytes > 0
        assert rig.engine.store.lookup("remote", "object") is None
        assert await rig.front.get("object", RangeSpec(9 * MIB, 9 * MIB + 9)) == data[9 * MIB : 9 * MIB + 10]
        assert rig.remote.fetched_bytes() <= len(data) + 3 * 4 * MIB + 16 * MIB

    rigged(story, capacity_bytes=32 * MIB, pinned=("pinned/",))


def test_many_readers_without_a_disk_stay_within_the_memory_bound(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for number in range(8):
            rig.remote.place(f"pinned/{number}", pattern(4 * MIB, number))
            await rig.front.get(f"pinned/{number}")
        rig.engine.cold.memory.shares = Shares(64, 32)
        data = pattern(30 * MIB, 7)
        rig.remote.place("object", data)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, rig.engine.cold.pass_bytes)
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        stalled = rig.front.open("object")
        stalled.takes = False  # a client that reads nothing holds its own part and nobody else's
        for read in await asyncio.gather(*(rig.front.get("object") for _ in range(12))):
            spread(data, read)
        assert len(stalled.data) <= 16 * MIB
        stalled.close()
        watcher.cancel()
        assert 0 < most <= 32 * MIB

    rigged(story, capacity_bytes=32 * MIB, pinned=("pinned/",))


@pytest.mark.real
def test_a_disk_that_fills_up_midway(small_disk: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path / "node", volumes=(str(small_disk / "volume"),)) as made:
            data = pattern(20 * MIB)
            made.remote.place("object", data)
            made.remote.place("after", pattern(3 * MIB, 3))
            made.remote.open.clear()
            made.remote.free_bytes = 3 * MIB
            reads = [made.front.open("object") for _ in range(3)]
            await reads[0].until(lambda: len(reads[0].data) >= 2 * MIB)
            free = os.statvfs(small_disk)
            with open(small_disk / "somebody-elses", "wb") as file:
                file.write(bytes(free.f_bavail * free.f_frsize - 5 * MIB))
            made.remote.open.set()
            for read in reads:
                spread(data, await read.whole())
            assert made.engine.tally.passed_bytes > 0
            spread(pattern(3 * MIB, 3), await made.front.get("after"))
            state = await made.front.call("status")
            assert state.volumes[0].state == "full"
            await made.idle()
            os.unlink(small_disk / "somebody-elses")
            made.engine.store.housekeep()
            spread(data, await made.front.get("object"))
            await made.idle()
            record = made.engine.store.lookup("remote", "object")
            assert record is not None
            assert record.complete, "healed"

    asyncio.run(story())


def test_a_write_that_stalls_moves_its_readers_to_memory(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.node.engine.read import sink
    from forebay.node.store.writer.landing import Landing

    monkeypatch.setattr(sink, "SLOW_WRITE_S", 0.1)
    stalled: list[int] = []

    class Stall:
        """A disk whose third write takes half a second."""

        def __init__(self) -> None:
            self.write = Landing.write

        def __call__(self, landing: Landing, offset: int, *pieces: memoryview) -> None:
            stalled.append(offset)
            if len(stalled) == 3:
                import time

                time.sleep(0.5)
            self.write(landing, offset, *pieces)

    stall = Stall()
    monkeypatch.setattr(Landing, "write", lambda landing, offset, *pieces: stall(landing, offset, *pieces))

    async def story(rig: Rig) -> None:
        data = pattern(12 * MIB)
        rig.remote.place("object", data)
        first, second = rig.front.open("object"), rig.front.open("object")
        spread(data, await first.whole())
        spread(data, await second.whole())
        assert rig.engine.tally.passed_bytes > 0
        written = len(stalled)
        rig.remote.place("next", data)
        spread(data, await rig.front.get("next"))
        assert len(stalled) == written, "a slow disk is left alone for a while"
        rig.clock.ahead_s = 31
        spread(data, await rig.front.get("next"))
        assert len(stalled) > written

    rigged(story)


def test_what_is_cached_is_given_while_a_read_waits_for_memory(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(24 * MIB)
        rig.remote.place("object", data)
        await rig.front.get("object", RangeSpec(0, 16 * MIB - 1))
        await rig.idle()
        cold, store = rig.engine.cold, rig.engine.store
        cold._slow[next(iter(store.usable())).path] = rig.clock.monotonic_s() + 1000
        held = [cold.memory.claim("others", Need.NEXT) for _ in range(cold.memory.shares.permits)]
        assert all(claim.take_now() for claim in held)
        read = rig.front.open("object")
        await read.until(lambda: len(read.data) == 16 * MIB)
        await until(lambda: cold.memory.waiting > 0)
        assert len(read.data) == 16 * MIB
        for claim in held:
            claim.leave()
        spread(data, await read.whole())

    rigged(story)


@pytest.mark.parametrize("same", [True, False])
def test_a_quick_reader_passes_two_hundred_who_hold_memory(rigged: Rigged, same: bool) -> None:
    """None of them ever takes a byte meanwhile: the quick one lives on what their share leaves."""

    async def story(rig: Rig) -> None:
        for number in range(8):
            rig.remote.place(f"pinned/{number}", pattern(4 * MIB, number))
            await rig.front.get(f"pinned/{number}")
        data, shares = pattern(12 * MIB, 7), rig.engine.cold.memory.shares
        for number in range(SLOW):
            rig.remote.place(f"slow/{0 if same else number}", data)
        rig.remote.place("quick", data)
        slow = [rig.front.open(f"slow/{0 if same else number}") for number in range(SLOW)]
        for read in slow:
            read.takes = False
        await until(lambda: all(read.data for read in slow))
        await until(lambda: shares.ahead == shares.ahead_max)
        held = sum(len(read.data) for read in slow)
        spread(data, await rig.front.get("quick"))
        shares.check()
        assert held <= sum(len(read.data) for read in slow) <= shares.permits * limits.PASS_UNIT_BYTES
        for read in slow:
            read.close()
        await rig.idle()
        assert not shares.claims

    rigged(story, capacity_bytes=32 * MIB, pinned=("pinned/",))


def test_flipped_bytes_that_a_front_suspects_are_fetched_again(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(13 * MIB)
        rig.remote.place("object", data)
        await rig.front.get("object")
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        path = next(iter(rig.engine.store.usable())).data_path(record.object_id)
        with open(path, "r+b") as file:
            file.seek(5 * MIB)
            file.write(b"rotten")
        rig.remote.asked.clear()
        rig.front.post(wire.Suspect("remote", "object", record.object_id, "looks odd"))
        spread(data, await rig.front.get("object"))
        assert rig.remote.asked == [("fetch", "object", 4 * MIB, 8 * MIB)]
        assert rig.engine.store.bad_blocks == 1

    rigged(story)


def test_a_file_that_is_gone_is_fetched_again(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(5 * MIB)
        rig.remote.place("object", data)
        await rig.front.get("object")
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        os.unlink(next(iter(rig.engine.store.usable())).data_path(record.object_id))
        rig.front.post(wire.Suspect("remote", "object", record.object_id, "no such file"))
        spread(data, await rig.front.get("object"))

    rigged(story)


def test_after_a_machine_stop_every_block_is_checked_before_its_first_use(tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            data = pattern(22 * MIB)
            made.remote.place("object", data)
            await made.front.get("object")
            await made.idle()
            made.engine.flush()
            record = made.engine.store.lookup("remote", "object")
            assert record is not None
            volume = next(iter(made.engine.store.usable()))
            path, mark_file = volume.data_path(record.object_id), Path(volume.path) / "volume.json"
            await made.stop(clean=False)
            mark = json.loads(mark_file.read_text())
            mark_file.write_text(json.dumps(mark | {"boot_id": "another", "clean": False}))
            with open(path, "r+b") as file:
                file.seek(9 * MIB)
                file.write(b"torn")
            made.front = type(made.front)()
            await made.start()
            made.remote.asked.clear()
            spread(data, await made.front.get("object"))
            fetched = [entry for entry in made.remote.asked if entry[0] == "fetch"]
            assert fetched == [("fetch", "object", 8 * MIB, 12 * MIB)], "only the torn block came from the backend"
            await made.idle()
            checked = made.engine.store.lookup("remote", "object")
            assert checked is not None
            assert checked.state == 0

    asyncio.run(story())


def test_what_is_cached_survives_restarts_of_both_kinds(tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            small, large = b"small", pattern(21 * MIB)
            made.remote.place("small", small)
            made.remote.place("large", large)
            await made.front.get("small")
            await made.front.get("large", RangeSpec(4 * MIB, 12 * MIB - 1))
            await made.idle()
            made.engine.flush()
            for clean in (True, False):
                await made.again(clean=clean)
                made.remote.asked.clear()
                assert await made.front.get("small") == small
                assert await made.front.get("large", RangeSpec(5 * MIB, 6 * MIB - 1)) == large[5 * MIB : 6 * MIB]
                await made.idle()
                assert not made.remote.asked
            assert not list((tmp_path / "volumes" / "v0" / "tmp").iterdir())

    asyncio.run(story())


def test_a_fault_in_what_watches_the_disks_does_not_end_the_watch(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended silently: a disk that stalled later would have frozen the node."""
    monkeypatch.setattr(engine, "AGAIN_S", 0.01)

    async def story(rig: Rig) -> None:
        looked: list[bool] = []
        watch = rig.engine.store.watch

        def breaks_once(now_s: float) -> object:
            looked.append(True)
            if len(looked) == 1:
                raise RuntimeError("nobody thought of this")
            return watch(now_s)

        monkeypatch.setattr(rig.engine.store, "watch", breaks_once)
        await until(lambda: len(looked) > 2)
        assert "Engine._watch broke; it begins again" in caplog.text

    rigged(story)
