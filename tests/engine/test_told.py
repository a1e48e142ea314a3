"""What a front was told of stays where it was said to be until the front took it, however late it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.errors import ForebayError, Unavailable
from forebay.core.messages import wire
from forebay.core.types import RangeSpec
from forebay.node.store.writer.landing import Landing

from .conftest import MIB, Rig, pattern, until
from .test_first_use import flip
from .test_races import data_files

Rigged = Callable[..., None]


class FullFrom:
    """A disk that takes no byte of data files from `offset` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset = 1 << 60
        write = Landing.write

        def limited(landing: Landing, offset: int, *pieces: memoryview) -> None:
            if offset + sum(map(len, pieces)) > self.offset:
                raise Unavailable("the disk is full")
            write(landing, offset, *pieces)

        monkeypatch.setattr(Landing, "write", limited)


async def reclaimed(rig: Rig) -> None:
    """Everything that may be given back to the disk is."""
    rig.engine.flush()
    await until(lambda: not rig.engine.store.pending and not rig.engine.store.reclaimable)


@pytest.mark.parametrize("listed", [False, True])
def test_a_partial_block_outlives_its_disk_for_those_who_were_told_of_it(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    disk = FullFrom(monkeypatch)
    before_bytes = (6 if listed else 2) * MIB  # of the file: with a whole block that is listed, or without

    async def story(rig: Rig) -> None:
        data = pattern(14 * MIB)
        rig.remote.place("object", data)
        rig.remote.open.clear()
        rig.remote.free_bytes = before_bytes
        reads = [rig.front.open("object") for _ in range(4)]
        await reads[0].until(lambda: len(reads[0].data) == before_bytes)
        for read in reads[2:]:
            read.stand_still()
        disk.offset = before_bytes
        late = rig.front.open("object")
        late.stand_still()  # told of all that is there in one message, which it looks at when the disk is given up
        await late.until(lambda: bool(late.stopped))
        rig.remote.open.set()
        for read in reads[:2]:
            assert await read.whole() == data
        await reclaimed(rig)
        for read in (*reads[2:], late):
            read.go_on()
            assert await read.whole() == data
        await rig.idle()
        await reclaimed(rig)
        record = rig.engine.store.lookup("remote", "object")
        assert (record is not None) == listed
        assert len(data_files(Path(rig.settings.dir))) == listed

    rigged(story)


def test_what_was_told_before_a_failure_can_be_read_after_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(9 * MIB)
        rig.remote.place("object", data)
        rig.remote.cut_after = 6 * MIB
        rig.remote.open.clear()
        rig.remote.free_bytes = 6 * MIB
        first, late = rig.front.open("object"), rig.front.open("object")
        late.stand_still()
        await first.until(lambda: len(first.data) == 6 * MIB)
        rig.remote.open.set()
        with pytest.raises(ForebayError):
            await first.whole()
        await reclaimed(rig)
        late.go_on()
        with pytest.raises(ForebayError):
            await late.whole()
        assert late.data == data[: len(late.data)]
        assert len(late.data) == 6 * MIB
        await rig.idle()

    rigged(story)


def test_memory_that_was_told_of_is_not_anothers_before_it_was_taken(rigged: Rigged) -> None:
    """A read without a disk fails while its front stands still; the next one's memory gets no number of its."""

    async def story(rig: Rig) -> None:
        for number in range(8):
            rig.remote.place(f"pinned/{number}", pattern(4 * MIB, number))
            await rig.front.get(f"pinned/{number}")
        await rig.idle()
        data, other = pattern(9 * MIB, 1), pattern(9 * MIB, 2)
        rig.remote.place("object", data)
        rig.remote.place("other", other)
        rig.remote.cut_after = 3 * MIB
        late = rig.front.open("object")
        late.stand_still()
        await late.until(lambda: any(hasattr(message, "error") for message in late.stopped or ()))
        rig.remote.cut_after = None
        reading = rig.front.open("other")
        reading.takes = False
        await reading.until(lambda: len(reading.data) >= 4 * MIB)
        late.go_on()
        with pytest.raises(ForebayError):
            await late.whole()
        assert late.data == data[: len(late.data)]
        assert late.data
        reading.close()
        await rig.idle()

    rigged(story, capacity_bytes=32 * MIB, pinned=("pinned/",))


@pytest.mark.parametrize("found_by", ["another reader", "another flight"])
def test_a_block_that_turns_out_to_be_wrong_is_withdrawn_and_makes_no_hole(rigged: Rigged, found_by: str) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(14 * MIB)
        rig.remote.place("object", data)
        rig.remote.open.clear()
        rig.remote.free_bytes = 6 * MIB
        first, late, taken = (rig.front.open("object") for _ in range(3))
        late.stand_still()
        taken.takes = False
        await first.until(lambda: len(first.data) == 6 * MIB)
        await taken.until(lambda: len(taken.data) == 6 * MIB)
        await late.until(lambda: bool(late.stopped))
        rig.front.post(wire.Consumed(taken.number, 4 * MIB))
        await reclaimed(rig)
        [path] = data_files(Path(rig.settings.dir))
        flip(rig, "object", 5)
        rotted = path.read_bytes()[: 6 * MIB]
        record = rig.engine.store.lookup("remote", "object")
        assert record is not None
        if found_by == "another reader":
            rig.engine.cold.suspect("remote", "object", record.object_id, "a front compared it")
        else:
            rig.engine.cold.compared.forget(record.object_id)
            del rig.engine.cold.flights["remote", "object"]
            again = rig.front.open("object", RangeSpec(0, 99))
            await again.until(lambda: rig.engine.store.bad_blocks == 1)
        await late.until(lambda: isinstance((late.stopped or [None])[-1], wire.Withdrawn))
        await reclaimed_but(rig, record.object_id)
        late.go_on()
        with pytest.raises(Unavailable, match="withdrawn"):
            await late.whole()
        assert late.data in (rotted, data[: 6 * MIB]), "as it was told, or put right since"
        rig.remote.open.set()
        assert await first.whole() == data, "it has the block, as it was"
        assert await taken.whole() == data
        if found_by == "another flight":
            assert await again.whole() == data[:100]
        assert await rig.front.get("object") == data
        await rig.idle()
        await reclaimed(rig)
        assert not +rig.engine.store.held

    rigged(story)


async def reclaimed_but(rig: Rig, object_id: int) -> None:
    """Everything that may be given back to the disk is, and that object's file waits."""
    rig.engine.flush()
    await until(lambda: not rig.engine.store.pending)
    assert rig.engine.store.reclaim().freed_bytes == 0
    assert rig.engine.store.held[object_id]


def test_an_engine_that_stops_keeps_what_it_told_of_while_its_fronts_see_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(9 * MIB)
        rig.remote.place("object", data)
        rig.remote.open.clear()
        rig.remote.free_bytes = 6 * MIB
        read = rig.front.open("object")
        read.takes = False
        await read.until(lambda: len(read.data) == 6 * MIB)
        read.stand_still()
        [path] = data_files(Path(rig.settings.dir))
        stopping = asyncio.create_task(rig.engine.stop())
        while not rig.front.task.done():  # it ends with the connection
            assert path.exists()
            assert path.read_bytes()[: 6 * MIB] == data[: 6 * MIB]
            await asyncio.sleep(0)
        await stopping
        await rig.front.aclose()
        rig.front = type(rig.front)()
        await rig.start()

    rigged(story)
