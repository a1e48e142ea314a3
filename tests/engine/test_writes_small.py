"""Small writes that wait for nothing but their commit go without a task: what they do is what the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from forebay.core import limits
from forebay.core.errors import Bug, ForebayError, NotFound, Unavailable
from forebay.core.messages.calls import PutCall, Written
from forebay.core.record import State
from tests.store.owned_objects import notes_of

from .conftest import MIB, Front, Rig, pattern, until
from .writing import as_written, delete, flushed, names, put, written

Rigged = Callable[..., None]
BODY = pattern(4096, 1)
VARYING = ("object_id", "version", "modified_s", "checked_s", "head")


def small(key: str, body: bytes = BODY, **more: Any) -> PutCall:
    return PutCall("remote", key, len(body), body=body, **more)


async def remembered(rig: Rig, call: PutCall) -> None:
    """The first write of a bucket has to wait: the node remembers, outside of the volume, that it owes something."""
    await rig.engine.known.note(rig.engine.store, call.bucket, call.key)


async def begun(rig: Rig, call: PutCall) -> Written:
    """As a front's put; it must need no task."""
    done: asyncio.Future[Written | ForebayError] = asyncio.get_running_loop().create_future()
    await remembered(rig, call)
    assert rig.engine.writes.begin(call, done.set_result)
    outcome = await done
    if isinstance(outcome, ForebayError):
        raise outcome
    return outcome


def kept(rig: Rig, key: str) -> tuple[Any, Any]:
    """Record and note of a key, but for what differs from write to write."""
    record = rig.engine.store.lookup("remote", key)
    assert record is not None
    shown = {name: value for name, value in msgspec.structs.asdict(record).items() if name not in VARYING}
    owed = {each.key: each for each in notes_of(rig.engine.store)}.get(key)
    if owed is None:
        return shown, None
    note = msgspec.structs.replace(owed.note, seq=0, object_id=0, since_s=0.0)
    return shown, (owed.durable, note)


@pytest.mark.parametrize("mode", ["back", "local"])
@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_both_ways_leave_the_same(rigged: Rigged, mode: str, durability: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode, durability=durability, pinned=("kept/",), freshness_s=0.0)
        rig.remote.writable.clear()
        for more in (
            {},
            {"headers": (("content-type", "a/b"), ("x-amz-meta-x", "1"))},
            {"tags": "a=1", "md5": "0" * 32},
            {"hash128": "1" * 32},
        ):
            for body in (b"", b"x", BODY, pattern(limits.INLINE_BYTES_MAX, 2)):
                first = await begun(rig, small("kept/one", body, **more))
                second = await rig.engine.writes.put(small("kept/other", body, **more))
                assert (first.etag, first.size_bytes) == (second.etag, second.size_bytes)
                ours, others = kept(rig, "kept/one"), kept(rig, "kept/other")
                assert ours == others
                assert ours[0]["state"] & State.PINNED
                assert await rig.front.get("kept/one") == body
        await flushed(rig)
        if mode == "back":
            assert (await rig.remote.objects.head("kept/one")).size_bytes == limits.INLINE_BYTES_MAX

    rigged(story)


def test_what_would_have_to_wait_is_left_alone(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        writes, told = rig.engine.writes, list[Any]()
        groups = writes.commits.groups
        big = pattern(limits.INLINE_BYTES_MAX + 1)
        for call in (
            small("k", if_match="e"),
            small("k", if_none_match="*"),
            small("k", big),
            small(""),
            small("k" * 1025),
            PutCall("remote", "k", 1, path="/nowhere"),
            PutCall("remote", "k", 2, body=b"x"),
            PutCall("nobody", "k", 1, body=b"x"),
        ):
            assert not writes.begin(call, told.append)
        async with writes.lock("remote", "k"):
            assert not writes.begin(small("k"), told.append)
        async with writes.quiet("remote"):
            assert not writes.begin(small("k"), told.append)
        await written(rig, "through")
        assert not writes.begin(small("k"), told.append)
        assert (told, len(writes.locks), writes.commits.groups) == ([], 0, groups)
        assert await names(rig) == []

    rigged(story)


def test_a_key_that_is_being_written_is_waited_for_in_turn(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        bodies = [b"%d" % number for number in range(8)]
        answers = await asyncio.gather(*(put(rig, "key", body) for body in bodies))
        assert len({answer.version for answer in answers}) == len(bodies)
        assert await rig.front.get("key") == bodies[-1], "they came in this order"
        assert len(rig.engine.writes.locks) == 0
        await delete(rig, "key")
        with pytest.raises(NotFound):
            await rig.front.get("key")

    rigged(story)


def test_a_front_that_is_gone_has_written_all_the_same(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        other = Front()
        await other.connect(rig.settings, 2)
        waiting = [asyncio.ensure_future(put(rig, f"k{number}", BODY, front=other)) for number in range(5)]
        commits = rig.engine.writes.commits
        before = commits.groups
        await until(lambda: commits.groups > before)
        other.vanish()
        await until(lambda: len(rig.engine.writes.locks) == 0)
        async with rig.engine.writes.quiet("remote"):
            assert await names(rig) == [f"k{number}" for number in range(5)]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await other.aclose()

    rigged(story)


def test_a_bucket_is_changed_when_its_small_writes_have_ended(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        told: list[Any] = []
        await remembered(rig, small("k"))
        assert rig.engine.writes.begin(small("k"), told.append)
        async with rig.engine.writes.quiet("remote"):
            assert len(told) == 1, "it was half-way, and is no more"
        assert isinstance(told[0], Written)
        assert rig.engine.writes.begin(small("k"), told.append)
        await rig.engine.writes.aclose()
        assert len(told) == 2
        assert not rig.engine.writes.begin(small("k"), told.append), "the node is stopping"

    rigged(story)


def test_what_a_commit_meets_is_told_and_the_key_is_free(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        store = rig.engine.store
        (volume,) = store.usable()

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        for broken, error in ((full, Unavailable), (lambda *_: 1 / 0, Bug)):
            with monkeypatch.context() as patch:
                patch.setattr(volume.durable, "commit", broken)
                with pytest.raises(error):
                    await put(rig, "k", BODY)
            assert len(rig.engine.writes.locks) == 0
            with pytest.raises(NotFound):
                await rig.front.get("k")
            volume.state = "ok"
        with monkeypatch.context() as patch:
            patch.setattr(store, "prepare", lambda changes: 1 / 0)
            with pytest.raises(Bug):
                await put(rig, "k", BODY)
        await put(rig, "k", BODY)
        assert await rig.front.get("k") == BODY

    rigged(story)


def test_a_bucket_that_owes_all_it_may_is_waited_for(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await rig.front.call("bucket_put", as_written(rig, "back", dirty_bytes_max=MIB))
        rig.remote.writable.clear()
        count = MIB // limits.INLINE_BYTES_MAX
        for number in range(count):
            await begun(rig, small(f"k{number}", pattern(limits.INLINE_BYTES_MAX, number)))
        told: list[Any] = []
        assert not rig.engine.writes.begin(small("more"), told.append)
        assert len(rig.engine.writes.locks) == 0
        counts = rig.engine.flusher.metrics
        waits = asyncio.ensure_future(put(rig, "more", BODY))
        await until(lambda: any("wait" in name and value for name, value in counts().items()))
        assert not waits.done()
        await flushed(rig)
        await waits
        assert (await begun(rig, small("more"))).size_bytes == len(BODY)

    rigged(story)
