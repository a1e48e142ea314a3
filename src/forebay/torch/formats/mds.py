"""Shards as Mosaic's streaming library writes them (MDS), where they lie: see `indexed.py`.

Theory. `index.json` says of each shard how many samples it has, which columns, and how it was compressed. Columns of
one size are not preceded by theirs. `ndarray` is the one encoding that has a head of its own: the type where the column
has many, then how many axes there are and how wide the numbers are that say their lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
import numpy as np

from forebay.core.errors import NotSupported
from forebay.torch.decoders import json_value
from forebay.torch.formats.indexed import Columns, Decode, IndexedShards, Said, array, number, text, undecoded
from forebay.torch.source import Bytes

_PACKED = ("zstd", "gz")  # what a node unpacks
_TYPES = {
    8: "uint8",
    16: "uint16",
    32: "uint32",
    64: "uint64",
    9: "int8",
    17: "int16",
    33: "int32",
    65: "int64",
    18: "float16",
    34: "float32",
    66: "float64",
}  # as `ndarray` numbers them
_NUMBERS = frozenset(_TYPES.values())
_TEXTS: dict[str, Callable[[str], Any]] = {"str": str, "str_int": int, "str_float": float, "str_decimal": Decimal}


class _File(msgspec.Struct):
    basename: str
    bytes: int


class _Shard(msgspec.Struct):
    """What the index says of a shard, as far as it is needed."""

    samples: int
    raw_data: _File
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    zip_data: _File | None = None
    format: str = "mds"
    compression: str | None = None


class _Index(msgspec.Struct):
    shards: list[_Shard]
    version: int = 2


class MdsDataset(IndexedShards):
    """The samples of the shards that `index.json` under `place` names, each a dictionary by column.

    Numbers, `str`, `json` and arrays are decoded as they were encoded, and `bytes`, `jpeg` and `png` stay bytes;
    `decode` says otherwise, as in `{"image": Pictures()}`, and is needed for other encodings (`pkl`, `pil`).
    `transform` gets the dictionary and makes the sample. Shards may be compressed by zstd or gzip: the node unpacks
    them. See `ObjectDataset` for the rest.
    """

    shape = "mds"
    library = "Mosaic's writer"
    suffixes = (".mds", ".mds.zstd", ".mds.gz", ".mds.br", ".mds.bz2", ".mds.snappy")

    def said(self, index: Bytes) -> dict[str, Said]:
        known: dict[tuple[Any, ...], Columns] = {}
        found = {}
        for shard in msgspec.json.decode(index, type=_Index).shards:
            packing = (shard.compression or "").partition(":")[0]
            if shard.format != "mds" or packing not in ("", *_PACKED):
                raise NotSupported(
                    f"{shard.raw_data.basename} is {shard.format}, compressed by {shard.compression}: only MDS that is "
                    "not compressed, or by zstd or gz, is read. Write it with compression='zstd'"
                )
            key = tuple(shard.column_names), tuple(shard.column_encodings), tuple(shard.column_sizes)
            if key not in known:
                decoders = [self.decode.get(name) or _decoder(name, encoding) for name, encoding in zip(*key[:2])]
                known[key] = Columns(key[0], key[2], tuple(decoders))
            file = shard.zip_data or shard.raw_data
            found[file.basename] = Said(shard.samples, known[key], shard.raw_data.bytes if shard.zip_data else None)
        return found


def _decoder(name: str, encoding: str) -> Decode:
    """How a column of that encoding is read."""
    kind, _, rest = encoding.partition(":")
    if kind in ("bytes", "jpeg", "png"):
        return bytes
    if encoding in _TEXTS:
        return partial(text, _TEXTS[encoding])
    if encoding == "json":
        return json_value
    if encoding == "int" or encoding in _NUMBERS:
        return partial(number, np.dtype("int64" if encoding == "int" else encoding).newbyteorder("<"))
    dtype, _, shape = rest.partition(":")
    if kind == "ndarray" and (not dtype or dtype in _NUMBERS):
        return partial(_array, dtype, tuple(map(int, shape.split(","))) if shape else ())
    raise undecoded(name, encoding)


def _array(dtype: str, shape: tuple[int, ...], data: Any) -> Any:
    """As `array`, having read what of type and shape the column does not say."""
    if not dtype:
        dtype, data = _TYPES[data[0]], data[1:]
    if not shape:
        axes, width = data[0] >> 2, 1 << (data[0] & 3)
        shape = tuple(np.frombuffer(data[1 : 1 + axes * width], f"<u{width}").tolist())
        data = data[1 + axes * width :]
    return array(np.dtype(dtype).newbyteorder("<"), shape, data)
