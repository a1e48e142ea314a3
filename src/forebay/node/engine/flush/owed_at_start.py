"""After a start: what the node owes comes into view, and to the flusher, while reads and writes are served.

Theory. The store brings it into view in steps (`index_repair.py`), a million entries in some ten seconds of them. The
first AT_ONCE are made before anything is served, the rest in turns of TURN_S, with everybody else's in between. So that
nobody notices, whoever names a key (`key`) has that key put into view first, and its debt taken up; whoever asks about
many (`NEEDS_ALL`) waits until all is there. What fronts serve from the index by themselves is right meanwhile: after a
process stop the index has all that was acknowledged, since that is when a write is, and after a machine stop it has
nothing of it that is not owed.

A key whose lock is held is left alone. Its holder came through here before: what is not in view of it is its own.

The same brings back what was lost when an index could not be written for a while.

Rejected: serving nothing until all is there (10 s per million objects); asking the durable index at each look-up (every
read of a key that is not here would pay).

Invariants. (1) No read, write or answer that goes through the engine is based on a key that is not in view.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from forebay.core.errors import Unavailable
from forebay.core.messages.calls import JobCall
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.store.disk.notes import Owed
from forebay.node.store.writer.writer import Store

log = logging.getLogger("forebay.engine")

AT_ONCE = 2048  # steps before the first request, some 50 ms
TURN_S = 0.005
NEEDS_ALL = frozenset(
    {"bucket_put", "bucket_create", "bucket_delete", "list", "list_cached", "manifest", "hints", "lost"}
    | {"lost_give_up", "volume_give_up", "job", "jobs", "job_cancel"}
)


class CatchingUp:
    """See the module's header. `is_held` tells keys whose lock is taken."""

    def __init__(self, store: Store, flusher: Flusher, is_held: Callable[[tuple[str, str]], bool]) -> None:
        self._catching = store.catching
        self._flusher = flusher
        self._is_held = is_held
        self._task: asyncio.Task[None] | None = None
        self._was_whole = False  # since the start: what is behind since is nothing that was acknowledged

    @property
    def is_done(self) -> bool:
        """Whether all that is owed is in view."""
        return self._task is None and not self._catching.is_behind

    def start(self) -> None:
        """Begin; much or little may be left to do afterwards. And again, for what a lost flush left behind."""
        if self._task is not None or not self._catching.may_catch_up:
            return
        steps = self._catching.steps(self._is_held)
        for owed in islice(steps, AT_ONCE):
            self._take_up(owed)
        if self._catching.may_catch_up:
            self._task = asyncio.create_task(self._go_on(steps))
        self._was_whole |= self.is_done

    async def _go_on(self, steps: Iterator[Owed | None]) -> None:
        try:
            loop = asyncio.get_running_loop()
            began_s = until_s = loop.time()
            for owed in steps:
                self._take_up(owed)
                if loop.time() >= until_s:
                    await asyncio.sleep(0)
                    until_s = loop.time() + TURN_S
            self._was_whole |= not self._catching.is_behind
            log.info("what was owed before the start was brought into view in %.1f s", loop.time() - began_s)
        except Exception:
            log.exception("what was owed before the start could not be brought into view: restart the node")
        finally:
            self._task = None

    def _take_up(self, owed: Owed | None) -> None:
        if owed is not None:
            self._flusher.take_up(owed)

    def key(self, bucket: str, key: str) -> None:
        """Bring this key into view, if it is not. `Unavailable` if its volume cannot."""
        if not self.is_done and not self._is_held((bucket, key)):
            self._take_up(self._catching.restore_key(bucket, key))

    async def before(self, verb: str, arguments: Any) -> None:
        """Bring into view what a call is about. `Unavailable` if that cannot be."""
        if self.is_done:
            return
        if verb in NEEDS_ALL or isinstance(arguments, JobCall):
            await self.whole()
            if not self._was_whole:
                raise Unavailable(
                    "what the node owes could not be brought into view: make room on its volumes (`forebay status`), "
                    "or look into its log, and try again",
                    retry_after_s=5.0,
                )
        for prefix in ("", "source_"):
            bucket, key = getattr(arguments, prefix + "bucket", None), getattr(arguments, prefix + "key", None)
            if isinstance(bucket, str) and isinstance(key, str):
                self.key(bucket, key)

    async def whole(self, patience_s: float | None = None) -> None:
        """Return when all is in view that can be, or it took too long."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience_s)

    async def aclose(self) -> None:
        """Stop where it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
