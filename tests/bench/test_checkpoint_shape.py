"""The `checkpoint-shape` rows, shrunk: our side and plain files, by processes that save and others that load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import main
from bench.parts import Lab
from bench.row import Objects
from bench.rows import checkpoint_shape
from bench.workloads import BY_NAME

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", ["checkpoint-shape", "checkpoint-elsewhere"])
def test_each_side_saves_and_loads_and_a_missing_peer_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
):
    monkeypatch.setenv("FOREBAY_BENCH_PEERS", str(tmp_path / "none"))
    monkeypatch.setattr(checkpoint_shape, "RANKS", 2)
    with Lab(quick=True) as lab:
        row = dataclasses.replace(BY_NAME[name], quick=(Objects("state", 4 << 20, 1),))
        result = main.run_row(lab, row)
    assert not result.error
    assert [(each.name, each.peer, len(each.ours)) for each in result.measures] == [
        ("save / raw", "raw", 2),
        ("load / raw", "raw", 2),
    ]
    assert "without s3torchconnector: the peers are missing" in result.notes[0]
