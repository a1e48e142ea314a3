"""Somebody who follows a prefix, and keeps the copy that the watch's promise says can be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import TracebackType

from forebay.meta.seam import Change, MetaStore
from tests.patience import until_async

State = dict[str, bytes]


class Watched:
    """`state` is what has been heard so far; `heard` are the lists that it was made of. Inside it, the first list has
    come."""

    def __init__(self, meta: MetaStore, prefix: str) -> None:
        self._meta, self._prefix = meta, prefix
        self.state: State = {}
        self.heard: list[list[Change]] = []
        self._task: asyncio.Task[None] | None = None

    async def until(self, condition: Callable[[State], bool]) -> None:
        """Wait until what was heard is so."""
        await until_async(lambda: condition(self.state) or self._ended(), f"the state last heard was {self.state}")

    def told(self, key: str) -> list[Change]:
        """What was heard of one key, in order."""
        return [change for changes in self.heard for change in changes if change.key == key]

    async def _follow(self) -> None:
        async with aclosing(self._meta.watch(self._prefix)) as lists:
            async for changes, revision in lists:
                assert all(change.revision <= revision for change in changes), "the state after them is of `revision`"
                self.heard.append(changes)
                for change in changes:
                    assert change.key.startswith(self._prefix)
                    if change.value is None:
                        self.state.pop(change.key, None)
                    else:
                        self.state[change.key] = change.value

    def _ended(self) -> bool:
        assert self._task is not None
        if self._task.done():
            self._task.result()
            raise AssertionError("a watch has no end")
        return False

    async def __aenter__(self) -> Watched:
        self._task = asyncio.create_task(self._follow())
        await until_async(lambda: self.heard or self._ended())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
