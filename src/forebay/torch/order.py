"""Which sample stands at which position of an epoch: computed, not stored.

Theory. A permutation of n numbers that any process can ask about any position, without having the rest: a Feistel
network over the bits of the index. k bits (the fewest that hold n - 1) are split in a high part of ceil(k/2) and a low
part of floor(k/2) bits; ROUNDS times, one part is XORed with a keyed hash of the other, in turns. Each round can be
undone, so the whole is a bijection of 0..2^k-1; a result of n or more is sent through again until it is below n
(cycle walking), which keeps it a bijection of 0..n-1 and takes less than two passes on average. The keys come from
(seed, epoch, stream) by splitmix64. The exact arithmetic is fixed by docs/order-vectors.json: a saved state means the
same order in every release.

Everything is done for arrays of positions at once: one index costs some 50 ns in runs of a few thousand, and 1 µs or
more if asked for alone, so callers ask in runs.

A block shuffle keeps near in the epoch what is near in storage: blocks (shards, or runs of keys) are permuted, cut in
that order into windows of at most so many bytes, and the samples of each window are permuted. Only a window's blocks
are needed at one time. Its memory is three numbers a block.

Rejected. A stored permutation (8 bytes a sample, in every worker, before the first batch); a shuffle buffer (order
depends on how it is read, and its content must be in the state); halves of equal width (up to four passes instead of
two); NumPy's generators (they give a whole permutation or none, and their streams may change between releases).

Invariants. (1) `at` is a bijection of 0..n-1 for every n, seed, epoch and stream. (2) It depends on nothing else.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from forebay.core.errors import Invalid

SAMPLES_MAX = 1 << 62  # indices are signed 64-bit numbers in torch and NumPy; one bit is kept for sums
ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1

Indices = Any  # numpy.ndarray of int64: numpy is not followed by the type checker


class Order(Protocol):
    """What is at each position of one epoch."""

    samples: int

    def at(self, positions: Indices) -> Indices:
        """The indices at `positions`, each in 0..samples-1."""
        ...


class InOrder:
    """No shuffle: the sample's index is its position."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def at(self, positions: Indices) -> Indices:
        return positions


class Permuted:
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


class BlockShuffled:
    """Blocks permuted, then the samples within windows of blocks.

    `counts` and `sizes_bytes` are the samples and bytes of each block, in the dataset's order. A window takes blocks
    while they are at most `window_bytes` together, and one block at least.
    """

    _BLOCKS, _WINDOWS = 1, 2  # streams: Permuted itself is 0, and window w is _WINDOWS + w

    def __init__(self, counts: Indices, sizes_bytes: Indices, window_bytes: int, seed: int, epoch: int) -> None:
        counts = np.asarray(counts, np.int64)
        sizes = np.asarray(sizes_bytes, np.int64)
        if window_bytes < 1 or len(counts) != len(sizes):
            raise Invalid("a block shuffle needs a window of at least one byte, and a size for each block")
        self.samples = int(counts.sum())
        self._seed, self._epoch = seed, epoch
        order = Permuted(len(counts), seed, epoch, self._BLOCKS).at(np.arange(len(counts)))
        self._first = (np.cumsum(counts) - counts)[order]  # index of each block's first sample, in permuted order
        self._ends = np.cumsum(counts[order])  # position after each block, before windows are mixed
        self._window_ends = self._ends[_windows(sizes[order], window_bytes) - 1]

    def at(self, positions: Indices) -> Indices:
        positions = np.asarray(positions, np.int64)
        windows = np.searchsorted(self._window_ends, positions, "right")
        mixed = np.empty_like(positions)
        for window in np.unique(windows):
            here = windows == window
            start = int(self._window_ends[window - 1]) if window else 0
            size = int(self._window_ends[window]) - start
            inner = Permuted(size, self._seed, self._epoch, self._WINDOWS + int(window))
            mixed[here] = start + inner.at(positions[here] - start)
        block = np.searchsorted(self._ends, mixed, "right")
        block_start = np.where(block > 0, self._ends[block - 1], 0)
        found: Indices = self._first[block] + (mixed - block_start)
        return found


def _windows(sizes: Indices, window_bytes: int) -> Indices:
    """For each window the number of the block after its last."""
    total = np.cumsum(sizes)
    ends: list[int] = []
    start, before = 0, 0
    while start < len(sizes):
        end = max(start + 1, int(np.searchsorted(total, before + window_bytes, "right")))
        ends.append(end)
        start, before = end, int(total[end - 1])
    return np.asarray(ends, np.int64)
