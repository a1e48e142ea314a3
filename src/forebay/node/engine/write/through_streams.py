"""Bodies that go on to the backend while the client still sends them (buckets written through).

Theory. `put_open` starts the put at the backend from the file that the front fills. `Grown` says how far the file is.
`put` with the number completes it. The last bytes (or the completion of an upload) are held back until then: only the
front knows whether the body is whole and its checksums match, and conditions can be judged only under the key's lock.
So the lock is taken when the body is there, not while a slow client sends it, and a body that the client gives up was
never visible.

If the started put does not fit the final call (another size, or an engine that has restarted since), the body is put
from the file, which is whole by then.

Invariants. (1) A put that was opened ends: completed, given up, or with the connection of its front. (2) The last byte
leaves for the backend under the key's lock, after the conditions held.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import Closed, ForebayError, Precondition
from forebay.core.messages.calls import PutCall, PutOpenCall, PutOpened, Written
from forebay.core.types import ObjectInfo, check_key
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.write.writes import Writes, check_writable
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.writer.writer import Store

log = logging.getLogger("forebay.writes")


class _Arriving:
    """One body on its way in and out."""

    def __init__(self, call: PutOpenCall, served: Served, expect: str | None) -> None:
        self.call, self.served, self.expect = call, served, expect
        self.upto = 0
        self.task: asyncio.Task[ObjectInfo]
        self._leave = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def grown(self, upto: int) -> None:
        self.upto = max(self.upto, upto)
        waiting, self._waiting = self._waiting, []
        for wanted, turn in waiting:
            if wanted > self.upto:
                self._waiting.append((wanted, turn))
            elif not turn.done():
                turn.set_result(None)

    async def ready(self, upto: int) -> None:
        if upto > self.upto:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((upto, turn))
            await turn

    async def leave(self) -> None:
        await self._leave.wait()

    def let_go(self) -> None:
        """The body is whole and wanted: let it become the object."""
        self.grown(self.call.size_bytes)
        self._leave.set()


class Streams:
    """See the module's header."""

    def __init__(self, store: Store, buckets: Buckets, writes: Writes) -> None:
        self._store, self._buckets, self._writes = store, buckets, writes
        self._arriving: dict[int, _Arriving] = {}
        self._ending: set[asyncio.Task[ObjectInfo]] = set()

    def __len__(self) -> int:
        """How many bodies are on their way."""
        return len(self._arriving)

    async def open(self, call: PutOpenCall) -> PutOpened:
        """Begin, if the bucket and its backend support it. `NotSupported` for a backend that cannot be written,
        `Precondition` for conditions that fail already: both before the body is taken."""
        check_key(call.key)
        return await self._buckets.again(lambda: self._open(call))

    async def _open(self, call: PutOpenCall) -> PutOpened:
        served = await self._buckets.acting(call.bucket, call.key)
        if served.bucket.write != "through":
            return PutOpened(0)
        check_writable(served)
        expect = await self._writes.expected(served, call.key, call.if_match, call.if_none_match)
        if call.size_bytes < limits.STREAM_BYTES_MIN or not call.path:
            return PutOpened(0)
        number = self._store.take_id()  # ids are never reused, not even by the next engine
        arriving = self._arriving[number] = _Arriving(call, served, expect)
        body = Body(call.size_bytes, path=call.path, ready=arriving.ready)
        arriving.task = asyncio.create_task(
            self._writes.through.put(
                served,
                call.key,
                body,
                headers=call.headers,
                expect=expect,
                tags=call.tags,
                leave=arriving.leave,
            )
        )
        return PutOpened(number)

    def grown(self, number: int, upto: int) -> None:
        """The file holds every byte below `upto`."""
        if (arriving := self._arriving.get(number)) is not None:
            arriving.grown(upto)

    def gave_up(self, number: int) -> None:
        """The body will not be completed: nothing of it becomes visible. May be called twice, and after the end."""
        if (arriving := self._arriving.pop(number, None)) is not None:
            self._give_up(arriving)

    def _give_up(self, arriving: _Arriving) -> None:
        self._ending.add(arriving.task)
        arriving.task.add_done_callback(self._ended)
        arriving.task.cancel()

    def _ended(self, task: asyncio.Task[ObjectInfo]) -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # mark it retrieved: nobody waits

    async def put(self, call: PutCall) -> Written:
        """The body of `put_open` is whole: make it the object. Runs to its end, even if the front goes away."""
        return await self._writes.finish(self._put(call))

    async def _put(self, call: PutCall) -> Written:
        try:
            check_key(call.key)
            return await self._buckets.again(lambda: self._put_once(call))
        finally:
            self.gave_up(call.put)
            if call.path:
                remove_temp(call.path)

    async def _put_once(self, call: PutCall) -> Written:
        async with self._writes.entered(call.bucket, call.key) as served:
            arriving = self._arriving.pop(call.put, None)
            if arriving is not None and not _fits(arriving, call, served):
                self._give_up(arriving)
                arriving = None
            send = functools.partial(self._complete, arriving) if arriving is not None else None
            try:
                return await self._writes.put_called(served, call, send)
            finally:
                if arriving is not None and not arriving.task.done():
                    self._give_up(arriving)

    async def _complete(self, arriving: _Arriving, expect: str | None) -> ObjectInfo:
        """Under the key's lock, with the conditions judged: release the rest, and wait for the backend."""
        if arriving.expect != expect:
            raise Precondition(
                f"{arriving.call.key!r} was written while its new body arrived: read it again, then decide",
                code="PreconditionFailed",
            )
        arriving.let_go()
        try:
            return await asyncio.shield(arriving.task)
        except asyncio.CancelledError:
            if arriving.task.cancelled():
                raise Closed("the node is stopping: write it again in a moment") from None
            raise

    async def aclose(self) -> None:
        """Give up what has not been completed."""
        for number in list(self._arriving):
            self.gave_up(number)
        while self._ending:
            await asyncio.wait(list(self._ending))


def _fits(arriving: _Arriving, call: PutCall, served: Served) -> bool:
    """Whether the started put is the one wanted, in a bucket that has not moved."""
    begun = arriving.call
    same = (begun.bucket, begun.key, begun.size_bytes, begun.path) == (
        call.bucket,
        call.key,
        call.size_bytes,
        call.path,
    )
    return same and served.same_place(arriving.served) and not _failed_early(arriving)


def _failed_early(arriving: _Arriving) -> bool:
    """Whether the put failed before the body was whole, in a way that sending it again from the file may mend."""
    task = arriving.task
    if not task.done():
        return False
    error = None if task.cancelled() else task.exception()
    if isinstance(error, ForebayError):
        log.info(
            "%s/%s could not be sent to the backend while it arrived: %s",
            arriving.call.bucket,
            arriving.call.key,
            error,
        )
        return error.retry != "never"
    return True
