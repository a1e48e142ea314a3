"""`forebay offload`: what it prints is what the replay says, and wrong input says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.offload.planning.choose import choose
from forebay.offload.planning.hardware import Hardware
from tests.cli.conftest import Program
from tests.torch.offload.traces import layered

PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    layered().save(tmp_path / "step.json.gz")
    return tmp_path / "step.json.gz"


def test_a_plan_as_json_is_that_of_the_library(program: Program, trace: Path) -> None:
    told = json.loads(program("offload", "plan", str(trace), "--budget", "1.4GiB", "--ssd", "8GB/s", "--json").stdout)
    hardware = Hardware(
        int(1.4 * (1 << 30)),
        disk_bytes=16 << 40,
        disk_write_bytes_s=8e9,
        disk_read_bytes_s=8e9,
        link_out_bytes_s=50e9,
        link_in_bytes_s=50e9,
    )
    chosen, _ = choose(layered(), hardware)
    assert told["simulated"] is True
    assert told["chosen"]["policy"] == chosen.plan.rank
    assert told["chosen"]["step_s"] == chosen.replayed.step_s
    assert told["chosen"]["peak_bytes"] <= told["budget_bytes"]
    policies = {row["policy"]: row["step_s"] for row in told["policies"]}
    assert {"ratio", "area", "area_then_ratio", "whole_layer"} <= set(policies)
    steps = [step["step_s"] for step in told["sweep"]]
    assert len(steps) > 5
    assert steps == sorted(steps, reverse=True)


def test_a_plan_for_people_says_what_waits_and_which_disks_to_buy(
    program: Program, trace: Path, tmp_path: Path
) -> None:
    picture = ("--picture", str(tmp_path / "new"))
    told = program("offload", "plan", str(trace), "--budget", "1.4GiB", "--ssd", "2GB/s", *picture).stdout
    assert "layered needs 2.0 GiB, 146 % of the budget (simulated)" in told
    assert "the disks are too slow for this budget" in told
    assert ": waiting for " in told
    assert "buys little: a step takes" in told
    for name in ("memory.png", "lifetimes.png", "sweep.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(PNG), name


def test_what_fits_moves_nothing(program: Program, trace: Path) -> None:
    told = program("offload", "plan", str(trace), "--budget", "8GiB", "--host", "4GiB").stdout
    assert "by nothing moves" in told


def test_a_trace_is_shown(program: Program, trace: Path, tmp_path: Path) -> None:
    told = json.loads(program("offload", "show", str(trace), "--json").stdout)
    assert told["operators"] == 24
    assert told["kinds"]["optimizer state"] == {"tensors": 16, "size_bytes": 1 << 30}
    shown = program("offload", "show", str(trace), "--picture", str(tmp_path / "shown")).stdout
    assert "no budget below that works" in shown
    for name in ("memory.png", "lifetimes.png"):
        assert (tmp_path / "shown" / name).read_bytes().startswith(PNG), name


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--budget", "1GiB"], "give --ssd 3GB/s, --host 64GiB, or both"),
        (["--budget", "100MiB", "--ssd", "1GB/s"], "operator 16 (update 0) uses 268,435,456 bytes at once"),
        (["--budget", "lots", "--ssd", "1GB/s"], "size 'lots' is not known"),
        (["--budget", "1GiB", "--ssd", "fast"], "rate 'fast' is not known"),
        (["--budget", "0", "--ssd", "1GB/s"], "give a positive one"),
        (["--budget", "1GiB", "--ssd", "0GB/s"], "a disk tier that reads or writes nothing"),
    ],
)
def test_wrong_input_says_what_to_do(program: Program, trace: Path, args: list[str], why: str) -> None:
    assert why in program("offload", "plan", str(trace), *args, code=2).stderr


def test_a_file_that_is_no_trace(program: Program, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    told = program("offload", "plan", str(tmp_path / "x.json"), "--budget", "1GiB", "--ssd", "1GB/s", code=2)
    assert "is no trace" in told.stderr


def test_planning_needs_no_torch(trace: Path) -> None:
    """As on a laptop that only has to say which disks to buy."""
    code = "import sys\nsys.modules['torch'] = None\nfrom forebay.cli.main import run\nrun()\n"
    arguments = ["offload", "plan", str(trace), "--budget", "1.4GiB", "--ssd", "8GB/s", "--no-sweep"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert "a step takes" in done.stdout
