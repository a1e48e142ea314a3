"""Giving space back, after the index no longer names it: unlinking files, punching holes.

Theory. What a plan has after its record waits here, by volume, until the pending changes of that volume are committed.
Then fronts are told (`take_dropped`), and `reclaim`, which may run in a worker thread, does the work. A hole needs an
exclusive lease on the file; while readers hold shared ones it is put off and tried again with the next `reclaim`.

A block may be dropped and come again before its hole is made. A landing therefore calls the hole off before it writes
(`keep_block`), under the lock under which holes are punched. The same lock keeps two threads from changing a file
header's checksums at once.

A hole may also be held off here, for bytes that turned out to be wrong and that a front may still come to send: it was
told of them before, and shall meet what it was told of, or ask anew, but never zeros.

Rejected: punching at once and waiting for readers (a slow client would hold up eviction); copying the file without the
blocks (takes room when there is none).

Invariants. (1) Nothing is unlinked or punched before the commit it waits for. (2) A block that is being written or
listed again is not punched. (3) No bytes go while the durable index still says that they are owed. (4) No hole
is made in a file that is held.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from forebay.core import commit
from forebay.core.errors import Corrupt
from forebay.core.record import Record
from forebay.node.store import files
from forebay.node.store.volume import StoreEvent, Volume


class Reclaimed(NamedTuple):
    freed_bytes: int
    deferred: list[int]  # object ids whose holes a reader's lease still forbids: send `Dropped`, call `reclaim` later


class _Holes(NamedTuple):
    """Blocks of one data file to be punched."""

    object_id: int
    block_bytes: int
    blocks: set[int]


class Reclaimer:
    """What is to be given back. `reclaim` and `keep_block`: any thread; the rest: the store's."""

    def __init__(self, tell: Callable[[StoreEvent], None]) -> None:
        self.lock = threading.Lock()  # holes, and the checksums in files' headers
        self.held: Counter[int] = Counter()  # object id -> who wants no hole in its file: the store's thread counts
        self._tell = tell
        self._after: dict[str, list[commit.Effect]] = {}  # by volume id: when its pending changes are committed
        self._holes_after: dict[str, dict[str, _Holes]] = {}
        self._dropped: list[int] = []
        self._doomed: deque[tuple[Volume, str]] = deque()
        self._holes: dict[str, tuple[Volume, _Holes]] = {}

    @property
    def waiting(self) -> int:
        """How much waits for a commit."""
        return sum(map(len, self._after.values())) + len(self._holes_after)

    @property
    def ready(self) -> bool:
        """Whether something may be given back now."""
        return bool(self._doomed or self._holes)

    # --- before the commit ---

    def after_commit(self, volume: Volume, plan: Iterable[commit.Effect], record: Record | None = None) -> None:
        """Keep what the plan has after its record; `record` is the one that gives up blocks, if any.

        The checksums that an eviction takes out of a file's header go with the punch: until then they are true.
        """
        for effect in plan:
            match effect:
                case commit.Announce() | commit.Unlink():
                    self._after.setdefault(volume.id, []).append(effect)
                case commit.Punch(path, start, _):
                    assert record is not None
                    self.hollow(volume, path, record, (start // record.block_bytes,))

    def hollow(self, volume: Volume, path: str, record: Record, blocks: Iterable[int]) -> None:
        """Punch these blocks of a file after the next commit."""
        with self.lock:
            holes = self._holes_after.setdefault(volume.id, {})
            if path not in holes:
                holes[path] = _Holes(record.object_id, record.block_bytes, set())
            holes[path].blocks.update(blocks)

    def cancel(self, volume: Volume) -> None:
        """The commit will not come."""
        self._after.pop(volume.id, None)
        with self.lock:
            self._holes_after.pop(volume.id, None)

    # --- after it ---

    def committed(self, volume: Volume) -> None:
        """The volume's pending changes are committed: what waited for them may be done."""
        for effect in self._after.pop(volume.id, ()):
            match effect:
                case commit.Announce(object_id):
                    self._dropped.append(object_id)
                case commit.Unlink(path):
                    self._doomed.append((volume, path))
        if volume.id not in self._holes_after:
            return
        with self.lock:
            for path, holes in self._holes_after[volume.id].items():
                if path in self._holes:
                    self._holes[path][1].blocks.update(holes.blocks)
                else:
                    self._holes[path] = (volume, holes)
            del self._holes_after[volume.id]  # only now: `keep_block` looks, without the lock, whether there are any

    def take_dropped(self) -> list[int]:
        """Objects to close files of, since the last call."""
        dropped, self._dropped = list(dict.fromkeys(self._dropped)), []
        return dropped

    def keep_block(self, path: str, block: int) -> None:
        """The block is about to be written: a hole that is still to be made there is called off."""
        if not self._holes and not self._holes_after:
            return
        with self.lock:
            for waiting in self._holes_after.values():
                if path in waiting:
                    waiting[path].blocks.discard(block)
            if path in self._holes:
                self._holes[path][1].blocks.discard(block)

    def reclaim(self, steps_max: int | None) -> Reclaimed:
        """Unlink and punch up to so many files (None: all); what is refused stays for the next call."""
        freed_bytes = 0
        deferred = []
        with self.lock:
            hollowed = [volume for volume, _ in self._holes.values()]
        refused = {each.id for each in {*hollowed, *(volume for volume, _ in self._doomed)} if not _forgets(each)}
        for _ in range(len(self._doomed) if steps_max is None else min(steps_max, len(self._doomed))):
            volume, path = self._doomed.popleft()
            if volume.id in refused:
                self._doomed.append((volume, path))
                continue
            with self.lock:
                self._holes.pop(path, None)
            try:
                freed_bytes += files.remove(path)
            except OSError as error:
                volume.trouble(error, "removing a data file")
        for path in list(self._holes)[:steps_max]:
            with self.lock:
                if path in self._holes and self._holes[path][0].id not in refused:
                    volume, holes = self._holes[path]
                    if self.held[holes.object_id] or not self._punch(volume, path, holes):
                        deferred.append(holes.object_id)
                        continue
                    freed_bytes += len(holes.blocks) * holes.block_bytes
                    del self._holes[path]
        return Reclaimed(freed_bytes, deferred)

    def _punch(self, volume: Volume, path: str, holes: _Holes) -> bool:
        """False when a reader's lease forbids it."""
        try:
            return files.punch_blocks(path, holes.block_bytes, holes.blocks)
        except OSError as error:
            # a filesystem that cannot punch: the space comes back when the whole object goes
            self._tell(
                StoreEvent("punch-failed", volume.id, f"{path}: {error}; its space returns with the whole object")
            )
            holes.blocks.clear()
            return True


def _forgets(volume: Volume) -> bool:
    """Have the durable index forget what was settled, before any of its bytes go: after a machine stop it would name a
    file with holes, or none, and call the object lost. Whether it has."""
    if not volume.durable.unsettled or volume.state == "out":
        return True
    try:
        volume.durable.commit({})
    except (OSError, Corrupt) as error:
        volume.trouble(error, "committing to the durable index")
        return False
    return True
