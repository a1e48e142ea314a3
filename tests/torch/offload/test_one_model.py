"""Planner, replay and runner say the same of what must be in memory, and of what a step comes to.

The runner's own code runs in a world that shares nothing with the replay (`world`): every lap takes the time that the
replay says, with the same moves, and memory that is counted at each operator stays within the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from forebay.core.errors import Invalid
from forebay.offload.planning.choose import choose, whole_layer
from forebay.offload.planning.hardware import Hardware
from forebay.offload.planning.plan import Plan, check_feasible, hoisted, plan
from forebay.offload.planning.replay import Machine, replay
from forebay.offload.planning.stretches import stretches_of
from forebay.offload.planning.trace import KINDS, TensorSaid, Trace, build
from tests.torch.offload.traces import MIB, budget_of, layered, randomly
from tests.torch.offload.world import World

LAPS = 4


def disk(budget_bytes: int, bytes_s: float = 2e9, **more: Any) -> Hardware:
    tiers: dict[str, Any] = {"disk_bytes": 1 << 40, "disk_write_bytes_s": bytes_s, "disk_read_bytes_s": bytes_s} | more
    return Hardware(budget_bytes, **tiers)


def with_temporaries(trace: Trace, seed: int) -> Trace:
    """The same with some that nobody can move."""
    kinds = trace.kinds.copy()
    chance = np.random.default_rng(seed)
    kinds[(chance.random(len(kinds)) < 0.25) & ~trace.persistent] = KINDS.index("temporary")
    return dataclasses.replace(trace, kinds=kinds)


def check_same(trace: Trace, found: Plan) -> None:
    """Lap by lap."""
    world, machine = World(trace, found), Machine(trace, found)
    for lap in range(LAPS):
        taken_s, ran = world.lap(), machine.run_lap(lap)
        assert ran.step_s == pytest.approx(taken_s, rel=1e-9), f"lap {lap}"
        assert ran.unplanned == world.runner.facts.unplanned, f"lap {lap}"
        assert world.peak_bytes <= ran.peak_bytes
        if not world.runner.facts.over_bytes:
            assert world.peak_bytes <= found.hardware.budget_bytes


@pytest.mark.parametrize("seed", range(40))
def test_a_step_under_the_runner_takes_what_the_replay_says(seed: int) -> None:
    trace = with_temporaries(randomly(seed), seed)
    share, bytes_s = (0.9, 0.7, 0.5)[seed % 3], (1e9, 4e9)[seed % 2]
    host = {"host_bytes": 96 * MIB, "link_out_bytes_s": 6e9, "link_in_bytes_s": 6e9} if seed % 4 == 1 else {}
    machine = disk(budget_of(trace, share), bytes_s, **host)
    found = plan(trace, machine, "area", 1)
    faster = dataclasses.replace(plan(trace, machine.faster(8), "ratio", 1), hardware=machine)
    nothing = dataclasses.replace(found, moves=())
    for each in (found, hoisted(trace, found), faster, nothing, whole_layer(trace, machine, 1)):
        check_same(trace, each)


@pytest.mark.parametrize("seed", range(12))
def test_a_tier_that_is_nearly_full_is_full_in_the_replay_too(seed: int) -> None:
    trace = randomly(seed)
    budget = budget_of(trace, 0.6)
    room = int((int(trace.need_bytes().max()) - budget) * 1.2) + 1
    machine = disk(budget, disk_bytes=room, host_bytes=(seed % 2) * 40 * MIB)
    moves = dataclasses.replace(plan(trace, disk(budget), "area", 1), hardware=machine)
    check_same(trace, moves)


def test_what_no_plan_can_do_with_is_what_is_here_with_all_else_away() -> None:
    """Counted stretch by stretch, operator by operator, tensor by tensor."""
    for seed in range(30):
        trace = with_temporaries(randomly(seed), seed)
        stretches = stretches_of(trace, 8 * MIB)
        begins = [*stretches.points.tolist(), trace.operator_count]
        for stretch, (begin, end) in enumerate(itertools.pairwise(begins)):
            most = 0
            for operator in range(begin, end):
                here = int(trace.workspace_bytes[operator])
                for tensor in range(trace.tensor_count):
                    if not trace.births[tensor] <= operator <= trace.deaths[tensor]:
                        continue
                    used = any(begin <= use < end for use in trace.uses(tensor).tolist())
                    dies = not trace.persistent[tensor] and trace.deaths[tensor] < end
                    stays = trace.kinds[tensor] == KINDS.index("temporary") or trace.sizes_bytes[tensor] < 8 * MIB
                    born = not trace.persistent[tensor] and trace.births[tensor] >= begin
                    if stays or used or born or (dies and trace.uses(tensor)[-1] < begin):
                        here += int(trace.sizes_bytes[tensor])
                most = max(most, here)
            assert most == stretches.required_bytes[stretch]


def test_a_plan_that_is_feasible_keeps_every_lap_within_the_budget() -> None:
    for seed in range(20):
        trace = with_temporaries(randomly(seed), seed)
        machine = disk(budget_of(trace, 0.5), 1e9)
        check_feasible(trace, machine)
        world = World(trace, plan(trace, machine, "ratio", 1))
        for _ in range(LAPS):
            world.lap()
            assert world.peak_bytes <= machine.budget_bytes
            assert not world.runner.facts.over_bytes


def test_what_one_stretch_uses_is_refused_though_each_operator_would_fit() -> None:
    """No point lies between the two: both have to be here at once."""
    operators = [("first", 0.1, 0), ("second", 0.1, 0), ("third", 0.1, 0)]
    both = [TensorSaid(name, "parameter", 100 * MIB, [at], [], persistent=True) for at, name in enumerate("ab")]
    trace = build("two in one", operators, [("step", 0), ("after both", 2)], both)
    with pytest.raises(Invalid, match=r"from 'step' to the next point 209,715,200 bytes .* give at least 211,83"):
        choose(trace, disk(150 * MIB))
    choose(trace, disk(211_833_536))


def test_tiers_without_the_room_are_refused_with_the_bytes() -> None:
    trace = layered()
    machine = disk(int(trace.need_bytes().max() * 0.6), disk_bytes=64 * MIB)
    with pytest.raises(Invalid, match=r"have to be elsewhere, and there is room for 67,108,864: give larger tiers"):
        choose(trace, machine)


# --- what is below the threshold -------------------------------------------------------------------------------------
def test_tensors_below_the_threshold_move_when_it_does_not_fit_without() -> None:
    """All are small: a plan without moves would keep no budget."""
    trace = layered(weight_bytes=MIB, activation_bytes=MIB)
    machine = disk(int(trace.need_bytes().max() * 0.75))
    chosen, _ = choose(trace, machine)
    assert chosen.plan.moves
    assert chosen.fits
    assert not chosen.plan.is_idle
    assert chosen.plan.size_bytes_min <= MIB
    large, _ = choose(layered(), disk(int(layered().need_bytes().max() * 0.75)))
    assert large.plan.size_bytes_min == 4 * MIB, "where it is not needed it stays"


def test_a_plan_without_moves_that_does_not_fit_is_not_idle() -> None:
    trace = layered()
    machine = disk(int(trace.need_bytes().max() * 0.75))
    assert not Plan("by hand", (), trace.need_bytes(), machine).is_idle


# --- steps that come round -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("seed", "operators", "tensors"), [(729, 24, 12), (2798, 24, 8), (2993, 12, 20)])
def test_steps_that_alternate_are_told_by_their_mean(seed: int, operators: int, tensors: int) -> None:
    """A move that one step has no time for is made in the next, so that every second step is quick."""
    trace = randomly(seed, operators, tensors)
    each = at_random(trace, seed)
    world = World(trace, each)
    laps = [world.lap() for _ in range(24)][-8:]
    assert max(laps) > 1.02 * min(laps), "they do alternate"
    ran = replay(trace, each)
    assert ran.step_s == pytest.approx(sum(laps) / len(laps), rel=1e-6)
    assert ran.step_s == pytest.approx(ran.compute_s + ran.missing_s + ran.memory_s)


def at_random(trace: Trace, seed: int) -> Plan:
    """Half of all moves that could be made, on some machine."""
    chance = random.Random(seed)
    budget = budget_of(trace, random.Random(seed).choice((0.5, 0.6, 0.7)))
    bytes_s = chance.choice((1e8, 3e8, 1e9, 2e9))
    write_bytes_s = bytes_s * chance.choice((0.3, 1, 3))
    host = {"host_bytes": chance.choice((0, 0, 100 * MIB)), "link_out_bytes_s": 5e9, "link_in_bytes_s": 5e9}
    machine = disk(budget, bytes_s, disk_write_bytes_s=write_bytes_s, **host)
    all_moves = whole_layer(trace, machine, 1)
    return dataclasses.replace(all_moves, moves=tuple(m for m in all_moves.moves if chance.random() < 0.5))
