"""A survey: everything under a prefix, listed from many places at once.

Theory. A listing is a chain of pages, each asked for with the last key of the page before, so a million objects take a
thousand round trips. A survey begins like any listing. Whenever a *hand* is free, the range with most left is cut
(`core/keyspace.py`), and each part is listed by itself. A page of one key shows what is behind a cut: cuts with the
same next key are merged, and a cut with nothing behind it shortens the range. So uneven ranges need no plan: a hand
that is done takes a part of a range that is not.

How much is left of a range is guessed from how far its pages have come in its width. Pages are packed as they come
(`core/formats/listing.pack`), about 100 bytes an object; nothing else is kept.

Rejected: a page with a delimiter first (finds ranges only where keys have one, and one more way to be uneven); cutting
once, at the start (the last range to end decides, and nobody knows how full ranges are).

Invariants. (1) At most `hands` requests at once. (2) Every key that exists throughout is in a piece. (3) Keys behind a
range's end are listed by the next range, which begins exactly there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.formats.listing import Piece, pack
from forebay.core.keyspace import Alphabet, cuts, is_past, share_left
from forebay.core.types import ListEntry, ListPage

HANDS = 16  # requests at once: a quarter of what one bucket may have
CUT_PAGES_MIN = 2.0  # a range with less left is not worth a cut
_UNKNOWN_PAGES = 1e6  # guess for a range without any page

AskPage = Callable[[str, int], Awaitable[ListPage]]  # (start after, limit)


class _Range:
    """The keys in (began, end], as far as they are listed. The next page begins at `next_after`."""

    def __init__(self, began: str, end: str | None, guess_pages: float) -> None:
        self.began, self.end = began, end
        self.at = self.next_after = began
        self.first = ""  # its first key, once it was seen
        self.pieces: list[Piece] = []
        self.guess_pages = guess_pages
        self.listing = False
        self.cutting = False
        self.cut_again_at = 0  # do not cut again before this many pages are listed
        self.done = False


class Survey:
    """One survey. `page` fetches the page under the prefix that starts after a key."""

    def __init__(self, page: AskPage, prefix: str, *, hands: int = HANDS) -> None:
        self.objects = 0  # so far
        self.requests = 0
        self._page, self._prefix, self._hands = page, prefix, hands
        self._busy = 0
        self._alphabet = Alphabet()
        self._ranges = [_Range("", None, _UNKNOWN_PAGES)]

    async def run(self) -> list[Piece]:
        """List everything; return the pieces, range by range. Raises the first exception of a page."""
        failed: list[BaseException] = []
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                for work in self._next_work():
                    tasks.add(asyncio.create_task(work))
                if not tasks:
                    break
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                failed += [error for task in done if (error := task.exception()) is not None]
                if failed:
                    raise failed[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [piece for each in sorted(self._ranges, key=lambda each: each.began) for piece in each.pieces]

    def _next_work(self) -> list[Coroutine[Any, Any, None]]:
        """Work for the free hands."""
        work: list[Coroutine[Any, Any, None]] = []
        for each in self._ranges:
            if not each.done and not each.listing and self._busy < self._hands:
                each.listing = True
                self._busy += 1
                work.append(self._list(each))
        free = self._hands - self._busy
        if free > 0:
            widest = max((each for each in self._ranges if self._worth_cutting(each)), key=_left, default=None)
            if widest is not None:
                widest.cutting = True
                self._busy += free
                work.append(self._cut(widest, free))
        return work

    def _worth_cutting(self, each: _Range) -> bool:
        if each.done or each.cutting or not each.pieces or len(each.pieces) < each.cut_again_at:
            return False
        return each.guess_pages >= CUT_PAGES_MIN

    # --- listing -----------------------------------------------------------------------------------------------------
    async def _list(self, range: _Range) -> None:
        """List the next page of a range."""
        try:
            self.requests += 1
            page = await self._page(range.next_after, limits.LIST_KEYS_MAX)
        finally:
            self._busy -= 1
            range.listing = False
        entries, end = page.entries, range.end
        kept = entries
        if end is not None and entries and entries[-1].key > end:
            kept = [entry for entry in entries if not is_past(entry.key, end)]
        range.next_after = page.next_after
        range.done = not page.next_after or len(kept) < len(entries)
        if not kept:
            return
        self._take(range, kept)

    def _take(self, range: _Range, entries: list[ListEntry]) -> None:
        range.first = range.first or entries[0].key
        range.pieces.append(pack(entries))
        range.at = max(range.at, entries[-1].key)
        self.objects += len(entries)
        if self.objects > limits.LISTING_OBJECTS_MAX:
            raise Invalid(
                f"there are more than {limits.LISTING_OBJECTS_MAX} objects under {self._prefix!r}, too many for one "
                "listing: name a longer prefix, or put samples together in shards"
            )
        self._alphabet.learn(
            entry.key[len(self._prefix) :] for entry in (entries[0], entries[len(entries) // 2], entries[-1])
        )
        self._guess(range)

    def _guess(self, range: _Range) -> None:
        left = share_left(range.first, range.at, range.end, self._prefix, self._alphabet)
        range.guess_pages = left * len(range.pieces)

    # --- cutting -----------------------------------------------------------------------------------------------------
    async def _cut(self, range: _Range, hands: int) -> None:
        """Cut a range into up to `hands` + 1 parts that have keys."""
        low, end = range.at, range.end
        try:
            places = cuts(low, end, self._prefix, hands + 1, self._alphabet)
            self.requests += len(places)
            found = await _all([self._page(place, 1) for place in places])
        finally:
            self._busy -= hands
            range.cutting = False
        parts: dict[str, str] = {}  # next key -> the last cut before it
        for place, page in zip(places, found, strict=True):
            first = page.entries[0].key if page.entries else ""
            if first and (end is None or not is_past(first, end)):
                parts[first] = place
            elif range.end == end and not range.done and place > range.at:
                range.end = place  # nothing is behind it
                self._guess(range)
                break
        self._split(range, [place for place in parts.values() if place > range.at])
        if parts or range.end == end:  # otherwise the range got narrower, and the next cuts may hit keys
            range.cut_again_at = len(range.pieces) + 2

    def _split(self, range: _Range, places: list[str]) -> None:
        places = [place for place in places if range.end is None or place < range.end]
        if range.done or not places:
            return
        guess_pages = range.guess_pages / (len(places) + 1)
        ends = [*places[1:], range.end]
        self._ranges += [_Range(place, end, guess_pages) for place, end in zip(places, ends, strict=True)]
        range.end = places[0]
        range.guess_pages = guess_pages


async def _all(asked: list[Awaitable[ListPage]]) -> list[ListPage]:
    """All results. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _left(range: _Range) -> float:
    return range.guess_pages
