"""What no backend has in a stretch of keys: of this node, and in a cluster of every node that may have such.

Theory. A listing needs such keys window by window. This node's are read from memory. Other nodes are asked over S3, all
at once, and each window is kept until the listing is past its end. All are read before the backend is asked, so a write
that reaches it in between is in at least one of the two (`pages.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from forebay.core import limits
from forebay.core.types import ListEntry

WINDOW = limits.LIST_KEYS_MAX
Found = list[tuple[str, ListEntry | None]]  # a key, and what it is there now; None: deleted


class Window(NamedTuple):
    """Consecutive keys. `is_last`: none follows."""

    found: Found
    is_last: bool


class OwedKeys:
    """The keys under one prefix. `own` and `others` answer with the next WINDOW of them, or fewer if no more follow."""

    def __init__(self, own: Callable[[str], Found], others: Sequence[Callable[[str], Awaitable[Found]]]) -> None:
        self._own, self._others = own, others
        self._read: list[tuple[str, Found] | None] = [None for _ in others]  # after which key, and what they said

    async def after(self, after: str) -> Window:
        """The next keys. Errors of a node that does not say."""
        found = self._own(after)
        if not self._others:
            return Window(found, len(found) < WINDOW)
        windows = [found, *await self._of_others(after)]
        ends = [window[-1][0] for window in windows if len(window) >= WINDOW]
        end = min(ends, default="")
        together = {
            key: entry for window in windows for key, entry in window if key > after and (not end or key <= end)
        }
        return Window(sorted(together.items(), key=lambda item: item[0]), not end)

    async def _of_others(self, after: str) -> list[Found]:
        async def read(number: int) -> Found:
            began, found = self._read[number] or ("", [])
            if self._read[number] is None or began > after or (len(found) >= WINDOW and found[-1][0] <= after):
                found = await self._others[number](after)
                self._read[number] = after, found
            return found

        return await asyncio.gather(*map(read, range(len(self._others))))
