"""Objects that a HEAD asked to have here: in line, fetched in the background, counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.errors import NotFound, Unavailable
from forebay.core.messages.calls import ObjectNamed
from forebay.core.types import Bucket
from forebay.node.engine.read import prestage
from tests.patience import until_async as until

from .conftest import MIB, Rig, pattern

Rigged = Callable[..., None]


async def ask(rig: Rig, key: str, bucket: str = "remote") -> None:
    await rig.front.call("prestage", ObjectNamed(bucket, key))


def counted(rig: Rig) -> dict[str, int]:
    return dict(rig.engine.tally.prestaged)


def test_what_was_asked_for_is_here_before_it_is_read(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        large, small = pattern(10 * MIB + 5), b"small"
        rig.remote.place("large", large)
        rig.remote.place("small", small)
        await ask(rig, "large")
        await ask(rig, "small")
        await until(lambda: counted(rig) == {"fetched": 2})
        assert rig.engine.tally.prestaged_bytes == len(large) + len(small)
        rig.remote.down = Unavailable("away")
        assert await rig.front.get("large") == large
        assert await rig.front.get("small") == small
        for key in ("large", "small"):
            await ask(rig, key)
        assert counted(rig) == {"fetched": 2, "present": 2}
        assert rig.engine.prestaging.waiting == 0

    rigged(story)


def test_an_object_that_may_have_changed_is_asked_about_and_fetched_anew(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("object", b"old")
        await ask(rig, "object")
        await until(lambda: counted(rig) == {"fetched": 1})
        rig.clock.ahead_s = 100
        rig.remote.place("object", b"new and longer")
        await ask(rig, "object")
        await until(lambda: counted(rig) == {"fetched": 2})
        fetched = rig.remote.count("fetch")
        assert await rig.front.get("object") == b"new and longer"
        assert rig.remote.count("fetch") == fetched

    rigged(story, freshness_s=60.0)


def test_a_bucket_has_few_under_way_and_no_name_twice(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        keys = [f"key-{number:03}" for number in range(100)]
        for key in keys:
            rig.remote.place(key, key.encode())
        rig.remote.open.clear()
        for key in (*keys, *keys):
            await ask(rig, key)
        staging = rig.engine.prestaging
        assert staging.waiting == 100
        await until(lambda: rig.remote.count("fetch") == prestage.AT_ONCE)
        await rig.engine.buckets.put(Bucket("other", "memory://remote"))
        rig.remote.free_bytes = 100
        await ask(rig, "key-000", "other")
        await until(lambda: counted(rig) == {"fetched": 1})
        assert staging.waiting == 100, "a line that stands holds up no other"
        rig.remote.open.set()
        await until(lambda: staging.waiting == 0)
        assert counted(rig) == {"fetched": 101}
        assert rig.remote.count("fetch") == 101

    rigged(story)


def test_who_asks_while_the_line_is_full_waits_for_a_place(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        rig.engine.prestaging._places = asyncio.Semaphore(2)
        for key in "abcd":
            rig.remote.place(key, key.encode())
        rig.remote.open.clear()
        await ask(rig, "a")
        await ask(rig, "b")
        late = asyncio.create_task(ask(rig, "c"))
        await asyncio.sleep(0)
        await rig.front.call("buckets")  # answered after the one before was put to wait
        monkeypatch.setattr(prestage, "PLACE_WAIT_S", 0.02)
        await ask(rig, "d")
        assert counted(rig) == {"refused": 1}
        assert not late.done()
        rig.remote.open.set()
        await late
        await until(lambda: counted(rig) == {"refused": 1, "fetched": 3})
        assert rig.remote.count("fetch") == 3

    rigged(story)


def test_what_cannot_be_fetched_is_counted_and_forgotten(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await ask(rig, "nothing")
        await until(lambda: counted(rig) == {"failed": 1})
        rig.remote.place("object", pattern(6 * MIB))
        rig.remote.cut_after = MIB
        await ask(rig, "object")
        await until(lambda: counted(rig) == {"failed": 2})
        rig.remote.cut_after = None
        await ask(rig, "object")
        await until(lambda: counted(rig) == {"failed": 2, "fetched": 1})
        with pytest.raises(NotFound):
            await ask(rig, "object", "nowhere")

    rigged(story)


def test_a_stop_forgets_the_line(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for number in range(40):
            rig.remote.place(f"key-{number}", b"x")
        rig.remote.open.clear()
        for number in range(40):
            await ask(rig, f"key-{number}")
        before = rig.engine
        await rig.again()
        assert before.prestaging.waiting == 0
        assert rig.engine.prestaging.waiting == 0
        rig.remote.open.set()

    rigged(story)
