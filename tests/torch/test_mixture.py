"""A mixture takes of each dataset's stream exactly its share, in an order that any number of ranks goes on with."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound, Precondition
from forebay.core.messages.batch import Item
from forebay.torch import DataLoader, Mixture, ObjectDataset, ShardDataset, TokenDataset
from forebay.torch.mixture import Mixed
from forebay.torch.order import splitmix
from forebay.torch.state import STATE_BYTES_MAX
from tests.torch.memory_source import MemorySource, as_int, label, numbered_shard, tokens


@pytest.fixture
def small() -> ObjectDataset:
    """The numbers 0 to 9."""
    return ObjectDataset("aaa/", decode=as_int, source=MemorySource({f"{n:04d}": b"%d" % n for n in range(10)}))


@pytest.fixture
def large() -> ShardDataset:
    """The numbers 1000 to 3999, in shards."""
    shards = {f"{n}.tar": numbered_shard(1000 + 600 * n, 600) for n in range(5)}
    return ShardDataset("bbb/", transform=label, source=MemorySource(shards))


def epoch(mixture: Mixture, seed: int, number: int, shuffle: Any = True) -> list[list[int]]:
    rows: list[list[int]] = Mixed(mixture, shuffle, 1 << 30, seed, number).at(np.arange(mixture.samples)).tolist()
    return rows


@pytest.mark.parametrize("shuffle", [True, False, "block"])
@pytest.mark.parametrize("choose", [(25, 1300), (3, 3000), (10, 1), (0, 7)])
def test_epochs_take_the_streams_one_after_another(
    small: ObjectDataset, large: ShardDataset, choose: tuple[int, int], shuffle: Any
) -> None:
    mixture = Mixture([small, large], choose=choose)
    epochs = [epoch(mixture, 5, number, shuffle) for number in range(4)]
    for source, (dataset, share) in enumerate(zip((small, large), choose, strict=True)):
        stream: list[tuple[int, int]] = []
        own = 0
        while len(stream) < 4 * share:  # the dumb way: all of it, as a list
            seed = splitmix(5 ^ source) & ((1 << 63) - 1)
            order = dataset.order(shuffle, (1 << 30), seed, own)
            order.reach(len(dataset))
            stream += [(own, index) for index in order.at(np.arange(len(dataset))).tolist()]
            own += 1
        for number, rows in enumerate(epochs):
            mine = [(row[1], row[2]) for row in rows if row[0] == source]
            assert sorted(mine) == sorted(stream[number * share : (number + 1) * share])
            if shuffle is False:
                assert mine == stream[number * share : (number + 1) * share]


def test_it_is_mixed_evenly_and_any_position_can_be_asked_alone(small: ObjectDataset, large: ShardDataset) -> None:
    mixture = Mixture([small, large], proportions=[1, 3], samples=8000)
    assert mixture.plan.shares == (2000, 6000)
    rows = epoch(mixture, 1, 2)
    for start in range(0, 7168, 1024):
        assert Counter(row[0] for row in rows[start : start + 1024]) == {0: 256, 1: 768}
    some = np.asarray([7999, 0, 4096, 4095, 17, 17])
    assert Mixed(mixture, True, 1 << 30, 1, 2).at(some).tolist() == [rows[at] for at in some]
    assert rows != epoch(mixture, 1, 3)
    assert rows != epoch(mixture, 2, 2)
    in_order = [row[0] for row in epoch(mixture, 1, 0, False)]
    assert all(sum(1 - source for source in in_order[at : at + 4]) == 1 for at in range(0, 8000, 4))


def given(mixture: Mixture, batch: int, world: int, state: dict[str, Any] | None, steps: int, workers: int = 0) -> Any:
    """What all ranks are given in `steps` steps, in the order of the job, and the state after them."""
    loaders = [
        DataLoader(mixture, batch, seed=3, rank=rank, world=world, collate=list, workers=workers)
        for rank in range(world)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    runs = [iter(loader) for loader in loaders]
    found: list[int] = []
    for _ in range(steps):
        for run in runs:
            found += next(run, [])
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert all(state == states[0] for state in states)
    return found, states[0]


@pytest.mark.parametrize(("world", "batch", "workers"), [(1, 7, 0), (3, 5, 0), (2, 8, 1)])
def test_a_job_goes_on_exactly_on_other_ranks(
    small: ObjectDataset, large: ShardDataset, world: int, batch: int, workers: int
) -> None:
    mixture = Mixture([small, large], choose=[33, 80])
    whole, end = given(mixture, 5, 2, None, 12)
    assert len(whole) == 113
    assert all(3 <= Counter(whole)[n] <= 4 for n in range(10)), "33 of 10 are three of each, and three more"
    begun, state = given(mixture, 5, 2, None, 4)
    rest, after = given(pickle.loads(pickle.dumps(mixture)), batch, world, json.loads(json.dumps(state)), 100, workers)
    assert begun + rest == whole
    assert (after["epoch"], after["samples"]) == (end["epoch"], end["samples"]) == (1, 0)
    assert len(json.dumps(state)) < STATE_BYTES_MAX


def test_a_changed_mixture_is_another_dataset(small: ObjectDataset, large: ShardDataset) -> None:
    state = DataLoader(Mixture([small, large], choose=[3, 30]), 4).state_dict()
    for other in (Mixture([small, large], choose=[4, 29]), Mixture([large, small], choose=[30, 3])):
        with pytest.raises(Precondition, match=r"it was read as 'a mixture .3 of 10 of objects"):
            DataLoader(other, 4).load_state_dict(state)
    more = MemorySource({f"{n:04d}": b"%d" % n for n in range(11)})
    grown = Mixture([ObjectDataset("aaa/", decode=as_int, source=more), large], choose=[3, 30])
    with pytest.raises(Precondition, match=r"objects: 15 then, 16 now.*'aaa/0010'"):
        DataLoader(grown, 4).load_state_dict(state)
    many = Mixture([small] * 300, proportions=range(300))
    assert len(json.dumps(DataLoader(many, 4).state_dict())) < STATE_BYTES_MAX


def test_rows_of_tokens_stay_one_tensor() -> None:
    first = TokenDataset("aaa/", 4, source=MemorySource({"x": tokens(40)}))
    second = TokenDataset("bbb/", 4, source=MemorySource({"x": tokens(400, 1000)}))
    mixture = Mixture([first, second], repeats=[2, 0.5])
    assert mixture.plan.shares == (20, 50)
    with DataLoader(mixture, 70) as loader:
        (batch,) = loader
    assert batch.shape == (70, 4)
    assert sorted(batch[batch < 1000].tolist()) == sorted(2 * list(range(40)))
    wide = Mixture([first, TokenDataset("bbb/", 8, source=MemorySource({"x": tokens(80)}))], choose=[1, 1])
    with DataLoader(wide, 2, collate=list) as loader:
        assert sorted(len(row) for row in next(iter(loader))) == [4, 8]
    assert torch.equal(wide[0], first[0]) or len(wide[0]) == 8
    with pytest.raises(IndexError):
        wide[2]


def test_what_is_damaged_is_skipped_where_its_dataset_says_so(large: ShardDataset) -> None:
    source = MemorySource({f"{n:04d}": b"x" if n % 2 else b"%d" % n for n in range(10)})
    mixture = Mixture([ObjectDataset("aaa/", decode=as_int, source=source, on_error="skip"), large], choose=[20, 20])
    with DataLoader(mixture, 8, seed=1, collate=list) as loader:
        found = [number for batch in loader for number in batch]
        assert sorted(n for n in found if n < 1000) == sorted(2 * [0, 2, 4, 6, 8])
        assert len(found) == 30
        assert loader.stall.report()["skipped"] == 10
    strict = Mixture([ObjectDataset("aaa/", decode=as_int, source=source), large], choose=[20, 20])
    with DataLoader(strict, 8, seed=1, collate=list) as loader, pytest.raises(Corrupt, match="aaa/000"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_skipped_moves_nothing_else(large: ShardDataset, workers: int) -> None:
    def numbers(bad: bool) -> list[list[int]]:
        source = MemorySource({f"{n:04d}": b"x" if bad and n % 3 == 0 else b"%d" % n for n in range(30)})
        some = ObjectDataset("aaa/", decode=as_int, source=source, on_error="skip")
        with DataLoader(Mixture([some, large], choose=[30, 30]), 8, seed=1, collate=list, workers=workers) as loader:
            return list(loader)

    whole = [[number for number in batch if number >= 1000 or number % 3] for batch in numbers(False)]
    assert numbers(True) == whole


def test_a_batch_of_which_nothing_is_left_is_an_error_of_its_own() -> None:
    source = MemorySource({"0": b"0", "1": b"1"})

    def gone(item: Item) -> ForebayError:
        return NotFound(f"{item.key} is gone")

    source.fail = gone
    mixture = Mixture([ObjectDataset("aaa/", decode=as_int, source=source, on_error="skip")], repeats=[1])
    with DataLoader(mixture, 2, collate=list) as loader, pytest.raises(Corrupt, match="none of the 2 samples"):
        list(loader)


def test_nonsense_is_refused(small: ObjectDataset) -> None:
    for how in ({}, {"choose": [1], "repeats": [1]}, {"choose": [1, 2]}, {"repeats": [-1]}, {"proportions": [0]}):
        with pytest.raises(Invalid):
            Mixture([small], **how)
    with pytest.raises(Invalid, match="samples= goes with"):
        Mixture([small], repeats=[1], samples=5)
    with pytest.raises(Invalid, match="list cannot be mixed"):
        Mixture([[1, 2]], repeats=[1])  # type: ignore[list-item]
    with pytest.raises(NotFound, match="without a sample"):
        Mixture([small], repeats=[0.01])
    with pytest.raises(TypeError, match="did you mean proportions"):
        Mixture([small], proportion=[1])  # type: ignore[call-arg]
