"""After a start: restore what the node owes to the visible index and the flusher, while reads and writes are served.

Theory. The store restores owed records in steps (`index_repair.py`); a million take about ten seconds. The first
AT_ONCE steps run before anything is served, the rest in turns of TURN_S with other work in between. To hide the delay,
a call that names a key (`key`) has that key restored first and its debt taken up. A call about many keys (`NEEDS_ALL`)
waits until everything is restored. Fronts may serve from the index by themselves meanwhile. After a process stop the
visible index already has every acknowledged write. After a machine stop it has nothing but owed records that were
restored.

A key whose lock is held is left alone: its holder restored it before, so a missing record is the holder's own doing.

The same steps restore records that were lost when an index could not be written for a while.

Rejected: serving nothing until all is there (10 s per million objects); asking the durable index at each look-up (every
read of a key that is not here would pay).

Invariants. (1) No read, write or answer that goes through the engine is based on a key that is not restored.
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

AT_ONCE = 2048  # steps before the first request, about 50 ms
TURN_S = 0.005
NEEDS_ALL = frozenset(
    {
        "bucket_put",
        "bucket_create",
        "bucket_delete",
        "list",
        "list_cached",
        "owed",
        "copies",
        "listing",
        "hints",
        "lost",
    }
    | {"lost_give_up", "volume_give_up", "job", "jobs", "job_cancel"}
)


class CatchingUp:
    """See the module's header. `is_held` says whether a key's lock is taken."""

    def __init__(self, store: Store, flusher: Flusher, is_held: Callable[[tuple[str, str]], bool]) -> None:
        self._catching = store.catching
        self._flusher = flusher
        self._is_held = is_held
        self._task: asyncio.Task[None] | None = None
        self._was_whole = False  # all was restored once: what is missing later was never acknowledged

    @property
    def is_done(self) -> bool:
        """Whether every owed record is in view."""
        return self._task is None and not self._catching.is_behind

    def start(self) -> None:
        """Begin; some or most steps may remain for the background. Call it again after an index flush was lost."""
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
            log.info("objects owed before the start were restored to the index in %.1f s", loop.time() - began_s)
        except Exception:
            log.exception("objects owed before the start could not be restored to the index: restart the node")
        finally:
            self._task = None

    def _take_up(self, owed: Owed | None) -> None:
        if owed is not None:
            self._flusher.take_up(owed)

    def key(self, bucket: str, key: str) -> None:
        """Restore this key to view if needed. `Unavailable` if its volume cannot."""
        if not self.is_done and not self._is_held((bucket, key)):
            self._take_up(self._catching.restore_key(bucket, key))

    async def before(self, verb: str, arguments: Any) -> None:
        """Restore to view what a call is about. `Unavailable` if that is impossible."""
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
        """Return when everything that can be restored is in view, or when `patience_s` has passed."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience_s)

    async def aclose(self) -> None:
        """Stop where it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
