"""The plot of the loader rows."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.workloads import ROWS

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot-loader"
SIDES = ("webdataset", "litdata", "shards", "objects")


@pytest.fixture(scope="module")
def picture() -> Iterator[ModuleType]:
    """The script as a module; no bytecode is left beside it."""
    loader = importlib.machinery.SourceFileLoader("plot_loader", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(module)
        yield module


def document(**changes: Any) -> dict[str, Any]:
    """Of all loader rows, as `forebay bench loader` writes it; far buckets are slow in the first epoch."""
    rows = []
    for row in ROWS:
        if row.name.startswith("first-batch"):
            rows.append({"row": row.name, "error": "", "extra": {"first_batch_s": {"forebay": [[1.0, 0.5]]}}})
        elif row.run == "bench.rows.loader:epochs":
            first = 1000 / (1 + 100 * row.link.latency_s)
            rates = {side: [[first, 2000.0], [first * 3, 4000.0], [first * 2, 3000.0]] for side in SIDES}
            rows.append({"row": row.name, "error": "", "extra": {"rates": rates}})
    return {"quick": False, "rows": rows, **changes}


def test_each_size_and_epoch_has_a_line_for_each_loader_of_medians_by_latency(picture: ModuleType):
    panels = picture.series(document())
    assert list(panels) == [(10_000, 1), (10_000, 2), (100_000, 1), (100_000, 2)]
    assert set(panels[10_000, 1]) == set(SIDES)
    assert panels[10_000, 1]["litdata"] == [
        (0.0, 2000.0),
        (5.0, pytest.approx(4000 / 3)),
        (20.0, pytest.approx(2000 / 3)),
    ]
    assert panels[100_000, 2]["shards"] == [(0.0, 3000.0), (5.0, 3000.0), (20.0, 3000.0)]


def test_a_row_that_could_not_be_measured_is_a_gap(picture: ModuleType):
    told = document()
    told["rows"][1] |= {"error": "LoadFailed: x", "extra": {}}
    assert sorted(len(lines["shards"]) for lines in picture.series(told).values()) == [2, 2, 3, 3]


def test_a_picture_is_drawn(picture: ModuleType, tmp_path: Path):
    (tmp_path / "loader.json").write_text(json.dumps(document()))
    picture.draw(tmp_path / "loader.json", tmp_path / "loader.png")
    image = pytest.importorskip("PIL.Image").open(tmp_path / "loader.png").convert("RGB")
    assert image.size == (1200, 864)
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    for side in SIDES:
        wanted = picture.COLOURS[side]
        assert tuple(int(wanted[at : at + 2], 16) for at in (1, 3, 5)) in colours, f"no line of {side}"


@pytest.mark.parametrize(
    "told, said", [(document(quick=True), "--quick run"), (document(rows=[]), "no loader rows"), (None, "No such file")]
)
def test_what_cannot_be_drawn_is_said(told: dict[str, Any] | None, said: str, tmp_path: Path):
    if told:
        (tmp_path / "loader.json").write_text(json.dumps(told))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "loader.json"), str(tmp_path / "loader.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "loader.png").exists()
