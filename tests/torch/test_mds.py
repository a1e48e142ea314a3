"""Shards of Mosaic's streaming library are read where they lie."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard
from torch.utils import data as torch_data

from forebay.core.errors import Corrupt, Invalid, NotFound, NotSupported
from forebay.torch import DataLoader, MdsDataset
from tests.torch.memory_source import MemorySource

COLUMNS = {
    "any": "ndarray",
    "data": "bytes",
    "grid": "ndarray:uint16:2,3",
    "halves": "ndarray:float16",
    "huge": "str_int",
    "number": "int",
    "text": "str",
    "weight": "float32",
}
SIZES = {"int": 8, "float32": 4, "ndarray:uint16:2,3": 12}


def encoded(sample: dict[str, Any]) -> bytes:
    """A sample as MDSWriter writes it: sizes of what varies, then all columns."""
    made = {
        "str": lambda value: value.encode(),
        "str_int": lambda value: str(value).encode(),
        "int": lambda value: np.int64(value).tobytes(),
        "float32": lambda value: np.float32(value).tobytes(),
        "bytes": bytes,
        "ndarray": lambda value: bytes([65]) + shaped(value),
        "ndarray:float16": lambda value: shaped(value),
        "ndarray:uint16:2,3": lambda value: value.tobytes(),
    }
    values = [(encoding, made[encoding](sample[name])) for name, encoding in COLUMNS.items()]
    sizes = [len(value) for encoding, value in values if encoding not in SIZES]
    return np.asarray(sizes, np.uint32).tobytes() + b"".join(value for _, value in values)


def shaped(value: Any) -> bytes:
    """An array of two axes with its shape before it, in numbers as narrow as do."""
    width = 0 if max(value.shape) < 256 else 1
    return bytes([2 << 2 | width]) + np.asarray(value.shape, f"<u{1 << width}").tobytes() + value.tobytes()


def shard(samples: Sequence[dict[str, Any]]) -> bytes:
    """As `MDSWriter.encode_joint_shard` has it, which puts its configuration before the samples."""
    config = json.dumps({"columns": COLUMNS}).encode()
    rows = [encoded(sample) for sample in samples]
    ends = np.cumsum([0, *map(len, rows)]) + 4 + 4 * (len(rows) + 1) + len(config)
    return np.uint32(len(rows)).tobytes() + ends.astype(np.uint32).tobytes() + config + b"".join(rows)


def sample(number: int) -> dict[str, Any]:
    grid = np.arange(6, dtype=np.uint16).reshape(2, 3) + number
    return {
        "text": "ü" * (number % 5),
        "huge": 10**30 + number,
        "number": -number,
        "weight": number / 2,
        "data": bytes(number % 7),
        "grid": grid,
        "any": np.full((1, 200 + number), -number),
        "halves": np.full((number + 1, 2), number / 2, np.float16),
    }


def written(shards: int = 4, each: int = 25, *, packed: bool = False, **more: Any) -> MemorySource:
    names = {f"shard.{number:05d}.mds": range(number * each, (number + 1) * each) for number in range(shards)}
    objects = {f"train/{name}": shard([sample(n) for n in numbers]) for name, numbers in names.items()}
    about = {
        "column_names": list(COLUMNS),
        "column_encodings": list(COLUMNS.values()),
        "column_sizes": [SIZES.get(encoding) for encoding in COLUMNS.values()],
        "compression": None,
        "format": "mds",
        "version": 2,
        "zip_data": None,
    }
    said: list[dict[str, Any]] = [
        about | more | {"samples": each, "raw_data": {"basename": name, "bytes": len(objects[f"train/{name}"])}}
        for name in names
    ]
    if packed:
        for shard_said in said:
            name = shard_said["raw_data"]["basename"]
            data = zstandard.compress(objects.pop(f"train/{name}"))
            objects[f"train/{name}.zstd"] = data
            shard_said |= {"compression": "zstd:7", "zip_data": {"basename": f"{name}.zstd", "bytes": len(data)}}
    return MemorySource(objects | {"train/index.json": json.dumps({"shards": said, "version": 2}).encode()})


@pytest.fixture
def source() -> MemorySource:
    return written()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["b-1/train", "b-1/train/"])
def test_samples_are_what_was_written(place: str, packed: bool):
    source = written(packed=packed)
    dataset = MdsDataset(place, source=source)
    assert len(dataset) == 100
    for number in (0, 24, 25, 99):
        found, expected = dataset[number], sample(number)
        for name in ("grid", "any", "halves"):
            one, other = found.pop(name), expected.pop(name)
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        assert found == expected
    fetched = len(source.batches)
    dataset.__getitems__([3, 77, 51])
    assert len(source.batches) == fetched + 2, "heads of shards that are new, and samples"
    dataset.__getitems__([4, 78, 52])
    assert len(source.batches) == fetched + 3


@pytest.mark.parametrize("shuffle", [True, "block", False])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_resumed_exactly(source: MemorySource, closing: list[DataLoader], shuffle: Any, workers: int):
    def loader() -> DataLoader:
        dataset = MdsDataset("b-1/train/", source=source, transform=lambda each, epoch: (each["number"], epoch))
        closing.append(DataLoader(dataset, 8, seed=2, shuffle=shuffle, workers=workers, collate=list))
        return closing[-1]

    first = loader()
    whole = [each for batch in first for each in batch]
    assert sorted(whole) == [(-number, 0) for number in reversed(range(100))]
    first.restart(0)
    batches = iter(first)
    began = [each for _ in range(3) for each in next(batches)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert began + [each for batch in again for each in batch] == whole


def test_the_node_is_told_of_ranges_and_batches_may_be_of_bytes(source: MemorySource, closing: list[DataLoader]):
    dataset = MdsDataset("b-1/train/", source=source)
    numbers = np.asarray([0, 26, 99])
    rows = [len(encoded(sample(number))) for number in numbers.tolist()]
    assert dataset.sizes(numbers).tolist() == rows
    accesses, size_bytes = dataset.accesses(numbers)
    assert (accesses[:, 1:].tolist(), size_bytes) == ([[0, 1]] * 3, sum(rows))
    counts, sizes = dataset.blocks()
    assert counts.tolist() == [25] * 4
    assert sizes.tolist() == [len(source.objects[f"train/shard.{n:05d}.mds"]) for n in range(4)]
    loader = DataLoader(dataset, 50, seed=2, batch_bytes=9000, collate=list)
    closing.append(loader)
    assert all(sum(len(encoded(each)) for each in batch) <= 9000 for batch in loader)
    assert pickle.loads(pickle.dumps(dataset))[7]["number"] == -7
    packed = MdsDataset("b-1/train/", source=written(packed=True))
    assert packed.sizes(numbers).tolist() == rows
    assert packed.accesses(numbers).size_bytes == int(packed.listing.sizes[[0, 1, 3]].sum()), "all is read to unpack"


def test_columns_are_decoded_as_one_says(source: MemorySource):
    dataset = MdsDataset("b-1/train/", source=source, decode={"data": len})
    assert dataset[13]["data"] == 6
    with pytest.raises(NotSupported, match=r"'data' is encoded as 'pkl'.*pass decode=\{'data': f\}"):
        MdsDataset("b-1/train/", source=written(column_encodings=["bytes", "pkl", *["bytes"] * 6]))


def test_an_array_of_no_known_type_is_damage(source: MemorySource):
    data = bytearray(source.objects["train/shard.00000.mds"])
    at = int(np.frombuffer(data[4:8], "<u4")[0]) + 4 * 5  # behind the sizes of the five columns that have some
    assert data[at] == 65
    data[at] = 7
    source.objects["train/shard.00000.mds"] = bytes(data)
    with pytest.raises(Corrupt, match=r"the any of sample 0 \(in b-1/train/shard.00000.mds\) cannot be decoded"):
        MdsDataset("b-1/train/", source=source)[0]
    skipping = MdsDataset("b-1/train/", source=source, on_error="skip")
    assert [sample["number"] for sample in skipping.__getitems__([0, 1])] == [-1]


def test_samples_are_chosen_by_their_numbers(source: MemorySource, closing: list[DataLoader]):
    chosen = torch_data.Subset(MdsDataset("b-1/train/", source=source), range(0, 100, 3))

    def loader() -> DataLoader:
        closing.append(DataLoader(chosen, 8, seed=1, collate=list))
        return closing[-1]

    batches = iter(first := loader())
    began = [sample["number"] for sample in next(batches)]
    again = loader()
    again.load_state_dict(first.state_dict())
    rest = [sample["number"] for batch in again for sample in batch]
    assert sorted(began + rest, reverse=True) == list(range(0, -100, -3))


@pytest.mark.parametrize("damage", ["cut", "nonsense", "gone"])
def test_samples_of_a_damaged_shard_are_skipped_and_no_others(
    source: MemorySource, closing: list[DataLoader], damage: str
):
    key = "train/shard.00002.mds"
    dataset = MdsDataset("b-1/train/", source=source, on_error="skip", transform=lambda each: -each["number"])
    if damage == "gone":
        del source.objects[key]
    else:
        source.objects[key] = source.objects[key][:60] if damage == "cut" else bytes(len(source.objects[key]))
        dataset = MdsDataset("b-1/train/", source=source, on_error="skip", transform=lambda each: -each["number"])
    loader = DataLoader(dataset, 10, seed=2, collate=list)
    closing.append(loader)
    assert sorted(number for batch in loader for number in batch) == [*range(50), *range(75, 100)]
    assert loader.stall.report()["skipped"] == 25
    assert "in b-1/train/shard.00002.mds" in loader.stall.skipped_names[0]
    within = DataLoader(dataset, 10, batch_bytes=10**6, seed=2, collate=list)
    closing.append(within)
    assert sorted(number for batch in within for number in batch) == [*range(50), *range(75, 100)]


def test_what_is_not_as_the_index_says(source: MemorySource):
    with pytest.raises(NotSupported, match="compressed by br: only"):
        MdsDataset("b-1/train/", source=written(compression="br"))
    objects = source.objects
    broken = objects["train/shard.00002.mds"]
    objects["train/shard.00002.mds"] = broken[:60]
    dataset = MdsDataset("b-1/train/", source=source)
    assert dataset[20]["number"] == -20
    with pytest.raises(Corrupt, match=r"shard.00002.mds is not what index.json says"):
        dataset[60]
    del objects["train/shard.00002.mds"]
    with pytest.raises(Invalid, match=r"shard.00002.mds is in the index, and not there"):
        MdsDataset("b-1/train/", source=source)
    objects["train/index.json"] = b"[]"
    with pytest.raises(Corrupt, match="no index of Mosaic's writer"):
        MdsDataset("b-1/train/", source=source)
    del objects["train/index.json"]
    with pytest.raises(NotFound, match=r"there is no index.json in 'b-1/train/'"):
        MdsDataset("b-1/train/", source=source)
