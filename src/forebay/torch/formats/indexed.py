"""Datasets of shards that another library wrote, with an `index.json` beside them that counts their samples.

Theory. The shards of Mosaic's streaming library and of litdata begin alike: with the number of their samples and, for
each, where it begins; so a sample is one range. That head is read when a batch first comes to the shard, a few KB, and
kept up to HEADS_BYTES_MAX. A sample has the sizes of its columns of variable size, then the columns one after another.
Which columns there are, and how each is decoded, is what the libraries differ in.

A shard that is compressed as a whole is unpacked by the node, once, and its samples are ranges of the plain form, which
is the shard's one member. Where samples of a shard can only be had together (litdata's Arrow and frames), a range holds
a group of them. Groups are read as those of parquet files are: see `together.py`.

Invariant. Samples are numbered by shard, in byte order of their keys, then as they lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound, NotSupported
from forebay.core.formats.listing import Listing
from forebay.core.formats.members import WHOLE
from forebay.core.messages.batch import Item
from forebay.core.spelling import known_arguments
from forebay.ports import clock
from forebay.torch.columns import Column
from forebay.torch.dataset import SKIPPED, Accesses, Dataset, OnError, block_rows, decoded, frees_lock, parameters
from forebay.torch.formats.together import WINDOW_BYTES, KeptHere
from forebay.torch.source import PATIENCE_S, Bytes, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S

INDEX = "index.json"
HEADS_BYTES_MAX = limits.GIB  # some 250 million samples; forked workers share them
Decode = Callable[[Any], Any]


class Columns(NamedTuple):
    """What a sample is made of: names, sizes (None: each sample says it) and decoders, one each. `join` makes the
    sample of the values; None: a dictionary of them. `unpack` makes plain bytes of a sample that lies alone."""

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    decode: tuple[Decode, ...]
    join: Callable[[list[Any]], Any] | None = None
    unpack: Decode | None = None


class Said(NamedTuple):
    """What the index says of a shard. `plain_bytes`: of its plain form where it is compressed; None: it is not."""

    samples: int
    columns: Columns
    plain_bytes: int | None


class Grouping(Protocol):
    """How the groups of a shard are read, where samples can only be had together. Both raise `ValueError` for what is
    damaged."""

    @property
    def nbytes(self) -> int:
        """Of memory that this takes."""
        ...

    def unpacked(self, group: int, data: Bytes) -> Any:
        """That group, as it is kept; it has `nbytes`."""
        ...

    def samples(self, found: Any, inner: list[int]) -> list[Any]:
        """Of a group these samples, by their numbers in the shard: the bytes of each, or what it holds."""
        ...


class Places(NamedTuple):
    """Where the samples of a shard begin and end. With `groups` each place is that of `together` samples."""

    starts: Column
    ends: Column
    together: int = 1
    groups: Grouping | None = None

    @property
    def nbytes(self) -> int:
        return int(self.starts.nbytes) + (0 if self.groups is None else self.groups.nbytes)


class Spans(NamedTuple):
    """Of samples: the shard, the number in it, from where to where it or its group lies, its share of that; the number
    of its group (-1: it has none), and how these are read, by shard. `damaged`: of which shards nobody can tell, where
    their samples are skipped: each of these counts as one of equal parts."""

    shards: Column
    inner: Column
    starts: Column
    ends: Column
    shares: Column
    groups: Column
    groupings: dict[int, Grouping]
    damaged: dict[int, ForebayError]


class IndexedShards(Dataset):
    """See the module's header. Kinds say `library` and `suffixes` of its shards, and read the index."""

    library = ""
    window_bytes = WINDOW_BYTES  # of groups
    suffixes: ClassVar[tuple[str, ...]] = ()

    @known_arguments
    def __init__(
        self,
        place: str,
        *,
        decode: Mapping[str, Decode] | None = None,
        transform: Callable[..., Any] | None = None,
        url: str | None = None,
        on_error: OnError = "raise",
        patience_s: float = PATIENCE_S,
        direct_after_s: float | None = DIRECT_AFTER_S,
        direct: Mapping[str, str] | None = None,
        source: Source | None = None,
        listing: Listing | bytes | None = None,
        versions: Listing | bytes | None = None,
    ) -> None:
        self.decode, self.transform, self._with_epoch = dict(decode or {}), transform, bool(parameters(transform))
        super().__init__(
            place,
            suffixes=self.suffixes,
            url=url,
            on_error=on_error,
            patience_s=patience_s,
            direct_after_s=direct_after_s,
            direct=direct,
            source=source,
            listing=listing,
            versions=versions,
        )
        self._shards = self._indexed()
        self._counts: Column = np.asarray([shard.samples for shard in self._shards], np.int64)
        self._ends: Column = np.cumsum(self._counts)
        self.samples = int(self._ends[-1])
        if not self.samples:
            raise NotFound(f"the shards under {place!r} hold no samples")
        self._heads: OrderedDict[int, Places] = OrderedDict()
        self._heads_bytes = 0
        self._groups = KeptHere(2 * self.window_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_heads": OrderedDict(), "_heads_bytes": 0}

    # --- the index ---------------------------------------------------------------------------------------------------
    def said(self, index: Bytes) -> dict[str, Said]:
        """What the index says of each shard, by its name. Raises `NotSupported`, `Corrupt` for what is no index."""
        raise NotImplementedError

    def _indexed(self) -> list[Said]:
        """What the index says of each shard, in order of their keys."""
        assert self._listing is not None, "it was listed just now"
        bucket, folder = self.listing.bucket, self._listing.prefix
        folder = folder if not folder or folder.endswith("/") else folder + "/"
        (value,) = self._source.get_many([Item(bucket, folder + INDEX)], Facts())
        if isinstance(value, NotFound):
            raise NotFound(f"there is no {INDEX} in {self.place!r}: give the folder that {self.library} made")
        if isinstance(value, ForebayError):
            raise value
        try:
            said = {folder + name: shard for name, shard in self.said(value).items()}
        except (ValueError, msgspec.MsgspecError) as error:
            what = f"no index of {self.library}"
            raise Corrupt(f"{bucket}/{folder}{INDEX} is {what} ({error}): write it again") from None
        keys = self.listing.names
        if set(keys) != set(said):
            odd = min(set(keys) ^ set(said))
            which = "in the index, and not there" if odd in said else "there, and not in the index"
            raise Invalid(f"{bucket}/{odd} is {which}: complete the data, or write the index again")
        return [said[key] for key in keys]

    # --- samples -----------------------------------------------------------------------------------------------------
    def blocks(self) -> tuple[Column, Column]:
        return self._counts, self.listing.sizes

    def sizes(self, indices: Column) -> Column:
        return self._spans(indices, Facts()).shares

    def accesses(self, indices: Column) -> Accesses:
        """Of what is compressed, all of its shard; of samples that are had together, all of their group."""
        spans = self._spans(indices, Facts())
        packed = np.asarray([shard.plain_bytes is not None for shard in self._shards])[spans.shards]
        ends = np.where(packed, self.listing.sizes[spans.shards], spans.ends)
        rows = block_rows(self.listing, spans.shards, np.where(packed, 0, spans.starts), ends)
        return Accesses(rows, int(np.where(packed, ends, spans.shares).sum()))

    def _spans(self, indices: Column, facts: Facts) -> Spans:
        shards: Column = np.searchsorted(self._ends, indices, "right")
        inner = indices - (self._ends[shards] - self._counts[shards])
        heads, damaged = self._places(np.unique(shards).tolist(), facts)
        for shard in damaged:
            even = np.linspace(0, self.listing.sizes[shard], int(self._counts[shard]) + 1).astype(np.int64)
            heads[shard] = Places(even[:-1], even[1:])
        starts, ends, together = np.empty_like(inner), np.empty_like(inner), np.ones_like(inner)
        groups = np.full_like(inner, -1)
        for shard, places in heads.items():
            here = shards == shard
            number = inner[here] // places.together
            starts[here], ends[here], together[here] = places.starts[number], places.ends[number], places.together
            if places.groups is not None:
                groups[here] = number
        groupings = {shard: places.groups for shard, places in heads.items() if places.groups is not None}
        return Spans(shards, inner, starts, ends, -(-(ends - starts) // together), groups, groupings, damaged)

    def _places(self, shards: list[int], facts: Facts) -> tuple[dict[int, Places], dict[int, ForebayError]]:
        """Where the samples of shards lie. Threads may do the same work twice."""
        found = {shard: places for shard in shards if (places := self._heads.get(shard)) is not None}
        missing = [shard for shard in shards if shard not in found]
        damaged: dict[int, ForebayError] = {}
        for shard, head in zip(missing, self._read_heads(missing, facts), strict=True):
            if not isinstance(head, ForebayError):
                found[shard] = self._heads[shard] = head
                self._heads_bytes += head.nbytes
            elif self.on_error == "skip" and isinstance(head, SKIPPED):
                damaged[shard] = head
            else:
                raise head
        while self._heads_bytes > HEADS_BYTES_MAX and len(self._heads) > 1:
            self._heads_bytes -= self._heads.popitem(last=False)[1].nbytes
        return found, damaged

    def _read_heads(self, shards: list[int], facts: Facts) -> list[Places | ForebayError]:
        sizes = self.listing.sizes
        items = [self._item(shard, 0, self.head_bytes(shard)) for shard in shards if sizes[shard]]
        came = iter(self._source.get_many(items, facts) if items else ())
        values = [next(came) if sizes[shard] else b"" for shard in shards]  # there is no range of an empty object
        return [
            value if isinstance(value, ForebayError) else self._head(shard, value)
            for shard, value in zip(shards, values, strict=True)
        ]

    def head_bytes(self, shard: int) -> int:
        """How long the head of a shard is, at least."""
        return 4 * (int(self._counts[shard]) + 2)

    def _head(self, shard: int, data: Bytes) -> Places | ForebayError:
        """The places in the head of a shard, or the error that it is."""
        count, plain_bytes = int(self._counts[shard]), self._shards[shard].plain_bytes
        end = int(self.listing.sizes[shard]) if plain_bytes is None else plain_bytes
        said = np.frombuffer(data, "<u4", min(len(data) // 4, count + 2)).astype(np.int64)
        if len(said) != count + 2 or said[0] != count or (np.diff(said[1:]) < 0).any() or said[-1] > end:
            return self._unlike(shard)
        return Places(said[1:-1], said[2:])

    def _name(self, shard: int) -> str:
        return f"{self.listing.bucket}/{self.listing.key(shard)}"

    def _unlike(self, shard: int, why: str = "") -> Corrupt:
        return Corrupt(f"{self._name(shard)} is not what {INDEX} says{why and f' ({why})'}: write it again")

    def _item(self, shard: int, start: int, end: int) -> Item:
        member = "" if self._shards[shard].plain_bytes is None else WHOLE
        return Item(self.listing.bucket, self.listing.key(shard), start, end, member, self.listing.etag(shard))

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64), facts)
        shards = spans.shards.tolist()
        made: list[Any] = [spans.damaged.get(shard) for shard in shards]
        alone = [n for n, group in enumerate(spans.groups.tolist()) if group < 0 and made[n] is None]
        items = {number: self._item_of(spans, number) for number in alone}
        asked = [item for item in items.values() if item.start != item.end]
        came = iter(self._source.get_many(asked, facts) if asked else ())
        began_s = clock.monotonic_s()
        facts.unlocked = facts.unlocked or frees_lock(self.decode.values())

        def name(number: int) -> str:
            return f"sample {indices[number]} (in {self._name(shards[number])})"

        def make(number: int, value: Any) -> None:
            if not isinstance(value, ForebayError):
                value = self._made(self._shards[shards[number]].columns, value, partial(name, number), facts.epoch)
            made[number] = value

        for number, item in items.items():
            value = next(came) if item.start != item.end else b""  # there is no range of nothing
            if not isinstance(value, ForebayError):
                facts.size_bytes += len(value)
            make(number, value)
        facts.decode_s += clock.monotonic_s() - began_s
        if spans.groupings:
            for number, value in self._of_groups(spans, facts):
                began_s = clock.monotonic_s()
                make(number, value)
                facts.decode_s += clock.monotonic_s() - began_s
        return self._kept(name, made, facts)

    def _item_of(self, spans: Spans, number: int) -> Item:
        return self._item(int(spans.shards[number]), int(spans.starts[number]), int(spans.ends[number]))

    def _of_groups(self, spans: Spans, facts: Facts) -> Iterator[tuple[int, Any]]:
        """Of those samples that are had together their numbers in the batch, and what there is of each."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for number, key in enumerate(zip(spans.shards.tolist(), spans.groups.tolist(), strict=True)):
            if key[1] >= 0:
                wanted.setdefault(key, []).append(number)
        kept = self._groups.kept()
        for some in self._at_once(spans, wanted):
            missing = [key for key in some if key not in kept]
            asked = [self._item_of(spans, wanted[key][0]) for key in missing]
            values = dict(zip(missing, self._source.get_many(asked, facts) if asked else (), strict=True))
            for key in some:
                numbers = wanted[key]
                load = partial(
                    self._group, key, spans.groupings[key[0]], partial(self._item_of, spans, numbers[0]), values, facts
                )
                try:
                    found = kept.group(key, load)
                    began_s = clock.monotonic_s()
                    samples = spans.groupings[key[0]].samples(found, spans.inner[numbers].tolist())
                    facts.decode_s += clock.monotonic_s() - began_s
                except ForebayError as error:
                    samples = [error] * len(numbers)
                except ValueError as error:
                    samples = [self._damaged(key, error)] * len(numbers)
                yield from zip(numbers, samples, strict=True)

    def _at_once(self, spans: Spans, wanted: dict[tuple[int, int], list[int]]) -> Iterator[list[tuple[int, int]]]:
        """Groups, so many at once as a window has bytes."""
        some: list[tuple[int, int]] = []
        size_bytes = 0
        for key, numbers in wanted.items():
            each_bytes = int(spans.ends[numbers[0]] - spans.starts[numbers[0]])
            if some and size_bytes + each_bytes > self.window_bytes:
                yield some
                some, size_bytes = [], 0
            some.append(key)
            size_bytes += each_bytes
        yield some

    def _group(
        self,
        key: tuple[int, int],
        grouping: Grouping,
        item: Callable[[], Item],
        values: dict[tuple[int, int], Any],
        facts: Facts,
    ) -> Any:
        """A group as it is kept. `values` has its bytes, unless it was dropped since somebody saw it."""
        value = values.pop(key, None)
        if value is None:
            (value,) = self._source.get_many([item()], facts)
        if isinstance(value, ForebayError):
            raise value
        facts.size_bytes += len(value)
        began_s = clock.monotonic_s()
        try:
            return grouping.unpacked(key[1], value)
        except ValueError as error:
            raise self._damaged(key, error) from error
        finally:
            facts.decode_s += clock.monotonic_s() - began_s

    def _damaged(self, key: tuple[int, int], error: ValueError) -> Corrupt:
        return Corrupt(
            f"{self._name(key[0])} cannot be read: group {key[1]} of its samples is damaged ({error}). Write it again, "
            "or on_error='skip'"
        )

    def _made(self, columns: Columns, value: Any, name: Callable[[], str], epoch: int | None) -> Any:
        if columns.unpack is not None:
            value = decoded(name, columns.unpack, value)
            if isinstance(value, ForebayError):
                return value
        data = memoryview(value)
        at = 4 * columns.sizes.count(None)
        told = iter(np.frombuffer(data[:at], "<u4").tolist() if len(data) >= at else ())
        made: list[Any] = []
        for column, size, decode in zip(columns.names, columns.sizes, columns.decode, strict=True):
            size_bytes = next(told, -1) if size is None else size
            if size_bytes < 0 or at + size_bytes > len(data):
                return Corrupt(f"{name()} is cut short in its {column}: write the shard again")
            made.append(decoded(partial(part_name, column, name), decode, data[at : at + size_bytes]))
            if isinstance(made[-1], ForebayError):
                return made[-1]
            at += size_bytes
        sample = dict(zip(columns.names, made, strict=True)) if columns.join is None else columns.join(made)
        return self._transformed(sample, name, epoch)

    def _transformed(self, sample: Any, name: Callable[[], str], epoch: int | None) -> Any:
        if self.transform is None:
            return sample
        return decoded(name, partial(self.transform, epoch=epoch) if self._with_epoch else self.transform, sample)


def part_name(column: str, name: Callable[[], str]) -> str:
    return f"the {column} of {name()}"


def undecoded(name: str, encoding: str) -> NotSupported:
    """For a column that is encoded in a way that is not read here."""
    return NotSupported(
        f"the column {name!r} is encoded as {encoding!r}, which is not read here: pass decode={{{name!r}: f}}, which "
        "gets its bytes"
    )


# --- what both libraries have -----------------------------------------------------------------------------------------
def text(kind: Callable[[str], Any], data: Any) -> Any:
    """UTF-8, of which `kind` makes the value."""
    return kind(str(data, "utf-8"))


def number(dtype: Any, data: Any) -> Any:
    """One number, as Python has it."""
    return np.frombuffer(data, dtype)[0].item()


def array(dtype: Any, shape: tuple[int, ...], data: Any) -> Any:
    """An array of its own memory."""
    return np.frombuffer(data, dtype).reshape(shape).copy()
