"""Computes which sample stands at which position of an epoch.

Theory. The order is a permutation of n numbers that any process can ask about any position without storing it: a
Feistel network over the bits of the index. k bits (the fewest that hold n - 1) are split in a high part of ceil(k/2)
and a low part of floor(k/2) bits. ROUNDS times, in turns, one part is XORed with a keyed hash of the other. Each round
can be undone, so the whole is a bijection of 0..2^k-1. A result of n or more goes through again until it is below n
(cycle walking), which keeps a bijection of 0..n-1 and takes less than two passes on average. The keys come from (seed,
epoch, stream) by splitmix64. docs/order-vectors.json fixes the exact arithmetic: a saved state means the same order in
every release.

Everything works on arrays of positions: in runs of a few thousand an index costs some 50 ns, alone 1 µs or more.

A block shuffle keeps samples that are near in storage near in the epoch. It permutes blocks (shards, or runs of keys),
cuts them in that order into windows of a number of bytes, and permutes the samples of each window. Only one window's
blocks are needed at a time. It stores three numbers a block. The cut is by bytes, which the listing has, so windows are
known before anybody has counted their samples: a shard is counted when its window is reached.

Rejected. A stored permutation (8 bytes a sample, in every worker, before the first batch); a shuffle buffer (the order
depends on how it is read, and the state must hold its content); halves of equal width (up to four passes instead of
two); NumPy's generators (they give a whole permutation or none, and their streams may change between releases).

Invariants. (1) `at` is a bijection of 0..n-1 for every n, seed, epoch and stream. (2) It depends on nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from forebay.core.errors import Invalid

SAMPLES_MAX = 1 << 62  # indices are signed 64-bit numbers in torch and NumPy; one bit is kept for sums
ROUNDS = 8
WINDOWS_AHEAD = 2  # that are looked at while one is read: more would only share a narrow link with what is needed first
_BLOCKS = 1  # the stream of the blocks' permutation
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1

Indices = Any  # numpy.ndarray of int64: numpy is not followed by the type checker


class Order(Protocol):
    """What is at each position of one epoch."""

    @property
    def samples(self) -> int | None:
        """Of the epoch; None as long as that is not known."""
        ...

    def reach(self, position: int) -> int:
        """Find out what there is up to `position`; how many samples are known then, fewer only if there are no more."""
        ...

    def at_once(self, position: int) -> bool:
        """Whether that can be said without asking anybody."""
        ...

    def at(self, positions: Indices) -> Indices:
        """The indices at `positions`, each in 0..samples-1."""
        ...


class Counted:
    """An order of which all samples are known from the beginning."""

    samples: int

    def reach(self, position: int) -> int:
        return self.samples

    def at_once(self, position: int) -> bool:
        return True


class InOrder(Counted):
    """No shuffle: the sample's index is its position."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def at(self, positions: Indices) -> Indices:
        return positions


class Permuted(Counted):
    """All samples in one permutation. Streams of the same seed and epoch are independent permutations."""

    def __init__(self, samples: int, seed: int, epoch: int, stream: int = 0) -> None:
        if not 0 <= samples <= SAMPLES_MAX:
            raise Invalid(f"{samples} samples are not in 0..2**62: shuffle shards instead of samples")
        self.samples = samples
        bits = max(1, (samples - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._keys = [np.uint64(key) for key in keys(seed, epoch, stream)]

    def at(self, positions: Indices) -> Indices:
        found = self._pass(np.asarray(positions).astype(np.uint64))
        walking = np.flatnonzero(found >= np.uint64(self.samples))
        while walking.size:
            again = self._pass(found[walking])
            found[walking] = again
            walking = walking[again >= np.uint64(self.samples)]
        return found.astype(np.int64)

    def _pass(self, value: Indices) -> Indices:
        low_bits, high_bits = np.uint64(self._low_bits), np.uint64(self._high_bits)
        high, low = value >> low_bits, value & np.uint64((1 << self._low_bits) - 1)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                high ^= _hashed(low, key, high_bits)
            elif self._low_bits:
                low ^= _hashed(high, key, low_bits)
        return (high << low_bits) | low


def _hashed(value: Indices, key: Any, bits: Any) -> Indices:
    """The top `bits` of a keyed hash of each value."""
    mixed = value + key
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_SECOND)
    mixed >>= np.uint64(64) - bits
    return mixed


def keys(seed: int, epoch: int, stream: int) -> list[int]:
    """The round keys: a splitmix64 sequence that starts from all three numbers."""
    state = 0
    for number in (seed, epoch, stream):
        state = splitmix(state ^ (number & _MASK))
    return [splitmix((state + turn * _GOLDEN) & _MASK) for turn in range(1, ROUNDS + 1)]


def splitmix(state: int) -> int:
    """One output of splitmix64 for the state before it."""
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


class Windows:
    """Blocks one after another, cut into windows; the samples of a window mixed.

    `blocks` are the blocks' numbers in the epoch's order, and `ends` how many of them come before the end of each
    window. `counts(blocks)` is how many samples blocks have; it may have to find out, so it is asked for a window only
    when that is reached. `counted(blocks)` is whether it knows that already. `ahead(blocks)` hears which blocks come
    next, of the WINDOWS_AHEAD windows after the last that was reached. What it hears, and all from the first window on
    that is still read, is room for: for each window, `fits` is how many blocks come before the end of what fits from
    its first on (None: all). An index is `named(blocks, inner)`: block, and number of the sample in it. `seed` None:
    samples stay as they lie. An epoch that goes on from the middle begins with window `window`, before which `before`
    samples lie, and asks nothing of the windows before that one.
    """

    _WINDOWS = 2  # streams: Permuted itself is 0, the blocks of a shuffle are 1, and window w is _WINDOWS + w

    def __init__(
        self,
        blocks: Indices,
        ends: Indices,
        counts: Callable[[Indices], Indices],
        named: Callable[[Indices, Indices], Indices],
        seed: int | None,
        epoch: int,
        window: int = 0,
        before: int = 0,
        counted: Callable[[Indices], bool] = lambda blocks: True,
        ahead: Callable[[Indices], None] = lambda blocks: None,
        fits: Indices | None = None,
    ) -> None:
        self.blocks, self.ends, self._counted, self._ahead = blocks, ends, counted, ahead
        self._fits = np.full(len(ends), len(blocks)) if fits is None else fits
        self.coming: Callable[[int, int], None] = lambda position, window: None  # hears what is read before `ahead` is
        self._counts, self._named, self._seed, self._epoch = counts, named, seed, epoch
        self._window, self._before = window, before
        self._inner_ends: list[Indices] = []  # of each window from the first on: after each block, in samples
        self._sample_ends: list[int] = []  # of these windows, in samples of the epoch
        self._given: int | None = None
        self._looked = (-1, -1)  # the windows that were held when `ahead` was told last, the first and the last
        self._start: Windows | None = None

    @property
    def samples(self) -> int | None:
        """Of the epoch; None while there are windows that were not reached."""
        return None if self.next_window < len(self.ends) else self._known

    @property
    def _known(self) -> int:
        return self._sample_ends[-1] if self._sample_ends else self._before

    def reach(self, position: int) -> int:
        while self._known < position and self.samples is None:
            self.advance()
        return self._known

    def at_once(self, position: int) -> bool:
        while self._known < position and self.samples is None:
            if not self._counted(self.of_window(self.next_window)):
                return False
            self.advance()
        return True

    @property
    def next_window(self) -> int:
        """The first that was not reached."""
        return self._window + len(self._sample_ends)

    def advance(self) -> None:
        """Reach one more window."""
        inner = np.cumsum(self._counts(self.of_window(self.next_window)))
        self._sample_ends.append(self._known + int(inner[-1]))
        self._inner_ends.append(inner)
        self._look_ahead()

    def given(self, position: int | None) -> None:
        """Samples before `position` were given out, and those after it are still read; None: all but those of the last
        window that was reached were."""
        self._given = position
        self._look_ahead()

    def _look_ahead(self) -> None:
        last = self.next_window - 1
        if last < self._window:
            return
        first = last if self._given is None else min(last, self.window_at(self._given)[0])
        if (first, last) == self._looked:
            return
        self._looked = (first, last)
        following = self.blocks[int(self.ends[last]) : self.end_after(last, first)]
        if not self._counted(following):
            self.coming(self._start_of(first) if self._given is None else self._given, first)
            self._ahead(following)

    def at(self, positions: Indices) -> Indices:
        positions = np.asarray(positions, np.int64)
        self.reach(int(positions.max(initial=-1)) + 1)
        found = np.empty_like(positions)
        early = positions < self._before
        if early.any():
            found[early] = self._from_start().at(positions[early])
            late = np.flatnonzero(~early)
        else:
            late = np.arange(len(positions))
        if not late.size:
            return found
        first = self._window_of(int(positions[late].min()))
        some = np.asarray(self._sample_ends[first : self._window_of(int(positions[late].max())) + 1], np.int64)
        where = first + np.searchsorted(some, positions[late], "right")
        for number in np.unique(where).tolist():
            here = late[where == number]
            start = self._sample_ends[number - 1] if number else self._before
            found[here] = self._in_window(number, positions[here] - start)
        return found

    def _from_start(self) -> Windows:
        """The same order from its beginning, of which only some samples are asked for: nothing is counted ahead."""
        if self._start is None:
            self._start = Windows(self.blocks, self.ends, self._counts, self._named, self._seed, self._epoch)
        return self._start

    def _window_of(self, position: int) -> int:
        """Which of the windows that were reached a position lies in."""
        return bisect_right(self._sample_ends, position)

    def _in_window(self, number: int, inner: Indices) -> Indices:
        """The indices at places of the window that is `number` after the first."""
        ends, window = self._inner_ends[number], self._window + number
        if self._seed is not None:
            inner = Permuted(int(ends[-1]), self._seed, self._epoch, self._WINDOWS + window).at(inner)
        block = np.searchsorted(ends, inner, "right")
        return self._named(self.of_window(window)[block], inner - np.where(block > 0, ends[block - 1], 0))

    def of_window(self, window: int) -> Indices:
        """The blocks of a window; none past the last."""
        if window >= len(self.ends):
            return self.blocks[:0]
        return self.blocks[int(self.ends[window - 1]) if window else 0 : int(self.ends[window])]

    def end_after(self, window: int, first: int | None = None) -> int:
        """How many blocks come before the end of the WINDOWS_AHEAD windows after this one, or of those that fit while
        all from window `first` on is still read (by default from this one)."""
        end = int(self.ends[min(window + WINDOWS_AHEAD, len(self.ends) - 1)])
        return max(int(self.ends[window]), min(end, int(self._fits[window if first is None else first])))

    @property
    def is_tight(self) -> bool:
        """Whether there is not room for all windows that would be looked at."""
        after = self.ends[np.minimum(np.arange(len(self.ends)) + WINDOWS_AHEAD, len(self.ends) - 1)]
        return bool((self._fits < after).any())

    def window_at(self, position: int) -> tuple[int, int]:
        """The window that `position`, which was reached, lies in, and how many samples there are before it."""
        number = self._window_of(position)
        return self._window + number, self._start_of(self._window + number)

    def _start_of(self, window: int) -> int:
        return self._sample_ends[window - self._window - 1] if window > self._window else self._before


class BlockShuffled(Counted):
    """Blocks permuted, then the samples within windows of blocks.

    `counts` and `sizes_bytes` are the samples and bytes of each block, in the dataset's order. A window takes blocks
    while they are at most `window_bytes` together, and one block at least.
    """

    def __init__(self, counts: Indices, sizes_bytes: Indices, window_bytes: int, seed: int, epoch: int) -> None:
        counts = np.asarray(counts, np.int64)
        if len(counts) != len(sizes_bytes):
            raise Invalid("a block shuffle needs a size for each block")
        self.samples = int(counts.sum())
        first = np.cumsum(counts) - counts
        blocks, ends = shuffled_blocks(sizes_bytes, window_bytes, seed, epoch)
        self._windows = Windows(
            blocks, ends, lambda blocks: counts[blocks], lambda blocks, inner: first[blocks] + inner, seed, epoch
        )

    def at(self, positions: Indices) -> Indices:
        return self._windows.at(positions)


def shuffled_blocks(
    sizes_bytes: Indices, window_bytes: int, seed: int | None, epoch: int, first_bytes: int | None = None
) -> tuple[Indices, Indices]:
    """Blocks of these sizes in the order of an epoch (as they lie without a seed), and the end of each window. With
    `first_bytes`, windows begin as small as that and grow: one is a quarter of what came before it, up to
    `window_bytes`."""
    if window_bytes < 1:
        raise Invalid("a block shuffle needs a window of at least one byte")
    sizes = np.asarray(sizes_bytes, np.int64)
    order = np.arange(len(sizes))
    if seed is not None:
        order = Permuted(len(sizes), seed, epoch, _BLOCKS).at(order)
    return order, _windows(sizes[order], window_bytes, window_bytes if first_bytes is None else first_bytes)


def _windows(sizes: Indices, window_bytes: int, first_bytes: int) -> Indices:
    """For each window the number of the block after its last."""
    total = np.cumsum(sizes)
    ends: list[int] = []
    start, before = 0, 0
    while start < len(sizes):
        room = min(window_bytes, max(first_bytes, before // 4))
        end = max(start + 1, int(np.searchsorted(total, before + room, "right")))
        ends.append(end)
        start, before = end, int(total[end - 1])
    return np.asarray(ends, np.int64)
