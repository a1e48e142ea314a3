"""Shards that nobody has read yet: what is read before the first batch, and an order that does without knowing all."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
import random
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.servers import SeaweedFS
from bench.shaper import Shaper
from forebay.core.errors import Corrupt, Invalid, NotFound, Precondition
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.formats.members import MemberIndex
from forebay.core.types import ListEntry
from forebay.torch import BatchSampler, DataLoader, ShardDataset
from forebay.torch.order import Windows, shuffled_blocks
from forebay.torch.source import Facts
from tests.core.archives import tar_of
from tests.node.conftest import NodeProcess
from tests.patience import until
from tests.torch.memory_source import MemorySource, label, numbered_shard
from tests.torch.test_foretelling import Node

SHARD, SHARDS = 25, 40


class Counted(MemorySource):
    """Says of which shards the members were asked for; `waits` holds those of a key back, in forked workers too."""

    asked: list[str] = []
    waits: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Counted, (self.objects,)

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        Counted.asked.append(key)
        if key in Counted.waits:
            assert Counted.waits[key].wait(90)
        return super().members(bucket, key, etag)


@pytest.fixture
def many() -> Counted:
    """SHARDS shards of SHARD samples each, but for some that have none or three."""
    counts = [0 if n % 9 == 4 else 3 if n % 7 == 2 else SHARD for n in range(SHARDS)]
    firsts = [sum(counts[:n]) for n in range(SHARDS)]
    Counted.asked, Counted.waits = [], {}
    return Counted(
        {f"train/{n:03d}.tar": numbered_shard(first, count) for n, (first, count) in enumerate(zip(firsts, counts))}
    )


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of some shards."""
    monkeypatch.setattr("forebay.torch.shards.FIRST_BYTES", 20_000)
    monkeypatch.setattr("forebay.torch.shards.ARRIVING_BYTES", 60_000)


def dataset_of(source: MemorySource, **how: Any) -> ShardDataset:
    return ShardDataset("b-1/train/", transform=label, source=source, **how)


def take(batches: Any, into: list[int]) -> None:
    """As `flat`, keeping what came before an error."""
    for batch in batches:
        into.extend(batch.tolist())


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


# --- windows ---------------------------------------------------------------------------------------------------------
def test_windows_grow_to_a_quarter_of_what_came_before():
    sizes = [10] * 200
    blocks, ends = shuffled_blocks(sizes, 400, 3, 0, 20)
    assert sorted(blocks.tolist()) == list(range(200))
    widths = np.diff(ends, prepend=0).tolist()
    assert widths[:6] == [2, 2, 2, 2, 2, 2]
    assert max(widths) <= 40
    assert all(width <= max(2, before // 4) for width, before in zip(widths, np.cumsum(widths) - widths))
    assert sum(widths) == 200
    assert shuffled_blocks(sizes, 400, None, 0, 20)[0].tolist() == list(range(200))


def test_the_order_of_the_first_epoch_is_the_same_in_every_release():
    """Windows as they are cut, and the head; what follows from them is in the published vectors."""
    sizes = {f"train/{n:02d}.tar": (5 + 7 * n) << 20 for n in range(24)}

    class Sparse(MemorySource):
        def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
            entries = [ListEntry(key, size, "e" * 32, 1.0) for key, size in sizes.items()]
            return Listing(build(bucket, prefix, [pack(entries)]))

    order = DataLoader(ShardDataset("b-1/train", source=Sparse({})), seed=9).schedule.order(0)
    assert isinstance(order, Windows)
    assert order.blocks.tolist() == [
        33,
        57,
        12,
        15,
        16,
        5,
        13,
        20,
        4,
        10,
        6,
        18,
        22,
        17,
        2,
        23,
        0,
        3,
        7,
        19,
        1,
        21,
        11,
        8,
        14,
    ]
    assert order.ends.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 15, 19, 21, 23, 25]


def windows(counts: list[int], asked: list[int], window: int = 0, before: int = 0) -> Windows:
    blocks, ends = shuffled_blocks([10] * len(counts), 40, 7, 3)

    def count(wanted: Any) -> Any:
        asked.extend(wanted.tolist())
        return np.asarray(counts)[wanted]

    return Windows(blocks, ends, count, lambda block, inner: block * 1000 + inner, 7, 3, window, before)


def test_an_order_can_be_had_from_any_window_on_without_those_before_it():
    chance = random.Random(5)
    for _ in range(20):
        counts = [chance.choice([0, 1, 5, 17]) for _ in range(chance.randint(1, 30))]
        whole = windows(counts, [])
        samples = sum(counts)
        expected = whole.at(np.arange(samples)).tolist()
        assert sorted(expected) == [block * 1000 + n for block, count in enumerate(counts) for n in range(count)]
        for position in {chance.randrange(samples) for _ in range(5)} if samples else ():
            asked: list[int] = []
            window, before = whole.window_at(position)
            part = windows(counts, asked, window, before)
            assert part.samples is None
            assert part.at(np.arange(position, samples)).tolist() == expected[position:]
            assert not set(asked) & set(whole.blocks[: whole.ends[window - 1] if window else 0].tolist())
            some = np.asarray(chance.sample(range(samples), min(samples, 9)))
            assert part.at(some).tolist() == [expected[at] for at in some], "those before it too, if they are asked for"


# --- what is asked for -----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("small_windows")
def test_nothing_is_read_before_an_epoch_comes_to_it(many: Counted, closing: list[DataLoader]):
    dataset = dataset_of(many)
    assert Counted.asked == []
    loader = DataLoader(dataset, 4, seed=1)
    closing.append(loader)
    loader.state_dict()
    assert Counted.asked == []
    next(iter(loader))
    assert 0 < len(set(Counted.asked)) < SHARDS / 2
    assert sorted(flat(loader)) == list(range(len(dataset)))
    assert len(Counted.asked) == SHARDS, "each once"
    assert len(flat(loader)) == len(dataset)
    assert len(Counted.asked) == SHARDS


@pytest.mark.usefixtures("small_windows")
def test_batches_that_are_there_are_given_out_while_the_next_window_is_read(many: Counted, closing: list[DataLoader]):
    dataset = dataset_of(many)
    loader = DataLoader(dataset, 4, seed=1, prefetch=4)
    closing.append(loader)
    order = loader.schedule.order(0)
    assert isinstance(order, Windows)
    first = order.of_window(0).tolist()
    for key in many.objects:
        if int(key[6:9]) not in first:
            Counted.waits[key] = multiprocessing.Event()
    batches = iter(loader)
    whole = sum(1 for _ in itertools.islice(batches, (order.reach(1) - 1) // 4))
    assert whole >= 2
    for event in Counted.waits.values():
        event.set()
    assert 4 * whole + len(flat(batches)) == len(dataset)


def test_what_has_no_length_yet_says_so(many: Counted, closing: list[DataLoader], caplog: pytest.LogCaptureFixture):
    loader = DataLoader(dataset_of(many), 4)
    closing.append(loader)
    for sized in (loader, BatchSampler(loader.dataset, 4)):
        with pytest.raises(TypeError, match=r"not known before .* len\(dataset\) first.*counts="):
            len(sized)
    assert len(list(loader)) == -(-len(loader.dataset) // 4), "list() asks for the length, and does without"
    assert not caplog.messages, "it was counted meanwhile"
    again = DataLoader(dataset_of(many), 4)
    closing.append(again)
    assert len(again.dataset) == len(loader.dataset)
    assert "looking into 40 of 40 shards" in caplog.text
    assert len(again) == len(loader)


# --- exact -----------------------------------------------------------------------------------------------------------
Kind = dict[str, Any]
KINDS: list[Kind] = [{}, {"shuffle": "block", "window_bytes": 50_000}, {"shuffle": False}, {"last": "fill"}]


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_any_ranks_workers_and_resumes_read_the_same(many: Counted, closing: list[DataLoader], kind: Kind):
    """Each start has a dataset of its own, which knows nothing, and another number of ranks, and batch."""
    chance = random.Random(11)
    samples = len(dataset_of(many))

    def ranks(world: int, batch: int, state: Any, **how: Any) -> list[DataLoader]:
        made = [
            DataLoader(dataset_of(many), batch, seed=5, rank=rank, world=world, **kind, **how) for rank in range(world)
        ]
        closing.extend(made)
        for loader in made if state else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        return made

    def read(loaders: list[DataLoader], steps: int) -> tuple[list[int], Any]:
        took = [[batch.tolist() for batch in itertools.islice(loader, steps)] for loader in loaders]
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        return [number for step in zip(*took, strict=True) for run in step for number in run], states[0]

    (alone,) = ranks(1, 8, None)
    expected = [flat(alone)[:samples] for _ in range(3)]
    assert [sorted(epoch) for epoch in expected] == [list(range(samples))] * 3
    found: list[list[int]] = [[], [], []]
    state: Any = None
    while not state or state["epoch"] < 3:
        epoch, done = (state["epoch"], state["samples"]) if state else (0, 0)
        world = chance.choice([1, 2, 3])
        how = {"workers": chance.choice([0, 0, 0, 1])}
        took, state = read(ranks(world, chance.choice([1, 3, 8]), state, **how), chance.choice([1, 5, 30, 100]))
        end = state["samples"] if state["epoch"] == epoch else samples
        found[epoch] += took[: end - done]  # but for what fills up the last step
    assert found == expected


@pytest.mark.usefixtures("small_windows")
def test_a_resumed_job_does_not_read_what_lies_before_it(many: Counted, closing: list[DataLoader]):
    loader = DataLoader(dataset_of(many), 4, seed=1)
    closing.append(loader)
    list(itertools.islice(loader, 150))
    state = loader.state_dict()
    assert state["window"] > 3
    order = loader.schedule.order(0)
    assert isinstance(order, Windows)
    passed = {f"train/{block:03d}.tar" for block in order.blocks[: order.ends[state["window"] - 1]].tolist()}
    Counted.asked.clear()
    resumed = DataLoader(dataset_of(many), 4)
    closing.append(resumed)
    resumed.load_state_dict(state)
    assert len(flat(resumed)) == len(loader.dataset) - 600
    assert not passed & set(Counted.asked)


@pytest.mark.usefixtures("small_windows")
def test_a_state_says_which_of_the_two_shuffles_it_was(many: Counted, closing: list[DataLoader]):
    """Also one that was saved before there were two."""
    first = DataLoader(dataset_of(many, index_first=True), 8, seed=5)
    closing.append(first)
    expected = flat(first)
    first.restart(0)
    list(itertools.islice(first, 10))
    state = first.state_dict()
    del state["window"], state["before"]
    state["fingerprint"]["samples"] = len(expected)
    loader = DataLoader(dataset_of(many), 8)
    closing.append(loader)
    assert flat(itertools.islice(loader, 10)) != expected[:80]
    loader.load_state_dict(state)
    assert flat(loader) == expected[80:]
    list(itertools.islice(other := DataLoader(dataset_of(many), 8, seed=5), 10))
    closing.append(other)
    first.load_state_dict(other.state_dict())
    rest = flat(first)
    assert rest == flat(DataLoader(dataset_of(many), 8, seed=5))[80:]
    with pytest.raises(Precondition, match="in windows of 9 bytes"):
        DataLoader(dataset_of(many), 8, window_bytes=9).load_state_dict(other.state_dict())
    with pytest.raises(Precondition, match="in order"):
        DataLoader(dataset_of(many), 8, shuffle=False).load_state_dict(state)


@pytest.mark.usefixtures("small_windows")
def test_later_epochs_are_shuffled_over_all_samples(many: Counted, closing: list[DataLoader]):
    ours, full = (DataLoader(dataset_of(many, index_first=first), 8, seed=5) for first in (False, True))
    closing += [ours, full]
    assert flat(ours) != flat(full)
    assert flat(ours) == flat(full)
    fresh = DataLoader(dataset_of(many), 8, seed=5)
    closing.append(fresh)
    fresh.set_epoch(1)
    full.set_epoch(1)
    assert flat(fresh) == flat(full), "whatever was read before"


# --- a node that holds little ----------------------------------------------------------------------------------------
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(("room", "windows"), [(20_000, 3), (165_000, 4), (None, 5)])
def test_no_more_is_counted_ahead_than_the_node_can_hold(many: Counted, room: int | None, windows: int):
    many.room = room
    dataset = dataset_of(many)
    order = BatchSampler(dataset, 4, shuffle=True).schedule.order(0)
    assert isinstance(order, Windows)
    order.reach(order.reach(order.reach(1) + 1) + 1)  # the head of a shard, the rest of it, and the next
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "forebay-count"])
    found = {int(key[6:9]) for key in Counted.asked}
    assert found == {block % SHARDS for window in range(windows) for block in order.of_window(window).tolist()}
    assert order.is_tight is (room is not None)


def test_what_is_still_read_takes_room_from_what_is_looked_at_ahead():
    blocks, ends = np.arange(8), np.arange(1, 9)  # a window a block, of five samples
    asked: list[tuple[int, list[int]]] = []
    order = Windows(
        blocks,
        ends,
        lambda some: np.full(len(some), 5),
        lambda some, inner: some * 5 + inner,
        7,
        0,
        counted=lambda some: not len(some),
        ahead=lambda some: asked.append((order.next_window - 1, some.tolist())),
        fits=np.minimum(ends + 2, 8),  # three of them
    )
    order.coming = lambda position, window: asked.append((-position, [-window]))
    order.reach(1)
    assert asked == [(0, [0]), (0, [1, 2])]
    order.given(3)  # window 0 is still read
    order.reach(6)
    order.reach(11)
    assert asked[2:] == [(-3, [0]), (1, [2])], "with windows 0 to 2 there is no room for another"
    asked.clear()
    order.given(4)
    assert asked == []
    order.given(5)
    assert asked == [(-5, [-1]), (2, [3])], "window 0 was given out"
    order.given(None)
    assert asked[2:] == [(-10, [-2]), (2, [3, 4])]


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("room", [20_000, 165_000])
def test_a_node_that_holds_few_windows_is_told_of_what_fits_before_that_is_looked_into(
    many: Counted, closing: list[DataLoader], monkeypatch: pytest.MonkeyPatch, room: int, workers: int
):
    nodes: list[Node] = []
    looked: list[tuple[str, set[int]]] = []
    members = Counted.members

    def looking(self: Counted, bucket: str, key: str, etag: str) -> MemberIndex:
        known = nodes[0].known if nodes else {}
        looked.append((key, {row[0] for at, row in known.items() if at >= nodes[0].position}))
        return members(self, bucket, key, etag)

    def make(job: str, listing: Listing) -> Node:
        nodes.append(Node(job, listing))
        return nodes[-1]

    monkeypatch.setattr(Counted, "members", looking)
    monkeypatch.setattr("forebay.torch.foretelling._HEARD_S", 60.0)
    many.room, many.told = room, make
    dataset = dataset_of(many)
    loader = DataLoader(dataset, 4, seed=1, shuffle=True, workers=workers)
    closing.append(loader)
    order = loader.schedule.order(0)
    assert isinstance(order, Windows)
    batches = iter(loader)
    seen = next(batches).tolist()
    until(lambda: nodes and nodes[0].known)
    for batch in batches:
        seen += batch.tolist()
    assert sorted(seen) == list(range(len(dataset)))
    begins = [0, *order.ends[:-1].tolist()]
    fits = [set((order.blocks[begin : order.end_after(at)] % SHARDS).tolist()) for at, begin in enumerate(begins)]
    later = [(int(key[6:9]), known) for key, known in looked if known]
    assert len(later) >= len(fits) - 4
    for shard, known in later:
        assert shard in known
        assert known in fits


@pytest.mark.usefixtures("small_windows")
def test_windows_of_the_first_epoch_fit_the_node_and_a_state_says_how_large_they_were(
    many: Counted, closing: list[DataLoader], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forebay.torch.choosing._WINDOW_BYTES_MIN", 1)

    def loader() -> DataLoader:
        closing.append(DataLoader(dataset_of(many), 8, seed=5, shuffle=True))
        return closing[-1]

    monkeypatch.setattr("forebay.torch.shards.ARRIVING_BYTES", 1_000_000)
    many.room = 40_000
    first = loader()
    assert first.schedule.window_bytes == 8192
    whole = flat(first)
    first.restart(0)
    list(itertools.islice(first, 10))
    many.room = None
    again = loader()
    assert flat(again) != whole
    again.load_state_dict(first.state_dict())
    assert flat(again) == whole[80:]
    assert again.state_dict()["fingerprint"]["shape"] == first.state_dict()["fingerprint"]["shape"]


# --- what goes wrong -------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_an_error_where_it_comes_and_after_it_was_mended_the_loop_goes_on(
    many: Counted, closing: list[DataLoader], workers: int
):
    expected = flat(DataLoader(dataset_of(many), 8, seed=5))
    order = DataLoader(dataset_of(many), 8, seed=5).schedule.order(0)
    assert isinstance(order, Windows)
    shard = next(block for block in order.blocks[20:].tolist() if len(many.objects[f"train/{block:03d}.tar"]) > 9000)
    key = f"train/{shard:03d}.tar"
    whole = many.objects[key]
    many.objects[key] = whole[: 2 * 512 + 100] + b"x" * (len(whole) - 2 * 512 - 100)
    loader = DataLoader(dataset_of(many), 8, seed=5, workers=workers)
    closing.append(loader)
    took: list[int] = []
    with pytest.raises(Corrupt, match=r"epoch 0, after \d+ samples: "):
        take(loader, took)
    assert took
    assert took == expected[: len(took)]
    skipping = DataLoader(dataset_of(many, on_error="skip"), 8, seed=5, workers=workers)
    closing.append(skipping)
    assert len(flat(skipping)) == len(expected) - SHARD
    assert list(skipping.dataset.damaged) == [key]


def test_an_epoch_without_a_step_is_an_error(many: Counted, closing: list[DataLoader]):
    loader = DataLoader(dataset_of(many), 5000, last="drop")
    closing.append(loader)
    with pytest.raises(Invalid, match=r"samples are not one step of 5000"):
        next(iter(loader))
    nothing = DataLoader(dataset_of(Counted({"train/0.tar": tar_of([("noextension", b"1")])})), 5)
    closing.append(nothing)
    with pytest.raises(NotFound, match="hold no samples: their members have no names"):
        next(iter(nothing))


# --- counts that are told --------------------------------------------------------------------------------------------
def told(many: Counted) -> dict[str, int]:
    counts = dataset_of(many, index_first=True).all_counts().tolist()
    return {key.removeprefix("train/"): count for key, count in zip(sorted(many.objects), counts, strict=True)}


def test_counts_may_be_told(many: Counted, closing: list[DataLoader]):
    counts = told(many)
    Counted.asked.clear()
    loader = DataLoader(dataset_of(many, counts=counts), 8)
    closing.append(loader)
    assert len(loader.dataset) == sum(counts.values())
    assert len(loader) == -(-len(loader.dataset) // 8)
    assert Counted.asked == []
    assert len(flat(loader)) == len(loader.dataset)
    with pytest.raises(Invalid, match=r"nothing of train/003\.tar"):
        dataset_of(many, counts={name: n for name, n in counts.items() if name != "003.tar"})
    wrong = DataLoader(dataset_of(many, counts=counts | {"003.tar": 24}), 8)
    closing.append(wrong)
    with pytest.raises(Invalid, match=r"train/003\.tar holds 25 samples, and 24 were told"):
        flat(wrong)


def test_an_index_of_wids_beside_the_shards_is_used(many: Counted):
    counts = told(many)
    shards = [{"url": f"gs://elsewhere/{name}", "nsamples": n, "filesize": 9} for name, n in counts.items()]
    many.objects["train/shardindex.json"] = json.dumps({"wids_version": 1, "shardlist": shards}).encode()
    Counted.asked.clear()
    assert len(dataset_of(many)) == sum(counts.values())
    assert Counted.asked == []
    assert len(dataset_of(many, counts={})) == sum(counts.values())
    assert len(Counted.asked) == SHARDS
    many.objects["train/shardindex.json"] = b"{}"
    assert len(dataset_of(many)) == sum(counts.values())


def beside(source: MemorySource) -> dict[str, bytes]:
    """DALI's index of each shard, as wds2idx writes it."""
    found = {}
    for key in [key for key in source.objects if key.endswith(".tar")]:
        index = MemorySource.members(source, "b-1", key, "")
        members = [index.member(number) for number in range(len(index))]
        parts = [f"{each.name.partition('.')[2]} {each.start} {each.size_bytes} {each.name}" for each in members]
        lines = [" ".join(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        found[key.removesuffix("tar") + "idx"] = "\n".join([f"v1.2 {len(lines)}", *lines, ""]).encode()
    return found


def test_indexes_of_dali_beside_the_shards_are_used(many: Counted, closing: list[DataLoader]):
    def run() -> list[int]:
        closing.append(DataLoader(dataset_of(many), 8, seed=3))
        return flat(closing[-1])

    without = run()
    many.objects |= {key: data for key, data in beside(many).items() if key != "train/005.idx"}
    Counted.asked.clear()
    read: list[int] = []
    many.before = lambda items: read.extend(item.end - item.start for item in items if item.end)
    assert run() == without, "the order is the same"
    empty = {f"train/{n:03d}.tar" for n in range(SHARDS) if n % 9 == 4}
    assert set(Counted.asked) == empty | {"train/005.tar"}, "of which nothing is said"
    assert max(read) < len(many.objects["train/000.tar"]) / 2


@pytest.mark.parametrize("wrong", ["another shard's", "cut", "shifted", "old", "text"])
def test_an_index_of_dali_that_is_not_of_its_shard_is_not_believed(
    many: Counted, caplog: pytest.LogCaptureFixture, wrong: str
):
    indexes = beside(many)
    own = indexes["train/000.idx"]
    many.objects["train/000.idx"] = {
        "another shard's": indexes["train/001.idx"],
        "cut": b"v1.2 24\n" + b"\n".join(own.splitlines()[1:-1]),  # a sample was appended since
        "shifted": own.replace(b"512", b"500"),
        "old": own.replace(b"v1.2", b"v1.1"),
        "text": b"anything",
    }[wrong]
    Counted.asked.clear()
    assert list(dataset_of(many, keys=["train/000.tar"])) == list(range(SHARD))
    assert Counted.asked == ["train/000.tar"]
    assert ("not of train/000.tar as it is now" in caplog.text) == (wrong in ("another shard's", "cut"))


# --- the head of the first shard -------------------------------------------------------------------------------------
@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Three shards that are large beside FIRST_BYTES."""
    monkeypatch.setattr("forebay.torch.shards.FIRST_BYTES", 30_000)
    monkeypatch.setattr("forebay.torch.shards.ARRIVING_BYTES", 60_000)
    Counted.asked, Counted.waits = [], {}
    return Counted({f"train/{n}.tar": numbered_shard(200 * n, 200) for n in range(3)})


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_batches_need_no_more_than_the_head_of_a_shard(
    large: Counted, closing: list[DataLoader], workers: int
):
    read: list[tuple[str, int, int | None]] = []
    large.before = lambda items: read.extend((item.key, item.start, item.end) for item in items)
    Counted.waits = {key: multiprocessing.Event() for key in large.objects}
    dataset = dataset_of(large)
    loader = DataLoader(dataset, 4, seed=1, workers=workers, prefetch=8)
    closing.append(loader)
    batches = iter(loader)
    first = flat([next(batches)])
    assert len(set(first)) == 4
    for event in Counted.waits.values():
        event.set()
    assert sorted(first + flat(batches)) == list(range(600))
    assert len(flat(loader)) == 600
    for how in ({"shuffle": False}, {"rank": 1, "world": 2, "shuffle": False}):
        other = DataLoader(dataset_of(large), 3, **how)  # type: ignore[arg-type]
        closing.append(other)
        rank, world = other.schedule.rank, other.schedule.world
        runs = [list(range(at + 3 * rank, at + 3 * rank + 3)) for at in range(0, 600, 3 * world)]
        assert [batch.tolist() for batch in other] == runs


def test_a_head_ends_where_its_last_sample_does(large: Counted):
    """Whatever lies at the cut: before, in and after any member, the samples of both parts are those of the whole."""
    source = MemorySource({"0.tar": tar_of([(f"{n}.{part}", b"%d" % n * 300) for n in range(40) for part in "abc"])})
    whole = ShardDataset("b-1", source=source, index_first=True)
    layout = whole._layout(0, Facts())
    for cut in range(512, 20_000, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("forebay.torch.shards.FIRST_BYTES", cut)
            dataset = ShardDataset("b-1", source=source)
            head = dataset._layout(1, Facts())
            firsts = [layout.offsets[layout.ends[n - 1] if n else 0] for n in range(40)]
            assert head.samples == sum(first < cut for first in firsts)
            assert head == layout.first(head.samples)._replace(extensions=head.extensions)
            assert head.extensions == layout.extensions[: len(head.extensions)]
            dataset._check_head(0)


def test_samples_whose_members_lie_apart_are_found_out(large: Counted, closing: list[DataLoader]):
    names = [f"{n:04d}.{part}" for part in ("bin", "cls") for n in range(100)]
    source = MemorySource({f"train/{n}.tar": tar_of([(name, b"7" * 700) for name in names]) for n in range(2)})
    with pytest.raises(Invalid, match=r"members of one sample lie far apart in train/\d\.tar: pass index_first"):
        list(DataLoader(ShardDataset("b-1/train", source=source, decode={}), 4, collate=len))
    whole = DataLoader(ShardDataset("b-1/train", source=source, decode={}, index_first=True), 4, collate=len)
    closing.append(whole)
    assert sum(whole) == 200


def test_a_shard_that_is_damaged_has_no_head_either(large: Counted, closing: list[DataLoader]):
    for key in list(large.objects):
        large.objects[key] = large.objects[key][:20_000] + b"x" * 50_000 if key == "train/1.tar" else large.objects[key]
    for seed in range(3):
        loader = DataLoader(dataset_of(large, on_error="skip"), 4, seed=seed)
        closing.append(loader)
        assert sorted(flat(loader)) == [*range(200), *range(400, 600)]
        assert list(loader.dataset.damaged) == ["train/1.tar"]
    large.objects["train/1.tar"] = numbered_shard(200, 200)[:90_000] + b"x" * 50_000
    heads = []
    for seed in range(3):
        loader = DataLoader(dataset_of(large, on_error="skip"), 4, seed=seed)
        closing.append(loader)
        found = sorted(flat(loader))
        heads.append([number for number in found if 200 <= number < 400])
        assert [number for number in found if number not in heads[-1]] == [*range(200), *range(400, 600)]
        assert heads[-1] == list(range(200, 200 + len(heads[-1]))), "what was given out before it showed"


# --- other processes -------------------------------------------------------------------------------------------------
def test_a_copy_of_what_is_half_known_finds_out_the_rest(many: Counted):
    dataset = dataset_of(many)
    numbers = [dataset[n] for n in (0, 400)]
    fresh = pickle.loads(pickle.dumps(dataset_of(many)))
    assert [fresh[n] for n in (0, 400)] == numbers
    assert fresh.fingerprint == dataset.fingerprint


# --- a real node -----------------------------------------------------------------------------------------------------
FAR, FAR_BYTES = 8, 12 << 20


@pytest.mark.real
@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_reads_what_it_is_about_to_read_and_all_of_it_once(
    seaweed: SeaweedFS, tmp_path: Path, closing: list[DataLoader], monkeypatch: pytest.MonkeyPatch, workers: int
):
    monkeypatch.setattr("forebay.torch.shards.FIRST_BYTES", 4 << 20)
    bucket = f"cold-shards-{workers}"
    seaweed.create_bucket(bucket)
    total = 0
    for number in range(FAR):
        parts = [(f"{number}-{n:03d}.bin", bytes([n]) * 50_000) for n in range(FAR_BYTES // 50_000)]
        data = tar_of(parts)
        total += len(data)
        request = urllib.request.Request(f"{seaweed.endpoint}/{bucket}/train/{number}.tar", data, method="PUT")
        with urllib.request.urlopen(request, timeout=60):
            pass
    node = NodeProcess(tmp_path / "node-0", "--fronts", "1")
    with Shaper(seaweed.endpoint) as link:
        node.start()
        try:
            node.add_bucket("far", f"s3://{bucket}", **(seaweed.options() | {"endpoint": link.endpoint}))
            before = link.counters()["response_bytes"]

            def sent() -> int:
                return link.counters()["response_bytes"] - before

            dataset = ShardDataset("far/train/", decode={}, url=node.endpoint)
            assert sent() < 64 * 1024, "it lists"
            loader = DataLoader(dataset, 8, seed=3, workers=workers, collate=names, hints=False)
            closing.append(loader)
            batches = iter(loader)
            found = list(next(batches))
            assert sent() < total / 2, "the head of a shard, and two windows after it, however long that took"
            found += [name for batch in batches for name in batch]
            assert len(set(found)) == len(found) == len(dataset)
            assert total <= sent() <= 1.02 * total
            for batch in loader:
                assert batch
            assert sent() <= 1.02 * total
            again = ShardDataset("far/train/", decode={}, url=node.endpoint)
            assert len(again) == len(dataset)
            assert sent() <= 1.02 * total, "what was found out stays at the node"
        finally:
            node.stop()


def names(samples: list[dict[str, Any]]) -> list[str]:
    for sample in samples:
        assert sample["bin"] == bytes([int(sample["__key__"].partition("-")[2])]) * 50_000
    return [sample["__key__"] for sample in samples]
