"""Group commit: changes that arrive while others are being made durable go out together in the next sync.

Theory. An acknowledged write costs a disk's flush, a few milliseconds however many writes share it. So changes queue;
one worker takes all that are waiting, has the store decide about them (`prepare`, on the loop), makes them durable (in
a thread of its own, so that no slow reader's bytes stand before it), and makes them visible (`publish`, on the loop).
Whoever waits longer than that shares the next turn. What must be true together with the change, such as the note of
what is owed, is told in the same turn of the loop (`published`), before anybody can look.

A large file is best synced before its change is queued (`Writes` does): then the group does not wait for its bytes.

Rejected: waiting a moment for company (a lone writer would pay, and under load company comes by itself).

Invariants. (1) A change is performed though its asker went away. (2) An asker hears only when its change is visible to
every front. (3) Changes of one key never share a group: their lock sees to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from forebay.core.errors import Bug, ForebayError
from forebay.core.record import Record
from forebay.node.store import Change, Put, Store

log = logging.getLogger("forebay.writes")

GROUP_MAX = 512  # changes in one sync: 8 MiB of inline bodies at most
SLOW_S = 5.0  # a sync that takes longer is worth a line in the log
Published = Callable[[Change, Record | None, Record | None], None]


class Commits:
    """See the module's header. `published(change, before, after)` hears of each change on the loop as it becomes true;
    `flush` makes the index visible."""

    def __init__(self, store: Store, *, published: Published, flush: Callable[[], None]) -> None:
        self.groups = 0  # syncs so far
        self._store = store
        self._published = published
        self.flush = flush
        self._waiting: list[tuple[Change, asyncio.Future[Record | None]]] = []
        self._working: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forebay-commit")

    async def commit(self, change: Change) -> Record | None:
        """Make it so; the record (None for a delete). Raises what kept it from being so: nothing changed then."""
        done: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await asyncio.shield(done)

    async def _work(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
                try:
                    await self._commit(group)
                except ForebayError as error:
                    _fail(group, error)
                except Exception as error:
                    log.exception("a commit of %d changes broke", len(group))
                    _fail(group, Bug(f"committing broke: {error!r}: please report it with the node's log"))
        finally:
            self._working = None

    async def _commit(self, group: list[tuple[Change, asyncio.Future[Record | None]]]) -> None:
        self.groups += 1
        prepared = self._store.prepare([change for change, _ in group])
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await loop.run_in_executor(self._thread, self._store.make_durable, prepared)
        if loop.time() - began_s > SLOW_S:
            log.warning("%d writes took %.1f s to reach the disks: they are slow", len(group), loop.time() - began_s)
        before = [self._store.lookup(change.bucket, _key(change)) for change, _ in group]
        outcomes = self._store.publish(prepared)
        for (change, _), old, outcome in zip(group, before, outcomes, strict=True):
            if not isinstance(outcome, ForebayError):
                self._published(change, old, outcome)
        self.flush()
        for (_, done), outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, ForebayError):
                _end(done, outcome)
            elif not done.done():
                done.set_result(outcome)

    async def aclose(self) -> None:
        """Finish what is queued. Twice is fine."""
        while self._working is not None:
            await asyncio.wait([self._working])
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


def _key(change: Change) -> str:
    return change.info.key if isinstance(change, Put) else change.key


def _end(done: asyncio.Future[Record | None], error: ForebayError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # who asked may be gone


def _fail(group: list[tuple[Change, asyncio.Future[Record | None]]], error: ForebayError) -> None:
    for _, done in group:
        _end(done, error)
