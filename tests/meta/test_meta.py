"""What every metadata store promises (`meta/seam.py`), asked of SQLite; another store joins by one more parameter."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.errors import Invalid, Precondition
from forebay.meta.seam import Change, Entry, MetaStore
from forebay.meta.sqlite import SqliteMeta

Open = Callable[[], MetaStore]


@pytest.fixture(params=["sqlite"])
def open_meta(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store each time it is called."""
    return {"sqlite": lambda: SqliteMeta(tmp_path / "meta.sqlite")}[request.param]


def test_values_are_kept_with_growing_revisions(open_meta: Open) -> None:
    async def story() -> None:
        meta = open_meta()
        assert await meta.get("a/1") is None
        assert await meta.range("") == ([], 0)
        first = await meta.put("a/1", b"one")
        second = await meta.put("b/1", b"two")
        third = await meta.put("a/2", b"\x00three")
        assert 0 < first < second < third
        assert await meta.get("a/1") == Entry("a/1", b"one", first)
        assert await meta.range("a/") == ([Entry("a/1", b"one", first), Entry("a/2", b"\x00three", third)], third)
        fourth = await meta.put("a/1", b"uno")
        assert await meta.get("a/1") == Entry("a/1", b"uno", fourth)
        assert await meta.delete("a/1")
        assert not await meta.delete("a/1")
        await meta.aclose()
        await meta.aclose()
        meta = open_meta()
        entries, revision = await meta.range("")
        assert [entry.key for entry in entries] == ["a/2", "b/1"]
        assert revision > fourth, "a delete is a change"
        assert await meta.put("a/1", b"back") > revision, "revisions outlive the process"
        await meta.aclose()

    asyncio.run(story())


def test_a_writer_that_compares_does_not_overwrite_what_it_has_not_read(open_meta: Open) -> None:
    async def story() -> None:
        meta = open_meta()
        first = await meta.put("key", b"one", revision=0)
        with pytest.raises(Precondition):
            await meta.put("key", b"two", revision=0)
        second = await meta.put("key", b"two", revision=first)
        for late in (meta.put("key", b"three", revision=first), meta.delete("key", revision=first)):
            with pytest.raises(Precondition):
                await late
        assert await meta.get("key") == Entry("key", b"two", second)
        assert await meta.delete("key", revision=second)
        with pytest.raises(Precondition):
            await meta.delete("key", revision=second)
        await meta.aclose()

    asyncio.run(story())


def test_prefixes_are_text_and_not_patterns(open_meta: Open) -> None:
    async def story() -> None:
        meta = open_meta()
        for key in ("a%b", "a_b", "aXb", "é/1", "é/2"):
            await meta.put(key, b"")
        assert [entry.key for entry in (await meta.range("a%"))[0]] == ["a%b"]
        assert [entry.key for entry in (await meta.range("a_"))[0]] == ["a_b"]
        assert [entry.key for entry in (await meta.range("é/"))[0]] == ["é/1", "é/2"]
        await meta.aclose()

    asyncio.run(story())


def test_watchers_hear_of_every_change_under_their_prefix_once_in_order(open_meta: Open) -> None:
    async def story() -> None:
        meta = open_meta()
        heard: list[Change] = []
        stop = meta.watch("a/", heard.append)
        first = await meta.put("a/1", b"one")
        await meta.put("b/1", b"not theirs")
        with pytest.raises(Precondition):
            await meta.put("a/1", b"refused", revision=0)
        await meta.delete("a/1")
        await meta.delete("a/1")
        assert [(change.key, change.value) for change in heard] == [("a/1", b"one"), ("a/1", None)]
        assert heard[0].revision == first < heard[1].revision
        stop()
        stop()
        await meta.put("a/2", b"unheard")
        assert len(heard) == 2
        await meta.aclose()

    asyncio.run(story())


def test_the_file_is_for_its_user_alone_and_only_of_a_known_kind(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    meta = SqliteMeta(path)
    asyncio.run(meta.put("secret", b"x"))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(os.stat(file).st_mode) & 0o077 == 0, file
    asyncio.run(meta.aclose())
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(Invalid, match="newer version"):
        SqliteMeta(path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(Invalid, match="move it away"):
        SqliteMeta(path)
