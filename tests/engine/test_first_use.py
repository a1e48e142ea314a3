"""What rotted on this node is never given out: it is mended from another copy, or an error."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from forebay.core.errors import Corrupt, Unavailable
from forebay.core.record import encode_record
from forebay.core.types import RangeSpec
from forebay.node.store.disk import keys
from tests.patience import until_async as until

from .conftest import MIB, Rig, pattern
from .writing import put, written

Rigged = Callable[..., None]
BLOCK = 4 * MIB


def flip(rig: Rig, key: str, at: int) -> None:
    record = rig.engine.store.lookup("remote", key)
    assert record is not None
    with open(rig.engine.store.data_path(record), "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def flip_inline(rig: Rig, key: str) -> None:
    record = rig.engine.store.lookup("remote", key)
    assert record is not None
    assert record.inline
    wrong = msgspec.structs.replace(record, inline=bytes([record.inline[0] ^ 1]) + record.inline[1:])
    index = rig.engine.store.home("remote", key).index
    index.put("records", keys.index_key("remote", key), encode_record(wrong))
    rig.engine.flush()


def test_flipped_bytes_of_clean_objects_are_fetched_again(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        small, large = pattern(5_000), pattern(3 * BLOCK + 7)
        rig.remote.place("small", small)
        rig.remote.place("large", large)
        await rig.front.get("small")
        await rig.front.get("large")
        await rig.again()
        flip_inline(rig, "small")
        flip(rig, "large", BLOCK + 1)
        rig.remote.asked.clear()
        assert await rig.front.get("large", RangeSpec(0, 99)) == large[:100]
        assert rig.remote.asked == [], "that block is right"
        assert await rig.front.get("large") == large
        assert [entry[2:] for entry in rig.remote.asked if entry[0] == "fetch"] == [(BLOCK, 2 * BLOCK)]
        assert await rig.front.get("small") == small
        assert rig.engine.store.bad_blocks == 2
        rig.remote.asked.clear()
        assert await rig.front.get("large") == large
        assert await rig.front.get("small") == small
        assert rig.remote.asked == []

    rigged(story, freshness_s=1e9)


def test_small_bytes_are_compared_before_a_confirmed_copy_is_given(rigged: Rigged) -> None:
    """The backend says that the version is right; it does not say that our bytes are."""

    async def story(rig: Rig) -> None:
        rig.remote.place("small", b"right bytes")
        await rig.front.get("small")
        await rig.again()
        flip_inline(rig, "small")
        rig.clock.ahead_s = 100
        assert await rig.front.get("small") == b"right bytes"

    rigged(story, freshness_s=60.0)


@pytest.mark.parametrize("mode", ["local", "back"])
def test_small_bytes_that_only_this_node_has_are_mended_from_the_durable_index(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.writable.clear()
        await written(rig, mode)
        await put(rig, "small", b"acknowledged")
        await rig.again()
        flip_inline(rig, "small")
        assert await rig.front.get("small") == b"acknowledged"
        flip_inline(rig, "small")
        rig.engine.cold.suspicions.compared.forget(rig.engine.store.lookup("remote", "small").object_id)  # type: ignore[union-attr]
        record = rig.engine.store.lookup("remote", "small")
        assert record is not None
        rig.engine.cold.suspect("remote", "small", record.object_id, "a front compared it")
        assert await rig.front.get("small") == b"acknowledged"
        await until(lambda: not rig.engine.cold.suspicions._looking)
        found = rig.engine.store.lookup("remote", "small")
        assert found is not None
        assert found.inline == b"acknowledged"
        rig.remote.writable.set()

    rigged(story)


def test_a_file_that_only_this_node_has_is_an_error_where_it_rotted(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        data = pattern(2 * BLOCK)
        await put(rig, "object", data)
        await rig.again()
        flip(rig, "object", BLOCK + 1)
        assert await rig.front.get("object", RangeSpec(0, 99)) == data[:100]
        for _ in range(2):
            with pytest.raises(Corrupt, match="write it again"):
                await rig.front.get("object", RangeSpec(BLOCK, BLOCK + 99))
        assert await rig.front.get("object", RangeSpec(0, 99)) == data[:100]

    rigged(story)


def test_what_the_flusher_finds_is_served_to_nobody(rigged: Rigged) -> None:
    """It compares before it sends; before, it told only the log, and readers went on to get the bytes."""

    async def story(rig: Rig) -> None:
        rig.remote.writable.clear()
        await written(rig, "back")
        data = pattern(BLOCK + 9)
        rig.remote.down = Unavailable("away")
        await put(rig, "object", data)
        assert await rig.front.get("object") == data
        await until(lambda: rig.engine.flusher.totals("remote").error)  # else the first try compares before the flip
        flip(rig, "object", 5)
        rig.remote.down = None
        rig.remote.writable.set()
        rig.clock.ahead_s += 1000  # its next try is due
        rig.engine.flusher.ask("remote", "object")
        await until(lambda: rig.engine.store.bad_blocks == 1)
        with pytest.raises(Corrupt):
            await rig.front.get("object", RangeSpec(0, 99))
        assert await rig.front.get("object", RangeSpec(BLOCK, BLOCK + 8)) == data[BLOCK:]
        assert rig.remote.objects._objects == {}, "nor was it sent"

    rigged(story)
