"""Chunks of Lightning's litdata are read where they lie."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch.utils import _pytree

from forebay.core.errors import Corrupt, NotSupported
from forebay.torch import DataLoader, LitDataset
from tests.torch.memory_source import MemorySource

FORMS = ["int", "float", "bytes", "str", "bool", "no_header_numpy:5", "numpy", "no_header_tensor:18", "tensor", "int"]


def sample(number: int) -> dict[str, Any]:
    return {
        "i": number,
        "f": number / 2,
        "b": bytes(number % 7),
        "s": "ü" * (number % 5),
        "flag": number % 2 == 0,
        "a": np.arange(number % 4, dtype=np.uint16),
        "m": np.full((2, number % 3 + 1), number, np.float32),
        "pair": (torch.arange(number % 4), [torch.full((2, 2), number, dtype=torch.int32), {"k": number}]),
    }


def leaf(form: str, value: Any) -> bytes:
    """As litdata's serializers have it."""
    kind, _, _ = form.partition(":")
    raw = value.numpy() if isinstance(value, torch.Tensor) else value
    if kind in ("numpy", "tensor"):
        number = 9 if kind == "numpy" else 15  # float32, int32
        order = "<u4" if kind == "numpy" else ">u4"
        return np.asarray([number, raw.ndim, *raw.shape], order).tobytes() + raw.tobytes()
    made = {"int": np.int64, "float": np.float64, "bool": np.bool_}
    return raw.encode() if kind == "str" else raw if kind == "bytes" else made.get(kind, np.asarray)(raw).tobytes()


def item(made: Any) -> bytes:
    leaves = [leaf(form, value) for form, value in zip(FORMS, _pytree.tree_leaves(made), strict=True)]
    return np.asarray(list(map(len, leaves)), "<u4").tobytes() + b"".join(leaves)


def written(*, packed: bool = False, **more: Any) -> MemorySource:
    objects, chunks = {}, []
    for chunk in range(4):
        items = [item(sample(25 * chunk + number)) for number in range(25)]
        ends = np.cumsum([0, *map(len, items)]) + 4 * (len(items) + 2)
        data = np.asarray([len(items), *ends], "<u4").tobytes() + b"".join(items)
        name = f"chunk-0-{chunk}.{'zstd.' if packed else ''}bin"
        objects[f"lit/{name}"] = zstandard.compress(data) if packed else data
        chunks.append({"filename": name, "chunk_size": 25, "chunk_bytes": sum(map(len, items)), "dim": None})
    spec = _pytree.treespec_dumps(_pytree.tree_flatten(sample(1))[1])
    config = {"data_format": FORMS, "data_spec": spec, "compression": "zstd" if packed else None} | more
    index = {"chunks": chunks, "config": config, "updated_at": "1.5"}
    return MemorySource(objects | {"lit/index.json": json.dumps(index).encode()})


def plain(made: Any) -> Any:
    """With the values of arrays, so that samples can be compared."""
    return _pytree.tree_map(
        lambda value: (str(value.dtype), value.tolist()) if hasattr(value, "dtype") else value, made
    )


@pytest.mark.parametrize("packed", [False, True])
def test_samples_are_what_was_written(packed: bool):
    dataset = LitDataset("b-1/lit/", source=written(packed=packed))
    assert len(dataset) == 100
    for number in (0, 24, 25, 99):
        assert plain(dataset[number]) == plain(sample(number))
    assert dataset.sizes(np.asarray([7])).tolist() == [len(item(sample(7)))]
    assert plain(pickle.loads(pickle.dumps(dataset))[7]) == plain(sample(7))


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_an_epoch_is_resumed_exactly(closing: list[DataLoader], shuffle: Any):
    source = written()

    def loader() -> DataLoader:
        dataset = LitDataset("b-1/lit/", source=source, transform=lambda each, epoch: (each["i"], epoch))
        closing.append(DataLoader(dataset, 8, seed=2, shuffle=shuffle, collate=list))
        return closing[-1]

    first = loader()
    whole = [each for batch in first for each in batch]
    assert sorted(whole) == [(number, 0) for number in range(100)]
    first.restart(0)
    batches = iter(first)
    began = [each for _ in range(3) for each in next(batches)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert began + [each for batch in again for each in batch] == whole


def test_values_are_decoded_as_one_says_by_their_paths():
    dataset = LitDataset("b-1/lit/", source=written(), decode={"b": len, "pair.1.1.k": bytes})
    assert dataset[13]["b"] == 6
    assert dataset[13]["pair"][1][1] == {"k": np.int64(13).tobytes()}
    forms = [*FORMS[:-1], "pickle"]
    with pytest.raises(NotSupported, match=r"'pair.1.1.k' is encoded as 'pickle'.*pass decode="):
        LitDataset("b-1/lit/", source=written(data_format=forms))


@pytest.mark.parametrize(
    "odd", [{"encryption": {"algorithm": "fernet"}}, {"compression_level": "whole"}, {"item_loader": "TokensLoader"}]
)
def test_chunks_of_another_kind_are_refused_in_words(odd: dict[str, Any]):
    with pytest.raises(NotSupported, match=f"written with {next(iter(odd))}="):
        LitDataset("b-1/lit/", source=written(**odd))


@pytest.mark.parametrize("size", [0, 2, 50])
def test_samples_of_a_chunk_that_was_cut_are_skipped_and_no_others(closing: list[DataLoader], size: int):
    source = written()
    source.objects["lit/chunk-0-1.bin"] = source.objects["lit/chunk-0-1.bin"][:size]
    with pytest.raises(Corrupt, match=r"lit/chunk-0-1.bin is not what index.json says"):
        LitDataset("b-1/lit/", source=source)[30]
    dataset = LitDataset("b-1/lit/", source=source, on_error="skip", transform=lambda each: each["i"])
    closing.append(DataLoader(dataset, 10, seed=2, collate=list))
    assert sorted(n for batch in closing[-1] for n in batch) == [*range(25), *range(50, 100)]
    assert closing[-1].stall.report()["skipped"] == 25


def test_what_is_not_as_the_index_says():
    source = written()
    empty = np.full(27, 108, "<u4")
    empty[0] = 25
    for more in (b"", b"ARROW1", b"ARROW1" + bytes(100)):
        source.objects["lit/chunk-0-1.bin"] = empty.tobytes() + more
        with pytest.raises(Corrupt, match=r"lit/chunk-0-1.bin is not what index.json says \(its end is not that of"):
            LitDataset("b-1/lit/", source=source)[30]
    source.objects["lit/index.json"] = json.dumps({"chunks": []}).encode()
    with pytest.raises(Corrupt, match=r"no index of litdata.optimize"):
        LitDataset("b-1/lit/", source=source)
