"""Group commit alone: what goes together, what is told, and what the disk has to do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from forebay.core.errors import Bug, Unavailable
from forebay.node.engine.write.commits import Commits
from forebay.node.store.writer.puts import Delete

from .conftest import until


class Prepared:
    def __init__(self, changes: list[Delete]) -> None:
        self.keys = [change.key for change in changes]
        self.touches_disk = all(change.durable for change in changes)
        self.replaced = [None] * len(changes)


class Disk:
    """A store of which each step is written down; syncs wait while `free` is clear."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, list[str]]] = []
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None

    def volume_of(self, bucket: str, key: str) -> str:
        return "v"

    def prepare(self, changes: list[Delete]) -> Prepared:
        prepared = Prepared(changes)
        self.steps.append(("prepare", prepared.keys))
        return prepared

    def make_durable(self, prepared: Prepared) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.steps.append(("sync", prepared.keys))
        self.free.wait(90)
        if self.error is not None:
            raise self.error

    def publish(self, prepared: Prepared) -> list[Any]:
        self.steps.append(("show", prepared.keys))
        return [Unavailable("no") if key == "refused" else None for key in prepared.keys]


def commits_of(story: Callable[[Disk, Commits], Awaitable[None]]) -> None:
    async def main() -> None:
        disk = Disk()
        published = lambda change, before, after: disk.steps.append(("true", [change.key]))  # noqa: E731
        commits = Commits(disk, published=published, flush=lambda: None)  # type: ignore[arg-type]
        try:
            await story(disk, commits)
        finally:
            disk.free.set()
            await commits.aclose()

    asyncio.run(main())


def change(key: str, durable: bool = True) -> Delete:
    return Delete("b", key, durable=durable)


def test_the_next_group_is_with_the_disk_before_the_last_one_is_shown() -> None:
    async def story(disk: Disk, commits: Commits) -> None:
        disk.free.clear()
        told: list[str] = []
        commits.begin(change("a"), lambda _: told.append("a"))
        commits.begin(change("b"), lambda _: told.append("b"))
        await until(lambda: len(disk.steps) == 2)
        for key in "cd":
            commits.begin(change(key), lambda _, key=key: told.append(key))
        assert told == []
        disk.free.set()
        await commits.settled()
        assert told == list("abcd")
        before = [step for step in disk.steps if step[0] != "sync"]
        assert before == [
            ("prepare", ["a", "b"]),
            ("prepare", ["c", "d"]),
            ("show", ["a", "b"]),
            ("true", ["a"]),
            ("true", ["b"]),
            ("show", ["c", "d"]),
            ("true", ["c"]),
            ("true", ["d"]),
        ]
        assert commits.groups == 2

    commits_of(story)


def test_what_need_not_be_synced_does_not_leave_the_loop() -> None:
    async def story(disk: Disk, commits: Commits) -> None:
        await asyncio.gather(commits.commit(change("a", durable=False)), commits.commit(change("b", durable=False)))
        assert disk.steps[:2] == [("prepare", ["a", "b"]), ("show", ["a", "b"])]
        disk.free.clear()
        slow = asyncio.ensure_future(commits.commit(change("slow")))
        await until(lambda: ("sync", ["slow"]) in disk.steps)
        behind = asyncio.ensure_future(commits.commit(change("c", durable=False)))
        await asyncio.sleep(0.01)
        assert not behind.done(), "one after the other"
        disk.free.set()
        await asyncio.gather(slow, behind)

    commits_of(story)


def test_each_is_told_its_own_and_one_that_breaks_does_no_harm() -> None:
    async def story(disk: Disk, commits: Commits) -> None:
        told: list[Any] = []
        commits.begin(change("a"), lambda _: 1 / 0)
        commits.begin(change("refused"), told.append)
        commits.begin(change("b"), told.append)
        await commits.settled()
        assert isinstance(told[0], Unavailable)
        assert told[1:] == [None]
        assert ("true", ["refused"]) not in disk.steps
        with pytest.raises(Unavailable):
            await commits.commit(change("refused"))
        gone = asyncio.ensure_future(commits.commit(change("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await commits.settled()
        assert ("true", ["gone"]) in disk.steps, "it is performed though its asker went away"

    commits_of(story)


def test_a_group_that_breaks_is_told_and_the_next_goes_on() -> None:
    async def story(disk: Disk, commits: Commits) -> None:
        disk.error = ZeroDivisionError()
        with pytest.raises(Bug):
            await commits.commit(change("a"))
        disk.error = None
        assert await commits.commit(change("b")) is None
        await commits.aclose()
        with pytest.raises(Bug):
            await commits.commit(change("late"))

    commits_of(story)
