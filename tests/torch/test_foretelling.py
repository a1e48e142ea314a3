"""The node is told what will be read, in the order in which it will be, by a thread that nobody waits for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.core.errors import Invalid, NotFound, Unavailable
from forebay.core.formats.listing import Listing
from forebay.core.limits import BLOCK_BYTES
from forebay.torch import DataLoader, ObjectDataset, ShardDataset, TokenDataset
from forebay.torch.dataset import block_rows
from forebay.torch.source import Telling
from tests.node.conftest import until
from tests.torch.memory_source import MemorySource, numbered_shard, tokens


class Node(Telling):
    """What a node makes of hints: the future it knows, and how far the job is. `fail` raises instead."""

    def __init__(self, job: str, listing: Listing) -> None:
        self.job, self.listing = job, listing
        self.known: dict[int, tuple[int, int, int]] = {}
        self.pieces: list[tuple[int, int]] = []
        self.position = 0
        self.closed = False
        self.fail: Callable[[str], None] = lambda verb: None

    def future(self, accesses: Any, start: int | None = None, use_bytes: int = 0) -> None:
        self.fail("future")
        assert start is not None
        assert accesses.dtype == np.uint32
        assert start <= max(self.known, default=-1) + 1 or not self.known
        self.known = {number: row for number, row in self.known.items() if number < start}
        self.known.update(enumerate(map(tuple, accesses.tolist()), start))
        self.pieces.append((start, len(accesses)))

    def at(self, position: int) -> None:
        self.fail("at")
        assert position >= self.position
        assert position in self.known, "it would not know what comes next"
        self.position = position

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def nodes(numbers: MemorySource) -> list[Node]:
    """The nodes that were told of `numbers`, one for each time that telling was begun."""
    made: list[Node] = []

    def make(job: str, listing: Listing) -> Node:
        made.append(Node(job, listing))
        return made[-1]

    numbers.told = make
    return made


def order(loader: DataLoader, epoch: int) -> list[int]:
    found: list[int] = loader.schedule.order(epoch).at(np.arange(100)).tolist()
    return found


def objects(node: Node) -> list[int]:
    return [node.known[number][0] for number in sorted(node.known)]


def test_the_node_is_kept_an_epoch_ahead(numbers: MemorySource, nodes: list[Node], closing: list[DataLoader]):
    loader = DataLoader(ObjectDataset("b-1/numbers", source=numbers), 10, seed=3, job="job-1", rank=0, world=1)
    closing.append(loader)
    batches = iter(loader)
    next(batches)
    (node,) = nodes
    until(lambda: len(node.known) >= 100)
    assert objects(node)[:100] == order(loader, 0)
    assert node.job == "job-1"
    for _ in range(4):
        next(batches)
    until(lambda: node.position == 50)
    until(lambda: len(node.known) == 200)
    assert objects(node)[100:] == order(loader, 1)
    list(batches)
    list(loader)
    until(lambda: node.position == 200)
    assert objects(node)[200:] == order(loader, 2)
    loader.close()
    assert node.closed
    assert len(nodes) == 1
    next(iter(loader))
    until(lambda: len(nodes) == 2 and nodes[1].known)
    assert objects(nodes[1])[:5] == order(loader, 2)[:5]


def test_a_jump_is_told_anew(numbers: MemorySource, nodes: list[Node], closing: list[DataLoader]):
    loader = DataLoader(ObjectDataset("b-1/numbers", source=numbers), 10, seed=3)
    closing.append(loader)
    next(iter(loader))
    (node,) = nodes
    until(lambda: node.position == 10)
    loader.set_epoch(40)
    next(iter(loader))
    until(lambda: objects(node)[node.position : node.position + 90] == order(loader, 40)[10:])
    loader.restart()
    next(iter(loader))
    until(lambda: objects(node)[node.position : node.position + 90] == order(loader, 40)[10:])


def test_a_node_that_forgot_is_told_again(numbers: MemorySource, nodes: list[Node], closing: list[DataLoader]):
    loader = DataLoader(ObjectDataset("b-1/numbers", source=numbers), 10, seed=3)
    closing.append(loader)
    batches = iter(loader)
    next(batches)
    (node,) = nodes
    until(lambda: node.position == 10)

    def forgot(verb: str) -> None:
        if verb == "at":
            node.known.clear()
            node.fail = lambda verb: None
            raise NotFound("no such hints: tell the future again", code="NoSuchHints")

    node.fail = forgot
    next(batches)
    until(lambda: node.known and min(node.known) == 20)
    assert objects(node)[:80] == order(loader, 0)[20:]


def test_what_the_node_cannot_take_ends_the_telling_and_nothing_else(
    numbers: MemorySource, nodes: list[Node], closing: list[DataLoader]
):
    def refuse(verb: str) -> None:
        raise Invalid("too many blocks")

    def make(job: str, listing: Listing) -> Node:
        nodes.append(Node(job, listing))
        nodes[-1].fail = refuse
        return nodes[-1]

    numbers.told = make
    loader = DataLoader(ObjectDataset("b-1/numbers", source=numbers), 10)
    closing.append(loader)
    assert sum(len(batch) for batch in loader) == 100
    telling = loader._foretelling
    assert telling is not None
    until(lambda: telling.failed is not None)
    assert sum(len(batch) for batch in loader) == 100


def test_a_node_that_is_away_costs_nothing(numbers: MemorySource, nodes: list[Node], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forebay.torch.foretelling._AWAY_S", 0.01)
    tried: list[str] = []

    def away(verb: str) -> None:
        tried.append(verb)
        if len(tried) < 3:
            raise Unavailable("no node answers")

    def make(job: str, listing: Listing) -> Node:
        nodes.append(Node(job, listing))
        nodes[-1].fail = away
        return nodes[-1]

    numbers.told = make
    with DataLoader(ObjectDataset("b-1/numbers", source=numbers), 10) as loader:
        assert sum(len(batch) for batch in loader) == 100
        until(lambda: nodes[0].known)


def test_only_rank_0_tells_and_only_if_wanted(numbers: MemorySource, nodes: list[Node]):
    dataset = ObjectDataset("b-1/numbers", source=numbers)
    for how in ({"rank": 1, "world": 2}, {"hints": False}):
        with DataLoader(dataset, 10, **how) as loader:  # type: ignore[arg-type]
            next(iter(loader))
    assert not nodes
    loader = DataLoader(dataset, 10)
    batches = iter(loader)
    next(batches)
    del batches, loader
    gc.collect()
    until(lambda: nodes[0].closed)  # it is told to nobody's job


def test_names_of_jobs(numbers: MemorySource, nodes: list[Node], monkeypatch: pytest.MonkeyPatch):
    dataset = ObjectDataset("b-1/numbers", source=numbers)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run/7")
    with DataLoader(dataset, 10) as training, DataLoader(dataset, 10) as validation:
        next(iter(training))
        next(iter(validation))
        assert [node.job for node in nodes] == ["run-7", "run-7-2"], "one must not end what the other told"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with DataLoader(dataset, 10) as loader:
        next(iter(loader))
    assert "none" not in nodes[2].job, "it is what torchrun calls all runs without an id"


# --- which blocks -----------------------------------------------------------------------------------------------------
def test_objects_are_counted_as_the_listing_counts_them():
    sizes = {"a.jpg": 1, "b.txt": 5, "c.jpg": 0, "d.jpg": 2 * BLOCK_BYTES + 1}
    dataset = ObjectDataset("b-1", suffixes=[".jpg"], source=MemorySource({k: bytes(n) for k, n in sizes.items()}))
    assert dataset.accesses(np.array([2, 0, 1])).rows.tolist() == [[3, 0, 3], [0, 0, 1], [2, 0, 1]]
    assert dataset.accesses(np.array([2])).size_bytes == 0, "all of it"


def test_members_and_windows_are_the_blocks_that_they_lie_in():
    shard = numbered_shard(0, 6000)
    assert len(shard) > 2 * BLOCK_BYTES
    shards = ShardDataset("b-1", source=MemorySource({"a.tar": numbered_shard(0, 5), "b.tar": shard}))
    items: list[Any] = []
    shards._source.source.before = items.extend
    indices = np.arange(0, len(shards), 7)
    shards.__getitems__(indices)
    rows, size_bytes = shards.accesses(indices)
    for item, (number, first, end) in zip([i for i in items if i.start != i.end], rows.tolist(), strict=False):
        assert ("a.tar", "b.tar")[number] == item.key
        assert first == item.start // BLOCK_BYTES
        assert end == -(-item.end // BLOCK_BYTES)
    read_bytes = sum(item.end - item.start for item in items)
    assert read_bytes <= size_bytes <= 1.01 * read_bytes
    windows = TokenDataset("b-1", 1000, stride=600_000, source=MemorySource({"a": tokens(100), "b": tokens(9_000_000)}))
    begins = np.arange(len(windows)) * 600_000 * 2
    ends = begins + 2000
    rows, size_bytes = windows.accesses(np.arange(len(windows)))
    assert size_bytes == len(windows) * 2000
    assert rows.tolist() == [
        [1, begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)] for begin, end in zip(begins, ends, strict=True)
    ]


def test_bytes_past_the_end_are_no_blocks():
    dataset = ObjectDataset("b-1", source=MemorySource({"a": bytes(10), "b": b""}))
    both = np.array([0, 1])
    far = both + 5 * BLOCK_BYTES
    assert block_rows(dataset.listing, both, far, far + 1).tolist() == [[0, 0, 1], [1, 0, 1]]


def test_telling_takes_no_time_of_the_loop(numbers: MemorySource, nodes: list[Node]):
    """A node that hangs holds up nobody but the thread that tells it."""
    release: list[bool] = []

    def hang(verb: str) -> None:
        while not release:
            time.sleep(0.01)

    def make(job: str, listing: Listing) -> Node:
        nodes.append(Node(job, listing))
        nodes[-1].fail = hang
        return nodes[-1]

    numbers.told = make
    loader = DataLoader(ObjectDataset("b-1/numbers", source=numbers), 10)
    assert sum(len(batch) for batch in loader) == 100
    release.append(True)
    loader.close()
