"""What local improvement makes of a plan: never a slower one, always the same one, and one that the runner follows."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from forebay.offload.planning import improve
from forebay.offload.planning.choose import OVERBOOKED, choose
from forebay.offload.planning.improve import improved
from forebay.offload.planning.plan import plan
from forebay.offload.planning.replay import replay
from forebay.offload.planning.stretches import stretches_of
from tests.torch.offload.test_one_model import check_same, disk, with_temporaries
from tests.torch.offload.traces import MIB, budget_of, layered, randomly

FEW = 60  # replays


@pytest.mark.parametrize("seed", range(16))
def test_what_comes_out_is_no_slower_and_is_what_its_replay_says(seed: int) -> None:
    trace = with_temporaries(randomly(seed), seed)
    host = {"host_bytes": 96 * MIB, "link_out_bytes_s": 6e9, "link_in_bytes_s": 6e9} if seed % 2 else {}
    machine = disk(budget_of(trace, (0.8, 0.6)[seed % 2]), 1e9, **host)
    faster = plan(trace, machine.faster(OVERBOOKED[0]), "area", 1)
    start = dataclasses.replace(faster, hardware=machine)
    ran = replay(trace, start)
    found, said = improved(trace, start, ran, FEW)
    assert said.step_s <= ran.step_s
    assert replay(trace, found).step_s == said.step_s
    if ran.peak_bytes <= machine.budget_bytes:
        assert said.peak_bytes <= machine.budget_bytes
    assert improved(trace, start, ran, FEW)[0].moves == found.moves, "the same trace has the same plan"
    assert len(found.left_bytes) == stretches_of(trace, 1).count
    check_same(trace, found)


def test_it_gains_where_greedy_leaves_something() -> None:
    """On the mean over small networks whose disk is too slow."""
    gains = []
    for layers, share in ((2, 0.7), (3, 0.7), (4, 0.55)):
        trace = layered(layers)
        machine = disk(budget_of(trace, share), 4e9)
        greedy, _ = choose(trace, machine, size_bytes_min=1, replays_max=0)
        better, tried = choose(trace, machine, size_bytes_min=1)
        assert better.replayed.step_s <= greedy.replayed.step_s
        assert any(choice.plan.rank.endswith(improve.IMPROVED) for choice in tried)
        gains.append(better.replayed.step_s / greedy.replayed.step_s)
    assert statistics.fmean(gains) < 0.97


def test_a_step_too_large_for_two_replays_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = layered()
    machine = disk(budget_of(trace, 0.6), 1e9)
    start = plan(trace, machine, "area")
    ran = replay(trace, start)
    monkeypatch.setattr(improve, "WORK", 100)
    assert improved(trace, start, ran, FEW) == (start, ran)
