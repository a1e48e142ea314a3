"""A dataset of shards as Mosaic's streaming library writes them (MDS), where they lie.

Theory. `index.json` says how many samples each shard has, and which columns. A shard begins with the number of its
samples and, for each, where it begins; so a sample is one range. That head is read when a batch first comes to the
shard, a few KB, and kept up to HEADS_BYTES_MAX. A sample has the sizes of its columns of variable size, then the
columns one after another.

Invariant. Samples are numbered by shard, in byte order of their keys, then as they lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound, NotSupported
from forebay.core.formats.listing import Listing
from forebay.core.messages.batch import Item
from forebay.core.spelling import known_arguments
from forebay.ports import clock
from forebay.torch.columns import Column
from forebay.torch.dataset import Accesses, Dataset, OnError, decoded, parameters, ranges
from forebay.torch.source import PATIENCE_S, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S

INDEX = "index.json"
HEADS_BYTES_MAX = limits.GIB  # some 250 million samples; forked workers share them
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_TEXTS: dict[str, type] = {"str": str, "str_int": int, "str_float": float}
_Decode = Callable[[Any], Any]


class _File(msgspec.Struct):
    basename: str


class _Shard(msgspec.Struct):
    """What the index says of a shard, as far as it is needed."""

    samples: int
    raw_data: _File
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    format: str = "mds"
    compression: str | None = None


class _Index(msgspec.Struct):
    shards: list[_Shard]
    version: int = 2


class _Columns(NamedTuple):
    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    decode: tuple[_Decode, ...]


class MdsDataset(Dataset):
    """The samples of the shards (`*.mds`) that `index.json` under `place` names, each a dictionary by column.

    Numbers, `str`, `json` and arrays of one shape are decoded as they were encoded, and `bytes`, `jpeg` and `png` stay
    bytes; `decode` says otherwise, as in `{"image": Pictures()}`, and is needed for other encodings (`pkl`, `pil`,
    `ndarray` of any shape). `transform` gets the dictionary and makes the sample. Uncompressed shards only. See
    `ObjectDataset` for the rest.
    """

    shape = "mds"

    @known_arguments
    def __init__(
        self,
        place: str,
        *,
        decode: Mapping[str, _Decode] | None = None,
        transform: Callable[..., Any] | None = None,
        url: str | None = None,
        on_error: OnError = "raise",
        patience_s: float = PATIENCE_S,
        direct_after_s: float | None = DIRECT_AFTER_S,
        direct: Mapping[str, str] | None = None,
        source: Source | None = None,
        listing: Listing | bytes | None = None,
    ) -> None:
        self.decode, self.transform, self._with_epoch = dict(decode or {}), transform, bool(parameters(transform))
        super().__init__(
            place,
            suffixes=[".mds"],
            url=url,
            on_error=on_error,
            patience_s=patience_s,
            direct_after_s=direct_after_s,
            direct=direct,
            source=source,
            listing=listing,
        )
        shards = self._indexed()
        self._counts: Column = np.asarray([shard.samples for shard in shards], np.int64)
        self._ends: Column = np.cumsum(self._counts)
        self.samples = int(self._ends[-1])
        if not self.samples:
            raise NotFound(f"the shards under {place!r} hold no samples")
        known: dict[tuple[Any, ...], _Columns] = {}
        self._columns_of = [self._columns_said(shard, known) for shard in shards]
        self._heads: OrderedDict[int, Column] = OrderedDict()
        self._heads_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_heads": OrderedDict(), "_heads_bytes": 0, "_columns_of": self._columns_of}

    # --- the index ---------------------------------------------------------------------------------------------------
    def _indexed(self) -> list[_Shard]:
        """What the index says of each shard, in order of their keys."""
        assert self._listing is not None, "it was listed just now"
        bucket, folder = self.listing.bucket, self._listing.prefix
        folder = folder if not folder or folder.endswith("/") else folder + "/"
        (value,) = self._source.get_many([Item(bucket, folder + INDEX)], Facts())
        if isinstance(value, NotFound):
            raise NotFound(f"there is no {INDEX} in {self.place!r}: give the folder that Mosaic's writer made")
        if isinstance(value, ForebayError):
            raise value
        try:
            said = {folder + shard.raw_data.basename: shard for shard in msgspec.json.decode(value, type=_Index).shards}
        except msgspec.DecodeError as error:
            raise Corrupt(f"{bucket}/{folder}{INDEX} is no index of MDS ({error}): write it again") from None
        keys = self.listing.names
        if set(keys) != set(said):
            odd = min(set(keys) ^ set(said))
            which = "in the index, and not there" if odd in said else "there, and not in the index"
            raise Invalid(f"{bucket}/{odd} is {which}: complete the data, or write the index again")
        return [said[key] for key in keys]

    def _columns_said(self, shard: _Shard, known: dict[tuple[Any, ...], _Columns]) -> _Columns:
        if shard.format != "mds" or shard.compression:
            raise NotSupported(
                f"{shard.raw_data.basename} is {shard.format}, compressed by {shard.compression}: only MDS that is not "
                "compressed is read in place. Write it with compression=None"
            )
        key = tuple(shard.column_names), tuple(shard.column_encodings), tuple(shard.column_sizes)
        if key not in known:
            decoders = [self.decode.get(name) or _decoder(name, encoding) for name, encoding in zip(*key[:2])]
            known[key] = _Columns(key[0], key[2], tuple(decoders))
        return known[key]

    # --- samples -----------------------------------------------------------------------------------------------------
    def blocks(self) -> tuple[Column, Column]:
        return self._counts, self.listing.sizes

    def sizes(self, indices: Column) -> Column:
        _, starts, ends = self._spans(indices)
        return ends - starts

    def accesses(self, indices: Column) -> Accesses:
        return ranges(self.listing, *self._spans(indices))

    def _spans(self, indices: Column, facts: Facts | None = None) -> tuple[Column, Column, Column]:
        """The shard of each sample, and from where to where it lies."""
        shards: Column = np.searchsorted(self._ends, indices, "right")
        inner = indices - (self._ends[shards] - self._counts[shards])
        heads = self._heads_of(np.unique(shards).tolist(), facts or Facts())
        starts, ends = np.empty_like(inner), np.empty_like(inner)
        for shard, head in heads.items():
            here = shards == shard
            starts[here], ends[here] = head[inner[here]], head[inner[here] + 1]
        return shards, starts, ends

    def _heads_of(self, shards: list[int], facts: Facts) -> dict[int, Column]:
        """Where the samples of shards begin, and the last one ends. Threads may do the same work twice."""
        found = {shard: head for shard in shards if (head := self._heads.get(shard)) is not None}
        missing = [shard for shard in shards if shard not in found]
        items = [self._item(shard, 0, 4 * (int(self._counts[shard]) + 2)) for shard in missing]
        for shard, item, value in zip(
            missing, items, self._source.get_many(items, facts) if items else (), strict=True
        ):
            if isinstance(value, ForebayError):
                raise value
            said = np.frombuffer(value, "<u4").astype(np.int64)
            whole = len(value) == item.end and said[0] == self._counts[shard]
            if not whole or (np.diff(said[1:]) < 0).any() or said[-1] > self.listing.sizes[shard]:
                raise Corrupt(f"{item.bucket}/{item.key} is not what {INDEX} says: write it again")
            found[shard] = self._heads[shard] = said[1:]
            self._heads_bytes += said.nbytes
        while self._heads_bytes > HEADS_BYTES_MAX and len(self._heads) > 1:
            self._heads_bytes -= self._heads.popitem(last=False)[1].nbytes
        return found

    def _item(self, shard: int, start: int, end: int) -> Item:
        return Item(self.listing.bucket, self.listing.key(shard), start, end, "", self.listing.etag(shard))

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        shards, starts, ends = self._spans(np.asarray(indices, np.int64), facts)
        items = [self._item(*row) for row in zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True)]
        values = self._source.get_many(items, facts)
        began_s = clock.monotonic_s()
        made: list[Any] = []

        def name(number: int) -> str:
            return f"sample {indices[number]} (in {items[number].bucket}/{items[number].key})"

        for number, value in enumerate(values):
            if not isinstance(value, ForebayError):
                facts.size_bytes += len(value)
                value = self._made(self._columns_of[int(shards[number])], value, partial(name, number), facts.epoch)
            made.append(value)
        facts.decode_s += clock.monotonic_s() - began_s
        return self._kept(name, made, facts)

    def _made(self, columns: _Columns, value: Any, name: Callable[[], str], epoch: int | None) -> Any:
        data = memoryview(value)
        at = 4 * columns.sizes.count(None)
        told = iter(np.frombuffer(data[:at], "<u4").tolist() if len(data) >= at else ())
        made: dict[str, Any] = {}
        for column, size, decode in zip(*columns, strict=True):
            size_bytes = next(told, -1) if size is None else size
            if size_bytes < 0 or at + size_bytes > len(data):
                return Corrupt(f"{name()} is cut short in its {column}: write the shard again")
            made[column] = decoded(partial(_part_name, column, name), decode, data[at : at + size_bytes])
            if isinstance(made[column], ForebayError):
                return made[column]
            at += size_bytes
        if self.transform is None:
            return made
        return decoded(name, partial(self.transform, epoch=epoch) if self._with_epoch else self.transform, made)


def _part_name(column: str, name: Callable[[], str]) -> str:
    return f"the {column} of {name()}"


def _decoder(name: str, encoding: str) -> _Decode:
    """How a column of that encoding is read."""
    kind, _, rest = encoding.partition(":")
    if kind in ("bytes", "jpeg", "png"):
        return bytes
    if encoding in _TEXTS:
        return partial(_text, _TEXTS[encoding])
    if encoding == "json":
        return msgspec.json.decode
    if encoding == "int" or encoding in _NUMBERS:
        return partial(_number, np.dtype("int64" if encoding == "int" else encoding).newbyteorder("<"))
    dtype, _, shape = rest.partition(":")
    if kind == "ndarray" and dtype in _NUMBERS and shape:
        return partial(_array, np.dtype(dtype).newbyteorder("<"), tuple(map(int, shape.split(","))))
    raise NotSupported(
        f"the column {name!r} is encoded as {encoding!r}, which is not read here: pass decode={{{name!r}: f}}, which "
        "gets its bytes"
    )


def _text(kind: type, data: Any) -> Any:
    return kind(str(data, "utf-8"))


def _number(dtype: Any, data: Any) -> Any:
    return np.frombuffer(data, dtype)[0].item()


def _array(dtype: Any, shape: tuple[int, ...], data: Any) -> Any:
    return np.frombuffer(data, dtype).reshape(shape).copy()
