"""Which stored bytes this process compared with their checksums, so that each is compared once before its first use.

Theory. A hit sends bytes straight from the page cache, and nobody looks at them. Comparing bytes once, when they come
into memory, finds what rotted on the disk; comparing at each use would cost as much as the use. So a process remembers
what it compared. The hot question ("all of this object?") is one byte in a page of bytes: object ids are handed out in
order, so the objects in use need few pages. Objects compared in part are kept separately.

Forgetting is always safe: the bytes are compared again. The owner forgets dropped blocks, since the same block of the
same object may come again.

Rejected: a bit of the index record (a write for each first use); a set of ids (seventy bytes each, for a million
objects); the open files as memory (a thousand of them are open, of a million).

Invariants. (1) Bytes marked here were compared, or made from bytes that were hashed, in this process since they were
last dropped. (2) At most PAGES_MAX pages and PARTS_MAX objects in part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

PAGE_BITS = 12
_PAGE_IDS = 1 << PAGE_BITS
PLACE = _PAGE_IDS - 1
PAGES_MAX = 8192  # 32 MiB, thirty million objects
PARTS_MAX = 16_384


class Compared:
    """See the module's header. Any thread may ask and add."""

    __slots__ = ("_parts", "pages")

    def __init__(self) -> None:
        self.pages: OrderedDict[int, bytearray] = OrderedDict()  # `StoreReader.lookup` reads them itself
        self._parts: OrderedDict[int, int] = OrderedDict()

    def whole(self, object_id: int) -> bool:
        """Whether all of the object was compared."""
        page = self.pages.get(object_id >> PAGE_BITS)
        return page is not None and page[object_id & PLACE] == 1

    def has(self, object_id: int, first: int, end: int) -> bool:
        """Whether its blocks [first, end) were compared."""
        if self.whole(object_id):
            return True
        wanted = ((1 << (end - first)) - 1) << first
        return self._parts.get(object_id, 0) & wanted == wanted

    def add(self, object_id: int, blocks: Iterable[int], count: int) -> None:
        """Mark these of the object's `count` blocks as compared. Inline bytes are one block."""
        if self.whole(object_id):
            return
        bits = self._parts.pop(object_id, 0)
        for block in blocks:
            bits |= 1 << block
        if bits == (1 << count) - 1:
            number = object_id >> PAGE_BITS
            page = self.pages.get(number)
            if page is None:
                page = self.pages[number] = bytearray(_PAGE_IDS)
                if len(self.pages) > PAGES_MAX:
                    self.pages.popitem(last=False)
            page[object_id & PLACE] = 1
        elif bits:
            self._parts[object_id] = bits
            if len(self._parts) > PARTS_MAX:
                self._parts.popitem(last=False)

    def forget(self, object_id: int) -> None:
        """Forget the object, of which something was dropped."""
        self._parts.pop(object_id, None)
        page = self.pages.get(object_id >> PAGE_BITS)
        if page is not None:
            page[object_id & PLACE] = 0
