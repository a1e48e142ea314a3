"""Pages while the backend has not heard of everything, against a dumb model; and a bucket that has no backend."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.backends.local.memory import MemoryBackend
from forebay.core.messages import calls
from forebay.core.record import State, make_record, own_version
from forebay.core.types import Bucket, ListEntry, ListPage, ObjectInfo
from forebay.node.engine.buckets import Served
from forebay.node.engine.read.pages import Pages
from forebay.node.store.disk.notes import Note

from .conftest import Rig
from .writing import AWAY, delete, flushed, names, put, written

Rigged = Callable[..., None]


class Node:
    """What a node owes, and what it has of it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.notes: dict[str, Note] = {}
        self.windows = 0

    def owe(self, key: str, object_id: int) -> None:
        if key not in self.notes:
            insort(self.keys, key)
        self.notes[key] = Note(len(self.keys), 0.0, 1, object_id)

    def settle(self, key: str) -> None:
        if self.notes.pop(key, None) is not None:
            self.keys.remove(key)

    def window(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[tuple[str, Note]]:
        self.windows += 1
        at = max(bisect_left(self.keys, prefix), bisect_right(self.keys, start_after))
        found = self.keys[at : at + limit]
        return [(key, self.notes[key]) for key in found if key.startswith(prefix)]

    def check_bucket(self, bucket: str) -> None:
        """No volume is missing."""

    def lost_in(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[Any]:
        return []

    def lost_of(self, bucket: str, key: str) -> None:
        return None

    def lookup(self, bucket: str, key: str) -> Any:
        note = self.notes.get(key)
        if note is None or note.is_delete:
            return None
        info = ObjectInfo(key, 1, own_version(note.object_id), f"ours-{note.object_id}", 0.0)
        record = make_record(info, 0.0, object_id=note.object_id, inline=b"x")
        record.state = State.DIRTY
        return record


def expected(model: dict[str, str], prefix: str, delimiter: str) -> list[str]:
    shown = []
    for key in sorted(key for key in model if key.startswith(prefix)):
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        name = key if cut < 0 else key[: cut + len(delimiter)]
        if not shown or shown[-1] != name:
            shown.append(name)
    return shown


KEYS = st.text("ab/", min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    there=st.sets(KEYS, max_size=25),
    owed=st.dictionaries(KEYS, st.booleans(), max_size=25),
    prefix=st.text("ab/", max_size=2),
    delimiter=st.sampled_from(["", "/", "b"]),
    limit=st.integers(1, 5),
)
def test_pages_show_each_key_once_in_order(
    there: set[str], owed: dict[str, bool], prefix: str, delimiter: str, limit: int
) -> None:
    backend, node, model = MemoryBackend(), Node(), {}
    for key in there:
        backend.place(key, b"theirs")
        model[key] = "theirs"
    for number, (key, is_delete) in enumerate(owed.items(), 1):
        node.owe(key, 0 if is_delete else number)
        model.pop(key, None)
        if not is_delete:
            model[key] = f"ours-{number}"
    listings = Pages(node, node, node, lambda *keys: None)  # type: ignore[arg-type]

    async def walk() -> tuple[list[str], dict[str, ListEntry]]:
        shown: list[str] = []
        entries: dict[str, ListEntry] = {}
        after = ""
        for _ in range(100):
            served = Served(Bucket("bucket", "memory://x", write="back"), backend)
            page = await listings.page(served, calls.ListCall("bucket", prefix, delimiter, after, limit))
            assert len(page.entries) + len(page.prefixes) <= limit
            assert page.entries or page.prefixes or not page.next_after, "no empty page but the last"
            shown += sorted([entry.key for entry in page.entries] + page.prefixes)
            entries |= {entry.key: entry for entry in page.entries}
            if not page.next_after:
                return shown, entries
            assert page.next_after > after
            after = page.next_after
        raise AssertionError("the pages do not end")

    shown, entries = asyncio.run(walk())
    assert shown == expected(model, prefix, delimiter)
    for key, entry in entries.items():
        assert (entry.etag == model[key]) or (model[key] == "theirs" and not entry.etag.startswith("ours"))


def test_a_write_that_arrives_at_the_backend_in_between_is_seen() -> None:
    """The flush ends after we looked at what is owed, and before or after the backend was asked."""

    async def story() -> None:
        for moment in ("before", "after"):
            backend, node = MemoryBackend(), Node()
            backend.place("deleted", b"theirs")
            node.owe("deleted", 0)
            node.owe("new", 7)
            plain = backend.list_page

            def flush(backend: MemoryBackend = backend, node: Node = node) -> None:
                backend.place("new", b"flushed")
                backend.remove("deleted")
                node.settle("new")
                node.settle("deleted")

            async def list_page(*arguments: Any, plain: Any = plain, flush: Any = flush) -> ListPage:
                if moment == "before":  # noqa: B023
                    flush()
                page: ListPage = await plain(*arguments)
                if moment == "after":  # noqa: B023
                    flush()
                return page

            backend.list_page = list_page  # type: ignore[method-assign]
            served = Served(Bucket("bucket", "memory://x", write="back"), backend)
            page = await Pages(node, node, node, lambda *keys: None).page(served, calls.ListCall("bucket"))  # type: ignore[arg-type]
            assert [entry.key for entry in page.entries] == ["new"], moment

    asyncio.run(story())


def test_a_page_costs_what_a_page_costs() -> None:
    async def story() -> None:
        backend, node = MemoryBackend(), Node()
        for number in range(5000):
            node.owe(f"key-{number:05}", number + 1)
        served = Served(Bucket("bucket", "memory://x", write="back"), backend)
        listings = Pages(node, node, node, lambda *keys: None)  # type: ignore[arg-type]
        page = await listings.page(served, calls.ListCall("bucket", start_after="key-02000", limit=10))
        assert [entry.key for entry in page.entries] == [f"key-{number:05}" for number in range(2001, 2011)]
        assert node.windows <= 2

    asyncio.run(story())


def test_a_listing_shows_writes_and_deletes_at_once(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        for key in ("a/1", "a/2", "b/1", "c"):
            rig.remote.place(key, b"theirs")
        rig.remote.writable.clear()
        assert await names(rig) == ["a/1", "a/2", "b/1", "c"]
        await put(rig, "a/0", b"ours")
        await put(rig, "d/1", b"ours")
        await put(rig, "c", b"ours, longer")
        await delete(rig, "b/1")
        assert await names(rig) == ["a/0", "a/1", "a/2", "c", "d/1"]
        assert await names(rig, delimiter="/") == ["c", "a/", "d/"]
        page = await rig.front.call("list", calls.ListCall("remote", prefix="c"))
        assert page.entries[0].size_bytes == 12
        await flushed(rig)
        assert await names(rig) == ["a/0", "a/1", "a/2", "c", "d/1"]

    rigged(story)


def test_a_local_bucket_lists_what_it_has(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        rig.remote.down = AWAY  # nobody asks it
        await asyncio.gather(*(put(rig, f"dir-{number % 3}/{number:02}", b"x") for number in range(9)))
        await delete(rig, "dir-1/04")
        assert len(await names(rig)) == 8
        page = await rig.front.call("list", calls.ListCall("remote", delimiter="/", limit=2))
        assert page.prefixes == ["dir-0/", "dir-1/"]
        page = await rig.front.call("list", calls.ListCall("remote", delimiter="/", start_after=page.next_after))
        assert (page.prefixes, page.next_after) == (["dir-2/"], "")

    rigged(story)


@pytest.mark.parametrize("mode", ["local", "back", "through"])
def test_a_full_page_with_nothing_behind_it_is_the_last(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        for key in ("a", "b/1", "c/1", "c/2"):
            await put(rig, key, b"x")
        for delimiter, after, limit, more in (
            *(("/", "", limit, limit < 3) for limit in (1, 2, 3)),
            ("/", "b/\U0010ffff", 1, False),
            *(("", "", limit, limit < 4) for limit in (1, 3, 4)),
        ):
            page = await rig.front.call("list", calls.ListCall("remote", "", delimiter, after, limit))
            assert len(page.entries) + len(page.prefixes) == limit
            assert bool(page.next_after) is more, (delimiter, after, limit)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local"])
def test_a_listing_is_right_after_a_restart(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        rig.remote.place("old", b"theirs")
        rig.remote.down = AWAY
        await put(rig, "new", b"ours")
        await delete(rig, "old")
        await rig.again()
        rig.remote.down = None
        assert await names(rig) == ["new"]
        rig.clock.ahead_s = 100
        await flushed(rig)

    rigged(story)
