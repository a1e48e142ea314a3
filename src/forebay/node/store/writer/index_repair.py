"""Repairs a volume's index from its durable index and its files, in small steps, while it is served.

Theory. After a start a volume is *behind*: owed records may not be in view (`owned.py`), and after a machine stop the
index is filled from the files (`rebuild.py`). Each step handles one entry or one file. It takes about ten microseconds
and at most a few disk reads, so the caller can let other work run at any time.

Invariants. (1) The steps may be repeated, or begun again after a part of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from forebay.core.errors import Corrupt
from forebay.node.store.disk import keys
from forebay.node.store.disk.notes import Owed
from forebay.node.store.disk.volume import Volume
from forebay.node.store.writer import owned, rebuild
from forebay.node.store.writer.owned import Name, NotedRecord

if TYPE_CHECKING:
    from forebay.node.store.writer.volumes import VolumeSet

PENDING_MAX = 1000  # changes that are committed together


class Catching:
    """For `Store`. `busy`: whether an object's file is in use by its writer. `flush` commits pending changes. Objects
    from `ids_below` on were made since the start."""

    def __init__(self, volumes: VolumeSet, busy: Callable[[int], bool], flush: Callable[[], int]) -> None:
        self._volumes, self._busy, self._flush = volumes, busy, flush
        self.ids_below = sys.maxsize

    @property
    def is_behind(self) -> bool:
        """Whether owed records may not be in view, or an index may lack what its files hold."""
        return any(volume.behind for volume in self._volumes.usable())

    @property
    def may_catch_up(self) -> bool:
        """Whether `steps` would help. On a full disk they do until its index refuses a commit."""
        behind = [volume for volume in self._volumes.usable() if volume.behind]
        return any(volume.state == "ok" or (volume.state == "full" and not volume.flushes_lost) for volume in behind)

    def steps(self, held: Callable[[Name], bool] = lambda name: False) -> Iterator[Owed | None]:
        """Restore records to view, in steps; yields what is owed to backends, or None. Continue whenever there is time.
        `held`: keys with a write under way, which are left alone. A volume that fails is out; one whose index refuses a
        commit stays behind until the next time."""
        for volume in self._volumes.usable():
            flushes_lost = volume.flushes_lost
            todo = steps(volume, held, self._busy, self.ids_below, self._belongs) if volume.behind else iter(())
            while volume.behind and volume.state != "out":
                try:
                    kept = next(todo)
                except StopIteration:
                    self._flush()
                    volume.behind = volume.flushes_lost != flushes_lost
                    break
                except (OSError, Corrupt, msgspec.MsgspecError, UnicodeDecodeError) as error:
                    damage = error if isinstance(error, OSError | Corrupt) else Corrupt(str(error))
                    volume.trouble(damage, "bringing what it owes into view")
                    break
                if volume.index.pending >= PENDING_MAX:
                    self._flush()
                yield _owed(kept)
        self._flush()

    def _belongs(self, volume: Volume, bucket: str, key: str) -> bool:
        return self._volumes.volume_of(bucket, key) == volume.id

    def before_moving(self) -> None:
        """Restore everything at once. The flusher still hears of what is owed through `steps`."""
        behind = [volume for volume in self._volumes.usable() if volume.behind]
        for _ in self.steps():
            pass
        for volume in behind:
            volume.behind = True

    def restore_key(self, bucket: str, key: str) -> Owed | None:
        """Restore one key now; returns what it owes. No write of it may be under way. `Unavailable` if its volume
        cannot."""
        volume = self._volumes.volume_at(bucket, key)
        if volume is None or not volume.behind:
            return None
        flushes_lost = volume.flushes_lost
        try:
            kept = owned.restore_key(volume, keys.index_key(bucket, key), bucket, key)
        except (OSError, Corrupt) as error:
            raise volume.trouble(error, "bringing what it owes into view") from error
        self._flush()
        if volume.flushes_lost != flushes_lost:
            raise self._volumes.unusable(volume)
        return _owed(kept)


def _owed(kept: NotedRecord | None) -> Owed | None:
    """What of it is to be flushed."""
    return Owed(kept.bucket, kept.key, kept.note, kept.durable) if kept is not None and not kept.note.local else None


def steps(
    volume: Volume,
    held: Callable[[Name], bool],
    busy: Callable[[int], bool],
    ids_below: int,
    belongs: rebuild.Belongs,
) -> Iterator[NotedRecord | None]:
    """Yields what the volume owes, or None after a step that found nothing. The caller flushes the index.

    `held`: keys with a write under way. `busy`: objects whose file is in use. Objects from `ids_below` on were made
    since the start. `OSError` or `Corrupt`.
    """
    yield from owned.restore(volume, held, ids_below)
    if volume.rebuilding:
        volume.rebuilt((yield from rebuild.rebuild(volume, busy, ids_below, belongs)))
        yield from owned.restore(volume, held, ids_below)  # again, for entries whose file was not what its header said


def at_once(volume: Volume) -> None:
    """All steps, for a volume that nobody uses yet; nobody hears what it owes. `OSError` or `Corrupt`."""
    for _ in steps(volume, lambda name: False, lambda object_id: False, sys.maxsize, lambda *name: True):
        if volume.index.pending >= PENDING_MAX:
            volume.commit()
    volume.commit()
