"""The resume row: the account of what a killed job lost, and our own side from end to end. The peers' side needs their
own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.parts import Lab
from bench.row import Objects
from bench.rows import resume
from bench.rows.resume import CASES, Case, Found, Left, Shape, account
from bench.workloads import BY_NAME
from forebay.core.types import FRESH_IMMUTABLE, Bucket
from tests.node.conftest import until

ALONE = [[4, 1], [0, 5], [3, 2]]
ONE, OTHER = Case(Shape(1, 0), Shape(1, 2)), Case(Shape(1, 2), Shape(2, 2))


@pytest.mark.parametrize(
    "taken, rest, found, said",
    [
        ([[4, 1]], [[0, 5], [3, 2]], Found(), "exact"),
        ([[4, 1]], [[0], [5, 3], [2]], Found(), "exact"),  # the batches may be others, the order is what counts
        ([[4, 1]], [[5, 0], [2, 3]], Found(order="same batches"), "each once, same batches"),
        ([[4, 1]], [[3, 2], [0, 5]], Found(order="other"), "each once, other order"),
        ([[4, 1]], [[3, 2]], Found(lost=2, order="other"), "0 twice, 2 lost, other order"),
        ([[4, 1]], [[1, 0], [5, 3], [2]], Found(repeated=1, order="other"), "1 twice, 0 lost, other order"),
        ([[4, 1]], [[4, 1], [0, 5]], Found(2, 2, "other"), "2 twice, 2 lost, other order"),
        ([[1, 4]], [[0, 5], [3, 2]], Found(order="none"), "each once, no fixed order"),
        ([[4, 1]], [], Found(lost=4, order="other"), "0 twice, 4 lost, other order"),
    ],
)
def test_the_account_of_a_job_that_went_on(taken: resume.Steps, rest: resume.Steps, found: Found, said: str):
    assert account(ALONE, taken, rest) == found
    assert str(found) == said
    assert found.exact == (said == "exact")


def test_a_job_that_does_not_go_on_is_not_exact():
    assert str(Found(failed="AssertionError: no")) == "fails"
    assert str(Found(hung=True)) == "hangs"
    assert not Found(failed="AssertionError: no").exact
    assert not Found(hung=True).exact


def test_notes_of_ranks_are_put_together_and_a_cut_line_does_not_count(tmp_path: Path):
    (tmp_path / "notes-0").write_text("[4]\n[0]\n[3]\n")
    (tmp_path / "notes-1").write_text("[1]\n[5]\n[2")
    assert resume.read_steps(tmp_path, 2) == [[4, 1], [0, 5], [3]]
    assert resume.read_steps(tmp_path, 1) == [[4], [0], [3]]


def test_a_step_counts_when_every_rank_saved_it(tmp_path: Path):
    assert resume.saved_step(tmp_path, 1) == 0
    for name in ("state-0-9", "state-0-10", "state-0-11", "state-1-9", "state-1-10", "state-1-11.new"):
        (tmp_path / name).touch()
    assert resume.saved_step(tmp_path, 1) == 11
    assert resume.saved_step(tmp_path, 2) == 10


def test_processes_that_outlive_a_job_are_counted_and_ended():
    sleeper = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True) as leader:
        leader.wait(90)
        assert len(resume.members(leader.pid)) == 1
        assert resume._end_sessions([leader.pid], 0.2) == 1
        until(lambda: not resume.members(leader.pid), 10)
    assert resume._end_sessions([leader.pid], 0.2) == 0


def test_what_failed_first_is_what_is_told(tmp_path: Path):
    (tmp_path / "said-0").write_text("[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:1\n")
    (tmp_path / "said-1").write_text("Traceback\n  File x\n[rank1]: AssertionError: other workers\nsome warning\n")
    assert resume._said(tmp_path, [1, 1]) == "AssertionError: other workers"
    assert "closed by peer" in resume._said(tmp_path, [1, -9])
    assert resume._said(tmp_path, [0, -9]) == ""


def test_an_assertion_without_words_is_told_by_its_line():
    said = "  File x, line 3\n    assert workers == 2\n           ^^^^^^^^^^^^\nAssertionError\n"
    assert resume.error_in(said) == "AssertionError: assert workers == 2"
    assert resume.error_in("killed by something\n") == "killed by something"
    assert resume.error_in("") == ""


def test_the_table_has_every_case_and_what_was_said():
    results = {
        "litdata": ({ONE: Found(1, 2, "other"), OTHER: Found(failed="ValueError: no")}, Left(2, 3)),
        "forebay": ({ONE: Found(), OTHER: Found()}, Left(0, 0)),
    }
    assert resume.table(results, [ONE, OTHER], {"litdata": "0.2"}) == (
        "| loader | 0 → 2 | 1 → 2 ranks | left after a kill |",
        "| --- | --- | --- | --- |",
        "| litdata 0.2 | 1 twice, 2 lost, other order | fails | 2 processes, 3 pieces of shared memory |",
        "| forebay | exact | exact | nothing |",
        "",
        "* 1 → 2 ranks: litdata: `ValueError: no`",
    )
    twice, lost, cases = resume._measures(BY_NAME["resume"], results)
    assert [(one.ours, one.theirs, one.verdict) for one in (twice, lost, cases)] == [
        ((0.0,), (1.0,), "reached"),
        ((0.0,), (2.0,), "reached"),
        ((0.0,), (2.0,), "reached"),
    ]
    results["forebay"] = ({ONE: Found(lost=1, order="other"), OTHER: Found(hung=True)}, Left(0, 0))
    assert [one.verdict for one in resume._measures(BY_NAME["resume"], results)] == ["reached", "MISSED", "MISSED"]


def test_the_cases_change_workers_and_ranks_both_ways():
    assert {case.after.workers for case in CASES} == {0, 1, 2, 4}
    assert {(case.before.ranks, case.after.ranks) for case in CASES} == {(1, 1), (1, 2), (2, 1)}
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.real
@pytest.mark.slow
def test_our_side_is_killed_and_goes_on_exactly_on_two_ranks(tmp_path: Path):
    objects = Objects("few", 100, 160)
    shards = resume.make_samples(tmp_path / "bucket" / "few", objects)
    assert len(shards) == resume.SHARDS
    case = Case(Shape(1, 1), Shape(2, 0))
    with Lab() as lab, lab.node(core=None) as node:
        with node.client() as client:
            client.bucket_put(Bucket("corpus", f"file://{tmp_path / 'bucket'}", freshness_s=FRESH_IMMUTABLE))
        side = resume.Side(resume.OURS, tmp_path / "side", {"url": node.endpoint, "place": "corpus/few/tar/"}, {})
        found, left = resume.resume(side, [case], objects.count // resume.BATCH)
    assert found == {case: Found()}
    assert left == Left(0, 0)
    assert resume.saved_step(tmp_path / "side" / "killed-0-0", 1) < objects.count // resume.BATCH
    notes = (tmp_path / "side" / "resumed-0-0" / "notes-1").read_text().splitlines()
    assert len(json.loads(notes[0])) == resume.BATCH // 2
