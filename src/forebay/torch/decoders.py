"""Decodes the parts of a sample by the extension of their name.

Theory. The conventions are WebDataset's where it has one: `.cls` is a whole number, `.json` a value, `.txt` a string,
`.npy` an array, images are pictures. Formats that could run code (pickles: `.pt`, `.pth`, `.pkl`) are refused, unless
the caller passes a decoder and thereby trusts the data. An unknown extension stays bytes.

Invariants. (1) A decoder gets all bytes of one part and never keeps them. (2) No decoder here executes what it reads.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from forebay.core.errors import Invalid, NotSupported
from forebay.torch.source import Bytes

try:
    _turbo: Any = importlib.import_module("simplejpeg")  # of the extra `images`
except ImportError:
    _turbo = None

Decoder = Callable[[Bytes], Any]
_JPEG = b"\xff\xd8\xff"


def whole_number(data: Bytes) -> int:
    """Decimal digits, as in `.cls` files."""
    return int(bytes(data))


def text(data: Bytes) -> str:
    """UTF-8."""
    return str(data, "utf-8")


def json_value(data: Bytes) -> Any:
    """JSON as Python writes it: with NaN, Infinity and halves of surrogate pairs, which the standard does not have."""
    try:
        return msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return json.loads(bytes(data))  # five times slower


def array(data: Bytes) -> Any:
    """A NumPy array; one of Python objects is refused, being a pickle."""
    return np.load(io.BytesIO(data), allow_pickle=False)


class Pictures:
    """Decodes pictures to uint8 tensors of 3 x height x width, which the default collation stacks if they are of one
    size. In memory the three values of a pixel lie together, as decoders write them and as in torch's `channels_last`,
    which convolutions on a GPU like best: to lay out planes (`contiguous`) takes a third of the time of decoding.

    With `size` a JPEG that is larger is scaled down while it is decoded, by 2, 4 or 8, as far as both sides keep `size`
    pixels: that takes less time than all its pixels, and leaves less to resize. With the extra `images` JPEGs are
    decoded by libjpeg-turbo itself; without it, and all other pictures, by pillow, to the same sizes.
    """

    unlocked = True  # the interpreter's lock is free meanwhile, so threads decode at once

    def __init__(self, size: int | None = None) -> None:
        if size is not None and size < 1:
            raise Invalid(f"size={size}: a picture has at least one pixel; None is all of them")
        self.size = size

    def __call__(self, data: Bytes) -> Any:
        import torch

        found = None if _turbo is None or bytes(data[:3]) != _JPEG else self._jpeg(data)
        if found is None:
            found = np.array(self._opened(data))
        return torch.from_numpy(found).permute(2, 0, 1)

    def _jpeg(self, data: Bytes) -> Any:
        """Height x width x 3; None for what only pillow understands, or calls damaged."""
        least = {}
        try:
            height, width, colours, *_ = _turbo.decode_jpeg_header(data)
            if colours not in ("YCbCr", "RGB", "Gray"):
                return None  # of CMYK it makes other colours
            if self.size is not None:
                scale = _scale(width, height, self.size)
                least = {"min_height": -(-height // scale), "min_width": -(-width // scale)}
            return _turbo.decode_jpeg(data, colorspace="RGB", **least)
        except ValueError:
            return None

    def _opened(self, data: Bytes) -> Any:
        """A PIL image in RGB, loaded."""
        try:
            image = importlib.import_module("PIL.Image")
        except ImportError:
            raise NotSupported(
                "images need pillow: `pip install pillow simplejpeg`, or pass a decoder for this extension"
            ) from None
        with image.open(io.BytesIO(data)) as opened:
            if self.size is not None:
                opened.draft("RGB", (self.size, self.size))
            return opened.convert("RGB")


def _scale(width: int, height: int, size: int) -> int:
    """By how much a picture is scaled down, as pillow's draft mode does it."""
    return next((scale for scale in (8, 4, 2) if min(width, height) // size >= scale), 1)


def refused(data: Bytes) -> Any:
    """For pickles."""
    raise Invalid(
        "a pickle can run any code when it is opened: if you trust this data, pass a decoder, such as "
        "decode={'pt': lambda data: torch.load(io.BytesIO(data))}"
    )


DEFAULT: Mapping[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "tif", "tiff"), Pictures()),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), whole_number),
    **dict.fromkeys(("txt", "text", "transcript"), text),
    **dict.fromkeys(("json", "jsn"), json_value),
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
