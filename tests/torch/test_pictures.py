"""Pictures: the fast decoder and pillow make the same pixels, whole and smaller, and say the same of damage."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from forebay.core.errors import Corrupt, Invalid, NotSupported
from forebay.torch import DataLoader, MdsDataset, ObjectDataset, ParquetDataset, Pictures, ShardDataset, decoders
from forebay.torch.dataset import Dataset
from forebay.torch.fetching import collate
from tests.core.archives import tar_of
from tests.patience import PATIENCE_S
from tests.torch import test_mds
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
    assert found.permute(1, 2, 0).is_contiguous(), "decoders write pixel after pixel, and nothing is moved after that"
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


class Meeting:
    """A decoder of which no call but the first comes to its end until two threads have been in it at once."""

    unlocked = True

    def __init__(self) -> None:
        self._lock, self._met = threading.Lock(), threading.Event()
        self._calls = self._inside = 0

    def __call__(self, *data: Any) -> int:
        with self._lock:
            self._calls, self._inside = self._calls + 1, self._inside + 1
            number = self._calls
            if self._inside == 2:
                self._met.set()
        if number > 1 and not self._met.wait(PATIENCE_S):
            raise TimeoutError("no other thread came")
        with self._lock:
            self._inside -= 1
        return number


def shards(decode: Any) -> Dataset:
    archive = tar_of([(f"{n:02d}.bin", b"%d" % n) for n in range(10)])
    return ShardDataset("photos/", decode={"bin": decode}, source=MemorySource({"0.tar": archive}))


def objects(decode: Any) -> Dataset:
    return ObjectDataset("photos/", decode=decode, source=MemorySource({f"{n}": b"x" for n in range(10)}))


def mosaic(decode: Any) -> Dataset:
    return MdsDataset("b-1/train/", decode={"data": decode}, source=test_mds.written(1, 10))


def tables(decode: Any) -> Dataset:
    table = pytest.importorskip("pyarrow").table({"data": [b"x"] * 10})
    written = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(table, written)
    return ParquetDataset("photos/", decode={"data": decode}, source=MemorySource({"0.parquet": written.getvalue()}))


@pytest.mark.parametrize("made", [shards, objects, mosaic, tables])
def test_threads_decode_at_once_where_the_decoder_frees_the_lock(made: Any) -> None:
    with DataLoader(made(Meeting()), 1, shuffle=False, collate=list) as loader:
        assert len([sample for batch in loader for sample in batch]) == 10


def test_an_object_may_be_a_picture(decoder: str) -> None:
    source = MemorySource({"a.jpg": picture(100, 60), "b.jpg": picture(100, 60)[:300]})
    dataset = ObjectDataset("photos/", decode=Pictures(), source=source)
    assert torch.equal(dataset[0], Pictures()(picture(100, 60)))
    with pytest.raises(Corrupt, match=r"photos/b\.jpg cannot be decoded"):
        dataset[1]


def samples(width: int, height: int, n: int) -> list[dict[str, Any]]:
    made = [Pictures()(picture(width, height, quality=50 + number)) for number in range(n)]
    return [{"jpg": tensor, "cls": number} for number, tensor in enumerate(made)]


@pytest.mark.parametrize("size", [(30, 20), (3, 3), (1, 1), (1, 5), (5, 1)])
def test_a_batch_of_pictures_is_that_of_torch_with_pixels_together(size: tuple[int, int]) -> None:
    made = samples(*size, 4)
    batch, expected = collate(made), default_collate(made)
    assert torch.equal(batch["jpg"], expected["jpg"])
    assert torch.equal(batch["cls"], expected["cls"])
    assert batch["jpg"].is_contiguous(memory_format=torch.channels_last)
    mixed = [made[0]["jpg"], made[1]["jpg"].contiguous(), made[2]["jpg"].flip(2)]
    for turned in (mixed, mixed[::-1]):
        assert torch.equal(collate(turned), default_collate(turned)), "whatever layout the others have"


def test_what_torch_does_not_stack_is_not_stacked() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        collate([Pictures()(picture(30, 20)), Pictures()(picture(20, 30))])
    with pytest.raises(RuntimeError, match=r"sparse tensors"):
        collate([torch.zeros(3, 4, 4).to_sparse()])


@pytest.mark.parametrize("gathered", [collate, list])
def test_pixels_come_from_workers_in_shared_memory(gathered: Any) -> None:
    """A megabyte of pixels in a pipe would be copied twice more, and in pieces of 64 KiB."""
    data = {f"{number}.jpg": picture(200, 100, quality=50 + number) for number in range(8)}
    dataset = ObjectDataset("photos/", decode=Pictures(), source=MemorySource(data))
    with DataLoader(dataset, 4, workers=1, shuffle=False, collate=gathered) as loader:
        batches = list(loader)
    found = [each for batch in batches for each in batch]
    assert all(each.is_shared() for each in (batches if gathered is collate else found))
    for each, one in zip(found, data.values(), strict=True):
        assert torch.equal(each, Pictures()(one))
        assert each.permute(1, 2, 0).is_contiguous()


def test_libjpeg_turbo_decodes_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pixels are pillow's, so only the time would tell: here pillow is not there at all."""
    pytest.importorskip("simplejpeg")
    data = picture(300, 200)
    expected = [by_pillow(data, size) for size in (None, 90)]
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for size, pixels in zip((None, 90), expected, strict=True):
        assert (Pictures(size)(data).int() - pixels.int()).abs().max() <= 1
    monkeypatch.setattr(decoders, "_turbo", None)
    with pytest.raises(NotSupported, match="images need pillow"):
        Pictures()(data)
