"""Listings as a writer expects them: the backend's keys, corrected by the writes it has not received yet.

Theory. A page of the backend is merged with what the node owes in the same stretch of keys (`core/pages.py`): owed
objects are added, owed deletes left out. The owed keys are read *before* the backend is asked. So a write that reaches
the backend in between is in at least one of the two, and a deleted key is missing from at least one. Only as many owed
keys are read as a page may need, so memory and time depend on the page, not on the bucket or the debt. In a cluster
what other nodes owe is merged too (`owed_keys.py`), and what they have of local buckets.

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
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from forebay.backends.seam import Backend
from forebay.core import limits
from forebay.core.errors import Unavailable
from forebay.core.messages.calls import CachedEntry, CachedPage, ListCall
from forebay.core.pages import after_prefix, merge_pages
from forebay.core.record import Record, State, cached_bytes
from forebay.core.types import Bucket, ListEntry, ListPage
from forebay.node.engine.buckets import Served
from forebay.node.engine.read.owed_keys import WINDOW, Found, OwedKeys
from forebay.node.store.disk.notes import Note
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store

Ask = Callable[[str], Awaitable[Found]]  # another node, for the keys after one
SCAN_PAGES_MAX = 100  # index pages scanned for one page of a listing with a delimiter


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
        self,
        store: Store,
        index: StoreReader,
        owed: Owed,
        listed: Callable[[str, str, str, str], None],
        others: Callable[[Bucket, str], Sequence[Ask] | None] = lambda bucket, prefix: None,
    ) -> None:
        """`listed` hears which keys a page of the backend covers: bucket, prefix, after, up to. `others`: who else may
        have what no backend has under a prefix; None for a node alone."""
        self._store, self._index, self._owed, self._listed, self._others = store, index, owed, listed, others

    async def page(self, served: Served, call: ListCall) -> ListPage:
        """The next page of a bucket, as it is now. `VolumeMissing` if keys may be missing from it, `Unavailable` while
        a change waits for its disk."""
        self._store.check_bucket(served.bucket.name)
        limit = max(1, min(call.limit, limits.LIST_KEYS_MAX))
        bucket, after = served.bucket, call.start_after
        others = self._others(bucket, call.prefix)
        if bucket.write == "local" and others is None:
            found, prefixes, after = self._scan(bucket.name, call.prefix, call.delimiter, after, limit, lost=True)
            return ListPage([_entry(key, record) for key, record in found], prefixes, after)
        while True:
            owed = OwedKeys(functools.partial(self._own, bucket, call.prefix), others or ())
            page = await self._merged(bucket.name, served.backend, owed, call.prefix, call.delimiter, after, limit)
            if page.entries or page.prefixes or not page.next_after:
                return self._as_read(bucket.name, page) if bucket.write == "back" else page
            after = page.next_after
            self._store.check_bucket(bucket.name)

    async def owed(self, bucket: Bucket, prefix: str, after: str) -> Found:
        """For another node: the next keys that no backend has."""
        self._store.check_bucket(bucket.name)
        return self._own(bucket, prefix, after)

    async def _merged(
        self, bucket: str, backend: Backend, owed: OwedKeys, prefix: str, delimiter: str, after: str, limit: int
    ) -> ListPage:
        ours = await self._ours(owed, prefix, delimiter, after)
        theirs = await backend.list_page(prefix, delimiter, after, limit)
        self._listed(bucket, prefix, after, theirs.next_after)
        if not (ours.page.entries or ours.page.prefixes or ours.removed or ours.thinned):
            return theirs
        kept = [
            group
            for group in theirs.prefixes
            if group not in ours.thinned or await self._anything(bucket, backend, owed, group, after)
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

    async def _anything(self, bucket: str, backend: Backend, owed: OwedKeys, prefix: str, after: str) -> bool:
        """Whether `prefix` still has a key after `after`."""
        after = after if after.startswith(prefix) else ""
        while True:
            page = await self._merged(bucket, backend, owed, prefix, "", after, limits.LIST_KEYS_MAX)
            if page.entries:
                return True
            if not page.next_after:
                return False
            after = page.next_after

    async def _ours(self, owed: OwedKeys, prefix: str, delimiter: str, after: str) -> _Ours:
        """What is owed from `after` on: a window of it, or all if there is less."""
        entries: list[ListEntry] = []
        prefixes: list[str] = []
        removed: set[str] = set()
        thinned: set[str] = set()
        at = max(after, prefix[:-1])  # windows may begin before the prefix
        while len(entries) + len(prefixes) + len(removed) + len(thinned) < WINDOW:
            found, is_last = await owed.after(at)
            for key, entry in found:
                if not key.startswith(prefix):
                    if key > prefix:
                        return _Ours(ListPage(entries, prefixes), removed, thinned)
                    continue
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut >= 0:
                    group = key[: cut + len(delimiter)]
                    if await _anything_new(owed, group, key, entry):
                        prefixes.append(group)
                    else:
                        thinned.add(group)
                    at = after_prefix(group)
                    break
                at = key
                if entry is None:
                    removed.add(key)
                else:
                    entries.append(entry)
            else:
                if is_last:
                    return _Ours(ListPage(entries, prefixes), removed, thinned)
                at = max(at, found[-1][0]) if found else at
        return _Ours(ListPage(entries, prefixes, at), removed, thinned)

    def _own(self, bucket: Bucket, prefix: str, after: str) -> Found:
        """The next keys under the prefix of which this node has what no backend has. Does not await."""
        name = bucket.name
        lost = self._store.lost_in(name, prefix, after, WINDOW)
        found: Found = [(each.key, None if each.note.is_delete else _entry(each.key, each.record)) for each in lost]
        if bucket.write == "local":
            found += [(key, _entry(key, record)) for key, record in self._local(name, prefix, after)]
        else:
            found += [
                (key, self._shown(name, key, note)) for key, note in self._owed.window(name, prefix, after, WINDOW)
            ]
        return sorted(found, key=lambda item: item[0])[:WINDOW] if lost else found

    def _shown(self, bucket: str, key: str, note: Note) -> ListEntry | None:
        if note.is_delete:
            return None
        lost = self._store.lost_of(bucket, key)
        record = self._store.lookup(bucket, key) or (None if lost is None else lost.record)
        if record is None:
            # a disk has not answered: a delete is under way there, and readers still see what was before
            raise Unavailable(
                f"{bucket}/{key} is being deleted on a disk that does not answer: list again", retry_after_s=1.0
            )
        return _entry(key, record)

    def _local(self, bucket: str, prefix: str, after: str) -> list[tuple[str, Record]]:
        """Local objects; what is cached of another node's is none."""
        found: list[tuple[str, Record]] = []
        while len(found) < WINDOW and (page := self._index.scan(bucket, prefix, after, WINDOW)):
            found += [(key, record) for key, record in page if record.state & State.OWNED]
            after = page[-1][0]
        return found[:WINDOW]

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


async def _anything_new(owed: OwedKeys, group: str, key: str, entry: ListEntry | None) -> bool:
    """Whether an object is owed under the common prefix `group`, from `key` on, which is this."""
    while entry is None:
        found, is_last = await owed.after(key)
        for key, entry in found:
            if not key.startswith(group):
                return False
            if entry is not None:
                return True
        if is_last:
            return False
    return True


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
