"""The sink of a landing: bytes are readable from the moment they are announced, wherever they are by then."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.core.limits import BLOCK_BYTES
from forebay.node.engine.read.sink import BlockHashes, DiskSink, DiskTrouble


class SlowLanding:
    """A data file whose first block is written only when the test says so."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.object_id = 1
        self.may_write = threading.Event()
        path.write_bytes(bytes(2 * BLOCK_BYTES))

    def write(self, offset: int, data: memoryview) -> None:
        if offset < BLOCK_BYTES:
            assert self.may_write.wait(90)
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def keep_sums(self, whole: list[tuple[int, int]]) -> None:
        pass

    def close(self) -> None:
        pass


def test_bytes_held_in_memory_are_served_from_there_until_they_are_written(tmp_path: Path) -> None:
    """Another run of the same flight may write first: that says nothing about the bytes that are held."""

    async def story() -> None:
        with ThreadPoolExecutor(2) as writers:
            landing = SlowLanding(tmp_path / "data")
            sink = DiskSink(landing, writers)  # type: ignore[arg-type]
            hashes = BlockHashes(0, 2 * BLOCK_BYTES, BLOCK_BYTES)
            first = memoryview(b"first" * 100)
            end = sink.hold(0, first)
            assert end == len(first)
            writing = asyncio.create_task(sink.write(0, [first], hashes))
            await sink.write(
                BLOCK_BYTES, [memoryview(b"second")], BlockHashes(BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES)
            )
            [(start, stop, path, _, body)] = sink.segments(0, end)
            assert (start, stop, path, body) == (0, end, "", bytes(first))
            landing.may_write.set()
            await writing
            [(start, stop, path, offset, body)] = sink.segments(0, end)
            assert (start, stop, path, offset, body) == (0, end, landing.path, 0, None)
            assert Path(path).read_bytes()[:end] == first

    asyncio.run(story())


def test_a_closed_sink_takes_nothing_and_touches_no_descriptor(tmp_path: Path) -> None:
    """A flight that is shut may have a write that was about to begin: the descriptor is somebody else's by then."""

    async def story() -> None:
        with ThreadPoolExecutor(1) as writers:
            landing = SlowLanding(tmp_path / "data")
            landing.may_write.set()
            sink = DiskSink(landing, writers)  # type: ignore[arg-type]
            sink.close()
            with pytest.raises(DiskTrouble):
                await sink.write(0, [memoryview(b"late")], BlockHashes(0, BLOCK_BYTES, BLOCK_BYTES))
            assert Path(landing.path).read_bytes()[:4] == bytes(4)

    asyncio.run(story())
