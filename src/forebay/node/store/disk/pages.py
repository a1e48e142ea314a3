"""How many pages of an LMDB environment are in use, and how many of its file are free for reuse.

Theory. LMDB's file never shrinks: it keeps a list of unused pages inside the file, and reuses them before the file
grows. So a volume whose small objects were all deleted shows no free disk, yet has all its former room: for small
objects. Not every free page is available at once. A transaction copies what it changes before the old pages are free,
the pages of the last two transactions stay until no reader needs them, and a value of several pages needs them side by
side. So MARGIN_PAGES are never promised, nor an eighth of the rest. Pages that a commit could not use (`refused`) are
not promised again: only pages freed since then.

When a volume opens, an environment that is mostly free pages is copied without them (`compact`). Then the disk has the
room back, for files too.

Rejected: giving free pages back to the disk by punching them (which of them a reader may still look at is LMDB's own
knowledge, and the list of free pages is in its format); compacting while the node runs (the one writer would stop).

Invariant. `bytes` is at most what is free.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import lmdb

from forebay.core import limits

MARGIN_PAGES = 64
COMPACT_FREE_BYTES_MIN = 4 * limits.MIB
COMPACT_USED_BYTES_MAX = 64 * limits.MIB  # copied in a fraction of a second
_META_PAGES = 2
_LISTED_PER_PAGE = 500  # free pages that one page of LMDB's own list names, at least


class Pages(NamedTuple):
    """Pages of one environment's file, of `page_bytes` each."""

    used: int
    free: int
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.used * self.page_bytes

    @property
    def free_bytes(self) -> int:
        return self.free * self.page_bytes


def count(env: Any, tables: Iterable[Any]) -> Pages:
    """The pages as committed now. `lmdb.Error`."""
    page = env.stat()
    used = page["branch_pages"] + page["leaf_pages"] + page["overflow_pages"]
    with env.begin() as txn:
        for table in tables:
            stat = txn.stat(table)
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    there = env.info()["last_pgno"] + 1 - _META_PAGES - used
    return Pages(used, max(0, there - there // _LISTED_PER_PAGE - 1), page["psize"])


def compact(env: Any, found: Pages, directory: str) -> bool:
    """Copy an environment that is mostly free pages to a new `directory`, without them. Returns whether it did."""
    worth = found.free_bytes >= COMPACT_FREE_BYTES_MIN and found.used_bytes <= COMPACT_USED_BYTES_MAX
    if not worth or found.free < 2 * found.used:
        return False
    try:
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        env.copy(directory, compact=True)
    except (lmdb.Error, OSError):  # no room for the copy, mostly: it stays as it is
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True


class FreePages:
    """The pages of one environment, counted at the first question after `changed`."""

    def __init__(self, counted: Callable[[], Pages]) -> None:
        self._count = counted
        self._now: Pages | None = None
        self._refused = 0

    def changed(self) -> None:
        """A transaction was committed."""
        self._now = None

    def refused(self) -> None:
        """A transaction found no room: it cannot use the pages that are free now."""
        self._now = None
        self._refused = self.now.free

    @property
    def now(self) -> Pages:
        if self._now is None:
            self._now = self._count()
        return self._now

    @property
    def bytes(self) -> int:
        """How many bytes small objects can surely take without the file growing."""
        free = min(self.now.free - MARGIN_PAGES, self.now.free - self._refused)
        return max(0, free) * 7 // 8 * self.now.page_bytes
