"""Who takes which positions: everybody the same number of steps, and every position once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.torch.partition import Last, Partition


def taken(samples: int, start: int, batch: int, world: int, last: Last) -> list[list[list[int]]]:
    """By step and rank: the positions."""
    ranks = [Partition.of(samples, start, batch, rank, world, last) for rank in range(world)]
    assert len({partition.steps for partition in ranks}) == 1
    steps = []
    for step in range(ranks[0].steps):
        runs = [partition.run(step) for partition in ranks]
        assert len({run.consumed for run in runs}) == 1
        steps.append([[position % samples for position in range(run.first, run.first + run.size)] for run in runs])
    return steps


numbers = st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(1, 7), st.integers(1, 5))


@given(numbers)
@settings(max_examples=150, deadline=None)
def test_the_end_of_an_epoch_is_as_was_chosen(numbers: tuple[int, int, int, int]):
    samples, start, batch, world = numbers
    start = min(start, samples)
    whole = batch * world
    left = list(range(start, samples))
    for last in ("short", "drop", "fill"):
        steps = taken(samples, start, batch, world, last)
        flat = [position for step in steps for run in step for position in run]
        assert all(run for step in steps for run in step), "no rank is without samples"
        match last:
            case "drop":
                assert flat == left[: len(left) // whole * whole]
            case "fill":
                assert flat[: len(left)] == left
                assert len(flat) % whole == 0
                assert len(flat) - len(left) < whole
                assert flat[len(left) :] == [
                    position % samples for position in range(samples, samples + len(flat) - len(left))
                ]
            case "short":
                repeated = Counter(flat) - Counter(left)
                assert Counter(flat) >= Counter(left)
                assert sum(repeated.values()) < world
                assert not repeated or len(left) % whole < world
                sizes = [len(run) for run in steps[-1]] if steps else [0]
                assert max(sizes) - min(sizes) <= 1


def test_ranks_take_consecutive_runs_of_a_step():
    assert taken(10, 0, 2, 2, "short") == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    assert taken(10, 0, 2, 2, "drop") == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert taken(10, 0, 2, 2, "fill")[-1] == [[8, 9], [0, 1]]


def test_a_run_that_resumes_elsewhere_takes_what_is_left_in_the_same_order():
    for world, batch in ((1, 3), (2, 2), (4, 1), (3, 5)):
        steps = taken(23, 7, batch, world, "short")
        assert [p for step in steps for run in step for p in run][: 23 - 7] == list(range(7, 23))


def test_fewer_samples_than_ranks():
    assert taken(2, 0, 4, 3, "short") == [[[0], [1], [0]]]
    assert taken(1, 0, 1, 3, "fill") == [[[0], [0], [0]]]
    assert taken(2, 0, 4, 3, "drop") == []


def test_nothing_left_is_no_step():
    for last in ("short", "drop", "fill"):
        assert Partition.of(0, 0, 4, 0, 1, last).steps == 0
        assert Partition.of(5, 5, 4, 0, 1, last).steps == 0


def test_consumed_is_what_all_ranks_have_taken_together():
    partition = Partition.of(10, 1, 2, 1, 2, "fill")
    assert [partition.run(step).consumed for step in range(partition.steps)] == [5, 9, 10]


@pytest.mark.parametrize(
    "numbers", [(5, 0, 0, 0, 1), (5, 0, 1, 1, 1), (5, 0, 1, 0, 0), (5, 6, 1, 0, 1), (5, -1, 1, 0, 1)]
)
def test_numbers_that_make_no_sense_are_refused(numbers: tuple[int, int, int, int, int]):
    with pytest.raises(Invalid):
        Partition.of(*numbers, "short")


def test_an_unknown_end_is_refused():
    with pytest.raises(Invalid, match="'short', 'drop' or 'fill'"):
        Partition.of(5, 0, 1, 0, 1, "keep")  # type: ignore[arg-type]
