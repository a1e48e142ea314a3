"""Decodes the parts of a sample by the extension of their name.

Theory. The conventions are WebDataset's where it has one: `.cls` is a whole number, `.json` a value, `.txt` a string,
`.npy` an array, images are pictures. Formats that could run code (pickles: `.pt`, `.pth`, `.pkl`) are refused, unless
the caller passes a decoder and thereby trusts the data. An unknown extension stays bytes.

Invariants. (1) A decoder gets all bytes of one part and never keeps them. (2) No decoder here executes what it reads.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from forebay.core.errors import Invalid, NotSupported
from forebay.torch.source import Bytes

Decoder = Callable[[Bytes], Any]


def whole_number(data: Bytes) -> int:
    """Decimal digits, as in `.cls` files."""
    return int(bytes(data))


def text(data: Bytes) -> str:
    """UTF-8."""
    return str(data, "utf-8")


def array(data: Bytes) -> Any:
    """A NumPy array; one of Python objects is refused, being a pickle."""
    return np.load(io.BytesIO(data), allow_pickle=False)


def picture(data: Bytes) -> Any:
    """A PIL image in RGB, loaded."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        raise NotSupported("images need pillow: `pip install pillow`, or pass a decoder for this extension") from None
    with image.open(io.BytesIO(data)) as opened:
        return opened.convert("RGB")


def pixels(data: Bytes) -> Any:
    """A uint8 tensor of 3 x height x width, which the default collation stacks if all are of one size."""
    import torch

    return torch.from_numpy(np.array(picture(data)).transpose(2, 0, 1).copy())


def refused(data: Bytes) -> Any:
    """For pickles."""
    raise Invalid(
        "a pickle can run any code when it is opened: if you trust this data, pass a decoder, such as "
        "decode={'pt': lambda data: torch.load(io.BytesIO(data))}"
    )


DEFAULT: Mapping[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "tif", "tiff"), pixels),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), whole_number),
    **dict.fromkeys(("txt", "text", "transcript"), text),
    **dict.fromkeys(("json", "jsn"), msgspec.json.decode),
    **dict.fromkeys(("pt", "pth", "pkl", "pickle", "pyd"), refused),
    "npy": array,
}


def chosen(decode: Mapping[str, Decoder] | None) -> Callable[[str], Decoder | None]:
    """The decoder for a part's extension: its last piece decides (`seg.png` is a png), unless all of it is named.
    `decode` stands before the defaults; an empty mapping leaves everything bytes."""
    known = {} if decode is not None and not decode else {**DEFAULT, **(decode or {})}

    def of(extension: str) -> Decoder | None:
        extension = extension.lower()
        return known.get(extension) or known.get(extension.rpartition(".")[2])

    return of
