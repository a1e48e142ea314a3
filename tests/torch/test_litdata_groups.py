"""Samples of litdata that lie together, as Arrow or in frames of zstd, are read by their groups."""

from __future__ import annotations

import json
import pickle
import random
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
import zstandard

from forebay.core.errors import Corrupt, Invalid, NotSupported, Precondition
from forebay.core.messages.batch import Item
from forebay.torch import DataLoader, LitDataset, Mixture
from forebay.torch.formats import arrow_rows, litdata_frames, litdata_json
from tests.torch.foreign import FIXTURES, LIT, lit_rows_read, plain
from tests.torch.memory_source import MemorySource

ROWS, TOGETHER = 600, 256  # of a chunk, of a batch
LEAF = {"type": None, "context": None, "children_spec": []}


def row(number: int) -> dict[str, Any]:
    return {"image": random.Random(number).randbytes(500), "label": number, "meta": {"at": [number, 2], "by": "x"}}


def arrow_file(rows: list[Any], **options: Any) -> bytes:
    out = pyarrow.BufferOutputStream()
    table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(out, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=TOGETHER)
    return bytes(out.getvalue())


def chunk(file: bytes, rows: int = ROWS) -> bytes:
    """As litdata has it: the places, all the same, then Arrow's file, its size, and a mark."""
    head = struct.pack(f"<{rows + 2}I", rows, *[4 * (rows + 2)] * (rows + 1))
    return head + file + struct.pack("<I", len(file)) + b"LDARW01\0"


def body(made: dict[str, Any]) -> bytes:
    leaves = [made["image"], struct.pack("<q", made["label"]), json.dumps(made["meta"]["at"]).encode(), b"x"]
    return struct.pack("<4I", *map(len, leaves)) + b"".join(leaves)


def source_of(chunks: list[bytes], sizes: list[int] | None = None, **config: Any) -> MemorySource:
    inner = {"type": "builtins.dict", "context": '["at", "by"]', "children_spec": [LEAF, LEAF]}
    tree = {"type": "builtins.dict", "context": '["image", "label", "meta"]', "children_spec": [LEAF, LEAF, inner]}
    names = [f"chunk-0-{number}.bin" for number in range(len(chunks))]
    listed = [
        {"filename": name, "chunk_size": size, "chunk_bytes": len(data)}
        for name, data, size in zip(names, chunks, sizes or [ROWS] * len(chunks), strict=True)
    ]
    how = {"data_format": ["bytes", "int", "json", "str"], "data_spec": json.dumps([1, tree])} | config
    index = json.dumps({"chunks": listed, "config": how}).encode()
    return MemorySource({"lit/index.json": index} | {f"lit/{name}": data for name, data in zip(names, chunks)})


def rows_of(number: int, rows: int = ROWS) -> list[dict[str, Any]]:
    return [row(ROWS * number + each) for each in range(rows)]


@pytest.fixture
def source() -> MemorySource:
    return source_of([chunk(arrow_file(rows_of(number))) for number in range(3)])


@pytest.fixture(scope="module")
def small() -> bytes:
    return chunk(arrow_file(rows_of(0, 5)), 5)


def test_of_a_chunk_the_head_the_end_and_one_batch_are_read_and_these_once(source: MemorySource):
    asked: list[Item] = []
    source.before = asked.extend
    dataset = LitDataset("b-1/lit/", source=source)
    assert len(dataset) == 3 * ROWS
    assert sum(item.end - item.start for item in asked if item.end) < 3000 + 2 * arrow_rows.TAIL_BYTES, "one head, end"
    asked.clear()
    source.batches.clear()
    assert dataset[ROWS + 300] == row(ROWS + 300)
    assert source.batches == [1, 1, 1], "the head, the end, a batch"
    assert {item.key for item in asked} == {"lit/chunk-0-1.bin"}
    assert asked[-1].end - asked[-1].start < TOGETHER * 650
    asked.clear()
    numbers = [ROWS + 299, ROWS + 256, ROWS + 511, ROWS + 299]
    assert dataset.__getitems__(numbers) == [row(number) for number in numbers]
    assert asked == [], "the batch is kept"
    first, again = dataset.__getitems__([ROWS + 300, ROWS + 300])
    assert first == again
    assert first["meta"] is not again["meta"]
    rows, size_bytes = dataset.accesses(np.asarray([3, ROWS + 3]))
    assert rows.tolist() == [[0, 0, 1], [1, 0, 1]]
    assert size_bytes == dataset.sizes(np.asarray([3, ROWS + 3])).sum() < 2 * 700
    assert pickle.loads(pickle.dumps(dataset))[-1] == row(3 * ROWS - 1)


@pytest.mark.parametrize("shuffle", [True, "block", False])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_resumed_exactly_and_reads_each_batch_once(
    source: MemorySource, closing: list[DataLoader], shuffle: Any, workers: int
):
    def loader(window_bytes: int = 300_000) -> DataLoader:
        dataset = LitDataset("b-1/lit/", source=source, window_bytes=window_bytes, transform=lambda each: each["label"])
        closing.append(DataLoader(dataset, 64, seed=2, shuffle=shuffle, workers=workers, collate=list))
        return closing[-1]

    asked: list[Item] = []
    first = loader()
    source.before = asked.extend
    whole = [each for batch in first for each in batch]
    assert sorted(whole) == list(range(3 * ROWS))
    if not workers:
        large = [item for item in asked if item.end and item.end - item.start > 20_000]
        assert len(large) == len(set(large)) == 9, "each batch is asked for once"
        assert shuffle is False or len({number // TOGETHER for number in whole[:64]}) > 1
    first.restart(0)
    batches = iter(first)
    began = [each for _ in range(3) for each in next(batches)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert began + [each for batch in again for each in batch] == whole
    with pytest.raises(Precondition, match="in windows of"):
        loader(200).load_state_dict(first.state_dict())


def test_no_more_than_a_window_is_read_at_once(source: MemorySource):
    dataset = LitDataset("b-1/lit/", source=source, window_bytes=1)
    source.batches.clear()
    assert [each["label"] for each in dataset.__getitems__([0, 300, 599, 1, 1799])] == [0, 300, 599, 1, 1799]
    assert source.batches == [2, 2, 1, 1, 1, 1], "heads, ends, then a batch at a time"
    with pytest.raises(Invalid, match="a window has at least one byte"):
        LitDataset("b-1/lit/", source=source, window_bytes=0)
    with pytest.raises(Invalid, match="LitDataset cannot be mixed"):
        Mixture([dataset, dataset], repeats=[1, 1])


def test_values_are_decoded_by_their_paths(source: MemorySource):
    dataset = LitDataset("b-1/lit/", source=source, decode={"image": len, "meta.at": sum, "other": int})
    assert dataset[7] == {"image": 500, "label": 7, "meta": {"at": 9, "by": "x"}}
    with pytest.raises(Corrupt, match=r"the meta.by of sample 7 \(in b-1/lit/chunk-0-0.bin\) cannot be decoded"):
        LitDataset("b-1/lit/", source=source, decode={"meta.by": int})[7]


def test_a_leaf_that_is_not_read_elsewhere_does_not_matter_in_arrow(source: MemorySource):
    """litdata says pickle of what was None in the first sample."""
    chunks = [source.objects[f"lit/chunk-0-{number}.bin"] for number in range(3)]
    forms = ["bytes", "int", "json", "pickle"]
    assert LitDataset("b-1/lit/", source=source_of(chunks, data_format=forms))[9] == row(9)
    laid = [body(row(9))]
    one = struct.pack("<3I", 1, 12, 12 + len(laid[0])) + laid[0]
    with pytest.raises(NotSupported, match=r"'meta.by' is encoded as 'pickle'"):
        LitDataset("b-1/lit/", source=source_of([one], [1], data_format=forms))


def test_chunks_that_are_laid_out_otherwise_may_lie_beside_them():
    """Rows that make no table are written as they would be without pyarrow, those of this chunk only."""
    laid = [body(made) for made in rows_of(1, 5)]
    ends = np.cumsum([0, *map(len, laid)]) + 4 * 7
    other = struct.pack("<7I", 5, *ends.tolist()) + b"".join(laid)
    dataset = LitDataset("b-1/lit/", source=source_of([chunk(arrow_file(rows_of(0))), other], [ROWS, 5]))
    expected = [row(number) for number in range(ROWS + 5)]
    assert [dataset[number] for number in range(ROWS + 5)] == expected
    with DataLoader(dataset, 10, seed=1, collate=list) as loader:
        assert sorted(each["label"] for batch in loader for each in batch) == list(range(ROWS + 5))


def test_without_pyarrow_it_is_said_what_to_install(source: MemorySource, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotSupported, match=r"chunk-0-0.bin: .*Arrow, which needs pyarrow: `pip install pyarrow`"):
        LitDataset("b-1/lit/", source=source)


# --- what is damaged --------------------------------------------------------------------------------------------------
def read(source: MemorySource) -> list[Any]:
    dataset = LitDataset("b-1/lit/", source=source)
    return [dataset[number] for number in range(len(dataset))]


def said_of(function: Callable[[], Any], otherwise: str) -> str:
    """What its error says, if it is one of those that damage may be."""
    try:
        function()
    except (Corrupt, NotSupported) as error:
        return error.message
    return otherwise


def test_a_damaged_batch_is_skipped_with_its_samples_and_no_others(source: MemorySource, closing: list[DataLoader]):
    data = bytearray(source.objects["lit/chunk-0-1.bin"])
    at = data.index(row(ROWS + 3)["image"])
    data[at - 2200 : at - 1600] = b"\xff" * 600  # the head of the batch, or its offsets
    source.objects["lit/chunk-0-1.bin"] = bytes(data)
    with pytest.raises(Corrupt, match=r"b-1/lit/chunk-0-1.bin cannot be read: group 0 of its samples is damaged"):
        LitDataset("b-1/lit/", source=source)[ROWS]
    dataset = LitDataset("b-1/lit/", source=source, on_error="skip", transform=lambda each: each["label"])
    closing.append(DataLoader(dataset, 100, seed=2, collate=list))
    read = sorted(number for batch in closing[-1] for number in batch)
    assert read == [*range(ROWS), *range(ROWS + TOGETHER, 3 * ROWS)]
    source.objects["lit/chunk-0-0.bin"] = source.objects["lit/chunk-0-0.bin"][:-1]
    dataset = LitDataset("b-1/lit/", source=source, on_error="skip", transform=lambda each: each["label"])
    assert not dataset.any_order, "the next chunk says how they lie"
    assert dataset.__getitems__([5, 2 * ROWS]) == [2 * ROWS]


@pytest.mark.parametrize("name", ["lit-rows", "lit-rows-zstd", "lit-nest", "lit-batch-2"])
@pytest.mark.parametrize("seed", range(25))
def test_damage_anywhere_is_an_error_that_names_the_object(name: str, seed: int):
    """Of some values nobody can tell that they changed. All others are Corrupt, and nothing else happens."""
    chance = random.Random(seed)
    files = {path.name: path.read_bytes() for path in (FIXTURES / name).iterdir()}
    victim = chance.choice(sorted(file for file in files if file.endswith(".bin")))
    data = bytearray(files[victim])
    ends = [*range(min(len(data), 3000)), *range(max(0, len(data) - 1500), len(data))]
    for _ in range(chance.choice((1, 3, 30))):
        at = chance.choice(ends) if seed % 2 else chance.randrange(len(data))
        data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    if seed % 5 == 0:
        del data[chance.randrange(len(data)) :]
    source = MemorySource({f"lit/{file}": data for file, data in files.items()} | {f"lit/{victim}": bytes(data)})
    made: list[LitDataset] = []
    assert victim in said_of(lambda: made.append(LitDataset("b-1/lit/", source=source)), victim)
    for dataset in made:
        for number in range(0, len(dataset), 3):
            assert victim in said_of(partial(dataset.__getitem__, number), victim)


@pytest.mark.parametrize("take", [1, 8, 12, 13, 22, 23, 100])
def test_a_chunk_that_was_cut_short(small: bytes, take: int):
    with pytest.raises(Corrupt, match=r"b-1/lit/chunk-0-0.bin is not what index.json says"):
        read(source_of([small[:-take]], [5]))


def lied(small: bytes, where: Callable[[bytes], int], form: str, value: int) -> MemorySource:
    data = bytearray(small)
    struct.pack_into(form, data, where(small), value)
    return source_of([bytes(data)], [5])


def block_at(data: bytes) -> int:
    """Of where the batch is, in the directory: it begins where the types end, 4 bytes of which are its head's size."""
    file = data[28:-12]
    with pyarrow.ipc.open_stream(file[8:]) as reader:
        first = len(reader.schema.serialize()) + 8
    return data.rindex(struct.pack("<q", first))


@pytest.mark.parametrize(
    ("where", "form", "value"),
    [
        (lambda data: len(data) - 12, "<I", 2**32 - 1),
        (lambda data: len(data) - 12, "<I", 7),
        (lambda data: len(data) - 22, "<i", 2**31 - 1),
        (lambda data: len(data) - 22, "<i", -1),
        (lambda data: len(data) - 22, "<i", 8),
        (block_at, "<q", 2**62),
        (block_at, "<q", -8),
        (lambda data: block_at(data) + 8, "<i", 2**31 - 1),
        (lambda data: block_at(data) + 8, "<i", 0),
        (lambda data: block_at(data) + 16, "<q", 2**62),
        (lambda data: block_at(data) + 16, "<q", -1),
        (lambda data: block_at(data) - 4, "<I", 2**32 - 1),
    ],
)
def test_a_directory_that_lies(small: bytes, where: Callable[[bytes], int], form: str, value: int):
    assert read(source_of([small], [5])) == rows_of(0, 5)
    with pytest.raises(Corrupt, match=r"chunk-0-0.bin is not what index.json says \("):
        read(lied(small, where, form, value))


def test_a_batch_that_would_not_fit_memory_is_not_decoded():
    """A column says before its values how many bytes they will be; a list how long it is, of what needs no bytes."""
    data = bytearray(chunk(arrow_file(rows_of(0, 5), compression="zstd"), 5))
    frame = data.index(zstandard.FRAME_HEADER) - 8
    struct.pack_into("<q", data, frame, 1 << 50)
    with pytest.raises(Corrupt, match=r"it would have 1125899906\d+ bytes decoded, at most 2147483648 are read"):
        read(source_of([bytes(data)], [5], ipc_compression="zstd"))
    nothing = pyarrow.ListArray.from_arrays([0, 1 << 28], pyarrow.nulls(1 << 28))
    many = arrow_file(pyarrow.Table.from_arrays([nothing], names=["many"]))
    with pytest.raises(Corrupt, match=r"it has 268435457 values, more than 67108864"):
        read(source_of([chunk(many, 1)], [1]))


def test_a_batch_with_other_rows_than_the_index_says():
    short = arrow_file(rows_of(0, 4))
    with pytest.raises(Corrupt, match=r"group 0 of its samples is damaged \(it has 4 rows, not 5\)"):
        read(source_of([chunk(short, 5)], [5]))
    with pytest.raises(Corrupt, match=r"it has 1 batches for 600 samples"):
        read(source_of([chunk(short, 600)], [600]))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pyarrow.table({"a": pyarrow.array(["x"]).dictionary_encode()}), "type dictionary"),
        (pyarrow.table({"a": pyarrow.array([[{"b": 1}]], pyarrow.list_(pyarrow.map_("utf8", "int8")))}), "type map"),
    ],
)
def test_other_types_of_arrow_are_refused_in_words(table: Any, said: str):
    with pytest.raises(
        NotSupported, match=rf"chunk-0-0.bin: it has a column of Arrow's {said}.*optimize\(\) text, numbers"
    ):
        read(source_of([chunk(arrow_file(table), 1)], [1]))


def test_a_stream_of_arrow_is_refused_in_words():
    out = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist(rows_of(0, 5))
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(NotSupported, match=r"chunk-0-0.bin: it holds Arrow as a stream.*optimize\(\) it again"):
        read(source_of([chunk(bytes(out.getvalue()), 5)], [5]))


def test_an_end_that_is_longer_than_is_read_at_first(monkeypatch: pytest.MonkeyPatch, source: MemorySource):
    monkeypatch.setattr(arrow_rows, "TAIL_BYTES", 100)
    assert LitDataset("b-1/lit/", source=source)[3] == row(3)


# --- frames and lists -------------------------------------------------------------------------------------------------
def frames_of(name: str = "lit-batch-2") -> dict[str, bytes]:
    return {f"lit/{path.name}": path.read_bytes() for path in (FIXTURES / name).iterdir()}


def test_frames_are_read_once_and_shuffled_in_windows():
    asked: list[Item] = []
    source = MemorySource(frames_of())
    source.before = asked.extend
    dataset = LitDataset("b-1/lit/", source=source)
    assert not dataset.any_order
    assert [dataset[number]["i"] for number in (0, 1, 4)] == [-5, -4, -1]
    assert len(asked) == 4, "the index, a head, two frames"
    with DataLoader(dataset, 4, seed=1, collate=list) as loader:
        assert sorted(each["i"] for batch in loader for each in batch) == [*range(-5, 4)]


def test_a_frame_that_lies():
    files = frames_of()
    key = min(name for name in files if name.endswith(".bin"))
    at = struct.calcsize("<8sHHIII") + 4 * 6  # its table of frames
    for offset, form, value in (
        (at + 20, "<I", 2**32 - 1),
        (at + 16, "<I", 2**32 - 1),
        (at + 8, "<Q", 2**64 - 1),
        (at + 8, "<Q", 0),
        (at, "<I", 1),
        (16, "<I", 1),
        (8, "<H", 2),
        (24, "<I", 1),
    ):
        data = bytearray(files[key])
        struct.pack_into(form, data, offset, value)
        with pytest.raises(Corrupt, match=r"is not what index.json says \(it"):
            read(MemorySource(files | {key: bytes(data)}))


@pytest.mark.parametrize("data", [b"", b"not zstd", zstandard.ZstdCompressor(write_content_size=False).compress(b"x")])
def test_what_is_no_frame_or_does_not_say_its_size(data: bytes):
    with pytest.raises(ValueError):
        litdata_frames.unpacked(data)
    bomb = zstandard.compress(b"x" * 1000)
    with pytest.raises(ValueError, match="1000 bytes unpacked, at most 10"):
        litdata_frames.unpacked(bomb, 10)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\xff\xff\xff\xff",
        b"\x02\xff\xff\xff\xff" + bytes(16),
        b"\x04\xff\xff\xff\x7f",
        b"\x05\xff\xff\xff\xff",
        b"\x06\xff\xff\xff\xff\x00\x00\x00\x00",
        b"\x06\xff\xff\xff\xff\x01\x00\x00\x00\x00\x00\x00\x00\x10",
        b"\x06\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x0f",
        b"\x07\x05\x00\x00\x00abc",
        b"\x0c",
        b"\x0b\x0b",
        b"\x00\x02\x00\x00\x00{]",
        b"[1,",
        b"\x05\x01\x00\x00\x00\x00\x00\x00\x00" * 5000 + b"\x0b",
    ],
)
def test_a_list_that_lies_takes_no_memory(data: bytes):
    with pytest.raises(ValueError):
        litdata_json.value_of(data)
    assert litdata_json.value_of(b'{"a":[1,null]}') == {"a": [1, None]}, "as older litdata wrote it"


def test_all_that_litdata_wrote_is_read_in_any_order():
    """Rows of several batches in one request, neighbours and others."""
    written = LIT["lit-rows-zstd"]
    files = {f"lit/{path.name}": path.read_bytes() for path in (FIXTURES / "lit-rows-zstd").iterdir()}
    dataset = LitDataset("b-1/lit/", source=MemorySource(files))
    for seed in range(4):
        numbers = random.Random(seed).sample(range(written.samples), (3, 40, 300, 520)[seed])
        assert [plain(each) for each in dataset.__getitems__(numbers)] == [plain(lit_rows_read(n)) for n in numbers]
