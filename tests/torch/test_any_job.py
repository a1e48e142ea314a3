"""Jobs of every kind of dataset, stopped anywhere and begun again with other ranks, workers and batches.

The oracle is one rank with batches of one that nobody stops: what all ranks together were given must be that, sample by
sample, once an epoch. A job's numbers come from one number, which hypothesis draws and prints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.torch import (
    DataLoader,
    LitDataset,
    MdsDataset,
    Mixture,
    ObjectDataset,
    ParquetDataset,
    ShardDataset,
    TokenDataset,
)
from tests.torch import test_litdata, test_mds, test_parquet
from tests.torch.memory_source import MemorySource, numbered_shard, tokens

Make = Callable[[], Any]  # the dataset, anew as a process that begins makes it


def number_of_object(key: str, data: Any) -> tuple[str, int]:
    return "object", int(bytes(data))


def number_in_shard(sample: dict[str, Any]) -> tuple[str, int]:
    return "member", sample["cls"]


def number_in_mds(sample: dict[str, Any]) -> tuple[str, int]:
    return "mds", sample["number"]


def number_in_chunk(sample: dict[str, Any]) -> tuple[str, int]:
    return "litdata", sample["i"]


def number_of_row(sample: dict[str, Any]) -> tuple[str, int]:
    return "row", sample["number"]


def number_of_window(_tokens: Any, index: int) -> tuple[str, int]:
    return "window", index


def even(name: str) -> bool:
    return int(name) % 2 == 0


def objects(chance: random.Random) -> Make:
    count = chance.choice([1, 2, 7, 101])
    source = MemorySource({f"n/{n:05d}": b"%d" % n for n in range(count)})
    keys = chance.choice([None, [f"n/{n:05d}" for n in range(0, count, 2)]])
    return lambda: ObjectDataset("b-1/n/", decode=number_of_object, source=source, keys=keys)


def shards(chance: random.Random) -> Make:
    counts = [chance.choice([0, 1, 3, 10, 40]) for _ in range(chance.randint(0, 8))] + [chance.choice([2, 30])]
    bodies = {f"t/{n}.tar": numbered_shard(sum(counts[:n]), count) for n, count in enumerate(counts)}
    told = {f"{n}.tar": count for n, count in enumerate(counts)}
    how = chance.choice(
        [{}, {"index_first": True}, {"counts": told}, {"parts": ["cls"]}, {"filter": even}, {"on_error": "skip"}]
    )
    if "on_error" in how and len(counts) > 1:  # the last has samples
        bodies["t/0.tar"] = b"no archive" * 100
    source = MemorySource(bodies)
    source.cold = chance.choice([0, 1])
    return lambda: ShardDataset("b-1/t/", transform=number_in_shard, source=source, **how)


def windows(chance: random.Random) -> Make:
    files = {f"x/{n}": tokens(chance.choice([0, 50, 95, 400])) for n in range(chance.randint(0, 4))}
    source = MemorySource(files | {"x/9": tokens(300)})
    how: dict[str, Any] = {"stride": chance.choice([None, 10, 40]), "straddle": chance.random() < 0.5}
    return lambda: TokenDataset("b-1/x/", 20, transform=number_of_window, source=source, **how)


def mds(chance: random.Random) -> Make:
    source = test_mds.written(shards=chance.randint(1, 4), each=chance.choice([1, 25]), packed=chance.random() < 0.3)
    return lambda: MdsDataset("b-1/train/", transform=number_in_mds, source=source)


def chunks(chance: random.Random) -> Make:
    source = test_litdata.written(packed=chance.random() < 0.3)
    return lambda: LitDataset("b-1/lit/", transform=number_in_chunk, source=source)


def rows(chance: random.Random) -> Make:
    source, size_bytes = test_parquet.written(), chance.choice([1, 120_000, 1 << 28])
    return lambda: ParquetDataset("b-1/rows/", transform=number_of_row, source=source, window_bytes=size_bytes)


def mixture(chance: random.Random) -> Make:
    parts = [kind(chance) for kind in chance.sample([objects, shards, windows, mds, chunks], chance.randint(1, 3))]
    how = chance.choice(["proportions", "repeats", "choose"])
    shares = [chance.choice({"proportions": [1, 2, 5], "repeats": [1, 2.5], "choose": [1, 20, 77]}[how]) for _ in parts]
    return lambda: Mixture([part() for part in parts], **{how: shares})


KINDS = [objects, shards, shards, windows, mds, chunks, rows, mixture, mixture]
BATCHES: list[dict[str, Any]] = [{"batch_size": size} for size in (1, 2, 5, 8, 16)]
BATCHES_BY_BYTES = [{"batch_size": size, "batch_bytes": limit} for size in (2, 16) for limit in (1, 50, 500, 10**9)]


class Job:
    """What all ranks were given up to the last saved state."""

    def __init__(self, epochs: int, samples: int, state: dict[str, Any]) -> None:
        self.epochs, self.samples, self.state = epochs, samples, state
        self.given: list[list[Any]] = [[] for _ in range(epochs)]

    @property
    def over(self) -> bool:
        return bool(self.state["epoch"] >= self.epochs)

    def run(self, ranks: list[DataLoader], steps: int) -> None:
        """Some steps of all ranks together, from the saved state on; at most to the end of the job."""
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(self.state)))
        left = steps
        while left and not self.over:
            loops = [iter(rank) for rank in ranks]
            while left:
                batches = [next(loop, None) for loop in loops]
                ended = {batch is None for batch in batches}
                assert len(ended) == 1, "all ranks have as many steps"
                if ended == {True}:
                    break
                states = [rank.state_dict() for rank in ranks]
                assert all(state == states[0] for state in states)
                self._took([sample for batch in batches for sample in batch], states[0])  # type: ignore[union-attr]
                left -= 1
            for loop in loops:
                loop.close()  # type: ignore[attr-defined]

    def _took(self, samples: list[Any], after: dict[str, Any]) -> None:
        """In the last step of an epoch ranks without a sample are given one from its start."""
        epoch, place = self.state["epoch"], self.state["samples"]
        consumed = (after["samples"] if after["epoch"] == epoch else self.samples) - place
        assert 0 < consumed <= len(samples)
        assert consumed == len(samples) or after["epoch"] > epoch
        self.given[epoch] += samples[:consumed]
        self.state = after


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_a_job_that_is_stopped_anywhere_sees_what_one_rank_sees_that_is_not(number: int) -> None:
    chance = random.Random(number)
    make = chance.choice(KINDS)(chance)
    shared: dict[str, Any] = {
        "seed": chance.randrange(1 << 40),
        "shuffle": chance.choice([True, "block", False, "auto"]),
        "window_bytes": chance.choice([1, 2000, 100_000, 4 << 30]),
        "collate": list,
    }
    with DataLoader(make(), 1, rank=0, world=1, **shared) as alone:
        began = alone.state_dict()
        epochs = [[sample for batch in alone for sample in batch] for _ in range(chance.choice([1, 2, 3]))]
    sizes = chance.choice([BATCHES, BATCHES, BATCHES_BY_BYTES])
    job = Job(len(epochs), len(epochs[0]), began)
    for start in range(100):
        world, workers = chance.choice([1, 1, 2, 3, 4]), chance.choice([0] * 15 + [1])
        how = shared | chance.choice(sizes) | {"workers": workers, "prefetch": chance.choice([1, 4])}
        ranks = [DataLoader(make(), rank=rank, world=world, **how) for rank in range(world)]
        try:
            if start % 3 == 0:  # a look at the first batch costs nothing
                next(iter(ranks[0]))
            job.run(ranks, chance.choice([1, 2, 5, 30]) if start < 6 else 10**9)
        finally:
            for rank in ranks:
                rank.close()
        if job.over:
            break
    assert job.given == epochs
