"""A dataset in which a sample is the members of a shard that share a name: WebDataset's layout, read in any order.

Theory. The node knows where each member of a tar or zip lies. A layout (`layouts.py`) is computed from the names for
each shard: which members make which sample, where they begin, how long they are. Parts of a sample usually lie side by
side, so they are read as one range if little is between them. Layouts are kept up to LAYOUTS_BYTES_MAX and fetched
again when needed, so that bounds a worker's memory.

Knowing what is in a tar means reading it. So making a dataset reads nothing. An epoch goes from window to window of
shards (`order.Windows`) and has those counted that come next. The first epoch does so even if it is shuffled, since a
permutation over all samples would begin by reading most shards. Which epochs do so depends on nothing that ranks may
know differently: see docs/design/0007-cold-shards.md.

WebDataset joins only neighbours into one sample; here all members of a shard with one key are one sample.

Invariants. (1) Samples are numbered by shard, in byte order of their keys, then in the order in which their first
members appear. (2) A layout is of the listed version of its shard.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound
from forebay.core.formats import tar
from forebay.core.formats.listing import Listing
from forebay.core.formats.members import Form, MemberIndex, build, form_of, of_ranges
from forebay.core.formats.samples import dali_name, decode_dali
from forebay.core.messages.batch import Item
from forebay.core.spelling import known_arguments
from forebay.ports import clock
from forebay.torch.columns import Column, ListingColumns
from forebay.torch.counting import Counting, Parts, Placed, block_and_inner, is_place, place_of, places_of
from forebay.torch.dataset import Accesses, Dataset, OnError, Shuffle, block_rows, decoded, parameters, ranges
from forebay.torch.decoders import Decoder, chosen
from forebay.torch.layouts import Layout, lay_out
from forebay.torch.order import Order, Windows, shuffled_blocks
from forebay.torch.shard_counts import told_counts
from forebay.torch.source import PATIENCE_S, Facts, Patient, Source
from forebay.torch.switch import DIRECT_AFTER_S

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".zip")
LAYOUTS_BYTES_MAX = 2 * limits.GIB  # some 40 million samples; forked workers share them
GAP_BYTES_MAX = 8 * limits.KIB  # between parts that are read together: less than a frame and its handling cost
# These two are part of the order, and of what saved states mean.
ARRIVING_BYTES = 256 * limits.MIB  # of a window of the first epoch: a node holds some of them, whatever its size
FIRST_BYTES = 16 * limits.MIB  # of the very first: it is read before the first batch
AHEAD_SHARE = 0.75  # of what the node can hold: a window and what is counted ahead of it
HEADER_BYTES = 64 * limits.KIB  # read at once where headers lie close together
log = logging.getLogger("forebay.torch")


class ShardDataset(Dataset):
    """The samples in the shards (tar, zip, compressed tar) under `place`, each a dictionary.

    `sample["__key__"]` is its name in the shard, `sample["__shard__"]` the shard's key; the rest is by extension, as
    in `sample["jpg"]`. Parts are decoded by extension (`decoders.DEFAULT`); `decode` adds to that, as in `{"jpg":
    f}`, and `{}` leaves everything bytes. With `parts`, only those extensions are read, and a sample must have all of
    them. `filter(key)` says by its name whether a sample is one; another filter is another dataset. `transform` gets
    the dictionary and makes the sample; one with a parameter `epoch` is told the loader's (None without our sampler),
    to seed what it draws. `on_error`: 'raise', or 'skip' what is missing, damaged or cannot be decoded; a shard that is
    no archive or is cut short then has no samples. See `ObjectDataset` for the rest.

    Shards are read when an epoch comes to them: `Corrupt` and `NotFound` for one that is damaged come then. With
    `index_first` all are read now, and epoch 0 too is shuffled over all samples. `counts` says how many samples shards
    have, by their keys or the last parts of them, so that `len` is known at once; by default that is taken from a
    `shardindex.json` (of WebDataset's wids) beside the shards, if there is one. What is told is checked when a shard is
    read.
    """

    comes_in_parts = True

    @known_arguments
    def __init__(
        self,
        place: str,
        *,
        decode: Mapping[str, Decoder] | None = None,
        parts: Sequence[str] = (),
        transform: Callable[..., Any] | None = None,
        filter: Callable[[str], bool] | None = None,
        suffixes: Sequence[str] = SUFFIXES,
        index_first: bool = False,
        counts: Mapping[str, int] | None = None,
        url: str | None = None,
        on_error: OnError = "raise",
        patience_s: float = PATIENCE_S,
        direct_after_s: float | None = DIRECT_AFTER_S,
        direct: Mapping[str, str] | None = None,
        source: Source | None = None,
        keys: Sequence[str] | None = None,
        listing: Listing | bytes | None = None,
        versions: Listing | bytes | None = None,
    ) -> None:
        if isinstance(parts, str):
            raise Invalid(f"parts={parts!r} is not a list of extensions: write parts=[{parts!r}]")
        self.decode, self.transform, self._with_epoch = decode, transform, bool(parameters(transform))
        self.parts = tuple(part.lower().lstrip(".") for part in parts)
        self.shape = "shards" + (f" of {', '.join(sorted(self.parts))}" if parts else "")
        if filter is not None:
            self.shape += f", filtered by {getattr(filter, '__name__', type(filter).__name__)}"
        self.filter = filter
        self.damaged: dict[str, str] = {}  # shards without samples, and why
        self._layouts: OrderedDict[int, Layout] = OrderedDict()
        self._layouts_bytes = 0
        self._decoder_of: dict[str, Decoder | None] = {}
        self._counting_source: tuple[int, Patient | None] = (0, None)  # of a process
        self._told: Column | None = None
        super().__init__(
            place,
            suffixes=suffixes,
            url=url,
            on_error=on_error,
            patience_s=patience_s,
            direct_after_s=direct_after_s,
            direct=direct,
            source=source,
            keys=keys,
            listing=listing,
            versions=versions,
        )
        self._dali = self._indexes_beside()
        self._parts = Parts(self.listing.objects)
        self._counting = Counting(self.listing.objects, self._count)
        if on_error == "raise" and (filter is None or counts):  # else an index beside them says too much
            self._told = told_counts(self._listing, self.listing, self._source, counts)
        self.arriving = not index_first
        if index_first:
            self.all_counts()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"_layouts": OrderedDict(), "_layouts_bytes": 0, "_decoder_of": {}}
        return state | {"_counting": None, "_counted": self._counting.counts, "_counting_source": (0, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counted = state.pop("_counted")
        self.__dict__.update(state)
        self._counting = Counting(len(counted) // 2, self._count)
        self._counting.counts = counted

    # --- how many ----------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """Reads what nobody has read yet; see `known_samples`."""
        return int(self.all_counts().sum())

    @property
    def known_samples(self) -> int | None:
        return int(self._told.sum()) if self._told is not None else self._counting.total

    @property
    def counted(self) -> bool:
        return self._counting.total is not None

    def all_counts(self) -> Column:
        """How many samples each shard has, having all read that were not. `NotFound` if none has any."""
        if self._told is not None:
            return self._told
        shards = np.arange(self.listing.objects)
        left = shards[self._counting.counts[shards] < 0]
        if self.arriving and left.size:
            log.warning(
                "how many samples %s has is asked for: looking into %d of %d shards (%.1f GB), which reads those that "
                "the node has not looked into; say it with counts= to do without",
                self.place,
                left.size,
                shards.size,
                self.listing.sizes[left].sum() / 1e9,
            )
        counts = self._counting.of(shards)
        if not counts.any():
            raise self.empty()
        return counts

    def empty(self) -> NotFound:
        """The error where no shard holds a sample."""
        why = next(
            iter(self.damaged.values()),
            "their members have no names like 'sample.ext', or lack the parts, or the filter keeps none",
        )
        return NotFound(f"the shards under {self.place!r} hold no samples: {why}")

    def _counts_of(self, blocks: Column) -> Column:
        parts, counting = self._parts, self._counting
        counting.of(parts.needed(blocks))
        rest = parts.is_rest(blocks)
        for block in parts.shard(blocks[rest]).tolist():
            self._check_head(block)
        counts: Column = counting.counts[np.where(parts.is_head(blocks), blocks, parts.shard(blocks))]
        return np.maximum(0, counts - np.where(rest, counting.counts[parts.head(blocks)], 0))  # 0: damaged after it

    def _count_ahead(self, blocks: Column) -> None:
        self._counting.ahead(self._parts.needed(blocks))

    def _fits(self, blocks: Column, ends: Column) -> Column:
        """For each window, how many blocks come before the end of what the node can hold from its first on. What is
        read too early leaves before it is used, or makes others leave, and is read once more."""
        room_bytes = self.room_bytes()
        if room_bytes is None:
            return np.full(len(ends), len(blocks))
        _, first, end = self._spans(blocks)
        total = np.concatenate(([0], np.cumsum(end - first)))
        begin = total[np.concatenate(([0], ends[:-1]))]
        return np.searchsorted(total, begin + room_bytes * AHEAD_SHARE, "right") - 1

    def _named(self, blocks: Column, inner: Column) -> Column:
        """The places of samples of an order's blocks."""
        parts = self._parts
        inner = inner + np.where(parts.is_rest(blocks), self._counting.counts[parts.head(blocks)], 0)
        return place_of(np.where(parts.is_head(blocks), blocks, parts.shard(blocks)), inner)

    def _count(self, number: int) -> int:
        """From a thread of its own, over connections of its own: a worker may be forked meanwhile."""
        pid, source = self._counting_source
        if source is None or pid != os.getpid():
            source = pickle.loads(pickle.dumps(self._source))
            self._counting_source = os.getpid(), source
        shard = number % self.listing.objects
        key = self.listing.key(shard)
        try:
            found = self._layout(number, Facts(), source).samples
        except (Corrupt, NotFound) as error:
            if self.on_error == "raise":
                raise
            self.damaged[key] = error.message
            return 0
        if number == shard and self._told is not None and self._told[shard] != found:
            raise Invalid(
                f"{key} holds {found} samples, and {self._told[shard]} were told by counts= or shardindex.json: "
                "correct that, or pass counts={} to do without"
            )
        return found

    def _check_head(self, shard: int) -> None:
        """What was taken from the head of a shard is what the whole of it says."""
        if self.listing.key(shard) in self.damaged:
            return
        head, whole = (self._layout(number, Facts()) for number in (self.listing.objects + shard, shard))
        if head.ends != whole.ends[: head.samples]:
            raise Invalid(
                f"members of one sample lie far apart in {self.listing.key(shard)}: pass index_first=True, which looks "
                "at whole shards before the first batch"
            )

    # --- order -------------------------------------------------------------------------------------------------------
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
        """In windows, but for the epochs that are shuffled over all samples: with `arriving` those from 1 on, else all.
        With 'block' and `arriving`, epoch 0 begins with small windows. Where it goes on is `window`, with `before`
        samples before it. Indices are places."""
        sizes = self.listing.sizes
        mixed: int | None = seed
        if shuffle == "block":
            grows = arriving and not epoch
            blocks, ends = shuffled_blocks(sizes, window_bytes, seed, epoch, FIRST_BYTES if grows else None)
        elif not shuffle:
            mixed = None
            blocks, ends = shuffled_blocks(sizes, ARRIVING_BYTES, None, epoch, FIRST_BYTES)
        elif arriving and not epoch:
            blocks, ends = shuffled_blocks(sizes, min(window_bytes, ARRIVING_BYTES), seed, epoch, FIRST_BYTES)
        else:
            counts = self.all_counts()
            self._counting.ahead(np.arange(len(counts)))  # where they were told, their members are needed all the same
            return Placed(counts, seed, epoch)
        if (shuffle != "block" or (arriving and not epoch)) and self._is_cut(int(blocks[0])):
            blocks, ends = self._parts.cut(blocks, ends)

        def counted(blocks: Column) -> bool:
            return self._counting.knows(self._parts.needed(blocks))

        how = (counted, self._count_ahead, self._fits(blocks, ends))
        return Windows(blocks, ends, self._counts_of, self._named, mixed, epoch, window, before, *how)

    def _is_cut(self, shard: int) -> bool:
        """Whether an epoch that begins with this shard gives out samples of its head before it has the rest."""
        plain = form_of(self.listing.key(shard), None) == Form("tar", "")
        if self.filter is not None:  # a head of which nothing is left would be searched for its first sample
            return False
        return plain and int(self.listing.sizes[shard]) >= 2 * FIRST_BYTES

    def of_blocks(self, blocks: Column) -> Accesses:
        """As `accesses`, for all of each of an order's blocks."""
        return Accesses(block_rows(self.listing, *self._spans(blocks)), 0)

    def _spans(self, blocks: Column) -> tuple[Column, Column, Column]:
        """The shard of each block, and from where to where it is of that."""
        shards = self._parts.shard(blocks)
        starts = np.where(self._parts.is_rest(blocks), FIRST_BYTES, 0)
        return shards, starts, np.where(self._parts.is_head(blocks), FIRST_BYTES, self.listing.sizes[shards])

    # --- layouts -----------------------------------------------------------------------------------------------------
    def _layout(self, number: int, facts: Facts, source: Patient | None = None) -> Layout:
        """Of shard number `number`, or of the head of a shard (`Parts`). Threads may do the same work twice; what is
        kept is right either way."""
        found = self._layouts.get(number)
        if found is not None:
            return found
        listing, source = self.listing, source or self._source
        if number < listing.objects:
            key, etag = listing.key(number), listing.etag(number)
            try:
                members = self._members_told(number, facts, source) or source.members(listing.bucket, key, etag, facts)
                found = lay_out(members, self.parts, self.filter)
            except Corrupt as error:
                if key in error.message:
                    raise
                raise Corrupt(f"{listing.bucket}/{key}: {error.message}", code=error.code) from error
        else:
            found = self._lay_out_head(number - listing.objects, facts, source)
        self._layouts[number] = found
        self._layouts_bytes += found.memory_bytes
        while self._layouts_bytes > LAYOUTS_BYTES_MAX and len(self._layouts) > 1:
            self._layouts_bytes -= self._layouts.popitem(last=False)[1].memory_bytes
        return found

    def _indexes_beside(self) -> dict[int, tuple[str, str]]:
        """Key and etag of DALI's index of each shard that has one beside it."""
        assert self._listing is not None, "it was listed just now"
        beside = ListingColumns.of(self._listing, (".idx",))
        etags = {beside.key(number): beside.etag(number) for number in range(beside.objects)}
        if not etags:
            return {}
        names = {number: dali_name(self.listing.key(number)) for number in range(self.listing.objects)}
        return {number: (name, etags[name]) for number, name in names.items() if name in etags}

    def _members_told(self, number: int, facts: Facts, source: Patient) -> MemberIndex | None:
        """What DALI's index says of a shard, if there is one and its first and last members and the end of the archive
        are where it says. Else None, and the shard itself is read: nothing hangs on that index but time."""
        key, etag, size = self.listing.key(number), self.listing.etag(number), int(self.listing.sizes[number])
        if number not in self._dali or form_of(key, None) != Form("tar", ""):
            return None
        bucket = self.listing.bucket
        (said,) = source.get_many([Item(bucket, self._dali[number][0], 0, None, "", self._dali[number][1])], facts)
        told = None if isinstance(said, ForebayError) else decode_dali(bytes(said))
        if told is None or not told[0]:
            return None
        names, offsets, sizes = told
        begins, ends = (np.frombuffer(column, np.uint64).astype(np.int64) for column in (offsets, sizes))
        ends = begins + -(-ends // tar.BLOCK) * tar.BLOCK
        gaps = np.diff(begins, prepend=0)[1:] - (ends - begins)[:-1]  # each has room for a header
        if (
            (begins % tar.BLOCK).any()
            or (gaps < tar.BLOCK).any()
            or begins[0] < tar.BLOCK
            or ends[-1] + tar.BLOCK > size
        ):
            return None
        starts = (int(begins[0]) - tar.BLOCK, int(begins[-1]) - tar.BLOCK, int(ends[-1]))
        blocks = source.get_many([Item(bucket, key, at, at + tar.BLOCK, "", etag) for at in starts], facts)
        for block in blocks:
            if isinstance(block, ForebayError):
                raise block
        first, final, after = (bytes(block) for block in blocks)  # type: ignore[arg-type]
        if not tar.begins(first, names[0], sizes[0]) or not tar.begins(final, names[-1], sizes[-1]) or any(after):
            log.warning("%s is not of %s as it is now: the shard itself is read", self._dali[number][0], key)
            return None
        return of_ranges(names, offsets, sizes, size, etag=etag)

    def _lay_out_head(self, shard: int, facts: Facts, source: Patient) -> Layout:
        """The samples of which the first part begins in the first FIRST_BYTES of a tar, from these bytes alone: the
        headers in them, and those after them up to the next sample."""
        listing = self.listing
        key, etag, size = listing.key(shard), listing.etag(shard), int(listing.sizes[shard])

        def asked(start: int, end: int) -> bytes:
            (value,) = source.get_many([Item(listing.bucket, key, start, min(end, size), "", etag)], facts)
            if isinstance(value, ForebayError):
                raise value
            return bytes(value)

        head = asked(0, FIRST_BYTES)

        def read(start: int, length: int) -> bytes:
            end = start + length
            return head[start:end] if end <= len(head) else asked(start, end)

        until = FIRST_BYTES
        while True:
            members = build("tar", read, size, version="", etag=etag, window_bytes=HEADER_BYTES, until=until)
            found = lay_out(members, self.parts, self.filter)
            offsets = np.frombuffer(found.offsets, np.uint64)
            firsts = offsets[[found.ends[n - 1] if n else 0 for n in range(found.samples)]]
            samples = int(np.searchsorted(np.maximum.accumulate(firsts), FIRST_BYTES, "left"))
            if samples < found.samples or members.end < until:
                return found.first(samples)
            until = members.end + 1

    # --- samples -----------------------------------------------------------------------------------------------------
    def key(self, index: int) -> str:
        """`SHARD/NAME` of a sample."""
        blocks, inner = self._located(np.asarray([index], np.int64))
        layout = self._layout(int(blocks[0]), Facts())
        return f"{self.listing.key(int(self._parts.shard(blocks)[0]))}/{layout.key(int(inner[0]))}"

    def accesses(self, indices: Column) -> Accesses:
        """From the first to the last byte of a sample's parts; all of a shard that is compressed as a whole."""
        blocks, inner = self._located(indices)
        shards = self._parts.shard(blocks)
        starts, ends = np.zeros_like(shards), self.listing.sizes[shards]
        for layout, here in self._by_layout(shards):
            if layout.plain:
                members = np.frombuffer(layout.ends, np.uint32).astype(np.int64)
                first = np.where(inner[here] > 0, members[inner[here] - 1], 0)
                last = members[inner[here]] - 1
                offsets, sizes = (np.frombuffer(column, np.uint64) for column in (layout.offsets, layout.sizes))
                starts[here], ends[here] = offsets[first], offsets[last] + sizes[last]
        return ranges(self.listing, shards, starts, ends)

    def sizes(self, indices: Column) -> Column:
        """Of all parts of each sample, unpacked."""
        blocks, inner = self._located(indices)
        found: Column = np.zeros(len(inner), np.int64)
        for layout, here in self._by_layout(self._parts.shard(blocks)):
            ends = np.concatenate(([0], np.frombuffer(layout.ends, np.uint32)))
            total = np.concatenate(([0], np.cumsum(np.frombuffer(layout.sizes, np.uint64).astype(np.int64))))[ends]
            found[here] = total[inner[here] + 1] - total[inner[here]]
        return found

    def _by_layout(self, shards: Column) -> Iterator[tuple[Layout, Column]]:
        """The layout of each of these shards, and where the shard stands among them."""
        by_shard = np.argsort(shards, kind="stable")
        edges = np.flatnonzero(np.diff(shards[by_shard], prepend=-1, append=-1))
        for begin, end in pairwise(edges.tolist()):
            here = by_shard[begin:end]
            yield self._layout(int(shards[here[0]]), Facts()), here

    def _located(self, indices: Column) -> tuple[Column, Column]:
        """Shards of samples (or heads of shards), and their numbers there, by their places or their numbers in the
        dataset."""
        numbers = ~is_place(indices)
        if numbers.any():
            indices = indices.copy()
            indices[numbers] = places_of(np.cumsum(self.all_counts()), indices[numbers])
        return block_and_inner(indices)

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        blocks, inner = self._located(np.asarray(indices, np.int64))
        views = {block: self._view(block, facts) for block in set(blocks.tolist())}
        places = [(views[block], sample) for block, sample in zip(blocks.tolist(), inner.tolist(), strict=True)]
        items: list[Item] = []
        cuts = [_cuts(view, sample, items) for view, sample in places]
        values = self._source.get_many(items, facts)
        began_s = clock.monotonic_s()
        made = [self._sample(view, at, cut, values, facts) for (view, at), cut in zip(places, cuts, strict=True)]
        facts.decode_s += clock.monotonic_s() - began_s
        return self._kept(lambda number: places[number][0].name(places[number][1]), made, facts)

    def _view(self, block: int, facts: Facts) -> _View:
        listing, shard = self.listing, block % self.listing.objects
        return _View(listing.bucket, listing.key(shard), listing.etag(shard), self._layout(block, facts))

    def _sample(self, view: _View, sample: int, cuts: list[_Cut], values: list[Any], facts: Facts) -> Any:
        made: dict[str, Any] = {"__key__": view.layout.key(sample), "__shard__": view.key}
        for extension, item, start, size in cuts:
            value = values[item] if item >= 0 else b""
            if isinstance(value, ForebayError):
                return value
            if len(value) != size:
                value = memoryview(value)[start : start + size]
                if len(value) != size:
                    return Corrupt(f"{view.name(sample)} is cut short in its {extension}: write the shard again")
            facts.size_bytes += size
            decoder = self._decoder(extension)
            if decoder is None:
                made[extension.lower()] = value if type(value) is bytes else bytes(value)
                continue
            facts.unlocked = facts.unlocked or getattr(decoder, "unlocked", False)
            part = decoded(partial(_part_name, view, sample, extension), decoder, value)
            if isinstance(part, ForebayError):
                return part
            made[extension.lower()] = part
        for part in self.parts:
            if part not in made:
                return Corrupt(f"{view.name(sample)} has no {part}: complete it, or on_error='skip'")
        if self.transform is None:
            return made
        transform = partial(self.transform, epoch=facts.epoch) if self._with_epoch else self.transform
        return decoded(partial(view.name, sample), transform, made)

    def _decoder(self, extension: str) -> Decoder | None:
        try:
            return self._decoder_of[extension]
        except KeyError:
            found = self._decoder_of[extension] = chosen(self.decode)(extension)
            return found


class _View(NamedTuple):
    """A shard, for the length of one fetch."""

    bucket: str
    key: str
    etag: str
    layout: Layout

    def name(self, sample: int) -> str:
        """Of a sample, for errors."""
        return f"sample {self.layout.key(sample)!r} of {self.bucket}/{self.key}"


def _part_name(view: _View, sample: int, extension: str) -> str:
    return f"the {extension} of {view.name(sample)}"


class _Cut(NamedTuple):
    """Where a part lies: `size` bytes at `start` of answer number `item`; of none if it is -1."""

    extension: str
    item: int
    start: int
    size: int


def _cuts(view: _View, sample: int, items: list[Item]) -> list[_Cut]:
    """Add what has to be read for a sample to `items`; where its parts lie in the answers."""
    bucket, key, etag, layout = view
    offsets, sizes, kinds, extensions = layout.offsets, layout.sizes, layout.kinds, layout.extensions
    found: list[_Cut] = []
    begin = end = -1
    for member in layout.members(sample):
        extension, size = extensions[kinds[member]], sizes[member]
        if not size:  # there is no range of nothing
            found.append(_Cut(extension, -1, 0, 0))
        elif not layout.plain:
            found.append(_Cut(extension, len(items), 0, size))
            items.append(Item(bucket, key, 0, None, f"{layout.key(sample)}.{extension}", etag))
        else:
            start = offsets[member]
            if begin >= 0 and 0 <= start - end <= GAP_BYTES_MAX:
                end = start + size
                items[-1] = Item(bucket, key, begin, end, "", etag)
            else:
                begin, end = start, start + size
                items.append(Item(bucket, key, begin, end, "", etag))
            found.append(_Cut(extension, len(items) - 1, start - begin, size))
    return found
