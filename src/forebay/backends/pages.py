"""Cuts one page of a listing out of anything that can walk keys in byte order.

Theory. S3's listing has three rules over keys in the byte order of their UTF-8: skip keys up to `start_after`, keep
keys that begin with `prefix`, and fold keys that agree up to the next `delimiter` into one common prefix. A `Walk`
yields entries from a position on. When a group folds, the page seeks past it, so a folder of a million objects costs
one seek. Python compares text by code point, which for valid Unicode is the byte order of UTF-8.

A page that ends on a common prefix sets `next_after` to that prefix and the highest code point: no key of the group
sorts above that.

Invariants. (1) Entries and prefixes together are at most `limit`. (2) Continuing from `next_after` neither repeats nor
skips a key. (3) Memory is O(limit).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.types import ListEntry, ListPage

HIGHEST = "\U0010ffff"


class Walk(Protocol):
    """Entries in byte order of their keys, from any position on."""

    def entries(self, prefix: str, after: str, from_key: str) -> Iterator[ListEntry]:
        """All entries whose key begins with `prefix`, is above `after` and at or above `from_key`, in byte order."""
        ...


def check_limit(limit: int) -> int:
    """`limit` if a page may be that long, else `Invalid`."""
    if not 1 <= limit <= limits.LIST_KEYS_MAX:
        raise Invalid(f"a page of {limit} keys was asked for: ask for 1 to {limits.LIST_KEYS_MAX}")
    return limit


def fold(key: str, prefix: str, delimiter: str) -> str:
    """The common prefix that `key` folds into, or "" if it stands for itself."""
    if not delimiter:
        return ""
    cut = key.find(delimiter, len(prefix))
    return "" if cut < 0 else key[: cut + len(delimiter)]


def page(walk: Walk, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
    """The page of `walk` after `start_after`."""
    check_limit(limit)
    entries: list[ListEntry] = []
    prefixes: list[str] = []
    from_key, last = "", start_after
    done = start_after.removesuffix(HIGHEST) if start_after.endswith(HIGHEST) else ""  # the group folded last
    while True:
        for entry in walk.entries(prefix, start_after, from_key):
            folded = fold(entry.key, prefix, delimiter)
            if folded and folded == done:
                continue  # a key that begins with the highest code point, above the seek
            if len(entries) + len(prefixes) == limit:
                return ListPage(entries, prefixes, last)
            if folded:
                prefixes.append(folded)
                done = folded
                from_key = last = folded + HIGHEST
                break  # seek past the group
            entries.append(entry)
            last = entry.key
        else:
            return ListPage(entries, prefixes, "")
