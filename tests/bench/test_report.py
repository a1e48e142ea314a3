"""How rounds become a line of the table, and what a reader of the table is told."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import main, report
from bench.report import Result
from bench.row import REPORTED, Goal, Link, at_least, at_most
from bench.stats import bounded, compared, faster
from bench.workloads import BY_NAME, GROUPS, ROWS


def test_the_median_of_the_rounds_is_judged_and_the_spread_is_kept():
    # One disturbed round of five must not decide.
    measure = compared("rate", "req/s", at_least(0.9), [95, 96, 10, 97, 98], [100, 100, 100, 100, 100])
    assert measure.value == 0.96
    assert measure.spread == (0.10, 0.98)
    assert measure.verdict == "reached"


def test_a_round_is_compared_with_its_own_peer_not_with_the_average():
    # The machine slowed down by half in the second round, for both: the ratio must not move.
    measure = compared("rate", "", at_least(0.8), [80, 40, 80], [100, 50, 100])
    assert measure.ratios == (0.8, 0.8, 0.8)


def test_times_are_compared_the_other_way_round():
    measure = faster("epochs", "s", at_least(1.8), [36.0], [72.0])
    assert measure.value == 2.0
    assert measure.ours == (36.0,)
    assert measure.theirs == (72.0,)


@pytest.mark.parametrize(
    "goal, value, verdict",
    [
        (at_least(0.7), 0.70, "reached"),
        (at_least(0.7), 0.69, "MISSED"),
        (at_most(8), 8, "reached"),
        (at_most(8), 8.01, "MISSED"),
        (REPORTED, 0.01, "reported"),
    ],
)
def test_a_verdict_says_whether_the_goal_is_met(goal: Goal, value: float, verdict: str):
    assert bounded("x", "", goal, [value]).verdict == verdict


def test_uneven_rounds_are_a_mistake():
    with pytest.raises(AssertionError, match="pairs"):
        compared("rate", "", REPORTED, [1, 2], [1])
    with pytest.raises(AssertionError, match="without a round"):
        bounded("rate", "", REPORTED, [])


ROOT = Path(__file__).parents[2]


def results() -> list[Result]:
    won = compared("rate", "req/s", at_least(0.7), [132_400, 130_000], [165_700, 165_000])
    lost = bounded("backend MiB", "MiB", at_most(8), [9.0])
    return [
        Result(BY_NAME["warm-1k"], (won,), 12.0),
        Result(BY_NAME["cold-range"], (lost,)),
        Result(BY_NAME["list-1m"], error="MissingProgram: no such thing"),
    ]


def test_the_table_shows_wins_losses_and_what_could_not_run():
    lines = report.table(results()).splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|"), "it is a Markdown table"
    assert "131 200 req/s" in lines[2]
    assert "nginx 165 350 req/s" in lines[2]
    assert "reached" in lines[2]
    assert "MISSED" in lines[3]
    assert "≤ 8" in lines[3]
    assert "FAILED: MissingProgram" in lines[4]
    assert report.summary(results()) == "1 reached, 1 missed, 0 reported, 1 could not run"


def test_the_json_holds_every_round_and_the_machine():
    document = json.loads(report.as_json(results(), quick=False, wall_s=1.8e9))
    first = document["rows"][0]["measures"][0]
    assert first["ours"] == [132_400, 130_000]
    assert first["verdict"] == "reached"
    assert document["rows"][2]["error"]
    assert document["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (0.123456, "0.123"), (1.234, "1.23"), (999.9, "999.90"), (165_350.4, "165 350")]
)
def test_numbers_are_short(value: float, text: str):
    assert report.number(value) == text


@pytest.mark.parametrize(
    "value, unit, text",
    [(6.8e9, "B/s", "6.80 GB/s"), (40e6, "B/s", "40.0 MB/s"), (0.0213, "s", "21.3 ms"), (70.0, "s", "70.0 s")],
)
def test_quantities_carry_their_unit(value: float, unit: str, text: str):
    assert report.quantity(value, unit) == text


def test_every_row_can_be_run_shrunk_and_judged():
    for row in ROWS:
        assert row.group in GROUPS
        assert row.goals, f"{row.name} is judged by nothing"
        assert len(row.objects) == len(row.quick) >= (row.group != "offload")  # those need no bucket
        for few, all_ in zip(row.quick, row.objects, strict=True):
            assert few.bytes_total <= all_.bytes_total
        assert row.rounds >= 5 or row.epochs, f"{row.name}: medians of at least five"
        module, _, function = row.run.partition(":")
        assert module, function
    assert len(BY_NAME) == len(ROWS), "a name belongs to one row"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """scripts/results on pages of its own: one row of another day, and none else."""
    loader = importlib.machinery.SourceFileLoader("results_script", str(ROOT / "scripts" / "results"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    line = "| `epochs` | speed-up | 36.1 s | direct 67.6 s | 1.87 | 1.80 to 1.90 | ≥ 1.8 | reached | 2026-11-21 A |"
    (tmp_path / "docs" / "benchmarks.md").write_text(
        "<!-- resume -->\nold\n<!-- end of resume -->\n"
        f"<!-- results -->\n* A: 96 cores of something else\n\n{line}\n<!-- end of results -->\n"
    )
    return module


def written(tmp_path: Path, told: list[Result], *, quick: bool = False) -> str:
    path = tmp_path / "told.json"
    path.write_text(report.as_json(told, quick=quick, wall_s=1.8e9))
    return str(path)


def test_measured_rows_take_the_place_of_their_lines(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["results", written(tmp_path, results())])
    assert script.main() == 0
    _, table = script.table_of((tmp_path / "docs" / "benchmarks.md").read_text())
    assert table["epochs"][0][-1] == "2026-11-21 A", "a row that was not measured stays, with its day"
    ours = table["warm-1k"][0]
    assert ours[2:5] == ("131 200 req/s", "nginx 165 350 req/s", "0.793")
    assert ours[-1] == "2027-01-15 B"
    assert "**missed**" in {line[7] for of_row in table.values() for line in of_row}
    assert "**failed**" in {line[7].split(":")[0] for of_row in table.values() for line in of_row}
    assert table["put-disk-4k"] == [("`put-disk-4k`", "", "", "", "", "", "", "not measured yet", "")]
    page = (tmp_path / "README.md").read_text()
    assert "| warm GET 1 KiB | rate | 131 200 req/s | nginx 165 350 req/s | 0.793 |" in page
    assert "| 36.1 s | direct 67.6 s | 1.87 |" in page
    assert "\nold\n" not in page
    assert page.endswith("<!-- end of results -->\nafter\n")


def test_a_quick_run_shows_nothing(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["results", written(tmp_path, results(), quick=True)])
    assert script.main() == 1
    assert "\nold\n" in (tmp_path / "README.md").read_text()


def test_each_line_names_its_machine(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = tmp_path / "docs" / "benchmarks.md"
    for expected in ({"epochs": "A", "warm-1k": "B"}, {"epochs": "B", "warm-1k": "B"}):
        told = results() if expected["epochs"] == "A" else [Result(BY_NAME["epochs"], error="it was too slow")]
        monkeypatch.setattr(sys, "argv", ["results", written(tmp_path, told)])
        assert script.main() == 0
        machines, table = script.table_of(page.read_text())
        assert {row: table[row][0][-1][-1] for row in expected} == expected
        assert sorted(machines) == sorted(set(expected.values())), "a machine of which no line is left goes"
        assert f"{report.machine()['cores']} cores of {report.machine()['processor']}, " in machines["B"]


def test_the_resume_row_writes_its_own_table_too(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    versions = {"torch": "2.13.0", "torchdata": "0.11.0"}
    result = Result(BY_NAME["resume"], notes=("| loader |", "| --- |"), extra={"versions": versions})
    monkeypatch.setattr(sys, "argv", ["results", written(tmp_path, [result])])
    assert script.main() == 0
    assert (
        (tmp_path / "docs" / "benchmarks.md")
        .read_text()
        .startswith(
            "<!-- resume -->\nMeasured 2027-01-15, with torchdata 0.11.0, torch 2.13.0.\n\n"
            "| loader |\n| --- |\n<!-- end of resume -->\n"
        )
    )


def test_the_readme_shows_rows_that_the_page_has(script: Any):
    _, table = script.table_of((ROOT / "docs" / "benchmarks.md").read_text("utf-8"))
    measures = {(row, line[1]) for row, of_row in table.items() for line in of_row}
    assert set(script.SHOWN) <= measures


def test_a_link_says_what_binds():
    assert str(Link()) == "unlimited"
    assert str(Link(200e6, 0.02)) == "200 MB/s, 20 ms"
    assert str(Link(0, 0.02, 50e6)) == "unlimited, 20 ms, 50 MB/s a connection"


def test_the_command_line_lists_rows_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]):
    assert main.main(["cold", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [row.name for row in ROWS if row.group == "cold"]
    with pytest.raises(SystemExit) as refused:
        main.main(["--row", "no-such-row"])
    assert refused.value.code == 2
    assert "warm-1k" in capsys.readouterr().err
