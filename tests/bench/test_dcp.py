"""The `dcp` row, shrunk: our side and torch's, each in a process of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import main
from bench.parts import Lab
from bench.row import Objects
from bench.workloads import BY_NAME

pytestmark = pytest.mark.real


def test_each_side_saves_and_loads_and_a_missing_peer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FOREBAY_BENCH_PEERS", str(tmp_path / "none"))
    with Lab(quick=True) as lab:
        row = dataclasses.replace(BY_NAME["dcp"], quick=(Objects("state", 1 << 20, 1),))
        result = main.run_row(lab, row)
    assert not result.error
    assert [(each.name, each.peer, len(each.ours)) for each in result.measures] == [
        ("save / torch", "torch", 2),
        ("load / torch", "torch", 2),
    ]
    assert "without s3torchconnector: the peers are missing" in result.notes[0]
