"""Which source stands at which position of an epoch that mixes several, and which of its samples.

Theory. An epoch takes a fixed number of samples of each source (its share). A source is an endless stream: all of its
samples, then all of them again in another order, and so on. Epoch e takes those from `e * share` to `(e + 1) * share`.
So a source that is larger than its share is read on in the next epoch, one that is smaller is repeated within an epoch,
and after any number of epochs no sample was taken more than once more often than another of its source.

Within an epoch, sample k of a source belongs at the point (k + 1/2) / share of the way. Points are gathered in chunks
of CHUNK, and within a chunk the order is free. So a position tells its sample by arithmetic alone, each stretch of the
epoch has the mixture of the whole, and a source's stream is read from its beginning to its end, as a cache likes it.

Invariants. (1) An epoch takes each sample of each source's share once. (2) A chunk holds, of each source, its share of
CHUNK, rounded up or down. (3) Everything is whole numbers of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from forebay.core.errors import Invalid

CHUNK = 1024  # part of the order, and of what saved states mean


class Chunk(NamedTuple):
    """The positions from `first` on: `counts` samples of each source, after `before` of them."""

    number: int
    first: int
    before: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + sum(self.counts)


class Mixture(NamedTuple):
    """An epoch of `shares` samples of the sources."""

    shares: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.shares)

    def chunk(self, number: int) -> Chunk:
        """Chunk `number`; a small one may be empty where shares are small."""
        before, after = self._before(number), self._before(number + 1)
        counts = tuple(end - start for start, end in zip(before, after, strict=True))
        return Chunk(number, sum(before), before, counts)

    def chunk_at(self, position: int) -> Chunk:
        """The chunk that holds `position`."""
        assert 0 <= position < self.samples, "a position of the epoch"
        number = position // CHUNK
        # what lies before chunk c is c * CHUNK but for rounding, by half a sample of each source
        while sum(self._before(number)) > position:
            number -= 1
        while sum(self._before(number + 1)) <= position:
            number += 1
        return self.chunk(number)

    def _before(self, chunk: int) -> tuple[int, ...]:
        """How many points of each source lie before the chunk."""
        samples = self.samples
        at = min(chunk * CHUNK, samples)
        return tuple((2 * at * share + samples) // (2 * samples) if samples else 0 for share in self.shares)


def by_proportion(weights: Sequence[float], samples: int) -> Mixture:
    """`samples` in an epoch, divided in proportion to `weights`; what does not come out even goes to those that lose
    most."""
    check(weights, "a weight")
    exact = [Fraction(weight) for weight in weights]
    ideal = [samples * weight / sum(exact) for weight in exact]
    shares = [int(share) for share in ideal]
    left = sorted(range(len(ideal)), key=lambda source: (shares[source] - ideal[source], source))
    for source in left[: samples - sum(shares)]:
        shares[source] += 1
    return Mixture(tuple(shares))


def by_repeat(factors: Sequence[float], sizes: Sequence[int]) -> Mixture:
    """Each source as often as its factor says: 2 is twice all of it, 0.5 half of it."""
    check(factors, "a factor")
    return Mixture(
        tuple(int(Fraction(factor) * size + Fraction(1, 2)) for factor, size in zip(factors, sizes, strict=True))
    )


def check(numbers: Sequence[float], what: str) -> None:
    """`Invalid` unless all are finite, none is negative and one is more than 0."""
    if not all(0 <= number < float("inf") for number in numbers) or not any(numbers):
        raise Invalid(f"{what} is a finite number, at least 0, and one is more: {list(numbers)} are not")
