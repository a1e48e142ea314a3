"""The `dcp` row, shrunk: our side and torch's, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import main
from bench.parts import Lab
from bench.rows import dcp
from bench.workloads import BY_NAME

pytestmark = pytest.mark.real


def test_each_side_saves_and_loads_and_a_missing_peer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(dcp, "QUICK_BYTES", 1 << 20)
    monkeypatch.setenv("FOREBAY_BENCH_PEERS", str(tmp_path / "none"))
    with Lab(quick=True) as lab:
        result = main.run_row(lab, BY_NAME["dcp"])
    assert not result.error
    assert [(each.name, each.peer, len(each.ours)) for each in result.measures] == [
        ("save / torch", "torch", 2),
        ("load / torch", "torch", 2),
    ]
    assert "without s3torchconnector: the peers are missing" in result.notes[0]
