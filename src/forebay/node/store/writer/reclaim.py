"""Frees space that the index no longer names: unlinks files, punches holes.

Theory. What a record gives up waits here, by volume, until the pending changes of that volume are committed. Then
fronts are told (`take_dropped`), and `reclaim`, which may run in a worker thread, does the work. A hole needs an
exclusive lease on the file. While readers hold shared ones it is put off and tried again with the next `reclaim`.

A block may be dropped and come again before its hole is punched. So a landing cancels the hole before it writes
(`keep_block`), and waits for one that is being punched.

`held` also puts holes off, for bytes that turned out to be wrong and that a front may still send. The front was told of
them before; it must find the bytes it was told of, or ask again, but never zeros.

Rejected: punching at once and waiting for readers (a slow client would hold up eviction); copying the file without the
blocks (takes room when there is none).

Invariants. (1) Nothing is unlinked or punched before the commit it waits for. (2) A block that is being written or
listed again is not punched. (3) No bytes go while the durable index still says that they are owed. (4) No hole is
punched in a file that is held.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from forebay.core.errors import Corrupt
from forebay.core.record import Record
from forebay.node.store.disk import files
from forebay.node.store.disk.volume import StoreEvent, Volume


class Reclaimed(NamedTuple):
    freed_bytes: int
    deferred: list[int]  # object ids whose holes a reader's lease still forbids: send `Dropped`, call `reclaim` later


class _Holes(NamedTuple):
    """Blocks of one data file to punch."""

    object_id: int
    block_bytes: int
    blocks: set[int]


class Reclaimer:
    """The space to free. `reclaim` and `keep_block`: any thread; the rest: the store's."""

    def __init__(self, tell: Callable[[StoreEvent], None]) -> None:
        self._lock = threading.Condition()  # guards this state; its holder never waits for a disk
        self._punching: set[str] = set()
        self.held: Counter[int] = Counter()  # object id -> how many want no hole in its file; the store's thread counts
        self._tell = tell
        self._after: dict[str, list[int | str]] = {}  # by volume id: object ids to tell of, paths to unlink
        self._holes_after: dict[str, dict[str, _Holes]] = {}
        self._dropped: list[int] = []
        self._doomed: dict[str, deque[str]] = {}  # by volume id
        self._holes: dict[str, tuple[Volume, _Holes]] = {}

    @property
    def waiting(self) -> int:
        """How many consequences wait for a commit."""
        return sum(map(len, self._after.values())) + len(self._holes_after)

    def ready(self) -> set[str]:
        """The ids of volumes on which something can be freed now."""
        hollowed = {volume.id for volume, _ in list(self._holes.values())}
        return hollowed | {volume_id for volume_id, doomed in self._doomed.items() if doomed}

    # --- before the commit ---

    def announce(self, volume: Volume, object_id: int) -> None:
        """Tell fronts after the next commit that bytes of this object are no longer listed (`wire.Dropped`)."""
        self._after.setdefault(volume.id, []).append(object_id)

    def unlink(self, volume: Volume, path: str) -> None:
        """Remove the file after the next commit. Whoever has it open keeps its bytes."""
        self._after.setdefault(volume.id, []).append(path)

    def hollow(self, volume: Volume, path: str, record: Record, blocks: Iterable[int]) -> None:
        """Punch these blocks of a file after the next commit. Their checksums leave its header only with the punch:
        until then they are true."""
        with self._lock:
            holes = self._holes_after.setdefault(volume.id, {})
            if path not in holes:
                holes[path] = _Holes(record.object_id, record.block_bytes, set())
            holes[path].blocks.update(blocks)

    def cancel(self, volume: Volume) -> None:
        """The commit failed: forget what waited for it."""
        for name in (volume.id, _sealed(volume)):
            self._after.pop(name, None)
            with self._lock:
                self._holes_after.pop(name, None)

    def sealed(self, volume: Volume) -> None:
        """What waits now waits for the commit that begins; what comes later, for the next."""
        if volume.id in self._after:
            self._after[_sealed(volume)] = self._after.pop(volume.id)
        with self._lock:
            if volume.id in self._holes_after:
                self._holes_after[_sealed(volume)] = self._holes_after[volume.id]
                del self._holes_after[
                    volume.id
                ]  # only now: `keep_block` looks, without the lock, whether there are any

    # --- after it ---

    def committed(self, volume: Volume) -> None:
        """The volume's sealed changes are committed: release what waited for them."""
        name = _sealed(volume)
        for given_up in self._after.pop(name, ()):
            if isinstance(given_up, int):
                self._dropped.append(given_up)
            else:
                self._doomed.setdefault(volume.id, deque()).append(given_up)
        if name not in self._holes_after:
            return
        with self._lock:
            for path, holes in self._holes_after[name].items():
                if path in self._holes:
                    self._holes[path][1].blocks.update(holes.blocks)
                else:
                    self._holes[path] = (volume, holes)
            del self._holes_after[name]  # only now: `keep_block` looks, without the lock, whether there are any

    def take_dropped(self) -> list[int]:
        """Objects whose files must be closed, since the last call."""
        dropped, self._dropped = list(dict.fromkeys(self._dropped)), []
        return dropped

    def keep_block(self, path: str, block: int) -> None:
        """The block is about to be written: cancel its pending hole, or wait for one that is being punched."""
        if not self._holes and not self._holes_after and not self._punching:
            return
        with self._lock:
            self._lock.wait_for(lambda: path not in self._punching)
            for waiting in self._holes_after.values():
                if path in waiting:
                    waiting[path].blocks.discard(block)
            if path in self._holes:
                self._holes[path][1].blocks.discard(block)

    def reclaim(self, volume: Volume, steps_max: int | None) -> Reclaimed:
        """Unlink and punch up to `steps_max` files of a volume (None: all). What is refused stays for the next call.
        One thread at a time for each volume."""
        freed_bytes = 0
        deferred: list[int] = []
        doomed = self._doomed.get(volume.id, deque())
        hollow = [path for path, (owner, _) in list(self._holes.items()) if owner is volume]
        if not (doomed or hollow) or not _forgets(volume):
            return Reclaimed(0, deferred)
        for _ in range(len(doomed) if steps_max is None else min(steps_max, len(doomed))):
            path = doomed.popleft()
            with self._lock:
                self._holes.pop(path, None)
            try:
                freed_bytes += files.remove(path)
            except OSError as error:
                volume.trouble(error, "removing a data file")
        for path in hollow[:steps_max]:
            with self._lock:
                if path not in self._holes:
                    continue
                holes = self._holes[path][1]
                if self.held[holes.object_id]:
                    deferred.append(holes.object_id)
                    continue
                del self._holes[path]
                self._punching.add(path)
            done = False
            try:
                done = self._punch(volume, path, holes)
            finally:
                with self._lock:
                    self._punching.discard(path)
                    self._lock.notify_all()
                    if not done:
                        here = self._holes.setdefault(path, (volume, holes))[1]
                        here.blocks.update(holes.blocks)
            if done:
                freed_bytes += len(holes.blocks) * holes.block_bytes
            else:
                deferred.append(holes.object_id)
        return Reclaimed(freed_bytes, deferred)

    def _punch(self, volume: Volume, path: str, holes: _Holes) -> bool:
        """False when a reader's lease forbids it."""
        try:
            with volume.headers:
                return files.punch_blocks(path, holes.block_bytes, holes.blocks)
        except OSError as error:
            # a filesystem that cannot punch: the space comes back when the whole object goes
            self._tell(
                StoreEvent("punch-failed", volume.id, f"{path}: {error}; its space returns with the whole object")
            )
            holes.blocks.clear()
            return True


def _sealed(volume: Volume) -> str:
    """The name for effects that wait for the commit under way."""
    return f"{volume.id} sealed"


def _forgets(volume: Volume) -> bool:
    """Let the durable index forget settled entries before any of their bytes go. Otherwise after a machine stop it
    would name a file with holes, or none, and call the object lost. Returns whether it did."""
    if not volume.durable.unsettled or volume.state == "out":
        return True
    try:
        volume.durable.commit({})
    except (OSError, Corrupt) as error:
        volume.trouble(error, "committing to the durable index")
        return False
    return True
