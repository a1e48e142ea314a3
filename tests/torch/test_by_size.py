"""Batches by bytes: the runs of a step against a dumb cut, and jobs that go on exactly on other ranks."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.torch import BatchSampler, DataLoader, Mixture, ObjectDataset, ShardDataset, TokenDataset, packed
from forebay.torch.by_size import greedy, step
from tests.torch.memory_source import MemorySource, as_int, label, numbered_shard

SIZES = st.lists(st.integers(0, 40), max_size=30)


def length(key: str, data: bytes | memoryview) -> tuple[int, int]:
    return int(key[-4:]), len(data)


@pytest.fixture
def uneven() -> ObjectDataset:
    """200 objects of 0 to 99 bytes."""
    sizes = random.Random(1).choices(range(100), k=200)
    source = MemorySource({f"u/{n:04d}": bytes(size) for n, size in enumerate(sizes)})
    return ObjectDataset("uneven/u/", decode=length, source=source)


@given(SIZES, st.integers(1, 5), st.integers(1, 60), st.integers(1, 4))
def test_runs_are_the_dumb_ones(sizes: list[int], batch: int, batch_bytes: int, world: int) -> None:
    expected: list[list[int]] = []
    for at, size in enumerate(sizes):
        last = expected[-1] if expected else []
        if not last or len(last) == batch or sum(sizes[n] for n in last) + size > batch_bytes:
            expected.append([])
        expected[-1].append(at)
    found = greedy(np.asarray(sizes, np.int64), batch, batch_bytes, world)
    assert [list(range(start, end)) for start, end in found] == expected[:world]


@given(SIZES, st.integers(2, 5), st.integers(1, 60), st.integers(1, 5), st.sampled_from(["short", "fill", "drop"]))
def test_a_step_gives_every_rank_a_run(sizes: list[int], batch: int, batch_bytes: int, world: int, last: Any) -> None:
    left = np.asarray(sizes, np.int64)
    runs = step(left, batch, batch_bytes, world, last, left)
    if not runs:
        assert last == "drop" or not sizes
        return
    assert len(runs) == world
    assert runs[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    whole = [*sizes, *(sizes * (batch * world))]
    for start, end in runs:
        assert 1 <= end - start <= batch
        assert end - start == 1 or sum(whole[start:end]) <= batch_bytes
    if last == "short" and runs[-1][1] > len(sizes):
        assert all(end - start == 1 for start, end in runs), "only samples that lack are repeated"


def given_out(dataset: Any, state: Any, steps: int, *, batch: int, batch_bytes: int, world: int, last: Any) -> Any:
    """The batches of each step and rank, and the state after them; steps end with the epoch."""
    loaders = [
        DataLoader(
            dataset, batch, batch_bytes=batch_bytes, seed=4, rank=rank, world=world, collate=list, last=last
        )
        for rank in range(world)
    ]  # fmt: skip
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    runs = [iter(loader) for loader in loaders]
    found = []
    for _ in range(steps):
        batches = [next(run, None) for run in runs]
        assert len({batch is None for batch in batches}) == 1, "all ranks have as many steps"
        if batches[0] is None:
            break
        found.append(batches)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    for loader in loaders:
        loader.close()
    return found, states[0]


@pytest.mark.parametrize("last", ["short", "fill", "drop"])
@pytest.mark.parametrize(("world", "batch", "batch_bytes"), [(1, 8, 200), (3, 50, 500), (2, 4, 10_000), (4, 9, 1)])
def test_a_job_goes_on_exactly_with_other_ranks_and_limits(
    uneven: ObjectDataset, world: int, batch: int, batch_bytes: int, last: Any
) -> None:
    first: dict[str, Any] = {"batch": 10, "batch_bytes": 300, "world": 2, "last": last}
    whole, end = given_out(uneven, None, 1000, **first)
    assert (end["epoch"], end["samples"]) == (1, 0)
    order = [sample for batches in whole for batch_ in batches for sample in batch_]
    for batches in whole:
        for one in batches:
            assert len(one) == 1 or sum(size for _, size in one) <= 300
    begun, state = given_out(uneven, None, 5, **first)
    taken = [sample for batches in begun for one in batches for sample in one]
    assert state["samples"] == len(taken)
    how: dict[str, Any] = {"batch": batch, "batch_bytes": batch_bytes, "world": world, "last": last}
    rest, after = given_out(uneven, json.loads(json.dumps(state)), 1000, **how)
    assert (after["epoch"], after["samples"]) == (1, 0)
    found = taken + [sample for batches in rest for one in batches for sample in one]
    if last == "drop":
        assert found[: len(order) - 20] == order[: len(found)][: len(order) - 20]
        assert len(set(found)) == len(found)
    else:
        assert found[:200] == order[:200]
        assert sorted(number for number, _ in found[:200]) == list(range(200))
        assert len(found) - 200 < (world * batch if last == "fill" else world)


@pytest.mark.parametrize("workers", [0, 1])
def test_cold_shards_give_the_same_with_workers_and_on_the_second_epoch(workers: int) -> None:
    source = MemorySource({f"train/{n}.tar": numbered_shard(500 * n, 500) for n in range(3)})
    dataset = ShardDataset("uneven/train/", transform=label, source=source)
    sizes = [n % 700 + len(str(n)) for n in range(1500)]
    with DataLoader(dataset, 64, batch_bytes=5000, seed=1, collate=list, workers=workers) as loader:
        for _ in range(2):
            batches = list(loader)
            assert sorted(number for batch in batches for number in batch) == list(range(1500))
            assert all(sum(sizes[number] for number in batch) <= 5000 for batch in batches)
        with pytest.raises(TypeError, match="known at its end"):
            len(loader)


def test_mixtures_and_samplers_have_batches_by_bytes_too(uneven: ObjectDataset) -> None:
    windows = TokenDataset("text/", 50, source=MemorySource({"x": bytes(10_000)}))
    mixture = Mixture([uneven, windows], choose=[100, 50])
    with DataLoader(mixture, 100, batch_bytes=400, collate=list) as loader:
        batches = list(loader)
    sizes = [[sample[1] if isinstance(sample, tuple) else 100 for sample in batch] for batch in batches]
    assert sum(map(len, sizes)) == 150
    assert all(sum(batch) <= 400 for batch in sizes)
    sampled = list(BatchSampler(uneven, 10, batch_bytes=300, seed=4, rank=0, world=1))
    whole, _ = given_out(uneven, None, 1000, batch=10, batch_bytes=300, world=1, last="short")
    assert sampled == [[number for number, _ in batch] for (batch,) in whole]


def test_what_stands_in_for_a_bad_batch_fits_the_limit_too() -> None:
    bodies = {f"{n:03d}": b"none" if 40 <= n < 44 else b"%04d" % n for n in range(200)}
    dataset = ObjectDataset("b-1/", decode=as_int, source=MemorySource(bodies), on_error="skip")
    with DataLoader(dataset, 64, batch_bytes=8, shuffle=False, collate=list) as loader:
        batches = list(loader)
    assert batches[20:22] == [[0, 1], [0, 1]]
    assert all(len(batch) == 2 for batch in batches)


def test_numbers_that_make_no_batches_are_refused(uneven: ObjectDataset) -> None:
    for batch, batch_bytes in ((1, 100), (10, 0)):
        with pytest.raises(Invalid, match="the most samples that one may have"):
            DataLoader(uneven, batch, batch_bytes=batch_bytes)
    with pytest.raises(Invalid, match=r"one of forebay.torch's datasets"):
        DataLoader([1, 2, 3], 10, batch_bytes=100)
    with DataLoader(uneven, 300, batch_bytes=10**9, last="drop", rank=0, world=2) as loader, pytest.raises(
        Invalid, match="not one step"
    ):  # fmt: skip
        list(loader)


def test_sequences_are_packed_into_a_row() -> None:
    found = packed([torch.tensor([5, 6, 7]), np.asarray([8]), [9, 10]])
    assert found["tokens"].tolist() == [5, 6, 7, 8, 9, 10]
    assert (found["starts"].tolist(), found["starts"].dtype) == ([0, 3, 4, 6], torch.int32)
    assert found["positions"].tolist() == [0, 1, 2, 0, 0, 1]
    filled = packed([torch.tensor([5, 6, 7])], window=5, fill=-1)
    assert filled["tokens"].tolist() == [5, 6, 7, -1, -1]
    assert filled["starts"].tolist() == [0, 3, 5]
    assert packed([torch.tensor([1])], window=1)["starts"].tolist() == [0, 1]
    with pytest.raises(Invalid, match="6 tokens do not fit a window of 5"):
        packed([torch.arange(6)], window=5)
    with pytest.raises(Invalid, match="one dimension"):
        packed([torch.zeros(2, 2)])
