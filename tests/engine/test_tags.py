"""Tags of objects that are there: read where the truth is, and changed without rewriting a byte."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from forebay.core import limits
from forebay.core.errors import NotFound, Unavailable
from forebay.core.messages import calls

from .conftest import MIB, Rig, pattern, until
from .writing import delete, flushed, put, written

Rigged = Callable[..., None]
SIZES = [5, limits.INLINE_BYTES_MAX + 1, 5 * MIB + 7]


async def tags(rig: Rig, key: str = "key") -> str:
    return (await rig.front.call("tags", calls.ObjectNamed("remote", key))).tags  # type: ignore[no-any-return]


async def tag(rig: Rig, tags: str, key: str = "key") -> None:
    await rig.front.call("tag", calls.TagCall("remote", key, tags))


async def shown(rig: Rig, key: str = "key") -> dict[str, str]:
    """The stored headers as a stat shows them."""
    return (await rig.front.call("stat", calls.StatCall("remote", key))).headers  # type: ignore[no-any-return]


def file_of(rig: Rig, key: str = "key") -> tuple[int, float] | None:
    """Inode and time of change of an object's bytes."""
    record = rig.engine.index.lookup("remote", key)
    assert record is not None
    path = rig.engine.store.data_path(record)
    if not path:
        return None
    seen = os.stat(path)
    return seen.st_ino, seen.st_mtime


@pytest.mark.parametrize("mode", ["back", "local", "through"])
@pytest.mark.parametrize("size", SIZES)
def test_tags_change_and_nothing_else_does(rigged: Rigged, mode: str, size: int) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        if mode == "back":
            rig.remote.writable.clear()
        data = pattern(size, 3)
        answer = await put(rig, "key", data, headers=(("x-amz-meta-a", "b"),), tags="stage=raw")
        assert await tags(rig) == "stage=raw"
        before = file_of(rig)
        await tag(rig, "stage=done&by=me")
        assert await tags(rig) == "stage=done&by=me"
        headers = await shown(rig)
        assert (headers["x-amz-tagging-count"], headers["x-amz-meta-a"]) == ("2", "b")
        record = rig.engine.index.lookup("remote", "key")
        assert record is not None
        assert (record.version, record.etag) == (answer.version, answer.etag)
        assert await rig.front.get("key") == data
        assert file_of(rig) == before
        await tag(rig, "")
        assert await tags(rig) == ""
        assert "x-amz-tagging-count" not in await shown(rig)
        await tag(rig, "last=1")
        await flushed(rig)
        if mode != "local":
            assert rig.remote.objects.tags["key"] == "last=1"
        if mode == "through":
            assert rig.remote.count("put") == 1, "the bytes went once"

    rigged(story)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_tags_of_what_is_owed_outlive_a_stop(rigged: Rigged, size: int, durability: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", durability=durability)
        rig.remote.writable.clear()
        data = pattern(size, 4)
        await put(rig, "key", data)
        await tag(rig, "a=b")
        await rig.again(clean=False)
        assert await tags(rig) == "a=b"
        assert (await shown(rig))["x-amz-tagging"] == "a=b"
        assert await rig.front.get("key") == data
        await flushed(rig)
        assert rig.remote.objects.tags["key"] == "a=b"
        await rig.again()
        assert (await shown(rig))["x-amz-tagging"] == "a=b", "clean now, and still known"

    rigged(story)


def test_tags_of_a_local_object_outlive_a_stop(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        for size in SIZES:
            await put(rig, f"key-{size}", pattern(size))
            await tag(rig, "a=b", f"key-{size}")
        await rig.again(clean=False)
        for size in SIZES:
            assert await tags(rig, f"key-{size}") == "a=b"
            assert await rig.front.get(f"key-{size}") == pattern(size)

    rigged(story)


def test_tags_that_change_while_a_flush_is_under_way_are_flushed_after_it(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", dirty_age_max_s=3600.0)
        rig.remote.writable.clear()
        await put(rig, "key", b"data", tags="a=1")
        flushing = rig.engine.flusher
        await until(lambda: rig.remote.count("put") == 1)
        rig.remote.writable.set()
        await tag(rig, "a=2")
        assert await tags(rig) == "a=2"
        await flushing.flush("remote")
        assert rig.remote.objects.tags["key"] == "a=2"
        assert await rig.front.get("key") == b"data"
        assert flushing.find("remote", "key") is None

    rigged(story)


def test_the_backend_has_the_truth_about_what_it_has(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        rig.remote.place("key", b"theirs")
        rig.remote.objects.tags["key"] = "set=elsewhere"
        assert await tags(rig) == "set=elsewhere"
        assert await rig.front.get("key") == b"theirs"
        await tag(rig, "set=here")
        assert rig.remote.objects.tags["key"] == "set=here"
        assert (await shown(rig))["x-amz-tagging"] == "set=here"
        assert await rig.front.get("key") == b"theirs"
        assert rig.remote.count("fetch") == 1, "what was cached stays so"
        rig.remote.down = Unavailable("away")
        with pytest.raises(Unavailable):
            await tag(rig, "set=never")
        rig.remote.down = None
        assert await tags(rig) == "set=here"

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_what_is_not_there_has_no_tags(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        for key in ("never", "gone"):
            if key == "gone":
                await put(rig, key, b"x", tags="a=b")
                await delete(rig, key)
            with pytest.raises(NotFound):
                await tags(rig, key)
            with pytest.raises(NotFound):
                await tag(rig, "a=b", key)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_a_copy_has_its_sources_tags_or_others(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        await put(rig, "key", b"data", headers=(("x-amz-meta-a", "b"),), tags="a=b")
        if mode != "through":  # there the backend copies, tags and all
            await rig.front.call("copy", calls.CopyCall("remote", "key", "remote", "same"))
            assert await tags(rig, "same") == "a=b"
        await rig.front.call("copy", calls.CopyCall("remote", "key", "remote", "other", tags="c=d"))
        assert await tags(rig, "other") == "c=d"
        assert (await shown(rig, "other"))["x-amz-meta-a"] == "b"
        await flushed(rig)

    rigged(story)
