"""The paper's budgets in simulation: the peer moves as it says it does, and nobody takes the numbers for measured."""

from __future__ import annotations

import dataclasses

import pytest

from bench import main
from bench.parts import Lab
from bench.rows import offload_paper
from bench.rows.offload_paper import as_zero_infinity, budgets
from bench.workloads import BY_NAME
from forebay.offload.planning import improve
from forebay.offload.planning.choose import whole_layer
from forebay.offload.planning.hardware import Hardware
from forebay.offload.planning.replay import replay
from forebay.offload.tracing.roofline import H100
from forebay.offload.tracing.shapes import trace_of


def test_what_persists_comes_as_far_ahead_as_the_bucket_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of("llama-3-8b", batch=1, sequence=256, layers=2, table=H100)
    machine = Hardware(
        int(trace.need_bytes().max() * 0.7), disk_bytes=1 << 50, disk_write_bytes_s=16e9, disk_read_bytes_s=16e9
    )
    whole = whole_layer(trace, machine)
    steps = []
    for bucket_bytes in (0, offload_paper.BUCKET_BYTES, 1 << 50):
        monkeypatch.setattr(offload_paper, "BUCKET_BYTES", bucket_bytes)
        plan = as_zero_infinity(trace, machine)
        assert sorted(move.tensor for move in plan.moves) == sorted(move.tensor for move in whole.moves)
        assert all(move.gone < move.load <= move.need for move in plan.moves)
        earlier = {(move.tensor, move.need): move.load for move in whole.moves}
        ahead = [earlier[move.tensor, move.need] - move.load for move in plan.moves]
        assert min(ahead) >= 0
        assert any(ahead) == (bucket_bytes > 0)
        steps.append(replay(trace, plan).step_s)
    assert steps[1] <= steps[0]


def test_the_row_says_that_it_is_a_simulation_and_both_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improve, "EVALUATIONS", 40)  # what more would gain is measured by the row itself
    row = BY_NAME["offload-paper"]
    assert row.what.startswith("simulated")
    with Lab(quick=True) as lab:
        result = budgets(lab, dataclasses.replace(row))
    assert "SIMULATION" in result.notes[0]
    assert [note.count("peak") for note in result.notes[1:]] == [1, 1]
    tf32, fp32 = (measure.value for measure in result.measures[:2])
    assert 0 < tf32 < fp32 <= 1, "the disks have longer"
    assert main._parser().parse_args(["--row", row.name]).row == [row.name]
