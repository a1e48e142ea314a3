"""Counts the samples of shards, a little ahead of the epoch that comes to them.

Theory. Only reading a shard tells what is in it, so a count costs as much as the shard. `of` waits for counts, and
`ahead` starts them early. At most THREADS threads count, first what somebody waits for; no thread stays while there is
nothing to do. Counts are kept. Failures are not: the next caller tries again.

An index is a place (`place_of`): a block (a shard, or the head of one) and a sample's number in it. So fetching a
sample needs only that block's count, and a worker process need not have counted anything.

Invariants. (1) A shard is counted at most once at a time. (2) A process forked during counting begins with the known
counts and waits for no thread that it does not have.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from forebay.core.errors import ForebayError
from forebay.torch.columns import Column
from forebay.torch.order import Counted, Permuted

THREADS = 8  # shards whose members are asked for at once
UNKNOWN = -1
_PLACE, _INNER_BITS = 1 << 62, 32  # places are above all numbers of samples; a block has less than 2**32 of them


def place_of(blocks: Column, inner: Column) -> Column:
    """Indices for samples number `inner` of `blocks`."""
    found: Column = _PLACE | (blocks << _INNER_BITS) | inner
    return found


def is_place(indices: Column) -> Column:
    return indices >= _PLACE


def block_and_inner(places: Column) -> tuple[Column, Column]:
    """What `place_of` was given."""
    return (places - _PLACE) >> _INNER_BITS, places & ((1 << _INNER_BITS) - 1)


class Placed(Counted):
    """A permutation over all samples, of shards whose counts are known, as places."""

    def __init__(self, counts: Column, seed: int, epoch: int) -> None:
        self._ends = np.cumsum(counts)
        self.samples = int(self._ends[-1])
        self._permuted = Permuted(self.samples, seed, epoch)

    def at(self, positions: Column) -> Column:
        return places_of(self._ends, self._permuted.at(positions))


def places_of(ends: Column, numbers: Column) -> Column:
    """The places of samples by their numbers in the dataset, where the samples of shards end at `ends`."""
    shards = np.searchsorted(ends, numbers, "right")
    return place_of(shards, numbers - np.where(shards > 0, ends[shards - 1], 0))


class Parts:
    """How the blocks of an order in windows are numbered, of `shards` shards: shard s as s; where it is cut in two, its
    first bytes, the head, as `shards + s` and the rest as `2 * shards + s`."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def cut(self, blocks: Column, ends: Column) -> tuple[Column, Column]:
        """The order with its first block, which is a shard, cut in two; the head is a window by itself."""
        head, rest = self.shards + blocks[:1], 2 * self.shards + blocks[:1]
        return np.concatenate((head, rest, blocks[1:])), np.concatenate(([1], ends + 1))

    def shard(self, blocks: Column) -> Column:
        return blocks % self.shards

    def head(self, blocks: Column) -> Column:
        """The heads of the shards of blocks."""
        return self.shards + blocks % self.shards

    def is_head(self, blocks: Column) -> Column:
        return blocks // self.shards == 1

    def is_rest(self, blocks: Column) -> Column:
        return blocks // self.shards == 2

    def needed(self, blocks: Column) -> Column:
        """What must be counted for the counts of blocks: shards and heads, in order."""
        heads = self.head(blocks[self.is_rest(blocks)])
        return np.concatenate((heads, np.where(self.is_head(blocks), blocks, self.shard(blocks))))


class _Asked:
    """A count that is being found out."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


class Counting:
    """`counts` of shards, and of their heads, UNKNOWN where nobody looked. `count`, a method of whoever
    holds this, finds one out, in any thread; when that object is gone, nothing more is found out."""

    def __init__(self, shards: int, count: Callable[[int], int]) -> None:
        self.counts: Column = np.full(2 * shards, UNKNOWN, np.int64)
        self._shards = shards
        self._count = weakref.WeakMethod(count)  # else the two would hold each other, and its connections
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._waiting: deque[int] = deque()
        self._threads = 0

    @property
    def total(self) -> int | None:
        """Of all shards; None as long as one is not known."""
        shards = self.counts[: self._shards]
        return None if (shards == UNKNOWN).any() else int(shards.sum())

    def knows(self, shards: Column) -> bool:
        """Whether nothing has to be found out for `shards`."""
        return not (self.counts[shards] == UNKNOWN).any()

    def of(self, shards: Column) -> Column:
        """The counts of `shards`. The first error in finding them out is raised."""
        wanted = self._ask(shards, first=True)
        for asked in wanted:
            asked.done.wait()
            if isinstance(asked.error, ForebayError):
                raise asked.error
            if asked.error is not None:
                raise RuntimeError("finding out how many samples a shard has failed") from asked.error
        return self.counts[shards]

    def ahead(self, shards: Column) -> None:
        """Find these out meanwhile. What goes wrong is said to who asks for them."""
        self._ask(shards, first=False)

    def _ask(self, shards: Column, *, first: bool) -> list[_Asked]:
        if self._pid != os.getpid():
            self._begin()
        unknown = shards[self.counts[shards] == UNKNOWN].tolist()
        with self._lock:
            for shard in reversed(unknown) if first else unknown:
                if shard not in self._asked:
                    self._asked[shard] = _Asked()
                elif first and shard in self._waiting:
                    self._waiting.remove(shard)
                else:
                    continue
                self._waiting.insert(0 if first else len(self._waiting), shard)
            wanted = [self._asked[shard] for shard in unknown if shard in self._asked]
            begun = min(THREADS - self._threads, len(self._waiting))
            self._threads += max(0, begun)
        for _ in range(begun):
            threading.Thread(target=self._work, name="forebay-count", daemon=True).start()
        return wanted

    def _work(self) -> None:
        while True:
            count = self._count()
            with self._lock:
                if not self._waiting or count is None:
                    self._threads -= 1
                    return
                shard = self._waiting.popleft()
                asked = self._asked[shard]
            try:
                self.counts[shard] = count(shard)
            except BaseException as error:  # of whoever waits for it
                asked.error = error
            with self._lock:
                del self._asked[shard]
            asked.done.set()
            del count
