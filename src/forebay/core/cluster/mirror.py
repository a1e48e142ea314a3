"""What a watcher of agreed state knows, and what it must be told next.

Theory. Whoever follows a prefix of the agreed state (`meta/seam.py`) holds a copy of it. The copy is made by a listing
and kept by the changes that follow. Both have revisions, so it is always known which of two is newer: a listing brings
the copy to its revision, whatever it was before, and a change that the copy has already is dropped. So a watcher that
was cut off, or for whom history is gone (compacted, or taken back by a restored backup), lists again, and what differs
*is* what it has to be told, deletes too.

A watch that is silent may be quiet or dead. Three numbers tell: how many entries there are, the newest revision among
them, and that of the store. If the first two are as in the copy, the entries are the same ones: a put makes the second
larger, a delete the first smaller, and a delete with a put cannot hide from the second. If the third is smaller than
the copy's, the store was taken back.

Rejected: watching from a revision that the caller remembers (once it is compacted nobody knows what was deleted).

Invariants. (1) Whoever applies all changes in order, each list at once, holds the state of the prefix at `revision`.
(2) A change is told once. (3) Only a listing takes `revision` back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Entry(NamedTuple):
    """A value and the revision of its last change."""

    key: str
    value: bytes
    revision: int


class Change(NamedTuple):
    """What a watcher is told. `value` is None for a delete."""

    key: str
    value: bytes | None
    revision: int


class Mirror:
    """See the module's header. Of one prefix."""

    def __init__(self) -> None:
        self.revision = 0  # the copy is of this one
        self._revisions: dict[str, int] = {}  # of every entry's last change

    def listed(self, entries: Iterable[Entry], revision: int) -> list[Change]:
        """All entries of the prefix at `revision`: what is different from the copy, which is now this."""
        found = {entry.key: entry for entry in entries}
        gone = [Change(key, None, revision) for key in self._revisions if key not in found]
        new = [Change(*entry) for key, entry in found.items() if self._revisions.get(key) != entry.revision]
        self._revisions = {key: entry.revision for key, entry in found.items()}
        self.revision = revision
        return sorted(new + gone, key=lambda change: (change.revision, change.key))

    def heard(self, changes: Iterable[Change]) -> list[Change]:
        """Changes as they happened, in order, whole revisions: those that the copy did not have."""
        new = [change for change in changes if change.revision > self.revision]
        for change in new:
            if change.value is None:
                self._revisions.pop(change.key, None)
            else:
                self._revisions[change.key] = change.revision
        if new:
            self.revision = new[-1].revision
        return new

    def agrees(self, count: int, newest: int, revision: int) -> bool:
        """Whether so many entries, the newest of revision `newest` (0: none), are those of the copy; `revision` is the
        store's."""
        if revision < self.revision or count != len(self._revisions):
            return False
        return newest == max(self._revisions.values(), default=0)
