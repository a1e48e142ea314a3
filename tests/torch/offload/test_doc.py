"""What docs/offload.md shows works as it stands there."""

import re
from pathlib import Path

import pytest

from forebay.offload.planning.trace import load
from tests.torch.offload.traces import layered

DOC = Path(__file__).parents[3] / "docs" / "offload.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOC.read_text("utf-8"), re.MULTILINE | re.DOTALL)


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
