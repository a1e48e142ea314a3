"""Replayed steps: what they wait for, and that their books are right."""

import numpy as np
import pytest

from forebay.core.errors import Invalid
from forebay.offload.planning.choose import whole_layer
from forebay.offload.planning.hardware import Hardware, Tier
from forebay.offload.planning.plan import RANKS, Move, Plan, Rank, hoisted, plan
from forebay.offload.planning.replay import Replayed, replay
from forebay.offload.planning.trace import TensorSaid, Trace, build
from tests.torch.offload.traces import MIB, budget_of, layered, randomly


def machine(budget_bytes: int, bytes_s: float = 1e9, latency_s: float = 0.0) -> Hardware:
    return Hardware(
        budget_bytes,
        disk_bytes=1 << 40,
        disk_write_bytes_s=bytes_s,
        disk_read_bytes_s=bytes_s,
        latency_s=latency_s,
    )


def three(gap_s: float = 1.0) -> Trace:
    """One tensor that is used at the start and at the end, with a gap; 100 MB."""
    operators = [("make", 0.1, 0), ("gap", gap_s, 0), ("use", 0.1, 0)]
    points = [("step", 0), ("gap", 1), ("use", 2)]
    return build("three", operators, points, [TensorSaid("one", "activation", 100_000_000, [0, 2], [0])])


def moved(load: int = 2, *, stores: bool = True) -> tuple[Move, ...]:
    return (Move(0, Tier.DISK, 0, 1, 1, load, 2, stores),)


def run(trace: Trace, hardware: Hardware, moves: tuple[Move, ...] = ()) -> Replayed:
    return replay(trace, Plan("by hand", moves, trace.need_bytes(), hardware))


# --- by hand ---------------------------------------------------------------------------------------------------------
def test_without_moves_a_step_that_fits_takes_its_compute() -> None:
    trace = three()
    ran = run(trace, machine(200_000_000))
    assert ran.step_s == pytest.approx(1.2)
    assert ran.stalls == ()
    assert ran.peak_bytes == 100_000_000


def test_a_load_that_begins_late_is_waited_for_by_its_operator() -> None:
    ran = run(three(), machine(200_000_000), moved())
    assert ran.step_s == pytest.approx(1.3)  # 100 MB at 1 GB/s, with nothing to hide it
    (stall,) = ran.stalls
    assert (stall.operator, stall.tensor) == (2, 0)
    assert stall.seconds == pytest.approx(0.1)
    assert ran.missing_s == pytest.approx(0.1)
    assert (ran.written_bytes, ran.read_bytes) == (100_000_000, 100_000_000)


def test_a_tensor_that_is_wanted_while_it_is_being_stored_is_kept() -> None:
    """The store takes 10 s, the gap 1 s: nothing is loaded, and nothing is waited for."""
    ran = run(three(), machine(200_000_000, bytes_s=1e7), moved())
    assert ran.step_s == pytest.approx(1.2)
    assert ran.read_bytes == 0


def test_an_operator_without_memory_waits_for_a_store() -> None:
    """`new` does not fit beside `old`, which leaves before it."""
    operators = [("make", 0.1, 0), ("new", 0.1, 0), ("old", 0.1, 0)]
    points = [("step", 0), ("before new", 1), ("before old", 2)]
    old = TensorSaid("old", "activation", 100_000_000, [0, 2], [0])
    new = TensorSaid("new", "activation", 100_000_000, [1], [1])
    trace = build("two", operators, points, [old, new])
    ran = run(trace, machine(100_000_000), moved())
    assert [(stall.operator, stall.tensor) for stall in ran.stalls] == [(1, -1), (2, 0)]
    assert ran.memory_s == pytest.approx(0.1)
    assert ran.step_s == pytest.approx(0.3 + 0.2)
    assert ran.peak_bytes == 100_000_000


def test_what_no_plan_foresaw_leaves_by_next_use() -> None:
    operators = [("make", 0.1, 0), ("new", 0.1, 0), ("old", 0.1, 0)]
    points = [("step", 0), ("before new", 1), ("before old", 2)]
    old = TensorSaid("old", "activation", 100_000_000, [0, 2], [0])
    new = TensorSaid("new", "activation", 100_000_000, [1], [1])
    ran = run(build("two", operators, points, [old, new]), machine(100_000_000))
    assert ran.unplanned == 1
    assert ran.peak_bytes == 100_000_000


def test_an_operator_that_is_larger_than_the_budget_runs_all_the_same() -> None:
    ran = run(three(), machine(50_000_000))
    assert ran.peak_bytes == 100_000_000
    assert ran.step_s >= 1.2


def test_every_move_costs_its_latency() -> None:
    quick = run(three(), machine(200_000_000), moved())
    late = run(three(), machine(200_000_000, latency_s=0.05), moved())
    assert late.step_s == pytest.approx(quick.step_s + 0.05)


def test_what_was_not_written_is_not_stored_again() -> None:
    """A weight that is only read leaves in every step, and is stored in the first one alone."""
    operators = [("use", 0.1, 0), ("other", 1.0, 0)]
    frozen = TensorSaid("frozen", "parameter", 100_000_000, [0], [], persistent=True)
    trace = build("frozen", operators, [("step", 0), ("other", 1)], [frozen])
    ran = run(trace, machine(200_000_000), (Move(0, Tier.DISK, 0, 1, 1, 1, 2, False),))
    assert ran.written_bytes == 0


def test_a_tensor_that_is_away_over_the_end_of_the_step_is_away_at_its_start() -> None:
    operators = [("other", 1.0, 0), ("use", 0.1, 0), ("more", 1.0, 0)]
    points = [("step", 0), ("use", 1), ("more", 2)]
    weight = TensorSaid("weight", "parameter", 100_000_000, [1], [1], persistent=True)
    trace = build("weight", operators, points, [weight])
    ran = run(trace, machine(200_000_000, 1e10), (Move(0, Tier.DISK, 1, 2, 2, 3, 4, True),))
    assert ran.memory_bytes[1] == 100_000_000
    assert ran.step_s == pytest.approx(2.1, rel=0.01)
    assert (ran.written_bytes, ran.read_bytes) == (100_000_000, 100_000_000)


def test_a_plan_of_another_trace_is_refused() -> None:
    with pytest.raises(Invalid, match="plan this trace anew"):
        run(three(), machine(1), (Move(7, Tier.DISK, 0, 1, 1, 2, 2, True),))


# --- any trace -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_the_books_of_any_replay_are_right(seed: int) -> None:
    trace = randomly(seed)
    budget = budget_of(trace, 0.6)
    for rank in RANKS[seed % 2 :: 2]:
        found = plan(trace, machine(budget, 2e9), rank, 1)
        for each in (found, hoisted(trace, found), whole_layer(trace, machine(budget, 2e9), 1)):
            check_books(trace, replay(trace, each))


def check_books(trace: Trace, ran: Replayed) -> None:
    """What is waited for adds up; memory is within the budget, and at each operator what it uses at the least."""
    assert ran.step_s == pytest.approx(ran.compute_s + ran.missing_s + ran.memory_s)
    assert (ran.memory_bytes >= trace.active_bytes()).all()
    assert ran.peak_bytes >= ran.memory_bytes.max()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rank", ["ratio", "area"])
def test_memory_stays_within_a_budget_that_operators_leave_room_in(seed: int, rank: Rank) -> None:
    trace = randomly(seed)
    budget = budget_of(trace, 0.7)
    ran = replay(trace, plan(trace, machine(budget, 2e9), rank, 1))
    assert ran.memory_bytes.max() <= budget


def test_a_replay_is_the_same_each_time() -> None:
    trace = layered()
    found = plan(trace, machine(int(trace.need_bytes().max() * 0.6), 8e9), "area")
    first, second = replay(trace, found), replay(trace, found)
    assert first.step_s == second.step_s
    assert first.stalls == second.stalls
    assert np.array_equal(first.memory_bytes, second.memory_bytes)


def test_faster_disks_never_make_a_layered_step_longer() -> None:
    trace = layered(activation_bytes=16 * MIB)
    steps = []
    for bytes_s in (1e9, 4e9, 16e9, 64e9):
        hardware = machine(int(trace.need_bytes().max() * 0.7), bytes_s)
        steps.append(replay(trace, plan(trace, hardware, "area")).step_s)
    assert steps == sorted(steps, reverse=True)
