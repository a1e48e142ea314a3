"""What docs/offload.md shows works as it stands there."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.offload.planning.trace import load
from tests.torch.offload.networks import numbers, square_loss
from tests.torch.offload.traces import layered

DOC = Path(__file__).parents[3] / "docs" / "offload.md"
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", DOC.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for told, text in BLOCKS if told == language]


def test_every_block_runs() -> None:
    assert [language for language, _ in BLOCKS] == ["python", "", "python", "json"], "give what was added a test"


def wide() -> tuple[Any, Any]:
    """A network whose step needs 105 MiB."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), *[torch.nn.Linear(1024, 1024) for _ in range(6)])
    return model, torch.optim.AdamW(model.parameters())


def test_the_training_in_the_manual_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = [block for block in blocks("python") if "off.step()" in block]
    batches = [numbers() for _ in range(8)]
    for disk in ("nvme0", "nvme1"):
        (tmp_path / disk).mkdir()
        told = told.replace(f'"/{disk}"', repr(str(tmp_path / disk)))
    assert '"/nvme' not in told
    for said, here in (("24GiB", "80MiB"), ("32GiB", "16MiB"), ("200GiB", "256MiB")):
        assert said in told
        told = told.replace(said, here)
    model, optimizer = wide()
    other, plain = wide()
    names = {"model": model, "optimizer": optimizer, "batches": batches, "loss_of": lambda made: made.square().mean()}
    exec(compile(told, str(DOC), "exec"), names)
    for batch in batches:
        square_loss(other, batch).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    said = capsys.readouterr().out
    assert re.search(r"[1-9]\d* moves planned", said), said
    assert re.search(r"optimizer state: \d+ tensors of .* leave [1-9]", said), said


def test_the_commands_in_the_manual_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (told,) = [block for block in blocks("") if block.startswith("forebay offload")]
    commands = [shlex.split(line) for line in told.splitlines()]
    assert [command[:3] for command in commands] == [["forebay", "offload", verb] for verb in ("trace", "show", "plan")]
    made, shown, planned = (
        CliRunner().invoke(app, [*command[1:], *more], prog_name="forebay")
        for command, more in zip(commands, (["--layers", "1"], [], ["--no-sweep"]), strict=True)
    )
    assert (made.exit_code, shown.exit_code, planned.exit_code) == (0, 0, 0), (
        made.output,
        shown.output,
        planned.output,
    )
    assert "no budget below that works" in shown.output
    assert "(simulated)" in planned.output
    assert {path.name for path in tmp_path.iterdir()} == {"step.json.gz", "memory.png", "lifetimes.png"}


def test_the_trace_in_the_manual_is_one(tmp_path: Path) -> None:
    (told,) = blocks("json")
    (tmp_path / "tiny.json").write_text(told)
    trace = load(tmp_path / "tiny.json")
    assert trace.name == "tiny"
    assert trace.need_bytes().tolist() == [12_288, 12_288, 4_096]


def test_the_plan_in_the_manual_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layered().save(tmp_path / "step.json.gz")
    monkeypatch.chdir(tmp_path)
    (told,) = [block for block in blocks("python") if "choose(" in block]
    exec(compile(told, str(DOC), "exec"), {})
    policy, step_s, share = capsys.readouterr().out.rsplit(maxsplit=2)
    assert (policy, float(share)) == ("nothing moves", 1.0)
    assert float(step_s) == pytest.approx(layered().compute_s)
