"""Datasets of shards that another library wrote, with an `index.json` beside them that counts their samples.

Theory. The shards of Mosaic's streaming library and of litdata begin alike: with the number of their samples and, for
each, where it begins; so a sample is one range. That head is read when a batch first comes to the shard, a few KB, and
kept up to HEADS_BYTES_MAX. A sample has the sizes of its columns of variable size, then the columns one after another.
Which columns there are, and how each is decoded, is what the libraries differ in.

A shard that is compressed as a whole is unpacked by the node, once, and its samples are ranges of the plain form, which
is the shard's one member.

Invariant. Samples are numbered by shard, in byte order of their keys, then as they lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
from forebay.torch.dataset import SKIPPED, Accesses, Dataset, OnError, decoded, frees_lock, parameters, ranges
from forebay.torch.source import PATIENCE_S, Bytes, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S

INDEX = "index.json"
HEADS_BYTES_MAX = limits.GIB  # some 250 million samples; forked workers share them
Decode = Callable[[Any], Any]


class Columns(NamedTuple):
    """What a sample is made of: names, sizes (None: each sample says it) and decoders, one each. `join` makes the
    sample of the values; None: a dictionary of them."""

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    decode: tuple[Decode, ...]
    join: Callable[[list[Any]], Any] | None = None


class Said(NamedTuple):
    """What the index says of a shard. `plain_bytes`: of its plain form where it is compressed; None: it is not."""

    samples: int
    columns: Columns
    plain_bytes: int | None


class IndexedShards(Dataset):
    """See the module's header. Kinds say `library` and `suffixes` of its shards, and read the index."""

    library = ""
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
        self._heads: OrderedDict[int, Column] = OrderedDict()
        self._heads_bytes = 0

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
        _, starts, ends, _ = self._spans(indices, Facts())
        return ends - starts

    def accesses(self, indices: Column) -> Accesses:
        """Of what is compressed, all of its shard."""
        shards, starts, ends, _ = self._spans(indices, Facts())
        packed = np.asarray([shard.plain_bytes is not None for shard in self._shards])[shards]
        return ranges(
            self.listing, shards, np.where(packed, 0, starts), np.where(packed, self.listing.sizes[shards], ends)
        )

    def _spans(self, indices: Column, facts: Facts) -> tuple[Column, Column, Column, dict[int, ForebayError]]:
        """The shard of each sample, and from where to where it lies; and of which shards nobody can tell, where their
        samples are skipped: each of these counts as one of equal parts."""
        shards: Column = np.searchsorted(self._ends, indices, "right")
        inner = indices - (self._ends[shards] - self._counts[shards])
        heads, damaged = self._heads_of(np.unique(shards).tolist(), facts)
        for shard in damaged:
            heads[shard] = np.linspace(0, self.listing.sizes[shard], int(self._counts[shard]) + 1).astype(np.int64)
        starts, ends = np.empty_like(inner), np.empty_like(inner)
        for shard, head in heads.items():
            here = shards == shard
            starts[here], ends[here] = head[inner[here]], head[inner[here] + 1]
        return shards, starts, ends, damaged

    def _heads_of(self, shards: list[int], facts: Facts) -> tuple[dict[int, Column], dict[int, ForebayError]]:
        """Where the samples of shards begin, and the last one ends. Threads may do the same work twice."""
        found = {shard: head for shard in shards if (head := self._heads.get(shard)) is not None}
        missing, sizes = [shard for shard in shards if shard not in found], self.listing.sizes
        items = [self._item(shard, 0, 4 * (int(self._counts[shard]) + 2)) for shard in missing if sizes[shard]]
        came = iter(self._source.get_many(items, facts) if items else ())
        values = [next(came) if sizes[shard] else b"" for shard in missing]  # there is no range of an empty object
        damaged: dict[int, ForebayError] = {}
        for shard, value in zip(missing, values, strict=True):
            head = value if isinstance(value, ForebayError) else self._head(shard, value)
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

    def _head(self, shard: int, data: Bytes) -> Any:
        """The places in the head of a shard, or the error that it is."""
        name, count = f"{self.listing.bucket}/{self.listing.key(shard)}", int(self._counts[shard])
        plain_bytes = self._shards[shard].plain_bytes
        end = int(self.listing.sizes[shard]) if plain_bytes is None else plain_bytes
        said = np.frombuffer(data, "<u4", len(data) // 4).astype(np.int64)
        if len(said) != count + 2 or said[0] != count or (np.diff(said[1:]) < 0).any() or said[-1] > end:
            return Corrupt(f"{name} is not what {INDEX} says: write it again")
        if said[1] == said[-1] and self._shards[shard].columns.names:
            return NotSupported(
                f"{name} has its samples behind its table of places, as Arrow, which is not read here: litdata writes "
                "dictionaries without arrays so, if it has pyarrow. Give optimize() tuples, or an array with the values"
            )
        return said[1:]

    def _item(self, shard: int, start: int, end: int) -> Item:
        member = "" if self._shards[shard].plain_bytes is None else WHOLE
        return Item(self.listing.bucket, self.listing.key(shard), start, end, member, self.listing.etag(shard))

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        shards, starts, ends, damaged = self._spans(np.asarray(indices, np.int64), facts)
        items = [self._item(*row) for row in zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True)]
        asked = [item for item, shard in zip(items, shards.tolist(), strict=True) if shard not in damaged]
        came = iter(self._source.get_many(asked, facts) if asked else ())
        values = [damaged[shard] if shard in damaged else next(came) for shard in shards.tolist()]
        began_s = clock.monotonic_s()
        facts.unlocked = facts.unlocked or frees_lock(self.decode.values())
        made: list[Any] = []

        def name(number: int) -> str:
            return f"sample {indices[number]} (in {items[number].bucket}/{items[number].key})"

        for number, value in enumerate(values):
            if not isinstance(value, ForebayError):
                facts.size_bytes += len(value)
                columns = self._shards[int(shards[number])].columns
                value = self._made(columns, value, partial(name, number), facts.epoch)
            made.append(value)
        facts.decode_s += clock.monotonic_s() - began_s
        return self._kept(name, made, facts)

    def _made(self, columns: Columns, value: Any, name: Callable[[], str], epoch: int | None) -> Any:
        data = memoryview(value)
        at = 4 * columns.sizes.count(None)
        told = iter(np.frombuffer(data[:at], "<u4").tolist() if len(data) >= at else ())
        made: list[Any] = []
        for column, size, decode in zip(columns.names, columns.sizes, columns.decode, strict=True):
            size_bytes = next(told, -1) if size is None else size
            if size_bytes < 0 or at + size_bytes > len(data):
                return Corrupt(f"{name()} is cut short in its {column}: write the shard again")
            made.append(decoded(partial(_part_name, column, name), decode, data[at : at + size_bytes]))
            if isinstance(made[-1], ForebayError):
                return made[-1]
            at += size_bytes
        sample = dict(zip(columns.names, made, strict=True)) if columns.join is None else columns.join(made)
        if self.transform is None:
            return sample
        return decoded(name, partial(self.transform, epoch=epoch) if self._with_epoch else self.transform, sample)


def _part_name(column: str, name: Callable[[], str]) -> str:
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
