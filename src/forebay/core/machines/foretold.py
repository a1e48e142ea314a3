"""What jobs told of the blocks that they will read: datasets, and the uses of their blocks in order.

Theory. A *job* gives its future as *accesses*, each some blocks of one object of its listing. An access is one or more
*uses*, one for each block. Uses are numbered in order, and each knows the number of the next use of the same block. So
the next use of a block is one look-up (`Job.head`), and passing a use is one step along its chain. Memory is about 24
bytes a use and 16 bytes a block of the listing. `core/machines/hints.py` asks all jobs together.

Invariants. (1) `head[block]` is the number of the block's first use that has not passed and was not read apart, or
NONE. (2) The chain from there rises.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from forebay.core import limits

NONE = (1 << 64) - 1
TRIM_USES_MIN = 65_536  # passed uses are dropped when there are this many


class Dataset:
    """The blocks of a listing's objects, numbered consecutively. An empty object counts as one block."""

    def __init__(self, number: int, sizes: Iterable[int], block_bytes: int = limits.BLOCK_BYTES) -> None:
        self.number = number
        self.block_bytes = block_bytes
        self.sizes = sizes if isinstance(sizes, memoryview) else array("Q", sizes)
        self.starts = array("Q", [0])  # of each object's blocks, and the end
        total = 0
        for size in self.sizes:
            total += -(-size // block_bytes) or 1
            self.starts.append(total)
        self.units = array("Q", bytes(8 * total))  # by block, one more than the unit; 0: it is not here
        self.jobs: list[Job] = []

    @property
    def objects(self) -> int:
        return len(self.starts) - 1

    def block(self, object: int, block: int) -> int:
        """The number of an object's block, or -1 if the object has no such block."""
        number = self.starts[object] + block
        return number if number < self.starts[object + 1] else -1

    def place(self, number: int) -> tuple[int, int]:
        """(object, block) of a block's number."""
        at = bisect_right(self.starts, number) - 1
        return at, number - self.starts[at]

    def is_here(self, object: int, first: int, end: int) -> bool:
        """Whether all these blocks are here."""
        start = self.starts[object]
        return all(self.units[start + first : start + end])

    def size_of(self, object: int, block: int) -> int:
        """How many bytes a block has."""
        return min(self.block_bytes, self.sizes[object] - block * self.block_bytes)

    def size_of_number(self, number: int) -> int:
        """How many bytes a block has, by its number."""
        return self.size_of(*self.place(number))


class Job:
    """What one job told, from its access `start` on. `share`: of the uses that all jobs pass, how many are its."""

    def __init__(self, name: str, dataset: Dataset, start: int, share: float) -> None:
        self.name, self.dataset, self.share = name, dataset, share
        self.heard_s = 0.0
        self.passed_before = 0  # by all jobs, at its last report
        self.reset(start)

    def reset(self, start: int) -> None:
        """Forget all accesses; the next one is number `start`."""
        blocks = len(self.dataset.units)
        self.access_base = self.position = start  # number of the first access that is kept, and of the next one
        self.use_ends = array("Q")  # where each kept access ends, in uses
        self.use_base = self.use = 0  # number of the first use that is kept, and of the first one not passed
        self.uses = array("I")  # the block of each use
        self.next = array("Q")  # the next use of the same block, or NONE
        self.head = array("Q", [NONE]) * blocks
        self.tail = array("Q", [NONE]) * blocks
        self.ahead = 0  # the first use that `wanted` has not looked at
        self.fetched: deque[tuple[int, int]] = deque()  # (use, bytes) that `wanted` gave and that were not passed
        self.fetched_bytes = 0
        self.apart: dict[int, int] = {}  # by block: bytes that were read by themselves, less than a use reads
        self.sizes: list[tuple[int, int]] = []  # (first use, bytes that a use from there on reads of its block)

    @property
    def known(self) -> int:
        return self.access_base + len(self.use_ends)

    @property
    def last_use(self) -> int:
        return self.use_base + len(self.uses)

    def end_of(self, access: int) -> int:
        """The number of the first use after those of the accesses before `access`."""
        return self.use_ends[access - self.access_base - 1] if access > self.access_base else self.use_base

    def use_bytes(self, use: int) -> int:
        """How many bytes a use reads of its block; 0: all."""
        at = bisect_right(self.sizes, (use, sys.maxsize)) - 1
        return self.sizes[at][1] if at >= 0 else 0

    def sized(self, use_bytes: int) -> None:
        """Uses that are added from now on read so many bytes."""
        if self.use_bytes(self.last_use) != use_bytes:
            self.sizes.append((self.last_use, use_bytes))

    def add(self, first: int, count: int) -> None:
        """One more access, of `count` blocks from number `first`."""
        use = self.last_use
        head, tail, chain, base = self.head, self.tail, self.next, self.use_base
        for block in range(first, first + count):
            before = tail[block]
            if before != NONE and before >= self.use:
                chain[before - base] = use
            if head[block] == NONE:
                head[block] = use
            tail[block] = use
            self.uses.append(block)
            chain.append(NONE)
            use += 1
        self.use_ends.append(use)

    def read_apart(self, block: int, size_bytes: int, whole_bytes: float) -> None:
        """So many bytes of a block were read by themselves: its next use is over, once that reads no more of it than
        was read (`whole_bytes` of one that reads all)."""
        use = self.head[block]
        read_bytes, reads_bytes = self.apart.pop(block, 0) + size_bytes, self.use_bytes(use) or whole_bytes
        if read_bytes < reads_bytes:
            self.apart[block] = read_bytes
        else:
            self.head[block] = self.next[use - self.use_base]

    def trim(self) -> None:
        """Drop passed uses once there are enough to be worth it."""
        passed = self.use - self.use_base
        if passed < TRIM_USES_MIN or passed < len(self.uses) // 2:
            return
        accesses = self.position - self.access_base
        del self.uses[:passed], self.next[:passed], self.use_ends[:accesses]
        self.use_base, self.access_base = self.use, self.position
        del self.sizes[: max(0, bisect_right(self.sizes, (self.use, sys.maxsize)) - 1)]
