"""Group commit: changes that arrive during a sync go out together in the next one.

Theory. An acknowledged write costs a disk's flush, a few milliseconds however many writes share it. So changes queue.
One worker takes all that wait, has the store decide about them (`prepare`, on the loop), makes them durable (in a
thread of its own, so that no slow reader's bytes stand before it), and makes them visible (`publish`, on the loop). The
next group begins before this one is shown, so that the disk rests as little as possible. What must become true together
with the change, such as the note of what is owed, is told in the same turn of the loop (`published`), before anybody
can look. Changes that need no disk never leave the loop.

`begin` takes a callback for the outcome, since a future and a wake-up for each small write would cost more than the
write. `commit` is the same for callers that would rather wait.

Each volume has its own queue and thread, so a disk that does not answer holds up only its own writers. If a disk has
taken the changes and the index cannot show them yet, their callers hear when it can (`flushed`).

A large file is best synced before its change is queued (`Writes` does): then the group does not wait for its bytes.

Rejected: waiting a moment for company (a lone writer would pay, and under load company comes by itself).

Invariants. (1) A change is performed even if its caller goes away. (2) A caller hears only when its change is visible
to every front. (3) Changes of one key are never under way together: their lock prevents it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from forebay.core.errors import ForebayError, Unavailable
from forebay.core.record import Record
from forebay.node.outcomes import resolve
from forebay.node.store.disk.volume import of_broken
from forebay.node.store.writer.puts import Change, Prepared, Put
from forebay.node.store.writer.writer import Store
from forebay.ports import threads

log = logging.getLogger("forebay.writes")

GROUP_MAX = 512  # changes in one sync: 8 MiB of inline bodies at most
SLOW_S = 5.0  # a sync that takes longer is worth a line in the log
Published = Callable[[Change, Record | None, Record | None], None]
Done = Callable[[Record | ForebayError | None], None]
_Asked = tuple[Change, Done]


class _Queue:
    """The changes of one volume."""

    def __init__(self, volume_id: str) -> None:
        self.volume_id = volume_id
        self.waiting: list[_Asked] = []
        self.refuses: ForebayError | None = None  # set while the disk does not answer
        self.group: list[_Asked] = []
        self.syncing = False  # the thread has this group
        self.thread = threads.pool(1, "forebay-commit", volume_id)


class Commits:
    """See the module's header. `published(change, before, after)` hears of each change on the loop as it becomes true;
    `flush` makes the index visible. All calls come from one loop."""

    def __init__(self, store: Store, *, published: Published, flush: Callable[[], None]) -> None:
        self.groups = 0  # syncs so far
        self.on_answer: Callable[[], None] = lambda: None  # all is shown that was under way when a disk stalled
        self._store = store
        self._published = published
        self.flush = flush
        self._loop: asyncio.AbstractEventLoop
        self._queues: dict[str, _Queue] = {}  # by volume
        self._unshown: list[tuple[list[_Asked], Prepared]] = []  # waiting for disks that have not answered
        self._idle = asyncio.Event()
        self._idle.set()

    async def commit(self, change: Change) -> Record | None:
        """Perform the change; return the record (None for a delete). If it raises, nothing changed, unless that says
        that it may have been written."""
        done: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()
        self.begin(change, functools.partial(resolve, done))
        return await done

    def begin(self, change: Change, done: Done) -> None:
        """Perform the change, and call `done` with the record (None for a delete), or with the error."""
        key = change.info.key if isinstance(change, Put) else change.key
        volume_id = self._store.volume_of(change.bucket, key)
        queue = self._queue(volume_id)
        if queue.refuses is not None:
            asyncio.get_running_loop().call_soon(self._refuse, queue, change, done)
            return
        queue.waiting.append((change, done))
        if len(queue.waiting) == 1 and not queue.syncing:
            self._idle.clear()
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._start, queue)  # changes of the same turn join the group

    def _refuse(self, queue: _Queue, change: Change, done: Done) -> None:
        self._store.give_up([change])
        _tell(done, queue.refuses or Unavailable("the disk answers again: write again", retry_after_s=1.0))

    def _start(self, queue: _Queue) -> None:
        self._go_on(queue)
        self._rest()

    def _rest(self) -> None:
        if not self._unshown and not any(queue.waiting or queue.syncing for queue in self._queues.values()):
            self._idle.set()

    def _go_on(self, queue: _Queue) -> None:
        """Begin the next group, unless the thread is busy with one."""
        while queue.waiting and not queue.syncing:
            group, queue.waiting = queue.waiting[:GROUP_MAX], queue.waiting[GROUP_MAX:]
            self.groups += 1
            try:
                prepared = self._store.prepare([change for change, _ in group])
                if prepared.touches_disk:
                    queue.thread.submit(self._make_durable, queue, group, prepared, self._loop.time())
                    queue.group, queue.syncing = group, True
                    return
            except Exception as error:
                _broke(group, error)
            else:
                self._show(group, prepared)

    def _make_durable(self, queue: _Queue, group: list[_Asked], prepared: Prepared, began_s: float) -> None:
        """In the thread."""
        failure: Exception | None = None
        try:
            self._store.make_durable(prepared)
        except Exception as error:
            failure = error
        self._loop.call_soon_threadsafe(self._made_durable, queue, group, prepared, began_s, failure)

    def _made_durable(
        self, queue: _Queue, group: list[_Asked], prepared: Prepared, began_s: float, failure: Exception | None
    ) -> None:
        queue.group, queue.syncing = [], False
        self._go_on(queue)  # the disk has the next group to work on while this one is shown
        took_s = self._loop.time() - began_s
        if took_s > SLOW_S:
            log.warning("%d writes took %.1f s to reach the disks: they are slow", len(group), took_s)
        if failure is not None:
            _broke(group, failure)
        else:
            self._show(group, prepared)
        self._start(queue)

    def _show(self, group: list[_Asked], prepared: Prepared) -> None:
        """Publish what was made durable, and call the callers back."""
        try:
            outcomes = self._store.publish(prepared)
        except Exception as error:
            _broke(group, error)
            return
        if outcomes is None:
            self._unshown.append((group, prepared))
        else:
            self._end(group, prepared, outcomes)

    def flushed(self) -> None:
        """The index was flushed: call back those whose disks have answered."""
        if not self._unshown:
            return
        unshown, self._unshown = self._unshown, []
        for group, prepared in unshown:
            outcomes = self._store.outcomes(prepared)
            if outcomes is None:
                self._unshown.append((group, prepared))
            else:
                self._end(group, prepared, outcomes)
        self._rest()

    def _end(self, group: list[_Asked], prepared: Prepared, outcomes: list[Record | ForebayError | None]) -> None:
        try:
            for (change, _), before, outcome in zip(group, prepared.replaced, outcomes, strict=True):
                if not isinstance(outcome, ForebayError):
                    self._published(change, before, outcome)
            self.flush()
        except Exception as error:
            _broke(group, error)
            return
        for (_, done), outcome in zip(group, outcomes, strict=True):
            _tell(done, outcome)

    def stalled(self, volume_id: str, error: ForebayError) -> None:
        """The volume's disk does not answer: everyone who waits for it gets `error`. Queued changes are not performed.
        Changes under way end when the disk answers, as if their callers had gone away."""
        queue = self._queue(volume_id)
        queue.refuses = error
        waiting, queue.waiting = queue.waiting, []
        self._store.give_up([change for change, _ in waiting])
        begun = [queue.group, *(group for group, prepared in self._unshown if volume_id in prepared.needs)]
        for group in (waiting, *begun):
            asked = list(group)
            group[:] = [(change, _nobody) for change, _ in group]
            for _, done in asked:
                _tell(done, error)

    def answers(self, volume_id: str) -> None:
        """The volume's disk answers. Changes that began before it stalled must be shown before new ones begin."""
        queue = self._queue(volume_id)
        under_way = queue.syncing or any(volume_id in prepared.needs for _, prepared in self._unshown)
        if queue.refuses is not None and not under_way:
            queue.refuses = None
            self.on_answer()

    def _queue(self, volume_id: str) -> _Queue:
        queue = self._queues.get(volume_id)
        if queue is None:
            queue = self._queues[volume_id] = _Queue(volume_id)
        return queue

    async def settled(self) -> None:
        """Return when nothing is queued."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """Finish what is queued. May be called twice."""
        await self.settled()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, queue.thread.shutdown) for queue in self._queues.values()))


def _nobody(outcome: Record | ForebayError | None) -> None:
    pass


def _tell(done: Done, outcome: Record | ForebayError | None) -> None:
    try:
        done(outcome)
    except Exception:
        log.exception("who waited for a commit broke when it was told")


def _broke(group: list[_Asked], error: Exception) -> None:
    if not isinstance(error, ForebayError):
        log.error("a commit of %d changes broke", len(group), exc_info=error)
    told = of_broken(error, "committing")
    for _, done in group:
        _tell(done, told)
