"""The GPU row without a GPU: its processes on the CPU, tiny; what is said of them; and that it was not run."""

from __future__ import annotations

import importlib.util
import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import main, report
from bench.gpu import first_day, offload
from bench.gpu.first_day import Check, checks
from bench.gpu.offload import PEER_STEPS, STEADY_MIN, STEPS, Alone, Round, Told, Work
from bench.workloads import BY_NAME

ROW = BY_NAME["offload-gpu"]
SHAPE = {"layers": 3, "width": 64, "words": 128, "batch": 4, "sequence": 64}
TINY: Work = {"device": "cpu", "shape": SHAPE, "options": {"size_bytes_min": 16_384, "chunk_bytes": 1 << 20}}
GIB = 1 << 30


# --- without a device ------------------------------------------------------------------------------------------------
def test_without_a_device_the_row_says_so_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "result.json"
    assert main.main(["--row", "offload-gpu", "--quick", "--out", str(out)]) == 1, "it is no success"
    printed = capsys.readouterr().out
    said = re.search(r"not run: no CUDA device \(\d{4}-\d\d-\d\d\)", printed)
    assert said is not None, printed
    assert "0 reached, 0 missed, 0 reported, 1 could not run" in printed
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["error"], row["measures"], row["notes"]) == (said[0], [], [])


def test_it_says_so_by_itself_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert offload.main(["--quick"]) == 1
    assert "FAILED: not run: no CUDA device (" in capsys.readouterr().out


@pytest.mark.parametrize("has_device", [False, True])
def test_the_first_day_ends_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, has_device: bool
):
    def wrong() -> str:
        raise first_day.Failed("losses are off by 1")

    def played(folder: Path) -> list[Check]:
        return [Check("one", lambda: "is well"), Check("other", wrong), Check("last", lambda: "is not asked")]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setattr(first_day.first_day, "__defaults__", (played,))
    assert offload.main(["--first-day"]) == 1
    printed = capsys.readouterr().out
    if has_device:
        assert printed == "1. one: is well\n2. other: FAILED: losses are off by 1\nThe checks after it were not made.\n"
    else:
        assert re.fullmatch(r"first day: not run: no CUDA device \(.*\). It needs a CUDA device and .*\n", printed)


def test_the_first_days_checks_judge_what_processes_tell(tmp_path: Path):
    def ask(work: Work) -> Told:
        works.append(work)
        told: Told = {"side": work["side"], "oom": False, "error": "", "steps_s": [0.1] * 4, "losses": [2.0, 1.0]}
        fields = ("step_s", "missing_s", "memory_s", "written_bytes", "read_bytes", "moves", "unplanned")
        report: Told = dict.fromkeys(fields, 0)
        report |= {"policy": "area", "predicted_s": 0.104 if work.get("limit_bytes", 0) < 850 else 0.1}
        told |= {"warm": 0, "shape": SHAPE, "peak_bytes": 1000, "report": report, "paths": [], "failures": []}
        return told | (wrong if work["side"] == "ours" else {})

    works: list[Work] = []
    wrong: Told = {}
    by_name = {check.name: check.run for check in checks(tmp_path, ask)}
    assert by_name["the same bits at 90 to 60 % of the memory"]() == "losses bit-equal at 90%, 80%, 70%, 60%"
    predicted = by_name["a step takes what was predicted"]()
    assert predicted == "0.0% off at 90%, 4.0% off at 80%, 4.0% off at 70%, 4.0% off at 60%"
    larger = "a state that is larger than the device"
    assert "losses bit-equal" in by_name[larger]()
    wrong["error"], wrong["oom"] = "OutOfMemoryError: none left", True
    assert by_name["no memory in the middle of a plan"]() == "it ended as out of memory after 2 steps"
    assert works[-1]["limit_bytes"] < works[-1]["budget_bytes"] < 1000
    wrong["oom"] = False
    for name in ("no memory in the middle of a plan", larger):
        with pytest.raises(first_day.Failed, match="none left"):
            by_name[name]()
    wrong.update(error="", losses=[2.0, 1.5])
    with pytest.raises(first_day.Failed, match=r"off by 0\.5"):
        by_name[larger]()


def test_the_first_day_looks_at_each_thing_after_those_that_it_rests_on(tmp_path: Path):
    assert [check.name for check in checks(tmp_path)] == [
        "the tests that need a device",
        "the same bits at 90 to 60 % of the memory",
        "an emptied storage gives its memory back",
        "copies run behind the computing",
        "a step takes what was predicted",
        "no memory in the middle of a plan",
        "a state that is larger than the device",
        "GPUDirect Storage",
    ]


@pytest.mark.parametrize("given_back", [True, False])
def test_an_emptied_storage_must_lower_what_is_allocated(monkeypatch: pytest.MonkeyPatch, *, given_back: bool):
    """The counters of a device are played; the storage is one of the host's."""
    monkeypatch.setattr(first_day, "MOVED_BYTES", 1 << 20)
    counts = iter([5 << 20, (4 if given_back else 5) << 20])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(counts))
    if given_back:
        assert first_day.gives_back("cpu") == "1 MiB came back"
    else:
        with pytest.raises(first_day.Failed, match="of 1048576 bytes 0 came back"):
            first_day.gives_back("cpu")


@pytest.mark.parametrize("asking_s", [0.001, 0.6])
def test_a_store_must_return_before_its_copy_is_over(monkeypatch: pytest.MonkeyPatch, asking_s: float):
    """On a clock that is played: asking takes `asking_s` of the copy's second."""
    monkeypatch.setattr(first_day, "MOVED_BYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = types.SimpleNamespace(perf_counter=iter([0.0, asking_s, 1.0] * 2).__next__)
    monkeypatch.setattr(first_day, "time", clock)
    if asking_s < 0.5:
        assert first_day.is_asynchronous("cpu").startswith("asking took 1.00 ms of the copy's 1000 ms, 0.0 GB/s")
    else:
        with pytest.raises(first_day.Failed, match="asking took 600"):
            first_day.is_asynchronous("cpu")


# --- its processes, on the CPU ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Round:
    return offload.measured(tmp_path_factory.mktemp("disk"), (0.75,), TINY)


@pytest.mark.slow
def test_each_side_trains_and_tells_in_one_line(found: Round):
    sides = found.limited[0.75]
    assert list(sides) == list(offload.SIDES)
    for name, told in {**sides, "plain": found.plain, "again": found.again}.items():
        if name == "trl":
            assert told["error"] == "not installed" or importlib.util.find_spec("trl")
            continue
        assert (told["error"], told["oom"]) == ("", False), name
        assert len(told["losses"]) == len(told["steps_s"]) > told["warm"]
        same = zip(told["losses"], found.plain["losses"], strict=False)
        assert all(ours == plain for ours, plain in same), f"{name} computes other numbers"
    assert len(found.plain["losses"]) == STEPS["none"]
    assert len(sides["ours"]["losses"]) == max(STEPS["ours"], sides["ours"]["warm"] + STEADY_MIN)
    assert len(sides["checkpoint"]["losses"]) == len(sides["save_on_cpu"]["losses"]) == PEER_STEPS
    assert found.plain["peak_bytes"] > 1 << 20


@pytest.mark.slow
def test_the_engine_moves_and_says_what_it_did(found: Round):
    ours = found.limited[0.75]["ours"]
    told = ours["report"]
    watched = 6  # two steps are watched, three time the first plan, one comes from it to the second
    assert ours["warm"] >= watched + 16, "later where busy cores made steps differ from what was predicted"
    assert told["budget_bytes"] == int(int(found.plain["peak_bytes"] * 0.75) * offload.PLANNED_SHARE)
    assert told["moves"] > 0
    assert told["written_bytes"] + told["read_bytes"] > 0
    assert told["predicted_s"] > 0
    assert ours["failures"] == []
    assert len(ours["paths"]) == 2, "of the host tier and of the disks"


@pytest.mark.slow
def test_the_row_is_judged_from_what_they_told(found: Round):
    result = offload.judged(ROW, found)
    values = {measure.name: measure.value for measure in result.measures}
    assert values["trained, of the limits"] == 1
    assert values["limits with other losses"] == 0
    assert {"share of the ideal step, at 75%", "error of the prediction, at 75%"} < set(values)
    assert any(re.search(r"75%: ours .* losses bit-equal over \d+ steps", note) for note in result.notes)
    assert "75%: none did not run out of memory" in "\n".join(result.notes)
    json.loads(report.as_json([result], quick=True, wall_s=1.8e9))


# --- what is said of them --------------------------------------------------------------------------------------------
def told_of(work: Work, **more: Any) -> Told:
    """What a process might say: half as quick under a limit as without."""
    step_s = 0.2 if work.get("limit_bytes") else 0.1
    told: Told = {"side": work["side"], "oom": False, "error": "", "warm": 2, "shape": SHAPE, "torch": "2.13.0"}
    told |= {"steps_s": [step_s] * work["steps"], "losses": [float(step) for step in range(work["steps"])]}
    told["peak_bytes"] = 10 * GIB
    if work["side"] == "ours":
        facts = dict.fromkeys(["moves", "written_bytes", "read_bytes", "unplanned", "missing_s", "memory_s"], 0)
        told["report"] = {**facts, "policy": "ratio", "predicted_s": 0.21, "step_s": 0.2}
        told |= {"paths": ["pinned", "O_DIRECT"], "failures": []}
    return told | more


def oom(work: Work) -> Told:
    return told_of({**work, "steps": 1}, oom=True, error="OutOfMemoryError: CUDA out of memory")


def judged(tmp_path: Path, ask: Any) -> report.Result:
    return offload.judged(ROW, offload.measured(tmp_path, (0.9, 0.6), {"device": "cuda"}, ask))


def test_a_side_that_runs_out_of_memory_is_said_to(tmp_path: Path):
    def ask(work: Work) -> Told:
        tight = work.get("limit_bytes", 10 * GIB) < 7 * GIB
        bare = work["side"] == "none" and "limit_bytes" in work
        return oom(work) if bare or (tight and work["side"] != "ours") else told_of(work)

    result = judged(tmp_path, ask)
    by_name = {measure.name: measure for measure in result.measures}
    assert by_name["trained, of the limits"].verdict == "reached"
    assert by_name["share of the ideal step, at 60%"].value == 0.5
    assert by_name["error of the prediction, at 90%"].value == pytest.approx(0.05)
    assert by_name["beside the best other, at 90%"].peer == "save_on_cpu"
    assert "beside the best other, at 60%" not in by_name, "all others ran out of memory"
    notes = "\n".join(result.notes)
    assert "60%: none ran out of memory in step 2 (as expected)" in notes
    assert "60%: checkpoint ran out of memory in step 2" in notes


def test_the_engine_that_does_not_train_has_lost(tmp_path: Path):
    result = judged(tmp_path, lambda work: oom(work) if work["side"] == "ours" else told_of(work))
    (measure,) = result.measures
    assert (measure.name, measure.value, measure.verdict) == ("trained, of the limits", 0.0, "MISSED")
    assert "90%: ours ran out of memory in step 2" in result.notes


def test_other_losses_are_a_loss(tmp_path: Path):
    def ask(work: Work) -> Told:
        return told_of(work, losses=[0.0, 1.5]) if work["side"] == "ours" else told_of(work)

    result = judged(tmp_path, ask)
    assert next(measure for measure in result.measures if "losses" in measure.name).verdict == "MISSED"
    assert any("losses off by 0.5 over 2 steps" in note for note in result.notes)


def test_a_model_that_does_not_train_even_alone_is_an_error(tmp_path: Path):
    result = judged(tmp_path, oom)
    assert result.error == "without a limit it did not train: OutOfMemoryError: CUDA out of memory"
    assert not result.ok


def test_a_process_that_dies_without_a_word_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload.sys, "executable", "/bin/false")
    told = offload.asked({"side": "ours"})
    assert (told["error"], told["oom"], told["losses"]) == ("it ended with 1: ", False, [])


def test_running_out_of_memory_is_seen_behind_other_errors():
    error = RuntimeError("a step failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert offload._is_out_of_memory(error)
    assert not offload._is_out_of_memory(RuntimeError("a step failed"))


def test_the_model_grows_with_the_device():
    widths = [offload.shape_for(gib * GIB)["width"] for gib in (1, 8, 24, 80, 140)]
    assert widths == sorted(widths)
    assert widths[-2:] == [2048, 2048]
    assert offload._need_bytes(**offload.shape_for(24 * GIB)) < 8 * GIB


def test_a_lab_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "no_device", lambda: "")
    monkeypatch.setattr(offload, "measured", lambda folder, shares, base: Round(oom({"side": "none"}), {}, {}))
    assert "did not train" in offload.gpu(Alone(tmp_path, quick=True), ROW).error
