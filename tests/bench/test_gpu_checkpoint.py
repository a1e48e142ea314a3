"""The row of checkpoints on a GPU, without one: the same code on a state in host memory, and that it was not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import main
from bench.gpu import checkpoint

ROW = "checkpoint-gpu"


def test_without_a_device_the_row_says_so_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "result.json"
    assert main.main(["--row", ROW, "--quick", "--out", str(out)]) == 1, "it is no success"
    (row,) = json.loads(out.read_text())["rows"]
    assert row["error"].startswith("not run: no CUDA device (")
    assert row["measures"] == []


@pytest.mark.real
@pytest.mark.slow
def test_all_sides_save_and_restore_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--bytes", "40000000", "--rounds", "2", "--out", str(out)]
    assert checkpoint.main(arguments) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["error"] == ""
    assert [measure["name"] for measure in row["measures"]] == [
        "stall / copy",
        "stall / peer",
        "durable / write",
        "reads / restore",
        "peer / restore",
        "memory / cap",
    ]
    said = capsys.readouterr().out
    for name in (*checkpoint.PEERS, *checkpoint.LOADERS, "save returned"):
        assert f"{name}: " in said
