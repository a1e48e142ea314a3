"""Where the user does not say how to shuffle: windows if the node cannot hold the data, and the same for all ranks."""

from __future__ import annotations

import logging

import pytest
from torch import distributed

from forebay.core.errors import Precondition
from forebay.torch import BatchSampler, DataLoader, ObjectDataset, ShardDataset, TokenDataset, choosing
from forebay.torch.choosing import agreed, chosen_window, window_for
from tests.patience import until
from tests.torch.memory_source import MemorySource, as_int, label, tokens

GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_said", set())


def flat(loader: DataLoader) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def test_a_window_is_a_quarter_of_the_room_at_most():
    assert window_for(10 * GIB, 10 * GIB, 4 * GIB) == 0, "it fits"
    assert window_for(10 * GIB, None, 4 * GIB) == 0, "nobody knows"
    assert window_for(11 * GIB, 10 * GIB, 4 * GIB) == 2 * GIB
    assert window_for(11 * GIB, 8 * GIB + 12345, 4 * GIB) == 2 * GIB, "a little more room makes no other order"
    assert window_for(99 * GIB, 90 * GIB, 4 * GIB) == 4 * GIB
    assert window_for(10 * GIB, 0, 4 * GIB) == 1 << 20


def test_data_that_does_not_fit_is_shuffled_in_windows_which_is_said_once(
    shards: MemorySource, closing: list[DataLoader], caplog: pytest.LogCaptureFixture
):
    dataset = ShardDataset("b-1/train", transform=label, source=shards)
    assert DataLoader(dataset).schedule.shuffle is True
    shards.room = dataset.listing.size_bytes - 1
    with caplog.at_level(logging.WARNING, "forebay.torch"):
        loader = DataLoader(dataset, 7, seed=1)
        closing.append(loader)
        DataLoader(dataset, 3)
    assert loader.schedule.shuffle == "block"
    [said] = [record.getMessage() for record in caplog.records]
    assert "b-1/train is" in said
    assert "more than the node can hold" in said
    assert "say shuffle= to choose" in said
    assert DataLoader(dataset, shuffle=True).schedule.shuffle is True, "who says it gets it"
    epochs = [flat(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))


def test_data_that_fits_the_cluster_is_shuffled_over_all_samples(
    shards: MemorySource, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    dataset = ShardDataset("b-1/train", transform=label, source=shards)
    size_bytes, holds = dataset.listing.size_bytes, [0]
    own = size_bytes // 2

    def room_bytes(bucket: str, *, cluster: bool = False) -> int:
        return holds[0] if cluster else own

    monkeypatch.setattr(shards, "room_bytes", room_bytes)
    with caplog.at_level(logging.WARNING, "forebay.torch"):
        holds[0] = size_bytes
        assert DataLoader(dataset).schedule.shuffle is True
        assert not caplog.records
        holds[0] = size_bytes - 1
        assert DataLoader(dataset).schedule.shuffle == "block"
    assert "more than the cluster can hold" in caplog.text


@pytest.mark.parametrize(("room_bytes", "ahead"), [(30, 1), (130, 2), (None, 4)])
def test_no_more_is_made_ahead_than_a_part_of_what_the_node_holds(
    numbers: MemorySource, closing: list[DataLoader], room_bytes: int | None, ahead: int
):
    """A hundred samples of 190 bytes together, in batches of 8."""
    numbers.room = room_bytes
    loader = DataLoader(ObjectDataset("b-1/numbers", decode=as_int, source=numbers), 8, seed=1, hints=False)
    closing.append(loader)
    for given, _ in enumerate(loader):
        until(lambda given=given: len(numbers.batches) == min(13, given + ahead))  # type: ignore[misc]
    assert sum(numbers.batches) == 100


@pytest.mark.parametrize("kind", ["objects", "shards", "tokens"])
def test_a_job_goes_on_as_it_began_whatever_the_node_holds_now(
    numbers: MemorySource, shards: MemorySource, closing: list[DataLoader], kind: str
):
    source = {"objects": numbers, "shards": shards, "tokens": MemorySource({"text/0": tokens(2000)})}[kind]
    if kind == "objects":
        dataset = ObjectDataset("b-1/numbers", decode=as_int, source=source)
    elif kind == "shards":
        dataset = ShardDataset("b-1/train", transform=label, source=source)
    else:
        dataset = TokenDataset("b-1/text", 20, source=source)

    def loader(**how: object) -> DataLoader:
        closing.append(DataLoader(dataset, 8, seed=4, **how))  # type: ignore[arg-type]
        return closing[-1]

    for before, after in ((100, None), (None, 100)):
        source.room = before
        first = loader()
        whole = [batch.tolist() for batch in first]
        again = loader()
        batches = iter(again)
        assert [next(batches).tolist() for _ in range(3)] == whole[:3]
        state = again.state_dict()
        source.room = after
        resumed = loader()
        assert resumed.schedule.shuffle != first.schedule.shuffle
        resumed.load_state_dict(state)
        assert resumed.schedule.shuffle == first.schedule.shuffle
        assert [batch.tolist() for batch in resumed] == whole[3:]
        assert resumed.state_dict()["fingerprint"]["shape"] == state["fingerprint"]["shape"]
    with pytest.raises(Precondition):
        loader(shuffle=False).load_state_dict(state)


def test_ranks_whose_nodes_differ_do_as_the_first_of_them(shards: MemorySource, monkeypatch: pytest.MonkeyPatch):
    dataset = ShardDataset("b-1/train", source=shards)
    assert agreed("x", 5) == 0, "nobody to agree with"
    shards.room = 100
    assert chosen_window(dataset, 1 << 32, 2) == 0
    store = distributed.HashStore()
    monkeypatch.setattr(choosing, "_store", lambda: store)
    assert chosen_window(dataset, 1 << 32, 2) == 1 << 20
    shards.room = None
    assert chosen_window(dataset, 1 << 32, 2) == 1 << 20, "its own node would hold all"
    assert chosen_window(dataset, 1 << 32, 1) == 0
    sampler = BatchSampler(dataset, 2, rank=1, world=2)
    assert sampler.schedule.shuffle == "block"


def test_torchs_store_is_where_ranks_agree():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert agreed("y", 5) == 5
        assert agreed("y", 0) == 5
    finally:
        distributed.destroy_process_group()
