"""Merges two pages of one bucket's listing: the backend's, and that of what only this node has.

Theory. Both sides list the same (prefix, delimiter, start_after) and answer with a page in byte order of UTF-8 keys. A
common prefix has its own place in that order. A page that is not the last covers the order up to its `next_after`, its
*horizon*. So the merged page ends at the nearer horizon, or when it is full, and both sides continue from there. Memory
is two pages, whatever the bucket's size. Python compares text by code point, which is the byte order of UTF-8.

A key that both sides have is shown as `local` has it, which is newer: acknowledged and not flushed yet. A key in
`removed` (deleted here, not there yet) is left out.

Rejected: sorting both sides (a bucket may have a hundred million keys); a heap of streams (there are only two).

Invariants. (1) Following `next_after` to the end shows every item once, in order. (2) A page holds at most `limit`
items. (3) A page that is not the last advances `next_after`.
"""

from __future__ import annotations

from collections.abc import Collection

from forebay.core.types import ListEntry, ListPage

HIGHEST = "\U0010ffff"  # sorts after everything that starts with the text before it, unless that holds it too


def after_prefix(prefix: str) -> str:
    """A `start_after` that passes over everything under the common prefix `prefix`."""
    return prefix + HIGHEST


def start_of_marker(marker: str, prefix: str, delimiter: str) -> str:
    """The `start_after` that an S3 marker means.

    A marker inside or at a common prefix passes over all of it: S3 has shown that prefix already.
    """
    if delimiter and marker.startswith(prefix):
        at = marker.find(delimiter, len(prefix))
        if at >= 0:
            return after_prefix(marker[: at + len(delimiter)])
    return marker


def marker_of(next_after: str) -> str:
    """The S3 marker that means `next_after`: a common prefix is named by itself (`start_of_marker` reads it back)."""
    return next_after.removesuffix(HIGHEST)


def last_shown(page: ListPage) -> str:
    """The last key or common prefix of a page in its order; "" for an empty page."""
    key = page.entries[-1].key if page.entries else ""
    prefix = page.prefixes[-1] if page.prefixes else ""
    return max(key, prefix)


def merge_pages(backend: ListPage, local: ListPage, limit: int, removed: Collection[str] = ()) -> ListPage:
    """The next page of both together. Both must answer the same question.

    `removed` holds keys only; a caller with removals under a common prefix lists below that prefix to see whether
    anything is left.
    """
    assert limit > 0, "a page of nothing moves nowhere"
    horizon = min((page.next_after for page in (backend, local) if page.next_after), default="")
    entries = {entry.key: entry for entry in backend.entries if entry.key not in removed}
    entries.update((entry.key, entry) for entry in local.entries)
    merged: list[tuple[str, ListEntry | None]] = [*entries.items()]
    merged += [(prefix, None) for prefix in {*backend.prefixes, *local.prefixes}]
    merged.sort(key=lambda item: item[0])
    covered = [item for item in merged if not horizon or item[0] <= horizon]
    shown = covered[:limit]
    if len(shown) < len(covered):
        text, entry = shown[-1]
        next_after = after_prefix(text) if entry is None else text
    else:
        next_after = horizon
    return ListPage(
        [entry for _, entry in shown if entry is not None], [text for text, entry in shown if entry is None], next_after
    )
