"""Traces as values and as files."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.core.errors import Invalid
from forebay.offload.planning.trace import TensorSaid, build, load
from tests.torch.offload.traces import layered, randomly

OPERATORS = [("one", 0.1, 5), ("two", 0.2, 0), ("three", 0.3, 7)]
POINTS = [("step", 0), ("two", 1)]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_trace_comes_back_from_its_file(tmp_path: Path, name: str, seed: int) -> None:
    trace = randomly(seed)
    trace.save(tmp_path / name)
    again = load(tmp_path / name)
    for column in (
        "times_s",
        "workspace_bytes",
        "points",
        "sizes_bytes",
        "births",
        "deaths",
        "use_ends",
        "use_operators",
    ):
        assert np.array_equal(getattr(again, column), getattr(trace, column)), column
    assert np.array_equal(again.use_writes, trace.use_writes)
    assert np.array_equal(again.kinds, trace.kinds)
    assert np.array_equal(again.persistent, trace.persistent)
    assert (again.operators, again.tensors, again.point_names) == (trace.operators, trace.tensors, trace.point_names)


def test_the_same_trace_makes_the_same_file(tmp_path: Path) -> None:
    layered().save(tmp_path / "a.json.gz")
    layered().save(tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".new"] == []


def test_need_is_what_lives_and_the_workspace() -> None:
    stays = TensorSaid("stays", "parameter", 100, [1], persistent=True)
    goes = TensorSaid("goes", "activation", 10, [0, 1], [0])
    trace = build("t", OPERATORS, POINTS, [stays, goes])
    assert trace.need_bytes().tolist() == [115, 110, 107]
    assert trace.active_bytes().tolist() == [15, 110, 7]


def test_a_life_may_be_longer_than_its_uses() -> None:
    held = TensorSaid("held", "activation", 10, [0], [0], life=(0, 2))
    trace = build("t", OPERATORS, POINTS, [held])
    assert trace.need_bytes().tolist() == [15, 10, 17]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "uses that fall": ({"uses": [1, 0], "life": (0, 2)}, "has uses that do not rise"),
    "a use outside its life": ({"uses": [0, 2], "life": (0, 1)}, "is used outside its life"),
    "a use outside the step": ({"uses": [3], "life": (0, 3)}, "is used outside its life"),
    "no use": ({"uses": [], "life": (0, 1)}, "a tensor without a use"),
    "a write that is no use": ({"uses": [0], "writes": [1]}, "written by an operator that does not use it"),
    "less than nothing": ({"uses": [0], "size_bytes": -1}, "has a negative size"),
    "half persistent": ({"uses": [0], "persistent": True, "life": (0, 1)}, "does not live all the step"),
}


@pytest.mark.parametrize("what", BAD)
def test_traces_that_cannot_be_are_refused(what: str) -> None:
    told, why = BAD[what]
    with pytest.raises(Invalid, match=why):
        build("bad", OPERATORS, POINTS, [TensorSaid(**{"name": "x", "kind": "activation", "size_bytes": 1, **told})])


@pytest.mark.parametrize(
    ("operators", "points", "why"),
    [
        ([], POINTS, "from 1 to"),
        ([("one", -1.0, 0)], [("step", 0)], "less than no time"),
        ([("one", float("nan"), 0)], [("step", 0)], "less than no time"),
        (OPERATORS, [("late", 1)], "the first point is the start"),
        (OPERATORS, [("step", 0), ("b", 2), ("a", 1)], "do not rise"),
        (OPERATORS, [("step", 0), ("beyond", 4)], "the last point is before operator 4"),
    ],
)
def test_steps_that_cannot_be_are_refused(operators: Any, points: Any, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        build("bad", operators, points, [TensorSaid("x", "activation", 1, [0], [0])])


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for name, data in {
        "text.json": b"hello",
        "other.json": b'{"a": 1}',
        "cut.json.gz": gzip.compress(b"{}" * 1000)[:20],
        "kind.json": json.dumps(
            {
                "forebay_trace": 1,
                "name": "x",
                "operators": [["a", 0.1, 0]],
                "points": [["step", 0]],
                "tensors": [{"name": "t", "kind": "weights", "size_bytes": 1, "uses": [0]}],
            }
        ).encode(),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Invalid, match="is no trace"):
            load(tmp_path / name)
    with pytest.raises(Invalid, match="is no trace"):
        load(tmp_path / "absent.json")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    layered().save(tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())
    told["forebay_trace"] = 2
    (tmp_path / "t.json").write_text(json.dumps(told))
    with pytest.raises(Invalid, match="update forebay"):
        load(tmp_path / "t.json")
