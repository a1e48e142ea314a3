"""Listings as a writer expects them: the backend's keys, corrected by the writes it has not received yet.

Theory. A page of the backend is merged with what the node owes in the same stretch of keys (`core/pages.py`): owed
objects are added, owed deletes left out. The owed keys are read *before* the backend is asked. So a write that reaches
the backend in between is in at least one of the two, and a deleted key is missing from at least one. Only as many owed
keys are read as a page may need, so memory and time depend on the page, not on the bucket or the debt.

If the backend has keys under a common prefix and the node has deleted some of them, the prefix is shown only if a key
below it remains. That costs a request for each such prefix, and only while deletes wait.

A local bucket is listed from the index, which has everything. Lost objects (`writer/owned.py`) are listed too: a writer
who compares a listing with its own list must not conclude that they were deleted.

Rejected: asking for more than a page to make up for deleted keys (a short page is allowed; only an empty page that is
not the last would be odd, and is never returned).

Invariant. Following `next_after` shows every key that exists throughout, once, in byte order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from forebay.backends.seam import Backend
from forebay.core import limits
from forebay.core.errors import Unavailable
from forebay.core.messages.calls import CachedEntry, CachedPage, ListCall
from forebay.core.pages import after_prefix, merge_pages
from forebay.core.record import Record, State, cached_bytes
from forebay.core.types import ListEntry, ListPage
from forebay.node.engine.buckets import Served
from forebay.node.store.disk.notes import Note
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store

SCAN_PAGES_MAX = 100  # index pages scanned for one page of a listing with a delimiter
WINDOW = limits.LIST_KEYS_MAX


class Owed(Protocol):
    """What the node owes its backends (`node/engine/flush/flusher.py`)."""

    def window(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[tuple[str, Note]]: ...


class _Ours(NamedTuple):
    """What is owed in a stretch of keys. `thinned`: common prefixes with deletes and no new objects below them."""

    page: ListPage
    removed: set[str]
    thinned: set[str]


class Pages:
    """See the module's header."""

    def __init__(
        self, store: Store, index: StoreReader, owed: Owed, listed: Callable[[str, str, str, str], None]
    ) -> None:
        """`listed` hears which keys a page of the backend covers: bucket, prefix, after, up to."""
        self._store, self._index, self._owed, self._listed = store, index, owed, listed

    async def page(self, served: Served, call: ListCall) -> ListPage:
        """The next page of a bucket, as it is now. `VolumeMissing` if keys may be missing from it, `Unavailable` while
        a change waits for its disk."""
        self._store.check_bucket(served.bucket.name)
        limit = max(1, min(call.limit, limits.LIST_KEYS_MAX))
        bucket, after = served.bucket, call.start_after
        if bucket.write == "local":
            found, prefixes, after = self._scan(bucket.name, call.prefix, call.delimiter, after, limit, lost=True)
            return ListPage([_entry(key, record) for key, record in found], prefixes, after)
        while True:
            page = await self._merged(bucket.name, served.backend, call.prefix, call.delimiter, after, limit)
            if page.entries or page.prefixes or not page.next_after:
                return self._as_read(bucket.name, page) if bucket.write == "back" else page
            after = page.next_after
            self._store.check_bucket(bucket.name)

    async def _merged(
        self, bucket: str, backend: Backend, prefix: str, delimiter: str, after: str, limit: int
    ) -> ListPage:
        ours = self._ours(bucket, prefix, delimiter, after)
        theirs = await backend.list_page(prefix, delimiter, after, limit)
        self._listed(bucket, prefix, after, theirs.next_after)
        if not (ours.page.entries or ours.page.prefixes or ours.removed or ours.thinned):
            return theirs
        kept = [
            group
            for group in theirs.prefixes
            if group not in ours.thinned or await self._anything(bucket, backend, group, after)
        ]
        return merge_pages(ListPage(theirs.entries, kept, theirs.next_after), ours.page, limit, ours.removed)

    def _as_read(self, bucket: str, page: ListPage) -> ListPage:
        """The page with the ETags that reads show: a written-back object keeps its own ETag here, and clients
        compare."""
        for at, entry in enumerate(page.entries):
            record = self._store.lookup(bucket, entry.key)
            if record is not None and record.etag != entry.etag and record.version.strip('"') == entry.etag.strip('"'):
                page.entries[at] = entry._replace(etag=record.etag)
        return page

    async def _anything(self, bucket: str, backend: Backend, prefix: str, after: str) -> bool:
        """Whether `prefix` still has a key after `after`."""
        after = after if after.startswith(prefix) else ""
        while True:
            page = await self._merged(bucket, backend, prefix, "", after, limits.LIST_KEYS_MAX)
            if page.entries:
                return True
            if not page.next_after:
                return False
            after = page.next_after

    def _ours(self, bucket: str, prefix: str, delimiter: str, after: str) -> _Ours:
        """What is owed from `after` on: a window of it, or all if there is less. Does not await."""
        entries: list[ListEntry] = []
        prefixes: list[str] = []
        removed: set[str] = set()
        thinned: set[str] = set()
        at = after
        while len(entries) + len(prefixes) + len(removed) + len(thinned) < WINDOW:
            found = self._window(bucket, prefix, at)
            for key, note in found:
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut >= 0:
                    group = key[: cut + len(delimiter)]
                    if self._anything_new(bucket, group, key, note):
                        prefixes.append(group)
                    else:
                        thinned.add(group)
                    at = after_prefix(group)
                    break
                at = key
                record = self._store.lookup(bucket, key) or self._lost_record(bucket, key)
                if note.is_delete:
                    removed.add(key)
                elif record is not None:
                    entries.append(_entry(key, record))
                else:  # a disk has not answered: a delete is under way there, and readers still see what was before
                    raise Unavailable(
                        f"{bucket}/{key} is being deleted on a disk that does not answer: list again", retry_after_s=1.0
                    )
            else:
                if len(found) < WINDOW:
                    return _Ours(ListPage(entries, prefixes), removed, thinned)
        return _Ours(ListPage(entries, prefixes, at), removed, thinned)

    def _window(self, bucket: str, prefix: str, after: str) -> list[tuple[str, Note]]:
        """The next owed keys, with the lost ones, which are listed until they are given up."""
        owed = self._owed.window(bucket, prefix, after, WINDOW)
        lost = self._store.lost_in(bucket, prefix, after, WINDOW)
        if not lost:
            return owed
        return sorted([*owed, *((each.key, each.note) for each in lost)], key=lambda found: found[0])[:WINDOW]

    def _lost_record(self, bucket: str, key: str) -> Record | None:
        lost = self._store.lost_of(bucket, key)
        return lost.record if lost is not None else None

    def _anything_new(self, bucket: str, group: str, key: str, note: Note) -> bool:
        """Whether an object is owed under the common prefix `group`, from `key` on."""
        while note.is_delete:
            found = self._window(bucket, group, key)
            if not found:
                return False
            key, note = next(((k, n) for k, n in found if not n.is_delete), found[-1])
        return True

    # --- from the index alone ----------------------------------------------------------------------------------------
    async def cached(self, call: ListCall) -> CachedPage:
        """The next page of the index's keys in a bucket. The backend is not asked."""
        limit = max(1, min(call.limit, limits.LIST_KEYS_MAX))
        found, prefixes, after = self._scan(call.bucket, call.prefix, call.delimiter, call.start_after, limit)
        await asyncio.sleep(0)
        return CachedPage([_cached_entry(key, record) for key, record in found], prefixes, after)

    def _scan(
        self, bucket: str, prefix: str, delimiter: str, after: str, limit: int, *, lost: bool = False
    ) -> tuple[list[tuple[str, Record]], list[str], str]:
        """A page of the index, with lost objects if `lost` is set."""

        def look(after: str, limit: int) -> list[tuple[str, Record]]:
            found = self._index.scan(bucket, prefix, after, limit)
            gone = self._store.lost_in(bucket, prefix, after, limit) if lost else []
            if not gone:
                return found
            return sorted([*found, *((each.key, each.record) for each in gone)], key=lambda item: item[0])[:limit]

        entries: list[tuple[str, Record]] = []
        prefixes: list[str] = []
        for _ in range(SCAN_PAGES_MAX):
            room = limit - len(entries) - len(prefixes)
            found = look(after, room)
            for key, record in found:
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut < 0:
                    entries.append((key, record))
                    after = key
                elif not prefixes or not key.startswith(prefixes[-1]):
                    prefixes.append(key[: cut + len(delimiter)])
                    after = after_prefix(prefixes[-1])
                    break  # keys below it are not shown: go on behind it
            else:
                if len(found) < room:
                    return entries, prefixes, ""
            if len(entries) + len(prefixes) >= limit:
                if not look(after, 1):
                    after = ""  # nothing follows: tell the client that this full page is the last
                break
        return entries, prefixes, after


def _entry(key: str, record: Record) -> ListEntry:
    return ListEntry(key, record.size_bytes, record.etag, record.modified_s)


def _cached_entry(key: str, record: Record) -> CachedEntry:
    return CachedEntry(
        key,
        record.size_bytes,
        record.etag,
        record.modified_s,
        cached_bytes(record),
        bool(record.state & State.PINNED),
        bool(record.state & State.DIRTY),
    )
