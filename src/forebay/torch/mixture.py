"""A dataset that mixes others: from each as many samples in an epoch as its weight says.

Theory. `core/mixture.py` says which sample of which source's stream stands where; a chunk's positions are permuted as
those of any shuffle. A source's stream is its own epochs, one after another, each in the order that the source itself
has for it. So everything is a function of (seed, epoch, position), and a job resumes on any number of ranks.

An index is three numbers: the source, the source's own epoch and the source's own index. The source's epoch is what a
`transform` is told, so a sample that an epoch takes twice is augmented in two ways.

The number of samples of each source must be known: shards without an index beside them are looked into first, all of
them.

Invariant. The order depends on the sources, the shares, seed and epoch, and on nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from forebay.core.errors import Corrupt, Invalid, NotFound
from forebay.core.mixture import by_proportion, by_repeat
from forebay.core.spelling import known_arguments
from forebay.torch.columns import Column, Fingerprint, ListingColumns
from forebay.torch.dataset import NOTHING_LEFT, Accesses, Dataset, Shuffle
from forebay.torch.mixed_telling import TOLD_MAX, MixedTelling, mixed, name_of
from forebay.torch.order import Counted, Order, Permuted, splitmix
from forebay.torch.source import Facts, Telling
from forebay.torch.tokens import Rows

_ORDERS_KEPT = 3  # of each source: the one that is read, and those before and after it
_SEED_BITS = (1 << 63) - 1
_CHUNKS = 1  # streams: the chunks of an epoch are _CHUNKS + their number


class Mixture(Dataset):
    """Samples of `datasets`, mixed evenly over the epoch. One of three says how many of each an epoch takes:

    `proportions`: weights, of which only the ratios count; an epoch has `samples`, by default as many as all datasets
    together. `repeats`: how often each is read in an epoch, such as 2 or 0.5. `choose`: how many of each. A dataset
    that is larger than its share is read on in the next epoch; one that is smaller is repeated, in another order.
    The loader's `shuffle` and `window_bytes` (divided by the number of datasets) are those of the datasets' own orders.
    """

    @known_arguments
    def __init__(
        self,
        datasets: Sequence[Dataset],
        *,
        proportions: Sequence[float] | None = None,
        repeats: Sequence[float] | None = None,
        choose: Sequence[int] | None = None,
        samples: int | None = None,
    ) -> None:
        self.datasets = list(datasets)
        for dataset in self.datasets:
            if not isinstance(dataset, Dataset) or isinstance(dataset, Mixture):
                raise Invalid(f"{type(dataset).__name__} cannot be mixed: give datasets of forebay.torch")
            if not dataset.any_order:
                raise Invalid(
                    f"{type(dataset).__name__} cannot be mixed, its samples being decoded many at a time: write them "
                    "to shards with ShardWriter"
                )
        said = [how for how in (proportions, repeats, choose) if how is not None]
        if len(said) != 1 or len(said[0]) != len(self.datasets):
            raise Invalid(
                f"say how to mix {len(self.datasets)} datasets by one of proportions=, repeats= and choose=, with a "
                "number for each"
            )
        if samples is not None and proportions is None:
            raise Invalid("samples= goes with proportions=: repeats= and choose= say how many there are")
        sizes = [len(dataset) for dataset in self.datasets]
        if proportions is not None:
            self.plan = by_proportion(proportions, sum(sizes) if samples is None else samples)
        elif repeats is not None:
            self.plan = by_repeat(repeats, sizes)
        else:
            self.plan = by_repeat(said[0], [1] * len(sizes))
        self.counts = tuple(sizes)
        self.samples = self.plan.samples
        self.place = " + ".join(dataset.place for dataset in self.datasets)
        self.on_error = "skip" if any(dataset.on_error == "skip" for dataset in self.datasets) else "raise"
        if not self.samples:
            raise NotFound(f"a mixture of {self.place} without a sample: take larger numbers")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __getitem__(self, index: int) -> Any:
        if not -self.samples <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return self.__getitems__(Mixed(self, False, 1, 0, 0).at(np.asarray([index % self.samples])))[0]

    # --- what the loader asks ----------------------------------------------------------------------------------------
    @property
    def listing(self) -> ListingColumns:
        """The objects of all datasets, their keys with their buckets."""
        return _joined([dataset.listing for dataset in self.datasets])

    @property
    def fingerprint(self) -> Fingerprint:
        """Of all datasets and how they are mixed."""
        parts = "; ".join(
            f"{share} of {size} of {dataset.shape}"
            for share, size, dataset in zip(self.plan.shares, self.counts, self.datasets, strict=True)
        )
        many = (
            parts
            if len(parts) < _SHAPE_MAX
            else f"{len(self.counts)} datasets, {xxhash.xxh3_64_hexdigest(parts.encode())}"
        )
        return self.listing.fingerprint(f"a mixture ({many})", self.samples)

    def room_bytes(self, *, cluster: bool = False) -> int | None:
        rooms = [room for dataset in self.datasets if (room := dataset.room_bytes(cluster=cluster)) is not None]
        return min(rooms, default=None)

    def hints(self, job: str) -> Telling | None:
        """Those of the datasets of which most is read, if there are very many."""
        shares = self.plan.shares
        told = sorted(range(len(shares)), key=lambda source: (-shares[source], source))[:TOLD_MAX]
        of = [
            dataset.hints(name_of(job, source)) if source in told and shares[source] else None
            for source, dataset in enumerate(self.datasets)
        ]
        return None if all(telling is None for telling in of) else MixedTelling(of)

    def accesses(self, indices: Column) -> Accesses:
        """Rows with two columns more: see `mixed`."""
        parts = []
        for source in np.unique(indices[:, 0]).tolist():
            here = np.flatnonzero(indices[:, 0] == source)
            parts.append((here, source, self.datasets[source].accesses(indices[here, 2])))
        return mixed(parts, len(indices))

    def changed_since(self, listing: str) -> str:
        return ""

    def order(
        self,
        shuffle: Shuffle,
        window_bytes: int,
        seed: int,
        epoch: int,
        *,
        arriving: bool = False,
        window: int = 0,
        before: int = 0,
    ) -> Order:
        return Mixed(self, shuffle, max(1, window_bytes // len(self.datasets)), seed, epoch)

    def sizes(self, indices: Column) -> Column:
        found: Column = np.zeros(len(indices), np.int64)
        for source in np.unique(indices[:, 0]).tolist():
            here = indices[:, 0] == source
            found[here] = self.datasets[source].sizes(indices[here, 2])
        return found

    def fetch(self, indices: Sequence[Any], facts: Facts) -> list[Any]:
        """Rows of (dataset, its epoch, its index)."""
        rows = np.asarray(indices, np.int64).reshape(-1, 3)
        made: list[Any] = [_GAP] * len(rows)
        found: list[tuple[Column, list[Any]]] = []
        missing: Corrupt | None = None
        for source, epoch in np.unique(rows[:, :2], axis=0).tolist():
            here = np.flatnonzero((rows[:, 0] == source) & (rows[:, 1] == epoch))
            facts.epoch, facts.gaps = epoch, []
            try:
                samples = self.datasets[source].fetch(rows[here, 2], facts)
            except Corrupt as error:
                if error.code != NOTHING_LEFT or self.on_error != "skip":
                    raise
                missing = error
                continue
            found.append((here, samples))
            left: Column = np.delete(here, facts.gaps)
            for at, sample in zip(left.tolist(), samples, strict=True):
                made[at] = sample
        if not found and missing is not None:
            raise missing
        if sum(len(samples) for _, samples in found) < len(rows):  # the others were skipped
            return [sample for sample in made if sample is not _GAP]
        return _rows(found, len(rows)) or made


_GAP = object()  # in place of a sample that was skipped
_SHAPE_MAX = 300  # of a state's 1 KiB


class Mixed(Counted):
    """The order of one epoch of a mixture, as rows of (dataset, its epoch, its index)."""

    def __init__(self, mixture: Mixture, shuffle: Shuffle, window_bytes: int, seed: int, epoch: int) -> None:
        self.samples = mixture.samples
        self._mixture, self._plan = mixture, mixture.plan
        self._shuffle: Shuffle = shuffle
        self._window_bytes, self._seed, self._epoch = window_bytes, seed, epoch
        self._orders: OrderedDict[tuple[int, int], Order] = OrderedDict()

    def at(self, positions: Column) -> Column:
        positions = np.asarray(positions, np.int64)
        found: Column = np.empty((len(positions), 3), np.int64)
        sorted_at = np.argsort(positions, kind="stable")
        ordered = positions[sorted_at]
        done = 0
        while done < len(ordered):
            chunk = self._plan.chunk_at(int(ordered[done]))
            end = int(np.searchsorted(ordered, chunk.end, "left"))
            inner = ordered[done:end] - chunk.first
            if self._shuffle is not False:
                inner = Permuted(sum(chunk.counts), self._seed, self._epoch, _CHUNKS + chunk.number).at(inner)
            source, number = self._in_chunk(chunk.before, chunk.counts, inner)
            found[sorted_at[done:end], 0] = source
            found[sorted_at[done:end], 2] = number
            done = end
        self._resolve(found)
        return found

    def _in_chunk(self, before: tuple[int, ...], counts: tuple[int, ...], inner: Column) -> tuple[Column, Column]:
        """The source of each place in a chunk, and which of the source's share of this epoch it is."""
        sources: Column = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(first, first + count) for first, count in zip(before, counts, strict=True)])
        if self._shuffle is False:  # by their points on the way
            points = (numbers + 0.5) / np.asarray(self._plan.shares, np.float64)[sources]
            places = np.lexsort((sources, points))
            sources, numbers = sources[places], numbers[places]
        return sources[inner], numbers[inner]

    def _resolve(self, rows: Column) -> None:
        """From numbers in this epoch's shares to each source's own epoch and index."""
        for source in np.unique(rows[:, 0]).tolist():
            here = np.flatnonzero(rows[:, 0] == source)
            share, size = self._plan.shares[source], self._mixture.counts[source]
            start, offset = divmod(self._epoch * share, size)
            at = rows[here, 2] + offset
            rows[here, 1] = start + at // size
            for epoch in np.unique(rows[here, 1]).tolist():
                of_epoch = here[rows[here, 1] == epoch]
                inner = (rows[of_epoch, 2] + offset) % size
                rows[of_epoch, 2] = self._order(source, epoch).at(inner)

    def _order(self, source: int, epoch: int) -> Order:
        """The source's own order, with a seed of its own: sources of one size would go in step."""
        found = self._orders.get((source, epoch))
        if found is None:
            seed = splitmix(self._seed ^ source) & _SEED_BITS
            found = self._mixture.datasets[source].order(self._shuffle, self._window_bytes, seed, epoch)
            found.reach(self._mixture.counts[source])
            self._orders[source, epoch] = found
            while len(self._orders) > _ORDERS_KEPT * len(self._mixture.counts):
                self._orders.popitem(last=False)
        return found


def _rows(found: list[tuple[Column, list[Any]]], samples: int) -> Rows | None:
    """Samples that are rows of tensors of one kind, as rows of one tensor; None if they are not."""
    if not all(isinstance(made, Rows) for _, made in found):
        return None
    tensors = [made.tensor for _, made in found]  # type: ignore[attr-defined]
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) != 1:
        return None
    together = torch.empty((samples, *tensors[0].shape[1:]), dtype=tensors[0].dtype)
    for (here, _), tensor in zip(found, tensors, strict=True):
        together[torch.from_numpy(here)] = tensor
    return Rows(together)


def _joined(listings: list[ListingColumns]) -> ListingColumns:
    """One listing of all of them."""
    keys: list[bytes] = []
    for listing in listings:
        keys += [f"{listing.bucket}/".encode() + bytes(listing.keys[a:b]) for a, b in _bounds(listing.key_ends)]
    etags = b"".join(bytes(listing.etags) for listing in listings)
    lengths = [np.diff(listing.etag_ends, prepend=0) for listing in listings]
    return ListingColumns(
        "",
        b"".join(keys),
        np.cumsum([len(key) for key in keys]),
        np.concatenate([listing.sizes for listing in listings]),
        etags,
        np.cumsum(np.concatenate(lengths)),
        "",
    )


def _bounds(ends: Column) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))
