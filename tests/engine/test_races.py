"""What meets in the wrong moment: eviction and readers, buckets that move, clocks that step, backends that hang."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import ForebayError, Invalid, Unavailable
from forebay.core.machines.shares import Need
from forebay.core.types import FRESH_IMMUTABLE, Bucket, RangeSpec
from forebay.node.engine.engine import Engine
from forebay.node.engine.read.permits import Permits
from forebay.node.front.front import Front
from forebay.node.store.disk import files
from forebay.node.store.writer import rebuild
from tests.patience import PATIENCE_S
from tests.patience import until_async as until

from .conftest import MIB, Remote, Rig, pattern, rig

Rigged = Callable[..., None]


async def reclaimed(rig: Rig) -> None:
    """Everything that was dropped is off the disk."""
    rig.engine.flush()
    rig.engine.room.reclaim()
    await until(lambda: not rig.engine.room._reclaiming)


def data_files(dir: Path) -> list[Path]:
    return [path for path in (dir / "volumes" / "v0" / "data").rglob("*") if path.is_file()]


def test_an_object_evicted_under_a_slow_reader_can_still_be_read(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(100 * MIB)
        rig.remote.place("object", data)
        slow = rig.front.open("object")
        slow.takes = False
        await slow.until(lambda: len(slow.data) >= 16 * MIB)
        assert rig.engine.cold.forget("remote", "object") > 0
        await reclaimed(rig)
        assert await rig.front.get("object", RangeSpec(0, MIB)) == data[: MIB + 1]
        slow.takes = True
        rig.front.post_taken(slow)
        assert await slow.whole() == data

    rigged(story)


def test_eviction_of_what_is_listed_leaves_what_is_landing(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(64 * MIB)
        rig.remote.place("object", data)
        assert await rig.front.get("object", RangeSpec(0, 9)) == data[:10]
        await rig.idle()
        rig.remote.open.clear()
        late = rig.front.open("object", RangeSpec(40 * MIB, 41 * MIB - 1))
        await until(lambda: bool(rig.engine.cold.all_flights))
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        rig.engine.room.drop([(record.object_id, 0)])
        await reclaimed(rig)
        rig.remote.open.set()
        assert await late.whole() == data[40 * MIB : 41 * MIB]

    rigged(story)


def test_a_torn_object_of_one_block_is_fetched_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with rig(tmp_path) as made:
            data = pattern(3 * MIB)
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
                file.write(b"torn")
            made.front = type(made.front)()
            await made.start()
            made.remote.open.clear()
            read = made.front.open("object")
            await until(lambda: made.remote.count("fetch") == 2)
            await reclaimed(made)
            made.remote.open.set()
            assert await read.whole() == data
            await made.idle()

    asyncio.run(story())


def test_a_bucket_that_moves_leaves_its_flights_behind(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        before, after = pattern(20 * MIB, 1), pattern(20 * MIB, 2)
        old, new = rig.remote, Remote()
        old.place("object", before)
        new.place("object", after)
        old.open.clear()
        first = rig.front.open("object")
        await until(lambda: bool(rig.engine.cold.flights))
        rig.remote = new
        await rig.front.call("bucket_put", Bucket("remote", "memory://another", freshness_s=FRESH_IMMUTABLE))
        second = rig.front.open("object")
        await asyncio.sleep(0.05)
        old.open.set()
        assert await second.whole() == after
        assert await first.whole() == before
        await rig.idle()
        assert await rig.front.get("object") == after

    rigged(story)


def test_an_opening_at_a_bucket_that_moves_is_not_shared(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        old, new = rig.remote, Remote()
        old.place("object", b"before")
        old.place("large", pattern(5 * MIB, 1))
        new.place("object", b"after")
        new.place("large", pattern(5 * MIB, 2))
        gate = asyncio.Event()
        plain = old.fetch

        async def held(*args: Any, **more: Any) -> Any:
            await gate.wait()
            return await plain(*args, **more)

        old.fetch = held  # type: ignore[method-assign]
        firsts = [rig.front.open("object"), rig.front.open("large")]
        await until(lambda: len(rig.engine.cold.openings.under_way) == 2)
        rig.remote = new
        await rig.front.call("bucket_put", Bucket("remote", "memory://another", freshness_s=FRESH_IMMUTABLE))
        seconds = [rig.front.open("object"), rig.front.open("large")]
        await asyncio.sleep(0.05)
        gate.set()
        for first in firsts:
            await first.whole()
        for second in seconds:
            assert await second.whole() in (b"after", pattern(5 * MIB, 2))
        await rig.idle()
        assert await rig.front.get("object") == b"after"
        assert await rig.front.get("large") == pattern(5 * MIB, 2)

    rigged(story)


def test_a_clock_that_steps_back_does_not_keep_a_read_asking(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", b"same")
        assert await rig.front.get("object") == b"same"
        plain = rig.remote.check

        async def stepping(key: str, version: str) -> Any:
            rig.clock.ahead_s = -3600.0
            return await plain(key, version)

        rig.remote.check = stepping  # type: ignore[method-assign]
        rig.remote.asked.clear()
        read = asyncio.create_task(rig.front.get("object"))
        second = asyncio.create_task(rig.front.get("object"))
        async with asyncio.timeout(PATIENCE_S):
            assert await read == await second == b"same"
        assert rig.remote.count("check") <= 4

    rigged(story, freshness_s=0.0)


def test_a_read_that_failed_leaves_no_file(rigged: Rigged, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.cut_after = MIB
        for number in range(5):
            rig.remote.place(f"object/{number}", pattern(20 * MIB, number))
            with pytest.raises(Unavailable):
                await rig.front.get(f"object/{number}")
        await rig.idle()
        await until(lambda: not data_files(tmp_path))

    rigged(story)


def test_a_bucket_that_hangs_does_not_hold_up_another(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        hung, well = rig.remote, Remote()
        rig.remote = well
        await rig.engine.buckets.put(Bucket("well", "memory://well"))
        well.place("object", b"well")
        gate = asyncio.Event()

        async def never(*args: Any, **more: Any) -> Any:
            await gate.wait()
            raise Unavailable("it hung")

        hung.fetch = never  # type: ignore[method-assign]
        waiting = [rig.front.open(f"object/{number}") for number in range(100)]
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await rig.front.get("object", bucket="well") == b"well"
        finally:
            gate.set()
            for read in waiting:
                with pytest.raises(ForebayError):
                    await read.whole()

    rigged(story)


def test_fronts_are_told_again_of_files_that_somebody_holds(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(12 * MIB))
        await rig.front.get("object")
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        path = next(iter(rig.engine.store.usable())).data_path(record.object_id)
        with open(path, "rb") as lease:
            fcntl.flock(lease, fcntl.LOCK_SH)  # as a front's that opened the file anew after it was told
            rig.engine.room.drop([(record.object_id, 1)])
            await until(lambda: rig.front.dropped.count(record.object_id) >= 2)
            assert os.pread(lease.fileno(), 9, 4 * MIB) != bytes(9)
        await until(lambda: os.stat(path).st_blocks * 512 < 9 * MIB)

    rigged(story)


def test_a_file_that_goes_while_it_is_swept_costs_nothing_else(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(5 * MIB))
        await rig.front.get("object")
        await rig.idle()
        plain = rebuild._files_in
        monkeypatch.setattr(rebuild, "_files_in", lambda at, path, busy: [*plain(at, path, busy), f"{path}/{1:016x}"])
        assert sum(rig.engine.store.sweep()) == 0
        assert [usage.state for usage in rig.engine.store.usage()] == ["ok"]

    rigged(story)


def test_a_file_that_cannot_be_resumed_is_closed(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(12 * MIB)
        rig.remote.place("object", data)
        assert await rig.front.get("object", RangeSpec(0, 9)) == data[:10]
        await rig.idle()

        def no_more(path: str) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(files.Header, "read", no_more)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert await rig.front.get("object", RangeSpec(8 * MIB, 9 * MIB - 1)) == data[8 * MIB : 9 * MIB]
        await rig.idle()
        assert len(os.listdir("/proc/self/fd")) <= before

    rigged(story)


def test_a_hole_that_a_commit_makes_ready_can_still_be_called_off(rigged: Rigged) -> None:
    """A writer's look, which takes no lock when nothing waits, must not fall between two tables."""

    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(12 * MIB))
        await rig.front.get("object")
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        volume, reclaimer = next(iter(rig.engine.store.usable())), rig.engine.store._reclaimer
        path = volume.data_path(record.object_id)
        writer = threading.Thread(target=reclaimer.keep_block, args=(path, 1))

        class Waiting(dict[str, Any]):
            def pop(self, *arguments: Any) -> Any:
                taken = super().pop(*arguments)
                self.look()
                return taken

            def __delitem__(self, name: str) -> None:
                self.look()
                super().__delitem__(name)

            def look(self) -> None:
                if writer.ident is None:
                    writer.start()
                    writer.join(0.2)

        reclaimer._holes_after = Waiting(reclaimer._holes_after)
        rig.engine.store.drop_units([(record.object_id, 1)])
        rig.engine.store.flush()
        writer.join()
        assert 1 not in reclaimer._holes[path][1].blocks

    rigged(story)


def test_a_turn_that_is_given_up_is_the_next_ones() -> None:
    async def story() -> None:
        permits = Permits(2, 1)
        held = [permits.claim(number, Need.NEXT) for number in range(2)]
        assert all(claim.take_now() for claim in held)
        given_up, next_one = (permits.claim(number, Need.NEXT) for number in (3, 4))
        waiting = [asyncio.create_task(claim.take()) for claim in (given_up, next_one)]
        await asyncio.sleep(0)
        assert not permits.claim(5, Need.FIRST).take_now()
        waiting[0].cancel()
        held[0].leave()
        async with asyncio.timeout(PATIENCE_S):
            await waiting[1]
        permits.shares.check()
        assert permits.waiting == 0

    asyncio.run(story())


def test_many_ranges_outside_an_unknown_object_do_not_queue(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(8 * MIB))
        outside = [rig.front.open("object", RangeSpec(20 * MIB, 21 * MIB)) for _ in range(32)]
        assert await rig.front.get("object", RangeSpec(0, 9)) == pattern(10)
        for read in outside:
            with pytest.raises(ForebayError, match="range"):
                await read.whole()
        assert rig.remote.count("refused") <= 3
        assert rig.remote.count("head") <= 3

    rigged(story)


def files_without_a_name(dir: Path) -> int:
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    names = [str(link.readlink()) for link in links if link.is_symlink()]
    return sum(name.startswith(str(dir / "volumes")) and "/data/" in name and "deleted" in name for name in names)


def test_a_front_lets_go_of_what_was_dropped_while_it_had_no_engine(tmp_path: Path) -> None:
    async def fetch(port: int, target: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        try:
            return await reader.read()
        finally:
            writer.close()

    async def story() -> None:
        async with rig(tmp_path, listen="127.0.0.1:0") as made:
            data = pattern(8 * MIB)
            made.remote.place("object", data)
            front = Front(made.settings, 0)
            await front.start()
            assert (await fetch(front.port, "/remote/object")).endswith(data)
            await made.idle()
            made.engine.flush()
            assert (await fetch(front.port, "/remote/object")).endswith(data)
            assert front._store.files_open == 1
            await made.stop()
            made.front = type(made.front)()
            made.engine = Engine(made.settings, opener=made._opener, clock=made.clock)
            await made.engine.start()
            assert made.engine.cold.forget("remote", "object") == len(data)
            made.engine.flush()
            await made.front.connect(made.settings)
            await until(lambda: front.link.connected and not data_files(tmp_path))
            await until(lambda: not files_without_a_name(tmp_path))
            await front.stop()

    asyncio.run(story())


def test_a_backend_that_refuses_a_range_inside_is_not_asked_for_ever(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", pattern(8 * MIB))

        async def refuse(*_: Any, **__: Any) -> Any:
            raise Invalid("no such range", code="InvalidRange")

        rig.remote.fetch = refuse  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await rig.front.get("object", RangeSpec(0, 9))
        assert rig.remote.count("head") <= 4

    rigged(story)
