"""Pictures: the fast decoder and pillow make the same pixels, whole and smaller, and say the same of damage."""

from __future__ import annotations

import io
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forebay.core.errors import Corrupt, Invalid
from forebay.torch import DataLoader, Pictures, ShardDataset, decoders
from tests.core.archives import tar_of
from tests.patience import PATIENCE_S
from tests.torch.memory_source import MemorySource

BOTH = ["simplejpeg", "pillow"]


def picture(width: int, height: int, mode: str = "RGB", form: str = "JPEG", **how: Any) -> bytes:
    bands = len(Image.new(mode, (1, 1)).getbands())
    x, y, band = np.meshgrid(np.arange(width), np.arange(height), np.arange(bands))
    values = (127 + 60 * np.sin(x / 9 + band) + 60 * np.cos(y / 7 - band)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(values if bands > 1 else values[:, :, 0], mode).save(out, form, **how)
    return out.getvalue()


@pytest.fixture(params=BOTH)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the extra, and without it."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(decoders, "_turbo", None)
    return str(request.param)


def by_pillow(data: bytes, size: int | None) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as opened:
        if size:
            opened.draft("RGB", (size, size))
        return torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("size", [None, 1, 33, 100, 1000])
@pytest.mark.parametrize(
    "data",
    [
        picture(400, 267, quality=92),
        picture(267, 401, quality=60, subsampling=0),
        picture(64, 33, quality=90, subsampling=1, progressive=True),
        picture(200, 200, "L"),
        picture(120, 200, "CMYK"),
        picture(120, 200, "RGBA", "PNG"),
        picture(1, 1),
    ],
    ids=["420", "444", "progressive", "grey", "cmyk", "png", "dot"],
)
def test_the_pixels_are_those_of_pillow(decoder: str, data: bytes, size: int | None) -> None:
    found = Pictures(size)(memoryview(data))
    expected = by_pillow(data, size)
    assert found.is_contiguous()
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= 1
    if size is not None:
        with Image.open(io.BytesIO(data)) as opened:
            assert min(found.shape[1:]) >= min(size, *opened.size)


def test_a_size_is_at_least_one_pixel_and_travels_to_workers() -> None:
    with pytest.raises(Invalid, match="at least one pixel"):
        Pictures(0)
    assert pickle.loads(pickle.dumps(Pictures(7))).size == 7


@pytest.mark.parametrize("damage", [slice(0, 400), slice(0, 2), slice(0, 0)])
def test_a_damaged_picture_is_corrupt_and_named(decoder: str, damage: slice) -> None:
    shard = tar_of([("a.jpg", picture(100, 100)), ("b.jpg", picture(100, 100)[damage] or b"x")])
    dataset = ShardDataset("photos/", source=MemorySource({"0.tar": shard}))
    assert dataset[0]["jpg"].shape == (3, 100, 100)
    with pytest.raises(Corrupt, match=r"the jpg of sample 'b' of photos/0.tar cannot be decoded"):
        dataset[1]


def test_threads_decode_at_once_where_the_decoder_frees_the_lock() -> None:
    met = threading.Barrier(2)

    class Meeting:
        """Comes to its end only if two threads are in it at once."""

        unlocked = True

        def __call__(self, data: Any) -> int:
            met.wait(PATIENCE_S)
            return int(bytes(data))

    first = Meeting()
    shard = tar_of([(f"{n:02d}.{'txt' if n < 2 else 'bin'}", b"%d" % n) for n in range(10)])
    dataset = ShardDataset("photos/", decode={"bin": first, "txt": Freed()}, source=MemorySource({"0.tar": shard}))
    with DataLoader(dataset, 1, shuffle=False, collate=list) as loader:
        assert len([sample for batch in loader for sample in batch]) == 10


class Freed:
    """Says so, and needs nobody."""

    unlocked = True

    def __call__(self, data: Any) -> int:
        return int(bytes(data))
