"""The optimum row of offloading: the bound is one, and is the right one where it can be told by hand."""

from __future__ import annotations

import pytest

from bench.parts import Lab
from bench.rows import offload_optimum
from bench.workloads import BY_NAME
from forebay.offload.planning import improve
from forebay.offload.planning.choose import choose
from forebay.offload.planning.hardware import Hardware
from forebay.offload.planning.trace import TensorSaid, build

pytest.importorskip("scipy")
MB = 1_000_000


def test_the_bound_of_a_step_whose_optimum_is_known():
    """Two halves of 0.1 s each, with a weight of 100 MB for each, and room for one and a half: in each half 50 MB of
    the other one are away, and flow while it runs. What the disk has no time for in 0.1 s is waited for."""
    weights = [TensorSaid(name, "parameter", 100 * MB, [at], [], persistent=True) for at, name in enumerate("ab")]
    trace = build("two halves", [("a", 0.1, 0), ("b", 0.1, 0)], [("a", 0), ("b", 1)], weights)

    def bound_s(bytes_s: float) -> float:
        machine = Hardware(150 * MB, disk_bytes=1 << 30, disk_write_bytes_s=1e12, disk_read_bytes_s=bytes_s)
        return offload_optimum.bound_s(trace, machine)

    assert bound_s(1e12) == pytest.approx(0.2, rel=1e-3)
    assert bound_s(1e8) == pytest.approx(0.2 + 2 * 50 / 100, rel=0.01), "50 MB come before each, at 100 MB/s"


def test_no_plan_is_quicker_than_the_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(improve, "EVALUATIONS", 100)
    for trace, machine in offload_optimum._cases(4):
        best, _ = choose(trace, machine, size_bytes_min=1)
        assert best.replayed.step_s >= offload_optimum.bound_s(trace, machine) * (1 - 1e-6)


def test_the_row_says_how_far_plans_are_from_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload_optimum, "PATIENCE", 1)
    monkeypatch.setattr(offload_optimum, "QUICK_TRACES", 2)
    monkeypatch.setattr(offload_optimum, "QUICK_NETS", 1)
    monkeypatch.setattr(improve, "EVALUATIONS", 40)
    result = offload_optimum.optimum(Lab(quick=True), BY_NAME["offload-optimum"])
    assert [measure.name for measure in result.measures] == [
        "step / fluid bound, mean",
        "step / fluid bound, p90",
        "step / patient search, mean",
        "step / patient search, p90",
    ]
    assert "simulated" in result.notes[0]
