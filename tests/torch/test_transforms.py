"""What a user's function is told: the epoch; and which samples a filter leaves, in every kind of loader."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

from forebay.core.errors import Invalid, NotFound, Precondition
from forebay.torch import DataLoader, Mixture, ObjectDataset, ShardDataset, TokenDataset
from tests.torch.memory_source import MemorySource, label, numbered_shard, tokens


def drawn(sample: dict[str, Any], epoch: int | None) -> tuple[int, int | None]:
    """Stands for an augmentation that is seeded with both."""
    return label(sample), epoch


def drawn_of_object(key: str, value: bytes, *, epoch: int | None = None) -> tuple[int, int | None]:
    return int(bytes(value)), epoch


def odd(key: str) -> bool:
    return int(key) % 2 == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_each_epoch_is_told_wherever_the_job_is_resumed(shards: MemorySource, workers: int) -> None:
    dataset = ShardDataset("numbers/train/", transform=drawn, source=shards)
    with DataLoader(dataset, 16, seed=2, collate=list, workers=workers) as loader:
        epochs = []
        for number in range(2):
            epochs.append([sample for batch in loader for sample in batch])
            assert sorted(epochs[-1]) == [(n, number) for n in range(100)]
        steps = iter(loader)
        begun = next(steps) + next(steps)
        state = json.loads(json.dumps(loader.state_dict()))
    with DataLoader(dataset, 7, collate=list) as loader:
        loader.load_state_dict(state)
        rest = [sample for batch in loader for sample in batch]
    assert sorted(begun + rest) == [(n, 2) for n in range(100)]


def test_what_stands_in_for_a_bad_batch_is_of_its_epoch(numbers: MemorySource) -> None:
    numbers.objects |= {f"numbers/{n:05d}": b"x" for n in range(8, 16)}
    dataset = ObjectDataset("numbers/numbers/", decode=drawn_of_object, source=numbers, on_error="skip")
    with DataLoader(dataset, 8, shuffle=False, collate=list) as loader:
        for number in range(2):
            assert {epoch for batch in loader for _, epoch in batch} == {number}


def test_other_loaders_say_none_and_other_functions_are_told_nothing(numbers: MemorySource) -> None:
    dataset = ObjectDataset("numbers/numbers/", decode=drawn_of_object, source=numbers)
    assert dataset[3] == (3, None)
    assert next(iter(data.DataLoader(dataset, 2, collate_fn=list))) == [(0, None), (1, None)]
    plain = ObjectDataset("numbers/numbers/", decode=max, source=numbers)  # built in: it says nothing of itself
    with DataLoader(plain, 100, collate=len) as loader, pytest.raises(TypeError):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_windows_of_tokens_are_transformed(text: MemorySource, workers: int) -> None:
    def masked(tokens: torch.Tensor, index: int, epoch: int) -> list[int]:
        return [epoch, index, int(tokens[0])]

    dataset = TokenDataset("text/text/", 100, transform=masked, source=text)
    with DataLoader(dataset, 3, shuffle=False, workers=workers) as loader:
        for number in range(2):
            batches = [torch.stack(batch, 1) for batch in loader]
            assert torch.cat(batches).tolist() == [[number, n, 100 * n] for n in range(10)] + [[number, 10, 5000]]
    assert dataset[2][1:] == [2, 200]


def test_a_sample_that_a_mixture_repeats_is_told_apart(shards: MemorySource) -> None:
    mixture = Mixture([ShardDataset("numbers/train/", transform=drawn, source=shards)], repeats=[1.5])
    with DataLoader(mixture, 150, collate=list) as loader:
        (first,), (second,) = list(loader), list(loader)
    both = first + second
    assert len(set(both)) == 300, "no sample twice with one epoch"
    assert sorted(both) == [(n, epoch) for n in range(100) for epoch in range(3)]


@pytest.mark.parametrize(("dtype", "code"), [("uint8", "u1"), ("uint16", "<u2"), ("uint32", "<u4"), ("int32", "<i4")])
def test_tokens_of_every_width(dtype: Any, code: str) -> None:
    source = MemorySource({"x": tokens(100, dtype=code)})
    dataset = TokenDataset("text/", 10, dtype=dtype, source=source)
    assert (len(dataset), dataset[9].dtype) == (10, torch.int64)
    assert dataset[9].tolist() == list(range(90, 100))
    raw = TokenDataset("text/", 10, dtype=dtype, raw=True, source=source)
    assert raw[1].dtype == getattr(torch, dtype)
    with pytest.raises(Invalid, match="uint8, uint16, uint32, int32"):
        TokenDataset("text/", 10, dtype="int8", source=source)  # type: ignore[arg-type]


def test_negative_tokens_stay_negative() -> None:
    source = MemorySource({"x": np.asarray([-100, 5], "<i4").tobytes()})
    assert TokenDataset("text/", 2, dtype="int32", source=source)[0].tolist() == [-100, 5]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_filter_leaves_samples_out_by_name(shards: MemorySource, workers: int) -> None:
    index = {"shardlist": [{"url": f"{n}.tar", "nsamples": 10 * n} for n in range(5)]}
    shards.objects["train/shardindex.json"] = json.dumps(index).encode()
    dataset = ShardDataset("numbers/train/", filter=odd, transform=label, source=shards)
    with DataLoader(dataset, 8, seed=1, collate=list, workers=workers) as loader:
        steps = iter(loader)
        begun = [*next(steps), *next(steps)]
        state = loader.state_dict()
    assert len(dataset) == 50
    with DataLoader(dataset, 8, collate=list) as loader:
        loader.load_state_dict(state)
        rest = [number for batch in loader for number in batch]
        assert sorted(begun + rest) == list(range(1, 100, 2))
        assert sorted(number for batch in loader for number in batch) == list(range(1, 100, 2))
    with pytest.raises(Precondition, match="filtered by odd"):
        DataLoader(ShardDataset("numbers/train/", transform=label, source=shards), 8).load_state_dict(state)


def test_a_filter_is_held_against_counts_that_are_told(shards: MemorySource) -> None:
    counts = {f"{n}.tar": 5 * n for n in range(5)}
    assert ShardDataset("numbers/train/", filter=odd, counts=counts, source=shards).known_samples == 50
    wrong = ShardDataset("numbers/train/", filter=odd, counts=counts | {"4.tar": 40}, source=shards)
    with DataLoader(wrong, 90, collate=len) as loader, pytest.raises(Invalid, match="holds 20 samples, and 40"):
        list(loader)


def test_a_filter_that_leaves_nothing_says_so(shards: MemorySource) -> None:
    dataset = ShardDataset("numbers/train/", filter=lambda key: False, source=shards)
    with DataLoader(dataset, 8) as loader, pytest.raises(NotFound, match="filter"):
        list(loader)


def test_a_large_shard_is_filtered_whole() -> None:
    source = MemorySource({"train/0.tar": numbered_shard(0, 100) + bytes(33 << 20)})
    dataset = ShardDataset("numbers/train/", filter=odd, transform=label, source=source)
    with DataLoader(dataset, 50, collate=list) as loader:
        assert sorted(next(iter(loader))) == list(range(1, 100, 2))
