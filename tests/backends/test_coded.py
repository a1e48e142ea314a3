"""A bucket in slices: nodes fall silent, lose slices and come back, and what is read is what was put, or refused."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from forebay.backends.coded.backend import STALE_S
from forebay.backends.coded.codec import Codec
from forebay.backends.seam import Body
from forebay.core.cluster.coding import ETAG_HEADER, TIME_HEADER, Code, slice_name
from forebay.core.errors import Invalid, NotFound, Precondition, Unavailable
from forebay.core.types import RangeSpec
from forebay.ports.clock import SystemClock
from tests.backends.backend_places import CodedPlace, list_all, read, run
from tests.patience import PATIENCE_S

MIB = 1 << 20


def some(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


async def put(place: CodedPlace, key: str, data: bytes) -> str:
    return (await place.open().put(key, Body(len(data), data))).version


async def settled(place: CodedPlace, count: int) -> None:
    """Until so many slices are left."""
    async with asyncio.timeout(PATIENCE_S):
        while len(place.nodes.keys()) != count:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("code", [(2, 1), (4, 2), (3, 3), (8, 3), (16, 4)], ids=str)
def test_any_k_slices_give_all_others_in_any_range(code: tuple[int, int]) -> None:
    codec, chance = Codec(Code(*code)), random.Random(5)
    for size_bytes in (1, 7, 1000, code[0] * 4096, code[0] * 5000 + 3):
        data = some(size_bytes)
        made = codec.slices_of(data)
        length = -(-size_bytes // code[0])
        assert [len(each) for each in made] == [length] * sum(code)
        assert b"".join(made[: code[0]])[:size_bytes] == data
        for _ in range(20):
            known = chance.sample(range(sum(code)), code[0])
            start = chance.randrange(length)
            end = chance.randrange(start, length) + 1
            lost = [number for number in range(sum(code)) if number not in known]
            found = codec.restore({number: made[number][start:end] for number in known}, lost)
            assert found == {number: made[number][start:end] for number in lost}


def test_as_many_nodes_may_be_silent_as_the_code_says_and_no_more() -> None:
    place = CodedPlace()

    async def story() -> None:
        data = {f"key-{number}": some(number * 3 * MIB + 5, number) for number in range(1, 7)}
        for key, body in data.items():
            await put(place, key, body)
        backend = place.open()
        chance = random.Random(3)
        for turn in range(12):
            down = chance.sample(sorted(place.nodes.nodes), 2)
            place.nodes.silent, place.nodes.away = ({down[0]}, {down[1]}) if turn % 2 else (set(down), set())
            key = chance.choice(sorted(data))
            start = chance.randrange(len(data[key]))
            end = chance.randrange(start, len(data[key]))
            assert await read(backend, key, RangeSpec(start, end)) == data[key][start : end + 1]
        place.nodes.silent, place.nodes.away = {"node-0", "node-1"}, {"node-2"}
        with pytest.raises(Unavailable, match="only 3 can be read, and 4 are needed"):
            await read(backend, "key-6")
        place.nodes.silent, place.nodes.away = set(), set()
        assert await read(backend, "key-6") == data["key-6"]

    run(story())


def test_a_slice_that_is_missing_or_too_short_is_computed_from_others() -> None:
    place = CodedPlace()

    async def story() -> None:
        data = some(9 * MIB)
        version = await put(place, "key", data)
        entry, _ = await place.bare().entry("key")
        assert entry.generation == version
        gone, short = slice_name(version, 0, 0), slice_name(version, 0, 2)
        place.nodes.nodes[entry.places[0]].remove(gone)
        place.nodes.nodes[entry.places[2]].place(short, b"cut off")
        assert await read(place.open(), "key") == data
        assert place.nodes.failures == [], "who lacks a slice is not silent"

    run(story())


def test_with_fewer_nodes_each_has_more_and_with_too_few_nothing_is_coded() -> None:
    place = CodedPlace(count=3)

    async def story() -> None:
        data = some(2 * MIB)
        await put(place, "key", data)
        entry, _ = await place.bare().entry("key")
        assert sorted(map(entry.places.count, place.nodes.nodes)) == [2, 2, 2]
        place.nodes.away = {"node-1"}
        assert await read(place.open(), "key") == data
        before = place.nodes.keys()
        with pytest.raises(Unavailable, match="need 3 nodes that take some, and there are 2"):
            await put(place, "new", data)
        assert place.nodes.keys() == before
        await put(place, "small", b"in its entry")
        with pytest.raises(NotFound):
            await read(place.open(), "new")

    run(story())


def test_what_is_replaced_or_deleted_leaves_no_slices() -> None:
    place = CodedPlace()

    async def story() -> None:
        backend = place.open()
        first = await put(place, "key", some(40 * MIB))
        assert len(place.nodes.keys()) == 3 * 6
        second = await put(place, "key", some(MIB, 1))
        await settled(place, 6)
        with pytest.raises(Precondition):
            await backend.fetch("key", version=first)
        with pytest.raises(Precondition):
            await backend.delete("key", expect=first)
        assert (await backend.head("key")).version == second
        await put(place, "key", b"small")
        await settled(place, 0)
        await put(place, "key", some(MIB, 2))
        await backend.delete("key")
        await settled(place, 0)
        await backend.delete("key")

    run(story())


def test_a_put_that_fails_in_between_leaves_what_was_there() -> None:
    place = CodedPlace()

    async def story() -> None:
        data = some(20 * MIB)
        await put(place, "key", data)
        parts = 0

        async def ready(upto: int) -> None:
            nonlocal parts
            parts += 1
            if parts == 2:
                place.nodes.silent = {"node-4"}

        new = some(50 * MIB, 1)
        with pytest.raises(Unavailable, match="node node-4 keeps no slice"):
            await place.bare().put("key", Body(len(new), new, ready=ready))
        place.nodes.silent = set()
        assert await read(place.open(), "key") == data

    run(story())


def test_a_flush_says_which_etag_and_time_clients_were_told() -> None:
    place = CodedPlace()

    async def story() -> None:
        for key, data in (("small", b"small"), ("large", some(3 * MIB))):
            told = ((ETAG_HEADER, "etag-3"), (TIME_HEADER, "1700000000.9996"), ("x-amz-meta-color", "red"))
            await place.open().put(key, Body(len(data), data), headers=told, tags="a=1")
            info = await place.open().head(key)
            assert (info.etag, info.modified_s) == ("etag-3", 1700000000.999)
            assert ("x-amz-meta-color", "red") in info.headers
            assert not [name for name, _ in info.headers if name.startswith("x-amz-meta-forebay")]
            (listed,) = (await place.open().list_page(key, "", "", 10)).entries
            assert (listed.etag, listed.modified_s, listed.size_bytes) == ("etag-3", info.modified_s, len(data))
            assert await place.open().read_tags(key) == "a=1"

    run(story())


def test_what_a_stranger_wrote_beside_entries_is_not_listed() -> None:
    place = CodedPlace()

    async def story() -> None:
        await put(place, "ours", b"small")
        place.entries.place("theirs", b"anything", ((ETAG_HEADER, "no entry"),))
        assert await list_all(place.open()) == (["ours"], [])
        with pytest.raises(Invalid, match="cannot be read"):
            await place.open().head("theirs")

    run(story())


def test_of_puts_side_by_side_one_is_there_whole() -> None:
    place = CodedPlace()

    async def story() -> None:
        bodies = [some(3 * MIB + number, number) for number in range(6)]
        versions = await asyncio.gather(*(put(place, "key", body) for body in bodies), return_exceptions=True)
        info = await place.open().head("key")
        assert info.version in versions
        assert await read(place.open(), "key") == bodies[versions.index(info.version)]
        await settled(place, 6)
        assert [isinstance(each, str | Precondition) for each in versions] == [True] * 6

    run(story())


def test_a_read_goes_on_while_slices_move_and_ends_where_the_object_is_replaced() -> None:
    place = CodedPlace(count=9)

    async def story() -> None:
        data, bare = some(60 * MIB), place.bare()
        await bare.put("key", Body(len(data), data))
        fetch = await bare.fetch("key")
        got = [await fetch.__anext__()]
        entry, version = await bare.entry("key")
        spare = [node for node in place.nodes.nodes if node not in entry.places]
        for number in range(3):
            for group in range(entry.groups):
                name = slice_name(entry.generation, group, number)
                old = place.nodes.nodes[entry.places[number]]
                place.nodes.nodes[spare[number]].place(name, await read(old, name))
        moved = msgspec.structs.replace(entry, places=(*spare, *entry.places[3:]), revision=entry.revision + 1)
        await bare.put_entry("key", moved, version)
        names = [(i, slice_name(entry.generation, g, i)) for i in range(3) for g in range(entry.groups)]
        await bare.drop((entry.places[number], name) for number, name in names)
        got += [chunk async for chunk in fetch]
        assert b"".join(got) == data

        fetch = await bare.fetch("key")
        await fetch.__anext__()
        await bare.put("key", Body(5, b"other"))
        await settled(place, 0)
        with pytest.raises(Precondition, match="has changed"):
            [chunk async for chunk in fetch]

    run(story())


class Jump(SystemClock):
    """Hours pass when it is told so."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


def test_a_put_that_was_held_up_for_hours_names_no_slices() -> None:
    """Nodes may have begun to delete them: the object would be there, and its bytes not."""
    place, clock = CodedPlace(), Jump()

    async def story() -> None:
        data, bare = some(40 * MIB), place.bare()
        bare._clock = clock
        for late in (1, 2, 3):
            groups = 0

            async def ready(upto: int, late: int = late) -> None:
                nonlocal groups
                groups += 1
                if groups == late:  # this process stands still for hours, and then goes on
                    clock.ahead_s += STALE_S + 1

            with pytest.raises(Unavailable, match="held up for too long"):
                await bare.put("key", Body(len(data), data, ready=ready))
            await settled(place, 0)
        await bare.put("key", Body(len(data), data))
        assert await read(bare, "key") == data

    run(story())
