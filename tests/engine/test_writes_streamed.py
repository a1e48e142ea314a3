"""Bodies that go on to the backend while they arrive: overlap, giving up, and nothing half visible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import xxhash

from forebay.backends.lost_answers import whole_etag
from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import NotFound, Precondition
from forebay.core.machines.delivery import part_size
from forebay.core.messages import calls, wire

from .conftest import MIB, Front, Rig, pattern, until
from .writing import put, temp_files, written

Rigged = Callable[..., None]


class Arriving:
    """A body that a front receives piece by piece."""

    def __init__(self, rig: Rig, key: str, data: bytes, front: Front | None = None) -> None:
        self.rig, self.key, self.data, self.front = rig, key, data, front or rig.front
        self.path = rig.engine.index.incoming("remote", key)
        self.put = 0

    async def open(self, **more: str) -> None:
        self.file = open(self.path, "xb")  # noqa: SIM115
        call = calls.PutOpenCall("remote", self.key, len(self.data), self.path, **more)
        self.put = (await self.front.call("put_open", call)).put
        assert self.put

    def arrive(self, start: int, end: int) -> None:
        self.file.write(self.data[start:end])
        self.file.flush()
        self.front.post(wire.Grown(self.put, end))

    async def finish(self, **more: str) -> calls.Written:
        self.file.close()
        step = limits.BLOCK_BYTES
        sums = [xxhash.xxh3_64_intdigest(self.data[at : at + step]) for at in range(0, len(self.data), step)]
        call = calls.PutCall("remote", self.key, len(self.data), path=self.path, sums=sums, put=self.put, **more)
        return await self.front.call("put", call)  # type: ignore[no-any-return]


@pytest.mark.parametrize("uploads", [False, True])
def test_a_large_body_is_on_its_way_before_it_is_here(rigged: Rigged, uploads: bool) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        rig.remote.part_bytes_min = 5 * MIB if uploads else 0
        await written(rig, "through", freshness_s=9.0)  # opened anew, as it is now
        data = pattern((70 if uploads else 9) * MIB)
        body = Arriving(rig, "key", data)
        await body.open()
        await until(lambda: rig.remote.count("begin" if uploads else "put") == 1)
        body.arrive(0, 40 * MIB)
        if uploads:
            await until(lambda: rig.remote.count("part") >= 1)
        body.arrive(40 * MIB, len(data)) if uploads else None
        await asyncio.sleep(0.02)
        with pytest.raises(NotFound):
            await rig.remote.objects.head("key")  # whole or not, nobody said yet that it is right
        answer = await body.finish()
        assert (await rig.remote.objects.head("key")).version == answer.version
        assert (rig.remote.count("put"), rig.remote.count("part")) == ((0, 3) if uploads else (1, 0))
        fetched = rig.remote.count("fetch")
        assert await rig.front.get("key") == data
        assert rig.remote.count("fetch") == fetched
        assert len(rig.engine.streams) == 0
        assert temp_files(rig) == []

    rigged(story)


@pytest.mark.parametrize("end", ["gave up", "vanished", "engine stops"])
@pytest.mark.parametrize("uploads", [False, True])
def test_a_body_that_is_given_up_was_never_there(rigged: Rigged, uploads: bool, end: str) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.part_bytes_min = 5 * MIB if uploads else 0
        await written(rig, "through")
        before = await put(rig, "key", b"before")
        other = Front()
        await other.connect(rig.settings, 2)
        body = Arriving(rig, "key", pattern((70 if uploads else 9) * MIB), other)
        await body.open()
        body.arrive(0, len(body.data))
        await until(lambda: rig.remote.count("part" if uploads else "put") >= (3 if uploads else 2))
        if end == "gave up":
            other.post(wire.GaveUp(body.put))
        elif end == "vanished":
            other.vanish()
        if end == "engine stops":
            await rig.engine.streams.aclose()
        await until(lambda: len(rig.engine.streams) == 0)
        await rig.engine.streams.aclose()
        await rig.engine.writes.through.aclose()
        assert (await rig.remote.objects.head("key")).version == before.version
        assert await rig.remote.objects.list_uploads("") == []
        assert rig.remote.cancelled >= (0 if uploads else 1)
        assert await rig.front.get("key") == b"before"
        body.file.close()
        await asyncio.gather(other.aclose(), return_exceptions=True)

    rigged(story)


def test_conditions_are_judged_before_the_body_and_again_after_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        first = await put(rig, "key", b"one")
        refused = Arriving(rig, "key", pattern(9 * MIB))
        with pytest.raises(Precondition):
            await refused.open(if_none_match="*")
        refused.file.close()
        body = Arriving(rig, "key", pattern(9 * MIB))
        await body.open(if_match=first.etag)
        body.arrive(0, 9 * MIB)
        await put(rig, "key", b"two")
        with pytest.raises(Precondition):
            await body.finish(if_match=first.etag)
        assert await rig.front.get("key") == b"two"
        assert rig.remote.objects._find("key")[1] == b"two"
        assert len(rig.engine.streams) == 0

    rigged(story)


def test_two_bodies_of_one_key_may_arrive_together_and_the_last_to_end_stays(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        slow, quick = Arriving(rig, "key", pattern(9 * MIB, 1)), Arriving(rig, "key", pattern(8 * MIB, 2))
        await slow.open()
        slow.arrive(0, MIB)
        await quick.open()
        quick.arrive(0, 8 * MIB)
        await quick.finish()
        assert await rig.front.get("key") == quick.data
        await put(rig, "key", b"three")
        slow.arrive(MIB, 9 * MIB)
        await slow.finish()
        assert await rig.front.get("key") == slow.data
        assert rig.remote.objects._find("key")[1] == slow.data

    rigged(story)


def test_a_number_that_another_engine_gave_is_a_put_from_the_file(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        body = Arriving(rig, "key", pattern(9 * MIB))
        body.file, body.put = open(body.path, "xb"), 4711  # noqa: SIM115
        body.file.write(body.data)
        await body.finish()
        assert await rig.front.get("key") == body.data

    rigged(story)


def test_small_bodies_and_other_modes_are_not_streamed(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        path = rig.engine.index.incoming("remote", "key")
        for mode, size in (("through", MIB), ("back", 9 * MIB)):
            await written(rig, mode)
            assert (await rig.front.call("put_open", calls.PutOpenCall("remote", "key", size, path))).put == 0

    rigged(story)


def test_the_link_does_not_rest_while_the_backend_thinks(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.part_bytes_min = 5 * MIB
        await written(rig, "through")
        sending: set[int] = set()
        sent: set[int] = set()
        may_leave, may_answer = [asyncio.Event() for _ in range(15)], asyncio.Event()
        take = rig.remote.put_part

        async def put_part(key: str, upload_id: str, number: int, part: Body) -> str:
            sending.add(number)
            await may_leave[number].wait()
            await part.ready(part.size_bytes)
            sending.discard(number)
            sent.add(number)
            await may_answer.wait()
            return await take(key, upload_id, number, part)

        monkeypatch.setattr(rig.remote, "put_part", put_part)
        data = pattern(70 * MIB)
        body = Arriving(rig, "key", data)
        await body.open()
        body.arrive(0, len(data))
        answer = asyncio.create_task(body.finish())
        await until(lambda: sending == {1, 2, 3, 4})
        may_leave[2].set()
        await until(lambda: sending == {1, 3, 4, 5})  # none was answered yet
        for each in may_leave:
            each.set()
        await until(lambda: len(sent) == 8)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (sent, sending) == (set(range(1, 9)), set())  # so many unanswered ones are enough
        may_answer.set()
        await answer
        assert await rig.front.get("key") == data

    monkeypatch.setattr(limits, "FLUSH_PART_BYTES", 5 * MIB)
    rigged(story)


def test_parts_are_few_whole_and_within_what_a_service_takes() -> None:
    for size in (64 * MIB, 5 * 1024 * MIB, limits.OBJECT_BYTES_MAX):
        part = part_size(size, 5 * MIB)
        assert part % limits.BLOCK_BYTES == 0
        assert -(-size // part) <= limits.PARTS_MAX
    assert whole_etag([(1, '"d41d8cd98f00b204e9800998ecf8427e"')]) == "59adb24ef3cdbe0297f05b395827453f-1"
    assert whole_etag([(1, "part-5")]) == ""


def test_uploads_in_use_are_not_told_as_left_behind(rigged: Rigged) -> None:
    """An upload of the key began, and nobody heard its id: it may be a stranger's, but not the client's own."""

    async def story(rig: Rig) -> None:
        rig.remote.part_bytes_min = 5 * MIB
        await written(rig, "through")
        await rig.front.call("upload_create", calls.UploadCreateCall("remote", "key"))
        body = Arriving(rig, "key", pattern(70 * MIB))
        await body.open()
        await until(lambda: rig.remote.count("begin") == 2)
        buckets = rig.engine.buckets
        await until(lambda: len(buckets.heard) == 2)
        stranger = await rig.remote.objects.begin_upload("key")
        assert len(await rig.remote.objects.list_uploads("")) == 3
        await buckets.leave_uploads(await buckets.get("remote"), "key")
        assert buckets.counters["remote"].uploads_left == 1, stranger
        body.file.close()
        rig.front.post(wire.GaveUp(body.put))
        await until(lambda: len(buckets.heard) == 1)

    rigged(story)
