"""The node is told the future of a mixture as one future for each dataset, and positions agree with what was read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from forebay.core.errors import NotFound, Unavailable
from forebay.core.formats.listing import Listing
from forebay.core.machines.hints import JOB_NAME_CHARS_MAX
from forebay.torch import DataLoader, Mixture, ObjectDataset
from forebay.torch.dataset import Accesses
from forebay.torch.mixed_telling import TOLD_MAX, MixedTelling, mixed, name_of
from forebay.torch.source import Telling
from tests.patience import until
from tests.torch.memory_source import MemorySource

MANY = 1 << 20


class Job(Telling):
    """What a node keeps of one job. `fail` is raised once, after the call took effect if `late`."""

    def __init__(self, job: str, listing: Listing | None = None) -> None:
        self.job, self.listing = job, listing
        self.known: dict[int, tuple[int, ...]] = {}
        self.used: dict[int, int] = {}
        self.position = 0
        self.closed = False
        self.fail: Exception | None = None
        self.late = False

    def _failing(self) -> None:
        error, self.fail = self.fail, None
        if error is not None:
            raise error

    def future(self, accesses: Any, start: int | None = None, use_bytes: int = 0) -> None:
        if not self.late:
            self._failing()
        assert start is not None
        assert accesses.dtype == np.uint32
        assert accesses.shape[1:] == (3,)
        assert start <= max(self.known, default=start - 1) + 1, "a gap"
        self.known = {number: row for number, row in self.known.items() if number < start}
        self.known.update(enumerate(map(tuple, accesses.tolist()), start))
        self.used.update(dict.fromkeys(range(start, start + len(accesses)), use_bytes))
        self._failing()

    def at(self, position: int) -> None:
        self._failing()
        assert position > self.position, "it would be a call in vain"
        self.position = position

    def close(self) -> None:
        self._failing()
        self.closed = True

    def objects(self) -> list[int]:
        return [row[0] for _, row in sorted(self.known.items())]


def rows(rng: random.Random, sources: int, count: int) -> Any:
    """Accesses of a mixture, each with a number of its own as its object."""
    found = [[rng.randrange(MANY), 0, 1 + rng.randrange(3), rng.randrange(sources), 9] for _ in range(count)]
    return np.asarray(found, np.uint32).reshape(-1, 5)


@pytest.mark.parametrize("seed", range(40))
def test_futures_and_positions_are_those_of_each_dataset_by_itself(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [Job("a"), Job("b"), Job("c")]
    telling = MixedTelling([*jobs[:2], None, jobs[2]])
    story: list[Any] = []  # all accesses, the dumb way
    position = 0
    for _ in range(60):
        if rng.random() < 0.3:
            rng.choice(jobs).fail = Unavailable("away: try again")
            jobs[rng.randrange(3)].late = rng.random() < 0.5
        try:
            if rng.random() < 0.5:
                start = rng.randint(position, len(story)) if rng.random() < 0.4 else len(story)
                more = rows(rng, 4, rng.randrange(20))
                story[start:] = more.tolist()  # also of what failed: it is told again
                while True:
                    try:
                        telling.future(more, start)
                        break
                    except Unavailable:
                        continue
            else:
                position = rng.randint(position, len(story))
                telling.at(position)
        except Unavailable:
            telling.at(position)
        for job in jobs:
            job.fail = None
    telling.at(position)
    for source, job in zip((0, 1, 3), jobs, strict=True):
        assert job.objects() == [row[0] for row in story if row[3] == source]
        assert job.position == sum(row[3] == source for row in story[:position])
    telling.close()
    assert all(job.closed for job in jobs)


def test_bytes_of_a_block_are_counted_for_each_dataset() -> None:
    small = Accesses(np.asarray([[0, 0, 1], [1, 0, 1]], np.uint32), 3000)
    large = Accesses(np.asarray([[7, 0, 2]], np.uint32), 6_000_000)
    accesses = mixed([(np.asarray([0, 2]), 0, small), (np.asarray([1]), 1, large)], 3)
    assert accesses.size_bytes == 6_003_000
    jobs = [Job("a"), Job("b")]
    MixedTelling(jobs).future(accesses.rows)
    assert [set(job.used.values()) for job in jobs] == [{1500}, {3_000_000}]
    assert jobs[0].objects() == [0, 1]


def test_an_error_while_closing_is_raised_when_all_are_closed() -> None:
    jobs = [Job("a"), Job("b")]
    jobs[0].fail = NotFound("there is no such job")
    with pytest.raises(NotFound):
        MixedTelling(jobs).close()
    assert jobs[1].closed


def test_names_of_jobs_fit_a_node_and_differ() -> None:
    long = "x" * 62 + "-2"
    names = {name_of(long, 0), name_of(long, 15), name_of(long[:-1] + "3", 0), name_of("train", 0)}
    assert len(names) == 4
    assert max(map(len, names)) == JOB_NAME_CHARS_MAX
    assert name_of("train", 3) == "train.3"


def numbers(count: int, jobs: list[Job]) -> ObjectDataset:
    source = MemorySource({f"{n:04d}": b"%d" % n for n in range(count)})

    def told(job: str, listing: Listing) -> Job:
        jobs.append(Job(job, listing))
        return jobs[-1]

    source.told = told
    return ObjectDataset("bucket/", source=source)


def test_a_loader_tells_each_dataset_of_a_mixture_what_it_reads_of_it() -> None:
    jobs: list[Job] = []
    mixture = Mixture([numbers(30, jobs), numbers(50, jobs)], choose=[20, 60])
    with DataLoader(mixture, 8, seed=5, job="train", rank=0, world=1) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        until(lambda: len(jobs) == 2 and sum(job.position for job in jobs) == 40 and jobs[0].position > 0)
        order = [loader.schedule.order(number).at(np.arange(80)).tolist() for number in (0, 1)]
        until(lambda: sum(len(job.known) for job in jobs) >= 120)
        for source, job in enumerate(jobs):
            expected = [row[2] for row in order[0] + order[1] if row[0] == source]
            assert job.objects() == expected[: len(job.known)]
            assert job.position == sum(row[0] == source for row in order[0][:40])
        assert sorted(job.job for job in jobs) == ["train.0", "train.1"]
    assert all(job.closed for job in jobs)


def test_of_very_many_datasets_those_with_the_largest_shares_are_told() -> None:
    jobs: list[Job] = []
    count = TOLD_MAX + 4
    mixture = Mixture([numbers(9, jobs) for _ in range(count)], choose=range(count))
    telling = mixture.hints("train")
    assert telling is not None
    assert {job.job for job in jobs} == {f"train.{n}" for n in range(4, count)}
    few = Mixture([numbers(9, []), numbers(9, [])], choose=[0, 9])
    telling = few.hints("train")
    assert isinstance(telling, MixedTelling)
    telling.at(0)
