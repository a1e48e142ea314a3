"""Bytes gathered while a write is under way: whole, in order, bounded, and right whatever breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.backends.local import memory
from forebay.core.errors import ForebayError, Unavailable
from forebay.node.engine.read import sink as module
from forebay.node.engine.read.sink import BlockHashes, DiskSink, Gathering
from forebay.node.store.writer.landing import Landing
from tests.patience import PATIENCE_S

from .conftest import MIB, Rig, pattern, until

Rigged = Callable[..., None]
KIB = 1024


class Slow:
    """Writes that end when they are let."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, bytes]] = []
        self.may_end = asyncio.Semaphore(0)
        self.fails: ForebayError | None = None

    async def __call__(self, position: int, pieces: list[memoryview]) -> None:
        self.begun.append((position, b"".join(pieces)))
        await self.may_end.acquire()
        if self.fails is not None:
            raise self.fails


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_the_first_bytes_are_written_alone_and_what_comes_meanwhile_together() -> None:
    async def story() -> None:
        slow = Slow()
        gathering = Gathering(7, slow)
        for part in (b"one", b"two", b"three"):
            await gathering.put(memoryview(part))
            await turns()
        assert slow.begun == [(7, b"one")]
        slow.may_end.release()
        await turns()
        assert slow.begun == [(7, b"one"), (10, b"twothree")], "without a word from the backend"
        slow.may_end.release()
        await gathering.written()
        await gathering.put(memoryview(b"four"))
        await turns()
        assert slow.begun[2:] == [(18, b"four")]
        await gathering.stop()

    asyncio.run(story())


def test_no_more_waits_than_is_allowed() -> None:
    async def story() -> None:
        slow = Slow()
        gathered = Gathering(0, slow)
        chunk, put = memoryview(bytes(100 * KIB)), 0

        async def all_puts() -> None:
            nonlocal put
            for _ in range(100):
                await gathered.put(chunk)
                put += 1

        putting = asyncio.create_task(all_puts())
        for written in range(5):
            await turns(50)
            waits_bytes = 100 * KIB * (put + 1) - sum(len(data) for _, data in slow.begun)
            assert module.GATHERED_BYTES_MAX <= waits_bytes < module.GATHERED_BYTES_MAX + 100 * KIB, written
            slow.may_end.release()
        putting.cancel()
        await gathered.stop()

    asyncio.run(story())


def test_a_write_that_fails_is_the_last_and_frees_who_waits() -> None:
    async def story() -> None:
        slow = Slow()
        slow.fails = Unavailable("the disk is full")
        gathering = Gathering(0, slow)
        await gathering.put(memoryview(b"one"))
        await turns()
        waiting = asyncio.create_task(gathering.put(memoryview(bytes(2 * MIB))))
        await turns()
        assert not waiting.done()
        slow.may_end.release()
        await asyncio.wait_for(waiting, PATIENCE_S)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await gathering.put(memoryview(b"more"))
            with pytest.raises(Unavailable):
                await gathering.written()
        await gathering.stop()
        assert slow.begun == [(0, b"one")]

    asyncio.run(story())


def test_after_a_stop_nothing_is_begun() -> None:
    async def story() -> None:
        slow = Slow()
        gathering = Gathering(0, slow)
        await gathering.put(memoryview(b"one"))
        await turns()
        await gathering.put(memoryview(b"two"))
        slow.may_end.release()
        await gathering.stop()
        await gathering.stop()
        await turns()
        assert slow.begun == [(0, b"one")]

    asyncio.run(story())


class FileLanding:
    """A data file, written by the real `Landing.write`'s contract: pieces one behind the other."""

    object_id = 1

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.writes = 0

    def write(self, offset: int, *pieces: memoryview) -> None:
        self.writes += 1
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(b"".join(pieces))

    def keep_sums(self, whole: list[tuple[int, int]]) -> None:
        pass

    def close(self) -> None:
        pass


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    block=st.integers(1, 40),
    first=st.integers(0, 3),
    size=st.integers(1, 300),
    cuts=st.lists(st.integers(0, 300), max_size=30),
    pauses=st.lists(st.integers(0, 3), max_size=30),
    bound=st.integers(1, 60),
)
def test_blocks_and_their_checksums_are_right_for_any_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    block: int,
    first: int,
    size: int,
    cuts: list[int],
    pauses: list[int],
    bound: int,
) -> None:
    start = first * block
    if start >= size:
        return
    data = pattern(size)
    path = tmp_path_factory.mktemp("any") / "data"
    path.write_bytes(bytes(size))
    edges = sorted({start, size, *(cut for cut in cuts if start < cut < size)})

    async def story() -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        with ThreadPoolExecutor(2) as writers:
            sink = DiskSink(FileLanding(path), writers)  # type: ignore[arg-type]
            hashes = BlockHashes(start, size, block)

            async def write(position: int, pieces: list[memoryview]) -> None:
                found.extend(await sink.write(position, pieces, hashes))

            gathered = Gathering(start, write)
            for number, (low, high) in enumerate(pairwise(edges)):
                await gathered.put(memoryview(data)[low:high])
                await turns(pauses[number] if number < len(pauses) else 0)
            await gathered.written()
            await gathered.stop()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GATHERED_BYTES_MAX", bound)
        found = asyncio.run(story())
    assert path.read_bytes() == bytes(start) + data[start:]
    expected = [
        (number, xxhash.xxh3_64_intdigest(data[number * block : (number + 1) * block]))
        for number in range(first, -(-size // block))
    ]
    assert found == expected


class Gate:
    """A disk whose writes wait until it opens; then the write that reaches `full_from` fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.full_from = 1 << 60
        self.writes: list[int] = []  # bytes of each
        write = Landing.write

        def gated(landing: Landing, offset: int, *pieces: memoryview) -> None:
            size = sum(map(len, pieces))
            self.writes.append(size)
            assert self.open.wait(PATIENCE_S)
            if offset + size > self.full_from:
                raise Unavailable("the disk is full")
            write(landing, offset, *pieces)

        monkeypatch.setattr(Landing, "write", gated)
        monkeypatch.setattr(memory, "CHUNK_BYTES", 100 * KIB)
        monkeypatch.setattr("forebay.node.engine.read.sink.SLOW_WRITE_S", PATIENCE_S)


def test_a_disk_that_fills_in_a_gathered_write_costs_no_reader_a_byte(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.full_from = 4 * MIB + 300 * KIB

    async def story(rig: Rig) -> None:
        data = pattern(9 * MIB + 11)
        rig.remote.place("object", data)
        reads = [rig.front.open("object") for _ in range(3)]
        await until(lambda: bool(gate.writes))
        gate.open.set()
        for read in reads:
            assert await read.whole() == data
        assert max(gate.writes) > 100 * KIB, "gathered"
        await rig.idle()
        gate.full_from = 1 << 60
        assert await rig.front.get("object") == data

    rigged(story)


def test_what_was_gathered_when_the_body_broke_is_told(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    async def story(rig: Rig) -> None:
        data = pattern(9 * MIB)
        rig.remote.place("object", data)
        rig.remote.cut_after = 500 * KIB  # while its first chunk is still being written
        read = rig.front.open("object")
        await until(lambda: bool(gate.writes))
        gate.open.set()
        with pytest.raises(ForebayError, match="broke"):
            await read.whole()
        assert bytes(read.data) == data[: 500 * KIB]
        await rig.idle()
        rig.remote.cut_after = None
        assert await rig.front.get("object") == data

    rigged(story)


def test_a_reader_that_leaves_while_bytes_are_gathered(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    async def story(rig: Rig) -> None:
        data = pattern(13 * MIB)
        rig.remote.place("object", data)
        read = rig.front.open("object")
        await until(lambda: bool(gate.writes))
        read.close()
        await turns(50)
        again = rig.front.open("object")
        await turns(50)
        gate.open.set()
        assert await again.whole() == data
        await rig.idle()
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        assert record.complete
        assert await rig.front.get("object") == data

    rigged(story)


def test_an_engine_that_stops_while_bytes_are_gathered(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    async def story(rig: Rig) -> None:
        data = pattern(13 * MIB)
        rig.remote.place("object", data)
        rig.front.open("object")
        await until(lambda: bool(gate.writes))
        stop = rig.engine.stop

        async def stopped(**how: bool) -> None:
            gate.open.set()  # not later: closing the store waits for the disk in the loop's own thread
            await stop(**how)

        monkeypatch.setattr(rig.engine, "stop", stopped)
        await rig.again()
        assert await rig.front.get("object") == data

    rigged(story)
