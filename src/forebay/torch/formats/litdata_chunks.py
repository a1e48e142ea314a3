"""Chunks as Lightning's litdata writes them, where they lie: see `indexed.py`.

Theory. `index.json` counts the samples of each chunk, and says once for all of them how a sample was flattened: the
tree of dictionaries, lists and tuples that it was, and how each leaf is encoded. A sample begins with the sizes of all
its leaves. Not read are chunks that are laid out otherwise: streams of tokens, Arrow, frames of samples that were
compressed together, encrypted ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from forebay.core.errors import NotSupported
from forebay.torch.formats.indexed import Columns, Decode, IndexedShards, Said, array, number, text, undecoded
from forebay.torch.source import Bytes

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
_WORD_BYTES = 4


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

    Numbers, truths, text and arrays are decoded as they were encoded, tensors as tensors, and `bytes`, pictures that
    were compressed, and files stay bytes; `decode` says otherwise by the path of a value in the sample, as in
    `{"image": Pictures()}` or `{"pair.0": f}`, and is needed for other encodings (`json`, `pickle`, `pil`, …).
    `transform` gets the sample and makes another. Chunks may be compressed as a whole by zstd
    (`compression_level="chunk"`): the node unpacks them. See `ObjectDataset` for the rest.
    """

    shape = "litdata"
    library = "litdata.optimize"
    suffixes = (".bin",)

    def said(self, index: Bytes) -> dict[str, Said]:
        said = msgspec.json.decode(index, type=_Index)
        config = said.config
        odd = {
            "encryption": config.encryption,
            "compression": config.compression if config.compression != "zstd" else "",  # a level is in the names
            "compression_level": config.compression_level if config.compression_level != "chunk" else "",
            "ipc_compression": config.ipc_compression,
            "item_loader": config.item_loader if config.item_loader != "PyTreeLoader" else "",
            "dim": next((chunk.dim for chunk in said.chunks if chunk.dim), None),  # a stream of tokens
        }
        for name, value in odd.items():
            if value:
                raise NotSupported(
                    f"these chunks were written with {name}={value!r}, which is not read here: optimize() them without "
                    "(compression='zstd' is read with compression_level='chunk'); tokens are read by TokenDataset from "
                    "plain files"
                )
        _, tree = json.loads(config.data_spec)
        root = msgspec.convert(tree, _Node)
        names = tuple(".".join(path) for path in _paths(root, ()))
        decoders = [
            self.decode.get(name) or _decoder(name, form) for name, form in zip(names, config.data_format, strict=True)
        ]
        columns = Columns(names, (None,) * len(names), tuple(decoders), partial(_joined, root))
        found = {}
        for chunk in said.chunks:
            plain_bytes = 4 * (chunk.chunk_size + 2) + chunk.chunk_bytes
            packed = chunk.filename.endswith(".zstd.bin")
            found[chunk.filename] = Said(chunk.chunk_size, columns, plain_bytes if packed else None)
        return found


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
def _decoder(name: str, encoding: str) -> Decode:
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
    raise undecoded(name, encoding)


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
