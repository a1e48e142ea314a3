"""Chunks as Lightning's litdata writes them, where they lie: see `indexed.py`.

Theory. `index.json` counts the samples of each chunk, and says once for all of them how a sample was flattened: the
tree of dictionaries, lists and tuples that it was, and how each leaf is encoded. A sample begins with the sizes of all
its leaves.

Two kinds of chunks have samples that can only be had together: rows of Arrow (`arrow_rows.py`) and frames of zstd
(`litdata_frames.py`). Of frames the index tells. Of Arrow it does not: litdata writes a chunk so if the samples allow
it and pyarrow is there. So where no leaf is an array or the like, the head of a chunk is read when the dataset is made.
If it is of Arrow, all are shuffled in windows of groups, and each chunk is read as its own head says: a chunk whose
rows do not make a table is laid out as the others are. What a group will take decoded nobody says, so it is estimated
by its share of the chunk.

Not read are chunks that are laid out otherwise: streams of tokens, encrypted ones.

Invariant. The order is a function of the listing, the index, and the head of the first chunk that is sound.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from forebay.core.errors import ForebayError, Invalid, NotSupported
from forebay.core.formats.listing import Listing
from forebay.core.spelling import known_arguments
from forebay.torch.columns import Column
from forebay.torch.dataset import SKIPPED, OnError, Shuffle, decoded
from forebay.torch.formats import arrow_rows, litdata_frames
from forebay.torch.formats.indexed import (
    Columns,
    Decode,
    IndexedShards,
    Places,
    Said,
    array,
    number,
    part_name,
    text,
    undecoded,
)
from forebay.torch.formats.litdata_json import value_of
from forebay.torch.formats.together import WINDOW_BYTES, order_of_groups
from forebay.torch.order import Order
from forebay.torch.source import PATIENCE_S, Bytes, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S

_ARRAYS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)  # by the number that litdata gives each
_TENSORS = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
_NUMBERS = {"int": "<i8", "float": "<f8", "bool": "?"}
_IN_ARROW = ("str", "int", "float", "bool", "bytes", "json", "pickle")  # leaves of what may be Arrow; pickle: of None
_WORD_BYTES = 4
_PACKED = 4  # how much larger what is compressed is taken to be when it is decoded
_FRAME_SAMPLES = 256  # unless the index says otherwise


class _Chunk(msgspec.Struct):
    filename: str
    chunk_size: int
    chunk_bytes: int
    dim: int | None = None


class _Config(msgspec.Struct):
    data_format: list[str]
    data_spec: str
    compression: str | None = None
    compression_level: str | None = None
    compression_batch_size: int | None = None
    ipc_compression: str | None = None
    encryption: Any = None
    item_loader: str = "PyTreeLoader"


class _Index(msgspec.Struct):
    chunks: list[_Chunk]
    config: _Config


class _Node(msgspec.Struct):
    """Of the tree that a sample was."""

    type: str | None
    context: str | None
    children_spec: list[_Node]


class LitDataset(IndexedShards):
    """The samples of the chunks that `index.json` under `place` names, as `litdata.optimize` was given them.

    Numbers, truths, text, lists and arrays are decoded as they were encoded, tensors as tensors, and `bytes`, pictures
    that were compressed, and files stay bytes; `decode` says otherwise by the path of a value in the sample, as in
    `{"image": Pictures()}` or `{"pair.0": f}`, and is needed for other encodings (`pickle`, `pil`, …). It gets the
    bytes of the value, or of chunks that are Arrow the value. `transform` gets the sample and makes another.

    Chunks may be compressed as a whole by zstd (`compression_level="chunk"`): the node unpacks them. Samples that lie
    together, as Arrow (extra `parquet`) or in frames of zstd, are shuffled in windows of such groups of `window_bytes`
    decoded, as rows of parquet files are: each process keeps up to twice that. See `ObjectDataset` for the rest.
    """

    library = "litdata.optimize"
    suffixes = (".bin",)

    @known_arguments
    def __init__(
        self,
        place: str,
        *,
        decode: Mapping[str, Decode] | None = None,
        transform: Callable[..., Any] | None = None,
        window_bytes: int = WINDOW_BYTES,
        url: str | None = None,
        on_error: OnError = "raise",
        patience_s: float = PATIENCE_S,
        direct_after_s: float | None = DIRECT_AFTER_S,
        direct: Mapping[str, str] | None = None,
        source: Source | None = None,
        listing: Listing | bytes | None = None,
        versions: Listing | bytes | None = None,
    ) -> None:
        if window_bytes < 1:
            raise Invalid(f"window_bytes={window_bytes}: a window has at least one byte")
        self.window_bytes = window_bytes
        super().__init__(
            place,
            decode=decode,
            transform=transform,
            url=url,
            on_error=on_error,
            patience_s=patience_s,
            direct_after_s=direct_after_s,
            direct=direct,
            source=source,
            listing=listing,
            versions=versions,
        )
        self._together = self._frame_samples or self._seen_together()
        self.any_order = self._together == 1
        self.shape = "litdata" if self.any_order else f"litdata, in windows of {window_bytes} bytes"
        if self._undecoded is not None and (self._frame_samples or self.any_order):
            raise self._undecoded

    def said(self, index: Bytes) -> dict[str, Said]:
        said = msgspec.json.decode(index, type=_Index)
        config = said.config
        level = config.compression_level or "chunk"
        kind = config.compression or ""
        kind = kind if level == "chunk" else kind.partition(":")[0]  # a node knows chunks by names without a level
        odd = {
            "encryption": config.encryption,
            "compression": config.compression if kind != "zstd" else "",
            "compression_level": level if level not in ("chunk", "batch", "sample") else "",
            "ipc_compression": config.ipc_compression if config.ipc_compression not in ("zstd", "lz4") else "",
            "item_loader": config.item_loader if config.item_loader != "PyTreeLoader" else "",
            "dim": next((chunk.dim for chunk in said.chunks if chunk.dim), None),  # a stream of tokens
        }
        for name, value in odd.items():
            if value:
                raise NotSupported(
                    f"these chunks were written with {name}={value!r}, which is not read here: optimize() them without "
                    "(compression='zstd' is read); tokens are read by TokenDataset from plain files"
                )
        self._frame_samples = (config.compression_batch_size or _FRAME_SAMPLES) if level == "batch" else 0
        if not 0 <= self._frame_samples < 1 << 32 or any(not 0 <= chunk.chunk_size < 1 << 32 for chunk in said.chunks):
            raise ValueError("it has a number of samples that no chunk can have")
        self._packed = bool(config.ipc_compression or level == "batch")
        columns = self._columns_of(config, litdata_frames.unpacked if level == "sample" else None)
        found = {}
        for chunk in said.chunks:
            plain_bytes = 4 * (chunk.chunk_size + 2) + chunk.chunk_bytes
            packed = chunk.filename.endswith(".zstd.bin")
            found[chunk.filename] = Said(chunk.chunk_size, columns, plain_bytes if packed else None)
        return found

    def _columns_of(self, config: _Config, unpack: Decode | None) -> Columns:
        _, tree = json.loads(config.data_spec)
        root = msgspec.convert(tree, _Node)
        paths = list(_paths(root, ()))
        names = tuple(map(".".join, paths))
        self._decoding = [(path, self.decode[name]) for path, name in zip(paths, names) if name in self.decode]
        self._undecoded: NotSupported | None = None
        decoders = []
        for name, form in zip(names, config.data_format, strict=True):
            decode = self.decode.get(name) or _decoder(form)
            if decode is None:
                self._undecoded = self._undecoded or undecoded(name, form)
                decode = partial(_refused, name, form)
            decoders.append(decode)
        self._may_be_arrow = root.type == "builtins.dict" and set(config.data_format) <= set(_IN_ARROW)
        return Columns(names, (None,) * len(names), tuple(decoders), partial(_joined, root), unpack)

    # --- samples that are had together -------------------------------------------------------------------------------
    def _seen_together(self) -> int:
        """How many samples of a chunk are had together, as the first chunk has it that is sound."""
        first: ForebayError | None = None
        for shard in range(self.listing.objects if self._may_be_arrow else 0):
            if self._shards[shard].plain_bytes is None:
                (places,) = self._read_heads([shard], Facts())
                if not isinstance(places, ForebayError):
                    return places.together
                if not isinstance(places, SKIPPED):
                    raise places
                first = first or places
        if first is not None:
            raise first
        return 1

    def head_bytes(self, shard: int) -> int:
        samples = int(self._counts[shard])
        if not self._frame_samples:
            return super().head_bytes(shard)
        return litdata_frames.head_bytes(samples, self._frame_samples)

    def _head(self, shard: int, data: Bytes) -> Places | ForebayError:
        if not self._frame_samples or not litdata_frames.is_framed(data):
            return super()._head(shard, data)
        count, size = int(self._counts[shard]), int(self.listing.sizes[shard])
        try:
            return litdata_frames.places_of(data, count, self._frame_samples, size)
        except ValueError as error:
            return self._unlike(shard, str(error))

    def _read_heads(self, shards: list[int], facts: Facts) -> list[Places | ForebayError]:
        """Of Arrow the ends too: all samples begin where the last one ends."""
        heads = super()._read_heads(shards, facts)
        begins = {
            at: int(head.starts[0])
            for at, head in enumerate(heads)
            if isinstance(head, Places) and head.groups is None and len(head.starts) and head.starts[0] == head.ends[-1]
            and self._shards[shards[at]].columns.names and self._shards[shards[at]].plain_bytes is None
        }  # fmt: skip
        sizes = {at: int(self.listing.sizes[shards[at]]) for at in begins}
        wanted = dict.fromkeys(begins, arrow_rows.TAIL_BYTES)
        while wanted:  # a second time for an end that is longer
            starts = {at: max(begins[at], sizes[at] - most) for at, most in wanted.items()}
            items = [self._item(shards[at], start, sizes[at]) for at, start in starts.items() if start < sizes[at]]
            tails = iter(self._source.get_many(items, facts) if items else ())
            longer: dict[int, int] = {}
            for at, most in wanted.items():
                tail = next(tails) if starts[at] < sizes[at] else b""  # there is no range of nothing
                read = tail if isinstance(tail, ForebayError) else self._of_arrow(shards[at], begins[at], tail)
                if isinstance(read, int) and read <= most:
                    read = self._unlike(shards[at], "its end is cut short")
                if isinstance(read, int):
                    longer[at] = read
                else:
                    heads[at] = read
            wanted = longer
        return heads

    def _of_arrow(self, shard: int, begin: int, tail: Bytes) -> Places | ForebayError | int:
        """Where the batches of a chunk lie, or how many bytes of its end say it, if more than these do."""
        try:
            end_bytes = arrow_rows.end_bytes(tail)
            if end_bytes > len(tail):
                return end_bytes
            size = int(self.listing.sizes[shard])
            return arrow_rows.places_of(tail[len(tail) - end_bytes :], int(self._counts[shard]), begin, size)
        except NotSupported as error:
            return NotSupported(f"{self._name(shard)}: {error.message}")
        except ValueError as error:
            return self._unlike(shard, str(error))

    def blocks(self) -> tuple[Column, Column]:
        """Groups, where there are any. Shards that cannot have as many samples as the index says are one each."""
        if self.any_order:
            return super().blocks()
        counts, sizes, together = self._counts, self.listing.sizes, self._together
        groups = np.where(4 * counts > sizes, 1, -(-counts // together))
        shards: Column = np.repeat(np.arange(len(groups)), groups)
        counts, sizes, groups = counts[shards], sizes[shards], groups[shards]
        first = together * (np.arange(len(shards)) - np.searchsorted(shards, shards))
        samples = np.where(groups == 1, counts, np.minimum(together, counts - first))
        share = (sizes * (samples / np.maximum(1, counts))).astype(np.int64) + 1
        return samples, share * (_PACKED if self._packed else 1)

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
        if self.any_order:
            return super().order(shuffle, window_bytes, seed, epoch)
        return order_of_groups(self.blocks(), self.window_bytes, shuffle, window_bytes, seed, epoch)

    def _made(self, columns: Columns, value: Any, name: Callable[[], str], epoch: int | None) -> Any:
        if not isinstance(value, dict):
            return super()._made(columns, value, name, epoch)
        for path, decode in self._decoding:
            holder: Any = value
            for key in path[:-1]:
                holder = holder.get(key) if isinstance(holder, dict) else None
            if isinstance(holder, dict) and path[-1] in holder:
                found = decoded(partial(part_name, ".".join(path), name), decode, holder[path[-1]])
                if isinstance(found, ForebayError):
                    return found
                holder[path[-1]] = found
        return self._transformed(value, name, epoch)


# --- the tree of a sample ---------------------------------------------------------------------------------------------
def _keys(node: _Node) -> list[str]:
    """The keys of a dictionary, or the numbers of a list or tuple."""
    if node.type == "builtins.dict":
        return [str(key) for key in json.loads(node.context or "[]")]
    if node.type in ("builtins.list", "builtins.tuple"):
        return [str(number) for number in range(len(node.children_spec))]
    raise NotSupported(
        f"these samples have a {node.type} in them, which is not read here: optimize() dictionaries, lists and tuples"
    )


def _paths(node: _Node, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """To all leaves, in their order."""
    if node.type is None:
        yield path
        return
    for key, child in zip(_keys(node), node.children_spec, strict=True):
        yield from _paths(child, (*path, key))


def _joined(root: _Node, leaves: list[Any]) -> Any:
    return _grown(root, iter(leaves))


def _grown(node: _Node, leaves: Iterator[Any]) -> Any:
    if node.type is None:
        return next(leaves)
    values = [_grown(child, leaves) for child in node.children_spec]
    if node.type == "builtins.dict":
        return dict(zip(json.loads(node.context or "[]"), values, strict=True))
    return values if node.type == "builtins.list" else tuple(values)


# --- leaves -----------------------------------------------------------------------------------------------------------
def _refused(name: str, encoding: str, data: Any) -> Any:
    raise undecoded(name, encoding)


def _decoder(encoding: str) -> Decode | None:
    kind, _, rest = encoding.partition(":")
    if kind in ("bytes", "jpeg", "image", "file"):
        return bytes
    if kind in ("str", "text"):
        return partial(text, str)
    if kind in _NUMBERS:
        return partial(number, np.dtype(_NUMBERS[kind]))
    if kind == "no_header_numpy" and int(rest) < len(_ARRAYS):
        return partial(array, np.dtype(_ARRAYS[int(rest)]), (-1,))
    if kind == "no_header_tensor" and int(rest) < len(_TENSORS):
        return partial(_tensor, int(rest), (-1,))
    if kind == "numpy":
        return partial(_shaped, _numpy)
    if kind == "tensor":
        return partial(_shaped, _tensor)
    return value_of if kind == "json" else None


def _shaped(make: Callable[[int, tuple[int, ...], Any], Any], data: Any) -> Any:
    """What has its type, its number of axes and their lengths before its values."""
    head = np.frombuffer(data[: 2 * _WORD_BYTES], "<u4")
    words = np.dtype("<u4" if int(head.max()) <= 0xFFFF else ">u4")  # newer litdata writes those of tensors so
    form, axes = np.frombuffer(data[: 2 * _WORD_BYTES], words).tolist()
    begin = (2 + axes) * _WORD_BYTES
    return make(form, tuple(np.frombuffer(data[2 * _WORD_BYTES : begin], words).tolist()), data[begin:])


def _numpy(form: int, shape: tuple[int, ...], data: Any) -> Any:
    return array(np.dtype(_ARRAYS[form]), shape, data)


def _tensor(form: int, shape: tuple[int, ...], data: Any) -> Any:
    dtype = getattr(torch, _TENSORS[form])
    if not len(data):
        return torch.empty([max(0, axis) for axis in shape], dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
