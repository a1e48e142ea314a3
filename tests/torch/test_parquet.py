"""Rows of parquet files are read where they lie."""

from __future__ import annotations

import io
import pickle
import random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from forebay.core.errors import Corrupt, Invalid, Precondition
from forebay.core.messages.batch import Item
from forebay.torch import DataLoader, Mixture, ParquetDataset
from tests.torch.memory_source import MemorySource

ROWS, GROUP = 40, 16  # of a file


def row(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "text": "ü" * (number % 5),
        "image": random.Random(number).randbytes(6000),
        "list": list(range(number % 3)),
        "deep": {"a": number / 2, "b": None if number % 2 else "x"},
    }


def written(**more: Any) -> MemorySource:
    objects = {}
    for file in range(3):
        table = pyarrow.Table.from_pylist([row(ROWS * file + number) for number in range(ROWS)])
        out = io.BytesIO()
        pyarrow.parquet.write_table(table, out, row_group_size=GROUP, **{"use_dictionary": False} | more)
        objects[f"rows/{file}.parquet"] = out.getvalue()
    return MemorySource(objects)


@pytest.fixture
def source() -> MemorySource:
    return written()


@pytest.mark.parametrize("more", [{}, {"compression": "zstd", "use_dictionary": True}, {"data_page_version": "2.0"}])
def test_rows_are_what_was_written(more: dict[str, Any]):
    dataset = ParquetDataset("b-1/rows/", source=written(**more))
    assert len(dataset) == 3 * ROWS
    assert dataset.__getitems__([7, 119, 16, 7, 40]) == [row(7), row(119), row(16), row(7), row(40)]
    assert pickle.loads(pickle.dumps(dataset))[-1] == row(119)


def test_columns_alone_are_read_and_a_group_once(source: MemorySource):
    dataset = ParquetDataset("b-1/rows/", columns=["number", "deep"], source=source)
    asked: list[Item] = []
    source.before = asked.extend
    assert dataset[3] == {"number": 3, "deep": row(3)["deep"]}
    assert sum(item.end - item.start for item in asked if item.end) < 12_000, "the end, and two small columns"
    assert dataset.sizes(np.asarray([3])).max() < 200
    count = len(asked)
    assert [sample["number"] for sample in dataset.__getitems__([15, 0, 9])] == [15, 0, 9]
    assert len(asked) == count, "the group is kept"
    rows, size_bytes = dataset.accesses(np.asarray([3, 50]))
    assert rows.tolist() == [[0, 0, 1], [1, 0, 1]]
    assert size_bytes < 4000, "what lies between the columns is not read"
    assert source.batches[:2] == [3, 3], "the ends of all files at once; then two columns, and the end again"
    with pytest.raises(Invalid, match=r"0.parquet has no column 'colour': it has deep, image, list, number, text"):
        ParquetDataset("b-1/rows/", columns=["colour"], source=source)


@pytest.mark.parametrize("shuffle", [True, "block", False])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_resumed_exactly(source: MemorySource, closing: list[DataLoader], shuffle: Any, workers: int):
    def loader(window_bytes: int = 100_000) -> DataLoader:
        dataset = ParquetDataset(
            "b-1/rows/",
            columns=["number"],
            source=source,
            transform=lambda each, epoch: (each["number"], epoch),
            window_bytes=window_bytes,
        )
        closing.append(DataLoader(dataset, 8, seed=2, shuffle=shuffle, workers=workers, collate=list))
        return closing[-1]

    first = loader()
    whole = [each for batch in first for each in batch]
    assert sorted(whole) == [(number, 0) for number in range(3 * ROWS)]
    first.restart(0)
    batches = iter(first)
    began = [each for _ in range(3) for each in next(batches)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert began + [each for batch in again for each in batch] == whole
    with pytest.raises(Precondition, match="in windows of"):
        loader(200).load_state_dict(first.state_dict())


def test_another_window_of_the_loader_is_no_other_order_where_it_has_none(
    source: MemorySource, closing: list[DataLoader]
):
    """A state says the loader's window where the shuffle is in blocks; else it must not matter."""

    def order(shuffle: Any, window_bytes: int) -> list[int]:
        dataset = ParquetDataset("b-1/rows/", columns=["number"], source=source)
        closing.append(DataLoader(dataset, 8, seed=2, shuffle=shuffle, window_bytes=window_bytes, collate=list))
        return [each["number"] for batch in closing[-1] for each in batch]

    assert order(True, 1) == order(True, 4 << 30)
    assert order("block", 1) != order("block", 4 << 30)
    with pytest.raises(Precondition, match="windows of 1 bytes"):
        closing[-1].load_state_dict(closing[-2].state_dict())


def test_a_shuffle_decodes_each_group_once(source: MemorySource, closing: list[DataLoader]):
    dataset = ParquetDataset("b-1/rows/", source=source, window_bytes=2 * GROUP * 6100)
    closing.append(DataLoader(dataset, 10, seed=1, collate=lambda samples: [each["number"] for each in samples]))
    source.batches.clear()
    order = [number for batch in closing[-1] for number in batch]
    assert sorted(order) == list(range(3 * ROWS))
    assert len({number // GROUP for number in order[:10]}) > 1, "rows of several groups are mixed"
    assert len(source.batches) == 9, "each group is asked for once"


def test_what_is_damaged_says_where(source: MemorySource):
    data = bytearray(source.objects["rows/1.parquet"])
    data[4:2000] = bytes(1996)
    source.objects["rows/1.parquet"] = bytes(data)
    dataset = ParquetDataset("b-1/rows/", source=source)
    assert dataset[0] == row(0)
    with pytest.raises(Corrupt, match=r"row group 0 of b-1/rows/1.parquet cannot be read"):
        dataset[ROWS]
    skipping = ParquetDataset("b-1/rows/", source=source, on_error="skip")
    assert [each["number"] for each in skipping.__getitems__([0, ROWS, ROWS + GROUP])] == [0, ROWS + GROUP]
    source.objects["rows/2.parquet"] = b"PAR1" + bytes(50)
    with pytest.raises(Corrupt, match=r"b-1/rows/2.parquet is no parquet file, or is cut short"):
        ParquetDataset("b-1/rows/", source=source)


def test_values_are_decoded_and_what_cannot_be_is_refused(source: MemorySource):
    dataset = ParquetDataset("b-1/rows/", source=source, decode={"image": len})
    assert dataset[1]["image"] == 6000
    with pytest.raises(Corrupt, match=r"the image of row 1 of row group 0 of b-1/rows/0.parquet cannot be decoded"):
        ParquetDataset("b-1/rows/", source=source, decode={"image": int})[1]
    with pytest.raises(Invalid, match=r"write columns=\['text'\]"):
        ParquetDataset("b-1/rows/", columns="text", source=source)
    with pytest.raises(Invalid, match=r"ParquetDataset cannot be mixed"):
        Mixture([dataset, dataset], repeats=[1, 1])
