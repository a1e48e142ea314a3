"""Committing a volume's pending changes, by its own thread.

Theory. Pending changes are sealed, and the volume's hand writes them (`disk/volume_threads.py`). Mostly that ends
before the store's thread would have done anything else. If the disk does not answer, the store's thread goes on, later
changes stay pending, and look-ups see both. Whoever needs to know that a change is committed asks again after a later
flush.

Invariants. (1) One commit of a volume at a time. (2) Consequences of a change wait until that change is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.core.errors import Corrupt
from forebay.node.store.disk.volume import StoreEvent, Volume
from forebay.node.store.writer.reclaim import Reclaimer
from forebay.ports import threads


class Flushes:
    """For `Store`. `next_id` returns the next object id. `answered` is called, in another thread, when a late disk has
    answered."""

    def __init__(
        self,
        reclaimer: Reclaimer,
        tell: Callable[[StoreEvent], None],
        next_id: Callable[[], int],
        answered: Callable[[], None],
    ) -> None:
        self._reclaimer, self._tell, self._next_id, self._answered = reclaimer, tell, next_id, answered

    def flush(self, volume: Volume) -> int:
        """Commit the pending changes; return how many. See `Store.flush`."""
        self._end(volume)
        if volume.writing is not None:
            return 0  # its disk has not answered: later changes wait
        index = volume.index
        if index.pending:
            index.put("meta", b"next_id", self._next_id().to_bytes(8, "big"))
        done = volume.seal()
        self._reclaimer.sealed(volume)
        if not done:
            self._reclaimer.committed(volume)
            return 0
        self._begin(volume)
        return done

    def settle(self, volumes: Iterable[Volume]) -> None:
        """Commit all pending changes, however long it takes."""
        for volume in volumes:
            self.flush(volume)
            while volume.writing is not None:
                threads.wait(volume.writing)
                self.flush(volume)

    def _begin(self, volume: Volume) -> None:
        volume.writing = volume.desk.begin(volume.write)
        volume.desk.wait(volume.writing)
        if volume.writing.done():
            self._end(volume)
        else:
            volume.writing.add_done_callback(lambda done: self._answered())

    def _end(self, volume: Volume) -> None:
        """Take the outcome of a commit that has ended."""
        writing = volume.writing
        if writing is None or not writing.done():
            return
        volume.writing = None
        error = writing.exception()
        if isinstance(error, OSError | Corrupt):
            volume.trouble(error, "committing to the index")
            self._tell(StoreEvent("changes-lost", volume.id, "what was to be committed was not kept"))
            volume.flush_lost(error)
            self._reclaimer.cancel(volume)
        elif writing.result():
            volume.written()
            self._reclaimer.committed(volume)
        else:
            volume.index.grow()
            self._begin(volume)
