"""Datasets of Mosaic's streaming library and of litdata, as these libraries write them: what is in each, and the
program that wrote them.

`fixtures/` holds the output of mosaicml-streaming 0.13.0 and litdata 0.2.76. To write it again, from the top of a
checkout (pyarrow decides what litdata writes, and is not among the peers):

    make peers
    .venv-peers/bin/python -m pip install --no-deps --target "$ARROW" pyarrow==26.0.1
    PYTHONPATH="$ARROW" .venv-peers/bin/python -m tests.torch.foreign

A sample is a function of its number, which the program and the tests share. Nothing of Forebay is imported here.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

FIXTURES = Path(__file__).with_name("fixtures")
VERSIONS = {"mosaicml-streaming": "0.13.0", "litdata": "0.2.76", "pyarrow": "26.0.1"}
TEXTS = ("", "plain", "ünïcode 🜁", "a\0b\n", "x" * 300)
WHOLES = {f"{sign}int{bits}": np.iinfo(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")}
FLOATS = ("float16", "float32", "float64")
EXTREMES = (0.0, -0.0, 0.1, -2.5, float("inf"), float("-inf"), 6e-5)
COMPLEX = ("complex64", "complex128")
ANY_JSON = (
    None,
    [],
    {"a": [1, 2.5, {"b": None}], "ü": "🜁"},
    {"loss": float("nan"), "most": float("inf"), "least": float("-inf")},
    10**30,
    "half of a pair: \ud800",
    [True, False, 1e-7, -(2**63), 2**64 - 1],
)


def text(number: int) -> str:
    return TEXTS[number % len(TEXTS)]


def array(dtype: str, shape: tuple[int, ...], number: int) -> Any:
    """Values that depend on the number, and that every type has."""
    counted = np.arange(np.prod(shape, dtype=int)) + number
    return (counted % 2 if dtype == "bool" else counted % 50).astype(dtype).reshape(shape)


def picture(mode: str, number: int) -> Any:
    """A small picture of one colour."""
    image = importlib.import_module("PIL.Image")
    return image.new(mode, (9, 5), 7 * number if mode == "L" else (7 * number, 90, 255 - number))


def plain(value: Any) -> Any:
    """What can be compared: of arrays their type, shape and values, of numbers their digits (nan is nan, 0 not -0)."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value)
    return repr(bytes(value) if isinstance(value, memoryview) else value)


# --- of Mosaic's library ---------------------------------------------------------------------------------------------
MDS_EVERY = {
    "any_array": "ndarray",
    "bytes": "bytes",
    "grid": "ndarray:int32:2,3",
    "int": "int",
    "jpeg": "jpeg",
    "json": "json",
    "png": "png",
    "str": "str",
    "str_decimal": "str_decimal",
    "str_float": "str_float",
    "str_int": "str_int",
    **{name: name for name in (*WHOLES, *FLOATS)},
    **{f"row_{name}": f"ndarray:{name}" for name in (*WHOLES, *FLOATS)},
}
MDS_PLAIN = {"number": "int", "text": "str", "wide": "ndarray"}
MDS_OTHERS = {"cell": "pil", "frames": "jpeg_array", "number": "int", "shelf": "list[png]", "thing": "pkl"}


def mds_every(number: int) -> dict[str, Any]:
    dtypes = (*WHOLES, *FLOATS)
    wholes = {name: (about.min, about.max, number)[number % 3] for name, about in WHOLES.items()}
    extremes = {name: np.dtype(name).type(EXTREMES[number % len(EXTREMES)]).item() for name in FLOATS}
    shape = ((3,), (2, 2), (1, 300), (1, 2, 1, 3), (2, 1, 1))[number % 5]
    return {
        "any_array": array(dtypes[number % len(dtypes)], shape, number),
        "bytes": bytes(range(number)),
        "grid": array("int32", (2, 3), number),
        "int": -(2**63) + number,
        "jpeg": picture("L" if number % 2 else "RGB", number),
        "json": ANY_JSON[number % len(ANY_JSON)],
        "png": picture("RGB", number),
        "str": text(number),
        "str_decimal": Decimal("0.1") ** number,
        "str_float": EXTREMES[number % len(EXTREMES)],
        "str_int": (-10) ** (3 * number),
        **wholes,
        **extremes,
        **{f"row_{name}": array(name, (number % 3 + 1, 2), number) for name in dtypes},
    }


def mds_plain(number: int) -> dict[str, Any]:
    lengths = (1, 255, 256, 65535, 65536)  # around where shapes are written wider
    return {"number": number, "text": text(number), "wide": array("uint8", (1, lengths[number % 5]), number)}


def mds_others(number: int) -> dict[str, Any]:
    return {
        "cell": picture("RGB", number),
        "frames": [b"jpeg", b"of no consequence"],
        "number": number,
        "shelf": [picture("RGB", number)],
        "thing": {number},
    }


# --- of litdata ------------------------------------------------------------------------------------------------------
TORCH = (*FLOATS, *COMPLEX, "uint8", "int8", "int16", "int32", "int64", "bool", "uint16")


def tensor(dtype: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    return torch.from_numpy(array(dtype, shape, number))


def lit_tree(number: int) -> dict[str, Any]:
    """As most are: a dictionary with some of everything."""
    return {
        "i": number - 5,
        "f": EXTREMES[number % len(EXTREMES)],
        "b": bytes(range(number)),
        "s": text(number),
        "flag": number % 2 == 0,
        "a": array("uint16", (number % 4,), number),
        "m": array("float32", (2, number % 3 + 1), number),
        "pair": (tensor("int64", (number % 4,), number), [tensor("int32", (2, 2), number), {"k": number}]),
    }


def lit_tensors(number: int) -> dict[str, Any]:
    """All types, with 0 to 3 axes, and empty ones."""
    shapes = ((), (number,), (2, number), (1, 2, 3))
    return {f"{dtype}_{len(shape)}": tensor(dtype, shape, number) for dtype in TORCH for shape in shapes}


def lit_arrays(number: int) -> dict[str, Any]:
    dtypes = (*WHOLES, *FLOATS, *COMPLEX, "bool")
    shapes = ((number,), (2, number), (1, 2, 3))
    return {f"{dtype}_{len(shape)}": array(dtype, shape, number) for dtype in dtypes for shape in shapes}


def lit_number(number: int) -> int:
    return 3 * number


def lit_pair(number: int) -> tuple[Any, ...]:
    return text(number), tensor("float32", (2, 2), number), b"\xff" * number


def lit_ids(number: int) -> torch.Tensor:
    return tensor("int64", (2 * number + 1,), number)


def lit_json(number: int) -> dict[str, Any]:
    """A list in a dictionary that has an array is one leaf of the tree."""
    return {"a": array("uint8", (4,), number), "tags": [text(number)] * number}


def lit_texts(number: int) -> dict[str, Any]:
    """Where all is text, it is kept as Arrow."""
    return {"text": text(number), "title": "t" * number}


def lit_rows(number: int) -> dict[str, Any]:
    """Most datasets: dictionaries without arrays. What a row lacks that another has comes back as None."""
    made = {
        "image": bytes([number % 256]) * (number % 40),
        "label": -(2**63) + number if number % 3 else number,
        "caption": text(number)[:40],
        "score": EXTREMES[number % len(EXTREMES)],
        "good": number % 2 == 0,
        "none": None,
        "tags": [text(number)[:7]] * (number % 4),
        "boxes": [[number, each] for each in range(number % 3)],
        "meta": {"url": None if number % 5 else "u", "size": {"w": number, "h": 2.5}},
        "words": [{"at": number, "word": "w"}] * (number % 2),
    }
    return made | ({"note": f"of {number}"} if number % 7 == 1 else {})


def lit_rows_read(number: int) -> dict[str, Any]:
    return {"note": None} | lit_rows(number)


def lit_nest(number: int) -> dict[str, Any]:
    """Lists beside an array, of each kind that litdata has its own way for."""
    record = {"n": None, "s": text(number), "i": number, "f": number / 2, "b": number % 2 == 0}
    lists = (
        *([], [text(number), "x"], [1, -(2**63), number], [0.5, float("inf")], [True, False], [record] * number),
        *([None, 1, "two", [3]], [[1, 2], ["x"]], [{"a": 1}, {"b": {"c": [1.5]}}], [2**70]),
    )
    return {"a": array("uint8", (4,), number), "any": lists[number % len(lists)], "fixed": [number, number]}


def lit_pictures(number: int) -> dict[str, Any]:
    types = importlib.import_module("litdata.types")
    return {"jpeg": types.Jpeg(array=pixels(number)), "image": types.Image(array=pixels(number)), "i": number}


def pixels(number: int) -> Any:
    return np.asarray(picture("RGB", number))


# --- the datasets ----------------------------------------------------------------------------------------------------
class Written(NamedTuple):
    """A folder of `fixtures/`: its samples, and how it was written."""

    sample: Callable[[int], Any]
    samples: int
    how: dict[str, Any]
    read: Callable[[int], Any] | None = None  # what is read of it, if the library's own reader is asked too


MDS = {
    "mds-every": Written(mds_every, 14, {"columns": MDS_EVERY, "size_limit": 5000, "hashes": ["sha1", "xxh64"]}),
    "mds-plain": Written(mds_plain, 7, {"columns": MDS_PLAIN, "size_limit": None, "compression": "zstd"}),
    "mds-gz": Written(mds_plain, 6, {"columns": MDS_PLAIN, "size_limit": 66000, "compression": "gz"}),
    "mds-zstd-7": Written(mds_plain, 6, {"columns": MDS_PLAIN, "size_limit": 66000, "compression": "zstd:7"}),
    "mds-br": Written(mds_plain, 2, {"columns": MDS_PLAIN, "compression": "br"}),
    "mds-bz2": Written(mds_plain, 2, {"columns": MDS_PLAIN, "compression": "bz2"}),
    "mds-snappy": Written(mds_plain, 2, {"columns": MDS_PLAIN, "compression": "snappy"}),
    "mds-others": Written(mds_others, 2, {"columns": MDS_OTHERS}),
    "mds-merged": Written(mds_plain, 6, {"columns": MDS_PLAIN, "compression": "zstd", "parts": 3}),
}
LIT = {
    "lit-tree": Written(lit_tree, 11, {"chunk_size": 4, "num_workers": 2, "keep_data_ordered": True}),
    "lit-tensors": Written(lit_tensors, 3, {"chunk_size": 2}),
    "lit-arrays": Written(lit_arrays, 3, {"chunk_size": 2}),
    "lit-number": Written(lit_number, 5, {"chunk_size": 2}),
    "lit-pair": Written(lit_pair, 5, {"chunk_bytes": 200}),
    "lit-ids": Written(lit_ids, 5, {"chunk_size": 2}),
    "lit-pictures": Written(lit_pictures, 3, {"chunk_size": 2}),
    "lit-json": Written(lit_json, 3, {"chunk_size": 2}),
    "lit-texts": Written(lit_texts, 3, {"chunk_size": 2}, lit_texts),
    "lit-rows": Written(lit_rows, 310, {"chunk_size": 300}, lit_rows_read),
    "lit-rows-zstd": Written(lit_rows, 520, {"chunk_size": 520, "compression": "zstd"}, lit_rows_read),
    "lit-nest": Written(lit_nest, 10, {"chunk_size": 20}, lit_nest),
    "lit-chunk": Written(lit_tree, 9, {"chunk_size": 4, "compression": "zstd", "compression_level": "chunk"}),
    "lit-chunk-4": Written(lit_tree, 3, {"chunk_size": 4, "compression": "zstd:4", "compression_level": "chunk"}),
    "lit-sample": Written(lit_tree, 3, {"chunk_size": 4, "compression": "zstd", "compression_level": "sample"}),
    "lit-batch": Written(lit_tree, 3, {"chunk_size": 4, "compression": "zstd"}),
    "lit-batch-2": Written(
        lit_tree, 9, {"chunk_size": 5, "compression": "zstd:7", "compression_batch_size": 2}, lit_tree
    ),
    "lit-tokens": Written(lit_ids, 5, {"chunk_bytes": 200, "item_loader": "TokensLoader"}),
}


def write_mds(folder: Path, written: Written) -> None:
    streaming = importlib.import_module("bench.peers").import_streaming()
    how, parts = dict(written.how), written.how.get("parts", 0)
    how.pop("parts", None)
    for part in range(parts or 1):
        where = folder / str(part) if parts else folder
        with streaming.MDSWriter(out=str(where), **how) as writer:
            for number in range(part, written.samples, parts or 1):
                writer.write(written.sample(number))
    if parts:
        importlib.import_module("streaming.base.util").merge_index(str(folder), keep_local=True)


def write_lit(folder: Path, written: Written) -> None:
    litdata: Any = importlib.import_module("litdata")
    how = {"num_workers": 1, "verbose": False} | written.how
    if "item_loader" in how:
        how["item_loader"] = getattr(litdata.streaming.item_loader, how["item_loader"])()
    litdata.optimize(written.sample, list(range(written.samples)), output_dir=str(folder), **how)
    if written.read is not None:
        read = litdata.StreamingDataset(str(folder), shuffle=False)
        assert len(read) == written.samples
        for number in range(written.samples):
            assert plain(read[number]) == plain(written.read(number)), f"{folder.name}, {number}"


def main(*names: str) -> None:
    """All, or those of these names."""
    for library, version in VERSIONS.items():
        assert importlib.import_module("importlib.metadata").version(library) == version, library
    for kinds, write in ((MDS, write_mds), (LIT, write_lit)):
        for name, written in kinds.items():
            if names and name not in names:
                continue
            with tempfile.TemporaryDirectory() as made:
                write(Path(made) / name, written)
                shutil.rmtree(FIXTURES / name, ignore_errors=True)
                shutil.copytree(Path(made) / name, FIXTURES / name)
            print(name, sum(path.stat().st_size for path in (FIXTURES / name).rglob("*") if path.is_file()))


if __name__ == "__main__":
    main(*sys.argv[1:])
