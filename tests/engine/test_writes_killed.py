"""The engine is killed between the backend's new version and its own: whoever reads after the restart gets the new one.

A kill is played by a copy of the node's directory: what is in the files at that moment is what the next engine finds.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.core import limits
from forebay.core.errors import Denied, NotFound, Precondition, Unavailable
from forebay.core.messages import calls
from forebay.core.types import FRESH_IMMUTABLE, RangeSpec
from forebay.node.engine.write import parts as files
from tests.patience import PATIENCE_S

from .conftest import MIB, Rig, pattern, until
from .test_writes_streamed import Arriving
from .writing import AWAY, delete, put, written

Rigged = Callable[..., None]
Ask = Callable[[Rig], Awaitable[Any]]
SMALL, LARGE, STREAMED = b"new", pattern(5 * MIB, 7), pattern(limits.STREAM_BYTES_MIN + 9, 8)
SIZES = pytest.mark.parametrize("old", [b"old", pattern(6 * MIB, 3)], ids=["inline", "file"])


async def prepared(rig: Rig, old: bytes, freshness_s: float = FRESH_IMMUTABLE) -> None:
    """A bucket written through, with `key` here and confirmed."""
    rig.remote.part_bytes_min = 5 * MIB
    await written(rig, "through", freshness_s=freshness_s)
    rig.remote.place("key", old)
    rig.remote.place("source", SMALL)
    assert named(await rig.front.get("key")) == named(old)
    await rig.idle()
    rig.engine.flush()
    rig.remote.asked.clear()


def named(body: bytes) -> tuple[int, str]:
    """What tells a body from another, and can be printed."""
    return len(body), hashlib.md5(body, usedforsecurity=False).hexdigest()


@asynccontextmanager
async def killed(rig: Rig, dir: Path) -> AsyncIterator[Rig]:
    """The node as it would start again, if the engine of `rig` were killed now."""
    shutil.copytree(rig.settings.dir, dir, ignore=lambda _, found: [name for name in found if name.endswith(".sock")])
    again = Rig(dir, rig.remote, rig.clock)
    await again.start()
    try:
        yield again
        await again.idle()
    finally:
        await again.stop()


async def is_now(rig: Rig, new: bytes | None) -> None:
    """Every way to read the key says so; once confirmed, nobody asks again."""
    if new is None:
        with pytest.raises(NotFound):
            await rig.front.get("key")
        with pytest.raises(NotFound):
            await rig.front.call("stat", calls.StatCall("remote", "key"))
        return
    assert (await rig.front.call("stat", calls.StatCall("remote", "key"))).size_bytes == len(new)
    assert named(await rig.front.get("key")) == named(new)
    await rig.idle()
    rig.remote.asked.clear()
    assert named(await rig.front.get("key")) == named(new)
    assert rig.remote.asked == []


async def _put_small(rig: Rig) -> None:
    await put(rig, "key", SMALL)


async def _put_large(rig: Rig) -> None:
    await put(rig, "key", LARGE)


async def _put_if_match(rig: Rig) -> None:
    state = await rig.front.call("stat", calls.StatCall("remote", "key"))
    await put(rig, "key", SMALL, if_match=f'"{state.etag}"')


async def _put_streamed(rig: Rig) -> None:
    body = Arriving(rig, "key", STREAMED)
    await body.open()
    body.arrive(0, len(body.data))
    await body.finish()


async def _copy(rig: Rig) -> None:
    await rig.front.call("copy", calls.CopyCall("remote", "source", "remote", "key"))


async def _copy_drawn(rig: Rig) -> None:
    await rig.front.call("copy", calls.CopyCall("remote", "source", "remote", "key", tags="a=b"))


async def _multipart(rig: Rig) -> None:
    made = await rig.front.call("upload_create", calls.UploadCreateCall("remote", "key"))
    named = ("remote", "key", made.upload_id)
    md5 = hashlib.md5(SMALL, usedforsecurity=False).hexdigest()
    await rig.front.call("upload_part", calls.UploadPartCall(*named, 1, len(SMALL), md5, body=SMALL))
    await rig.front.call("upload_complete", calls.UploadCompleteCall(*named, [(1, md5, {})]))


WRITES: dict[str, tuple[Ask, str, bytes]] = {
    "put": (_put_small, "put", SMALL),
    "put-large": (_put_large, "put", LARGE),
    "put-if-match": (_put_if_match, "put", SMALL),
    "put-streamed": (_put_streamed, "put", STREAMED),
    "copy": (_copy, "copy", SMALL),
    "copy-drawn": (_copy_drawn, "put", SMALL),
    "multipart": (_multipart, "complete", SMALL),
}


def held_back(rig: Rig, verb: str) -> Callable[[], bool]:
    """From now on no answer to `verb` comes back from the backend; whether one is held."""
    rig.remote.answers[verb] = asyncio.Event()
    return lambda: rig.remote.unheard[verb] > 0


@SIZES
@pytest.mark.parametrize("name", WRITES)
def test_a_write_whose_engine_is_killed_after_the_backend_has_it(
    rigged: Rigged, tmp_path: Path, name: str, old: bytes
) -> None:
    write, verb, new = WRITES[name]

    async def story(rig: Rig) -> None:
        await prepared(rig, old)
        is_held = held_back(rig, verb)
        writing = asyncio.create_task(write(rig))  # type: ignore[arg-type]
        await until(is_held)
        async with killed(rig, tmp_path / "killed") as again:
            await is_now(again, new)
        rig.remote.answers[verb].set()
        await writing
        await is_now(rig, new)

    rigged(story)


@SIZES
def test_a_delete_whose_engine_is_killed_after_the_backend_did_it(rigged: Rigged, tmp_path: Path, old: bytes) -> None:
    async def story(rig: Rig) -> None:
        await prepared(rig, old)
        is_held = held_back(rig, "delete")
        deleting = asyncio.create_task(delete(rig, "key"))
        await until(is_held)
        async with killed(rig, tmp_path / "killed") as again:
            await is_now(again, None)
        rig.remote.answers["delete"].set()
        await deleting
        await is_now(rig, None)

    rigged(story)


def test_an_upload_that_no_disk_here_takes(rigged: Rigged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        await prepared(rig, b"old")

        def no_room(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "no room")

        monkeypatch.setattr(files, "join", no_room)
        is_held = held_back(rig, "complete")
        writing = asyncio.create_task(_multipart(rig))
        await until(is_held)
        async with killed(rig, tmp_path / "killed") as again:
            await is_now(again, SMALL)
        rig.remote.answers["complete"].set()
        await writing
        await is_now(rig, SMALL)

    rigged(story)


# --- readers beside the write ----------------------------------------------------------------------------------------
@SIZES
@pytest.mark.parametrize("gone", [False, True], ids=["put", "delete"])
@pytest.mark.parametrize("freshness_s", [FRESH_IMMUTABLE, 60.0, 0.0])
def test_readers_that_ask_before_the_backend_changes_confirm_nothing_for_later(
    rigged: Rigged, tmp_path: Path, old: bytes, gone: bool, freshness_s: float
) -> None:
    async def story(rig: Rig) -> None:
        await prepared(rig, old, freshness_s)
        rig.remote.writable.clear()
        is_held = held_back(rig, "delete" if gone else "put")
        writing = asyncio.create_task(delete(rig, "key") if gone else put(rig, "key", SMALL))  # type: ignore[arg-type]
        await until(lambda: rig.remote.count("delete" if gone else "put") == 1)
        async with asyncio.timeout(PATIENCE_S):
            assert named(await rig.front.get("key")) == named(old)
            assert named(await rig.front.get("key", revalidate=True)) == named(old)
            assert named(await rig.front.get("key", RangeSpec(1, 2))) == named(old[1:3])
            await rig.front.call("stat", calls.StatCall("remote", "key", revalidate=True))
        await rig.idle()
        rig.engine.flush()
        rig.remote.writable.set()
        await until(is_held)
        async with killed(rig, tmp_path / "killed") as again:
            if freshness_s:
                await is_now(again, None if gone else SMALL)
        rig.remote.answers["delete" if gone else "put"].set()
        await writing

    rigged(story)


def test_readers_beside_a_slow_write_ask_no_more_than_without_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        for freshness_s, asked_max in ((FRESH_IMMUTABLE, 0), (60.0, 0), (0.0, 30)):
            await prepared(rig, b"old", freshness_s)
            rig.remote.writable.clear()
            writing = asyncio.create_task(put(rig, "key", SMALL))
            await until(lambda: rig.remote.count("put") == 1)
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(10):
                    assert set(await asyncio.gather(*(rig.front.get("key") for _ in range(5)))) == {b"old"}
            assert rig.remote.count("check") <= asked_max
            assert rig.remote.count("fetch") == 0
            rig.remote.writable.set()
            await writing
            assert named(await rig.front.get("key")) == named(SMALL)
            await rig.front.call("bucket_delete", calls.BucketNamed("remote"))

    rigged(story)


@pytest.mark.parametrize("old", [pattern(1000, 3), pattern(9 * MIB, 3)], ids=["inline", "file"])
@pytest.mark.parametrize("early", [False, True], ids=["begun-beside", "begun-before"])
def test_what_is_fetched_beside_a_write_is_kept_unconfirmed(
    rigged: Rigged, tmp_path: Path, old: bytes, early: bool
) -> None:
    """Nothing of the key is here when the write begins; its old version lands meanwhile."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        rig.remote.place("key", old)
        rig.remote.writable.clear()
        rig.remote.open.clear()
        is_held = held_back(rig, "put")
        if early:
            reading = asyncio.create_task(rig.front.get("key"))
            await until(lambda: rig.remote.count("fetch") == 1)
        writing = asyncio.create_task(put(rig, "key", SMALL))
        await until(lambda: rig.remote.count("put") == 1)
        if not early:
            reading = asyncio.create_task(rig.front.get("key"))
        rig.remote.open.set()
        async with asyncio.timeout(PATIENCE_S):
            assert named(await reading) == named(old)
            assert named(await rig.front.get("key")) == named(old)
        await rig.idle()
        rig.engine.flush()
        assert rig.engine.store.lookup("remote", "key") is not None, "it is kept"
        assert rig.remote.count("fetch") == 1
        rig.remote.writable.set()
        await until(is_held)
        async with killed(rig, tmp_path / "killed") as again:
            await is_now(again, SMALL)
        rig.remote.answers["put"].set()
        await writing
        await is_now(rig, SMALL)

    rigged(story)


def test_what_was_dropped_a_moment_ago_does_not_come_back_confirmed(rigged: Rigged, tmp_path: Path) -> None:
    """The drop waits for the next flush of the index; the write must not go out before it."""

    async def story(rig: Rig) -> None:
        await prepared(rig, b"old")
        is_held = held_back(rig, "put")
        rig.engine.cold.forget("remote", "key")
        rig.engine._stopping = True  # no flush comes by itself
        assert rig.engine._flushing is not None
        rig.engine._flushing.cancel()
        writing = asyncio.create_task(put(rig, "key", SMALL))
        await until(is_held)
        async with killed(rig, tmp_path / "killed") as again:
            await is_now(again, SMALL)
        rig.engine._stopping = False
        rig.remote.answers["put"].set()
        await writing

    rigged(story)


def test_a_delete_beside_a_read_that_has_landed_nothing_yet(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        old = pattern(9 * MIB, 3)
        rig.remote.place("key", old)
        rig.remote.free_bytes = MIB
        rig.remote.open.clear()
        read = rig.front.open("key")
        await read.until(lambda: read.opened is not None)
        assert rig.engine.store.lookup("remote", "key") is None
        await delete(rig, "key")
        rig.remote.open.set()
        await read.until(lambda: read.error is not None or len(read.data) == len(old))
        read.close()
        await rig.idle()
        assert rig.engine.store.lookup("remote", "key") is None
        await is_now(rig, None)

    rigged(story)


# --- the end of a write that did not happen --------------------------------------------------------------------------
@SIZES
def test_a_write_that_was_refused_leaves_what_is_here_confirmed(rigged: Rigged, old: bytes) -> None:
    async def story(rig: Rig) -> None:
        await prepared(rig, old)
        rig.remote.refuses = Denied("not you")
        with pytest.raises(Denied):
            await put(rig, "key", SMALL)
        with pytest.raises(Denied):
            await delete(rig, "key")
        assert named(await rig.front.get("key")) == named(old)
        assert [verb for verb, *_ in rig.remote.asked] == ["put", "delete"], "nobody asks again"
        rig.remote.refuses = Precondition("it is another")
        with pytest.raises(Precondition):
            await put(rig, "key", SMALL)
        await is_now(rig, old)

    rigged(story)


@SIZES
def test_a_write_of_unknown_outcome_is_asked_about_and_not_fetched_again(rigged: Rigged, old: bytes) -> None:
    async def story(rig: Rig) -> None:
        await prepared(rig, old)
        rig.remote.refuses = AWAY
        with pytest.raises(Unavailable):
            await put(rig, "key", SMALL)
        rig.remote.refuses = None
        assert named(await rig.front.get("key")) == named(old)
        assert [verb for verb, *_ in rig.remote.asked if verb != "head"] == ["put", "check"]
        await is_now(rig, old)

    rigged(story)


def test_an_answer_from_before_a_write_of_unknown_outcome_confirms_nothing(rigged: Rigged) -> None:
    """Two readers asked before the write; they hear `unchanged` after it, when that is not true any more."""

    async def story(rig: Rig) -> None:
        await prepared(rig, b"old")
        gate, plain, answered = asyncio.Event(), rig.remote.check, 0

        async def late(key: str, version: str) -> Any:
            nonlocal answered
            answer = await plain(key, version)
            answered += 1
            if answered <= 2:
                await gate.wait()
            return answer

        rig.remote.check = late  # type: ignore[method-assign]
        reading = asyncio.create_task(rig.front.get("key", revalidate=True))
        looking = asyncio.create_task(rig.front.call("stat", calls.StatCall("remote", "key", revalidate=True)))
        await until(lambda: answered == 2)
        rig.remote.lose_answers = 1
        with pytest.raises(Unavailable):
            await put(rig, "key", SMALL)
        gate.set()
        assert await reading in (b"old", SMALL)
        await looking
        await is_now(rig, SMALL)

    rigged(story)


# --- what it costs ---------------------------------------------------------------------------------------------------
def test_a_key_of_which_nothing_is_here_costs_no_commit(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await prepared(rig, b"old")
        flushes = 0
        index = rig.engine.store.home("remote", "key").index
        plain = index.seal

        def counted() -> int:
            nonlocal flushes
            flushes += index.pending > 0
            return plain()

        index.seal = counted  # type: ignore[method-assign]
        await put(rig, "another", SMALL)
        assert flushes == 1, "its own"
        await put(rig, "key", SMALL)
        assert flushes == 3, "and one before the backend was asked"

    rigged(story)


@pytest.mark.parametrize("listed", [False, True])
def test_what_a_kill_left_in_doubt_is_asked_about_once(rigged: Rigged, tmp_path: Path, listed: bool) -> None:
    """Until the backend answers anything it is better than nothing, and after that it may be known to be old."""

    async def story(rig: Rig) -> None:
        await prepared(rig, b"old")
        record = rig.engine.store.lookup("remote", "key")
        assert record is not None
        rig.engine.store.confirm([("remote", "key", record.version, 0.0)])  # as the window of a write leaves it
        rig.engine.flush()
        async with killed(rig, tmp_path / "killed") as again:
            rig.remote.place("key", SMALL)
            if listed:
                page = await again.front.call("list", calls.ListCall("remote"))
                assert len(SMALL) in [entry.size_bytes for entry in page.entries if entry.key == "key"]
            rig.remote.down = AWAY
            if listed:
                with pytest.raises(Unavailable):
                    await again.front.get("key")
            else:
                assert await again.front.get("key") == b"old", "better than nothing"
            rig.remote.down = None
            rig.clock.ahead_s = 10
            await is_now(again, SMALL)

    rigged(story)
