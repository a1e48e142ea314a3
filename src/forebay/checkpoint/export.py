"""Writes tensors of a checkpoint to one file in the safetensors format, which most tools for models read. No torch.

Theory. A safetensors file is the size of its header (8 bytes, little-endian), the header (JSON: for each name `dtype`,
`shape` and where its bytes begin and end), and then the bytes, row-major, without holes. So where each tensor goes is
known before a byte is read. A part of a tensor that several ranks saved is runs of elements that lie together in the
whole: one run if only the first dimension was cut, else one for each row. Runs are read, verified, and written to their
places.

The file gets its name when it is whole and on the disk.

Invariant. A file that has its name holds only bytes that matched their digests, and all elements of each tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from forebay.checkpoint.repository import Progress, Repository
from forebay.checkpoint.stream import READ_BYTES, Stream
from forebay.core.checkpoint import Entry, Manifest
from forebay.core.errors import Corrupt, Invalid, NotFound

HEADER_BYTES_MAX = 100_000_000  # what readers of the format take
DTYPES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
}


class Exported(NamedTuple):
    """How much was written."""

    tensors: int
    size_bytes: int


class _Part(NamedTuple):
    """A part of a tensor, and the rank whose stream has it."""

    rank: int
    entry: Entry


def export(
    repository: Repository,
    manifest: Manifest,
    path: str,
    name: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tensors of a checkpoint to the file `path`, which is replaced. With `name` (keys joined by dots, as
    `model`) those below it, under what follows it.

    `NotFound` if there is none, `Invalid` if the format has no word for one, `Corrupt` if something does not verify;
    the file is then as it was. `OSError` of the file.
    """
    streams, parts, tree = _read(repository, manifest)
    found = list(_named(tree, (), name))
    named = dict(found)
    if len(named) < len(found):
        raise Invalid("two tensors have the same name, once their keys are joined by dots: export less by `name`")
    if not named:
        raise NotFound(f"the checkpoint has no tensor{f' below {name!r}' if name else ''}: it has {', '.join(tree)}")
    places: list[tuple[list[_Part], int]] = []
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(manifest.step)}}
    end = 0
    for key, at in sorted(named.items(), key=lambda item: (-_dtype(parts, item[1])[1], item[0])):
        word, element_bytes = _dtype(parts, at)
        shape = parts[at][0].entry.whole_shape
        if sum(math.prod(part.entry.shape) for part in parts[at]) != math.prod(shape):
            raise Corrupt(f"the checkpoint has only a part of {at}: export an older one")
        header[key] = {
            "dtype": word,
            "shape": shape,
            "data_offsets": [end, end + math.prod(shape) * element_bytes],
        }
        places.append((parts[at], end))
        end = header[key]["data_offsets"][1]
    written = json.dumps(header, ensure_ascii=False).encode()
    written += b" " * (-len(written) % 8)
    if len(written) > HEADER_BYTES_MAX:
        raise Invalid(f"the names of {len(named)} tensors are more than safetensors takes: export less by `name`")
    _write(path, len(written).to_bytes(8, "little") + written, end, places, streams, progress)
    return Exported(len(named), 8 + len(written) + end)


def _read(repository: Repository, manifest: Manifest) -> tuple[list[Stream], dict[str, list[_Part]], dict[str, Any]]:
    """The ranks' streams, where each tensor lies by path, and the tree. Of what is each rank's own, rank 0's."""
    streams: list[Stream] = []
    parts: dict[str, list[_Part]] = {}
    tree: dict[str, Any] = {}
    for rank in range(len(manifest.ranks)):
        index = repository.index(manifest, rank)
        streams.append(repository.stream(manifest, index))
        tree = tree or index.tree
        for entry in index.entries:
            if rank == 0 or entry.path.partition("/")[0] not in index.tree:
                parts.setdefault(entry.path, []).append(_Part(rank, entry))
    return streams, parts, tree


def _named(node: Any, way: tuple[str, ...], below: str | None) -> Iterator[tuple[str, str]]:
    """Name and path of each tensor of a tree; `way` is the keys above it."""
    if not way:
        for key, value in node.items():
            yield from _named(value, (key,), below)
        return
    name = ".".join(way)
    if not isinstance(node, dict):
        return
    for key, value in node.get("d", ()):
        yield from _named(value, (*way, str(key)), below)
    for number, value in enumerate(node.get("l") or node.get("t") or ()):
        yield from _named(value, (*way, str(number)), below)
    path = node.get("x", node.get("n"))
    if path is not None and (below is None or name == below or name.startswith(below + ".")):
        yield name.removeprefix(f"{below}."), path


def _dtype(parts: dict[str, list[_Part]], path: str) -> tuple[str, int]:
    if path not in parts:
        raise Corrupt(f"the checkpoint names {path} and has no bytes of it: export an older one")
    dtype = parts[path][0].entry.dtype
    if dtype not in DTYPES:
        raise Invalid(f"{path} is {dtype}, for which safetensors has no word: export less by `name`")
    return DTYPES[dtype]


def _write(
    path: str,
    header: bytes,
    data_bytes: int,
    places: list[tuple[list[_Part], int]],
    streams: list[Stream],
    progress: Progress,
) -> None:
    unfinished = os.path.join(os.path.dirname(path), f".{os.path.basename(path)[:200]}.forebay-{os.getpid()}.part")
    done = 0
    memory = memoryview(bytearray(READ_BYTES))
    try:
        with open(unfinished, "xb", buffering=0) as file:
            os.truncate(file.fileno(), len(header) + data_bytes)
            os.pwrite(file.fileno(), header, 0)
            for parts, begin in places:
                for rank, entry in parts:
                    for at, start, size_bytes in _runs(entry):
                        view = memory[:size_bytes]
                        streams[rank].read_into(start, view)
                        assert os.pwrite(file.fileno(), view, len(header) + begin + at) == size_bytes, (
                            "a file takes all"
                        )
                        done += size_bytes
                        progress(done, data_bytes)
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)


def _runs(entry: Entry) -> Iterator[tuple[int, int, int]]:
    """Where in the whole tensor a part's bytes go, where in the stream they are, and how many, READ_BYTES at most."""
    whole, shape = entry.whole_shape, entry.shape
    elements = math.prod(shape)
    if not elements:
        return
    element_bytes = entry.size_bytes // elements
    inner = max(0, len(shape) - 1)  # elements that differ from this dimension on alone lie together
    while inner and shape[inner] == whole[inner]:
        inner -= 1
    run_bytes = math.prod(shape[inner:]) * element_bytes
    strides = [math.prod(whole[dimension + 1 :]) * element_bytes for dimension in range(len(shape))]
    for number in range(math.prod(shape[:inner])):
        at, rest = 0, number
        for dimension in reversed(range(len(shape))):
            here = 0
            if dimension < inner:
                rest, here = divmod(rest, shape[dimension])
            at += (entry.first[dimension] + here) * strides[dimension]
        for offset in range(0, run_bytes, READ_BYTES):
            start = entry.offset + number * run_bytes + offset
            yield at + offset, start, min(READ_BYTES, run_bytes - offset)
