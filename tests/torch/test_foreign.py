"""What Mosaic's streaming library and litdata wrote themselves is read as it was given to them (`foreign.py`)."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forebay.core.errors import NotSupported
from forebay.torch import DataLoader, LitDataset, MdsDataset
from tests.torch import foreign
from tests.torch.foreign import FIXTURES, LIT, MDS, plain
from tests.torch.memory_source import MemorySource

READ = [
    *("mds-every", "mds-plain", "mds-gz", "mds-zstd-7", "mds-merged", "lit-tree", "lit-tensors", "lit-arrays"),
    *("lit-number", "lit-pair", "lit-ids", "lit-chunk", "lit-json", "lit-nest", "lit-texts", "lit-rows"),
    *("lit-rows-zstd", "lit-sample", "lit-batch", "lit-batch-2"),
]
SHARDS = {
    "mds-every": 6,
    "mds-merged": 3,
    "lit-tree": 4,
    "lit-chunk": 3,
    "lit-rows": 2,
    "lit-batch-2": 2,
}  # of some, so that there are several


def source_of(name: str) -> MemorySource:
    """A bucket with that folder of `fixtures/`."""
    files = [path for path in (FIXTURES / name).rglob("*") if path.is_file()]
    return MemorySource({f"data/{path.relative_to(FIXTURES / name).as_posix()}": path.read_bytes() for path in files})


def opened(name: str, **how: Any) -> MdsDataset | LitDataset:
    kind = MdsDataset if name in MDS else LitDataset
    return kind("b-1/data/", source=source_of(name), **how)


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def compared(sample: Any, expected: Any) -> None:
    """`expected` was given to the writer. Pictures are what was written of them: lossless or nearly so."""
    for name in ("png", "jpeg") if isinstance(expected, dict) else ():
        if name in expected:
            picture = np.asarray(expected.pop(name)).astype(int)
            assert np.abs(pixels(sample.pop(name)) - picture).max() <= (2 if name == "jpeg" else 0)
    assert plain(sample) == plain(expected)


@pytest.mark.parametrize("name", READ)
def test_each_sample_is_what_the_writer_was_given(name: str) -> None:
    """litdata's workers share the samples out in runs, and Mosaic's parts were written in turn."""
    written = (MDS | LIT)[name]
    dataset = opened(name)
    order, expected = list(range(written.samples)), written.read or written.sample
    if parts := written.how.get("parts"):
        order = [number for part in range(parts) for number in range(part, written.samples, parts)]
    assert len(dataset) == len(order)
    assert len(dataset.keys) == SHARDS.get(name, len(dataset.keys))
    for index, number in enumerate(order):
        compared(dataset[index], expected(number))
    for index, sample in enumerate(pickle.loads(pickle.dumps(dataset)).__getitems__(range(len(order)))):
        compared(sample, expected(order[index]))
    with DataLoader(dataset, 4, seed=1, collate=list) as loader:
        assert len([sample for batch in loader for sample in batch]) == len(order)


def test_pictures_of_litdata_stay_bytes() -> None:
    dataset = opened("lit-pictures")
    for number in range(len(dataset)):
        sample, picture = dataset[number], np.asarray(foreign.picture("RGB", number)).astype(int)
        assert sample.keys() == {"jpeg", "image", "i"}
        assert np.abs(pixels(sample["jpeg"]) - picture).max() <= 2
        assert (pixels(sample["image"]) == picture).all()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mds-br", r"shard.00000.mds is mds, compressed by br: .* Write it with compression='zstd'"),
        ("mds-bz2", r"compressed by bz2: .* Write it with compression='zstd'"),
        ("mds-snappy", r"compressed by snappy: .* Write it with compression='zstd'"),
        ("mds-others", r"the column 'cell' is encoded as 'pil', .* pass decode=\{'cell': f\}"),
        ("lit-chunk-4", r"written with compression='zstd:4'.*compression='zstd' is read"),
        ("lit-tokens", r"written with item_loader='TokensLoader'.*TokenDataset"),
    ],
)
def test_what_is_not_read_is_refused_in_words(name: str, said: str) -> None:
    with pytest.raises(NotSupported, match=said):
        opened(name)[0]


def test_a_column_that_is_not_read_needs_a_decoder() -> None:
    trusted = {"cell": bytes, "frames": bytes, "shelf": bytes, "thing": pickle.loads}
    dataset = opened("mds-others", decode=trusted)
    assert [(sample["number"], sample["thing"]) for sample in dataset.__getitems__([0, 1])] == [(0, {0}), (1, {1})]
    assert [len(sample["tags"]) > 4 for sample in opened("lit-json", decode={"tags": bytes}).__getitems__([1, 2])]
