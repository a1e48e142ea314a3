"""Bytes that may be wrong, and what happens once they are known to be.

Theory. Bytes are compared with their checksums before their first use in a process (`compared_blocks.py`). The engine
compares what it serves itself: inline bytes here, at look-up; blocks of files as a flight's doubted blocks. Others
report what they find: a front that compared bytes or found a file short or missing (`suspect`), the scrubber, the
flusher. From then on nobody gets those bytes. They are restored from the durable index; or dropped, so that the next
reader fetches from the backend; or reported lost if there is no other copy.

Invariant. While an object is being examined, no read of it begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.core.record import Record, present_blocks
from forebay.node.store.disk.compared_blocks import Compared

if TYPE_CHECKING:
    from forebay.node.engine.read.cold import ColdReads

log = logging.getLogger("forebay.suspicions")
Name = tuple[str, str]


class Suspicions:
    """See the module's header."""

    def __init__(self, cold: ColdReads, flush_soon: Callable[[], None]) -> None:
        self.compared = Compared()
        self._cold, self._flush_soon = cold, flush_soon
        self._looking: dict[Name, asyncio.Task[None]] = {}

    async def settled(self, name: Name) -> None:
        """Return when the object is not being examined."""
        if name in self._looking:
            await asyncio.wait([self._looking[name]])

    def suspect(self, bucket: str, key: str, object_id: int, reason: str) -> None:
        """Somebody could not use the bytes that the record lists: check them before the next read."""
        name = (bucket, key)
        if name not in self._looking:
            log.warning("%s/%s could not be read (%s): checking it", bucket, key, reason)
            task = self._looking[name] = self._cold.spawn(self._examine(name, object_id))
            task.add_done_callback(lambda done: self._looking.pop(name, None))

    def first_look(self, name: Name, record: Record | None) -> Record | None:
        """The store's record of an object, after comparing inline bytes that this process has not compared yet."""
        if record is None or record.inline is None or self.compared.whole(record.object_id):
            return record
        if not self._cold.store.check_blocks(record, *name, [0]):
            self.compared.add(record.object_id, (0,), 1)
            return record
        return self.found_bad(name, record, [0])

    def found_bad(self, name: Name, record: Record, bad: list[int], good: list[int] | None = None) -> Record | None:
        """These blocks are wrong: drop them, restore them or report them lost. Returns the record afterwards."""
        after = self._cold.store.settle_checked(*name, record.object_id, good or [], bad)
        if bad and not (after is not None and after.inline is not None):  # else it was mended
            self._cold.evictor.removed(record.object_id, bad)
            self._cold.evicted(record.object_id, bad)
        self._flush_soon()
        return after

    async def _examine(self, name: Name, object_id: int) -> None:
        cold = self._cold
        before = cold.store.of_object(*name, object_id)
        if before is None:
            return
        record, blocks = cold.store.examine(*name, object_id), present_blocks(before)
        if record is None:
            cold.evicted(object_id, blocks)
            if (flight := cold.flights.get(name)) is not None:
                del cold.flights[name]  # its file is gone
                log.warning("%s/%s: %d readers keep a file that was removed", *name, len(flight.machine.readers))
            self._flush_soon()
            return
        loop = asyncio.get_running_loop()
        bad = await loop.run_in_executor(cold.workers, cold.store.check_blocks, record, *name, blocks)
        self.found_bad(name, record, bad, [block for block in blocks if block not in set(bad)])
