"""Bringing a volume's index to what its durable index and its files say, in small steps, while it is served.

Theory. After a start a volume is *behind*: what it owes may not be in view (`owned.py`), and after a machine stop the
index is filled from the files (`rebuild.py`). Each step is one entry or one file, some ten microseconds and at most a
few looks at the disk, so that who drives them can give others a turn whenever he likes.

Invariants. (1) Twice is as good as once, and half of it may be begun anew.
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
from forebay.node.store.writer.owned import Kept, Name

if TYPE_CHECKING:
    from forebay.node.store.writer.volumes import VolumeSet

PENDING_MAX = 1000  # changes that are committed together


class Catching:
    """For `Store`: `busy` tells objects whose file is in use by its writer, `flush` commits what is pending. Objects
    from `ids_below` on were made since the start."""

    def __init__(self, volumes: VolumeSet, busy: Callable[[int], bool], flush: Callable[[], int]) -> None:
        self._volumes, self._busy, self._flush = volumes, busy, flush
        self.ids_below = sys.maxsize

    @property
    def is_behind(self) -> bool:
        """Whether something that is owed may not be in view, or not all that the files of a volume hold."""
        return any(volume.behind for volume in self._volumes.usable())

    @property
    def may_catch_up(self) -> bool:
        """Whether `steps` would help: of a full disk, until its index takes no more."""
        behind = [volume for volume in self._volumes.usable() if volume.behind]
        return any(volume.state == "ok" or (volume.state == "full" and not volume.flushes_lost) for volume in behind)

    def steps(self, held: Callable[[Name], bool] = lambda name: False) -> Iterator[Owed | None]:
        """Bring into view what is not, in steps: what is owed to backends, or None. Go on when there is time; `held`
        tells keys whose write is under way, which are left alone. A volume that errs is out; one whose index takes no
        more is behind until the next time."""
        for volume in self._volumes.usable():
            flushes_lost = volume.flushes_lost
            todo = steps(volume, held, self._busy, self.ids_below) if volume.behind else iter(())
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

    def before_moving(self) -> None:
        """Bring all into view at once. Who shall hear of what is owed hears of it by `steps`, as ever."""
        behind = [volume for volume in self._volumes.usable() if volume.behind]
        for _ in self.steps():
            pass
        for volume in behind:
            volume.behind = True

    def restore_key(self, bucket: str, key: str) -> Owed | None:
        """Bring one key into view, now; what is owed of it. No write of it is under way. `Unavailable` if its volume
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


def _owed(kept: Kept | None) -> Owed | None:
    """What is to be flushed of it."""
    return Owed(kept.bucket, kept.key, kept.note, kept.durable) if kept is not None and not kept.note.local else None


def steps(
    volume: Volume, held: Callable[[Name], bool], busy: Callable[[int], bool], ids_below: int
) -> Iterator[Kept | None]:
    """What the volume owes, or None after a step that found nothing of it. Whoever goes on flushes the index.

    `held` tells keys whose write is under way, `busy` objects whose file is; objects from `ids_below` on were made
    since the start. `OSError` or `Corrupt`."""
    yield from owned.restore(volume, held, ids_below)
    if volume.rebuilding:
        volume.rebuilt((yield from rebuild.rebuild(volume, busy, ids_below)))
        yield from owned.restore(volume, held, ids_below)  # of what a file was not what its header said


def at_once(volume: Volume) -> None:
    """All steps, of a volume that nobody uses yet; what it owes is told to nobody. `OSError` or `Corrupt`."""
    for _ in steps(volume, lambda name: False, lambda object_id: False, sys.maxsize):
        if volume.index.pending >= PENDING_MAX:
            volume.commit()
    volume.commit()
