"""What the simulator's stories found in the product, each as a small story of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from forebay.backends import errors
from forebay.core.errors import ForebayError, Unavailable
from forebay.core.messages import calls
from forebay.node.engine.buckets import Served
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.write import writes
from forebay.node.outcomes import from_node
from tests.patience import PATIENCE_S

from .conftest import MIB, Rig, pattern, until
from .writing import flushed, names, put, written

Rigged = Callable[..., None]


def test_a_home_in_whose_place_another_node_stands_passes_on_what_a_node_asks(rigged: Rigged) -> None:
    """A key of a local bucket was at a node that was not its home any more, and the home answered 404 to a third node:
    it took the question for one about bytes that it had as the home of before."""

    async def story(rig: Rig) -> None:
        rig.engine.cold.is_of_another = lambda bucket, key, position: True
        asked, served = Ask("remote", "key"), await rig.engine.buckets.get("remote")
        assert not rig.engine.cold._asks_for_what_is_here(asked, served), "a client asks"
        from_node.set(True)
        assert rig.engine.cold._asks_for_what_is_here(asked, served)
        in_place = Served(served.bucket, served.backend, of=served)
        assert not rig.engine.cold._asks_for_what_is_here(asked, in_place)

    rigged(story)


def test_a_body_that_its_disk_does_not_sync_is_refused_as_a_disk_that_fails(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered as a bug of the node."""

    def fail(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    async def story(rig: Rig) -> None:
        await written(rig, "back")
        monkeypatch.setattr(writes, "_sync", fail)
        with pytest.raises(Unavailable):
            await put(rig, "key", pattern(2 * MIB, 1))
        assert [usage.state for usage in rig.engine.store.usage()] == ["out"]

    rigged(story)


def test_what_a_stop_brought_back_is_no_base_for_a_write(rigged: Rigged) -> None:
    """A stop of the machine may bring back a version that this node has replaced at the backend since. A write that was
    based on it met this node's own flush there, called it somebody else's, and stepped aside."""

    async def story(rig: Rig) -> None:
        await written(rig, "back")
        await put(rig, "key", pattern(MIB, 1))
        await flushed(rig)
        rig.remote.objects.place("key", pattern(MIB, 2))  # by a flush whose file and note the stop took
        record = rig.engine.store.lookup("remote", "key")
        assert record is not None
        volume = rig.engine.store.home("remote", "key")
        rig.engine.store._put(volume, "remote", "key", msgspec.structs.replace(record, checked_s=0.0), record)
        rig.engine.flush()
        await put(rig, "key", pattern(MIB, 3))
        await flushed(rig)
        assert await names(rig) == ["key"], "nothing stepped aside"
        assert (await rig.remote.objects.head("key")).size_bytes == MIB
        assert rig.remote.objects._objects["key"][1] == pattern(MIB, 3)

    rigged(story)


def test_a_listing_says_so_while_a_delete_waits_for_its_disk(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is gone from the engine's view, and readers still have it: the backend's older version was listed."""

    async def story(rig: Rig) -> None:
        await written(rig, "back")
        await put(rig, "key", b"old")
        await flushed(rig)
        rig.remote.writable.clear()
        await put(rig, "key", b"newer")
        assert await names(rig) == ["key"]
        monkeypatch.setattr(rig.engine.pages._store, "lookup", lambda bucket, key: None)
        with pytest.raises(ForebayError) as refused:
            await rig.front.call("list", calls.ListCall("remote"))
        assert refused.value.kind == "Unavailable"
        monkeypatch.undo()
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local"])
def test_nobody_sees_a_write_whose_record_waits_for_its_disk(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The engine's look-ups have it, what is owed and the fronts do not: a GET showed it, and a listing after it, or
    a front, what was before."""

    async def story(rig: Rig) -> None:
        await written(rig, mode)
        await put(rig, "other", b"settled")
        volume = rig.engine.store.home("remote", "key")
        answers, write = threading.Event(), volume.write

        def held() -> bool:
            assert answers.wait(PATIENCE_S)
            return write()

        with monkeypatch.context() as patch:
            patch.setattr(volume, "write", held)
            writing = asyncio.create_task(put(rig, "key", b"new"))
            await until(lambda: ("remote", "key") in rig.engine.store.unshown)
            with pytest.raises(Unavailable):
                await rig.front.get("key")
            with pytest.raises(Unavailable):
                await names(rig)
            assert not writing.done()
            assert await rig.front.get("other") == b"settled"
        answers.set()
        await writing
        assert await rig.front.get("key") == b"new"
        assert await names(rig) == ["key", "other"]
        assert not rig.engine.store.unshown

    rigged(story)


def test_a_small_object_that_changes_while_its_first_body_arrives_is_read_anew(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was told of the older version yet: a GET without conditions was answered 412."""

    async def story(rig: Rig) -> None:
        rig.remote.place("key", b"one")
        fetch = rig.remote.fetch

        async def fetched(*args: Any, **named: Any) -> Any:
            body = await fetch(*args, **named)
            if rig.remote.objects._objects["key"][1] == b"one":
                rig.remote.place("key", b"second")
                monkeypatch.setattr(type(body), "__aiter__", lambda self: _broken(errors.changed("key")))
            else:
                monkeypatch.undo()
            return body

        monkeypatch.setattr(rig.remote, "fetch", fetched)
        assert await rig.front.get("key") == b"second"

    rigged(story)


async def _broken(error: ForebayError) -> AsyncIterator[bytes]:
    raise error
    yield b""


def test_what_the_sweep_finds_missing_is_no_longer_counted_by_eviction(rigged: Rigged) -> None:
    """It was counted until the node's end, as room that nothing could give back."""

    async def story(rig: Rig) -> None:
        rig.remote.place("key", pattern(2 * MIB, 1))
        await rig.front.get("key")
        await rig.idle()
        record = rig.engine.store.lookup("remote", "key")
        assert record is not None
        os.unlink(rig.engine.store.data_path(record))
        for _ in rig.engine.store.sweep():
            pass
        rig.engine.flush()
        assert rig.engine.store.lookup("remote", "key") is None
        for usage in rig.engine.store.usage():
            assert rig.engine.room._machines[usage.volume_id].used_bytes == usage.weighed_bytes

    rigged(story)
